"""Backward of attention in which every query sees one contiguous range of keys.

    ds[t, n] = p[t, n] * (do[t].v[n] - delta[t]),   delta[t] = do[t].o[t] - dlse[t]
    dq[t] = scale * sum_n ds[t, n] k[n],   dk[n] = scale * sum_t ds[t, n] q[t],   dv[n] = sum_t p[t, n] do[t]

Two kernels after the row statistics (`row_statistics.py`), no atomics, every output element written once:
- `dq`, query-major: a CTA owns a tile of rows and runs over the keys they see, like the forward;
- `dkv`, key-major: a CTA owns a tile of keys and runs over the rows that see them. It makes the scores transposed
  from the start, `s^T = k q^T`, because a dot whose operand is a transposed accumulator is miscompiled on Hopper by
  Triton 3.4 to 3.7.0. Where there are few tiles of keys, their rows are split over several CTAs, whose fp32
  partials are summed afterwards in a fixed order (`partials.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.gluon import tiles as gluon_tiles
from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout, new_layout, strides
from nsa.backends.triton.partials import sum_partials
from nsa.backends.triton.primitives import (
    COUNTS,
    LOG2_E,
    first_position,
    load_keys,
    load_rows,
    seeing_queries,
    split_rows,
    store_rows,
    visible_keys,
)
from nsa.backends.triton.row_statistics import ROW_PAD, row_statistics
from nsa.backends.triton.tiles import (
    BackwardTile,
    SplitTile,
    Tile,
    Visibility,
    block_width,
    both,
    describe,
    describe_keys,
    describe_rows,
    pick_backward,
    row_contiguous,
    sm_count,
    visibility_of,
)
from nsa.sequences import Compressed, Saved, Sliding, Upstream

if TYPE_CHECKING:
    from nsa.backends.gluon.query_gradient import KeptPlan


@triton.jit
def load_stat(src, i_bg, i_row, n_rows_padded, BLOCK_M: tl.constexpr, DESC: tl.constexpr):
    """`[BLOCK_M]` of a row buffer `[B * G, rows]`.

    In the key-major loop the descriptor saves work: every thread needs a good part of the tile, and by pointer each
    would copy its own part.
    """
    if DESC:
        b_x = src.load([i_bg, i_row]).reshape(BLOCK_M)
    else:
        b_x = tl.load(src + tl.cast(i_bg, tl.int64) * n_rows_padded + i_row + tl.arange(0, BLOCK_M))
    return b_x


@triton.jit
def attend_dq(
    b_q, b_do, b_lse2, b_delta, b_dq, b_lo, b_hi, i_start, i_stop, k, v, i_b, i_g, n_keys, scale_log2,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """Adds to `b_dq` what comes of the keys `[i_start, i_stop)`."""
    for i_n in tl.range(i_start, i_stop, BLOCK_N):
        b_k = load_keys(k, i_b, i_g, i_n, n_keys, stride_kb, stride_kn, stride_kg, D_K, BLOCK_N, BLOCK_DK, MASKED, DESC)
        b_v = load_keys(v, i_b, i_g, i_n, n_keys, stride_vb, stride_vn, stride_vg, D_V, BLOCK_N, BLOCK_DV, MASKED, DESC)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
        b_p = tl.math.exp2(b_s * scale_log2 - b_lse2[:, None])
        if MASKED:
            o_n = i_n + tl.arange(0, BLOCK_N)
            m_s = (o_n[None, :] >= b_lo[:, None]) & (o_n[None, :] < b_hi[:, None])
            b_p = tl.where(m_s, b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")
    return b_dq


@triton.jit(do_not_specialize=COUNTS)
def ranged_dq_kernel(
    q, do, k, v, lse2, delta, p_dq, p_lo, p_hi, scale, scale_log2, n_queries, n_keys, n_groups, n_rows_padded,
    stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, stride_xb, stride_xt, stride_xh,
    H: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SLIDING: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, VARLEN: tl.constexpr,
    DESC_Q: tl.constexpr, DESC_KV: tl.constexpr, ACCUMULATE: tl.constexpr, p_start=None,
):  # fmt: skip
    """One tile of rows against all the keys they see, as in the forward; ACCUMULATE adds to the `dq` that is there."""
    n_rows = n_queries * H
    n_tiles = tl.cdiv(n_rows, BLOCK_M)
    n_bg = tl.num_programs(0) // n_tiles
    i_bg = tl.program_id(0) % n_bg
    i_b = i_bg // n_groups
    i_g = i_bg % n_groups
    start = first_position(p_start, i_b)
    i_row = (n_tiles - 1 - tl.program_id(0) // n_bg) * BLOCK_M

    i_t, o_t, _ = split_rows(i_row, H, BLOCK_M)
    o_t = tl.minimum(i_t + o_t, n_queries - 1)
    b_lo, b_hi = visible_keys(o_t, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)
    i_last = tl.minimum(i_row + BLOCK_M, n_rows) - 1
    first_lo, first_hi = visible_keys(i_t, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)
    last_lo, last_hi = visible_keys(i_last // H, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)

    # [BLOCK_M, BLOCK_DK], [BLOCK_M, BLOCK_DV]
    b_q = load_rows(q, i_b, i_g, i_row, n_queries, stride_qb, stride_qt, stride_qh, H, D_K, BLOCK_M, BLOCK_DK, DESC_Q)
    b_do = load_rows(do, i_b, i_g, i_row, n_queries, stride_db, stride_dt, stride_dh, H, D_V, BLOCK_M, BLOCK_DV, DESC_Q)
    b_lse2 = load_stat(lse2, i_bg, i_row, n_rows_padded, BLOCK_M, False)
    b_delta = load_stat(delta, i_bg, i_row, n_rows_padded, BLOCK_M, False)
    b_dq = tl.zeros([BLOCK_M, BLOCK_DK], dtype=tl.float32)

    i_full = first_lo
    if SLIDING or VARLEN:
        i_full += tl.cdiv(last_lo - first_lo, BLOCK_N) * BLOCK_N
        b_dq = attend_dq(
            b_q, b_do, b_lse2, b_delta, b_dq, b_lo, b_hi, first_lo, tl.minimum(i_full, last_hi), k, v, i_b, i_g,
            n_keys, scale_log2, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
            D_K, D_V, BLOCK_N, BLOCK_DK, BLOCK_DV, True, DESC_KV,
        )  # fmt: skip
    i_edge = i_full + tl.maximum(first_hi - i_full, 0) // BLOCK_N * BLOCK_N
    b_dq = attend_dq(
        b_q, b_do, b_lse2, b_delta, b_dq, b_lo, b_hi, i_full, i_edge, k, v, i_b, i_g,
        n_keys, scale_log2, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
        D_K, D_V, BLOCK_N, BLOCK_DK, BLOCK_DV, False, DESC_KV,
    )  # fmt: skip
    b_dq = attend_dq(
        b_q, b_do, b_lse2, b_delta, b_dq, b_lo, b_hi, i_edge, last_hi, k, v, i_b, i_g,
        n_keys, scale_log2, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
        D_K, D_V, BLOCK_N, BLOCK_DK, BLOCK_DV, True, DESC_KV,
    )  # fmt: skip
    b_dq *= scale
    if ACCUMULATE:
        b_dq += load_rows(
            p_dq, i_b, i_g, i_row, n_queries, stride_xb, stride_xt, stride_xh, H, D_K, BLOCK_M, BLOCK_DK, False
        ).to(tl.float32)
    store_rows(p_dq, b_dq, i_b, i_g, i_row, n_queries, stride_xb, stride_xt, stride_xh, H, D_K, BLOCK_M, BLOCK_DK)


@triton.jit
def attend_dkv(
    b_k, b_v, b_dk, b_dv, b_first, b_end, i_start, i_stop, q, do, lse2, delta, i_b, i_g, i_bg, n_queries,
    n_rows_padded, scale_log2, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
    H: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr, DESC: tl.constexpr, DESC_STAT: tl.constexpr,
):  # fmt: skip
    """Adds to `b_dk`, `b_dv` what comes of the rows `[i_start, i_stop)`, a multiple of BLOCK_M apart."""
    for i_row in tl.range(i_start, i_stop, BLOCK_M):
        o_r = i_row + tl.arange(0, BLOCK_M)
        b_q = load_rows(q, i_b, i_g, i_row, n_queries, stride_qb, stride_qt, stride_qh, H, D_K, BLOCK_M, BLOCK_DK, DESC)
        b_lse2 = load_stat(lse2, i_bg, i_row, n_rows_padded, BLOCK_M, DESC_STAT)
        b_st = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
        b_do = load_rows(
            do, i_b, i_g, i_row, n_queries, stride_db, stride_dt, stride_dh, H, D_V, BLOCK_M, BLOCK_DV, DESC
        )
        # [BLOCK_N, BLOCK_M]
        b_pt = tl.math.exp2(b_st * scale_log2 - b_lse2[None, :])
        if MASKED:
            m_st = (o_r[None, :] >= b_first[:, None]) & (o_r[None, :] < b_end[:, None])
            b_pt = tl.where(m_st, b_pt, 0.0)
        b_dv = tl.dot(b_pt.to(b_do.dtype), b_do, b_dv, input_precision="ieee")
        # Not before dv: ptxas would then make every matmul wait for the one before it (`tests/kernels/sass.py`).
        b_dpt = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
        b_delta = load_stat(delta, i_bg, i_row, n_rows_padded, BLOCK_M, DESC_STAT)
        b_dst = b_pt * (b_dpt - b_delta[None, :])
        b_dk = tl.dot(b_dst.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
    return b_dk, b_dv


@triton.jit(do_not_specialize=COUNTS)
def ranged_dkv_kernel(
    q, do, k, v, lse2, delta, p_dk, p_dv, p_first, p_end,
    scale, scale_log2, n_queries, n_keys, n_groups, n_rows_padded, n_splits, split_rows,
    stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg, stride_xp, stride_yp,
    H: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SLIDING: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, VARLEN: tl.constexpr,
    SINGLE_LOOP: tl.constexpr, DESC_Q: tl.constexpr, DESC_STAT: tl.constexpr, p_start=None,
):  # fmt: skip
    """One tile of keys against one split of the rows that see it.

    Tiles of keys vary fastest, so CTAs that run together stream the same rows. In the compressed branch a split is a
    fixed run of rows and the last one, which every key sees, goes first; in the sliding branch splits are counted from
    the first row that sees the tile. Partials lie `[n_splits, B, N, G, D]`; a split that sees nothing writes zeros.
    """
    n_tiles = tl.cdiv(n_keys, BLOCK_N)
    i_n = tl.program_id(0) % n_tiles * BLOCK_N
    i_bg = tl.program_id(0) // n_tiles
    n_bg = tl.num_programs(0) // (n_tiles * n_splits)
    i_split = n_splits - 1 - i_bg // n_bg
    i_bg = i_bg % n_bg
    i_b = i_bg // n_groups
    i_g = i_bg % n_groups
    start = first_position(p_start, i_b)

    o_n = i_n + tl.arange(0, BLOCK_N)
    m_n = o_n < n_keys
    i_last = tl.minimum(i_n + BLOCK_N, n_keys) - 1
    # Rows of a key: its queries' rows.
    b_first, b_end = seeing_queries(
        tl.minimum(o_n, n_keys - 1), p_start, start, p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, VARLEN
    )
    b_first = b_first * H
    b_end = b_end * H
    first_begin, first_end = seeing_queries(
        i_n, p_start, start, p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, VARLEN
    )
    last_begin, last_end = seeing_queries(
        i_last, p_start, start, p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, VARLEN
    )

    # Multiples of BLOCK_M: rows [i_start, i_stop) of this split, of which [i_full, i_edge) are seen by every key.
    i_start = first_begin * H // BLOCK_M * BLOCK_M
    i_stop = tl.cdiv(last_end * H, BLOCK_M) * BLOCK_M
    i_split_row = i_split * split_rows
    if SLIDING:
        i_split_row += i_start
    i_start = tl.maximum(i_start, i_split_row)
    i_stop = tl.minimum(i_stop, i_split_row + split_rows)
    i_full = tl.minimum(tl.maximum(tl.cdiv(last_begin * H, BLOCK_M) * BLOCK_M, i_start), i_stop)

    b_k = load_keys(k, i_b, i_g, i_n, n_keys, stride_kb, stride_kn, stride_kg, D_K, BLOCK_N, BLOCK_DK, True, False)
    b_v = load_keys(v, i_b, i_g, i_n, n_keys, stride_vb, stride_vn, stride_vg, D_V, BLOCK_N, BLOCK_DV, True, False)
    b_dk = tl.zeros([BLOCK_N, BLOCK_DK], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)

    if SINGLE_LOOP:
        i_full = i_stop
    b_dk, b_dv = attend_dkv(
        b_k, b_v, b_dk, b_dv, b_first, b_end, i_start, i_full, q, do, lse2, delta, i_b, i_g, i_bg, n_queries,
        n_rows_padded, scale_log2, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
        H, D_K, D_V, BLOCK_M, BLOCK_DK, BLOCK_DV, True, DESC_Q, DESC_STAT,
    )  # fmt: skip
    if not SINGLE_LOOP:
        if SLIDING or VARLEN:
            i_edge = tl.minimum(tl.maximum(first_end * H // BLOCK_M * BLOCK_M, i_full), i_stop)
        else:
            # Once complete a block is seen to the end, and rows past the end have no probability.
            i_edge = i_stop
        b_dk, b_dv = attend_dkv(
            b_k, b_v, b_dk, b_dv, b_first, b_end, i_full, i_edge, q, do, lse2, delta, i_b, i_g, i_bg, n_queries,
            n_rows_padded, scale_log2, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
            H, D_K, D_V, BLOCK_M, BLOCK_DK, BLOCK_DV, False, DESC_Q, DESC_STAT,
        )  # fmt: skip
        if SLIDING or VARLEN:
            b_dk, b_dv = attend_dkv(
                b_k, b_v, b_dk, b_dv, b_first, b_end, i_edge, i_stop, q, do, lse2, delta, i_b, i_g, i_bg, n_queries,
                n_rows_padded, scale_log2, stride_qb, stride_qt, stride_qh, stride_db, stride_dt, stride_dh,
                H, D_K, D_V, BLOCK_M, BLOCK_DK, BLOCK_DV, True, DESC_Q, DESC_STAT,
            )  # fmt: skip

    o_key = (i_b.to(tl.int64) * n_keys + o_n) * n_groups + i_g
    o_dk = tl.arange(0, BLOCK_DK)
    o_dv = tl.arange(0, BLOCK_DV)
    p_dk += i_split.to(tl.int64) * stride_xp + (o_key * D_K)[:, None] + o_dk[None, :]
    p_dv += i_split.to(tl.int64) * stride_yp + (o_key * D_V)[:, None] + o_dv[None, :]
    tl.store(p_dk, (b_dk * scale).to(p_dk.dtype.element_ty), mask=m_n[:, None] & (o_dk < D_K)[None, :])
    tl.store(p_dv, b_dv.to(p_dv.dtype.element_ty), mask=m_n[:, None] & (o_dv < D_V)[None, :])


def split_keys(
    sliding: bool, span: int, tile: SplitTile, n_ctas: int, n_rows: int, heads: int, n_sms: int
) -> tuple[int, int]:
    """How many splits the rows of a tile of keys are cut into, and how many rows a split has.

    In the compressed branch half of the CTAs see (nearly) nothing, so twice as many are wanted.
    """
    block_m = tile.block_m
    if sliding:
        n_rows = min(n_rows, (tile.block_n + span) * heads + block_m)
    wanted = (1 if sliding else 2) * tile.waves * n_sms
    n_splits = max(1, min(wanted // n_ctas, n_rows // (tile.min_row_tiles * block_m)))
    split_rows = triton.cdiv(triton.cdiv(n_rows, n_splits), block_m) * block_m
    return triton.cdiv(n_rows, split_rows), split_rows


class StartedPass(NamedTuple):
    """A backward pass that has all of its memory, in two steps. `dk` and `dv` are written when both have run; `dq` is
    what the second returns, which is its argument, added to, if that is not None."""

    dk: Tensor
    dv: Tensor
    key_gradients: Callable[[], None]
    query_gradient: Callable[[Tensor | None], Tensor]
    # Whether the second step reads what the first one wrote.
    reads_keys: bool


class RangedBackwardPlan:
    """What shapes decide about a backward pass. `n_splits` is 0 where there are no keys."""

    __slots__ = (
        *("describe_dkv_rows", "describe_dq_keys", "describe_dq_rows", "describe_statistics"),
        *("dk_shape", "dkv", "dq", "dv_shape", "kept", "n_splits", "sum_partials", "visibility"),
    )

    def __init__(
        self, do: Layout, q: Layout, k: Layout, v: Layout, visibility: Visibility, scale: float,
        tile: BackwardTile | None, accumulate: bool,
    ) -> None:  # fmt: skip
        if tile is None:
            tile = pick_backward(q, v, visibility.sliding)
            keys = gluon_tiles.pick_dkv(do, q, k, v, visibility)
            if keys is not None:
                tile = BackwardTile(gluon_tiles.pick_dq(k, visibility) or tile.dq, keys)
        self.visibility = visibility
        batch, n_queries, n_heads, d_k = q.shape
        _, n_keys, n_groups, d_v = v.shape
        heads = n_heads // n_groups
        n_rows_padded = triton.cdiv(n_queries * heads, ROW_PAD) * ROW_PAD
        self.kept: KeptPlan | None = None
        if isinstance(tile.dq, gluon_tiles.QueryTile) and isinstance(tile.dkv, gluon_tiles.KeyTile):
            from nsa.backends.gluon.query_gradient import KeptPlan, split_whole_tiles

            n_ctas = triton.cdiv(n_keys, tile.dkv.block_n) * batch * n_groups
            splits = split_keys(
                visibility.sliding, visibility.span, split_whole_tiles(tile.dkv, tile.dq.block_m), n_ctas,
                n_queries * heads, heads, sm_count(q.device),
            )  # fmt: skip
            self.kept = KeptPlan(do, q, k, v, visibility, scale, tile.dkv, tile.dq, *splits, accumulate)
            return

        def shared(cut: Tile) -> dict[str, Any]:
            """What both kernels are given."""
            return {
                "scale": scale,
                "scale_log2": scale * LOG2_E,
                "n_queries": n_queries,
                "n_keys": n_keys,
                "n_groups": n_groups,
                "n_rows_padded": n_rows_padded,
                **strides(q_bth=q, d_bth=do, k_bng=k, v_bng=v),
                "H": heads,
                "D_K": d_k,
                "D_V": d_v,
                "BLOCK_M": cut.block_m,
                "BLOCK_N": cut.block_n,
                "BLOCK_DK": block_width(d_k),
                "BLOCK_DV": block_width(d_v),
                **visibility.constants,
                "num_warps": cut.num_warps,
                "num_stages": cut.num_stages,
                "maxnreg": cut.max_registers,
            }

        def describe_both_rows(cut: Tile) -> Any:
            return both(describe_rows(q, heads, cut), describe_rows(do, heads, cut))

        self.describe_dq_rows = describe_both_rows(tile.dq)
        self.describe_dq_keys = both(describe_keys(k, tile.dq), describe_keys(v, tile.dq))
        self.dq = Launch(
            ranged_dq_kernel, (triton.cdiv(n_queries * heads, tile.dq.block_m) * batch * n_groups,),
            **strides(x_bth=new_layout(q.shape, q.dtype, q.device)), **shared(tile.dq),
            **visibility.absent("p_lo", "p_hi"), DESC_Q=self.describe_dq_rows is not None,
            DESC_KV=self.describe_dq_keys is not None, ACCUMULATE=accumulate,
        )  # fmt: skip

        cut = tile.dkv
        self.dk_shape, self.dv_shape = tuple(k.shape), tuple(v.shape)
        self.n_splits = 0
        if n_keys == 0:
            return
        n_ctas = triton.cdiv(n_keys, cut.block_n) * batch * n_groups
        self.n_splits, split_rows = split_keys(
            visibility.sliding, visibility.span, cut, n_ctas, n_rows_padded, heads, sm_count(q.device)
        )
        if self.n_splits > 1:
            self.dk_shape, self.dv_shape = (self.n_splits, *k.shape), (self.n_splits, *v.shape)
            self.sum_partials = sum_partials(self.n_splits, k.shape.numel(), v.shape.numel())
        if isinstance(cut, gluon_tiles.KeyTile):
            from nsa.backends.gluon.backward import KeyLaunch, Part

            # It makes its descriptors itself.
            self.describe_dkv_rows = self.describe_statistics = None
            whole = Part(0, batch * n_groups, 0, n_keys, 0, n_rows_padded, self.n_splits, split_rows)
            self.dkv: Any = KeyLaunch(do, q, k, v, visibility, scale, cut, whole)
            return
        self.describe_dkv_rows = describe_both_rows(cut)
        statistics = new_layout((batch * n_groups, n_rows_padded), torch.float32, q.device)
        self.describe_statistics = describe(statistics, (1, cut.block_m)) if cut.desc_rows else None
        self.dkv = Launch(
            ranged_dkv_kernel, (n_ctas * self.n_splits,), n_splits=self.n_splits, split_rows=split_rows,
            stride_xp=k.shape.numel(), stride_yp=v.shape.numel(), **shared(cut),
            **visibility.absent("p_first", "p_end"), SINGLE_LOOP=cut.single_loop,
            DESC_Q=self.describe_dkv_rows is not None, DESC_STAT=self.describe_statistics is not None,
        )  # fmt: skip

    def start(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse2: Tensor, delta: Tensor, branch: Compressed | Sliding
    ) -> StartedPass:
        if self.kept is not None:
            return self.kept.start(do, q, k, v, lse2, delta, branch)
        dtype = k.dtype if self.n_splits <= 1 else torch.float32
        dk = dk_sum = torch.empty(self.dk_shape, dtype=dtype, device=k.device)
        dv = dv_sum = torch.empty(self.dv_shape, dtype=dtype, device=k.device)
        if self.n_splits > 1:
            dk_sum = torch.empty(k.shape, dtype=k.dtype, device=k.device)
            dv_sum = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        seen = (branch, k.shape[1])
        for_keys, for_queries = self.visibility.key_tables(*seen), self.visibility.query_tables(*seen)

        def key_gradients() -> None:
            if self.n_splits == 0:
                return
            rows, statistics = self.describe_dkv_rows, self.describe_statistics
            self.dkv(
                q=q if rows is None else rows[0](q), do=do if rows is None else rows[1](do), k=k, v=v,
                lse2=lse2 if statistics is None else statistics(lse2),
                delta=delta if statistics is None else statistics(delta), p_dk=dk, p_dv=dv, **for_keys,
            )  # fmt: skip
            if self.n_splits > 1:
                self.sum_partials(p_part=dk, p_out=dk_sum, p_part_1=dv, p_out_1=dv_sum)

        def query_gradient(into: Tensor | None) -> Tensor:
            dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if into is None else into
            rows, keys = self.describe_dq_rows, self.describe_dq_keys
            self.dq(
                q=q if rows is None else rows[0](q), do=do if rows is None else rows[1](do),
                k=k if keys is None else keys[0](k), v=v if keys is None else keys[1](v), lse2=lse2, delta=delta,
                p_dq=dq, **for_queries,
            )  # fmt: skip
            return dq

        return StartedPass(dk_sum, dv_sum, key_gradients, query_gradient, reads_keys=False)


plan = lru_cache(maxsize=MAX_PLANS)(RangedBackwardPlan)


def start_backward(
    upstream: Upstream, saved: Saved, branch: Compressed | Sliding, tile: BackwardTile | None, *, accumulate: bool
) -> StartedPass:
    """Everything but the launches of a backward pass, whose `dq` is added to one that is there if `accumulate`."""
    do, q = row_contiguous(upstream.do), row_contiguous(saved.q)
    if do is not upstream.do:
        upstream = upstream._replace(do=do)
    k, v = saved.k, saved.v
    layouts = (layout(do), layout(q), layout(k), layout(v))
    planned = plan(*layouts, visibility_of(branch, k.shape[1]), branch.scale, tile, accumulate)
    lse2, delta = row_statistics(upstream, saved, k.shape[2])
    return planned.start(do, q, k, v, lse2, delta, branch)


def ranged_backward(
    upstream: Upstream, saved: Saved, branch: Compressed | Sliding, tile: BackwardTile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq`, `dk`, `dv`, each in the dtype and shape of what it is the gradient of; see `Upstream` for a gate.

    `upstream.dq` is written last: after a failure before that another backend finds it as it was.
    """
    started = start_backward(upstream, saved, branch, tile, accumulate=upstream.dq is not None)
    started.key_gradients()
    return started.query_gradient(upstream.dq), started.dk, started.dv
