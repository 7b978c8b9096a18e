"""The gated sum of the three branches, and its gradients, each in one pass over memory.

    o = g_cmp * o_cmp + g_sel * o_sel + g_win * o_win          d_g[c] = do . o[c]          d_o[c] = g[c] * do

Rows are (query, head). Grid (tiles of rows, B): one program owns `BLOCK_R` rows of all tensors, reads each element once
and writes each result once. Sums are fp32; a row's dot products are its own, so nothing is shared between programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton import tuning
from nsa.backends.triton.tiles import capability


@dataclass(frozen=True)
class Tile:
    """`elements`: of each tensor that one program works on."""

    elements: int
    num_warps: int


def default_tile(o: Tensor, *, backward: bool) -> Tile:
    """Enough loads in flight for each SM to keep the memory busy, few enough for several programs an SM."""
    kernel = "combine-backward" if backward else "combine-forward"
    return tuning.pick(kernel, Tile, capability(o.device), o.shape[-1], o.shape[-1], o.dtype)


def candidates() -> list[Tile]:
    """Tiles worth measuring."""
    return [Tile(elements, warps) for elements in (1024, 2048, 4096, 8192) for warps in (2, 4, 8)]


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
    """The three branch gradients, if wanted, are laid out alike (`stride_d*`); `d_gates` is contiguous."""
    i_tile = tl.program_id(0)
    i_b = tl.program_id(1)
    o_gate, m_row = row_offsets(i_tile, n_rows, stride_gt, stride_gh, HEADS, BLOCK_R)
    p_g = gates + i_b.to(tl.int64) * stride_gb + o_gate
    p_dg = d_gates + (i_b.to(tl.int64) * n_rows + i_tile * BLOCK_R + tl.arange(0, BLOCK_R)) * 3
    b_do = load_tile(do, i_b, i_tile, n_rows, stride_yb, stride_yt, stride_yh, HEADS, D, BLOCK_R, BLOCK_D)
    b_cmp = load_tile(o_cmp, i_b, i_tile, n_rows, stride_cb, stride_ct, stride_ch, HEADS, D, BLOCK_R, BLOCK_D)
    b_sel = load_tile(o_sel, i_b, i_tile, n_rows, stride_sb, stride_st, stride_sh, HEADS, D, BLOCK_R, BLOCK_D)
    b_win = load_tile(o_win, i_b, i_tile, n_rows, stride_wb, stride_wt, stride_wh, HEADS, D, BLOCK_R, BLOCK_D)
    if d_cmp is not None:
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


def strides(x: Tensor, name: str) -> dict[str, int]:
    """`stride_<name>b`, `t`, `h` of `[B, S, Hq, D]`, which must be contiguous in `D`."""
    assert x.stride(-1) == 1 or x.shape[-1] == 1, f"last dimension has stride {x.stride(-1)}"
    return {f"stride_{name}{dim}": x.stride(i) for i, dim in enumerate("bth")}


def contiguous_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def combine_forward(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, *, tile: Tile | None = None) -> Tensor:
    """`[B,S,Hq,Dv]`: the branches weighed by `gates [B,S,Hq,3]`."""
    batch, length, heads, dim = o_cmp.shape
    tile = tile or default_tile(o_cmp, backward=False)
    block_d = triton.next_power_of_2(dim)
    block_r = max(1, tile.elements // block_d)
    o = contiguous_like(o_cmp, o_cmp.dtype)
    combine_forward_kernel[(triton.cdiv(length * heads, block_r), batch)](
        o_cmp=o_cmp, o_sel=o_sel, o_win=o_win, gates=gates, o=o, n_rows=length * heads,
        **strides(o_cmp, "c"), **strides(o_sel, "s"), **strides(o_win, "w"), **strides(o, "o"),
        stride_gb=gates.stride(0), stride_gt=gates.stride(1), stride_gh=gates.stride(2), stride_gc=gates.stride(3),
        HEADS=heads, D=dim, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=tile.num_warps,
    )  # fmt: skip
    return o


def combine_backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the three branches and of the gates."""
    branches = (o_cmp, o_sel, o_win)
    d_cmp, d_sel, d_win = (contiguous_like(o, o.dtype) for o in branches)
    d_gates = contiguous_like(gates, gates.dtype)
    launch_backward(do, branches, gates, (d_cmp, d_sel, d_win), d_gates, tile)
    return d_cmp, d_sel, d_win, d_gates


def gates_backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, *, tile: Tile | None = None
) -> Tensor:
    """The gradient of the gates alone, in fp32."""
    d_gates = contiguous_like(gates, torch.float32)
    launch_backward(do, (o_cmp, o_sel, o_win), gates, (None, None, None), d_gates, tile)
    return d_gates


def launch_backward(
    do: Tensor,
    branches: tuple[Tensor, Tensor, Tensor],
    gates: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    d_gates: Tensor,
    tile: Tile | None,
) -> None:
    """Fills the branches' gradients, if there are tensors for them, and that of the gates."""
    o_cmp, o_sel, o_win = branches
    d_cmp, d_sel, d_win = grads
    batch, length, heads, dim = o_cmp.shape
    tile = tile or default_tile(o_cmp, backward=True)
    block_d = triton.next_power_of_2(dim)
    block_r = max(1, tile.elements // block_d)
    combine_backward_kernel[(triton.cdiv(length * heads, block_r), batch)](
        do=do, o_cmp=o_cmp, o_sel=o_sel, o_win=o_win, gates=gates,
        d_cmp=d_cmp, d_sel=d_sel, d_win=d_win, d_gates=d_gates, n_rows=length * heads,
        **strides(do, "y"), **strides(o_cmp, "c"), **strides(o_sel, "s"), **strides(o_win, "w"),
        **strides(do if d_cmp is None else d_cmp, "d"),
        stride_gb=gates.stride(0), stride_gt=gates.stride(1), stride_gh=gates.stride(2), stride_gc=gates.stride(3),
        HEADS=heads, D=dim, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=tile.num_warps,
    )  # fmt: skip
