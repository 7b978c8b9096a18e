"""What the passes of the selected branch that go by block have in common: the segment of a CTA, and how rows of queries
come and how partial results of their shape go.

A query's rows are a piece of `h x D` in memory. Rows of a tile come by two boxes a query, `[h, D / 2]` each, which is
how wide a swizzled box may be: boxes side by side are then columns of a tile that products read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from nsa.backends.gluon.api import gl, gluon, mbarrier, tma
from nsa.backends.gluon.decode import clear_unseen
from nsa.backends.gluon.descriptors import describe_keys, descriptor
from nsa.backends.gluon.tiles import BlockBackwardTile, BlockForwardTile
from nsa.backends.triton.launch import Launch, Layout, new_layout
from nsa.backends.triton.selected.forward import assigned_segment, locate_block, own_segment
from nsa.backends.triton.selected.index import Chunk, Shapes, query_start


@gluon.jit
def boxes_of(x_s, desc, H: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Tiles `[STAGES, BLOCK_M, D]` as the boxes `[1, 1, H, D / 2]` that they consist of: per tile those of the left
    half of the columns, one for each query, then those of the right half."""
    return x_s._reinterpret(desc.dtype, [STAGES * 2 * (BLOCK_M // H), 1, 1, H, D // 2], desc.layout)


@gluon.jit
def gather_rows(
    x, p_pair, x_s, full, free, i_b, i_g, n_pairs,
    H: gl.constexpr, N_SELECT: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: requests tiles of rows of `x` as soon as a buffer is free. Rows past the end are the last query's."""
    QUERIES: gl.constexpr = BLOCK_M // H
    x_box = boxes_of(x_s, x, H, BLOCK_M, D, STAGES)
    for step in range((n_pairs + QUERIES - 1) // QUERIES):
        slot = step % STAGES
        mbarrier.wait(free.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), 2 * QUERIES * x.block_type.nbytes)
        for i in gl.static_range(QUERIES):
            i_t = gl.load(p_pair + gl.minimum(step * QUERIES + i, n_pairs - 1)) // N_SELECT
            for half in gl.static_range(2):
                box = x_box.index((2 * slot + half) * QUERIES + i)
                tma.async_copy_global_to_shared(x, [i_b, i_t, i_g * H, half * (D // 2)], full.index(slot), box)


@gluon.jit
def scatter_rows(
    partial, p_pair, x_s, done, free, i_first_pair, n_pairs,
    H: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: stores a tile of partial results from the buffer that its queries came in, and frees that."""
    QUERIES: gl.constexpr = BLOCK_M // H
    partial_box = boxes_of(x_s, partial, H, BLOCK_M, D, STAGES)
    for step in range((n_pairs + QUERIES - 1) // QUERIES):
        slot = step % STAGES
        mbarrier.wait(done.index(slot), (step // STAGES) & 1)
        for i in gl.static_range(QUERIES):
            if step * QUERIES + i < n_pairs:
                i_pair = gl.load(p_pair + step * QUERIES + i) - i_first_pair
                for half in gl.static_range(2):
                    box = partial_box.index((2 * slot + half) * QUERIES + i)
                    tma.async_copy_shared_to_global(partial, [0, i_pair, 0, half * (D // 2)], box)
        tma.store_wait(0)
        mbarrier.arrive(free.index(slot), count=1)


@gluon.jit
def clear_other_keys(k_w, v_w, i_key, i_end, BLOCK_N: gl.constexpr):
    """Another document's keys may follow in the block, whose values must not reach a matmul."""
    if i_end < i_key + BLOCK_N:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        m_seen = (i_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)) < i_end)[:, None]
        clear_unseen(k_w, m_seen, layout)
        clear_unseen(v_w, m_seen, layout)


@gluon.jit
def segment_of(
    p_pair, p_order, p_item, p_low, p_high, p_last_segment, p_first_token, p_end_token, p_start, max_start,
    n_items, n_blocks, n_keys, n_groups, row_0, query_0, n_queries,
    N_SELECT: gl.constexpr, BLOCK_N: gl.constexpr, SEGMENT: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """This CTA's segment, its pairs and how many (none if it is not used), its row, the first key of its block and the
    end of that one's document, the first key counted as queries are, and the first pair of the partials.

    It reduces nothing over warps: where that would be done, Triton 3.6 puts the arguments of `gl.warp_specialize`,
    without a barrier before them.
    """
    i_segment = assigned_segment(p_order)
    i_item = gl.load(p_item + i_segment)
    is_used = i_item < n_items
    i_item = gl.minimum(i_item, n_items - 1)
    i_low, i_high = own_segment(i_segment, i_item, p_low, p_high, p_last_segment, SEGMENT)
    n_pairs = gl.where(is_used, i_high - i_low, 0)
    p_pair += gl.where(is_used, i_low, 0)
    i_local = i_item // n_blocks
    i_row = row_0 + i_local
    i_key, i_end = locate_block(i_item % n_blocks, n_keys, p_first_token, p_end_token, BLOCK_N, VARLEN)
    i_first = i_key - query_start(p_start, max_start, i_row // n_groups)
    # Pairs of this row of the chunk follow those of the rows before.
    i_first_pair = (query_0 - i_local * n_queries) * N_SELECT
    return i_segment, p_pair, n_pairs, i_row, i_key, i_end, i_first, i_first_pair


class BlockLaunch(NamedTuple):
    """A launch that takes its tensors as `tensors` describes them."""

    launch: Launch
    tensors: Callable[..., dict[str, Any]]


def launch_blocks(
    kernel: Any, shapes: Shapes, chunk: Chunk, segment: int, tile: BlockForwardTile | BlockBackwardTile,
    rows: dict[str, Layout], partial: tuple[str, int], **others: Any,
) -> BlockLaunch:  # fmt: skip
    """The launch of a kernel over a chunk's segments, of `segment` pairs at most. `rows`: by name, tensors with rows of
    queries. `partial`: the name of the partial results, and for how many pairs there is room."""
    assert shapes.select_block == tile.block_n, "blocks are of another length, which `takes_blocks` declines"
    # A step waits for the next tile before it frees its own.
    assert tile.num_stages >= 2
    heads, d = shapes.heads, shapes.d_k
    box, (name, n_pairs) = (1, 1, heads, d // 2), partial
    rows = {**rows, name: new_layout((1, n_pairs, heads, d), shapes.q.dtype, shapes.q.device)}
    describe = {row: descriptor(layout, box) for row, layout in rows.items()}
    describe |= {"k": describe_keys(shapes.k, tile.block_n), "v": describe_keys(shapes.v, tile.block_n)}
    launch = Launch(
        kernel, (chunk.n_segments,), n_items=chunk.n_items, n_blocks=shapes.n_blocks, n_keys=shapes.n_keys,
        n_groups=shapes.n_groups, **chunk.where, **shapes.last_start, H=heads, N_SELECT=shapes.n_select, D=d,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SEGMENT=segment, VARLEN=shapes.n_documents is not None,
        STAGES=tile.num_stages, num_warps=tile.num_warps, maxnreg=tile.max_registers, **others,
    )  # fmt: skip
    return BlockLaunch(launch, lambda **tensors: {key: describe[key](x) for key, x in tensors.items()})
