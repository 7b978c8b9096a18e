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

from nsa.config import NSAConfig, require, require_int, require_positive_int
from nsa.geometry import n_compressed, n_compressed_of

Pair = tuple[Tensor, Tensor]


class Remembered(NamedTuple):
    """What a step attends to, its own tokens included, and where its first query lies in it."""

    compressed: Pair
    selected: Pair
    window: Pair
    q_start: Tensor  # [B] in the selected keys, counted from position 0
    window_start: Tensor  # [B] in the sliding keys, which start later


class NSACache:
    """The cache of one layer for `batch_size` rows of up to `max_len` tokens, each row with a length of its own.

    `max_rollback` is how many tokens `crop` can always take back; it costs that many extra places in the two rings.
    `static=True` fixes every shape at its full capacity: for CUDA graphs and compiled steps. No length is then known to
    the host, so a full row drops the token of a further step instead of raising, and what it returns means nothing.
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
        require_positive_int("batch_size", batch_size)
        require_positive_int("max_len", max_len)
        require_int("max_rollback", max_rollback, at_least=0)
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
    def append(
        self,
        *,
        raw: Pair,
        selected: Pair,
        window: Pair,
        compress: Callable[[Tensor, Tensor, Tensor], Pair],
        counts: Tensor | None = None,
    ) -> Remembered:
        """Take in the keys and values of `T` new tokens a row, and hand out what these tokens attend to.

        `raw` is what blocks are compressed from. `compress(k_blocks, v_blocks, positions)` turns blocks `[B,E,l,G,D]`
        that start at `positions [B,E]` into one key and one value each. `counts [B]`: how many of the `T` are real, the
        first ones; the rest is padding.
        """
        for name, x in (("raw", raw), ("selected", selected), ("window", window)):
            require(x[0].dtype == self.dtype, f"the dtype of {name}", x[0].dtype, f"the cache's, {self.dtype}")
            require(x[0].shape[0] == self.batch_size, f"the batch of {name}", x[0].shape[0], f"{self.batch_size}")
        n_new = selected[0].shape[1]
        self.reserve(n_new)
        start = self.lengths.clone()
        end = (start + n_new if counts is None else start + counts.int()).clamp_max(self.max_len)
        position = start[:, None] + torch.arange(n_new, device=self.device)
        keep = position < end[:, None]

        write(self.selected, position, selected, keep)
        window_keys = self.window.recent(start, window)
        self.window.write(position, end, window, keep)
        self.emit_blocks(start, end, self.tail.recent(start, raw), compress)
        self.tail.write(position, end, raw, keep)
        self.lengths.copy_(end)
        self.high_water.copy_(torch.maximum(self.high_water, self.lengths))

        n_blocks = n_compressed(self.max_len if self.static else self.longest, self.config.l, self.config.d)
        k_cmp, v_cmp = (x[:, :n_blocks] for x in self.compressed)
        return Remembered(
            compressed=(k_cmp, v_cmp),
            selected=self.selected,
            window=window_keys,
            # What a full row asks is not kept: any place that the keys reach will do.
            q_start=torch.where(start >= self.max_len, max(self.max_len - n_new, 0), start),
            window_start=start.clamp_max(self.window.reach),
        )

    def reserve(self, n_new: int) -> None:
        if self.static:
            return
        if self.longest + n_new > self.max_len:
            # The host's bound counts padding and rows since cut short; ask the device before giving up.
            self.longest = int(self.lengths.max())
        require(
            self.longest + n_new <= self.max_len,
            "the cache's length",
            self.longest + n_new,
            f"at most max_len = {self.max_len}; make the cache longer, or reset or crop it",
        )
        self.longest += n_new

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
        """Forget everything, or the given rows (indices). Memory stays where it is."""
        if rows is None:
            self.lengths.zero_()
            self.high_water.zero_()
            self.longest = 0
        else:
            self.lengths[rows] = 0
            self.high_water[rows] = 0

    def reorder(self, rows: Tensor) -> None:
        """Let row `b` continue what row `rows[b]` holds: beam search."""
        require(tuple(rows.shape) == (self.batch_size,), "rows.shape", tuple(rows.shape), f"({self.batch_size},)")
        for buffer in self.buffers():
            buffer.copy_(buffer.index_select(0, rows))

    def crop(self, lengths: int | Tensor) -> None:
        """Cut every row to at most `lengths` tokens (one number, or one a row); negative: take that many back.

        Up to `max_rollback` tokens can always be taken back. Further is an error, unless the rings still reach.
        """
        wanted = torch.as_tensor(lengths, device=self.device)
        whole = not wanted.is_floating_point() and wanted.dtype != torch.bool
        require(whole, "lengths", lengths, "an integer, or a tensor of them")
        per_row = tuple(wanted.shape) in ((), (self.batch_size,))
        require(per_row, "lengths.shape", tuple(wanted.shape), f"one number, or ({self.batch_size},)")
        wanted = wanted.int()
        wanted = torch.where(wanted < 0, self.lengths + wanted, wanted)
        require(bool((wanted >= 0).all()), "lengths", lengths, "no more tokens taken back than there are")
        kept = torch.minimum(self.lengths, wanted)
        for ring in (self.window, self.tail):
            lost = (kept - ring.reach).clamp_min(0) < self.high_water - ring.places
            require(
                not bool((lost & (kept > 0) & (kept < self.lengths)).any()),
                "lengths",
                lengths,
                f"at most max_rollback = {self.max_rollback} tokens taken back",
            )
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


def take(x: Tensor, index: Tensor) -> Tensor:
    """`x [B, N, G, D]` at `index [B, M]`: `[B, M, G, D]`."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[row, index.long()]


def write(pair: Pair, index: Tensor, new: Pair, keep: Tensor) -> None:
    """Write `new [B, M, G, D]` at `index [B, M]`, or at the spare last place where it is not to be kept."""
    row = torch.arange(index.shape[0], device=index.device)[:, None]
    for store, values in zip(pair, new, strict=True):
        store[row, torch.where(keep, index, store.shape[1] - 1).long()] = values
