"""The forward pass of the selected branch by blocks in Gluon, run on the CPU by `gluon_emulator.py`, against the
reference in fp64: the rule and the cases of the backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import INTERPRETED  # isort: skip
import test_offset
from helpers import Case, assert_same_bits, random_inputs
from test_gluon import Emulator, emulator, usable
from test_gluon_block_backward import BASE, CASES, FP16
from test_selected import BACKWARD, FORWARD, branch_of, check, fresh_plans, kernel, poisoned

from nsa.backends import gluon
from nsa.backends.gluon.tiles import BlockForwardTile, pick_block_forward
from nsa.backends.triton import branches, selected
from nsa.backends.triton.launch import layout, new_layout
from nsa.backends.triton.selected import HopperForwardTile, QueryForward, index
from nsa.backends.triton.selected.forward import BlockForward
from nsa.backends.triton.selected.index import Shapes

if not INTERPRETED:
    pytest.skip("the emulator runs beside Triton's interpreter", allow_module_level=True)
if gluon.import_failure() is not None:
    pytest.skip(gluon.import_failure(), allow_module_level=True)

__all__ = ["emulator", "fresh_plans", "poisoned", "usable"]

BY_BLOCK = HopperForwardTile(common_m=32, attend=BlockForwardTile(block_m=32, block_n=16, num_stages=2))
# Tiles of several queries, of one, and segments that end within a tile.
TILES = {
    "whole": replace(BY_BLOCK, segment=1 << 12),
    "cut": replace(BY_BLOCK, segment=80),
    "chunked": replace(BY_BLOCK, segment=96, scratch=1, attend=replace(BY_BLOCK.attend, block_m=64)),
    "three stages": replace(BY_BLOCK, segment=256, attend=replace(BY_BLOCK.attend, num_stages=3)),
}


def run(case: Case, tile: HopperForwardTile) -> dict[str, Tensor]:
    return kernel(random_inputs(case, FP16), case, tile, None)


@pytest.mark.parametrize(
    "tile", ["whole", "cut", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chunked", "three stages"))]
)
@pytest.mark.parametrize("name", CASES)
def test_outputs(name: str, tile: str, emulator: Emulator) -> None:
    case = CASES[name]
    check(case, TILES[tile], None, FP16)
    assert "hopper_block_kernel" in emulator.launched
    assert "block_kernel" not in emulator.launched


@pytest.mark.parametrize("tile", ["cut", "chunked"])
@pytest.mark.parametrize("name", test_offset.OFFSETS)
def test_queries_that_start_later_than_their_keys(
    name: str, tile: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, *where = test_offset.OFFSETS[name]
    case = case.but(heads=8, d_k=16, d_v=16, select_block=16)
    monkeypatch.setitem(test_offset.OFFSETS, "here", (case, *where))
    test_offset.check("selected", "here", (TILES[tile], BACKWARD["whole"]), FP16)
    assert "hopper_block_kernel" in emulator.launched


def test_partials_of_several_rows_at_once(emulator: Emulator) -> None:
    case = CASES["h8, batch"]
    scratch = 2 * case.length * case.n_select * case.heads * case.d_v * FP16.itemsize
    check(case, replace(TILES["cut"], scratch=scratch), None, FP16)


def test_triton_gives_the_same_up_to_rounding(emulator: Emulator) -> None:
    theirs = kernel(random_inputs(BASE, FP16), BASE, replace(FORWARD["block"], segment=80, common_m=32), None)
    for name, ours in run(BASE, TILES["cut"]).items():
        torch.testing.assert_close(ours, theirs[name], rtol=2e-3, atol=2e-3)


def test_partials_do_not_depend_on_stages_and_segments(emulator: Emulator) -> None:
    assert_same_bits(run(BASE, TILES["cut"]), run(BASE, TILES["three stages"]))


def test_an_index_in_several_parts(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_WORDS", 1)
    check(BASE.but(length=70, groups=1), TILES["cut"], None, FP16)


def test_queries_that_selected_nothing_get_nothing(emulator: Emulator) -> None:
    """Of blocks that nobody selected, no segment is used."""
    inputs = random_inputs(BASE, FP16)
    found = kernel(inputs.but(indices=torch.full_like(inputs.indices, -1)), BASE, TILES["cut"], None)
    assert not found["o"].any()
    assert (found["lse"] == float("-inf")).all()


def test_no_scale_is_so_small_that_the_future_counts(emulator: Emulator) -> None:
    case = BASE.but(groups=1)
    inputs = random_inputs(case, FP16)
    q, k, v = inputs.of("selected")
    # Every other query selected nothing: no run has a block in common.
    indices = inputs.indices.clone()
    indices[:, 1::2] = -1
    branch = branch_of(case, scale=1e-30)
    o, _ = selected.selected_forward(q, k, v, indices, branch, tile=TILES["cut"])
    v[:, 30:] += 100.0
    later, _ = selected.selected_forward(q, k, v, indices, branch, tile=TILES["cut"])
    assert torch.equal(o[:, :30], later[:, :30])


def test_what_follows_a_document_reaches_no_output(emulator: Emulator) -> None:
    case = BASE.but(documents=(21, 40), length=61, groups=1)
    inputs = random_inputs(case, FP16)
    indices = inputs.indices.clone()
    # Else its own queries multiply by what is not finite, which the emulator takes for a buffer that was not loaded.
    indices[:, 21:] = -1

    def outputs(fill: float) -> dict[str, Tensor]:
        x = inputs.k_sel.clone()
        x[:, 21:] = fill
        return kernel(inputs.but(k_sel=x, v_sel=x, indices=indices), case, TILES["cut"], None)

    assert_same_bits(outputs(1.0), outputs(float("nan")))


@pytest.mark.usefixtures("usable")
def test_a_tile_is_picked_where_the_kernel_applies() -> None:
    q, k = torch.empty(1, 8192, 64, 128, dtype=torch.bfloat16), torch.empty(1, 8192, 4, 128, dtype=torch.bfloat16)

    def picked(q: Tensor, k: Tensor, select_block: int = 64) -> BlockForwardTile | None:
        return pick_block_forward(layout(q), layout(k), layout(k), select_block)

    assert picked(q, k) == BlockForwardTile()
    assert picked(q[:, :, :32], k) == BlockForwardTile()
    assert picked(q, k, select_block=32) is None
    assert picked(q.float(), k.float()) is None
    assert picked(q[..., :64], k[..., :64]) is None
    # Four and twelve heads per group: half a swizzled box, and no power of two.
    assert picked(q[:, :, :16], k) is None
    assert picked(q[:, :, :48], k) is None


def plan(length: int = 16384, heads: int = 64, select_block: int = 64, **given: Any) -> Any:
    q, k = (new_layout((1, length, n, 128), torch.bfloat16, torch.device("cpu")) for n in (heads, 4))
    indices = new_layout((1, length, 4, 16), torch.int32, q.device)
    chosen = {"tile": None, "method": None, **given}
    return selected.plan_forward(q, k, k, indices, select_block, None, False, 1.0, **chosen).run


@pytest.mark.usefixtures("usable")
def test_a_pass_by_block_without_a_given_tile_takes_it() -> None:
    assert isinstance(plan().tile, HopperForwardTile)
    assert isinstance(plan(method="block").tile, HopperForwardTile)
    # Read in halves.
    assert isinstance(plan(select_block=128).tile, HopperForwardTile)
    assert not isinstance(plan(heads=24).tile, HopperForwardTile)
    triton_s = plan(tile=FORWARD["block"])
    assert isinstance(triton_s, BlockForward)
    assert triton_s.tile == FORWARD["block"]
    assert isinstance(plan(heads=128), QueryForward)


@pytest.mark.usefixtures("usable")
def test_partials_of_the_fused_kernel_come_from_it() -> None:
    q, k = (new_layout((1, 8192, n, 128), torch.bfloat16, torch.device("cpu")) for n in (64, 4))
    indices = new_layout((1, 8192, 4, 16), torch.int32, q.device)
    tiles = branches.pick_together(Shapes(q, k, k, indices, 64, None), k, k)
    assert tiles is not None
    assert isinstance(tiles[0], HopperForwardTile)


@pytest.mark.slow
@pytest.mark.usefixtures("usable")
def test_the_forward_pass_runs_it(emulator: Emulator) -> None:
    case = Case(length=261, heads=8, d_k=128, d_v=128, select_block=64, n_select=1, n_init=0, n_local=0)
    inputs = random_inputs(case, FP16)
    selected.selected_forward(*inputs.of("selected"), inputs.indices, branch_of(case))
    assert "hopper_block_kernel" in emulator.launched
