"""What one NSA layer remembers while it generates.

Four stores: every selected-branch key and value; the last `w` of the sliding branch; the compressed blocks; and the raw
tail that the next compressed block still needs. All are allocated once and written in place, so that their addresses
never change, and every index is computed on the device, so that a step can be captured in a CUDA graph and replayed.

Each store has one place more than it needs. What must not be kept (padding, a block that is not complete yet) is
written there: a step then does the same work whatever the lengths are, and nothing ever reads that place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.config import NSAConfig, require, require_bool, require_int, require_positive_int
from nsa.geometry import n_compressed, n_compressed_of
from nsa.ops.checks import FLOAT_NAMES, FLOATS, check_tensor

Pair = tuple[Tensor, Tensor]


class Step(NamedTuple):
    """What a step attends to, its own tokens included, where its first query lies in it, and what `commit` takes in."""

    compressed: Pair
    selected: Pair
    window: Pair
    q_start: Tensor  # [B] in the selected keys, counted from position 0
    window_start: Tensor  # [B] in the sliding keys, which start later
    new_raw: Pair
    new_window: Pair
    position: Tensor  # [B, T] of the new tokens
    end: Tensor  # [B] the new lengths
    keep: Tensor  # [B, T] which of the new tokens are real and fit
    longest: int


class NSACache:
    """The cache of one layer for `batch_size` rows of up to `max_len` tokens, each row with a length of its own.

    `max_rollback` is how many tokens `crop` can always take back; it costs that many extra places in the two rings.
    `static=True` fixes every shape at its full capacity: for CUDA graphs and compiled steps. No length is then known to
    the host, so a row drops what does not fit instead of raising, and what it returns for that means nothing.
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
        self.config = config
        self.batch_size = batch_size
        self.max_len = max_len
        self.max_rollback = max_rollback
        self.static = static

        def store(places: int) -> Pair:
            shape = (batch_size, places + 1, config.n_kv_groups)
            return (
                torch.zeros(*shape, config.d_k, dtype=dtype, device=device),
                torch.zeros(*shape, config.d_v, dtype=dtype, device=device),
            )

        self.selected = store(max_len)
        self.compressed = store(n_compressed(max_len, config.l, config.d))
        self.window = Ring(store(min(config.w + max_rollback, max_len)), reach=config.w - 1)
        self.tail = Ring(store(min(config.l + max_rollback, max_len)), reach=config.l - 1)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        # The longest each row has been since it was reset: what the rings have overwritten.
        self.high_water = torch.zeros_like(self.lengths)
        # No row is longer than this. Known to the host without asking the device, at times too large.
        self.longest = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.selected[0].dtype

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    def buffers(self) -> tuple[Tensor, ...]:
        """Everything with a row per sequence."""
        return (
            *self.selected,
            *self.compressed,
            *self.window.pair,
            *self.tail.pair,
            self.lengths,
            self.high_water,
        )

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
        """Lay in the keys and values of `T` new tokens a row, and hand out what these tokens attend to.

        `raw` is what blocks are compressed from. `compress(k_blocks, v_blocks, positions)` turns blocks `[B,E,l,G,D]`
        that start at `positions [B,E]` into one key and one value each. `counts [B]`: how many of the `T` are real, the
        first ones; the rest is padding. Nothing that a later step would miss is touched before `commit`: a step that is
        refused half way leaves the cache as it was.
        """
        for x in (*raw, *selected, *window):
            accepted = f"what the layer computes, {x.dtype}: pass dtype= to new_cache"
            require(x.dtype == self.dtype, "cache.dtype", self.dtype, accepted)
            require(x.shape[0] == self.batch_size, "the batch of the new tokens", x.shape[0], f"{self.batch_size}")
        n_new = selected[0].shape[1]
        require(n_new <= self.max_len, "new tokens in one step", n_new, f"at most the cache's max_len = {self.max_len}")
        longest = self.longest_after(n_new)
        start = self.lengths.clone()
        end = (start + n_new if counts is None else start + counts.int()).clamp_max(self.max_len)
        position = start[:, None] + torch.arange(n_new, device=self.device)
        keep = position < end[:, None]

        # Both lie behind the present end, where nothing is read until the lengths say so.
        write(self.selected, position, selected, keep)
        self.emit_blocks(start, end, self.tail.recent(start, raw), compress)
        n_blocks = n_compressed(longest, self.config.l, self.config.d)
        k_cmp, v_cmp = (x[:, :n_blocks] for x in self.compressed)
        return Step(
            compressed=(k_cmp, v_cmp),
            selected=self.selected,
            window=self.window.recent(start, window),
            # What a full row asks is not kept: any place that the keys reach will do.
            q_start=torch.where(start >= self.max_len, max(self.max_len - n_new, 0), start),
            window_start=start.clamp_max(self.window.reach),
            new_raw=raw,
            new_window=window,
            position=position,
            end=end,
            keep=keep,
            longest=longest,
        )

    @torch.no_grad()
    def commit(self, step: Step) -> None:
        """Take the tokens of a staged step in for good."""
        self.window.write(step.position, step.end, step.new_window, step.keep)
        self.tail.write(step.position, step.end, step.new_raw, step.keep)
        self.lengths.copy_(step.end)
        self.high_water.copy_(torch.maximum(self.high_water, self.lengths))
        self.longest = step.longest

    def longest_after(self, n_new: int) -> int:
        """No row will be longer than this after `n_new` more tokens, padding counted."""
        if self.static:
            return self.max_len
        longest = self.longest
        if longest + n_new > self.max_len:
            # The host's bound counts padding and rows since cut short; ask the device before giving up.
            longest = int(self.lengths.max())
            if longest + n_new > self.max_len:
                raise ValueError(
                    f"the cache would hold {longest + n_new} tokens (padding counts); accepted: at most max_len = "
                    f"{self.max_len}. Make the cache longer, or reset or crop it"
                )
        return longest + n_new

    def emit_blocks(
        self, start: Tensor, end: Tensor, recent: Pair, compress: Callable[[Tensor, Tensor, Tensor], Pair]
    ) -> None:
        """Compress the blocks whose last token has just arrived."""
        block, stride = self.config.l, self.config.d
        n_new = recent[0].shape[1] - self.tail.reach
        index = n_compressed_of(start, block, stride)[:, None] + torch.arange(-(-n_new // stride), device=self.device)
        complete = index < n_compressed_of(end, block, stride)[:, None]
        first = index * stride - self.tail.first_position(start)[:, None]
        token = (first[..., None] + torch.arange(block, device=self.device)).clamp_max(recent[0].shape[1] - 1)
        k_blocks, v_blocks = (take(x, token.flatten(1)).unflatten(1, token.shape[1:]) for x in recent)
        write(self.compressed, index, compress(k_blocks, v_blocks, index * stride), complete)

    def reset(self, rows: Tensor | None = None) -> None:
        """Forget everything, or the given rows (indices, or a bool a row). Memory stays where it is."""
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
        """Let row `b` continue what row `rows[b]` holds: beam search."""
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
        """Cut every row to at most `lengths` tokens (one number, or one a row); negative: take that many back.

        Counted from the longest a row has been, `max_rollback` tokens can always be taken back; further is an error
        unless the rings still reach.
        """
        accepted = f"an integer, or {self.batch_size} of them in a tensor"
        require(isinstance(lengths, int | Tensor) and not isinstance(lengths, bool), "lengths", lengths, accepted)
        wanted = torch.as_tensor(lengths, device=self.device)
        require(wanted.dtype in (torch.int32, torch.int64), "lengths.dtype", wanted.dtype, accepted)
        require(tuple(wanted.shape) in ((), (self.batch_size,)), "lengths.shape", tuple(wanted.shape), accepted)
        # In 64 bits until it is known to be small.
        present = self.lengths.long()
        wanted = torch.where(wanted < 0, present + wanted, wanted.expand_as(present).long())
        require(bool((wanted >= 0).all()), "lengths", lengths, "no more tokens taken back than there are")
        kept = torch.minimum(present, wanted).int()
        for ring in (self.window, self.tail):
            lost = (kept - ring.reach).clamp_min(0) < self.high_water - ring.places
            require(
                not bool((lost & (kept > 0) & (kept < self.lengths)).any()),
                "lengths",
                lengths,
                f"at most max_rollback = {self.max_rollback} tokens taken back",
            )
        # What is hidden is still multiplied, by zero; a NaN that was taken back must not come through that way.
        clear_from(self.selected, kept)
        clear_from(self.compressed, n_compressed_of(kept, self.config.l, self.config.d))
        self.lengths.copy_(kept)
        self.high_water.copy_(torch.where(kept == 0, 0, self.high_water))
        self.longest = int(kept.max())

    def bytes_used(self) -> int:
        """Memory held, all rows."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def bytes_read_per_step(self, length: int | None = None) -> int:
        """What one decoding step must read of the keys and values of all rows, each `length` long (default: as now)."""
        lengths = self.lengths.tolist() if length is None else [length] * self.batch_size
        a_token = self.config.n_kv_groups * (self.config.d_k + self.config.d_v) * self.selected[0].element_size()
        return sum(self.config.reads_per_step(n) for n in lengths) * a_token


class Ring:
    """The last tokens of every row, each at its position modulo the number of places."""

    def __init__(self, pair: Pair, *, reach: int) -> None:
        self.pair = pair
        self.places = pair[0].shape[1] - 1
        # How many tokens before the first new one are asked for.
        self.reach = reach

    def first_position(self, start: Tensor) -> Tensor:
        return (start - self.reach).clamp_min(0)

    def recent(self, start: Tensor, new: Pair) -> Pair:
        """The up to `reach` tokens before position `start [B]` and the new ones behind them: `[B, reach + T, G, D]`.

        A row with fewer tokens before it starts at position 0 and has unused places at the end, after its new tokens.
        """
        n_new = new[0].shape[1]
        position = self.first_position(start)[:, None] + torch.arange(self.reach + n_new, device=start.device)
        is_new = (position >= start[:, None])[..., None, None]
        place = position % self.places
        fresh = (position - start[:, None]).clamp(0, n_new - 1)
        k, v = (torch.where(is_new, take(n, fresh), take(o, place)) for o, n in zip(self.pair, new, strict=True))
        return k, v

    def write(self, position: Tensor, end: Tensor, new: Pair, keep: Tensor) -> None:
        # Of more new tokens than places only the last stay: two writes to one place would race.
        keep = keep & (position >= end[:, None] - self.places)
        write(self.pair, position % self.places, new, keep)


def clear_from(pair: Pair, length: Tensor) -> None:
    """Zero every place from `length [B]` on."""
    for store in pair:
        behind = torch.arange(store.shape[1], device=store.device) >= length[:, None]
        store.masked_fill_(behind[..., None, None], 0.0)


def take(x: Tensor, index: Tensor) -> Tensor:
    """`x [B, N, G, D]` at `index [B, M]`: `[B, M, G, D]`."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[row, index.long()]


def write(pair: Pair, index: Tensor, new: Pair, keep: Tensor) -> None:
    """Write `new [B, M, G, D]` at `index [B, M]`, or at the spare last place where it is not to be kept."""
    row = torch.arange(index.shape[0], device=index.device)[:, None]
    for store, values in zip(pair, new, strict=True):
        store[row, torch.where(keep, index, store.shape[1] - 1).long()] = values
