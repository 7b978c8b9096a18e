"""How the Gluon kernels cut their work, and for which problems they are picked: those they were measured faster on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nsa.backends import gluon
from nsa.backends.problem import Problem
from nsa.backends.triton.launch import Layout, new_layout
from nsa.backends.triton.tiles import SplitTile, Tile, Visibility, capability, describable
from nsa.dtypes import HALF_DTYPES
from nsa.sequences import Compressed, Sliding

HOPPER = (9, 0)
HEAD_DIMS = (64, 128)
# From here on a tile of 128 keys is ahead of one of 64 in the compressed branch.
MANY_KEYS = 1024
# Rows of the compressed branch are cut into splits. With more of them the last CTA runs alone for less time, and more
# partials are written and summed: so many elements of them cost as much as a step over a tile of rows.
PARTIALS = 75_000

# Where a query sees more keys, the runs of rows or keys whose `dS^T` is kept become short.
MOST_KEPT_KEYS = 8192


@dataclass(frozen=True)
class ForwardTile(Tile):
    """Two warpgroups of 64 rows each, and a warp that loads."""

    block_m: int = 128
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = 168


@dataclass(frozen=True)
class KeyTile(SplitTile):
    """Two warpgroups of 64 keys each, and a warp that loads `block_m` rows at a time."""

    block_m: int = 64
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = 168


@dataclass(frozen=True)
class QueryTile(Tile):
    """`dq` from the `dS^T` that was kept: two warpgroups of 128 rows each, four tiles of a `KeyTile`, and a warp that
    loads. `scratch`: bytes of `dS^T` alive at once, in buffers of as many streams."""

    block_m: int = 256
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = 168
    scratch: int = 3 << 29
    streams: int = 2


@dataclass(frozen=True)
class StepTile(Tile):
    """Of a decode step: `num_stages` tiles of keys and values in a ring, `ctas_per_sm` CTAs that stay on an SM."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = 224
    ctas_per_sm: int = 2


@dataclass(frozen=True)
class FusedTile(Tile):
    """The selected and the sliding branch at once: two warpgroups of 64 rows each, a warp that loads tiles of keys, and
    one that loads `ring` slots of partial outputs."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = 168
    ring: int = 3


@dataclass(frozen=True)
class BlockForwardTile(Tile):
    """Of the selected branch's forward pass: a warpgroup that owns a block of `block_n` keys, a warp that loads
    `block_m` rows at a time into `num_stages` buffers, and one that stores their partial outputs from there; as many
    CTAs share an SM as registers and shared memory allow."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 4
    max_registers: int | None = 128


@dataclass(frozen=True)
class BlockBackwardTile(Tile):
    """Of the selected branch's backward pass: a warpgroup that owns a block of `block_n` keys, two warps that load
    `block_m` rows at a time, and one that stores their `dq`; two CTAs share an SM. The rest as in
    `SelectedBackwardTile`."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = 128
    segment: int = 4096
    scratch: int = 1 << 30
    merge_warps: int = 1

    @property
    def max_block_keys(self) -> int:
        return self.block_n


# Tiles that are picked, or were near to it: 128 keys for long ranges, 64 for short ones.
FORWARD = {
    64: (ForwardTile(block_n=128, num_stages=4), ForwardTile(block_n=64, num_stages=4)),
    128: (ForwardTile(block_n=128, num_stages=2), ForwardTile(block_n=64, num_stages=4)),
}
KEYS = (KeyTile(num_stages=3), KeyTile(num_stages=4))


def unsupported(gpu: tuple[int, int], dtype: torch.dtype, d_k: int, d_v: int) -> str | None:
    """Why Triton's kernels run instead, whatever the lengths are; None where these may."""
    # ROCm reports (9, 0) for an MI200.
    if torch.version.hip is not None:
        return "the Gluon kernels are for NVIDIA GPUs"
    if gpu != HOPPER:
        return f"the Gluon kernels are for sm_90, the GPU is sm_{gpu[0]}{gpu[1]}"
    if dtype not in HALF_DTYPES:
        return f"the Gluon kernels take fp16 and bf16, not {dtype}"
    if d_k != d_v or d_k not in HEAD_DIMS:
        return f"the Gluon kernels take head_dim 64 and 128, not {d_k} and {d_v}"
    return gluon.unavailable()


def whole_queries(x: Layout, n_groups: int) -> bool:
    """Whether a descriptor fetches rows of `x [B, S, Hq, D]`: boxes of whole queries, in powers of two."""
    heads = x.shape[2] // n_groups
    return describable(x) and heads & (heads - 1) == 0 and heads <= 64


def pick_forward(q: Layout, k: Layout, v: Layout, visibility: Visibility) -> ForwardTile | None:
    """The tile of the forward pass; None where Triton's kernel runs."""
    head_dim = q.shape[3]
    if unsupported(capability(q.device), q.dtype, head_dim, v.shape[3]) or not (describable(k) and describable(v)):
        return None
    # Rows of fewer queries than that are mostly padding: a step of decoding.
    few = q.shape[1] * q.shape[2] // k.shape[2] < ForwardTile().block_m
    if few or (head_dim == 64 and not whole_queries(q, k.shape[2])):
        return None
    long, short = FORWARD[head_dim]
    return long if not visibility.sliding and k.shape[1] >= MANY_KEYS else short


def pick_dkv(do: Layout, q: Layout, k: Layout, v: Layout, visibility: Visibility) -> KeyTile | None:
    """The tile of the gradients of keys and values; None where Triton's kernel runs, as it does for head_dim 64."""
    n_groups, head_dim = k.shape[2], q.shape[3]
    if unsupported(capability(q.device), q.dtype, head_dim, v.shape[3]) or head_dim == 64:
        return None
    rows, keys = (whole_queries(x, n_groups) for x in (q, do)), (describable(x) for x in (k, v))
    if not all((*rows, *keys)):
        return None
    if visibility.sliding:
        return KeyTile(waves=1)
    tile = KeyTile(waves=32)
    n_row_tiles = q.shape[1] * q.shape[2] // n_groups // tile.block_m
    n_splits = max(1, round((PARTIALS * n_row_tiles / k.shape.numel()) ** 0.5))
    return replace(tile, min_row_tiles=max(tile.min_row_tiles, n_row_tiles // n_splits))


def pick_dq(k: Layout, visibility: Visibility) -> QueryTile | None:
    """The tile of the gradient of queries, where `pick_dkv` has one; None where Triton's kernel runs.

    In the compressed branch a run of rows has room for the keys of all documents, most of which it does not see.
    """
    sparse = visibility.varlen and not visibility.sliding
    seen = min(visibility.span, k.shape[1]) if visibility.sliding else k.shape[1]
    return None if visibility.offset or sparse or seen > MOST_KEPT_KEYS else QueryTile()


def pick_step(q: Layout, k: Layout, v: Layout, block_n: int) -> StepTile | None:
    """The tile of the compressed branch of a decode step, over stores that are neither paged nor in fp8; None where
    Triton's kernel runs, with its tiles of `block_n` keys. The batch has no say in it, and so none in results."""
    head_dim, tile = q.shape[3], StepTile()
    if unsupported(capability(q.device), q.dtype, head_dim, v.shape[3]) or head_dim == 64 or block_n != tile.block_n:
        return None
    # Fewer rows fit into a smaller tile, and there Triton is as fast or faster.
    rows = q.shape[1] * q.shape[2] // k.shape[2]
    return tile if tile.block_m // 2 < rows <= tile.block_m and describable(k) and describable(v) else None


def pick_fused(
    q: Layout, k: Layout, v: Layout, k_win: Layout, v_win: Layout, run: int, select_block: int
) -> FusedTile | None:
    """The tile of the selected and the sliding forward pass at once, where blocks that `run` neighboring queries have
    in common are attended to together; None where each branch has a kernel of its own."""
    tile, n_groups, head_dim = FusedTile(), k.shape[2], q.shape[3]
    if unsupported(capability(q.device), q.dtype, head_dim, v.shape[3]) or head_dim != 128:
        return None
    described = whole_queries(q, n_groups) and all(describable(x) for x in (k, v, k_win, v_win))
    # A run is a tile of rows, and a block a tile of keys.
    fits = run * (q.shape[2] // n_groups) == tile.block_m and select_block == tile.block_n
    return tile if described and fits else None


def takes_blocks(rows: tuple[Layout, ...], k: Layout, v: Layout, select_block: int) -> bool:
    """Whether the kernels of the selected branch that go by block fetch tensors with these `rows` of queries."""
    n_groups, head_dim = k.shape[2], rows[0].shape[3]
    if unsupported(capability(k.device), k.dtype, head_dim, v.shape[3]) or head_dim == 64:
        return False
    described = all(whole_queries(x, n_groups) for x in rows) and describable(k) and describable(v)
    # A box of fewer rows is not swizzled as the tile is.
    return described and rows[0].shape[2] // n_groups >= 8 and select_block == BlockBackwardTile().block_n


def pick_block_forward(q: Layout, k: Layout, v: Layout, select_block: int) -> BlockForwardTile | None:
    """The tile of the selected branch's forward pass by blocks; None where Triton's kernel runs."""
    return BlockForwardTile() if takes_blocks((q,), k, v, select_block) else None


def pick_block_backward(do: Layout, q: Layout, k: Layout, v: Layout, select_block: int) -> BlockBackwardTile | None:
    """The tile of the selected branch's backward pass; None where Triton's kernel runs."""
    # More heads spill more, and were not measured.
    few = q.shape[2] // k.shape[2] <= 16
    return BlockBackwardTile() if few and takes_blocks((q, do), k, v, select_block) else None


def layouts(problem: Problem) -> tuple[Layout, Layout]:
    """Of contiguous queries, and of keys as wide."""
    device = torch.device(problem.device)
    sizes = (problem.n_queries, problem.n_heads), (problem.n_keys, problem.n_groups)
    q, k = (new_layout((problem.batch, *size, problem.d_k), problem.dtype, device) for size in sizes)
    return q, k


def passes(problem: Problem, branch: Compressed | Sliding, forward: bool, backward: bool) -> list[str]:
    """Those of the forward and the backward pass of a problem of the `branch` that these kernels run, where its tensors
    are contiguous."""
    q, k = layouts(problem)
    visibility = Visibility(*branch.view(problem.n_keys), problem.varlen, offset=problem.cached and not problem.varlen)
    tile = pick_forward(q, k, k, visibility)
    # A step of decoding has no backward pass.
    keys = backward and (tile or not problem.cached) and pick_dkv(q, q, k, k, visibility) is not None
    found = {
        "forward": forward and tile is not None,
        "dk and dv": keys,
        "dq": keys and pick_dq(k, visibility) is not None,
    }
    return [name for name, taken in found.items() if taken]
