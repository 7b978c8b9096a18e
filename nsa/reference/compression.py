"""phi without its MLP: the mean of each block, or its flattened tokens (Eq. 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.reference.visibility import locate_compressed


def compress_mean(x: Tensor, *, block: int, stride: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """The mean of each block's tokens.

    Args:
        x: `[B,S,G,D]`.
        block, stride: Tokens per block, and between the starts of two blocks.

    Returns:
        `[B,N,G,D]`, zeros in unused slots.
    """
    blocks, used = tokens_of_blocks(x, block, stride, cu_seqlens)
    return blocks.mean(dim=2).where(used[:, None, None], 0.0)


def gather_blocks(x: Tensor, position: Tensor, *, block: int, stride: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """The tokens of each block, flattened.

    Args:
        x: `[B,S,G,D]`.
        position: `[l,D]`, added to the tokens of every block.
        block, stride: Tokens per block, and between the starts of two blocks.

    Returns:
        `[B,N,G,l*D]`, zeros in unused slots.
    """
    blocks, used = tokens_of_blocks(x, block, stride, cu_seqlens)
    placed = (blocks + position[:, None]).where(used[:, None, None, None], 0.0)
    return placed.transpose(2, 3).flatten(3)


def tokens_of_blocks(x: Tensor, block: int, stride: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """`[B,N,l,G,D]`, and `[N]` which slots hold a block.

    A fixed-length sequence has exactly its blocks. A varlen batch has `S // d` slots: the documents' blocks, then
    unused slots, whose result is zero and which pass no gradient.
    """
    length = x.shape[1]
    n_slots = len(range(0, length - block + 1, stride)) if cu_seqlens is None else length // stride
    document, inner = locate_compressed(n_slots, block, stride, cu_seqlens, x.device)
    used = inner >= 0
    start = inner * stride if cu_seqlens is None else cu_seqlens.long()[document] + inner * stride
    token = start[:, None] + torch.arange(block, device=x.device)
    return x[:, token.where(used[:, None], 0)], used
