"""Attention of a step to tokens in full: the sliding window, and the selected blocks.

Both are split over CTAs, which leave partials. The window is computed by CTAs of the selection launch, whose own work
is too short to keep the memory busy (`select.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.backends.triton.decode.common import follow, load_step_rows, load_tokens, position_of, store_partials
from nsa.backends.triton.primitives import FLOOR, online_softmax


@triton.jit
def attend(b_q, b_k, b_v, m_seen, b_m, b_l, b_o, scale_log2):
    """One tile of keys and values, of which each row sees `m_seen`."""
    b_s = tl.where(m_seen, tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), float("-inf"))
    b_p, b_m, b_l, b_o = online_softmax(b_s, b_m, b_l, b_o, scale_log2)
    return b_m, b_l, tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")


@triton.jit
def window_split(
    q, k, v, start, part_o, part_m, part_l, max_len, places, scale_log2, i_bg, i_s, i_slot, i_m,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
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
    o_pos = position_of(start, i_b, tl.minimum(o_r, ROWS - 1) // H, max_len)
    end = tl.max(o_pos, 0) + 1
    lo = tl.minimum(tl.load(start + i_b), max_len - 1) - WINDOW + 1 + i_s * SPLIT
    hi = end
    if i_s < N_SPLITS - 1:
        hi = tl.minimum(lo + SPLIT, end)
    lo = tl.maximum(lo, 0)
    b_q = load_step_rows(q, i_b, i_g, o_r, stride_qb, stride_qt, stride_qh, H, ROWS, DK, BLOCK_DK)
    k += i_b.to(tl.int64) * stride_kb + i_g * stride_kg
    v += i_b.to(tl.int64) * stride_vb + i_g * stride_vg
    b_m = tl.full([BLOCK_M], FLOOR, tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i_n in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < hi
        b_k = load_tokens(k, o_n % places, m_n, stride_kn, DK, BLOCK_DK)
        b_v = load_tokens(v, o_n % places, m_n, stride_vn, DV, BLOCK_DV)
        m_seen = m_n[None, :] & (o_n[None, :] <= o_pos[:, None]) & (o_n[None, :] > o_pos[:, None] - WINDOW)
        b_m, b_l, b_o = attend(b_q, b_k, b_v, m_seen, b_m, b_l, b_o, scale_log2)
    store_partials(part_o, part_m, part_l, i_slot, o_r, b_m, b_l, b_o, ROWS, DV, BLOCK_DV)


@triton.jit
def selected_split_kernel(
    q, k, v, start, indices, part_o, part_m, part_l, max_len, scale_log2,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    G: tl.constexpr, H: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, N_SELECT: tl.constexpr, SLOTS: tl.constexpr, FIRST_SLOT: tl.constexpr,
    SPLIT: tl.constexpr, SPLIT_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`SPLIT` of the selected blocks of one token and group. Grid (B*G, T, splits)."""
    CHUNKS: tl.constexpr = (SELECT_BLOCK + BLOCK_N - 1) // BLOCK_N
    follow(PDL)
    i_bg = tl.program_id(0)
    i_t = tl.program_id(1)
    i_s = tl.program_id(2)
    i_b = i_bg // G
    i_g = i_bg % G
    position = position_of(start, i_b, i_t, max_len)
    o_h = tl.arange(0, BLOCK_M)
    o_r = tl.where(o_h < H, i_t * H + o_h, T * H)
    # [SPLIT_PAD], ascending, -1 behind the last
    o_s = i_s * SPLIT + tl.arange(0, SPLIT_PAD)
    m_s = (tl.arange(0, SPLIT_PAD) < SPLIT) & (o_s < N_SELECT)
    p_index = indices + ((i_b * T + i_t) * G + i_g).to(tl.int64) * N_SELECT
    b_j = tl.load(p_index + o_s, mask=m_s, other=-1)
    n_blocks = tl.sum((b_j >= 0).to(tl.int32), 0)

    b_q = load_step_rows(q, i_b, i_g, o_r, stride_qb, stride_qt, stride_qh, H, T * H, DK, BLOCK_DK)
    k += i_b.to(tl.int64) * stride_kb + i_g * stride_kg
    v += i_b.to(tl.int64) * stride_vb + i_g * stride_vg
    b_m = tl.full([BLOCK_M], FLOOR, tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i in tl.range(0, n_blocks * CHUNKS, num_stages=STAGES):
        j = tl.sum(tl.where(tl.arange(0, SPLIT_PAD) == i // CHUNKS, b_j, 0), 0)
        o_in = (i % CHUNKS) * BLOCK_N + tl.arange(0, BLOCK_N)
        o_n = j * SELECT_BLOCK + o_in
        m_n = (o_n <= position) & (o_in < SELECT_BLOCK)
        b_k = load_tokens(k, o_n, m_n, stride_kn, DK, BLOCK_DK)
        b_v = load_tokens(v, o_n, m_n, stride_vn, DV, BLOCK_DV)
        b_m, b_l, b_o = attend(b_q, b_k, b_v, m_n[None, :], b_m, b_l, b_o, scale_log2)
    i_slot = i_bg * SLOTS + FIRST_SLOT + i_s
    store_partials(part_o, part_m, part_l, i_slot, o_r, b_m, b_l, b_o, T * H, DV, BLOCK_DV)
