"""Helpers that the kernels share: where rows lie, how tiles are loaded, the online softmax, and which keys a query
sees.

Rows. The `h` query heads of a group read the same keys, so a group's queries and heads are flattened into rows
`r = t * h + head` and a tile is any run of consecutive rows: no tile is padded to the group size, whatever `h` is.

Tiles come through a pointer or through a tensor descriptor (TMA on Hopper), which fills what lies outside with zeros.
A kernel is written once for both: `DESC` says which of the two its argument is.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below every score and finite: `exp2(-inf - FLOOR)` is 0 where `exp2(-inf - -inf)` would be NaN.
FLOOR = tl.constexpr(-1.0e30)
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = 1.4426950408889634

# Counts that a kernel is not compiled again for. Triton makes a constant of a 1, and ptxas crashes on what that leaves
# of a loop over one key; and nothing is gained by knowing that a count is a multiple of 16.
COUNTS = [
    *("n_queries", "n_keys", "n_groups", "n_splits", "n_tokens", "n_blocks", "n_items", "n_runs", "n_tiles", "n_words"),
    *("n_partials", "n_word_tiles", "row_0", "query_0", "t_lo", "t_hi", "max_start"),
]


@triton.jit
def gated(b_lse2, b_gate):
    """The LSE with which a probability comes out as `gate * p`.

    A branch that is mixed in with a gate has `dv = (gate * p)^T do` and `ds = gate * p * (do.v - do.o)`: its gradients
    are the plain ones of `do`, of these probabilities. A gate of 0 gives +inf, and 0; a gate is not negative.
    """
    return b_lse2 - tl.math.log2(b_gate.to(tl.float32))


@triton.jit
def split_rows(i_row, H: tl.constexpr, BLOCK_M: tl.constexpr):
    """First query of the tile of rows from `i_row` on, and each row's query past that one and head.

    Where a tile holds whole queries the last two do not depend on `i_row`, and leave the loop that calls this.
    """
    i_t = i_row // H
    o_m = tl.arange(0, BLOCK_M)
    if BLOCK_M % H != 0:
        o_m += i_row - i_t * H
    o_t = o_m // H
    return i_t, o_t, o_m - o_t * H


@triton.jit
def load_wide(p_x, o_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """`[rows, BLOCK_D]` of which the first D columns are there: a mask only where the tile is wider than the head."""
    return tl.load(p_x, mask=(o_d < D)[None, :], other=0.0) if D < BLOCK_D else tl.load(p_x)


@triton.jit
def load_rows(
    src, i_b, i_g, i_row, n_queries, stride_b, stride_t, stride_h,
    H: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_M, BLOCK_D]` rows of `src [B, S, Hq, D]`. Rows past the end hold some valid row, or zeros: never NaN."""
    if DESC:
        b_x = src.load([i_b, i_row // H, i_g * H, 0]).reshape(BLOCK_M, BLOCK_D)
    else:
        i_t, o_t, o_h = split_rows(i_row, H, BLOCK_M)
        o_t = tl.minimum(o_t, n_queries - 1 - i_t)
        o_d = tl.arange(0, BLOCK_D)
        p_x = src + tl.cast(i_b, tl.int64) * stride_b + tl.cast(i_t, tl.int64) * stride_t
        p_x += tl.cast(i_g * H, tl.int64) * stride_h
        b_x = load_wide(p_x + (o_t * stride_t + o_h * stride_h)[:, None] + o_d[None, :], o_d, D, BLOCK_D)
    return b_x


@triton.jit
def load_keys(
    src, i_b, i_g, i_n, n_keys, stride_b, stride_n, stride_g,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BOUND: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_N, BLOCK_D]` of `src [B, N, G, D]` from key `i_n` on; with `BOUND` keys past the end are zeros."""
    if DESC:
        b_x = src.load([i_b, i_n, i_g, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        o_n = tl.arange(0, BLOCK_N)
        o_d = tl.arange(0, BLOCK_D)
        p_x = src + tl.cast(i_b, tl.int64) * stride_b + tl.cast(i_n, tl.int64) * stride_n
        p_x += tl.cast(i_g, tl.int64) * stride_g
        p_x += (o_n * stride_n)[:, None] + o_d[None, :]
        if BOUND:
            b_x = tl.load(p_x, mask=(i_n + o_n < n_keys)[:, None] & (o_d < D)[None, :], other=0.0)
        else:
            b_x = load_wide(p_x, o_d, D, BLOCK_D)
    return b_x


@triton.jit
def store_rows(
    p_x, b_x, i_b, i_g, i_row, n_queries, stride_b, stride_t, stride_h,
    H: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes `[BLOCK_M, BLOCK_D]` rows to `p_x [B, S, Hq, D]`."""
    i_t, o_t, o_h = split_rows(i_row, H, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    base = tl.cast(i_b, tl.int64) * stride_b + tl.cast(i_t, tl.int64) * stride_t + tl.cast(i_g * H, tl.int64) * stride_h
    p_x += base + (o_t * stride_t + o_h * stride_h)[:, None] + o_d[None, :]
    m_x = (i_t + o_t < n_queries)[:, None] & (o_d < D)[None, :]
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def online_softmax(b_s, b_m, b_l, b_o, scale_log2, m_row=None):
    """Takes in raw scores `b_s`: returns the probabilities relative to the new maximum, and maximum, sum and output
    rescaled to it. All in base 2, with `scale_log2 > 0` applied here. Of `m_row`, other rows see none of these keys."""
    b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * scale_log2)
    b_top = b_m_new
    if m_row is not None:
        b_m_new = tl.where(m_row, b_m_new, b_m)
        # A number per row: cheaper than to hide the scores one by one.
        b_top = tl.where(m_row, b_m_new, float("inf"))
    b_p = tl.math.exp2(b_s * scale_log2 - b_top[:, None])
    b_alpha = tl.math.exp2(b_m - b_m_new)
    return b_p, b_m_new, b_l * b_alpha + tl.sum(b_p, 1), b_o * b_alpha[:, None]


@triton.jit
def first_position(p_start, i_b):
    """The position of batch entry `i_b`'s first query among its keys: `q_start`, or 0 where there is none.

    Without it `p_start` is None and a kernel is compiled as if there were no such thing.
    """
    start = 0
    if p_start is not None:
        start = tl.load(p_start + i_b)
    return start


@triton.jit
def visible_keys(
    o_t, start, p_lo, p_hi, n_keys,
    SLIDING: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """`[lo, hi)`, the keys that query `o_t` (a scalar or a tile) sees: looked up for varlen rows, else computed from
    its position `start + o_t`."""
    if VARLEN:
        lo, hi = tl.load(p_lo + o_t), tl.load(p_hi + o_t)
    elif SLIDING:
        o_t += start
        lo, hi = tl.maximum(o_t - SPAN + 1, 0), tl.minimum(o_t + 1, n_keys)
    else:
        o_t += start
        # Adding the stride first keeps the dividend, and so the quotient, from being negative.
        lo, hi = o_t * 0, tl.minimum(tl.maximum(o_t + 1 - SPAN + STRIDE, 0) // STRIDE, n_keys)
    return lo, hi


@triton.jit
def seeing_queries(
    o_n, p_start, start, p_first, p_end, n_queries,
    SLIDING: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """`[first, end)`, the queries that see key `o_n`: the same relation, read from the key's side."""
    if VARLEN:
        first, end = tl.load(p_first + o_n), tl.load(p_end + o_n)
    elif SLIDING:
        first, end = tl.minimum(o_n - start, n_queries), tl.minimum(o_n + SPAN - start, n_queries)
    else:
        first, end = tl.minimum(o_n * STRIDE + SPAN - 1 - start, n_queries), o_n * 0 + n_queries
    if p_start is not None:
        # Keys before those of the first query.
        first, end = tl.maximum(first, 0), tl.maximum(end, 0)
    return first, end
