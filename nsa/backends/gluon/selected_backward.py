"""Backward of the selected branch by blocks, for Hopper.

The results of `block_backward_kernel` in `triton/selected/backward.py`, with the same segments and the same places of
partial gradients. A CTA owns a segment: one warpgroup holds a block's 64 keys and streams the rows of the queries that
selected it, 64 at a time. Two warps load rows by TMA, of `q` and of `do`, and a third stores their partial `dq`, which
leaves through the buffer that the queries came in. A step of the warpgroup, transposed, keys down and rows across:

    issue S^T = K Q^T, issue dP^T = V dO^T, wait for S^T
    P^T = exp2(S^T - lse)            while dP^T is being computed
    wait for dP^T, dS^T = P^T (dP^T - delta)
    issue dV += P^T dO, issue dK += dS^T Q
    request LSE and delta of the next rows
    dS^T to shared memory            while dV and dK are being computed
    wait for both, issue dQ = dS K, wait for it
    LSE and delta to shared memory, dQ into the buffer of Q

A step multiplies for 1,280 cycles and moves 192 KB through shared memory, which takes 128 bytes a cycle: 64 KB for the
two scores, 32 KB for dV and dK, whose left operands are in registers, 24 KB for dQ, the rest for what comes and goes.
Sums split over two warpgroups would need P^T in shared memory as well, and move 40 KB more. One warpgroup has 232
registers where two CTAs share an SM, and needs 192 of them for dK, dV and either S^T and dP^T or dQ: so P^T and dS^T
are operands only when S^T and dP^T are gone, and are gone before dQ. Where one CTA waits or computes exponentials, the
other multiplies.
"""

from __future__ import annotations

import triton

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
from nsa.backends.gluon.selected_blocks import (
    BlockLaunch,
    clear_other_keys,
    gather_rows,
    launch_blocks,
    scatter_rows,
    segment_of,
)
from nsa.backends.gluon.tiles import BlockBackwardTile
from nsa.backends.triton.launch import Layout
from nsa.backends.triton.primitives import COUNTS, LOG2_E
from nsa.backends.triton.row_statistics import ROW_PAD
from nsa.backends.triton.selected.index import Chunk, Shapes


@gluon.jit
def gather_block_and_rows(
    x, y, p_pair, x_s, y_s, y_full, full, free, i_b, i_g, i_key, n_pairs,
    H: gl.constexpr, N_SELECT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: requests the block's tile of `y`, then tiles of rows of `x`."""
    if n_pairs > 0:
        mbarrier.expect(y_full, y.block_type.nbytes)
        tma.async_copy_global_to_shared(y, [i_b, i_key, i_g, 0], y_full, y_s)
    gather_rows(x, p_pair, x_s, full, free, i_b, i_g, n_pairs, H, N_SELECT, D, BLOCK_M, STAGES)


@gluon.jit
def load_row_pairs(p_pair, step, n_pairs, H: gl.constexpr, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """The pair of each row of a tile; 0 past the end."""
    o_pair = step * (BLOCK_M // H) + gl.arange(0, BLOCK_M, layout) // H
    # The minimum changes no result: LLVM would keep a pointer of 64 bits per thread through the loop.
    return gl.load(p_pair + gl.minimum(o_pair, n_pairs - 1), mask=o_pair < n_pairs, other=0)


@gluon.jit
def load_statistics(
    p_lse2, p_delta, b_t, step, n_pairs, i_statistic, H: gl.constexpr, BLOCK_M: gl.constexpr, layout: gl.constexpr
):
    """LSE and delta of each row of a tile, whose queries are `b_t`; past the end those of a row without gradients."""
    o_row = gl.arange(0, BLOCK_M, layout)
    m_row = step * (BLOCK_M // H) + o_row // H < n_pairs
    o_statistic = i_statistic + (b_t * H + o_row % H)
    b_lse2 = gl.load(p_lse2 + o_statistic, mask=m_row, other=float("inf"))
    return b_lse2, gl.load(p_delta + o_statistic, mask=m_row, other=0.0)


@gluon.jit
def differentiate_rows(
    k_w, v_w, b_dk, b_dv, b_pair, p_pair, p_lse2, p_delta, q_s, do_s, lse2_s, delta_s, seen_s, ds_s, full, done,
    zero, zero_dq, step, n_pairs, i_first, i_statistic, scale, scale_log2,
    s_layout: gl.constexpr, o_layout: gl.constexpr, row_layout: gl.constexpr,
    H: gl.constexpr, N_SELECT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Adds to `b_dk`, `b_dv` what comes of a tile of rows, and leaves its partial `dq` where its queries were.

    `b_pair`: the pairs of the next tile, whose statistics are loaded here; returns those of the one after it.
    """
    column: gl.constexpr = gl.SliceLayout(0, s_layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    slot = step % STAGES
    q_w = q_s.index(slot)
    do_w = do_s.index(slot)
    ds_w = ds_s.index(0)
    mbarrier.wait(full.index(slot), (step // STAGES) & 1)
    b_st = warpgroup_mma(k_w, q_w.permute([1, 0]), zero, use_acc=False, is_async=True)
    b_dpt = warpgroup_mma(v_w, do_w.permute([1, 0]), zero, use_acc=False, is_async=True)
    # The minimum as in `load_row_pairs`.
    i_t = gl.load(p_pair + gl.minimum(step * (BLOCK_M // H), n_pairs - 1)) // N_SELECT
    b_lse2 = lse2_s.index(0).load(column)
    b_st = warpgroup_mma_wait(1, deps=[b_st])
    # [BLOCK_N, BLOCK_M]
    b_p = gl.exp2(b_st * scale_log2 - b_lse2[None, :])
    # Queries inside the block itself come first, and alone need a mask.
    if i_t < i_first + BLOCK_N - 1:
        o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, s_layout))
        b_p = gl.where(o_n[:, None] < seen_s.index(0).load(column)[None, :], b_p, 0.0)
    b_delta = delta_s.index(0).load(column)
    b_dpt = warpgroup_mma_wait(0, deps=[b_dpt])
    # With the scale in it, so that neither `dk` nor `dq` needs it again.
    b_ds = (b_p * (b_dpt * scale - b_delta[None, :])).to(q_s.dtype)
    b_pt = gl.convert_layout(b_p.to(q_s.dtype), p_layout)
    b_dv = warpgroup_mma(b_pt, do_w, b_dv, is_async=True)
    b_dst = gl.convert_layout(b_ds, p_layout)
    b_dk = warpgroup_mma(b_dst, q_w, b_dk, is_async=True)
    # They come while products are computed, of pairs that came a step ago.
    b_t = b_pair // N_SELECT
    b_next_lse2, b_next_delta = load_statistics(
        p_lse2, p_delta, b_t, step + 1, n_pairs, i_statistic, H, BLOCK_M, row_layout
    )
    b_pair = load_row_pairs(p_pair, step + 2, n_pairs, H, BLOCK_M, row_layout)
    ds_w.store(b_ds)
    fence_async_shared()
    # Every warp has stored dS, and loaded what belongs to this tile's rows.
    barrier()
    seen_s.index(0).store(b_t - i_first + 1)
    # The operands in registers too: ptxas may reuse them under a matmul in flight unless the wait depends on them.
    b_dk, b_dv, b_pt, b_dst = warpgroup_mma_wait(0, deps=[b_dk, b_dv, b_pt, b_dst])
    # [BLOCK_M, D]
    b_dq = warpgroup_mma(ds_w.permute([1, 0]), k_w, zero_dq, use_acc=False, is_async=True)
    b_dq = warpgroup_mma_wait(0, deps=[b_dq])
    lse2_s.index(0).store(b_next_lse2)
    delta_s.index(0).store(b_next_delta * scale)
    # Every warp is done with the queries and with dS. The statistics are loaded after the next barrier.
    barrier()
    q_w.store(b_dq.to(q_s.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(done.index(slot), count=1)
    return b_dk, b_dv, b_pair


@gluon.jit
def consume_segment(
    p_dk, p_dv, p_pair, p_lse2, p_delta, q_s, do_s, kv_s, lse2_s, delta_s, seen_s, ds_s, kv_full, full, done,
    i_key, i_end, i_first, i_statistic, n_pairs, scale, scale_log2,
    H: gl.constexpr, N_SELECT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the block, whose first key is `i_first` counted as queries are, against all rows of the segment.

    One loop: with another for the tiles that need a mask, ptxas keeps more across them than there are registers.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k_w = kv_s.index(0).reshape([BLOCK_N, D])
    v_w = kv_s.index(1).reshape([BLOCK_N, D])
    # A row per thread, twice.
    row_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, s_layout)
    zero_dq = gl.zeros([BLOCK_M, D], gl.float32, o_layout)
    b_dk = gl.zeros([BLOCK_N, D], gl.float32, o_layout)
    b_dv = gl.zeros([BLOCK_N, D], gl.float32, o_layout)
    b_t = load_row_pairs(p_pair, 0, n_pairs, H, BLOCK_M, row_layout) // N_SELECT
    b_lse2, b_delta = load_statistics(p_lse2, p_delta, b_t, 0, n_pairs, i_statistic, H, BLOCK_M, row_layout)
    b_pair = load_row_pairs(p_pair, 1, n_pairs, H, BLOCK_M, row_layout)
    seen_s.index(0).store(b_t - i_first + 1)
    lse2_s.index(0).store(b_lse2)
    delta_s.index(0).store(b_delta * scale)
    barrier()
    if n_pairs > 0:
        mbarrier.wait(kv_full, 0)
        if VARLEN:
            clear_other_keys(k_w, v_w, i_key, i_end, BLOCK_N)
    for step in range((n_pairs * H + BLOCK_M - 1) // BLOCK_M):
        b_dk, b_dv, b_pair = differentiate_rows(
            k_w, v_w, b_dk, b_dv, b_pair, p_pair, p_lse2, p_delta, q_s, do_s, lse2_s, delta_s, seen_s, ds_s, full, done,
            zero, zero_dq, step, n_pairs, i_first, i_statistic, scale, scale_log2, s_layout, o_layout, row_layout,
            H, N_SELECT, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip
    o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, o_layout))
    o_out = (o_n * D)[:, None] + gl.arange(0, D, gl.SliceLayout(0, o_layout))[None, :]
    # None where no segment is this CTA's.
    m_n = (o_n < n_pairs * BLOCK_N)[:, None]
    gl.store(p_dk + o_out, b_dk, mask=m_n)
    gl.store(p_dv + o_out, b_dv, mask=m_n)


@gluon.jit(do_not_specialize=COUNTS)
def hopper_block_backward_kernel(
    q, k, v, do, dq, p_lse2, p_delta, p_dk, p_dv, p_pair, p_order, p_item, p_low, p_high, p_last_segment,
    p_first_token, p_end_token, scale, scale_log2, n_items, n_blocks, n_keys, n_groups, row_0, query_0, n_queries,
    n_rows_padded,
    H: gl.constexpr, N_SELECT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SEGMENT: gl.constexpr, VARLEN: gl.constexpr, STAGES: gl.constexpr, p_start=None, max_start=None,
):  # fmt: skip
    """A segment of one block's queries, as in `block_backward_kernel`: partial `dq [pairs, h, D]` by descriptor, and
    `dk, dv [segments, l, D]`."""
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_M, D], tile_layout)
    do_s = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_M, D], tile_layout)
    ds_s = gl.allocate_shared_memory(q.dtype, [1, BLOCK_N, BLOCK_M], tile_layout)
    kv_s = gl.allocate_shared_memory(q.dtype, [2, 1, BLOCK_N, 1, D], k.layout)
    # LSE and delta of a tile's rows, and how many of the keys each row sees.
    lse2_s = gl.allocate_shared_memory(gl.float32, [1, BLOCK_M], row_layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [1, BLOCK_M], row_layout)
    seen_s = gl.allocate_shared_memory(gl.int32, [1, BLOCK_M], row_layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Of both warps that load.
    mbarrier.init(kv_full, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(done.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()

    i_segment, p_pair, n_pairs, i_row, i_key, i_end, i_first, i_first_pair = segment_of(
        p_pair, p_order, p_item, p_low, p_high, p_last_segment, p_first_token, p_end_token, p_start, max_start,
        n_items, n_blocks, n_keys, n_groups, row_0, query_0, n_queries, N_SELECT, BLOCK_N, SEGMENT, VARLEN,
    )  # fmt: skip
    i_b = i_row // n_groups
    i_g = i_row % n_groups
    i_statistic = gl.cast(i_row, gl.int64) * n_rows_padded
    p_dk += gl.cast(i_segment, gl.int64) * (BLOCK_N * D)
    p_dv += gl.cast(i_segment, gl.int64) * (BLOCK_N * D)
    gl.warp_specialize(
        [
            (consume_segment, (p_dk, p_dv, p_pair, p_lse2, p_delta, q_s, do_s, kv_s, lse2_s, delta_s, seen_s, ds_s,
                               kv_full, full, done, i_key, i_end, i_first, i_statistic, n_pairs, scale, scale_log2,
                               H, N_SELECT, D, BLOCK_M, BLOCK_N, STAGES, VARLEN)),
            (gather_block_and_rows, (q, k, p_pair, q_s, kv_s.index(0), kv_full, full, free, i_b, i_g, i_key,
                                     n_pairs, H, N_SELECT, D, BLOCK_M, STAGES)),
            (gather_block_and_rows, (do, v, p_pair, do_s, kv_s.index(1), kv_full, full, free, i_b, i_g, i_key,
                                     n_pairs, H, N_SELECT, D, BLOCK_M, STAGES)),
            (scatter_rows, (dq, p_pair, q_s, done, free, i_first_pair, n_pairs, H, D, BLOCK_M, STAGES)),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )  # fmt: skip


def block_backward(
    shapes: Shapes, do: Layout, n_rows: int, chunk: Chunk, scale: float, segment: int, tile: BlockBackwardTile
) -> BlockLaunch:
    """The launch of `hopper_block_backward_kernel` for a chunk, with partials `dq [n_rows, D]`."""
    rows, partial = {"q": shapes.q, "do": do}, ("dq", n_rows // shapes.heads)
    return launch_blocks(
        hopper_block_backward_kernel, shapes, chunk, segment, tile, rows, partial, scale=scale,
        scale_log2=scale * LOG2_E, n_rows_padded=triton.cdiv(shapes.n_tokens * shapes.heads, ROW_PAD) * ROW_PAD,
    )  # fmt: skip
