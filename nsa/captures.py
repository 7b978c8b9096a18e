"""Decides which calls are captured as CUDA graphs, and how long a capture is kept: see `replay`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

# Calls of a shape before it is captured: a shape that comes once is not worth it.
CALLS_BEFORE = 2
# Shapes that are kept, and those captured at most: shapes may never repeat, and memory must not grow with them.
MAX_SHAPES, MAX_CAPTURED = 8, 32
# Calls so far, of a shape that cannot be captured.
NEVER = -(1 << 62)

T = TypeVar("T")

log = logging.getLogger(__name__)


class NotCapturableError(RuntimeError):
    """A call that has to be launched kernel by kernel."""


def try_to_capture(make: Callable[[], T]) -> T | None:
    """Call `make`; None where that cannot be captured."""
    try:
        return make()
    except NotCapturableError:
        return None
    except RuntimeError as error:
        # What is wrong with the call itself is raised again where it is launched.
        log.warning("nsa: no CUDA graph, kernels are launched one by one (NSA_REPLAY=0 turns capturing off): %s", error)
        return None


class Captures(Generic[T]):
    """The captured graphs by shape. A cache: copies and pickles leave it out."""

    def __init__(self) -> None:
        # Of a shape that is not captured yet: how often it came.
        self.shapes: dict[tuple[Any, ...], T | int] = {}
        self.n_captured = 0
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Captures, ()

    def find(self, key: tuple[Any, ...], make: Callable[[], T]) -> T | None:
        """The graph for `key`, which `make` makes when it has come often enough; None: run without."""
        with self.lock:
            found: T | int | None = self.shapes.pop(key, 0)
            if isinstance(found, int):
                found += 1
                if found > CALLS_BEFORE and self.n_captured < MAX_CAPTURED:
                    self.n_captured += 1
                    found = try_to_capture(make)
            # The last one is the one that was used last.
            self.shapes[key] = NEVER if found is None else found
            if len(self.shapes) > MAX_SHAPES:
                del self.shapes[next(iter(self.shapes))]
            return None if isinstance(found, int) else found
