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
from nsa.backends.triton import selected
from nsa.backends.triton.launch import Launch

PACKAGE = Path(nsa.__file__).parent
LIMIT = 7
COMPRESSION = {"mlp": "gather_forward_kernel", "mean": "mean_forward_kernel"}
INDEX = {"mark_kernel", "count_kernel", "place_kernel", "cut_kernel"}
SELECTED = {
    "dense": {"mark_kernel"},
    "block": {"split_kernel", *INDEX, "block_kernel", "common_kernel"},
    "query": {"split_kernel", "common_kernel", "query_kernel"},
}


def frames(stack: traceback.StackSummary) -> list[str]:
    """Those of ours, from the layer's forward on to the launch, in whose place this is called."""
    own = [f"{Path(frame.filename).stem}.{frame.name}" for frame in stack if PACKAGE in Path(frame.filename).parents]
    return [*own[own.index("attention.forward") :], "launch.__call__"]


@pytest.mark.parametrize("phi", ["mlp", "mean"])
@pytest.mark.parametrize("method", ["dense", "block", "query"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_layer_launches_kernels_within_few_frames(
    phi: str, method: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    plan = selected.plan_forward
    # It otherwise depends on the GPU and the length.
    monkeypatch.setattr(selected, "plan_forward", lambda *args: plan(*args[:-1], method))

    def recorded(self: Launch, **free: Any) -> None:
        """In place of the launch: no value is read back, so what was not computed changes no path."""
        launched.append((self.kernel.__name__, frames(traceback.extract_stack())))

    monkeypatch.setattr(Launch, "__call__", recorded)
    config = nsa.NSAConfig(
        dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=64, n_sel=4, w=16, backend="triton", phi=phi
    )
    layer = nsa.NSAAttention(config).to(DEVICE)
    with torch.set_grad_enabled(training):
        layer(torch.randn(1, 600, 32, device=DEVICE, requires_grad=training))

    attention = {"ranged_forward_kernel", "score_kernel", "select_kernel", "combine_forward_kernel"}
    assert attention | SELECTED[method] | {COMPRESSION[phi]} <= dict(launched).keys()
    for kernel, path in launched:
        assert len(path) <= LIMIT, f"{kernel}: {' > '.join(path)}"
