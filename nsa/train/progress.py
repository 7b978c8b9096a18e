"""What a run shows on the terminal: lines of text, or a progress bar where rich is installed and stdout is a terminal.

Output that cannot be written (a closed terminal, a broken pipe, a full disk behind a redirection) never ends a run.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TextIO


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


@contextmanager
def lossy(stream: TextIO) -> Iterator[None]:
    """Drop what cannot be written in here. A stream whose reader is gone for good is pointed at the null device, so
    that what is left in its buffer does not fail again when the interpreter exits."""
    try:
        yield
    except OSError as failure:
        if failure.errno in (errno.EPIPE, errno.EIO):
            with suppress(OSError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), stream.fileno())
    except ValueError:
        # How Python refuses a stream that was closed, and an encoding a character.
        pass


def open_closed_descriptors() -> None:
    """Give 0, 1 and 2 to the null device where they are closed.

    They would otherwise go to the next files opened, and whatever native code prints would be written into a
    checkpoint or the metrics.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)


class Progress(Protocol):
    def show(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def show(self, step: int, text: str) -> None:
        say(f"step {step:>{len(str(self.steps))}}/{self.steps}  {text}")

    def close(self) -> None:
        """Nothing to put away."""


class Bar:
    def __init__(self, steps: int) -> None:
        rich = import_module("rich.progress")
        # Drawn by `show` alone: a thread that redraws it could not report that the terminal is gone.
        self.bar = rich.Progress(
            rich.MofNCompleteColumn(),
            rich.BarColumn(),
            rich.TimeRemainingColumn(),
            rich.TextColumn("{task.description}"),
            auto_refresh=False,
        )
        self.task = self.bar.add_task("", total=steps)
        with lossy(sys.stdout):
            self.bar.start()

    def show(self, step: int, text: str) -> None:
        with lossy(sys.stdout):
            self.bar.update(self.task, completed=step, description=text, refresh=True)

    def close(self) -> None:
        with lossy(sys.stdout):
            self.bar.stop()


def progress(steps: int) -> Progress:
    return Bar(steps) if find_spec("rich") is not None and is_terminal(sys.stdout) else Lines(steps)


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        # None, a stand-in that only writes, or a stream that was closed.
        return False


def log_line(loss: float, lr: float, speed: Mapping[str, float], steps_left: int, skipped: int) -> str:
    """What is shown of a log step; `speed` as it is logged, of which everything may be missing."""
    parts = [f"loss {loss:.3f}", f"lr {lr:.2e}"]
    if "tokens_per_s" in speed:
        parts += [f"{speed['tokens_per_s']:,.0f} tokens/s", f"{speed['step_s'] * 1e3:,.0f} ms/step"]
    if "mfu" in speed:
        parts.append(f"MFU {speed['mfu']:.1%}")
    if "step_s" in speed and steps_left:
        parts.append(f"ETA {duration(steps_left * speed['step_s'])}")
    if "cost" in speed:
        parts.append(f"cost {speed['cost']:.2f}")
    if skipped:
        parts.append(f"skipped {skipped}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
