"""Attention in which every query sees one contiguous range `[lo, hi)` of keys.

The compressed branch (complete blocks of the document) and the sliding branch (its last `w` tokens) have this form, for
fixed-length, varlen and cached sequences. Queries are split into tiles, and every tile attends to a slice of keys that
contains its ranges: a band along the diagonal for the window, the first keys for the compressed branch. As many tiles
as the budget allows are processed at once: memory is bounded, and a window costs a band, not a square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.backends.gated import without_gate
from nsa.backends.sdpa.layout import (
    group_keys,
    group_lse,
    group_queries,
    group_rows,
    score_budget,
    ungroup_keys,
    ungroup_queries,
)
from nsa.backends.sdpa.tile import is_fused, tile_backward, tile_forward
from nsa.dtypes import sum_dtype
from nsa.sequences import Compressed, Ranges, Saved, Selection, Sliding, Upstream, ranges_of

MIN_TILE = 16
# Queries per tile. The sliding branch computes `tile * (tile + window)` scores for `tile * window` visible ones; in the
# compressed branch the keys of a tile do not depend on its size.
SLIDING_TILE = 256
COMPRESSED_TILE = 512


@dataclass(frozen=True)
class Tiling:
    """The ranges of the queries, and slices of keys that contain them, known without reading the ranges.

    The slice of the tile that starts at query `c` starts at key `c - before` if `along` (a band), else at key 0. It has
    `n_slice_keys(tile, c1)` keys for tiles of that many queries that end before query `c1`.
    """

    ranges: Ranges
    tile: int
    along: bool
    before: int
    n_slice_keys: Callable[[int, int], int]

    @property
    def n_queries(self) -> int:
        return self.ranges.sequences.length

    def tile_within(self, rows: int, budget: int) -> int:
        """Queries per tile: halved until one tile of every row fits the budget."""
        size = self.tile
        while size > MIN_TILE and rows * size * self.n_slice_keys(size, self.n_queries) > budget:
            size //= 2
        return size

    def groups(self, rows: int, budget: int) -> Iterator[TileGroup]:
        """All tiles, in groups that fit the budget."""
        size = self.tile_within(rows, budget)
        n_tiles = -(-self.n_queries // size)
        first = 0
        while first < n_tiles:
            count = n_tiles - first
            while count > 1 and rows * count * size * self.n_slice_keys(size, (first + count) * size) > budget:
                count = -(-count // 2)
            yield TileGroup(self, size, first, count)
            first += count

    def empty(self) -> Tensor:
        """`[B or 1, S]`: queries without visible keys."""
        return self.ranges.lo >= self.ranges.hi


@dataclass(frozen=True)
class TileGroup:
    """`count` tiles of `size` queries from tile `first` on, processed at once; the last may be partly empty."""

    tiling: Tiling
    size: int
    first: int
    count: int

    @property
    def c0(self) -> int:
        return self.first * self.size

    @property
    def c1(self) -> int:
        return min(self.c0 + self.count * self.size, self.tiling.n_queries)

    @property
    def n_keys(self) -> int:
        """Keys per slice."""
        return self.tiling.n_slice_keys(self.size, self.c1)

    @property
    def step(self) -> int:
        """Distance in keys between the slices of neighboring tiles."""
        return self.size if self.tiling.along else 0

    def tiles(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """The group's queries of `[R, S, ...]` as tiles `[R * count, size, ...]`, `fill` past the last query."""
        part = x[:, self.c0 : self.c1]
        missing = self.count * self.size - part.shape[1]
        if missing:
            part = F.pad(part, (0, 0) * (x.dim() - 2) + (0, missing), value=fill)
        return part.unflatten(1, (self.count, self.size)).flatten(0, 1)

    def queries(self, x: Tensor) -> Tensor:
        """Tiles `[R * count, size, ...]` back to the group's queries `[R, c1 - c0, ...]`."""
        return x.unflatten(0, (-1, self.count)).flatten(1, 2)[:, : self.c1 - self.c0]

    def key_indices(self) -> Tensor:
        """`[count, n_keys]`; outside `[0, N)` where a slice reaches past the keys."""
        device = self.tiling.ranges.sequences.device
        start = (self.first + torch.arange(self.count, device=device)) * self.step
        if self.tiling.along:
            start = start - self.tiling.before
        return start[:, None] + torch.arange(self.n_keys, device=device)

    def keys(self, x: Tensor) -> Tensor:
        """`[R, N, D]` to the tiles' slices `[R * count, n_keys, D]`."""
        index = self.key_indices().clamp(0, x.shape[1] - 1)
        return x.index_select(1, index.flatten()).unflatten(1, index.shape).flatten(0, 1)

    def hidden(self, rows: int) -> Tensor:
        """The mask `[rows * count, size, n_keys]`, for `rows = B * G`."""
        lo, hi = (self.tiles(x).unflatten(0, (-1, self.count)) for x in (self.tiling.ranges.lo, self.tiling.ranges.hi))
        key = self.key_indices()[:, None]
        hidden = (key < lo[..., None]) | (key >= hi[..., None])
        per_batch = rows // hidden.shape[0]
        return hidden[:, None].expand(-1, per_batch, -1, -1, -1).flatten(0, 2)

    def add_keys(self, total: Tensor, x: Tensor) -> None:
        """Add the slices' gradients `x [R * count, n_keys, D]` to `total [R, before + N + ..., D]`, in order."""
        x = x.unflatten(0, (-1, self.count))
        if not self.tiling.along:
            total[:, : self.n_keys] += x.sum(dim=1)
            return
        # Slices overlap; split into chunks of one step, chunks of the same index do not.
        for begin in range(0, self.n_keys, self.step):
            chunk = x[:, :, begin : begin + self.step]
            place = self.c0 + begin
            target = total[:, place : place + self.count * self.step].unflatten(1, (self.count, self.step))
            target[:, :, : chunk.shape[2]] += chunk


def key_totals(keys: Tensor, group: TileGroup) -> Tensor:
    """Zeros for `TileGroup.add_keys`: the keys, padded by what slices reach past them on both sides."""
    tiling = group.tiling
    length = keys.shape[1]
    if tiling.along:
        n_tiles = -(-tiling.n_queries // group.size)
        length = n_tiles * group.step + group.n_keys + group.step
    return torch.zeros(keys.shape[0], length, keys.shape[2], dtype=sum_dtype(keys), device=keys.device)


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling, scale: float) -> tuple[Tensor, Tensor]:
    batch, _, n_heads, _ = q.shape
    n_groups = k.shape[2]
    qg, kg, vg = group_queries(q, n_groups), group_keys(k), group_keys(v)
    o = torch.zeros(*qg.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full(qg.shape[:3], float("-inf"), dtype=sum_dtype(q), device=q.device)
    for group in tiling.groups(batch * n_heads, score_budget(q, fused=is_fused(q, v))):
        if group.n_keys > 0:
            hidden = group.hidden(qg.shape[0])
            o_tiles, lse_tiles = tile_forward(group.tiles(qg), group.keys(kg), group.keys(vg), hidden, scale)
            o[:, group.c0 : group.c1] = group.queries(o_tiles)
            lse[:, group.c0 : group.c1] = group.queries(lse_tiles)
    o, lse = ungroup_queries(o, batch, q.dtype), ungroup_queries(lse, batch, lse.dtype)
    empty = tiling.empty()[..., None]
    return o.masked_fill_(empty[..., None], 0.0), lse.masked_fill_(empty, float("-inf"))


def tiled_backward(upstream: Upstream, saved: Saved, tiling: Tiling, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    do, dlse, *_ = upstream
    q, k, v, o, lse, _ = saved
    batch, _, n_heads, _ = q.shape
    n_keys, n_groups = k.shape[1:3]
    qg, kg, vg = group_queries(q, n_groups), group_keys(k), group_keys(v)
    dog, og, lse_g = group_queries(do, n_groups), group_queries(o, n_groups), group_lse(lse, n_groups)
    dlse_g = None if dlse is None else group_rows(dlse, n_groups)
    dq = torch.zeros(qg.shape, dtype=q.dtype, device=q.device)
    dk, dv = torch.zeros_like(kg), torch.zeros_like(vg)
    groups = list(tiling.groups(batch * n_heads, score_budget(q, fused=dlse is None and is_fused(q, v))))
    if groups[-1].n_keys > 0:
        dk, dv = key_totals(kg, groups[0]), key_totals(vg, groups[0])
    for group in groups:
        if group.n_keys > 0:
            given = Upstream(group.tiles(dog), None if dlse_g is None else group.tiles(dlse_g))
            lse_t = group.tiles(lse_g, fill=float("inf"))
            inputs = Saved(group.tiles(qg), group.keys(kg), group.keys(vg), group.tiles(og), lse_t)
            dq_tiles, dk_tiles, dv_tiles = tile_backward(given, inputs, group.hidden(qg.shape[0]), scale)
            dq[:, group.c0 : group.c1] = group.queries(dq_tiles)
            group.add_keys(dk, dk_tiles)
            group.add_keys(dv, dv_tiles)
    before = tiling.before if tiling.along else 0
    dk, dv = dk[:, before : before + n_keys], dv[:, before : before + n_keys]
    return ungroup_queries(dq, batch, q.dtype), ungroup_keys(dk, batch, k.dtype), ungroup_keys(dv, batch, v.dtype)


def compressed_tiling(branch: Compressed | Selection, n_keys: int) -> Tiling:
    sequences = branch.sequences

    def n_slice_keys(tile: int, c1: int) -> int:
        # A block takes a whole stride of tokens, in a varlen batch too: no more blocks than strides before `c1`.
        return n_keys if sequences.q_start is not None else min(n_keys, c1 // branch.stride)

    tile = min(COMPRESSED_TILE, sequences.length)
    return Tiling(ranges_of(branch, n_keys), tile=tile, along=False, before=0, n_slice_keys=n_slice_keys)


def sliding_tiling(branch: Sliding, n_keys: int) -> Tiling:
    length = branch.sequences.length
    reach = min(branch.window, n_keys) - 1

    def n_slice_keys(tile: int, c1: int) -> int:
        # The keys of a cache are ahead of the queries by at most the difference of their numbers.
        return reach + tile + n_keys - length

    tile = min(SLIDING_TILE, length)
    return Tiling(ranges_of(branch, n_keys), tile=tile, along=True, before=reach, n_slice_keys=n_slice_keys)


def compressed_forward(q: Tensor, k: Tensor, v: Tensor, branch: Compressed) -> tuple[Tensor, Tensor]:
    return tiled_forward(q, k, v, compressed_tiling(branch, k.shape[1]), branch.scale)


@without_gate
def compressed_backward(upstream: Upstream, saved: Saved, branch: Compressed) -> tuple[Tensor, Tensor, Tensor]:
    return tiled_backward(upstream, saved, compressed_tiling(branch, saved.k.shape[1]), branch.scale)


def sliding_forward(q: Tensor, k: Tensor, v: Tensor, branch: Sliding) -> tuple[Tensor, Tensor]:
    return tiled_forward(q, k, v, sliding_tiling(branch, k.shape[1]), branch.scale)


@without_gate
def sliding_backward(upstream: Upstream, saved: Saved, branch: Sliding) -> tuple[Tensor, Tensor, Tensor]:
    return tiled_backward(upstream, saved, sliding_tiling(branch, saved.k.shape[1]), branch.scale)
