"""Block selection: Eq. 8 to 12 of the paper, with ties and forced blocks made exact.

Every sum that decides a selection has a fixed order, written out as additions of whole tensors. The order in which a
matmul adds depends on the place and the number of rows: equal keys would get different scores, and a cached step other
scores than the full sequence.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from nsa.reference.visibility import locate_compressed, locate_queries, sees_compressed


def overlap_weights(n_compressed: int, n_blocks: int, block: int, stride: int, select_block: int) -> Tensor:
    """How far compressed blocks and selection blocks overlap (Eq. 9).

    Args:
        n_compressed, n_blocks: Numbers of compressed and of selection blocks.
        block, stride, select_block: In tokens.

    Returns:
        `[N, J]`: the tokens that block `i` and selection block `j` share, in units of the stride.
    """
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
    """The importance of each selection block: the compressed attention of a group that falls on it (Eq. 8 to 10).

    Args:
        q: `[B,S,Hq,Dk]`.
        k_cmp: `[B,N,G,Dk]`.
        lse: `[B,S,Hq]`, of the compressed branch.
        block: Tokens per compressed block.
        stride: Tokens between the starts of two compressed blocks.
        select_block: Tokens per selection block.

    Returns:
        `[B,S,G,J]`. Blocks whose compressed blocks have the same probabilities and overlaps, in the same order, are
        bitwise equal.
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

    # The index in the document decides which selection blocks a compressed block overlaps.
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
    """Enough selection blocks for every query; with a cache, `k_cmp` bounds the length."""
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
    """The blocks that each group of each query reads.

    The first `n_init` blocks and the last `n_local`, the query's own included, are always selected, the rest by
    importance, ties to the lower index. Not differentiable.

    Args:
        q: `[B,S,Hq,Dk]`.
        k_cmp: `[B,N,G,Dk]`.
        lse: `[B,S,Hq]`, of the compressed branch.
        block: Tokens per compressed block.
        stride: Tokens between the starts of two compressed blocks.
        select_block: Tokens per selection block.
        n_select: Blocks to select, forced ones included.
        n_init: First blocks that are forced.
        n_local: Last blocks that are forced.

    Returns:
        int32 `[B,S,G,n_select]`, ascending, padded with -1 at the end.
    """
    with torch.no_grad():
        blocks = {"block": block, "stride": stride, "select_block": select_block}
        importance = selection_importance(q, k_cmp, lse, **blocks, cu_seqlens=cu_seqlens, q_start=q_start, scale=scale)
        n_blocks = importance.shape[-1]
        _, t = locate_queries(q, cu_seqlens, q_start)
        own = (t // select_block)[:, :, None, None]
        j = torch.arange(n_blocks, device=q.device)
        candidate = j <= own
        forced = candidate & ((j < n_init) | (j > own - n_local))
        importance = importance.masked_fill(forced, float("inf")).masked_fill(~candidate, float("-inf"))

        # A stable sort keeps the lower index first among equals.
        index = importance.argsort(dim=-1, descending=True, stable=True)[..., :n_select]
        index = index.where(candidate.expand_as(importance).gather(-1, index), n_blocks).sort(dim=-1).values
        index = torch.nn.functional.pad(index, (0, n_select - index.shape[-1]), value=n_blocks)
        return index.where(index < n_blocks, -1).int()
