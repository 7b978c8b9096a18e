"""How many functions of ours a call of the layer goes through before a kernel is launched: each costs host time."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE  # isort: skip

import nsa
from nsa.backends.triton.launch import Launch

PACKAGE = Path(nsa.__file__).parent
LIMIT = 7


def frames(stack: traceback.StackSummary) -> list[str]:
    """Those of ours, from the layer's forward on."""
    own = [f"{Path(frame.filename).stem}.{frame.name}" for frame in stack if PACKAGE in Path(frame.filename).parents]
    return own[own.index("attention.forward") :]


@pytest.mark.parametrize("length", [40, 300], ids=["short", "long"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_layer_launches_attention_kernels_within_few_frames(
    length: int, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def recorded(self: Launch, **free: Any) -> None:
        """In place of the launch: no value is read back, so what was not computed changes no path."""
        launched.append((self.kernel.__name__, frames(traceback.extract_stack())))

    monkeypatch.setattr(Launch, "__call__", recorded)
    config = nsa.NSAConfig(
        dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=16, backend="triton"
    )
    layer = nsa.NSAAttention(config).to(DEVICE)
    with torch.set_grad_enabled(training):
        layer(torch.randn(1, length, 32, device=DEVICE, requires_grad=training))

    attention = [(kernel, path) for kernel, path in launched if "fused.run_forward" in path]
    assert {"ranged_forward_kernel", "score_kernel", "select_kernel", "combine_forward_kernel"} <= dict(
        attention
    ).keys()
    for kernel, path in attention:
        # Autograd calls an op through a function of its own.
        path = [frame for frame in path if frame != "registry.forward"]
        assert len(path) <= LIMIT, f"{kernel}: {' > '.join(path)}"
