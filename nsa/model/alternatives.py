"""The sparse attentions that NSA is compared with. All are dense attention that sees less, and nothing else differs.

With `t` the query's position in its document, it sees

    sliding     the window (t - w, t]                                                          (Mistral)
    longformer  the window, and the first `n_global` tokens; with one projection for both      (Longformer, causal)
    bigbird     in blocks: the window that ends at its own, the first ones, and `n_random` of  (BigBird, causal)
                those between, drawn once for each block of queries from the seed and the layer

A global token itself sees everything before it: that is global too, and nothing after it may be seen.

Nothing here holds a mask of queries by keys. The window is NSA's sliding op, blocks are its selected op with a choice
that is drawn instead of scored, and two parts of one softmax are put together by their normalisers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nsa import ops
from nsa.cache import Pair, Ring, pair_of, write
from nsa.config import NSAConfig, require, require_int, require_positive_int
from nsa.geometry import query_positions
from nsa.model.dense import DenseAttention, DenseCache, Past, new_store
from nsa.reference.attention import masked_attention

# Queries and keys a tile of FlexAttention, whose default kernels take no smaller ones; and the most tiles that a
# sequence may have, because its mask holds a few numbers for every pair of them.
FLEX_TILE = 128
FLEX_TILES = 4096


class SlidingAttention(DenseAttention):
    """The last `window` tokens, the query's own included."""

    def __init__(self, config: NSAConfig, *, window: int) -> None:
        super().__init__(config)
        require_positive_int("window", window)
        self.window = window

    def new_cache(
        self,
        batch_size: int,
        max_len: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> WindowCache:
        return WindowCache(
            self.config, batch_size, max_len, window=self.window, n_first=0, **self.cache_options(dtype, device)
        )

    def keys_seen(self, length: int) -> int:
        return min(self.window, length)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, q_start: Tensor | None = None
    ) -> Tensor:
        return self.attend_window(q, k, v, window=self.window, cu_seqlens=cu_seqlens, q_start=q_start)[0]


class LongformerAttention(SlidingAttention):
    """The window, and of the first `n_global` tokens those that it has left behind."""

    def __init__(self, config: NSAConfig, *, window: int, n_global: int) -> None:
        super().__init__(config, window=window)
        require_positive_int("n_global", n_global)
        self.n_global = n_global

    def new_cache(
        self,
        batch_size: int,
        max_len: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> WindowCache:
        options = self.cache_options(dtype, device)
        return WindowCache(
            self.config, batch_size, max_len, window=self.window, n_first=min(self.n_global, max_len), **options
        )

    def keys_seen(self, length: int) -> int:
        return min(self.window + self.n_global, length)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, q_start: Tensor | None = None
    ) -> Tensor:
        assert q_start is None, "a cache goes through attend_cached"
        near = self.attend_window(q, k, v, window=self.window, cu_seqlens=cu_seqlens, q_start=None)
        batch, length, _, _ = q.shape
        if length <= self.window:
            return near[0]
        # What the window of `t` has left behind is what causality lets `t - w` see. So each query moves `w` places to
        # the front, attends to the first block of its document there, and its result moves back.
        first_block = torch.zeros(batch, length, k.shape[2], 1, dtype=torch.int32, device=q.device)
        o, lse = ops.selected_attention(
            q.roll(-self.window, dims=1),
            k,
            v,
            first_block,
            select_block=self.n_global,
            cu_seqlens=cu_seqlens,
            backend=self.config.backend,
            strict=self.config.strict,
        )
        too_early = query_positions(batch, length, cu_seqlens, None, q.device)[..., None] < self.window
        lse = lse.roll(self.window, dims=1).masked_fill(too_early, float("-inf"))
        return join(near, (o.roll(self.window, dims=1), lse))

    def attend_cached(self, q: Tensor, new: Pair, cache: DenseCache, counts: Tensor | None) -> Tensor:
        assert isinstance(cache, WindowCache)
        batch, length, _, _ = q.shape
        position = query_positions(batch, length, None, cache.lengths, q.device)
        past = cache.append(new, counts)
        asked = past.rotate_queries(q)
        o, lse = self.attend_window(
            asked, past.keys, past.values, window=self.window, cu_seqlens=None, q_start=past.q_start
        )
        near = past.restore_order(o, length), past.restore_order(lse, length)
        # The first tokens alone do not reach the queries, as the ops would want; they are few, so plain steps will do.
        k, v = (x[:, :-1].to(near[1].dtype) for x in cache.first)
        left_behind = torch.arange(k.shape[1], device=q.device) <= position[..., None] - self.window
        return join(near, masked_attention(q.to(near[1].dtype), k, v, left_behind[:, :, None], None))


class BigBirdAttention(DenseAttention):
    """Blocks of `block` tokens: `window / block` that end at the query's own, those that hold the first `n_global`
    tokens, and `n_random` of the blocks between."""

    def __init__(
        self, config: NSAConfig, *, window: int, n_global: int, n_random: int, block: int, seed: int, layer: int
    ) -> None:
        super().__init__(config)
        for name, value in (("window", window), ("block", block)):
            require_positive_int(name, value)
        for name, value in (("n_global", n_global), ("n_random", n_random), ("seed", seed), ("layer", layer)):
            require_int(name, value, at_least=0)
        require(window % block == 0, "window", window, f"a multiple of block = {block} for bigbird")
        self.block = block
        self.n_window = window // block
        self.n_first = -(-n_global // block)
        self.n_random = n_random
        self.draw = (seed, layer)
        # Looked up here: a traced forward cannot.
        self.flex_compiles = find_spec("triton") is not None

    def keys_seen(self, length: int) -> int:
        own = (length - 1) // self.block
        before_window = max(own + 1 - self.n_window, 0)
        # The window's blocks and those before it; of the latter the first ones, and as many as are drawn.
        n_blocks = own + 1 - before_window + min(before_window, self.n_first + self.n_random)
        return min((n_blocks - 1) * self.block + length - own * self.block, length)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, q_start: Tensor | None = None
    ) -> Tensor:
        if cu_seqlens is None and q_start is None and self.flex_serves(q):
            own = torch.arange(-(-q.shape[1] // self.block), device=q.device)
            return attend_flex(q, k, v, self.blocks_seen(own), self.block)
        batch, length, _, _ = q.shape
        position = query_positions(batch, length, cu_seqlens, q_start, q.device)
        seen = self.blocks_seen(torch.div(position, self.block, rounding_mode="floor"))
        o, _ = ops.selected_attention(
            q,
            k,
            v,
            seen[:, :, None].expand(batch, -1, k.shape[2], -1).contiguous(),
            select_block=self.block,
            cu_seqlens=cu_seqlens,
            q_start=q_start,
            backend=self.config.backend,
            strict=self.config.strict,
        )
        return o

    def flex_serves(self, q: Tensor) -> bool:
        """Whole sequences on a GPU, with blocks that fit its tiles. Short ones would go to its decoding kernel."""
        fits = FLEX_TILE % self.block == 0 and FLEX_TILE <= q.shape[1] <= FLEX_TILE * FLEX_TILES
        served = q.is_cuda and q.dtype != torch.float64 and self.flex_compiles
        return fits and served and self.config.backend == "auto"

    def blocks_seen(self, own: Tensor) -> Tensor:
        """The blocks that queries of the blocks `own [...]` see: int32 `[..., n]`, ascending, -1 at the end.

        A block's choice depends on its own number alone, so that a cache and the whole sequence see the same.
        """
        first = torch.arange(self.n_first, device=own.device).expand(*own.shape, -1)
        window = own[..., None] - torch.arange(self.n_window, device=own.device)
        # The first blocks may lie in the window: each is taken once.
        window = window.masked_fill(window < self.n_first, -1)
        first = first.masked_fill(first > own[..., None], -1)
        drawn = self.draw_blocks(own, self.n_first, own - self.n_window + 1)
        seen = torch.cat([first, drawn, window], dim=-1)
        last = torch.iinfo(seen.dtype).max
        seen = seen.masked_fill(seen < 0, last).sort(dim=-1).values
        return seen.masked_fill(seen == last, -1).int()

    def draw_blocks(self, own: Tensor, low: int, high: Tensor) -> Tensor:
        """`n_random` distinct blocks of `[low, high)`, all of them where there are no more, -1 for none.

        Floyd's way to draw `n` of `c` without replacement: for `j = c - n ... c - 1` draw one of the first `j + 1`, or
        take `j` itself if that one is taken already.
        """
        taken = own[..., None][..., :0]
        for index in range(self.n_random):
            j = high - low - self.n_random + index
            pick = scramble(own, *self.draw, index) % (j + 1).clamp_min(1)
            again = (taken == pick[..., None]).any(dim=-1)
            pick = torch.where(again, j, pick).masked_fill(j < 0, -1)
            taken = torch.cat([taken, pick[..., None]], dim=-1)
        return torch.where(taken < 0, -1, taken + low)


class WindowCache(DenseCache):
    """The last `window` keys and values of every row, and its first `n_first`: what a window and global tokens need."""

    def __init__(
        self,
        config: NSAConfig,
        batch_size: int,
        max_len: int,
        *,
        window: int,
        n_first: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        keys_seen: Callable[[int], int],
    ) -> None:
        places = min(window, max_len)
        super().__init__(config, batch_size, max_len, dtype=dtype, device=device, keys_seen=keys_seen, places=places)
        self.ring = Ring(self.pair, reach=window - 1)
        self.first = new_store(config, batch_size, n_first, dtype, device)

    @torch.no_grad()
    def append(self, new: Pair, counts: Tensor | None) -> Past:
        """As of a `DenseCache`, but of the keys and values only those that a window can reach."""
        start, q_start, position, keep = self.advance(new, counts)
        n_queries = position.shape[1]
        new = pair_of(x[:, :n_queries] for x in new)
        keys, values = self.ring.recent(start, new, asked_from=q_start)
        self.ring.write(position, self.lengths, new, keep)
        write(self.first, position, new, keep & (position < self.first[0].shape[1] - 1))
        shift = None if q_start is start else start - q_start
        return Past(keys, values, q_start.clamp_max(self.ring.reach), n_queries, shift)

    def stores(self) -> tuple[Tensor, ...]:
        return (*self.pair, *self.first)


def join(near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor]) -> Tensor:
    """One softmax from its two parts `(o, lse)`. The near part sees at least one key, the far part may see none."""
    (o_near, lse_near), (o_far, lse_far) = near, far
    share = (lse_far - lse_near).sigmoid()[..., None]
    return (o_near * (1 - share) + o_far * share).to(o_near.dtype)


def scramble(x: Tensor, *more: int) -> Tensor:
    """A number below 2^32 that looks random, made of `x` and `more`: the same on every device and for every length.

    The mixing steps are a well-tested 32-bit integer hash; both factors are below 2^31, so that nothing overflows.
    """
    x = x.long()
    for part in (0, *more):
        x = (x * 0x01000193 + part) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
        x = x ^ (x >> 15)
    return x


# FlexAttention: all queries of a block see the same blocks, which is what its kernels are made for.


def attend_flex(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, block: int) -> Tensor:
    """`seen [n_blocks, n]`: the blocks that the queries of each block see, -1 for none."""
    # Not compiled, it would hold the scores of all queries and keys; in a compiled model it is compiled already.
    attend: Any = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
    mask = flex_mask(seen, block, q.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)


@cache
def compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def flex_mask(seen: Tensor, block: int, length: int) -> BlockMask:
    """The choice as FlexAttention reads it: tiles that are seen in full, and tiles where each score is asked about."""
    n_blocks = seen.shape[0]
    table = torch.zeros(n_blocks, n_blocks + 1, dtype=torch.bool, device=seen.device)
    # Those that are none go to the column too many.
    table = table.scatter(1, torch.where(seen < 0, n_blocks, seen).long(), True)[:, :n_blocks]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & table[query // block, key // block]

    per_tile = FLEX_TILE // block
    n_tiles = -(-n_blocks // per_tile)
    missing = n_tiles * per_tile - n_blocks
    padded = torch.nn.functional.pad(table, (0, missing, 0, missing))
    tiles = padded.view(n_tiles, per_tile, n_tiles, per_tile).transpose(1, 2).flatten(2)
    # On the diagonal causality cuts through.
    full = tiles.all(dim=-1).tril(-1)
    return BlockMask.from_kv_blocks(
        *ordered(tiles.any(dim=-1) & ~full), *ordered(full), FLEX_TILE, visible, (length, length)
    )


def ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """`[Q, K]` bool to how many each row has, and their numbers first: int32 `[1, 1, Q]` and `[1, 1, Q, K]`."""
    numbers = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32)[None, None], numbers.int()[None, None]
