"""How one decode step is cut into launches: tiles, splits, scratch memory.

Splits have a fixed number of keys, whatever the batch and the lengths: a row's result does not depend on the rows
beside it. Grids follow from the cache's capacity, so a captured step can be replayed at any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa import settings
from nsa.backends.routing import CallUnsupported
from nsa.backends.triton import tiles
from nsa.backends.triton.decode.compressed import compressed_split_kernel
from nsa.backends.triton.decode.merge import merge_kernel
from nsa.backends.triton.decode.near import selected_split_kernel
from nsa.backends.triton.decode.select import select_window_kernel
from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, strides
from nsa.backends.triton.primitives import LOG2_E
from nsa.backends.triton.selection import MAX_RATIO, MAX_SELECT_BLOCKS
from nsa.backends.triton.tiles import block_width
from nsa.geometry import n_compressed

# Rows of a tile: a step with more reads its keys once per tile, most of them from the L2 cache.
MAX_ROWS = 64
# Floats of pooled probabilities that a CTA of the selection loads at once.
POOL_ELEMENTS = 4096


class Hyperparameters(NamedTuple):
    """Of one attention, named as in `nsa.ops.attention`; `max_len`: tokens that the cache holds."""

    block: int
    stride: int
    select_block: int
    n_select: int
    n_init: int
    n_local: int
    window: int
    scale: float
    max_len: int


@dataclass(frozen=True)
class DecodeTile:
    """`tile_bytes`: of one tile of keys. `split`: compressed keys, `window_split`: tokens, `selected_split`: selected
    blocks that one CTA reads; the number of warps and pipeline stages of each kernel."""

    tile_bytes: int = 16384
    split: int = 512
    window_split: int = 256
    selected_split: int = 4
    warps: int = 4
    stages: int = 3
    near_warps: int = 4
    near_stages: int = 3


class DecodePlan:
    """The launches of one step, and the shapes of what they exchange."""

    def __init__(
        self,
        q: Layout,
        compressed: tuple[Layout, Layout],
        selected: tuple[Layout, Layout],
        window: tuple[Layout, Layout],
        gates: Layout,
        how: Hyperparameters,
        tile: DecodeTile,
        commits: bool,
        counted: bool,
    ) -> None:
        batch, n_tokens, n_heads, d_k = q.shape
        groups, d_v = compressed[0].shape[2], compressed[1].shape[3]
        heads = n_heads // groups
        rows = n_tokens * heads
        ratio, overlap = how.select_block // how.stride, how.block // how.stride
        reach = (ratio + overlap - 2) // ratio
        r_pad = triton.next_power_of_2(ratio)
        widest = max(block_width(d_k), block_width(d_v))
        block_n = max(16, tile.tile_bytes // (widest * q.dtype.itemsize))
        cmp_n = max(block_n, r_pad * triton.next_power_of_2(max(1, reach)))
        block_j = cmp_n // r_pad
        n_tiles = max(1, triton.cdiv(n_compressed(how.max_len, how.block, how.stride), block_j * ratio))
        split_tiles = max(1, tile.split // (block_j * ratio))
        n_splits = triton.cdiv(n_tiles, split_tiles)
        n_columns = max(16, triton.next_power_of_2(triton.cdiv(how.max_len, how.select_block)))
        n_tiles_pad = max(triton.next_power_of_2(n_tiles), triton.cdiv(n_columns, block_j))
        n_columns = n_tiles_pad * block_j
        if ratio > MAX_RATIO or cmp_n > 2 * MAX_RATIO or n_columns > MAX_SELECT_BLOCKS:
            raise CallUnsupported(
                f"{ratio} strides per selection block, {overlap} per block, {n_columns} selection blocks"
            )
        span = min(how.window, how.max_len)
        window_splits = max(1, span // tile.window_split)
        selected_splits = triton.cdiv(how.n_select, tile.selected_split)
        slots = n_splits + window_splits + selected_splits
        block_m = min(MAX_ROWS, max(16, triton.next_power_of_2(rows)))
        row_tiles = triton.cdiv(rows, block_m)

        def keys(pair: tuple[Layout, Layout]) -> dict[str, int]:
            return strides(q_bth=q, k_bng=pair[0], v_bng=pair[1])

        device, pairs = q.device, batch * groups
        self.scratch = (
            ((pairs, rows, reach + 1, n_tiles * block_j), torch.float32, device),
            ((pairs, rows, n_tiles), torch.float32, device),
            ((pairs, slots, rows, d_v), torch.float32, device),
            ((pairs, slots, rows), torch.float32, device),
            ((pairs, slots, rows), torch.float32, device),
        )
        self.indices = ((batch, n_tokens, groups, how.n_select), torch.int32, device)
        self.output = ((batch, n_tokens, n_heads, d_v), q.dtype, device)
        wide = {"BLOCK_DK": block_width(d_k), "BLOCK_DV": block_width(d_v)}
        shared = {"max_len": how.max_len, "scale_log2": how.scale * LOG2_E, "SLOTS": slots}
        shared |= {"G": groups, "H": heads, "DK": d_k, "DV": d_v, **wide}
        pooling = {"BLOCK": how.block, "STRIDE": how.stride, "R": ratio, "REACH": reach, "N_TILES": n_tiles}
        overlapping = dependent_launch(device)
        # What a launch is not given is None in all its calls.
        absent = {} if commits else {"lengths": None, "high_water": None}
        absent |= {} if counted else {"counts": None}
        self.attend_compressed = Launch(
            compressed_split_kernel,
            (pairs, n_splits, row_tiles),
            **keys(compressed),
            **shared,
            **pooling,
            ROWS=rows,
            R_PAD=r_pad,
            OVERLAP=overlap,
            SPLIT_TILES=split_tiles,
            BLOCK_M=block_m,
            BLOCK_N=cmp_n,
            STAGES=tile.stages,
            num_warps=tile.warps,
            **overlapping,
        )
        self.select = Launch(
            select_window_kernel,
            (pairs, n_tokens + window_splits * row_tiles),
            **keys(window),
            **shared,
            **pooling,
            places=window[0].shape[1] - 1,
            T=n_tokens,
            SELECT_BLOCK=how.select_block,
            N_SELECT=how.n_select,
            N_PAD=triton.next_power_of_2(how.n_select),
            N_INIT=how.n_init,
            N_LOCAL=how.n_local,
            WINDOW=span,
            N_SPLITS=n_splits,
            N_SPLITS_PAD=triton.next_power_of_2(n_splits),
            N_TILES_PAD=n_tiles_pad,
            BLOCK_J=block_j,
            UNROLL=max(1, min(heads, POOL_ELEMENTS // n_columns)),
            SEGMENTS=min(32 * tile.near_warps, n_columns // 4),
            WINDOW_SPLITS=window_splits,
            SPLIT=tile.window_split,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            STAGES=tile.near_stages,
            num_warps=tile.near_warps,
            **overlapping,
        )
        self.attend_selected = Launch(
            selected_split_kernel,
            (pairs, n_tokens, selected_splits),
            **keys(selected),
            **shared,
            T=n_tokens,
            SELECT_BLOCK=how.select_block,
            N_SELECT=how.n_select,
            FIRST_SLOT=n_splits + window_splits,
            SPLIT=tile.selected_split,
            SPLIT_PAD=triton.next_power_of_2(tile.selected_split),
            BLOCK_M=max(16, triton.next_power_of_2(heads)),
            BLOCK_N=min(block_n, max(16, triton.next_power_of_2(how.select_block))),
            STAGES=tile.near_stages,
            num_warps=tile.near_warps,
            **overlapping,
        )
        self.merge = Launch(
            merge_kernel,
            (pairs, rows),
            **strides(g_bthc=gates),
            **absent,
            max_len=how.max_len,
            G=groups,
            H=heads,
            T=n_tokens,
            DV=d_v,
            BLOCK_DV=block_width(d_v),
            SLOTS=slots,
            N_CMP=n_splits,
            N_CMP_PAD=triton.next_power_of_2(n_splits),
            N_WIN=window_splits,
            N_WIN_PAD=triton.next_power_of_2(window_splits),
            N_SEL=selected_splits,
            N_SEL_PAD=triton.next_power_of_2(selected_splits),
            num_warps=1,
            **overlapping,
        )

    def run(
        self,
        q: Tensor,
        compressed: tuple[Tensor, Tensor],
        selected: tuple[Tensor, Tensor],
        window: tuple[Tensor, Tensor],
        gates: Tensor,
        start: Tensor,
        **committed: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`committed`: `lengths`, `high_water` and `counts`, as far as the plan is for them."""
        pool, tile_max, part_o, part_m, part_l = (torch.empty(s, dtype=t, device=d) for s, t, d in self.scratch)
        shape, dtype, device = self.indices
        indices = torch.empty(shape, dtype=dtype, device=device)
        shape, dtype, device = self.output
        o = torch.empty(shape, dtype=dtype, device=device)
        parts = {"part_o": part_o, "part_m": part_m, "part_l": part_l}
        pooled = {"pool": pool, "tile_max": tile_max}
        self.attend_compressed(q=q, k=compressed[0], v=compressed[1], start=start, **pooled, **parts)
        self.select(q=q, k=window[0], v=window[1], start=start, indices=indices, **pooled, **parts)
        self.attend_selected(q=q, k=selected[0], v=selected[1], start=start, indices=indices, **parts)
        self.merge(gates=gates, o=o, **parts, **committed)
        return o, indices


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Arguments and options of a launch that may start before the one before it has ended: on Hopper and later."""
    if settings.triton_interpreted() or tiles.capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@lru_cache(maxsize=MAX_PLANS)
def plan_decode(
    q: Layout,
    compressed: tuple[Layout, Layout],
    selected: tuple[Layout, Layout],
    window: tuple[Layout, Layout],
    gates: Layout,
    how: Hyperparameters,
    tile: DecodeTile,
    commits: bool = False,
    counted: bool = False,
) -> DecodePlan:
    """The plan for these layouts; with `commits` it also writes the cache's lengths, with `counted` some tokens may be
    padding."""
    return DecodePlan(q, compressed, selected, window, gates, how, tile, commits, counted)
