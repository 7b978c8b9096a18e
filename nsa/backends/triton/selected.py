"""The selected branch by our kernels: which of the two forward methods, which tiles, and the launches.

Per (query, block) `query` reads `2 * l_sel * D` elements through the L2, `block` moves `3 * h * D` through memory, half
as fast. On an H200 at 65,536 tokens `block` is faster at 4, 6 and 16 heads a group (docs/kernels.md); past that
`query` reads less than `block` moves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nsa.backends.triton.selected_attend import ForwardTile, block_forward, query_forward
from nsa.backends.triton.selected_gradient import BackwardTile, block_backward
from nsa.backends.triton.selected_index import Blocks
from nsa.backends.triton.tiles import capability, is_hopper, is_large

# Heads per group from which on a query's blocks are cheaper to read than its partial outputs are to write.
QUERY_FROM_HEADS = 32


def pick_forward(
    heads: int, d_k: int, d_v: int, dtype: torch.dtype, method: str | None = None, gpu: tuple[int, int] = (9, 0)
) -> ForwardTile:
    method = method or ("query" if heads >= QUERY_FROM_HEADS else "block")
    if method not in ("query", "block"):
        raise ValueError(f"method must be 'query' or 'block', got {method!r}")
    tile = ForwardTile(method)
    if is_small(dtype, gpu):
        return small_forward(tile, max(d_k, d_v), dtype)
    if dtype == torch.float32:
        tile = replace(tile, num_stages=2, num_warps=8, common_m=64, common_stages=1)
        return replace(tile, block_m=32) if max(d_k, d_v) > 128 else tile
    if max(d_k, d_v) > 128:
        return replace(tile, num_stages=2, num_warps=8 if method == "query" else 4, common_stages=2)
    # Two stages leave room for one program more on a processor.
    return replace(tile, num_stages=2) if method == "block" and max(d_k, d_v) > 64 else tile


def is_small(dtype: torch.dtype, gpu: tuple[int, int]) -> bool:
    """Whether the larger tiles do not fit, or spill: fp32, whose products take registers alone, does on all GPUs.
    Hopper keeps the ones that it was tested with."""
    return not is_hopper(gpu) if dtype == torch.float32 else not is_large(gpu)


def small_forward(tile: ForwardTile, width: int, dtype: torch.dtype) -> ForwardTile:
    """A block's keys and values, and the rows, within 99 KiB, and the factors of a product in registers."""
    if dtype == torch.float32:
        return replace(tile, block_m=16, num_warps=8, num_stages=1, common_m=32, common_stages=1)
    if width > 128:
        return replace(tile, block_m=32, num_warps=8, num_stages=2, common_m=64, common_stages=1)
    return replace(tile, num_stages=2, common_m=64, common_warps=4, common_stages=2)


def pick_backward(heads: int, d_k: int, d_v: int, dtype: torch.dtype, gpu: tuple[int, int] = (9, 0)) -> BackwardTile:
    if is_small(dtype, gpu):
        if dtype == torch.float32:
            return BackwardTile(block_m=16, num_warps=8, num_stages=1)
        if max(d_k, d_v) > 128:
            # One stage fits 99 KiB, unless both are wide: then nothing does, and two stages spill less.
            return BackwardTile(block_m=16, num_warps=8, num_stages=2 if min(d_k, d_v) > 128 else 1)
        return BackwardTile(num_warps=8 if max(d_k, d_v) > 64 else 4, num_stages=2)
    if dtype == torch.float32:
        return BackwardTile(block_m=16 if max(d_k, d_v) > 128 else 32, num_warps=8, num_stages=1)
    if max(d_k, d_v) > 128:
        return BackwardTile(num_warps=8, num_stages=2)
    if max(d_k, d_v) <= 64:
        return BackwardTile(block_m=64)
    return BackwardTile()


def candidates() -> list[ForwardTile | BackwardTile]:
    """Tiles worth measuring on an H200, besides those that `pick_forward` and `pick_backward` give."""
    query = ForwardTile("query")
    block = ForwardTile("block")
    whole = BackwardTile()
    return [
        query,
        replace(query, common_m=0),
        replace(query, num_warps=2),
        replace(query, num_stages=4),
        replace(query, blocks=2, num_stages=2),
        replace(query, common_m=64, common_warps=4),
        block,
        replace(block, common_m=0),
        replace(block, segment=1024),
        replace(block, segment=8192),
        replace(block, block_m=128, num_warps=8, num_stages=2),
        replace(block, num_stages=2),
        replace(block, merge_warps=2),
        whole,
        replace(whole, block_m=64),
        replace(whole, block_m=64, num_warps=8),
        replace(whole, num_stages=2),
        replace(whole, num_stages=4),
        replace(whole, segment=2048),
        replace(whole, segment=16384),
    ]


def row_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def selected_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    select_block: int,
    scale: float,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    tile: ForwardTile | None = None,
    method: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`o [B,S,Hq,Dv]` and natural `lse [B,S,Hq]`; `indices [B,S,G,n]` ascending and distinct, -1 for none."""
    if q_start is not None:
        raise ValueError("q_start: the Triton selected branch serves whole sequences, not cached ones")
    q, k, v, indices = (row_contiguous(x) for x in (q, k, v, indices))
    batch, length, n_heads, d_k = q.shape
    heads = n_heads // k.shape[2]
    tile = tile or pick_forward(heads, d_k, v.shape[3], q.dtype, method, capability(q.device))
    o = q.new_empty(batch, length, n_heads, v.shape[3])
    lse = q.new_empty(batch, length, n_heads, dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    blocks = Blocks.of(length, select_block, cu_seqlens)
    run = query_forward if tile.method == "query" else block_forward
    run(q, k, v, indices, o, lse, blocks, scale, tile)
    return o, lse


def selected_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    select_block: int,
    scale: float,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    tile: BackwardTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv`, each contiguous and in its input's dtype."""
    if q_start is not None:
        raise ValueError("q_start: the Triton selected branch serves whole sequences, not cached ones")
    do, q, k, v, indices, o = (row_contiguous(x) for x in (do, q, k, v, indices, o))
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    tile = tile or pick_backward(q.shape[2] // k.shape[2], q.shape[3], v.shape[3], q.dtype, capability(q.device))
    blocks = Blocks.of(q.shape[1], select_block, cu_seqlens)
    return block_backward(do, dlse, q, k, v, indices, o, lse.contiguous(), blocks, scale, tile)
