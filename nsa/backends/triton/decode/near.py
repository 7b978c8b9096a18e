"""Attention of a step to tokens in full: the sliding window, forced blocks, and the blocks that were selected freely.

All are split over CTAs, which leave partials. Those of the window and of the forced blocks come first in the grid and
need nothing of the selection: they keep the memory busy while it runs, which is bound by latency. The others wait for
the selection of their own batch row and group.

A block that several tokens of a step selected is read once, for all of them: the splits go through the distinct blocks
of the tokens' lists, in the order of their first occurrence, and rows of the other tokens are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from nsa.backends.triton.decode.common import (
    arrive,
    last_of,
    load_step_rows,
    load_tokens,
    position_of,
    store_partials,
    wait_for,
    wait_then_trigger,
)
from nsa.backends.triton.primitives import FLOOR, online_softmax


@triton.jit
def attend_seen(b_q, b_k, b_v, m_seen, b_m, b_l, b_o, scale_log2):
    """One tile of keys and values, of which each row sees `m_seen`."""
    b_s = tl.where(m_seen, tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), float("-inf"))
    b_p, b_m, b_l, b_o = online_softmax(b_s, b_m, b_l, b_o, scale_log2)
    return b_m, b_l, tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")


@triton.jit
def window_split(
    q, k, v, k_scale, v_scale, start, partial_o, partial_m, partial_l, i_bg, i_s, i_m, i_slot, last, places,
    scale_log2, stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    G: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    N_SPLITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`SPLIT` keys of the window of the step's first token; the last split goes on to the step's last token. Position
    `p` lies at `p % places` of `k [B, places, G, Dk]` and `v`."""
    i_b = i_bg // G
    i_g = i_bg % G
    o_r = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    # [BLOCK_M]
    o_pos = position_of(start, i_b, tl.minimum(o_r, ROWS - 1) // H, last)
    end = tl.max(o_pos, 0) + 1
    lo = position_of(start, i_b, 0, last) - WINDOW + 1 + i_s * SPLIT
    hi = tl.where(i_s < N_SPLITS - 1, tl.minimum(lo + SPLIT, end), end)
    b_q = load_step_rows(q, i_b, i_g, o_r, stride_qb, stride_qt, stride_qh, H, ROWS, DK, BLOCK_DK)
    b_m = tl.full([BLOCK_M], FLOOR, tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i_n in tl.range(tl.maximum(lo, 0), hi, BLOCK_N, num_stages=STAGES):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < hi
        b_k = load_tokens(
            k, k_scale, None, i_b, i_g, o_n % places, m_n, 0, stride_kb, stride_kn, stride_kg,
            1, DK, BLOCK_DK, b_q.dtype,
        )  # fmt: skip
        b_v = load_tokens(
            v, v_scale, None, i_b, i_g, o_n % places, m_n, 0, stride_vb, stride_vn, stride_vg,
            1, DV, BLOCK_DV, b_q.dtype,
        )  # fmt: skip
        m_seen = m_n[None, :] & (o_n[None, :] <= o_pos[:, None]) & (o_n[None, :] > o_pos[:, None] - WINDOW)
        b_m, b_l, b_o = attend_seen(b_q, b_k, b_v, m_seen, b_m, b_l, b_o, scale_log2)
    store_partials(partial_o, partial_m, partial_l, i_slot, o_r, b_m, b_l, b_o, ROWS, DV, BLOCK_DV)


@triton.jit
def selected_split(
    q, k, v, k_scale, v_scale, table, start, indices, partial_o, partial_m, partial_l, i_bg, i_s, i_m, i_slot, forced,
    columns, arrivals, last, scale_log2,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    G: tl.constexpr, H: tl.constexpr, T: tl.constexpr, T_PAD: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAGE: tl.constexpr, SELECT_BLOCK: tl.constexpr, N_SELECT: tl.constexpr, N_PAD: tl.constexpr, N_INIT: tl.constexpr,
    N_LOCAL: tl.constexpr, N_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The `forced` blocks, or split `i_s` of those that the tokens of this tile of rows selected freely."""
    ROWS: tl.constexpr = T * H
    CHUNKS: tl.constexpr = (SELECT_BLOCK + BLOCK_N - 1) // BLOCK_N
    i_b = i_bg // G
    i_g = i_bg % G
    o_r = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_t = tl.minimum(o_r, ROWS - 1) // H
    o_pos = position_of(start, i_b, o_t, last)
    b_q = load_step_rows(q, i_b, i_g, o_r, stride_qb, stride_qt, stride_qh, H, ROWS, DK, BLOCK_DK)
    # [T_PAD * N_PAD]: each token's list of blocks in ascending order, whose two ends are the forced ones.
    o_e = tl.arange(0, T_PAD * N_PAD)
    e_t = o_e // N_PAD
    e_n = o_e % N_PAD
    e_own = position_of(start, i_b, tl.minimum(e_t, T - 1), last) // SELECT_BLOCK
    n_taken = tl.minimum(e_own + 1, N_SELECT)
    m_forced = (e_n < N_INIT) | (e_n >= n_taken - N_LOCAL)
    m_e = (e_n < n_taken) & (e_t >= tl.min(o_t, 0)) & (e_t <= tl.max(o_t, 0)) & (m_forced == forced)
    if forced:
        e_j = tl.where(e_n < N_INIT, e_n, e_own + 1 - n_taken + e_n)
    else:
        wait_for(arrivals + i_bg * 3 + 1, T)
        p_index = indices + ((i_b * T + e_t) * G + i_g).to(tl.int64) * N_SELECT + e_n
        e_j = tl.load(p_index, mask=m_e, other=0)
    m_first = m_e
    if T > 1:
        m_same = (e_j[:, None] == e_j[None, :]) & m_e[None, :] & (e_t[None, :] < e_t[:, None])
        m_first = m_e & (tl.sum(m_same.to(tl.int32), 1) == 0)
    e_rank = tl.where(m_first, tl.cumsum(m_first.to(tl.int32), 0), 0)
    n_blocks = tl.max(e_rank, 0)
    first = 0
    if forced == False:  # noqa: E712  a tensor
        # The same number of blocks for every split, whatever the tokens share.
        first = i_s * n_blocks // N_SPLITS
        n_blocks = (i_s + 1) * n_blocks // N_SPLITS

    b_m = tl.full([BLOCK_M], FLOOR, tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i in tl.range(first * CHUNKS, n_blocks * CHUNKS, num_stages=STAGES):
        j = tl.sum(tl.where(e_rank == i // CHUNKS + 1, e_j, 0), 0)
        o_in = (i % CHUNKS) * BLOCK_N + tl.arange(0, BLOCK_N)
        o_n = j * SELECT_BLOCK + o_in
        m_n = (o_n <= tl.max(o_pos, 0)) & (o_in < SELECT_BLOCK)
        b_k = load_tokens(
            k, k_scale, table, i_b, i_g, o_n, m_n, columns, stride_kb, stride_kn, stride_kg,
            PAGE, DK, BLOCK_DK, b_q.dtype,
        )  # fmt: skip
        b_v = load_tokens(
            v, v_scale, table, i_b, i_g, o_n, m_n, columns, stride_vb, stride_vn, stride_vg,
            PAGE, DV, BLOCK_DV, b_q.dtype,
        )  # fmt: skip
        m_seen = m_n[None, :] & (o_n[None, :] <= o_pos[:, None])
        if T > 1:
            takers = tl.sum(tl.where(m_e & (e_j == j), 1 << e_t, 0), 0)
            m_seen = m_seen & (((takers >> o_t) & 1) == 1)[:, None]
        b_m, b_l, b_o = attend_seen(b_q, b_k, b_v, m_seen, b_m, b_l, b_o, scale_log2)
    store_partials(partial_o, partial_m, partial_l, i_slot, o_r, b_m, b_l, b_o, ROWS, DV, BLOCK_DV)


@triton.jit
def near_kernel(
    q, k_win, v_win, k_win_scale, v_win_scale, k_sel, v_sel, k_sel_scale, v_sel_scale, table, start, counts, limits,
    indices, partial_o, partial_m, partial_l, arrivals, pairs, columns, max_len, places, scale_log2,
    stride_qb, stride_qt, stride_qh, stride_wkb, stride_wkn, stride_wkg, stride_wvb, stride_wvn, stride_wvg,
    stride_skb, stride_skn, stride_skg, stride_svb, stride_svn, stride_svg,
    G: tl.constexpr, H: tl.constexpr, T: tl.constexpr, T_PAD: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SELECT_BLOCK: tl.constexpr, N_SELECT: tl.constexpr, N_PAD: tl.constexpr,
    N_INIT: tl.constexpr, N_LOCAL: tl.constexpr, SLOTS: tl.constexpr, FIRST_SLOT: tl.constexpr,
    WINDOW_SPLITS: tl.constexpr, SPLIT: tl.constexpr, N_EARLY: tl.constexpr, FREE_SPLITS: tl.constexpr,
    ROW_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SEL: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, ALONE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one tile of rows. Grid (pairs of batch row and group * tiles of rows * splits), where the splits are
    `WINDOW_SPLITS` of the window, one of the forced blocks if there are any, and `FREE_SPLITS`. `ALONE`: no launch of
    the attention comes before this one."""
    if ALONE:
        wait_then_trigger(PDL)
    elif PDL:
        gdc_launch_dependents()
    units = pairs * ROW_TILES
    i_s = tl.program_id(0) // units
    i_unit = tl.program_id(0) % units
    if FREE_SPLITS == 0:
        if not ALONE:
            # The merge waits for this launch alone, so no CTA of it may end before the selection's.
            wait_for(arrivals + i_unit // ROW_TILES * 3 + 1, T)
    elif i_s >= N_EARLY:
        # The splits of a row are neighbors: it may be selected before others are.
        i_free = tl.program_id(0) - units * N_EARLY
        i_s = N_EARLY + i_free % FREE_SPLITS
        i_unit = i_free // FREE_SPLITS
    i_bg = i_unit // ROW_TILES
    i_m = i_unit % ROW_TILES
    i_slot = i_bg * SLOTS + FIRST_SLOT + i_s
    last = last_of(start, counts, limits, i_bg // G, max_len, T)
    if i_s < WINDOW_SPLITS:
        window_split(
            q, k_win, v_win, k_win_scale, v_win_scale, start, partial_o, partial_m, partial_l, i_bg, i_s, i_m, i_slot,
            last, places, scale_log2,
            stride_qb, stride_qt, stride_qh, stride_wkb, stride_wkn, stride_wkg, stride_wvb, stride_wvn, stride_wvg,
            G=G, H=H, ROWS=T * H, DK=DK, DV=DV, WINDOW=WINDOW, N_SPLITS=WINDOW_SPLITS, SPLIT=SPLIT,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_DK=BLOCK_DK, BLOCK_DV=BLOCK_DV, STAGES=STAGES,
        )  # fmt: skip
    if i_s >= WINDOW_SPLITS:
        selected_split(
            q, k_sel, v_sel, k_sel_scale, v_sel_scale, table, start, indices, partial_o, partial_m, partial_l, i_bg,
            i_s - N_EARLY, i_m, i_slot, i_s < N_EARLY, columns, arrivals, last, scale_log2,
            stride_qb, stride_qt, stride_qh, stride_skb, stride_skn, stride_skg, stride_svb, stride_svn, stride_svg,
            G=G, H=H, T=T, T_PAD=T_PAD, DK=DK, DV=DV, PAGE=PAGE, SELECT_BLOCK=SELECT_BLOCK, N_SELECT=N_SELECT,
            N_PAD=N_PAD, N_INIT=N_INIT, N_LOCAL=N_LOCAL, N_SPLITS=FREE_SPLITS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_SEL,
            BLOCK_DK=BLOCK_DK, BLOCK_DV=BLOCK_DV, STAGES=STAGES,
        )  # fmt: skip
    arrive(arrivals + i_bg * 3 + 2)
