"""Attention on a batch of tiles: each tile's queries, all heads of a group, over one shared set of keys.

Two ways to the same result. Torch's fused memory-efficient kernel serves half precision on a GPU: no score is ever
written to memory. Everything else multiplies, masks and normalises in plain steps. The fused kernel is called so that
two runs give the same bits (no split over keys), and keys reach all heads of a group through a stride of zero.

A row that sees no key comes out undefined: the caller knows which rows those are, and sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
# The fused kernel takes tiles as the third grid dimension, which CUDA bounds.
MAX_TILES = 65_535
# Its normalisers lie in rows padded to this many queries, its masks in rows padded to this many keys.
LSE_ALIGNMENT = 32
MASK_ALIGNMENT = 8
NO_CUSTOM_MASK = 0


def is_fused(q: Tensor, v: Tensor) -> bool:
    """Whether the fused kernel takes these: its loads are eight half-precision numbers wide."""
    return q.is_cuda and q.dtype in HALF and q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0


def tile_forward(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, ...]:
    """`q [T,M,h,Dk]`, `k [T,N,Dk]`, `v [T,N,Dv]`, `hidden [T,M,N]`: `o [T,M,h,Dv]`, and `lse [T,M,h]` at least fp32."""
    if not is_fused(q, v):
        return plain_forward(q, k, v, hidden, scale)
    parts = [fused_forward(*part, scale=scale) for part in split_tiles(q, k, v, hidden)]
    return join(parts)


def tile_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    hidden: Tensor,
    scale: float,
    row_sum: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of `q` `[T,M,h,Dk]`, of `k` and `v` `[T,N,D]` summed over heads.

    `o` and `lse` are those of the whole row; `lse = +inf` marks an empty row. Where the tiles hold parts of rows,
    `row_sum` takes sums over each tile's keys, `[T,M,h]`, to those over all keys of the same row.
    """
    if dlse is not None or not is_fused(q, v):
        return plain_backward(do, dlse, q, k, v, lse, hidden, scale, row_sum or (lambda x: x))
    parts = [fused_backward(*part, scale=scale) for part in split_tiles(do, q, k, v, o, lse, hidden)]
    return join(parts)


def split_tiles(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    tiles = tensors[0].shape[0]
    if tiles <= MAX_TILES:
        return [tensors]
    return list(zip(*(x.split(MAX_TILES) for x in tensors), strict=True))


def join(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched `a @ b` whose result is not rounded to half precision."""
    if a.dtype in HALF:
        return torch.bmm(a, b, out_dtype=torch.float32)
    # Torch's batched product on a CPU can be many times slower on a transposed operand than on a copy of it.
    return torch.bmm(a, b) if b.is_cuda else torch.bmm(a.contiguous(), b.contiguous())


def plain_scores(q: Tensor, k: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """`[T, M, h, N]` scaled scores, -inf where hidden; keys that are equal have equal scores."""
    tiles, queries, heads, _ = q.shape
    rows = q.flatten(1, 2)
    if rows.shape[1] == 1:
        # Never a single row: a matrix-vector product sums the last keys in another order than the others.
        rows = rows.expand(-1, 2, -1)
    scores = product(rows, k.transpose(1, 2))[:, : queries * heads].mul_(scale).view(tiles, queries, heads, k.shape[1])
    return scores.masked_fill_(hidden[:, :, None], float("-inf"))


def plain_forward(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = plain_scores(q, k, hidden, scale)
    p = scores.softmax(dim=-1)
    # The largest probability is 1 / sum(exp(s - max)): the normaliser for the price of two maxima. It is put together
    # in fp64, because the backward pass raises e to it: every rounding here is a relative error of each probability.
    lse = scores.amax(dim=-1).double() - p.amax(dim=-1).double().log()
    o = product(p.flatten(1, 2).to(v.dtype), v)
    return o.view(*q.shape[:3], -1), lse


def plain_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    hidden: Tensor,
    scale: float,
    row_sum: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """As exact as autograd through a softmax, however large the scores are.

    `lse` is rounded by up to `eps * |lse|`, which would be a relative error of every probability: they are divided by
    their sum, which would be 1. And the mean of `dp` is summed from the same products that it is subtracted from, not
    taken from `do . o`: where one key has all the weight, the two then cancel.
    """
    p = plain_scores(q, k, hidden, scale).sub_(lse[..., None]).exp_()
    total = row_sum(p.sum(dim=-1))
    p.div_(total.masked_fill_(total == 0.0, 1.0)[..., None])
    ds = product(do.flatten(1, 2), v.transpose(1, 2)).view_as(p)
    ds.sub_(row_sum((p * ds).sum(dim=-1))[..., None])
    if dlse is not None:
        ds.add_(dlse[..., None])
    ds.mul_(p).mul_(scale)
    p_rows, ds_rows = p.flatten(1, 2).to(v.dtype), ds.flatten(1, 2).to(k.dtype)
    dq = product(ds_rows, k).view(*q.shape)
    dk = product(ds_rows.transpose(1, 2), q.flatten(1, 2))
    dv = product(p_rows.transpose(1, 2), do.flatten(1, 2))
    return dq, dk, dv


def fused_bias(q: Tensor, hidden: Tensor) -> Tensor:
    """The mask as the kernel reads it: `[T, h, M, N]` of 0 and -inf, rows padded, tiles and heads by stride zero."""
    n_keys = hidden.shape[-1]
    padded = -(-n_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
    bias = torch.zeros(*hidden.shape[:-1], padded, dtype=q.dtype, device=q.device)[..., :n_keys]
    bias.masked_fill_(hidden, float("-inf"))
    return bias[:, None].expand(q.shape[0], q.shape[2], -1, -1)


def fused_forward(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    queries, heads = q.shape[1:3]
    o, lse, *_ = torch.ops.aten._efficient_attention_forward(
        q,
        k[:, :, None].expand(-1, -1, heads, -1),
        v[:, :, None].expand(-1, -1, heads, -1),
        fused_bias(q, hidden),
        None,
        None,
        None,
        None,
        0.0,
        NO_CUSTOM_MASK,
        True,
        scale=scale,
    )
    return o, lse[..., :queries].transpose(1, 2)


def fused_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, hidden: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    queries, heads = q.shape[1:3]
    n_keys = k.shape[1]
    padding = -queries % LSE_ALIGNMENT
    lse = torch.nn.functional.pad(lse.transpose(1, 2), (0, padding), value=float("inf")).contiguous()
    no_dropout = torch.empty((), dtype=torch.long, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
        do,
        q,
        k[:, :, None].expand(-1, -1, heads, -1),
        v[:, :, None].expand(-1, -1, heads, -1),
        fused_bias(q, hidden),
        o,
        None,
        None,
        queries,
        n_keys,
        lse,
        0.0,
        no_dropout,
        no_dropout,
        NO_CUSTOM_MASK,
        False,
        scale=scale,
        num_splits_key=1,
    )
    return dq, dk.sum(dim=2, dtype=torch.float32), dv.sum(dim=2, dtype=torch.float32)
