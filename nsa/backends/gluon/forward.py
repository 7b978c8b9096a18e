"""Forward of attention in which every query sees one contiguous range of keys, for Hopper.

The results of `triton/ranged_forward.py`, on the schedule of FlashAttention-3. A CTA has three partitions: one warp
issues the TMA loads, and two consumer warpgroups own 64 rows each of a tile of 128. A step of a consumer:

    issue S' = Q K'^T     (tile j + 1)
    issue O += P V        (tile j, P in registers)
    wait for S', then its softmax, while O is still being computed
    wait for O, rescale O, P = P'

Grid: persistent, at most one CTA per SM; each takes every n-th tile of rows, the last rows, which see most keys, first.
Tiles with keys that are hidden from some row are masked and come first; at least one is.
"""

from __future__ import annotations

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
from nsa.backends.gluon.descriptors import describe_keys, describe_rows
from nsa.backends.gluon.tiles import ForwardTile
from nsa.backends.triton.launch import Launch, Layout, new_layout, strides
from nsa.backends.triton.primitives import COUNTS, FLOOR, LN_2, LOG2_E, first_position, visible_keys
from nsa.backends.triton.tiles import Visibility, sm_count


@gluon.jit
def key_tiles(
    tile, p_lo, p_hi, p_start, n_queries, n_keys, n_groups, n_tiles, n_bg, H: gl.constexpr, BLOCK_N: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Batch and group, first row, first key and number of tiles of keys that a tile of rows reads, of which
    `[n_left, n_full)` need no mask; and where the first query lies."""
    i_bg = tile % n_bg
    i_row = (n_tiles - 1 - tile // n_bg) * 128
    i_last = gl.minimum(i_row + 128, n_queries * H) - 1
    start = first_position(p_start, i_bg // n_groups)
    first_lo, first_hi = visible_keys(i_row // H, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)
    last_lo, last_hi = visible_keys(i_last // H, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)
    # Rows that see nothing read one tile, all of it masked.
    n = gl.maximum((last_hi - first_lo + BLOCK_N - 1) // BLOCK_N, 1)
    n_full = gl.minimum(gl.maximum(first_hi - first_lo, 0) // BLOCK_N, n - 1)
    n_left = gl.minimum((last_lo - first_lo + BLOCK_N - 1) // BLOCK_N, n_full)
    return i_bg, i_row, first_lo, n, n_full, n_left, start


@gluon.jit
def edge_tile(j, n, n_full, n_left):
    """Number of the masked tile that comes `j`-th: from the last down to `n_full`, then the `n_left` first ones."""
    return n - 1 - j - gl.where(j >= n - n_full, n_full - n_left, 0)


@gluon.jit
def produce(
    q, k, v, p_lo, p_hi, p_start, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
    n_queries, n_keys, n_groups, n_tiles, n_bg,
    H: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, VARLEN: gl.constexpr, DESC_Q: gl.constexpr,
):  # fmt: skip
    """One warp: requests the queries of a tile, its keys and its values as soon as their buffers are free."""
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), n_tiles * n_bg, gl.num_programs(0)):
        i_bg, i_row, first, n, n_full, n_left, _ = key_tiles(
            tile, p_lo, p_hi, p_start, n_queries, n_keys, n_groups, n_tiles, n_bg, H, BLOCK_N,
            SLIDING, SPAN, STRIDE, VARLEN,
        )  # fmt: skip
        i_b = i_bg // n_groups
        i_g = i_bg % n_groups
        if DESC_Q:
            mbarrier.wait(q_free, (turn & 1) ^ 1)
            mbarrier.expect(q_full, 2 * q.block_type.nbytes)
            for w in gl.static_range(2):
                tma.async_copy_global_to_shared(q, [i_b, i_row // H + w * (64 // H), i_g * H, 0], q_full, q_s.index(w))
            turn += 1
        n_edge = n - n_full + n_left
        for j in range(n):
            i_tile = edge_tile(j, n, n_full, n_left)
            if j >= n_edge:
                i_tile = n_full - 1 - (j - n_edge)
            i_n = first + i_tile * BLOCK_N
            slot = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_free.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), k.block_type.nbytes)
            tma.async_copy_global_to_shared(k, [i_b, i_n, i_g, 0], k_full.index(slot), k_s.index(slot))
            mbarrier.wait(v_free.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), v.block_type.nbytes)
            tma.async_copy_global_to_shared(v, [i_b, i_n, i_g, 0], v_full.index(slot), v_s.index(slot))
            step += 1


@gluon.jit
def lane_sums(p, BLOCK_N: gl.constexpr):
    """`[64, 4]`: what each of the four lanes of a row holds of its sum. They are added up after the last tile."""
    return gl.sum(gl.sum(p.reshape([64, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def keep_order(x):
    """`x`, which is not negative, unchanged. ptxas 12.8 moves a wait for a matmul above all arithmetic that does not
    depend on it, which ends the overlap, but not above a store to shared memory (here one that is never executed)."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.u32 a, 0; setp.lt.f32 p, $1, 0f00000000;"
        " @p st.volatile.shared.f32 [a], $1; mov.b32 $0, $1; }",
        "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def masked(b_s, i_n, b_lo, b_hi, s_layout: gl.constexpr, BLOCK_N: gl.constexpr):
    """Scores with -inf where a row does not see the key."""
    o_n = i_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    return gl.where((o_n[None, :] >= b_lo[:, None]) & (o_n[None, :] < b_hi[:, None]), b_s, float("-inf"))


@gluon.jit
def attend(
    q_w, b_p, b_o, b_m, b_l, step, i_n, b_lo, b_hi, zero, k_s, v_s, k_full, k_free, v_full, v_free, scale_log2,
    s_layout: gl.constexpr, o_layout: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """One step: `b_p` belongs to tile `step`, whose values are multiplied here; tile `step + 1` gives the next one."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    v_slot = step % STAGES
    slot = (step + 1) % STAGES
    k_t = k_s.index(slot).reshape([BLOCK_N, D]).permute([1, 0])
    mbarrier.wait(k_full.index(slot), ((step + 1) // STAGES) & 1)
    b_s = warpgroup_mma(q_w, k_t, zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_slot), (step // STAGES) & 1)
    b_o = warpgroup_mma(b_p, v_s.index(v_slot).reshape([BLOCK_N, D]), b_o, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=[b_s])
    mbarrier.arrive(k_free.index(slot), count=1)
    if MASKED:
        b_s = masked(b_s, i_n, b_lo, b_hi, s_layout, BLOCK_N)
    b_m_new = gl.maximum(b_m, gl.max(b_s, 1) * scale_log2)
    b_e = gl.exp2(b_s * scale_log2 - b_m_new[:, None])
    b_alpha = gl.exp2(b_m - b_m_new)
    b_l = b_l * gl.convert_layout(b_alpha, gl.SliceLayout(1, b_l.type.layout))[:, None] + lane_sums(b_e, BLOCK_N)
    b_l = keep_order(b_l)
    # `b_p` is an operand of the matmul in flight: ptxas may reuse its registers unless the wait depends on it.
    b_o, b_p = warpgroup_mma_wait(0, deps=[b_o, b_p])
    mbarrier.arrive(v_free.index(v_slot), count=1)
    b_o = b_o * gl.convert_layout(b_alpha, gl.SliceLayout(1, o_layout))[:, None]
    b_p = gl.convert_layout(b_e.to(v_s.dtype), p_layout)
    return b_p, b_o, b_m_new, b_l


@gluon.jit
def consume(
    W: gl.constexpr, q, o, p_lse, p_lo, p_hi, p_start, q_s, k_s, v_s, o_s,
    q_full, q_free, k_full, k_free, v_full, v_free, scale_log2,
    n_queries, n_keys, n_groups, n_tiles, n_bg, stride_qb, stride_qt, stride_qh,
    H: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, VARLEN: gl.constexpr, DESC_Q: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows `[64 W, 64 W + 64)` of every tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    # Sixteen bytes per thread, whole rows by neighboring threads.
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    s_row: gl.constexpr = gl.SliceLayout(1, s_layout)
    copy_row: gl.constexpr = gl.SliceLayout(1, copy_layout)
    n_heads = n_groups * H
    q_w = q_s.index(W).reshape([64, D])
    o_w = o_s.index(W)
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    o_m = W * 64 + gl.arange(0, 64, s_row)
    o_d = gl.arange(0, D, gl.SliceLayout(0, copy_layout))
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), n_tiles * n_bg, gl.num_programs(0)):
        i_bg, i_row, first, n, n_full, n_left, start = key_tiles(
            tile, p_lo, p_hi, p_start, n_queries, n_keys, n_groups, n_tiles, n_bg, H, BLOCK_N,
            SLIDING, SPAN, STRIDE, VARLEN,
        )  # fmt: skip
        i_b = gl.cast(i_bg // n_groups, gl.int64)
        i_g = i_bg % n_groups
        o_t = (i_row + o_m) // H
        # Rows past the end look like the last query; they are computed and not stored.
        o_seen = gl.minimum(o_t, n_queries - 1)
        b_lo, b_hi = visible_keys(o_seen, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)
        o_r = i_row + W * 64 + gl.arange(0, 64, copy_row)
        if DESC_Q:
            mbarrier.wait(q_full, turn & 1)
        else:
            o_q = gl.minimum(o_r // H, n_queries - 1).to(gl.int64) * stride_qt + (i_g * H + o_r % H) * stride_qh
            q_w.store(gl.load(q + i_b * stride_qb + o_q[:, None] + o_d[None, :]))
            fence_async_shared()
            barrier()

        # The first tile of keys: scores and softmax alone.
        slot = step % STAGES
        i_n = first + (n - 1) * BLOCK_N
        mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
        k_t = k_s.index(slot).reshape([BLOCK_N, D]).permute([1, 0])
        b_s = warpgroup_mma(q_w, k_t, zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        mbarrier.arrive(k_free.index(slot), count=1)
        b_s = masked(b_s, i_n, b_lo, b_hi, s_layout, BLOCK_N)
        b_m = gl.maximum(gl.max(b_s, 1) * scale_log2, FLOOR)
        b_e = gl.exp2(b_s * scale_log2 - b_m[:, None])
        b_l = lane_sums(b_e, BLOCK_N)
        b_p = gl.convert_layout(b_e.to(v_s.dtype), gl.DotOperandLayout(0, o_layout, 2))
        b_o = gl.zeros([64, D], gl.float32, o_layout)

        n_edge = n - n_full + n_left
        for j in range(1, n_edge):
            i_n = first + edge_tile(j, n, n_full, n_left) * BLOCK_N
            b_p, b_o, b_m, b_l = attend(
                q_w, b_p, b_o, b_m, b_l, step, i_n, b_lo, b_hi, zero, k_s, v_s, k_full, k_free, v_full, v_free,
                scale_log2, s_layout, o_layout, D, BLOCK_N, STAGES, True,
            )  # fmt: skip
            step += 1
        for _ in range(n_edge, n):
            b_p, b_o, b_m, b_l = attend(
                q_w, b_p, b_o, b_m, b_l, step, 0, b_lo, b_hi, zero, k_s, v_s, k_full, k_free, v_full, v_free,
                scale_log2, s_layout, o_layout, D, BLOCK_N, STAGES, False,
            )  # fmt: skip
            step += 1

        # The last tile's values.
        if DESC_Q:
            mbarrier.arrive(q_free, count=1)
            turn += 1
        slot = step % STAGES
        mbarrier.wait(v_full.index(slot), (step // STAGES) & 1)
        b_o = warpgroup_mma(b_p, v_s.index(slot).reshape([BLOCK_N, D]), b_o, is_async=True)
        b_sum = gl.convert_layout(gl.sum(b_l, 1), s_row)
        m_empty = b_sum == 0.0
        b_sum = gl.where(m_empty, 1.0, b_sum)
        b_lse = gl.where(m_empty, float("-inf"), (b_m + gl.log2(b_sum)) * LN_2)
        p_row = p_lse + (i_b * n_queries + o_t) * n_heads + i_g * H + (i_row + o_m) % H
        gl.store(p_row, b_lse, mask=o_t < n_queries)
        b_o, b_p = warpgroup_mma_wait(0, deps=[b_o, b_p])
        mbarrier.arrive(v_free.index(slot), count=1)
        step += 1
        b_o = b_o * gl.convert_layout(1.0 / b_sum, gl.SliceLayout(1, o_layout))[:, None]
        if DESC_Q:
            # The tile before has left the buffer.
            tma.store_wait(0)
            barrier()
            o_w.reshape([64, D]).store(b_o.to(o_s.dtype))
            fence_async_shared()
            barrier()
            tma.async_copy_shared_to_global(o, [i_bg // n_groups, i_row // H + W * (64 // H), i_g * H, 0], o_w)
        else:
            barrier()
            o_w.reshape([64, D]).store(b_o.to(o_s.dtype))
            barrier()
            o_o = ((i_b * n_queries + o_r // H) * n_heads + i_g * H + o_r % H) * D
            m_o = (o_r // H < n_queries)[:, None]
            gl.store(o + o_o[:, None] + o_d[None, :], o_w.reshape([64, D]).load(copy_layout), mask=m_o)
    if DESC_Q:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=COUNTS)
def hopper_forward_kernel(
    q, k, v, o, p_lse, p_lo, p_hi, scale_log2, n_queries, n_keys, n_groups, n_bg, stride_qb, stride_qt, stride_qh,
    H: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, VARLEN: gl.constexpr, DESC_Q: gl.constexpr,
    p_start=None,
):  # fmt: skip
    """`q` and `o` come by descriptor (DESC_Q) or by pointer, `k` and `v` by descriptor."""
    # A warpgroup's rows by descriptor: boxes of whole queries.
    QUERIES: gl.constexpr = 64 // H if DESC_Q else 64
    HEADS: gl.constexpr = H if DESC_Q else 1
    q_s = gl.allocate_shared_memory(k.dtype, [2, 1, QUERIES, HEADS, D], k.layout)
    o_s = gl.allocate_shared_memory(k.dtype, [2, 1, QUERIES, HEADS, D], k.layout)
    k_s = gl.allocate_shared_memory(k.dtype, [STAGES, 1, BLOCK_N, 1, D], k.layout)
    v_s = gl.allocate_shared_memory(k.dtype, [STAGES, 1, BLOCK_N, 1, D], k.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    n_tiles = (n_queries * H + 127) // 128
    gl.warp_specialize(
        [
            (consume, (0, q, o, p_lse, p_lo, p_hi, p_start, q_s, k_s, v_s, o_s,
                       q_full, q_free, k_full, k_free, v_full, v_free, scale_log2,
                       n_queries, n_keys, n_groups, n_tiles, n_bg, stride_qb, stride_qt, stride_qh,
                       H, D, BLOCK_N, STAGES, SLIDING, SPAN, STRIDE, VARLEN, DESC_Q)),
            (consume, (1, q, o, p_lse, p_lo, p_hi, p_start, q_s, k_s, v_s, o_s,
                       q_full, q_free, k_full, k_free, v_full, v_free, scale_log2,
                       n_queries, n_keys, n_groups, n_tiles, n_bg, stride_qb, stride_qt, stride_qh,
                       H, D, BLOCK_N, STAGES, SLIDING, SPAN, STRIDE, VARLEN, DESC_Q)),
            (produce, (q, k, v, p_lo, p_hi, p_start, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
                       n_queries, n_keys, n_groups, n_tiles, n_bg,
                       H, BLOCK_N, STAGES, SLIDING, SPAN, STRIDE, VARLEN, DESC_Q)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


class ForwardPlan:
    """What shapes decide about a forward pass; called as `triton.ranged_forward.Plan` is."""

    __slots__ = ("describe_k", "describe_o", "describe_q", "describe_v", "launch", "lse_shape", "o_shape")

    def __init__(
        self, q: Layout, k: Layout, v: Layout, visibility: Visibility, scale: float, tile: ForwardTile
    ) -> None:
        assert scale > 0, "the running maximum is taken before the scale is applied"
        batch, n_queries, n_heads, d = q.shape
        _, n_keys, n_groups, _ = k.shape
        heads = n_heads // n_groups
        self.o_shape = (batch, n_queries, n_heads, d)
        self.lse_shape = (batch, n_queries, n_heads)
        self.describe_q = describe_rows(q, heads, 64)
        self.describe_o = describe_rows(new_layout(self.o_shape, q.dtype, q.device), heads, 64)
        if self.describe_q is None:
            self.describe_o = None
        self.describe_k, self.describe_v = describe_keys(k, tile.block_n), describe_keys(v, tile.block_n)
        n_bg = batch * n_groups
        self.launch = Launch(
            hopper_forward_kernel,
            (min(sm_count(q.device), triton.cdiv(n_queries * heads, tile.block_m) * n_bg),),
            scale_log2=scale * LOG2_E,
            n_queries=n_queries,
            n_keys=n_keys,
            n_groups=n_groups,
            n_bg=n_bg,
            **strides(q_bth=q),
            H=heads,
            D=d,
            BLOCK_N=tile.block_n,
            STAGES=tile.num_stages,
            **visibility.constants,
            **visibility.absent("p_lo", "p_hi"),
            DESC_Q=self.describe_q is not None,
            num_warps=tile.num_warps,
            maxnreg=tile.max_registers,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, **tables: Tensor) -> None:
        """Writes `o` and natural `lse`, contiguous. `tables`: those of `Visibility.query_tables`."""
        self.launch(
            q=q if self.describe_q is None else self.describe_q(q),
            k=self.describe_k(k),
            v=self.describe_v(v),
            o=o if self.describe_o is None else self.describe_o(o),
            p_lse=lse,
            **tables,
        )
