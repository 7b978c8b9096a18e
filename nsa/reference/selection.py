"""Which blocks a query reads in full: Eq. 8 to 12 of the paper, with ties and forced blocks made exact."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.reference.visibility import locate_compressed, locate_queries, sees_compressed


def overlap_weights(n_compressed: int, n_blocks: int, block: int, stride: int, select_block: int) -> Tensor:
    """`[N, J]`: tokens shared by compressed block `i` and selection block `j`, in units of the stride (Eq. 9)."""
    start = torch.arange(n_compressed)[:, None] * stride
    select_start = torch.arange(n_blocks) * select_block
    shared = torch.minimum(start + block, select_start + select_block) - torch.maximum(start, select_start)
    return shared.clamp_min(0) // stride


def selection_importance(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    block: int,
    stride: int,
    select_block: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`[B,S,G,J]`: how much of a group's compressed attention falls on each selection block (Eq. 8 to 10)."""
    n_groups, n_cmp = k_cmp.shape[2], k_cmp.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    visible = sees_compressed(q, n_cmp, block, stride, cu_seqlens, q_start)[:, :, None, None]

    scores = torch.einsum("bsghd,bngd->bsghn", q.unflatten(2, (n_groups, -1)), k_cmp).to(lse.dtype) * scale
    p = (scores - lse.unflatten(2, (n_groups, -1))[..., None]).exp().where(visible, 0.0)

    # A block's place in its own document decides which selection blocks it overlaps.
    _, inner = locate_compressed(n_cmp, block, stride, cu_seqlens, q.device)
    n_blocks = n_selection_blocks(q, k_cmp, block, stride, select_block, q_start)
    weights = overlap_weights(n_cmp, n_blocks, block, stride, select_block).to(p)
    return torch.einsum("bsghn,nj->bsgj", p, weights[inner])


def n_selection_blocks(
    q: Tensor, k_cmp: Tensor, block: int, stride: int, select_block: int, q_start: Tensor | None
) -> int:
    """Enough selection blocks for every query; `k_cmp` tells how long a cached sequence can be."""
    length = q.shape[1] if q_start is None else k_cmp.shape[1] * stride + block - 1
    return -(-length // select_block)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    block: int,
    stride: int,
    select_block: int,
    n_select: int,
    n_init: int,
    n_local: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`[B,S,G,n_select]` int32: the blocks each group of each query reads, ascending, -1 where there are fewer.

    The first `n_init` blocks and the `n_local` that end at the query's own are always taken, the rest by importance,
    ties to the lower index. The choice is not differentiable.
    """
    with torch.no_grad():
        importance = selection_importance(
            q,
            k_cmp,
            lse,
            block=block,
            stride=stride,
            select_block=select_block,
            cu_seqlens=cu_seqlens,
            q_start=q_start,
            scale=scale,
        )
        n_blocks = importance.shape[-1]
        _, t = locate_queries(q, cu_seqlens, q_start)
        own = (t // select_block)[:, :, None, None]
        j = torch.arange(n_blocks, device=q.device)
        candidate = j <= own
        forced = candidate & ((j < n_init) | (j > own - n_local))
        importance = importance.masked_fill(forced, float("inf")).masked_fill(~candidate, float("-inf"))

        # A stable sort keeps the lower index first among equals.
        chosen = importance.argsort(dim=-1, descending=True, stable=True)[..., :n_select]
        chosen = chosen.where(candidate.expand_as(importance).gather(-1, chosen), n_blocks).sort(dim=-1).values
        chosen = torch.nn.functional.pad(chosen, (0, n_select - chosen.shape[-1]), value=n_blocks)
        return chosen.where(chosen < n_blocks, -1).int()
