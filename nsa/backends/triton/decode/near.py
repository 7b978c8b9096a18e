"""Attention of a step to tokens in full: the sliding window, forced blocks, and the blocks that were selected freely.

All are split over CTAs, which leave partials. Those of the window and of the forced blocks come first in the grid and
need nothing of the selection: they keep the memory busy while it runs, which is bound by latency.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from nsa.backends.triton.decode.common import follow, load_step_rows, load_tokens, position_of, store_partials
from nsa.backends.triton.primitives import FLOOR, online_softmax


@triton.jit
def attend(b_q, b_k, b_v, m_seen, b_m, b_l, b_o, scale_log2):
    """One tile of keys and values, of which each row sees `m_seen`."""
    b_s = tl.where(m_seen, tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), float("-inf"))
    b_p, b_m, b_l, b_o = online_softmax(b_s, b_m, b_l, b_o, scale_log2)
    return b_m, b_l, tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")


@triton.jit
def attend_range(
    b_q, k, v, i_b, i_g, o_pos, o_lower, lo, hi, places, scale_log2,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    HEAD: tl.constexpr, RING: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial softmax over positions `[0, HEAD)` and `[lo, hi)`; a row at `o_pos` sees those of `[o_lower, o_pos]` and
    of the head. In a `RING`, position `p` lies at `p % places`."""
    N_HEAD: tl.constexpr = (HEAD + BLOCK_N - 1) // BLOCK_N
    b_m = tl.full([BLOCK_M], FLOOR, tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i in tl.range(N_HEAD + tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N), num_stages=STAGES):
        o_n = tl.where(i < N_HEAD, i * BLOCK_N, lo + (i - N_HEAD) * BLOCK_N) + tl.arange(0, BLOCK_N)
        m_n = o_n < tl.where(i < N_HEAD, tl.minimum(HEAD, hi), hi)
        o_place = o_n % places if RING else o_n
        b_k = load_tokens(k, i_b, i_g, o_place, m_n, stride_kb, stride_kn, stride_kg, DK, BLOCK_DK)
        b_v = load_tokens(v, i_b, i_g, o_place, m_n, stride_vb, stride_vn, stride_vg, DV, BLOCK_DV)
        m_seen = (o_n[None, :] >= o_lower[:, None]) | (o_n < HEAD)[None, :]
        m_seen = m_seen & m_n[None, :] & (o_n[None, :] <= o_pos[:, None])
        b_m, b_l, b_o = attend(b_q, b_k, b_v, m_seen, b_m, b_l, b_o, scale_log2)
    return b_m, b_l, b_o


@triton.jit
def attend_blocks(
    b_q, k, v, i_b, i_g, b_j, n_blocks, position, scale_log2,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    SELECT_BLOCK: tl.constexpr, SPLIT_PAD: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial softmax of one token over the first `n_blocks` of the blocks `b_j [SPLIT_PAD]`."""
    CHUNKS: tl.constexpr = (SELECT_BLOCK + BLOCK_N - 1) // BLOCK_N
    b_m = tl.full([BLOCK_M], FLOOR, tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i in tl.range(0, n_blocks * CHUNKS, num_stages=STAGES):
        j = tl.sum(tl.where(tl.arange(0, SPLIT_PAD) == i // CHUNKS, b_j, 0), 0)
        o_in = (i % CHUNKS) * BLOCK_N + tl.arange(0, BLOCK_N)
        o_n = j * SELECT_BLOCK + o_in
        m_n = (o_n <= position) & (o_in < SELECT_BLOCK)
        b_k = load_tokens(k, i_b, i_g, o_n, m_n, stride_kb, stride_kn, stride_kg, DK, BLOCK_DK)
        b_v = load_tokens(v, i_b, i_g, o_n, m_n, stride_vb, stride_vn, stride_vg, DV, BLOCK_DV)
        b_m, b_l, b_o = attend(b_q, b_k, b_v, m_n[None, :], b_m, b_l, b_o, scale_log2)
    return b_m, b_l, b_o


@triton.jit
def near_kernel(
    q, k_win, v_win, k_sel, v_sel, start, indices, part_o, part_m, part_l, pairs, max_len, places, scale_log2,
    stride_qb, stride_qt, stride_qh, stride_wkb, stride_wkn, stride_wkg, stride_wvb, stride_wvn, stride_wvg,
    stride_skb, stride_skn, stride_skg, stride_svb, stride_svn, stride_svg,
    G: tl.constexpr, H: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, N_SELECT: tl.constexpr, N_INIT: tl.constexpr, N_LOCAL: tl.constexpr,
    SLOTS: tl.constexpr, FIRST_SLOT: tl.constexpr, WINDOW_SPLITS: tl.constexpr, WINDOW_SPLIT: tl.constexpr,
    N_EARLY: tl.constexpr, FREE_SPLITS: tl.constexpr, FREE_SPLIT: tl.constexpr, FREE_PAD: tl.constexpr,
    ROW_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SEL: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One split. Grid: of every pair of batch row and group the `N_EARLY` splits (those of the window, one of forced
    blocks if there are any) times tiles of rows; then pair by pair `T` tokens times `FREE_SPLITS`."""
    ROWS: tl.constexpr = T * H
    HEAD: tl.constexpr = N_INIT * SELECT_BLOCK
    i_cta = tl.program_id(0)
    if i_cta < pairs * (N_EARLY * ROW_TILES):
        if FREE_SPLITS == 0:
            follow(PDL)
        elif PDL:
            gdc_launch_dependents()
        i_bg = i_cta % pairs
        i_b = i_bg // G
        i_g = i_bg % G
        i_s = i_cta // pairs // ROW_TILES
        o_r = i_cta // pairs % ROW_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
        # [BLOCK_M]
        o_pos = position_of(start, i_b, tl.minimum(o_r, ROWS - 1) // H, max_len)
        first = position_of(start, i_b, 0, max_len)
        end = tl.max(o_pos, 0) + 1
        b_q = load_step_rows(q, i_b, i_g, o_r, stride_qb, stride_qt, stride_qh, H, ROWS, DK, BLOCK_DK)
        if i_s < WINDOW_SPLITS:
            # From the window of the step's first token on; the last split goes on to the last token.
            lo = first - WINDOW + 1 + i_s * WINDOW_SPLIT
            hi = tl.where(i_s < WINDOW_SPLITS - 1, tl.minimum(lo + WINDOW_SPLIT, end), end)
            b_m, b_l, b_o = attend_range(
                b_q, k_win, v_win, i_b, i_g, o_pos, o_pos - WINDOW + 1, tl.maximum(lo, 0), hi, places, scale_log2,
                stride_wkb, stride_wkn, stride_wkg, stride_wvb, stride_wvn, stride_wvg,
                0, True, DK, DV, BLOCK_M, BLOCK_N, BLOCK_DK, BLOCK_DV, STAGES,
            )  # fmt: skip
        else:
            lo = tl.maximum((first // SELECT_BLOCK - N_LOCAL + 1) * SELECT_BLOCK, HEAD)
            o_lower = (o_pos // SELECT_BLOCK - N_LOCAL + 1) * SELECT_BLOCK
            b_m, b_l, b_o = attend_range(
                b_q, k_sel, v_sel, i_b, i_g, o_pos, o_lower, lo, end, places, scale_log2,
                stride_skb, stride_skn, stride_skg, stride_svb, stride_svn, stride_svg,
                HEAD, False, DK, DV, BLOCK_M, BLOCK_N, BLOCK_DK, BLOCK_DV, STAGES,
            )  # fmt: skip
        i_slot = i_bg * SLOTS + FIRST_SLOT + i_s
        store_partials(part_o, part_m, part_l, i_slot, o_r, b_m, b_l, b_o, ROWS, DV, BLOCK_DV)
    else:
        i_cta -= pairs * (N_EARLY * ROW_TILES)
        i_bg = i_cta // (T * FREE_SPLITS)
        i_t = i_cta % T
        i_s = i_cta // T % FREE_SPLITS
        i_b = i_bg // G
        i_g = i_bg % G
        position = position_of(start, i_b, i_t, max_len)
        o_h = tl.arange(0, BLOCK_H)
        o_r = tl.where(o_h < H, i_t * H + o_h, ROWS)
        b_q = load_step_rows(q, i_b, i_g, o_r, stride_qb, stride_qt, stride_qh, H, ROWS, DK, BLOCK_DK)
        # Of the blocks in ascending order, those between the first and the last ones, which are forced.
        n_taken = tl.minimum(position // SELECT_BLOCK + 1, N_SELECT)
        n_blocks = tl.minimum(tl.maximum(n_taken - N_INIT - N_LOCAL - i_s * FREE_SPLIT, 0), FREE_SPLIT)
        o_s = tl.arange(0, FREE_PAD)
        p_index = indices + ((i_b * T + i_t) * G + i_g).to(tl.int64) * N_SELECT + N_INIT + i_s * FREE_SPLIT
        follow(PDL)
        b_j = tl.load(p_index + o_s, mask=o_s < n_blocks, other=0)
        b_m, b_l, b_o = attend_blocks(
            b_q, k_sel, v_sel, i_b, i_g, b_j, n_blocks, position, scale_log2,
            stride_skb, stride_skn, stride_skg, stride_svb, stride_svn, stride_svg,
            SELECT_BLOCK, FREE_PAD, DK, DV, BLOCK_H, BLOCK_SEL, BLOCK_DK, BLOCK_DV, STAGES,
        )  # fmt: skip
        i_slot = i_bg * SLOTS + FIRST_SLOT + N_EARLY + i_s
        store_partials(part_o, part_m, part_l, i_slot, o_r, b_m, b_l, b_o, ROWS, DV, BLOCK_DV)
