"""The backward pass of the selected branch in Gluon, on a Hopper GPU: the reference's numbers in fp64, those of
Triton's kernel, bitwise determinism.

The cases and the rule are those of `tests/kernels/test_selected.py`, with tiles as long as they are in use.
"""

from __future__ import annotations

import sys
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
from torch import Tensor

from nsa.backends import gluon
from nsa.backends.gluon.tiles import BlockBackwardTile
from nsa.backends.triton import selected
from nsa.backends.triton.selected import SelectedBackwardTile, SelectedForwardTile, pick_backward
from nsa.sequences import Saved, Upstream

if gluon.unavailable() is not None:
    pytest.skip(str(gluon.unavailable()), allow_module_level=True)

__all__ = ["fresh_plans", "poisoned"]

FORWARD = SelectedForwardTile("block")
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
# At once, in several launches, and with segments that end within a tile of rows.
TILES = {
    "at once": BlockBackwardTile(),
    "chunks": BlockBackwardTile(scratch=1 << 20),
    "short segments": BlockBackwardTile(segment=208),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str, tile: str, dtype: str) -> None:
    case = CASES[name]
    ours = kernel(random_inputs(case, DTYPES[dtype]), case, FORWARD, TILES[tile])
    assert_close_to_fp64(ours, *by_reference(case, DTYPES[dtype]), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_matches_triton_s_kernel(name: str, dtype: str) -> None:
    case = CASES[name]
    inputs = random_inputs(case, DTYPES[dtype])
    ours, again = (kernel(inputs, case, FORWARD, BlockBackwardTile()) for _ in range(2))
    assert_same_bits(ours, again)
    theirs = kernel(inputs, case, FORWARD, pick_backward(case.d_k, case.d_v, DTYPES[dtype]))
    assert torch.equal(ours["dq"], theirs["dq"])
    for key in ("dk", "dv"):
        # Sums over segments of another length.
        a, b = (x[key].float() for x in (ours, theirs))
        assert (a - b).norm() <= 1e-3 * b.norm(), key


@pytest.mark.parametrize("starts", [(0, 101), (133, 133)], ids=str)
def test_queries_that_start_later_than_their_keys(starts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_offset.OFFSETS, "here", (BASE.but(batch=2, length=333), 200, starts))
    test_offset.check("selected", "here", (FORWARD, BlockBackwardTile()), torch.bfloat16)


def test_head_major_tensors_give_the_same_bits() -> None:
    inputs = random_inputs(BASE, torch.bfloat16)
    turned = inputs.map(lambda x: head_major(x.cuda()) if x.is_floating_point() else x)
    assert not turned.q.is_contiguous()
    assert_same_bits(*(kernel(x, BASE, FORWARD, BlockBackwardTile()) for x in (turned, inputs)))


def gradients(tile: BlockBackwardTile | SelectedBackwardTile | None, gate: Tensor | None = None) -> list[Tensor]:
    inputs = on_device(random_inputs(BASE, torch.bfloat16))
    q, k, v = inputs.of("selected")
    branch = branch_of(BASE)
    o, lse = selected.selected_forward(q, k, v, inputs.indices, branch)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2)).to(o)
    product = None if gate is None else (do.float() * o.float()).sum(-1)
    saved = Saved(q, k, v, o, lse, inputs.indices)
    return [*selected.selected_backward(Upstream(do, None, gate, product), saved, branch, tile=tile)]


def test_a_gate_folds_into_the_gradients() -> None:
    gate = torch.rand(BASE.batch, BASE.length, BASE.n_heads, device="cuda", dtype=torch.bfloat16)
    gate[:, ::7] = 0.0
    theirs = gradients(pick_backward(BASE.d_k, BASE.d_v, torch.bfloat16), gate)
    for x, y in zip(gradients(BlockBackwardTile(), gate), theirs, strict=True):
        assert (x - y).float().norm() <= 1e-2 * y.float().norm()


def test_the_launcher_picks_it() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gradients(None)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert "hopper_block_backward_kernel" in names
    assert "block_backward_kernel" not in names


def test_a_graph_replays_it() -> None:
    inputs = on_device(random_inputs(BASE, torch.bfloat16))
    q, k, v = inputs.of("selected")
    branch = branch_of(BASE)
    o, lse = selected.selected_forward(q, k, v, inputs.indices, branch)
    upstream, saved = Upstream(torch.randn_like(o)), Saved(q, k, v, o, lse, inputs.indices)
    expected = selected.selected_backward(upstream, saved, branch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = selected.selected_backward(upstream, saved, branch)
    graph.replay()
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
