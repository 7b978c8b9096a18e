"""The choice turned round: for every block the queries that chose it, built on the GPU, in a fixed order.

A query chooses a block at most once, so "who chose block j" is a bitmap over the queries: one 32-bit word for each
block and each tile of 32 queries. Setting bits commutes, so the bitmap does not depend on the order of the atomics;
counting its bits gives the number of choosers, counting those below a query's own bit gives the query's rank, and one
running sum over `[row, block, tile]` gives every pair its place in a list sorted by row, block and query:

    place(t, j) = sum of all counts before (row, j, t // 32)  +  popcount(word & bits below t % 32)

Three elementwise kernels and a running sum; no sort, no value read back. Because a block's list ascends in `t`, the
part of it that falls into a chunk of queries is a range, whose ends are entries of the same running sum. Ranges are cut
into segments of bounded length, so that block 0, which every query takes, is shared by many programs; how many segments
there can be at most follows from shapes.

Grids: `mark` and `place` one program a (tile of pairs, row); `count` one a tile of words. A pair is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.primitives import COUNTS
from nsa.geometry import documents, exclusive_offsets

WORD = 32
# Words of the bitmap at most: past that the queries are indexed in several parts, so memory stays linear.
MAX_WORDS = 1 << 25
# Rows of shorter sequences stay in the L2 whatever the order.
SORT_FROM_QUERIES = 8192
PAIRS_PER_PROGRAM = 512
WORDS_PER_PROGRAM = 2048


@triton.jit
def chosen_block(
    p_indices,
    o_t,
    o_slot,
    m_pair,
    stride_t,
    p_doc_start,
    p_block_offset,
    SELECT_BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Number of the block that each (query, slot) reads, -1 for none: padding, or a block that starts after it."""
    b_index = tl.load(p_indices + o_t.to(tl.int64) * stride_t + o_slot, mask=m_pair, other=-1)
    if PACKED:
        b_start = tl.load(p_doc_start + o_t, mask=m_pair, other=0)
        b_offset = tl.load(p_block_offset + o_t, mask=m_pair, other=0)
        b_reads = (b_index >= 0) & (b_index <= (o_t - b_start) // SELECT_BLOCK)
        b_number = b_index + b_offset
    else:
        b_reads = (b_index >= 0) & (b_index <= o_t // SELECT_BLOCK)
        b_number = b_index
    return tl.where(b_reads, b_number, -1)


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


@triton.jit(do_not_specialize=COUNTS)
def mark_kernel(
    p_indices, p_word, p_doc_start, p_block_offset,
    stride_b, stride_t, stride_g, n_groups, n_blocks, n_tiles, query_0, n_queries,
    N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Set the bit of every (query, chosen block)."""
    i_row = tl.program_id(1)
    o_pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_local = o_pair // N_SELECT
    o_slot = o_pair % N_SELECT
    m_pair = o_local < n_queries
    p_row = p_indices + (i_row // n_groups).to(tl.int64) * stride_b + (i_row % n_groups).to(tl.int64) * stride_g
    b_block = chosen_block(
        p_row, query_0 + o_local, o_slot, m_pair, stride_t, p_doc_start, p_block_offset, SELECT_BLOCK, PACKED
    )
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
    N_SELECT: tl.constexpr, SELECT_BLOCK: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write every pair `t * N_SELECT + slot` to its place."""
    i_row = tl.program_id(1)
    o_pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_local = o_pair // N_SELECT
    o_slot = o_pair % N_SELECT
    m_pair = o_local < n_queries
    p_row = p_indices + (i_row // n_groups).to(tl.int64) * stride_b + (i_row % n_groups).to(tl.int64) * stride_g
    b_block = chosen_block(
        p_row, query_0 + o_local, o_slot, m_pair, stride_t, p_doc_start, p_block_offset, SELECT_BLOCK, PACKED
    )
    m_pair = m_pair & (b_block >= 0)
    o_word = (i_row.to(tl.int64) * n_blocks + b_block) * n_tiles + o_local // 32
    b_word = tl.load(p_word + o_word, mask=m_pair, other=0)
    b_below = (tl.full([BLOCK], 1, tl.int32) << (o_local % 32)) - 1
    # The running sum includes the word itself: step back by the bits at and above the query's own.
    b_place = tl.load(p_sum + o_word, mask=m_pair, other=0) - popcount(b_word & ~b_below)
    tl.store(p_pair + b_place, (query_0 + o_local) * N_SELECT + o_slot, mask=m_pair)


@dataclass(frozen=True)
class Blocks:
    """Where the selection blocks lie. Unpacked, block `j` starts at `j * select_block` and nothing is stored."""

    count: int
    select_block: int
    doc_start: Tensor | None = None  # [S] first token of each query's document
    offset: Tensor | None = None  # [S] number of the first block of each query's document
    first_token: Tensor | None = None  # [J]
    end_token: Tensor | None = None  # [J] one past the last token of the block's document

    @classmethod
    def of(cls, n_tokens: int, select_block: int, cu_seqlens: Tensor | None) -> Blocks:
        if cu_seqlens is None:
            return cls(-(-n_tokens // select_block), select_block)
        packed = documents(cu_seqlens, n_tokens)
        offsets = exclusive_offsets(torch.div(packed.lengths + select_block - 1, select_block, rounding_mode="floor"))
        count = n_tokens // select_block + packed.count
        number = torch.arange(count, device=cu_seqlens.device)
        document = torch.searchsorted(offsets[1:].contiguous(), number, right=True)
        unused = document >= packed.count
        document = document.clamp_max(packed.count - 1)
        first = packed.cu_seqlens[document] + (number - offsets[document]) * select_block
        # Numbers past the last block own no token.
        first = torch.where(unused, n_tokens, first)
        end = torch.minimum(packed.cu_seqlens[document + 1], torch.full_like(first, n_tokens))
        return cls(
            count,
            select_block,
            packed.start.int(),
            offsets[packed.index].int(),
            first.int(),
            torch.where(unused, n_tokens, end).int(),
        )

    @property
    def packed(self) -> bool:
        return self.first_token is not None


def halve_blocks(indices: Tensor, select_block: int) -> tuple[Tensor, int]:
    """The same tokens in blocks of half the length: block `j` is `2j` and `2j + 1`, still ascending, -1 for none."""
    halves = torch.stack([2 * indices, 2 * indices + 1], dim=-1)
    halves = halves.masked_fill((indices < 0)[..., None], -1)
    return halves.flatten(-2), select_block // 2


@dataclass(frozen=True)
class Index:
    """Queries `[query_0, query_1)` of every row, sorted by row, block, query."""

    query_0: int
    query_1: int
    pair: Tensor  # [R * C * n] int32 `t * n + slot`; as many in use as there are pairs that read something
    count: Tensor  # [R, J, tiles] int32 how many queries of each tile chose each block
    total: Tensor  # [R, J, tiles] int32 inclusive running sum of `count`


def pair_launch(
    indices: Tensor, blocks: Blocks, query_0: int, query_1: int
) -> tuple[tuple[int, int], dict[str, object], Tensor]:
    """Grid and arguments of a kernel over the pairs of queries `[query_0, query_1)`, and their bitmap, not yet set."""
    batch, _, n_groups, n_select = indices.shape
    rows, length = batch * n_groups, query_1 - query_0
    n_tiles = triton.cdiv(length, WORD)
    word = torch.zeros(rows, blocks.count, n_tiles, dtype=torch.int32, device=indices.device)
    arguments = {
        "p_indices": indices,
        "p_word": word,
        "p_doc_start": blocks.doc_start,
        "p_block_offset": blocks.offset,
        "stride_b": indices.stride(0),
        "stride_t": indices.stride(1),
        "stride_g": indices.stride(2),
        "n_groups": n_groups,
        "n_blocks": blocks.count,
        "n_tiles": n_tiles,
        "query_0": query_0,
        "n_queries": length,
        "N_SELECT": n_select,
        "SELECT_BLOCK": blocks.select_block,
        "PACKED": blocks.packed,
        "BLOCK": PAIRS_PER_PROGRAM,
    }
    return (triton.cdiv(length * n_select, PAIRS_PER_PROGRAM), rows), arguments, word


def mark(indices: Tensor, blocks: Blocks) -> Tensor:
    """The bitmap alone: `[rows, blocks, tiles of 32 queries]` int32."""
    grid, arguments, word = pair_launch(indices, blocks, 0, indices.shape[1])
    mark_kernel[grid](**arguments)
    return word


def build_index(indices: Tensor, blocks: Blocks, query_0: int, query_1: int) -> Index:
    """The inverted index of queries `[query_0, query_1)`; both bounds multiples of 32, or the end."""
    grid, arguments, word = pair_launch(indices, blocks, query_0, query_1)
    mark_kernel[grid](**arguments)
    count = torch.empty_like(word)
    count_kernel[(triton.cdiv(word.numel(), WORDS_PER_PROGRAM),)](
        p_word=word, p_count=count, n_words=word.numel(), BLOCK=WORDS_PER_PROGRAM
    )
    total = count.view(-1).cumsum(0, dtype=torch.int32).view_as(count)
    rows, n_select = word.shape[0], indices.shape[3]
    pair = torch.empty(rows * (query_1 - query_0) * n_select, dtype=torch.int32, device=indices.device)
    place_kernel[grid](**arguments, p_sum=total, p_pair=pair)
    return Index(query_0, query_1, pair, count, total)


@dataclass(frozen=True)
class Launch:
    """One launch over blocks: rows `[row_0, row_1)`, queries `[query_0, query_1)`, its ranges and segments.

    An item is a (row, block), numbered `(row - row_0) * J + block`.
    """

    row_0: int
    row_1: int
    query_0: int
    query_1: int
    low: Tensor  # [items] int32 range of `Index.pair`
    high: Tensor  # [items]
    last_segment: Tensor  # [items] one past the number of the item's last segment
    item: Tensor  # [segments] int32 whose each segment is; `items`, one past the end, where unused
    order: Tensor  # [segments] int32 which segment each program takes
    pair: Tensor

    @property
    def n_items(self) -> int:
        return self.low.numel()

    @property
    def n_segments(self) -> int:
        return self.item.numel()

    @property
    def n_rows(self) -> int:
        return self.row_1 - self.row_0

    @property
    def n_queries(self) -> int:
        return self.query_1 - self.query_0


def launches(
    indices: Tensor,
    blocks: Blocks,
    *,
    bytes_per_query: int,
    budget: int,
    segment: int,
    in_order: bool = False,
) -> Iterator[Launch]:
    """Cut the queries' work so that `bytes_per_query` of scratch for each (row, query) stay below `budget`.

    `in_order`: long launches go by their first query.

    Rows come one after the other with as many queries as fit, because a block's keys are read once a launch.
    """
    batch, n_queries, n_groups, n_select = indices.shape
    rows = batch * n_groups
    part = max(WORD, MAX_WORDS // (rows * blocks.count) * WORD)
    fit = max(WORD, budget // bytes_per_query)
    for query_0 in range(0, n_queries, part):
        query_1 = min(query_0 + part, n_queries)
        index = build_index(indices, blocks, query_0, query_1)
        length = query_1 - query_0
        if fit >= length:
            rows_each, tiles_each = largest_divisor(rows, fit // length), index.count.shape[2]
        else:
            # As even as they come: a short one at the end would take a launch for little.
            n_chunks = triton.cdiv(index.count.shape[2], fit // WORD)
            rows_each, tiles_each = 1, triton.cdiv(index.count.shape[2], n_chunks)
        yield from cut(index, rows_each, tiles_each, segment, n_select, in_order)


def by_first_query(
    index: Index, item: Tensor, low: Tensor, high: Tensor, last: Tensor, number: Tensor, segment: int, n_select: int
) -> Tensor:
    """Segments by their first query: programs that run together then read much the same queries from the L2."""
    n_items = low.shape[1]
    owner = item.clamp_max(n_items - 1).long()
    first = last - torch.div(high - low + (segment - 1), segment, rounding_mode="floor")
    start = low.gather(1, owner) + (number - first.gather(1, owner)) * segment
    query = torch.div(index.pair[start.clamp(0, index.pair.numel() - 1).long()], n_select, rounding_mode="floor")
    return query.masked_fill(item == n_items, torch.iinfo(torch.int32).max).argsort(dim=1, stable=True).int()


def largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, min(n, limit) + 1) if n % d == 0)


def cut(index: Index, rows_each: int, tiles_each: int, segment: int, n_select: int, in_order: bool) -> Iterator[Launch]:
    rows, n_blocks, n_tiles = index.count.shape
    n_chunks = -(-n_tiles // tiles_each)
    begin = list(range(0, n_tiles, tiles_each))
    finish = [min(b + tiles_each, n_tiles) - 1 for b in begin]
    # `tiles_each` divides all but the end, so strided views reach the chunk bounds without an index tensor.
    low = index.total[:, :, ::tiles_each] - index.count[:, :, ::tiles_each]
    high = torch.cat([low[:, :, 1:], index.total[:, :, -1:]], dim=2)
    n_launches = rows // rows_each * n_chunks
    low, high = (x.transpose(1, 2).reshape(n_launches, rows_each * n_blocks).contiguous() for x in (low, high))
    last = torch.div(high - low + (segment - 1), segment, rounding_mode="floor").cumsum(1, dtype=torch.int32)
    n_pairs = rows_each * min(tiles_each * WORD, index.query_1 - index.query_0) * n_select
    n_segments = n_pairs // segment + rows_each * n_blocks
    number = torch.arange(n_segments, dtype=torch.int32, device=low.device).expand(n_launches, -1).contiguous()
    item = torch.searchsorted(last, number, right=True, out_int32=True)
    order = number
    if in_order and min(tiles_each, n_tiles) * WORD >= SORT_FROM_QUERIES:
        order = by_first_query(index, item, low, high, last, number, segment, n_select)
    for i in range(n_launches):
        row, chunk = i // n_chunks * rows_each, i % n_chunks
        yield Launch(
            row_0=row,
            row_1=row + rows_each,
            query_0=index.query_0 + begin[chunk] * WORD,
            query_1=min(index.query_0 + (finish[chunk] + 1) * WORD, index.query_1),
            low=low[i],
            high=high[i],
            last_segment=last[i],
            item=item[i],
            order=order[i],
            pair=index.pair,
        )
