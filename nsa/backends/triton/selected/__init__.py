"""The selected branch: which of the three forward methods, which tiles, and the cached plans.

The queries of a short sequence select a good part of the blocks before them: `dense` reads all of those, masked, which
is cheapest up to a measured number of blocks. A longer one goes by `query` or by `block`.

Per (query, block) `query` reads `2 * l_sel * D` elements through the L2, `block` moves `3 * h * D` through memory, half
as fast. On an H200 at 65,536 tokens `block` is faster at 4, 6 and 16 heads per group (docs/kernels.md); past that
`query` reads less than `block` moves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.backends.gluon.tiles import BlockBackwardTile, layouts, pick_block_backward, pick_block_forward
from nsa.backends.problem import Problem
from nsa.backends.triton import tuning
from nsa.backends.triton.launch import MAX_PLANS, Layout, layout, new_layout
from nsa.backends.triton.selected.backward import BlockBackward, SelectedBackwardTile
from nsa.backends.triton.selected.dense import DenseForward, dense_tile
from nsa.backends.triton.selected.forward import BlockForward, HopperForwardTile, QueryForward, SelectedForwardTile
from nsa.backends.triton.selected.index import Shapes, block_tables, halve_blocks
from nsa.backends.triton.tiles import capability, row_contiguous
from nsa.sequences import Saved, Selected, Upstream

# Elements of a block's keys past which its two halves are read as blocks of their own, if they are not short already.
LARGEST_BLOCK = 64 * 128


def pick_forward(
    heads: int, d_k: int, d_v: int, dtype: torch.dtype, method: str | None = None, gpu: tuple[int, int] = (9, 0)
) -> SelectedForwardTile:
    method = method or ("query" if heads >= tuning.tuned().threshold("query_from_heads", gpu) else "block")
    if method not in ("query", "block"):
        raise ValueError(f"method is {method!r}; accepted: 'query', 'block', 'dense'")
    return tuning.pick_tile(f"selected-forward-{method}", SelectedForwardTile, gpu, d_k, d_v, dtype)


def pick_hopper(tile: SelectedForwardTile, shapes: Shapes) -> SelectedForwardTile:
    """The `tile` of `block`, with Gluon's kernel where that one runs."""
    attend = pick_block_forward(shapes.q, shapes.k, shapes.v, shapes.select_block)
    return tile if attend is None else HopperForwardTile(**vars(tile), attend=attend)


def pick_backward(d_k: int, d_v: int, dtype: torch.dtype, gpu: tuple[int, int] = (9, 0)) -> SelectedBackwardTile:
    return tuning.pick_tile("selected-backward", SelectedBackwardTile, gpu, d_k, d_v, dtype)


def candidates() -> list[SelectedForwardTile | SelectedBackwardTile]:
    """Tiles worth measuring on an H200, besides those that `pick_forward` and `pick_backward` give."""
    query = SelectedForwardTile("query")
    block = SelectedForwardTile("block")
    gathered = replace(block, num_stages=2, common_m=64, common_warps=4, common_stages=2)
    backward = SelectedBackwardTile()
    return [
        query,
        replace(query, common_m=0),
        replace(query, num_warps=2),
        replace(query, num_stages=4),
        replace(query, blocks=2, num_stages=2),
        replace(query, common_m=64, common_warps=4),
        block,
        replace(block, common_m=64, common_warps=4),
        replace(block, common_m=64, common_warps=4, common_stages=2),
        replace(block, segment=1024),
        replace(block, segment=8192),
        replace(block, block_m=128, num_warps=8, num_stages=2),
        replace(block, num_stages=2),
        *(replace(gathered, scratch=size << 30) for size in (1, 2, 4)),
        replace(gathered, scratch=2 << 30, num_stages=3),
        replace(gathered, scratch=2 << 30, common_stages=1, common_registers=168),
        backward,
        replace(backward, block_m=64),
        replace(backward, block_m=64, num_warps=8),
        replace(backward, num_stages=2),
        replace(backward, num_stages=4),
        replace(backward, segment=2048),
        replace(backward, segment=16384),
    ]


def fit_blocks(shapes: Shapes, max_block_keys: int) -> tuple[Shapes, int]:
    """The selection in blocks whose keys and values fit a CTA, and how often blocks are halved for that."""
    longest, halvings = max(max_block_keys, LARGEST_BLOCK // max(shapes.d_k, shapes.d_v)), 0
    while shapes.select_block > longest and shapes.select_block % 2 == 0:
        shapes, halvings = shapes.with_indices(2 * shapes.n_select, shapes.select_block // 2), halvings + 1
    return shapes, halvings


def is_short(shapes: Shapes) -> bool:
    """Whether there are so few blocks per selected one that it is cheapest to read them all."""
    most = tuning.tuned().threshold("dense_up_to_blocks", capability(shapes.q.device))
    return shapes.n_documents is None and shapes.n_keys <= most * shapes.n_select * shapes.select_block


def is_step(shapes: Shapes) -> bool:
    """Whether there are so few queries that most blocks are read by none, and the rest by hardly more than one."""
    return shapes.offset and shapes.n_tokens * shapes.n_select <= shapes.n_blocks


class SelectedForwardPlan(NamedTuple):
    shape: tuple[int, ...]
    select_block: int
    # How often blocks are halved.
    halvings: int
    run: DenseForward | BlockForward | QueryForward | None


@lru_cache(maxsize=MAX_PLANS)
def plan_forward(
    q: Layout, k: Layout, v: Layout, indices: Layout, select_block: int, n_documents: int | None, offset: bool,
    scale: float, tile: SelectedForwardTile | None, method: str | None,
) -> SelectedForwardPlan:  # fmt: skip
    shapes = Shapes(q, k, v, indices, select_block, n_documents, offset)
    given, requested = tile is not None, tile is not None or method is not None
    other = None if method == "dense" else method
    tile = tile or pick_forward(shapes.heads, shapes.d_k, shapes.d_v, q.dtype, other, capability(q.device))
    shapes, halvings = fit_blocks(shapes, tile.max_block_keys)
    shape = (*q.shape[:3], shapes.d_v)
    run: DenseForward | BlockForward | QueryForward | None = None
    if 0 not in shape:
        if not requested and is_short(shapes):
            method = "dense"
        elif not requested and is_step(shapes):
            tile = replace(tile, method="query", common_m=0)
        dense = dense_tile(shapes) if method == "dense" else None
        if dense is not None:
            run = DenseForward(shapes, scale, dense)
        elif tile.method == "query":
            run = QueryForward(shapes, scale, tile)
        else:
            run = BlockForward(shapes, scale, tile if given else pick_hopper(tile, shapes))
    return SelectedForwardPlan(shape, shapes.select_block, halvings, run)


def forward_in_gluon(problem: Problem, select_block: int, n_select: int) -> bool:
    """Whether the plan of a forward pass over contiguous tensors has Gluon's kernel."""
    q, k = layouts(problem)
    indices = new_layout((*q.shape[:2], problem.n_groups, n_select), torch.int32, q.device)
    # As many documents as any: they decide about sizes alone.
    n_documents = 1 if problem.varlen else None
    run = plan_forward(q, k, k, indices, select_block, n_documents, problem.cached, 1.0, None, None).run
    return isinstance(run, BlockForward) and isinstance(run.tile, HopperForwardTile)


def selected_forward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, branch: Selected, tile: SelectedForwardTile | None = None,
    method: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`o [B, S, Hq, D_v]` and natural `lse [B, S, Hq]`, fp32, from `q [B, S, Hq, D_k]`, `k, v [B, N, G, D]` and
    `indices [B, S, G, n]`, int32, ascending and distinct, -1 for none.

    `tile` and `method` ("query", "block" or "dense") take the place of the tuned and the fastest one. A `tile` is of
    Triton's kernels, but for a `HopperForwardTile`.
    """
    sequences = branch.sequences
    cu_seqlens = sequences.cu_seqlens
    q, k, v, indices = row_contiguous(q), row_contiguous(k), row_contiguous(v), row_contiguous(indices)
    plan = plan_forward(
        layout(q), layout(k), layout(v), layout(indices), branch.select_block,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1, sequences.q_start is not None, branch.scale, tile,
        method,
    )  # fmt: skip
    o = torch.empty(plan.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(plan.shape[:3], dtype=torch.float32, device=q.device)
    if plan.run is not None:
        for _ in range(plan.halvings):
            indices = halve_blocks(indices)
        plan.run(q, k, v, indices, block_tables(sequences, k.shape[1], plan.select_block), o, lse)
    return o, lse


class BackwardPlan(NamedTuple):
    select_block: int
    halvings: int
    run: BlockBackward


@lru_cache(maxsize=MAX_PLANS)
def plan_backward(
    do: Layout, q: Layout, k: Layout, v: Layout, indices: Layout, select_block: int, n_documents: int | None,
    offset: bool, scale: float, tile: SelectedBackwardTile | BlockBackwardTile | None,
) -> BackwardPlan:  # fmt: skip
    shapes = Shapes(q, k, v, indices, select_block, n_documents, offset)
    tile = tile or pick_block_backward(do, q, k, v, select_block)
    tile = tile or pick_backward(shapes.d_k, shapes.d_v, q.dtype, capability(q.device))
    shapes, halvings = fit_blocks(shapes, tile.max_block_keys)
    return BackwardPlan(shapes.select_block, halvings, BlockBackward(shapes, do, scale, tile))


def selected_backward(
    upstream: Upstream, saved: Saved, branch: Selected, tile: SelectedBackwardTile | BlockBackwardTile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `selected_forward`, or of `gate * o` with `upstream.gate`.

    Returns:
        `dq, dk, dv`, contiguous, in their inputs' dtypes; `dq` is `upstream.dq`, added to, if there is one.
    """
    sequences = branch.sequences
    assert saved.indices is not None
    cu_seqlens = sequences.cu_seqlens
    do, q, k, v = row_contiguous(upstream.do), row_contiguous(saved.q), row_contiguous(saved.k), row_contiguous(saved.v)
    indices = row_contiguous(saved.indices)
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    plan = plan_backward(
        layout(do), layout(q), layout(k), layout(v), layout(indices), branch.select_block,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1, sequences.q_start is not None, branch.scale, tile,
    )  # fmt: skip
    for _ in range(plan.halvings):
        indices = halve_blocks(indices)
    tables = block_tables(sequences, k.shape[1], plan.select_block)
    dq, dk, dv = plan.run(upstream._replace(do=do), saved._replace(q=q, k=k, v=v), indices, tables)
    return (dq if upstream.dq is None else upstream.dq.add_(dq)), dk, dv
