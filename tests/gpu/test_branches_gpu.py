"""The backward passes of all branches on two streams: the same bits as on one, eagerly and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Case
from op_arguments import attention_backward_arguments
from torch import Tensor

from nsa.backends.triton import branches
from nsa.ops import fused

DEFAULTS = {"block": 32, "stride": 16, "select_block": 64, "n_init": 1, "n_local": 2, "window": 200}
CASES = {
    "triton": Case(length=700, batch=2, groups=2, heads=6, d_k=64, d_v=64, n_select=4, **DEFAULTS),
    "gluon": Case(length=1100, groups=2, heads=16, d_k=128, d_v=128, n_select=8, **DEFAULTS),
    "varlen": Case(length=900, documents=(13, 0, 1, 886), groups=2, heads=4, d_k=128, d_v=128, n_select=4, **DEFAULTS),
    "few tokens": Case(length=20, groups=1, heads=4, d_k=64, d_v=64, n_select=4, **DEFAULTS),
}
Backward = Callable[[], tuple[Tensor, ...]]


def backward_of(case: Case, dtype: torch.dtype) -> Backward:
    """The whole backward pass, of a forward pass on the CPU."""

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        # A log-sum-exp has three dimensions and stays in fp32.
        return x.detach().to("cuda", dtype if x.is_floating_point() and x.dim() == 4 else x.dtype)

    *arguments, _, strict = attention_backward_arguments(case, "sdpa")
    return partial(fused.run_backward, *map(move, arguments), "triton", strict)


def assert_same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert [i for i, (x, y) in enumerate(zip(found, expected, strict=True)) if not torch.equal(x, y)] == []


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Grows by one with each pass on two streams."""
    found, intact = [], branches.side_by_side

    def recorded(*args: Any) -> Any:
        found.append(args[1][0].q.dtype)
        return intact(*args)

    monkeypatch.setattr(branches, "side_by_side", recorded)
    return found


def on_one_stream(run: Backward) -> tuple[Tensor, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches, "MAX_SIDE_BY_SIDE", 0)
        return run()


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.bfloat16) for case in CASES), ("triton", torch.float32)], ids=str
)
def test_two_streams_give_the_bits_of_one(case: str, dtype: torch.dtype, taken: list[torch.dtype]) -> None:
    run = backward_of(CASES[case], dtype)
    expected = on_one_stream(run)
    assert taken == []
    for _ in range(4):
        found = run()
        # Memory of the call that was freed too early would be overwritten here.
        torch.full((1 << 24,), float("nan"), device="cuda")
        assert_same_bits(found, expected)
    assert taken == [dtype] * 4


@pytest.mark.parametrize("case", CASES)
def test_a_graph_holds_both_streams(case: str, taken: list[torch.dtype]) -> None:
    run = backward_of(CASES[case], torch.bfloat16)
    expected = on_one_stream(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    assert len(taken) == 1
    for _ in range(4):
        for x in found:
            x.zero_()
        graph.replay()
        assert_same_bits(found, expected)


def test_calls_on_several_streams_do_not_mix(taken: list[torch.dtype]) -> None:
    runs = [backward_of(CASES["gluon"].but(seed=seed), torch.bfloat16) for seed in range(3)]
    expected = [on_one_stream(run) for run in runs]
    streams = [torch.cuda.Stream() for _ in runs]
    torch.cuda.synchronize()
    for _ in range(4):
        found = []
        for stream, run in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                found.append(run())
        torch.cuda.synchronize()
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_bits(ours, theirs)
    assert len(taken) == 12


def test_fp16_and_a_profiler_take_one_stream(taken: list[torch.dtype]) -> None:
    backward_of(CASES["triton"], torch.float16)()
    run = backward_of(CASES["triton"], torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        run()
    assert taken == []
