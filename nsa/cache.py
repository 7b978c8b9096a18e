"""The KV cache of one NSA layer.

Four stores: all keys and values of the selected branch; the last `w` of the sliding branch; the compressed blocks; and
the raw tail that the next compressed block still needs. All are allocated once and written in place, so their addresses
never change, and every index is computed on the device, so a step can be captured in a CUDA graph and replayed.

Each store has one spare slot at its end. What must not be kept (padding, an incomplete block) is written there: a step
does the same work whatever the lengths are, and nothing ever reads that slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.checks import FLOAT_NAMES, FLOATS, check_tensor
from nsa.config import NSAConfig, require, require_bool, require_int, require_positive_int
from nsa.geometry import n_compressed, n_compressed_of
from nsa.rope import Rope
from nsa.sequences import Pair


class NewTokens(NamedTuple):
    """Where a step's `T` new tokens go, and where their queries are placed.

    Every query must lie among the keys, even one of padding or of a token that does not fit. Where a row's queries
    would run past the end, they start `shift` positions earlier, rotated so that the queries of tokens that fit stay at
    their positions and the others come before them.
    """

    position: Tensor  # [B, T], at most max_len of the new tokens: the rest is padding or does not fit
    keep: Tensor  # [B, T] which of them are real and fit
    q_start: Tensor  # [B] position of the first query
    shift: Tensor | None  # [B]; None: no row's queries are rotated

    @classmethod
    def place(cls, start: Tensor, end: Tensor, n_new: int, max_len: int, *, crowded: bool) -> NewTokens:
        """`start, end [B]`: row lengths before and after. `crowded`: some row's queries may run past `max_len`."""
        n_queries = min(n_new, max_len)
        position = start[:, None] + torch.arange(n_queries, device=start.device)
        q_start = start.clamp_max(max_len - n_queries) if crowded else start
        # A single query cannot be rotated.
        return cls(position, position < end[:, None], q_start, start - q_start if crowded and n_new > 1 else None)

    def rotate_queries(self, x: Tensor) -> Tensor:
        """`[B, n_new, ...]` in the order of the tokens to `[B, T, ...]` in the order of the queries."""
        if self.shift is None:
            return x
        n_queries = self.position.shape[1]
        return take(x, (torch.arange(n_queries, device=x.device) - self.shift[:, None]) % n_queries)

    def restore_order(self, x: Tensor, n_new: int) -> Tensor:
        """`[B, T, ...]` in the order of the queries back to `[B, n_new, ...]` in the order of the tokens."""
        if self.shift is None:
            return x
        return take(x, (torch.arange(n_new, device=x.device) + self.shift[:, None]) % x.shape[1])


class Step(NamedTuple):
    """The keys and values that a staged step attends to, its own tokens included, and what `commit` stores."""

    compressed: Pair
    selected: Pair
    window: Pair
    window_start: Tensor  # [B] place of the first query in the sliding keys, which do not start at position 0
    tokens: NewTokens
    new_raw: Pair
    new_window: Pair
    end: Tensor  # [B] the new lengths
    longest: int


class NSACache:
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
    ) -> None:
        require(isinstance(config, NSAConfig), "config", config, "an NSAConfig")
        require_positive_int("batch_size", batch_size)
        require_positive_int("max_len", max_len)
        require_int("max_rollback", max_rollback, at_least=0)
        require_bool("static", static)
        require(dtype in FLOATS, "dtype", dtype, FLOAT_NAMES)
        check_device(device)
        self.config = config
        self.batch_size = batch_size
        self.max_len = max_len
        self.max_rollback = max_rollback
        self.static = static

        def store(slots: int) -> Pair:
            return new_store(config, batch_size, slots, dtype, device)

        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.selected = store(max_len)
            self.compressed = store(n_compressed(max_len, config.l, config.d))
            self.window = Ring(store(min(config.w + max_rollback, max_len)), reach=config.w - 1)
            self.tail = Ring(store(min(config.l + max_rollback, max_len)), reach=config.l - 1)
            self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
            # The longest that each row has been since its reset: what the rings have overwritten.
            self.high_water = torch.zeros_like(self.lengths)
            # RoPE's, for kernels that rotate what they write.
            self.frequencies = Rope(config.d_k, config.rope_theta, config.rope_scaling).frequencies(self.device)
        # An upper bound on the row lengths that the host knows without reading the device.
        self.longest = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.selected[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of all buffers."""
        return self.lengths.device

    def buffer_pairs(self) -> tuple[Pair, Pair, Pair, Pair]:
        """Keys and values: raw tail, compressed, selected, window."""
        return self.tail.pair, self.compressed, self.selected, self.window.pair

    def buffers(self) -> tuple[Tensor, ...]:
        """All tensors, each with `batch_size` rows."""
        return (*(x for pair in self.buffer_pairs() for x in pair), self.lengths, self.high_water)

    @torch.no_grad()
    def stage(
        self,
        *,
        raw: Pair,
        selected: Pair,
        window: Pair,
        compress: Callable[[Tensor, Tensor, Tensor], Pair],
        counts: Tensor | None = None,
    ) -> Step:
        """Write the keys and values of `T` new tokens per row and return what these tokens attend to.

        Nothing that a later step reads changes before `commit`: a step that fails leaves the cache as it was.

        Args:
            raw: Keys and values that blocks are compressed from, `[B, T, G, D]` each.
            selected: Keys and values of the selected branch, `[B, T, G, D]` each.
            window: Keys and values of the sliding branch, `[B, T, G, D]` each.
            compress: `compress(k_blocks, v_blocks, positions)` turns blocks `[B, E, l, G, D]` that start at
                `positions [B, E]` into one key and one value each.
            counts: `[B]` how many of the `T` tokens are real, the first ones; the rest is padding. Default: all.

        Returns:
            The staged step; its queries are ordered by `tokens.rotate_queries` and `tokens.restore_order`.

        Raises:
            ValueError: The dtype or batch is not the cache's, or the tokens do not fit.
        """
        for x in (*raw, *selected, *window):
            accepted = f"what the layer computes, {x.dtype}: pass dtype= to new_cache"
            require(x.dtype == self.dtype, "cache.dtype", self.dtype, accepted)
            require(x.shape[0] == self.batch_size, "the batch of the new tokens", x.shape[0], f"{self.batch_size}")
        n_new = selected[0].shape[1]
        accepted = f"at most the cache's max_len = {self.max_len}"
        require(counts is not None or n_new <= self.max_len, "new tokens in one step", n_new, accepted)
        crowded = self.static or self.longest + n_new > self.max_len
        longest = self.longest_after(n_new, counts)
        start = self.lengths.clone()
        end = (start + (n_new if counts is None else counts.int())).clamp_max(self.max_len)
        tokens = NewTokens.place(start, end, n_new, self.max_len, crowded=crowded)
        n_queries = tokens.position.shape[1]
        raw, selected, window = (pair_of(x[:, :n_queries] for x in pair) for pair in (raw, selected, window))

        # Both are past the current lengths, where nothing is read until the lengths change.
        write_slots(self.selected, tokens.position, selected, tokens.keep)
        self.emit_blocks(start, end, self.tail.recent(start, raw), compress)
        n_blocks = n_compressed(self.max_len if crowded else longest, self.config.l, self.config.d)
        return Step(
            compressed=pair_of(x[:, :n_blocks] for x in self.compressed),
            selected=self.selected,
            window=self.window.recent(start, window, q_start=tokens.q_start),
            window_start=tokens.q_start.clamp_max(self.window.reach),
            tokens=tokens,
            new_raw=raw,
            new_window=window,
            end=end,
            longest=longest,
        )

    @torch.no_grad()
    def commit(self, step: Step) -> None:
        """Append the tokens of a staged step."""
        self.window.write(step.tokens, step.end, step.new_window)
        self.tail.write(step.tokens, step.end, step.new_raw)
        self.lengths.copy_(step.end)
        self.high_water.copy_(torch.maximum(self.high_water, self.lengths))
        self.longest = step.longest

    @torch.no_grad()
    def discard(self) -> None:
        """Remove a staged step that failed."""
        self.clear_after(self.lengths)

    def clear_after(self, lengths: Tensor) -> None:
        """Zero what lies past `lengths [B]`: masked keys are still multiplied by 0, and 0 * NaN is NaN."""
        clear_from(self.selected, lengths)
        clear_from(self.compressed, n_compressed_of(lengths, self.config.l, self.config.d))

    def longest_after(self, n_new: int, counts: Tensor | None) -> int:
        """An upper bound on the row lengths after `n_new` more tokens, of which `counts [B]` are real."""
        if self.static:
            # A compiled step cannot read the device.
            if self.config.strict and not torch.compiler.is_compiling():
                self.exact_longest_after(n_new, counts)
            return self.max_len
        longest = self.longest + n_new
        # The host's bound includes padding and rows that were cropped since: read the device before raising.
        return longest if longest <= self.max_len else self.exact_longest_after(n_new, counts)

    def exact_longest_after(self, n_new: int, counts: Tensor | None) -> int:
        """The longest row after the step, from the lengths on the device; a ValueError where it does not fit."""
        longest = int((self.lengths + (n_new if counts is None else counts)).max())
        accepted = f"at most max_len = {self.max_len} tokens: make the cache longer, or reset or crop it"
        require(longest <= self.max_len, "the cache's new length", longest, accepted)
        return longest

    def emit_blocks(
        self, start: Tensor, end: Tensor, recent: Pair, compress: Callable[[Tensor, Tensor, Tensor], Pair]
    ) -> None:
        """Compress the blocks whose last token has just arrived."""
        block, stride = self.config.l, self.config.d
        if block > self.max_len:
            # No block will ever be complete; gathering one would cost its length at every step.
            return
        n_new = recent[0].shape[1] - self.tail.reach
        index = n_compressed_of(start, block, stride)[:, None] + torch.arange(-(-n_new // stride), device=self.device)
        complete = index < n_compressed_of(end, block, stride)[:, None]
        first = index * stride - self.tail.first_position(start)[:, None]
        token = (first[..., None] + torch.arange(block, device=self.device)).clamp_max(recent[0].shape[1] - 1)
        k_blocks, v_blocks = (take(x, token.flatten(1)).unflatten(1, token.shape[1:]) for x in recent)
        write_slots(self.compressed, index, compress(k_blocks, v_blocks, index * stride), complete)

    def reset(self, rows: Tensor | None = None) -> None:
        """Empty the cache; memory stays allocated.

        Args:
            rows: Row indices, int `[n]`, or a mask, bool `[batch_size]`. Default: all rows.

        Raises:
            ValueError: `rows` is no such tensor, or holds an index outside `[0, batch_size)`.
        """
        if rows is None:
            for buffer in self.buffers():
                buffer.zero_()
            self.longest = 0
        else:
            if isinstance(rows, Tensor) and rows.dtype == torch.bool and tuple(rows.shape) == (self.batch_size,):
                rows = rows.nonzero().flatten()
            self.check_rows(rows)
            for buffer in self.buffers():
                buffer[rows.long()] = 0

    def reorder(self, rows: Tensor) -> None:
        """Replace row `b` by row `rows[b]`, as beam search does.

        Args:
            rows: int `[batch_size]`, each in `[0, batch_size)`.

        Raises:
            ValueError: `rows` is no such tensor.
        """
        self.check_rows(rows)
        require(tuple(rows.shape) == (self.batch_size,), "rows.shape", tuple(rows.shape), f"({self.batch_size},)")
        for buffer in self.buffers():
            buffer.copy_(buffer.index_select(0, rows.long()))

    def check_rows(self, rows: Tensor) -> None:
        check_tensor("rows", rows, "n", (torch.int32, torch.int64), "int32 or int64")
        require(rows.device == self.device, "rows.device", rows.device, f"the cache's, {self.device}")
        inside = bool(((rows >= 0) & (rows < self.batch_size)).all())
        require(inside, "rows", rows.tolist(), f"rows 0 to {self.batch_size - 1}")

    def crop(self, lengths: int | Tensor) -> None:
        """Truncate every row to at most `lengths` tokens.

        Args:
            lengths: One number, or int `[batch_size]`. Negative: remove that many tokens. `max_rollback` tokens can
                always be removed, counted from the longest that a row has been; more only if the rings still hold them.

        Raises:
            ValueError: `lengths` has a wrong type or shape, or asks for more tokens back than the cache has kept.
        """
        accepted = f"an integer, or {self.batch_size} of them in a tensor"
        require(isinstance(lengths, int | Tensor) and not isinstance(lengths, bool), "lengths", lengths, accepted)
        if isinstance(lengths, Tensor):
            require(lengths.device == self.device, "lengths.device", lengths.device, f"the cache's, {self.device}")
        else:
            require(abs(lengths) < 2**62, "lengths", lengths, "a number of tokens")
        wanted = torch.as_tensor(lengths, device=self.device)
        require(wanted.dtype in (torch.int32, torch.int64), "lengths.dtype", wanted.dtype, accepted)
        require(tuple(wanted.shape) in ((), (self.batch_size,)), "lengths.shape", tuple(wanted.shape), accepted)
        # int64 until it is known to be small.
        present = self.lengths.long()
        wanted = torch.where(wanted < 0, present + wanted, wanted.expand_as(present).long())
        require(bool((wanted >= 0).all()), "lengths", lengths, "at most as many tokens removed as there are")
        kept = torch.minimum(present, wanted).int()
        for ring in (self.window, self.tail):
            lost = (kept - ring.reach).clamp_min(0) < self.high_water - ring.slots
            held = not bool((lost & (kept > 0) & (kept < self.lengths)).any())
            require(held, "lengths", lengths, f"at most max_rollback = {self.max_rollback} tokens removed")
        self.clear_after(kept)
        self.lengths.copy_(kept)
        self.high_water.copy_(torch.where(kept == 0, 0, self.high_water))
        self.longest = int(kept.max())

    def bytes_used(self) -> int:
        """Memory allocated for all rows, in bytes."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def bytes_read_per_step(self, length: int | None = None) -> int:
        """Bytes of keys and values that one decoding step reads, all rows.

        Args:
            length: The length of every row. Default: the current lengths.

        Raises:
            ValueError: `length` is not an integer in `[0, max_len]`.
        """
        if length is not None:
            require_int("length", length, at_least=0)
            require(length <= self.max_len, "length", length, f"at most max_len = {self.max_len}")
        lengths = self.lengths.tolist() if length is None else [length] * self.batch_size
        bytes_per_token = sum(x[0, 0].nbytes for x in self.selected)
        return sum(self.config.reads_per_step(n) for n in lengths) * bytes_per_token


class Ring:
    """A ring buffer of each row's last tokens: position `p` is in slot `p % slots`."""

    def __init__(self, pair: Pair, *, reach: int) -> None:
        self.pair = pair
        self.slots = pair[0].shape[1] - 1
        # How many tokens before the first new one are read: no more than there can be.
        self.reach = min(reach, self.slots - 1)

    def first_position(self, start: Tensor) -> Tensor:
        return (start - self.reach).clamp_min(0)

    def recent(self, start: Tensor, new: Pair, *, q_start: Tensor | None = None) -> Pair:
        """The up to `reach` tokens before position `start [B]`, then the new ones: `[B, reach + T, G, D]`.

        A row with fewer tokens before `start` begins at position 0 and has unused places at the end. `q_start [B]`: the
        places are those of queries that start there, before `start`; some may be unused at the beginning too. An unused
        place holds a new token, because what the ring has overwritten could be anything.
        """
        n_new = new[0].shape[1]
        first = self.first_position(start if q_start is None else q_start)
        position = first[:, None] + torch.arange(self.reach + n_new, device=start.device)
        since_start = position - start[:, None]
        is_old = ((since_start < 0) & (since_start >= -self.reach))[..., None, None]
        slot = position % self.slots
        fresh = since_start.clamp(0, n_new - 1)
        return pair_of(
            torch.where(is_old, take(old, slot), take(x, fresh)) for old, x in zip(self.pair, new, strict=True)
        )

    def write(self, tokens: NewTokens, end: Tensor, new: Pair) -> None:
        # Of more new tokens than slots only the last stay: two writes to one slot would race.
        keep = tokens.keep & (tokens.position >= end[:, None] - self.slots)
        write_slots(self.pair, tokens.position % self.slots, new, keep)


def check_device(device: torch.device | str) -> None:
    """A ValueError if torch cannot use `device`: its own errors do not name the argument."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"device is {device!r}; accepted: a device that torch can use here ({reason})") from error


def new_store(config: NSAConfig, batch_size: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> Pair:
    """Zeros for the keys and values of `slots` tokens and one spare slot: `[B, slots + 1, G, D]` each."""
    shape = (batch_size, slots + 1, config.n_kv_groups)
    k, v = (torch.zeros(*shape, head_dim, dtype=dtype, device=device) for head_dim in (config.d_k, config.d_v))
    return k, v


def pair_of(tensors: Iterable[Tensor]) -> Pair:
    k, v = tensors
    return k, v


def clear_from(pair: Pair, length: Tensor) -> None:
    """Zero every slot from `length [B]` on."""
    for store in pair:
        after = torch.arange(store.shape[1], device=store.device) >= length[:, None]
        store.masked_fill_(after[..., None, None], 0.0)


def take(x: Tensor, index: Tensor) -> Tensor:
    """`x [B, N, ...]` at `index [B, M]`: `[B, M, ...]`."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[row, index.long()]


def write_slots(pair: Pair, index: Tensor, new: Pair, keep: Tensor) -> None:
    """Write `new [B, M, G, D]` at `index [B, M]`, or into the spare last slot where `keep [B, M]` is False."""
    row = torch.arange(index.shape[0], device=index.device)[:, None]
    for store, values in zip(pair, new, strict=True):
        store[row, torch.where(keep, index, store.shape[1] - 1).long()] = values
