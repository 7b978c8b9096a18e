"""The forward pass of the selected branch by blocks in Gluon, on a Hopper GPU: the reference's numbers in fp64, those
of Triton's kernel, bitwise determinism, in the cases of the backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

# First: it skips this file where the kernels cannot run, and finds the modules of `tests/kernels`.
from test_selected_backward_gpu import BASE, CASES, DTYPES  # isort: skip
import test_offset
from against_fp64 import assert_close_to_fp64
from helpers import assert_same_bits, random_inputs
from op_arguments import head_major
from test_selected import branch_of, by_reference, fresh_plans, kernel, on_device, poisoned

from nsa.backends.gluon.tiles import BlockForwardTile
from nsa.backends.triton import selected
from nsa.backends.triton.selected import HopperForwardTile, SelectedForwardTile, pick_backward

__all__ = ["fresh_plans", "poisoned"]

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
