"""The blocks that a run of neighbouring queries all chose, attended to as dense tiles.

The forced blocks (the first ones, and those ending at the query's own) are the same for all queries of a block, and
neighbouring queries of a trained model choose much the same others too. So the choice is split: what all queries of a
run have in common is read once for the run, with `queries * h` rows in one tile; what is left goes the general way
(`selected_attend.py`), starting from the run's result. Nothing here knows which blocks were forced.

`split`: a program per (run, group) writes the run's common blocks and, for each query, the rest of its choice.
`common`: a program per (run, group) owns the run's rows and writes their `o` and base-2 log-sum-exp once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.primitives import COUNTS, FLOOR
from nsa.backends.triton.selected_index import Blocks

# A power of two; work that starts at a multiple of it starts with a whole run.
LONGEST_RUN = 64


@triton.jit(do_not_specialize=COUNTS)
def split_kernel(
    p_indices, p_rest, p_common, p_n_common, p_doc_start,
    n_tokens, n_groups, run_0, n_runs, stride_b, stride_t, stride_g,
    N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, RUN: tl.constexpr, BLOCK_S: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Common blocks of a run, as first tokens packed to the front, and `[B, S, G, n]` what is left, padded with -1."""
    i_run = run_0 + tl.program_id(0)
    i_row = tl.program_id(1)
    i_b = (i_row // n_groups).to(tl.int64)
    i_g = (i_row % n_groups).to(tl.int64)
    o_t = i_run * RUN + tl.arange(0, RUN)
    o_slot = tl.arange(0, BLOCK_S)
    m_t = o_t < n_tokens
    m_pair = m_t[:, None] & (o_slot < N_SELECT)[None, :]
    p_row = p_indices + i_b * stride_b + i_g * stride_g
    b_index = tl.load(p_row + (o_t.to(tl.int64) * stride_t)[:, None] + o_slot[None, :], mask=m_pair, other=-1)
    i_t = i_run * RUN
    if PACKED:
        b_start = tl.load(p_doc_start + o_t, mask=m_t, other=0)
        i_start = tl.load(p_doc_start + i_t)
    else:
        b_start = o_t * 0
        i_start = 0
    # A block is known by its first token, the same in every document's own count.
    m_reads = (b_index >= 0) & (b_index <= ((o_t - b_start) // SELECT_BLOCK)[:, None])
    b_token = tl.where(m_reads, b_start[:, None] + b_index * SELECT_BLOCK, -1)
    b_first = tl.load(p_row + i_t.to(tl.int64) * stride_t + o_slot, mask=o_slot < N_SELECT, other=-1)
    m_first = (b_first >= 0) & (b_first <= (i_t - i_start) // SELECT_BLOCK)
    b_first = tl.where(m_first, i_start + b_first * SELECT_BLOCK, -2)

    # [RUN, slot, slot of the first query]; chosen blocks are distinct, so counting finds those that everyone chose.
    b_same = (b_token[:, :, None] == b_first[None, None, :]).to(tl.int32)
    n_choosers = tl.sum(tl.sum(b_same, 1), 0)
    m_common = (n_choosers == tl.minimum(RUN, n_tokens - i_t)) & m_first
    b_common = m_common.to(tl.int32)
    b_place = tl.cumsum(b_common, 0) - b_common
    o_list = (i_row.to(tl.int64) * n_runs + i_run) * N_SELECT
    tl.store(p_common + o_list + b_place, b_first, mask=m_common)
    tl.store(p_n_common + i_row * n_runs + i_run, tl.sum(b_common))

    b_kept = (m_reads & (tl.sum(b_same * b_common[None, None, :], 2) == 0)).to(tl.int32)
    b_place = tl.cumsum(b_kept, 1) - b_kept
    p_rest += (((i_b * n_tokens + o_t) * n_groups + i_g) * N_SELECT)[:, None]
    tl.store(p_rest + b_place, b_index, mask=m_pair & (b_kept > 0))
    m_gap = o_slot[None, :] >= tl.sum(b_kept, 1)[:, None]
    tl.store(p_rest + o_slot[None, :], tl.full([RUN, BLOCK_S], -1, tl.int32), mask=m_pair & m_gap)


@triton.jit(do_not_specialize=COUNTS)
def common_kernel(
    p_q, p_k, p_v, p_o, p_lse, p_common, p_n_common, scale_log2, n_tokens, n_groups, run_0, n_runs,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The rows of a run over its common blocks; `lse` in base 2, -inf where a run has nothing in common."""
    i_run = run_0 + tl.program_id(0)
    i_row = tl.program_id(1)
    i_b = (i_row // n_groups).to(tl.int64)
    i_g = (i_row % n_groups).to(tl.int64)
    o_row = tl.arange(0, BLOCK_M)
    o_head = o_row % H
    o_t = i_run * RUN + o_row // H
    m_row = (o_row < RUN * H) & (o_t < n_tokens)
    i_last = tl.minimum(i_run * RUN + RUN, n_tokens) - 1
    o_n = tl.arange(0, BLOCK_N)
    o_dk = tl.arange(0, BLOCK_DK)
    o_dv = tl.arange(0, BLOCK_DV)
    p_rows = p_q + i_b * stride_qb + i_g * H * stride_qh + o_t.to(tl.int64) * stride_qt + o_head * stride_qh
    b_q = tl.load(p_rows[:, None] + o_dk[None, :], mask=m_row[:, None] & (o_dk < D_K)[None, :], other=0.0)
    p_k += i_b * stride_kb + i_g * stride_kg
    p_v += i_b * stride_vb + i_g * stride_vg
    p_list = p_common + (i_row.to(tl.int64) * n_runs + i_run) * N_SELECT
    n_common = tl.load(p_n_common + i_row * n_runs + i_run)

    b_m = tl.full([BLOCK_M], FLOOR, tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for i_slot in tl.range(0, n_common, num_stages=NUM_STAGES):
        o_token = tl.load(p_list + i_slot) + o_n
        m_n = o_token <= i_last
        if SELECT_BLOCK < BLOCK_N:
            m_n = m_n & (o_n < SELECT_BLOCK)
        m_k = m_n[:, None] if D_K == BLOCK_DK else m_n[:, None] & (o_dk < D_K)[None, :]
        m_v = m_n[:, None] if D_V == BLOCK_DV else m_n[:, None] & (o_dv < D_V)[None, :]
        b_k = tl.load(p_k + (o_token.to(tl.int64) * stride_kn)[:, None] + o_dk[None, :], mask=m_k, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_s = tl.where(m_n[None, :] & (o_token[None, :] <= o_t[:, None]), b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * scale_log2)
        b_p = tl.math.exp2(b_s * scale_log2 - b_m_new[:, None])
        b_alpha = tl.math.exp2(b_m - b_m_new)
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_v = tl.load(p_v + (o_token.to(tl.int64) * stride_vn)[:, None] + o_dv[None, :], mask=m_v, other=0.0)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None], input_precision="ieee")
        b_m = b_m_new
    b_o = b_o * (1.0 / tl.where(b_l > 0, b_l, 1.0))[:, None]
    b_lse = tl.where(b_l > 0, b_m + tl.math.log2(b_l), float("-inf"))
    o_out = ((i_b * n_tokens + o_t) * n_groups + i_g) * H + o_head
    m_o = m_row[:, None] & (o_dv < D_V)[None, :]
    tl.store(p_o + (o_out * D_V)[:, None] + o_dv[None, :], b_o.to(p_o.dtype.element_ty), mask=m_o)
    tl.store(p_lse + o_out, b_lse, mask=m_row)


def run_length(heads: int, block_m: int, select_block: int) -> int:
    """Queries a run: a power of two that fits the tile, and a block, past which local blocks are not shared."""
    run = 1
    while 2 * run * heads <= block_m and 2 * run <= min(select_block, LONGEST_RUN):
        run *= 2
    return run


@dataclass(frozen=True)
class Split:
    """The choice in two: what the queries of each run have in common, and what is left of every query's."""

    run: int  # queries in a run
    run_0: int  # runs before this one are not there
    common: Tensor  # [rows, runs, n] int32 first tokens
    n_common: Tensor  # [rows, runs] int32
    rest: Tensor  # [B, S, G, n] int32


def split_choice(indices: Tensor, blocks: Blocks, heads: int, block_m: int, query_0: int) -> Split:
    """Of the queries from `query_0` on, which starts a run."""
    batch, n_tokens, n_groups, n_select = indices.shape
    rows = batch * n_groups
    run = run_length(heads, block_m, blocks.select_block)
    n_runs, run_0 = triton.cdiv(n_tokens, run), query_0 // run
    assert query_0 % run == 0, "runs start at multiples of their length"
    common = torch.empty(rows, n_runs, n_select, dtype=torch.int32, device=indices.device)
    n_common = torch.empty(rows, n_runs, dtype=torch.int32, device=indices.device)
    rest = torch.empty(indices.shape, dtype=torch.int32, device=indices.device)
    split_kernel[(n_runs - run_0, rows)](
        p_indices=indices,
        p_rest=rest,
        p_common=common,
        p_n_common=n_common,
        p_doc_start=blocks.doc_start,
        n_tokens=n_tokens,
        n_groups=n_groups,
        run_0=run_0,
        n_runs=n_runs,
        stride_b=indices.stride(0),
        stride_t=indices.stride(1),
        stride_g=indices.stride(2),
        N_SELECT=n_select,
        SELECT_BLOCK=blocks.select_block,
        RUN=run,
        BLOCK_S=triton.next_power_of_2(n_select),
        PACKED=blocks.packed,
        num_warps=4 if run >= 16 else 2,
    )
    return Split(run, run_0, common, n_common, rest)


def common_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    split: Split,
    o: Tensor,
    lse: Tensor,
    select_block: int,
    scale_log2: float,
    *,
    num_warps: int,
    num_stages: int,
    sizes: dict[str, int],
) -> None:
    """Fills `o` and `lse` (base 2) with what comes of the common blocks."""
    n_tokens, n_heads, d_k = q.shape[1:]
    n_groups, d_v = v.shape[2:]
    heads = n_heads // n_groups
    rows, n_runs, n_select = split.common.shape
    common_kernel[(n_runs - split.run_0, rows)](
        p_q=q,
        p_k=k,
        p_v=v,
        p_o=o,
        p_lse=lse,
        p_common=split.common,
        p_n_common=split.n_common,
        scale_log2=scale_log2,
        n_tokens=n_tokens,
        n_groups=n_groups,
        run_0=split.run_0,
        n_runs=n_runs,
        stride_qb=q.stride(0),
        stride_qt=q.stride(1),
        stride_qh=q.stride(2),
        stride_kb=k.stride(0),
        stride_kn=k.stride(1),
        stride_kg=k.stride(2),
        stride_vb=v.stride(0),
        stride_vn=v.stride(1),
        stride_vg=v.stride(2),
        H=heads,
        N_SELECT=n_select,
        SELECT_BLOCK=select_block,
        D_K=d_k,
        D_V=d_v,
        RUN=split.run,
        BLOCK_M=max(16, triton.next_power_of_2(split.run * heads)),
        **sizes,
        NUM_STAGES=num_stages,
        num_warps=num_warps,
    )
