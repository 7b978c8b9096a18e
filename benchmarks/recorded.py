"""The recorded rows that figures of README.md and docs/ are computed from, and how tables are written."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from nsa.bench.report import Heads, Measurements
from nsa.results import Row, read_rows

RESULTS = Path(__file__).resolve().parent / "results"
NSA, CUDNN, FA2 = "nsa-triton", "dense-cudnn", "dense-fa2"
SHAPES = {f"{h}/{g}/{d}": Heads(h, g, d, 1) for h, g, d in ((64, 4, 128), (32, 8, 128), (12, 2, 64))}
MODES = {"fwd": "forward", "bwd": "backward"}
BOTH = tuple(MODES)
COMPARED = {"ours": NSA, "dense": CUDNN}
MEMORY_LENGTHS = (2048, 8192, 32768, 131072)


@cache
def rows_of(*names: str, machine: str = "h200") -> list[Row]:
    return [row for name in names for row in read_rows(RESULTS / machine / f"{name}.csv")]


def records(name: str | Path) -> list[dict[str, str]]:
    """The rows of a file with columns of its own."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def measured(*names: str) -> Measurements:
    return Measurements(rows_of(*names))


def training_rows() -> dict[tuple[str, int, int], Row]:
    """By implementation, batch and length; the last row of each kind."""
    return {(row.impl, row.B, row.S): row for row in rows_of("train")}


def digits(x: float) -> str:
    """Three of them."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]], rule: str = "---", *, spaced: bool = True) -> str:
    cells = [rule] * len(head)
    divider = f"| {' | '.join(cells)} |" if spaced else f"|{'|'.join(cells)}|"
    return "\n".join([f"| {' | '.join(head)} |", divider, *(f"| {' | '.join(line)} |" for line in lines)])
