"""Partials of the three branches to the gated sum, and the cache's new lengths: the last launch of a step.

    o[row] = sum_slot gate[branch] / sum[branch] * 2^(max[slot] - max[branch]) * partial_o[slot, row]

Gates are given, or by the last layer of a gate, `sigmoid(weight @ hidden + bias)`, which is computed while other
launches run.

Grid (B*G * rows), a warp each. With `lengths` the first CTA of a batch row also takes the step's tokens in for good; no
CTA that is still running reads them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from nsa.backends.triton.decode.common import end_of, wait_for
from nsa.backends.triton.primitives import FLOOR


@triton.jit
def branch_scale(m_branch, b_m, b_l, gate):
    """The branch's maximum, and its gate over its sum."""
    b_m = tl.where(m_branch, b_m, FLOOR)
    top = tl.max(b_m, 0)
    total = tl.sum(tl.where(m_branch, b_l, 0.0) * tl.math.exp2(b_m - top), 0)
    return top, gate / tl.where(total > 0, total, 1.0)


@triton.jit
def of_branch(o_s, cmp, win, sel, N_CMP: tl.constexpr, N_WIN: tl.constexpr):
    """To each slot what belongs to its branch: compressed slots come first, then those of the window."""
    return tl.where(o_s < N_CMP, cmp, tl.where(o_s < N_CMP + N_WIN, win, sel))


@triton.jit
def open_gates(p_hidden, weight, bias, i_head, WIDTH: tl.constexpr, BLOCK_U: tl.constexpr):
    """The three gates of a head, of a hidden layer of `WIDTH` units; rounded as by torch's separate kernels."""
    dtype = weight.dtype.element_ty
    o_c = tl.arange(0, 4)
    o_row = i_head * 3 + o_c
    b_y = tl.zeros([4], tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK_U):
        o_u = first + tl.arange(0, BLOCK_U)
        b_hidden = tl.load(p_hidden + o_u, mask=o_u < WIDTH, other=0.0).to(tl.float32)
        m_w = (o_c < 3)[:, None] & (o_u < WIDTH)[None, :]
        b_w = tl.load(weight + (o_row * WIDTH)[:, None] + o_u[None, :], mask=m_w, other=0.0).to(tl.float32)
        b_y += tl.sum(b_w * b_hidden[None, :], 1)
    b_y += tl.load(bias + o_row, mask=o_c < 3, other=0.0).to(tl.float32)
    b_gate = tl.sigmoid(b_y.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    cmp = tl.sum(tl.where(o_c == 0, b_gate, 0.0), 0)
    sel = tl.sum(tl.where(o_c == 1, b_gate, 0.0), 0)
    win = tl.sum(tl.where(o_c == 2, b_gate, 0.0), 0)
    return cmp, sel, win


@triton.jit
def merge_kernel(
    partial_o, partial_m, partial_l, gates, hidden, gate_weight, gate_bias, o, lengths, high_water, counts, limits,
    arrivals, max_len, stride_gb, stride_gt, stride_gh, stride_gc,
    G: tl.constexpr, H: tl.constexpr, T: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr, CHUNK: tl.constexpr, N_CMP: tl.constexpr, N_WIN: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, CTAS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_U: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row; with neither `gates` nor `hidden [B, T, WIDTH]` all gates are 1. Slots from `FIRST` on hold an output;
    `LAST` counts the `CTAS` of the launch before this one."""
    ROWS: tl.constexpr = T * H
    i_bg = tl.program_id(0) // ROWS
    i_r = tl.program_id(0) % ROWS
    i_b = (i_bg // G).to(tl.int64)
    i_t = i_r // H
    i_head = i_bg % G * H + i_r % H
    # Gates are older than the launches that this one may overlap with.
    if hidden is not None:
        gate_cmp, gate_sel, gate_win = open_gates(
            hidden + (i_b * T + i_t) * WIDTH, gate_weight, gate_bias, i_head, WIDTH, BLOCK_U
        )
    elif gates is None:
        gate_cmp, gate_sel, gate_win = 1.0, 1.0, 1.0
    else:
        p_g = gates + i_b * stride_gb + i_t * stride_gt + i_head * stride_gh
        gate_cmp = tl.load(p_g).to(tl.float32)
        gate_sel = tl.load(p_g + stride_gc).to(tl.float32)
        gate_win = tl.load(p_g + 2 * stride_gc).to(tl.float32)
    wait_for(arrivals + i_bg * 3 + LAST, CTAS)
    if PDL:
        gdc_launch_dependents()
    o_part = i_bg.to(tl.int64) * (SLOTS * ROWS) + i_r
    o_s = tl.arange(0, SLOTS_PAD)
    b_l = tl.load(partial_l + o_part + o_s * ROWS, mask=o_s < SLOTS, other=0.0)
    b_m = tl.load(partial_m + o_part + o_s * ROWS, mask=o_s < SLOTS, other=FLOOR)
    top_cmp, scale_cmp = branch_scale(o_s < N_CMP, b_m, b_l, gate_cmp)
    top_win, scale_win = branch_scale((o_s >= N_CMP) & (o_s < N_CMP + N_WIN), b_m, b_l, gate_win)
    top_sel, scale_sel = branch_scale(o_s >= N_CMP + N_WIN, b_m, b_l, gate_sel)
    o_d = tl.arange(0, BLOCK_DV)
    b_o = tl.zeros([BLOCK_DV], tl.float32)
    for first in tl.static_range(FIRST, SLOTS, CHUNK):
        o_c = first + tl.arange(0, CHUNK)
        p_c = o_part + o_c * ROWS
        m_c = tl.load(partial_l + p_c, mask=o_c < SLOTS, other=0.0) > 0
        b_x = tl.load(partial_o + p_c[:, None] * DV + o_d[None, :], mask=m_c[:, None] & (o_d < DV)[None, :], other=0.0)
        b_top = tl.load(partial_m + p_c, mask=o_c < SLOTS, other=FLOOR)
        b_top -= of_branch(o_c, top_cmp, top_win, top_sel, N_CMP, N_WIN)
        b_scale = of_branch(o_c, scale_cmp, scale_win, scale_sel, N_CMP, N_WIN) * tl.math.exp2(b_top)
        b_o += tl.sum(b_x * b_scale[:, None], 0)
    p_o = o + ((i_b * T + i_t) * (G * H) + i_head) * DV + o_d
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=o_d < DV)
    if lengths is not None:  # noqa: SIM102  the first is known to the compiler
        if (i_bg % G == 0) & (i_r == 0):
            # Other groups of the row may still read its length.
            for i_g in range(1, G):
                wait_for(arrivals + (i_bg + i_g) * 3 + LAST, CTAS)
            end = end_of(lengths, counts, limits, i_b, max_len, T)
            tl.store(lengths + i_b, end)
            tl.store(high_water + i_b, tl.maximum(tl.load(high_water + i_b), end))
