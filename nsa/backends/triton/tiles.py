"""The host's side of the ranged kernels: what each query sees, how a tensor reaches a kernel, and which tile is used.

Tiles worth measuring are in `candidates()`; which of them is used is in the file of `tuning.py`, and a launcher takes
any other by its `tile` argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.backends.triton import tuning
from nsa.geometry import compressed_offsets, documents, n_compressed_of


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work.

    `desc_rows`, `desc_keys`: tiles of rows, of keys come by tensor descriptor where their strides allow it, else by
    pointer. `max_registers`: a thread's limit, to fit one more program on a processor.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    desc_rows: bool = True
    desc_keys: bool = True
    max_registers: int | None = None


@dataclass(frozen=True)
class SplitTile(Tile):
    """A tile of the key-major kernel, and how far its work is split.

    Where there are few tiles of keys, their rows are split over several programs until a processor has `waves` of them,
    but not into parts of less than `least` tiles of rows, beside which loading and storing the keys would count.
    `mask_all`: one masked loop in place of edge, middle, edge, which is better when the range is short. Not for the
    query-major kernels, see docs/kernels.md: ptxas 12.8 lets go of queries in registers where there is one loop only.
    """

    mask_all: bool = False
    waves: int = 8
    least: int = 8


@dataclass(frozen=True)
class BackwardTile:
    """Tiles of the query-major and of the key-major kernel."""

    dq: Tile
    dkv: SplitTile


@dataclass(frozen=True)
class Ranges:
    """Query `t` sees keys `[lo, hi)`; key `n` is seen by queries `[first, end)`.

    Both are arithmetic in a plain row, and int32 tensors `[S]` and `[N]` in a packed one. None of the four decreases:
    the kernels rely on it.
    """

    sliding: bool
    # The window, or the compression block and its stride.
    span: int
    stride: int = 1
    lo: Tensor | None = None
    hi: Tensor | None = None
    first: Tensor | None = None
    end: Tensor | None = None


def compressed_ranges(length: int, n_keys: int, block: int, stride: int, cu_seqlens: Tensor | None) -> Ranges:
    if cu_seqlens is None:
        return Ranges(sliding=False, span=block, stride=stride)
    docs = documents(cu_seqlens, length)
    offsets = compressed_offsets(cu_seqlens, block, stride)
    lo = offsets[docs.index]
    hi = (lo + n_compressed_of(docs.position + 1, block, stride)).clamp_max(n_keys)

    key = torch.arange(n_keys, device=cu_seqlens.device)
    index = torch.searchsorted(offsets[1:].contiguous(), key, right=True)
    used = index < docs.count
    index = index.clamp_max(docs.count - 1)
    # Space that no document uses is seen by nobody: an empty range past the last query.
    first = torch.where(used, docs.cu_seqlens[index] + (key - offsets[index]) * stride + block - 1, length)
    end = torch.where(used, docs.cu_seqlens[index + 1], length)
    return Ranges(False, block, stride, *(x.int() for x in (lo, hi, first, end)))


def sliding_ranges(length: int, window: int, cu_seqlens: Tensor | None) -> Ranges:
    # A longer one sees no more, and could not be added to a position in 32 bits.
    window = min(window, max(1, length))
    if cu_seqlens is None:
        return Ranges(sliding=True, span=window)
    docs = documents(cu_seqlens, length)
    token = torch.arange(length, device=cu_seqlens.device)
    lo = torch.maximum(docs.start, token - window + 1)
    end = torch.minimum(docs.cu_seqlens[docs.index + 1], token + window)
    return Ranges(True, window, 1, *(x.int() for x in (lo, token + 1, token, end)))


def block_width(width: int) -> int:
    """Head width as a tile has it; the rest is filled with zeros."""
    return max(16, triton.next_power_of_2(width))


def describe(x: Tensor, block_shape: tuple[int, ...]) -> Tensor | TensorDescriptor:
    """A descriptor of `x` where the hardware's rules allow one, else `x` itself."""
    size = x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(s > 0 and s * size % 16 == 0 for s in x.stride()[:-1])
    if not aligned or x.numel() == 0 or max(block_shape) > 256:
        return x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block_shape))


def row_source(x: Tensor, heads: int, tile: Tile) -> Tensor | TensorDescriptor:
    """`x [B, S, Hq, D]` as a kernel takes its rows: a descriptor fetches boxes of whole queries, if `heads` allows."""
    whole = heads & (heads - 1) == 0 and tile.block_m % heads == 0
    if not tile.desc_rows or not whole:
        return x
    return describe(x, (1, tile.block_m // heads, heads, block_width(x.shape[-1])))


def row_sources(
    q: Tensor, do: Tensor, heads: int, tile: Tile
) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor]:
    """Both by descriptor, or both by pointer."""
    q_src, do_src = row_source(q, heads, tile), row_source(do, heads, tile)
    return (q, do) if q_src is q or do_src is do else (q_src, do_src)


def key_sources(k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor]:
    """`k` and `v` `[B, N, G, D]` as a kernel takes its keys: both by descriptor, or both by pointer."""
    if not tile.desc_keys:
        return k, v
    k_src, v_src = (describe(x, (1, tile.block_n, 1, block_width(x.shape[-1]))) for x in (k, v))
    return (k, v) if k_src is k or v_src is v else (k_src, v_src)


def strides(name: str, x: Tensor, second: str = "t", third: str = "h") -> dict[str, int]:
    """The strides of `x` but the last, by the names that kernels give them."""
    return {f"stride_{name}{axis}": x.stride(i) for i, axis in enumerate(("b", second, third))}


def row_contiguous(x: Tensor) -> Tensor:
    """`x [B,S,H,D]`, copied where its rows are in pieces, or its heads so far apart that kernels, which count in 32
    bits from one head of a group to another, would lose count."""
    return x if x.stride(-1) == 1 and x.shape[2] * x.stride(2) < 2**31 else x.contiguous()


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


# Registers, shared memory and programs on a processor as compiled for sm_90, h = 16; none of these spills. Two or three
# programs a processor let one multiply while another is in its softmax, which on an H200 is worth more than the fewer
# loads of one program of large tiles.
FORWARD = {
    64: (
        Tile(64, 128, 4, 2),  # 167 registers, 3 programs
        Tile(128, 64, 4, 3),  # 226 registers, 2 programs
        Tile(128, 128, 8, 3),
    ),
    128: (
        Tile(128, 64, 8, 2, desc_rows=False, max_registers=128),  # 96 KiB, 2 programs
        Tile(128, 128, 8, 3),  # 220 registers, 192 KiB, 1 program
        Tile(128, 128, 8, 2),
        Tile(64, 64, 4, 2, max_registers=168),  # 64 KiB, 3 programs
        Tile(64, 64, 4, 3),  # 96 KiB, 2 programs
    ),
    256: (Tile(128, 64, 8, 2, desc_rows=False),),
}
BACKWARD_DQ = {
    64: (
        Tile(64, 64, 4, 3),  # 124 registers, 3 programs
        Tile(128, 64, 4, 2),  # 254 registers, 2 programs
        Tile(128, 128, 8, 2),
    ),
    128: (
        Tile(128, 64, 8, 3),  # 220 registers, 96 KiB, 1 program
        Tile(128, 64, 8, 3, desc_rows=False),  # 168 registers, 161 KiB, 1 program
        Tile(128, 128, 8, 2, desc_rows=False),  # 231 registers, 193 KiB, 1 program
        Tile(64, 64, 4, 2, desc_rows=False),  # 168 registers, 97 KiB, 2 programs
        Tile(128, 32, 8, 3, desc_rows=False, max_registers=128),  # 112 KiB, 2 programs
        Tile(128, 64, 8, 4),
    ),
    256: (Tile(64, 64, 8, 2, desc_rows=False),),
}
BACKWARD_DKV = {
    64: (
        SplitTile(64, 64, 4, 3),  # 180 registers, 66 KiB, 2 programs
        SplitTile(128, 128, 8, 2),  # 222 registers, 98 KiB, 1 program
        SplitTile(64, 128, 8, 3),  # 181 registers, 82 KiB, 1 program
        SplitTile(64, 64, 4, 3, mask_all=True),
    ),
    128: (
        SplitTile(64, 64, 4, 2),  # 252 registers, 97 KiB, 2 programs
        SplitTile(64, 128, 8, 2),  # 244 registers, 129 KiB, 1 program
        SplitTile(32, 64, 4, 3),  # 204 registers, 81 KiB, 2 programs
        SplitTile(64, 64, 4, 2, mask_all=True),
        SplitTile(32, 128, 8, 3),  # 206 registers, 113 KiB, 1 program
        SplitTile(64, 128, 8, 3),
        SplitTile(64, 128, 8, 4),
    ),
    256: (SplitTile(32, 64, 8, 2),),
}
LARGE: dict[str, Mapping[int, tuple[Tile, ...]]] = {"forward": FORWARD, "dq": BACKWARD_DQ, "dkv": BACKWARD_DKV}
# Rows and keys for GPUs that are not large, whose shared memory holds less and most of which have no descriptors.
POINTER_BLOCKS = ((64, 64), (128, 64), (64, 32), (32, 64), (32, 32))


def candidates(kernel: str, width: int, *, large: bool = True) -> tuple[Tile, ...]:
    """Tiles worth measuring for `kernel` ("forward", "dq", "dkv") and heads up to `width` (64, 128, 256)."""
    if large:
        return LARGE[kernel][width]
    kind = SplitTile if kernel == "dkv" else Tile
    plain = [kind(m, n, 4, 2, desc_rows=False, desc_keys=False) for m, n in POINTER_BLOCKS]
    return (*plain, *(replace(tile, num_stages=3) for tile in plain), *(replace(tile, num_warps=8) for tile in plain))


def tile_width(d_k: int, d_v: int) -> int:
    return max(64, block_width(d_k), block_width(d_v))


def pick_forward(q: Tensor, v: Tensor, sliding: bool) -> Tile:
    kernel = "sliding-forward" if sliding else "compressed-forward"
    return tuning.pick(kernel, Tile, capability(q.device), q.shape[-1], v.shape[-1], q.dtype)


def pick_backward(q: Tensor, v: Tensor, sliding: bool) -> BackwardTile:
    branch = "sliding" if sliding else "compressed"
    problem = (capability(q.device), q.shape[-1], v.shape[-1], q.dtype)
    dq, dkv = tuning.pick(f"{branch}-dq", Tile, *problem), tuning.pick(f"{branch}-dkv", SplitTile, *problem)
    return BackwardTile(dq, dkv)
