"""A source that falls silent, threads that end, and errors that arrive."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data_standins import Memory, Numbers, memory_loader
from waiting import PATIENCE_S, wait_until

from nsa.data.documents import DocumentChunk
from nsa.data.loader import RETRIES, Late, Loader, Prefetcher, Stalled, Stopped

LENGTHS = [9] * 40


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nsa-data"]


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(5)
    return not any(thread.is_alive() for thread in threads)


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    before = set(data_threads())
    yield
    assert ended([thread for thread in data_threads() if thread not in before])


class Sleepy(Memory):
    """Falls asleep before it reads its chunk number `at`, as often as `naps` says, until it is woken."""

    def __init__(self, at: int, naps: int) -> None:
        super().__init__(LENGTHS)
        self.at, self.naps, self.wake = at, naps, threading.Event()

    def chunks(self, seed: int, epoch: int, first: int, bookmark: Any) -> Iterator[DocumentChunk]:
        for number, chunk in enumerate(super().chunks(seed, epoch, first, bookmark), first):
            if number == self.at and epoch == 0 and self.naps:
                self.naps -= 1
                self.wake.wait(30)
            yield chunk


@pytest.fixture
def sleepy() -> Iterator[Sleepy]:
    source = Sleepy(at=6, naps=1)
    yield source
    source.wake.set()


def stalling(source: Sleepy, on_stall: str, **values: Any) -> Loader:
    values = {"stall_timeout_s": 0.3, "queue": 1, **values}
    return memory_loader(source, prefetch=True, on_stall=on_stall, **values)


def drain(loader: Loader) -> None:
    for _ in range(60):
        next(loader)


def test_abort_says_what_it_waited_for(sleepy: Sleepy) -> None:
    loader = stalling(sleepy, "abort")
    with pytest.raises(Stalled, match=r"memory for 0\.3 s; .*chunk \d+ of memory \(.*'retry'"):
        drain(loader)
    assert loader.waited >= 0.3
    # What came before it is not lost.
    assert loader.state_dict()["used"] > 0
    with pytest.raises(ValueError, match="loader is 'closed'"):
        next(loader)


def test_retry_goes_on_with_the_same_batches(sleepy: Sleepy, caplog: pytest.LogCaptureFixture) -> None:
    expected = [batch.tokens for batch, _ in zip(memory_loader(Memory(LENGTHS)), range(60), strict=False)]
    with stalling(sleepy, "retry") as loader, caplog.at_level(logging.WARNING, "nsa"):
        assert all(torch.equal(next(loader).tokens, tokens) for tokens in expected)
        sleepy.wake.set()
    assert "reading chunk" in caplog.text
    assert f" 1 of {RETRIES}" in caplog.text


def test_retry_gives_up_in_the_end(sleepy: Sleepy) -> None:
    sleepy.naps = 100
    loader = stalling(sleepy, "retry", stall_timeout_s=0.05)
    with pytest.raises(Stalled, match=f"tried {RETRIES} times more"):
        drain(loader)


def test_synthetic_stands_in_and_the_ranks_stay_together(sleepy: Sleepy, caplog: pytest.LogCaptureFixture) -> None:
    """The stalled rank loses what the others have passed: after it, every rank is where it would have been."""
    expected = [batch.tokens for batch, _ in zip(memory_loader(Memory(LENGTHS)), range(60), strict=False)]
    seen, states = [], []
    with stalling(sleepy, "synthetic", stall_timeout_s=2.0) as loader, caplog.at_level(logging.WARNING, "nsa"):
        for step in range(60):
            if loader.stand_ins == 4:
                sleepy.wake.set()
                time.sleep(0.01)
            # One at a time, so that the thread can keep up once the source is back.
            if step and not loader.late:
                time.sleep(0.002)
            seen.append(next(loader).tokens)
            states.append(loader.state_dict())
    real = [torch.equal(a, b) for a, b in zip(seen, expected, strict=True)]
    first = real.index(False)
    assert 4 <= real.count(False) == loader.stand_ins < 30
    assert all(real[:first])
    assert real[-1], "the source came back"
    assert caplog.text.count("random tokens") == caplog.text.count(" back") >= 1
    assert all(seen[first].flatten() >= 0)
    # A state that was saved while something stood in is where the other ranks are, too.
    resumed = memory_loader(Memory(LENGTHS))
    resumed.load_state_dict(states[first])
    assert torch.equal(next(resumed).tokens, expected[first + 1])


def test_a_loader_that_goes_on_stands_in_with_other_noise() -> None:
    first, second, older = (memory_loader(Memory(LENGTHS)) for _ in range(3))
    noise = [first.stand_in()[0].tokens for _ in range(2)]
    state = first.state_dict()
    second.load_state_dict(state)
    assert second.stand_ins == 2
    noise += [second.stand_in()[0].tokens for _ in range(2)]
    assert len({tuple(tokens.flatten().tolist()) for tokens in noise}) == 4
    # A state from before they were counted.
    del state["stand_ins"]
    older.load_state_dict(state)
    assert older.stand_ins == 0


def test_stand_ins_are_packed_like_the_rest(sleepy: Sleepy) -> None:
    with stalling(sleepy, "synthetic", pack=True, batch_size=3) as loader:
        while not loader.stand_ins:
            batch = next(loader)
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens.tolist() == [0, 4, 8, 12]
        assert batch.tokens.max() < Numbers.vocab_size
        sleepy.wake.set()


def test_close_ends_the_threads_and_may_be_called_again() -> None:
    loader = memory_loader(Memory(LENGTHS), prefetch=True)
    assert not data_threads(), "nothing runs before the first batch"
    next(loader)
    threads = data_threads()
    assert threads
    loader.close()
    loader.close()
    assert not any(thread.is_alive() for thread in threads)


def test_loading_a_state_replaces_the_threads() -> None:
    with memory_loader(Memory(LENGTHS), prefetch=True) as loader:
        for _ in range(3):
            next(loader)
            old = data_threads()
            loader.load_state_dict(loader.state_dict())
            assert not any(thread.is_alive() for thread in old)
        next(loader)
        assert len(data_threads()) == len(old)


def test_the_thread_works_ahead_and_no_further() -> None:
    made = []

    def items() -> Iterator[int]:
        for index in range(100):
            made.append(index)
            yield index

    ahead = Prefetcher(items(), 3)
    assert ahead.get() == 0
    wait_until(lambda: len(made) >= 5)
    time.sleep(0.02)
    # One was taken, three are ready, one is in the thread's hand.
    assert made == [0, 1, 2, 3, 4]
    assert ahead.stop(PATIENCE_S)
    with pytest.raises(Stopped):
        ahead.get()


def test_results_that_came_before_an_error_are_given_first() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    ahead = Prefetcher(items(), 4)
    assert ahead.get(PATIENCE_S) == 1
    for _ in range(2):
        with pytest.raises(KeyError, match="broken") as caught:
            ahead.get(PATIENCE_S)
        assert "items" in [entry.name for entry in caught.traceback]
    assert ahead.stop(PATIENCE_S)


def test_what_does_not_come_is_late() -> None:
    wake = threading.Event()
    ahead = Prefetcher(iter(wake.wait, True), 1)
    with pytest.raises(Late):
        ahead.get(0.01)
    assert not ahead.stop(0.01)
    wake.set()


def test_a_process_ends_though_its_source_never_answers() -> None:
    code = """
        import time
        from data_standins import Memory, memory_loader

        class Silent(Memory):
            def read(self, index):
                time.sleep(1000)

        loader = memory_loader(Silent([9] * 40), prefetch=True, stall_timeout_s=0.1)
        try:
            next(loader)
        except TimeoutError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": ":".join([str(Path(__file__).parents[1]), *sys.path])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "memory for 0.1 s" in done.stdout
