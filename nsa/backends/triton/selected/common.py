"""The blocks that all queries of a run of neighbors selected, attended to as dense tiles.

The forced blocks (the first ones, and those ending at the query's own) are the same for all queries of a block, and
neighboring queries of a trained model select much the same others too. So the selection is split: what all queries of
a run have in common is read once for the run, with `queries * h` rows in one tile; what is left goes the general way
(`forward.py`). Nothing here knows which blocks were forced.

`split`: a CTA per (run, group) writes the run's common blocks and, for each query, the rest of its selection.
`common`: a CTA per (run, group) owns the run's rows. It attends to the common blocks and, where the rest went by block,
adds the partials of the rest: its matmuls then overlap with another CTA's wait for memory.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.launch import Launch, strides
from nsa.backends.triton.primitives import COUNTS, FLOOR, LN_2, LOG2_E, load_wide, online_softmax
from nsa.backends.triton.selected.index import WORD, Chunk, Shapes, Tables, aligned_size, query_start

# Work is cut at multiples of a word of queries; cut there, it starts and ends with a whole run.
LONGEST_RUN = WORD

# Comparisons of a run's selections with those of its first query that a CTA holds at once.
MOST_COMPARED = 1 << 14

# Numbers that are kept of a run.
RUN_FIELDS = tl.constexpr(4)

# Bytes of partials in flight to a CTA, which then has little else to do than to wait for them.
PARTIAL_BYTES = 64 << 10


@triton.jit(do_not_specialize=COUNTS)
def split_kernel(
    p_indices, p_rest, p_common, p_runs, p_doc_start,
    n_tokens, n_groups, n_runs, stride_b, stride_t, stride_g,
    N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, RUN: tl.constexpr, BLOCK_S: tl.constexpr, VARLEN: tl.constexpr,
    p_start=None, max_start=None,
):  # fmt: skip
    """Common blocks of a run, as first tokens packed to the front, and `[B, S, G, n]` what is left, padded with -1.

    `p_runs`, of each run: how many are common; the fewest and the most blocks that are left of a query; the first token
    of the last common block if some query lies in it or before it, else 0.
    """
    i_run = tl.program_id(0)
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
    start = query_start(p_start, max_start, i_row // n_groups)
    if VARLEN:
        b_start = tl.load(p_doc_start + o_t, mask=m_t, other=0)
        i_start = tl.load(p_doc_start + i_t)
    else:
        b_start = o_t * 0
        i_start = 0
    # A block is known by its first token, the same in every document's own count.
    m_reads = (b_index >= 0) & (b_index <= ((o_t + start - b_start) // SELECT_BLOCK)[:, None])
    b_token = tl.where(m_reads, b_start[:, None] + b_index * SELECT_BLOCK, -1)
    b_first = tl.load(p_row + i_t.to(tl.int64) * stride_t + o_slot, mask=o_slot < N_SELECT, other=-1)
    m_first = (b_first >= 0) & (b_first <= (i_t + start - i_start) // SELECT_BLOCK)
    b_first = tl.where(m_first, i_start + b_first * SELECT_BLOCK, -2)

    if RUN == 1:
        # One query has all of its selection in common with itself.
        m_common = m_first
        b_kept = (m_reads & False).to(tl.int32)
    else:
        # [RUN, slot, slot of the first query]; selected blocks are distinct, so counting finds the common ones.
        b_same = (b_token[:, :, None] == b_first[None, None, :]).to(tl.int32)
        n_selecting = tl.sum(tl.sum(b_same, 1), 0)
        m_common = (n_selecting == tl.minimum(RUN, n_tokens - i_t)) & m_first
        b_kept = (m_reads & (tl.sum(b_same * m_common.to(tl.int32)[None, None, :], 2) == 0)).to(tl.int32)
    b_common = m_common.to(tl.int32)
    b_place = tl.cumsum(b_common, 0) - b_common
    o_list = (i_row.to(tl.int64) * n_runs + i_run) * N_SELECT
    tl.store(p_common + o_list + b_place, b_first, mask=m_common)
    p_runs += (i_row.to(tl.int64) * n_runs + i_run) * RUN_FIELDS
    tl.store(p_runs, tl.sum(b_common))
    n_kept = tl.sum(b_kept, 1)
    tl.store(p_runs + 1, tl.min(tl.where(m_t, n_kept, N_SELECT)))
    tl.store(p_runs + 2, tl.max(n_kept))
    tl.store(p_runs + 3, tl.max(tl.where(m_common & (b_first + SELECT_BLOCK > i_t + start), b_first, 0)))

    b_place = tl.cumsum(b_kept, 1) - b_kept
    p_rest += (((i_b * n_tokens + o_t) * n_groups + i_g) * N_SELECT)[:, None]
    tl.store(p_rest + b_place, b_index, mask=m_pair & (b_kept > 0))
    m_gap = o_slot[None, :] >= n_kept[:, None]
    tl.store(p_rest + o_slot[None, :], tl.full([RUN, BLOCK_S], -1, tl.int32), mask=m_pair & m_gap)


@triton.jit
def add_partials(
    b_m, b_l, b_o, p_part, p_part_lse, o_part, n_partials, i_start, i_stop,
    H: tl.constexpr, D_V: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A running softmax continues over the partial outputs in slots `[i_start, i_stop)` of each row."""
    o_dv = tl.arange(0, BLOCK_DV)
    for i_slot in tl.range(i_start, i_stop, num_stages=NUM_STAGES):
        o_x = o_part + i_slot * H
        p_x = p_part + (o_x * D_V)[:, None] + o_dv[None, :]
        if MASKED:
            m_part = i_slot < n_partials
            b_x = tl.load(p_x, mask=m_part[:, None] & (o_dv < D_V)[None, :], other=0.0)
            b_lse = tl.load(p_part_lse + o_x, mask=m_part, other=float("-inf"))
        else:
            b_x = load_wide(p_x, o_dv, D_V, BLOCK_DV)
            b_lse = tl.load(p_part_lse + o_x)
        b_m_new = tl.maximum(b_m, b_lse)
        b_alpha = tl.math.exp2(b_m - b_m_new)
        b_w = tl.math.exp2(b_lse - b_m_new)
        b_l = b_l * b_alpha + b_w
        b_o = b_o * b_alpha[:, None] + b_x.to(tl.float32) * b_w[:, None]
        b_m = b_m_new
    return b_m, b_l, b_o


@triton.jit(do_not_specialize=COUNTS)
def common_kernel(
    p_q, p_k, p_v, p_o, p_lse, p_common, p_runs, p_rest, p_part, p_part_lse,
    scale_log2, n_tokens, n_groups, n_runs, row_0, query_0, n_queries,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    H: tl.constexpr, N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr, PARTIALS: tl.constexpr, NUM_STAGES: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
    p_start=None, max_start=None,
):  # fmt: skip
    """The rows of a run over its common blocks and, with PARTIALS, the partials of the others.

    Writes `o` and `lse`: the natural one with PARTIALS; else in base 2, -inf where a run has nothing in common.
    """
    i_run = query_0 // RUN + tl.program_id(0)
    i_local = tl.program_id(1)
    i_row = row_0 + i_local
    i_b = (i_row // n_groups).to(tl.int64)
    i_g = (i_row % n_groups).to(tl.int64)
    o_row = tl.arange(0, BLOCK_M)
    o_head = o_row % H
    o_t = i_run * RUN + o_row // H
    m_row = (o_row < RUN * H) & (o_t < n_tokens)
    start = query_start(p_start, max_start, i_row // n_groups)
    # Of the run's last query and of each row's: the last token that it sees.
    i_last = start + tl.minimum(i_run * RUN + RUN, n_tokens) - 1
    o_last = start + o_t
    o_n = tl.arange(0, BLOCK_N)
    o_dk = tl.arange(0, BLOCK_DK)
    o_dv = tl.arange(0, BLOCK_DV)
    p_rows = p_q + i_b * stride_qb + i_g * H * stride_qh + o_t.to(tl.int64) * stride_qt + o_head * stride_qh
    b_q = tl.load(p_rows[:, None] + o_dk[None, :], mask=m_row[:, None] & (o_dk < D_K)[None, :], other=0.0)
    p_k += i_b * stride_kb + i_g * stride_kg
    p_v += i_b * stride_vb + i_g * stride_vg
    p_list = p_common + (i_row.to(tl.int64) * n_runs + i_run) * N_SELECT
    n_common = tl.load(p_runs + (i_row.to(tl.int64) * n_runs + i_run) * RUN_FIELDS)

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
        b_s = tl.where(m_n[None, :] & (o_token[None, :] <= o_last[:, None]), b_s, float("-inf"))
        b_p, b_m, b_l, b_o = online_softmax(b_s, b_m, b_l, b_o, scale_log2)
        b_v = tl.load(p_v + (o_token.to(tl.int64) * stride_vn)[:, None] + o_dv[None, :], mask=m_v, other=0.0)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")
    o_query = (i_b * n_tokens + o_t) * n_groups + i_g
    if PARTIALS:
        o_slot = tl.arange(0, BLOCK_S)
        m_rest = m_row[:, None] & (o_slot < N_SELECT)[None, :]
        b_rest = tl.load(p_rest + (o_query * N_SELECT)[:, None] + o_slot[None, :], mask=m_rest, other=-1)
        # Parts fill a row's first slots. Rows past the end read the run's first query's and are not written.
        n_partials = tl.sum((b_rest >= 0).to(tl.int32), 1)
        n_all = tl.min(tl.where(m_row, n_partials, N_SELECT))
        o_local = tl.where(m_row, o_row, 0)
        o_part = i_local.to(tl.int64) * n_queries + i_run * RUN - query_0 + o_local // H
        o_part = o_part * (N_SELECT * H) + o_local % H
        b_m, b_l, b_o = add_partials(
            b_m, b_l, b_o, p_part, p_part_lse, o_part, n_partials, 0, n_all, H, D_V, BLOCK_DV, False, PARTIAL_STAGES
        )
        b_m, b_l, b_o = add_partials(
            b_m, b_l, b_o, p_part, p_part_lse, o_part, n_partials, n_all, tl.max(n_partials), H, D_V, BLOCK_DV, True, 1
        )
    b_sum = tl.where(b_l > 0, b_l, 1.0)
    b_lse = b_m + tl.math.log2(b_sum)
    if PARTIALS:
        b_lse *= LN_2
    o_out = o_query * H + o_head
    p_out = p_o + (o_out * D_V)[:, None] + o_dv[None, :]
    b_o = (b_o * (1.0 / b_sum)[:, None]).to(p_o.dtype.element_ty)
    tl.store(p_out, b_o, mask=m_row[:, None] & (o_dv < D_V)[None, :])
    tl.store(p_lse + o_out, tl.where(b_l > 0, b_lse, float("-inf")), mask=m_row)


def partial_stages(block_m: int, block_dv: int, element_size: int) -> int:
    """Slots whose partials are in flight at once, plus the current one."""
    return 1 + max(1, min(4, PARTIAL_BYTES // (block_m * block_dv * element_size)))


def run_length(heads: int, block_m: int, select_block: int, n_select: int) -> int:
    """Queries per run: a power of two that fits the tile, what a CTA can compare, and a block, past which local
    blocks are not shared."""
    compared = triton.next_power_of_2(n_select) ** 2
    longest = min(select_block, LONGEST_RUN, block_m // heads, MOST_COMPARED // compared)
    run = 1
    while 2 * run <= longest:
        run *= 2
    return run


class CommonSplit(NamedTuple):
    """A selection in two: what the queries of each run have in common, and the rest of every query's."""

    common: Tensor  # [rows, runs, n] int32 first tokens
    runs: Tensor  # [rows, runs, RUN_FIELDS] int32, see `split_kernel`
    rest: Tensor  # [B, S, G, n] int32


class SplitPlan:
    """How a selection is split into runs of neighboring queries."""

    def __init__(self, shapes: Shapes, block_m: int) -> None:
        self.run = run = run_length(shapes.heads, block_m, shapes.select_block, shapes.n_select)
        self.n_runs = n_runs = triton.cdiv(shapes.n_tokens, run)
        self.device = shapes.q.device
        n_lists = shapes.rows * n_runs
        n_pairs = shapes.rows * shapes.n_tokens * shapes.n_select
        self.sizes = [aligned_size(n_lists * shapes.n_select), n_lists * RUN_FIELDS.value, aligned_size(n_pairs)]
        self.size = sum(self.sizes)
        # The problem that is left.
        self.rest = shapes.with_indices(shapes.n_select, shapes.select_block)
        self.split = Launch(
            split_kernel, (n_runs, shapes.rows), n_tokens=shapes.n_tokens, n_groups=shapes.n_groups, n_runs=n_runs,
            **strides(_btg=shapes.indices), N_SELECT=shapes.n_select, **shapes.packing, **shapes.last_start, RUN=run,
            BLOCK_S=triton.next_power_of_2(shapes.n_select), num_warps=4 if run >= 16 else 2,
        )  # fmt: skip

    def __call__(self, indices: Tensor, tables: Tables) -> tuple[CommonSplit, partial[None]]:
        """The split, and the launch that fills it, for the caller to run: from here it would be a frame deeper."""
        split = CommonSplit(*torch.empty(self.size, dtype=torch.int32, device=self.device).split(self.sizes))
        return split, partial(
            self.split, p_indices=indices, p_rest=split.rest, p_common=split.common, p_runs=split.runs,
            p_doc_start=tables.doc_start, **tables.start,
        )  # fmt: skip


def common_launch(
    shapes: Shapes, plan: SplitPlan, scale: float, chunk: Chunk | None, *, num_warps: int, num_stages: int,
    max_registers: int | None,
) -> Launch:  # fmt: skip
    """The launch for the common blocks. With a `chunk` it also fills its queries' `o` and natural `lse` from partials;
    without, it writes `o` and `lse` in base 2 of the common blocks alone, for all queries."""
    n_queries, rows = (shapes.n_tokens, shapes.rows) if chunk is None else (chunk.n_queries, chunk.n_rows)
    block_m = max(16, triton.next_power_of_2(plan.run * shapes.heads))
    return Launch(
        common_kernel, (triton.cdiv(n_queries, plan.run), rows), **shapes.attention, **shapes.last_start,
        n_tokens=shapes.n_tokens,
        **({"row_0": 0, "query_0": 0, "n_queries": n_queries} if chunk is None else chunk.where),
        scale_log2=scale * LOG2_E, n_runs=plan.n_runs, RUN=plan.run, BLOCK_M=block_m,
        BLOCK_S=triton.next_power_of_2(shapes.n_select), PARTIALS=chunk is not None, NUM_STAGES=num_stages,
        PARTIAL_STAGES=partial_stages(block_m, shapes.block_sizes["BLOCK_DV"], shapes.q.dtype.itemsize),
        num_warps=num_warps, maxnreg=max_registers,
    )  # fmt: skip
