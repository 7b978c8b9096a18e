"""Keys and values by row and slot, written in place: contiguous or in pages, in the layer's dtype or in fp8.

A store has a spare place that nothing reads. What must not be kept (padding, an incomplete block) is written there: a
step does the same work whatever the lengths are, and every index is computed on the device.

fp8 is e4m3 with one fp32 scale per token and group, the largest magnitude divided by 448: `x ~ scale * fp8(x / scale)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.cache.kernels import cache_kernels
from nsa.config import NSAConfig
from nsa.geometry import n_compressed_of
from nsa.sequences import Pair

Device = torch.device | str
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


class NewTokens(NamedTuple):
    """Where a step's `T` new tokens go, and where their queries are placed.

    Every query must lie among the keys, even one of padding or of a token that does not fit. Where a row's queries
    would run past the end, they start `shift` positions earlier, rotated so that the queries of tokens that fit stay at
    their positions and the others come before them.
    """

    start: Tensor  # [B] row lengths before
    end: Tensor  # [B] and after, by the tokens that are real and fit
    n_queries: int  # at most max_len of the new tokens: the rest is padding or does not fit
    q_start: Tensor  # [B] position of the first query
    shift: Tensor | None  # [B]; None: no row's queries are rotated

    @classmethod
    def place(cls, start: Tensor, end: Tensor, n_new: int, max_len: int, *, crowded: bool) -> NewTokens:
        """`start, end [B]`: row lengths before and after. `crowded`: some row's queries may run past `max_len`."""
        n_queries = min(n_new, max_len)
        q_start = start.clamp_max(max_len - n_queries) if crowded else start
        # A single query cannot be rotated.
        return cls(start, end, n_queries, q_start, start - q_start if crowded and n_new > 1 else None)

    def rotate_queries(self, x: Tensor) -> Tensor:
        """`[B, n_new, ...]` in the order of the tokens to `[B, T, ...]` in the order of the queries."""
        if self.shift is None:
            return x
        return take(x, (torch.arange(self.n_queries, device=x.device) - self.shift[:, None]) % self.n_queries)

    def restore_order(self, x: Tensor, n_new: int) -> Tensor:
        """`[B, T, ...]` in the order of the queries back to `[B, n_new, ...]` in the order of the tokens."""
        if self.shift is None:
            return x
        return take(x, (torch.arange(n_new, device=x.device) + self.shift[:, None]) % x.shape[1])


def take(x: Tensor, index: Tensor) -> Tensor:
    """`x [B, N, ...]` at `index [B, M]`: `[B, M, ...]`."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[row, index.long()]


def pair_of(tensors: Iterable[Tensor]) -> Pair:
    k, v = tensors
    return k, v


class Store:
    """Keys and values `[B, slots + 1, G, D]`, the last slot of each row spare; `shape`: `(B, slots + 1)`. They are
    written and read in `dtype`, and stored in it, or as e4m3 values and their scales."""

    def __init__(
        self, config: NSAConfig, shape: tuple[int, int], dtype: torch.dtype, device: Device, *, fp8: bool = False
    ) -> None:
        sizes = (*shape, config.n_kv_groups)
        stored = FP8 if fp8 else dtype
        self.dtype, self.backend = dtype, config.backend
        self.pair = pair_of(torch.zeros(*sizes, d, dtype=stored, device=device) for d in (config.d_k, config.d_v))
        # [B, slots + 1, G] each
        self.scales = pair_of(torch.zeros(sizes, device=device) for _ in range(2)) if fp8 else None

    @property
    def slots(self) -> int:
        """Tokens that a row can hold."""
        return self.pair[0].shape[1] - 1

    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values, and with fp8 their scales."""
        return self.pair if self.scales is None else (*self.pair, *self.scales)

    def kernels(self) -> Any:
        """The kernels that write and read the store, or None: then torch's operations do."""
        return cache_kernels(self.backend, self.dtype, self.pair[0])

    def replace(self, tensors: tuple[Tensor, ...]) -> None:
        """Use other `tensors()`."""
        self.pair = pair_of(tensors[:2])
        if self.scales is not None:
            self.scales = pair_of(tensors[2:])

    @property
    def copied(self) -> bool:
        """Whether reading makes a copy."""
        return self.scales is not None

    def bytes_per_slot(self) -> int:
        """Bytes of one token's key and value in all groups."""
        return sum(x[0, 0].nbytes for x in self.tensors())

    def places(self, index: Tensor) -> Tensor:
        """Slots `index [B, M]` as int64 places in tensors whose first two dimensions are flattened."""
        row = torch.arange(index.shape[0], device=index.device)[:, None]
        return row * (self.slots + 1) + index

    def stored(self, index: Tensor) -> tuple[Tensor, ...]:
        """`tensors()` at slots `index [B, M]`: `[B, M, ...]` each."""
        places = self.places(index)
        return tuple(bits(x).flatten(0, 1)[places].view(x.dtype) for x in self.tensors())

    def gather(self, index: Tensor) -> Pair:
        """Keys and values at slots `index [B, M]`, `[B, M, G, D]` each in `dtype`."""
        k, v, *scales = self.stored(index)
        return self.decode((k, v), (scales[0], scales[1])) if scales else (k, v)

    def first(self, n: int, end: Tensor, *, block: int = 1, stride: int = 1) -> Pair:
        """Keys and values of the first `n` slots of every row, `[B, n, G, D]` each; not copied where that is possible.
        What lies past those of `end [B]` tokens (see `extend`) is 0, or was once part of the row.
        """
        pair = pair_of(x[:, :n] for x in self.pair)
        return pair if self.scales is None else self.decode(pair, pair_of(x[:, :n] for x in self.scales))

    def extend(self, start: Tensor, end: Tensor, new: Pair, *, block: int = 1, stride: int = 1) -> None:
        """Write `new [B, M, G, D]`, a token or a compressed block per slot, from the first that `start [B]` tokens do
        not complete to the last that `end [B]` tokens do: what is past that is padding, or does not fit."""
        values, kernels = new if self.scales is None else self.encode(new), self.kernels()
        if kernels is None:
            first, last = (n_compressed_of(x, block, stride)[:, None] for x in (start, end))
            index, keep = self.place(first + torch.arange(new[0].shape[1], device=start.device), last)
            self.store(index, values, keep)
            return
        for pair, store in zip(by_pair(values), by_pair(self.tensors()), strict=True):
            kernels.write_tokens(pair, store, start, end, block=block, stride=stride, **self.addressing())

    def place(self, index: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Slots of tokens or blocks `index [B, M]`, and which of them are kept in rows that end at `end [B, 1]`."""
        return index, index < end

    def addressing(self) -> dict[str, Any]:
        """The arguments by which the kernels find slots."""
        return {}

    def write(self, index: Tensor, new: Pair, keep: Tensor) -> None:
        """Write `new [B, M, G, D]` at slots `index [B, M]`, or into the spare place where `keep [B, M]` is False."""
        self.store(index, new if self.scales is None else self.encode(new), keep)

    def store(self, index: Tensor, values: tuple[Tensor, ...], keep: Tensor) -> None:
        """The reverse of `stored`, where `keep [B, M]`."""
        flat = [bits(x).flatten(0, 1) for x in self.tensors()]
        places = torch.where(keep, self.places(index), flat[0].shape[0] - 1)
        for store, new in zip(flat, values, strict=True):
            store[places] = bits(new)

    def clear(self, first: Tensor, n: int, end: Tensor) -> None:
        """Zero the `n` slots from `first [B]` on of every row, as far as they lie before `end [B]`.

        Masked keys are still multiplied by 0, and 0 * NaN is NaN.
        """
        index = first[:, None] + torch.arange(n, device=first.device)
        zeros = pair_of(torch.zeros(1, 1, *x.shape[2:], dtype=self.dtype, device=x.device) for x in self.pair)
        self.write(index, zeros, index < end[:, None])

    def encode(self, new: Pair) -> tuple[Tensor, ...]:
        """Keys, values `[..., G, D]` in e4m3, and their scales `[..., G]`."""
        scales = pair_of(x.abs().amax(dim=-1).float() / FP8_MAX for x in new)
        # A token of zeros has no scale, and one that is not finite stays so.
        divisors = (torch.where(s > 0, s, 1.0)[..., None] for s in scales)
        return (*((x.float() / s).to(FP8) for x, s in zip(new, divisors, strict=True)), *scales)

    def decode(self, pair: Pair, scales: Pair) -> Pair:
        return pair_of((x.float() * s[..., None]).to(self.dtype) for x, s in zip(pair, scales, strict=True))

    def decode_pairs(self, read: list[Pair]) -> Pair:
        """Keys and values in `dtype`, of what kernels have read `by_pair`."""
        if self.scales is None:
            return read[0]
        return self.decode(pair_of(x.view(FP8) for x in read[0]), pair_of(x[..., 0] for x in read[1]))

    def as_stored(self, new: Pair) -> Pair:
        """`new` as a later step reads it, so that results do not depend on how a sequence was split."""
        if self.scales is None:
            return new
        k, v, k_scale, v_scale = self.encode(new)
        return self.decode((k, v), (k_scale, v_scale))

    def grown(self, slots: int) -> tuple[Tensor, ...]:
        """`tensors()` with room for `slots` tokens per row; what is there stays in its slots."""
        old = self.slots

        def longer(x: Tensor) -> Tensor:
            grown = x.new_zeros(x.shape[0], slots + 1, *x.shape[2:])
            grown[:, :old] = x[:, :old]
            return grown

        return tuple(map(longer, self.tensors())) if slots > old else self.tensors()


class Ring(Store):
    """Each row's last tokens: position `p` is in slot `p % slots`. A step reads `reach` tokens before its first."""

    def __init__(self, *args: Any, reach: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.full_reach = reach

    @property
    def reach(self) -> int:
        """How many tokens before the first new one are read: no more than there can be."""
        return min(self.full_reach, self.slots - 1)

    def first_position(self, start: Tensor) -> Tensor:
        return (start - self.reach).clamp_min(0)

    def recent(self, start: Tensor, new: Pair, *, q_start: Tensor | None = None) -> Pair:
        """The up to `reach` tokens before position `start [B]`, then the new ones: `[B, reach + T, G, D]`.

        A row with fewer tokens before `start` begins at position 0 and has unused places at the end. `q_start [B]`: the
        places are those of queries that start there, before `start`; some may be unused at the beginning too. An unused
        place holds a new token, because what the ring has overwritten could be anything.
        """
        kernels = self.kernels()
        if kernels is not None:
            values, at = new if self.scales is None else self.encode(new), start if q_start is None else q_start
            pairs = zip(by_pair(values), by_pair(self.tensors()), strict=True)
            read = [kernels.read_tokens(pair, ring, start, self.reach, q_start=at) for pair, ring in pairs]
            return self.decode_pairs(read)
        n_new = new[0].shape[1]
        first = self.first_position(start if q_start is None else q_start)
        position = first[:, None] + torch.arange(self.reach + n_new, device=start.device)
        since_start = position - start[:, None]
        is_old = ((since_start < 0) & (since_start >= -self.reach))[..., None, None]
        fresh = since_start.clamp(0, n_new - 1)
        old = self.gather(position % self.slots)
        return pair_of(torch.where(is_old, x, take(y, fresh)) for x, y in zip(old, self.as_stored(new), strict=True))

    def blocks(self, start: Tensor, new: Pair, block: int, stride: int) -> Pair:
        """The tokens `[B, E, l, G, D]` of the `E` compressed blocks that `new [B, T, G, D]` may complete; of those that
        they do not, any. The ring's reach is a block less one token."""
        kernels = self.kernels()
        if kernels is not None:
            found = kernels.read_tokens(new, self.pair, start, self.reach, emitted=(block, stride))
            return pair_of(x.transpose(2, 3) for x in found)
        recent, count = self.recent(start, new), -(-new[0].shape[1] // stride)
        index = n_compressed_of(start, block, stride)[:, None] + torch.arange(count, device=start.device)
        first = index * stride - self.first_position(start)[:, None]
        token = (first[..., None] + torch.arange(block, device=start.device)).clamp_max(recent[0].shape[1] - 1)
        return pair_of(take(x, token.flatten(1)).unflatten(1, token.shape[1:]) for x in recent)

    def held_from(self, high_water: Tensor) -> Tensor:
        """The first position that is not overwritten yet in rows that have been `high_water [B]` long."""
        return (high_water - self.slots).clamp_min(0)

    def place(self, index: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        # Of more than there are slots only the last: two writes would race.
        return index % self.slots, (index < end) & (index >= end - self.slots)

    def addressing(self) -> dict[str, Any]:
        return {"ring": True}


class PagedStore(Store):
    """Keys and values `[n_pages + 1, per_page, G, D]`, a spare page at the end; int32 `table [B, columns]`, shared with
    the cache, has the page of each part of a row, or `n_pages` for none."""

    def __init__(self, *args: Any, table: Tensor, **options: Any) -> None:
        super().__init__(*args, **options)
        self.table = table

    @property
    def slots(self) -> int:
        return self.table.shape[1] * self.pair[0].shape[1]

    @property
    def copied(self) -> bool:
        return True

    def places(self, index: Tensor) -> Tensor:
        per_page = self.pair[0].shape[1]
        column = torch.div(index, per_page, rounding_mode="floor").clamp(max=self.table.shape[1] - 1)
        return self.table.gather(1, column.long()).long() * per_page + index % per_page

    def addressing(self) -> dict[str, Any]:
        return {"table": self.table}

    def first(self, n: int, end: Tensor, *, block: int = 1, stride: int = 1) -> Pair:
        kernels = self.kernels()
        if kernels is not None:
            pairs = by_pair(self.tensors())
            read = [kernels.read_pages(pair, self.table, end, n, block=block, stride=stride) for pair in pairs]
            return self.decode_pairs(read)
        index = torch.arange(n, device=end.device).expand(end.shape[0], -1)
        # A page may hold what another row left, which need not be finite.
        unused = (index >= n_compressed_of(end, block, stride)[:, None])[..., None, None]
        return pair_of(x.masked_fill_(unused, 0.0) for x in self.gather(index))

    def grown(self, slots: int) -> tuple[Tensor, ...]:
        """`tensors()`: rows grow by pages."""
        return self.tensors()


def by_pair(tensors: tuple[Tensor, ...]) -> Iterator[Pair]:
    """Keys and values, and then their scales if there are any, `[..., G, D]` each, as kernels take them."""
    k, v, *scales = tensors
    yield bits(k), bits(v)
    if scales:
        yield pair_of(x[..., None] for x in scales)


def bits(x: Tensor) -> Tensor:
    """fp8 as bytes, which torch can index on every device; other dtypes as they are."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
