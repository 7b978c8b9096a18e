"""Backward of the selected branch: one pass over the blocks gives all three gradients.

    p = exp(scale * q.k - lse)      ds = p * (do.v - delta)      delta = sum(do * o) - dlse
    dv = p^T do        dk = scale * ds^T q        dq = scale * ds k

A CTA per segment (see `index.py`) holds a block's keys and values and streams the rows of the queries that selected it.
Everything is computed transposed, keys down and rows across, `s^T = k q^T`: then `p^T` and `ds^T` are left operands of
`dv` and `dk` and `ds^T` is the right operand of `dq^T = k^T ds^T`, and no accumulator is ever transposed (which several
Triton versions get wrong on Hopper). A pair's partial of `dq` is written once, to its own place, and a CTA per tile of
rows sums a query's; a segment's partials of `dk` and `dv` are written once and a CTA per `KEYS_PER_SUM` keys of a block
sums its segments in their order. So the result is bitwise deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.gluon.tiles import BlockBackwardTile
from nsa.backends.triton.launch import Launch, Layout, strides
from nsa.backends.triton.primitives import COUNTS, LN_2
from nsa.backends.triton.row_statistics import ROW_PAD, row_statistics
from nsa.backends.triton.selected.forward import (
    assigned_segment,
    load_block,
    load_pairs,
    locate_block,
    masked_rows,
    needs_int64,
    offset,
    own_segment,
)
from nsa.backends.triton.selected.index import Chunk, Shapes, Tables, index_plans, query_start, selected_block
from nsa.backends.triton.tiles import block_width
from nsa.sequences import Saved, Upstream

# Keys that a CTA sums over their segments.
KEYS_PER_SUM = 16


@dataclass(frozen=True)
class SelectedBackwardTile:
    """`block_m`: rows per tile. `segment`: rows that a CTA streams at most. `scratch`: bytes of partial `dq` at once.
    `max_block_keys`: longer blocks may be read in halves.

    Four warps wherever the accumulators allow: of eight, the second four repeat the scores of the first, a block of 64
    keys being one instruction tall.
    """

    block_m: int = 32
    num_warps: int = 4
    num_stages: int = 3
    segment: int = 4096
    scratch: int = 1 << 30
    merge_warps: int = 1
    max_block_keys: int = 64


@triton.jit
def differentiate_segment(
    p_q, p_do, p_lse2, p_delta, p_dq, p_pair, b_k, b_v, b_dk, b_dv,
    i_start, i_stop, i_low, n_rows, i_first, i_pair_0, scale, stride_qt, stride_qh, stride_dt, stride_dh,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Rows `[i_start, i_stop)` of a segment: adds to the block's `dk` and `dv`, writes the rows' partial `dq`."""
    o_n = tl.arange(0, BLOCK_N)
    o_dk = tl.arange(0, BLOCK_DK)
    o_dv = tl.arange(0, BLOCK_DV)
    b_next = load_pairs(p_pair, i_low, i_start, n_rows, i_pair_0, H, BLOCK_M)
    for i_row in tl.range(i_start, i_stop, BLOCK_M, num_stages=NUM_STAGES):
        b_pair = b_next
        b_next = load_pairs(p_pair, i_low, i_row + BLOCK_M, n_rows, i_pair_0, H, BLOCK_M)
        o_row = i_row + tl.arange(0, BLOCK_M)
        m_row = o_row < n_rows
        o_head = o_row % H
        b_t = b_pair // N_SELECT
        o_t = offset(b_t, WIDE)
        m_q = m_row[:, None] if D_K == BLOCK_DK else m_row[:, None] & (o_dk < D_K)[None, :]
        m_do = m_row[:, None] if D_V == BLOCK_DV else m_row[:, None] & (o_dv < D_V)[None, :]
        b_q = tl.load(p_q + (o_t * stride_qt + o_head * stride_qh)[:, None] + o_dk[None, :], mask=m_q, other=0.0)
        b_do = tl.load(p_do + (o_t * stride_dt + o_head * stride_dh)[:, None] + o_dv[None, :], mask=m_do, other=0.0)
        # Rows past the end get probability 0 by an infinite LSE.
        b_lse2 = tl.load(p_lse2 + o_t * H + o_head, mask=m_row, other=float("inf"))
        b_delta = tl.load(p_delta + o_t * H + o_head, mask=m_row, other=0.0) * scale

        # [BLOCK_N, BLOCK_M]
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
        b_p = tl.math.exp2(b_s * (scale * (1.0 / LN_2)) - b_lse2[None, :])
        if MASKED:
            b_p = tl.where((i_first + o_n)[:, None] <= b_t[None, :], b_p, 0.0)
        if SELECT_BLOCK < BLOCK_N:
            b_p = tl.where((o_n < SELECT_BLOCK)[:, None], b_p, 0.0)
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision="ieee")
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
        # With the scale in it, so that neither `dk` nor `dq` needs it again.
        b_ds = (b_p * (b_dp * scale - b_delta[None, :])).to(b_q.dtype)
        b_dk = tl.dot(b_ds, b_q, b_dk, input_precision="ieee")
        # [BLOCK_DK, BLOCK_M]
        b_dq = tl.dot(tl.trans(b_k), b_ds, input_precision="ieee")
        o_out = offset(b_pair - i_pair_0, WIDE) * H + o_head
        m_dq = m_row[None, :] if D_K == BLOCK_DK else m_row[None, :] & (o_dk < D_K)[:, None]
        tl.store(p_dq + (o_out * D_K)[None, :] + o_dk[:, None], b_dq.to(p_dq.dtype.element_ty), mask=m_dq)
    return b_dk, b_dv


@triton.jit(do_not_specialize=COUNTS)
def block_backward_kernel(
    p_q, p_k, p_v, p_do, p_lse2, p_delta, p_dq, p_dk, p_dv,
    p_pair, p_order, p_item, p_low, p_high, p_last_segment, p_first_token, p_end_token,
    scale, n_items, n_blocks, n_keys, n_groups, row_0, query_0, n_queries, n_rows_padded,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_db, stride_dt, stride_dh,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SEGMENT: tl.constexpr, VARLEN: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
    p_start=None, max_start=None,
):  # fmt: skip
    """A segment of one block's queries: writes partial `dq [rows, queries, n, h, D_k]`, `dk, dv [segments, l, D]`."""
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
    # From here on counted as queries are.
    i_first -= query_start(p_start, max_start, i_b)
    p_q += i_b * stride_qb + i_g * H * stride_qh
    p_do += i_b * stride_db + i_g * H * stride_dh
    p_lse2 += i_row.to(tl.int64) * n_rows_padded
    p_delta += i_row.to(tl.int64) * n_rows_padded
    p_dq += i_local.to(tl.int64) * n_queries * N_SELECT * H * D_K
    i_pair_0 = query_0 * N_SELECT
    n_rows = (i_high - i_low) * H
    n_masked = masked_rows(p_pair, i_low, i_high, i_first, H, N_SELECT, SELECT_BLOCK, BLOCK_N, BLOCK_M)
    b_dk = tl.zeros([BLOCK_N, BLOCK_DK], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    b_dk, b_dv = differentiate_segment(
        p_q, p_do, p_lse2, p_delta, p_dq, p_pair, b_k, b_v, b_dk, b_dv,
        0, n_masked, i_low, n_rows, i_first, i_pair_0, scale, stride_qt, stride_qh, stride_dt, stride_dh,
        H, N_SELECT, SELECT_BLOCK, D_K, D_V, BLOCK_M, BLOCK_N, BLOCK_DK, BLOCK_DV, True, WIDE, NUM_STAGES,
    )  # fmt: skip
    b_dk, b_dv = differentiate_segment(
        p_q, p_do, p_lse2, p_delta, p_dq, p_pair, b_k, b_v, b_dk, b_dv,
        n_masked, n_rows, i_low, n_rows, i_first, i_pair_0, scale, stride_qt, stride_qh, stride_dt, stride_dh,
        H, N_SELECT, SELECT_BLOCK, D_K, D_V, BLOCK_M, BLOCK_N, BLOCK_DK, BLOCK_DV, False, WIDE, NUM_STAGES,
    )  # fmt: skip
    o_n = tl.arange(0, BLOCK_N)
    o_dk = tl.arange(0, BLOCK_DK)
    o_dv = tl.arange(0, BLOCK_DV)
    o_part = i_segment.to(tl.int64) * SELECT_BLOCK + o_n
    m_n = (o_n < SELECT_BLOCK)[:, None]
    tl.store(p_dk + (o_part * D_K)[:, None] + o_dk[None, :], b_dk, mask=m_n & (o_dk < D_K)[None, :])
    tl.store(p_dv + (o_part * D_V)[:, None] + o_dv[None, :], b_dv, mask=m_n & (o_dv < D_V)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def sum_slots_kernel(
    p_part, p_dq, p_indices, p_doc_start, p_block_offset,
    n_tokens, n_groups, row_0, query_0, n_queries, stride_ib, stride_it, stride_ig,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, D_K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DK: tl.constexpr, VARLEN: tl.constexpr,
    p_start=None, max_start=None,
):  # fmt: skip
    """`dq` of BLOCK_R rows: the sum of the partials from each of the query's blocks."""
    i_local = tl.program_id(1)
    i_row = row_0 + i_local
    i_b = (i_row // n_groups).to(tl.int64)
    i_g = (i_row % n_groups).to(tl.int64)
    o_row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_t = o_row // H
    o_head = o_row % H
    m_row = o_t < n_queries
    o_slot = tl.arange(0, BLOCK_S)
    o_dk = tl.arange(0, BLOCK_DK)
    p_row = p_indices + i_b * stride_ib + i_g * stride_ig
    b_block = selected_block(
        p_row, (query_0 + o_t)[:, None], o_slot[None, :], m_row[:, None] & (o_slot < N_SELECT)[None, :],
        stride_it, query_start(p_start, max_start, i_b), p_doc_start, p_block_offset, SELECT_BLOCK, VARLEN,
    )  # fmt: skip
    o_part = (((i_local.to(tl.int64) * n_queries + o_t) * N_SELECT) * H + o_head)[:, None] + (o_slot * H)[None, :]
    # [BLOCK_R, BLOCK_S, BLOCK_DK]: all partials are loaded at once.
    m_x = (b_block >= 0)[:, :, None] & (o_dk < D_K)[None, None, :]
    b_x = tl.load(p_part + (o_part * D_K)[:, :, None] + o_dk[None, None, :], mask=m_x, other=0.0)
    b_dq = tl.sum(b_x.to(tl.float32), 1)
    o_out = ((i_b * n_tokens + query_0 + o_t) * n_groups + i_g) * H + o_head
    p_out = p_dq + (o_out * D_K)[:, None] + o_dk[None, :]
    tl.store(p_out, b_dq.to(p_dq.dtype.element_ty), mask=m_row[:, None] & (o_dk < D_K)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def sum_segments_kernel(
    p_part, p_out, p_part_1, p_out_1, p_low, p_high, p_last_segment, p_first_token, p_end_token,
    n_blocks, n_keys, n_groups, row_0,
    SELECT_BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr, VARLEN: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """BLOCK_R keys of a block: the sum over its segments, in their order, on top of earlier launches' if ACCUMULATE.

    The grid's third dimension picks one of two gradients of the same head_dim.
    """
    if tl.program_id(2) == 1:
        p_part = p_part_1
        p_out = p_out_1
    i_item = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    i_row = row_0 + i_item // n_blocks
    i_b = (i_row // n_groups).to(tl.int64)
    i_g = i_row % n_groups
    i_first, i_end = locate_block(i_item % n_blocks, n_keys, p_first_token, p_end_token, SELECT_BLOCK, VARLEN)
    m_n = (o_n < SELECT_BLOCK) & (i_first + o_n < i_end)
    m_x = m_n[:, None] & (o_d < D)[None, :]
    p_x = p_out + (((i_b * n_keys + i_first + o_n) * n_groups + i_g) * D)[:, None] + o_d[None, :]
    i_last = tl.load(p_last_segment + i_item)
    n_segments = (tl.load(p_high + i_item) - tl.load(p_low + i_item) + SEGMENT - 1) // SEGMENT
    b_x = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if ACCUMULATE:
        b_x += tl.load(p_x, mask=m_x, other=0.0)
    # Six in flight at once: every query selects the first block, whose many segments others would wait for.
    for i_segment in tl.range(i_last - n_segments, i_last, num_stages=6):
        o_part = (tl.full([BLOCK_R], 0, tl.int64) + i_segment) * SELECT_BLOCK + o_n
        b_x += tl.load(p_part + (o_part * D)[:, None] + o_d[None, :], mask=m_x, other=0.0)
    tl.store(p_x, b_x.to(p_out.dtype.element_ty), mask=m_x)


class BlockBackward:
    """The plan of a backward pass."""

    def __init__(
        self, shapes: Shapes, do: Layout, scale: float, tile: SelectedBackwardTile | BlockBackwardTile
    ) -> None:
        self.n_groups = shapes.n_groups
        heads, segment = shapes.heads, max(1, tile.segment // shapes.heads)
        per_query, size = shapes.n_select * heads, shapes.block_sizes
        self.indexes = index_plans(
            shapes,
            bytes_per_query=per_query * shapes.d_k * shapes.q.dtype.itemsize,
            budget=tile.scratch,
            segment=segment,
        )
        chunks = [chunk for index in self.indexes for chunk in index.chunks]
        self.dq_shape = (per_query * max(x.n_rows * x.n_queries for x in chunks), shapes.d_k)
        n_segments = max(x.n_segments for x in chunks)
        self.dk_shape = (n_segments, shapes.select_block, shapes.d_k)
        self.dv_shape = (n_segments, shapes.select_block, shapes.d_v)
        # Sums over several launches are kept in fp32 between them.
        self.total = shapes.k.dtype if chunks[0].n_queries == shapes.n_tokens else torch.float32
        # Rows whose partials are summed at once: about 128 elements per thread in flight.
        rows = max(1, 4096 * tile.merge_warps // (triton.next_power_of_2(shapes.n_select) * size["BLOCK_DK"]))
        wide = needs_int64(self.dq_shape[0] * shapes.d_k, shapes.q, do)

        # dk and dv in one launch, or one after the other.
        self.together = shapes.d_k == shapes.d_v
        head_dims = [(2, shapes.d_k)] if self.together else [(1, shapes.d_k), (1, shapes.d_v)]

        def differentiate_blocks(chunk: Chunk) -> tuple[Launch, Callable[..., dict[str, Any]]]:
            """The launch, and how it takes queries, keys, values, output gradients and partial `dq`."""
            if isinstance(tile, BlockBackwardTile):
                from nsa.backends.gluon.selected_backward import block_backward

                return block_backward(shapes, do, self.dq_shape[0], chunk, scale, segment, tile)
            launch = Launch(
                block_backward_kernel, (chunk.n_segments,), **shapes.attention, **shapes.last_start,
                **strides(d_bth=do), **chunk.where, scale=scale, n_items=chunk.n_items, n_blocks=shapes.n_blocks,
                n_keys=shapes.n_keys, n_rows_padded=triton.cdiv(shapes.n_tokens * heads, ROW_PAD) * ROW_PAD,
                VARLEN=shapes.n_documents is not None, BLOCK_M=tile.block_m, SEGMENT=segment, WIDE=wide,
                NUM_STAGES=tile.num_stages, num_warps=tile.num_warps,
            )  # fmt: skip
            return launch, lambda **tensors: {f"p_{name}": x for name, x in tensors.items()}

        def launches(chunk: Chunk) -> tuple[tuple[Launch, Callable[..., dict[str, Any]]], Launch, list[Launch]]:
            sum_slots = Launch(
                sum_slots_kernel, (triton.cdiv(chunk.n_queries * heads, rows), chunk.n_rows),
                n_tokens=shapes.n_tokens, n_groups=shapes.n_groups, **chunk.where, **strides(i_btg=shapes.indices),
                **shapes.packing, **shapes.last_start, H=heads, N_SELECT=shapes.n_select, D_K=shapes.d_k,
                BLOCK_R=rows, BLOCK_S=triton.next_power_of_2(shapes.n_select), BLOCK_DK=size["BLOCK_DK"],
                num_warps=tile.merge_warps,
            )  # fmt: skip
            return differentiate_blocks(chunk), sum_slots, [sum_keys(chunk, *dims) for dims in head_dims]

        def sum_keys(chunk: Chunk, n_gradients: int, head_dim: int) -> Launch:
            return Launch(
                sum_segments_kernel, (chunk.n_items, triton.cdiv(shapes.select_block, KEYS_PER_SUM), n_gradients),
                n_keys=shapes.n_keys, n_groups=shapes.n_groups, **shapes.packing, n_blocks=shapes.n_blocks,
                row_0=chunk.row_0, D=head_dim, BLOCK_R=KEYS_PER_SUM, BLOCK_D=block_width(head_dim), SEGMENT=segment,
                ACCUMULATE=chunk.query_0 > 0, num_warps=4,
            )  # fmt: skip

        self.launches = [[launches(chunk) for chunk in index.chunks] for index in self.indexes]

    def __call__(
        self, upstream: Upstream, saved: Saved, indices: Tensor, tables: Tables
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, do = saved.q, saved.k, saved.v, upstream.do
        device, fp32 = q.device, torch.float32
        lse2, delta = row_statistics(upstream, saved, self.n_groups)
        dq = torch.empty(q.shape, dtype=q.dtype, device=device)
        dk = torch.empty(k.shape, dtype=self.total, device=device)
        dv = torch.empty(v.shape, dtype=self.total, device=device)
        dq_part = torch.empty(self.dq_shape, dtype=q.dtype, device=device)
        dk_part = torch.empty(self.dk_shape, dtype=fp32, device=device)
        dv_part = torch.empty(self.dv_shape, dtype=fp32, device=device)
        gradients = [(dk_part, dk, dv_part, dv)]
        if not self.together:
            gradients = [(dk_part, dk, dk_part, dk), (dv_part, dv, dv_part, dv)]
        doc_start, offset, first_token, end_token, start = tables
        for index, launches in zip(self.indexes, self.launches, strict=True):
            steps, segments = index.steps(indices, tables)
            for step in steps:
                step()
            chunks = zip(segments, launches, strict=True)
            for (pair, low, high, last, item, order), ((differentiate, tensors), sum_slots, sum_keys) in chunks:
                differentiate(
                    **tensors(q=q, k=k, v=v, do=do, dq=dq_part), p_lse2=lse2, p_delta=delta, p_dk=dk_part,
                    p_dv=dv_part, p_pair=pair, p_order=order, p_item=item, p_low=low, p_high=high,
                    p_last_segment=last, p_first_token=first_token, p_end_token=end_token, **start,
                )  # fmt: skip
                sum_slots(
                    p_part=dq_part, p_dq=dq, p_indices=indices, p_doc_start=doc_start, p_block_offset=offset, **start
                )
                for sum_up, (part, out, part_1, out_1) in zip(sum_keys, gradients, strict=True):
                    sum_up(
                        p_part=part, p_out=out, p_part_1=part_1, p_out_1=out_1, p_low=low, p_high=high,
                        p_last_segment=last, p_first_token=first_token, p_end_token=end_token,
                    )  # fmt: skip
        return dq, dk.to(k.dtype), dv.to(v.dtype)
