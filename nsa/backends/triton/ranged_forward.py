"""Forward of attention in which every query sees one contiguous range of keys.

    o[t] = sum_n p[t, n] v[n],   p[t, n] = exp(scale * q[t].k[n] - lse[t])   over   lo[t] <= n < hi[t]

Grid: one CTA per (tile of BLOCK_M rows, batch and group); the last rows, which see most keys, start first. A CTA
owns its rows and writes their `o` and `lse` once. `lo` and `hi` never decrease along a row of tokens, so the
first and the last query of a tile bound what it reads, and what lies between is seen by every row and needs no mask.

Of that range a query may see selected blocks only: a bitmap then hides the others, tile by tile of keys. That reads
keys which no query of the tile selected, so it is for sequences of which every query selects a good part.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.gluon import tiles as gluon_tiles
from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout, new_layout, strides
from nsa.backends.triton.primitives import (
    COUNTS,
    FLOOR,
    LN_2,
    LOG2_E,
    first_position,
    load_keys,
    load_rows,
    online_softmax,
    split_rows,
    store_rows,
    visible_keys,
)
from nsa.backends.triton.tiles import (
    Tile,
    Visibility,
    block_width,
    both,
    describe_keys,
    describe_rows,
    pick_forward,
    row_contiguous,
    visibility_of,
)
from nsa.sequences import Compressed, Sliding

if TYPE_CHECKING:
    from nsa.backends.gluon.forward import ForwardPlan


@triton.jit
def load_words(p_word, i_n, i_stop, o_t, n_word_tiles, SELECT_BLOCK: tl.constexpr):
    """Each row's word of the block that key `i_n` is in, or of the last one that is read."""
    i_block = tl.maximum(tl.minimum(i_n, i_stop - 1), 0) // SELECT_BLOCK
    return tl.load(p_word + i_block * n_word_tiles + o_t // 32)


@triton.jit
def attend_keys(
    b_q, b_m, b_l, b_o, b_lo, b_hi, i_start, i_stop, k, v, i_b, i_g, n_keys, scale_log2,
    stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    p_word, o_t, n_word_tiles, SELECT_BLOCK: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr,
    DESC: tl.constexpr,
):  # fmt: skip
    """Takes the keys `[i_start, i_stop)` into the running softmax, a tile at a time.

    With a SELECT_BLOCK, which tiles of keys do not straddle, `p_word` has a word for each block and 32 queries.
    AHEAD: it is read one tile ahead, so that no softmax waits for it.
    """
    if SELECT_BLOCK > 0 and AHEAD:
        b_next = load_words(p_word, i_start, i_stop, o_t, n_word_tiles, SELECT_BLOCK)
    for i_n in tl.range(i_start, i_stop, BLOCK_N):
        if SELECT_BLOCK > 0 and AHEAD:
            b_word = b_next
            b_next = load_words(p_word, i_n + BLOCK_N, i_stop, o_t, n_word_tiles, SELECT_BLOCK)
        b_k = load_keys(k, i_b, i_g, i_n, n_keys, stride_kb, stride_kn, stride_kg, D_K, BLOCK_N, BLOCK_DK, MASKED, DESC)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if MASKED:
            o_n = i_n + tl.arange(0, BLOCK_N)
            m_s = (o_n[None, :] >= b_lo[:, None]) & (o_n[None, :] < b_hi[:, None])
            b_s = tl.where(m_s, b_s, float("-inf"))
        if SELECT_BLOCK > 0:
            if not AHEAD:
                b_word = load_words(p_word, i_n, i_stop, o_t, n_word_tiles, SELECT_BLOCK)
            m_row = ((b_word >> (o_t % 32)) & 1) != 0
            b_p, b_m, b_l, b_o = online_softmax(b_s, b_m, b_l, b_o, scale_log2, m_row)
        else:
            b_p, b_m, b_l, b_o = online_softmax(b_s, b_m, b_l, b_o, scale_log2)
        b_v = load_keys(v, i_b, i_g, i_n, n_keys, stride_vb, stride_vn, stride_vg, D_V, BLOCK_N, BLOCK_DV, MASKED, DESC)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")
    return b_m, b_l, b_o


@triton.jit(do_not_specialize=COUNTS)
def ranged_forward_kernel(
    q, k, v, p_o, p_lse, p_lo, p_hi, p_word, scale_log2, n_queries, n_keys, n_groups, n_blocks, n_word_tiles,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
    stride_ob, stride_ot, stride_oh, stride_lb,
    H: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    SLIDING: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, VARLEN: tl.constexpr,
    SELECT_BLOCK: tl.constexpr, DESC_Q: tl.constexpr, DESC_KV: tl.constexpr, p_start=None,
):  # fmt: skip
    """One tile of rows against all the keys they see."""
    n_rows = n_queries * H
    n_tiles = tl.cdiv(n_rows, BLOCK_M)
    n_bg = tl.num_programs(0) // n_tiles
    i_bg = tl.program_id(0) % n_bg
    i_b = i_bg // n_groups
    i_g = i_bg % n_groups
    start = first_position(p_start, i_b)
    i_row = (n_tiles - 1 - tl.program_id(0) // n_bg) * BLOCK_M

    i_t, o_t, o_h = split_rows(i_row, H, BLOCK_M)
    o_t = i_t + o_t
    # Rows past the end look like the last query; they are computed and not stored.
    o_seen = tl.minimum(o_t, n_queries - 1)
    b_lo, b_hi = visible_keys(o_seen, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)
    i_last = tl.minimum(i_row + BLOCK_M, n_rows) - 1
    first_lo, first_hi = visible_keys(i_t, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)
    last_lo, last_hi = visible_keys(i_last // H, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)

    if SELECT_BLOCK > 0:
        p_word += i_bg.to(tl.int64) * n_blocks * n_word_tiles

    # [BLOCK_M, BLOCK_DK]
    b_q = load_rows(q, i_b, i_g, i_row, n_queries, stride_qb, stride_qt, stride_qh, H, D_K, BLOCK_M, BLOCK_DK, DESC_Q)
    b_m = tl.full([BLOCK_M], FLOOR, dtype=tl.float32)
    b_l = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)

    # With rows by descriptor, ptxas serializes the matmuls of a loop that reads words ahead.
    AHEAD: tl.constexpr = not DESC_Q
    # Keys [first_lo, last_hi): those before last_lo or from first_hi on are hidden from some row of the tile.
    i_full = first_lo
    if SLIDING or VARLEN:
        i_full += tl.cdiv(last_lo - first_lo, BLOCK_N) * BLOCK_N
        b_m, b_l, b_o = attend_keys(
            b_q, b_m, b_l, b_o, b_lo, b_hi, first_lo, tl.minimum(i_full, last_hi), k, v, i_b, i_g, n_keys,
            scale_log2, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
            D_K, D_V, BLOCK_N, BLOCK_DK, BLOCK_DV, p_word, o_seen, n_word_tiles, SELECT_BLOCK, AHEAD, True, DESC_KV,
        )  # fmt: skip
    i_edge = i_full + tl.maximum(first_hi - i_full, 0) // BLOCK_N * BLOCK_N
    b_m, b_l, b_o = attend_keys(
        b_q, b_m, b_l, b_o, b_lo, b_hi, i_full, i_edge, k, v, i_b, i_g, n_keys,
        scale_log2, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
        D_K, D_V, BLOCK_N, BLOCK_DK, BLOCK_DV, p_word, o_seen, n_word_tiles, SELECT_BLOCK, AHEAD, False, DESC_KV,
    )  # fmt: skip
    b_m, b_l, b_o = attend_keys(
        b_q, b_m, b_l, b_o, b_lo, b_hi, i_edge, last_hi, k, v, i_b, i_g, n_keys,
        scale_log2, stride_kb, stride_kn, stride_kg, stride_vb, stride_vn, stride_vg,
        D_K, D_V, BLOCK_N, BLOCK_DK, BLOCK_DV, p_word, o_seen, n_word_tiles, SELECT_BLOCK, AHEAD, True, DESC_KV,
    )  # fmt: skip

    m_empty = b_l == 0.0
    b_l = tl.where(m_empty, 1.0, b_l)
    b_o = b_o / b_l[:, None]
    b_lse = tl.where(m_empty, float("-inf"), (b_m + tl.math.log2(b_l)) * LN_2)
    store_rows(p_o, b_o, i_b, i_g, i_row, n_queries, stride_ob, stride_ot, stride_oh, H, D_V, BLOCK_M, BLOCK_DV)
    p_lse += i_b.to(tl.int64) * stride_lb + o_t.to(tl.int64) * n_groups * H + i_g * H + o_h
    tl.store(p_lse, b_lse, mask=o_t < n_queries)


class RangedForwardPlan:
    """What shapes decide about a forward pass. With `select_block` a bitmap says which blocks of so many keys query `t`
    reads: bit `t % 32` of `word[row, block, t // 32]`, int32 `[B * G, blocks, ceil(S / 32)]`."""

    __slots__ = ("describe_kv", "describe_q", "launch", "lse_shape", "o_shape")

    def __init__(
        self, q: Layout, k: Layout, v: Layout, visibility: Visibility, scale: float, tile: Tile | None,
        select_block: int = 0,
    ) -> None:  # fmt: skip
        assert scale > 0, "the running maximum is taken before the scale is applied"
        batch, n_queries, n_heads, d_k = q.shape
        _, n_keys, n_groups, d_v = v.shape
        heads = n_heads // n_groups
        tile = tile or pick_forward(q, v, visibility.sliding)
        if select_block > 0:
            assert select_block % tile.block_n == 0, "a tile of keys must not straddle blocks"
            assert not visibility.sliding, "tiles start at multiples of their size only where ranges start at 0"
        self.o_shape = (batch, n_queries, n_heads, d_v)
        self.lse_shape = (batch, n_queries, n_heads)
        self.describe_q = describe_rows(q, heads, tile)
        self.describe_kv = both(describe_keys(k, tile), describe_keys(v, tile))
        self.launch = Launch(
            ranged_forward_kernel, (triton.cdiv(n_queries * heads, tile.block_m) * batch * n_groups,),
            scale_log2=scale * LOG2_E, n_queries=n_queries, n_keys=n_keys, n_groups=n_groups,
            n_blocks=triton.cdiv(n_keys, select_block) if select_block > 0 else 0,
            n_word_tiles=triton.cdiv(n_queries, 32),
            **strides(q_bth=q, k_bng=k, v_bng=v, o_bth=new_layout(self.o_shape, q.dtype, q.device)),
            stride_lb=n_queries * n_heads, H=heads, D_K=d_k, D_V=d_v, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_DK=block_width(d_k), BLOCK_DV=block_width(d_v), **visibility.constants,
            **visibility.absent("p_lo", "p_hi"), **({} if select_block > 0 else {"p_word": None}),
            SELECT_BLOCK=select_block, DESC_Q=self.describe_q is not None, DESC_KV=self.describe_kv is not None,
            num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
        )  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, **tables: Tensor) -> None:
        """Writes `o` and natural `lse`, contiguous. `tables`: those of `Visibility.query_tables`, and `p_word`."""
        self.launch(**self.described(q, k, v), p_o=o, p_lse=lse, **tables)

    def described(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """As the kernel takes them, by descriptor or by pointer."""
        describe_q, describe_kv = self.describe_q, self.describe_kv
        if describe_kv is None:
            return {"q": q if describe_q is None else describe_q(q), "k": k, "v": v}
        return {"q": q if describe_q is None else describe_q(q), "k": describe_kv[0](k), "v": describe_kv[1](v)}


@lru_cache(maxsize=MAX_PLANS)
def plan(
    q: Layout, k: Layout, v: Layout, visibility: Visibility, scale: float, tile: Tile | None
) -> RangedForwardPlan | ForwardPlan:
    """Of Triton's kernel, or of Gluon's where `tile` is one of its own or it has one for the problem."""
    tile = tile or gluon_tiles.pick_forward(q, k, v, visibility)
    if isinstance(tile, gluon_tiles.ForwardTile):
        from nsa.backends.gluon.forward import ForwardPlan

        return ForwardPlan(q, k, v, visibility, scale, tile)
    return RangedForwardPlan(q, k, v, visibility, scale, tile)


def ranged_forward(
    q: Tensor, k: Tensor, v: Tensor, branch: Compressed | Sliding, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """`o [B,S,Hq,Dv]` in the dtype of `q` and `lse [B,S,Hq]` in fp32, over the branch's keys `k`, `v [B,N,G,D]`."""
    q = row_contiguous(q)
    visibility = visibility_of(branch, k.shape[1])
    planned = plan(layout(q), layout(k), layout(v), visibility, branch.scale, tile)
    o = torch.empty(planned.o_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(planned.lse_shape, dtype=torch.float32, device=q.device)
    planned(q, k, v, o, lse, **visibility.query_tables(branch, k.shape[1]))
    return o, lse
