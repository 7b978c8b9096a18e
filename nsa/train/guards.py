"""What stands between a long run and a bad end: signals, stalls, numbers that are not finite, a run too slow."""

from __future__ import annotations

import errno
import faulthandler
import fcntl
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from nsa.config import require
from nsa.data import Batch
from nsa.files import is_at, make_folder, open_no_link
from nsa.tensor_file import read_tensors, write_tensors
from nsa.train.progress import say
from nsa.train.step import autocast

# The descriptor, which is there whatever Python's own stderr was replaced by.
STDERR = 2
LOCK = ".lock"
WATCHDOG = "watchdog.txt"
# Between two looks of the watchdog.
MAX_WAIT_S = 3600.0


class RunStopped(RuntimeError):
    """A guard ended the run; the message says why and what is left on the disk."""


class Asked(Exception):
    """A signal came while the run was waiting for something that may never come."""


class Signals:
    """SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask the run to stop after its step; a second SIGTERM or SIGINT kills it.

    A closed terminal sends SIGHUP more than once, and a scheduler follows its warning with SIGTERM: neither SIGHUP nor
    SIGUSR1 ends the process, or counts as the first of two. SIGHUP stays ignored where it is, as under nohup.

    Within `waiting()` the first signal ends the wait: nothing else would, if what is waited for never comes. Under a
    launcher, which forwards what its ranks may have been sent too, one within `echo_s` of the first is the same one.
    """

    ENDING = (signal.SIGTERM, signal.SIGINT)
    NUMBERS = (*ENDING, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self, *, echo_s: float = 0.0) -> None:
        self.echo_s = echo_s
        self.asked: str | None = None
        # When the first SIGTERM or SIGINT came.
        self.since: float | None = None
        self.before: dict[int, Any] = {}
        self.raises = False

    def __enter__(self) -> Signals:
        # Python lets only the main thread have handlers; elsewhere whoever started the thread has them.
        if threading.current_thread() is threading.main_thread():
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
            self.before = {number: signal.signal(number, self.note) for number in self.NUMBERS if number not in ignored}
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in self.ENDING:
            if self.since is not None and now - self.since >= self.echo_s:
                self.restore()
                signal.raise_signal(number)
                return
            self.since = self.since or now
        if self.asked is None:
            self.asked = signal.Signals(number).name
            if self.raises:
                raise Asked

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.raises = True
        try:
            if self.asked is not None:
                raise Asked
            yield
        finally:
            self.raises = False

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def __exit__(self, *_: object) -> None:
        self.restore()


@contextmanager
def only_writer(folder: Path) -> Iterator[Callable[[], bool]]:
    """Two processes in one folder would remove each other's checkpoints. The lock goes with its process, however that
    ends; a file system without locks has none.

    Yields a function that tells whether the folder is still the one that was locked: not deleted, moved or replaced.
    """
    make_folder(folder)
    path = folder / LOCK
    with open(path, "a", opener=open_no_link) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            require(
                error.errno not in (errno.EACCES, errno.EAGAIN),
                "out",
                str(folder),
                "a folder that no other process trains in, and one does at this moment",
            )
        yield lambda: is_at(path, file)


class Skips:
    """Steps whose loss or gradients were not finite: counted, their batches kept for replay, many in a row an end."""

    def __init__(self, folder: Path, limit: int, *, rank: int = 0) -> None:
        self.folder = folder
        self.limit = limit
        self.rank = rank
        self.total = 0
        self.in_a_row = 0

    def note(self, skipped: bool) -> None:
        """Count the next step."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.total += skipped

    def keep(self, step: int, batches: Sequence[Batch]) -> str:
        """Write the batches of the skipped `step`, counted from 0; where they are, in words."""
        rank = f".rank_{self.rank}" if self.rank else ""
        path = self.folder / f"step_{step + 1}{rank}.safetensors"
        try:
            return f"its batch is in {save_batches(path, batches)}"
        except OSError as error:
            # The run need not end for it.
            return f"its batch could not be kept: {error}"

    @property
    def too_many(self) -> bool:
        return self.in_a_row >= self.limit


def save_batches(path: Path, batches: Sequence[Batch]) -> Path:
    tensors = {
        f"{name}.{index}": x.cpu().contiguous()
        for index, batch in enumerate(batches)
        for name, x in batch._asdict().items()
        if x is not None
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, tensors)
    return path


def load_batches(path: Path) -> list[Batch]:
    """What `save_batches` wrote: the batches of one step, to be trained on again."""
    tensors = read_tensors(path)
    count = sum(name.startswith("tokens.") for name in tensors)
    return [
        Batch(tensors[f"tokens.{index}"], tensors[f"targets.{index}"], tensors.get(f"cu_seqlens.{index}"))
        for index in range(count)
    ]


class Watchdog:
    """A thread that writes the stack of every other thread to `path` when no step has come for `seconds`.

    `describe` tells what the run was doing; `rescue` saves what can be saved and tells that. The run itself is left
    alone: it may only be slow, and it is looked at again after twice the time. A thread that has died is replaced at
    the next `beat`, which is reported.
    """

    def __init__(self, path: Path, seconds: float, *, describe: Callable[[], str], rescue: Callable[[], str]) -> None:
        self.path = path
        self.seconds = seconds
        self.describe = describe
        self.rescue = rescue
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        self.reset()

    def reset(self) -> None:
        self.last = time.monotonic()
        self.patience = self.seconds

    def beat(self) -> None:
        """A step is done."""
        self.reset()
        if self.thread is not None and not self.thread.is_alive() and not self.ended.is_set():
            self.say("its thread has died; starting another one")
            self.start()

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def start(self) -> None:
        self.thread = threading.Thread(target=self.watch, name="nsa-watchdog", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:
            # The machine has no threads left. The run does not depend on this one.
            self.say(f"the run goes on without it: {error}")
            self.thread = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        if self.thread is not None:
            # A thread that is awake while the interpreter ends takes the process down. One that reports is not waited
            # for.
            self.thread.join(1.0)

    def watch(self) -> None:
        # A wait beyond what the platform can count is an error.
        while not self.ended.wait(min(self.seconds / 10, MAX_WAIT_S)):
            idle = time.monotonic() - self.last
            if idle >= self.patience:
                self.patience = 2 * idle
                self.bark(idle)

    def bark(self, idle: float) -> None:
        silence, doing = f"no step for {idle:.0f} s", answer("describe", self.describe)
        # Nothing that cannot be written may keep the rescue from being tried.
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", errors="backslashreplace", opener=open_no_link) as file:
                file.write(f"{silence}\n{doing}\n\n")
                # It writes past Python's buffer.
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\n")
            self.say(f"{silence}: every thread's stack is in {self.path}")
        except OSError as error:
            self.say(f"{silence}; {self.path} cannot be written: {error}\n{doing}")
            faulthandler.dump_traceback(STDERR, all_threads=True)
        saved = answer("rescue", self.rescue)
        self.say(saved)
        with suppress(OSError), open(self.path, "a", errors="backslashreplace", opener=open_no_link) as file:
            file.write(f"{saved}\n\n")

    def say(self, text: str) -> None:
        say(f"[watchdog] {text}", error=True)


def answer(name: str, question: Callable[[], str]) -> str:
    """The answer, or the error in its place: the watchdog asks while another thread changes what it asks about."""
    try:
        return question()
    except Exception as error:  # noqa: BLE001
        return f"{name} failed: {error!r}"


# Names of what torch's own attention shows in a profile.
TORCH_ATTENTION = ("aten::scaled_dot_product_attention", "flex_attention")


def branch_profile(module: nn.Module, batch: Batch, dtype: torch.dtype) -> str:
    """Where the time of a forward and backward goes, branch by branch; uncompiled, because compiled code shows none."""
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
    rows = []
    for event in measured.key_averages():
        if event.key.startswith(("nsa::", *TORCH_ATTENTION)):
            spent = event.device_time_total if on_gpu else event.cpu_time_total
            rows.append((event.key.removeprefix("nsa::"), event.count, spent / 1e3))
    rows.sort(key=lambda row: -row[2])
    clock = "GPU" if on_gpu else "CPU"
    lines = [f"  {name:<32}{count:>6} calls {spent:>10.2f} ms of {clock} time" for name, count, spent in rows]
    return "\n".join([f"one batch, uncompiled, forward and backward: {total:.1f} ms", *lines])
