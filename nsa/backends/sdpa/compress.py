"""Block means, and blocks flattened for a Linear, with their gradients.

A token is in at most `l/d` blocks. Its gradient is gathered from them in order, not scattered by the blocks, which on a
GPU would take float atomics and would not be deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.dtypes import sum_dtype
from nsa.sequences import Pooling


def compress_mean_forward(x: Tensor, pooling: Pooling) -> Tensor:
    blocks, used = blocks_of(x, pooling)
    mean = blocks.mean(dim=3)
    return mean if used is None else mean.masked_fill_(~used[:, None, None], 0.0)


def compress_mean_backward(dout: Tensor, pooling: Pooling) -> Tensor:
    per_token = dout[:, :, None].expand(-1, -1, pooling.block, -1, -1)
    return (token_gradient(per_token, pooling) / pooling.block).to(dout.dtype)


def gather_blocks_forward(x: Tensor, position: Tensor, pooling: Pooling) -> Tensor:
    blocks, used = blocks_of(x, pooling)
    # With `out`, because torch would give the sum the strides of the blocks and copy it once more.
    placed = torch.add(blocks, position, out=x.new_empty(blocks.shape))
    if used is not None:
        placed.masked_fill_(~used[:, None, None, None], 0.0)
    return placed.flatten(3)


def gather_blocks_backward(dout: Tensor, pooling: Pooling) -> tuple[Tensor, Tensor]:
    inner = (pooling.block, dout.shape[3] // pooling.block)
    dx = token_gradient(dout.unflatten(3, inner).transpose(2, 3), pooling).to(dout.dtype)
    if pooling.sequences.cu_seqlens is not None:
        used = pooling.starts[2]
        dout = dout.masked_fill(~used[:, None, None], 0.0)
    return dx, dout.sum(dim=(0, 1, 2), dtype=sum_dtype(dout)).to(dout.dtype).unflatten(0, inner)


def blocks_of(x: Tensor, pooling: Pooling) -> tuple[Tensor, Tensor | None]:
    """`[B,N,G,l,D]`, a view of fixed-length `x`; for varlen also `[N]`, which slots hold a block."""
    batch, length, groups, head_dim = x.shape
    block = pooling.block
    if pooling.sequences.cu_seqlens is not None:
        start, _, used = pooling.starts
        token = (start[:, None] + torch.arange(block, device=x.device)).clamp_max(length - 1)
        return x[:, token].transpose(2, 3), used
    if pooling.count == 0:
        return x.new_empty(batch, 0, groups, block, head_dim), None
    return x.unfold(1, block, pooling.stride).transpose(3, 4), None


def token_gradient(dblocks: Tensor, pooling: Pooling) -> Tensor:
    """Sums over the blocks that hold each token: `dblocks [B,N,l,G,D]` to `[B,S,G,D]` in `sum_dtype`."""
    length, stride = pooling.sequences.length, pooling.stride
    batch, n_slots, block, groups, head_dim = dblocks.shape
    total = torch.zeros(batch, length, groups, head_dim, dtype=sum_dtype(dblocks), device=dblocks.device)
    if n_slots == 0:
        return total
    if pooling.sequences.cu_seqlens is None:
        position = torch.arange(length, device=dblocks.device)
        base, count = torch.zeros_like(position), torch.full_like(position, n_slots)
    else:
        position, base, count = pooling.tokens
    for earlier in range(block // stride):
        number = position // stride - earlier
        held = (number >= 0) & (number < count)
        slot = (base + number).clamp(0, n_slots - 1)
        total += dblocks[:, slot, position - number * stride].masked_fill_(~held[:, None, None], 0.0)
    return total
