"""Positions of blocks and documents: integer arithmetic on lengths, shared by every backend but the reference.

Positions are relative to a document. A varlen batch (`B = 1`, `cu_seqlens`) concatenates its documents, and likewise
their compressed blocks and their selection blocks. Nothing here reads a value back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def n_compressed(length: int, block: int, stride: int) -> int:
    """Number of complete compression blocks in `length` tokens."""
    return 0 if length < block else (length - block) // stride + 1


def n_compressed_of(lengths: Tensor, block: int, stride: int) -> Tensor:
    """`n_compressed` of each element of `lengths`, same shape."""
    return (torch.div(lengths - block, stride, rounding_mode="floor") + 1).clamp_min(0)


def exclusive_offsets(counts: Tensor) -> Tensor:
    """`[n]` counts to `[n + 1]` offsets that start at 0."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


@dataclass(frozen=True)
class TokenDocuments:
    """The document of every token of a varlen batch."""

    cu_seqlens: Tensor  # [n + 1] int64
    index: Tensor  # [S] which document
    start: Tensor  # [S] its first token
    position: Tensor  # [S] the token's position in it

    @property
    def count(self) -> int:
        """Number of documents."""
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """`[n]` tokens per document."""
        return self.cu_seqlens.diff()


def documents(cu_seqlens: Tensor, length: int, q_start: Tensor | None = None) -> TokenDocuments:
    """The documents of `length` tokens, all of the batch or those from `q_start [1]` on."""
    cu_seqlens = cu_seqlens.long()
    token = torch.arange(length, device=cu_seqlens.device)
    if q_start is not None:
        token = token + q_start
    # Not in a slice of cu_seqlens: inductor cannot search in a slice on a GPU.
    index = torch.searchsorted(cu_seqlens, token, right=True) - 1
    # Wrong values raise where they can be read; elsewhere they must at least not index out of bounds.
    index = index.clamp(0, cu_seqlens.numel() - 2)
    start = cu_seqlens[index]
    return TokenDocuments(cu_seqlens, index, start, token - start)


def compressed_offsets(cu_seqlens: Tensor, block: int, stride: int) -> Tensor:
    """`[n + 1]` offsets of each document's compressed blocks in the `k_cmp` of a varlen batch."""
    return exclusive_offsets(n_compressed_of(cu_seqlens.long().diff(), block, stride))


def query_positions(length: int, cu_seqlens: Tensor | None, q_start: Tensor | None, device: torch.device) -> Tensor:
    """`[B or 1, S]` position of every query in its document or row of keys; row `b` starts at key `q_start[b]`."""
    if cu_seqlens is not None:
        return documents(cu_seqlens, length, q_start).position[None]
    position = torch.arange(length, device=device)[None]
    return position if q_start is None else position + q_start.long()[:, None]


def compressed_starts(cu_seqlens: Tensor, length: int, block: int, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """The compressed blocks of a varlen batch, `[length // stride]` slots, which always suffice.

    Returns:
        First token of each block in the batch, its position in the document, and whether the slot holds a block. Unused
        slots point at tokens that exist.
    """
    offsets = compressed_offsets(cu_seqlens, block, stride)
    slot = torch.arange(length // stride, device=cu_seqlens.device)
    document = (torch.searchsorted(offsets, slot, right=True) - 1).clamp(0, cu_seqlens.numel() - 2)
    position = (slot - offsets[document]) * stride
    token = cu_seqlens.long()[document] + position
    # The second condition guards against a wrong total in unchecked offsets.
    used = (slot < offsets[-1]) & (token + block <= length)
    return token.clamp_max(max(length - block, 0)), position, used


def compressed_of_tokens(cu_seqlens: Tensor, length: int, block: int, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """`[length]` tensors for the tokens of a varlen batch: position, and the first slot and the number of its
    document's compressed blocks."""
    docs = documents(cu_seqlens, length)
    base = compressed_offsets(cu_seqlens, block, stride)[docs.index]
    count = n_compressed_of(docs.lengths, block, stride)[docs.index]
    # Clamped to the slots there are, against a wrong total in unchecked offsets.
    return docs.position, base, torch.minimum(count, length // stride - base)
