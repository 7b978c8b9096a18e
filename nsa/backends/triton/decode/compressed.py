"""Split-KV attention of a step over the compressed cache, which also leaves what block selection needs.

    pool[r, j] = 2^-tile_max[r, tile(j)] * sum_c sum_u weight(u, c) * exp2(score[r, (j - c)*R + u])

A compressed block `j*R + u` gives `weight(u, c) = |[u, u + L) ∩ [c*R, (c + 1)*R)|` of its probability to selection
block `j + c` (`R = l_sel/d`, `L = l/d`). Each tile pools its probabilities relative to the maximum so far, a power of
two, so that importance needs neither the keys again nor all scores: `select.py` rescales and sums. What a tile has for
the first blocks of the next one goes to `carry [r, c - 1, tile, :c]`.

Grid (B * splits * tiles of rows * G): the CTAs of a batch row are neighbors and end at about the same time, for the
selection waits for no others. Every split and every tile of it is written by one CTA; CTAs past a row's end exit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.backends.triton.decode.common import (
    NONE_SEEN,
    arrive,
    exact_softmax,
    last_of,
    load_step_rows,
    load_tokens,
    position_of,
    store_partials,
    wait_then_trigger,
)
from nsa.backends.triton.selection import complete_blocks


@triton.jit
def overlap(o_unit, C: tl.constexpr, R: tl.constexpr, OVERLAP: tl.constexpr):
    """Strides that the compressed blocks which start at units `o_unit` of a selection block share with the `C`-th
    selection block from there."""
    shared = tl.minimum(o_unit + OVERLAP, (C + 1) * R) - tl.maximum(o_unit, C * R)
    return tl.maximum(shared, 0).to(tl.float32)


@triton.jit
def compressed_split_kernel(
    q, k, v, k_scale, v_scale, table, start, counts, limits, pool, carry, tile_max, partial_o, partial_m,
    partial_l, arrivals, columns, max_len, scale_log2,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    G: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, OVERLAP: tl.constexpr,
    REACH: tl.constexpr, CARRY: tl.constexpr, SLOTS: tl.constexpr, N_TILES: tl.constexpr, SPLIT_TILES: tl.constexpr,
    N_SPLITS: tl.constexpr, ROW_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    POOL: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of `SPLIT_TILES` tiles: partial output, or with `DV = 0` maximum and sum alone; with `POOL`,
    probabilities pooled to selection blocks."""
    BLOCK_J: tl.constexpr = BLOCK_N // R_PAD
    i_g = tl.program_id(0) % G
    i_m = tl.program_id(0) // G % ROW_TILES
    i_s = tl.program_id(0) // (G * ROW_TILES) % N_SPLITS
    i_b = tl.program_id(0) // (G * ROW_TILES * N_SPLITS)
    i_bg = i_b * G + i_g
    o_r = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    # [BLOCK_M] compressed blocks that each row sees, and the most of them
    end = last_of(start, counts, limits, i_b, max_len, ROWS // H)
    o_seen = complete_blocks(position_of(start, i_b, tl.minimum(o_r, ROWS - 1) // H, end), BLOCK, STRIDE)
    n_seen = tl.max(o_seen, 0)
    # Of what is read before, nothing comes from the launch before this one.
    wait_then_trigger(PDL)

    i_slot = i_bg * SLOTS + i_s
    first = i_s * SPLIT_TILES
    last = tl.minimum(first + SPLIT_TILES, tl.cdiv(n_seen, BLOCK_J * R))
    if first >= last:
        o_part = i_slot.to(tl.int64) * ROWS + o_r
        tl.store(partial_l + o_part, tl.zeros([BLOCK_M], tl.float32), mask=o_r < ROWS)
        tl.store(partial_m + o_part, tl.full([BLOCK_M], NONE_SEEN, tl.float32), mask=o_r < ROWS)
    else:
        b_q = load_step_rows(q, i_b, i_g, o_r, stride_qb, stride_qt, stride_qh, H, ROWS, DK, BLOCK_DK)
        o_row = i_bg.to(tl.int64) * ROWS + o_r
        o_n = tl.arange(0, BLOCK_N)
        o_j = tl.arange(0, BLOCK_J)
        o_unit = tl.arange(0, R_PAD)
        m_r = o_r < ROWS
        b_m = tl.full([BLOCK_M], NONE_SEEN, tl.float32)
        b_l = tl.zeros([BLOCK_M], tl.float32)
        b_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        for i in tl.range(first, last, num_stages=STAGES):
            o_i = (i * BLOCK_J + o_n // R_PAD) * R + o_n % R_PAD
            m_i = o_i < n_seen
            if R_PAD > R:
                m_i = m_i & (o_n % R_PAD < R)
            b_k = load_tokens(
                k, k_scale, table, i_b, i_g, o_i, m_i, columns, stride_kb, stride_kn, stride_kg,
                PAGE, DK, BLOCK_DK, b_q.dtype,
            )  # fmt: skip
            if DV > 0:
                b_v = load_tokens(
                    v, v_scale, table, i_b, i_g, o_i, m_i, columns, stride_vb, stride_vn, stride_vg,
                    PAGE, DV, BLOCK_DV, b_q.dtype,
                )  # fmt: skip
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale_log2
            m_seen = m_i[None, :] & (o_i[None, :] < o_seen[:, None])
            b_p, b_m, b_l, b_o = exact_softmax(b_s, m_seen, b_m, b_l, b_o)
            if DV > 0:
                b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")
            if POOL:
                b_u = tl.reshape(b_p, [BLOCK_M, BLOCK_J, R_PAD])
                b_pool = tl.sum(b_u * overlap(o_unit, 0, R, OVERLAP)[None, None, :], 2)
                for c in tl.static_range(1, REACH + 1):
                    b_c = tl.sum(b_u * overlap(o_unit, c, R, OVERLAP)[None, None, :], 2)
                    p_carry = carry + ((o_row * REACH + c - 1) * N_TILES + i) * CARRY
                    m_carry = m_r[:, None] & (o_j >= BLOCK_J - c)[None, :]
                    tl.store(p_carry[:, None] + (o_j - (BLOCK_J - c))[None, :], b_c, mask=m_carry)
                    o_from = tl.broadcast_to(((o_j + BLOCK_J - c) % BLOCK_J)[None, :], [BLOCK_M, BLOCK_J])
                    b_pool += tl.where((o_j >= c)[None, :], tl.gather(b_c, o_from, 1), 0.0)
                p_pool = pool + (o_row * N_TILES + i) * BLOCK_J
                # What the selection reads back stays in the L2 cache.
                tl.store(p_pool[:, None] + o_j[None, :], b_pool, mask=m_r[:, None], eviction_policy="evict_last")
                tl.store(tile_max + o_row * N_TILES + i, b_m, mask=m_r, eviction_policy="evict_last")
        store_partials(partial_o, partial_m, partial_l, i_slot, o_r, b_m, b_l, b_o, ROWS, DV, BLOCK_DV)
    arrive(arrivals + i_bg * 3)
