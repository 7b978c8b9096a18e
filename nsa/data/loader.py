"""Batches for a rank, in an order that the seed decides, with a position that can be saved and gone back to.

    loader = open_loader(DataConfig(), split="train", batch_size=8, seq_len=2048, seed=0)
    for batch in loader: ...

All ranks walk the same sequence of windows. A step takes `world_size * batch_size` of them, and a rank its own part of
those. So the position is one number for all ranks, and a run goes on with another number of ranks, or another batch
size, where it stopped: no window twice, none left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, get_args

import torch

from nsa.config import require, require_int, require_positive_int
from nsa.data.config import HUB, IGNORED, Batch, DataConfig, Split
from nsa.data.documents import Documents, OnBad, open_files, standard_library, stop
from nsa.data.hub import FINEWEB_EDU, FINEWEB_EDU_SUBSET, HubDocuments
from nsa.data.pools import Pool, Pools, SyntheticPools, TextPools, Window
from nsa.data.prefetch import Late, Prefetcher
from nsa.data.shards import ShardPools
from nsa.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

log = logging.getLogger("nsa")

# How often a silent source is opened again before that is given up.
RETRIES = 3

# Seconds that a thread gets to end when the loader is closed.
PATIENCE = 10.0


class Position(NamedTuple):
    """So many windows were used, counted from the beginning of a pool; None: the first pool of all."""

    pool: dict[str, Any] | None = None
    used: int = 0


class Share(NamedTuple):
    """What a rank takes of the windows, and how it lays them out."""

    batch_size: int
    rank: int
    world_size: int
    pack: bool


class Stalled(TimeoutError):
    """A source gave nothing for too long."""


class Loader:
    """Endless; close it, or use it in a `with`."""

    def __init__(self, pools: Pools, config: DataConfig, share: Share, identity: dict[str, Any]) -> None:
        self.pools, self.config, self.share, self.identity = pools, config, share, identity
        self.source: str = pools.name
        self.tokenizer: Tokenizer = pools.tokenizer
        self.vocab_size: int = pools.tokenizer.vocab_size
        # Seconds that the caller spent waiting, in all, and since when it waits now.
        self.waited = 0.0
        self.asked: float | None = None
        # Batches that stood in for real ones, in all.
        self.stand_ins = 0
        self.position = Position()
        # Batches that are late: others stood in for them, and they are dropped when they come.
        self.late = 0
        self.retries = 0
        # Made when the first batch is asked for: until then the position may still change.
        self.items: Iterator[tuple[Batch, Position]] | None = None
        self.threads: list[Prefetcher[Any]] = []
        self.closed = False

    def start(self) -> Iterator[tuple[Batch, Position]]:
        """Batches from `position` on. One thread makes the next pool while another takes batches out of this one."""
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
        self.asked = time.perf_counter()
        try:
            batch, self.position = self.take()
        finally:
            self.waited += time.perf_counter() - self.asked
            self.asked = None
        return batch

    def __str__(self) -> str:
        """For whoever looks in from another thread."""
        since = self.asked
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
                # A source that is known to be silent is not waited for again.
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
        """What `on_stall` says: a batch that stands in, None for another try, or the end."""
        c = self.config
        message = f"no batch from {self.source} for {c.stall_timeout_s:g} s; it was {self.pools.doing}"
        if c.on_stall == "retry" and self.retries < RETRIES:
            self.retries += 1
            log.warning("%s; opening it again, %d of %d", message, self.retries, RETRIES)
            self.stop(patience=0.0)
            return None
        if c.on_stall == "synthetic":
            if not self.late:
                log.warning("%s; random tokens stand in, and what they stand in for will not be seen", message)
            self.late += 1
            return self.stand_in()
        self.stop(patience=0.0)
        self.closed = True
        hint = "data.on_stall may be 'retry' or 'synthetic'" if c.on_stall == "abort" else f"tried {RETRIES} times more"
        raise Stalled(f"{message} ({hint})")

    def stand_in(self) -> tuple[Batch, Position]:
        """Random tokens. The position moves on as if they were the real ones: all ranks must agree on it."""
        share, seq_len = self.share, self.identity["seq_len"]
        pools = SyntheticPools(self.tokenizer, split="train", seq_len=seq_len, seed=self.identity["seed"])
        pool = pools.pool(share.rank + share.world_size * self.stand_ins)
        self.stand_ins += 1
        windows = [pool.window(index % len(pool)) for index in range(share.batch_size)]
        position = self.position._replace(used=self.position.used + share.world_size * share.batch_size)
        return layout(windows, share), position

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was returned: the same on every rank, JSON types. `stand_ins` alone is
        this rank's; it is kept so that no noise is learned from twice."""
        return {
            **self.identity,
            "pool": self.position.pool,
            "used": self.position.used,
            "stand_ins": self.stand_ins,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader of the same data, seed and length was, bit for bit.

        The number of ranks and the batch size may be others: no window comes twice and none is left out, for every
        source. What is lost is what `on_stall="synthetic"` stood in for. Other data, or a corpus that has changed, is
        an error.
        """
        # One that was written without the last had none.
        state = {"stand_ins": 0, **state}
        known = {*self.identity, "pool", "used", "stand_ins"}
        require(set(state) == known, "the keys of the data's state", sorted(state, key=str), f"{sorted(known)}")
        for name, value in self.identity.items():
            did = "was shuffled" if name in ("seed", "shuffle_tokens") else "was read"
            require(
                value == state[name],
                f"{name} of the data",
                value,
                f"{state[name]!r}: the data of the run that is resumed {did} with it, and it cannot change now",
            )
        for name in ("used", "stand_ins"):
            require_int(f"{name} in the data's state", state[name], at_least=0)
        check_mark(state["pool"], self.pools.mark_keys)
        self.close()
        self.stand_ins = state["stand_ins"]
        self.position = Position(state["pool"], state["used"])
        self.late = self.retries = 0
        self.closed = False

    def close(self) -> None:
        """End the threads. One that waits for a source that does not answer ends with the process at the latest."""
        if not self.stop(PATIENCE):
            log.warning("the thread that reads %s does not end yet: it is %s", self.source, self.pools.doing)
        self.closed = True

    def stop(self, patience: float) -> bool:
        threads, self.threads, self.items = self.threads, [], None
        ended = [thread.stop(patience) for thread in threads]
        return all(ended)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_mark(mark: object, keys: tuple[str, ...]) -> None:
    """None, or the counts that `keys` name; a stream has a bookmark of its own beside them."""
    if mark is None:
        return
    known = isinstance(mark, dict) and set(keys) <= set(mark) <= {*keys, "bookmark"}
    require(known, "pool in the data's state", mark, f"None, or {list(keys)}")
    assert isinstance(mark, dict)
    for name in keys:
        require_int(f"pool.{name} in the data's state", mark[name], at_least=0)


def batches(supply: Iterator[Pool], share: Share, used: int) -> Iterator[tuple[Batch, Position]]:
    """A rank's batches, each with the position after it; `used` windows, from the first pool on, were used before."""
    pool, at = next(supply), used
    while True:
        windows: list[Window] = []
        # The windows of the ranks before this one, its own, and those of the ranks after it.
        for ranks, own in ((share.rank, False), (1, True), (share.world_size - share.rank - 1, False)):
            left = ranks * share.batch_size
            while left:
                if at >= len(pool):
                    pool, at = next(supply), at - len(pool)
                    continue
                count = min(left, len(pool) - at)
                if own:
                    windows += [pool.window(index) for index in range(at, at + count)]
                at, left = at + count, left - count
        yield layout(windows, share), Position(pool.mark, at)


def layout(windows: list[Window], share: Share) -> Batch:
    return pack(windows) if share.pack else stack(windows)


def stack(windows: list[Window]) -> Batch:
    """A window a row; a document sees what was before it in its window."""
    rows = torch.stack([window.tokens for window in windows]).long()
    # Copies: a slice of a single row is contiguous as it is, and the two would share their memory.
    tokens, targets = (x.clone(memory_format=torch.contiguous_format) for x in (rows[:, :-1], rows[:, 1:]))
    return Batch(tokens, targets, None)


def pack(windows: list[Window]) -> Batch:
    """All in one row, with a border at every document and every window. No target is another document's token."""
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
    """Batches of `config`'s data. `vocab_size` is the model's, to be checked where it is given."""
    require(split in get_args(Split), "split", split, f"one of {get_args(Split)}")
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("world_size", world_size)):
        require_positive_int(name, value)
    require_int("seed", seed, at_least=0)
    require_int("rank", rank, at_least=0)
    require(rank < world_size, "rank", rank, f"below world_size = {world_size}")
    pools = open_pools(config, split=split, seq_len=seq_len, seed=seed)
    if vocab_size is not None:
        check_vocabulary(pools.tokenizer, vocab_size)
    identity = {
        "source": config.source,
        "fingerprint": pools.fingerprint,
        "tokenizer": pools.tokenizer.name,
        "split": split,
        "seq_len": seq_len,
        "seed": seed,
        "shuffle_tokens": config.shuffle_tokens,
    }
    return Loader(pools, config, Share(batch_size, rank, world_size, config.pack), identity)


def open_pools(config: DataConfig, *, split: Split, seq_len: int, seed: int) -> Pools:
    if config.source == "shards":
        assert config.path is not None
        return ShardPools(
            Path(config.path).expanduser(), tokenizer=config.tokenizer, split=split, seq_len=seq_len, seed=seed
        )
    tokenizer = load_tokenizer(config.tokenizer or "bytes")
    if config.source == "synthetic":
        return SyntheticPools(tokenizer, split=split, seq_len=seq_len, seed=seed)
    return TextPools(
        open_documents(config),
        tokenizer,
        split=split,
        seq_len=seq_len,
        seed=seed,
        doc_batch=config.doc_batch,
        shuffle_tokens=config.shuffle_tokens,
    )


def open_documents(config: DataConfig, on_bad: OnBad = stop) -> Documents:
    if config.source == "stdlib":
        return standard_library()
    if config.source == "fineweb_edu":
        subset = config.name or FINEWEB_EDU_SUBSET
        return HubDocuments(FINEWEB_EDU, subset, text_key=config.text_key, on_bad=on_bad)
    if config.source.startswith(HUB):
        return HubDocuments(config.source.removeprefix(HUB), config.name, text_key=config.text_key, on_bad=on_bad)
    assert config.path is not None
    return open_files(config.source, config.path, config.text_key, on_bad)
