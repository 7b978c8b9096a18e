"""Forward of the selected branch by blocks, for Hopper.

The results of `block_kernel` in `triton/selected/forward.py`, with the same segments and the same places of partial
outputs. A CTA owns a segment: one warpgroup holds a block's 64 keys and values and streams the rows of the queries that
selected it, 64 at a time. One warp loads them, another stores their partial outputs, which leave through the buffer
that the queries came in. A step of the warpgroup, with the scores S of its tile at hand:

    P = softmax(S), all of it: a row sees no other keys here
    issue O = P V, issue S' = Q' K^T of the next tile, wait for O
    O into the buffer of Q           while S' is being computed
    wait for S'

A step multiplies for 512 cycles and moves 32 KB between its SM and the L2, which takes longer. So what counts is that
many tiles are on their way, and that moving them takes no instructions: rows come and go by TMA, in two boxes a query
(see `selected_blocks.py`). Two CTAs share an SM, and where one computes exponentials, the other multiplies.
"""

from __future__ import annotations

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
from nsa.backends.gluon.tiles import BlockForwardTile
from nsa.backends.triton.primitives import COUNTS, LOG2_E
from nsa.backends.triton.selected.index import Chunk, Shapes


@gluon.jit
def gather_queries(
    q, k, v, p_pair, q_s, kv_s, kv_full, full, free, i_b, i_g, i_key, n_pairs,
    H: gl.constexpr, N_SELECT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: requests the block, then tiles of queries."""
    if n_pairs > 0:
        mbarrier.expect(kv_full, k.block_type.nbytes + v.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [i_b, i_key, i_g, 0], kv_full, kv_s.index(0))
        tma.async_copy_global_to_shared(v, [i_b, i_key, i_g, 0], kv_full, kv_s.index(1))
    gather_rows(q, p_pair, q_s, full, free, i_b, i_g, n_pairs, H, N_SELECT, D, BLOCK_M, STAGES)


@gluon.jit
def pairs_of_tile(p_pair, step, o_m, n_pairs, H: gl.constexpr, BLOCK_M: gl.constexpr):
    """The pair of each row of a tile, and of its first one; past the end the last pair."""
    i_pair = step * (BLOCK_M // H)
    b_pair = gl.load(p_pair + gl.minimum(i_pair + o_m // H, n_pairs - 1))
    return b_pair, gl.load(p_pair + gl.minimum(i_pair, n_pairs - 1))


@gluon.jit
def attend_queries(
    b_s, b_pair, i_pair, p_lse, p_pair, q_s, k_t, v_w, full, done, step, i_first, i_first_pair, n_pairs, scale_log2,
    zero_s, zero_o, s_layout: gl.constexpr, o_layout: gl.constexpr,
    H: gl.constexpr, N_SELECT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    LAST: gl.constexpr,
):  # fmt: skip
    """Leaves a tile's partial outputs where its queries were, and their LSEs in memory; scores and pairs of the next
    tile, unless it is the LAST."""
    slot = step % STAGES
    q_w = q_s.index(slot)
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
    b_next, i_next = b_pair, i_pair
    if not LAST:
        # Used a step later, so that nothing waits for them.
        b_next, i_next = pairs_of_tile(p_pair, step + 1, o_m, n_pairs, H, BLOCK_M)
    # Queries inside the block itself come first.
    if i_pair // N_SELECT < i_first + BLOCK_N - 1:
        o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        b_s = gl.where((i_first + o_n)[None, :] <= (b_pair // N_SELECT)[:, None], b_s, float("-inf"))
    # Finite: a query that selected a block sees its first token.
    b_m = gl.max(b_s, 1) * scale_log2
    b_e = gl.exp2(b_s * scale_log2 - b_m[:, None])
    b_l = gl.sum(b_e, 1)
    b_p = gl.convert_layout(b_e.to(q_s.dtype), gl.DotOperandLayout(0, o_layout, 2))
    # Every warp is done with the queries.
    barrier()
    b_o = warpgroup_mma(b_p, v_w, zero_o, use_acc=False, is_async=True)
    if not LAST:
        following = (step + 1) % STAGES
        mbarrier.wait(full.index(following), ((step + 1) // STAGES) & 1)
        b_s = warpgroup_mma(q_s.index(following), k_t, zero_s, use_acc=False, is_async=True)
    p_lse += (b_pair - i_first_pair) * H + o_m % H
    gl.store(p_lse, b_m + gl.log2(b_l), mask=step * (BLOCK_M // H) + o_m // H < n_pairs)
    b_scale = gl.convert_layout(1.0 / b_l, gl.SliceLayout(1, o_layout))
    # The operand in registers too: ptxas may reuse it under a matmul in flight unless the wait depends on it.
    b_o, b_p = warpgroup_mma_wait(0 if LAST else 1, deps=[b_o, b_p])
    q_w.store((b_o * b_scale[:, None]).to(q_s.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(done.index(slot), count=1)
    if not LAST:
        b_s = warpgroup_mma_wait(0, deps=[b_s])
    return b_s, b_next, i_next


@gluon.jit
def stream_queries(
    p_lse, p_pair, q_s, kv_s, kv_full, full, done, i_key, i_end, i_first, i_first_pair, n_pairs, scale_log2,
    H: gl.constexpr, N_SELECT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """A warpgroup: all rows of the segment against the block."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    k_w = kv_s.index(0).reshape([BLOCK_N, D])
    v_w = kv_s.index(1).reshape([BLOCK_N, D])
    k_t = k_w.permute([1, 0])
    zero_s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)
    zero_o = gl.zeros([BLOCK_M, D], gl.float32, o_layout)
    # None where no segment is this CTA's.
    if n_pairs > 0:
        o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
        b_pair, i_pair = pairs_of_tile(p_pair, 0, o_m, n_pairs, H, BLOCK_M)
        mbarrier.wait(kv_full, 0)
        if VARLEN:
            clear_other_keys(k_w, v_w, i_key, i_end, BLOCK_N)
        mbarrier.wait(full.index(0), 0)
        b_s = warpgroup_mma(q_s.index(0), k_t, zero_s, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        last = (n_pairs - 1) // (BLOCK_M // H)
        for step in range(last):
            b_s, b_pair, i_pair = attend_queries(
                b_s, b_pair, i_pair, p_lse, p_pair, q_s, k_t, v_w, full, done, step, i_first, i_first_pair, n_pairs,
                scale_log2, zero_s, zero_o, s_layout, o_layout, H, N_SELECT, BLOCK_M, BLOCK_N, STAGES, False,
            )  # fmt: skip
        attend_queries(
            b_s, b_pair, i_pair, p_lse, p_pair, q_s, k_t, v_w, full, done, last, i_first, i_first_pair, n_pairs,
            scale_log2, zero_s, zero_o, s_layout, o_layout, H, N_SELECT, BLOCK_M, BLOCK_N, STAGES, True,
        )  # fmt: skip


@gluon.jit(do_not_specialize=COUNTS)
def hopper_block_kernel(
    q, k, v, partial, p_lse, p_pair, p_order, p_item, p_low, p_high, p_last_segment, p_first_token, p_end_token,
    scale_log2, n_items, n_blocks, n_keys, n_groups, row_0, query_0, n_queries,
    H: gl.constexpr, N_SELECT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SEGMENT: gl.constexpr, VARLEN: gl.constexpr, STAGES: gl.constexpr, p_start=None, max_start=None,
):  # fmt: skip
    """A segment of one block's queries, as in `block_kernel`: `partial [pairs, h, D]` by descriptor, its base-2 LSEs by
    pointer."""
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_s = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_M, D], tile_layout)
    kv_s = gl.allocate_shared_memory(q.dtype, [2, 1, BLOCK_N, 1, D], k.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()

    _, p_pair, n_pairs, i_row, i_key, i_end, i_first, i_first_pair = segment_of(
        p_pair, p_order, p_item, p_low, p_high, p_last_segment, p_first_token, p_end_token, p_start, max_start,
        n_items, n_blocks, n_keys, n_groups, row_0, query_0, n_queries, N_SELECT, BLOCK_N, SEGMENT, VARLEN,
    )  # fmt: skip
    i_b = i_row // n_groups
    i_g = i_row % n_groups
    gl.warp_specialize(
        [
            (stream_queries, (p_lse, p_pair, q_s, kv_s, kv_full, full, done, i_key, i_end, i_first, i_first_pair,
                              n_pairs, scale_log2, H, N_SELECT, D, BLOCK_M, BLOCK_N, STAGES, VARLEN)),
            (gather_queries, (q, k, v, p_pair, q_s, kv_s, kv_full, full, free, i_b, i_g, i_key, n_pairs,
                              H, N_SELECT, D, BLOCK_M, STAGES)),
            (scatter_rows, (partial, p_pair, q_s, done, free, i_first_pair, n_pairs, H, D, BLOCK_M, STAGES)),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip


def block_forward(
    shapes: Shapes, n_queries: int, chunk: Chunk, scale: float, segment: int, tile: BlockForwardTile
) -> BlockLaunch:
    """The launch of `hopper_block_kernel` for a chunk, with partials of `n_queries`."""
    partial = "partial", n_queries * shapes.n_select
    rows = {"q": shapes.q}
    return launch_blocks(hopper_block_kernel, shapes, chunk, segment, tile, rows, partial, scale_log2=scale * LOG2_E)
