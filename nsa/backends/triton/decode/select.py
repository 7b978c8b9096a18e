"""Block selection of a step from pooled probabilities, and beside it the sliding window.

    importance[t, j] = sum_head 1/sum[head] * sum_c 2^(tile_max - max[head]) * pool[t, head, c, j - c]

All scaling but the last is by powers of two, and sums have one order, so that blocks with equal keys tie exactly, in
whichever splits they lie; of equal blocks the lower is taken. Selection goes by bisection, as in `selection.py`.

Grid (B*G, T + splits of the window * tiles of rows). The CTAs of the first kind own one token of one group; they are
bound by latency and leave the memory idle, so those of the second kind share the launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from nsa.backends.triton.decode.common import follow, position_of, power_of_2
from nsa.backends.triton.decode.near import window_split
from nsa.backends.triton.primitives import FLOOR
from nsa.backends.triton.selection import complete_blocks, last_taken


@triton.jit
def pooled_importance(
    pool, tile_max, part_m, part_l, i_bg, i_t, n_seen,
    H: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr, REACH: tl.constexpr, SLOTS: tl.constexpr,
    N_SPLITS: tl.constexpr, N_SPLITS_PAD: tl.constexpr, N_TILES: tl.constexpr, N_TILES_PAD: tl.constexpr,
    BLOCK_J: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`[N_TILES_PAD, BLOCK_J]` importance of every selection block that a seen compressed block reaches, else 0.

    Head by head: with the heads as an axis to sum over, what Triton 3.6 compiled selected wrong blocks on an H200.
    """
    o_s = tl.arange(0, N_SPLITS_PAD)
    o_tile = tl.arange(0, N_TILES_PAD)
    o_in = tl.arange(0, BLOCK_J)[None, :]
    o_j = o_tile[:, None] * BLOCK_J + o_in
    m_tile = o_tile * (BLOCK_J * R) < n_seen
    m_before = (o_tile >= 1) & ((o_tile - 1) * (BLOCK_J * R) < n_seen)
    b_importance = tl.zeros([N_TILES_PAD, BLOCK_J], tl.float32)
    for i_h in tl.range(H, loop_unroll_factor=UNROLL):
        i_row = i_bg.to(tl.int64) * ROWS + i_t * H + i_h
        o_part = (i_bg.to(tl.int64) * SLOTS + o_s) * ROWS + i_t * H + i_h
        b_l = tl.load(part_l + o_part, mask=o_s < N_SPLITS, other=0.0)
        b_m = tl.load(part_m + o_part, mask=b_l > 0, other=FLOOR)
        top = tl.max(b_m, 0)
        total = tl.sum(b_l * power_of_2(b_m - top), 0)
        # [N_TILES_PAD], and of the tile before: the first blocks of a tile are reached from there
        p_max = tile_max + i_row * N_TILES + o_tile
        b_scale = power_of_2(tl.load(p_max, mask=m_tile, other=FLOOR) - top)
        b_before = power_of_2(tl.load(p_max - 1, mask=m_before, other=FLOOR) - top)
        b_pooled = tl.zeros([N_TILES_PAD, BLOCK_J], tl.float32)
        for c in tl.static_range(REACH + 1):
            p_c = pool + (i_row * (REACH + 1) + c) * (N_TILES * BLOCK_J) + (o_j - c)
            b_c = tl.load(p_c, mask=(o_j >= c) & ((o_j - c) * R < n_seen), other=0.0)
            b_pooled += b_c * tl.where(o_in < c, b_before[:, None], b_scale[:, None])
        b_importance += b_pooled * (1.0 / tl.where(total > 0, total, 1.0))
    return b_importance


@triton.jit
def select_token(
    pool, tile_max, part_m, part_l, start, p_index, i_bg, i_b, i_t, max_len,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    R: tl.constexpr, REACH: tl.constexpr, N_SELECT: tl.constexpr, N_PAD: tl.constexpr, N_INIT: tl.constexpr,
    N_LOCAL: tl.constexpr, SLOTS: tl.constexpr, N_SPLITS: tl.constexpr, N_SPLITS_PAD: tl.constexpr,
    N_TILES: tl.constexpr, N_TILES_PAD: tl.constexpr, BLOCK_J: tl.constexpr, UNROLL: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The blocks that one token of one group reads: `N_SELECT` indices, ascending, -1 where there are fewer."""
    N_FREE: tl.constexpr = N_SELECT - N_INIT - N_LOCAL
    N_COLUMNS: tl.constexpr = N_TILES_PAD * BLOCK_J
    position = position_of(start, i_b, i_t, max_len)
    own = position // SELECT_BLOCK
    if own < N_SELECT:
        o_n = tl.arange(0, N_PAD)
        tl.store(p_index + o_n, tl.where(o_n <= own, o_n, -1), mask=o_n < N_SELECT)
    else:
        o_j = tl.arange(0, N_COLUMNS)
        m_forced = (o_j < N_INIT) | ((o_j > own - N_LOCAL) & (o_j <= own))
        m_taken = m_forced
        if N_FREE > 0:
            b_i = pooled_importance(
                pool, tile_max, part_m, part_l, i_bg, i_t, complete_blocks(position, BLOCK, STRIDE),
                H=H, ROWS=ROWS, R=R, REACH=REACH, SLOTS=SLOTS, N_SPLITS=N_SPLITS, N_SPLITS_PAD=N_SPLITS_PAD,
                N_TILES=N_TILES, N_TILES_PAD=N_TILES_PAD, BLOCK_J=BLOCK_J, UNROLL=UNROLL,
            )  # fmt: skip
            # Importance is not negative: its bits are in its order.
            b_key = tl.maximum(tl.reshape(b_i, [N_COLUMNS]).to(tl.int32, bitcast=True), 0)
            b_key = tl.where((o_j <= own) & (m_forced == False), b_key, -1)  # noqa: E712  a tensor
            key, exact = last_taken(b_key, N_FREE=N_FREE, SEGMENTS=SEGMENTS, BLOCK_J=N_COLUMNS)
            m_free = b_key >= key
            if exact == False:  # noqa: E712  a tensor
                # More blocks share the last value than there is room for: the lower ones.
                m_tie = b_key == key
                room = N_FREE - tl.sum((b_key > key).to(tl.int32), 0)
                m_free = m_free & ((m_tie == False) | (tl.cumsum(m_tie.to(tl.int32), 0) <= room))  # noqa: E712
            m_taken = m_forced | m_free
        o_out = tl.cumsum(m_taken.to(tl.int32), 0) - 1
        tl.store(p_index + o_out, o_j, mask=m_taken)


@triton.jit
def select_window_kernel(
    q, k, v, start, pool, tile_max, indices, part_o, part_m, part_l, max_len, places, scale_log2,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    G: tl.constexpr, H: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, SELECT_BLOCK: tl.constexpr, R: tl.constexpr, REACH: tl.constexpr,
    N_SELECT: tl.constexpr, N_PAD: tl.constexpr, N_INIT: tl.constexpr, N_LOCAL: tl.constexpr, WINDOW: tl.constexpr,
    SLOTS: tl.constexpr, N_SPLITS: tl.constexpr, N_SPLITS_PAD: tl.constexpr, N_TILES: tl.constexpr,
    N_TILES_PAD: tl.constexpr, BLOCK_J: tl.constexpr, UNROLL: tl.constexpr, SEGMENTS: tl.constexpr,
    WINDOW_SPLITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Selection of one token of one group, or one split of the window."""
    i_bg = tl.program_id(0)
    i_task = tl.program_id(1)
    if i_task < T:
        follow(PDL)
        i_b = i_bg // G
        p_index = indices + ((i_b * T + i_task) * G + i_bg % G).to(tl.int64) * N_SELECT
        select_token(
            pool, tile_max, part_m, part_l, start, p_index, i_bg, i_b, i_task, max_len,
            H=H, ROWS=T * H, BLOCK=BLOCK, STRIDE=STRIDE, SELECT_BLOCK=SELECT_BLOCK, R=R, REACH=REACH,
            N_SELECT=N_SELECT, N_PAD=N_PAD, N_INIT=N_INIT, N_LOCAL=N_LOCAL, SLOTS=SLOTS, N_SPLITS=N_SPLITS,
            N_SPLITS_PAD=N_SPLITS_PAD, N_TILES=N_TILES, N_TILES_PAD=N_TILES_PAD, BLOCK_J=BLOCK_J, UNROLL=UNROLL,
            SEGMENTS=SEGMENTS,
        )  # fmt: skip
    else:
        # Needs nothing of the launch before this one, which has itself waited for those before.
        if PDL:
            gdc_launch_dependents()
        i_s = (i_task - T) % WINDOW_SPLITS
        i_m = (i_task - T) // WINDOW_SPLITS
        window_split(
            q, k, v, start, part_o, part_m, part_l, max_len, places, scale_log2,
            i_bg, i_s, i_bg * SLOTS + N_SPLITS + i_s, i_m,
            stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
            G=G, H=H, ROWS=T * H, DK=DK, DV=DV, WINDOW=WINDOW, N_SPLITS=WINDOW_SPLITS, SPLIT=SPLIT,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_DK=BLOCK_DK, BLOCK_DV=BLOCK_DV, STAGES=STAGES,
        )  # fmt: skip
