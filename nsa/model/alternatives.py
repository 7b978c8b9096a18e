"""The sparse attentions that NSA is compared with: dense attention with fewer visible keys, otherwise identical.

A query at position `t` of its document sees

    sliding     the window (t - w, t]                                                             (Mistral)
    longformer  the window and the first `n_global` tokens, with one projection for both          (Longformer, causal)
    bigbird     in blocks: the window that ends at its own block, the first blocks, and           (BigBird, causal)
                `n_random` of those between, drawn per block of queries from the seed and the layer

A global token sees everything before it, as in the originals; causality hides the rest.

No query-by-key mask is stored. The window is NSA's sliding op, blocks are its selected op with a random selection, and
two partial softmaxes are merged by their LSE.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nsa import ops
from nsa.cache import NewTokens, Pair, Ring, Store
from nsa.config import NSAConfig, require, require_int, require_positive_int
from nsa.geometry import query_positions
from nsa.model.dense import DenseAttention, DenseCache, Past
from nsa.reference.attention import masked_attention

# The smallest tile of FlexAttention's default kernels, and the most tiles per sequence: its mask is quadratic in them.
FLEX_TILE = 128
MAX_FLEX_TILES = 4096


class SlidingAttention(DenseAttention):
    """Sliding-window attention.

    Args:
        config: As for `DenseAttention`.
        window: How many tokens a query sees, its own included.

    Raises:
        ValueError: `window` is not a positive integer.
    """

    n_global = 0

    def __init__(self, config: NSAConfig, *, window: int) -> None:
        super().__init__(config)
        require_positive_int("window", window)
        self.window = window

    def make_cache(self, batch_size: int, max_len: int, options: dict[str, Any]) -> WindowCache:
        return WindowCache(self.config, batch_size, max_len, window=self.window, n_first=self.n_global, **options)

    def keys_seen(self, length: int) -> int:
        return min(self.window + self.n_global, length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, q_start: Tensor | None) -> Tensor:
        return self.attend_window(q, k, v, window=self.window, cu_seqlens=cu_seqlens, q_start=q_start)[0]


class LongformerAttention(SlidingAttention):
    """Sliding-window attention with global tokens.

    Args:
        config: As for `DenseAttention`.
        window: How many tokens a query sees, its own included.
        n_global: The first tokens of a document, which every query sees.

    Raises:
        ValueError: `window` or `n_global` is not a positive integer.
    """

    def __init__(self, config: NSAConfig, *, window: int, n_global: int) -> None:
        super().__init__(config, window=window)
        require_positive_int("n_global", n_global)
        self.n_global = n_global

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, q_start: Tensor | None) -> Tensor:
        assert q_start is None, "a cache goes through attend_past"
        near = self.attend_window(q, k, v, window=self.window, cu_seqlens=cu_seqlens)
        batch, length, _, _ = q.shape
        if length <= self.window:
            return near[0]
        # What is before the window of `t` is what causality lets `t - w` see: each query is rolled `w` positions to
        # the front, attends to the first block of its document there, and its result is rolled back.
        first_block = torch.zeros(batch, length, k.shape[2], 1, dtype=torch.int32, device=q.device)
        options = {"select_block": self.n_global, "cu_seqlens": cu_seqlens, **self.op_options}
        o, lse = ops.selected_attention(q.roll(-self.window, dims=1), k, v, first_block, **options)
        too_early = query_positions(length, cu_seqlens, None, q.device)[..., None] < self.window
        lse = lse.roll(self.window, dims=1).masked_fill(too_early, float("-inf"))
        return merge_softmax(near, (o.roll(self.window, dims=1), lse))

    def attend_past(self, q: Tensor, cache: DenseCache, past: Past) -> Tensor:
        assert isinstance(cache, WindowCache)
        length = q.shape[1]
        position = query_positions(length, None, cache.lengths, q.device)
        rotated = past.tokens.rotate_queries(q)
        results = self.attend_window(rotated, *past.pair, window=self.window, q_start=past.q_start)
        o, lse = (past.tokens.restore_order(x, length) for x in results)
        # The ops need keys up to the query; the global tokens are few enough for plain torch.
        k, v = (x.to(lse.dtype) for x in cache.first.first(cache.first.slots, past.tokens.end))
        before_window = torch.arange(k.shape[1], device=q.device) <= position[..., None] - self.window
        return merge_softmax((o, lse), masked_attention(q.to(lse.dtype), k, v, before_window[:, :, None], None))


class BigBirdAttention(DenseAttention):
    """Block-sparse attention: a window of blocks, global blocks, and random ones.

    Args:
        config: As for `DenseAttention`.
        window: Tokens of the blocks that end at the query's own; a multiple of `block`.
        n_global: Every query sees the blocks that hold the first `n_global` tokens.
        n_random: Blocks drawn from those between.
        block: Tokens per block.
        seed: Of the random blocks.
        layer: Layers with different numbers draw different blocks.

    Raises:
        ValueError: An argument is no such integer.
    """

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
        # Looked up here, because a traced forward cannot.
        self.flex_compiles = find_spec("triton") is not None

    def keys_seen(self, length: int) -> int:
        own = (length - 1) // self.block
        before_window = max(own + 1 - self.n_window, 0)
        # The window's blocks and, of those before it, the global and the random ones.
        n_blocks = own + 1 - before_window + min(before_window, self.n_first + self.n_random)
        return min((n_blocks - 1) * self.block + length - own * self.block, length)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, q_start: Tensor | None) -> Tensor:
        if cu_seqlens is None and q_start is None and self.can_use_flex(q):
            own = torch.arange(-(-q.shape[1] // self.block), device=q.device)
            return attend_flex(q, k, v, self.blocks_seen(own), self.block)
        batch, length, _, _ = q.shape
        position = query_positions(length, cu_seqlens, q_start, q.device)
        seen = self.blocks_seen(torch.div(position, self.block, rounding_mode="floor"))
        indices = seen[:, :, None].expand(batch, -1, k.shape[2], -1).contiguous()
        options = {"select_block": self.block, "cu_seqlens": cu_seqlens, "q_start": q_start, **self.op_options}
        return ops.selected_attention(q, k, v, indices, **options)[0]

    def can_use_flex(self, q: Tensor) -> bool:
        """On a GPU, for blocks that fit FlexAttention's tiles; short sequences would use its decode kernel."""
        fits = FLEX_TILE % self.block == 0 and FLEX_TILE <= q.shape[1] <= FLEX_TILE * MAX_FLEX_TILES
        runs = q.is_cuda and q.dtype != torch.float64 and self.flex_compiles
        return fits and runs and self.config.backend == "auto"

    def blocks_seen(self, own: Tensor) -> Tensor:
        """The blocks that queries of the blocks `own [...]` see: int32 `[..., n]`, ascending, -1 at the end.

        The random blocks depend on the query's block alone, so a cache and the full sequence see the same ones.
        """
        first = torch.arange(self.n_first, device=own.device).expand(*own.shape, -1)
        window = own[..., None] - torch.arange(self.n_window, device=own.device)
        # A first block may be in the window: each block counts once.
        window = window.masked_fill(window < self.n_first, -1)
        first = first.masked_fill(first > own[..., None], -1)
        drawn = self.draw_blocks(own, self.n_first, own - self.n_window + 1)
        seen = torch.cat([first, drawn, window], dim=-1)
        last = torch.iinfo(seen.dtype).max
        seen = seen.masked_fill(seen < 0, last).sort(dim=-1).values
        return seen.masked_fill(seen == last, -1).int()

    def draw_blocks(self, own: Tensor, low: int, high: Tensor) -> Tensor:
        """`n_random` distinct blocks of `[low, high)`, all of them where there are no more, -1 for none.

        Floyd's algorithm for drawing `n` of `c` without replacement: for `j = c - n ... c - 1` draw one of the first
        `j + 1`, or take `j` itself if that one is already taken.
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
    """The keys and values that a window and global tokens need.

    Args:
        config, batch_size, max_len, options: As for `DenseCache`.
        window: How many of the last tokens of a row are kept.
        n_first: How many of its first tokens.
    """

    def __init__(
        self, config: NSAConfig, batch_size: int, max_len: int, *, window: int, n_first: int, **options: Any
    ) -> None:
        self.window = window
        self.n_first = n_first
        super().__init__(config, batch_size, max_len, **options)
        with torch.inference_mode(False):
            n_slots = self.slots_for(max_len)["first"]
            self.first = Store(config, (batch_size, n_slots + 1), self.dtype, self.device)

    def new_kv(self) -> Ring:
        shape = (self.batch_size, self.slots_for(self.max_len)["kv"] + 1)
        return Ring(self.config, shape, self.dtype, self.device, reach=self.window - 1)

    def slots_for(self, max_len: int) -> dict[str, int]:
        return {"kv": min(self.window + self.max_rollback, max_len), "first": min(self.n_first, max_len)}

    def stores(self) -> dict[str, Store]:
        return {"kv": self.kv, "first": self.first}

    def write(self, tokens: NewTokens, new: Pair, n_keys: int) -> tuple[Pair, Tensor]:
        """As `DenseCache.write`, but returns only the keys and values that a window can reach."""
        ring = self.kv
        assert isinstance(ring, Ring)
        self.first.extend(tokens.start, tokens.end.clamp_max(self.first.slots), new)
        return ring.recent(tokens.start, new, q_start=tokens.q_start), tokens.q_start.clamp_max(ring.reach)

    @torch.no_grad()
    def commit(self, past: Past) -> None:
        super().commit(past)
        self.kv.extend(past.tokens.start, past.tokens.end, past.new)

    def clear(self, start: Tensor, n: int, end: Tensor) -> None:
        self.first.clear(start, n, end.clamp(max=self.first.slots))


def merge_softmax(near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor]) -> Tensor:
    """`o` of one softmax from two partials `(o, lse)`; `near` has at least one visible key, `far` may have none."""
    (o_near, lse_near), (o_far, lse_far) = near, far
    share = (lse_far - lse_near).sigmoid()[..., None]
    return (o_near * (1 - share) + o_far * share).to(o_near.dtype)


def scramble(x: Tensor, *more: int) -> Tensor:
    """A 32-bit integer hash of `x` and `more`: the same on every device and for every length.

    Both factors are below 2^31, so nothing overflows.
    """
    x = x.long()
    for part in (0, *more):
        x = (x * 0x01000193 + part) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
        x = x ^ (x >> 15)
    return x


def attend_flex(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, block: int) -> Tensor:
    """FlexAttention; `seen [n_blocks, n]`: the blocks that the queries of each block see, -1 for none."""
    # Uncompiled it would store all scores; in a compiled model it is compiled already.
    attend: Any = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
    mask = flex_mask(seen, block, q.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)


@cache
def compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def flex_mask(seen: Tensor, block: int, length: int) -> BlockMask:
    """The mask for FlexAttention: fully visible tiles, and tiles where each score is tested."""
    n_blocks = seen.shape[0]
    table = torch.zeros(n_blocks, n_blocks + 1, dtype=torch.bool, device=seen.device)
    # -1 goes to an extra column that is dropped.
    table = table.scatter(1, torch.where(seen < 0, n_blocks, seen).long(), True)[:, :n_blocks]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & table[query // block, key // block]

    per_tile = FLEX_TILE // block
    n_tiles = -(-n_blocks // per_tile)
    missing = n_tiles * per_tile - n_blocks
    padded = torch.nn.functional.pad(table, (0, missing, 0, missing))
    tiles = padded.view(n_tiles, per_tile, n_tiles, per_tile).transpose(1, 2).flatten(2)
    # On the diagonal causality cuts through.
    full = tiles.all(dim=-1).tril(-1)[None, None]
    lists = (*tile_lists(tiles.any(dim=-1) & ~full), *tile_lists(full))
    return BlockMask.from_kv_blocks(*lists, FLEX_TILE, visible, (length, length))


def tile_lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., Q, K]` bool to the count per row and the indices, set ones first: int32 `[..., Q]` and `[..., Q, K]`."""
    numbers = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32), numbers.int()
