"""Takes a step's projections into the cache: RoPE of queries and keys, and the writes to its three stores.

    out[:half] = x[:half] * cos - x[half:] * sin          out[half:] = x[half:] * cos + x[:half] * sin

Grid (B*T, tiles of query heads + 3). The last three CTAs of a token write its selected, sliding and raw key and value;
raw ones are what blocks are compressed from. Of dense attention, whose cache is one store, only the first of the three
is there. A token that is padding or does not fit writes nothing. Angles are computed in fp64 from the position: no
table, whose length would be the cache's. The first CTA of a batch row also zeroes the counters of its groups, by which
later launches wait for each other (`common.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa.backends.triton.decode.common import cosine_and_sine, end_of, place_of, store_row


@triton.jit
def rotated_halves(p_x, m_x, cos, sin, HALF: tl.constexpr):
    """Both halves of the rows at `p_x`, rotated; products are not fused into sums, to have the bits of plain torch."""
    b_first = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_second = tl.load(p_x + HALF, mask=m_x, other=0.0).to(tl.float32)
    return b_first * cos - b_second * sin, b_second * cos + b_first * sin


@triton.jit
def angles_at(frequencies, position, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """`cos, sin [1, BLOCK_HALF]` at `position`."""
    o_d = tl.arange(0, BLOCK_HALF)
    cos, sin = cosine_and_sine(position, tl.load(frequencies + o_d, mask=o_d < HALF, other=0.0))
    return cos[None, :], sin[None, :]


@triton.jit
def put(
    k, v, k_store, v_store, k_scale, v_scale, table, cos, sin, i_b, i_t, place, keep, columns,
    stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_ksb, stride_ksn, stride_vsb, stride_vsn,
    G: tl.constexpr, G_PAD: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HALF_V: tl.constexpr, PAGE: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """One token's key and value of every group into `place` of its row."""
    HALF: tl.constexpr = DK // 2
    HALF_V: tl.constexpr = DV // 2
    o_g = tl.arange(0, G_PAD)
    m_g = keep & (o_g < G)
    o_d = tl.arange(0, BLOCK_HALF)
    m_k = m_g[:, None] & (o_d < HALF)[None, :]
    p_k = k + i_b * stride_kb + i_t * stride_kt + (o_g * stride_kg)[:, None] + o_d[None, :]
    if ROTATE:
        b_first, b_second = rotated_halves(p_k, m_k, cos, sin, HALF)
    else:
        b_first, b_second = tl.load(p_k, mask=m_k, other=0.0), tl.load(p_k + HALF, mask=m_k, other=0.0)
    o_b, o_n = place_of(table, i_b, place, keep, columns, stride_ksb, stride_ksn, PAGE)
    dtype = k.dtype.element_ty
    store_row(k_store, k_scale, o_b + o_n + o_g * DK, m_g, b_first.to(dtype), b_second.to(dtype), DK, BLOCK_HALF)
    o_d = tl.arange(0, BLOCK_HALF_V)
    m_v = m_g[:, None] & (o_d < HALF_V)[None, :]
    p_v = v + i_b * stride_vb + i_t * stride_vt + (o_g * stride_vg)[:, None] + o_d[None, :]
    b_first, b_second = tl.load(p_v, mask=m_v, other=0.0), tl.load(p_v + HALF_V, mask=m_v, other=0.0)
    o_b, o_n = place_of(table, i_b, place, keep, columns, stride_vsb, stride_vsn, PAGE)
    store_row(v_store, v_scale, o_b + o_n + o_g * DV, m_g, b_first, b_second, DV, BLOCK_HALF_V)


@triton.jit(do_not_specialize=["position_offset"])
def append_kernel(
    q, k_raw, v_raw, k_sel, v_sel, k_win, v_win, q_out, tail_k, tail_v, selected_k, selected_v, window_k, window_v,
    selected_k_scale, selected_v_scale, window_k_scale, window_v_scale, table, start, counts, limits, frequencies,
    arrivals, columns, max_len, tail_places, window_places, position_offset,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
    stride_tkb, stride_tkn, stride_tvb, stride_tvn, stride_skb, stride_skn, stride_svb, stride_svn,
    stride_wkb, stride_wkn, stride_wvb, stride_wvn,
    HEADS: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_HALF_V: tl.constexpr, HEAD_TILE: tl.constexpr, N_HEAD_TILES: tl.constexpr,
    PAGE: tl.constexpr, ROTATE_RAW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DK // 2
    if PDL:
        gdc_launch_dependents()
    i_b = (tl.program_id(0) // T).to(tl.int64)
    i_t = tl.program_id(0) % T
    i_task = tl.program_id(1)
    position = tl.load(start + i_b) + i_t
    cos, sin = angles_at(frequencies, position + position_offset, HALF, BLOCK_HALF)
    # Lengths are older than the launch before this one, which makes what is appended.
    if PDL:
        gdc_wait()
    if i_task < N_HEAD_TILES:
        o_h = i_task * HEAD_TILE + tl.arange(0, HEAD_TILE)
        o_d = tl.arange(0, BLOCK_HALF)
        m_q = (o_h < HEADS)[:, None] & (o_d < HALF)[None, :]
        p_q = q + i_b * stride_qb + i_t * stride_qt + (o_h * stride_qh)[:, None] + o_d[None, :]
        b_first, b_second = rotated_halves(p_q, m_q, cos, sin, HALF)
        p_out = q_out + ((i_b * T + i_t) * HEADS + o_h)[:, None] * DK + o_d[None, :]
        tl.store(p_out, b_first.to(q_out.dtype.element_ty), mask=m_q)
        tl.store(p_out + HALF, b_second.to(q_out.dtype.element_ty), mask=m_q)
        o_g = tl.arange(0, 4 * G_PAD)
        m_g = (o_g < 3 * G) & (i_t == 0) & (i_task == 0)
        tl.store(arrivals + i_b * (3 * G) + o_g, tl.zeros([4 * G_PAD], tl.int32), mask=m_g)
    else:
        keep = position < end_of(start, counts, limits, i_b, max_len, T)
        i_store = i_task - N_HEAD_TILES
        if i_store == 0:
            put(
                k_sel, v_sel, selected_k, selected_v, selected_k_scale, selected_v_scale, table, cos, sin, i_b, i_t,
                position, keep, columns,
                stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
                stride_skb, stride_skn, stride_svb, stride_svn,
                G, G_PAD, DK, DV, BLOCK_HALF, BLOCK_HALF_V, PAGE, True,
            )  # fmt: skip
        elif tail_k is not None:
            if i_store == 1:
                put(
                    k_win, v_win, window_k, window_v, window_k_scale, window_v_scale, None, cos, sin, i_b, i_t,
                    position % window_places, keep, 0,
                    stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
                    stride_wkb, stride_wkn, stride_wvb, stride_wvn,
                    G, G_PAD, DK, DV, BLOCK_HALF, BLOCK_HALF_V, PAGE, True,
                )  # fmt: skip
            else:
                put(
                    k_raw, v_raw, tail_k, tail_v, None, None, None, cos, sin, i_b, i_t, position % tail_places, keep, 0,
                    stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg,
                    stride_tkb, stride_tkn, stride_tvb, stride_tvn,
                    G, G_PAD, DK, DV, BLOCK_HALF, BLOCK_HALF_V, PAGE, ROTATE_RAW,
                )  # fmt: skip
