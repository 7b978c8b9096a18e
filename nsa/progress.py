"""Terminal output of a long command: lines, or a progress bar where rich is installed and stdout is a terminal.

Output that cannot be written (a closed terminal, a broken pipe, a full disk behind a redirection) never ends a run.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Any, TextIO

from nsa import settings

log = logging.getLogger("nsa")

# Seconds between two lines of progress where there is no bar.
LINE_EVERY_S = 10.0


def say(text: str, *, error: bool = False) -> None:
    """Print one message to stdout, or to stderr with `error`."""
    stream = sys.stderr if error else sys.stdout
    # Python has no stream where the descriptor was closed at start.
    if stream is None:
        return
    with lossy(stream):
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def aligned_columns(rows: Iterable[Sequence[str]], *, left: int = 0) -> str:
    """A table as text: columns as wide as their longest cell, the first `left` of them aligned to the left."""
    columns = []
    for index, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if index < left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


@contextmanager
def lossy(stream: TextIO) -> Iterator[None]:
    """Ignore failed writes. A stream whose reader is gone is redirected to the null device: what is left in its buffer
    would fail again when the interpreter exits."""
    try:
        yield
    except OSError as failure:
        if failure.errno in (errno.EPIPE, errno.EIO):
            with suppress(OSError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), stream.fileno())
    except ValueError:
        # The stream is closed, or its encoding lacks a character.
        pass


def open_closed_descriptors() -> None:
    """Open descriptors 0, 1 and 2 on the null device where they are closed: the next files opened would get them, and
    what native code prints would end up in a checkpoint or the metrics."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)


def prepare_streams() -> None:
    """Let stdout and stderr take any text: opened where Python has none, and with what they cannot encode escaped."""
    open_closed_descriptors()
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Lines:
    """One line for each `show`, but none within `every_s` seconds of the last one; the last is always printed."""

    def __init__(self, total: int | None, *, unit: str = "step", every_s: float = 0.0) -> None:
        self.total, self.unit, self.every_s = total, unit, every_s
        self.next = time.monotonic() + every_s

    def show(self, done: int, text: str) -> None:
        if done == self.total or time.monotonic() >= self.next:
            self.next = time.monotonic() + self.every_s
            of = "" if self.total is None else f"/{self.total}"
            say(f"{self.unit} {done:>{len(str(self.total or 0))}}{of}  {text}")

    def close(self) -> None:
        """There is nothing to close."""


class Bar:
    """A progress bar, drawn by `show` alone: a thread that redraws it could not report that the terminal is gone."""

    def __init__(self, total: int | None) -> None:
        rich = import_module("rich.progress")
        columns = (rich.MofNCompleteColumn(), rich.BarColumn(), rich.TimeRemainingColumn())
        self.bar = rich.Progress(*columns, rich.TextColumn("{task.description}"), auto_refresh=False)
        self.task = self.bar.add_task("", total=total)
        with lossy(sys.stdout):
            self.bar.start()

    def show(self, done: int, text: str) -> None:
        with lossy(sys.stdout):
            self.bar.update(self.task, completed=done, description=text, refresh=True)

    def close(self) -> None:
        with lossy(sys.stdout):
            self.bar.stop()


Progress = Lines | Bar


def progress(total: int | None, *, unit: str = "step", every_s: float = 0.0) -> Progress:
    """A bar on a terminal, else lines. `total` is None where the number of units is unknown."""
    if find_spec("rich") is not None and is_terminal(sys.stdout):
        return Bar(total)
    return Lines(total, unit=unit, every_s=every_s)


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        # None, a stand-in that only writes, or a stream that was closed.
        return False


def warn_on_first_rank() -> AbstractContextManager[None]:
    """A block in which only the first process on a machine warns: the others would warn of the same."""
    if settings.first_on_machine():
        return nullcontext()
    return without_warnings(lambda record: record.levelno >= logging.ERROR)


def log_with_rank(rank: int) -> AbstractContextManager[None]:
    """A block in which the log messages of every rank but the first carry its number, because they may concern its GPU
    or its data alone. Python warnings concern the code: those of the first rank are enough."""

    def add_rank(record: logging.LogRecord) -> bool:
        record.msg = f"rank {rank}: {record.msg}"
        return True

    return nullcontext() if rank == 0 else without_warnings(add_rank)


@contextmanager
def without_warnings(log_filter: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    log.addFilter(log_filter)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.removeFilter(log_filter)
