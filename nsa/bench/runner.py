"""The runner of all suites: a task passes its gate, then each of its passes is timed and becomes a row.

A suite describes what to time and what is right. The rest is here: gate, timing, memory, rows,
output, and what could not be measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.cuda_graph import capture_graph
from nsa.dtypes import DTYPES
from nsa.machine import usable_device
from nsa.results import Row, append, check_can_append, make_row

Found = TypeVar("Found")
# Makes the context manager that a call runs in.
Context = Callable[[], AbstractContextManager[Any]]

WARMUP_MS, MEASURE_MS = 50.0, 300.0
MIN_CALLS, MAX_CALLS, MAX_CPU_CALLS = 3, 200, 50


@dataclass(frozen=True)
class Pass:
    """One call to time."""

    mode: str
    call: Callable[[], object]
    peak_of: Callable[[], object] | None = None  # what counts for peak memory; default: `call`
    tokens: int | None = None  # per call, for tokens per second


@dataclass(frozen=True)
class Task:
    """One implementation of one op at one shape."""

    suite: str
    op: str
    impl: str
    shape: Any  # printed; `columns` are its columns in a row
    passes: Callable[[], Iterator[Pass]]
    error: Callable[[], float]  # the error as a multiple of what is allowed; above 1, or NaN, is wrong
    within: Context = nullcontext

    @property
    def title(self) -> str:
        return f"{self.shape!s:<26} {self.op:<10} {self.impl:<18}"


# How a pass is timed: milliseconds of single calls, and the peak memory in bytes where it is known.
Timing = tuple[list[float], int | None]
PassClock = Callable[[Pass], Timing]


def forward_and_backward(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Iterator[Pass]:
    """`fwd` and, with leaves, `bwd`, whose peak memory is that of both passes."""
    yield Pass("fwd", torch.no_grad()(forward))
    if leaves:

        @cache
        def output() -> tuple[Tensor, Tensor]:
            """The output with its gradient. Computed after the peak of both passes was measured, which must not include
            it."""
            out = forward()
            return out, torch.randn_like(out)

        def both() -> object:
            out = forward()
            return torch.autograd.grad(out, leaves, torch.randn_like(out))

        def backward() -> object:
            out, grad = output()
            return torch.autograd.grad(out, leaves, grad, retain_graph=True)

        yield Pass("bwd", backward, both)


def measure_if_right(error: Callable[[], float], measure: Callable[[], Found]) -> tuple[Found | None, str]:
    """Measure if the gate is passed; else return None and the reason."""
    try:
        off = error()
        if not off <= 1:
            return None, f"wrong: error is {off:.1f} times the tolerance"
        return measure(), ""
    except RuntimeError as failure:
        # A kernel that cannot run, or too little memory: the others are still worth measuring.
        first = str(failure).strip().splitlines() or [type(failure).__name__]
        return None, f"does not run: {first[0][:120]}"


@dataclass
class Runner:
    """Runs tasks; keeps, prints and appends their rows, and the reasons for what has none."""

    clock: PassClock
    dtype: torch.dtype
    device: str
    args: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """One for all tasks: torch keeps a workspace for each stream, which would add up in the peaks."""
        return torch.cuda.Stream()

    def run(self, tasks: Iterable[Task]) -> int:
        """Run all tasks and print a summary as one line of JSON; returns 1 if one was wrong, else 0."""
        for task in tasks:
            # A backward pass runs where its forward pass did, so both are on the stream that a graph is captured on.
            with task.within(), side_stream(self.stream) if isinstance(self.clock, CudaClock) else nullcontext():
                _, note = measure_if_right(task.error, partial(self.measure, task))
            if note:
                self.leave_out(f"{task.impl}, {task.op} at {task.shape}", note)
            # The next task is made before the name is bound again.
            del task
        print(json.dumps({"rows": [asdict(row) for row in self.rows], "left_out": self.left_out}), flush=True)
        return int(any(note.startswith("wrong") for note in self.left_out.values()))

    def measure(self, task: Task) -> None:
        for each in task.passes():
            self.record(task, each, *self.clock(each))

    def record(self, task: Task, each: Pass, times: list[float], peak: int | None) -> None:
        """Make the row of one pass, print it and append it to the file."""
        suffix = self.clock.suffix if isinstance(self.clock, CudaClock) else ""
        names = {"suite": task.suite, "op": task.op, "impl": task.impl + suffix, "mode": each.mode}
        where: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "commit": self.args.commit}
        row = make_row(times, {**names, **task.shape.columns}, **where, peak_bytes=peak)
        if each.tokens is not None:
            row = replace(row, tokens_per_s=round(each.tokens / row.p50_ms * 1e3, 1))
        rate = "" if row.tokens_per_s is None else f"   {row.tokens_per_s:,.0f} tokens/s"
        memory = "" if row.peak_gib is None else f"   peak {row.peak_gib:.2f} GiB"
        spread = f"p20 {row.p20_ms:.3f}  p50 {row.p50_ms:.3f}  p80 {row.p80_ms:.3f} ms"
        print(f"{task.title} {row.mode:<8} {spread}{rate}{memory}", flush=True)
        self.rows.append(row)
        if self.args.out is not None:
            append(self.args.out, row)

    def leave_out(self, what: str, why: str) -> None:
        """Say once why something is not measured."""
        if self.left_out.get(what) != why:
            print(f"left out: {what}: {why}", flush=True)
        self.left_out[what] = why


@dataclass(frozen=True)
class Suite:
    """A suite, which `nsa bench NAME` runs; by default on the GPU in bf16, else on the CPU in fp32, which it computes
    faster."""

    tasks: Callable[[argparse.Namespace, Runner], Iterable[Task]]
    clock: Callable[[argparse.Namespace, str], PassClock]
    finish: Callable[[argparse.Namespace, Runner], None] | None = None  # what follows from the rows

    def run(self, args: argparse.Namespace) -> int:
        if args.out is not None:
            check_can_append(args.out)
        device = getattr(args, "device", None) or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(args, "dtype", None) or ("float32" if device == "cpu" else "bfloat16")
        device = str(usable_device(device))
        runner = Runner(self.clock(args, device), DTYPES[dtype], device, args)
        status = runner.run(self.tasks(args, runner))
        if self.finish is not None:
            self.finish(args, runner)
        return status


@dataclass(frozen=True)
class CudaClock:
    """Single calls by CUDA events, with a cold L2 cache. The host does not wait for a call, so its own time shows only
    where it is slower than the GPU; with `graphs` a call is replayed as one CUDA graph and its time does not show."""

    graphs: bool = False
    suffix: str = ""  # of the implementations' names in rows
    warmup_ms: float = WARMUP_MS
    measure_ms: float = MEASURE_MS
    max_calls: int = MAX_CALLS

    def __call__(self, each: Pass) -> Timing:
        peak_of = each.peak_of or each.call
        peak_of()
        peak = peak_bytes(peak_of)
        call = captured(each.call) if self.graphs else each.call
        return self.times(call), peak

    def times(self, call: Callable[[], object]) -> list[float]:
        flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

        def timed(count: int) -> list[float]:
            events = cuda_events(count)
            for begin, end in events:
                flush.zero_()
                begin.record()
                call()
                end.record()
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in events]

        timed(1)
        rough = max(timed(1)[0], 1e-3)
        if rough < self.warmup_ms:
            timed(round(self.warmup_ms / rough))
        return timed(max(MIN_CALLS, min(self.max_calls, round(self.measure_ms / rough))))


@contextmanager
def side_stream(side: torch.cuda.Stream) -> Iterator[None]:
    """Run on a stream that a graph can be captured on, after the work before the block and before the work after it."""
    here = torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


def cuda_events(count: int) -> list[tuple[Any, Any]]:
    return [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]


def cpu_clock(each: Pass) -> Timing:
    each.call()
    times: list[float] = []
    while len(times) < MIN_CALLS or (sum(times) < MEASURE_MS and len(times) < MAX_CPU_CALLS):
        begin = time.perf_counter()
        each.call()
        times.append((time.perf_counter() - begin) * 1e3)
    return times, None


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The replay of `call`, captured in a CUDA graph on the current stream. That must be a side stream, and for a
    backward pass the one that its forward ran on."""
    call()
    torch.cuda.synchronize()
    return capture_graph(call, stream=torch.cuda.current_stream()).replay


def peak_bytes(call: Callable[[], object]) -> int:
    """Peak allocated memory of one call, inputs included."""
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()
