"""How one decode step is cut into launches: tiles, splits, scratch memory.

Splits have a fixed number of keys, whatever the batch and the lengths: a row's result does not depend on the rows
beside it. Grids follow from the cache's capacity, so a captured step can be replayed at any length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor

from nsa import settings
from nsa.backends.gluon import tiles as gluon_tiles
from nsa.backends.problem import Problem
from nsa.backends.routing import CallUnsupported
from nsa.backends.triton import tiles
from nsa.backends.triton.decode.compressed import compressed_split_kernel
from nsa.backends.triton.decode.merge import merge_kernel
from nsa.backends.triton.decode.near import near_kernel
from nsa.backends.triton.decode.select import select_step_kernel
from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, new_layout, strides
from nsa.backends.triton.primitives import LOG2_E
from nsa.backends.triton.selection import MAX_RATIO, MAX_SELECT_BLOCKS
from nsa.backends.triton.tiles import block_width
from nsa.geometry import n_compressed

if TYPE_CHECKING:
    from nsa.backends.gluon.decode import CompressedStep

# Rows of a tile: a step with more reads its keys once per tile, most of them from the L2 cache.
MAX_ROWS = 64
# Scores of a tile of the compressed branch: with more, registers spill at 64 rows.
MAX_TILE_SCORES = 4096
# CTAs that share the selected blocks of a row and group. Short caches may have so many rows that they fill the GPU, and
# more CTAs of each only cost more; for a few rows of a long one, more finish sooner.
SHORT_CACHE, FEW_SPLITS, MANY_SPLITS = 1 << 14, 3, 5
# Units of a gate's hidden layer that a warp multiplies at once.
GATE_UNITS = 256
# Of the selection: floats of pooled probabilities that a warp loads at once, and blocks that are worth another warp.
POOL_ELEMENTS = 2048
BLOCKS_PER_WARP = 128


NEAR_SCALES = ("k_win_scale", "v_win_scale", "k_sel_scale", "v_sel_scale")


class Hyperparameters(NamedTuple):
    """Of one attention, named as in `nsa.ops.attention`; `max_len`: tokens that the cache holds; `branch`: the only one
    that is computed, `cmp`, `sel` or `win`, whose gate is then 1. None: all three."""

    block: int
    stride: int
    select_block: int
    n_select: int
    n_init: int
    n_local: int
    window: int
    scale: float
    max_len: int
    branch: str | None = None


class Pages(NamedTuple):
    """Where rows lie in paged stores: `table` int32 `[B,columns]`, every entry a page that exists, of `size` tokens;
    `limits` int32 `[B]`, how many tokens each row's pages hold."""

    table: Tensor
    limits: Tensor
    size: int


class Form(NamedTuple):
    """How stores are laid out and encoded: tokens per page and columns of the table, 0 without pages; in fp8 or not."""

    page: int = 0
    columns: int = 0
    fp8: bool = False

    @classmethod
    def of(cls, pages: Pages | None, scales: Scales | None) -> Form:
        if pages is None:
            return cls(fp8=scales is not None)
        return cls(pages.size, pages.table.shape[1], scales is not None)


class GateLayer(NamedTuple):
    """The last layer of a gate: `sigmoid(weight [Hq*3,W] @ hidden [B,T,W] + bias)` are the gates. All contiguous."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


# fp32 [B,places,G] of keys and values: compressed, selected, window.
Scales = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DecodeTile:
    """`tile_bytes`, `near_bytes`: of one tile of keys. `split`: compressed keys, `window_split`: tokens that one CTA
    reads, twice as many where a tile has 64 rows; `selected_splits`: CTAs that share the selected blocks, None for a
    number by the cache's length. The number of warps of each kernel, and of tiles in shared memory (`buffers`)."""

    tile_bytes: int = 16384
    near_bytes: int = 16384
    split: int = 512
    window_split: int = 256
    selected_splits: int | None = None
    warps: int = 4
    buffers: int = 2
    select_warps: int = 8
    near_warps: int = 4
    near_buffers: int = 2
    merge_slots: int = 16


class DecodePlan:
    """The launches of one step, and the shapes of what they exchange."""

    def __init__(
        self,
        q: Layout,
        compressed: tuple[Layout, Layout],
        selected: tuple[Layout, Layout],
        window: tuple[Layout, Layout],
        gates: Layout | None,
        how: Hyperparameters,
        tile: DecodeTile,
        form: Form,
        commits: bool,
        counted: bool,
        gate_width: int,
    ) -> None:
        batch, n_tokens, n_heads, d_k = q.shape
        groups, d_v = compressed[0].shape[2], compressed[1].shape[3]
        heads = n_heads // groups
        rows = n_tokens * heads
        ratio, overlap = how.select_block // how.stride, how.block // how.stride
        reach = (ratio + overlap - 2) // ratio
        r_pad = triton.next_power_of_2(ratio)
        block_m = min(MAX_ROWS, max(16, triton.next_power_of_2(rows)))
        row_tiles = triton.cdiv(rows, block_m)
        # The more rows, the more a split leaves to be merged.
        longer = max(1, block_m // 32)
        widest = max(block_width(d_k), block_width(d_v))
        near_n = max(16, tile.near_bytes // (widest * q.dtype.itemsize))
        cmp_n = min(tile.tile_bytes // (widest * q.dtype.itemsize), MAX_TILE_SCORES // block_m)
        cmp_n = max(16, cmp_n, r_pad * triton.next_power_of_2(max(1, reach)))
        block_j = cmp_n // r_pad
        n_tiles = max(1, triton.cdiv(n_compressed(how.max_len, how.block, how.stride), block_j * ratio))
        split_tiles = max(1, tile.split * longer // (block_j * ratio))
        n_splits = triton.cdiv(n_tiles, split_tiles)
        n_columns = max(16, triton.next_power_of_2(triton.cdiv(how.max_len, how.select_block)))
        n_tiles_pad = max(triton.next_power_of_2(n_tiles), triton.cdiv(n_columns, block_j))
        n_columns = n_tiles_pad * block_j
        self.branch = how.branch
        selects = how.branch in (None, "sel")
        if selects and (ratio > MAX_RATIO or cmp_n > 2 * MAX_RATIO or n_columns > MAX_SELECT_BLOCKS):
            raise CallUnsupported(
                f"{ratio} strides per selection block, {overlap} per block, {n_columns} selection blocks"
            )
        select_warps = min(tile.select_warps, max(1, n_columns // BLOCKS_PER_WARP))
        span = min(how.window, how.max_len)
        cmp_slots = 0 if how.branch == "win" else n_splits
        window_splits = max(1, span // (tile.window_split * longer)) if how.branch in (None, "win") else 0
        n_forced = how.n_init + how.n_local
        early = window_splits + (selects and n_forced > 0)
        free_splits = tile.selected_splits or (FEW_SPLITS if how.max_len <= SHORT_CACHE else MANY_SPLITS)
        free_splits = min(free_splits, how.n_select - n_forced) if selects else 0
        slots = cmp_slots + early + free_splits
        # Of Triton's stages one has no buffer, unless the matmul is Hopper's asynchronous one. There the kernel of the
        # selected blocks gains by another buffer, and the compressed one, whose tile has more scores, does not.
        extra_stages = int(block_m < 64 or tiles.capability(q.device)[0] != 9)

        device, pairs = q.device, batch * groups
        # Aligned as the pooled probabilities are: Triton then loads both in one layout.
        carry = max(4, triton.next_power_of_2(reach))
        pooled: dict[str, tuple[int, ...]] = {
            "pool": (pairs, rows, n_tiles * block_j),
            "carry": (pairs, rows, reach, n_tiles, carry),
            "tile_max": (pairs, rows, n_tiles),
        }
        self.pooled = pooled if selects else {}
        self.factors = {"factors": (pairs, rows, 2)}
        of_rows = (pairs, slots, rows)
        self.partials = {"partial_o": (*of_rows, d_v), "partial_m": of_rows, "partial_l": of_rows}
        # Zeros before the step, see `common.py`.
        self.arrivals = ((pairs, 3), torch.int32, device)
        self.indices = ((batch, n_tokens, groups, how.n_select), torch.int32, device)
        self.output = ((batch, n_tokens, n_heads, d_v), q.dtype, device)
        step = {"max_len": how.max_len, "G": groups, "H": heads, "SLOTS": slots}
        attend = {"scale_log2": how.scale * LOG2_E, "DK": d_k, "DV": d_v, "BLOCK_M": block_m}
        attend |= {"BLOCK_DK": block_width(d_k), "BLOCK_DV": block_width(d_v)}
        pooling = {"BLOCK": how.block, "STRIDE": how.stride, "R": ratio, "REACH": reach, "N_TILES": n_tiles}
        pooling |= {"SPLIT_TILES": split_tiles, "N_SPLITS": n_splits, "CARRY": carry}
        selection = {"T": n_tokens, "SELECT_BLOCK": how.select_block, "N_SELECT": how.n_select}
        selection |= {"N_INIT": how.n_init, "N_LOCAL": how.n_local, "N_PAD": triton.next_power_of_2(how.n_select)}
        overlapping = dependent_launch(device)
        # What a launch is not given is None in all its calls.
        absent = {} if commits else {"lengths": None, "high_water": None}
        absent |= {"gates": None} if gates is None else {}
        absent |= {} if gate_width else dict.fromkeys(("hidden", "gate_weight", "gate_bias"))
        ends = {} if counted else {"counts": None}
        ends |= {} if form.page and commits else {"limits": None}
        absent |= ends
        paged: dict[str, Any] = {"columns": form.columns} | ({} if form.page else {"table": None})
        plain = not (form.page or form.fp8) and r_pad == ratio and how.branch is None
        hopper_tile = gluon_tiles.pick_step(q, *compressed, cmp_n) if plain else None
        self.attend_compressed: Launch | CompressedStep
        if hopper_tile is None:
            self.attend_compressed = Launch(
                compressed_split_kernel,
                (pairs * n_splits * row_tiles,),
                **strides(q_bth=q, k_bng=compressed[0], v_bng=compressed[1]),
                **(paged if form.fp8 else {**paged, "k_scale": None, "v_scale": None}),
                PAGE=max(1, form.page // how.stride),
                **step,
                **ends,
                **(attend if how.branch != "sel" else {**attend, "DV": 0, "BLOCK_DV": 16}),
                **pooling,
                **({} if selects else dict.fromkeys(pooled)),
                POOL=selects,
                ROW_TILES=row_tiles,
                ROWS=rows,
                R_PAD=r_pad,
                OVERLAP=overlap,
                BLOCK_N=cmp_n,
                STAGES=tile.buffers + extra_stages,
                num_warps=tile.warps,
                **overlapping,
            )
        else:
            from nsa.backends.gluon.decode import CompressedStep

            bound = {**strides(q_bth=q), **step, **pooling, **overlapping, "scale_log2": how.scale * LOG2_E}
            bound |= {"T": n_tokens, "D": d_k, "OVERLAP": overlap}
            self.attend_compressed = CompressedStep(*compressed, hopper_tile, pairs * n_splits, bound)
        self.select = Launch(
            select_step_kernel,
            (pairs * n_tokens,),
            **step,
            **ends,
            **pooling,
            **selection,
            ROW_TILES=row_tiles,
            H_PAD=triton.next_power_of_2(heads),
            N_SPLITS_PAD=triton.next_power_of_2(n_splits),
            N_TILES_PAD=n_tiles_pad,
            BLOCK_J=block_j,
            UNROLL=max(1, min(heads, POOL_ELEMENTS * select_warps // n_columns)),
            SEGMENTS=min(32 * select_warps, n_columns // 4),
            num_warps=select_warps,
            **overlapping,
        )
        self.attend_near = Launch(
            near_kernel,
            (pairs * row_tiles * (early + free_splits),),
            **strides(q_bth=q, wk_bng=window[0], wv_bng=window[1], sk_bng=selected[0], sv_bng=selected[1]),
            **(paged if form.fp8 else {**paged, **dict.fromkeys(NEAR_SCALES)}),
            PAGE=max(1, form.page),
            **step,
            **ends,
            **attend,
            **selection,
            pairs=pairs,
            places=window[0].shape[1] - 1,
            WINDOW=span,
            FIRST_SLOT=cmp_slots,
            ALONE=how.branch == "win",
            WINDOW_SPLITS=window_splits,
            SPLIT=tile.window_split * longer,
            N_EARLY=early,
            FREE_SPLITS=free_splits,
            ROW_TILES=row_tiles,
            T_PAD=triton.next_power_of_2(n_tokens),
            BLOCK_N=near_n,
            BLOCK_SEL=min(near_n, max(16, triton.next_power_of_2(how.select_block))),
            STAGES=tile.near_buffers + 1,
            num_warps=tile.near_warps,
            **overlapping,
        )
        self.merge = Launch(
            merge_kernel,
            (pairs * rows,),
            **strides(g_bthc=gates),
            **absent,
            max_len=how.max_len,
            G=groups,
            H=heads,
            T=n_tokens,
            DV=d_v,
            BLOCK_DV=block_width(d_v),
            SLOTS=slots,
            SLOTS_PAD=triton.next_power_of_2(slots),
            CHUNK=min(tile.merge_slots, triton.next_power_of_2(slots)),
            N_CMP=cmp_slots,
            N_WIN=window_splits,
            FIRST=cmp_slots if how.branch == "sel" else 0,
            LAST=0 if how.branch == "cmp" else 2,
            CTAS=row_tiles * (n_splits if how.branch == "cmp" else early + free_splits),
            WIDTH=gate_width,
            BLOCK_U=min(GATE_UNITS, triton.next_power_of_2(gate_width)),
            num_warps=1,
            **overlapping,
        )

    def run(
        self,
        q: Tensor,
        compressed: tuple[Tensor, Tensor],
        selected: tuple[Tensor, Tensor],
        window: tuple[Tensor, Tensor],
        gates: Tensor | GateLayer | None,
        start: Tensor,
        arrivals: Tensor,
        pages: Pages | None,
        scales: Scales | None,
        **committed: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`committed`: `lengths`, `high_water`, `counts` and `limits`, as far as the plan is for them."""
        shape, dtype, device = self.indices
        indices = torch.empty(shape, dtype=dtype, device=device)
        shape, dtype, device = self.output
        o = torch.empty(shape, dtype=dtype, device=device)
        pooled, partials = floats(self.pooled, device), floats(self.partials, device)
        partial_o = partials.pop("partial_o")
        ends = {name: x for name, x in committed.items() if name in ("counts", "limits")}
        pooled |= {"start": start, "arrivals": arrivals, **partials, **ends}
        table = {} if pages is None else {"table": pages.table}
        cmp_scales, sel_scales, win_scales = scales or ((), (), ())
        scaled = dict(zip(("k_scale", "v_scale"), cmp_scales, strict=False))
        if self.branch != "win":
            keys = {"k": compressed[0], "v": compressed[1], **scaled}
            self.attend_compressed(q=q, partial_o=partial_o, **keys, **pooled, **table)
        if self.branch in (None, "sel"):
            self.select(**floats(self.factors, device), indices=indices, **pooled)
        else:
            indices.fill_(-1)
        near = {"k_win": window[0], "v_win": window[1], "k_sel": selected[0], "v_sel": selected[1]}
        near |= dict(zip(NEAR_SCALES, (*win_scales, *sel_scales), strict=False))
        near |= {"q": q, "start": start, "indices": indices, "arrivals": arrivals, "partial_o": partial_o}
        if self.branch != "cmp":
            self.attend_near(**near, **partials, **table, **ends)
        gated = {} if gates is None else {"gates": gates}
        if isinstance(gates, GateLayer):
            gated = {"hidden": gates.hidden, "gate_weight": gates.weight, "gate_bias": gates.bias}
        self.merge(**gated, o=o, arrivals=arrivals, partial_o=partial_o, **partials, **committed)
        return o, indices


def floats(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    """Scratch memory in fp32, by name."""
    return {name: torch.empty(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}


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
    gates: Layout | None,
    how: Hyperparameters,
    tile: DecodeTile,
    form: Form,
    commits: bool = False,
    counted: bool = False,
    gate_width: int = 0,
) -> DecodePlan:
    """The plan for these layouts; with `commits` it also writes the cache's lengths, with `counted` some tokens may be
    padding. `gate_width`: that of the hidden layer which gates are computed from, 0 if they are given."""
    return DecodePlan(q, compressed, selected, window, gates, how, tile, form, commits, counted, gate_width)


def step_in_gluon(problem: Problem, block: int, stride: int, select_block: int, n_select: int, window: int) -> bool:
    """Whether a step's plan has Gluon's kernel for the compressed branch, in a cache neither paged nor in fp8."""
    if select_block % stride:
        return False
    device, capacity = torch.device(problem.device), problem.n_keys

    def new(n_tokens: int, heads: int, head_dim: int) -> Layout:
        return new_layout((problem.batch, n_tokens, heads, head_dim), problem.dtype, device)

    def store(places: int) -> tuple[Layout, Layout]:
        return new(places + 1, problem.n_groups, problem.d_k), new(places + 1, problem.n_groups, problem.d_v)

    stores = store(n_compressed(capacity, block, stride)), store(capacity), store(min(window, capacity))
    how = Hyperparameters(block, stride, select_block, n_select, 0, 0, window, 1.0, capacity)
    q = new(problem.n_queries, problem.n_heads, problem.d_k)
    try:
        plan = plan_decode(q, *stores, None, how, DecodeTile(), Form())
    except CallUnsupported:
        return False
    return not isinstance(plan.attend_compressed, Launch)
