"""What the Triton backend declines before a kernel runs, on GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

from nsa.backends import triton as backend
from nsa.backends.contracts import SMALL_SHARED_MEMORY
from nsa.backends.problem import Problem

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
    for widths in ({}, {"d_k": 192, "d_v": 192}):
        reason = answer(monkeypatch, gpu, **widths)
        assert reason is not None
        assert "need more shared memory than this GPU has" in reason


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
