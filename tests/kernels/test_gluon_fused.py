"""The selected and the sliding forward pass in one Gluon kernel, run on the CPU by `gluon_emulator.py`, against the
reference in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import INTERPRETED  # isort: skip
from helpers import Case, Inputs, assert_within_derived_tolerance, random_inputs, results
from helpers import branches as branches_of
from op_arguments import attention_arguments
from test_gluon import Emulator, emulator, poison

from nsa import reference
from nsa.backends import gluon
from nsa.backends import triton as backend
from nsa.backends.gluon.tiles import BlockForwardTile, FusedTile, pick_fused
from nsa.backends.triton import branches, ranged_forward
from nsa.backends.triton.launch import Launch, layout, new_layout
from nsa.backends.triton.selected import HopperForwardTile, SelectedForwardTile
from nsa.backends.triton.selected.index import Shapes, block_tables
from nsa.ops import fused
from nsa.sequences import attention_branches

if not INTERPRETED:
    pytest.skip("the emulator runs beside Triton's interpreter", allow_module_level=True)
if gluon.import_failure() is not None:
    pytest.skip(gluon.import_failure(), allow_module_level=True)

from nsa.backends.gluon import selected_sliding

__all__ = ["emulator", "poison"]

FP16 = torch.float16
BASE = Case(length=77, heads=16, d_k=16, d_v=16, select_block=16, n_select=4, window=40)
CASES = {
    "h16": BASE,
    "h8, two groups": BASE.but(heads=8, groups=2, length=61),
    "h4, batch": BASE.but(heads=4, batch=2, length=101, select_block=32, n_select=3, window=64),
    "h32, window of one": BASE.but(heads=32, length=35, window=1),
    "h64, window past the start": BASE.but(heads=64, length=33, window=512),
    "odd number of slots": BASE.but(n_select=5, length=90, window=20),
    "more slots than tiles, than 16": BASE.but(n_select=17, length=150, window=10),
}
# Bytes of partial outputs alive at once, and CTAs: few, so that most have several runs, one after the other.
SPREAD = {"chunks": (1, 3), "at once": (1 << 20, 3), "one CTA": (1 << 20, 1)}


def draw_forced(case: Case, indices: Tensor) -> Tensor:
    """The first block, the query's own, and in half of the rest what its neighbors have."""
    own = (torch.arange(case.length) // case.select_block)[None, :, None, None].expand(*indices.shape[:3], 1)
    run = torch.arange(case.length) // (128 // case.heads) * (128 // case.heads)
    shared = torch.where((run % 3 == 0)[None, :, None, None], indices[:, run], indices)
    selected = torch.cat([own * 0, own, shared.long()], -1)
    selected = selected.masked_fill(selected > own, -1)
    found = torch.zeros(*indices.shape[:3], case.length + 2, dtype=torch.bool).scatter_(-1, selected + 1, True)[..., 1:]
    numbers = torch.arange(found.shape[-1]).expand(found.shape).masked_fill(~found, 1 << 20).sort(-1).values
    return numbers[..., : case.n_select].masked_fill(numbers[..., : case.n_select] == 1 << 20, -1).int()


@pytest.fixture
def offered(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """As on an H200 of three SMs."""
    plans = (branches.plan_forward, branches.runs_together, ranged_forward.plan)
    monkeypatch.setattr(gluon, "unavailable", lambda: None)
    monkeypatch.setattr(selected_sliding, "sm_count", lambda device: 3)
    for plan in plans:
        plan.cache_clear()
    yield emulator
    # No other test is to find these plans.
    for plan in plans:
        plan.cache_clear()


def check_both(case: Case, x: Inputs, tile: SelectedForwardTile) -> None:
    over = branches_of(case)
    shapes = Shapes(*map(layout, (x.q, x.k_sel, x.v_sel, x.indices)), case.select_block, None, False)
    plan = selected_sliding.SelectedSlidingForward(
        shapes, layout(x.k_win), layout(x.v_win), case.window, over.selected.scale, tile,
        FusedTile(block_n=case.select_block, num_stages=2, ring=2),
    )  # fmt: skip
    o, o_win = torch.empty_like(x.q), torch.empty_like(x.q)
    lse, lse_win = torch.empty(x.q.shape[:3]), torch.empty(x.q.shape[:3])
    tables = block_tables(over.selected.sequences, case.length, case.select_block)
    plan(x.q, x.k_sel, x.v_sel, x.indices, tables, o, lse, x.k_win, x.v_win, o_win, lse_win)
    for branch, got in (("selected", (o, lse)), ("sliding", (o_win, lse_win))):
        exact, plain = (results(reference, branch, x.to(dtype), case) for dtype in (torch.float64, FP16))
        names = ("o", "lse")
        assert_within_derived_tolerance(
            dict(zip(names, got, strict=True)), {n: exact[n] for n in names}, {n: plain[n] for n in names}
        )


@pytest.mark.parametrize("forced", [False, True], ids=["any", "forced"])
@pytest.mark.parametrize("spread", ["chunks", "at once", pytest.param("one CTA", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_both_branches(
    name: str, spread: str, forced: bool, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, (scratch, ctas) = CASES[name], SPREAD[spread]
    monkeypatch.setattr(selected_sliding, "sm_count", lambda device: ctas)
    x = random_inputs(case, FP16)
    if forced:
        x = replace(x, indices=draw_forced(case, x.indices))
    check_both(case, x, SelectedForwardTile(block_m=16, segment=64, scratch=scratch, common_m=128))
    assert "hopper_selected_sliding_kernel" in emulator.launched
    assert "hopper_block_kernel" not in emulator.launched


@pytest.mark.parametrize("scratch", [1, 1 << 20], ids=["chunks", "at once"])
@pytest.mark.parametrize("name", ["h16", "h8, two groups"])
def test_partials_from_gluon_s_kernel(name: str, scratch: int, emulator: Emulator) -> None:
    attend = BlockForwardTile(block_m=32, block_n=16, num_stages=2)
    tile = HopperForwardTile(segment=80, scratch=scratch, common_m=128, attend=attend)
    check_both(CASES[name], random_inputs(CASES[name], FP16), tile)
    assert {"hopper_selected_sliding_kernel", "hopper_block_kernel"} <= {*emulator.launched}


# As short as one that is not read densely; a window longer than 32 bits can tell.
SERVED = Case(
    length=261, heads=4, d_k=128, d_v=128, block=32, stride=16, select_block=64, n_select=1, n_init=0, n_local=0,
    window=1 << 40,
)  # fmt: skip


@pytest.mark.slow
def test_the_attention_runs_it(offered: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in attention_arguments(SERVED, "triton", FP16)]
    found = fused.run_forward(*arguments)
    assert offered.launched.count("hopper_selected_sliding_kernel") == 1
    # The compressed branch.
    assert offered.launched.count("hopper_forward_kernel") == 1
    assert "common_kernel" not in offered.launched
    monkeypatch.delattr(backend, "selected_sliding_forward")
    apart = fused.run_forward(*arguments)
    assert offered.launched.count("hopper_selected_sliding_kernel") == 1
    assert offered.launched.count("hopper_forward_kernel") == 3
    for name, ours, theirs in zip(["o", *fused.OUTPUTS.split()], found, apart, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
        # Only the partial outputs of the selected branch are added up in another order.
        assert name in ("o", "o_sel", "lse_sel") or torch.equal(ours, theirs), name


@pytest.mark.usefixtures("offered")
def test_a_profile_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "__call__", lambda self, **free: None)
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in attention_arguments(SERVED, "triton", FP16)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fused.run_forward(*arguments)
    names = {event.key for event in profile.key_averages()}
    assert "nsa::selected_sliding_forward" in names
    assert not names & {"nsa::selected_forward", "nsa::sliding_forward"}


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"documents": (100, 161)}, ()),
        ({}, ("q_start", "window_start")),
        ({}, ("window_start",)),
        ({"length": 256}, ()),
        ({"d_k": 64, "d_v": 64}, ()),
        ({"heads": 3}, ()),
        ({"heads": 32}, ()),
        ({"select_block": 32}, ()),
    ],
    ids=str,
)
def test_other_problems_run_branch_by_branch(
    changes: dict[str, Any], places: tuple[str, ...], offered: Emulator
) -> None:
    case, zeros = SERVED.but(**changes), torch.zeros(1, dtype=torch.int32)
    x = random_inputs(case, FP16)
    starts = [zeros if name in places else None for name in ("q_start", "window_start")]
    over = attention_branches(x.q, case.cu_seqlens, *starts, *case.selection.values(), case.window, 0.1)
    given = (x.q, x.k_sel, x.v_sel, x.indices, x.k_win, x.v_win)
    assert branches.selected_sliding_forward(*given, over) is None
    assert offered.launched == []


def test_fp32_and_longer_keys_run_branch_by_branch(offered: Emulator) -> None:
    x = random_inputs(SERVED, FP16)
    over = attention_branches(x.q, None, None, None, *SERVED.selection.values(), SERVED.window, 0.1)
    given = (x.q, x.k_sel, x.v_sel, x.indices, x.k_win, x.v_win)
    wide = [y.float() if y.is_floating_point() else y for y in given]
    assert branches.selected_sliding_forward(*wide, over) is None
    assert branches.selected_sliding_forward(x.q[:, :200], *given[1:], over) is None
    assert offered.launched == []


def test_which_problems_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.backends.gluon.tiles.capability", lambda device: (9, 0))
    monkeypatch.setattr(gluon, "unavailable", lambda: None)

    def picked(heads: int, groups: int, head_dim: int, *, run: int, block: int = 64, dtype=torch.bfloat16) -> bool:
        q, k = (new_layout((1, 4096, n, head_dim), dtype, torch.device("cpu")) for n in (heads, groups))
        return pick_fused(q, k, k, k, k, run, block) is not None

    assert picked(64, 4, 128, run=8)
    assert picked(32, 8, 128, run=32)
    assert not picked(64, 4, 64, run=8)
    assert not picked(12, 2, 128, run=16)
    assert not picked(16, 8, 128, run=32)
    assert not picked(64, 4, 128, run=8, block=32)
    assert not picked(64, 4, 128, run=8, dtype=torch.float32)
