"""The statistics of a row that every backward pass needs: its LSE in base 2 and `delta = sum(do * o) - dlse`.

Both are laid out by rows `[B * G, rows]` (see `primitives`), padded to a multiple of `ROW_PAD`. Grid: one CTA per
ROW_PAD rows and (batch, group), which writes each of its rows once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout, strides
from nsa.backends.triton.primitives import COUNTS, LN_2, gated, load_rows, split_rows
from nsa.backends.triton.tiles import block_width, row_contiguous
from nsa.sequences import Saved, Upstream

# Row buffers are padded to a multiple of this, so every BLOCK_M that reads them must divide it.
ROW_PAD = 128


@triton.jit
def store_statistics(p_lse2, p_delta, b_lse, b_lse2, b_delta, m_out):
    """Neither probabilities nor gradients of a row that sees nothing."""
    m_empty = b_lse == float("-inf")
    tl.store(p_lse2, tl.where(m_empty, float("inf"), b_lse2), mask=m_out)
    tl.store(p_delta, tl.where(m_empty, 0.0, b_delta), mask=m_out)


@triton.jit(do_not_specialize=COUNTS)
def row_statistics_kernel(
    p_o, p_do, p_lse, p_dlse, p_gate, p_product, p_lse2, p_delta, n_queries, n_groups,
    stride_ob, stride_ot, stride_oh, stride_db, stride_dt, stride_dh,
    stride_lb, stride_lt, stride_lh, stride_eb, stride_et, stride_eh, stride_gb, stride_gt, stride_gh,
    stride_pb, stride_pt, stride_ph,
    H: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`lse2 = lse / ln(2)` and `delta`, `[B * G, rows]`; `+inf` and 0 for rows that see nothing or do not exist, which
    makes their probabilities and gradients exactly 0 in every tile. See `gated` for what a gate does.

    `p_product` is `sum(do * o)` where that is known; `o` and `do` are not there then.
    """
    i_row = tl.program_id(0) * BLOCK_M
    i_b = tl.program_id(1) // n_groups
    i_g = tl.program_id(1) % n_groups
    i_t, o_t, o_h = split_rows(i_row, H, BLOCK_M)
    o_t = i_t + o_t
    m_t = o_t < n_queries
    if p_product is None:
        b_o = load_rows(
            p_o, i_b, i_g, i_row, n_queries, stride_ob, stride_ot, stride_oh, H, D_V, BLOCK_M, BLOCK_DV, False
        )
        b_do = load_rows(
            p_do, i_b, i_g, i_row, n_queries, stride_db, stride_dt, stride_dh, H, D_V, BLOCK_M, BLOCK_DV, False
        )
        b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
        o_h += i_g * H
    else:
        o_h += i_g * H
        o_product = i_b.to(tl.int64) * stride_pb + o_t.to(tl.int64) * stride_pt + o_h * stride_ph
        b_delta = tl.load(p_product + o_product, mask=m_t, other=0.0)
    o_lse = i_b.to(tl.int64) * stride_lb + o_t.to(tl.int64) * stride_lt + o_h * stride_lh
    b_lse = tl.load(p_lse + o_lse, mask=m_t, other=float("-inf"))
    if p_dlse is not None:
        o_dlse = i_b.to(tl.int64) * stride_eb + o_t.to(tl.int64) * stride_et + o_h * stride_eh
        b_delta -= tl.load(p_dlse + o_dlse, mask=m_t, other=0.0)

    o_row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) * BLOCK_M + i_row + tl.arange(0, BLOCK_M)
    b_lse2 = b_lse / LN_2
    if p_gate is not None:
        o_gate = i_b.to(tl.int64) * stride_gb + o_t.to(tl.int64) * stride_gt + o_h * stride_gh
        b_lse2 = gated(b_lse2, tl.load(p_gate + o_gate, mask=m_t, other=1.0))
    store_statistics(p_lse2 + o_row, p_delta + o_row, b_lse, b_lse2, b_delta, None)


@lru_cache(maxsize=MAX_PLANS)
def plan(
    lse: Layout, o: Layout | None, do: Layout | None, dlse: Layout | None, gate: Layout | None,
    product: Layout | None, n_groups: int,
) -> tuple[Launch, tuple[int, int]]:  # fmt: skip
    """The launch, and the shape of both results."""
    batch, n_queries, n_heads = lse.shape
    heads = n_heads // n_groups
    d_v = 1 if o is None else o.shape[3]
    n_tiles = triton.cdiv(n_queries * heads, ROW_PAD)
    launch = Launch(
        row_statistics_kernel, (n_tiles, batch * n_groups), n_queries=n_queries, n_groups=n_groups,
        **strides(o_bth=o, d_bth=do, l_bth=lse, e_bth=dlse, g_bth=gate, p_bth=product), H=heads, D_V=d_v,
        BLOCK_M=ROW_PAD, BLOCK_DV=block_width(d_v), num_warps=4,
    )  # fmt: skip
    return launch, (batch * n_groups, n_tiles * ROW_PAD)


def row_statistics(upstream: Upstream, saved: Saved, n_groups: int) -> tuple[Tensor, Tensor]:
    """`lse2` and `delta`, each fp32 `[B * G, rows padded to ROW_PAD]`; see the kernel, and `prepare.py`."""
    if upstream.statistics is not None:
        lse2, delta = upstream.statistics
        return lse2, delta
    lse, dlse, gate, product = saved.lse, upstream.dlse, upstream.gate, upstream.product
    o, do = (row_contiguous(saved.o), row_contiguous(upstream.do)) if product is None else (None, None)
    launch, shape = plan(
        layout(lse), None if o is None else layout(o), None if do is None else layout(do),
        None if dlse is None else layout(dlse), None if gate is None else layout(gate),
        None if product is None else layout(product), n_groups,
    )  # fmt: skip
    lse2 = torch.empty(shape, dtype=torch.float32, device=lse.device)
    delta = torch.empty(shape, dtype=torch.float32, device=lse.device)
    launch(p_o=o, p_do=do, p_lse=lse, p_dlse=dlse, p_gate=gate, p_product=product, p_lse2=lse2, p_delta=delta)
    return lse2, delta
