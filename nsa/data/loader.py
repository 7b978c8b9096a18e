"""Batches for a rank, in an order that the seed determines, with a position that can be saved and restored.

    loader = open_loader(DataConfig(), split="train", batch_size=8, seq_len=2048, seed=0)
    for batch in loader: ...

All ranks iterate over the same sequence of windows. A step takes `world_size * batch_size` of them, and a rank its own
share of those. So the position is the same on all ranks, and a run can resume with another number of ranks or another
batch size: no window is repeated or left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from nsa.config import IGNORED, require, require_int, require_positive_int
from nsa.data.config import SPLITS, Batch, DataConfig, Split
from nsa.data.documents import open_documents
from nsa.data.pools import Pool, Pools, SyntheticPools, TextPools, Window
from nsa.data.shards import ShardPools
from nsa.data.tokenizer import check_vocabulary, load_tokenizer

log = logging.getLogger("nsa")
T = TypeVar("T")

# How often a stalled source is opened again.
RETRIES = 3
# Seconds to wait for a thread when the loader is closed.
PATIENCE = 10.0


class Position(NamedTuple):
    """How many windows were used since the beginning of a pool; None: the very first pool."""

    pool: dict[str, Any] | None = None
    used: int = 0


class Share(NamedTuple):
    """A rank's share of the windows, and whether it packs them."""

    batch_size: int
    rank: int
    world_size: int
    pack: bool


class Stalled(TimeoutError):
    """A source gave no batch for too long."""


class Late(Exception):
    """Raised when no batch came in time."""


class Stopped(Exception):
    """Raised when no batch will come any more."""


class Prefetcher(Generic[T]):
    """An iterator that runs ahead in a thread and buffers a few items; `get()` raises what the iterator raised.

    The thread is a daemon: one that waits for the network must not keep the process from ending.
    """

    def __init__(self, items: Iterator[T], size: int) -> None:
        self.items, self.size = items, size
        self.ready: deque[T] = deque()
        self.failure: Exception | None = None
        self.stopping = False
        self.changed = threading.Condition()  # guards the three attributes above
        self.thread = threading.Thread(target=self.work, name="nsa-data", daemon=True)
        self.thread.start()

    def work(self) -> None:
        try:
            for item in self.items:
                with self.changed:
                    self.changed.wait_for(lambda: self.stopping or len(self.ready) < self.size)
                    if self.stopping:
                        return
                    self.ready.append(item)
                    self.changed.notify_all()
            raise Stopped
        # get() raises it in the caller's thread.
        except Exception as error:  # noqa: BLE001
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def get(self, timeout: float | None = None) -> T:
        """The next item; raises `Late` after `timeout` seconds."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.ready or self.failure or self.stopping, timeout):
                raise Late
            if self.ready:
                self.changed.notify_all()
                return self.ready.popleft()
            raise self.failure or Stopped

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self.get()

    def stop(self, timeout: float) -> bool:
        """Stop the thread; returns whether it has ended. A read in progress is not interrupted."""
        with self.changed:
            self.stopping = True
            self.ready.clear()
            self.changed.notify_all()
        self.thread.join(timeout)
        return not self.thread.is_alive()


class Loader:
    """An endless iterator of batches, from `open_loader`; close it, or use it in a `with`.

    Args:
        pools: Gives the windows.
        config: How they are batched and prefetched, and what to do when none comes.
        share: This rank's part of them.
        identity: What a saved position must match, JSON types.
    """

    def __init__(self, pools: Pools, config: DataConfig, share: Share, identity: dict[str, Any]) -> None:
        self.pools, self.config, self.share, self.identity = pools, config, share, identity
        self.source, self.tokenizer, self.vocab_size = pools.name, pools.tokenizer, pools.tokenizer.vocab_size
        # Seconds that the caller has waited in total, and since when it is waiting now.
        self.waited = 0.0
        self.waiting_since: float | None = None
        self.stand_ins = 0  # batches of random tokens in place of real ones, in total
        self.late = 0  # batches that were replaced and are dropped when they come
        self.retries = 0
        self.position = Position()
        # Created for the first batch: until then the position may change.
        self.items: Iterator[tuple[Batch, Position]] | None = None
        self.threads: list[Prefetcher[Any]] = []
        self.closed = False

    def start(self) -> Iterator[tuple[Batch, Position]]:
        """Batches from `position` on. One thread prepares the next pool while another makes batches of this one."""
        supply = self.pools.pools(self.position.pool)
        if not self.config.prefetch:
            return batches(supply, self.share, self.position.used)
        next_pool = Prefetcher(supply, 1)
        next_batches = Prefetcher(batches(next_pool, self.share, self.position.used), self.config.queue)
        self.threads = [next_pool, next_batches]
        return next_batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.waiting_since = time.perf_counter()
        try:
            batch, self.position = self.take()
        finally:
            self.waited += time.perf_counter() - self.waiting_since
            self.waiting_since = None
        return batch

    def __str__(self) -> str:
        """Describe the state for the watchdog, from another thread."""
        since = self.waiting_since
        now = 0.0 if since is None else time.perf_counter() - since
        waited = f"{self.waited + now:.0f} s waited for, {now:.0f} of them for the next batch"
        return f"{self.source}, last seen {self.pools.doing}; {waited}"

    def take(self) -> tuple[Batch, Position]:
        require(not self.closed, "loader", "closed", "one that is open")
        while True:
            if self.items is None:
                self.items = self.start()
            if not isinstance(self.items, Prefetcher):
                return next(self.items)
            try:
                # A source that has stalled is not waited for again.
                item = self.items.get(0.001 if self.late else self.config.stall_timeout_s)
            except Late:
                stand_in = self.stalled()
                if stand_in is not None:
                    return stand_in
                continue
            self.retries = 0
            if not self.late:
                return item
            self.late -= 1
            if not self.late:
                log.warning("%s is back", self.source)

    def stalled(self) -> tuple[Batch, Position] | None:
        """Follow `on_stall`: return a batch of random tokens, or None to try again, or raise."""
        c = self.config
        message = f"no batch from {self.source} for {c.stall_timeout_s:g} s; it was {self.pools.doing}"
        if c.on_stall == "retry" and self.retries < RETRIES:
            self.retries += 1
            log.warning("%s; opening it again, %d of %d", message, self.retries, RETRIES)
            self.stop(patience=0.0)
            return None
        if c.on_stall == "synthetic":
            if not self.late:
                log.warning("%s; random tokens replace its batches, which will not be seen", message)
            self.late += 1
            return self.stand_in()
        self.stop(patience=0.0)
        self.closed = True
        hint = "data.on_stall may be 'retry' or 'synthetic'" if c.on_stall == "abort" else f"tried {RETRIES} times more"
        raise Stalled(f"{message} ({hint})")

    def stand_in(self) -> tuple[Batch, Position]:
        """Random tokens. The position advances as if they were real: all ranks must agree on it."""
        share, seq_len = self.share, self.identity["seq_len"]
        pools = SyntheticPools(self.tokenizer, split="train", seq_len=seq_len, seed=self.identity["seed"])
        pool = pools.pool(share.rank + share.world_size * self.stand_ins)
        self.stand_ins += 1
        windows = [pool.window(index % len(pool.order)) for index in range(share.batch_size)]
        position = self.position._replace(used=self.position.used + share.world_size * share.batch_size)
        return (pack if share.pack else stack)(windows), position

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch: JSON types, the same on every rank except `stand_ins`, which is saved so
        that no random batch is repeated."""
        return {**self.identity, **self.position._asdict(), "stand_ins": self.stand_ins}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position of a loader of the same data, seed and sequence length.

        The number of ranks and the batch size may differ. What `on_stall="synthetic"` replaced stays lost.

        Args:
            state: from `state_dict`.

        Raises:
            ValueError: the state is of other data, or of a corpus that has changed since.
        """
        # Earlier versions did not save it.
        state = {"stand_ins": 0, **state}
        expected = {*self.identity, "pool", "used", "stand_ins"}
        require(set(state) == expected, "the keys of the data's state", sorted(state, key=str), f"{sorted(expected)}")
        for name, value in self.identity.items():
            accepted = f"{state[name]!r}, as in the run that is resumed: it cannot change"
            require(value == state[name], f"{name} of the data", value, accepted)
        for name in ("used", "stand_ins"):
            require_int(f"{name} in the data's state", state[name], at_least=0)
        mark, keys = state["pool"], self.pools.mark_keys
        if mark is not None:
            # A stream adds a bookmark.
            known = isinstance(mark, dict) and set(keys) <= set(mark) <= {*keys, "bookmark"}
            require(known, "pool in the data's state", mark, f"None, or {list(keys)}")
            for name in keys:
                require_int(f"pool.{name} in the data's state", mark[name], at_least=0)
        self.close()
        self.stand_ins, self.position = state["stand_ins"], Position(mark, state["used"])
        self.late = self.retries = 0
        self.closed = False

    def close(self) -> None:
        """Stop the threads. One that waits for a source that does not answer ends with the process."""
        if not self.stop(PATIENCE):
            log.warning("the thread that reads %s does not end yet: it is %s", self.source, self.pools.doing)
        self.closed = True

    def stop(self, patience: float) -> bool:
        threads, self.threads, self.items = self.threads, [], None
        ended = [thread.stop(patience) for thread in threads]
        return all(ended)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def batches(supply: Iterator[Pool], share: Share, used: int) -> Iterator[tuple[Batch, Position]]:
    """A rank's batches, each with the position after it; the first `used` windows of the supply are skipped."""
    pool, at = next(supply), used
    while True:
        windows: list[Window] = []
        # The windows of the ranks before this one, its own, and those of the ranks after it.
        for ranks, own in ((share.rank, False), (1, True), (share.world_size - share.rank - 1, False)):
            left = ranks * share.batch_size
            while left:
                if at >= len(pool.order):
                    pool, at = next(supply), at - len(pool.order)
                    continue
                count = min(left, len(pool.order) - at)
                if own:
                    windows += [pool.window(index) for index in range(at, at + count)]
                at, left = at + count, left - count
        yield (pack if share.pack else stack)(windows), Position(pool.mark, at)


def stack(windows: list[Window]) -> Batch:
    """One window per row; a document attends to what precedes it in its window."""
    rows = torch.stack([window.tokens for window in windows]).long()
    # Copies: slices of a single row are contiguous already, and the two would share memory.
    tokens, targets = (x.clone(memory_format=torch.contiguous_format) for x in (rows[:, :-1], rows[:, 1:]))
    return Batch(tokens, targets, None)


def pack(windows: list[Window]) -> Batch:
    """All windows in one row, with a border at every document and window. No target is another document's token."""
    tokens, targets, _ = stack(windows)
    seq_len = tokens.shape[1]
    borders = [torch.arange(len(windows) + 1) * seq_len]
    for index, window in enumerate(windows):
        inside = window.starts[window.starts > 0]
        targets[index, inside - 1] = IGNORED
        borders.append(inside[inside < seq_len] + index * seq_len)
    return Batch(tokens.view(1, -1), targets.view(1, -1), torch.cat(borders).sort().values.int())


def open_loader(
    config: DataConfig,
    *,
    split: Split,
    batch_size: int,
    seq_len: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    vocab_size: int | None = None,
) -> Loader:
    """Open the data of a run.

    Args:
        config: the data.
        split: "train" or "valid".
        batch_size: windows in a batch of this rank.
        seq_len: tokens in a window.
        seed: of the shuffle.
        rank: of this process.
        world_size: number of ranks.
        vocab_size: the model's, which the tokenizer's must not exceed (default: not checked).

    Returns:
        An iterator of batches, `tokens` and `targets [batch_size, seq_len]`; close it to end its threads.

    Raises:
        ValueError: an argument is out of range, or the data or its tokenizer cannot be used.
    """
    require(split in SPLITS, "split", split, f"one of {SPLITS}")
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("world_size", world_size)):
        require_positive_int(name, value)
    require_int("seed", seed, at_least=0)
    require_int("rank", rank, at_least=0)
    require(rank < world_size, "rank", rank, f"below world_size = {world_size}")
    pools = open_pools(config, split=split, seq_len=seq_len, seed=seed)
    if vocab_size is not None:
        check_vocabulary(pools.tokenizer, vocab_size)
    identity: dict[str, Any] = {"source": config.source, "fingerprint": pools.fingerprint}
    identity |= {"tokenizer": pools.tokenizer.name, "split": split, "seq_len": seq_len, "seed": seed}
    identity["shuffle_tokens"] = config.shuffle_tokens
    return Loader(pools, config, Share(batch_size, rank, world_size, config.pack), identity)


def open_pools(config: DataConfig, *, split: Split, seq_len: int, seed: int) -> Pools:
    order: dict[str, Any] = {"split": split, "seq_len": seq_len, "seed": seed}
    if config.source == "shards":
        assert config.path is not None
        return ShardPools(Path(config.path).expanduser(), tokenizer=config.tokenizer, **order)
    tokenizer = load_tokenizer(config.tokenizer or "bytes")
    if config.source == "synthetic":
        return SyntheticPools(tokenizer, **order)
    return TextPools(open_documents(config), tokenizer, config, **order)


def synthetic(
    batch_size: int, length: int, vocab_size: int, *, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Uniformly random tokens, for benchmarks, where only shapes matter.

    Args:
        batch_size, length: the shape.
        vocab_size: tokens are below it.
        seed: of the generator.
        device: of the generator and the tensors.

    Returns:
        Tokens and targets, int64 `[batch_size, length]` each.
    """
    generator = torch.Generator(device).manual_seed(seed)
    window = torch.randint(vocab_size, (batch_size, length + 1), generator=generator, device=device)
    return window[:, :-1], window[:, 1:]
