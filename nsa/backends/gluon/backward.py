"""Gradients of keys and values of a range of queries, for Hopper.

The results of `ranged_dkv_kernel` in `triton/ranged_backward.py`, with the same splits of rows. A CTA has
three partitions: one warp issues the TMA loads of rows, and two consumer warpgroups own 64 keys each. A step of a
consumer, over a tile of rows:

    issue S^T = K Q^T, issue dP^T = V dO^T, wait for S^T
    P^T = exp2(S^T - lse)       while dP^T is being computed
    issue dV += P^T dO, wait for dP^T
    dS^T = P^T (dP^T - delta)   while dV is being computed
    issue dK += dS^T Q, wait for both

With KEEP, dS^T also goes to memory, from which `query_gradient.py` makes dQ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa.backends.gluon.api import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nsa.backends.gluon.descriptors import describe_keys, describe_rows, describe_statistics, descriptor
from nsa.backends.gluon.tiles import KeyTile
from nsa.backends.triton.launch import BoxDescriptor, Launch, Layout, new_layout
from nsa.backends.triton.primitives import COUNTS, LOG2_E, first_position, seeing_queries
from nsa.backends.triton.row_statistics import ROW_PAD
from nsa.backends.triton.tiles import Visibility


@gluon.jit
def edge_row(step, i_start, i_full, i_edge, BLOCK_M: gl.constexpr):
    """First row of the masked tile number `step`: of `[i_start, i_full)`, then from `i_edge` on."""
    i_row = i_start + step * BLOCK_M
    return i_row + gl.where(i_row >= i_full, i_edge - i_full, 0)


@gluon.jit
def produce_rows(
    q, do, lse2, delta, q_s, do_s, lse2_s, delta_s, full, free, i_b, i_g, i_bg, i_start, i_full, i_edge, i_stop,
    H: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: requests a tile of rows and their statistics as soon as a buffer is free."""
    n_edge = (i_full - i_start + i_stop - i_edge) // BLOCK_M
    for step in range((i_stop - i_start) // BLOCK_M):
        i_row = edge_row(step, i_start, i_full, i_edge, BLOCK_M)
        if step >= n_edge:
            i_row = i_full + (step - n_edge) * BLOCK_M
        slot = step % STAGES
        mbarrier.wait(free.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), 2 * q.block_type.nbytes + 2 * lse2.block_type.nbytes)
        tma.async_copy_global_to_shared(q, [i_b, i_row // H, i_g * H, 0], full.index(slot), q_s.index(slot))
        tma.async_copy_global_to_shared(lse2, [i_bg, i_row], full.index(slot), lse2_s.index(slot))
        tma.async_copy_global_to_shared(do, [i_b, i_row // H, i_g * H, 0], full.index(slot), do_s.index(slot))
        tma.async_copy_global_to_shared(delta, [i_bg, i_row], full.index(slot), delta_s.index(slot))


@gluon.jit
def attend_rows(
    k_w, v_w, b_dk, b_dv, q_s, do_s, lse2_s, delta_s, full, free, zero, step, i_row, b_first, b_end, scale_log2,
    ds, ds_s, i_buffer, i_bg, i_n, i_column,
    s_layout: gl.constexpr, o_layout: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Adds to `b_dk`, `b_dv` what comes of the tile of rows from `i_row` on; KEEP stores its `dS^T` at
    `ds[i_bg, i_n, i_column]`."""
    column: gl.constexpr = gl.SliceLayout(0, s_layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    slot = step % STAGES
    q_w = q_s.index(slot).reshape([BLOCK_M, D])
    do_w = do_s.index(slot).reshape([BLOCK_M, D])
    mbarrier.wait(full.index(slot), (step // STAGES) & 1)
    b_st = warpgroup_mma(k_w, q_w.permute([1, 0]), zero, use_acc=False, is_async=True)
    b_dpt = warpgroup_mma(v_w, do_w.permute([1, 0]), zero, use_acc=False, is_async=True)
    b_lse2 = lse2_s.index(slot).reshape([BLOCK_M]).load(column)
    b_st = warpgroup_mma_wait(1, deps=[b_st])
    # [64, BLOCK_M]
    b_e = gl.exp2(b_st * scale_log2 - b_lse2[None, :])
    if MASKED:
        o_r = (i_row + gl.arange(0, BLOCK_M, column))[None, :]
        b_e = gl.where((o_r >= b_first[:, None]) & (o_r < b_end[:, None]), b_e, 0.0)
    b_pt = gl.convert_layout(b_e.to(q_s.dtype), p_layout)
    b_dv = warpgroup_mma(b_pt, do_w, b_dv, is_async=True)
    b_delta = delta_s.index(slot).reshape([BLOCK_M]).load(column)
    b_dpt = warpgroup_mma_wait(1, deps=[b_dpt])
    b_ds = (b_e * (b_dpt - b_delta[None, :])).to(q_s.dtype)
    b_dst = gl.convert_layout(b_ds, p_layout)
    b_dk = warpgroup_mma(b_dst, q_w, b_dk, is_async=True)
    if KEEP:
        # The tile before the last has left the buffer.
        tma.store_wait(1)
        barrier()
        ds_tile = ds_s.index(i_buffer + step % 2)
        ds_tile.reshape([64, BLOCK_M]).store(b_ds)
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(ds, [i_bg, i_n, i_column], ds_tile)
    # The operands in registers too: ptxas may reuse them under a matmul in flight unless the wait depends on them.
    b_dk, b_dv, b_pt, b_dst = warpgroup_mma_wait(0, deps=[b_dk, b_dv, b_pt, b_dst])
    mbarrier.arrive(free.index(slot), count=1)
    return b_dk, b_dv


@gluon.jit
def consume_rows(
    W: gl.constexpr, p_dk, p_dv, p_first, p_end, p_start, start,
    k_s, v_s, kv_full, q_s, do_s, lse2_s, delta_s, full, free, ds, ds_s, i_bg, i_base, i_kept, adds,
    i_n, i_start, i_full, i_edge, i_stop, scale, scale_log2, n_queries, n_keys, n_groups,
    H: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, VARLEN: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """A warpgroup: keys `[64 W, 64 W + 64)` of the tile, over rows `[i_start, i_stop)`, of which `[i_full, i_edge)` see
    every key and come last. `p_dk`, `p_dv` point to the tile's first key, whose gradients are added to if `adds`."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k_w = k_s.index(W).reshape([64, D])
    v_w = v_s.index(W).reshape([64, D])
    zero = gl.zeros([64, BLOCK_M], gl.float32, s_layout)
    b_dk = gl.zeros([64, D], gl.float32, o_layout)
    b_dv = gl.zeros([64, D], gl.float32, o_layout)
    o_key = gl.minimum(i_n + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout)), n_keys - 1)
    b_first, b_end = seeing_queries(o_key, p_start, start, p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, VARLEN)
    b_first = b_first * H
    b_end = b_end * H
    mbarrier.wait(kv_full, 0)
    n_edge = (i_full - i_start + i_stop - i_edge) // BLOCK_M
    for step in range(n_edge):
        i_row = edge_row(step, i_start, i_full, i_edge, BLOCK_M)
        b_dk, b_dv = attend_rows(
            k_w, v_w, b_dk, b_dv, q_s, do_s, lse2_s, delta_s, full, free, zero, step, i_row, b_first, b_end, scale_log2,
            ds, ds_s, 2 * W, i_bg, i_kept + W * 64, i_row - i_base, s_layout, o_layout, D, BLOCK_M, STAGES, True, KEEP,
        )  # fmt: skip
    i_column = i_full - i_base - n_edge * BLOCK_M
    for step in range(n_edge, (i_stop - i_start) // BLOCK_M):
        b_dk, b_dv = attend_rows(
            k_w, v_w, b_dk, b_dv, q_s, do_s, lse2_s, delta_s, full, free, zero, step, 0, b_first, b_end, scale_log2,
            ds, ds_s, 2 * W, i_bg, i_kept + W * 64, i_column + step * BLOCK_M,
            s_layout, o_layout, D, BLOCK_M, STAGES, False, KEEP,
        )  # fmt: skip
    o_n = W * 64 + gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    o_d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    o_out = (o_n * n_groups * D)[:, None] + o_d[None, :]
    m_n = (i_n + o_n < n_keys)[:, None]
    b_dk *= scale
    if KEEP and not SLIDING:  # noqa: SIM102
        if adds:
            # Without rows there is nothing to add.
            m_n &= i_stop > i_start
            b_dk += gl.load(p_dk + o_out, mask=m_n, other=0.0).to(gl.float32)
            b_dv += gl.load(p_dv + o_out, mask=m_n, other=0.0).to(gl.float32)
    gl.store(p_dk + o_out, b_dk.to(p_dk.dtype.element_ty), mask=m_n)
    gl.store(p_dv + o_out, b_dv.to(p_dv.dtype.element_ty), mask=m_n)
    if KEEP:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=[*COUNTS, "bg_0", "key_0", "row_end", "slot_0", "n_written"])
def hopper_dkv_kernel(
    q, do, k, v, lse2, delta, ds, p_dk, p_dv, p_first, p_end, scale, scale_log2,
    n_queries, n_keys, n_groups, n_tiles, n_splits, split_rows, bg_0, key_0, row_0, row_end, slot_0, n_written,
    stride_xp, stride_yp,
    H: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, VARLEN: gl.constexpr, KEEP: gl.constexpr,
    p_start=None,
):  # fmt: skip
    """One tile of 128 keys against one split of the rows that see it, cut and ordered as in `ranged_dkv_kernel`; the
    launch is a `Part` of the problem."""
    # With KEEP the rows are those of whole tiles of `query_gradient.py`, which reads what is written here.
    ROWS: gl.constexpr = 4 * BLOCK_M if KEEP else BLOCK_M
    q_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, BLOCK_M // H, H, D], q.layout)
    do_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, BLOCK_M // H, H, D], do.layout)
    lse2_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse2.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta.layout)
    k_s = gl.allocate_shared_memory(q.dtype, [2, 1, 64, 1, D], k.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [2, 1, 64, 1, D], v.layout)
    ds_s = gl.allocate_shared_memory(q.dtype, [4, 1, 64, BLOCK_M], ds.layout) if KEEP else k_s
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()

    i_n = key_0 + gl.program_id(0) % n_tiles * 128
    i_bg = gl.program_id(0) // n_tiles
    n_bg = gl.num_programs(0) // (n_tiles * n_splits)
    i_split = n_splits - 1 - i_bg // n_bg
    i_local = i_bg % n_bg
    i_bg = bg_0 + i_local
    i_b = i_bg // n_groups
    i_g = i_bg % n_groups
    mbarrier.expect(kv_full, 4 * k.block_type.nbytes)
    for w in gl.static_range(2):
        tma.async_copy_global_to_shared(k, [i_b, i_n + w * 64, i_g, 0], kv_full, k_s.index(w))
        tma.async_copy_global_to_shared(v, [i_b, i_n + w * 64, i_g, 0], kv_full, v_s.index(w))

    i_last = gl.minimum(i_n + 128, n_keys) - 1
    start = first_position(p_start, i_b)
    first_begin, first_end = seeing_queries(
        i_n, p_start, start, p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, VARLEN
    )
    last_begin, last_end = seeing_queries(
        i_last, p_start, start, p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, VARLEN
    )
    i_start = first_begin * H // ROWS * ROWS
    i_stop = (last_end * H + ROWS - 1) // ROWS * ROWS
    i_base = i_start if SLIDING else row_0
    i_split_row = i_base + i_split * split_rows
    i_start = gl.maximum(i_start, i_split_row)
    i_stop = gl.minimum(gl.minimum(i_stop, row_end), i_split_row + split_rows)
    i_full = gl.minimum(gl.maximum((last_begin * H + BLOCK_M - 1) // BLOCK_M * BLOCK_M, i_start), i_stop)
    # Once complete a compressed block is seen to the end, and rows past the end have no probability up to `ROW_PAD`.
    EDGE: gl.constexpr = SLIDING or VARLEN or KEEP
    i_edge = gl.minimum(gl.maximum(first_end * H // BLOCK_M * BLOCK_M, i_full), i_stop) if EDGE else i_stop
    o_tile = ((gl.cast(i_b, gl.int64) * n_keys + i_n) * n_groups + i_g) * D
    p_dk += gl.cast(slot_0 + i_split, gl.int64) * stride_xp + o_tile
    p_dv += gl.cast(slot_0 + i_split, gl.int64) * stride_yp + o_tile
    adds = i_split < n_written
    gl.warp_specialize(
        [
            (consume_rows, (0, p_dk, p_dv, p_first, p_end, p_start, start,
                            k_s, v_s, kv_full, q_s, do_s, lse2_s, delta_s, full, free, ds, ds_s, i_local, i_base,
                            i_n - key_0, adds, i_n, i_start, i_full, i_edge, i_stop, scale, scale_log2,
                            n_queries, n_keys, n_groups, H, D, BLOCK_M, STAGES, SLIDING, SPAN, STRIDE, VARLEN, KEEP)),
            (consume_rows, (1, p_dk, p_dv, p_first, p_end, p_start, start,
                            k_s, v_s, kv_full, q_s, do_s, lse2_s, delta_s, full, free, ds, ds_s, i_local, i_base,
                            i_n - key_0, adds, i_n, i_start, i_full, i_edge, i_stop, scale, scale_log2,
                            n_queries, n_keys, n_groups, H, D, BLOCK_M, STAGES, SLIDING, SPAN, STRIDE, VARLEN, KEEP)),
            (produce_rows, (q, do, lse2, delta, q_s, do_s, lse2_s, delta_s, full, free, i_b, i_g, i_bg,
                            i_start, i_full, i_edge, i_stop, H, BLOCK_M, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


class Part(NamedTuple):
    """What of a problem one launch takes: batch entries and groups `[bg_0, bg_0 + n_bg)`, keys `[key_0, key_end)` and
    rows `[row_0, row_end)`, in `n_splits` splits of `split_rows` each.

    The splits write to slots of partial `dk` and `dv` from `slot_0` on, and add to the first `n_written` of them.
    `kept`: the shape of the `dS^T` that is kept, if it is.
    """

    bg_0: int
    n_bg: int
    key_0: int
    key_end: int
    row_0: int
    row_end: int
    n_splits: int
    split_rows: int
    slot_0: int = 0
    n_written: int = 0
    kept: tuple[int, int, int] | None = None


class KeyLaunch:
    """Launches `hopper_dkv_kernel`, given what the launch of `ranged_dkv_kernel` is given, all of it as tensors."""

    __slots__ = (
        "describe_do",
        "describe_ds",
        "describe_k",
        "describe_q",
        "describe_statistics",
        "describe_v",
        "launch",
    )

    def __init__(
        self, do: Layout, q: Layout, k: Layout, v: Layout, visibility: Visibility, scale: float, tile: KeyTile,
        part: Part,
    ) -> None:  # fmt: skip
        batch, n_queries, n_heads, d = q.shape
        _, n_keys, n_groups, _ = k.shape
        heads = n_heads // n_groups
        n_rows_padded = triton.cdiv(n_queries * heads, ROW_PAD) * ROW_PAD
        rows = describe_rows(q, heads, tile.block_m), describe_rows(do, heads, tile.block_m)
        assert rows[0] is not None, "q is not whole queries, which `pick_dkv` declines"
        assert rows[1] is not None, "do is not whole queries, which `pick_dkv` declines"
        self.describe_q, self.describe_do = rows[0], rows[1]
        self.describe_k, self.describe_v = describe_keys(k, tile.block_n // 2), describe_keys(v, tile.block_n // 2)
        self.describe_statistics = describe_statistics(
            new_layout((batch * n_groups, n_rows_padded), torch.float32, q.device), tile.block_m
        )
        self.describe_ds = None if part.kept is None else describe_ds(part.kept, q, tile)
        n_tiles = triton.cdiv(part.key_end - part.key_0, tile.block_n)
        self.launch = Launch(
            hopper_dkv_kernel,
            (n_tiles * part.n_bg * part.n_splits,),
            scale=scale,
            scale_log2=scale * LOG2_E,
            n_queries=n_queries,
            n_keys=n_keys,
            n_groups=n_groups,
            n_tiles=n_tiles,
            n_splits=part.n_splits,
            split_rows=part.split_rows,
            bg_0=part.bg_0,
            key_0=part.key_0,
            row_0=part.row_0,
            row_end=part.row_end,
            slot_0=part.slot_0,
            n_written=part.n_written,
            stride_xp=k.shape.numel(),
            stride_yp=v.shape.numel(),
            H=heads,
            D=d,
            BLOCK_M=tile.block_m,
            STAGES=tile.num_stages,
            **visibility.constants,
            **visibility.absent("p_first", "p_end"),
            KEEP=part.kept is not None,
            **({} if part.kept is not None else {"ds": None}),
            num_warps=tile.num_warps,
            maxnreg=tile.max_registers,
        )

    def __call__(
        self, q: Tensor, do: Tensor, k: Tensor, v: Tensor, lse2: Tensor, delta: Tensor, p_dk: Tensor, p_dv: Tensor,
        ds: Tensor | None = None, **tables: Tensor,
    ) -> None:  # fmt: skip
        """`tables`: those of `Visibility.key_tables`. `ds`: a buffer that holds at least what is kept."""
        kept = {} if self.describe_ds is None or ds is None else {"ds": self.describe_ds(ds)}
        self.launch(
            q=self.describe_q(q),
            do=self.describe_do(do),
            k=self.describe_k(k),
            v=self.describe_v(v),
            lse2=self.describe_statistics(lse2),
            delta=self.describe_statistics(delta),
            p_dk=p_dk,
            p_dv=p_dv,
            **kept,
            **tables,
        )


def describe_ds(shape: tuple[int, int, int], q: Layout, tile: KeyTile) -> BoxDescriptor:
    """Of `dS^T [B * G, keys, rows]`, in boxes of 64 keys and a tile of rows."""
    return descriptor(new_layout(shape, q.dtype, q.device), (1, tile.block_n // 2, tile.block_m))
