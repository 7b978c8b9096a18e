"""The files of a run's folder: their names, which checkpoints are there, and the log that a run writes as it goes.

`metrics.jsonl` and `heartbeat.jsonl` hold one JSON object per line, flushed line by line. A process that is killed
while it writes a line loses that line; the next process drops it and appends. Kinds of lines that `nsa.train.report`
draws (it draws other numbers too, by their name):

    step       step, loss, grad_norm, lr
    eval       step, loss
    speed      step, tokens_per_s, step_s (seconds per step), data_wait (fraction of time), mfu, gpu_util, memory_gib
    gates      step, mean, entropy: one {"cmp": .., "sel": .., "win": ..} per layer, None for a layer without gates
    distances  step, counts: how many of the selected blocks lie 0, 1, 2, ... blocks back
    fallbacks  step, counts: {reason: how often}
    sample     step, text
    end        the summary of the run

Importable without torch: a missing checkpoint is reported before torch is loaded.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from nsa.config import require
from nsa.files import LOCK, TEMPORARY, is_at, is_natural, naming_file, open_no_link, parse_json, sync_folder

RUNS = Path("runs")

CONFIG, RUN_INFO, METRICS, HEARTBEAT = "config.yaml", "run.json", "metrics.jsonl", "heartbeat.jsonl"
CHECKPOINTS, TENSORBOARD, WATCHDOG, REPORT = "checkpoints", "tensorboard", "watchdog.txt", "report.html"
# Files that a run appends to, and all that it writes.
APPENDED = (LOCK, METRICS, HEARTBEAT)
WRITTEN = (CONFIG, RUN_INFO, METRICS, HEARTBEAT, REPORT, "model.json", "model.safetensors", "tokenizer.json")

# A folder whose name ends so is no checkpoint: it is being replaced or removed.
REPLACED, REMOVED = ".replaced" + TEMPORARY, ".removed" + TEMPORARY

STEP = re.compile(r"step_(0|[1-9][0-9]*)")
LEFTOVER = re.compile(rf"{STEP.pattern}(\.replaced|\.removed)?{re.escape(TEMPORARY)}")


def saved_steps(folder: Path) -> list[int]:
    """The steps that `folder` has a checkpoint of, in order; none where it does not exist."""
    if not folder.is_dir():
        return []
    names = (STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in names if match)


def temporary_name(folder: Path) -> Path:
    return folder.with_name(folder.name + TEMPORARY)


def name_checkpoint(folder: Path) -> None:
    """Give a checkpoint that is complete its name, in place of another, which cannot be renamed onto."""
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        folder.rename(replaced)
    temporary_name(folder).rename(folder)
    sync_folder(folder.parent)
    # What cannot be deleted now is left to the next save.
    with suppress(OSError):
        discard(replaced)


def recover(folder: Path) -> None:
    """Rename checkpoints back that a process killed between the two renames of `name_checkpoint` left behind."""
    for path in folder.glob(f"*{REPLACED}"):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if not original.exists():
            path.rename(original)


def clear_folder(folder: Path) -> None:
    """Remove what a killed process left behind; files of other names are not ours."""
    recover(folder)
    for path in folder.iterdir():
        if LEFTOVER.fullmatch(path.name):
            discard(path)


def remove(folder: Path) -> None:
    """Rename, then delete: what is half deleted must not look like a checkpoint, even after a power cut."""
    doomed = folder.with_name(folder.name + REMOVED)
    folder.rename(doomed)
    sync_folder(folder.parent)
    discard(doomed)


def discard(path: Path) -> None:
    """Delete a folder, or the link to one but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run_names(runs: Sequence[Path]) -> list[str]:
    """Names that distinguish runs: those of their folders, or whole paths where two have the same name.

    A ValueError if a folder is there twice: both would have one name.
    """
    folders = [run.resolve() for run in runs]
    require(len(set(folders)) == len(folders), "runs", [str(run) for run in runs], "each folder once")
    names = [folder.name for folder in folders]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def require_checkpoint(run: Path, argument: str) -> None:
    """`ValueError`, naming `argument`, unless `run` has a checkpoint: without one, a start would empty its metrics."""
    folder = run / CHECKPOINTS
    found = bool(saved_steps(folder)) or any(folder.glob(f"step_*{REPLACED}"))
    how = f"--config and another --out (or --out {shlex.quote(str(run))}, once its {METRICS} is moved away)"
    accepted = (
        f"a run with a checkpoint, and {folder} has none: restore it from a copy, or start from step 0 with {how}"
    )
    require(found, argument, str(run), accepted)


class RunLog:
    """Metrics, heartbeat and, where it is installed, TensorBoard of one run; rank 0 alone has one. `resume`: append to
    the files instead of emptying them."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = {name: open_lines(folder / name, resume) for name in (METRICS, HEARTBEAT)}
        self.folder = folder
        self.board: Charts | None = None
        # Made when there is a number to show.
        self.board_folder = folder / TENSORBOARD if find_spec("tensorboard") is not None else None

    def write(self, kind: str, **values: Any) -> None:
        """Append a line of metrics, without the time: the same run twice gives the same lines."""
        add_line(self.files[METRICS], {"kind": kind, **plain(values)})
        step = values.pop("step", None)
        if self.board_folder is not None and isinstance(step, int) and (numbers := dict(scalars(kind, values))):
            with self.optional_charts():
                self.board = self.board or Charts(self.board_folder)
                self.board.add(numbers, step)

    def heartbeat(self, step: int, **values: Any) -> None:
        """Append a line with the Unix time, for a monitor to compare with its clock."""
        add_line(self.files[HEARTBEAT], {"time": round(time.time(), 3), "step": step, **plain(values)})

    def in_place(self) -> bool:
        """Whether the metrics are where they were opened."""
        return is_at(self.folder / METRICS, self.files[METRICS])

    def reopen(self) -> list[Path]:
        """Open again the files that were deleted or replaced; return their paths."""
        lost = [name for name, file in self.files.items() if not is_at(self.folder / name, file)]
        for name in lost:
            self.files[name].close()
            self.files[name] = open_lines(self.folder / name, resume=True)
        return [self.folder / name for name in lost]

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        if self.board is not None:
            with self.optional_charts():
                self.board.file.close()
            self.board = None

    @contextmanager
    def optional_charts(self) -> Iterator[None]:
        """A broken package or a full disk ends TensorBoard's log, not the run: `metrics.jsonl` has every number."""
        try:
            yield
        except (ImportError, OSError) as error:
            warnings.warn(f"TensorBoard's log ends here: {error}", RuntimeWarning, stacklevel=4)
            self.board = self.board_folder = None


class Charts:
    """TensorBoard's file. The package's own writer has a thread, whose death on a full disk prints a traceback."""

    def __init__(self, folder: Path) -> None:
        self.event = import_module("tensorboard.compat.proto.event_pb2").Event
        self.summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"events.out.tfevents.{time.time():.0f}.{uuid4().hex[:8]}").open("xb")
        self.records = import_module("tensorboard.summary.writer.record_writer").RecordWriter(self.file)
        self.write(file_version="brain.Event:2")

    def add(self, numbers: dict[str, float], step: int) -> None:
        values = [self.summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self.write(step=step, summary=self.summary(value=values))

    def write(self, **fields: Any) -> None:
        self.records.write(self.event(wall_time=time.time(), **fields).SerializeToString())
        self.file.flush()


def add_line(file: IO[str], record: dict[str, Any]) -> None:
    with naming_file(Path(file.name)):
        file.write(json.dumps(record) + "\n")
        file.flush()


def open_lines(path: Path, resume: bool) -> IO[str]:
    """Open for appending: to what is there without its incomplete last line, or to an empty file."""
    if resume and path.exists():
        with open(path, "r+b", opener=open_no_link) as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    return open(path, "a" if resume else "w", encoding="utf-8", opener=open_no_link)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that may still be written to, without incomplete lines and those whose step is no
    number of a step; none of a missing file."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().rpartition(b"\n")[0].decode(errors="replace").splitlines():
        # A disk that was full, or a machine that lost power, can tear a line that others follow.
        with suppress(ValueError):
            records.append(parse_json(line))
    return [record for record in records if is_natural(record.get("step", 0))]


def plain(value: Any) -> Any:
    """Non-finite floats as "nan", "inf" and "-inf", which JSON has no numbers for."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number in a nested value, by its path."""
    if isinstance(value, dict | list | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from scalars(f"{name}/{key}", entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
