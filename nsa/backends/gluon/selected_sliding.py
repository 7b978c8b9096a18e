"""Forward of the selected and the sliding branch of the same queries at once, for Hopper.

The results of `common_kernel` in `triton/selected/common.py` and of the sliding branch in `forward.py`. What the other
blocks of a selection give comes as partial outputs, whose sum is bound by memory; the sliding window and the blocks
that a run of queries has in common are dense tiles, bound by matmuls. A CTA owns 128 rows, a run of queries. One warp
loads queries, keys and values, another the partial outputs, each into buffers of its own, and two warpgroups own 64
rows each:

    the common blocks; the weights of the partial outputs from their LSEs
    for each tile of keys of the window:
        issue S = Q K^T, add one slot of partial outputs, wait for S, softmax
        issue O += P V,  add one slot of partial outputs, wait for O

Grid: persistent, at most one CTA per SM.
"""

from __future__ import annotations

from typing import Any

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
from nsa.backends.gluon.descriptors import describe_keys, describe_rows, descriptor
from nsa.backends.gluon.forward import edge_tile, lane_sums, masked
from nsa.backends.gluon.tiles import FusedTile
from nsa.backends.triton.launch import Launch, Layout, new_layout
from nsa.backends.triton.primitives import COUNTS, FLOOR, LN_2, LOG2_E, visible_keys
from nsa.backends.triton.selected.common import RUN_FIELDS
from nsa.backends.triton.selected.forward import BlockForward, SelectedForwardTile
from nsa.backends.triton.selected.index import Chunk, Shapes, Tables
from nsa.backends.triton.tiles import sm_count


@gluon.jit
def locate_run(tile, n_tiles, row_0, query_0, n_groups, RUN: gl.constexpr):
    """Row within the chunk, batch entry, group and first query of a tile."""
    i_local = tile // n_tiles
    i_row = row_0 + i_local
    return i_local, i_row // n_groups, i_row % n_groups, query_0 + tile % n_tiles * RUN


@gluon.jit
def window_tiles(i_t, n_tokens, RUN: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """First key and number of tiles that the run from `i_t` on sees, of which `[n_left, n_full)` need no mask."""
    first_lo, first_hi = visible_keys(i_t, 0, None, None, n_tokens, True, WINDOW, 1, False)
    i_last = gl.minimum(i_t + RUN, n_tokens) - 1
    last_lo, last_hi = visible_keys(i_last, 0, None, None, n_tokens, True, WINDOW, 1, False)
    n = (last_hi - first_lo + BLOCK_N - 1) // BLOCK_N
    n_full = gl.minimum((first_hi - first_lo) // BLOCK_N, n - 1)
    n_left = gl.minimum((last_lo - first_lo + BLOCK_N - 1) // BLOCK_N, n_full)
    return first_lo, n, n_full, n_left


@gluon.jit
def run_field(p_runs, tile, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN: gl.constexpr, FIELD: gl.constexpr):
    """What `split_kernel` wrote of a run; of the last one for tiles past the end."""
    tile = gl.minimum(tile, n_all_tiles - 1)
    i_row = row_0 + tile // n_tiles
    return gl.load(p_runs + (i_row * n_runs + query_0 // RUN + tile % n_tiles) * RUN_FIELDS + FIELD)


@gluon.jit
def load_pair(x, y, i_b, i_n, i_g, x_s, y_s, x_full, x_free, y_full, y_free, step, STAGES: gl.constexpr):
    """Keys and values from `i_n` on, as soon as their buffers are free."""
    slot = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(x_free.index(slot), phase ^ 1)
    mbarrier.expect(x_full.index(slot), x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [i_b, i_n, i_g, 0], x_full.index(slot), x_s.index(slot))
    mbarrier.wait(y_free.index(slot), phase ^ 1)
    mbarrier.expect(y_full.index(slot), y.block_type.nbytes)
    tma.async_copy_global_to_shared(y, [i_b, i_n, i_g, 0], y_full.index(slot), y_s.index(slot))


@gluon.jit
def produce_keys(
    q, k_sel, v_sel, k_win, v_win, p_common, p_runs, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
    n_tokens, n_groups, n_runs, n_tiles, n_all_tiles, row_0, query_0,
    H: gl.constexpr, RUN: gl.constexpr, N_SELECT: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: the queries of a run, the keys and values of its common blocks, then those of its window."""
    step = 0
    phase = 0
    i_tile = gl.program_id(0)
    n_next = run_field(p_runs, i_tile, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 0)
    for tile in range(i_tile, n_all_tiles, gl.num_programs(0)):
        i_local, i_b, i_g, i_t = locate_run(tile, n_tiles, row_0, query_0, n_groups, RUN)
        n_common = n_next
        # Ahead, so that nothing waits for it.
        n_next = run_field(p_runs, tile + gl.num_programs(0), n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 0)
        mbarrier.wait(q_free, phase ^ 1)
        mbarrier.expect(q_full, 2 * q.block_type.nbytes)
        for w in gl.static_range(2):
            tma.async_copy_global_to_shared(q, [i_b, i_t + w * (RUN // 2), i_g * H, 0], q_full, q_s.index(w))
        phase ^= 1
        p_list = p_common + gl.cast((row_0 + i_local) * n_runs + i_t // RUN, gl.int64) * N_SELECT
        for i in range(n_common):
            i_n = gl.load(p_list + i)
            load_pair(k_sel, v_sel, i_b, i_n, i_g, k_s, v_s, k_full, k_free, v_full, v_free, step + i, STAGES)
        # Not counted in the loop: what is carried from tile to tile and does nothing but bound a loop keeps its first
        # value (Triton 3.6 and 3.7 take it for dead, see pull request 9036 there).
        step += n_common
        first, n, n_full, n_left = window_tiles(i_t, n_tokens, RUN, BLOCK_N, WINDOW)
        n_edge = n - n_full + n_left
        for j in range(n):
            i_key = edge_tile(j, n, n_full, n_left)
            if j >= n_edge:
                i_key = n_full - 1 - (j - n_edge)
            i_n = first + i_key * BLOCK_N
            load_pair(k_win, v_win, i_b, i_n, i_g, k_s, v_s, k_full, k_free, v_full, v_free, step + j, STAGES)
        step += n


@gluon.jit
def produce_partials(
    partial, p_runs, partial_s, partial_full, partial_free, n_groups, n_runs, n_tiles, n_all_tiles, row_0, query_0,
    n_queries, RUN: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """One warp: the partial outputs of a run, one slot of all its queries after the other."""
    step = 0
    i_tile = gl.program_id(0)
    n_next = run_field(p_runs, i_tile, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 2)
    for tile in range(i_tile, n_all_tiles, gl.num_programs(0)):
        n_slots = n_next
        n_next = run_field(p_runs, tile + gl.num_programs(0), n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 2)
        i_query = tile // n_tiles * n_queries + tile % n_tiles * RUN
        for i in range(n_slots):
            ring = (step + i) % RING
            mbarrier.wait(partial_free.index(ring), (((step + i) // RING) & 1) ^ 1)
            mbarrier.expect(partial_full.index(ring), 2 * partial.block_type.nbytes)
            for w in gl.static_range(2):
                corner = [i_query + w * (RUN // 2), i, 0, 0]
                slot_s = partial_s.index(ring * 2 + w)
                tma.async_copy_global_to_shared(partial, corner, partial_full.index(ring), slot_s)
        # As in `produce_keys`.
        step += n_slots


@gluon.jit
def add_partial(
    W: gl.constexpr, b_sum, b_w, slot, step, partial_s, partial_full, partial_free, w_layout: gl.constexpr,
    o_layout: gl.constexpr, D: gl.constexpr, BLOCK_S: gl.constexpr, RING: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """`b_sum` with one slot of partial outputs, weighed. MASKED: some rows have none there, whose weight is zero."""
    ring = step % RING
    o_slot = gl.arange(0, BLOCK_S, gl.SliceLayout(0, w_layout))
    b_weight = gl.sum(gl.where((o_slot == slot)[None, :], b_w, 0.0), 1)
    b_weight = gl.convert_layout(b_weight, gl.SliceLayout(1, o_layout))[:, None]
    mbarrier.wait(partial_full.index(ring), (step // RING) & 1)
    b_x = partial_s.index(ring * 2 + W).reshape([64, D]).load(o_layout)
    mbarrier.arrive(partial_free.index(ring), count=1)
    b_x = b_x.to(gl.float32)
    if MASKED:
        b_x = gl.where(b_weight > 0.0, b_x, 0.0)
    return b_sum + b_x * b_weight


@gluon.jit
def softmax_step(b_s, b_m, b_l, b_o, scale_log2, o_layout: gl.constexpr, BLOCK_N: gl.constexpr):
    """Probabilities, and maximum, sums and output rescaled to the new maximum."""
    b_m_new = gl.maximum(b_m, gl.max(b_s, 1) * scale_log2)
    b_e = gl.exp2(b_s * scale_log2 - b_m_new[:, None])
    b_alpha = gl.exp2(b_m - b_m_new)
    b_l = b_l * gl.convert_layout(b_alpha, gl.SliceLayout(1, b_l.type.layout))[:, None] + lane_sums(b_e, BLOCK_N)
    b_o = b_o * gl.convert_layout(b_alpha, gl.SliceLayout(1, o_layout))[:, None]
    return b_e, b_m_new, b_l, b_o


@gluon.jit
def attend_block(
    q_w, b_o, b_m, b_l, step, i_n, b_lo, b_hi, zero, k_s, v_s, k_full, k_free, v_full, v_free, scale_log2,
    s_layout: gl.constexpr, o_layout: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A common block."""
    slot = step % STAGES
    phase = (step // STAGES) & 1
    k_t = k_s.index(slot).reshape([BLOCK_N, D]).permute([1, 0])
    mbarrier.wait(k_full.index(slot), phase)
    b_s = warpgroup_mma(q_w, k_t, zero, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    mbarrier.arrive(k_free.index(slot), count=1)
    b_s = masked(b_s, i_n, b_lo, b_hi, s_layout, BLOCK_N)
    b_e, b_m, b_l, b_o = softmax_step(b_s, b_m, b_l, b_o, scale_log2, o_layout, BLOCK_N)
    b_p = gl.convert_layout(b_e.to(v_s.dtype), gl.DotOperandLayout(0, o_layout, 2))
    mbarrier.wait(v_full.index(slot), phase)
    b_o = warpgroup_mma(b_p, v_s.index(slot).reshape([BLOCK_N, D]), b_o, is_async=True)
    b_o, b_p = warpgroup_mma_wait(0, deps=[b_o, b_p])
    mbarrier.arrive(v_free.index(slot), count=1)
    return b_o, b_m, b_l


@gluon.jit
def attend_window(
    W: gl.constexpr, q_w, b_o, b_m, b_l, b_sum, b_w, done, credit, n_halves, n_all, partial_step,
    step, i_n, b_lo, b_hi, zero, k_s, v_s, k_full, k_free, v_full, v_free, partial_s, partial_full, partial_free,
    scale_log2, s_layout: gl.constexpr, o_layout: gl.constexpr, w_layout: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_S: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """A tile of the window; up to two slots of partial outputs are added to `b_sum` meanwhile, as many as keep their
    number even over the `n_halves` halves of all steps."""
    slot = step % STAGES
    phase = (step // STAGES) & 1
    k_t = k_s.index(slot).reshape([BLOCK_N, D]).permute([1, 0])
    mbarrier.wait(k_full.index(slot), phase)
    b_s = warpgroup_mma(q_w, k_t, zero, use_acc=False, is_async=True)
    credit += n_all
    if credit >= n_halves:
        b_sum = add_partial(
            W, b_sum, b_w, done, partial_step + done, partial_s, partial_full, partial_free, w_layout, o_layout, D,
            BLOCK_S, RING, False,
        )  # fmt: skip
        done += 1
        credit -= n_halves
    b_s = warpgroup_mma_wait(0, deps=[b_s])
    mbarrier.arrive(k_free.index(slot), count=1)
    if MASKED:
        b_s = masked(b_s, i_n, b_lo, b_hi, s_layout, BLOCK_N)
    b_e, b_m, b_l, b_o = softmax_step(b_s, b_m, b_l, b_o, scale_log2, o_layout, BLOCK_N)
    b_p = gl.convert_layout(b_e.to(v_s.dtype), gl.DotOperandLayout(0, o_layout, 2))
    mbarrier.wait(v_full.index(slot), phase)
    b_o = warpgroup_mma(b_p, v_s.index(slot).reshape([BLOCK_N, D]), b_o, is_async=True)
    credit += n_all
    if credit >= n_halves:
        b_sum = add_partial(
            W, b_sum, b_w, done, partial_step + done, partial_s, partial_full, partial_free, w_layout, o_layout, D,
            BLOCK_S, RING, False,
        )  # fmt: skip
        done += 1
        credit -= n_halves
    b_o, b_p = warpgroup_mma_wait(0, deps=[b_o, b_p])
    mbarrier.arrive(v_free.index(slot), count=1)
    return b_o, b_m, b_l, b_sum, done, credit


@gluon.jit
def row_lse(b_m, b_sum):
    """Natural LSE, and the sum with ones where a row saw nothing."""
    m_empty = b_sum == 0.0
    b_sum = gl.where(m_empty, 1.0, b_sum)
    return gl.where(m_empty, float("-inf"), (b_m + gl.log2(b_sum)) * LN_2), b_sum


@gluon.jit
def consume_runs(
    W: gl.constexpr, o_sel, o_win, p_lse_sel, p_lse_win, p_part_lse, p_rest, p_runs, q_s, k_s, v_s, o_s, partial_s,
    q_full, q_free, k_full, k_free, v_full, v_free, partial_full, partial_free, scale_log2,
    n_tokens, n_groups, n_runs, n_tiles, n_all_tiles, row_0, query_0, n_queries,
    H: gl.constexpr, D: gl.constexpr, RUN: gl.constexpr, N_SELECT: gl.constexpr, BLOCK_S: gl.constexpr,
    BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows `[64 W, 64 W + 64)` of every run."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    # Rows as above, so that weights stay where they are.
    w_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_S, 16])
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    w_row: gl.constexpr = gl.SliceLayout(1, w_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    n_heads = n_groups * H
    q_w = q_s.index(W)
    o_w = o_s.index(W)
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    none = lane_sums(zero, BLOCK_N)
    o_m = W * 64 + gl.arange(0, 64, s_row)
    o_r = W * 64 + gl.arange(0, 64, w_row)
    o_slot = gl.arange(0, BLOCK_S, gl.SliceLayout(0, w_layout))[None, :]
    step = 0
    phase = 0
    partial_step = 0
    i_tile = gl.program_id(0)
    next_common = run_field(p_runs, i_tile, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 0)
    next_all = run_field(p_runs, i_tile, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 1)
    next_slots = run_field(p_runs, i_tile, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 2)
    next_own = run_field(p_runs, i_tile, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 3)
    for tile in range(i_tile, n_all_tiles, gl.num_programs(0)):
        i_local, i_b, i_g, i_t = locate_run(tile, n_tiles, row_0, query_0, n_groups, RUN)
        n_common = next_common
        n_all = next_all
        n_slots = next_slots
        i_own = next_own
        following = tile + gl.num_programs(0)
        next_common = run_field(p_runs, following, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 0)
        next_all = run_field(p_runs, following, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 1)
        next_slots = run_field(p_runs, following, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 2)
        next_own = run_field(p_runs, following, n_tiles, n_all_tiles, row_0, query_0, n_runs, RUN, 3)

        # Base 2, -inf where a row has no partial output. Used after the common blocks.
        o_query = gl.minimum(i_t + o_r // H, n_tokens - 1)
        o_rest = ((gl.cast(i_b, gl.int64) * n_tokens + o_query) * n_groups + i_g) * N_SELECT
        o_part = ((i_local * n_queries + o_query - query_0) * (N_SELECT * H) + o_r % H)[:, None] + o_slot * H
        m_slot = (o_slot < N_SELECT) & (o_r >= 0)[:, None]
        b_rest = gl.load(p_rest + o_rest[:, None] + o_slot, mask=m_slot, other=-1)
        b_lse = gl.load(p_part_lse + o_part, mask=m_slot, other=float("-inf"))

        o_t = i_t + o_m // H
        # Rows past the end look like the last query; they are computed and not stored.
        o_seen = gl.minimum(o_t, n_tokens - 1)
        b_lo, b_hi = visible_keys(o_seen, 0, None, None, n_tokens, True, WINDOW, 1, False)
        mbarrier.wait(q_full, phase)
        b_sum = gl.zeros([64, D], gl.float32, o_layout)
        b_m = gl.zeros([64], gl.float32, s_row) + FLOOR
        b_l = none
        for i in range(n_common):
            # Only the last one may hold keys after a query, if it is their own: no other is masked at token 0.
            i_n = gl.where(i == n_common - 1, i_own, 0)
            b_sum, b_m, b_l = attend_block(
                q_w.reshape([64, D]), b_sum, b_m, b_l, step, i_n, o_seen * 0, b_hi, zero,
                k_s, v_s, k_full, k_free, v_full, v_free, scale_log2, s_layout, o_layout, D, BLOCK_N, STAGES,
            )  # fmt: skip
            step += 1

        # From here on with one maximum: the partial outputs are only weighed and added.
        b_lse = gl.where(b_rest >= 0, b_lse, float("-inf"))
        b_m_sel = gl.maximum(b_m, gl.convert_layout(gl.max(b_lse, 1), s_row))
        b_w = gl.exp2(b_lse - gl.convert_layout(b_m_sel, w_row)[:, None])
        b_alpha = gl.exp2(b_m - b_m_sel)
        b_total = gl.convert_layout(gl.sum(b_l, 1), s_row) * b_alpha + gl.convert_layout(gl.sum(b_w, 1), s_row)
        b_sum = b_sum * gl.convert_layout(b_alpha, o_row)[:, None]

        first, n, n_full, n_left = window_tiles(i_t, n_tokens, RUN, BLOCK_N, WINDOW)
        n_edge = n - n_full + n_left
        b_o = gl.zeros([64, D], gl.float32, o_layout)
        b_m = gl.zeros([64], gl.float32, s_row) + FLOOR
        b_l = none
        done = 0
        credit = 0
        for j in range(n_edge):
            i_n = first + edge_tile(j, n, n_full, n_left) * BLOCK_N
            b_o, b_m, b_l, b_sum, done, credit = attend_window(
                W, q_w.reshape([64, D]), b_o, b_m, b_l, b_sum, b_w, done, credit, 2 * n, n_all, partial_step,
                step, i_n, b_lo, b_hi, zero, k_s, v_s, k_full, k_free, v_full, v_free, partial_s, partial_full,
                partial_free, scale_log2, s_layout, o_layout, w_layout, D, BLOCK_N, BLOCK_S, STAGES, RING, True,
            )  # fmt: skip
            step += 1
        for _ in range(n_edge, n):
            b_o, b_m, b_l, b_sum, done, credit = attend_window(
                W, q_w.reshape([64, D]), b_o, b_m, b_l, b_sum, b_w, done, credit, 2 * n, n_all, partial_step,
                step, 0, b_lo, b_hi, zero, k_s, v_s, k_full, k_free, v_full, v_free, partial_s, partial_full,
                partial_free, scale_log2, s_layout, o_layout, w_layout, D, BLOCK_N, BLOCK_S, STAGES, RING, False,
            )  # fmt: skip
            step += 1
        # Slots that only some queries have, and those that were more than two a step.
        for i in range(done, n_slots):
            b_sum = add_partial(
                W, b_sum, b_w, i, partial_step + i, partial_s, partial_full, partial_free, w_layout, o_layout, D,
                BLOCK_S, RING, True,
            )  # fmt: skip
        partial_step += n_slots

        p_row = (gl.cast(i_b, gl.int64) * n_tokens + o_t) * n_heads + i_g * H + o_m % H
        b_lse_win, b_total_win = row_lse(b_m, gl.convert_layout(gl.sum(b_l, 1), s_row))
        b_lse_sel, b_total = row_lse(b_m_sel, b_total)
        gl.store(p_lse_win + p_row, b_lse_win, mask=o_t < n_tokens)
        gl.store(p_lse_sel + p_row, b_lse_sel, mask=o_t < n_tokens)
        b_o = b_o * gl.convert_layout(1.0 / b_total_win, o_row)[:, None]
        b_sum = b_sum * gl.convert_layout(1.0 / b_total, o_row)[:, None]
        # One leaves through the queries' buffer, which is of no more use, the other through one that the run before
        # has left by now.
        tma.store_wait(0)
        barrier()
        q_w.reshape([64, D]).store(b_o.to(o_s.dtype))
        o_w.reshape([64, D]).store(b_sum.to(o_s.dtype))
        fence_async_shared()
        barrier()
        corner = [i_b, i_t + W * (RUN // 2), i_g * H, 0]
        tma.async_copy_shared_to_global(o_win, corner, q_w)
        tma.async_copy_shared_to_global(o_sel, corner, o_w)
        tma.store_wait(1)
        mbarrier.arrive(q_free, count=1)
        phase ^= 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*COUNTS, "n_all_tiles"])
def hopper_selected_sliding_kernel(
    q, k_sel, v_sel, k_win, v_win, partial, o_sel, o_win, p_lse_sel, p_lse_win, p_part_lse, p_common, p_runs, p_rest,
    scale_log2, n_tokens, n_groups, n_runs, n_tiles, n_all_tiles, row_0, query_0, n_queries,
    H: gl.constexpr, D: gl.constexpr, RUN: gl.constexpr, N_SELECT: gl.constexpr, BLOCK_S: gl.constexpr,
    BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Of a chunk. `n_tiles`: runs in a row of it. What is not a pointer or a number is a descriptor."""
    q_s = gl.allocate_shared_memory(q.dtype, [2, 1, RUN // 2, H, D], q.layout)
    o_s = gl.allocate_shared_memory(q.dtype, [2, 1, RUN // 2, H, D], q.layout)
    k_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, BLOCK_N, 1, D], k_sel.layout)
    v_s = gl.allocate_shared_memory(q.dtype, [STAGES, 1, BLOCK_N, 1, D], k_sel.layout)
    partial_s = gl.allocate_shared_memory(q.dtype, [2 * RING, RUN // 2, 1, H, D], partial.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    partial_full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    partial_free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(RING):
        mbarrier.init(partial_full.index(i), count=1)
        mbarrier.init(partial_free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume_runs, (0, o_sel, o_win, p_lse_sel, p_lse_win, p_part_lse, p_rest, p_runs, q_s, k_s, v_s, o_s,
                            partial_s, q_full, q_free, k_full, k_free, v_full, v_free, partial_full, partial_free,
                            scale_log2, n_tokens, n_groups, n_runs, n_tiles, n_all_tiles, row_0, query_0, n_queries,
                            H, D, RUN, N_SELECT, BLOCK_S, BLOCK_N, WINDOW, STAGES, RING)),
            (consume_runs, (1, o_sel, o_win, p_lse_sel, p_lse_win, p_part_lse, p_rest, p_runs, q_s, k_s, v_s, o_s,
                            partial_s, q_full, q_free, k_full, k_free, v_full, v_free, partial_full, partial_free,
                            scale_log2, n_tokens, n_groups, n_runs, n_tiles, n_all_tiles, row_0, query_0, n_queries,
                            H, D, RUN, N_SELECT, BLOCK_S, BLOCK_N, WINDOW, STAGES, RING)),
            (produce_keys, (q, k_sel, v_sel, k_win, v_win, p_common, p_runs, q_s, k_s, v_s,
                            q_full, q_free, k_full, k_free, v_full, v_free,
                            n_tokens, n_groups, n_runs, n_tiles, n_all_tiles, row_0, query_0,
                            H, RUN, N_SELECT, BLOCK_N, WINDOW, STAGES)),
            (produce_partials, (partial, p_runs, partial_s, partial_full, partial_free, n_groups, n_runs, n_tiles,
                                n_all_tiles, row_0, query_0, n_queries, RUN, RING)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


class SelectedSlidingForward(BlockForward):
    """The plan of both branches: chunk by chunk the partial outputs by block, then this kernel."""

    def __init__(
        self, shapes: Shapes, k_win: Layout, v_win: Layout, window: int, scale: float,
        blocks: SelectedForwardTile, tile: FusedTile,
    ) -> None:  # fmt: skip
        q, heads = shapes.q, shapes.heads
        self.window, self.fused = window, tile
        describe_q = describe_rows(q, heads, tile.block_m // 2)
        describe_o = describe_rows(new_layout(q.shape, q.dtype, q.device), heads, tile.block_m // 2)
        assert describe_q is not None, "a tile of rows holds whole queries"
        assert describe_o is not None
        keys = (describe_keys(x, tile.block_n) for x in (shapes.k, shapes.v, k_win, v_win))
        names = ("q", "k_sel", "v_sel", "k_win", "v_win", "o_sel", "o_win")
        self.describe = dict(zip(names, (describe_q, *keys, describe_o, describe_o), strict=True))
        super().__init__(shapes, scale, blocks)
        # Of the largest chunk: what a smaller one leaves of it is read only for rows that are not stored.
        box = (self.split.run // 2, 1, heads, shapes.d_v)
        self.describe["partial"] = descriptor(new_layout(self.partials, q.dtype, q.device), box)

    def merge(self, chunk: Chunk) -> Launch:
        shapes, split, tile = self.shapes, self.split, self.fused
        n_tiles = triton.cdiv(chunk.n_queries, split.run)
        return Launch(
            hopper_selected_sliding_kernel, (min(sm_count(shapes.q.device), n_tiles * chunk.n_rows),),
            scale_log2=self.scale * LOG2_E, n_tokens=shapes.n_tokens, n_groups=shapes.n_groups, n_runs=split.n_runs,
            n_tiles=n_tiles, n_all_tiles=n_tiles * chunk.n_rows, **chunk.where, H=shapes.heads, D=shapes.d_v,
            RUN=split.run, N_SELECT=shapes.n_select, BLOCK_S=max(16, triton.next_power_of_2(shapes.n_select)),
            BLOCK_N=tile.block_n, WINDOW=self.window, STAGES=tile.num_stages, RING=tile.ring,
            num_warps=tile.num_warps, maxnreg=tile.max_registers,
        )  # fmt: skip

    def merged(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, o: Tensor, lse: Tensor, partial: Tensor, *others: Tensor
    ) -> dict[str, Any]:
        """`others`: keys and values of the window, and its output and natural LSE, which are written too."""
        k_win, v_win, o_win, lse_win = others
        described = (q, k, v, k_win, v_win, o, o_win, partial)
        found: dict[str, Any] = {
            name: describe(x) for (name, describe), x in zip(self.describe.items(), described, strict=True)
        }
        return {**found, "p_lse_sel": lse, "p_lse_win": lse_win}
