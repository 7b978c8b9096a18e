"""The gradient of queries from `dS^T`, which the kernel of `dk` and `dv` kept in half precision: one matmul, not three.

    dQ[r] = scale * sum_n dS[r, n] K[n]

`dS^T [B * G, keys, rows]` is larger than all inputs together, so a backward pass goes in chunks: `hopper_dkv_kernel`
over a part of the rows, or of the groups, and then `hopper_dq_kernel` over the same, through one buffer of bounded size.
In the sliding branch, where a tile of keys is seen by few rows, a tile's first column is the first row that sees it.

Reading `dS^T` from memory bounds `hopper_dq_kernel`. A CTA has three partitions: one warp issues the TMA loads, and two
consumer warpgroups own half of a tile of rows each. Grid: persistent, one CTA per SM, the last rows, which see most
keys, first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

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
from nsa.backends.gluon.backward import KeyLaunch, Part, describe_ds
from nsa.backends.gluon.descriptors import describe_keys, describe_rows
from nsa.backends.gluon.tiles import KeyTile, QueryTile
from nsa.backends.triton.launch import Launch, Layout, new_layout
from nsa.backends.triton.partials import sum_partials
from nsa.backends.triton.primitives import COUNTS, first_position, seeing_queries, visible_keys
from nsa.backends.triton.tiles import Visibility, sm_count
from nsa.sequences import Ranges


@gluon.jit
def row_tile(
    tile, p_lo, p_hi, p_start, n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, row_0, H: gl.constexpr,
    ROWS: gl.constexpr, SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Batch entry and group, in this launch and of all, and first row; first key and number of tiles of 64 keys; and
    where the first query lies."""
    i_local = tile % n_bg
    i_bg = bg_0 + i_local
    i_row = row_0 + (n_tiles - 1 - tile // n_bg) * ROWS
    i_last = gl.minimum(i_row + ROWS, n_queries * H) - 1
    start = first_position(p_start, i_bg // n_groups)
    first_lo, _ = visible_keys(i_row // H, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, PACKED)
    _, last_hi = visible_keys(i_last // H, start, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, PACKED)
    i_key = first_lo // 64 * 64
    n = gl.where(last_hi > first_lo, (last_hi - i_key + 63) // 64, 0)
    return i_local, i_bg, i_row, i_key, n, start


@gluon.jit
def produce_ds(
    ds, k, dq, p_lo, p_hi, p_first, p_end, p_start, ds_s, k_s, dq_s, full, free, dq_full, dq_free,
    n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, row_0,
    H: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, PACKED: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """One warp: requests `dS^T` and the keys of a step as soon as a buffer is free, and the `dq` to add to."""
    ROWS: gl.constexpr = 4 * BLOCK_M
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), n_tiles * n_bg, gl.num_programs(0)):
        i_local, i_bg, i_row, i_key, n, start = row_tile(
            tile, p_lo, p_hi, p_start, n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, row_0, H, ROWS,
            SLIDING, SPAN, STRIDE, PACKED,
        )  # fmt: skip
        i_b = i_bg // n_groups
        i_g = i_bg % n_groups
        if ACCUMULATE:
            mbarrier.wait(dq_free, (turn & 1) ^ 1)
            mbarrier.expect(dq_full, 4 * dq.block_type.nbytes)
            for w in gl.static_range(4):
                i_t = i_row // H + w * (BLOCK_M // H)
                tma.async_copy_global_to_shared(dq, [i_b, i_t, i_g * H, 0], dq_full, dq_s.index(w))
            turn += 1
        for j in range(n):
            i_n = i_key + j * 64
            i_base = row_0
            if SLIDING:
                # Of the tile of 128 keys that was written at once.
                first_begin, _ = seeing_queries(
                    i_n // 128 * 128, p_start, start, p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, PACKED
                )
                i_base = first_begin * H // ROWS * ROWS
            slot = step % STAGES
            mbarrier.wait(free.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 4 * ds.block_type.nbytes + k.block_type.nbytes)
            tma.async_copy_global_to_shared(k, [i_b, i_n, i_g, 0], full.index(slot), k_s.index(slot))
            for w in gl.static_range(4):
                i_column = i_row - i_base + w * BLOCK_M
                tma.async_copy_global_to_shared(
                    ds, [i_local, i_n, i_column], full.index(slot), ds_s.index(4 * slot + w)
                )
            step += 1


@gluon.jit
def store_dq(b_dq, dq, dq_w, i_b, i_t, i_head, scale, o_layout: gl.constexpr, M: gl.constexpr, D: gl.constexpr,
             ACCUMULATE: gl.constexpr):  # fmt: skip
    """Sends rows of `dq`, added to what the buffer holds with ACCUMULATE."""
    buffer = dq_w.reshape([M, D])
    b_dq = b_dq * scale
    if ACCUMULATE:
        b_dq += buffer.load(o_layout).to(gl.float32)
    barrier()
    buffer.store(b_dq.to(dq.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(dq, [i_b, i_t, i_head, 0], dq_w)


@gluon.jit
def consume_ds(
    W: gl.constexpr, dq, p_lo, p_hi, p_start, ds_s, k_s, dq_s, full, free, dq_full, dq_free, scale,
    n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, row_0,
    H: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, PACKED: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows `[2 W, 2 W + 2)`, in tiles of BLOCK_M, of every tile of four."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), n_tiles * n_bg, gl.num_programs(0)):
        _, i_bg, i_row, _, n, _ = row_tile(
            tile, p_lo, p_hi, p_start, n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, row_0, H, 4 * BLOCK_M,
            SLIDING, SPAN, STRIDE, PACKED,
        )  # fmt: skip
        b_first = gl.zeros([BLOCK_M, D], gl.float32, o_layout)
        b_second = gl.zeros([BLOCK_M, D], gl.float32, o_layout)
        for _ in range(n):
            slot = step % STAGES
            k_w = k_s.index(slot).reshape([64, D])
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            first_t = ds_s.index(4 * slot + 2 * W).reshape([64, BLOCK_M]).permute([1, 0])
            second_t = ds_s.index(4 * slot + 2 * W + 1).reshape([64, BLOCK_M]).permute([1, 0])
            b_first = warpgroup_mma(first_t, k_w, b_first, is_async=True)
            b_second = warpgroup_mma(second_t, k_w, b_second, is_async=True)
            b_first, b_second = warpgroup_mma_wait(0, deps=[b_first, b_second])
            mbarrier.arrive(free.index(slot), count=1)
            step += 1
        i_b = i_bg // n_groups
        i_head = i_bg % n_groups * H
        i_t = i_row // H + 2 * W * (BLOCK_M // H)
        if ACCUMULATE:
            mbarrier.wait(dq_full, turn & 1)
            turn += 1
        else:
            # The tile before has left the buffer.
            tma.store_wait(0)
        store_dq(b_first, dq, dq_s.index(2 * W), i_b, i_t, i_head, scale, o_layout, BLOCK_M, D, ACCUMULATE)
        i_t += BLOCK_M // H
        store_dq(b_second, dq, dq_s.index(2 * W + 1), i_b, i_t, i_head, scale, o_layout, BLOCK_M, D, ACCUMULATE)
        if ACCUMULATE:
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(dq_free, count=1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*COUNTS, "bg_0", "n_bg"])
def hopper_dq_kernel(
    ds, k, dq, p_lo, p_hi, p_first, p_end, scale, n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, row_0,
    H: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, PACKED: gl.constexpr, ACCUMULATE: gl.constexpr,
    p_start=None,
):  # fmt: skip
    """`dq` of `n_tiles` tiles of `4 * BLOCK_M` rows from `row_0` on, of `n_bg` batch entries and groups from `bg_0` on;
    ACCUMULATE adds to the `dq` that is there."""
    ds_s = gl.allocate_shared_memory(ds.dtype, [4 * STAGES, 1, 64, BLOCK_M], ds.layout)
    k_s = gl.allocate_shared_memory(ds.dtype, [STAGES, 1, 64, 1, D], k.layout)
    dq_s = gl.allocate_shared_memory(ds.dtype, [4, 1, BLOCK_M // H, H, D], dq.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    dq_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(dq_full, count=1)
    mbarrier.init(dq_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume_ds, (0, dq, p_lo, p_hi, p_start, ds_s, k_s, dq_s, full, free, dq_full, dq_free, scale,
                          n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, row_0,
                          H, D, BLOCK_M, STAGES, SLIDING, SPAN, STRIDE, PACKED, ACCUMULATE)),
            (consume_ds, (1, dq, p_lo, p_hi, p_start, ds_s, k_s, dq_s, full, free, dq_full, dq_free, scale,
                          n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, row_0,
                          H, D, BLOCK_M, STAGES, SLIDING, SPAN, STRIDE, PACKED, ACCUMULATE)),
            (produce_ds, (ds, k, dq, p_lo, p_hi, p_first, p_end, p_start, ds_s, k_s, dq_s, full, free, dq_full, dq_free,
                          n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, row_0,
                          H, BLOCK_M, STAGES, SLIDING, SPAN, STRIDE, PACKED, ACCUMULATE)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def align(n: int, step: int) -> int:
    return -(-n // step) * step


def split_compressed(
    n_bg: int, n_keys: int, n_rows: int, part_rows: int, visible: list[int], capacity: int
) -> Iterator[tuple[Part, int]]:
    """Parts of the rows, from the last on as many at once as `capacity` elements of `dS^T` allow, and their rows;
    `visible`: the keys that the rows of each part see."""
    end = len(visible)
    while end > 0:
        begin, keys = end - 1, max(1, visible[end - 1])
        while begin > 0 and n_bg * keys * (end - begin + 1) * part_rows <= capacity:
            begin -= 1
        rows = min(end * part_rows, n_rows) - begin * part_rows
        yield Part(0, n_bg, begin, end - begin, begin * part_rows, (n_bg, keys, rows)), rows
        end = begin


def split_sliding(
    n_bg: int, n_keys: int, n_columns: int, n_parts: int, n_rows: int, capacity: int
) -> Iterator[tuple[Part, int]]:
    at_once = min(n_bg, max(1, capacity // (n_keys * n_columns)))
    for first in range(0, n_bg, at_once):
        count = min(at_once, n_bg - first)
        yield Part(first, count, 0, n_parts, 0, (count, n_keys, n_columns)), n_rows


class KeptPlan:
    """A backward pass in which `dq` comes from the `dS^T` that was kept; called as `RangedBackwardPlan`'s passes are."""

    def __init__(
        self, do: Layout, q: Layout, k: Layout, v: Layout, visibility: Visibility, scale: float,
        keys: KeyTile, tile: QueryTile, n_parts: int, part_rows: int, accumulate: bool,
    ) -> None:  # fmt: skip
        self.visibility, self.tile = visibility, tile
        batch, n_queries, n_heads, d = q.shape
        _, n_keys, n_groups, _ = k.shape
        heads, n_bg = n_heads // n_groups, batch * n_groups
        n_rows = align(n_queries * heads, tile.block_m)
        capacity = tile.scratch // q.dtype.itemsize // tile.streams
        if visibility.sliding:
            columns = align(min(n_rows, (keys.block_n + visibility.span) * heads + tile.block_m), tile.block_m)
            chunks = list(split_sliding(n_bg, n_keys, columns, n_parts, n_rows, capacity))
        else:
            known = not visibility.packed and not visibility.offset
            last = [min((i + 1) * part_rows, n_rows) // heads for i in range(n_parts)]
            span, stride = visibility.span, visibility.stride
            visible = [min(n_keys, max(0, t - span + stride) // stride) if known else n_keys for t in last]
            chunks = list(split_compressed(n_bg, n_keys, n_rows, part_rows, visible, capacity))
        self.n_parts = n_parts
        self.size = max(torch.Size(part.kept or ()).numel() for part, _ in chunks)
        self.dk_shape, self.dv_shape = tuple(k.shape), tuple(v.shape)
        if n_parts > 1:
            self.dk_shape, self.dv_shape = (n_parts, *k.shape), (n_parts, *v.shape)
            self.sum_parts = sum_partials(n_parts, k.shape.numel(), v.shape.numel())
        self.describe_k = describe_keys(k, tile.block_n)
        describe_dq = describe_rows(new_layout(q.shape, q.dtype, q.device), heads, keys.block_m)
        assert describe_dq is not None, "q is not whole queries, which `pick_dq` declines"
        self.describe_dq = describe_dq

        def query_launch(part: Part, rows: int) -> Launch:
            n_tiles = triton.cdiv(rows, tile.block_m)
            return Launch(
                hopper_dq_kernel, (min(sm_count(q.device), n_tiles * part.n_bg),), scale=scale, n_queries=n_queries,
                n_keys=n_keys, n_groups=n_groups, n_tiles=n_tiles, n_bg=part.n_bg, bg_0=part.bg_0, row_0=part.row_0,
                H=heads, D=d, BLOCK_M=keys.block_m, STAGES=tile.num_stages, **visibility.constants,
                **visibility.absent("p_lo", "p_hi", "p_first", "p_end"), ACCUMULATE=accumulate,
                num_warps=tile.num_warps, maxnreg=tile.max_registers,
            )  # fmt: skip

        self.chunks = []
        for part, rows in chunks:
            assert part.kept is not None
            launch = KeyLaunch(do, q, k, v, visibility, scale, keys, part, part_rows)
            self.chunks.append((launch, describe_ds(part.kept, q, keys), query_launch(part, rows)))

    def __call__(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse2: Tensor, delta: Tensor, ranges: Ranges,
        into: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`dq`, which is `into` if that is given, `dk` and `dv`."""
        dtype = k.dtype if self.n_parts <= 1 else torch.float32
        dk = torch.empty(self.dk_shape, dtype=dtype, device=k.device)
        dv = torch.empty(self.dv_shape, dtype=dtype, device=k.device)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if into is None else into
        n_streams = min(self.tile.streams, len(self.chunks))
        kept = [torch.empty(self.size, dtype=q.dtype, device=q.device) for _ in range(n_streams)]
        for_keys, for_queries = self.visibility.key_tables(ranges), self.visibility.query_tables(ranges)

        def run(turn: int) -> None:
            ds = kept[turn]
            for launch_keys, describe, launch_queries in self.chunks[turn::n_streams]:
                launch_keys(q=q, do=do, k=k, v=v, lse2=lse2, delta=delta, p_dk=dk, p_dv=dv, ds=ds, **for_keys)
                launch_queries(
                    ds=describe(ds), k=self.describe_k(k), dq=self.describe_dq(dq), **{**for_keys, **for_queries}
                )

        if n_streams == 2:
            # Work of one chunk fills the SMs that the end of another's leaves idle. Everything is allocated before and
            # freed after the other stream has joined again.
            here, other = torch.cuda.current_stream(q.device), second_stream(q.device)
            other.wait_stream(here)
            with torch.cuda.stream(other):
                run(1)
            run(0)
            here.wait_stream(other)
        else:
            run(0)
        if self.n_parts == 1:
            return dq, dk, dv
        dk_sum = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        dv_sum = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        self.sum_parts(p_part=dk, p_out=dk_sum, p_part_1=dv, p_out_1=dv_sum)
        return dq, dk_sum, dv_sum


def split_whole_tiles(tile: KeyTile, block_m: int) -> KeyTile:
    """`tile` as `split_keys` takes it to split rows at multiples of `block_m`."""
    return replace(tile, block_m=block_m, min_row_tiles=max(1, tile.min_row_tiles * tile.block_m // block_m))
