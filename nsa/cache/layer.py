"""The KV cache of one NSA layer.

Four stores: all keys and values of the selected branch; the last `w` of the sliding branch; the compressed blocks; and
the raw tail that the next compressed block still needs. All are allocated once and written in place, so their addresses
never change, and every index is computed on the device, so a step can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from nsa.cache.file import read_saved
from nsa.cache.kernels import cache_kernels
from nsa.cache.rows import RowCache
from nsa.cache.store import NewTokens, Ring, Store, pair_of
from nsa.config import NSAConfig, require
from nsa.geometry import n_compressed, n_compressed_of
from nsa.rope import Angles, Rope
from nsa.sequences import Pair

Quantize = Literal["fp8"]

# Keys that are not copied are read up to a multiple of this: not as many as fit, over which kernels would search for
# blocks, and not as many as there are, which would be a new shape to plan launches for at every step.
KEYS_STEP = 1024


class Step(NamedTuple):
    """The keys and values that a staged step attends to, its own tokens included, and what `commit` stores. Of whole
    sequences both starts are None."""

    compressed: Pair
    selected: Pair
    window: Pair
    q_start: Tensor | None  # [B] place of the first query in the selected keys
    window_start: Tensor | None  # [B] and in the sliding ones, which do not start at position 0
    tokens: NewTokens
    new_raw: Pair
    new_window: Pair
    longest: int


class NSACache(RowCache):
    """The cache of one layer for `batch_size` rows of up to `max_len` tokens, each row with its own length.

    Args:
        config: The layer's config.
        batch_size: Rows.
        max_len: Most tokens per row.
        dtype: Of keys and values.
        device: Where they are stored.
        max_rollback: How many tokens `crop` can always remove; costs that many extra slots in the two ring buffers.
        static: Fix every shape at full capacity, for CUDA graphs and compiled steps. The host then knows no lengths: a
            row drops tokens that do not fit instead of raising, and their outputs are undefined. With `config.strict`
            the lengths are read from the device, and a row that overflows raises. A step of more than `max_len` tokens
            without a mask raises either way.
        quantize: `"fp8"` stores compressed, selected and sliding keys and values in e4m3, with an fp32 scale per token
            and group. The raw tail keeps `dtype`.

    Raises:
        ValueError: An argument has a wrong type or value.
    """

    def __init__(
        self,
        config: NSAConfig,
        batch_size: int,
        max_len: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_rollback: int = 32,
        static: bool = False,
        quantize: Quantize | None = None,
    ) -> None:
        require(quantize in (None, "fp8"), "quantize", quantize, "None or 'fp8'")
        form: dict[str, Any] = {"dtype": dtype, "device": device}
        super().__init__(config, batch_size, max_len, max_rollback=max_rollback, static=static, **form)
        self.quantize = quantize
        with torch.inference_mode(False):
            self.selected, self.compressed = self.new_stores()
            slots = self.slots_for(max_len)
            window, tail = ((batch_size, slots[name] + 1) for name in ("window", "tail"))
            self.window = Ring(config, window, reach=config.w - 1, fp8=quantize == "fp8", **form)
            self.tail = Ring(config, tail, reach=config.l - 1, **form)

    def new_stores(self) -> tuple[Store, Store]:
        """Empty stores of the selected branch and of compressed blocks."""
        slots, fp8 = self.slots_for(self.max_len), self.quantize == "fp8"
        selected, compressed = (
            Store(self.config, (self.batch_size, slots[name] + 1), self.dtype, self.device, fp8=fp8)
            for name in ("selected", "compressed")
        )
        return selected, compressed

    def slots_for(self, max_len: int) -> dict[str, int]:
        c = self.config
        return {
            "tail": min(c.l + self.max_rollback, max_len),
            "compressed": n_compressed(max_len, c.l, c.d),
            "selected": max_len,
            "window": min(c.w + self.max_rollback, max_len),
        }

    def slots_of(self, name: str, lengths: Tensor) -> Tensor:
        return n_compressed_of(lengths, self.config.l, self.config.d) if name == "compressed" else lengths

    def stores(self) -> dict[str, Store]:
        return {"tail": self.tail, "compressed": self.compressed, "selected": self.selected, "window": self.window}

    def buffer_pairs(self) -> tuple[Pair, Pair, Pair, Pair]:
        """Keys and values: raw tail, compressed, selected, window."""
        return self.tail.pair, self.compressed.pair, self.selected.pair, self.window.pair

    def saved_form(self) -> dict[str, Any]:
        return {"kind": "nsa", "quantize": self.quantize}

    @classmethod
    def load(
        cls,
        path: Path | str,
        config: NSAConfig,
        *,
        device: torch.device | str = "cpu",
        max_len: int | None = None,
        max_rollback: int | None = None,
        **options: Any,
    ) -> Self:
        """A cache with what `save` wrote.

        Args:
            path: The file, of a cache of either form.
            config: The layer's config; all but its backend and strictness must be that of the saved cache.
            device: Where the cache is made.
            max_len: Most tokens per row, at least as many as the rows have. Default: as saved.
            max_rollback: As for `NSACache`; of what was saved, no more tokens can be removed than before.
            options: More arguments of the class.

        Returns:
            The cache.

        Raises:
            ValueError: The file is damaged, is no saved cache, or holds one of another config or of several layers.
        """
        saved = read_saved(Path(path))
        form = saved.form(0, config, kind="nsa")
        cache = cls(
            config,
            len(saved.tensor("lengths", 0)),
            form["max_len"] if max_len is None else max_len,
            dtype=saved.dtype,
            device=device,
            max_rollback=form["max_rollback"] if max_rollback is None else max_rollback,
            quantize=form["quantize"],
            **options,
        )
        saved.restore(cache, 0)
        return cache

    @torch.no_grad()
    def stage(
        self,
        *,
        raw: Pair,
        selected: Pair,
        window: Pair,
        compress: Callable[[Tensor, Tensor], Pair],
        counts: Tensor | None = None,
    ) -> Step:
        """Write the keys and values of `T` new tokens per row, `[B, T, G, D]` each, and return what these attend to.

        Nothing that a later step reads changes before `commit`: a step that fails leaves the cache as it was.

        Args:
            raw, selected, window: What blocks are compressed from, and of the two other branches.
            compress: `compress(k_blocks, v_blocks)` turns blocks `[B, E, l, G, D]`, the next `E` of every row, into
                one key and one value each.
            counts: `[B]` how many of the `T` tokens are real, the first ones; the rest is padding. Default: all.

        Returns:
            The staged step; its queries are ordered by `tokens.rotate_queries` and `tokens.restore_order`.

        Raises:
            ValueError: The dtype or batch is not the cache's, or the tokens do not fit.
        """
        for x in (*raw, *selected, *window):
            self.check_dtype(x.dtype)
            require(x.shape[0] == self.batch_size, "the batch of the new tokens", x.shape[0], f"{self.batch_size}")
        n_new = selected[0].shape[1]
        start, end, tokens, crowded, longest = self.place_tokens(n_new, counts)
        if tokens.n_queries < n_new:
            raw, selected, window = (
                pair_of(x[:, : tokens.n_queries] for x in pair) for pair in (raw, selected, window)
            )

        # Both are past the current lengths, where nothing is read until the lengths change.
        self.selected.extend(start, end, selected)
        self.emit_blocks(start, end, raw, compress)
        block, stride = self.config.l, self.config.d
        if not (self.static or crowded or self.longest):
            # The rows are empty: the new tokens are whole sequences, as those without a cache.
            return Step(
                compressed=self.compressed.first(n_compressed(n_new, block, stride), end, block=block, stride=stride),
                selected=self.selected.as_stored(selected),
                window=self.window.as_stored(window),
                q_start=None,
                window_start=None,
                tokens=tokens,
                new_raw=raw,
                new_window=window,
                longest=longest,
            )
        # Keys up to the last query, be it one of padding.
        n_keys = self.longest + n_new
        if not self.selected.copied:
            n_keys = -(-n_keys // KEYS_STEP) * KEYS_STEP
        n_keys = self.max_len if crowded else min(n_keys, self.max_len)
        return Step(
            compressed=self.compressed.first(n_compressed(n_keys, block, stride), end, block=block, stride=stride),
            selected=self.selected.first(n_keys, end),
            window=self.window.recent(start, window, q_start=tokens.q_start),
            q_start=tokens.q_start,
            window_start=tokens.q_start.clamp_max(self.window.reach),
            tokens=tokens,
            new_raw=raw,
            new_window=window,
            longest=longest,
        )

    @torch.no_grad()
    def commit(self, step: Step) -> None:
        """Append the tokens of a staged step.

        Args:
            step: What `stage` returned last.
        """
        start, end = step.tokens.start, step.tokens.end
        self.window.extend(start, end, step.new_window)
        self.tail.extend(start, end, step.new_raw)
        self.lengths.copy_(end)
        self.high_water.clamp_(min=end)
        self.longest = step.longest

    @torch.no_grad()
    def discard(self, step: Step) -> None:
        """Remove a staged step that failed.

        Args:
            step: What `stage` returned last.
        """
        self.clear(self.lengths, step.tokens.n_queries, step.tokens.end)

    def clear(self, start: Tensor, n: int, end: Tensor) -> None:
        block, stride = self.config.l, self.config.d
        self.selected.clear(start, n, end)
        blocks = n_compressed_of(start, block, stride), n_compressed_of(end, block, stride)
        self.compressed.clear(blocks[0], -(-n // stride), blocks[1])

    def emit_blocks(self, start: Tensor, end: Tensor, raw: Pair, compress: Callable[[Tensor, Tensor], Pair]) -> None:
        """Compress the blocks whose last token is among the new ones, at `start` to `end` `[B]`, whose keys and values
        `[B,T,G,D]` are `raw`; `compress` takes blocks `[B,n,l,G,D]`."""
        block, stride = self.config.l, self.config.d
        if block > self.max_len:
            # No block will ever be complete; gathering one would cost its length at every step.
            return
        self.compressed.extend(
            start, end, compress(*self.tail.blocks(start, raw, block, stride)), block=block, stride=stride
        )

    def angles(self, rope: Rope, n: int, *, offset: int | Tensor = 0, blocks: bool = False) -> Angles:
        """Those of `rope` at the positions of the next `n` tokens of every row, or at the first ones of its next `n`
        compressed blocks, `[B, n, 1, d_k / 2]` each; `offset`, a number or `[B, 1]`, is added to the positions."""
        block, stride = (self.config.l, self.config.d) if blocks else (1, 1)
        kernels = cache_kernels(self.config.backend, self.dtype, self.lengths)
        # The kernels read the frequencies of the config, and a layer's `rope` may have been replaced.
        if kernels is not None and isinstance(offset, int) and rope == self.rope:
            angles: Angles = kernels.cached_angles(
                self.lengths, self.frequencies, n, offset=offset, block=block, stride=stride
            )
            return angles
        index = n_compressed_of(self.lengths.long(), block, stride)[:, None] + torch.arange(n, device=self.device)
        return rope.angles(index * stride + offset, self.dtype)

    def bytes_read_per_step(self, length: int | None = None) -> int:
        """Bytes of keys and values that one decoding step reads, all rows.

        Args:
            length: The length of every row. Default: the current lengths.

        Returns:
            The bytes; of fp8 keys and values with their scales.

        Raises:
            ValueError: `length` is not an integer in `[0, max_len]`.
        """
        lengths = self.check_length(length)
        return sum(self.config.reads_per_step(n) for n in lengths) * self.selected.bytes_per_slot()
