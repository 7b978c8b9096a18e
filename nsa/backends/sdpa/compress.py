"""Block means, and blocks in a row for a Linear, with their gradients.

A token is in at most `l/d` blocks: its gradient is gathered from them one after the other, never added by the blocks,
which on a GPU would take float atomics and give other bits each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.backends.sdpa.layout import sum_dtype
from nsa.geometry import compressed_of_tokens, compressed_starts, n_compressed


def compress_mean_forward(x: Tensor, *, block: int, stride: int, cu_seqlens: Tensor | None) -> Tensor:
    blocks, used = blocks_of(x, block, stride, cu_seqlens)
    mean = blocks.mean(dim=3)
    return mean if used is None else mean.masked_fill_(~used[:, None, None], 0.0)


def compress_mean_backward(dout: Tensor, *, length: int, block: int, stride: int, cu_seqlens: Tensor | None) -> Tensor:
    of_each_token = dout[:, :, None].expand(-1, -1, block, -1, -1)
    return (token_gradient(of_each_token, length, stride, cu_seqlens) / block).to(dout.dtype)


def gather_blocks_forward(x: Tensor, position: Tensor, *, block: int, stride: int, cu_seqlens: Tensor | None) -> Tensor:
    blocks, used = blocks_of(x, block, stride, cu_seqlens)
    # Written where it stays: left to itself, torch would lay the sum out like the blocks, and copy it once more.
    placed = torch.add(blocks, position, out=x.new_empty(blocks.shape))
    if used is not None:
        placed.masked_fill_(~used[:, None, None, None], 0.0)
    return placed.flatten(3)


def gather_blocks_backward(
    dout: Tensor, *, length: int, block: int, stride: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    inner = (block, dout.shape[3] // block)
    dx = token_gradient(dout.unflatten(3, inner).transpose(2, 3), length, stride, cu_seqlens).to(dout.dtype)
    if cu_seqlens is not None:
        used = compressed_starts(cu_seqlens, length, block, stride)[2]
        dout = dout.masked_fill(~used[:, None, None], 0.0)
    return dx, dout.sum(dim=(0, 1, 2), dtype=sum_dtype(dout)).to(dout.dtype).unflatten(0, inner)


def blocks_of(x: Tensor, block: int, stride: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """`[B,N,G,l,D]`, unpacked a view of `x`; packed, also which of the `S // d` slots hold a block."""
    batch, length, groups, width = x.shape
    if cu_seqlens is not None:
        start, _, used = compressed_starts(cu_seqlens, length, block, stride)
        token = (start[:, None] + torch.arange(block, device=x.device)).clamp_max(length - 1)
        return x[:, token].transpose(2, 3), used
    if n_compressed(length, block, stride) == 0:
        return x.new_empty(batch, 0, groups, block, width), None
    return x.unfold(1, block, stride).transpose(3, 4), None


def token_gradient(dblocks: Tensor, length: int, stride: int, cu_seqlens: Tensor | None) -> Tensor:
    """Sums over the blocks that hold each token: `dblocks [B,N,l,G,D]` to `[B,S,G,D]`, wide."""
    batch, n_slots, block, groups, width = dblocks.shape
    total = torch.zeros(batch, length, groups, width, dtype=sum_dtype(dblocks), device=dblocks.device)
    if n_slots == 0:
        return total
    if cu_seqlens is None:
        position = torch.arange(length, device=dblocks.device)
        base, count = torch.zeros_like(position), torch.full_like(position, n_slots)
    else:
        position, base, count = compressed_of_tokens(cu_seqlens, length, block, stride)
    for earlier in range(block // stride):
        number = position // stride - earlier
        held = (number >= 0) & (number < count)
        slot = (base + number).clamp(0, n_slots - 1)
        total += dblocks[:, slot, position - number * stride].masked_fill_(~held[:, None, None], 0.0)
    return total
