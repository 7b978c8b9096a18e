"""Selection of blocks: how much of a group's compressed attention falls on each of them, and the best ones.

    importance[t, j] = sum_head sum_i overlap(i, j) * exp(scale * q[t, head] . k_cmp[i] - lse[t, head])

A compressed block `i = j*R + u` (`R = l_sel/d`, `L = l/d`) reaches from selection block `j` into `j + c` with weight
`|[u, u + L) ∩ [c*R, (c + 1)*R)|`, for `c` up to `REACH`. A CTA goes through the blocks of its queries in order and
carries what a tile has for the first blocks of the next. Queries are processed in chunks: their importance, `[B*G,
chunk, J]`, is the only scratch memory, and is bounded.

`score_kernel`, grid (tiles of queries, B*G). One CTA owns `Q` queries times the heads of one group, columns that it
multiplies with tiles of `BLOCK_N` compressed blocks. The matmul is `k q^T`, with columns ordered `head * Q + query`:
the sum over heads is then over registers of one thread, and what is masked, pooled and written is `h` times smaller
than the scores. Six heads are a matmul of four and one of two, not one of eight. Every importance is written at most
once.

`select_kernel`, grid (runs of queries, B*G). One CTA owns whole rows. Importance is never negative, so its bits,
read as an integer, are in the same order: the value of the last block that is taken is found by bisection with counts,
and a prefix sum over the taken blocks puts them out in ascending order. Nothing is sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.routing import BackendFailure
from nsa.backends.triton import tuning
from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout, strides
from nsa.backends.triton.primitives import COUNTS, LOG2_E, first_position
from nsa.backends.triton.tiles import capability, start_table
from nsa.geometry import compressed_offsets, n_compressed
from nsa.sequences import Selection

# Floats of importance of one chunk: 256 MiB, large enough that a chunk fills a GPU several times over.
SCORE_BUDGET = 1 << 26

# More selection blocks than one CTA can hold in registers, and more compressed blocks in one of them than a tile.
MAX_SELECT_BLOCKS = 1 << 15
MAX_RATIO = 256

# Heads per group up to which the scores have tiles of their own.
FEW_HEADS = 4


# Keys too many that are dropped one by one, the least first; more are bisected.
FEW_TOO_MANY = tl.constexpr(3)


@dataclass(frozen=True)
class SelectionTile:
    """`block_m`: queries times (padded) heads. `block_n`: compressed blocks per step.
    `rows`: queries that one CTA of `select_kernel` works on, one after the other."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    rows: int = 4


def default_tile(dim: int, heads: int, dtype: torch.dtype, gpu: tuple[int, int] = (9, 0)) -> SelectionTile:
    """Many columns halve how often the blocks come through L2; few blocks let two CTAs share an SM, so that one
    takes exponentials while the other multiplies. Past D = 128 the columns fill shared memory, and with few heads
    what is kept per query fills the registers, which on a GPU that is not large hold the factors too."""
    kernel = "scores" if heads > FEW_HEADS else "scores-few-heads"
    return tuning.pick_tile(kernel, SelectionTile, gpu, dim, dim, dtype)


def candidates() -> list[SelectionTile]:
    """Tiles worth measuring."""
    return [
        SelectionTile(block_m=256, block_n=64, num_warps=4, num_stages=2),
        SelectionTile(block_m=256, block_n=64, num_warps=4, num_stages=3),
        SelectionTile(block_m=128, block_n=64, num_warps=4, num_stages=2),
        SelectionTile(block_m=128, block_n=64, num_warps=4, num_stages=3),
        SelectionTile(block_m=128, block_n=128, num_warps=4, num_stages=2),
        SelectionTile(block_m=128, block_n=128, num_warps=8, num_stages=3),
        SelectionTile(block_m=256, block_n=128, num_warps=8, num_stages=2),
        SelectionTile(block_m=256, block_n=128, num_warps=8, num_stages=3),
    ]


@triton.jit
def complete_blocks(o_pos, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """How many compressed blocks a query at position `o_pos` sees; the dividend is kept from being negative."""
    return tl.maximum(o_pos + 1 - BLOCK + STRIDE, 0) // STRIDE


@triton.jit
def from_earlier(b_now, b_before, C: tl.constexpr):
    """`[BLOCK_J, Q]`: for each row what lies `C` rows up, in this tile or at the end of the one before it."""
    BLOCK_J: tl.constexpr = b_now.shape[0]
    Q: tl.constexpr = b_now.shape[1]
    o_j = tl.arange(0, BLOCK_J)
    # The last rows of this tile are the next one's to take, so those of the one before can be in their place.
    b_both = tl.where((o_j < BLOCK_J - C)[:, None], b_now, b_before)
    return tl.gather(b_both, tl.broadcast_to(((o_j + BLOCK_J - C) % BLOCK_J)[:, None], [BLOCK_J, Q]), 0)


@triton.jit
def over_heads(b_s, b_lse, scale_log2, HEADS: tl.constexpr, Q: tl.constexpr):
    """`[BLOCK_N, HEADS * Q]` scores to `[BLOCK_N, Q]` sums of probabilities."""
    return tl.sum(tl.reshape(tl.math.exp2(b_s * scale_log2 - b_lse[None, :]), [b_s.shape[0], HEADS, Q]), 1)


@triton.jit
def score_document(
    q0, q1, b_lse, q_rest, b_lse_rest, k, p_row, o_seen, m_t, n_seen, n_keys, stride_kn, n_columns, scale_log2,
    R: tl.constexpr, R_PAD: tl.constexpr, OVERLAP: tl.constexpr, REACH: tl.constexpr, H_LOW: tl.constexpr,
    H_REST: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, ROW_WARPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Importance of one document's selection blocks for one tile of queries; its compressed blocks start at `k`. `q0`,
    and `q1` with the rest of the features, are of the first `H_LOW` heads, `q_rest` of the `H_REST` others."""
    BLOCK_J: tl.constexpr = BLOCK_N // R_PAD
    REPEATS: tl.constexpr = BLOCK_N // (16 * ROW_WARPS)
    TENSOR_CORES: tl.constexpr = q0.dtype != tl.float32
    # Neighbors are summed, so a thread shall hold neighbors in memory. Tensor cores leave it rows 8 apart, and those
    # a round of warps apart: there the row at (repeat, warp, half, lane) is number (warp, lane, repeat, half). Other
    # products leave it neighbors; in another order sums go over warps, which Triton before 3.8 may get wrong.
    o_n = tl.arange(0, BLOCK_N)
    if TENSOR_CORES:
        o_m = o_n
        o_n = (o_m // 16 % ROW_WARPS) * (16 * REPEATS) + (o_m % 8) * (2 * REPEATS)
        o_n += (o_m // (16 * ROW_WARPS)) * 2 + o_m // 8 % 2
    o_j = tl.arange(0, BLOCK_J)
    o_d = tl.arange(0, BLOCK_D)
    o_unit = tl.arange(0, R_PAD)
    b_before = tl.zeros([BLOCK_J, R_PAD, Q], dtype=tl.float32)
    # Up to the last block that a seen one reaches into.
    for j in range(0, tl.cdiv(n_seen + OVERLAP - 1, R), BLOCK_J):
        # [BLOCK_N], rows past the last block repeat it and are masked below
        o_i = (j + o_n // R_PAD) * R + o_n % R_PAD
        p_k = k + tl.minimum(o_i, n_keys - 1).to(tl.int64)[:, None] * stride_kn
        if BLOCK_E == 0 and BLOCK_D > D:
            b_k = tl.load(p_k + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
        else:
            b_k = tl.load(p_k + o_d[None, :])
        b_s = tl.dot(b_k, q0, input_precision=PRECISION)
        if BLOCK_E > 0:
            o_e = BLOCK_D + tl.arange(0, BLOCK_E)
            b_ke = tl.load(p_k + o_e[None, :], mask=(o_e < D)[None, :], other=0.0)
            b_s = tl.dot(b_ke, q1, b_s, input_precision=PRECISION)
        b_p = over_heads(b_s, b_lse, scale_log2, H_LOW, Q)
        if H_REST > 0:
            b_p += over_heads(tl.dot(b_k, q_rest, input_precision=PRECISION), b_lse_rest, scale_log2, H_REST, Q)
        m_p = o_i[:, None] < o_seen[None, :]
        if R_PAD > R:
            m_p = m_p & (o_n % R_PAD < R)[:, None]
        b_p = tl.where(m_p, b_p, 0.0)
        if TENSOR_CORES:
            b_p = tl.permute(tl.reshape(b_p, [REPEATS, ROW_WARPS, 2, 8, Q]), (1, 3, 0, 2, 4))
        b_p = tl.reshape(b_p, [BLOCK_J, R_PAD, Q])
        # [BLOCK_J, Q]
        b_i = weighed(b_p, o_unit, 0, R, OVERLAP)
        for c in tl.static_range(1, REACH + 1):
            b_i += from_earlier(weighed(b_p, o_unit, c, R, OVERLAP), weighed(b_before, o_unit, c, R, OVERLAP), c)
        b_before = b_p
        p_out = p_row[None, :] + (j + o_j)[:, None]
        tl.store(p_out, b_i, mask=(j + o_j < n_columns)[:, None] & m_t[None, :])


@triton.jit
def weighed(b_p, o_unit, C: tl.constexpr, R: tl.constexpr, OVERLAP: tl.constexpr):
    """The importance that the `R` compressed blocks that start in each selection block give the one `C` further on."""
    shared = tl.minimum(o_unit + OVERLAP, (C + 1) * R) - tl.maximum(o_unit, C * R)
    return tl.sum(b_p * tl.maximum(shared, 0).to(tl.float32)[None, :, None], 1)


@triton.jit
def load_columns(
    q, o_t, o_head, m_column, stride_qt, stride_qh,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """`[WIDTH, columns]` of `q [S, h, D]`: a column per query and head, features `FIRST` on; zeros where masked."""
    o_d = FIRST + tl.arange(0, WIDTH)
    p_q = q + (o_t.to(tl.int64) * stride_qt + o_head.to(tl.int64) * stride_qh)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_column[:, None] & (o_d < D)[None, :], other=0.0)
    return tl.trans(b_q)


@triton.jit
def load_heads(
    q, lse, t_first, t_hi, stride_qt, stride_qh, stride_lt, stride_lh,
    FIRST: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, Q: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Of `HEADS` heads from `FIRST` on: columns of queries, of the rest of their features, and LSEs in base 2."""
    o_c = tl.arange(0, HEADS * Q)
    o_head = FIRST + o_c // Q
    o_t = t_first + o_c % Q
    m_column = (o_t < t_hi) & (o_head < H)
    b_q0 = load_columns(q, o_t, o_head, m_column, stride_qt, stride_qh, FIRST=0, WIDTH=BLOCK_D, D=D)
    b_q1 = b_q0
    if BLOCK_E > 0:
        b_q1 = load_columns(q, o_t, o_head, m_column, stride_qt, stride_qh, FIRST=BLOCK_D, WIDTH=BLOCK_E, D=D)
    # A column that is not there, or sees nothing, must add nothing: exp2(s - inf) = 0.
    p_lse = lse + o_t.to(tl.int64) * stride_lt + o_head.to(tl.int64) * stride_lh
    b_lse = tl.load(p_lse, mask=m_column, other=float("inf")) * 1.4426950408889634
    return b_q0, b_q1, tl.where(b_lse == float("-inf"), float("inf"), b_lse)


@triton.jit(do_not_specialize=COUNTS)
def score_kernel(
    q, k_cmp, lse, importance, document, cu_seqlens, k_offset,
    t_lo, t_hi, n_keys, n_columns, scale_log2,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_lb, stride_lt, stride_lh,
    G: tl.constexpr, H: tl.constexpr, H_LOW: tl.constexpr, H_REST: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, OVERLAP: tl.constexpr,
    REACH: tl.constexpr, VARLEN: tl.constexpr, Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, ROW_WARPS: tl.constexpr, PRECISION: tl.constexpr, p_start=None,
):  # fmt: skip
    """Importance for queries `[t_lo, t_hi)`: one tile of `Q` queries, one group."""
    # The longest rows first: they are what the last wave would wait for.
    i_q = tl.num_programs(0) - 1 - tl.program_id(0)
    i_b = tl.program_id(1) // G
    i_g = tl.program_id(1) % G
    t_first = t_lo + i_q * Q
    t_last = tl.minimum(t_first + Q, t_hi) - 1

    q += i_b.to(tl.int64) * stride_qb + (i_g * H).to(tl.int64) * stride_qh
    lse += i_b.to(tl.int64) * stride_lb + (i_g * H).to(tl.int64) * stride_lh
    k_cmp += i_b.to(tl.int64) * stride_kb + i_g.to(tl.int64) * stride_kg
    b_q0, b_q1, b_lse = load_heads(
        q, lse, t_first, t_hi, stride_qt, stride_qh, stride_lt, stride_lh,
        FIRST=0, HEADS=H_LOW, H=H, Q=Q, D=D, BLOCK_D=BLOCK_D, BLOCK_E=BLOCK_E,
    )  # fmt: skip
    b_q_rest, b_lse_rest = b_q0, b_lse
    if H_REST > 0:
        b_q_rest, _, b_lse_rest = load_heads(
            q, lse, t_first, t_hi, stride_qt, stride_qh, stride_lt, stride_lh,
            FIRST=H_LOW, HEADS=H_REST, H=H, Q=Q, D=D, BLOCK_D=BLOCK_D, BLOCK_E=0,
        )  # fmt: skip

    # [Q], from here on the heads of a group are one
    o_t = t_first + tl.arange(0, Q)
    m_t = o_t < t_hi
    # Where they, and the last one, lie in the row of keys.
    start = first_position(p_start, i_b)
    o_row = start + o_t
    i_last = start + t_last
    importance += (tl.program_id(1).to(tl.int64) * (t_hi - t_lo) + i_q * Q) * n_columns
    p_row = importance + tl.arange(0, Q) * n_columns
    if VARLEN:
        for i_d in range(tl.load(document + t_first), tl.load(document + t_last) + 1):
            begin = tl.load(cu_seqlens + i_d)
            end = tl.load(cu_seqlens + i_d + 1)
            i_k = tl.load(k_offset + i_d)
            o_seen = complete_blocks(o_row - begin, BLOCK, STRIDE)
            n_seen = complete_blocks(tl.minimum(i_last, end - 1) - begin, BLOCK, STRIDE)
            n_seen = tl.minimum(n_seen, n_keys - i_k)
            score_document(
                b_q0, b_q1, b_lse, b_q_rest, b_lse_rest, k_cmp + i_k.to(tl.int64) * stride_kn, p_row,
                tl.minimum(o_seen, n_seen), m_t & (o_row >= begin) & (o_row < end), n_seen, n_keys - i_k, stride_kn,
                n_columns, scale_log2, R=R, R_PAD=R_PAD, OVERLAP=OVERLAP, REACH=REACH, H_LOW=H_LOW, H_REST=H_REST, Q=Q,
                D=D, BLOCK_D=BLOCK_D, BLOCK_E=BLOCK_E, BLOCK_N=BLOCK_N, ROW_WARPS=ROW_WARPS, PRECISION=PRECISION,
            )  # fmt: skip
    else:
        n_seen = tl.minimum(complete_blocks(i_last, BLOCK, STRIDE), n_keys)
        o_seen = tl.minimum(complete_blocks(o_row, BLOCK, STRIDE), n_keys)
        score_document(
            b_q0, b_q1, b_lse, b_q_rest, b_lse_rest, k_cmp, p_row, o_seen, m_t, n_seen, n_keys, stride_kn, n_columns,
            scale_log2, R=R, R_PAD=R_PAD, OVERLAP=OVERLAP, REACH=REACH, H_LOW=H_LOW, H_REST=H_REST, Q=Q, D=D,
            BLOCK_D=BLOCK_D, BLOCK_E=BLOCK_E, BLOCK_N=BLOCK_N, ROW_WARPS=ROW_WARPS, PRECISION=PRECISION,
        )  # fmt: skip


@triton.jit
def last_taken(b_key, N_FREE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_J: tl.constexpr):
    """A key `lo` with `count(key >= lo) >= N_FREE > count(key > lo)`, or any with exactly `N_FREE` keys at or above it;
    and whether it was found as one of the second kind. At least `N_FREE` keys must be 0 or more."""
    # Few segments, each the greatest of some keys: their N_FREE-th greatest is a lower bound, and cheap to come near.
    b_top = tl.max(tl.max(tl.reshape(b_key, [BLOCK_J // (4 * SEGMENTS), SEGMENTS, 4]), 2), 0)
    lo = tl.maximum(tl.min(b_top, 0), 0)
    hi = tl.max(b_top, 0) + 1
    if SEGMENTS >= N_FREE:
        upper = hi
        for _ in range(12):
            middle = lo + (upper - lo) // 2
            enough = tl.sum((b_top >= middle).to(tl.int32), 0) >= N_FREE
            lo = tl.where(enough, middle, lo)
            upper = tl.where(enough, upper, middle)
    else:
        lo = 0
    # `count` keys are at or above `lo`, fewer than N_FREE at or above `hi`.
    count = tl.sum((b_key >= lo).to(tl.int32), 0)
    while (hi - lo > 1) & (count != N_FREE):
        if count > N_FREE + FEW_TOO_MANY:
            middle = lo + (hi - lo) // 2
            above = tl.sum((b_key >= middle).to(tl.int32), 0)
            if above >= N_FREE:
                lo = middle
                count = above
            else:
                hi = middle
        else:
            # Where each segment holds one of the greatest, `lo` is right; for each that shares one, it is one too low.
            least = tl.min(tl.where(b_key >= lo, b_key, 2147483647), 0)
            above = tl.sum((b_key > least).to(tl.int32), 0)
            if above >= N_FREE:
                lo = least + 1
                count = above
            else:
                lo = least
                hi = least + 1
    return lo, count == N_FREE


@triton.jit
def most_important(b_i, m_forced, o_j, own, N_FREE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_J: tl.constexpr):
    """`[BLOCK_J]` mask of the `N_FREE` blocks of the greatest importance among `0 .. own`, without the forced ones; of
    equal ones, the first."""
    # Importance is not negative: its bits are in its order.
    b_key = tl.maximum(b_i.to(tl.int32, bitcast=True), 0)
    b_key = tl.where((o_j <= own) & (m_forced == False), b_key, -1)  # noqa: E712  a tensor
    key, exact = last_taken(b_key, N_FREE=N_FREE, SEGMENTS=SEGMENTS, BLOCK_J=BLOCK_J)
    m_free = b_key >= key
    if exact == False:  # noqa: E712  a tensor
        # More blocks share the last value than there is room for: the lower ones.
        m_tie = b_key == key
        room = N_FREE - tl.sum((b_key > key).to(tl.int32), 0)
        m_free = m_free & ((m_tie == False) | (tl.cumsum(m_tie.to(tl.int32), 0) <= room))  # noqa: E712
    return m_free


@triton.jit
def select_row(
    importance, indices, own, n_seen,
    R: tl.constexpr, OVERLAP: tl.constexpr, N_SELECT: tl.constexpr, N_INIT: tl.constexpr, N_LOCAL: tl.constexpr,
    SEGMENTS: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The `N_SELECT` of the blocks `0 .. own` to read, for a query with more candidates than that."""
    N_FREE: tl.constexpr = N_SELECT - N_INIT - N_LOCAL
    o_j = tl.arange(0, BLOCK_J)
    m_forced = (o_j < N_INIT) | ((o_j > own - N_LOCAL) & (o_j <= own))
    m_taken = m_forced
    if N_FREE > 0:
        # Loads in fours: what else comes along, or was never written, is dropped.
        b_i = tl.load(importance + o_j, mask=o_j // 4 <= own // 4, other=0.0)
        b_i = tl.where((o_j * R < n_seen + OVERLAP - 1) & (n_seen > 0), b_i, 0.0)
        m_taken = m_forced | most_important(b_i, m_forced, o_j, own, N_FREE, SEGMENTS, BLOCK_J)
    o_out = tl.cumsum(m_taken.to(tl.int32), 0) - 1
    tl.store(indices + o_out, o_j, mask=m_taken)


@triton.jit(do_not_specialize=COUNTS)
def select_kernel(
    importance, indices, document, cu_seqlens, k_offset, t_lo, t_hi, n_keys, n_columns, stride_ib, stride_it,
    G: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, SELECT_BLOCK: tl.constexpr, R: tl.constexpr,
    OVERLAP: tl.constexpr, VARLEN: tl.constexpr, N_SELECT: tl.constexpr, N_PAD: tl.constexpr, N_INIT: tl.constexpr,
    N_LOCAL: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_J: tl.constexpr, ROWS: tl.constexpr, p_start=None,
):  # fmt: skip
    """Indices of up to `ROWS` queries from `t_lo` on, one group."""
    i_b = tl.program_id(1) // G
    i_g = tl.program_id(1) % G
    t_first = t_lo + tl.program_id(0) * ROWS
    start = first_position(p_start, i_b)
    for i in range(tl.minimum(ROWS, t_hi - t_first)):
        i_t = t_first + i
        position = start + i_t
        n_here = n_keys
        if VARLEN:
            i_d = tl.load(document + i_t)
            position -= tl.load(cu_seqlens + i_d)
            n_here = n_keys - tl.load(k_offset + i_d)
        own = position // SELECT_BLOCK
        if p_start is not None:
            # There are no more columns than this; a wrong `q_start` must not read out of bounds.
            own = tl.minimum(own, n_columns - 1)
        p_index = indices + i_b.to(tl.int64) * stride_ib + i_t.to(tl.int64) * stride_it + i_g * N_SELECT
        if own < N_SELECT:
            o_n = tl.arange(0, N_PAD)
            tl.store(p_index + o_n, tl.where(o_n <= own, o_n, -1), mask=o_n < N_SELECT)
        else:
            n_seen = tl.minimum(complete_blocks(position, BLOCK, STRIDE), n_here)
            i_row = tl.program_id(1).to(tl.int64) * (t_hi - t_lo) + (i_t - t_lo)
            select_row(
                importance + i_row * n_columns, p_index, own, n_seen,
                R=R, OVERLAP=OVERLAP, N_SELECT=N_SELECT, N_INIT=N_INIT, N_LOCAL=N_LOCAL, SEGMENTS=SEGMENTS,
                BLOCK_J=BLOCK_J,
            )  # fmt: skip


def split_width(size: int, least: int = 16) -> tuple[int, int]:
    """A head_dim, or a number of heads, as one power of two of at least `least`, or as two of them where that wastes
    less: 192 is 128 + 64, not 256."""
    low = 1 << (size.bit_length() - 1)
    if size == low or size < least:
        return max(least, low if size == low else 2 * low), 0
    rest = max(least, triton.next_power_of_2(size - low))
    return (low, rest) if low + rest < 2 * low else (2 * low, 0)


def select_shape(n_columns: int) -> tuple[int, int, int, int]:
    """`(BLOCK_J, SEGMENTS, warps, registers)`: a warp holds up to 1024 keys, four neighbors per lane. Left alone, the
    compiler takes all registers there are, and too few CTAs would share an SM to hide each other's waiting."""
    block_j = max(16, triton.next_power_of_2(n_columns))
    warps = min(16, max(1, block_j // 1024))
    per_lane = block_j // (32 * warps)
    return block_j, min(32 * warps, block_j // 4), warps, 96 if per_lane <= 32 else 168


def query_chunks(length: int, rows: int, n_columns: Callable[[int], int], multiple: int) -> list[tuple[int, int]]:
    """Runs of queries whose importance stays within the budget, with `n_columns(hi)` for a run that ends at `hi`:
    early runs have fewer columns and so are longer."""
    chunks, lo = [], 0
    while lo < length:
        hi = length
        while hi - lo > multiple and (hi - lo) * rows * n_columns(hi) > SCORE_BUDGET:
            hi = lo + max(multiple, (hi - lo) // 2 // multiple * multiple)
        chunks.append((lo, hi))
        lo = hi
    return chunks


def columns(length: int, select_block: int) -> int:
    """Selection blocks of the first `length` positions, rounded up to what Triton takes as aligned."""
    return -(-length // (16 * select_block)) * 16


class SelectionPlan:
    """The launches of one problem: scores and selection of one chunk of queries after the other."""

    def __init__(
        self, q: Layout, k_cmp: Layout, lse: Layout, varlen: bool, offset: bool, block: int, stride: int,
        select_block: int, n_select: int, n_init: int, n_local: int, scale: float, tile: SelectionTile | None,
    ) -> None:  # fmt: skip
        batch, length, n_heads, dim = q.shape
        n_keys, n_groups = k_cmp.shape[1:3]
        heads, rows = n_heads // n_groups, batch * n_groups
        ratio, overlap = select_block // stride, block // stride
        reach = (ratio + overlap - 2) // ratio
        if ratio > MAX_RATIO:
            raise BackendFailure(
                f"select_block / stride = {ratio}: at most {MAX_RATIO} compressed blocks per selection block"
            )

        def n_positions(hi: int) -> int:
            """Positions that queries up to `hi` may have. Where they start, the device alone knows: with an offset any
            may lie as far on as the keys reach."""
            return n_keys * stride + block - 1 if offset else hi

        def n_columns(hi: int) -> int:
            return columns(n_positions(hi), select_block)

        if n_columns(length) > MAX_SELECT_BLOCKS:
            raise BackendFailure(
                f"a sequence of {n_positions(length)} tokens: at most {MAX_SELECT_BLOCKS} selection blocks"
            )
        tile = tile or default_tile(dim, heads, q.dtype, capability(q.device))
        r_pad = triton.next_power_of_2(ratio)
        queries = max(1, tile.block_m // triton.next_power_of_2(heads))
        # What reaches further than a tile of blocks would have to be carried over several.
        block_n = max(tile.block_n, r_pad * triton.next_power_of_2(max(1, reach)), 16)
        block_d, block_e = split_width(dim)
        # A matmul has at least 16 columns.
        h_low, h_rest = split_width(heads, triton.cdiv(16, queries))
        if block_e:
            h_low, h_rest = triton.next_power_of_2(heads), 0
        chunks = query_chunks(length, rows, n_columns, queries)
        self.shape = (batch, length, n_groups, n_select)
        self.scratch = max(rows * (hi - lo) * n_columns(hi) for lo, hi in chunks)
        shared = {
            "n_keys": n_keys,
            "G": n_groups,
            "BLOCK": block,
            "STRIDE": stride,
            "R": ratio,
            "OVERLAP": overlap,
            "VARLEN": varlen,
            **({} if varlen else {"document": None, "cu_seqlens": None, "k_offset": None}),
        }

        def score(lo: int, hi: int) -> Launch | None:
            """The launch that scores queries `lo .. hi - 1`; None where no query sees a compressed block."""
            if min(n_keys, n_compressed(n_positions(hi), block, stride)) == 0:
                return None
            return Launch(
                score_kernel, (triton.cdiv(hi - lo, queries), rows), **shared,
                **strides(q_bth=q, k_bng=k_cmp, l_bth=lse), t_lo=lo, t_hi=hi, n_columns=n_columns(hi),
                scale_log2=scale * LOG2_E, H=heads, H_LOW=h_low, H_REST=h_rest, D=dim, R_PAD=r_pad, REACH=reach,
                Q=queries, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_E=block_e,
                ROW_WARPS=min(tile.num_warps, block_n // 16), PRECISION="ieee", num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )  # fmt: skip

        def select(lo: int, hi: int) -> Launch:
            block_j, segments, warps, registers = select_shape(n_columns(hi))
            return Launch(
                select_kernel, (triton.cdiv(hi - lo, tile.rows), rows), **shared, t_lo=lo, t_hi=hi,
                n_columns=n_columns(hi), stride_ib=length * n_groups * n_select, stride_it=n_groups * n_select,
                SELECT_BLOCK=select_block, N_SELECT=n_select, N_PAD=triton.next_power_of_2(n_select), N_INIT=n_init,
                N_LOCAL=n_local, SEGMENTS=segments, BLOCK_J=block_j, ROWS=tile.rows, num_warps=warps, num_stages=1,
                maxnreg=registers,
            )  # fmt: skip

        self.chunks = [(score(lo, hi), select(lo, hi)) for lo, hi in chunks]


plan = lru_cache(maxsize=MAX_PLANS)(SelectionPlan)


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, selection: Selection, tile: SelectionTile | None = None
) -> Tensor:
    """The forced blocks and those of the greatest importance: int32 `[B, S, G, n_select]`, ascending, -1 for none.

    From `q [B, S, Hq, D]`, `k_cmp [B, N, G, D]` and the compressed branch's `lse [B, S, Hq]`, fp32 and natural.
    """
    sequences = selection.sequences
    block, stride, cu_seqlens = selection.block, selection.stride, sequences.cu_seqlens
    planned = plan(
        layout(q), layout(k_cmp), layout(lse), cu_seqlens is not None, sequences.q_start is not None, block, stride,
        selection.select_block, selection.n_select, selection.n_init, selection.n_local, selection.scale, tile,
    )  # fmt: skip
    tables = {} if sequences.q_start is None else start_table(sequences.q_start)
    if cu_seqlens is not None:
        tables |= {
            "document": sequences.documents.index.int(),
            "cu_seqlens": cu_seqlens.int(),
            "k_offset": compressed_offsets(cu_seqlens, block, stride).int(),
        }
    indices = torch.empty(planned.shape, dtype=torch.int32, device=q.device)
    importance = torch.empty(planned.scratch, dtype=torch.float32, device=q.device)
    for score, select in planned.chunks:
        if score is not None:
            score(q=q, k_cmp=k_cmp, lse=lse, importance=importance, **tables)
        select(importance=importance, indices=indices, **tables)
    return indices
