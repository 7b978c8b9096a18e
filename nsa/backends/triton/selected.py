"""The selected branch by our kernels: which of the three forward methods, which tiles, and the launches.

The queries of a short sequence choose a good part of the blocks before them: `dense` reads all of those, masked, which
is cheapest up to a measured number of blocks. A longer one goes by `query` or by `block`.

Per (query, block) `query` reads `2 * l_sel * D` elements through the L2, `block` moves `3 * h * D` through memory, half
as fast. On an H200 at 65,536 tokens `block` is faster at 4, 6 and 16 heads a group (docs/kernels.md); past that
`query` reads less than `block` moves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nsa.backends.triton import tuning
from nsa.backends.triton.selected_attend import ForwardTile, block_forward, query_forward
from nsa.backends.triton.selected_dense import dense_forward, dense_tile
from nsa.backends.triton.selected_gradient import BackwardTile, block_backward
from nsa.backends.triton.selected_index import Blocks, halve_blocks
from nsa.backends.triton.tiles import capability, row_contiguous

# Elements of a block's keys past which its two halves are read as blocks of their own, if they are not short already.
LARGEST_BLOCK = 64 * 128


def pick_forward(
    heads: int, d_k: int, d_v: int, dtype: torch.dtype, method: str | None = None, gpu: tuple[int, int] = (9, 0)
) -> ForwardTile:
    method = method or ("query" if heads >= tuning.tuned().threshold("query_from_heads", gpu) else "block")
    if method not in ("query", "block"):
        raise ValueError(f"method is {method!r}; here 'query' or 'block' serves")
    return tuning.pick(f"selected-forward-{method}", ForwardTile, gpu, d_k, d_v, dtype)


def pick_backward(d_k: int, d_v: int, dtype: torch.dtype, gpu: tuple[int, int] = (9, 0)) -> BackwardTile:
    return tuning.pick("selected-backward", BackwardTile, gpu, d_k, d_v, dtype)


def candidates() -> list[ForwardTile | BackwardTile]:
    """Tiles worth measuring on an H200, besides those that `pick_forward` and `pick_backward` give."""
    query = ForwardTile("query")
    block = ForwardTile("block")
    gathered = replace(block, num_stages=2, common_m=64, common_warps=4, common_stages=2)
    whole = BackwardTile()
    return [
        query,
        replace(query, common_m=0),
        replace(query, num_warps=2),
        replace(query, num_stages=4),
        replace(query, blocks=2, num_stages=2),
        replace(query, common_m=64, common_warps=4),
        block,
        replace(block, common_m=64, common_warps=4),
        replace(block, common_m=64, common_warps=4, common_stages=2),
        replace(block, segment=1024),
        replace(block, segment=8192),
        replace(block, block_m=128, num_warps=8, num_stages=2),
        replace(block, num_stages=2),
        *(replace(gathered, scratch=size << 30) for size in (1, 2, 4)),
        replace(gathered, scratch=2 << 30, num_stages=3),
        replace(gathered, scratch=2 << 30, common_stages=1, common_registers=168),
        whole,
        replace(whole, block_m=64),
        replace(whole, block_m=64, num_warps=8),
        replace(whole, num_stages=2),
        replace(whole, num_stages=4),
        replace(whole, segment=2048),
        replace(whole, segment=16384),
    ]


def fit_blocks(indices: Tensor, select_block: int, width: int, whole: int) -> tuple[Tensor, int]:
    """The choice in blocks whose keys and values fit a program: those of wide heads past `whole` keys are halved."""
    while select_block > whole and select_block % 2 == 0 and select_block * width > LARGEST_BLOCK:
        indices, select_block = halve_blocks(indices, select_block)
    return indices, select_block


def is_short(length: int, n_select: int, select_block: int, device: torch.device) -> bool:
    """Whether there are so few blocks for each that is chosen that it is cheapest to read them all."""
    return length <= tuning.tuned().threshold("dense_up_to_blocks", capability(device)) * n_select * select_block


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
    asked = tile is not None or method is not None
    other = None if method == "dense" else method
    tile = tile or pick_forward(heads, d_k, v.shape[3], q.dtype, other, capability(q.device))
    indices, select_block = fit_blocks(indices, select_block, max(d_k, v.shape[3]), tile.whole)
    o = q.new_empty(batch, length, n_heads, v.shape[3])
    lse = q.new_empty(batch, length, n_heads, dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    if not asked and cu_seqlens is None and is_short(length, indices.shape[3], select_block, q.device):
        method = "dense"
    cut = dense_tile(q, v, select_block) if method == "dense" else None
    if cut is not None:
        dense_forward(q, k, v, indices, o, lse, select_block, scale, cut)
        return o, lse
    run = query_forward if tile.method == "query" else block_forward
    run(q, k, v, indices, o, lse, Blocks.of(length, select_block, cu_seqlens), scale, tile)
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
    gate: Tensor | None = None,
    product: Tensor | None = None,
    into: Tensor | None = None,
    tile: BackwardTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv`, contiguous, in their inputs' dtypes; with a gate, of `gate * o`. `into`: a `dq` to add to."""
    if q_start is not None:
        raise ValueError("q_start: the Triton selected branch serves whole sequences, not cached ones")
    do, q, k, v, indices, o = (row_contiguous(x) for x in (do, q, k, v, indices, o))
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    tile = tile or pick_backward(q.shape[3], v.shape[3], q.dtype, capability(q.device))
    indices, select_block = fit_blocks(indices, select_block, max(q.shape[3], v.shape[3]), tile.whole)
    blocks = Blocks.of(q.shape[1], select_block, cu_seqlens)
    dq, dk, dv = block_backward(do, dlse, q, k, v, indices, o, lse, blocks, scale, tile, gate, product)
    return (dq if into is None else into.add_(dq)), dk, dv
