"""Partials of the three branches to the gated sum, and the cache's new lengths: the last launch of a step.

Grid (B*G, rows), a warp each. With `lengths` the first CTA of a batch row also takes the step's tokens in for good; no
other CTA of this launch reads them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.backends.triton.decode.common import end_of, follow
from nsa.backends.triton.primitives import FLOOR


@triton.jit
def merged(
    part_o, part_m, part_l, o_part, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    N_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_DV]`: softmax output from the `N` slots that start at row `o_part`; 0 where no key was seen."""
    o_s = tl.arange(0, N_PAD)
    b_l = tl.load(part_l + o_part + o_s * ROWS, mask=o_s < N, other=0.0)
    b_m = tl.load(part_m + o_part + o_s * ROWS, mask=b_l > 0, other=FLOOR)
    top = tl.max(b_m, 0)
    total = tl.sum(b_l * tl.math.exp2(b_m - top), 0)
    o_d = tl.arange(0, BLOCK_DV)
    b_o = tl.zeros([BLOCK_DV], tl.float32)
    for first in tl.static_range(0, N, CHUNK):
        o_c = first + tl.arange(0, CHUNK)
        m_c = tl.load(part_l + o_part + o_c * ROWS, mask=o_c < N, other=0.0) > 0
        b_c = tl.load(part_m + o_part + o_c * ROWS, mask=m_c, other=FLOOR)
        p_o = part_o + (o_part + o_c * ROWS)[:, None] * DV + o_d[None, :]
        b_x = tl.load(p_o, mask=m_c[:, None] & (o_d < DV)[None, :], other=0.0)
        b_o += tl.sum(b_x * tl.math.exp2(b_c - top)[:, None], 0)
    return b_o / tl.where(total > 0, total, 1.0)


@triton.jit
def merge_kernel(
    part_o, part_m, part_l, gates, o, lengths, high_water, counts, limits, max_len,
    stride_gb, stride_gt, stride_gh, stride_gc,
    G: tl.constexpr, H: tl.constexpr, T: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SLOTS: tl.constexpr,
    N_CMP: tl.constexpr, N_CMP_PAD: tl.constexpr, N_WIN: tl.constexpr, N_WIN_PAD: tl.constexpr, N_SEL: tl.constexpr,
    N_SEL_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = T * H
    i_bg = tl.program_id(0)
    i_r = tl.program_id(1)
    i_b = (i_bg // G).to(tl.int64)
    i_t = i_r // H
    i_head = i_bg % G * H + i_r % H
    # Gates are older than the launches that this one may overlap with.
    p_g = gates + i_b * stride_gb + i_t * stride_gt + i_head * stride_gh
    gate_cmp = tl.load(p_g).to(tl.float32)
    gate_sel = tl.load(p_g + stride_gc).to(tl.float32)
    gate_win = tl.load(p_g + 2 * stride_gc).to(tl.float32)
    follow(PDL)
    o_part = i_bg.to(tl.int64) * (SLOTS * ROWS) + i_r
    b_cmp = merged(part_o, part_m, part_l, o_part, DV, BLOCK_DV, ROWS, N_CMP, N_CMP_PAD, min(N_CMP_PAD, 8))
    o_part += N_CMP * ROWS
    b_win = merged(part_o, part_m, part_l, o_part, DV, BLOCK_DV, ROWS, N_WIN, N_WIN_PAD, min(N_WIN_PAD, 8))
    o_part += N_WIN * ROWS
    b_sel = merged(part_o, part_m, part_l, o_part, DV, BLOCK_DV, ROWS, N_SEL, N_SEL_PAD, min(N_SEL_PAD, 8))
    b_o = b_cmp * gate_cmp + b_sel * gate_sel + b_win * gate_win
    o_d = tl.arange(0, BLOCK_DV)
    p_o = o + ((i_b * T + i_t) * (G * H) + i_head) * DV + o_d
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=o_d < DV)
    if lengths is not None:  # noqa: SIM102  the first is known to the compiler
        if (i_bg % G == 0) & (i_r == 0):
            end = end_of(lengths, counts, limits, i_b, max_len, T)
            tl.store(lengths + i_b, end)
            tl.store(high_water + i_b, tl.maximum(tl.load(high_water + i_b), end))
