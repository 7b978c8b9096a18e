"""What a run writes down as it goes: `metrics.jsonl`, `heartbeat.jsonl`, and TensorBoard's files where it is installed.

One JSON object a line, flushed line by line. A process that is killed in the middle of a line loses that line: the next
one drops it and goes on. Lines that `nsa.train.report` knows how to draw (it draws other numbers too, by their name):

    step       step, loss, grad_norm, lr
    eval       step, loss
    speed      step, tokens_per_s, step_s (seconds per step), data_wait (part of the time), mfu, gpu_util, memory_gib
    gates      step, mean, entropy: one {"cmp": .., "sel": .., "win": ..} a layer, None for a layer without
    distances  step, counts: how many of the selected blocks lie 0, 1, 2, ... blocks back
    fallbacks  step, counts: {reason: how often}
    sample     step, text
    end        whatever sums the run up
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from nsa.files import is_at, open_no_link
from nsa.train.run_folder import METRICS

HEARTBEAT, TENSORBOARD = "heartbeat.jsonl", "tensorboard"


class RunLog:
    """The files of one run. On rank 0 alone: other ranks have nothing to add."""

    def __init__(self, folder: Path, *, resume: bool, tensorboard: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = {name: open_lines(folder / name, resume) for name in (METRICS, HEARTBEAT)}
        self.folder = folder
        self.board: Any = None
        # Made when there is a number to show: the import takes seconds.
        self.board_folder = folder / TENSORBOARD if tensorboard and find_spec("tensorboard") is not None else None

    def write(self, kind: str, **values: Any) -> None:
        """A line of metrics. Times are no part of it: the same run twice gives the same lines."""
        add_line(self.files[METRICS], {"kind": kind, **plain(values)})
        step = values.get("step")
        if isinstance(step, int):
            self.show(kind, {name: value for name, value in values.items() if name != "step"}, step)

    def heartbeat(self, step: int, **values: Any) -> None:
        """A sign of life, with the time in seconds since 1970: whoever watches compares it with their clock."""
        add_line(self.files[HEARTBEAT], {"time": round(time.time(), 3), "step": step, **plain(values)})

    def in_place(self) -> bool:
        """Whether the metrics are where they were opened."""
        return is_at(self.folder / METRICS, self.files[METRICS])

    def reopen(self) -> list[Path]:
        """The files that were deleted or replaced since they were opened; from now on they are written again."""
        lost = [name for name, file in self.files.items() if not is_at(self.folder / name, file)]
        for name in lost:
            self.files[name].close()
            self.files[name] = open_lines(self.folder / name, resume=True)
        return [self.folder / name for name in lost]

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        if self.board is not None:
            with self.without_charts_if_it_fails():
                self.board.close()
            self.board = None

    def show(self, kind: str, values: dict[str, Any], step: int) -> None:
        if self.board_folder is None:
            return
        numbers = dict(scalars(kind, values))
        with self.without_charts_if_it_fails():
            if numbers and self.board is None:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(self.board_folder))
            for name, number in numbers.items():
                self.board.add_scalar(name, number, step)

    @contextmanager
    def without_charts_if_it_fails(self) -> Iterator[None]:
        """A broken package or a full disk costs the charts, not the run: every number is in `metrics.jsonl` too."""
        try:
            yield
        except (ImportError, OSError) as error:
            warnings.warn(f"TensorBoard gets no more numbers: {error}", RuntimeWarning, stacklevel=4)
            self.board = self.board_folder = None


def add_line(file: IO[str], record: dict[str, Any]) -> None:
    try:
        file.write(json.dumps(record) + "\n")
        file.flush()
    except OSError as error:
        raise OSError(error.errno, f"{file.name} cannot be written: {error.strerror}") from error


def open_lines(path: Path, resume: bool) -> IO[str]:
    """For adding lines: to what is there without its torn end, or to an empty file."""
    if resume and path.exists():
        with open(path, "r+b", opener=open_no_link) as file:
            file.truncate(whole_lines(file.read()))
    return open(path, "a" if resume else "w", encoding="utf-8", opener=open_no_link)


def whole_lines(content: bytes) -> int:
    """How much of it is lines that ended."""
    return content.rfind(b"\n") + 1


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that may still be written to: a torn last line is left out, and so is a missing file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    lines = content[: whole_lines(content)].decode(errors="replace").splitlines()
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            # A disk that was full, or a machine that lost power, can tear a line that others follow.
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def plain(value: Any) -> Any:
    """JSON has no word for what is not finite: "nan", "inf" and "-inf" are text, and the line stays readable to all."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number in a nested value, by its path."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from scalars(f"{name}/{key}", entry)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from scalars(f"{name}/{index}", entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
