"""A launch by hand: where the compiled kernel runs."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.backends.triton.launch import runner_of


@pytest.mark.parametrize("current", [0, 1])
def test_a_kernel_runs_on_the_device_of_its_tensors(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"device": current}

    @contextmanager
    def switched(device: int) -> Any:
        before, state["device"] = state["device"], device
        yield
        state["device"] = before

    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state["device"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    seen = []
    compiled = SimpleNamespace(
        run=lambda *args: seen.append((state["device"], args[3], args[-1])), function=None, packed_metadata=None
    )
    runner_of(compiled, (1, 1, 1), 1)("x")
    assert seen == [(1, 101, "x")]
    assert state["device"] == current
