"""Backward of attention in which every query sees one contiguous range of keys.

    ds[t, n] = p[t, n] * (do[t].v[n] - delta[t]),   delta[t] = do[t].o[t] - dlse[t]
    dq[t] = scale * sum_n ds[t, n] k[n],   dk[n] = scale * sum_t ds[t, n] q[t],   dv[n] = sum_t p[t, n] do[t]

Three kernels, no atomics, every output element written once:
- `prepare`: a program per tile of rows writes `delta` and the base-2 `lse`, laid out as rows;
- `dq`, query-major: a program owns a tile of rows and runs over the keys they see, like the forward;
- `dkv`, key-major: a program owns a tile of keys and runs over the rows that see them. It makes the scores transposed
  from the start, `s^T = k q^T`, because a dot whose operand is a transposed accumulator is miscompiled on Hopper by
  Triton 3.4 to 3.7.0. Where there are few tiles of keys, their rows are split over several programs, whose fp32 parts
  are summed afterwards in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.primitives import (
    COUNTS,
    LN_2,
    LOG2_E,
    gated,
    load_keys,
    load_rows,
    seeing_queries,
    split_rows,
    store_rows,
    visible_keys,
)
from nsa.backends.triton.tiles import (
    BackwardTile,
    Ranges,
    SplitTile,
    Tile,
    block_width,
    describe,
    key_sources,
    pick_backward,
    processors,
    row_contiguous,
    row_sources,
    strides,
)

# Rows a program of `prepare` owns; the row buffers are padded to a multiple of it, so every BLOCK_M must divide it.
ROW_PAD = 128


@triton.jit(do_not_specialize=COUNTS)
def prepare_kernel(
    p_o, p_do, p_lse, p_dlse, p_gate, p_product, p_lse2, p_delta, n_queries, n_groups,
    stride_ob, stride_ot, stride_oh, stride_db, stride_dt, stride_dh,
    stride_lb, stride_lt, stride_lh, stride_eb, stride_et, stride_eh, stride_gb, stride_gt, stride_gh,
    stride_pb, stride_pt, stride_ph,
    H: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`lse2 = lse / ln(2)` and `delta`, `[B * G, rows]`; `+inf` and 0 for rows that see nothing or do not exist, which
    makes their probabilities and gradients exactly 0 in every tile. See `gated` for what a gate does."""
    i_row = tl.program_id(0) * BLOCK_M
    i_b = tl.program_id(1) // n_groups
    i_g = tl.program_id(1) % n_groups
    i_t, o_t, o_h = split_rows(i_row, H, BLOCK_M)
    o_t = i_t + o_t
    m_t = o_t < n_queries
    if p_product is None:
        b_o = load_rows(
            p_o, i_b, i_g, i_row, n_queries, stride_ob, stride_ot, stride_oh, H, D_V, BLOCK_M, BLOCK_DV, False
        )
        b_do = load_rows(
            p_do, i_b, i_g, i_row, n_queries, stride_db, stride_dt, stride_dh, H, D_V, BLOCK_M, BLOCK_DV, False
        )
        b_product = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
        o_h += i_g * H
    else:
        o_h += i_g * H
        o_product = i_b.to(tl.int64) * stride_pb + o_t.to(tl.int64) * stride_pt + o_h * stride_ph
        b_product = tl.load(p_product + o_product, mask=m_t, other=0.0)
    o_lse = i_b.to(tl.int64) * stride_lb + o_t.to(tl.int64) * stride_lt + o_h * stride_lh
    o_dlse = i_b.to(tl.int64) * stride_eb + o_t.to(tl.int64) * stride_et + o_h * stride_eh
    b_lse = tl.load(p_lse + o_lse, mask=m_t, other=float("-inf"))
    b_dlse = tl.load(p_dlse + o_dlse, mask=m_t, other=0.0)
    b_delta = b_product - b_dlse

    m_empty = b_lse == float("-inf")
    o_row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) * BLOCK_M + i_row + tl.arange(0, BLOCK_M)
    b_lse2 = b_lse / LN_2
    if p_gate is not None:
        o_gate = i_b.to(tl.int64) * stride_gb + o_t.to(tl.int64) * stride_gt + o_h * stride_gh
        b_lse2 = gated(b_lse2, tl.load(p_gate + o_gate, mask=m_t, other=1.0))
    tl.store(p_lse2 + o_row, tl.where(m_empty, float("inf"), b_lse2))
    tl.store(p_delta + o_row, tl.where(m_empty, 0.0, b_delta))


@triton.jit
def load_stat(src, i_bg, i_row, n_rows_padded, BLOCK_M: tl.constexpr, DESC: tl.constexpr):
    """`[BLOCK_M]` of a row buffer `[B * G, rows]`.

    In the key-major loop the descriptor saves work: every thread needs a good part of the tile, and by pointer each
    would copy its own part.
    """
    if DESC:
        b_x = src.load([i_bg, i_row]).reshape(BLOCK_M)
    else:
        b_x = tl.load(src + tl.cast(i_bg, tl.int64) * n_rows_padded + i_row + tl.arange(0, BLOCK_M))
    return b_x


@triton.jit
def attend_dq(
    b_q, b_do, b_lse2, b_delta, b_dq, b_lo, b_hi, i_start, i_stop, k, v, i_b, i_g, n_keys, scale_log2,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """Adds to `b_dq` what comes of the keys `[i_start, i_stop)`."""
    for i_n in tl.range(i_start, i_stop, BLOCK_N):
        b_k = load_keys(k, i_b, i_g, i_n, n_keys, stride_kb, stride_kn, stride_kg, D_K, BLOCK_N, BLOCK_DK, MASKED, DESC)
        b_v = load_keys(v, i_b, i_g, i_n, n_keys, stride_vb, stride_vn, stride_vg, D_V, BLOCK_N, BLOCK_DV, MASKED, DESC)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
        b_p = tl.math.exp2(b_s * scale_log2 - b_lse2[:, None])
        if MASKED:
            o_n = i_n + tl.arange(0, BLOCK_N)
            m_s = (o_n[None, :] >= b_lo[:, None]) & (o_n[None, :] < b_hi[:, None])
            b_p = tl.where(m_s, b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")
    return b_dq


@triton.jit(do_not_specialize=COUNTS)
def ranged_dq_kernel(
    q, do, k, v, lse2, delta, p_dq, p_lo, p_hi, scale, scale_log2, n_queries, n_keys, n_groups, n_rows_padded,
    stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, stride_xb, stride_xt, stride_xh,
    H: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SLIDING: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr,
    DESC_Q: tl.constexpr, DESC_KV: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """One tile of rows against all the keys they see, as in the forward; ACCUMULATE adds to the `dq` that is there."""
    n_rows = n_queries * H
    n_tiles = tl.cdiv(n_rows, BLOCK_M)
    n_bg = tl.num_programs(0) // n_tiles
    i_bg = tl.program_id(0) % n_bg
    i_b = i_bg // n_groups
    i_g = i_bg % n_groups
    i_row = (n_tiles - 1 - tl.program_id(0) // n_bg) * BLOCK_M

    i_t, o_t, _ = split_rows(i_row, H, BLOCK_M)
    o_t = tl.minimum(i_t + o_t, n_queries - 1)
    b_lo, b_hi = visible_keys(o_t, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, PACKED)
    i_last = tl.minimum(i_row + BLOCK_M, n_rows) - 1
    first_lo, first_hi = visible_keys(i_t, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, PACKED)
    last_lo, last_hi = visible_keys(i_last // H, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, PACKED)

    # [BLOCK_M, BLOCK_DK], [BLOCK_M, BLOCK_DV]
    b_q = load_rows(q, i_b, i_g, i_row, n_queries, stride_qb, stride_qt, stride_qh, H, D_K, BLOCK_M, BLOCK_DK, DESC_Q)
    b_do = load_rows(do, i_b, i_g, i_row, n_queries, stride_db, stride_dt, stride_dh, H, D_V, BLOCK_M, BLOCK_DV, DESC_Q)
    b_lse2 = load_stat(lse2, i_bg, i_row, n_rows_padded, BLOCK_M, False)
    b_delta = load_stat(delta, i_bg, i_row, n_rows_padded, BLOCK_M, False)
    b_dq = tl.zeros([BLOCK_M, BLOCK_DK], dtype=tl.float32)

    i_full = first_lo
    if SLIDING or PACKED:
        i_full += tl.cdiv(last_lo - first_lo, BLOCK_N) * BLOCK_N
        b_dq = attend_dq(
            b_q, b_do, b_lse2, b_delta, b_dq, b_lo, b_hi, first_lo, tl.minimum(i_full, last_hi), k, v, i_b, i_g,
            n_keys, scale_log2, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
            D_K, D_V, BLOCK_N, BLOCK_DK, BLOCK_DV, True, DESC_KV,
        )  # fmt: skip
    i_edge = i_full + tl.maximum(first_hi - i_full, 0) // BLOCK_N * BLOCK_N
    b_dq = attend_dq(
        b_q, b_do, b_lse2, b_delta, b_dq, b_lo, b_hi, i_full, i_edge, k, v, i_b, i_g,
        n_keys, scale_log2, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
        D_K, D_V, BLOCK_N, BLOCK_DK, BLOCK_DV, False, DESC_KV,
    )  # fmt: skip
    b_dq = attend_dq(
        b_q, b_do, b_lse2, b_delta, b_dq, b_lo, b_hi, i_edge, last_hi, k, v, i_b, i_g,
        n_keys, scale_log2, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
        D_K, D_V, BLOCK_N, BLOCK_DK, BLOCK_DV, True, DESC_KV,
    )  # fmt: skip
    b_dq *= scale
    if ACCUMULATE:
        b_dq += load_rows(
            p_dq, i_b, i_g, i_row, n_queries, stride_xb, stride_xt, stride_xh, H, D_K, BLOCK_M, BLOCK_DK, False
        ).to(tl.float32)
    store_rows(p_dq, b_dq, i_b, i_g, i_row, n_queries, stride_xb, stride_xt, stride_xh, H, D_K, BLOCK_M, BLOCK_DK)


@triton.jit
def attend_dkv(
    b_k, b_v, b_dk, b_dv, b_first, b_end, i_start, i_stop, q, do, lse2, delta, i_b, i_g, i_bg, n_queries,
    n_rows_padded, scale_log2, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
    H: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, DESC: tl.constexpr, DESC_STAT: tl.constexpr,
):  # fmt: skip
    """Adds to `b_dk`, `b_dv` what comes of the rows `[i_start, i_stop)`, a multiple of BLOCK_M apart."""
    for i_row in tl.range(i_start, i_stop, BLOCK_M):
        o_r = i_row + tl.arange(0, BLOCK_M)
        b_q = load_rows(q, i_b, i_g, i_row, n_queries, stride_qb, stride_qt, stride_qh, H, D_K, BLOCK_M, BLOCK_DK, DESC)
        b_lse2 = load_stat(lse2, i_bg, i_row, n_rows_padded, BLOCK_M, DESC_STAT)
        b_st = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
        b_do = load_rows(
            do, i_b, i_g, i_row, n_queries, stride_db, stride_dt, stride_dh, H, D_V, BLOCK_M, BLOCK_DV, DESC
        )
        b_dpt = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
        # [BLOCK_N, BLOCK_M]
        b_pt = tl.math.exp2(b_st * scale_log2 - b_lse2[None, :])
        if MASKED:
            m_st = (o_r[None, :] >= b_first[:, None]) & (o_r[None, :] < b_end[:, None])
            b_pt = tl.where(m_st, b_pt, 0.0)
        b_dv = tl.dot(b_pt.to(b_do.dtype), b_do, b_dv, input_precision="ieee")
        b_delta = load_stat(delta, i_bg, i_row, n_rows_padded, BLOCK_M, DESC_STAT)
        b_dst = b_pt * (b_dpt - b_delta[None, :])
        b_dk = tl.dot(b_dst.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
    return b_dk, b_dv


@triton.jit(do_not_specialize=COUNTS)
def ranged_dkv_kernel(
    q, do, k, v, lse2, delta, p_dk, p_dv, p_first, p_end,
    scale, scale_log2, n_queries, n_keys, n_groups, n_rows_padded, n_parts, part_rows,
    stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, stride_xp, stride_yp,
    H: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SLIDING: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, PACKED: tl.constexpr,
    MASK_ALL: tl.constexpr, DESC_Q: tl.constexpr, DESC_STAT: tl.constexpr,
):  # fmt: skip
    """One tile of keys against one part of the rows that see it.

    Tiles of keys vary fastest, so programs that run together stream the same rows. In the compressed branch a part is a
    fixed run of rows and the last one, which every key sees, goes first; in the sliding branch parts are counted from
    the first row that sees the tile. The parts lie `[n_parts, B, N, G, D]`; a part that sees nothing writes its zeros.
    """
    n_tiles = tl.cdiv(n_keys, BLOCK_N)
    i_n = tl.program_id(0) % n_tiles * BLOCK_N
    i_bg = tl.program_id(0) // n_tiles
    n_bg = tl.num_programs(0) // (n_tiles * n_parts)
    i_part = n_parts - 1 - i_bg // n_bg
    i_bg = i_bg % n_bg
    i_b = i_bg // n_groups
    i_g = i_bg % n_groups

    o_n = i_n + tl.arange(0, BLOCK_N)
    m_n = o_n < n_keys
    i_last = tl.minimum(i_n + BLOCK_N, n_keys) - 1
    # Rows of a key: its queries' rows.
    b_first, b_end = seeing_queries(
        tl.minimum(o_n, n_keys - 1), p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, PACKED
    )
    b_first = b_first * H
    b_end = b_end * H
    first_begin, first_end = seeing_queries(i_n, p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, PACKED)
    last_begin, last_end = seeing_queries(i_last, p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, PACKED)

    # Multiples of BLOCK_M: rows [i_start, i_stop) of this part, of which [i_full, i_edge) are seen by every key.
    i_start = first_begin * H // BLOCK_M * BLOCK_M
    i_stop = tl.cdiv(last_end * H, BLOCK_M) * BLOCK_M
    i_part_row = i_part * part_rows
    if SLIDING:
        i_part_row += i_start
    i_start = tl.maximum(i_start, i_part_row)
    i_stop = tl.minimum(i_stop, i_part_row + part_rows)
    i_full = tl.minimum(tl.maximum(tl.cdiv(last_begin * H, BLOCK_M) * BLOCK_M, i_start), i_stop)

    b_k = load_keys(k, i_b, i_g, i_n, n_keys, stride_kb, stride_kn, stride_kg, D_K, BLOCK_N, BLOCK_DK, True, False)
    b_v = load_keys(v, i_b, i_g, i_n, n_keys, stride_vb, stride_vn, stride_vg, D_V, BLOCK_N, BLOCK_DV, True, False)
    b_dk = tl.zeros([BLOCK_N, BLOCK_DK], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)

    if MASK_ALL:
        i_full = i_stop
    b_dk, b_dv = attend_dkv(
        b_k, b_v, b_dk, b_dv, b_first, b_end, i_start, i_full, q, do, lse2, delta, i_b, i_g, i_bg, n_queries,
        n_rows_padded, scale_log2, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
        H, D_K, D_V, BLOCK_M, BLOCK_DK, BLOCK_DV, True, DESC_Q, DESC_STAT,
    )  # fmt: skip
    if not MASK_ALL:
        if SLIDING or PACKED:
            i_edge = tl.minimum(tl.maximum(first_end * H // BLOCK_M * BLOCK_M, i_full), i_stop)
        else:
            # Once complete a block is seen to the end, and rows past the end have no probability.
            i_edge = i_stop
        b_dk, b_dv = attend_dkv(
            b_k, b_v, b_dk, b_dv, b_first, b_end, i_full, i_edge, q, do, lse2, delta, i_b, i_g, i_bg, n_queries,
            n_rows_padded, scale_log2, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
            H, D_K, D_V, BLOCK_M, BLOCK_DK, BLOCK_DV, False, DESC_Q, DESC_STAT,
        )  # fmt: skip
        if SLIDING or PACKED:
            b_dk, b_dv = attend_dkv(
                b_k, b_v, b_dk, b_dv, b_first, b_end, i_edge, i_stop, q, do, lse2, delta, i_b, i_g, i_bg, n_queries,
                n_rows_padded, scale_log2, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
                H, D_K, D_V, BLOCK_M, BLOCK_DK, BLOCK_DV, True, DESC_Q, DESC_STAT,
            )  # fmt: skip

    o_key = (i_b.to(tl.int64) * n_keys + o_n) * n_groups + i_g
    o_dk = tl.arange(0, BLOCK_DK)
    o_dv = tl.arange(0, BLOCK_DV)
    p_dk += i_part.to(tl.int64) * stride_xp + (o_key * D_K)[:, None] + o_dk[None, :]
    p_dv += i_part.to(tl.int64) * stride_yp + (o_key * D_V)[:, None] + o_dv[None, :]
    tl.store(p_dk, (b_dk * scale).to(p_dk.dtype.element_ty), mask=m_n[:, None] & (o_dk < D_K)[None, :])
    tl.store(p_dv, b_dv.to(p_dv.dtype.element_ty), mask=m_n[:, None] & (o_dv < D_V)[None, :])


def split_keys(
    ranges: Ranges, tile: SplitTile, n_programs: int, n_rows: int, heads: int, n_processors: int
) -> tuple[int, int]:
    """How many parts the rows of a tile of keys are split into, and how many rows a part has.

    In the compressed branch half of the programs see (nearly) nothing, so twice as many are wanted.
    """
    block_m = tile.block_m
    if ranges.sliding:
        n_rows = min(n_rows, (tile.block_n + ranges.span) * heads + block_m)
    wanted = (1 if ranges.sliding else 2) * tile.waves * n_processors
    n_parts = max(1, min(wanted // n_programs, n_rows // (tile.least * block_m)))
    part_rows = triton.cdiv(triton.cdiv(n_rows, n_parts), block_m) * block_m
    return triton.cdiv(n_rows, part_rows), part_rows


def prepare(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    gate: Tensor | None,
    product: Tensor | None,
    n_groups: int,
) -> tuple[Tensor, Tensor]:
    """`lse2` and `delta`, each `[B * G, rows]`, padded."""
    if dlse is None:
        dlse = lse.new_zeros(1, 1, 1).expand_as(lse)
    batch, n_queries, n_heads, d_v = o.shape
    heads = n_heads // n_groups
    n_rows_padded = triton.cdiv(n_queries * heads, ROW_PAD) * ROW_PAD
    lse2 = torch.empty(batch * n_groups, n_rows_padded, dtype=torch.float32, device=o.device)
    delta = torch.empty(batch * n_groups, n_rows_padded, dtype=torch.float32, device=o.device)
    prepare_kernel[(n_rows_padded // ROW_PAD, batch * n_groups)](
        p_o=o,
        p_do=do,
        p_lse=lse,
        p_dlse=dlse,
        p_gate=gate,
        p_product=product,
        p_lse2=lse2,
        p_delta=delta,
        n_queries=n_queries,
        n_groups=n_groups,
        **strides("o", o),
        **strides("d", do),
        **strides("l", lse),
        **strides("e", dlse),
        **strides("g", lse if gate is None else gate),
        **strides("p", lse if product is None else product),
        H=heads,
        D_V=d_v,
        BLOCK_M=ROW_PAD,
        BLOCK_DV=block_width(d_v),
        num_warps=4,
    )
    return lse2, delta


def shared_arguments(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse2: Tensor, ranges: Ranges, scale: float, cut: Tile
) -> dict[str, Any]:
    """What the query-major and the key-major kernel are both given."""
    return {
        "scale": scale,
        "scale_log2": scale * LOG2_E,
        "n_queries": q.shape[1],
        "n_keys": k.shape[1],
        "n_groups": k.shape[2],
        "n_rows_padded": lse2.shape[1],
        **strides("q", q),
        **strides("d", do),
        **strides("k", k, "n", "g"),
        **strides("v", v, "n", "g"),
        "H": q.shape[2] // k.shape[2],
        "D_K": q.shape[3],
        "D_V": v.shape[3],
        "BLOCK_M": cut.block_m,
        "BLOCK_N": cut.block_n,
        "BLOCK_DK": block_width(q.shape[3]),
        "BLOCK_DV": block_width(v.shape[3]),
        "SLIDING": ranges.sliding,
        "SPAN": ranges.span,
        "STRIDE": ranges.stride,
        "PACKED": ranges.lo is not None,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
        "maxnreg": cut.max_registers,
    }


def query_gradient(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor,
    ranges: Ranges,
    scale: float,
    cut: Tile,
    into: Tensor | None,
) -> Tensor:
    batch, n_queries, n_heads, _ = q.shape
    n_groups = k.shape[2]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if into is None else into
    q_src, do_src = row_sources(q, do, n_heads // n_groups, cut)
    k_src, v_src = key_sources(k, v, cut)
    n_tiles = triton.cdiv(n_queries * (n_heads // n_groups), cut.block_m)
    ranged_dq_kernel[(n_tiles * batch * n_groups,)](
        q=q_src,
        do=do_src,
        k=k_src,
        v=v_src,
        lse2=lse2,
        delta=delta,
        p_dq=dq,
        p_lo=ranges.lo,
        p_hi=ranges.hi,
        **strides("x", dq),
        **shared_arguments(do, q, k, v, lse2, ranges, scale, cut),
        DESC_Q=q_src is not q,
        DESC_KV=k_src is not k,
        ACCUMULATE=into is not None,
    )
    return dq


def key_gradients(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor,
    ranges: Ranges,
    scale: float,
    cut: SplitTile,
) -> tuple[Tensor, Tensor]:
    batch, n_keys, n_groups, _ = k.shape
    if n_keys == 0:
        return torch.empty_like(k), torch.empty_like(v)
    heads = q.shape[2] // n_groups
    n_programs = triton.cdiv(n_keys, cut.block_n) * batch * n_groups
    n_parts, part_rows = split_keys(ranges, cut, n_programs, lse2.shape[1], heads, processors(q.device))
    part_dtype = k.dtype if n_parts == 1 else torch.float32
    dk = torch.empty(n_parts, *k.shape, dtype=part_dtype, device=k.device)
    dv = torch.empty(n_parts, *v.shape, dtype=part_dtype, device=v.device)
    q_src, do_src = row_sources(q, do, heads, cut)
    ranged_dkv_kernel[(n_programs * n_parts,)](
        q=q_src,
        do=do_src,
        k=k,
        v=v,
        lse2=describe(lse2, (1, cut.block_m)) if cut.desc_rows else lse2,
        delta=describe(delta, (1, cut.block_m)) if cut.desc_rows else delta,
        p_dk=dk,
        p_dv=dv,
        p_first=ranges.first,
        p_end=ranges.end,
        n_parts=n_parts,
        part_rows=part_rows,
        stride_xp=dk.stride(0),
        stride_yp=dv.stride(0),
        **shared_arguments(do, q, k, v, lse2, ranges, scale, cut),
        MASK_ALL=cut.mask_all,
        DESC_Q=q_src is not q,
        DESC_STAT=cut.desc_rows,
    )
    if n_parts == 1:
        return dk[0], dv[0]
    return dk.sum(dim=0).to(k.dtype), dv.sum(dim=0).to(v.dtype)


def ranged_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    ranges: Ranges,
    scale: float,
    tile: BackwardTile | None = None,
    gate: Tensor | None = None,
    product: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq`, `dk`, `dv`, each in the dtype and shape of what it is the gradient of; of `gate * o`, if there is a gate.

    `product` is `sum(do * o)`, fp32 `[B,S,Hq]`, where it is known already.
    `into`, contiguous, is a `dq` to add to. It is written last: whoever steps in for a failure finds it as it was.
    """
    tile = tile or pick_backward(q, v, ranges.sliding)
    do, q, o = row_contiguous(do), row_contiguous(q), row_contiguous(o)
    lse2, delta = prepare(do, dlse, o, lse, gate, product, k.shape[2])
    dk, dv = key_gradients(do, q, k, v, lse2, delta, ranges, scale, tile.dkv)
    return query_gradient(do, q, k, v, lse2, delta, ranges, scale, tile.dq, into), dk, dv
