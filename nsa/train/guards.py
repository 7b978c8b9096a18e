"""Guards of a long run: signals, stalls, steps that are not finite, and the profile of a run that is too slow."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from nsa.data import Batch
from nsa.files import open_no_link
from nsa.progress import say
from nsa.tensor_file import read_tensors, write_tensors
from nsa.train.step import autocast

# The descriptor, whatever Python's sys.stderr was replaced by.
STDERR = 2
# The longest interval between two checks of the watchdog: the platform cannot wait for any time.
MAX_WAIT_S = 3600.0
# torchrun forwards a signal to its ranks within this time.
ECHO_S = 2.0


class RunStopped(RuntimeError):
    """A guard ended the run; the message says why, and what was saved."""


class StopRequested(Exception):
    """A signal arrived while the run was waiting for something that may never come."""


class Signals:
    """SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask the run to stop after its step; a second SIGTERM or SIGINT kills it.

    A closed terminal sends SIGHUP more than once, and a scheduler follows its SIGUSR1 with SIGTERM: neither SIGHUP nor
    SIGUSR1 kills the process, or counts as the first of two. An ignored SIGHUP, as under nohup, stays ignored.

    Within `waiting()` the first signal ends the wait. With `forwarded`, signals within 2 s of the first are ignored,
    because torchrun forwards the first one again.
    """

    ENDING = (signal.SIGTERM, signal.SIGINT)
    NUMBERS = (*ENDING, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self, *, forwarded: bool = False) -> None:
        self.echo_s = ECHO_S if forwarded else 0.0
        self.received: str | None = None  # the name of the first signal
        self.since: float | None = None  # when the first SIGTERM or SIGINT arrived
        self.before: dict[int, Any] = {}
        self.raises = False

    def __enter__(self) -> Signals:
        # Only the main thread may have handlers.
        if threading.current_thread() is threading.main_thread():
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
            self.before = {n: signal.signal(n, self.handle) for n in self.NUMBERS if n not in ignored}
        return self

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in self.ENDING:
            if self.since is not None and now - self.since >= self.echo_s:
                self.restore()
                signal.raise_signal(number)
                return
            self.since = self.since or now
        if self.received is None:
            self.received = signal.Signals(number).name
            if self.raises:
                raise StopRequested

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.raises = True
        try:
            if self.received is not None:
                raise StopRequested
            yield
        finally:
            self.raises = False

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def __exit__(self, *_: object) -> None:
        self.restore()


class Skips:
    """Steps whose loss or gradients were not finite: counts them, and saves their batches for replay."""

    def __init__(self, folder: Path, limit: int, *, rank: int = 0) -> None:
        self.folder, self.limit, self.rank = folder, limit, rank
        self.total = self.in_a_row = 0

    def count(self, skipped: bool) -> None:
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.total += skipped

    def save(self, step: int, batches: Sequence[Batch]) -> str:
        """Write the batches of the skipped `step`, counted from 0; returns a message that says where they are."""
        rank = f".rank_{self.rank}" if self.rank else ""
        path = self.folder / f"step_{step + 1}{rank}.safetensors"
        try:
            return f"its batch is in {save_batches(path, batches)}"
        except OSError as error:
            return f"its batch could not be saved: {error}"


def save_batches(path: Path, batches: Sequence[Batch]) -> Path:
    named = {f"{name}.{i}": x for i, batch in enumerate(batches) for name, x in batch._asdict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, {name: x.cpu().contiguous() for name, x in named.items() if x is not None})
    return path


def load_batches(path: Path) -> list[Batch]:
    """The batches of one step that `save_batches` wrote, for `Trainer.step`."""
    tensors = read_tensors(path)
    n = sum(name.startswith("tokens.") for name in tensors)
    return [Batch(tensors[f"tokens.{i}"], tensors[f"targets.{i}"], tensors.get(f"cu_seqlens.{i}")) for i in range(n)]


class Watchdog:
    """A thread that appends the stack of every thread to `path` when no `beat` came for `seconds`.

    It adds what the run was doing by `describe()`, and what could be saved by `rescue()`. The run goes on, because it
    may only be slow, and is reported again after twice the time. A thread that has died is replaced at the next `beat`.
    """

    def __init__(self, path: Path, seconds: float, *, describe: Callable[[], str], rescue: Callable[[], str]) -> None:
        self.path, self.seconds, self.describe, self.rescue = path, seconds, describe, rescue
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        self.beat()

    def beat(self) -> None:
        """A step is done."""
        self.last, self.patience = time.monotonic(), self.seconds
        if self.thread is not None and not self.thread.is_alive() and not self.ended.is_set():
            self.log("its thread has died; starting another one")
            self.start()

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def start(self) -> None:
        self.thread = threading.Thread(target=self.watch, name="nsa-watchdog", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:
            self.log(f"the run continues without it: {error}")
            self.thread = None

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.thread is not None:
            # A thread that runs while the interpreter ends aborts the process. One that is saving is not waited for.
            self.thread.join(1.0)

    def watch(self) -> None:
        while not self.ended.wait(min(self.seconds / 10, MAX_WAIT_S)):
            idle = time.monotonic() - self.last
            if idle >= self.patience:
                self.patience = 2 * idle
                self.report_stall(idle)

    def report_stall(self, idle: float) -> None:
        silence, doing = f"no step for {idle:.0f} s", call_or_error("describe", self.describe)
        # A file that cannot be written must not prevent the rescue.
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.open() as file:
                file.write(f"{silence}\n{doing}\n\n")
                # It writes past Python's buffer.
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\n")
            self.log(f"{silence}: every thread's stack is in {self.path}")
        except OSError as error:
            self.log(f"{silence}; {self.path} cannot be written: {error}\n{doing}")
            faulthandler.dump_traceback(STDERR, all_threads=True)
        saved = call_or_error("rescue", self.rescue)
        self.log(saved)
        with suppress(OSError), self.open() as file:
            file.write(f"{saved}\n\n")

    def open(self) -> IO[str]:
        return open(self.path, "a", errors="backslashreplace", opener=open_no_link)

    def log(self, text: str) -> None:
        say(f"[watchdog] {text}", error=True)


def call_or_error(name: str, function: Callable[[], str]) -> str:
    """The result, or the error as text: `function` reads what another thread changes."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001
        return f"{name} failed: {error!r}"


def branch_profile(module: nn.Module, batch: Batch, dtype: torch.dtype) -> str:
    """A table of the time of a forward and backward by branch; uncompiled, because compiled code does not show it."""
    device = batch.tokens.device
    on_gpu = device.type == "cuda"

    def once() -> float:
        begin = time.perf_counter()
        with autocast(device, dtype):
            loss = module(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens)
        loss.backward()
        module.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    once()
    total = once()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as measured:
        once()
    attention = ("nsa::", "aten::scaled_dot_product_attention", "flex_attention")
    events = [event for event in measured.key_averages() if event.key.startswith(attention)]
    spent = {event: event.device_time_total if on_gpu else event.cpu_time_total for event in events}
    lines = [f"one batch, uncompiled, forward and backward: {total:.1f} ms"]
    for event in sorted(events, key=lambda event: -spent[event]):
        name, time_of = event.key.removeprefix("nsa::"), "GPU" if on_gpu else "CPU"
        lines.append(f"  {name:<32}{event.count:>6} calls {spent[event] / 1e3:>10.2f} ms of {time_of} time")
    return "\n".join(lines)
