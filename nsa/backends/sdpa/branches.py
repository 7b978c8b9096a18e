"""The compressed and the sliding branch, each as the ranges its queries see."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.backends.sdpa.ranged import Ranges, ranged_backward, ranged_forward
from nsa.geometry import compressed_offsets, documents, n_compressed_of, query_positions

# Longest chunk of queries for branches whose key slice hardly grows with the chunk.
LONG_CHUNK = 4096


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

    def span(c0: int, c1: int) -> tuple[int, int]:
        # Every block takes a whole stride of tokens before its last one, in a pack too.
        return 0, n_keys if q_start is not None else min(n_keys, c1 // stride)

    return Ranges(lo, (lo + complete).clamp_max(n_keys), span, LONG_CHUNK)


def sliding_ranges(
    q: Tensor, n_keys: int, window: int, cu_seqlens: Tensor | None, q_start: Tensor | None
) -> Ranges:
    """A query sees its own token and the `window - 1` before it, within its document."""
    batch, length = q.shape[:2]
    hi = query_positions(batch, length, None, q_start, q.device) + 1
    lo = (hi - window).clamp_min(0)
    if cu_seqlens is not None:
        lo = torch.maximum(lo, documents(cu_seqlens, length).start[None])

    def span(c0: int, c1: int) -> tuple[int, int]:
        return (0, n_keys) if q_start is not None else (max(0, c0 - window + 1), c1)

    # A chunk of c queries multiplies c * (c + window) scores for c * window that count.
    return Ranges(lo, hi, span, max_chunk=max(64, min(256, window)))


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
    dlse: Tensor,
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
    dlse: Tensor,
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
