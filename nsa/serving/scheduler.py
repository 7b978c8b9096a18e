"""One thread that owns the model: it admits requests to slots, steps all of them together, and hands out their text.

A request that fails, is cancelled or runs out of time leaves its slot; the others go on. Only a step that itself fails
ends every request that was in it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nsa.config import require_int, require_positive_int
from nsa.generation.options import Options
from nsa.generation.sampling import draws, pick
from nsa.generation.text import TextStream
from nsa.serving.batch import SlotBatch
from nsa.serving.errors import ServingError

log = logging.getLogger("nsa")

# What computing and decoding can raise. Anything else is no request's fault: it ends the thread, and /health says so.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
# So many failed steps in a row mean that the device is lost.
MAX_FAILED_STEPS = 3


class Update(NamedTuple):
    """News of a request: more text, its end, or why it failed."""

    text: str = ""
    finish: Literal["stop", "length"] | None = None
    error: ServingError | None = None


@dataclass(eq=False)
class Job:
    """A request in progress: the token ids of its prompt, how tokens are sampled, and the stream that decodes them.
    `deadline` is in the time of `time.monotonic`; `deliver` is called with each update from the scheduler's thread, and
    must not block."""

    prompt: Sequence[int]
    options: Options
    stream: TextStream
    deadline: float
    deliver: Callable[[Update], None]
    n_tokens: int = 0
    cancelled: bool = False
    slot: int | None = None
    last: int = 0
    n_prefilled: int = 0  # of the prompt, how many tokens are processed
    draws: Tensor = field(init=False)

    def __post_init__(self) -> None:
        # As `nsa generate` draws them: the text depends on the seed, not on what else is being served.
        self.draws = draws(self.options, 1, self.options.max_new_tokens, torch.device("cpu"))[0]

    def cancel(self) -> None:
        """The client has disconnected: the slot is free after the current step."""
        self.cancelled = True

    @property
    def sampling(self) -> tuple[float | int | None, ...]:
        """Requests with the same are sampled together."""
        o = self.options
        return o.temperature, o.top_k, o.top_p, o.min_p


class Scheduler:
    """Runs requests until `close`: tokens of `ends` end an answer, `hidden` ones are not part of a text, `max_waiting`
    requests wait for a slot, and `prefill_chunk` prompt tokens are processed between two decode steps, at most."""

    def __init__(
        self,
        batch: SlotBatch,
        *,
        ends: Collection[int],
        hidden: Collection[int] = (),
        max_waiting: int = 64,
        prefill_chunk: int = 2048,
    ) -> None:
        require_int("max_waiting", max_waiting, at_least=0)
        require_positive_int("prefill_chunk", prefill_chunk)
        self.batch, self.ends, self.hidden = batch, frozenset(ends), frozenset(hidden)
        self.max_waiting, self.prefill_chunk = max_waiting, prefill_chunk
        self.waiting: deque[Job] = deque()
        self.prefilling: Job | None = None
        self.running: list[Job] = []
        self.free = list(range(batch.n_slots))
        self.failed_steps = 0
        self.closing = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self.work, name="nsa-serving", daemon=True)
        self.thread.start()

    @property
    def healthy(self) -> bool:
        return self.thread.is_alive() and not self.closing

    @property
    def max_len(self) -> int:
        return self.batch.max_len

    @property
    def n_running(self) -> int:
        """Requests that have a slot, or are about to."""
        return self.batch.n_slots - len(self.free)

    def submit(self, job: Job) -> None:
        """Queue a request; a ServingError 429 where too many wait already, 503 where the scheduler has stopped."""
        with self.changed:
            if not self.healthy:
                raise stopped()
            if len(self.waiting) - len(self.free) >= self.max_waiting:
                busy = f"{self.batch.n_slots} requests are running and {self.max_waiting} are waiting"
                raise ServingError(429, "too_many_requests", f"{busy}; try again later", retry_after=1)
            self.waiting.append(job)
            self.changed.notify()

    def close(self) -> None:
        """Stop after the current step; requests that are left fail with 503."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()

    def work(self) -> None:
        if self.batch.device.type == "cuda":
            torch.cuda.set_device(self.batch.device)
        try:
            while self.wait_for_work():
                self.drop_ended()
                self.prefill()
                self.step()
        finally:
            with self.changed:
                self.closing = True
            # Their slots stay as they are: the device may be lost.
            for job in self.jobs():
                job.deliver(Update(error=stopped()))

    def wait_for_work(self) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.closing or self.jobs())
            return not self.closing

    def jobs(self) -> list[Job]:
        return [*self.waiting, *([] if self.prefilling is None else [self.prefilling]), *self.running]

    def drop_ended(self) -> None:
        now = time.monotonic()
        for job in self.jobs():
            if job.cancelled:
                self.remove(job)
            elif now >= job.deadline:
                self.fail(job, ServingError(504, "timeout", "the request ran out of time"))

    def prefill(self) -> None:
        """Process up to `prefill_chunk` tokens of waiting prompts, the oldest first."""
        left = self.prefill_chunk
        while left > 0 and (job := self.next_prompt()) is not None:
            chunk = job.prompt[job.n_prefilled : job.n_prefilled + left]
            left -= len(chunk)
            with self.isolated([job]):
                self.extend(job, chunk)

    def next_prompt(self) -> Job | None:
        """The prompt that is being processed, else the oldest one if there is a slot for it."""
        with self.changed:
            if self.prefilling is None and self.free and self.waiting:
                self.prefilling = self.waiting.popleft()
                self.prefilling.slot = self.free.pop()
            return self.prefilling

    def extend(self, job: Job, chunk: Sequence[int]) -> None:
        """Process the next tokens of a prompt; after the last, pick the first of the answer."""
        if job.n_prefilled == 0:
            self.batch.begin_prompt()
        logits = self.batch.extend_prompt(chunk)
        job.n_prefilled += len(chunk)
        if job.n_prefilled == len(job.prompt):
            assert job.slot is not None
            self.batch.occupy(job.slot)
            self.prefilling = None
            self.running.append(job)
            self.sample([job], logits)

    def step(self) -> None:
        if not self.running:
            return
        jobs = list(self.running)
        self.failed_steps += 1
        with self.isolated(jobs):
            logits = self.batch.step({job.slot: job.last for job in jobs if job.slot is not None})
            self.failed_steps = 0
        if self.failed_steps:
            self.closing = self.failed_steps >= MAX_FAILED_STEPS
            return
        groups: dict[tuple[float | int | None, ...], list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.sampling, []).append(job)
        for group in groups.values():
            with self.isolated(group):
                self.sample(group, logits[torch.tensor([job.slot for job in group], device=logits.device)])

    @torch.inference_mode()
    def sample(self, jobs: Sequence[Job], logits: Tensor) -> None:
        """Pick the next token of each of `jobs`, which have the same `sampling`, from `logits [n, V]`."""
        draw = torch.stack([job.draws[min(job.n_tokens, len(job.draws) - 1)] for job in jobs]).to(logits.device)
        for job, token in zip(jobs, pick(logits, draw, jobs[0].options).tolist(), strict=True):
            with self.isolated([job]):
                self.take(job, token)

    def take(self, job: Job, token: int) -> None:
        """Append a token to a request, and end it where it must."""
        if token < 0:
            raise ArithmeticError("the logits are not finite")
        job.last = token
        finish: Literal["stop", "length"] | None = None
        if token in self.ends:
            text, finish = job.stream.close(), "stop"
        else:
            job.n_tokens += 1
            text = job.stream.push([] if token in self.hidden else [token])
            if job.stream.stopped:
                finish = "stop"
            elif job.n_tokens == job.options.max_new_tokens:
                text, finish = text + job.stream.close(), "length"
        if finish is not None:
            self.remove(job)
        job.deliver(Update(text, finish))

    def remove(self, job: Job) -> None:
        with self.changed:
            if job in self.waiting:
                self.waiting.remove(job)
            if job in self.running:
                self.running.remove(job)
            if job is self.prefilling:
                self.prefilling = None
            slot, job.slot = job.slot, None
        if slot is not None:
            # Free again even where the device fails.
            self.free.append(slot)
            self.batch.release(slot)

    def fail(self, job: Job, error: ServingError) -> None:
        job.deliver(Update(error=error))
        self.remove(job)

    @contextmanager
    def isolated(self, jobs: Sequence[Job]) -> Iterator[None]:
        """A failure ends `jobs`, and no other."""
        try:
            yield
        except FAILURES as error:
            log.exception("%d of %d requests failed", len(jobs), len(self.jobs()))
            for job in jobs:
                self.fail(job, ServingError(500, "internal_error", f"the request failed: {type(error).__name__}"))


def stopped() -> ServingError:
    return ServingError(503, "unavailable", "the server is shutting down, or its device failed", retry_after=10)
