"""Which blocks a query reads in full: Eq. 8 to 12 of the paper, with ties and forced blocks made exact.

Every sum that decides a selection has a fixed order, written out as additions of whole tensors. The order in which a
matmul adds depends on where a row lies and on how many there are: keys that are equal would get scores that are not,
and a cached step other ones than the whole sequence.
"""

from __future__ import annotations

from functools import reduce

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
    """`[B,S,G,J]`: how much of a group's compressed attention falls on each selection block (Eq. 8 to 10).

    Blocks whose compressed blocks have equal probabilities and overlaps, in the same order, are equal to the last bit.
    """
    n_groups, n_cmp = k_cmp.shape[2], k_cmp.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    visible = sees_compressed(q, n_cmp, block, stride, cu_seqlens, q_start)[:, :, None, None]

    # [B,S,G,h,N], feature by feature
    features_q = q.to(lse.dtype).unflatten(2, (n_groups, -1))[..., None].unbind(dim=-2)
    features_k = k_cmp.to(lse.dtype).transpose(1, 2)[:, None, :, None].unbind(dim=-1)
    scores = reduce(torch.add, (a * b for a, b in zip(features_q, features_k, strict=True))) * scale
    p = (scores - lse.unflatten(2, (n_groups, -1))[..., None]).exp().where(visible, 0.0)
    # [B,S,G,N], head by head
    p = reduce(torch.add, p.unbind(dim=3))

    # A block's place in its own document decides which selection blocks it overlaps.
    _, inner = locate_compressed(n_cmp, block, stride, cu_seqlens, q.device)
    n_blocks = n_selection_blocks(q, k_cmp, block, stride, select_block, q_start)
    weights = overlap_weights(n_cmp, n_blocks, block, stride, select_block).to(p)
    importance = p.new_zeros(*p.shape[:3], n_blocks)
    for column, i in enumerate(inner.tolist()):
        if i >= 0:
            reached = slice(i * stride // select_block, -(-(i * stride + block) // select_block))
            importance[..., reached] += p[..., column, None] * weights[i, reached]
    return importance


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
