"""The inverted index of a selection: for every block the queries that selected it, built on the GPU in a fixed order.

A query selects a block at most once, so "who selected block j" is a bitmap over the queries: one 32-bit word for each
block and each tile of 32 queries. Setting bits commutes, so the bitmap does not depend on the order of the atomics;
counting its bits gives the number of queries, counting those below a query's own bit gives the query's rank, and one
running sum over `[row, block, tile]` gives every pair its place in a list sorted by row, block and query:

    place(t, j) = sum of all counts before (row, j, t // 32)  +  popcount(word & bits below t % 32)

No sort, no value read back. A block's list ascends in `t`, so the part of it that falls into a chunk of queries is a
range, whose ends are entries of the same running sum. Ranges are cut into segments of bounded length, so that many CTAs
share block 0, which every query selects. The maximum number of segments follows from shapes.

Launches: clear the bitmap, `mark`, `count`, a running sum, `place`, `cut`, and `order` where segments are sorted.
Grids: `mark` and `place` one CTA per (tile of pairs, row); `count` one per tile of words; `cut` one per chunk; `order`
one per (tile of segments, chunk). Each element is written once.

Everything that shapes decide is in an `IndexPlan`, which launchers cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.launch import Launch, Layout, new_layout, strides
from nsa.backends.triton.primitives import COUNTS, first_position
from nsa.backends.triton.tiles import block_width, start_table
from nsa.sequences import Blocks, Sequences

WORD = 32
# Words of the bitmap at most: past that the queries are indexed in several parts, so memory stays linear.
MAX_WORDS = 1 << 25
# Rows of shorter sequences stay in the L2 whatever the order.
SORT_FROM_QUERIES = 8192
# Segments that are ranked by comparing each with all others; more are sorted.
MAX_RANKED = 1 << 15
PAIRS_PER_CTA = 512
WORDS_PER_CTA = 2048
ITEMS_PER_STEP = 1024
# Each CTA of `order` ranks the first number of segments, comparing with the second number at a time.
RANKED_PER_CTA, COMPARED_PER_STEP = 32, 512
# Slices of an int32 buffer start at multiples of 16 bytes, so kernels are compiled for aligned pointers only.
ALIGN = 4

INDEX_COUNTS = [*COUNTS, "n_segments", "n_chunks", "rows_each", "tiles_each", "stride_chunk"]
LAST = tl.constexpr(2147483647)


@triton.jit
def selected_block(
    p_indices, o_t, o_slot, m_pair, stride_t, start, p_doc_start, p_block_offset, SELECT_BLOCK: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Number of the block that each (query, slot) reads, -1 for none: padding, or a block that starts after it.

    `start`: where the first query lies in its row of keys.
    """
    b_index = tl.load(p_indices + o_t.to(tl.int64) * stride_t + o_slot, mask=m_pair, other=-1)
    if VARLEN:
        b_start = tl.load(p_doc_start + o_t, mask=m_pair, other=0)
        b_offset = tl.load(p_block_offset + o_t, mask=m_pair, other=0)
        b_reads = (b_index >= 0) & (b_index <= (o_t + start - b_start) // SELECT_BLOCK)
        b_number = b_index + b_offset
    else:
        b_reads = (b_index >= 0) & (b_index <= (o_t + start) // SELECT_BLOCK)
        b_number = b_index
    return tl.where(b_reads, b_number, -1)


@triton.jit
def query_start(p_start, max_start, i_b):
    """The position of batch entry `i_b`'s first query in its row of keys, kept inside it whatever `q_start` is."""
    start = first_position(p_start, i_b)
    if p_start is not None:
        start = tl.minimum(tl.maximum(start, 0), max_start)
    return start


@triton.jit
def popcount(b_word):
    """Set bits of each int32."""
    b = b_word.to(tl.uint32, bitcast=True)
    b = b - ((b >> 1) & 0x55555555)
    b = (b & 0x33333333) + ((b >> 2) & 0x33333333)
    b = (b + (b >> 4)) & 0x0F0F0F0F
    b = b + (b >> 8)
    b = b + (b >> 16)
    return (b & 0x3F).to(tl.int32)


@triton.jit
def selected_pairs(
    i_row, p_indices, p_doc_start, p_block_offset, p_start, max_start, stride_b, stride_t, stride_g, n_groups, query_0,
    n_queries,
    N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`[BLOCK]` pairs of a CTA: query, slot, the block in that slot or -1, and whether there is such a pair."""
    o_pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_local = o_pair // N_SELECT
    o_slot = o_pair % N_SELECT
    m_pair = o_local < n_queries
    p_row = p_indices + (i_row // n_groups).to(tl.int64) * stride_b + (i_row % n_groups).to(tl.int64) * stride_g
    start = query_start(p_start, max_start, i_row // n_groups)
    b_block = selected_block(
        p_row, query_0 + o_local, o_slot, m_pair, stride_t, start, p_doc_start, p_block_offset, SELECT_BLOCK, VARLEN
    )
    return o_local, o_slot, b_block, m_pair


@triton.jit(do_not_specialize=COUNTS)
def mark_kernel(
    p_indices, p_word, p_doc_start, p_block_offset,
    stride_b, stride_t, stride_g, n_groups, n_blocks, n_tiles, query_0, n_queries,
    N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
    p_start=None, max_start=None,
):  # fmt: skip
    """Set the bit of every (query, selected block)."""
    i_row = tl.program_id(1)
    o_local, _, b_block, m_pair = selected_pairs(
        i_row, p_indices, p_doc_start, p_block_offset, p_start, max_start, stride_b, stride_t, stride_g, n_groups,
        query_0, n_queries, N_SELECT, SELECT_BLOCK, VARLEN, BLOCK,
    )  # fmt: skip
    o_word = (i_row.to(tl.int64) * n_blocks + b_block) * n_tiles + o_local // 32
    b_bit = tl.full([BLOCK], 1, tl.int32) << (o_local % 32)
    tl.atomic_or(p_word + o_word, b_bit, mask=m_pair & (b_block >= 0), sem="relaxed")


@triton.jit(do_not_specialize=COUNTS)
def count_kernel(p_word, p_count, n_words, BLOCK: tl.constexpr):
    """Bits of every word."""
    o_word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_word = o_word < n_words
    tl.store(p_count + o_word, popcount(tl.load(p_word + o_word, mask=m_word, other=0)), mask=m_word)


@triton.jit(do_not_specialize=COUNTS)
def place_kernel(
    p_indices, p_word, p_sum, p_pair, p_doc_start, p_block_offset,
    stride_b, stride_t, stride_g, n_groups, n_blocks, n_tiles, query_0, n_queries,
    N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
    p_start=None, max_start=None,
):  # fmt: skip
    """Write every pair `t * N_SELECT + slot` to its place."""
    i_row = tl.program_id(1)
    o_local, o_slot, b_block, m_pair = selected_pairs(
        i_row, p_indices, p_doc_start, p_block_offset, p_start, max_start, stride_b, stride_t, stride_g, n_groups,
        query_0, n_queries, N_SELECT, SELECT_BLOCK, VARLEN, BLOCK,
    )  # fmt: skip
    m_pair = m_pair & (b_block >= 0)
    o_word = (i_row.to(tl.int64) * n_blocks + b_block) * n_tiles + o_local // 32
    b_word = tl.load(p_word + o_word, mask=m_pair, other=0)
    b_below = (tl.full([BLOCK], 1, tl.int32) << (o_local % 32)) - 1
    # The running sum includes the word itself: step back by the bits at and above the query's own.
    b_place = tl.load(p_sum + o_word, mask=m_pair, other=0) - popcount(b_word & ~b_below)
    tl.store(p_pair + b_place, (query_0 + o_local) * N_SELECT + o_slot, mask=m_pair)


@triton.jit(do_not_specialize=INDEX_COUNTS)
def cut_kernel(
    p_total, p_low, p_high, p_last_segment, p_item,
    n_blocks, n_tiles, n_items, n_segments, rows_each, tiles_each, n_chunks, stride_chunk,
    SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The ranges of one chunk's items and whose item each of its segments is, `n_items` for unused ones."""
    i_chunk = tl.program_id(0)
    i_row = i_chunk // n_chunks * rows_each
    i_tile = i_chunk % n_chunks * tiles_each
    i_end = tl.minimum(i_tile + tiles_each, n_tiles)
    o_chunk = i_chunk.to(tl.int64) * stride_chunk
    p_item += o_chunk
    n_before = n_items * 0
    for i in range(0, n_items, BLOCK):
        o_item = i + tl.arange(0, BLOCK)
        m_item = o_item < n_items
        o_word = (i_row.to(tl.int64) * n_blocks + o_item) * n_tiles
        b_low = tl.load(p_total + o_word + i_tile - 1, mask=m_item & (o_word + i_tile > 0), other=0)
        b_high = tl.load(p_total + o_word + i_end - 1, mask=m_item, other=0)
        b_count = tl.where(m_item, (b_high - b_low + SEGMENT - 1) // SEGMENT, 0)
        b_last = n_before + tl.cumsum(b_count, 0)
        tl.store(p_low + o_chunk + o_item, b_low, mask=m_item)
        tl.store(p_high + o_chunk + o_item, b_high, mask=m_item)
        tl.store(p_last_segment + o_chunk + o_item, b_last, mask=m_item)
        for j in range(0, tl.max(b_count, 0)):
            tl.store(p_item + b_last - b_count + j, o_item, mask=j < b_count)
        n_before += tl.sum(b_count, 0)
    for i in range(n_before, n_segments, BLOCK):
        o_segment = i + tl.arange(0, BLOCK)
        tl.store(p_item + o_segment, tl.zeros([BLOCK], tl.int32) + n_items, mask=o_segment < n_segments)


@triton.jit
def first_query(
    o_segment, n_used, p_pair, p_item, p_low, p_high, p_last_segment, N_SELECT: tl.constexpr, SEGMENT: tl.constexpr
):
    """The query each segment starts with, `LAST` for unused segments."""
    m_used = o_segment < n_used
    b_item = tl.load(p_item + o_segment, mask=m_used, other=0)
    b_low = tl.load(p_low + b_item, mask=m_used, other=0)
    b_high = tl.load(p_high + b_item, mask=m_used, other=0)
    b_first = tl.load(p_last_segment + b_item, mask=m_used, other=0) - (b_high - b_low + SEGMENT - 1) // SEGMENT
    b_pair = tl.load(p_pair + b_low + (o_segment - b_first) * SEGMENT, mask=m_used, other=0)
    return tl.where(m_used, b_pair // N_SELECT, LAST)


@triton.jit(do_not_specialize=INDEX_COUNTS)
def order_kernel(
    p_order, p_pair, p_item, p_low, p_high, p_last_segment, n_items, n_segments, stride_chunk,
    N_SELECT: tl.constexpr, SEGMENT: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Segments by (first query, number): a segment's place is the number of segments before it.

    Without RANK the first queries themselves are written, to be sorted.
    """
    o_chunk = tl.program_id(1).to(tl.int64) * stride_chunk
    p_order += o_chunk
    p_item += o_chunk
    p_low += o_chunk
    p_high += o_chunk
    p_last_segment += o_chunk
    n_used = tl.load(p_last_segment + n_items - 1)
    o_own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_own = first_query(o_own, n_used, p_pair, p_item, p_low, p_high, p_last_segment, N_SELECT, SEGMENT)
    if RANK:
        b_own = (b_own.to(tl.int64) << 32) + o_own
        b_rank = tl.zeros([BLOCK], tl.int32)
        for i in range(0, n_used, OTHERS):
            o_other = i + tl.arange(0, OTHERS)
            b_other = first_query(o_other, n_used, p_pair, p_item, p_low, p_high, p_last_segment, N_SELECT, SEGMENT)
            b_other = (b_other.to(tl.int64) << 32) + o_other
            b_rank += tl.sum((b_other[None, :] < b_own[:, None]).to(tl.int32), 1)
        # Unused segments are the last ones and stay where they are.
        b_rank = tl.where(o_own < n_used, b_rank, o_own)
        tl.store(p_order + b_rank, o_own, mask=o_own < n_segments)
    else:
        tl.store(p_order + o_own, b_own, mask=o_own < n_segments)


class Tables(NamedTuple):
    """int32 tables: where blocks and documents of varlen sequences start and end, None for fixed-length ones; and
    `start`, `q_start` by the name that kernels have for it, if there is one. Tokens are counted in the row of keys."""

    doc_start: Tensor | None = None  # [S] first token of each query's document
    offset: Tensor | None = None  # [S] number of the first block of each query's document
    first_token: Tensor | None = None  # [J] of each block
    end_token: Tensor | None = None  # [J] one past the last token of the block's document
    start: dict[str, Tensor] = {}  # noqa: RUF012  never written to


FIXED_LENGTH = Tables()


def block_tables(sequences: Sequences, n_keys: int, select_block: int) -> Tables:
    start = {} if sequences.q_start is None else start_table(sequences.q_start)
    if sequences.cu_seqlens is None:
        return FIXED_LENGTH._replace(start=start) if start else FIXED_LENGTH
    blocks = Blocks(sequences, n_keys, select_block)
    first, _, end = blocks.places
    return Tables(sequences.documents.start.int(), blocks.offset.int(), first.int(), end.int(), start)


@dataclass(frozen=True)
class Shapes:
    """One problem of the selected branch without its values: what all its kernels are launched with."""

    q: Layout
    k: Layout
    v: Layout
    indices: Layout
    select_block: int
    # None for fixed-length sequences.
    n_documents: int | None
    # Whether the queries start at `q_start` of their keys, which may be more than there are queries.
    offset: bool = False

    @property
    def n_tokens(self) -> int:
        """Queries per batch entry."""
        return self.q.shape[1]

    @property
    def n_keys(self) -> int:
        return self.k.shape[1]

    @property
    def n_groups(self) -> int:
        return self.k.shape[2]

    @property
    def rows(self) -> int:
        return self.q.shape[0] * self.n_groups

    @property
    def heads(self) -> int:
        """Per group."""
        return self.q.shape[2] // self.n_groups

    @property
    def n_select(self) -> int:
        return self.indices.shape[3]

    @property
    def d_k(self) -> int:
        return self.q.shape[3]

    @property
    def d_v(self) -> int:
        return self.v.shape[3]

    @property
    def n_blocks(self) -> int:
        """The number of selection blocks, counted as `sequences.Blocks` does."""
        if self.n_documents is None:
            return triton.cdiv(self.n_keys, self.select_block)
        return self.n_keys // self.select_block + self.n_documents

    @property
    def packing(self) -> dict[str, Any]:
        return {"SELECT_BLOCK": self.select_block, "VARLEN": self.n_documents is not None}

    @property
    def last_start(self) -> dict[str, int]:
        """The greatest possible `q_start`, for kernels that are given one."""
        return {"max_start": self.n_keys - self.n_tokens} if self.offset else {}

    @property
    def block_sizes(self) -> dict[str, int]:
        """Tile sizes that a matmul accepts; what exceeds the tensor is masked."""
        return {
            "BLOCK_N": max(16, triton.next_power_of_2(self.select_block)),
            "BLOCK_DK": block_width(self.d_k),
            "BLOCK_DV": block_width(self.d_v),
        }

    @property
    def attention(self) -> dict[str, Any]:
        """The arguments that kernels with attention matmuls have in common."""
        return {
            "n_groups": self.n_groups,
            **strides(q_bth=self.q, k_bng=self.k, v_bng=self.v),
            "H": self.heads,
            "N_SELECT": self.n_select,
            "D_K": self.d_k,
            "D_V": self.d_v,
            "SELECT_BLOCK": self.select_block,
            **self.block_sizes,
        }

    def with_indices(self, n_select: int, select_block: int) -> Shapes:
        """The same shapes with a contiguous selection of `n_select` blocks of `select_block` tokens."""
        indices = new_layout((*self.indices.shape[:3], n_select), self.indices.dtype, self.indices.device)
        return replace(self, indices=indices, select_block=select_block)


def halve_blocks(indices: Tensor) -> Tensor:
    """The same tokens in blocks of half the length: block `j` is `2j` and `2j + 1`, still ascending, -1 for none."""
    halves = torch.stack([2 * indices, 2 * indices + 1], dim=-1)
    return halves.masked_fill((indices < 0)[..., None], -1).flatten(-2)


class Bitmap:
    """Launches over the pairs of queries `[query_0, query_1)`; `mark` alone makes the bitmap, of zeros of its `shape`:
    rows, blocks, tiles of 32 queries."""

    def __init__(self, shapes: Shapes, query_0: int, query_1: int) -> None:
        length = query_1 - query_0
        self.shape = (shapes.rows, shapes.n_blocks, triton.cdiv(length, WORD))
        self.size = shapes.rows * shapes.n_blocks * self.shape[2]
        self.grid = (triton.cdiv(length * shapes.n_select, PAIRS_PER_CTA), shapes.rows)
        self.bound: dict[str, Any] = {
            **strides(_btg=shapes.indices),
            "n_groups": shapes.n_groups,
            "n_blocks": shapes.n_blocks,
            "n_tiles": self.shape[2],
            "query_0": query_0,
            "n_queries": length,
            "N_SELECT": shapes.n_select,
            **shapes.packing,
            **shapes.last_start,
            "BLOCK": PAIRS_PER_CTA,
        }
        self.mark = Launch(mark_kernel, self.grid, **self.bound)


class Chunk(NamedTuple):
    """The work of one launch over blocks: rows `[row_0, row_0 + n_rows)`, queries `[query_0, query_0 + n_queries)`.

    An item is a (row, block), numbered `(row - row_0) * n_blocks + block`.
    """

    row_0: int
    n_rows: int
    query_0: int
    n_queries: int
    n_items: int
    n_segments: int

    @property
    def where(self) -> dict[str, int]:
        return {"row_0": self.row_0, "query_0": self.query_0, "n_queries": self.n_queries}


class Segments(NamedTuple):
    """The tables of a chunk that kernels read. Tensors may be longer than what is in use."""

    pair: Tensor  # `t * n + slot` of the queries of all chunks, sorted by row, block and query
    low: Tensor  # [items] range of `pair`
    high: Tensor  # [items]
    last_segment: Tensor  # [items] one past the number of the item's last segment
    item: Tensor  # [segments] whose each segment is; `n_items` where unused
    order: Tensor | None = None  # [segments] which segment each CTA takes; None: its own number


class IndexPlan:
    """How the inverted index of queries `[query_0, query_1)` is built, and the chunks it is cut into."""

    def __init__(self, shapes: Shapes, query_0: int, query_1: int, *, fit: int, segment: int, in_order: bool) -> None:
        self.device = shapes.q.device
        self.bitmap = bitmap = Bitmap(shapes, query_0, query_1)
        length, n_tiles = query_1 - query_0, bitmap.shape[2]
        if fit >= length:
            # The largest divisor.
            rows_each = max(n for n in range(1, min(shapes.rows, fit // length) + 1) if shapes.rows % n == 0)
            tiles_each = n_tiles
        else:
            # As even as possible: a short chunk at the end would cost a launch for little.
            rows_each, tiles_each = 1, triton.cdiv(n_tiles, triton.cdiv(n_tiles, fit // WORD))
        n_chunks = triton.cdiv(n_tiles, tiles_each)
        n_items = rows_each * shapes.n_blocks
        n_pairs = rows_each * min(tiles_each * WORD, length) * shapes.n_select
        n_segments = n_pairs // segment + n_items
        self.chunks = [
            Chunk(
                row_0=row,
                n_rows=rows_each,
                query_0=query_0 + tile * WORD,
                n_queries=min(tiles_each * WORD, length - tile * WORD),
                n_items=n_items,
                n_segments=n_segments,
            )
            for row in range(0, shapes.rows, rows_each)
            for tile in range(0, n_tiles, tiles_each)
        ]
        self.in_order = in_order and min(tiles_each, n_tiles) * WORD >= SORT_FROM_QUERIES
        self.ranked = n_segments <= MAX_RANKED

        items, segments = aligned_size(n_items), aligned_size(n_segments)
        per_chunk = [items, items, items, segments, *([segments] if self.in_order else [])]
        self.per_chunk = len(per_chunk)
        stride_chunk = sum(per_chunk)
        self.sizes = [
            aligned_size(bitmap.size),
            aligned_size(bitmap.size),
            aligned_size(shapes.rows * length * shapes.n_select),
            *(per_chunk * len(self.chunks)),
        ]
        self.size, n_words = sum(self.sizes), self.sizes[0]
        self.count = Launch(count_kernel, (triton.cdiv(n_words, WORDS_PER_CTA),), n_words=n_words, BLOCK=WORDS_PER_CTA)
        self.place = Launch(place_kernel, bitmap.grid, **bitmap.bound)
        self.cut = Launch(
            cut_kernel, (len(self.chunks),), n_blocks=shapes.n_blocks, n_tiles=n_tiles, n_items=n_items,
            n_segments=n_segments, rows_each=rows_each, tiles_each=tiles_each, n_chunks=n_chunks,
            stride_chunk=stride_chunk, SEGMENT=segment,
            BLOCK=min(ITEMS_PER_STEP, max(16, triton.next_power_of_2(n_items))), num_warps=8,
        )  # fmt: skip
        self.order = Launch(
            order_kernel, (triton.cdiv(n_segments, RANKED_PER_CTA), len(self.chunks)), n_items=n_items,
            n_segments=n_segments, stride_chunk=stride_chunk, N_SELECT=shapes.n_select, SEGMENT=segment,
            RANK=self.ranked, BLOCK=RANKED_PER_CTA, OTHERS=COMPARED_PER_STEP,
        )  # fmt: skip

    def steps(self, indices: Tensor, tables: Tables) -> tuple[list[partial[Any]], list[Segments]]:
        """The steps that build the index, for the caller to run in order (from here they would be a frame deeper), and
        what the index then holds of each chunk."""
        views = torch.empty(self.size, dtype=torch.int32, device=self.device).split(self.sizes)
        word, total, pair, low, high, last, item = views[:7]
        doc_start, offset, *_, start = tables
        pairs = {"p_indices": indices, "p_word": word, "p_doc_start": doc_start, "p_block_offset": offset, **start}
        items = {"p_low": low, "p_high": high, "p_last_segment": last, "p_item": item}
        steps: list[partial[Any]] = [
            partial(word.zero_),
            partial(self.bitmap.mark, **pairs),
            partial(self.count, p_word=word, p_count=total),
            partial(total.cumsum_, 0),
            partial(self.place, p_sum=total, p_pair=pair, **pairs),
            partial(self.cut, p_total=total, **items),
        ]
        n = self.per_chunk
        segments = [Segments(pair, *views[i : i + n]) for i in range(3, len(views), n)]
        if self.in_order:
            steps.append(partial(self.order, p_order=views[7], p_pair=pair, **items))
            if not self.ranked:
                steps.append(partial(self.sort, segments))
        return steps, segments

    def sort(self, segments: list[Segments]) -> None:
        for chunk, one in zip(self.chunks, segments, strict=True):
            assert one.order is not None
            order = one.order[: chunk.n_segments]
            order.copy_(order.argsort(stable=True))


def index_plans(
    shapes: Shapes, *, bytes_per_query: int, budget: int, segment: int, in_order: bool = False
) -> list[IndexPlan]:
    """Cut the work so that `bytes_per_query` of scratch for each (row, query) stay below `budget`.

    `in_order`: segments of long chunks go by their first query: CTAs that run together then read much the same queries
    from the L2.

    Rows come one after the other with as many queries as fit, because a block's keys are read once per chunk.
    """
    part = max(WORD, MAX_WORDS // (shapes.rows * shapes.n_blocks) * WORD)
    fit = max(WORD, budget // bytes_per_query)
    n = shapes.n_tokens
    return [
        IndexPlan(shapes, start, min(start + part, n), fit=fit, segment=segment, in_order=in_order)
        for start in range(0, n, part)
    ]


def aligned_size(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
