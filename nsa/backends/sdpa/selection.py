"""Block selection: compressed attention summed over a group, pooled onto selection blocks, the top `n_select` kept.

Equal probabilities must pool to equal importance wherever a block is, or ties would not go to the lower index. So sums
are additions of whole tensors: `Tensor.sum` adds the last columns of a row in another order than the first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.backends.sdpa.layout import group_keys, group_lse, group_queries, score_budget
from nsa.backends.sdpa.ranged import TileGroup, compressed_tiling
from nsa.backends.sdpa.tile import plain_scores
from nsa.sequences import Selection


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, selection: Selection) -> Tensor:
    batch, length, n_heads, _ = q.shape
    n_cmp, n_groups = k_cmp.shape[1:3]
    sequences, stride, positions = selection.sequences, selection.stride, selection.sequences.positions
    select_block, n_select = selection.select_block, selection.n_select
    tiling = compressed_tiling(selection, n_cmp)
    qg, kg = group_queries(q, n_groups), group_keys(k_cmp)
    lse_g = group_lse(lse, n_groups)
    indices = torch.empty(batch, length, n_groups, n_select, dtype=torch.int32, device=q.device)
    for group in tiling.groups(batch * n_heads, score_budget(q, fused=False)):
        c0, c1 = group.c0, group.c1
        longest = c1 if sequences.q_start is None else selection.capacity(n_cmp)
        p = group_probabilities(group, qg, kg, lse_g, selection.scale).unflatten(0, (batch, n_groups))
        if sequences.cu_seqlens is not None:
            p = shift_to_document_start(p, tiling.ranges.lo[:, c0:c1])
        # A block longer than the sequence has no more units than the sequence.
        per_select = min(select_block // stride, -(-longest // stride))
        importance = pool_to_blocks(p, -(-longest // select_block), selection.block // stride, per_select)
        own = torch.div(positions[:, None, c0:c1, None], select_block, rounding_mode="floor")
        indices[:, c0:c1] = best_blocks(importance, own, n_select, selection.n_init, selection.n_local).transpose(1, 2)
    return indices


def group_probabilities(group: TileGroup, q: Tensor, k: Tensor, lse: Tensor, scale: float) -> Tensor:
    """`[B*G, C, K]`: compressed attention, summed over the heads of a group."""
    if group.n_keys == 0:
        return lse.new_zeros(q.shape[0], group.c1 - group.c0, 0)
    scores = plain_scores(group.tiles(q), group.keys(k), group.hidden(q.shape[0]), scale)
    p = scores.sub_(group.tiles(lse, fill=float("inf"))[..., None]).exp_()
    return group.queries(sum_in_halves(p, dim=2))


def sum_in_halves(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim`, in an order that depends on its size alone."""
    while x.shape[dim] > 1:
        half = x.shape[dim] // 2
        first, second, rest = x.split([half, half, x.shape[dim] - 2 * half], dim=dim)
        x = torch.cat([first + second, rest], dim=dim)
    return x.squeeze(dim)


def shift_to_document_start(p: Tensor, lo: Tensor) -> Tensor:
    """Shift each query's `p [B,G,C,K]` so that its document's first block is column 0, zeros past the last column."""
    n_columns = p.shape[-1]
    column = lo[:, None, :, None] + torch.arange(n_columns, device=p.device)
    inside = column < n_columns
    return p.gather(-1, column.clamp_max(max(n_columns - 1, 0)).expand_as(p)).where(inside, 0.0)


def pool_to_blocks(p: Tensor, n_blocks: int, strides_per_block: int, strides_per_select: int) -> Tensor:
    """Eq. 9 on units of one stride: a compressed block adds its mass to each unit that it covers, a selection block
    sums its units. A pair is thus counted once per shared unit, which is the overlap in strides."""
    n_units = n_blocks * strides_per_select
    p = F.pad(p, (strides_per_block - 1, max(0, n_units - p.shape[-1])))
    units = p[..., strides_per_block - 1 :][..., :n_units].clone()
    for shift in range(1, strides_per_block):
        units += p[..., strides_per_block - 1 - shift :][..., :n_units]
    return sum_in_halves(units.unflatten(-1, (n_blocks, strides_per_select)), dim=-1)


def best_blocks(importance: Tensor, own: Tensor, n_select: int, n_init: int, n_local: int) -> Tensor:
    """`[..., n_select]` int32: forced blocks, then by importance, ties to the lower index; ascending, -1 at the end."""
    n_blocks = importance.shape[-1]
    j = torch.arange(n_blocks, device=importance.device)
    importance = importance.masked_fill((j < n_init) | (j > own - n_local), float("inf"))
    importance = importance.masked_fill(j > own, float("-inf"))
    best, index = importance.sort(dim=-1, descending=True, stable=True)
    index = index[..., :n_select].masked_fill(best[..., :n_select] == float("-inf"), n_blocks).sort(dim=-1).values
    index = F.pad(index, (0, n_select - index.shape[-1]), value=n_blocks)
    return index.masked_fill(index == n_blocks, -1).int()
