"""The compressed and the sliding branch, each as the ranges its queries see."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.backends.sdpa.ranged import Ranges, ranged_backward, ranged_forward
from nsa.geometry import compressed_offsets, documents, n_compressed_of, query_positions

# Queries a tile. The window's band multiplies `tile * (tile + window)` scores for `tile * window` that count; the
# compressed branch's slice does not grow with the tile.
SLIDING_TILE = 256
COMPRESSED_TILE = 512


def compressed_ranges(
    q: Tensor, n_keys: int, block: int, stride: int, cu_seqlens: Tensor | None, q_start: Tensor | None
) -> Ranges:
    """A query sees its document's blocks from the first to the last that is complete."""
    batch, length = q.shape[:2]
    complete = n_compressed_of(query_positions(batch, length, cu_seqlens, q_start, q.device) + 1, block, stride)
    if cu_seqlens is None:
        lo = torch.zeros_like(complete)
    else:
        lo = compressed_offsets(cu_seqlens, block, stride)[documents(cu_seqlens, length).index][None]

    def width(tile: int, c1: int) -> int:
        # A block comes with a whole stride of tokens, in a pack too: no more blocks than strides before the last query.
        return n_keys if q_start is not None else min(n_keys, c1 // stride)

    hi = (lo + complete).clamp_max(n_keys)
    return Ranges(lo, hi, tile=min(COMPRESSED_TILE, length), along=False, before=0, width=width)


def sliding_ranges(q: Tensor, n_keys: int, window: int, cu_seqlens: Tensor | None, q_start: Tensor | None) -> Ranges:
    """A query sees its own token and the `window - 1` before it, within its document."""
    batch, length = q.shape[:2]
    hi = query_positions(batch, length, None, q_start, q.device) + 1
    lo = (hi - window).clamp_min(0)
    if cu_seqlens is not None:
        lo = torch.maximum(lo, documents(cu_seqlens, length).start[None])
    reach = min(window, n_keys) - 1

    def width(tile: int, c1: int) -> int:
        # The keys of a cache run ahead of the queries by at most as many as there are more of them.
        return reach + tile + n_keys - length

    return Ranges(lo, hi, tile=min(SLIDING_TILE, length), along=True, before=reach, width=width)


def compressed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    stride: int,
    scale: float,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return ranged_forward(q, k, v, compressed_ranges(q, k.shape[1], block, stride, cu_seqlens, q_start), scale)


def compressed_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    block: int,
    stride: int,
    scale: float,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    ranges = compressed_ranges(q, k.shape[1], block, stride, cu_seqlens, q_start)
    return ranged_backward(do, dlse, q, k, v, o, lse, ranges, scale)


def sliding_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return ranged_forward(q, k, v, sliding_ranges(q, k.shape[1], window, cu_seqlens, q_start), scale)


def sliding_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    ranges = sliding_ranges(q, k.shape[1], window, cu_seqlens, q_start)
    return ranged_backward(do, dlse, q, k, v, o, lse, ranges, scale)
