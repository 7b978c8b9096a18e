"""The gated sum of the three branches, and its gradients, each in one pass over memory.

    o = g_cmp * o_cmp + g_sel * o_sel + g_win * o_win          d_g[c] = do . o[c]          d_o[c] = g[c] * do

Rows are (query, head). Grid (tiles of rows, B): one CTA owns `BLOCK_R` rows of all tensors, reads each element once
and writes each result once. Sums are fp32; a row's dot products are its own, so nothing is shared between CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton import tuning
from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout, new_layout, strides
from nsa.backends.triton.tiles import capability


@dataclass(frozen=True)
class CombineTile:
    """`elements`: of each tensor that one CTA works on."""

    elements: int
    num_warps: int


def default_tile(o: Tensor | Layout, *, backward: bool) -> CombineTile:
    """Enough loads in flight for each SM to keep the memory busy, few enough for several CTAs per SM."""
    kernel = "combine-backward" if backward else "combine-forward"
    return tuning.pick_tile(kernel, CombineTile, capability(o.device), o.shape[-1], o.shape[-1], o.dtype)


def candidates() -> list[CombineTile]:
    """Tiles worth measuring."""
    return [CombineTile(elements, warps) for elements in (1024, 2048, 4096, 8192) for warps in (2, 4, 8)]


@triton.jit
def row_offsets(i_tile, n_rows, stride_t, stride_h, HEADS: tl.constexpr, BLOCK_R: tl.constexpr):
    """`[BLOCK_R]` offsets of the tile's rows within one batch row, and which of them exist."""
    o_r = i_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    o_t = o_r // HEADS
    return o_t.to(tl.int64) * stride_t + (o_r - o_t * HEADS).to(tl.int64) * stride_h, o_r < n_rows


@triton.jit
def load_tile(
    x, i_b, i_tile, n_rows, stride_b, stride_t, stride_h,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_R, BLOCK_D]` of `x [B, S, Hq, D]` in fp32, zeros outside."""
    o_row, m_row = row_offsets(i_tile, n_rows, stride_t, stride_h, HEADS, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    p_x = x + i_b.to(tl.int64) * stride_b + o_row[:, None] + o_d[None, :]
    return tl.load(p_x, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_tile(
    x, b_x, i_b, i_tile, n_rows, stride_b, stride_t, stride_h,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    o_row, m_row = row_offsets(i_tile, n_rows, stride_t, stride_h, HEADS, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    p_x = x + i_b.to(tl.int64) * stride_b + o_row[:, None] + o_d[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m_row[:, None] & (o_d < D)[None, :])


@triton.jit
def combine_forward_kernel(
    o_cmp, o_sel, o_win, gates, o, n_rows,
    stride_cb, stride_ct, stride_ch, stride_sb, stride_st, stride_sh, stride_wb, stride_wt, stride_wh,
    stride_gb, stride_gt, stride_gh, stride_gc, stride_ob, stride_ot, stride_oh,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_tile = tl.program_id(0)
    i_b = tl.program_id(1)
    o_gate, m_row = row_offsets(i_tile, n_rows, stride_gt, stride_gh, HEADS, BLOCK_R)
    p_g = gates + i_b.to(tl.int64) * stride_gb + o_gate
    b_cmp = load_tile(o_cmp, i_b, i_tile, n_rows, stride_cb, stride_ct, stride_ch, HEADS, D, BLOCK_R, BLOCK_D)
    b_sel = load_tile(o_sel, i_b, i_tile, n_rows, stride_sb, stride_st, stride_sh, HEADS, D, BLOCK_R, BLOCK_D)
    b_win = load_tile(o_win, i_b, i_tile, n_rows, stride_wb, stride_wt, stride_wh, HEADS, D, BLOCK_R, BLOCK_D)
    b_gc = tl.load(p_g, mask=m_row, other=0.0).to(tl.float32)
    b_gs = tl.load(p_g + stride_gc, mask=m_row, other=0.0).to(tl.float32)
    b_gw = tl.load(p_g + 2 * stride_gc, mask=m_row, other=0.0).to(tl.float32)
    b_o = b_gc[:, None] * b_cmp + b_gs[:, None] * b_sel + b_gw[:, None] * b_win
    store_tile(o, b_o, i_b, i_tile, n_rows, stride_ob, stride_ot, stride_oh, HEADS, D, BLOCK_R, BLOCK_D)


@triton.jit
def combine_backward_kernel(
    do, o_cmp, o_sel, o_win, gates, d_cmp, d_sel, d_win, d_gates, n_rows,
    stride_yb, stride_yt, stride_yh,
    stride_cb, stride_ct, stride_ch, stride_sb, stride_st, stride_sh, stride_wb, stride_wt, stride_wh,
    stride_gb, stride_gt, stride_gh, stride_gc, stride_db, stride_dt, stride_dh,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The three branch gradients are laid out alike (`stride_d*`); `d_gates` is contiguous."""
    i_tile = tl.program_id(0)
    i_b = tl.program_id(1)
    o_gate, m_row = row_offsets(i_tile, n_rows, stride_gt, stride_gh, HEADS, BLOCK_R)
    p_g = gates + i_b.to(tl.int64) * stride_gb + o_gate
    p_dg = d_gates + (i_b.to(tl.int64) * n_rows + i_tile * BLOCK_R + tl.arange(0, BLOCK_R)) * 3
    b_do = load_tile(do, i_b, i_tile, n_rows, stride_yb, stride_yt, stride_yh, HEADS, D, BLOCK_R, BLOCK_D)
    b_cmp = load_tile(o_cmp, i_b, i_tile, n_rows, stride_cb, stride_ct, stride_ch, HEADS, D, BLOCK_R, BLOCK_D)
    b_sel = load_tile(o_sel, i_b, i_tile, n_rows, stride_sb, stride_st, stride_sh, HEADS, D, BLOCK_R, BLOCK_D)
    b_win = load_tile(o_win, i_b, i_tile, n_rows, stride_wb, stride_wt, stride_wh, HEADS, D, BLOCK_R, BLOCK_D)
    b_gc = tl.load(p_g, mask=m_row, other=0.0).to(tl.float32)
    b_gs = tl.load(p_g + stride_gc, mask=m_row, other=0.0).to(tl.float32)
    b_gw = tl.load(p_g + 2 * stride_gc, mask=m_row, other=0.0).to(tl.float32)
    b_dc = b_gc[:, None] * b_do
    store_tile(d_cmp, b_dc, i_b, i_tile, n_rows, stride_db, stride_dt, stride_dh, HEADS, D, BLOCK_R, BLOCK_D)
    b_ds = b_gs[:, None] * b_do
    store_tile(d_sel, b_ds, i_b, i_tile, n_rows, stride_db, stride_dt, stride_dh, HEADS, D, BLOCK_R, BLOCK_D)
    b_dw = b_gw[:, None] * b_do
    store_tile(d_win, b_dw, i_b, i_tile, n_rows, stride_db, stride_dt, stride_dh, HEADS, D, BLOCK_R, BLOCK_D)
    tl.store(p_dg, tl.sum(b_do * b_cmp, 1).to(d_gates.dtype.element_ty), mask=m_row)
    tl.store(p_dg + 1, tl.sum(b_do * b_sel, 1).to(d_gates.dtype.element_ty), mask=m_row)
    tl.store(p_dg + 2, tl.sum(b_do * b_win, 1).to(d_gates.dtype.element_ty), mask=m_row)


def bound(o: Layout, gates: Layout, tile: CombineTile, **others: Layout) -> tuple[tuple[int, int], dict[str, object]]:
    """Grid and arguments of either kernel; `others`, named as for `strides`, are `[B, S, Hq, D]` too."""
    batch, length, heads, dim = o.shape
    block_d = triton.next_power_of_2(dim)
    block_r = max(1, tile.elements // block_d)
    return (triton.cdiv(length * heads, block_r), batch), {
        "n_rows": length * heads,
        **strides(**others, g_bthc=gates),
        "HEADS": heads,
        "D": dim,
        "BLOCK_R": block_r,
        "BLOCK_D": block_d,
        "num_warps": tile.num_warps,
    }


@lru_cache(maxsize=MAX_PLANS)
def plan_forward(o_cmp: Layout, o_sel: Layout, o_win: Layout, gates: Layout, tile: CombineTile | None) -> Launch:
    tile = tile or default_tile(o_cmp, backward=False)
    o = new_layout(o_cmp.shape, o_cmp.dtype, o_cmp.device)
    grid, arguments = bound(o_cmp, gates, tile, c_bth=o_cmp, s_bth=o_sel, w_bth=o_win, o_bth=o)
    return Launch(combine_forward_kernel, grid, **arguments)


@lru_cache(maxsize=MAX_PLANS)
def plan_backward(
    do: Layout, o_cmp: Layout, o_sel: Layout, o_win: Layout, gates: Layout, tile: CombineTile | None
) -> Launch:
    tile = tile or default_tile(o_cmp, backward=True)
    grads = new_layout(o_cmp.shape, o_cmp.dtype, o_cmp.device)
    grid, arguments = bound(o_cmp, gates, tile, y_bth=do, c_bth=o_cmp, s_bth=o_sel, w_bth=o_win, d_bth=grads)
    return Launch(combine_backward_kernel, grid, **arguments)


def combine_forward(
    o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, tile: CombineTile | None = None
) -> Tensor:
    """`[B,S,Hq,Dv]`: the branches weighed by `gates [B,S,Hq,3]`."""
    launch = plan_forward(layout(o_cmp), layout(o_sel), layout(o_win), layout(gates), tile)
    o = torch.empty(o_cmp.shape, dtype=o_cmp.dtype, device=o_cmp.device)
    launch(o_cmp=o_cmp, o_sel=o_sel, o_win=o_win, gates=gates, o=o)
    return o


def combine_backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, tile: CombineTile | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the three branches and of the gates."""
    layouts = (layout(do), layout(o_cmp), layout(o_sel), layout(o_win), layout(gates))
    launch = plan_backward(*layouts, tile)
    d_cmp, d_sel, d_win, d_gates = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (o_cmp, o_sel, o_win, gates)
    )
    launch(
        do=do, o_cmp=o_cmp, o_sel=o_sel, o_win=o_win, gates=gates,
        d_cmp=d_cmp, d_sel=d_sel, d_win=d_win, d_gates=d_gates,
    )  # fmt: skip
    return d_cmp, d_sel, d_win, d_gates
