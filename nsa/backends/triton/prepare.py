"""The inputs that all branches' backward passes share, in one launch: the gates' gradients and the row statistics.

    d_g[c] = do . o[c]          lse2[c] = lse[c] / ln(2) - log2(g[c])          delta[c] = d_g[c]

Rows and tiles are those of `combine.py`, statistics those of `row_statistics.py`. Grid: (tiles of rows, B). The rows go
on past the last query until they cover the padding of the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.combine import bound, default_tile, load_tile, row_offsets
from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout, strides
from nsa.backends.triton.primitives import LN_2, gated
from nsa.backends.triton.row_statistics import ROW_PAD, store_statistics
from nsa.sequences import Upstream


@triton.jit
def prepare_branch(
    b_do, o, lse, p_gate, p_dg, p_lse2, p_delta, m_out, i_b, i_tile, n_rows,
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One branch's part of a tile of rows; `m_out`: the rows that the statistics have."""
    b_o = load_tile(o, i_b, i_tile, n_rows, stride_ob, stride_ot, stride_oh, HEADS, D, BLOCK_R, BLOCK_D)
    o_lse, m_row = row_offsets(i_tile, n_rows, stride_lt, stride_lh, HEADS, BLOCK_R)
    b_product = tl.sum(b_do * b_o, 1)
    tl.store(p_dg, b_product.to(p_dg.dtype.element_ty), mask=m_row)
    b_lse = tl.load(lse + i_b.to(tl.int64) * stride_lb + o_lse, mask=m_row, other=float("-inf"))
    b_lse2 = gated(b_lse / LN_2, tl.load(p_gate, mask=m_row, other=1.0))
    store_statistics(p_lse2, p_delta, b_lse, b_lse2, b_product, m_out)


@triton.jit
def prepare_backward_kernel(
    do, o_cmp, o_sel, o_win, lse_cmp, lse_sel, lse_win, gates, d_gates, statistics, n_rows, n_rows_padded, stride_stat,
    stride_yb, stride_yt, stride_yh,
    stride_cb, stride_ct, stride_ch, stride_sb, stride_st, stride_sh, stride_wb, stride_wt, stride_wh,
    stride_kb, stride_kt, stride_kh, stride_lb, stride_lt, stride_lh, stride_mb, stride_mt, stride_mh,
    stride_gb, stride_gt, stride_gh, stride_gc,
    HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`d_gates [B, S, Hq, 3]` and `statistics`: `lse2, delta [B * G, rows]` of each branch, one after the other."""
    i_tile = tl.program_id(0)
    i_b = tl.program_id(1)
    o_gate, _ = row_offsets(i_tile, n_rows, stride_gt, stride_gh, HEADS, BLOCK_R)
    p_g = gates + i_b.to(tl.int64) * stride_gb + o_gate
    o_r = i_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    p_dg = d_gates + (i_b.to(tl.int64) * n_rows + o_r) * 3
    o_t = o_r // HEADS
    o_head = o_r - o_t * HEADS
    o_row = o_t * H + o_head % H
    m_out = o_row < n_rows_padded
    p_x = statistics + (i_b.to(tl.int64) * (HEADS // H) + o_head // H) * n_rows_padded + o_row
    b_do = load_tile(do, i_b, i_tile, n_rows, stride_yb, stride_yt, stride_yh, HEADS, D, BLOCK_R, BLOCK_D)
    prepare_branch(
        b_do, o_cmp, lse_cmp, p_g, p_dg, p_x, p_x + stride_stat, m_out, i_b, i_tile, n_rows,
        stride_cb, stride_ct, stride_ch, stride_kb, stride_kt, stride_kh, HEADS, D, BLOCK_R, BLOCK_D,
    )  # fmt: skip
    p_x += 2 * tl.cast(stride_stat, tl.int64)
    prepare_branch(
        b_do, o_sel, lse_sel, p_g + stride_gc, p_dg + 1, p_x, p_x + stride_stat, m_out, i_b, i_tile, n_rows,
        stride_sb, stride_st, stride_sh, stride_lb, stride_lt, stride_lh, HEADS, D, BLOCK_R, BLOCK_D,
    )  # fmt: skip
    p_x += 2 * tl.cast(stride_stat, tl.int64)
    prepare_branch(
        b_do, o_win, lse_win, p_g + 2 * stride_gc, p_dg + 2, p_x, p_x + stride_stat, m_out, i_b, i_tile, n_rows,
        stride_wb, stride_wt, stride_wh, stride_mb, stride_mt, stride_mh, HEADS, D, BLOCK_R, BLOCK_D,
    )  # fmt: skip


@lru_cache(maxsize=MAX_PLANS)
def plan(
    do: Layout, outputs: tuple[Layout, ...], lses: tuple[Layout, ...], gates: Layout, n_groups: int
) -> tuple[Launch, tuple[int, int, int]]:
    """The launch, and the shape of the statistics."""
    batch, n_queries, n_heads, _ = do.shape
    heads = n_heads // n_groups
    n_rows_padded = triton.cdiv(n_queries * heads, ROW_PAD) * ROW_PAD
    o_cmp, o_sel, o_win = outputs
    lse_cmp, lse_sel, lse_win = lses
    tile = default_tile(o_cmp, backward=True)
    _, arguments = bound(do, gates, tile, y_bth=do, c_bth=o_cmp, s_bth=o_sel, w_bth=o_win)
    block_r = max(1, tile.elements // triton.next_power_of_2(do.shape[3]))
    launch = Launch(
        prepare_backward_kernel, (triton.cdiv(triton.cdiv(n_rows_padded, heads) * n_heads, block_r), batch),
        n_rows_padded=n_rows_padded, stride_stat=batch * n_groups * n_rows_padded,
        **strides(k_bth=lse_cmp, l_bth=lse_sel, m_bth=lse_win), **arguments, H=heads,
    )  # fmt: skip
    return launch, (6, batch * n_groups, n_rows_padded)


def prepare_backward(
    do: Tensor, outputs: Sequence[Tensor], lses: Sequence[Tensor], gates: Tensor, n_groups: int
) -> tuple[Tensor, tuple[Upstream, Upstream, Upstream]]:
    """The gates' gradients `[B,S,Hq,3]`, and what each branch's backward pass starts from, in the gates' order.

    Args:
        do: `[B,S,Hq,Dv]`, the gradient of the gated sum.
        outputs, lses: of the three branches, `[B,S,Hq,Dv]` and `[B,S,Hq]`.
        gates: `[B,S,Hq,3]`.
        n_groups: heads are grouped by this many.
    """
    o_cmp, o_sel, o_win = outputs
    lse_cmp, lse_sel, lse_win = lses
    launch, shape = plan(
        layout(do), (layout(o_cmp), layout(o_sel), layout(o_win)),
        (layout(lse_cmp), layout(lse_sel), layout(lse_win)), layout(gates), n_groups,
    )  # fmt: skip
    d_gates = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    statistics = torch.empty(shape, dtype=torch.float32, device=gates.device)
    launch(
        do=do, o_cmp=o_cmp, o_sel=o_sel, o_win=o_win, lse_cmp=lse_cmp, lse_sel=lse_sel, lse_win=lse_win,
        gates=gates, d_gates=d_gates, statistics=statistics,
    )  # fmt: skip
    g_cmp, g_sel, g_win = gates.unbind(dim=-1)
    rows = statistics.unbind()
    return d_gates, (
        Upstream(do, None, g_cmp, statistics=rows[0:2]),
        Upstream(do, None, g_sel, statistics=rows[2:4]),
        Upstream(do, None, g_win, statistics=rows[4:6]),
    )
