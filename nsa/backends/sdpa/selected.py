"""The selected branch by block: every block gathers the queries that selected it.

Gathering keys per query would move `n_select * select_block` rows for each query; gathering queries per block moves
`n_select * h`, an order of magnitude less, and makes the matmuls larger. The pairs (query, selected block) of a chunk
are sorted by block and split into tiles of `M` queries. Each tile attends to its one block, and the partials of a query
are merged by their LSE. The number of tiles has a bound that depends on shapes alone, so the host never waits. With
`M = 1` this is the plain gather that a decoding step needs.

The gradients of keys and values are sums over a block's tiles, which are contiguous: a segment sum in a fixed order,
bitwise deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.backends.gated import without_gate
from nsa.backends.sdpa.layout import compute_dtype, group_lse, group_queries, group_rows, score_budget, ungroup_queries
from nsa.backends.sdpa.tile import is_fused, tile_backward, tile_forward
from nsa.dtypes import sum_dtype
from nsa.geometry import exclusive_offsets
from nsa.sequences import Blocks, Saved, Selected, Upstream

MAX_TILE = 64
# A document's first block may be read by few queries, yet takes a tile, whose memory equals that of this many pairs.
PAIRS_PER_EXTRA_BLOCK = 16


def block_starts(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """`[J]` first token of each block in the row, and its position in the document."""
    if blocks.sequences.cu_seqlens is None:
        first = torch.arange(blocks.count, device=blocks.sequences.device) * blocks.size
        return first, first
    return blocks.places[:2]


def readable_blocks(blocks: Blocks, c0: int, c1: int) -> tuple[Tensor, Tensor]:
    """`block_starts` of the blocks that queries `[c0, c1)` can read, from block `offset[c0]` on. A chunk has no more
    documents than queries, whatever the number in the batch."""
    first_token, first_position = block_starts(blocks)
    n_blocks = -(-c1 // blocks.size)
    if blocks.sequences.cu_seqlens is None:
        return first_token[:n_blocks], first_position[:n_blocks]
    n_blocks = min(blocks.count, n_blocks + min(n_extra(blocks), c1 - c0))
    number = blocks.offset[c0] + torch.arange(n_blocks, device=blocks.offset.device)
    number = number.clamp_max(blocks.count - 1)
    return first_token[number], first_position[number]


def n_extra(blocks: Blocks) -> int:
    """The most blocks on top of one per `size` tokens: one for each document of a varlen batch."""
    return 0 if blocks.sequences.cu_seqlens is None else blocks.sequences.documents.count


@dataclass(frozen=True)
class Tiles:
    """A chunk's pairs, sorted by block and split into tiles of `M`; pair `(row * C + query) * n + slot`."""

    pair: Tensor  # [T * M] pair at each place, 0 where the place is unused
    used: Tensor  # [T, M]
    place: Tensor  # [P] place of each pair; the first place of the last tile for a pair that reads nothing
    row: Tensor  # [T] row (batch and group) of keys
    block: Tensor  # [T] block of that row
    per_block: Tensor  # [rows * J] tiles per block; unused tiles follow, the last one is always unused


def split_pairs(number: Tensor, n_blocks: int, size: int) -> Tiles:
    """`number [R, C, n]`: the block that each pair reads, below 0 for none. No shape depends on values."""
    rows = number.shape[0]
    device = number.device
    n_keys = rows * n_blocks
    row = torch.arange(rows, device=device).view(-1, 1, 1)
    key = torch.where(number >= 0, row * n_blocks + number, n_keys).flatten()
    n_pairs = key.numel()
    n_tiles = min(n_pairs, n_pairs // size + n_keys) + 1

    sorted_key, order = key.sort(stable=True)
    bounds = torch.searchsorted(sorted_key, torch.arange(n_keys + 1, device=device))
    per_block = torch.div(bounds.diff() + size - 1, size, rounding_mode="floor")
    first_tile = exclusive_offsets(per_block)
    rank = torch.arange(n_pairs, device=device) - bounds[sorted_key]
    place_sorted = torch.where(sorted_key < n_keys, first_tile[sorted_key] * size + rank, (n_tiles - 1) * size)

    pair = torch.full((n_tiles * size,), -1, dtype=torch.long, device=device).scatter(0, place_sorted, order)
    pair[-size:] = -1
    place = torch.empty_like(order).scatter(0, order, place_sorted)
    tile_key = torch.searchsorted(first_tile[1:].contiguous(), torch.arange(n_tiles, device=device), right=True)
    tile_key = tile_key.clamp_max(n_keys - 1)
    row, block = torch.div(tile_key, n_blocks, rounding_mode="floor"), tile_key % n_blocks
    return Tiles(pair.clamp_min(0), (pair >= 0).view(n_tiles, size), place, row, block, per_block)


@dataclass(frozen=True)
class QueryChunk:
    """Queries `[c0, c1)` of every row, split into tiles, with the indices that forward and backward gather by."""

    c0: int
    c1: int
    tiles: Tiles
    query: Tensor  # [T * M] row * S + query of each place
    token: Tensor  # [T, L] (b * N + key) * G + g
    hidden: Tensor  # [T, M, L]
    n_select: int
    first_token: Tensor  # [J] first token of each block

    def gather_queries(self, x: Tensor) -> Tensor:
        """`[R, S, h, ...]` to `[T, M, h, ...]`."""
        return x.flatten(0, 1).index_select(0, self.query).unflatten(0, self.tiles.used.shape)

    def gather_keys(self, x: Tensor) -> Tensor:
        """`[B, N, G, D]` to `[T, L, D]`; a cache is read here only, so only selected blocks are touched."""
        x = x.flatten(0, 2).index_select(0, self.token.flatten())
        return x.to(compute_dtype(x)).view(*self.token.shape, -1)

    def per_pair(self, x: Tensor, missing: float) -> Tensor:
        """`[T, M, ...]` per place back to `[R, C, n, ...]` per pair; `missing` where the pair reads nothing."""
        x[-1] = missing
        return x.flatten(0, 1).index_select(0, self.tiles.place).unflatten(0, (-1, self.c1 - self.c0, self.n_select))

    def row_sum(self, x: Tensor) -> Tensor:
        """`[T, M, h]` summed over all places of the same query, and broadcast back to them."""
        total = self.per_pair(x, missing=0.0).sum(dim=2)
        query = torch.div(self.tiles.pair, self.n_select, rounding_mode="floor")
        return total.flatten(0, 1).index_select(0, query).view_as(x)

    def add_blocks(self, total: Tensor, x: Tensor) -> None:
        """Add per-tile key gradients `x [T, L, D]` to `total [B, N, G, D]`, a block's tiles in order.

        A document's last block reaches past its end, where it adds exact zeros: no token gets two contributions.
        """
        batch, n_keys, n_groups, head_dim = total.shape
        device = x.device
        lengths = self.tiles.per_block
        lengths = torch.cat([lengths, (x.shape[0] - lengths.sum())[None]])
        sums = torch.segment_reduce(x.flatten(1), "sum", lengths=lengths, axis=0, unsafe=True)[:-1]
        token = self.first_token[:, None] + torch.arange(self.token.shape[1], device=device)
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        g = torch.arange(n_groups, device=device).view(1, -1, 1, 1)
        row = (b * n_keys + token.clamp_max(n_keys - 1)) * n_groups + g
        total.view(-1, head_dim).index_add_(0, row.flatten(), sums.view(-1, head_dim))


def chunks(indices: Tensor, blocks: Blocks, pairs_at_once: int) -> Iterator[QueryChunk]:
    """Chunks of queries with at most `pairs_at_once` pairs each."""
    batch, n_queries, n_groups, n_select = indices.shape
    sequences, n_keys, select_block = blocks.sequences, blocks.n_keys, blocks.size
    varlen = sequences.cu_seqlens is not None
    device = indices.device
    rows = batch * n_groups
    position = sequences.positions.expand(batch, -1).repeat_interleave(n_groups, dim=0)
    number = indices.long().transpose(1, 2).flatten(0, 1)
    # A block that starts after its query has no visible key: the same as no block.
    reads = (number >= 0) & (number * select_block <= position[..., None])
    if varlen:
        number = number + blocks.offset[:, None]
    number = torch.where(reads, number, -1)

    inner = torch.arange(select_block, device=device)
    size = min(n_queries, chunk_size(pairs_at_once // rows, n_select, n_extra(blocks)))
    for c0 in range(0, n_queries, size):
        c1 = min(c0 + size, n_queries)
        number_c = number[:, c0:c1]
        # Queries of a cache may be anywhere among its keys.
        cached = sequences.q_start is not None
        if varlen and not cached:
            number_c = number_c - blocks.offset[c0]
        first_token, first_position = block_starts(blocks) if cached else readable_blocks(blocks, c0, c1)
        n_blocks = first_token.numel()
        tiles = split_pairs(number_c, n_blocks, tile_size((c1 - c0) * n_select, n_blocks))

        query_of_pair = torch.div(tiles.pair, n_select, rounding_mode="floor")
        row = torch.div(query_of_pair, c1 - c0, rounding_mode="floor")
        query = row * n_queries + c0 + query_of_pair % (c1 - c0)
        token = first_token[tiles.block][:, None] + inner
        key_position = first_position[tiles.block][:, None] + inner
        q_position = torch.where(tiles.used, position.flatten()[query].view_as(tiles.used), -1)
        # Row `b * G + g` of keys begins there when `[B, N, G, D]` is viewed as rows of `D`.
        begin = torch.div(tiles.row, n_groups, rounding_mode="floor") * (n_keys * n_groups) + tiles.row % n_groups
        token = begin[:, None] + token.clamp_max(n_keys - 1) * n_groups
        hidden = key_position[:, None] > q_position[..., None]
        yield QueryChunk(c0, c1, tiles, query, token, hidden, n_select, first_token)


def chunk_size(pairs_per_row: int, n_select: int, n_extra: int) -> int:
    """Queries per chunk: each has `n_select` pairs and up to one extra block, `n_extra` in total."""
    few_extra = (pairs_per_row - n_extra * PAIRS_PER_EXTRA_BLOCK) // n_select
    return max(1, few_extra, pairs_per_row // (n_select + PAIRS_PER_EXTRA_BLOCK))


def tile_size(pairs_per_row: int, n_blocks: int) -> int:
    """The largest power of two that keeps unused places below about half; a block wastes half a tile on average."""
    size = 1
    while size < MAX_TILE and 2 * size * n_blocks <= pairs_per_row:
        size *= 2
    return size


def pairs_within_budget(q: Tensor, heads: int, select_block: int, *, fused: bool) -> int:
    return score_budget(q, fused=fused) // (heads * select_block)


def selected_forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, branch: Selected) -> tuple[Tensor, Tensor]:
    batch, _, n_heads, _ = q.shape
    n_keys, n_groups = k.shape[1:3]
    # A block longer than the keys holds them all.
    blocks = Blocks(branch.sequences, n_keys, min(branch.select_block, n_keys))
    qg = group_queries(q, n_groups)
    o = torch.empty(*qg.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(qg.shape[:3], dtype=sum_dtype(q), device=q.device)
    pairs = pairs_within_budget(q, n_heads // n_groups, blocks.size, fused=is_fused(q, v))
    for chunk in chunks(indices, blocks, pairs):
        keys = (chunk.gather_keys(k), chunk.gather_keys(v))
        o_tile, lse_tile = tile_forward(chunk.gather_queries(qg), *keys, chunk.hidden, branch.scale)
        lse_pair = chunk.per_pair(lse_tile, missing=float("-inf"))
        lse_c = lse_pair.logsumexp(dim=2)
        weight = (lse_pair - lse_c.masked_fill(lse_c == float("-inf"), 0.0)[:, :, None]).exp_()
        o_pair = chunk.per_pair(o_tile, missing=0.0)
        o[:, chunk.c0 : chunk.c1] = (weight[..., None] * o_pair).sum(dim=2)
        lse[:, chunk.c0 : chunk.c1] = lse_c
    return ungroup_queries(o, batch, q.dtype), ungroup_queries(lse, batch, lse.dtype)


@without_gate
def selected_backward(upstream: Upstream, saved: Saved, branch: Selected) -> tuple[Tensor, Tensor, Tensor]:
    do, dlse, *_ = upstream
    q, k, v, o, lse, indices = saved
    assert indices is not None
    batch, _, n_heads, _ = q.shape
    n_keys, n_groups = k.shape[1:3]
    # A block longer than the keys holds them all.
    blocks = Blocks(branch.sequences, n_keys, min(branch.select_block, n_keys))
    qg, dog, og = (group_queries(x, n_groups) for x in (q, do, o))
    lse_g = group_lse(lse, n_groups)
    dlse_g = None if dlse is None else group_rows(dlse, n_groups)
    dq = torch.empty(qg.shape, dtype=q.dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=sum_dtype(q), device=q.device)
    dv = torch.zeros(v.shape, dtype=sum_dtype(q), device=q.device)
    fused = dlse is None and is_fused(q, v)
    pairs = pairs_within_budget(q, n_heads // n_groups, blocks.size, fused=fused)
    for chunk in chunks(indices, blocks, pairs):
        do_c, q_c, o_c, lse_c = map(chunk.gather_queries, (dog, qg, og, lse_g))
        given = Upstream(do_c, None if dlse_g is None else chunk.gather_queries(dlse_g))
        inputs = Saved(q_c, chunk.gather_keys(k), chunk.gather_keys(v), o_c, lse_c)
        dq_tile, dk_tile, dv_tile = tile_backward(given, inputs, chunk.hidden, branch.scale, chunk.row_sum)
        dq[:, chunk.c0 : chunk.c1] = chunk.per_pair(dq_tile, missing=0.0).sum(dim=2, dtype=sum_dtype(q))
        chunk.add_blocks(dk, dk_tile)
        chunk.add_blocks(dv, dv_tile)
    return ungroup_queries(dq, batch, q.dtype), dk.to(k.dtype), dv.to(v.dtype)
