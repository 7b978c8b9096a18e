"""Captures of CUDA graphs, with stand-ins for torch's; tests/gpu has the real ones."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nsa.cuda_graph import capture_graph


class Stream(str):
    """A stand-in for torch's: a name."""

    __slots__ = ()
    device_index = 1


class Streams:
    def __init__(self) -> None:
        self.current: object = Stream("callers")

    @contextmanager
    def use(self, stream: object) -> Iterator[None]:
        kept, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = kept


class Generator:
    state = "recording"

    def clone_state(self) -> str:
        return "as before"

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.use)
    return found


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> list[dict[str, Any]]:
    """What was captured, by the arguments."""
    made: list[dict[str, Any]] = []

    @contextmanager
    def graph(graph: object, **options: Any) -> Iterator[None]:
        made.append(options)
        kept, streams.current = streams.current, "side"
        yield
        # As torch's: not after an error.
        streams.current = kept

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(), Generator()))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return made


def test_a_capture_collects_no_garbage(captures: list[dict[str, Any]]) -> None:
    class Cycle:
        freed = False

        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            Cycle.freed = True

    def function() -> None:
        Cycle()
        # Enough new objects for a collection.
        kept = [[] for _ in range(200 * gc.get_threshold()[0])]  # type: ignore[var-annotated]
        assert kept
        assert not Cycle.freed

    gc.collect()
    capture_graph(function)
    assert captures == [{"pool": None, "stream": None, "capture_error_mode": "thread_local"}]
    assert gc.isenabled()
    gc.collect()
    assert Cycle.freed


@pytest.mark.parametrize("collects", [True, False])
def test_a_failed_capture_leaves_the_collector_as_it_was(captures: list[dict[str, Any]], collects: bool) -> None:
    def function() -> None:
        raise RuntimeError("out of luck")

    try:
        if not collects:
            gc.disable()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="luck"):
                capture_graph(function)
            assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert len(captures) == 2


def test_a_failed_capture_leaves_the_stream_as_it_was(captures: list[dict[str, Any]], streams: Streams) -> None:
    def function() -> None:
        assert streams.current == "side"
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="luck"):
        capture_graph(function)
    assert len(captures) == 1
    assert streams.current == "callers"


def test_a_failed_capture_leaves_no_generator_recording(captures: list[dict[str, Any]]) -> None:
    another, generator = torch.cuda.default_generators
    capture_graph(lambda: None)
    assert generator.state == "recording"

    def function() -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="luck"):
        capture_graph(function)
    assert (another.state, generator.state) == ("recording", "as before")


def test_one_thread_captures_at_a_time(captures: list[dict[str, Any]]) -> None:
    """A second capture would wait for a device that captures."""
    inside: list[int] = []
    found: list[list[int]] = []

    def function() -> None:
        inside.append(threading.get_ident())
        threading.Event().wait(0.05)
        found.append(inside.copy())
        inside.pop()

    threads = [threading.Thread(target=capture_graph, args=(function,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(each) for each in found] == [1, 1, 1]
