"""Compile the kernels of a computation in parallel, before it runs for the first time.

On a new machine a layer's kernels would be compiled one after the other, as each is first launched. Here the
computation is run once without launching anything, which collects the kernels it needs; these are then compiled by as
many threads as there are cores. Afterwards Triton finds them in its disk cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import torch

from nsa import settings
from nsa.backends.triton.launch import COLLECTING, Launch

# Called after each kernel: its name, how many are done, how many there are.
CompileProgress = Callable[[str, int, int], None]


class Collector:
    """Compiles the kernels of the launches it is handed, each in a thread."""

    def __init__(self, workers: int) -> None:
        self.pool = ThreadPoolExecutor(workers)
        self.device = torch.cuda.current_device()
        self.futures: dict[Future[None], str] = {}
        self.kernels: set[Any] = set()

    def submit(self, launch: Launch, free: dict[str, Any]) -> None:
        self.futures[self.pool.submit(self.compile, launch, free)] = launch.kernel.__name__
        self.kernels.add(launch.kernel)

    def compile(self, launch: Launch, free: dict[str, Any]) -> None:
        torch.cuda.set_device(self.device)
        compiled = launch.kernel.warmup(**free, **launch.bound, grid=launch.grid)
        # Builds the launcher stub, which is work for a thread too.
        assert compiled.run is not None


def compile_ahead(computation: Callable[[], Any], progress: CompileProgress | None = None) -> int:
    """Compile every kernel that `computation()` would launch; returns how many there were.

    It is called once, in this thread and without any of our launches: what it computes means nothing. A kernel that
    cannot be compiled is left to fail where it is used, with the reason.
    """
    if settings.triton_interpreted():
        return 0
    collector = Collector(os.cpu_count() or 1)
    token = COLLECTING.set(collector)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            computation()
    finally:
        COLLECTING.reset(token)
    with collector.pool:
        for done, future in enumerate(as_completed(collector.futures), start=1):
            if progress is not None:
                progress(collector.futures[future], done, len(collector.futures))
    # Triton before 3.7 loads all stubs under one module name, so a thread may hold another's function: what was loaded
    # is dropped, and found again on disk by the first launch.
    for kernel in collector.kernels:
        kernel.device_caches.clear()
    return len(collector.futures)
