"""What one NSA layer remembers while it generates.

Four stores: every selected-branch key and value; the last `w` of the sliding branch; the compressed blocks; and the raw
tail that the next compressed block still needs. All are allocated once and written in place, so that their addresses
never change, and every index is computed on the device, so that a step can be captured in a CUDA graph and replayed.

Each store has one place more than it needs. What must not be kept (padding, a block that is not complete yet) is
written there: a step then does the same work whatever the lengths are, and nothing ever reads that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.checks import FLOAT_NAMES, FLOATS, check_tensor
from nsa.config import NSAConfig, require, require_bool, require_int, require_positive_int
from nsa.geometry import n_compressed, n_compressed_of

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
    turn: Tensor | None  # [B] by how many places a row's queries are turned; None: no row's are

    def asked(self, x: Tensor) -> Tensor:
        """What each new token brings, `[B, T, ...]`, in the order in which the queries are asked."""
        if self.turn is None:
            return x
        n_asked = self.position.shape[1]
        return take(x, (torch.arange(n_asked, device=x.device) - self.turn[:, None]) % n_asked)

    def answered(self, x: Tensor, n_new: int) -> Tensor:
        """What each query was answered, back in the order of the `n_new` tokens."""
        if self.turn is None:
            return x
        return take(x, (torch.arange(n_new, device=x.device) + self.turn[:, None]) % x.shape[1])


class NSACache:
    """The cache of one layer for `batch_size` rows of up to `max_len` tokens, each row with a length of its own.

    `max_rollback` is how many tokens `crop` can always take back; it costs that many extra places in the two rings.
    `static=True` fixes every shape at its full capacity: for CUDA graphs and compiled steps. No length is then known to
    the host, so a row drops the tokens that do not fit instead of raising, and what it returns for those means nothing;
    with `strict` in its config the device is asked, and it raises. What a shape shows is refused either way: a step of
    more than `max_len` tokens that has no mask.
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

        def store(places: int) -> Pair:
            shape = (batch_size, places + 1, config.n_kv_groups)
            return (
                torch.zeros(*shape, config.d_k, dtype=dtype, device=device),
                torch.zeros(*shape, config.d_v, dtype=dtype, device=device),
            )

        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
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

        Every query must lie among the keys, also one of padding or of a token that does not fit. Where a row's would
        run past the end, they are asked from further back, turned so that those of the tokens that fit stay at their
        positions and the others come before them: `Step.asked` and `Step.answered` turn there and back.
        """
        for x in (*raw, *selected, *window):
            accepted = f"what the layer computes, {x.dtype}: pass dtype= to new_cache"
            require(x.dtype == self.dtype, "cache.dtype", self.dtype, accepted)
            require(x.shape[0] == self.batch_size, "the batch of the new tokens", x.shape[0], f"{self.batch_size}")
        n_new = selected[0].shape[1]
        accepted = f"at most the cache's max_len = {self.max_len}"
        require(counts is not None or n_new <= self.max_len, "new tokens in one step", n_new, accepted)
        # Whether some row's queries, padding included, may run past the end.
        crowded = self.static or self.longest + n_new > self.max_len
        longest = self.longest_after(n_new, counts)
        start = self.lengths.clone()
        end = (start + (n_new if counts is None else counts.int())).clamp_max(self.max_len)
        # The real tokens come first: of what is longer than the cache, the rest is padding or does not fit.
        n_asked = min(n_new, self.max_len)
        raw, selected, window = (pair_of(x[:, :n_asked] for x in pair) for pair in (raw, selected, window))
        position = start[:, None] + torch.arange(n_asked, device=self.device)
        keep = position < end[:, None]
        q_start = start.clamp_max(self.max_len - n_asked) if crowded else start

        # Both lie behind the present end, where nothing is read until the lengths say so.
        write(self.selected, position, selected, keep)
        self.emit_blocks(start, end, self.tail.recent(start, raw), compress)
        n_blocks = n_compressed(self.max_len if crowded else longest, self.config.l, self.config.d)
        return Step(
            compressed=pair_of(x[:, :n_blocks] for x in self.compressed),
            selected=self.selected,
            window=self.window.recent(start, window, asked_from=q_start),
            q_start=q_start,
            window_start=q_start.clamp_max(self.window.reach),
            new_raw=raw,
            new_window=window,
            position=position,
            end=end,
            keep=keep,
            longest=longest,
            # A single query has nowhere to turn to.
            turn=start - q_start if crowded and n_new > 1 else None,
        )

    @torch.no_grad()
    def commit(self, step: Step) -> None:
        """Take the tokens of a staged step in for good."""
        self.window.write(step.position, step.end, step.new_window, step.keep)
        self.tail.write(step.position, step.end, step.new_raw, step.keep)
        self.lengths.copy_(step.end)
        self.high_water.copy_(torch.maximum(self.high_water, self.lengths))
        self.longest = step.longest

    @torch.no_grad()
    def discard(self) -> None:
        """Forget a staged step that was refused."""
        self.clear_behind(self.lengths)

    def clear_behind(self, lengths: Tensor) -> None:
        """What is hidden is still multiplied, by zero; a NaN that was taken back must not come through that way."""
        clear_from(self.selected, lengths)
        clear_from(self.compressed, n_compressed_of(lengths, self.config.l, self.config.d))

    def longest_after(self, n_new: int, counts: Tensor | None) -> int:
        """No row will be longer than this after `n_new` more tokens, of which `counts [B]` are real."""
        if self.static:
            # In a compiled step nobody can be asked.
            if self.config.strict and not torch.compiler.is_compiling():
                self.exactly_after(n_new, counts)
            return self.max_len
        longest = self.longest + n_new
        # The host's bound counts padding and rows since cut short; ask the device before giving up.
        return longest if longest <= self.max_len else self.exactly_after(n_new, counts)

    def exactly_after(self, n_new: int, counts: Tensor | None) -> int:
        """The longest row after the step, by the lengths on the device; a ValueError where it does not fit."""
        longest = int((self.lengths + (n_new if counts is None else counts)).max())
        if longest > self.max_len:
            raise ValueError(
                f"the cache would hold {longest} tokens; accepted: at most max_len = {self.max_len}. "
                "Make the cache longer, or reset or crop it"
            )
        return longest

    def emit_blocks(
        self, start: Tensor, end: Tensor, recent: Pair, compress: Callable[[Tensor, Tensor, Tensor], Pair]
    ) -> None:
        """Compress the blocks whose last token has just arrived."""
        block, stride = self.config.l, self.config.d
        if block > self.max_len:
            # None will ever be complete, and laying one out would cost its length at every step.
            return
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
        if isinstance(lengths, Tensor):
            require(lengths.device == self.device, "lengths.device", lengths.device, f"the cache's, {self.device}")
        else:
            require(abs(lengths) < 2**62, "lengths", lengths, "a number of tokens")
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
        self.clear_behind(kept)
        self.lengths.copy_(kept)
        self.high_water.copy_(torch.where(kept == 0, 0, self.high_water))
        self.longest = int(kept.max())

    def bytes_used(self) -> int:
        """Memory held, all rows."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def bytes_read_per_step(self, length: int | None = None) -> int:
        """What one decoding step must read of the keys and values of all rows, each `length` long (default: as now)."""
        if length is not None:
            require_int("length", length, at_least=0)
            require(length <= self.max_len, "length", length, f"at most max_len = {self.max_len}")
        lengths = self.lengths.tolist() if length is None else [length] * self.batch_size
        a_token = self.config.n_kv_groups * (self.config.d_k + self.config.d_v) * self.selected[0].element_size()
        return sum(self.config.reads_per_step(n) for n in lengths) * a_token


class Ring:
    """The last tokens of every row, each at its position modulo the number of places."""

    def __init__(self, pair: Pair, *, reach: int) -> None:
        self.pair = pair
        self.places = pair[0].shape[1] - 1
        # How many tokens before the first new one are asked for: no more than there can be.
        self.reach = min(reach, self.places - 1)

    def first_position(self, start: Tensor) -> Tensor:
        return (start - self.reach).clamp_min(0)

    def recent(self, start: Tensor, new: Pair, *, asked_from: Tensor | None = None) -> Pair:
        """The up to `reach` tokens before position `start [B]` and the new ones behind them: `[B, reach + T, G, D]`.

        A row with fewer tokens before it starts at position 0 and has unused places at the end, after its new tokens.
        `asked_from [B]`: the places are those of queries that start there, before `start`; some may be unused at the
        beginning too. An unused place holds a new token: what the ring has let go could be anything.
        """
        n_new = new[0].shape[1]
        first = self.first_position(start if asked_from is None else asked_from)
        position = first[:, None] + torch.arange(self.reach + n_new, device=start.device)
        since_start = position - start[:, None]
        is_old = ((since_start < 0) & (since_start >= -self.reach))[..., None, None]
        place = position % self.places
        fresh = since_start.clamp(0, n_new - 1)
        return pair_of(
            torch.where(is_old, take(old, place), take(x, fresh)) for old, x in zip(self.pair, new, strict=True)
        )

    def write(self, position: Tensor, end: Tensor, new: Pair, keep: Tensor) -> None:
        # Of more new tokens than places only the last stay: two writes to one place would race.
        keep = keep & (position >= end[:, None] - self.places)
        write(self.pair, position % self.places, new, keep)


def check_device(device: torch.device | str) -> None:
    """Torch can put a tensor there: its own errors name no argument."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"device is {device!r}; accepted: a device that torch has here ({reason})") from error


def pair_of(tensors: Iterable[Tensor]) -> Pair:
    k, v = tensors
    return k, v


def clear_from(pair: Pair, length: Tensor) -> None:
    """Zero every place from `length [B]` on."""
    for store in pair:
        behind = torch.arange(store.shape[1], device=store.device) >= length[:, None]
        store.masked_fill_(behind[..., None, None], 0.0)


def take(x: Tensor, index: Tensor) -> Tensor:
    """`x [B, N, ...]` at `index [B, M]`: `[B, M, ...]`."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[row, index.long()]


def write(pair: Pair, index: Tensor, new: Pair, keep: Tensor) -> None:
    """Write `new [B, M, G, D]` at `index [B, M]`, or at the spare last place where it is not to be kept."""
    row = torch.arange(index.shape[0], device=index.device)[:, None]
    for store, values in zip(pair, new, strict=True):
        store[row, torch.where(keep, index, store.shape[1] - 1).long()] = values
