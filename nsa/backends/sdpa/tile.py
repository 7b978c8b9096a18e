"""Attention on a batch of tiles: each tile's queries, all heads of a group, over one shared set of keys.

Half precision on a GPU runs in torch's fused memory-efficient kernel, which stores no scores; all else is matmul, mask
and softmax. The fused kernel is called without a split over keys, so it is bitwise deterministic, and the heads of
a group share keys through a stride of zero.

A row without visible keys is undefined: the caller sets those rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nsa.dtypes import HALF_DTYPES
from nsa.sequences import Saved, Upstream

# The fused kernel has tiles in the third grid dimension, which CUDA limits.
MAX_TILES = 65_535
# It pads rows of LSEs to this many queries and rows of masks to this many keys.
LSE_ALIGNMENT = 32
MASK_ALIGNMENT = 8
NO_CUSTOM_MASK = 0


def is_fused(q: Tensor, v: Tensor) -> bool:
    """Whether the fused kernel supports these: it loads eight half-precision numbers at once."""
    return q.is_cuda and q.dtype in HALF_DTYPES and q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0


def tile_forward(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, ...]:
    """`q [T,M,h,Dk]`, `k [T,N,Dk]`, `v [T,N,Dv]`, `hidden [T,M,N]`: `o [T,M,h,Dv]`, and `lse [T,M,h]` at least fp32."""
    if not is_fused(q, v):
        return plain_forward(q, k, v, hidden, scale)
    return join_tiles([fused_forward(*part, scale=scale) for part in split_tiles(q, k, v, hidden)])


def tile_backward(
    upstream: Upstream, saved: Saved, hidden: Tensor, scale: float, row_sum: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Tensor, ...]:
    """Gradients of `q` `[T,M,h,Dk]`, and of `k` and `v` `[T,N,D]` summed over heads.

    `o` and `lse` are those of the whole row; `lse = +inf` marks an empty row. Where tiles share a row, `row_sum`
    turns sums over each tile's keys, `[T,M,h]`, into sums over all keys of the row.
    """
    if upstream.dlse is not None or not is_fused(saved.q, saved.v):
        return plain_backward(upstream, saved, hidden, scale, row_sum)
    parts = split_tiles(upstream.do, *saved[:5], hidden)
    return join_tiles([fused_backward(*part, scale=scale) for part in parts])


def split_tiles(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    tiles = tensors[0].shape[0]
    if tiles <= MAX_TILES:
        return [tensors]
    return list(zip(*(x.split(MAX_TILES) for x in tensors), strict=True))


def join_tiles(results: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return results[0] if len(results) == 1 else tuple(torch.cat(tiles) for tiles in zip(*results, strict=True))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched `a @ b` with an fp32 result for half precision."""
    if a.dtype in HALF_DTYPES:
        return torch.bmm(a, b, out_dtype=torch.float32)
    # On a CPU bmm can be many times slower on a transposed operand than on a copy of it.
    return torch.bmm(a, b) if b.is_cuda else torch.bmm(a.contiguous(), b.contiguous())


def plain_scores(q: Tensor, k: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """`[T, M, h, N]` scaled scores, -inf where hidden; equal keys have equal scores."""
    tiles, queries, heads, _ = q.shape
    rows = q.flatten(1, 2)
    if rows.shape[1] == 1:
        # A matrix-vector matmul would sum the last keys in another order than the others.
        rows = rows.expand(-1, 2, -1)
    scores = matmul(rows, k.transpose(1, 2))[:, : queries * heads].mul_(scale).view(tiles, queries, heads, k.shape[1])
    return scores.masked_fill_(hidden[:, :, None], float("-inf"))


def plain_forward(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = plain_scores(q, k, hidden, scale)
    p = scores.softmax(dim=-1)
    # The largest probability is 1 / sum(exp(s - max)), which gives the LSE at the cost of two maxima. It is computed in
    # fp64, because each rounding here becomes a relative error of every probability in the backward pass.
    lse = scores.amax(dim=-1).double() - p.amax(dim=-1).double().log()
    o = matmul(p.flatten(1, 2).to(v.dtype), v)
    return o.view(*q.shape[:3], -1), lse


def plain_backward(
    upstream: Upstream, saved: Saved, hidden: Tensor, scale: float, row_sum: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """A backward pass as exact as autograd through a softmax, however large the scores are.

    The rounding of `lse` would be a relative error of every probability, so they are divided by their sum, which would
    otherwise be 1. The mean of `dp` is summed from the products that it is subtracted from, not taken from `do . o`:
    where one key has all the weight, the two then cancel.
    """
    (do, dlse, *_), (q, k, v, _, lse, _) = upstream, saved
    p = plain_scores(q, k, hidden, scale).sub_(lse[..., None]).exp_()
    total = row_sum(p.sum(dim=-1))
    p.div_(total.masked_fill_(total == 0.0, 1.0)[..., None])
    ds = matmul(do.flatten(1, 2), v.transpose(1, 2)).view_as(p)
    ds.sub_(row_sum((p * ds).sum(dim=-1))[..., None])
    if dlse is not None:
        ds.add_(dlse[..., None])
    ds.mul_(p).mul_(scale)
    p_rows, ds_rows = p.flatten(1, 2).to(v.dtype), ds.flatten(1, 2).to(k.dtype)
    dq = matmul(ds_rows, k).view(*q.shape)
    dk = matmul(ds_rows.transpose(1, 2), q.flatten(1, 2))
    dv = matmul(p_rows.transpose(1, 2), do.flatten(1, 2))
    return dq, dk, dv


def fused_operands(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys, values and the mask, `[T, h, M, N]` of 0 and -inf with padded rows, for the fused kernel; the
    heads of a group share keys and mask by a stride of zero."""
    k, v = (x[:, :, None].expand(-1, -1, q.shape[2], -1) for x in (k, v))
    n_keys = hidden.shape[-1]
    padded = -(-n_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
    bias = torch.zeros(*hidden.shape[:-1], padded, dtype=q.dtype, device=q.device)[..., :n_keys]
    bias.masked_fill_(hidden, float("-inf"))
    return q, k, v, bias[:, None].expand(q.shape[0], q.shape[2], -1, -1)


def fused_forward(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    operands = fused_operands(q, k, v, hidden)
    # No offsets or longest lengths, no dropout; with the LSE.
    rest = (None, None, None, None, 0.0, NO_CUSTOM_MASK, True)
    o, lse, *_ = torch.ops.aten._efficient_attention_forward(*operands, *rest, scale=scale)
    return o, lse[..., : q.shape[1]].transpose(1, 2)


def fused_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, hidden: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    operands, lengths = fused_operands(q, k, v, hidden), (q.shape[1], k.shape[1])
    padding = -q.shape[1] % LSE_ALIGNMENT
    lse = torch.nn.functional.pad(lse.transpose(1, 2), (0, padding), value=float("inf")).contiguous()
    no_seed = torch.empty((), dtype=torch.long, device=q.device)
    no_dropout = (0.0, no_seed, no_seed)
    options = {"scale": scale, "num_splits_key": 1}
    dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
        do, *operands, o, None, None, *lengths, lse, *no_dropout, NO_CUSTOM_MASK, False, **options
    )
    return dq, dk.sum(dim=2, dtype=torch.float32), dv.sum(dim=2, dtype=torch.float32)
