"""Two files of rows, or folders of them: what became slower or needs more memory, beyond the noise, or is gone.

nsa bench compare before.csv after.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from nsa.config import require
from nsa.results import COLUMNS, Row, read_rows

# What every implementation and mode of a suite is measured on.
PROBLEM = ("suite", "B", "S", "Hq", "G", "Dk", "Dv", "dtype", "gpu")
# What a row is a measurement of. Versions, commit and date may differ.
SUBJECT = (*PROBLEM, "op", "impl", "mode")
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
    return {columns_of(row, SUBJECT): row for row in rows}


def columns_of(row: Row, names: Iterable[str]) -> RowSubject:
    return tuple(getattr(row, name) for name in names)


def is_reference(row: Row) -> bool:
    return row.impl.startswith("dense")


def rows_with_spread(rows: Iterable[Row]) -> dict[RowSubject, Row]:
    """The last row of each subject, with the smallest p20 and the largest p80 of its runs: those of the same commit, or
    of all commits for dense attention, whose code does not change."""
    runs: dict[RowSubject, list[Row]] = {}
    for row in rows:
        runs.setdefault(columns_of(row, SUBJECT), []).append(row)
    found = {}
    for subject, own in runs.items():
        last = own[-1]
        same = [row for row in own if row.commit == last.commit or is_reference(row)]
        p20, p80 = min(row.p20_ms for row in same), max(row.p80_ms for row in same)
        found[subject] = replace(last, p20_ms=p20, p80_ms=p80)
    return found


def subject_name(row: Row) -> str:
    return f"{row.suite} {row.op} {row.impl} {row.mode} {row.Hq}/{row.G}/{row.Dk} B={row.B} S={row.S}"


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
    def direction(self) -> str:
        """`slower` or `faster`, or nothing within the noise."""
        if self.ratio > 1 + self.bound and self.after.p20_ms > self.before.p80_ms:
            return "slower"
        if self.ratio < 1 / (1 + self.bound) and self.after.p80_ms < self.before.p20_ms:
            return "faster"
        return ""

    @property
    def verdict(self) -> str:
        """The direction, and `memory` where the peak grew."""
        before, after = self.before.peak_gib, self.after.peak_gib
        grew = before is not None and after is not None and after > before * (1 + self.bound) + ROUNDING_GIB
        return " ".join(filter(None, (self.direction, "memory" * grew)))

    def __str__(self) -> str:
        a, b = self.before, self.after
        peaks = "" if a.peak_gib is None or b.peak_gib is None else f"   {a.peak_gib:.2f} to {b.peak_gib:.2f} GiB"
        times = f"{a.p50_ms:.4g} to {b.p50_ms:.4g} ms   {self.ratio:.2f}x{peaks}"
        return f"{self.verdict or 'same':<14} {subject_name(a):<64} {times}"


def changes(before: Iterable[Row], after: Iterable[Row], bound: float) -> list[Change]:
    """The changes between rows that both have, the largest ratio first."""
    old, new = rows_with_spread(before), rows_with_spread(after)
    found = [Change(old[subject], new[subject], bound) for subject in old.keys() & new.keys()]
    return sorted(found, key=lambda change: change.ratio, reverse=True)


def machine_note(change: Change, found: Iterable[Change]) -> str:
    """A note if dense attention of the same suite and shape moved too, and in this direction only."""
    same = columns_of(change.before, PROBLEM)
    dense = [each for each in found if is_reference(each.before) and columns_of(each.before, PROBLEM) == same]
    moved = {each.ratio: each.direction for each in dense if each.direction}
    if is_reference(change.before) or {*moved.values()} != {change.direction}:
        return ""
    ratio = max(moved, key=lambda ratio: abs(math.log(ratio)))
    return f"   dense moved by {ratio:.2f}x too: another machine?"


def lost_rows(before: Iterable[Row], after: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The rows whose subject is not in `after`: those of a problem that was measured there, and the others."""
    old, new = latest_rows(before), latest_rows(after)
    problems = {columns_of(row, PROBLEM) for row in new.values()}
    lost = [row for subject, row in old.items() if subject not in new]
    gone = [row for row in lost if columns_of(row, PROBLEM) in problems]
    return gone, [row for row in lost if columns_of(row, PROBLEM) not in problems]


def run(args: argparse.Namespace) -> int:
    """`nsa bench compare`: returns 1 if a row became slower, needs more memory or is gone, else 0."""
    require(args.bound >= 0, "--bound", args.bound, "a fraction of at least 0")
    before, after = (
        [row for file in files_of_rows([path]) for row in read_rows(file)] for path in (args.before, args.after)
    )
    found = changes(before, after, args.bound)
    gone, unmeasured = lost_rows(before, after)
    require(bool(found or gone), "A and B", f"{args.before} and {args.after}", "files with rows of the same subject")
    for verdict, rows in {"not measured": unmeasured, "gone": gone}.items():
        for row in rows:
            print(f"{verdict:<14} {subject_name(row)}")
    for change in found:
        if change.verdict:
            print(f"{change}{machine_note(change, found)}")
    worse = [change for change in found if {"slower", "memory"} & set(change.verdict.split())]
    only = {"only_before": len(gone) + len(unmeasured), "only_after": len(latest_rows(after)) - len(found)}
    print(json.dumps({"compared": len(found), "worse": len(worse), "gone": len(gone), **only}))
    return int(bool(worse or gone))
