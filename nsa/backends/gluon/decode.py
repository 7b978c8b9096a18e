"""Split-KV attention of a decode step of several tokens over the compressed cache, for Hopper.

The results of `triton/decode/compressed.py`. The grid stays on the SMs, two CTAs each; a CTA takes every n-th split.
Keys and values come by TMA into a ring of tiles that is requested ahead over the ends of splits, so that a CTA reads
memory also while it writes a split's partials and starts the next one. Which keys a split has depends neither on the
grid nor on the batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
from nsa.backends.gluon.descriptors import describe_keys
from nsa.backends.gluon.tiles import StepTile
from nsa.backends.triton.decode.common import NONE_SEEN, TO_WHOLE, position_of, power_of_2
from nsa.backends.triton.decode.compressed import overlap
from nsa.backends.triton.launch import Launch, Layout
from nsa.backends.triton.primitives import FLOOR
from nsa.backends.triton.selection import complete_blocks
from nsa.backends.triton.tiles import sm_count


@gluon.jit
def tiles_of_split(
    split, start, max_len, T: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    BLOCK_N: gl.constexpr, SPLIT_TILES: gl.constexpr, N_SPLITS: gl.constexpr,
):  # fmt: skip
    """Batch row and group of a split, its first tile and the one after its last, and the keys that the row sees."""
    i_b = split // (G * N_SPLITS)
    n_seen = complete_blocks(position_of(start, i_b, T - 1, max_len - 1), BLOCK, STRIDE)
    first = split // G % N_SPLITS * SPLIT_TILES
    last = gl.minimum(first + SPLIT_TILES, (n_seen + BLOCK_N - 1) // BLOCK_N)
    return i_b, split % G, first, last, n_seen


@gluon.jit
def request_next(
    k, v, k_s, v_s, full, slot, split, tile, last, start, max_len, n_splits,
    T: gl.constexpr, G: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT_TILES: gl.constexpr, N_SPLITS: gl.constexpr,
):  # fmt: skip
    """Asks for the tile after `tile` of `split`, which ends at `last`; returns these three for it."""
    tile += 1
    while (tile >= last) & (split < n_splits):
        split += gl.num_programs(0)
        _, _, tile, last, _ = tiles_of_split(
            gl.minimum(split, n_splits - 1), start, max_len, T, G, BLOCK, STRIDE, BLOCK_N, SPLIT_TILES, N_SPLITS
        )
    if split < n_splits:
        corner = [split // (G * N_SPLITS), tile * BLOCK_N, split % G, 0]
        mbarrier.expect(full.index(slot), 2 * k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, corner, full.index(slot), k_s.index(slot))
        tma.async_copy_global_to_shared(v, corner, full.index(slot), v_s.index(slot))
    return split, tile, last


@gluon.jit
def clear_unseen(x_s, m_seen, layout: gl.constexpr):
    """What is multiplied by a probability of 0 must be finite, and beyond a row's end anything may lie."""
    b_x = gl.where(m_seen, x_s.load(layout), 0.0).to(x_s.dtype)
    barrier()
    x_s.store(b_x)
    fence_async_shared()
    barrier()


@gluon.jit
def pooled(
    b_p, o_n, C: gl.constexpr, R: gl.constexpr, OVERLAP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """`[BLOCK_M, BLOCK_N / R]`: what the keys of each selection block give to the `C`-th one from there."""
    b_u = b_p * overlap(o_n % R, C, R, OVERLAP)[None, :]
    return gl.convert_layout(gl.sum(b_u.reshape([BLOCK_M, BLOCK_N // R, R]), 2), layout)


@gluon.jit(do_not_specialize=["n_splits"])
def hopper_compressed_step_kernel(
    q, k, v, start, pool, carry, tile_max, partial_o, partial_m, partial_l, arrivals, n_splits, max_len, scale_log2,
    stride_qb, stride_qt, stride_qh,
    T: gl.constexpr, G: gl.constexpr, H: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, STRIDE: gl.constexpr,
    R: gl.constexpr, OVERLAP: gl.constexpr, REACH: gl.constexpr, CARRY: gl.constexpr, SLOTS: gl.constexpr,
    N_TILES: gl.constexpr, SPLIT_TILES: gl.constexpr, N_SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`k` and `v` come by descriptor."""
    ROWS: gl.constexpr = T * H
    BLOCK_J: gl.constexpr = BLOCK_N // R
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    j_layout: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    v_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    k_s = gl.allocate_shared_memory(k.dtype, [STAGES, 1, BLOCK_N, 1, D], k.layout)
    v_s = gl.allocate_shared_memory(k.dtype, [STAGES, 1, BLOCK_N, 1, D], k.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    barrier()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
    o_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    o_q = gl.arange(0, BLOCK_M, gl.SliceLayout(1, q_layout))
    o_qd = gl.arange(0, D, gl.SliceLayout(0, q_layout))
    o_o = gl.arange(0, BLOCK_M, gl.SliceLayout(1, o_layout))
    o_d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    o_r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, j_layout))
    o_j = gl.arange(0, BLOCK_J, gl.SliceLayout(0, j_layout))
    o_key = gl.arange(0, BLOCK_N, gl.SliceLayout(1, v_layout))
    o_token = gl.minimum(o_m, ROWS - 1) // H
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)

    split = gl.program_id(0)
    _, _, tile, last, _ = tiles_of_split(split, start, max_len, T, G, BLOCK, STRIDE, BLOCK_N, SPLIT_TILES, N_SPLITS)
    next_split = split
    next_tile = tile - 1
    next_last = last
    for i in gl.static_range(STAGES):
        next_split, next_tile, next_last = request_next(
            k, v, k_s, v_s, full, i, next_split, next_tile, next_last, start, max_len, n_splits, T, G, BLOCK, STRIDE,
            BLOCK_N, SPLIT_TILES, N_SPLITS,
        )  # fmt: skip
    step = 0
    for split in range(gl.program_id(0), n_splits, gl.num_programs(0)):
        i_b, i_g, first, last, n_seen = tiles_of_split(
            split, start, max_len, T, G, BLOCK, STRIDE, BLOCK_N, SPLIT_TILES, N_SPLITS
        )
        i_bg = i_b * G + i_g
        i_row = gl.cast(i_bg, gl.int64) * ROWS
        i_part = (gl.cast(i_bg, gl.int64) * SLOTS + split // G % N_SPLITS) * ROWS
        b_m = gl.full([BLOCK_M], NONE_SEEN, gl.float32, gl.SliceLayout(1, s_layout))
        b_l = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, s_layout))
        if first < last:
            o_seen = complete_blocks(position_of(start, i_b, o_token, max_len - 1), BLOCK, STRIDE)
            o_qrow = o_q // H * stride_qt + (i_g * H + o_q % H) * stride_qh
            p_q = q + gl.cast(i_b, gl.int64) * stride_qb + o_qrow[:, None] + o_qd[None, :]
            b_q = gl.load(p_q, mask=(o_q < ROWS)[:, None], other=0.0)
            b_o = gl.zeros([BLOCK_M, D], gl.float32, o_layout)
            for tile in range(first, last):
                slot = step % STAGES
                mbarrier.wait(full.index(slot), (step // STAGES) & 1)
                k_t = k_s.index(slot).reshape([BLOCK_N, D])
                v_t = v_s.index(slot).reshape([BLOCK_N, D])
                if (tile + 1) * BLOCK_N > n_seen:
                    m_seen = (tile * BLOCK_N + o_key < n_seen)[:, None]
                    clear_unseen(k_t, m_seen, v_layout)
                    clear_unseen(v_t, m_seen, v_layout)
                b_s = warpgroup_mma(b_q, k_t.permute([1, 0]), zero, use_acc=False, is_async=True)
                b_s = warpgroup_mma_wait(0, deps=[b_s])
                o_i = tile * BLOCK_N + o_n
                b_s = gl.where(o_i[None, :] < o_seen[:, None], b_s * scale_log2, FLOOR)
                b_whole = (b_s + TO_WHOLE) - TO_WHOLE
                b_m_new = gl.maximum(b_m, gl.max(b_whole, 1))
                b_p = gl.exp2(b_s - b_whole) * power_of_2(b_whole - b_m_new[:, None])
                b_alpha = power_of_2(b_m - b_m_new)
                b_m = b_m_new
                b_l = b_l * b_alpha + gl.sum(b_p, 1)
                b_o = b_o * gl.convert_layout(b_alpha, gl.SliceLayout(1, o_layout))[:, None]
                b_pd = gl.convert_layout(b_p.to(v_s.dtype), p_layout)
                b_o = warpgroup_mma(b_pd, v_t, b_o, is_async=True)
                b_pool = pooled(b_p, o_n, 0, R, OVERLAP, BLOCK_M, BLOCK_N, j_layout)
                p_pool = pool + ((i_row + o_r) * N_TILES + tile)[:, None] * BLOCK_J + o_j[None, :]
                m_r = (o_r < ROWS)[:, None]
                for c in gl.static_range(1, REACH + 1):
                    b_c = pooled(b_p, o_n, c, R, OVERLAP, BLOCK_M, BLOCK_N, j_layout)
                    p_carry = carry + (((i_row + o_r) * REACH + c - 1) * N_TILES + tile)[:, None] * CARRY
                    p_carry += (o_j - (BLOCK_J - c))[None, :]
                    gl.store(p_carry, b_c, mask=m_r & (o_j >= BLOCK_J - c)[None, :])
                    o_from = ((o_j + BLOCK_J - c) % BLOCK_J)[None, :] + (o_r * 0)[:, None]
                    b_pool += gl.where((o_j >= c)[None, :], gl.gather(b_c, o_from, 1), 0.0)
                # What the selection reads back stays in the L2 cache.
                gl.store(p_pool, b_pool, mask=m_r, eviction_policy="evict_last")
                p_max = tile_max + (i_row + o_m) * N_TILES + tile
                gl.store(p_max, b_m, mask=o_m < ROWS, eviction_policy="evict_last")
                b_o, b_pd = warpgroup_mma_wait(0, deps=[b_o, b_pd])
                # Every warp is done with the tile.
                barrier()
                next_split, next_tile, next_last = request_next(
                    k, v, k_s, v_s, full, slot, next_split, next_tile, next_last, start, max_len, n_splits, T, G,
                    BLOCK, STRIDE, BLOCK_N, SPLIT_TILES, N_SPLITS,
                )  # fmt: skip
                step += 1
            p_o = partial_o + (i_part + o_o)[:, None] * D + o_d[None, :]
            gl.store(p_o, b_o, mask=(o_o < ROWS)[:, None])
        gl.store(partial_m + i_part + o_m, b_m, mask=o_m < ROWS)
        gl.store(partial_l + i_part + o_m, b_l, mask=o_m < ROWS)
        barrier()
        gl.atomic_add(arrivals + i_bg * 3, 1, sem="release")


class CompressedStep:
    """Called as the `Launch` of Triton's kernel is."""

    __slots__ = ("describe_k", "describe_v", "launch")

    def __init__(self, k: Layout, v: Layout, tile: StepTile, n_splits: int, bound: dict[str, Any]) -> None:
        """`n_splits`: of all rows and groups. `bound`: the kernel's arguments, but for those that the tile decides."""
        self.describe_k, self.describe_v = describe_keys(k, tile.block_n), describe_keys(v, tile.block_n)
        self.launch = Launch(
            hopper_compressed_step_kernel,
            (min(n_splits, tile.ctas_per_sm * sm_count(k.device)),),
            n_splits=n_splits,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            maxnreg=tile.max_registers,
            **bound,
        )

    def __call__(self, k: Tensor, v: Tensor, counts: Tensor | None = None, **tensors: Tensor) -> None:
        """`counts` is not needed: in a contiguous cache, what lies past a row's end is zeros."""
        del counts
        self.launch(k=self.describe_k(k), v=self.describe_v(v), **tensors)
