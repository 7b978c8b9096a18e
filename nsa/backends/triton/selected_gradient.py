"""Backward of the selected branch: one pass over the blocks gives all three gradients.

    p = exp(scale * q.k - lse)      ds = p * (do.v - delta)      delta = sum(do * o) - dlse
    dv = p^T do        dk = scale * ds^T q        dq = scale * ds k

A program per segment (see `selected_index.py`) holds a block's keys and values and streams the rows of the queries that
chose it. Everything is computed transposed, keys down and rows across, `s^T = k q^T`: then `p^T` and `ds^T` are left
operands of `dv` and `dk` and `ds^T` is the right operand of `dq^T = k^T ds^T`, and no accumulator is ever transposed
(which several Triton versions get wrong on Hopper). A pair's part of `dq` is written once, to its own place, and a
program per tile of rows sums a query's; a segment's part of `dk` and `dv` is written once and a program per piece of a
block sums its segments in their order. So two runs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.primitives import COUNTS, LN_2, gated
from nsa.backends.triton.selected_attend import (
    at_least,
    is_wide,
    load_block,
    load_pairs,
    locate_block,
    masked_rows,
    offset,
    own_segment,
    segment_arguments,
    strides,
    widths,
)
from nsa.backends.triton.selected_index import Blocks, chosen_block, launches


@dataclass(frozen=True)
class BackwardTile:
    """`block_m`: rows a tile. `segment`: rows a program streams at most. `scratch`: bytes of partial `dq` at once.
    `whole`: keys of a block that is never read in halves.

    Four warps wherever the accumulators allow: of eight, the second four repeat the scores of the first, a block of 64
    keys being one instruction tall.
    """

    block_m: int = 32
    num_warps: int = 4
    num_stages: int = 3
    segment: int = 4096
    scratch: int = 1 << 30
    merge_warps: int = 1
    whole: int = 64


@triton.jit(do_not_specialize=COUNTS)
def statistics_kernel(
    p_do, p_o, p_lse, p_dlse, p_gate, p_product, p_lse2, p_delta, n_tokens, n_heads,
    stride_db, stride_dt, stride_dh, stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh,
    stride_eb, stride_et, stride_eh, stride_gb, stride_gt, stride_gh, stride_pb, stride_pt, stride_ph,
    D_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`lse2`, in base 2, and `delta`, `[B, S, Hq]`, of BLOCK_R rows. See `gated` for what a gate does."""
    o_row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    i_b = tl.program_id(1).to(tl.int64)
    m_row = o_row < n_tokens * n_heads
    o_t = (o_row // n_heads).to(tl.int64)
    o_head = o_row % n_heads
    if p_product is None:
        o_dv = tl.arange(0, BLOCK_DV)
        m_x = m_row[:, None] & (o_dv < D_V)[None, :]
        o_do = i_b * stride_db + o_t * stride_dt + o_head * stride_dh
        o_o = i_b * stride_ob + o_t * stride_ot + o_head * stride_oh
        b_do = tl.load(p_do + o_do[:, None] + o_dv[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_o = tl.load(p_o + o_o[:, None] + o_dv[None, :], mask=m_x, other=0.0).to(tl.float32)
        b_product = tl.sum(b_do * b_o, 1)
    else:
        o_product = i_b * stride_pb + o_t * stride_pt + o_head * stride_ph
        b_product = tl.load(p_product + o_product, mask=m_row, other=0.0)
    o_dlse = i_b * stride_eb + o_t * stride_et + o_head * stride_eh
    b_dlse = tl.load(p_dlse + o_dlse, mask=m_row, other=0.0).to(tl.float32)
    o_lse = i_b * stride_lb + o_t * stride_lt + o_head * stride_lh
    b_lse2 = tl.load(p_lse + o_lse, mask=m_row, other=0.0) / LN_2
    if p_gate is not None:
        o_gate = i_b * stride_gb + o_t * stride_gt + o_head * stride_gh
        b_lse2 = gated(b_lse2, tl.load(p_gate + o_gate, mask=m_row, other=1.0))
    o_out = i_b * n_tokens * n_heads + o_row
    tl.store(p_lse2 + o_out, b_lse2, mask=m_row)
    tl.store(p_delta + o_out, b_product - b_dlse, mask=m_row)


@triton.jit
def differentiate_segment(
    p_q, p_do, p_lse2, p_delta, p_dq, p_pair, b_k, b_v, b_dk, b_dv,
    i_start, i_stop, i_low, n_rows, i_first, i_pair_0, scale, n_heads, stride_qt, stride_qh, stride_dt, stride_dh,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Rows `[i_start, i_stop)` of a segment: adds to the block's `dk` and `dv`, writes the rows' parts of `dq`."""
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
        # Rows past the end get probability 0 by an infinite normaliser.
        b_lse2 = tl.load(p_lse2 + o_t * n_heads + o_head, mask=m_row, other=float("inf"))
        b_delta = tl.load(p_delta + o_t * n_heads + o_head, mask=m_row, other=0.0) * scale

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
    scale, n_items, n_blocks, n_tokens, n_groups, row_0, query_0, n_queries,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_db, stride_dt, stride_dh,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SEGMENT: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A segment of one block's queries: writes partial `dq [rows, queries, n, h, D_k]`, `dk, dv [segments, l, D]`."""
    i_segment = tl.load(p_order + tl.program_id(0))
    i_item = tl.load(p_item + i_segment)
    if i_item >= n_items:
        return
    i_low, i_high = own_segment(i_segment, i_item, p_low, p_high, p_last_segment, SEGMENT)
    i_block = i_item % n_blocks
    i_local = i_item // n_blocks
    i_row = row_0 + i_local
    i_b = (i_row // n_groups).to(tl.int64)
    i_g = (i_row % n_groups).to(tl.int64)
    i_first, i_end = locate_block(i_block, n_tokens, p_first_token, p_end_token, SELECT_BLOCK, PACKED)
    b_k = load_block(
        p_k + i_b * stride_kb + i_g * stride_kg, i_first, i_end, stride_kn, SELECT_BLOCK, D_K, BLOCK_N, BLOCK_DK
    )
    b_v = load_block(
        p_v + i_b * stride_vb + i_g * stride_vg, i_first, i_end, stride_vn, SELECT_BLOCK, D_V, BLOCK_N, BLOCK_DV
    )
    n_heads = n_groups * H
    p_q += i_b * stride_qb + i_g * H * stride_qh
    p_do += i_b * stride_db + i_g * H * stride_dh
    p_lse2 += i_b * n_tokens * n_heads + i_g * H
    p_delta += i_b * n_tokens * n_heads + i_g * H
    p_dq += i_local.to(tl.int64) * n_queries * N_SELECT * H * D_K
    i_pair_0 = query_0 * N_SELECT
    n_rows = (i_high - i_low) * H
    n_masked = masked_rows(p_pair, i_low, i_high, i_first, H, N_SELECT, SELECT_BLOCK, BLOCK_N, BLOCK_M)
    b_dk = tl.zeros([BLOCK_N, BLOCK_DK], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    b_dk, b_dv = differentiate_segment(
        p_q, p_do, p_lse2, p_delta, p_dq, p_pair, b_k, b_v, b_dk, b_dv,
        0, n_masked, i_low, n_rows, i_first, i_pair_0, scale, n_heads, stride_qt, stride_qh, stride_dt, stride_dh,
        H, N_SELECT, SELECT_BLOCK, D_K, D_V, BLOCK_M, BLOCK_N, BLOCK_DK, BLOCK_DV, True, WIDE, NUM_STAGES,
    )  # fmt: skip
    b_dk, b_dv = differentiate_segment(
        p_q, p_do, p_lse2, p_delta, p_dq, p_pair, b_k, b_v, b_dk, b_dv,
        n_masked, n_rows, i_low, n_rows, i_first, i_pair_0, scale, n_heads, stride_qt, stride_qh, stride_dt, stride_dh,
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
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`dq` of BLOCK_R rows: the sum of the parts from each of the query's blocks."""
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
    b_block = chosen_block(
        p_row, (query_0 + o_t)[:, None], o_slot[None, :], m_row[:, None] & (o_slot < N_SELECT)[None, :],
        stride_it, p_doc_start, p_block_offset, SELECT_BLOCK, PACKED,
    )  # fmt: skip
    o_part = (((i_local.to(tl.int64) * n_queries + o_t) * N_SELECT) * H + o_head)[:, None] + (o_slot * H)[None, :]
    # [BLOCK_R, BLOCK_S, BLOCK_DK]: all parts are asked for at once.
    m_x = (b_block >= 0)[:, :, None] & (o_dk < D_K)[None, None, :]
    b_x = tl.load(p_part + (o_part * D_K)[:, :, None] + o_dk[None, None, :], mask=m_x, other=0.0)
    b_dq = tl.sum(b_x.to(tl.float32), 1)
    o_out = ((i_b * n_tokens + query_0 + o_t) * n_groups + i_g) * H + o_head
    p_out = p_dq + (o_out * D_K)[:, None] + o_dk[None, :]
    tl.store(p_out, b_dq.to(p_dq.dtype.element_ty), mask=m_row[:, None] & (o_dk < D_K)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def sum_segments_kernel(
    p_part, p_out, p_low, p_high, p_last_segment, p_first_token, p_end_token,
    n_blocks, n_tokens, n_groups, row_0,
    SELECT_BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT: tl.constexpr, PACKED: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """BLOCK_R keys of a block: the sum over its segments, in their order, on top of earlier launches' if ACCUMULATE."""
    i_item = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    i_row = row_0 + i_item // n_blocks
    i_b = (i_row // n_groups).to(tl.int64)
    i_g = i_row % n_groups
    i_first, i_end = locate_block(i_item % n_blocks, n_tokens, p_first_token, p_end_token, SELECT_BLOCK, PACKED)
    m_n = (o_n < SELECT_BLOCK) & (i_first + o_n < i_end)
    m_x = m_n[:, None] & (o_d < D)[None, :]
    p_x = p_out + (((i_b * n_tokens + i_first + o_n) * n_groups + i_g) * D)[:, None] + o_d[None, :]
    i_last = tl.load(p_last_segment + i_item)
    n_segments = (tl.load(p_high + i_item) - tl.load(p_low + i_item) + SEGMENT - 1) // SEGMENT
    b_x = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if ACCUMULATE:
        b_x += tl.load(p_x, mask=m_x, other=0.0)
    # Six on their way at once: every query chose the first block, whose many segments others would wait for.
    for i_segment in tl.range(i_last - n_segments, i_last, num_stages=6):
        o_part = (tl.full([BLOCK_R], 0, tl.int64) + i_segment) * SELECT_BLOCK + o_n
        b_x += tl.load(p_part + (o_part * D)[:, None] + o_d[None, :], mask=m_x, other=0.0)
    tl.store(p_x, b_x.to(p_out.dtype.element_ty), mask=m_x)


def rows_to_sum(n_select: int, width: int, num_warps: int) -> int:
    """Rows whose `n_select` parts are summed at once: about 128 elements a thread in flight."""
    return max(1, 4096 * num_warps // (triton.next_power_of_2(n_select) * width))


def row_statistics(
    do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None, gate: Tensor | None, product: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`lse` in base 2 and `delta = sum(do * o) - dlse`, `[B, S, Hq]` fp32."""
    if dlse is None:
        dlse = o.new_zeros(1, 1, 1, dtype=torch.float32).expand(o.shape[:3])
    batch, length, n_heads, d_v = do.shape
    lse2 = torch.empty(batch, length, n_heads, dtype=torch.float32, device=do.device)
    delta = torch.empty_like(lse2)
    rows = 16
    statistics_kernel[(triton.cdiv(length * n_heads, rows), batch)](
        p_do=do,
        p_o=o,
        p_lse=lse,
        p_dlse=dlse,
        p_gate=gate,
        p_product=product,
        p_lse2=lse2,
        p_delta=delta,
        n_tokens=length,
        n_heads=n_heads,
        **strides(d_bth=do, o_bth=o, l_bth=lse, e_bth=dlse),
        **strides(g_bth=lse if gate is None else gate, p_bth=lse if product is None else product),
        D_V=d_v,
        BLOCK_R=rows,
        BLOCK_DV=triton.next_power_of_2(d_v),
        num_warps=4,
    )
    return lse2, delta


def block_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    blocks: Blocks,
    scale: float,
    tile: BackwardTile,
    gate: Tensor | None,
    product: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    n_tokens, n_heads, d_k = q.shape[1:]
    n_groups, d_v = v.shape[2:]
    heads, n_select, select_block = n_heads // n_groups, indices.shape[3], blocks.select_block
    size = widths(d_k, d_v, select_block)
    packing = {"SELECT_BLOCK": select_block, "PACKED": blocks.packed}
    segment = max(1, tile.segment // heads)
    rows = rows_to_sum(n_select, size["BLOCK_DK"], tile.merge_warps)
    lse2, delta = row_statistics(do, o, lse, dlse, gate, product)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    bytes_per_query = n_select * heads * d_k * q.element_size()
    dq_part = dk_part = dv_part = dk = dv = None
    for launch in launches(indices, blocks, bytes_per_query=bytes_per_query, budget=tile.scratch, segment=segment):
        dq_part = at_least(dq_part, launch.n_rows * launch.n_queries * n_select * heads, (d_k,), q.dtype, q.device)
        dk_part = at_least(dk_part, launch.n_segments, (select_block, d_k), torch.float32, q.device)
        dv_part = at_least(dv_part, launch.n_segments, (select_block, d_v), torch.float32, q.device)
        if dk is None or dv is None:
            # Sums over several launches are kept in fp32 between them.
            total = k.dtype if launch.n_queries == n_tokens else torch.float32
            dk = torch.empty(k.shape, dtype=total, device=k.device)
            dv = torch.empty(v.shape, dtype=total, device=v.device)
        where = {"n_tokens": n_tokens, "n_groups": n_groups, "row_0": launch.row_0}
        chunk = {"query_0": launch.query_0, "n_queries": launch.n_queries}
        block_backward_kernel[(launch.n_segments,)](
            p_q=q,
            p_k=k,
            p_v=v,
            p_do=do,
            p_lse2=lse2,
            p_delta=delta,
            p_dq=dq_part,
            p_dk=dk_part,
            p_dv=dv_part,
            **segment_arguments(launch, blocks),
            scale=scale,
            **where,
            **chunk,
            **strides(q_bth=q, k_bng=k, v_bng=v, d_bth=do),
            H=heads,
            N_SELECT=n_select,
            D_K=d_k,
            D_V=d_v,
            BLOCK_M=tile.block_m,
            **size,
            SEGMENT=segment,
            WIDE=is_wide(dq_part, q, do),
            **packing,
            NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        sum_slots_kernel[(triton.cdiv(launch.n_queries * heads, rows), launch.n_rows)](
            p_part=dq_part,
            p_dq=dq,
            p_indices=indices,
            p_doc_start=blocks.doc_start,
            p_block_offset=blocks.offset,
            **where,
            **chunk,
            **strides(i_btg=indices),
            H=heads,
            N_SELECT=n_select,
            D_K=d_k,
            BLOCK_R=rows,
            BLOCK_S=triton.next_power_of_2(n_select),
            BLOCK_DK=size["BLOCK_DK"],
            **packing,
            num_warps=tile.merge_warps,
        )
        for part, out, width, block_d in (
            (dk_part, dk, d_k, size["BLOCK_DK"]),
            (dv_part, dv, d_v, size["BLOCK_DV"]),
        ):
            sum_segments_kernel[(launch.n_items, triton.cdiv(select_block, 16))](
                p_part=part,
                p_out=out,
                p_low=launch.low,
                p_high=launch.high,
                p_last_segment=launch.last_segment,
                p_first_token=blocks.first_token,
                p_end_token=blocks.end_token,
                n_blocks=blocks.count,
                **where,
                D=width,
                BLOCK_R=16,
                BLOCK_D=block_d,
                SEGMENT=segment,
                **packing,
                ACCUMULATE=launch.query_0 > 0,
                num_warps=4,
            )
    assert dk is not None
    assert dv is not None
    return dq, dk.to(k.dtype), dv.to(v.dtype)
