"""What is tried before a problem is served: shapes like its own, strict enough to tell wrong answers from right."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_standin import BatchFault, LongFault, LongWindow, StandIn, WindowFault
from probing import INSISTS, OWN, PROBLEM, backend_of, probe_quickly, sliding

from nsa.backends import sdpa
from nsa.backends.flash import trial
from nsa.backends.flash.cases import MOST_ELEMENTS, MOST_TOKENS, cases_of, kind_of, make_call, posed
from nsa.backends.flash.libraries import Library
from nsa.backends.flash.trial import Answers, difference, try_case, written_out
from nsa.backends.probe import Outcome
from nsa.backends.problem import Problem
from nsa.backends.routing import BackendFailure, Router
from nsa.geometry import n_compressed


@pytest.mark.parametrize(("heads", "groups", "width"), [(2, 1, 64), (8, 8, 128), (1, 1, 256)])
@pytest.mark.parametrize("layout", ["dense", "packed", "cached"])
def test_a_window_of_one_key_too_many_is_found_in_half_precision(
    layout: str, heads: int, groups: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process is no child to be ended.
    monkeypatch.setattr(trial, "end_after", lambda _: None)
    sizes = {"n_heads": heads, "n_groups": groups, "d_k": width, "d_v": width, "dtype": torch.bfloat16}
    fixed = [
        case
        for case in cases_of(replace(PROBLEM, **sizes), width, torch.bfloat16)
        if case["feature"] == layout and case["window"] and case["name"] not in OWN
    ]
    answers = Answers(str(tmp_path / "answers"))
    assert [try_case(StandIn(), case, "cpu", answers) for case in fixed] == [None] * len(fixed)
    assert any("off by" in str(try_case(LongWindow(), case, "cpu", answers)) for case in fixed)


@pytest.mark.parametrize(
    ("library", "changes"),
    [
        (LongFault, {"n_queries": 300, "n_keys": 300}),
        (LongFault, {"n_queries": 270, "n_keys": 270}),
        (BatchFault, {"batch": 2}),
        (BatchFault, {"batch": 2, "op": "compressed", "n_keys": 3}),
    ],
)
def test_a_crash_at_the_problem_s_own_shape_is_found_before_the_run_meets_it(
    library: Any, changes: dict[str, Any], tmp_path: Path, children_find_the_stand_ins: None
) -> None:
    flash = backend_of(library(), tmp_path, partial(probe_quickly, names=OWN))
    assert flash.supports(PROBLEM) is None
    assert "killed by SIGFPE in forward" in str(flash.supports(replace(PROBLEM, **changes)))
    again = backend_of(library(), tmp_path, lambda *_: pytest.fail("both are remembered"))
    assert again.supports(PROBLEM) is None
    assert "SIGFPE" in str(again.supports(replace(PROBLEM, **changes)))


def test_a_window_is_tried_before_the_call_that_has_it(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    flash = backend_of(WindowFault(), tmp_path, partial(probe_quickly, names=OWN))
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)
    with pytest.raises(BackendFailure, match="SIGFPE"):
        flash.sliding_forward(q, k, k, sliding(q, 33))
    flash.sliding_forward(q, k, k, sliding(q, 34))


def test_a_verdict_on_one_window_keeps_no_other_from_being_served(tmp_path: Path) -> None:
    def prober(library: Library, problem: Any, *_: Any) -> list[Outcome]:
        return [Outcome(case="x", feature="dense", problem="hung" if problem.knob == 33 else None)]

    library = StandIn()
    router = Router([backend_of(library, tmp_path, prober), sdpa], INSISTS)
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)
    for window in (34, 33, 34, 33):
        router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, window))
    assert dict(router.counts.calls) == {("sliding", "flash"): 2, ("sliding", "sdpa"): 2}
    assert list(router.counts.failures.values()) == [2]
    with pytest.raises(BackendFailure, match=r"hung.*strict forbids"):
        router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, 33), strict=True)
    router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, 34), strict=True)


def test_lengths_up_to_a_power_of_two_share_a_verdict() -> None:
    def kind(**changes: Any) -> str:
        return kind_of(replace(PROBLEM, **changes), 8, torch.float32)

    def length(n: int) -> dict[str, int]:
        return {"n_queries": n, "n_keys": n}

    assert kind(**length(1)) == kind(**length(256)) != kind(**length(257)) == kind(**length(512))
    assert kind(batch=1) != kind(batch=2) == kind(batch=3)
    assert len({kind(), kind(packed=True), kind(cached=True), kind(op="compressed")}) == 4
    assert kind(**length(2**16)) == kind(**length(2**20)), "longer ones are tried at the same length"
    assert kind_of(posed(PROBLEM, 512), 8, torch.float32) == kind() != kind_of(posed(PROBLEM, 4), 8, torch.float32)


@pytest.mark.parametrize("length", [1, 64, 255, 256, 2048, 4000, 4096, 2**20])
def test_a_pack_is_tried_as_one_document_and_as_several(length: int) -> None:
    problem = replace(PROBLEM, packed=True, n_queries=length, n_keys=length)
    own, longest = [case for case in cases_of(problem, 8, torch.float32) if case["name"] in OWN]
    assert own["lengths"] == [min(length, MOST_TOKENS)]
    assert len(longest["lengths"]) == 3
    assert min(longest["lengths"]) > 0
    assert sum(longest["lengths"]) >= own["lengths"][0]


@pytest.mark.parametrize("op", ["sliding", "compressed"])
@pytest.mark.parametrize("layout", ["dense", "packed", "cached"])
def test_a_large_problem_is_tried_at_a_size_that_fits(op: str, layout: str) -> None:
    batch = 1 if layout == "packed" else 300
    queries = 1 if layout == "cached" else 2**18
    keys = 2**18 if op == "sliding" or layout == "cached" else 2**14
    problem = Problem(
        op=op, batch=batch, n_queries=queries, n_keys=keys, n_heads=64, n_groups=4, d_k=128, d_v=128,
        dtype=torch.bfloat16, packed=layout == "packed", cached=layout == "cached",
    )  # fmt: skip
    own = [case for case in cases_of(problem, 128, torch.bfloat16) if case["name"] in OWN]
    assert own
    for case in own:
        rows = case["batch"] * case.get("queries", sum(case["lengths"]))
        assert rows <= MOST_TOKENS
        assert sum(case["lengths"]) <= MOST_TOKENS
        assert rows * case["heads"] * 128 <= MOST_ELEMENTS
        assert case["batch"] == 1 or batch > 1


def test_attention_written_out_in_tiles_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in cases_of(replace(PROBLEM, batch=2), 8, torch.float32):
        call = make_call(case, "cpu")
        do = torch.randn_like(call.q) if case["backward"] else None
        whole = written_out(call, do)
        with monkeypatch.context() as small:
            small.setattr("nsa.backends.flash.trial.TILE_QUERIES", 7)
            rounded = {name: x.float() for name, x in whole.items()}
            assert difference(call, rounded, do) is None
            tiled = written_out(call, do)
        for name, x in whole.items():
            torch.testing.assert_close(tiled[name], x, equal_nan=True)


def test_a_stride_s_heads_are_counted_once_the_call_tells_it(tmp_path: Path) -> None:
    flash = backend_of(StandIn(), tmp_path, lambda *_: [])
    problem = Problem(
        op="compressed", batch=512, n_queries=64, n_keys=3, n_heads=32, n_groups=2, d_k=128, d_v=128,
        dtype=torch.bfloat16, backward=True,
    )  # fmt: skip
    assert flash.supports(posed(problem, 2)) is None
    assert flash.supports(replace(problem, n_keys=31)) is None, "so many keys tell a stride of 2"
    assert "2^31" in str(flash.supports(problem)), "so few tell 16"
    assert "2^31" in str(flash.supports(posed(problem, 16)))
    assert "80000 heads" in str(flash.supports(posed(replace(problem, n_heads=5000, backward=False), 16)))
    assert flash.supports(replace(problem, n_keys=0, n_heads=5000, n_groups=1)) is None, "nothing is called"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(("block", "stride"), [(32, 16), (16, 16), (64, 16), (8, 4)])
@pytest.mark.parametrize("length", [2048, 172_032, 174_720, 262_144])
def test_a_compressed_gradient_is_forbidden_before_its_call_where_the_call_would_be(
    length: int, block: int, stride: int, packed: bool, tmp_path: Path
) -> None:
    """At 64 heads of width 192 the sums of 174,762 queries are the last that 32 bits count."""
    n_keys = length // stride if packed else n_compressed(length, block, stride)
    problem = Problem(
        op="compressed", batch=1, n_queries=length, n_keys=n_keys, n_heads=64, n_groups=4, d_k=192, d_v=192,
        dtype=torch.bfloat16, backward=True, packed=packed,
    )  # fmt: skip
    flash = backend_of(StandIn(), tmp_path, lambda *_: [])
    called = flash.forbids(StandIn(), posed(problem, stride))
    assert flash.forbids(StandIn(), problem) == called
    assert (called is None) is (length < 174_720)
    if called is not None:
        assert flash.supports(problem) == f"stand-in: {called}"


def test_probing_tries_the_window_and_the_stride_that_it_is_told(tmp_path: Path) -> None:
    asked = []

    def prober(library: Library, problem: Any, *_: Any) -> list[Outcome]:
        asked.append((problem.op, problem.knob, problem.n_keys))
        return []

    whole = replace(PROBLEM, op="attention")
    backend_of(StandIn(), tmp_path, prober).probe_all(whole, block=8, stride=4, window=24)
    assert asked == [("sliding", 24, 64), ("compressed", 4, 15)]


def test_folded_heads_are_tried_as_far_as_a_grid_reaches() -> None:
    many = replace(PROBLEM, n_heads=8192, n_groups=8192)
    heads = {case["name"]: case["heads"] for case in cases_of(many, 8, torch.float16)}
    assert heads["folded heads"] == 7 * 8192
