"""The gradient of queries from `dS^T`, which the kernel of `dk` and `dv` kept in half precision: one matmul, not three.

    dQ[r] = scale * sum_n dS[r, n] K[n]

`dS^T [B * G, keys, rows]` is larger than all inputs together, so a backward pass goes in runs of rows, or of keys in
the sliding branch: `hopper_dkv_kernel` and then `hopper_dq_kernel`, through a buffer of bounded size. In the sliding
branch, where a tile of keys is seen by few rows, a tile's first column is the first row that sees it.

Reading `dS^T` from memory bounds `hopper_dq_kernel`. A CTA has three partitions: one warp issues the TMA loads, and two
consumer warpgroups own half of a tile of rows each. Grid: persistent, one CTA per SM, the last rows, which see most
keys, first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

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
from nsa.backends.triton.primitives import COUNTS, seeing_queries, visible_keys
from nsa.backends.triton.ranged_backward import StartedPass
from nsa.backends.triton.streams import forked, launching_on
from nsa.backends.triton.tiles import Visibility, sm_count
from nsa.sequences import Compressed, Sliding


@gluon.jit
def row_tile(
    tile, p_lo, p_hi, n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, key_0, key_end, row_0, H: gl.constexpr,
    ROWS: gl.constexpr, SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Batch entry and group, in this launch and of all, and first row; first key and number of tiles of 64 keys."""
    i_local = tile % n_bg
    i_row = row_0 + (n_tiles - 1 - tile // n_bg) * ROWS
    i_last = gl.minimum(i_row + ROWS, n_queries * H) - 1
    first_lo, _ = visible_keys(i_row // H, 0, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)
    _, last_hi = visible_keys(i_last // H, 0, p_lo, p_hi, n_keys, SLIDING, SPAN, STRIDE, VARLEN)
    first_lo = gl.maximum(first_lo, key_0)
    last_hi = gl.minimum(last_hi, key_end)
    i_key = first_lo // 64 * 64
    n = gl.where(last_hi > first_lo, (last_hi - i_key + 63) // 64, 0)
    return i_local, bg_0 + i_local, i_row, i_key, n


@gluon.jit
def produce_ds(
    ds, k, dq, p_lo, p_hi, p_first, p_end, ds_s, k_s, dq_s, full, free, dq_full, dq_free,
    n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, key_0, key_end, row_0,
    H: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, VARLEN: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """One warp: requests `dS^T` and the keys of a step as soon as a buffer is free, and the `dq` to add to."""
    ROWS: gl.constexpr = 4 * BLOCK_M
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), n_tiles * n_bg, gl.num_programs(0)):
        i_local, i_bg, i_row, i_key, n = row_tile(
            tile, p_lo, p_hi, n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, key_0, key_end, row_0, H, ROWS,
            SLIDING, SPAN, STRIDE, VARLEN,
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
                    i_n // 128 * 128, None, 0, p_first, p_end, n_queries, SLIDING, SPAN, STRIDE, VARLEN
                )
                i_base = first_begin * H // ROWS * ROWS
            slot = step % STAGES
            mbarrier.wait(free.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 4 * ds.block_type.nbytes + k.block_type.nbytes)
            tma.async_copy_global_to_shared(k, [i_b, i_n, i_g, 0], full.index(slot), k_s.index(slot))
            for w in gl.static_range(4):
                i_column = i_row - i_base + w * BLOCK_M
                tma.async_copy_global_to_shared(
                    ds, [i_local, i_n - key_0, i_column], full.index(slot), ds_s.index(4 * slot + w)
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
    W: gl.constexpr, dq, p_lo, p_hi, ds_s, k_s, dq_s, full, free, dq_full, dq_free, scale,
    n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, key_0, key_end, row_0,
    H: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, VARLEN: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: rows `[2 W, 2 W + 2)`, in tiles of BLOCK_M, of every tile of four."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), n_tiles * n_bg, gl.num_programs(0)):
        _, i_bg, i_row, _, n = row_tile(
            tile, p_lo, p_hi, n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, key_0, key_end, row_0, H, 4 * BLOCK_M,
            SLIDING, SPAN, STRIDE, VARLEN,
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


@gluon.jit(do_not_specialize=[*COUNTS, "bg_0", "n_bg", "key_0", "key_end"])
def hopper_dq_kernel(
    ds, k, dq, p_lo, p_hi, p_first, p_end, scale, n_queries, n_keys, n_groups, n_tiles,
    n_bg, bg_0, key_0, key_end, row_0, H: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    SLIDING: gl.constexpr, SPAN: gl.constexpr, STRIDE: gl.constexpr, VARLEN: gl.constexpr, ACCUMULATE: gl.constexpr,
):  # fmt: skip
    """`dq` of `n_tiles` tiles of `4 * BLOCK_M` rows from `row_0` on, of `n_bg` batch entries and groups from `bg_0` on,
    of keys `[key_0, key_end)`; ACCUMULATE adds to the `dq` that is there."""
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
            (consume_ds, (0, dq, p_lo, p_hi, ds_s, k_s, dq_s, full, free, dq_full, dq_free, scale,
                          n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, key_0, key_end, row_0,
                          H, D, BLOCK_M, STAGES, SLIDING, SPAN, STRIDE, VARLEN, ACCUMULATE)),
            (consume_ds, (1, dq, p_lo, p_hi, ds_s, k_s, dq_s, full, free, dq_full, dq_free, scale,
                          n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, key_0, key_end, row_0,
                          H, D, BLOCK_M, STAGES, SLIDING, SPAN, STRIDE, VARLEN, ACCUMULATE)),
            (produce_ds, (ds, k, dq, p_lo, p_hi, p_first, p_end, ds_s, k_s, dq_s, full, free, dq_full,
                          dq_free, n_queries, n_keys, n_groups, n_tiles, n_bg, bg_0, key_0, key_end, row_0,
                          H, BLOCK_M, STAGES, SLIDING, SPAN, STRIDE, VARLEN, ACCUMULATE)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# Runs of fewer rows, or of fewer keys in the sliding branch, are of fewer batch entries and groups instead.
FEW_ROWS, FEW_KEYS = 8192, 4096


def align(n: int, step: int) -> int:
    return -(-n // step) * step


def split_compressed(
    n_bg: int, n_keys: int, n_rows: int, split_rows: int, visible: Callable[[int], int], tile: QueryTile, capacity: int
) -> Iterator[Part]:
    """Runs of rows, from the last on, as long as `capacity` elements of `dS^T` allow. Partial `dk` and `dv` of one
    stream's runs are added up in the same slots; `visible(end)`: how many keys the rows before `end` see."""
    at_once = min(n_bg, max(1, capacity // (n_keys * min(n_rows, FEW_ROWS))))
    for bg_0 in range(0, n_bg, at_once):
        count, end, runs = min(at_once, n_bg - bg_0), n_rows, []
        while end > 0:
            keys = max(1, visible(end))
            start = max(0, end - max(1, capacity // (at_once * keys * tile.block_m)) * tile.block_m)
            runs.append((start, end, keys, max(1, round((end - start) / split_rows))))
            end = start
        slots = [max((x[3] for x in runs[turn :: tile.streams]), default=0) for turn in range(tile.streams)]
        for i, (start, end, keys, n_splits) in enumerate(runs):
            turn = i % tile.streams
            written = max((x[3] for x in runs[turn : i : tile.streams]), default=0)
            rows = align(-(-(end - start) // n_splits), tile.block_m)
            kept = count, keys, end - start
            yield Part(bg_0, count, 0, n_keys, start, end, n_splits, rows, sum(slots[:turn]), written, kept)


def split_sliding(
    n_bg: int, n_keys: int, n_columns: int, n_splits: int, split_rows: int,
    rows_seeing: Callable[[int, int], tuple[int, int]], keys: KeyTile, tile: QueryTile, capacity: int,
) -> Iterator[Part]:  # fmt: skip
    """Runs of keys, and the rows that may see them: at a seam they get their `dq` from both runs."""
    at_once = min(n_bg, max(1, capacity // (min(n_keys, FEW_KEYS) * n_columns)))
    n_runs = triton.cdiv(n_keys, max(1, capacity // (at_once * n_columns * keys.block_n)) * keys.block_n)
    if n_runs > 1:
        n_runs = align(n_runs, tile.streams)
    step = align(triton.cdiv(n_keys, n_runs), keys.block_n)
    for bg_0 in range(0, n_bg, at_once):
        count = min(at_once, n_bg - bg_0)
        for key_0 in range(0, n_keys, step):
            end = min(key_0 + step, n_keys)
            row_0, row_end = rows_seeing(key_0, end)
            yield Part(
                bg_0, count, key_0, end, row_0, row_end, n_splits, split_rows, kept=(count, end - key_0, n_columns)
            )


class KeptPlan:
    """A backward pass in which `dq` comes from the `dS^T` that was kept; started as `RangedBackwardPlan`'s are.

    Two streams take turns: work of one run fills the SMs that the end of another's leaves idle.
    """

    def __init__(
        self, do: Layout, q: Layout, k: Layout, v: Layout, visibility: Visibility, scale: float,
        keys: KeyTile, tile: QueryTile, n_splits: int, split_rows: int, accumulate: bool,
    ) -> None:  # fmt: skip
        assert not visibility.offset, "where runs begin is not known, which `pick_dq` declines"
        self.visibility, self.streams = visibility, tile.streams
        batch, n_queries, n_heads, d = q.shape
        _, n_keys, n_groups, _ = k.shape
        heads, n_bg = n_heads // n_groups, batch * n_groups
        n_rows, span = align(n_queries * heads, tile.block_m), visibility.span
        capacity = tile.scratch // q.dtype.itemsize // tile.streams

        def visible(end: int) -> int:
            if visibility.varlen:
                return n_keys
            return min(n_keys, max(0, end // heads - span + visibility.stride) // visibility.stride)

        def rows_seeing(key_0: int, key_end: int) -> tuple[int, int]:
            row_end = align((key_end - 1 + span) * heads, tile.block_m)
            return key_0 * heads // tile.block_m * tile.block_m, min(row_end, n_rows)

        if visibility.sliding:
            columns = align(min(n_rows, (keys.block_n + span) * heads + tile.block_m), tile.block_m)
            runs = split_sliding(n_bg, n_keys, columns, n_splits, split_rows, rows_seeing, keys, tile, capacity)
        else:
            runs = split_compressed(n_bg, n_keys, n_rows, split_rows, visible, tile, capacity)
        parts = list(runs)
        # Rows at a seam: their `dq` is added to.
        self.seams = visibility.sliding and len(parts) > 1
        self.size = max(torch.Size(part.kept or ()).numel() for part in parts)
        self.n_slots = max(part.slot_0 + part.n_splits for part in parts)
        self.dk_shape, self.dv_shape = tuple(k.shape), tuple(v.shape)
        if self.n_slots > 1:
            self.dk_shape, self.dv_shape = (self.n_slots, *k.shape), (self.n_slots, *v.shape)
            self.sum_slots = sum_partials(self.n_slots, k.shape.numel(), v.shape.numel())
        self.describe_k = describe_keys(k, tile.block_n)
        describe_dq = describe_rows(new_layout(q.shape, q.dtype, q.device), heads, keys.block_m)
        assert describe_dq is not None, "q is not whole queries, which `pick_dkv` declines"
        self.describe_dq = describe_dq

        def query_launch(part: Part) -> Launch:
            n_tiles = triton.cdiv(part.row_end - part.row_0, tile.block_m)
            return Launch(
                hopper_dq_kernel, (min(sm_count(q.device), n_tiles * part.n_bg),), scale=scale, n_queries=n_queries,
                n_keys=n_keys, n_groups=n_groups, n_tiles=n_tiles, n_bg=part.n_bg, bg_0=part.bg_0, key_0=part.key_0,
                key_end=part.key_end, row_0=part.row_0, H=heads, D=d, BLOCK_M=keys.block_m, STAGES=tile.num_stages,
                **visibility.constants, **visibility.absent("p_lo", "p_hi", "p_first", "p_end"),
                ACCUMULATE=accumulate or self.seams, num_warps=tile.num_warps, maxnreg=tile.max_registers,
            )  # fmt: skip

        self.runs = []
        for part in parts:
            assert part.kept is not None
            launch = KeyLaunch(do, q, k, v, visibility, scale, keys, part)
            self.runs.append((launch, describe_ds(part.kept, q, keys), query_launch(part)))

    def start(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse2: Tensor, delta: Tensor, branch: Compressed | Sliding
    ) -> StartedPass:
        dtype = k.dtype if self.n_slots == 1 else torch.float32
        dk = dk_sum = torch.empty(self.dk_shape, dtype=dtype, device=k.device)
        dv = dv_sum = torch.empty(self.dv_shape, dtype=dtype, device=k.device)
        if self.n_slots > 1:
            dk_sum = torch.empty(k.shape, dtype=k.dtype, device=k.device)
            dv_sum = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        n_streams = min(self.streams, len(self.runs))
        kept = [torch.empty(self.size, dtype=q.dtype, device=q.device) for _ in range(n_streams)]
        seen = (branch, k.shape[1])
        for_keys, for_queries = self.visibility.key_tables(*seen), self.visibility.query_tables(*seen)

        def keys_of(i: int) -> None:
            self.runs[i][0](
                q=q, do=do, k=k, v=v, lse2=lse2, delta=delta, p_dk=dk, p_dv=dv, ds=kept[i % n_streams], **for_keys
            )

        def queries_of(i: int, dq: Tensor) -> None:
            _, describe, launch = self.runs[i]
            ds = describe(kept[i % n_streams])
            launch(ds=ds, k=self.describe_k(k), dq=self.describe_dq(dq), **{**for_keys, **for_queries})

        def sum_up() -> None:
            if self.n_slots > 1:
                self.sum_slots(p_part=dk, p_out=dk_sum, p_part_1=dv, p_out_1=dv_sum)

        def key_gradients() -> None:
            """Of a single run."""
            if len(self.runs) == 1:
                keys_of(0)
                sum_up()

        def query_gradient(into: Tensor | None) -> Tensor:
            dq = into
            if dq is None:
                dq = (torch.zeros if self.seams else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
            if len(self.runs) == 1:
                queries_of(0, dq)
                return dq
            # On a CPU both are None, and the runs come one after the other.
            with forked(q.device) if n_streams == 2 else nullcontext((None, None)) as streams:
                for i in range(len(self.runs)):
                    here, other = streams[i % 2], streams[1 - i % 2]
                    with launching_on(here):
                        keys_of(i)
                        if self.seams and here is not None and other is not None:
                            # The other one's last launch is of the run before.
                            here.wait_stream(other)
                        queries_of(i, dq)
            sum_up()
            return dq

        return StartedPass(dk_sum, dv_sum, key_gradients, query_gradient, reads_keys=True)


def split_whole_tiles(tile: KeyTile, block_m: int) -> KeyTile:
    """`tile` as `split_keys` takes it to split rows at multiples of `block_m`."""
    return replace(tile, block_m=block_m, min_row_tiles=max(1, tile.min_row_tiles * tile.block_m // block_m))
