"""What a probe tries: shapes like the problem's own, strictly enough to tell wrong results from right ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_standin import BatchFault, LongFault, LongWindow, NotFinite, StandIn, WindowFault
from probing import FORCED_ON, OWN, PROBLEM, backend_of, no_probe, probe_quickly, sliding

from nsa.backends import sdpa
from nsa.backends.flash import probe_child
from nsa.backends.flash.cases import MAX_PROBED_ELEMENTS, MAX_PROBED_TOKENS, cases_of, flash_problem, kind_of, make_call
from nsa.backends.flash.libraries import Library
from nsa.backends.flash.probe import Outcome
from nsa.backends.flash.probe_child import Answers, difference, expected_results, run_case
from nsa.backends.problem import Problem
from nsa.backends.routing import BackendFailure, Router
from nsa.geometry import n_compressed

LAYOUTS = {"fixed": {}, "varlen": {"varlen": True}, "cached": {"cached": True}}


@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(2, 1, 64), (8, 8, 128)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_key_too_many_and_nan_are_found_in_bf16(
    layout: str, heads: int, groups: int, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process is not a child to be ended.
    monkeypatch.setattr(probe_child, "end_after", lambda _: None)
    sizes = {"n_heads": heads, "n_groups": groups, "d_k": head_dim, "d_v": head_dim, "dtype": torch.bfloat16}
    problem = replace(PROBLEM, **sizes, **LAYOUTS[layout])
    fixed = [x for x in cases_of(problem, head_dim, torch.bfloat16) if x["window"] and x["name"] not in OWN]
    answers = Answers(str(tmp_path / "answers"))
    assert [run_case(StandIn(), case, "cpu", answers) for case in fixed] == [None] * len(fixed)
    assert any("off by" in str(run_case(LongWindow(), case, "cpu", answers)) for case in fixed)
    assert all("not finite" in str(run_case(NotFinite(), case, "cpu", answers)) for case in fixed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "changes"),
    [
        (LongFault, {"n_queries": 300, "n_keys": 300}),
        (LongFault, {"n_queries": 270, "n_keys": 270}),
        (BatchFault, {"batch": 2, "op": "compressed", "n_keys": 3}),
    ],
)
def test_the_probe_finds_a_crash_at_the_problem_s_own_shape(
    library: Any, changes: dict[str, Any], tmp_path: Path, children_find_the_stand_ins: None
) -> None:
    flash = backend_of(library(), tmp_path, partial(probe_quickly, names=OWN))
    assert flash.supports(PROBLEM) is None
    assert "SIGFPE in forward" in str(flash.supports(replace(PROBLEM, **changes)))


@pytest.mark.slow
def test_a_window_is_tried_before_its_first_call(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    flash = backend_of(WindowFault(), tmp_path, partial(probe_quickly, names=OWN))
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)
    with pytest.raises(BackendFailure, match="SIGFPE"):
        flash.sliding_forward(q, k, k, sliding(q, 33))
    flash.sliding_forward(q, k, k, sliding(q, 34))


def test_a_verdict_on_one_window_does_not_hold_for_another(tmp_path: Path) -> None:
    def prober(library: Library, problem: Any, *_: Any) -> list[Outcome]:
        return [Outcome(case="x", layout="fixed", problem="hung" if problem.window_or_stride == 33 else None)]

    router = Router([backend_of(StandIn(), tmp_path, prober), sdpa], FORCED_ON)
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)
    for window in (34, 33, 34, 33):
        router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, window))
    assert dict(router.counts.calls) == {("sliding", "flash"): 2, ("sliding", "sdpa"): 2}
    assert list(router.counts.failures.values()) == [2]
    with pytest.raises(BackendFailure, match=r"hung.*strict"):
        router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, 33), strict=True)
    router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, 34), strict=True)


def test_lengths_up_to_a_power_of_two_share_a_verdict() -> None:
    def kind(length: int = 64, **changes: Any) -> str:
        return kind_of(replace(PROBLEM, n_queries=length, n_keys=length, **changes), 8, torch.float32)

    assert kind(1) == kind(256) != kind(257) == kind(512)
    assert kind(batch=1) != kind(batch=2) == kind(batch=3)
    assert len({kind(), kind(varlen=True), kind(cached=True), kind(op="compressed")}) == 4
    assert kind(2**16) == kind(2**20), "longer ones are tried at the same length"
    own, other = (kind_of(flash_problem(PROBLEM, window), 8, torch.float32) for window in (512, 4))
    assert own == kind() != other


@pytest.mark.parametrize("length", [1, 255, 256, 4000, 2**20])
def test_varlen_is_tried_as_one_document_and_as_several(length: int) -> None:
    problem = replace(PROBLEM, varlen=True, n_queries=length, n_keys=length)
    own, longest = [case for case in cases_of(problem, 8, torch.float32) if case["name"] in OWN]
    assert own["lengths"] == [min(length, MAX_PROBED_TOKENS)]
    assert len(longest["lengths"]) == 3
    assert min(longest["lengths"]) > 0
    assert sum(longest["lengths"]) >= own["lengths"][0]


@pytest.mark.parametrize("op", ["sliding", "compressed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_problem_is_tried_at_a_size_that_fits(op: str, layout: str) -> None:
    batch = 1 if layout == "varlen" else 300
    queries = 1 if layout == "cached" else 2**18
    keys = 2**18 if op == "sliding" or layout == "cached" else 2**14
    problem = Problem(
        op=op, batch=batch, n_queries=queries, n_keys=keys, n_heads=64, n_groups=4, d_k=128, d_v=128,
        dtype=torch.bfloat16, **LAYOUTS[layout],
    )  # fmt: skip
    own = [case for case in cases_of(problem, 128, torch.bfloat16) if case["name"] in OWN]
    assert own
    for case in own:
        rows = case["batch"] * case.get("queries", sum(case["lengths"]))
        assert rows <= MAX_PROBED_TOKENS
        assert sum(case["lengths"]) <= MAX_PROBED_TOKENS
        assert rows * case["heads"] * 128 <= MAX_PROBED_ELEMENTS
        assert case["batch"] == 1 or batch > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expected_results_do_not_depend_on_tiles(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in cases_of(replace(PROBLEM, batch=2, **LAYOUTS[layout]), 8, torch.float32):
        call = make_call(case, "cpu")
        do = torch.randn_like(call.q) if case["backward"] else None
        whole = expected_results(call, do)
        assert difference(call, {name: x.float() for name, x in whole.items()}, do) is None
        with monkeypatch.context() as small:
            small.setattr(probe_child, "TILE_QUERIES", 7)
            tiled = expected_results(call, do)
        for name, x in whole.items():
            torch.testing.assert_close(tiled[name], x, equal_nan=True)


def test_folded_heads_are_counted(tmp_path: Path) -> None:
    flash = backend_of(StandIn(), tmp_path, no_probe)
    problem = Problem(
        op="compressed", batch=512, n_queries=64, n_keys=3, n_heads=32, n_groups=2, d_k=128, d_v=128,
        dtype=torch.bfloat16, backward=True,
    )  # fmt: skip
    assert flash.supports(flash_problem(problem, 2)) is None
    assert flash.supports(replace(problem, n_keys=31)) is None, "so many keys mean a stride of 2"
    assert "2^31" in str(flash.supports(problem)), "so few mean 16"
    assert "80000 heads" in str(flash.supports(flash_problem(replace(problem, n_heads=5000, backward=False), 16)))
    assert flash.supports(replace(problem, n_keys=0, n_heads=5000, n_groups=1)) is None, "nothing is called"
    many = cases_of(replace(PROBLEM, n_heads=8192, n_groups=8192), 8, torch.float16)
    assert {case["name"]: case["heads"] for case in many}["folded heads"] == 7 * 8192, "as many as fit a grid"


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
@pytest.mark.parametrize(("block", "stride"), [(32, 16), (8, 4)])
@pytest.mark.parametrize("length", [2048, 172_032, 174_720])
def test_the_stride_is_guessed_well_enough_for_the_limits(
    length: int, block: int, stride: int, varlen: bool, tmp_path: Path
) -> None:
    """With 64 heads of head_dim 192, 32 bits count the elements of dQ up to 174,762 queries."""
    n_keys = length // stride if varlen else n_compressed(length, block, stride)
    problem = Problem(
        op="compressed", batch=1, n_queries=length, n_keys=n_keys, n_heads=64, n_groups=4, d_k=192, d_v=192,
        dtype=torch.bfloat16, backward=True, varlen=varlen,
    )  # fmt: skip
    flash = backend_of(StandIn(), tmp_path, no_probe)
    found = flash.outside_contract(StandIn(), problem)
    assert found == flash.outside_contract(StandIn(), flash_problem(problem, stride))
    assert (found is None) is (length < 174_720)
