"""Capturing a CUDA graph."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import torch

# One thread at a time: capturing waits for the device, which would break a capture that another thread has begun.
CAPTURING = threading.Lock()


def capture_graph(
    function: Callable[[], object], *, pool: torch.cuda.MemPool | None = None, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Capture what `function` launches. Other threads may allocate meanwhile.

    Garbage collection is off meanwhile: freeing another graph, such as that of an earlier generation, fails a capture.

    Args:
        function: Called once. Nothing runs on the device.
        pool: The graph's memory pool (default: one of its own).
        stream: The stream to capture on (default: a side stream).

    Returns:
        The graph, to be replayed.
    """
    graph = torch.cuda.CUDAGraph()
    where: dict[str, Any] = {"pool": None if pool is None else pool.id, "stream": stream}
    # A capture that fails would leave its stream behind as the current one.
    here = torch.cuda.current_stream(None if stream is None else stream.device)
    with CAPTURING, torch.cuda.stream(here):
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, **where, capture_error_mode="thread_local"):
                function()
        except RuntimeError:
            # A capture that fails leaves its device's generator recording, and the next random number would raise: the
            # same seed and offset, in a state that does not. Earlier graphs of that device keep theirs.
            generator = torch.cuda.default_generators[here.device_index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            if collects:
                gc.enable()
    return graph
