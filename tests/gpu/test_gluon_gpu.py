"""The Gluon kernels on a Hopper GPU: the reference's numbers in fp64, bitwise determinism, Triton's results.

The cases and the rule are those of `tests/kernels/test_ranged.py`; there the kernels run with the tiles that are
picked, here each set of kernels by its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from test_ranged import FUNCTIONS, Case, by_kernel, check, inputs, poison

from nsa.backends import gluon
from nsa.backends.gluon.tiles import FORWARD, KEYS, ForwardTile, KeyTile, QueryTile
from nsa.backends.triton.ranged_backward import plan as backward_plan
from nsa.backends.triton.ranged_forward import plan as forward_plan
from nsa.backends.triton.tiles import BackwardTile, pick_backward, pick_forward
from nsa.sequences import Saved, Upstream

if gluon.unavailable() is not None:
    pytest.skip(str(gluon.unavailable()), allow_module_level=True)

__all__ = ["poison"]

BRANCHES = ("compressed", "sliding")
SHAPES = {
    "128-h16": (128, 16, torch.bfloat16),
    "128-h4-fp16": (128, 4, torch.float16),
    "128-h6": (128, 6, torch.bfloat16),
    "128-h1": (128, 1, torch.bfloat16),
    "128-h64": (128, 64, torch.bfloat16),
    "64-h6": (64, 6, torch.bfloat16),
    "64-h16-fp16": (64, 16, torch.float16),
    "64-h4": (64, 4, torch.bfloat16),
}
ROWS = {
    "fixed": {"batch": 2, "length": 1111, "groups": 2},
    "varlen": {"length": 1111, "groups": 2, "documents": (1, 30, 500, 0, 400, 180)},
    "one token": {"length": 33, "groups": 3, "batch": 2},
}


@pytest.fixture(autouse=True)
def forget_plans() -> None:
    for plan in (forward_plan, backward_plan):
        plan.cache_clear()


def case_of(shape: str, rows: str) -> Case:
    head_dim, heads, dtype = SHAPES[shape]
    return Case(heads=heads, d_k=head_dim, d_v=head_dim, dtype=dtype, block=32, stride=16, window=200, **ROWS[rows])


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_sets_match_the_reference(shape: str, rows: str, branch: str) -> None:
    case = case_of(shape, rows)
    x = inputs(case, branch)
    triton = pick_forward(x["q"], x["v"], branch == "sliding"), pick_backward(x["q"], x["v"], branch == "sliding")
    expected = by_kernel(case, branch, x, *triton)
    check(case, branch, expected, x)
    whole = case.heads & (case.heads - 1) == 0
    for forward, keys in zip(FORWARD[case.d_k], KEYS, strict=True):
        own = forward, BackwardTile(triton[1].dq, keys if whole else triton[1].dkv)
        actual = by_kernel(case, branch, x, *own)
        check(case, branch, actual, x)
        again = by_kernel(case, branch, x, *own)
        for name, value in actual.items():
            assert torch.equal(value, again[name]), f"{name} is not deterministic"
            hidden = expected[name] == float("-inf")
            ours, theirs = (y.float().masked_fill(hidden, 0.0) for y in (value, expected[name]))
            assert (ours - theirs).norm() <= 1e-2 * theirs.norm() + 1e-6, name


# All at once, on one stream in runs, and on two.
KEPT = {
    "at once": QueryTile(scratch=1 << 30),
    "in runs": QueryTile(scratch=4 << 20, streams=1),
    "two streams": QueryTile(scratch=8 << 20, streams=2),
}


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", ["128-h16", "128-h4-fp16", "128-h1", "128-h64"])
@pytest.mark.parametrize("kept", KEPT)
def test_dq_from_kept_ds(kept: str, shape: str, rows: str, branch: str) -> None:
    case = case_of(shape, rows)
    x = inputs(case, branch)
    keys = KeyTile(waves=1) if branch == "sliding" else KeyTile(waves=32)
    tile = BackwardTile(KEPT[kept], keys)
    actual, again = (by_kernel(case, branch, x, None, tile) for _ in range(2))
    check(case, branch, actual, x)
    for name, value in actual.items():
        assert torch.equal(value, again[name]), f"{name} is not deterministic"


@pytest.mark.parametrize("branch", BRANCHES)
def test_launchers_pick_the_gluon_kernels(branch: str) -> None:
    case = Case(
        heads=16, groups=4, length=4096, d_k=128, d_v=128, dtype=torch.bfloat16, block=32, stride=16, window=512
    )
    x = inputs(case, branch)
    forward_plan.cache_clear()
    backward_plan.cache_clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        by_kernel(case, branch, x, None, None)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert {"hopper_forward_kernel", "hopper_dkv_kernel", "hopper_dq_kernel"} <= names


@pytest.mark.parametrize("branch", BRANCHES)
def test_runs_on_two_streams_replay_in_a_graph(branch: str) -> None:
    case = case_of("128-h16", "fixed")
    x = inputs(case, branch)
    forward, backward, _ = FUNCTIONS[branch]
    over, q, k, v, do = case.branch(branch), x["q"], x["k"], x["v"], x["do"]
    o, lse = forward(q, k, v, over)
    tile = BackwardTile(KEPT["two streams"], KeyTile(waves=32))

    def call() -> tuple[torch.Tensor, ...]:
        return backward(Upstream(do, None), Saved(q, k, v, o, lse), over, tile=tile)

    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_gate_folds_into_the_gradients(branch: str) -> None:
    case = case_of("128-h16", "fixed")
    x = inputs(case, branch)
    gate = torch.rand(x["q"].shape[:3], device="cuda", dtype=torch.bfloat16)
    gate[:, ::7] = 0.0
    forward, backward, _ = FUNCTIONS[branch]
    over, q, k, v, do = case.branch(branch), x["q"], x["k"], x["v"], x["do"]
    o, lse = forward(q, k, v, over, tile=ForwardTile())
    product = (do.float() * o.float()).sum(-1)
    found = []
    picked = pick_backward(q, v, branch == "sliding")
    kept = [BackwardTile(tile, KeyTile(waves=1)) for tile in KEPT.values()]
    for tile in (picked, BackwardTile(picked.dq, KeyTile()), *kept):
        into = torch.ones_like(q)
        upstream = Upstream(do, None, gate, product, into)
        found.append(backward(upstream, Saved(q, k, v, o, lse), over, tile=tile))
    for ours in found[1:]:
        for x, y in zip(ours, found[0], strict=True):
            assert (x - y).float().norm() <= 1e-2 * y.float().norm()
