"""Two files of rows, or folders of them: what became slower or needs more memory, beyond the noise.

nsa bench compare before.csv after.csv
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nsa.config import require
from nsa.results import COLUMNS, Row, read_rows

# What a row is a measurement of. Versions, commit and date may differ.
SUBJECT = ("suite", "op", "impl", "mode", "B", "S", "Hq", "G", "Dk", "Dv", "dtype", "gpu")
# Peak memory does not vary from run to run; CSVs have three decimals.
ROUNDING_GIB = 0.002

RowSubject = tuple[object, ...]


def files_of_rows(paths: Iterable[Path]) -> list[Path]:
    """The CSV files with the columns of `nsa bench`, of folders too; a ValueError for a path without any."""
    found: list[Path] = []
    for path in paths:
        candidates = sorted(path.rglob("*.csv")) if path.is_dir() else [path] if path.exists() else []
        own = [file for file in candidates if csv_header(file) == list(COLUMNS)]
        others = [str(file) for file in candidates if file not in own]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            print(f"left out: {others[0]}{more}: other columns than rows of nsa bench")
        require(bool(own), "rows", str(path), "a CSV file that nsa bench wrote, or a folder with one")
        found += own
    return found


def csv_header(path: Path) -> list[str]:
    """The column names; none of a file that is no CSV."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file, suppress(csv.Error):
        return next(csv.reader(file), [])
    return []


def latest_rows(rows: Iterable[Row]) -> dict[RowSubject, Row]:
    """The last row of each subject: rows are appended."""
    return {tuple(getattr(row, name) for name in SUBJECT): row for row in rows}


@dataclass(frozen=True)
class Change:
    """One subject, before and after."""

    before: Row
    after: Row
    bound: float

    @property
    def ratio(self) -> float:
        return self.after.p50_ms / max(self.before.p50_ms, 1e-9)

    @property
    def verdict(self) -> str:
        """`slower`, `faster` or nothing, and `memory` where the peak grew."""
        before, after = self.before, self.after
        slower = self.ratio > 1 + self.bound and after.p20_ms > before.p80_ms
        faster = self.ratio < 1 / (1 + self.bound) and after.p80_ms < before.p20_ms
        grew = None not in (before.peak_gib, after.peak_gib) and (after.peak_gib or 0.0) > (
            (before.peak_gib or 0.0) * (1 + self.bound) + ROUNDING_GIB
        )
        return " ".join(name for name, holds in (("slower", slower), ("faster", faster), ("memory", grew)) if holds)

    def __str__(self) -> str:
        a, b = self.before, self.after
        what = f"{a.suite} {a.op} {a.impl} {a.mode} {a.Hq}/{a.G}/{a.Dk} B={a.B} S={a.S}"
        peaks = "" if a.peak_gib is None or b.peak_gib is None else f"   {a.peak_gib:.2f} to {b.peak_gib:.2f} GiB"
        times = f"{a.p50_ms:.4g} to {b.p50_ms:.4g} ms   {self.ratio:.2f}x{peaks}"
        return f"{self.verdict or 'same':<14} {what:<64} {times}"


def changes(before: Iterable[Row], after: Iterable[Row], bound: float) -> list[Change]:
    """The changes between rows that both have, the largest ratio first."""
    old, new = latest_rows(before), latest_rows(after)
    found = [Change(old[subject], new[subject], bound) for subject in old.keys() & new.keys()]
    return sorted(found, key=lambda change: change.ratio, reverse=True)


def run(args: argparse.Namespace) -> int:
    """`nsa bench compare`: returns 1 if a row became slower or needs more memory, else 0."""
    require(args.bound >= 0, "--bound", args.bound, "a fraction of at least 0")
    before, after = (
        [row for file in files_of_rows([path]) for row in read_rows(file)] for path in (args.before, args.after)
    )
    found = changes(before, after, args.bound)
    require(bool(found), "A and B", f"{args.before} and {args.after}", "files with rows of the same subject")
    for change in found:
        if change.verdict:
            print(change)
    worse = [change for change in found if {"slower", "memory"} & set(change.verdict.split())]
    old, new = latest_rows(before).keys(), latest_rows(after).keys()
    only = {"only_before": len(old - new), "only_after": len(new - old)}
    print(json.dumps({"compared": len(found), "worse": len(worse), **only}))
    return int(bool(worse))
