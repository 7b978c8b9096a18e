"""One measurement, one row; the files that plots and tables are drawn from."""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import torch

from nsa.config import require
from nsa.origin import commit, installed


@dataclass(frozen=True, kw_only=True)
class Row:
    """Shapes as run; milliseconds are quantiles over repetitions. None: not measured there, an empty cell."""

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


COLUMNS = tuple(field.name for field in fields(Row))


def append(path: Path, row: Row) -> None:
    """Add a row; a new file starts with the column names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        header = file.readline()
        if header:
            require(header.strip() == ",".join(COLUMNS), str(path), header.strip(), f"the columns {','.join(COLUMNS)}")
        writer = csv.writer(file, lineterminator="\n")
        if not header:
            writer.writerow(COLUMNS)
        writer.writerow(["" if value is None else value for value in (getattr(row, name) for name in COLUMNS)])


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [parse(cells) for cells in csv.DictReader(file)]


def parse(cells: dict[str, str]) -> Row:
    def value(name: str, kind: Any) -> Any:
        text = cells[name]
        if kind in (int, float, str):
            return kind(text)
        # The others are optional: `float | None` or `str | None`.
        return None if text == "" else (float(text) if kind == float | None else text)

    return Row(**{name: value(name, kind) for name, kind in get_type_hints(Row).items()})


def quantiles(milliseconds: list[float]) -> tuple[float, float, float]:
    """p20, p50 and p80."""
    p20, p50, p80 = torch.tensor(milliseconds, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double())
    return round(p20.item(), 4), round(p50.item(), 4), round(p80.item(), 4)


def environment(device: torch.device, recorded_commit: str | None = None) -> dict[str, Any]:
    """The columns that say where a row comes from: gpu, torch, triton, commit, date."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": installed("triton"),
        "commit": recorded_commit or commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }
