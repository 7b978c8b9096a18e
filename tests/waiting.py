"""How long tests wait for what must happen: a busy machine may stand still for many seconds at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

# Only what hangs takes longer.
PATIENCE_S = 600.0


def wait_until(condition: Callable[[], object]) -> None:
    """Poll; a failure after `PATIENCE_S`."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
