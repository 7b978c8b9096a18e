"""A plan of the whole attention: the backward passes of its branches at once, where a backend offers that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_arguments import FIXED, attention_arguments, attention_backward_arguments
from torch import Tensor

from nsa import ops
from nsa.backends import sdpa, stages
from nsa.backends.routing import BackendFailure, Router
from nsa.ops import fused
from nsa.sequences import Sliding, branch_of
from nsa.settings import Settings

# What may run several branches at once, with the pass that calls it and the arguments of that.
PASSES: dict[str, Any] = {
    "selected_sliding_forward": (fused.run_forward, attention_arguments),
    "branches_backward": (fused.run_backward, attention_backward_arguments),
}


class Together:
    """What `sdpa` offers here; `answer` is raised, if it is an error."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls = 0
        self.autocast: list[bool] = []

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    found = Router([sdpa], Settings())
    monkeypatch.setattr(stages, "router", lambda: found)
    return found


def offer(monkeypatch: pytest.MonkeyPatch, answer: Any, name: str = "branches_backward") -> Together:
    together = Together(answer)
    monkeypatch.setattr(sdpa, name, together, raising=False)
    return together


def backward(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return fused.run_backward(*arguments)


def count_branches(router: Router) -> list[int]:
    return [router.counts.calls[op, "sdpa"] for op in ("compressed", "selected", "sliding")]


def test_branches_run_at_once_where_that_is_offered(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = attention_backward_arguments(FIXED, "sdpa")
    marks = tuple(torch.tensor(float(i)) for i in range(7))
    together = offer(monkeypatch, marks)
    before = count_branches(router)
    assert backward(arguments)[:7] == marks
    assert together.calls == 1
    assert [b - a for a, b in zip(before, count_branches(router), strict=True)] == [1, 1, 1]


@pytest.mark.parametrize("answer", [None, BackendFailure("too large")], ids=["declined", "failed"])
def test_branches_run_in_turn_after_a_refusal(answer: Any, router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = attention_backward_arguments(FIXED, "sdpa")
    expected = backward(arguments)
    together = offer(monkeypatch, answer)
    before = count_branches(router)
    assert all(map(torch.equal, backward(arguments), expected))
    assert together.calls == 1
    assert [b - a for a, b in zip(before, count_branches(router), strict=True)] == [1, 1, 1]


def test_a_profile_shows_the_branches_one_by_one(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = attention_backward_arguments(FIXED, "sdpa")
    together = offer(monkeypatch, None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        backward(arguments)
    assert together.calls == 0
    assert {f"nsa::{x}_backward" for x in ("compressed", "selected", "sliding")} <= {
        event.key for event in profile.key_averages()
    }


def test_branches_of_several_backends_run_in_turn(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = attention_backward_arguments(FIXED, "sdpa")
    together = offer(monkeypatch, None)
    backward(arguments)
    (plan,) = [x for x in router.plans.values() if x.compressed.function == "compressed_backward"]
    monkeypatch.setattr(plan.sliding, "name", "reference")
    backward(arguments)
    assert together.calls == 1


@pytest.mark.parametrize("refusal", [None, BackendFailure("too large")], ids=["declined", "failed"])
def test_two_forward_passes_run_in_turn_after_a_refusal(
    refusal: Any, router: Router, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = attention_arguments(FIXED, "sdpa")
    expected = fused.run_forward(*arguments)
    together = offer(monkeypatch, refusal, "selected_sliding_forward")
    before = count_branches(router)
    for _ in range(2):
        assert all(map(torch.equal, fused.run_forward(*arguments), expected))
    assert [b - a for a, b in zip(before, count_branches(router), strict=True)] == [2, 2, 2]
    # What failed is logged, counted and not tried again.
    failed = refusal is not None
    assert together.calls == 2 - failed
    assert [*router.counts.failures] == [("selected", "sdpa", "too large")] * failed
    assert caplog.text.count("in selected_sliding_forward on") == failed


def test_two_forward_passes_run_at_once_if_offered(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = attention_arguments(FIXED, "sdpa")
    expected = tuple(2 * x for x in fused.run_forward(*arguments)[4:])
    together = offer(monkeypatch, expected, "selected_sliding_forward")
    before = count_branches(router)
    assert all(map(torch.equal, fused.run_forward(*arguments)[4:], expected))
    assert together.calls == 1
    assert [b - a for a, b in zip(before, count_branches(router), strict=True)] == [1, 1, 1]


@pytest.mark.parametrize("function", PASSES)
def test_passes_at_once_do_not_see_the_callers_autocast(
    function: str, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, arguments = PASSES[function]
    together = offer(monkeypatch, None, function)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(*arguments(FIXED, "sdpa"))
        assert torch.is_autocast_enabled("cpu")
    assert together.autocast == [False]


@pytest.mark.parametrize("before", [False, True], ids=["at once", "after a fallback"])
@pytest.mark.parametrize("function", PASSES)
def test_strict_raises_where_passes_at_once_fail(
    function: str, before: bool, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, arguments = PASSES[function]
    given = arguments(FIXED, "sdpa")
    together = offer(monkeypatch, BackendFailure("too large"), function)
    if before:
        run(*given)
    # A failure before is no reason to go on by another way.
    for _ in range(2):
        with pytest.raises(BackendFailure, match=f"sdpa .*in {function} on .*too large"):
            run(*given[:-1], True)
    assert together.calls == (1 if before else 2)
    assert router.counts.failures.total() == 2 + before


@pytest.mark.parametrize("function", PASSES)
def test_a_strict_failure_of_passes_at_once_rules_nothing_out(
    function: str, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, arguments = PASSES[function]
    given = arguments(FIXED, "sdpa")
    together = offer(monkeypatch, BackendFailure("too large"), function)
    with pytest.raises(BackendFailure):
        run(*given[:-1], True)
    monkeypatch.setattr(sdpa, "recover_from", lambda failure: "other kernels", raising=False)
    for _ in range(2):
        run(*given)
    assert together.calls == 3
    assert not router.failed


def tensors_of(x: object) -> list[Tensor]:
    """Those that an object of ours holds."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, tuple):
        return [found for part in x for found in tensors_of(part)]
    return [found for part in getattr(x, "__dict__", {}).values() for found in tensors_of(part)]


def test_a_plan_keeps_no_tensor(router: Router) -> None:
    """There are thousands of plans, and what is computed during a capture has no values until the graph runs."""
    fused.run_forward(*attention_arguments(FIXED, "sdpa"))
    backward(attention_backward_arguments(FIXED, "sdpa"))
    assert [tensors_of(plan.branches) for plan in router.plans.values()] == [[], []]


def test_a_branch_of_fixed_length_keeps_no_tensor() -> None:
    """It is shared by all calls of a shape, like a plan."""
    q, k, v = (torch.randn(1, 40, 2, 8, requires_grad=True) for _ in range(3))
    o, _ = ops.sliding_attention(q, k, v, window=5, scale=0.5, backend="sdpa")
    o.sum().backward()
    branch = branch_of(Sliding, q, 40, None, None, 5, 0.5)
    assert branch is branch_of(Sliding, q, 40, None, None, 5, 0.5)
    assert tensors_of(branch) == []
    assert tensors_of(branch.sequences) == []
