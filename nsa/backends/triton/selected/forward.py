"""Forward of the selected branch, in two ways that differ in what is read more than once.

    o[t] = sum_n p[t, n] v[n],   p[t, n] = exp(scale * q[t].k[n] - lse[t])   over the tokens n <= t of t's blocks

`query`: a CTA per (query, group) walks the query's blocks; its keys and values, `n_sel * l_sel` rows of each, come
through the L2 for every query. A CTA owns the `h` rows of its query and writes `o` and `lse` once.

`block`: a CTA per segment (at most `segment` of the queries that selected one block) holds the block's keys and values
and streams the queries' rows past them. Each (query, slot) gets a partial output and a base-2 LSE, written once;
`common.py` merges a query's. Per pair that moves `3 * h * D_v` elements, where `query` moves `2 * l_sel * D`: it wins
when groups are small.

Both leave what runs of neighboring queries have in common to `common.py`: `query` starts from its result, `block`
hands its own to it.

Rows of a segment are flattened, `r = pair * h + head`, so no tile is padded to the group size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.gluon.tiles import BlockForwardTile
from nsa.backends.triton.launch import Launch, Layout, strides
from nsa.backends.triton.primitives import COUNTS, FLOOR, LN_2, LOG2_E, load_wide, online_softmax
from nsa.backends.triton.selected.common import SplitPlan, common_launch
from nsa.backends.triton.selected.index import Chunk, Shapes, Tables, index_plans, query_start


@dataclass(frozen=True)
class SelectedForwardTile:
    """`method`: which kernel. `block_m`: rows per tile (`block`). `blocks`: blocks per iteration (`query`).

    `segment`: rows that a CTA streams at most. `scratch`: bytes of partial outputs alive at once. `common_m`: rows of a
    run whose common blocks are attended to together; 0, none, is for `query` alone. `common_registers`: the limit per
    thread there, so that more CTAs share an SM. `max_block_keys`: longer blocks may be read in halves.
    """

    method: str = "block"
    block_m: int = 64
    blocks: int = 1
    num_warps: int = 4
    num_stages: int = 3
    segment: int = 2048
    scratch: int = 1 << 30
    common_m: int = 128
    common_warps: int = 8
    common_stages: int = 3
    common_registers: int | None = None
    max_block_keys: int = 64


@dataclass(frozen=True)
class HopperForwardTile(SelectedForwardTile):
    """Of `block`, with a Gluon kernel in the place of `block_kernel`. `attend`: its tile."""

    attend: BlockForwardTile = field(default_factory=BlockForwardTile)


@triton.jit
def locate_block(i_block, n_keys, p_first_token, p_end_token, SELECT_BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """First token of a block, and one past the last token of its document."""
    if VARLEN:
        i_first = tl.load(p_first_token + i_block)
        i_end = tl.load(p_end_token + i_block)
    else:
        i_first = i_block * SELECT_BLOCK
        i_end = n_keys
    return i_first, i_end


@triton.jit
def load_block(
    p_x, i_first, i_end, stride_n, SELECT_BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_N, BLOCK_D]` rows of one block; zeros past the document, whose values must not reach a matmul."""
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_n = (o_n < SELECT_BLOCK) & (i_first + o_n < i_end)
    p_x += i_first.to(tl.int64) * stride_n + (o_n * stride_n)[:, None] + o_d[None, :]
    return tl.load(p_x, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def assigned_segment(p_order):
    """The segment that this CTA takes."""
    i_segment = tl.program_id(0)
    if p_order is not None:
        i_segment = tl.load(p_order + i_segment)
    return i_segment


@triton.jit
def own_segment(i_segment, i_item, p_low, p_high, p_last_segment, SEGMENT: tl.constexpr):
    """Range of pairs of a segment; each item's segments are numbered one after the other."""
    i_low = tl.load(p_low + i_item)
    i_high = tl.load(p_high + i_item)
    n_segments = (i_high - i_low + SEGMENT - 1) // SEGMENT
    i_low += (i_segment - tl.load(p_last_segment + i_item) + n_segments) * SEGMENT
    return i_low, tl.minimum(i_high, i_low + SEGMENT)


@triton.jit
def masked_rows(
    p_pair, i_low, i_high, i_first,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows, up to a whole tile, of the queries inside the block itself: they come first, and alone need a mask.

    `i_first`: the query at the block's first token; negative where that lies before the first query.
    """
    o_pair = i_low + tl.arange(0, BLOCK_N)
    b_pair = tl.load(p_pair + o_pair, mask=o_pair < i_high, other=2147483647)
    n_inside = tl.sum((b_pair // N_SELECT < i_first + SELECT_BLOCK - 1).to(tl.int32))
    n_rows = (n_inside * H + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    return tl.minimum(n_rows, (i_high - i_low) * H)


@triton.jit
def offset(b_x, WIDE: tl.constexpr):
    """An index about to meet a stride: 64 bits wide only where tensors are that large, for it costs registers."""
    return b_x.to(tl.int64) if WIDE else b_x


@triton.jit
def load_pairs(p_pair, i_low, i_row, n_rows, i_other, H: tl.constexpr, BLOCK_M: tl.constexpr):
    """The pair of each of a tile's rows, `i_other` for rows past the end."""
    o_row = i_row + tl.arange(0, BLOCK_M)
    return tl.load(p_pair + i_low + o_row // H, mask=o_row < n_rows, other=i_other)


@triton.jit
def attend_segment(
    p_q, p_o, p_lse, p_pair, b_k, b_v, i_start, i_stop, i_low, n_rows, i_first, i_pair_0, scale_log2,
    stride_qt, stride_qh,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Rows `[i_start, i_stop)` of a segment against its block: one softmax over the block a row, nothing to carry."""
    o_n = tl.arange(0, BLOCK_N)
    o_dk = tl.arange(0, BLOCK_DK)
    o_dv = tl.arange(0, BLOCK_DV)
    b_next = load_pairs(p_pair, i_low, i_start, n_rows, i_pair_0, H, BLOCK_M)
    for i_row in tl.range(i_start, i_stop, BLOCK_M, num_stages=NUM_STAGES):
        # Read one tile ahead: an address that waited for a load of the same iteration would halve the pipeline.
        b_pair = b_next
        b_next = load_pairs(p_pair, i_low, i_row + BLOCK_M, n_rows, i_pair_0, H, BLOCK_M)
        o_row = i_row + tl.arange(0, BLOCK_M)
        m_row = o_row < n_rows
        o_head = o_row % H
        b_t = b_pair // N_SELECT
        o_q = offset(b_t, WIDE) * stride_qt + o_head * stride_qh
        # Rows past the end read the launch's first query and are not written.
        b_q = load_wide(p_q + o_q[:, None] + o_dk[None, :], o_dk, D_K, BLOCK_DK)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if MASKED:
            b_s = tl.where((i_first + o_n)[None, :] <= b_t[:, None], b_s, float("-inf"))
        if SELECT_BLOCK < BLOCK_N:
            b_s = tl.where((o_n < SELECT_BLOCK)[None, :], b_s, float("-inf"))
        # Finite: a query that selected a block sees its first token, and rows past the end are not written.
        b_m = tl.max(b_s, 1) * scale_log2
        b_p = tl.math.exp2(b_s * scale_log2 - b_m[:, None])
        b_l = tl.sum(b_p, 1)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee") * (1.0 / b_l)[:, None]
        o_out = offset(b_pair - i_pair_0, WIDE) * H + o_head
        m_o = m_row[:, None] if D_V == BLOCK_DV else m_row[:, None] & (o_dv < D_V)[None, :]
        # Streamed: partials come back when all of a launch are there, and must not drive the queries out of the L2.
        p_part = p_o + (o_out * D_V)[:, None] + o_dv[None, :]
        tl.store(p_part, b_o.to(p_o.dtype.element_ty), mask=m_o, cache_modifier=".cs")
        tl.store(p_lse + o_out, b_m + tl.math.log2(b_l), mask=m_row)


@triton.jit(do_not_specialize=COUNTS)
def block_kernel(
    p_q, p_k, p_v, p_o, p_lse, p_pair, p_order, p_item, p_low, p_high, p_last_segment,
    p_first_token, p_end_token, scale_log2, n_items, n_blocks, n_keys, n_groups, row_0, query_0, n_queries,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SEGMENT: tl.constexpr, VARLEN: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
    p_start=None, max_start=None,
):  # fmt: skip
    """A segment of the queries that selected one block: writes their partial outputs `[rows, queries, n, h, D_v]`."""
    i_segment = assigned_segment(p_order)
    i_item = tl.load(p_item + i_segment)
    if i_item >= n_items:
        return
    i_low, i_high = own_segment(i_segment, i_item, p_low, p_high, p_last_segment, SEGMENT)
    i_block = i_item % n_blocks
    i_local = i_item // n_blocks
    i_row = row_0 + i_local
    i_b = (i_row // n_groups).to(tl.int64)
    i_g = (i_row % n_groups).to(tl.int64)
    i_first, i_end = locate_block(i_block, n_keys, p_first_token, p_end_token, SELECT_BLOCK, VARLEN)
    b_k = load_block(
        p_k + i_b * stride_kb + i_g * stride_kg, i_first, i_end, stride_kn, SELECT_BLOCK, D_K, BLOCK_N, BLOCK_DK
    )
    b_v = load_block(
        p_v + i_b * stride_vb + i_g * stride_vg, i_first, i_end, stride_vn, SELECT_BLOCK, D_V, BLOCK_N, BLOCK_DV
    )
    p_q += i_b * stride_qb + i_g * H * stride_qh
    # From here on counted as queries are.
    i_first -= query_start(p_start, max_start, i_b)
    i_pair_0 = query_0 * N_SELECT
    p_o += i_local.to(tl.int64) * n_queries * N_SELECT * H * D_V
    p_lse += i_local.to(tl.int64) * n_queries * N_SELECT * H
    n_rows = (i_high - i_low) * H
    n_masked = masked_rows(p_pair, i_low, i_high, i_first, H, N_SELECT, SELECT_BLOCK, BLOCK_N, BLOCK_M)
    attend_segment(
        p_q, p_o, p_lse, p_pair, b_k, b_v, 0, n_masked, i_low, n_rows, i_first, i_pair_0, scale_log2,
        stride_qt, stride_qh, H, N_SELECT, SELECT_BLOCK, D_K, D_V, BLOCK_M, BLOCK_N, BLOCK_DK, BLOCK_DV,
        True, WIDE, NUM_STAGES,
    )  # fmt: skip
    attend_segment(
        p_q, p_o, p_lse, p_pair, b_k, b_v, n_masked, n_rows, i_low, n_rows, i_first, i_pair_0, scale_log2,
        stride_qt, stride_qh, H, N_SELECT, SELECT_BLOCK, D_K, D_V, BLOCK_M, BLOCK_N, BLOCK_DK, BLOCK_DV,
        False, WIDE, NUM_STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def query_kernel(
    p_q, p_k, p_v, p_o, p_lse, p_indices, p_doc_start,
    scale_log2, n_tokens, n_groups,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_ib, stride_it, stride_ig,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCKS: tl.constexpr, VARLEN: tl.constexpr, COMMON: tl.constexpr, NUM_STAGES: tl.constexpr,
    p_start=None, max_start=None,
):  # fmt: skip
    """One query and group: its `h` rows walk its blocks, BLOCKS of them at a time.

    With COMMON `o` and `lse` hold what to start from, and are replaced.
    """
    i_t = tl.program_id(0)
    i_row = tl.program_id(1)
    i_b = (i_row // n_groups).to(tl.int64)
    i_g = (i_row % n_groups).to(tl.int64)
    o_head = tl.arange(0, BLOCK_H)
    o_dk = tl.arange(0, BLOCK_DK)
    o_dv = tl.arange(0, BLOCK_DV)
    m_head = o_head < H
    p_q += i_b * stride_qb + i_t.to(tl.int64) * stride_qt + i_g * H * stride_qh
    m_q = m_head[:, None] & (o_dk < D_K)[None, :]
    b_q = tl.load(p_q + (o_head * stride_qh)[:, None] + o_dk[None, :], mask=m_q, other=0.0)
    p_k += i_b * stride_kb + i_g * stride_kg
    p_v += i_b * stride_vb + i_g * stride_vg
    p_row = p_indices + i_b * stride_ib + i_g * stride_ig + i_t.to(tl.int64) * stride_it
    i_start = tl.load(p_doc_start + i_t) if VARLEN else 0
    i_last = i_t + query_start(p_start, max_start, i_b)

    o_slot = tl.arange(0, BLOCK_S)
    b_index = tl.load(p_row + o_slot, mask=o_slot < N_SELECT, other=-1)
    m_reads = (b_index >= 0) & (b_index <= (i_last - i_start) // SELECT_BLOCK)
    b_index = tl.where(m_reads, b_index, -1)
    n_slots = tl.max(tl.where(m_reads, o_slot + 1, 0))

    o_n = tl.arange(0, BLOCKS * BLOCK_N)
    o_in = o_n % BLOCK_N
    o_out = ((i_b * n_tokens + i_t) * n_groups + i_g) * H + o_head
    p_out = p_o + (o_out * D_V)[:, None] + o_dv[None, :]
    m_out = m_head[:, None] & (o_dv < D_V)[None, :]
    if COMMON:
        b_m = tl.load(p_lse + o_out, mask=m_head, other=float("-inf"))
        b_l = tl.where(b_m > FLOOR, 1.0, 0.0)
        b_m = tl.maximum(b_m, FLOOR)
        b_o = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
    else:
        b_m = tl.full([BLOCK_H], FLOOR, tl.float32)
        b_l = tl.zeros([BLOCK_H], tl.float32)
        b_o = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    for i_slot in tl.range(0, n_slots, BLOCKS, num_stages=NUM_STAGES):
        # Taken from registers: a block number read here would cost the loads of its keys a stage of the pipeline.
        b_at = tl.zeros([BLOCKS * BLOCK_N], tl.int32)
        for j in tl.static_range(BLOCKS):
            i_at = tl.max(tl.where(o_slot == i_slot + j, b_index, -1))
            b_at = tl.where(o_n // BLOCK_N == j, i_at, b_at)
        o_token = i_start + b_at * SELECT_BLOCK + o_in
        m_n = (b_at >= 0) & (o_token <= i_last)
        if SELECT_BLOCK < BLOCK_N:
            m_n = m_n & (o_in < SELECT_BLOCK)
        m_k = m_n[:, None] if D_K == BLOCK_DK else m_n[:, None] & (o_dk < D_K)[None, :]
        m_v = m_n[:, None] if D_V == BLOCK_DV else m_n[:, None] & (o_dv < D_V)[None, :]
        b_k = tl.load(p_k + (o_token.to(tl.int64) * stride_kn)[:, None] + o_dk[None, :], mask=m_k, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_p, b_m, b_l, b_o = online_softmax(b_s, b_m, b_l, b_o, scale_log2)
        b_v = tl.load(p_v + (o_token.to(tl.int64) * stride_vn)[:, None] + o_dv[None, :], mask=m_v, other=0.0)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")
    b_o = b_o * (1.0 / tl.where(b_l > 0, b_l, 1.0))[:, None]
    b_lse = tl.where(b_l > 0, (b_m + tl.math.log2(tl.where(b_l > 0, b_l, 1.0))) * LN_2, float("-inf"))
    tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=m_out)
    tl.store(p_lse + o_out, b_lse, mask=m_head)


def needs_int64(scratch: int, *inputs: Layout) -> bool:
    """Whether an offset into `scratch` elements or into one batch entry of the inputs may not fit 32 bits."""
    return max(scratch, *(x.shape[1] * x.strides[1] for x in inputs)) >= 2**31


class BlockForward:
    """The plan of `block`. A subclass may have another kernel than `common_kernel` add up the partials of a chunk."""

    method = "block"

    def __init__(self, shapes: Shapes, scale: float, tile: SelectedForwardTile) -> None:
        self.shapes, self.scale, self.tile = shapes, scale, tile
        self.split = SplitPlan(shapes, tile.common_m)
        heads, d_v = shapes.heads, shapes.d_v
        segment = max(1, tile.segment // heads)
        per_query = shapes.n_select * heads
        self.indexes = index_plans(
            self.split.rest,
            # Without the LSEs, a sixtieth of it: powers of two then fit one another.
            bytes_per_query=per_query * d_v * shapes.q.dtype.itemsize,
            budget=tile.scratch,
            segment=segment,
            in_order=True,
        )
        # Of a chunk, at most.
        n_queries = max(x.n_rows * x.n_queries for index in self.indexes for x in index.chunks)
        self.partials = (n_queries, shapes.n_select, heads, d_v)
        wide = needs_int64(n_queries * per_query * d_v, shapes.q)

        def attend(chunk: Chunk) -> tuple[Launch, Callable[..., dict[str, Any]]]:
            """The launch, and how it takes queries, keys, values and partial outputs."""
            if isinstance(tile, HopperForwardTile):
                from nsa.backends.gluon.selected_forward import block_forward

                return block_forward(shapes, n_queries, chunk, scale, segment, tile.attend)
            launch = Launch(
                block_kernel, (chunk.n_segments,), **shapes.attention, **shapes.last_start, **chunk.where,
                scale_log2=scale * LOG2_E, n_items=chunk.n_items, n_blocks=shapes.n_blocks, n_keys=shapes.n_keys,
                VARLEN=shapes.n_documents is not None, BLOCK_M=tile.block_m, SEGMENT=segment, WIDE=wide,
                NUM_STAGES=tile.num_stages, num_warps=tile.num_warps,
            )  # fmt: skip
            return launch, lambda q, k, v, partial: {"p_q": q, "p_k": k, "p_v": v, "p_o": partial}

        self.launches = [[(attend(x), self.merge(x)) for x in index.chunks] for index in self.indexes]

    def merge(self, chunk: Chunk) -> Launch:
        """The launch that adds up the partials of a chunk."""
        return attend_common(self.shapes, self.split, self.scale, self.tile, chunk)

    def merged(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, o: Tensor, lse: Tensor, partial: Tensor, *others: Tensor
    ) -> dict[str, Any]:
        """The arguments of `merge` besides the split and the partials' LSEs."""
        return {"p_q": q, "p_k": k, "p_v": v, "p_o": o, "p_lse": lse, "p_part": partial, **tables.start}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, tables: Tables, o: Tensor, lse: Tensor, *others: Tensor
    ) -> None:
        """Writes `o` and natural `lse`. `others`: for `merged`."""
        split, launch_split = self.split(indices, tables)
        launch_split()
        partial = torch.empty(self.partials, dtype=q.dtype, device=q.device)
        partial_lse = torch.empty(self.partials[:3], dtype=torch.float32, device=q.device)
        merged = self.merged(q, k, v, tables, o, lse, partial, *others)
        for index, launches in zip(self.indexes, self.launches, strict=True):
            steps, chunks = index.steps(split.rest, tables)
            for step in steps:
                step()
            for segments, ((attend, tensors), merge) in zip(chunks, launches, strict=True):
                attend(
                    **tensors(q=q, k=k, v=v, partial=partial), p_lse=partial_lse, p_pair=segments.pair,
                    p_order=segments.order, p_item=segments.item, p_low=segments.low, p_high=segments.high,
                    p_last_segment=segments.last_segment, p_first_token=tables.first_token,
                    p_end_token=tables.end_token, **tables.start,
                )  # fmt: skip
                merge(p_common=split.common, p_runs=split.runs, p_rest=split.rest, p_part_lse=partial_lse, **merged)


class QueryForward:
    """The plan of `query`."""

    method = "query"

    def __init__(self, shapes: Shapes, scale: float, tile: SelectedForwardTile) -> None:
        self.split = SplitPlan(shapes, tile.common_m) if tile.common_m > 0 else None
        if self.split is not None:
            self.common = attend_common(shapes, self.split, scale, tile, None)
        indices = shapes.indices if self.split is None else self.split.rest.indices
        self.attend = Launch(
            query_kernel, (shapes.n_tokens, shapes.rows), **shapes.attention, **shapes.last_start,
            **strides(i_btg=indices), n_tokens=shapes.n_tokens, scale_log2=scale * LOG2_E,
            BLOCK_H=max(16, triton.next_power_of_2(shapes.heads)), BLOCK_S=triton.next_power_of_2(shapes.n_select),
            BLOCKS=tile.blocks, VARLEN=shapes.n_documents is not None, COMMON=self.split is not None,
            NUM_STAGES=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, tables: Tables, o: Tensor, lse: Tensor
    ) -> None:
        """Writes `o` and natural `lse`."""
        if self.split is not None:
            split, launch_split = self.split(indices, tables)
            launch_split()
            indices = split.rest
            self.common(
                p_q=q, p_k=k, p_v=v, p_o=o, p_lse=lse, p_common=split.common, p_runs=split.runs,
                p_rest=split.rest, p_part=None, p_part_lse=None, **tables.start,
            )  # fmt: skip
        self.attend(
            p_q=q, p_k=k, p_v=v, p_o=o, p_lse=lse, p_indices=indices, p_doc_start=tables.doc_start, **tables.start
        )


def attend_common(
    shapes: Shapes, split: SplitPlan, scale: float, tile: SelectedForwardTile, chunk: Chunk | None
) -> Launch:
    return common_launch(
        shapes, split, scale, chunk, num_warps=tile.common_warps, num_stages=tile.common_stages,
        max_registers=tile.common_registers,
    )  # fmt: skip
