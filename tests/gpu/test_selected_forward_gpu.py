"""The forward pass of the selected branch by blocks in Gluon, on a Hopper GPU: the reference's numbers in fp64, those
of Triton's kernel, bitwise determinism.

The cases and the rule are those of `tests/kernels/test_selected.py`, with tiles as long as they are in use.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

import test_offset
from against_fp64 import assert_close_to_fp64
from helpers import Case, assert_same_bits, random_inputs
from op_arguments import head_major
from test_selected import branch_of, by_reference, fresh_plans, kernel, on_device, poisoned

from nsa.backends import gluon
from nsa.backends.gluon.tiles import BlockForwardTile
from nsa.backends.triton import selected
from nsa.backends.triton.selected import HopperForwardTile, SelectedForwardTile, pick_backward

if gluon.unavailable() is not None:
    pytest.skip(str(gluon.unavailable()), allow_module_level=True)

__all__ = ["fresh_plans", "poisoned"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BASE = Case(length=1000, groups=2, heads=16, d_k=128, d_v=128, select_block=64, n_select=8)
CASES = {
    "h16": BASE,
    "h8, batch": BASE.but(batch=3, length=515, heads=8),
    "h32": BASE.but(heads=32, length=700, groups=1),
    "h64": BASE.but(heads=64, length=333, groups=1),
    "varlen": BASE.but(documents=(1, 30, 500, 0, 400, 69)),
    "varlen, h8": BASE.but(documents=(64, 128, 65, 63), length=320, heads=8),
    "one slot": BASE.but(n_select=1),
    "one token": BASE.but(length=1, groups=3),
    "shorter than a block": BASE.but(length=45),
}
# Longer than what is read densely.
LONG = BASE.but(n_select=3)
BY_BLOCK = HopperForwardTile(common_m=64, common_warps=4, common_stages=2)
# At once, in several launches, with segments that end within a tile of rows, and with a ring of two tiles.
TILES = {
    "at once": BY_BLOCK,
    "chunks": replace(BY_BLOCK, scratch=1 << 20),
    "short segments": replace(BY_BLOCK, segment=208),
    "two stages": replace(BY_BLOCK, attend=BlockForwardTile(num_stages=2)),
}
TRITON_S = SelectedForwardTile(num_stages=2, common_m=64, common_warps=4, common_stages=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str, tile: str, dtype: str) -> None:
    case = CASES[name]
    ours = kernel(random_inputs(case, DTYPES[dtype]), case, TILES[tile], None)
    exact, plain = ({key: x[key] for key in ours} for x in by_reference(case, DTYPES[dtype]))
    assert_close_to_fp64(ours, exact, plain, case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_triton_s_kernel(name: str, dtype: str) -> None:
    case = CASES[name]
    inputs = random_inputs(case, DTYPES[dtype])
    ours, again, short = (kernel(inputs, case, TILES[x], None) for x in ("at once", "at once", "short segments"))
    assert_same_bits(ours, again)
    assert_same_bits(ours, short)
    theirs = kernel(inputs, case, TRITON_S, None)
    for key in ("o", "lse"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("starts", [(0, 101), (133, 133)], ids=str)
def test_queries_that_start_later_than_their_keys(starts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_offset.OFFSETS, "here", (BASE.but(batch=2, length=333), 200, starts))
    tiles = (TILES["short segments"], pick_backward(128, 128, torch.bfloat16))
    test_offset.check("selected", "here", tiles, torch.bfloat16)


def test_head_major_tensors_give_the_same_bits() -> None:
    inputs = random_inputs(BASE, torch.bfloat16)
    turned = inputs.map(lambda x: head_major(x.cuda()) if x.is_floating_point() else x)
    assert not turned.q.is_contiguous()
    assert_same_bits(*(kernel(x, BASE, BY_BLOCK, None) for x in (turned, inputs)))


def test_the_launcher_picks_it() -> None:
    inputs = on_device(random_inputs(LONG, torch.bfloat16))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        selected.selected_forward(*inputs.of("selected"), inputs.indices, branch_of(LONG))
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert "hopper_block_kernel" in names
    assert "block_kernel" not in names


def test_a_graph_replays_it() -> None:
    inputs = on_device(random_inputs(LONG, torch.bfloat16))
    arguments = (*inputs.of("selected"), inputs.indices, branch_of(LONG))
    expected = selected.selected_forward(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = selected.selected_forward(*arguments)
    for x in found:
        x.zero_()
    graph.replay()
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
