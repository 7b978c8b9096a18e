"""Compresses the blocks that a step completes: the mean of a block's raw tokens, or the two layers of the MLP.

Candidates are `(b, e, g)`: the `e`-th block that row `b` may complete, of group `g`. A tile of candidates none of which
is complete exits, so that most steps read no weights. The raw tokens are in the cache's tail already.

`mean_kernel`, grid (candidates, 2). `inner_kernel`, grid (tiles of candidates, tiles of hidden units, 2), leaves the
hidden layer in memory; `outer_kernel`, grid (tiles of candidates, 2), reads it. The last axis is key or value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.backends.triton.decode.common import cosine_and_sine, end_of, place_of, store_row, trigger_then_wait
from nsa.backends.triton.selection import complete_blocks


@triton.jit
def candidate(
    start, counts, limits, o_c, n_candidates, max_len,
    G: tl.constexpr, E: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Row, group and index of the block of candidates `o_c`, and which of them the step completes."""
    o_b = tl.minimum(o_c, n_candidates - 1) // (E * G)
    o_index = complete_blocks(tl.load(start + o_b) - 1, BLOCK, STRIDE) + o_c // G % E
    n_complete = complete_blocks(end_of(start, counts, limits, o_b, max_len, T) - 1, BLOCK, STRIDE)
    return o_b.to(tl.int64), o_c % G, o_index, (o_c < n_candidates) & (o_index < n_complete)


@triton.jit
def store_block(
    store, scale, table, b_x, frequencies, o_b, o_g, o_index, m_c, columns, position_offset, stride_b, stride_n,
    D: tl.constexpr, BLOCK_HALF: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Writes compressed keys or values `b_x [C, 2, BLOCK_HALF]`, given by halves and already rounded."""
    HALF: tl.constexpr = D // 2
    o_d = tl.arange(0, BLOCK_HALF)
    b_first, b_second = tl.split(tl.permute(b_x.to(tl.float32), (0, 2, 1)))
    if ROTATE:
        # [C, BLOCK_HALF], at the block's first position
        b_frequency = tl.load(frequencies + o_d, mask=o_d < HALF, other=0.0)
        b_cos, b_sin = cosine_and_sine((o_index * STRIDE + position_offset)[:, None], b_frequency[None, :])
        b_turned = b_first * b_cos - b_second * b_sin
        b_second = b_second * b_cos + b_first * b_sin
        b_first = b_turned
    o_row, o_n = place_of(table, o_b, o_index, m_c, columns, stride_b, stride_n, PAGE)
    store_row(store, scale, o_row + o_n + o_g * D, m_c, b_first.to(b_x.dtype), b_second.to(b_x.dtype), D, BLOCK_HALF)


@triton.jit
def mean_of(
    tail, store, scale, table, frequencies, o_b, o_g, o_index, m_c, columns, places, position_offset,
    stride_tb, stride_tn, stride_cb, stride_cn,
    D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    C: tl.constexpr = o_b.shape[0]
    o_d = tl.arange(0, BLOCK_HALF)
    # [1, 2, BLOCK_HALF]
    o_x = (tl.arange(0, 2) * HALF)[:, None] + o_d[None, :]
    m_x = m_c[:, None, None] & (o_d < HALF)[None, None, :]
    b_sum = tl.zeros([C, 2, BLOCK_HALF], tl.float32)
    for i in range(BLOCK):
        o_row = o_b * stride_tb + (o_index * STRIDE + i) % places * stride_tn + o_g * D
        b_sum += tl.load(tail + o_row[:, None, None] + o_x[None, :, :], mask=m_x, other=0.0).to(tl.float32)
    b_mean = (b_sum / BLOCK).to(tail.dtype.element_ty)
    store_block(
        store, scale, table, b_mean, frequencies, o_b, o_g, o_index, m_c, columns, position_offset,
        stride_cb, stride_cn, D, BLOCK_HALF, STRIDE, PAGE, ROTATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_candidates", "position_offset"])
def mean_kernel(
    tail_k, tail_v, compressed_k, compressed_v, compressed_k_scale, compressed_v_scale, table, start, counts, limits,
    frequencies, n_candidates, columns, max_len, places, position_offset,
    stride_tkb, stride_tkn, stride_tvb, stride_tvn, stride_ckb, stride_ckn, stride_cvb, stride_cvn,
    G: tl.constexpr, E: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_HALF_K: tl.constexpr,
    BLOCK_HALF_V: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, ROTATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One candidate's key or value."""
    trigger_then_wait(PDL)
    o_c = tl.program_id(0) + tl.arange(0, 1)
    o_b, o_g, o_index, m_c = candidate(start, counts, limits, o_c, n_candidates, max_len, G, E, T, BLOCK, STRIDE)
    if tl.max(m_c.to(tl.int32), 0) > 0:
        if tl.program_id(1) == 0:
            mean_of(
                tail_k, compressed_k, compressed_k_scale, table, frequencies, o_b, o_g, o_index, m_c, columns, places,
                position_offset, stride_tkb, stride_tkn, stride_ckb, stride_ckn,
                DK, BLOCK_HALF_K, BLOCK, STRIDE, PAGE, ROTATE,
            )  # fmt: skip
        else:
            mean_of(
                tail_v, compressed_v, compressed_v_scale, table, frequencies, o_b, o_g, o_index, m_c, columns, places,
                position_offset, stride_tvb, stride_tvn, stride_cvb, stride_cvn,
                DV, BLOCK_HALF_V, BLOCK, STRIDE, PAGE, False,
            )  # fmt: skip


@triton.jit
def inner_of(
    tail, position, weight, bias, hidden, o_c, o_b, o_g, o_index, m_c, places, stride_tb, stride_tn,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`hidden[c] = silu(weight @ (block + position) + bias)` for one tile of hidden units."""
    C: tl.constexpr = o_b.shape[0]
    o_d = tl.arange(0, BLOCK_D)
    o_u = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_w = (o_u < HIDDEN)[:, None] & (o_d < D)[None, :]
    b_h = tl.zeros([C, BLOCK_H], tl.float32)
    for i in tl.range(0, BLOCK, num_stages=STAGES):
        o_row = o_b * stride_tb + (o_index * STRIDE + i) % places * stride_tn + o_g * D
        b_x = tl.load(tail + o_row[:, None] + o_d[None, :], mask=m_c[:, None] & (o_d < D)[None, :], other=0.0)
        b_x += tl.load(position + i * D + o_d, mask=o_d < D, other=0.0)[None, :]
        b_w = tl.load(weight + (o_u * (BLOCK * D) + i * D)[:, None] + o_d[None, :], mask=m_w, other=0.0)
        b_h = tl.dot(b_x, tl.trans(b_w), b_h, input_precision="ieee")
    b_h = (b_h + tl.load(bias + o_u, mask=o_u < HIDDEN, other=0.0).to(tl.float32)[None, :]).to(hidden.dtype.element_ty)
    b_h = b_h.to(tl.float32)
    p_h = hidden + (o_c.to(tl.int64) * HIDDEN)[:, None] + o_u[None, :]
    tl.store(p_h, b_h * tl.sigmoid(b_h), mask=m_c[:, None] & (o_u < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["n_candidates"])
def inner_kernel(
    tail_k, tail_v, position_k, position_v, weight_k, weight_v, bias_k, bias_v, hidden_k, hidden_v, start, counts,
    limits, n_candidates, max_len, places, stride_tkb, stride_tkn, stride_tvb, stride_tvn,
    G: tl.constexpr, E: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, HIDDEN_K: tl.constexpr, HIDDEN_V: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    trigger_then_wait(PDL)
    o_c = tl.program_id(0) * C + tl.arange(0, C)
    o_b, o_g, o_index, m_c = candidate(start, counts, limits, o_c, n_candidates, max_len, G, E, T, BLOCK, STRIDE)
    if tl.max(m_c.to(tl.int32), 0) > 0:
        if tl.program_id(2) == 0:
            inner_of(
                tail_k, position_k, weight_k, bias_k, hidden_k, o_c, o_b, o_g, o_index, m_c, places, stride_tkb,
                stride_tkn, DK, BLOCK_DK, HIDDEN_K, BLOCK_H, BLOCK, STRIDE, STAGES,
            )  # fmt: skip
        else:
            inner_of(
                tail_v, position_v, weight_v, bias_v, hidden_v, o_c, o_b, o_g, o_index, m_c, places, stride_tvb,
                stride_tvn, DV, BLOCK_DV, HIDDEN_V, BLOCK_H, BLOCK, STRIDE, STAGES,
            )  # fmt: skip


@triton.jit
def outer_of(
    hidden, weight, bias, store, scale, table, frequencies, o_c, o_b, o_g, o_index, m_c, columns, position_offset,
    stride_cb, stride_cn,
    D: tl.constexpr, BLOCK_HALF: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr, STRIDE: tl.constexpr,
    PAGE: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """`weight @ hidden + bias`, rotated, into the compressed store."""
    HALF: tl.constexpr = D // 2
    C: tl.constexpr = o_b.shape[0]
    # Output features as two padded halves, which is how they are rotated.
    o_f = tl.arange(0, 2 * BLOCK_HALF)
    o_in = o_f % BLOCK_HALF
    o_out = o_f // BLOCK_HALF * HALF + o_in
    m_out = o_in < HALF
    b_x = tl.zeros([C, 2 * BLOCK_HALF], tl.float32)
    for first in range(0, HIDDEN, BLOCK_H):
        o_u = first + tl.arange(0, BLOCK_H)
        m_h = m_c[:, None] & (o_u < HIDDEN)[None, :]
        b_h = tl.load(hidden + (o_c.to(tl.int64) * HIDDEN)[:, None] + o_u[None, :], mask=m_h, other=0.0)
        m_w = m_out[:, None] & (o_u < HIDDEN)[None, :]
        b_w = tl.load(weight + (o_out * HIDDEN)[:, None] + o_u[None, :], mask=m_w, other=0.0)
        b_x = tl.dot(b_h, tl.trans(b_w), b_x, input_precision="ieee")
    b_x = (b_x + tl.load(bias + o_out, mask=m_out, other=0.0).to(tl.float32)[None, :]).to(hidden.dtype.element_ty)
    store_block(
        store, scale, table, tl.reshape(b_x, [C, 2, BLOCK_HALF]), frequencies, o_b, o_g, o_index, m_c, columns,
        position_offset, stride_cb, stride_cn, D, BLOCK_HALF, STRIDE, PAGE, ROTATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_candidates", "position_offset"])
def outer_kernel(
    hidden_k, hidden_v, weight_k, weight_v, bias_k, bias_v, compressed_k, compressed_v, compressed_k_scale,
    compressed_v_scale, table, start, counts, limits, frequencies, n_candidates, columns, max_len, position_offset,
    stride_ckb, stride_ckn, stride_cvb, stride_cvn,
    G: tl.constexpr, E: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_HALF_K: tl.constexpr,
    BLOCK_HALF_V: tl.constexpr, HIDDEN_K: tl.constexpr, HIDDEN_V: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, ROTATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    trigger_then_wait(PDL)
    o_c = tl.program_id(0) * C + tl.arange(0, C)
    o_b, o_g, o_index, m_c = candidate(start, counts, limits, o_c, n_candidates, max_len, G, E, T, BLOCK, STRIDE)
    if tl.max(m_c.to(tl.int32), 0) > 0:
        if tl.program_id(1) == 0:
            outer_of(
                hidden_k, weight_k, bias_k, compressed_k, compressed_k_scale, table, frequencies, o_c, o_b, o_g,
                o_index, m_c, columns, position_offset, stride_ckb, stride_ckn,
                DK, BLOCK_HALF_K, HIDDEN_K, BLOCK_H, STRIDE, PAGE, ROTATE,
            )  # fmt: skip
        else:
            outer_of(
                hidden_v, weight_v, bias_v, compressed_v, compressed_v_scale, table, frequencies, o_c, o_b, o_g,
                o_index, m_c, columns, position_offset, stride_cvb, stride_cvn,
                DV, BLOCK_HALF_V, HIDDEN_V, BLOCK_H, STRIDE, PAGE, False,
            )  # fmt: skip
