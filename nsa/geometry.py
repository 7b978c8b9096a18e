"""Where blocks and documents lie: integer arithmetic on lengths, shared by every path but the reference.

Positions are counted within a document. A packed batch (`B = 1`, `cu_seqlens`) lays its documents, and likewise their
compressed blocks and their selection blocks, one after the other; nothing here reads a value back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def n_compressed(length: int, block: int, stride: int) -> int:
    """How many whole compression blocks a sequence of `length` tokens has."""
    return 0 if length < block else (length - block) // stride + 1


def n_compressed_of(lengths: Tensor, block: int, stride: int) -> Tensor:
    return (torch.div(lengths - block, stride, rounding_mode="floor") + 1).clamp_min(0)


def exclusive_offsets(counts: Tensor) -> Tensor:
    """`[n]` counts to `[n + 1]` offsets that start at 0."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


@dataclass(frozen=True)
class Documents:
    """For every query of a packed row: which document it is in, where that starts, how far into it the query is."""

    cu_seqlens: Tensor  # [n + 1]
    index: Tensor  # [S]
    start: Tensor  # [S]
    position: Tensor  # [S]

    @property
    def count(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:
        return self.cu_seqlens.diff()


def documents(cu_seqlens: Tensor, length: int, q_start: Tensor | None = None) -> Documents:
    """Of `length` tokens of a packed row: all of it, or those from `q_start [1]` on."""
    cu_seqlens = cu_seqlens.long()
    token = torch.arange(length, device=cu_seqlens.device)
    if q_start is not None:
        token = token + q_start
    # In the whole tensor, not in a slice: inductor cannot search in a slice on a GPU.
    index = torch.searchsorted(cu_seqlens, token, right=True) - 1
    # Wrong values are refused where they may be looked at; elsewhere they must at least not read out of bounds.
    index = index.clamp(0, cu_seqlens.numel() - 2)
    start = cu_seqlens[index]
    return Documents(cu_seqlens, index, start, token - start)


def compressed_offsets(cu_seqlens: Tensor, block: int, stride: int) -> Tensor:
    """Where each document's compressed blocks start in the packed `k_cmp`: `[n + 1]`."""
    return exclusive_offsets(n_compressed_of(cu_seqlens.long().diff(), block, stride))


def query_positions(
    batch: int, length: int, cu_seqlens: Tensor | None, q_start: Tensor | None, device: torch.device
) -> Tensor:
    """`[B or 1, S]` position of every query in its document, or in its row of keys; the first one of row `b` lies at
    `q_start[b]` of the keys."""
    if cu_seqlens is not None:
        return documents(cu_seqlens, length, q_start).position[None]
    position = torch.arange(length, device=device)[None]
    return position if q_start is None else position + q_start.long()[:, None]


def compressed_starts(cu_seqlens: Tensor, length: int, block: int, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """First token of each packed compressed block, among all tokens and in its document, and whether there is one.

    Each `[length // stride]`: that many slots always suffice. Those past the last block point at tokens that exist.
    """
    offsets = compressed_offsets(cu_seqlens, block, stride)
    slot = torch.arange(length // stride, device=cu_seqlens.device)
    document = (torch.searchsorted(offsets, slot, right=True) - 1).clamp(0, cu_seqlens.numel() - 2)
    position = (slot - offsets[document]) * stride
    token = cu_seqlens.long()[document] + position
    # The second holds by itself; a wrong total that nobody looked at must not read out of bounds.
    used = (slot < offsets[-1]) & (token + block <= length)
    return token.clamp_max(max(length - block, 0)), position, used


def compressed_of_tokens(cu_seqlens: Tensor, length: int, block: int, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each packed token: its position, the first slot of its document's compressed blocks, and their number."""
    packed = documents(cu_seqlens, length)
    base = compressed_offsets(cu_seqlens, block, stride)[packed.index]
    count = n_compressed_of(packed.lengths, block, stride)[packed.index]
    # There are no more slots than this; a wrong total that nobody looked at must not read out of bounds.
    return packed.position, base, torch.minimum(count, length // stride - base)
