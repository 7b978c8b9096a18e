"""Partials of the three branches to the gated sum, and the cache's new lengths: the last launch of a step.

    o[row] = sum_branch gate[branch] / sum[branch] * sum_slot 2^(max[slot] - max[branch]) * part_o[slot, row]

Grid (B*G * rows), a warp each. With `lengths` the first CTA of a batch row also takes the step's tokens in for good; no
CTA that is still running reads them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from nsa.backends.triton.decode.common import end_of, sum_slots, wait_for


@triton.jit
def gated_branch(
    gate, part_o, part_m, part_l, o_part, o_d,
    ROWS: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, FOLD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`[1, len(o_d)]` of a branch with `N` slots, see `sum_slots`."""
    _, b_l, b_o = sum_slots(part_o, part_m, part_l, o_part, o_part >= 0, o_d, ROWS, DV, N, FOLD, WHOLE)
    return b_o * (gate / tl.where(b_l > 0, b_l, 1.0))[:, None]


@triton.jit
def merge_kernel(
    part_o, part_m, part_l, gates, o, lengths, high_water, counts, limits, arrivals, max_len,
    stride_gb, stride_gt, stride_gh, stride_gc,
    G: tl.constexpr, H: tl.constexpr, T: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SLOTS: tl.constexpr,
    N_CMP: tl.constexpr, FOLD: tl.constexpr, N_WIN: tl.constexpr, NEAR_CTAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = T * H
    i_bg = tl.program_id(0) // ROWS
    i_r = tl.program_id(0) % ROWS
    i_b = (i_bg // G).to(tl.int64)
    i_t = i_r // H
    i_head = i_bg % G * H + i_r % H
    # Gates are older than the launches that this one may overlap with.
    p_g = gates + i_b * stride_gb + i_t * stride_gt + i_head * stride_gh
    gate_cmp = tl.load(p_g).to(tl.float32)
    gate_sel = tl.load(p_g + stride_gc).to(tl.float32)
    gate_win = tl.load(p_g + 2 * stride_gc).to(tl.float32)
    wait_for(arrivals + i_bg * 3 + 2, NEAR_CTAS)
    if PDL:
        gdc_launch_dependents()
    # [1]
    o_part = i_bg.to(tl.int64) * (SLOTS * ROWS) + i_r + tl.arange(0, 1)
    o_win = o_part + N_CMP * ROWS
    o_d = tl.arange(0, BLOCK_DV)
    b_o = gated_branch(gate_cmp, part_o, part_m, part_l, o_part, o_d, ROWS, DV, N_CMP, FOLD, True)
    b_o += gated_branch(gate_win, part_o, part_m, part_l, o_win, o_d, ROWS, DV, N_WIN, 1, False)
    o_sel = o_win + N_WIN * ROWS
    b_o += gated_branch(gate_sel, part_o, part_m, part_l, o_sel, o_d, ROWS, DV, SLOTS - N_CMP - N_WIN, 1, False)
    p_o = o + ((i_b * T + i_t) * (G * H) + i_head) * DV + o_d[None, :]
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=(o_d < DV)[None, :])
    if lengths is not None:  # noqa: SIM102  the first is known to the compiler
        if (i_bg % G == 0) & (i_r == 0):
            # Other groups of the row may still read its length.
            for i_g in range(1, G):
                wait_for(arrivals + (i_bg + i_g) * 3 + 2, NEAR_CTAS)
            end = end_of(lengths, counts, limits, i_b, max_len, T)
            tl.store(lengths + i_b, end)
            tl.store(high_water + i_b, tl.maximum(tl.load(high_water + i_b), end))
