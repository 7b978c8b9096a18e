"""Counters of what ran and what failed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Counts:
    """The counts of what ran and what failed: calls by op and backend, failures by op, backend and reason.

    Autograd runs backward passes on its own threads, so additions take a lock.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    # By thread: see `record`.
    recorded: dict[int, Counter[tuple[str, str]]] = field(default_factory=dict, repr=False, compare=False)

    def add_call(self, op: str, backend: str) -> None:
        with self.lock:
            self.calls[op, backend] += 1
            if self.recorded and threading.get_ident() in self.recorded:
                self.recorded[threading.get_ident()][op, backend] += 1

    def add_calls(self, calls: Counter[tuple[str, str]]) -> None:
        with self.lock:
            self.calls.update(calls)

    @contextmanager
    def record(self) -> Iterator[Counter[tuple[str, str]]]:
        """The calls that this thread makes in the block, whatever others do."""
        thread, calls = threading.get_ident(), Counter[tuple[str, str]]()
        with self.lock:
            self.recorded[thread] = calls
        try:
            yield calls
        finally:
            with self.lock:
                del self.recorded[thread]

    def add_failure(self, op: str, backend: str, reason: str) -> int:
        """How often this has now happened."""
        with self.lock:
            self.failures[op, backend, reason] += 1
            return self.failures[op, backend, reason]

    def as_dict(self) -> dict[str, dict[str, int]]:
        """The counts as a dict for logs: `{"calls": {"sliding/sdpa": 12}, "failures": {"sliding/triton: out of shared
        memory": 1}}`."""
        with self.lock:
            return {
                "calls": {f"{op}/{name}": n for (op, name), n in sorted(self.calls.items())},
                "failures": {f"{op}/{name}: {why}": n for (op, name, why), n in sorted(self.failures.items())},
            }

    def __str__(self) -> str:
        """The counts as text: what ran on one line, then a line per failure."""
        counts = self.as_dict()
        ran = ", ".join(f"{name} {n}" for name, n in counts["calls"].items()) or "none"
        return "\n".join([f"calls: {ran}", *(f"failed {n}x: {name}" for name, n in counts["failures"].items())])

    def clear(self) -> None:
        with self.lock:
            self.calls.clear()
            self.failures.clear()
