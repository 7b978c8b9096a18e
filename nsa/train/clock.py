"""How long a run takes, and how to wait for a device without keeping a core busy."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """How long the run takes, and how long the steps between two looks, with nothing else in between."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        # Seconds of the run before this process.
        self.earlier = 0.0
        self.began = (0.0, 0.0, 0.0)
        # Tokens per second, seconds per step, and the parts of that time that data and processor took; None: not known.
        self.rate: float | None = None
        self.step_s = 0.0
        self.data_wait = 0.0
        self.cpu_cores = 0.0
        # Tokens and seconds of the steps that count for the run's speed.
        self.timed = (0, 0.0)

    def begin(self, waited: float) -> None:
        self.began = (time.perf_counter(), time.process_time(), waited)

    def end(self, steps: int, tokens: int, waited: float, *, timed: bool) -> None:
        now = (time.perf_counter(), time.process_time(), waited)
        seconds, cpu, wait = (end - begin for end, begin in zip(now, self.began, strict=True))
        if timed:
            self.rate, self.step_s = tokens / seconds, seconds / steps
            self.data_wait, self.cpu_cores = wait / seconds, cpu / seconds
            self.timed = (self.timed[0] + tokens, self.timed[1] + seconds)

    def numbers(self, at_peak: float | None, price_per_hour: float) -> dict[str, Any]:
        """For the log's "speed". `at_peak`: seconds per token at the GPUs' peak."""
        found: dict[str, Any] = {}
        if self.rate is not None:
            found["tokens_per_s"] = round(self.rate, 1)
            found["step_s"] = round(self.step_s, 6)
            found["data_wait"] = round(self.data_wait, 4)
            found["cpu_cores"] = round(self.cpu_cores, 2)
            if at_peak is not None:
                found["mfu"] = round(self.rate * at_peak, 4)
        if price_per_hour:
            found["cost"] = round(self.total / 3600 * price_per_hour, 2)
        return found

    @property
    def total(self) -> float:
        """Seconds of the run, everything in it."""
        return self.earlier + time.perf_counter() - self.started

    @property
    def mean_rate(self) -> float | None:
        tokens, seconds = self.timed
        return tokens / seconds if tokens else None


def wait_asleep(device: torch.device) -> None:
    """Until the device has done all that it was asked to. Reading a value waits too, but keeps a core busy with it."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)
        done.record()
        done.synchronize()
