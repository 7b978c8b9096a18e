"""What the Triton backend declines before a kernel runs, on GPUs that are not here."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from nsa.backends import triton as backend
from nsa.backends.gpu import SMALL_SHARED_MEMORY
from nsa.backends.problem import Problem
from nsa.backends.routing import Router
from nsa.settings import Settings

PROBLEM = Problem(
    op="selected", batch=1, n_queries=64, n_keys=64, n_heads=64, n_groups=1, d_k=256, d_v=256, dtype=torch.float32,
    device="cuda", backward=True,
)  # fmt: skip


def answer(monkeypatch: pytest.MonkeyPatch, gpu: tuple[int, int], **changes: object) -> str | None:
    monkeypatch.setattr(backend, "available", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu)
    return backend.supports(Problem(**{**vars(PROBLEM), **changes}))


@pytest.mark.parametrize("gpu", SMALL_SHARED_MEMORY)
def test_a_group_that_does_not_fit_shared_memory_is_declined(
    gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for head_dims in ({}, {"d_k": 192, "d_v": 192}):
        reason = answer(monkeypatch, gpu, **head_dims)
        assert reason is not None
        assert re.search(r"64 heads .*shared memory", reason)


@pytest.mark.parametrize(
    "changes",
    [{"n_heads": 32}, {"dtype": torch.bfloat16}, {"d_v": 128}, {"op": "sliding"}],
    ids=["fewer heads", "bf16", "narrow values", "another branch"],
)
def test_what_compiles_for_a_small_gpu_is_served_there(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(monkeypatch, (8, 6), **changes) is None


@pytest.mark.parametrize("gpu", [(8, 0), (9, 0), (10, 0)])
def test_a_gpu_with_more_shared_memory_serves_the_widest_group(
    gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(monkeypatch, gpu) is None


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with Triton and without a GPU, where TRITON_INTERPRET is set."""
    monkeypatch.setattr(backend, "installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def on_cpu(**changes: object) -> Problem:
    return Problem(**{**vars(PROBLEM), "device": "cpu", **changes})


@pytest.mark.usefixtures("interpreted")
def test_the_interpreter_takes_cpu_tensors_but_no_bf16() -> None:
    assert backend.available() is None
    for dtype in (torch.float16, torch.float32):
        assert backend.supports(on_cpu(dtype=dtype)) is None
    reason = backend.supports(on_cpu(dtype=torch.bfloat16))
    assert reason is not None
    assert "bf16" in reason


def test_without_the_interpreter_cpu_tensors_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available", lambda: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = backend.supports(on_cpu())
    assert reason is not None
    assert "cpu" in reason


@pytest.mark.usefixtures("interpreted")
def test_the_interpreter_runs_only_by_name() -> None:
    router = Router([backend, SimpleNamespace(name="plain", supports=lambda problem: None)], Settings())
    assert router.route(on_cpu()).backend == "plain"
    assert router.route(on_cpu(), "triton").backend == "triton"


def test_auto_takes_caches_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"cached": True, "backward": False, "dtype": torch.bfloat16, "d_k": 64, "d_v": 64}
    assert answer(monkeypatch, (9, 0), **changes) is None
    router = Router([backend], Settings())
    problem = Problem(**{**vars(PROBLEM), **changes})
    assert router.route(problem, "triton").backend == "triton"
    assert router.reason_against("triton", problem) is None
