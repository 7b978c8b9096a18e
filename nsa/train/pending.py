"""Steps that were launched and not logged yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.data import Batch
from nsa.train.clock import wait_asleep
from nsa.train.step import StepResult


class Outcome(NamedTuple):
    """What came of a step, read back from the device."""

    # Counted from 0.
    step: int
    loss: float
    grad_norm: float
    # Where the batches of a skipped step are kept, in words; None for a step that was not skipped.
    kept: str | None


class PendingSteps:
    """Results of the steps since the last log step, and the batches of those that the device has not finished.

    A step's batches are needed only if it was skipped, so they are dropped, or handed to `keep(step, batches)`, as soon
    as its result can be read without waiting: memory does not grow with the number of steps between two log steps.
    """

    def __init__(self, device: torch.device, keep: Callable[[int, Sequence[Batch]], str]) -> None:
        self.device = device
        self.keep = keep
        self.running: deque[tuple[int, Tensor, torch.cuda.Event | None, Sequence[Batch]]] = deque()
        self.outcomes: list[Outcome] = []

    def __len__(self) -> int:
        return len(self.running) + len(self.outcomes)

    def add(self, step: int, result: StepResult, batches: Sequence[Batch]) -> None:
        values, arrived = torch.stack(result), None
        if self.device.type == "cuda":
            # Only into pinned memory can a copy be made without waiting.
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = on_host.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(self.device))
        self.running.append((step, values, arrived, batches))
        self.poll()

    def poll(self) -> None:
        """Read back the steps that are finished; never waits."""
        while self.running and (self.running[0][2] is None or self.running[0][2].query()):
            step, values, _, batches = self.running.popleft()
            loss, grad_norm, skipped = values.tolist()
            self.outcomes.append(Outcome(step, loss, grad_norm, self.keep(step, batches) if skipped else None))

    def wait(self) -> list[Outcome]:
        """The outcomes of all steps since the last call, in order; waits for the device."""
        wait_asleep(self.device)
        self.poll()
        outcomes, self.outcomes = self.outcomes, []
        return outcomes
