"""Benchmark rows and the CSV files that hold them: one measurement, one row."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nsa.config import require
from nsa.dtypes import dtype_name
from nsa.files import can_write_in
from nsa.lazy import renamed_attributes
from nsa.origin import commit, package_version


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: shapes as run, milliseconds as quantiles over repetitions. None is an empty cell."""

    suite: str
    op: str  # attention for the whole, else compressed, scores, selected, sliding, combine, decode, train
    impl: str  # nsa-sdpa, nsa-triton, dense-sdpa, ...
    mode: str  # fwd, bwd, decode, train
    B: int
    S: int
    Hq: int
    G: int
    Dk: int
    Dv: int
    dtype: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    peak_gib: float | None
    tokens_per_s: float | None
    gpu: str
    torch: str
    triton: str | None
    commit: str | None
    date: str


def parse_time(text: str) -> float:
    """Milliseconds; a ValueError for what no clock measures."""
    value = float(text)
    require(0 < value < math.inf, "a time", text, "a finite number above 0")
    return value


COLUMNS = tuple(field.name for field in fields(Row))
# How a cell becomes a value, by the type of its column.
TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": parse_time,
    "str": str,
    "str | None": lambda text: text or None,
    "float | None": lambda text: float(text) if text else None,
}
PARSERS = {field.name: TYPES[str(field.type)] for field in fields(Row)}
__getattr__ = renamed_attributes(__name__, {"read": "read_rows", "environment": "origin_columns"})


def make_row(
    milliseconds: list[float],
    columns: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    commit: str | None = None,
    peak_bytes: int | None = None,
) -> Row:
    """The row of one measurement; `columns`: suite, op, impl, mode and the shape."""
    times: dict[str, Any] = dict(zip(("p20_ms", "p50_ms", "p80_ms"), quantiles(milliseconds), strict=True))
    peak = None if peak_bytes is None else round(peak_bytes / 2**30, 3)
    where = origin_columns(torch.device(device), commit)
    return Row(**columns, dtype=dtype_name(dtype), **times, peak_gib=peak, tokens_per_s=None, **where)


def check_can_append(path: Path) -> None:
    """A ValueError unless rows can be appended to a file, which need not exist."""
    require(not path.is_dir() and can_write_in(path.parent), "--out", str(path), "a file that can be written")
    if path.exists():
        with path.open(newline="", errors="replace") as file:
            header = file.readline().strip()
        require(header in ("", ",".join(COLUMNS)), str(path), header, f"the columns {','.join(COLUMNS)}")


def append(path: Path, row: Row) -> None:
    """Append a row to a CSV file, whose first line is the column names; a ValueError if it has others."""
    check_can_append(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        writer.writerow(["" if value is None else value for value in (getattr(row, name) for name in COLUMNS)])


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file that `append` wrote; a ValueError names the file and the line that is no row."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            return [Row(**{name: parse(cells[name]) for name, parse in PARSERS.items()}) for cells in reader]
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            raise ValueError(f"{path}, line {reader.line_num}, is no row of nsa bench: {error!r}") from error


def quantiles(milliseconds: list[float]) -> tuple[float, float, float]:
    """p20, p50 and p80."""
    p20, p50, p80 = torch.tensor(milliseconds, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double())
    return round(p20.item(), 4), round(p50.item(), 4), round(p80.item(), 4)


def origin_columns(device: torch.device, recorded_commit: str | None = None) -> dict[str, Any]:
    """The columns that record where a row comes from: gpu, torch, triton, commit, date."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "commit": recorded_commit or commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }
