"""The backward pass of the selected branch in Gluon, run on the CPU by `gluon_emulator.py`, against the reference in
fp64: the rule and the cases of Triton's kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import INTERPRETED  # isort: skip
import test_offset
from helpers import Case, assert_same_bits, random_inputs
from test_gluon import Emulator, emulator, usable
from test_selected import FORWARD, branch_of, check, fresh_plans, kernel, poisoned

from nsa.backends import gluon
from nsa.backends.gluon.tiles import BlockBackwardTile, pick_block_backward
from nsa.backends.triton import selected
from nsa.backends.triton.launch import layout
from nsa.backends.triton.selected import SelectedBackwardTile, index
from nsa.sequences import Saved, Upstream

if not INTERPRETED:
    pytest.skip("the emulator runs beside Triton's interpreter", allow_module_level=True)
if gluon.import_failure() is not None:
    pytest.skip(gluon.import_failure(), allow_module_level=True)

__all__ = ["emulator", "fresh_plans", "poisoned", "usable"]

FP16 = torch.float16
# Tiles of several queries, of one, and segments that end within a tile.
TILES = {
    "whole": BlockBackwardTile(block_m=32, block_n=16, segment=1 << 12),
    "cut": BlockBackwardTile(block_m=32, block_n=16, segment=80),
    "chunked": BlockBackwardTile(block_m=64, block_n=16, segment=96, scratch=1),
    "three stages": BlockBackwardTile(block_m=32, block_n=16, num_stages=3, segment=256),
}
BASE = Case(length=61, heads=16, groups=2, d_k=16, d_v=16, select_block=16, n_select=3)
CASES = {
    "h16": BASE,
    "h8, batch": BASE.but(heads=8, batch=2, length=45),
    "h32": BASE.but(heads=32, groups=1),
    "one token": BASE.but(length=1),
    "shorter than a block": BASE.but(length=5, heads=8),
    "one slot": BASE.but(n_select=1, heads=8),
    "varlen": BASE.but(documents=(1, 33, 1, 30), length=65, groups=1),
    "varlen, h8": BASE.but(documents=(7, 0, 40), length=47, heads=8),
    "whole documents": BASE.but(documents=(16, 32, 1), length=49, groups=1, heads=8),
}


@pytest.mark.parametrize(
    "tile", ["whole", "cut", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chunked", "three stages"))]
)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, tile: str, emulator: Emulator) -> None:
    case = CASES[name]
    check(case, FORWARD["block"], TILES[tile], FP16)
    assert "hopper_block_backward_kernel" in emulator.launched
    assert "block_backward_kernel" not in emulator.launched


@pytest.mark.parametrize("tile", ["cut", "chunked"])
@pytest.mark.parametrize("name", test_offset.OFFSETS)
def test_queries_that_start_later_than_their_keys(
    name: str, tile: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, *where = test_offset.OFFSETS[name]
    case = case.but(heads=8, d_k=16, d_v=16, select_block=16)
    monkeypatch.setitem(test_offset.OFFSETS, "here", (case, *where))
    test_offset.check("selected", "here", (FORWARD["block"], TILES[tile]), FP16)
    assert "hopper_block_backward_kernel" in emulator.launched


def test_chunks_of_several_rows(emulator: Emulator) -> None:
    case = CASES["h8, batch"]
    # Two rows of (batch, group) at a time.
    scratch = 2 * case.length * case.n_select * case.heads * case.d_k * FP16.itemsize
    check(case, FORWARD["block"], replace(TILES["cut"], scratch=scratch), FP16)


def test_triton_gives_the_same_up_to_rounding(emulator: Emulator) -> None:
    inputs = random_inputs(BASE, FP16)
    ours = kernel(inputs, BASE, FORWARD["block"], TILES["cut"])
    theirs = kernel(inputs, BASE, FORWARD["block"], SelectedBackwardTile(block_m=16, segment=80))
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=2e-3, atol=2e-3)


def test_partials_do_not_depend_on_stages(emulator: Emulator) -> None:
    inputs = random_inputs(BASE, FP16)
    two, three = (kernel(inputs, BASE, FORWARD["block"], replace(TILES["cut"], num_stages=stages)) for stages in (2, 3))
    assert_same_bits(two, three)


def test_an_index_in_several_parts(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_WORDS", 1)
    check(BASE.but(length=70, groups=1), FORWARD["block"], TILES["cut"], FP16)


def test_queries_that_selected_nothing_get_nothing(emulator: Emulator) -> None:
    """Of blocks that nobody selected, no segment is used."""
    inputs = random_inputs(BASE, FP16)
    none = inputs.but(indices=torch.full_like(inputs.indices, -1))
    found = kernel(none, BASE, FORWARD["block"], TILES["cut"])
    assert all(not found[name].any() for name in ("dq", "dk", "dv"))


def test_what_follows_a_document_reaches_no_gradient(emulator: Emulator) -> None:
    case = BASE.but(documents=(21, 40), length=61, groups=1)
    inputs = random_inputs(case, FP16)
    indices = inputs.indices.clone()
    # Else its own queries multiply by what is not finite, which the emulator takes for a buffer that was not loaded.
    indices[:, 21:] = -1

    def gradients(fill: float) -> dict[str, Tensor]:
        x = inputs.k_sel.clone()
        x[:, 21:] = fill
        given = inputs.but(k_sel=x, v_sel=x, indices=indices)
        return kernel(given, case, FORWARD["block"], TILES["cut"])

    finite, not_finite = gradients(1.0), gradients(float("nan"))
    for name in ("dq", "dk", "dv"):
        assert torch.equal(finite[name], not_finite[name])


@pytest.mark.usefixtures("usable")
def test_a_tile_is_picked_where_the_kernel_applies() -> None:
    q, k = torch.empty(1, 4096, 64, 128, dtype=torch.bfloat16), torch.empty(1, 4096, 4, 128, dtype=torch.bfloat16)

    def picked(q: Tensor, k: Tensor, select_block: int = 64, do: Tensor | None = None) -> BlockBackwardTile | None:
        return pick_block_backward(layout(q if do is None else do), layout(q), layout(k), layout(k), select_block)

    assert picked(q, k) == BlockBackwardTile()
    assert picked(q[:, :, :32], k) == BlockBackwardTile()
    assert picked(q, k, select_block=32) is None
    assert picked(q, k, select_block=128) is None
    assert picked(q.float(), k.float()) is None
    assert picked(q[..., :64], k[..., :64]) is None
    # Four and twelve heads per group: half a swizzled box, and no power of two.
    assert picked(q[:, :, :16], k) is None
    assert picked(q[:, :, :48], k) is None
    # Gradients that no descriptor takes.
    assert picked(q, k, do=torch.empty(1, 4096, 64, 132, dtype=torch.bfloat16)[..., :128]) is None


@pytest.mark.usefixtures("usable")
def test_the_backward_pass_runs_it(emulator: Emulator) -> None:
    case = Case(length=70, heads=8, d_k=128, d_v=128, select_block=64, n_select=1)
    check(case, FORWARD["block"], BlockBackwardTile(), FP16)
    inputs = random_inputs(case, FP16)
    o, lse = torch.zeros_like(inputs.q), torch.zeros(inputs.q.shape[:3])
    emulator.launched.clear()
    selected.selected_backward(
        Upstream(o), Saved(inputs.q, inputs.k_sel, inputs.v_sel, o, lse, inputs.indices), branch_of(case)
    )
    assert "hopper_block_backward_kernel" in emulator.launched
