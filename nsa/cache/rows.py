"""What every cache can do with its rows: reset, crop, select, grow, move to another device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from nsa.cache.file import save_caches
from nsa.cache.store import NewTokens, Ring, Store, bits
from nsa.checks import FLOAT_NAMES, FLOATS, check_tensor
from nsa.config import NSAConfig, require, require_bool, require_int, require_positive_int
from nsa.rope import Rope


class RowCache(ABC):
    """`batch_size` rows of up to `max_len` tokens, each row with its own length: what `NSACache` and the cache of dense
    attention have in common.

    Args:
        config, batch_size, max_len, dtype, device, max_rollback, static: As for `NSACache`.

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
        self.config, self.batch_size, self.max_len = config, batch_size, max_len
        self.max_rollback, self.static, self.dtype = max_rollback, static, dtype
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
            # The longest that each row has been since its reset: what the rings have overwritten.
            self.high_water = torch.zeros_like(self.lengths)
            # The shortest, but for 0, that a loaded row can be cropped to: its file may hold less than the rings do.
            self.crop_floor = torch.zeros_like(self.lengths)
            self.rope = Rope(config.d_k, config.rope_theta, config.rope_scaling)
            # For kernels that compute angles.
            self.frequencies = self.rope.frequencies(self.device)
        # An upper bound on the row lengths that the host knows without reading the device.
        self.longest = 0

    @abstractmethod
    def stores(self) -> dict[str, Store]:
        """All keys and values, by name."""

    @abstractmethod
    def slots_for(self, max_len: int) -> dict[str, int]:
        """Slots of each store for rows of up to `max_len` tokens."""

    @abstractmethod
    def clear(self, start: Tensor, n: int, end: Tensor) -> None:
        """Zero what is stored by position of the up to `n` tokens from `start [B]` to before `end [B]`."""

    def slots_of(self, name: str, lengths: Tensor) -> Tensor:
        """Slots of a store that rows of `lengths [B]` use; a ring's are by position."""
        return lengths

    @property
    def device(self) -> torch.device:
        """The device of all buffers."""
        return self.lengths.device

    @property
    def capacity(self) -> int | Tensor:
        """How many tokens each row can hold: one number, or int32 `[B]`."""
        return self.max_len

    def row_tensors(self) -> tuple[Tensor, ...]:
        """Tensors with one entry per row."""
        return (*(x for store in self.row_stores() for x in store.tensors()), *self.counters)

    def row_stores(self) -> Iterable[Store]:
        """Stores with one entry per row."""
        return self.stores().values()

    def buffers(self) -> tuple[Tensor, ...]:
        """All tensors that a step reads or writes."""
        return self.row_tensors()

    def replace(self, stores: Iterable[Store], tensors: list[Tensor]) -> None:
        """Use new `tensors` for those of `stores` and then the counters. Allocates nothing: a change that runs out of
        memory must do so before, or it would leave a part of the cache as it was."""
        new = iter(tensors)
        for store in stores:
            store.replace(tuple(next(new) for _ in store.tensors()))
        self.lengths, self.high_water, self.crop_floor = new

    @property
    def counters(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is known of each row's length, `[B]` each."""
        return self.lengths, self.high_water, self.crop_floor

    def longest_after(self, n_new: int, counts: Tensor | None) -> int:
        """An upper bound on the row lengths after `n_new` more tokens, of which `counts [B]` are real; a ValueError
        where they do not fit, which a static cache knows only under `config.strict`."""
        if self.static:
            # A compiled step cannot read the device.
            if self.config.strict and not torch.compiler.is_compiling():
                self.exact_longest_after(n_new, counts)
            return self.max_len
        longest = self.longest + n_new
        # The host's bound includes padding and rows that were cropped since: read the device before raising.
        return longest if longest <= self.least_capacity() else self.exact_longest_after(n_new, counts)

    def place_tokens(self, n_new: int, counts: Tensor | None) -> tuple[Tensor, Tensor, NewTokens, bool, int]:
        """Where `n_new` more tokens per row go, of which `counts [B]` are real: `[B]` each row's length before and
        after, the places of the tokens, whether some row's queries may run past `max_len`, and an upper bound on the
        new lengths."""
        accepted = f"at most the cache's max_len = {self.max_len}"
        require(counts is not None or n_new <= self.max_len, "new tokens in one step", n_new, accepted)
        crowded = self.static or self.longest + n_new > self.max_len
        longest = self.longest_after(n_new, counts)
        start = self.lengths.clone()
        end = start + (n_new if counts is None else counts.int())
        if self.static:
            # Elsewhere what does not fit has raised.
            end = end.clamp(max=self.capacity)
        return start, end, NewTokens.place(start, end, n_new, self.max_len, crowded=crowded), crowded, longest

    def least_capacity(self) -> int:
        """The number of tokens that every row can hold, as the host knows it."""
        return self.max_len

    def exact_longest_after(self, n_new: int, counts: Tensor | None) -> int:
        """The longest row after the step, from the lengths on the device; a ValueError where it does not fit."""
        lengths = (self.lengths + (n_new if counts is None else counts)).tolist()
        self.check_fit(lengths)
        return max(lengths)

    def check_layer(self, config: NSAConfig, n_rows: int, device: torch.device) -> None:
        """A ValueError where the cache is not one of a layer of `config` for `n_rows` rows on `device`."""
        # Runs in every layer of every step, and messages take time.
        if self.config is config and self.batch_size == n_rows and self.device == device:
            return
        require(self.config == config, "cache", self.config, "a cache made by this layer's new_cache")
        require(n_rows == self.batch_size, "x.shape[0]", n_rows, f"the cache's {self.batch_size} rows")
        require(self.device == device, "cache.device", self.device, f"x's, {device}")

    def check_dtype(self, dtype: torch.dtype) -> None:
        """A ValueError where keys and values of `dtype` are not the cache's."""
        accepted = f"what the layer computes, {dtype}: pass dtype= to new_cache"
        require(self.dtype == dtype, "cache.dtype", self.dtype, accepted)

    def check_fit(self, lengths: list[int]) -> None:
        accepted = f"at most max_len = {self.max_len} tokens: make the cache longer, or reset or crop it"
        require(max(lengths) <= self.max_len, "the cache's new length", max(lengths), accepted)

    def reset(self, rows: Tensor | None = None) -> None:
        """Empty the cache; memory stays allocated.

        Args:
            rows: Row indices, int `[n]`, or a mask, bool `[batch_size]`. Default: all rows.

        Raises:
            ValueError: `rows` is no such tensor, or holds an index outside `[0, batch_size)`.
        """
        if rows is None:
            for buffer in self.row_tensors():
                buffer.zero_()
            self.longest = 0
        else:
            index = self.check_rows(rows)
            for buffer in self.row_tensors():
                bits(buffer)[index] = 0

    @torch.no_grad()
    def select(self, rows: Tensor) -> None:
        """Make row `i` what row `rows[i]` was: reorders, repeats or drops rows.

        With as many rows as before, the buffers stay where they are. Otherwise they are replaced, and a captured graph
        must be captured again.

        Args:
            rows: Row indices, int `[n]` with `n >= 1`, or a mask, bool `[batch_size]`, of the rows to keep.

        Raises:
            ValueError: `rows` is no such tensor, or holds an index outside `[0, batch_size)`.
        """
        index = self.check_rows(rows)
        require(index.numel() > 0, "rows", rows.tolist(), "at least one row")
        with torch.inference_mode(False):
            found = [bits(x).index_select(0, index).view(x.dtype) for x in self.row_tensors()]
        if len(index) == self.batch_size:
            for x, new in zip(self.row_tensors(), found, strict=True):
                x.copy_(new)
        else:
            self.replace(self.row_stores(), found)
            self.batch_size = len(index)

    def reorder(self, rows: Tensor) -> None:
        """Replace row `b` by row `rows[b]`, as beam search does.

        Args:
            rows: int `[batch_size]`, each in `[0, batch_size)`.

        Raises:
            ValueError: `rows` is no such tensor.
        """
        check_tensor("rows", rows, "n", (torch.int32, torch.int64), "int32 or int64")
        require(tuple(rows.shape) == (self.batch_size,), "rows.shape", tuple(rows.shape), f"({self.batch_size},)")
        self.select(rows)

    def check_rows(self, rows: Tensor) -> Tensor:
        """Row indices, int64 `[n]`."""
        if isinstance(rows, Tensor) and rows.dtype == torch.bool and tuple(rows.shape) == (self.batch_size,):
            rows = rows.nonzero().flatten()
        check_tensor("rows", rows, "n", (torch.int32, torch.int64), "int32 or int64, or a mask")
        require(rows.device == self.device, "rows.device", rows.device, f"the cache's, {self.device}")
        inside = bool(((rows >= 0) & (rows < self.batch_size)).all())
        require(inside, "rows", rows.tolist(), f"rows 0 to {self.batch_size - 1}")
        return rows.long()

    def crop(self, lengths: int | Tensor) -> None:
        """Truncate every row to at most `lengths` tokens. Waits for the device once; `truncate` does not.

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
        kept = torch.minimum(present, wanted)
        lost = kept < self.crop_floor
        for ring in (store for store in self.stores().values() if isinstance(store, Ring)):
            lost |= (kept - ring.reach).clamp_min(0) < ring.held_from(self.high_water)
        lost &= (kept > 0) & (kept < present)
        found = [wanted.min(), lost.sum(), (present - kept).max(), kept.max()]
        least, n_lost, removed, longest = torch.stack(found).tolist()
        require(least >= 0, "lengths", lengths, "at most as many tokens removed as there are")
        require(n_lost == 0, "lengths", lengths, f"at most max_rollback = {self.max_rollback} tokens removed")
        self.truncate(kept.int(), removed=removed, longest=longest)

    @torch.no_grad()
    def truncate(self, lengths: Tensor, *, removed: int, longest: int) -> None:
        """`crop` without its checks: reads nothing back from the device, and can be captured in a CUDA graph.

        Args:
            lengths: int32 `[batch_size]`, what rows are truncated to, none below 0. A row must not lose more than
                `crop` would accept.
            removed: Most tokens that a row loses.
            longest: Upper bound on `lengths` where they are shorter than the rows.
        """
        kept = torch.minimum(self.lengths, lengths)
        if removed:
            self.clear(kept, removed, self.lengths)
        self.lengths.copy_(kept)
        for x in (self.high_water, self.crop_floor):
            x *= kept > 0
        self.longest = min(self.longest, longest)

    @torch.no_grad()
    def grow(self, max_len: int) -> None:
        """Make room for rows of up to `max_len` tokens, which keep what they hold.

        Buffers are replaced: a captured graph must be captured again.

        Args:
            max_len: At least as many tokens as before.

        Raises:
            ValueError: `max_len` is not such a number.
        """
        require_int("max_len", max_len, at_least=1)
        require(max_len >= self.max_len, "max_len", max_len, f"at least the {self.max_len} tokens of now")
        with torch.inference_mode(False):
            self.enlarge(max_len)
        self.max_len = max_len

    def enlarge(self, max_len: int) -> None:
        stores, slots = self.stores(), self.slots_for(max_len)
        grown = [x for name, store in stores.items() for x in store.grown(slots[name])]
        self.replace(stores.values(), [*grown, *self.counters])

    @torch.no_grad()
    def to(self, device: torch.device | str) -> Self:
        """Move all buffers to `device`.

        Args:
            device: Any that torch can use.

        Returns:
            The cache itself.

        Raises:
            ValueError: torch cannot use `device`.
        """
        check_device(device)
        with torch.inference_mode(False):
            self.move(device)
        return self

    def move(self, device: torch.device | str) -> None:
        stores = self.stores().values()
        tensors = (*(x for store in stores for x in store.tensors()), *self.counters, self.frequencies)
        *moved, frequencies = [x.to(device) for x in tensors]
        self.replace(stores, moved)
        self.frequencies = frequencies

    def save(self, path: Path | str, *, tokens: Sequence[Sequence[int]] | None = None) -> None:
        """Write what the rows hold as safetensors; paged or not, the file is the same.

        Args:
            path: Replaced if it exists.
            tokens: The token ids of each row, stored beside it.

        Raises:
            ValueError: `tokens` are not as many as the rows hold.
        """
        save_caches(Path(path), [self], tokens=tokens)

    def saved_form(self) -> dict[str, Any]:
        """What a file says of a cache besides its config and tensors."""
        return {"kind": "dense"}

    def make_room(self, lengths: Sequence[int]) -> None:
        """Prepare for rows of these lengths; a ValueError where they do not fit."""
        self.check_fit(list(lengths))

    def bytes_used(self) -> int:
        """Memory allocated for all rows.

        Returns:
            The bytes of all buffers.
        """
        return sum(buffer.nbytes for buffer in self.buffers())

    def check_length(self, length: int | None) -> list[int]:
        """The length of every row: as now, or `length`."""
        if length is None:
            return self.lengths.tolist()
        require_int("length", length, at_least=0)
        require(length <= self.max_len, "length", length, f"at most max_len = {self.max_len}")
        return [length] * self.batch_size


def check_device(device: torch.device | str) -> None:
    """A ValueError if torch cannot use `device`: its own errors do not name the argument."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"device is {device!r}; accepted: a device that torch can use here ({reason})") from error
