"""The selected and the sliding forward pass in one Gluon kernel, on a Hopper GPU: the numbers of the reference in fp64,
those of the separate kernels, bitwise determinism, and the separate kernels where it does not apply."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from against_fp64 import assert_close_to_fp64, whole_results
from helpers import BRANCHES, Case, Inputs, assert_same_bits, attend, random_inputs
from helpers import branches as branches_of
from op_arguments import head_major
from test_ranged import poison
from torch import Tensor

from nsa import NSAConfig, ops, reference
from nsa.backends import gluon
from nsa.backends.triton import branches, ranged, selected
from nsa.functional import attention_kwargs

if gluon.unavailable() is not None:
    pytest.skip(str(gluon.unavailable()), allow_module_level=True)

__all__ = ["poison"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BASE = Case(
    length=1111, groups=2, heads=16, d_k=128, d_v=128, block=32, stride=16, select_block=64, n_select=4, n_init=1,
    n_local=2, window=200,
)  # fmt: skip
# Just longer than what is read densely, or a good deal longer.
FUSED = {
    "h16": BASE,
    "h8, batch": BASE.but(heads=8, groups=1, batch=3, length=1025),
    "h4, three groups": BASE.but(heads=4, groups=3, length=1301, n_select=5),
    "one slot, window of one": BASE.but(length=577, n_select=1, n_init=0, n_local=0, window=1),
    "window past the start": BASE.but(length=2047, window=1 << 40),
    "as by default": BASE.but(length=4161, groups=1, n_select=16, window=512),
    "20 slots": BASE.but(length=5300, groups=1, heads=8, n_select=20, window=512),
}
APART = {
    "h6": BASE.but(heads=6),
    "h1": BASE.but(heads=1),
    "h32": BASE.but(heads=32, groups=1),
    "head_dim 64": BASE.but(d_k=64, d_v=64),
    "blocks of 32": BASE.but(select_block=32),
    "short": BASE.but(length=1000),
    "varlen": BASE.but(documents=(1, 30, 500, 0, 400, 180)),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with each forward pass by whether the two ran in one kernel."""
    found, intact = [], branches.selected_sliding_forward

    def recorded(*args: Any) -> Any:
        result = intact(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(branches, "selected_sliding_forward", recorded)
    return found


def together(x: Inputs, case: Case) -> dict[str, Tensor]:
    found = branches.selected_sliding_forward(
        x.q, x.k_sel, x.v_sel, x.indices, x.k_win, x.v_win, branches_of(case, "cuda")
    )
    assert found is not None
    return dict(zip(("o_sel", "lse_sel", "o_win", "lse_win"), found, strict=True))


def default_attention(x: Inputs, start: int = 0, **places: Tensor) -> Tensor:
    """Of the queries from `start` on, with the default hyperparameters."""
    config = NSAConfig(dim=64, n_heads=16, n_kv_groups=1, d_k=128, d_v=128, backend="triton")
    keys = [y for branch in BRANCHES for y in x.of(branch)[1:]]
    o, _ = ops.attention(x.q[:, start:], *keys, x.gates[:, start:], **places, **attention_kwargs(config))
    return o


def by_reference(x: Inputs, case: Case) -> dict[str, Tensor]:
    found = {}
    for branch, name in (("selected", "sel"), ("sliding", "win")):
        found[f"o_{name}"], found[f"lse_{name}"] = attend(reference, branch, x, case, x.of(branch))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED)
def test_matches_fp64_and_the_separate_kernels(name: str, dtype: str) -> None:
    """Selections are any: of no block, of blocks that are not seen yet."""
    case = FUSED[name]
    x = random_inputs(case, DTYPES[dtype]).map(Tensor.cuda)
    ours, again = together(x, case), together(x, case)
    assert_same_bits(ours, again)
    exact = by_reference(x.to(torch.float64), case)
    assert_close_to_fp64(ours, exact, by_reference(x, case), case)
    # A query that selected nothing.
    assert exact["lse_sel"].isinf().any()
    over = branches_of(case, "cuda")
    o_sel, lse_sel = selected.selected_forward(x.q, x.k_sel, x.v_sel, x.indices, over.selected)
    o_win, lse_win = ranged.sliding_forward(x.q, x.k_win, x.v_win, over.sliding)
    separate = {"o_sel": o_sel, "lse_sel": lse_sel, "o_win": o_win, "lse_win": lse_win}
    for key, theirs in separate.items():
        assert (ours[key].shape, ours[key].dtype) == (theirs.shape, theirs.dtype)
        hidden = theirs.isinf()
        assert torch.equal(ours[key].isinf(), hidden), key
        a, b = (y.float().masked_fill(hidden, 0.0) for y in (ours[key], theirs))
        assert (a - b).norm() <= 1e-2 * b.norm(), key


def test_head_major_tensors_give_the_same_bits() -> None:
    x = random_inputs(BASE, torch.bfloat16).map(Tensor.cuda)
    turned = x.map(head_major)
    assert not turned.q.is_contiguous()
    assert_same_bits(together(turned, BASE), together(x, BASE))


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = FUSED["as by default"]
    x = random_inputs(case, torch.bfloat16).map(Tensor.cuda)
    expected, pick = together(x, case), branches.pick_together

    def cut_up(*args: Any) -> Any:
        blocks, tile = pick(*args)
        return replace(blocks, scratch=8 << 20), tile

    monkeypatch.setattr(branches, "pick_together", cut_up)
    branches.plan_forward.cache_clear()
    found = together(x, case)
    branches.plan_forward.cache_clear()
    assert_same_bits(found, expected)


def test_a_graph_replays_it() -> None:
    case = FUSED["as by default"]
    x = random_inputs(case, torch.bfloat16).map(Tensor.cuda)
    expected = together(x, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = together(x, case)
    for _ in range(3):
        for y in found.values():
            y.fill_(float("nan"))
        graph.replay()
        assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*FUSED, *APART])
def test_attention_and_every_gradient(name: str, dtype: str, taken: list[bool]) -> None:
    case = (FUSED | APART)[name]
    gates = torch.rand(case.batch, case.length, case.n_heads, 3, device="cuda")
    ours, again, exact, plain = whole_results(case, DTYPES[dtype], "triton", gates)
    assert taken == [name in FUSED] * 2
    assert_same_bits(ours, again)
    assert_close_to_fp64(ours, exact, plain, case)


def test_later_queries_are_those_of_the_whole(taken: list[bool]) -> None:
    """With `q_start`, branch by branch."""
    x, start = random_inputs(FUSED["as by default"], torch.bfloat16).map(Tensor.cuda), 1777
    at = torch.tensor([start], dtype=torch.int32, device="cuda")
    expected, later = default_attention(x)[:, start:], default_attention(x, start, q_start=at, window_start=at)
    assert taken == [True, False]
    assert (later - expected).float().norm() <= 1e-2 * expected.float().norm()


def test_the_op_launches_one_kernel_for_both() -> None:
    x = random_inputs(FUSED["as by default"], torch.bfloat16).map(Tensor.cuda)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        default_attention(x)
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["hopper_selected_sliding_kernel"] == counts["block_kernel"] == 1
    # That of the compressed branch.
    assert counts["hopper_forward_kernel"] == 1
    assert "common_kernel" not in counts
