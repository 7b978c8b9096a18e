"""Block selection of a step from pooled probabilities.

    importance[t, j] = sum_head 1/sum[head] * 2^-max[head] * (2^tile_max * pool[t, head, j] + what the tile before has)

All scaling but the last is by powers of two, and sums have one order, so that blocks with equal keys tie exactly, in
whichever tiles they lie; of equal blocks the lower is taken. Selection goes by bisection, as in `selection.py`.

Grid (B*G * T). A CTA owns one token of one group. It is bound by latency, so loads of several heads are in flight, and
the next launch, most of which does not depend on this one, starts at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from nsa.backends.triton.decode.common import arrive, last_of, position_of, power_of_2, wait_for
from nsa.backends.triton.primitives import FLOOR
from nsa.backends.triton.selection import complete_blocks, most_important


@triton.jit
def row_factors(
    partial_m, partial_l, p_factors, first_partial, n_seen,
    H: tl.constexpr, H_PAD: tl.constexpr, ROWS: tl.constexpr, N_SPLITS: tl.constexpr, N_SPLITS_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Maximum and 1/sum of each head over its splits, to `p_factors [H, 2]`: a loop over heads loads single numbers
    from there. From a tensor it would take each by a reduction over warps."""
    o_h = tl.arange(0, H_PAD)
    o_s = tl.arange(0, N_SPLITS_PAD)
    o_part = first_partial + o_h[:, None] + (o_s * ROWS)[None, :]
    m_part = (o_h < H)[:, None] & ((o_s < N_SPLITS) & (o_s * SPLIT < n_seen))[None, :]
    b_l = tl.load(partial_l + o_part, mask=m_part, other=0.0)
    b_m = tl.load(partial_m + o_part, mask=m_part, other=FLOOR)
    b_top = tl.max(b_m, 1)
    b_total = tl.sum(b_l * power_of_2(b_m - b_top[:, None]), 1)
    tl.store(p_factors + o_h * 2, b_top, mask=o_h < H)
    tl.store(p_factors + o_h * 2 + 1, 1.0 / tl.where(b_total > 0, b_total, 1.0), mask=o_h < H)
    tl.debug_barrier()


@triton.jit
def pooled_importance(
    pool, carry, tile_max, p_factors, i_row, n_seen,
    H: tl.constexpr, R: tl.constexpr, REACH: tl.constexpr, CARRY: tl.constexpr, N_TILES: tl.constexpr,
    N_TILES_PAD: tl.constexpr, BLOCK_J: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`[N_TILES_PAD, BLOCK_J]` importance of every selection block that a seen compressed block reaches, else 0.

    Head by head: with the heads as an axis to sum over, what Triton 3.6 compiled selected wrong blocks on an H200. All
    loads of a head have one layout, so that nothing between those of several heads needs a barrier.
    """
    o_tile = tl.arange(0, N_TILES_PAD)
    o_in = tl.arange(0, BLOCK_J)[None, :]
    o_j = o_tile[:, None] * BLOCK_J + o_in
    m_tile = o_tile * (BLOCK_J * R) < n_seen
    m_before = (o_tile >= 1) & ((o_tile - 1) * (BLOCK_J * R) < n_seen)
    b_importance = tl.zeros([N_TILES_PAD, BLOCK_J], tl.float32)
    for i_h in tl.range(H, loop_unroll_factor=UNROLL):
        i_r = i_row + i_h
        top = tl.load(p_factors + i_h * 2)
        # [N_TILES_PAD], and of the tile before: the first blocks of a tile are reached from there
        p_max = tile_max + i_r * N_TILES + o_tile
        b_scale = power_of_2(tl.load(p_max, mask=m_tile, other=FLOOR) - top)
        b_pooled = tl.load(pool + i_r * (N_TILES * BLOCK_J) + o_j, mask=m_tile[:, None], other=0.0) * b_scale[:, None]
        if REACH > 0:
            b_before = power_of_2(tl.load(p_max - 1, mask=m_before, other=FLOOR) - top)
        for c in tl.static_range(1, REACH + 1):
            p_carry = carry + ((i_r * REACH + c - 1) * N_TILES + o_tile[:, None] - 1) * CARRY + o_in
            b_carry = tl.load(p_carry, mask=m_before[:, None] & (o_in < c), other=0.0)
            b_pooled += b_carry * b_before[:, None]
        b_importance += b_pooled * tl.load(p_factors + i_h * 2 + 1)
    return b_importance


@triton.jit
def select_step_kernel(
    start, counts, limits, pool, carry, tile_max, factors, indices, partial_m, partial_l, arrivals, max_len,
    G: tl.constexpr, H: tl.constexpr, H_PAD: tl.constexpr, T: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, SELECT_BLOCK: tl.constexpr, R: tl.constexpr, REACH: tl.constexpr,
    N_SELECT: tl.constexpr, N_PAD: tl.constexpr, N_INIT: tl.constexpr, N_LOCAL: tl.constexpr, SLOTS: tl.constexpr,
    N_SPLITS: tl.constexpr, N_SPLITS_PAD: tl.constexpr, SPLIT_TILES: tl.constexpr, CARRY: tl.constexpr,
    N_TILES: tl.constexpr, N_TILES_PAD: tl.constexpr, BLOCK_J: tl.constexpr, UNROLL: tl.constexpr,
    SEGMENTS: tl.constexpr, ROW_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The blocks that one token of one group reads: `N_SELECT` indices, ascending, -1 where there are fewer."""
    ROWS: tl.constexpr = T * H
    N_FREE: tl.constexpr = N_SELECT - N_INIT - N_LOCAL
    N_COLUMNS: tl.constexpr = N_TILES_PAD * BLOCK_J
    if PDL:
        gdc_launch_dependents()
    i_bg = tl.program_id(0) // T
    i_t = tl.program_id(0) % T
    i_b = i_bg // G
    i_row = i_bg.to(tl.int64) * ROWS + i_t * H
    p_index = indices + ((i_b * T + i_t) * G + i_bg % G).to(tl.int64) * N_SELECT
    position = position_of(start, i_b, i_t, last_of(start, counts, limits, i_b, max_len, T))
    own = position // SELECT_BLOCK
    wait_for(arrivals + i_bg * 3, N_SPLITS * ROW_TILES)
    if own < N_SELECT:
        o_n = tl.arange(0, N_PAD)
        tl.store(p_index + o_n, tl.where(o_n <= own, o_n, -1), mask=o_n < N_SELECT)
    else:
        o_j = tl.arange(0, N_COLUMNS)
        m_forced = (o_j < N_INIT) | ((o_j > own - N_LOCAL) & (o_j <= own))
        m_taken = m_forced
        if N_FREE > 0:
            n_seen = complete_blocks(position, BLOCK, STRIDE)
            p_factors = factors + i_row * 2
            row_factors(
                partial_m, partial_l, p_factors, i_bg.to(tl.int64) * (SLOTS * ROWS) + i_t * H, n_seen, H, H_PAD, ROWS,
                N_SPLITS, N_SPLITS_PAD, SPLIT_TILES * BLOCK_J * R,
            )  # fmt: skip
            b_i = pooled_importance(
                pool, carry, tile_max, p_factors, i_row, n_seen, H, R, REACH, CARRY, N_TILES, N_TILES_PAD, BLOCK_J,
                UNROLL,
            )  # fmt: skip
            b_i = tl.reshape(b_i, [N_COLUMNS])
            m_taken = m_forced | most_important(b_i, m_forced, o_j, own, N_FREE, SEGMENTS, N_COLUMNS)
        o_out = tl.cumsum(m_taken.to(tl.int32), 0) - 1
        tl.store(p_index + o_out, o_j, mask=m_taken)
    arrive(arrivals + i_bg * 3 + 1)
