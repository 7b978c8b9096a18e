"""What a chunk of prefill does to a cache besides its attention, without a launch per index: copies, and RoPE's angles.

    write:    store[n(start) + t] = x[t]       where n(start) + t < n(end); of a ring only its last `slots` tokens
    recent:   out[i] = token q_start - reach + i, from a ring before `start` and from the new tokens from there on
    blocks:   out[e, r] = token (n(start) + e) * d + r, likewise
    pages:    out[i] = store[i]                where i < n(end), else 0
    angles:   cos, sin of ((n(start) + e) * d + offset) * frequency, in fp64 and then rounded

`start, end [B]` are the rows' lengths before and after; `n` counts the complete compression blocks in so many tokens.
Single tokens are blocks of one with a stride of one. Decode steps, of a few tokens, have kernels of their own.

Grids: (tiles of rows (token, group), B, key or value); one CTA owns its tile and writes it once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.decode.common import place_of
from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout, strides
from nsa.backends.triton.selection import complete_blocks
from nsa.backends.triton.tiles import row_contiguous
from nsa.sequences import Pair

PairLayout = tuple[Layout, Layout]

TILE_ELEMENTS = 4096
# A cosine in fp64 takes most of a thread's registers.
ANGLES_PER_CTA = 128


@triton.jit
def blocks_of_row(lengths, i_b, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """How many complete blocks row `i_b` has; of `lengths` int32."""
    return complete_blocks(tl.load(lengths + i_b) - 1, BLOCK, STRIDE)


@triton.jit
def write_tile(
    x, store, table, first, end, i_b, n_rows, slots, columns, stride_xb, stride_xt, stride_xg, stride_sb, stride_sn,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_t = (o_r // G).to(tl.int64)
    o_g = o_r % G
    o_n = first + o_r // G
    m_r = (o_r < n_rows) & (o_n < end)
    if RING:
        m_r = m_r & (o_n >= end - slots)
        o_n = o_n % slots
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_r[:, None] & (o_d < D)[None, :]
    p_x = x + i_b * stride_xb + (o_t * stride_xt + o_g * stride_xg)[:, None] + o_d[None, :]
    o_b, o_x = place_of(table, i_b, o_n, m_r, columns, stride_sb, stride_sn, PAGE)
    tl.store(store + o_b + (o_x + o_g * D)[:, None] + o_d[None, :], tl.load(p_x, mask=m_x), mask=m_x)


@triton.jit(do_not_specialize=["n_rows", "slots", "columns"])
def write_kernel(
    k, v, k_store, v_store, table, start, end, n_rows, slots, columns,
    stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg, stride_ksb, stride_ksn, stride_vsb, stride_vsn,
    G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(1).to(tl.int64)
    i_first = blocks_of_row(start, i_b, BLOCK, STRIDE)
    i_end = blocks_of_row(end, i_b, BLOCK, STRIDE)
    if tl.program_id(2) == 0:
        write_tile(
            k, k_store, table, i_first, i_end, i_b, n_rows, slots, columns, stride_kb, stride_kt, stride_kg,
            stride_ksb, stride_ksn, G, DK, BLOCK_D, BLOCK_R, PAGE, RING,
        )  # fmt: skip
    else:
        write_tile(
            v, v_store, table, i_first, i_end, i_b, n_rows, slots, columns, stride_vb, stride_vt, stride_vg,
            stride_vsb, stride_vsn, G, DV, BLOCK_D, BLOCK_R, PAGE, RING,
        )  # fmt: skip


@triton.jit
def read_tile(
    x, ring, out, first, start, i_b, n_rows, n_new, slots, reach,
    stride_xb, stride_xt, stride_xg, stride_rb, stride_rn,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Rows `(e, g, r)` of `out [E, G, BLOCK, D]`: token `r` of block `first + e`. One that the ring no longer has, or
    past the last, is a new token instead: what lies there could be anything."""
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_g = o_r // BLOCK % G
    o_new = (first + o_r // (BLOCK * G)) * STRIDE + o_r % BLOCK - start
    m_old = (o_new < 0) & (o_new >= -reach)
    o_slot = ((start + o_new) % slots).to(tl.int64)
    o_t = tl.minimum(tl.maximum(o_new, 0), n_new - 1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_x = (o_r < n_rows)[:, None] & (o_d < D)[None, :]
    p_old = ring + i_b * stride_rb + (o_slot * stride_rn + o_g * D)[:, None] + o_d[None, :]
    p_new = x + i_b * stride_xb + (o_t * stride_xt + o_g * stride_xg)[:, None] + o_d[None, :]
    b_old = tl.load(p_old, mask=m_x & m_old[:, None])
    b_new = tl.load(p_new, mask=m_x & ~m_old[:, None])
    p_out = out + (i_b * n_rows + o_r)[:, None] * D + o_d[None, :]
    tl.store(p_out, tl.where(m_old[:, None], b_old, b_new), mask=m_x)


@triton.jit(do_not_specialize=["n_rows", "n_new", "slots", "reach"])
def read_kernel(
    k, v, k_ring, v_ring, k_out, v_out, start, q_start, n_rows, n_new, slots, reach,
    stride_kb, stride_kt, stride_kg, stride_vb, stride_vt, stride_vg, stride_krb, stride_krn, stride_vrb, stride_vrn,
    G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """The tokens around `q_start`; without it those of the blocks that may be completed."""
    i_b = tl.program_id(1).to(tl.int64)
    i_start = tl.load(start + i_b)
    if q_start is None:
        i_first = blocks_of_row(start, i_b, BLOCK, STRIDE)
    else:
        i_first = tl.maximum(tl.load(q_start + i_b) - reach, 0)
    if tl.program_id(2) == 0:
        read_tile(
            k, k_ring, k_out, i_first, i_start, i_b, n_rows, n_new, slots, reach, stride_kb, stride_kt, stride_kg,
            stride_krb, stride_krn, G, DK, BLOCK_D, BLOCK_R, BLOCK, STRIDE,
        )  # fmt: skip
    else:
        read_tile(
            v, v_ring, v_out, i_first, i_start, i_b, n_rows, n_new, slots, reach, stride_vb, stride_vt, stride_vg,
            stride_vrb, stride_vrn, G, DV, BLOCK_D, BLOCK_R, BLOCK, STRIDE,
        )  # fmt: skip


@triton.jit
def page_tile(
    store, table, out, end, i_b, n_rows, columns, stride_sb, stride_sn,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_g = o_r % G
    m_r = o_r < n_rows
    m_n = m_r & (o_r // G < end)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    o_b, o_x = place_of(table, i_b, o_r // G, m_n, columns, stride_sb, stride_sn, PAGE)
    p_x = store + o_b + (o_x + o_g * D)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=m_n[:, None] & m_d, other=0)
    tl.store(out + (i_b * n_rows + o_r)[:, None] * D + o_d[None, :], b_x, mask=m_r[:, None] & m_d)


@triton.jit(do_not_specialize=["n_rows", "columns"])
def pages_kernel(
    k_store, v_store, table, k_out, v_out, end, n_rows, columns, stride_ksb, stride_ksn, stride_vsb, stride_vsn,
    G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(1).to(tl.int64)
    i_end = blocks_of_row(end, i_b, BLOCK, STRIDE)
    if tl.program_id(2) == 0:
        page_tile(
            k_store, table, k_out, i_end, i_b, n_rows, columns, stride_ksb, stride_ksn, G, DK, BLOCK_D, BLOCK_R, PAGE
        )
    else:
        page_tile(
            v_store, table, v_out, i_end, i_b, n_rows, columns, stride_vsb, stride_vsn, G, DV, BLOCK_D, BLOCK_R, PAGE
        )


@triton.jit(do_not_specialize=["n_positions", "offset"])
def angles_kernel(
    start, frequencies, p_cos, p_sin, n_positions, offset,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(1).to(tl.int64)
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    o_position = (blocks_of_row(start, i_b, BLOCK, STRIDE) + o_r).to(tl.int64) * STRIDE + offset
    b_frequency = tl.load(frequencies + o_d, mask=o_d < HALF, other=0.0)
    # [BLOCK_R, BLOCK_D] in fp64, as `Rope.angles` computes them
    b_angle = o_position.to(tl.float64)[:, None] * b_frequency[None, :]
    o_out = (i_b * n_positions + o_r)[:, None] * HALF + o_d[None, :]
    m_out = (o_r < n_positions)[:, None] & (o_d < HALF)[None, :]
    tl.store(p_cos + o_out, tl.cos(b_angle).to(tl.float32), mask=m_out)
    tl.store(p_sin + o_out, tl.sin(b_angle).to(tl.float32), mask=m_out)


def tile_of(n_rows: int, row: int, elements: int) -> tuple[int, dict[str, int]]:
    """How many tiles of `elements` `n_rows` rows of length `row` are, and their sizes."""
    block_d = triton.next_power_of_2(row)
    block_r = max(1, elements // block_d)
    return triton.cdiv(n_rows, block_r), {"BLOCK_D": block_d, "BLOCK_R": block_r}


@lru_cache(maxsize=MAX_PLANS)
def plan_write(
    new: PairLayout, stores: PairLayout, table: Layout | None, block: int, stride: int, ring: bool
) -> Launch:
    (k, v), (k_store, v_store) = new, stores
    batch, n_new, groups, d_k = k.shape
    n_rows = n_new * groups
    n_tiles, tile = tile_of(n_rows, max(d_k, v.shape[3]), TILE_ELEMENTS)
    paged: dict[str, Any] = {"columns": 0, "table": None} if table is None else {"columns": table.shape[1]}
    return Launch(
        write_kernel, (n_tiles, batch, 2), **strides(k_btg=k, v_btg=v, ks_bn=k_store, vs_bn=v_store), **paged, **tile,
        n_rows=n_rows, slots=k_store.shape[1] - 1, G=groups, DK=d_k, DV=v.shape[3], BLOCK=block, STRIDE=stride,
        PAGE=1 if table is None else k_store.shape[1], RING=ring, num_warps=4,
    )  # fmt: skip


def write_tokens(
    new: Pair, stores: Pair, start: Tensor, end: Tensor, *, table: Tensor | None = None, ring: bool = False,
    block: int = 1, stride: int = 1,
) -> None:  # fmt: skip
    """Write `new [B,M,G,D]` into `stores [B,slots+1,G,D]`, or with a `table` of pages `[pages,slots,G,D]`: of the
    blocks from the first that `start` tokens do not complete, those that `end` tokens do; both int32 `[B]`."""
    if new[0].shape[1] == 0:
        return
    (k, v), (k_store, v_store) = map(row_contiguous, new), stores
    layouts = (layout(k), layout(v)), (layout(k_store), layout(v_store))
    launch = plan_write(*layouts, None if table is None else layout(table), block, stride, ring)
    given = {} if table is None else {"table": table}
    launch(k=k, v=v, k_store=k_store, v_store=v_store, start=start, end=end, **given)


@lru_cache(maxsize=MAX_PLANS)
def plan_read(
    new: PairLayout, rings: PairLayout, reach: int, emitted: tuple[int, int] | None
) -> tuple[Launch, tuple[tuple[int, ...], ...]]:
    """The launch and the shapes of its results; `emitted`: block and stride of compressed blocks."""
    (k, v), (k_ring, v_ring) = new, rings
    batch, n_new, groups, d_k = k.shape
    block, stride = emitted or (1, 1)
    count = reach + n_new if emitted is None else triton.cdiv(n_new, stride)
    n_rows = count * groups * block
    n_tiles, tile = tile_of(n_rows, max(d_k, v.shape[3]), TILE_ELEMENTS)
    inner = (groups,) if emitted is None else (groups, block)
    launch = Launch(
        read_kernel, (n_tiles, batch, 2), **strides(k_btg=k, v_btg=v, kr_bn=k_ring, vr_bn=v_ring), **tile,
        **({} if emitted is None else {"q_start": None}), n_rows=n_rows, n_new=n_new, slots=k_ring.shape[1] - 1,
        reach=reach, G=groups, DK=d_k, DV=v.shape[3], BLOCK=block, STRIDE=stride, num_warps=4,
    )  # fmt: skip
    return launch, tuple((batch, count, *inner, d) for d in (d_k, v.shape[3]))


def read_tokens(
    new: Pair, rings: Pair, start: Tensor, reach: int, *, q_start: Tensor | None = None,
    emitted: tuple[int, int] | None = None,
) -> Pair:  # fmt: skip
    """Of `rings [B,slots+1,G,D]` and `new [B,T,G,D]` tokens from `start [B]` on: with `q_start [B]`, all from `reach`
    tokens before it, `[B,reach+T,G,D]`; with `emitted`, a block and its stride, the tokens of the blocks that the new
    ones may complete, `[B,E,G,l,D]`."""
    (k, v), (k_ring, v_ring) = map(row_contiguous, new), rings
    layouts = (layout(k), layout(v)), (layout(k_ring), layout(v_ring))
    launch, shapes = plan_read(*layouts, reach, emitted)
    k_out, v_out = (torch.empty(shape, dtype=x.dtype, device=x.device) for shape, x in zip(shapes, (k, v), strict=True))
    given = {} if q_start is None else {"q_start": q_start}
    launch(k=k, v=v, k_ring=k_ring, v_ring=v_ring, k_out=k_out, v_out=v_out, start=start, **given)
    return k_out, v_out


@lru_cache(maxsize=MAX_PLANS)
def plan_pages(
    stores: PairLayout, table: Layout, n_slots: int, block: int, stride: int
) -> tuple[Launch, tuple[tuple[int, ...], ...]]:
    """The launch and the shapes of its results."""
    k_store, v_store = stores
    (_, page, groups, d_k), d_v = k_store.shape, v_store.shape[3]
    batch, columns = table.shape
    n_rows = n_slots * groups
    n_tiles, tile = tile_of(n_rows, max(d_k, d_v), TILE_ELEMENTS)
    launch = Launch(
        pages_kernel, (n_tiles, batch, 2), **strides(ks_bn=k_store, vs_bn=v_store), **tile, n_rows=n_rows,
        columns=columns, G=groups, DK=d_k, DV=d_v, BLOCK=block, STRIDE=stride, PAGE=page, num_warps=4,
    )  # fmt: skip
    return launch, tuple((batch, n_slots, groups, d) for d in (d_k, d_v))


def read_pages(
    stores: Pair, table: Tensor, end: Tensor, n_slots: int, *, block: int = 1, stride: int = 1
) -> Pair:  # fmt: skip
    """The first `n_slots` slots of every row of `stores [pages,slots,G,D]`, contiguous `[B,n,G,D]`; zeros from the
    first block on that `end [B]` tokens do not complete."""
    k_store, v_store = stores
    launch, shapes = plan_pages((layout(k_store), layout(v_store)), layout(table), n_slots, block, stride)
    k_out, v_out = (torch.empty(s, dtype=x.dtype, device=x.device) for s, x in zip(shapes, stores, strict=True))
    if n_slots:
        launch(k_store=k_store, v_store=v_store, table=table, k_out=k_out, v_out=v_out, end=end)
    return k_out, v_out


@lru_cache(maxsize=MAX_PLANS)
def plan_angles(
    start: Layout, frequencies: Layout, n_positions: int, offset: int, block: int, stride: int
) -> tuple[Launch, tuple[int, ...]]:
    (batch,), (half,) = start.shape, frequencies.shape
    n_tiles, tile = tile_of(n_positions, half, ANGLES_PER_CTA)
    launch = Launch(
        angles_kernel, (n_tiles, batch), **tile, n_positions=n_positions, offset=offset, HALF=half, BLOCK=block,
        STRIDE=stride, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return launch, (batch, n_positions, 1, half)


def cached_angles(
    start: Tensor, frequencies: Tensor, n_positions: int, *, offset: int = 0, block: int = 1, stride: int = 1
) -> Pair:
    """Cosine and sine, fp32 `[B,n,1,D/2]`, at the first tokens of the `n` blocks after those that `start [B]` tokens
    complete."""
    launch, shape = plan_angles(layout(start), layout(frequencies), n_positions, offset, block, stride)
    cos, sin = (torch.empty(shape, dtype=torch.float32, device=start.device) for _ in range(2))
    launch(start=start, frequencies=frequencies, p_cos=cos, p_sin=sin)
    return cos, sin
