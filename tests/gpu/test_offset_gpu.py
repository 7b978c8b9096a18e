"""Queries that start at `q_start` of longer keys, on a GPU: the reference's numbers, bitwise deterministic, no waiting
for the device, and CUDA graphs whose starts change between replays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from against_fp64 import assert_close_to_fp64
from helpers import BRANCHES, Case, Inputs, assert_same_bits, attend, output_gradients, random_inputs
from torch import Tensor

from nsa import NSAAttention, NSAConfig, ops, reference

DEVICE = "cuda"
PAPER = {"block": 32, "stride": 16, "select_block": 64, "n_select": 16, "n_init": 1, "n_local": 2, "window": 512}
WIDE: dict[str, Any] = {"groups": 2, "heads": 16, "d_k": 128, "d_v": 128, **PAPER}
# The problem with all of its keys, how many queries a row has, and where those of each row start.
OFFSETS: dict[str, tuple[Case, int, tuple[int, ...]]] = {
    "a start per row": (Case(length=1500, batch=3, groups=2, heads=6, d_k=64, d_v=64, **PAPER), 333, (0, 700, 1167)),
    "a long prompt": (Case(length=5000, **WIDE), 1000, (3777,)),
    "few queries": (Case(length=2500, batch=2, **WIDE), 4, (0, 2496)),
    "documents": (Case(length=2500, documents=(300, 0, 1, 1700, 499), **WIDE), 900, (1111,)),
}


def int32(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def problem(name: str, dtype: torch.dtype) -> tuple[Case, Inputs, dict[str, Tensor | None]]:
    """A case, its queries and all of its keys, and where the queries are."""
    case, n, starts = OFFSETS[name]
    inputs = random_inputs(case, dtype).map(lambda x: x.to(DEVICE))

    def rows(x: Tensor) -> Tensor:
        return torch.stack([row[start : start + n] for row, start in zip(x, starts, strict=True)])

    queries = {x: rows(getattr(inputs, x)) for x in ("q", "indices", "gates")}
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.to(DEVICE)
    return case, inputs.but(**queries), {"cu_seqlens": cu_seqlens, "q_start": int32(starts)}


def outputs_and_gradients(module: Any, branch: str, inputs: Inputs, case: Case, **options: Any) -> dict[str, Tensor]:
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs.of(branch))
    o, lse = attend(module, branch, inputs, case, leaves, **options)
    heads = [(x, grad.to(DEVICE)) for x, grad in zip((o, lse), output_gradients(o, lse), strict=True)]
    heads = [(x, grad) for x, grad in heads if x.requires_grad]
    dq, dk, dv = torch.autograd.grad([x for x, _ in heads], leaves, [grad for _, grad in heads])
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("branch", BRANCHES)
def test_branch_matches_fp64_and_is_bitwise_deterministic(branch: str, name: str, dtype: torch.dtype) -> None:
    case, inputs, where = problem(name, dtype)
    ours, again = (outputs_and_gradients(ops, branch, inputs, case, backend="triton", **where) for _ in range(2))
    exact = outputs_and_gradients(reference, branch, inputs.to(torch.float64), case, **where)
    assert_close_to_fp64(ours, exact, outputs_and_gradients(reference, branch, inputs, case, **where), case)
    assert_same_bits(ours, again)


@pytest.mark.parametrize("name", OFFSETS)
def test_the_selection_is_the_reference_s(name: str) -> None:
    case, inputs, where = problem(name, torch.float32)
    q, k, v = inputs.of("compressed")
    _, lse = reference.compressed_attention(q, k, v, **case.compression, **where)
    ours = ops.select_blocks(q, k, lse, **case.selection, backend="triton", **where)
    exact = reference.select_blocks(q.double(), k.double(), lse.double(), **case.selection, **where)
    assert torch.equal(ours < 0, exact < 0)
    # Rounding may swap two blocks of nearly the same importance, and nothing else.
    assert (ours != exact).any(dim=-1).float().mean() < 1e-3


def whole(inputs: Inputs, case: Case, where: dict[str, Tensor | None]) -> Tensor:
    o, _ = ops.attention(
        *inputs.for_attention,
        **case.selection,
        window=case.window,
        **where,
        window_start=where["q_start"],
        backend="triton",
        strict=False,
    )
    return o


@pytest.mark.parametrize("name", OFFSETS)
def test_a_graph_serves_every_start(name: str) -> None:
    case, inputs, where = problem(name, torch.bfloat16)
    q_start = where["q_start"]
    assert q_start is not None
    # Compiled and planned before: what follows may not wait for the device, nor may a graph.
    whole(inputs, case, where)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole(inputs, case, where)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = whole(inputs, case, where)
    for moved in (0, 17):
        q_start.sub_(moved).clamp_min_(0)
        graph.replay()
        assert torch.equal(o, whole(inputs, case, where))


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_a_cache_filled_in_chunks_gives_the_whole_forward(static: bool) -> None:
    config = NSAConfig(dim=128, n_heads=12, n_kv_groups=2, d_k=64, d_v=64, backend="triton")
    layer = NSAAttention(config).to(DEVICE)
    # Short enough that every block is selected: products of other shapes round differently, and would swap near ties.
    x = torch.randn(2, 1000, 128, device=DEVICE)
    with torch.no_grad():
        expected = layer(x)
        cache = layer.new_cache(2, 1100, static=static)
        chunks = [layer(x[:, a:b], cache=cache) for a, b in pairwise([0, 512, 700, 701, 705, 1000])]
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected, atol=1e-5, rtol=1e-5)
