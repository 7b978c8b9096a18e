"""An iterator that runs ahead in a thread and buffers a few items."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Late(Exception):
    """Nothing came in time."""


class Stopped(Exception):
    """Nothing more will come."""


class Prefetcher(Generic[T]):
    """`get()` returns the next item, or raises what the iterator raised.

    The thread is a daemon: one that waits for the network must not keep the process from ending.
    """

    def __init__(self, items: Iterator[T], size: int) -> None:
        self.items, self.size = items, size
        self.ready: deque[T] = deque()
        self.failure: Exception | None = None
        self.stopping = False
        # Guards the three attributes above.
        self.changed = threading.Condition()
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
