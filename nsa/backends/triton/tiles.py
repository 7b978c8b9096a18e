"""The tiles of the ranged kernels: which there are, which one a problem gets, and how a tensor reaches a kernel.

Tiles worth measuring are in `candidates()`; which of them is used is in the file of `tuning.py`, and a launcher takes
any other by its `tile` argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nsa.backends.triton import tuning
from nsa.backends.triton.launch import MAX_PLANS, BoxDescriptor, Layout
from nsa.sequences import Compressed, Sliding, ranges_of


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work.

    `desc_rows`, `desc_keys`: tiles of rows, of keys come by tensor descriptor where their strides allow it, else by
    pointer. `max_registers`: the limit per thread, to fit one more CTA on an SM.
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

    Where there are few tiles of keys, their rows are split over several CTAs until an SM has `waves` of them, but not
    into splits of less than `min_row_tiles` tiles of rows, beside which loading and storing the keys would count.
    `single_loop`: one masked loop in place of edge, middle, edge, which is better when the range is short. Not for the
    query-major kernels, see docs/kernels.md: ptxas 12.8 drops queries from registers where there is a single loop.
    """

    single_loop: bool = False
    waves: int = 8
    min_row_tiles: int = 8


@dataclass(frozen=True)
class BackwardTile:
    """Tiles of the query-major and of the key-major kernel."""

    dq: Tile
    dkv: SplitTile


class Visibility(NamedTuple):
    """The part of `Ranges` that a kernel is compiled for: all but tensors. Tensors are the bounds of varlen documents,
    which `q_start` is part of, or `q_start` itself (`offset`)."""

    sliding: bool
    span: int
    stride: int
    varlen: bool
    offset: bool

    @property
    def constants(self) -> dict[str, Any]:
        return {"SLIDING": self.sliding, "SPAN": self.span, "STRIDE": self.stride, "VARLEN": self.varlen}

    def absent(self, *tables: str) -> dict[str, None]:
        """The arguments, of these that only varlen rows have, that are None in every call."""
        return {} if self.varlen else dict.fromkeys(tables)

    def query_tables(self, branch: Compressed | Sliding, n_keys: int) -> dict[str, Tensor]:
        """The tables by which a kernel finds the keys that a query sees, by argument name."""
        if self.varlen:
            ranges = ranges_of(branch, n_keys)
            return {"p_lo": ranges.lo.int(), "p_hi": ranges.hi.int()}
        return {} if branch.sequences.q_start is None else start_table(branch.sequences.q_start)

    def key_tables(self, branch: Compressed | Sliding, n_keys: int) -> dict[str, Tensor]:
        """The same for a kernel that asks which queries see a key."""
        if self.varlen:
            first, end = ranges_of(branch, n_keys).keys
            return {"p_first": first.int(), "p_end": end.int()}
        return {} if branch.sequences.q_start is None else start_table(branch.sequences.q_start)


# Made once for all calls that see alike.
known_visibility = lru_cache(maxsize=MAX_PLANS)(Visibility)


def visibility_of(branch: Compressed | Sliding, n_keys: int) -> Visibility:
    varlen = branch.sequences.cu_seqlens is not None
    return known_visibility(*branch.view(n_keys), varlen, branch.sequences.q_start is not None and not varlen)


def start_table(q_start: Tensor) -> dict[str, Tensor]:
    """`q_start` as kernels take it, by argument name."""
    return {"p_start": q_start.int().contiguous()}


def block_width(head_dim: int) -> int:
    """A head_dim as a tile has it; the rest is filled with zeros."""
    return max(16, triton.next_power_of_2(head_dim))


def describable(x: Layout) -> bool:
    """Whether the hardware's rules allow a tensor descriptor."""
    aligned = x.aligned and all(s > 0 and s * x.dtype.itemsize % 16 == 0 for s in x.strides[:-1])
    return aligned and x.strides[-1] == 1 and 0 not in x.shape


def describe(x: Layout, box: tuple[int, ...]) -> BoxDescriptor | None:
    """How to describe tensors of this layout, where the hardware's rules allow it."""
    return BoxDescriptor(x, box) if describable(x) and max(box) <= 256 else None


def describe_rows(x: Layout, heads: int, tile: Tile) -> BoxDescriptor | None:
    """A descriptor of `x [B, S, Hq, D]` that fetches rows in boxes of whole queries, if `heads` allows."""
    whole = heads & (heads - 1) == 0 and tile.block_m % heads == 0
    if not tile.desc_rows or not whole:
        return None
    return describe(x, (1, tile.block_m // heads, heads, block_width(x.shape[-1])))


def describe_keys(x: Layout, tile: Tile) -> BoxDescriptor | None:
    """A descriptor of `x [B, N, G, D]` that fetches tiles of keys of one group."""
    return describe(x, (1, tile.block_n, 1, block_width(x.shape[-1]))) if tile.desc_keys else None


def both(first: BoxDescriptor | None, second: BoxDescriptor | None) -> tuple[BoxDescriptor, BoxDescriptor] | None:
    """A kernel takes both tensors of a pair by descriptor, or both by pointer."""
    return None if first is None or second is None else (first, second)


def row_contiguous(x: Tensor) -> Tensor:
    """`x [B,S,H,D]`, copied where its rows are not contiguous, or its heads so far apart that kernels, which count in
    32 bits from one head of a group to another, would lose count."""
    return x if x.stride(-1) == 1 and x.shape[2] * x.stride(2) < 2**31 else x.contiguous()


def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's compute capability; on a CPU, which interprets the kernels, that of the GPU they were measured on."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


# Registers, shared memory and CTAs per SM as compiled for sm_90, h = 16; none of these spills. With two or three CTAs
# per SM one CTA's softmax overlaps another's matmul, which on an H200 beats the fewer loads of one CTA of large tiles.
FORWARD_TILES = {
    64: (
        Tile(64, 128, 4, 2),  # 167 registers, 3 CTAs/SM
        Tile(128, 64, 4, 3),  # 226 registers, 2 CTAs/SM
        Tile(128, 128, 8, 3),
    ),
    128: (
        Tile(128, 64, 8, 2, desc_rows=False, max_registers=128),  # 96 KiB, 2 CTAs/SM
        Tile(128, 128, 8, 3),  # 220 registers, 192 KiB, 1 CTA/SM
        Tile(128, 128, 8, 2),
        Tile(64, 64, 4, 2, max_registers=168),  # 64 KiB, 3 CTAs/SM
        Tile(64, 64, 4, 3),  # 96 KiB, 2 CTAs/SM
    ),
    256: (Tile(128, 64, 8, 2, desc_rows=False),),
}
DQ_TILES = {
    64: (
        Tile(64, 64, 4, 3),  # 124 registers, 3 CTAs/SM
        Tile(128, 64, 4, 2),  # 254 registers, 2 CTAs/SM
        Tile(128, 128, 8, 2),
    ),
    128: (
        Tile(128, 64, 8, 3),  # 220 registers, 96 KiB, 1 CTA/SM
        Tile(128, 64, 8, 3, desc_rows=False),  # 168 registers, 161 KiB, 1 CTA/SM
        Tile(128, 128, 8, 2, desc_rows=False),  # 231 registers, 193 KiB, 1 CTA/SM
        Tile(64, 64, 4, 2, desc_rows=False),  # 168 registers, 97 KiB, 2 CTAs/SM
        Tile(128, 32, 8, 3, desc_rows=False, max_registers=128),  # 112 KiB, 2 CTAs/SM
        Tile(128, 64, 8, 4),
    ),
    256: (Tile(64, 64, 8, 2, desc_rows=False),),
}
DKV_TILES = {
    64: (
        SplitTile(64, 64, 4, 3),  # 182 registers, 66 KiB, 2 CTAs/SM
        SplitTile(64, 64, 4, 3, max_registers=168),  # 66 KiB, 3 CTAs/SM; 4 registers spilled at h = 6
        SplitTile(128, 128, 8, 2),  # 222 registers, 98 KiB, 1 CTA/SM
        SplitTile(64, 128, 8, 3),  # 181 registers, 82 KiB, 1 CTA/SM
        SplitTile(64, 64, 4, 3, single_loop=True),
    ),
    128: (
        SplitTile(64, 64, 4, 2),  # 252 registers, 97 KiB, 2 CTAs/SM
        SplitTile(64, 128, 8, 2),  # 244 registers, 129 KiB, 1 CTA/SM
        SplitTile(32, 64, 4, 3),  # 204 registers, 81 KiB, 2 CTAs/SM
        SplitTile(64, 64, 4, 2, single_loop=True),
        SplitTile(32, 128, 8, 3),  # 206 registers, 113 KiB, 1 CTA/SM
        SplitTile(64, 128, 8, 3),
        SplitTile(64, 128, 8, 4),
    ),
    256: (SplitTile(32, 64, 8, 2),),
}
LARGE: dict[str, Mapping[int, tuple[Tile, ...]]] = {"forward": FORWARD_TILES, "dq": DQ_TILES, "dkv": DKV_TILES}
# Rows and keys for GPUs that are not large, whose shared memory holds less and most of which have no descriptors.
POINTER_BLOCKS = ((64, 64), (128, 64), (64, 32), (32, 64), (32, 32))


def candidates(kernel: str, head_dim: int, *, large: bool = True) -> tuple[Tile, ...]:
    """Tiles worth measuring for `kernel` ("forward", "dq", "dkv") and heads of up to `head_dim` (64, 128, 256)."""
    if large:
        return LARGE[kernel][head_dim]
    kind = SplitTile if kernel == "dkv" else Tile
    plain = [kind(m, n, 4, 2, desc_rows=False, desc_keys=False) for m, n in POINTER_BLOCKS]
    return (*plain, *(replace(tile, num_stages=3) for tile in plain), *(replace(tile, num_warps=8) for tile in plain))


def tile_width(d_k: int, d_v: int) -> int:
    return max(64, block_width(d_k), block_width(d_v))


def pick_forward(q: Tensor | Layout, v: Tensor | Layout, sliding: bool) -> Tile:
    kernel = "sliding-forward" if sliding else "compressed-forward"
    return tuning.pick_tile(kernel, Tile, capability(q.device), q.shape[-1], v.shape[-1], q.dtype)


def pick_backward(q: Tensor | Layout, v: Tensor | Layout, sliding: bool) -> BackwardTile:
    branch = "sliding" if sliding else "compressed"
    problem = (capability(q.device), q.shape[-1], v.shape[-1], q.dtype)
    dq, dkv = tuning.pick_tile(f"{branch}-dq", Tile, *problem), tuning.pick_tile(f"{branch}-dkv", SplitTile, *problem)
    return BackwardTile(dq, dkv)
