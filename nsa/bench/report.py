"""Benchmark rows on one self-contained page. Reads files, measures nothing.

nsa bench report benchmarks/results -o bench.html

Rows are appended to their files, so the last of each kind counts; GPU time by graph replay goes before eager calls.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from itertools import product
from pathlib import Path

from nsa.backends.gpu import GPUS, gpu_kind
from nsa.bench.compare import files_of_rows, latest_rows
from nsa.config import NSAConfig, require
from nsa.files import make_folder, replace_text
from nsa.geometry import n_compressed
from nsa.results import Row, read_rows
from nsa.train.report.charts import Chart, Point, grid, note, render_page, section, stacked_bars, table, tiles_html

RESULTS_FOLDER = Path("benchmarks/results")
GRAPHS = "-graphs"
# The first that was measured is compared.
NSA_FIRST = ("nsa-triton", "nsa-sdpa")
DENSE_FIRST = ("dense-cudnn", "dense-fa2", "dense-sdpa", "dense-triton")
# Passes of attention that a row, or a sum of rows, has the time of.
MODE_SUMS = {"forward": ("fwd",), "backward": ("bwd",), "forward + backward": ("fwd", "bwd")}
PASSES = {"fwd": ", forward", "bwd": ", backward"}
BRANCH_OPS = ("compress", "compressed", "scores", "selected", "sliding", "combine")
# What measures each section of the page.
SUITE_OF = {"training": "train", "decoding": "decode", "host": "host", "time by branch": "branches"}
SUITE_OF |= dict.fromkeys(("speedup over dense attention", "time", "memory", "ceilings"), "attention")
# Two matmuls forward, five backward.
BACKWARD_FLOPS = 2.5
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, order=True)
class Heads:
    """Query heads, groups and head_dim, and the batch size."""

    n_heads: int
    n_groups: int
    head_dim: int
    batch: int
    # Of values, where it is not that of keys.
    value_dim: int = 0

    def __str__(self) -> str:
        return self.dims + (f", batch {self.batch}" if self.batch > 1 else "")

    @property
    def dims(self) -> str:
        """Without the batch."""
        values = f" (d_v {self.value_dim})" if self.value_dim else ""
        return f"{self.n_heads}/{self.n_groups}/{self.head_dim}{values}"


def heads_of(row: Row) -> Heads:
    return Heads(row.Hq, row.G, row.Dk, row.B, 0 if row.Dv == row.Dk else row.Dv)


class Measurements:
    """The rows of one GPU and dtype."""

    def __init__(self, rows: Iterable[Row]) -> None:
        # Graphs last: they replace eager calls of the same kind.
        ordered = sorted(rows, key=lambda row: row.impl.endswith(GRAPHS))
        self.all = [replace(row, impl=row.impl.removesuffix(GRAPHS)) for row in ordered]
        # Rows of graphs may lack the peak, which those of eager calls have.
        peaks = {subject: row.peak_gib for subject, row in latest_rows(r for r in self.all if r.peak_gib).items()}
        self.rows = {
            (row.suite, row.op, row.impl, row.mode, heads_of(row), row.S): replace(row, peak_gib=peaks.get(subject))
            for subject, row in latest_rows(self.all).items()
        }

    def of(self, suite: str) -> list[Row]:
        return [row for row in self.rows.values() if row.suite == suite]

    def heads(self) -> list[Heads]:
        """The shapes of whole attention."""
        return sorted({key[4] for key in self.rows if key[:2] == ("attention", "attention")}, reverse=True)

    def lengths(self, impl: str, heads: Heads, modes: Iterable[str]) -> list[int]:
        """The lengths at which all modes of the whole attention were measured."""
        subjects = [("attention", "attention", impl, mode, heads) for mode in modes]
        return sorted(set.intersection(*({key[5] for key in self.rows if key[:5] == s} for s in subjects)))

    def ms(self, impl: str, heads: Heads, length: int, modes: Iterable[str]) -> float:
        return sum(self.rows["attention", "attention", impl, mode, heads, length].p50_ms for mode in modes)

    def first(self, impls: Iterable[str], heads: Heads) -> str | None:
        """The first implementation with rows of these heads."""
        return next((impl for impl in impls if self.lengths(impl, heads, ("fwd",))), None)

    def speedups(
        self, heads: Heads, modes: Iterable[str], ours: str | None = None, dense: str | None = None
    ) -> list[Point]:
        """How many times as fast as dense attention, by length; by default of the first implementations measured."""
        ours, dense = ours or self.first(NSA_FIRST, heads), dense or self.first(DENSE_FIRST, heads)
        if ours is None or dense is None:
            return []
        lengths = set(self.lengths(ours, heads, modes)) & set(self.lengths(dense, heads, modes))
        return [(n, self.ms(dense, heads, n, modes) / self.ms(ours, heads, n, modes)) for n in sorted(lengths)]


def break_even(points: list[Point]) -> float | None:
    """The length from which the speedup is above 1, interpolated between lengths on logarithmic axes; None if dense
    attention is faster at the longest, 0 if it is nowhere."""
    slower = [x for x, ratio in points if ratio < 1]
    if not slower:
        return 0.0
    before = max(slower)
    after = min((x for x, _ in points if x > before), default=None)
    if after is None:
        return None
    lead = {x: math.log2(ratio) for x, ratio in points}
    return float(before * (after / before) ** (lead[before] / (lead[before] - lead[after])))


@cache
def keys_seen(op: str, impl: str, length: int) -> float:
    """Mean keys per query that an op multiplies with, at the default hyperparameters."""
    if impl.startswith("dense"):
        return (length + 1) / 2
    c = NSAConfig(dim=64, n_heads=1, n_kv_groups=1, d_k=64, d_v=64)
    at = range(1, length + 1, max(1, length // 1024))
    counts: dict[str, Callable[[int], float]] = {
        "attention": c.reads_per_step,
        "compressed": lambda t: n_compressed(t, c.l, c.d),
        # Queries and keys only.
        "scores": lambda t: n_compressed(t, c.l, c.d) / 2,
        "selected": lambda t: c.reads_per_step(t) - n_compressed(t, c.l, c.d) - min(c.w, t),
        "sliding": lambda t: min(c.w, t),
    }
    return sum(counts[op](t) for t in at) / len(at) if op in counts else 0.0


def row_flops(row: Row) -> float:
    """FLOPs of the matmuls of an attention row; 0 of an op without any."""
    keys = keys_seen(row.op, row.impl, row.S)
    return 2 * row.B * row.S * row.Hq * (row.Dk + row.Dv) * keys * (BACKWARD_FLOPS if row.mode == "bwd" else 1)


def row_bytes(row: Row) -> float:
    """Bytes that `compress` and `combine` forward must read and write; 0 of other rows."""
    size = DTYPE_BYTES.get(row.dtype, 2) * row.B * row.S
    if row.mode != "fwd":
        return 0.0
    return {"compress": size * row.G * row.Dk * 17 / 16, "combine": size * row.Hq * (4 * row.Dv + 3)}.get(row.op, 0.0)


# The parts of the page.


def speedup_charts(found: Measurements) -> Iterator[str]:
    for name, modes in MODE_SUMS.items():
        speedups = {str(heads): found.speedups(heads, modes) for heads in found.heads()}
        lines = [(label, points) for label, points in speedups.items() if points]
        if lines:
            yield Chart(f"{name}: times as fast as dense attention", lines, log_x=True, log_y=True).html()


def break_even_table(found: Measurements) -> Iterator[str]:
    def cell(heads: Heads, modes: Iterable[str]) -> str:
        points = found.speedups(heads, modes)
        if not points:
            return ""
        length = break_even(points)
        if length is None:
            return f"above {points[-1][0]:,.0f}"
        return f"{length:,.0f}" if length else f"below {points[0][0]:,.0f}"

    rows = []
    for heads in found.heads():
        pair = (found.first(NSA_FIRST, heads), found.first(DENSE_FIRST, heads))
        if None not in pair:
            rows.append([str(heads), *(cell(heads, modes) for modes in MODE_SUMS.values()), f"{pair[0]}, {pair[1]}"])
    if rows:
        yield grid("Tokens from which NSA is faster", ["heads/groups/head_dim", *MODE_SUMS, "compared"], rows)


def charts_by_heads(
    found: Measurements, title: str, modes: dict[str, str], value: Callable[[Row], float | None], *, log_y: bool = True
) -> Iterator[str]:
    """A chart per shape and mode, `modes` with their names, with a line per implementation."""
    for heads, (mode, name) in product(found.heads(), modes.items()):
        lines: dict[str, list[Point]] = {}
        for key, row in sorted(found.rows.items(), key=lambda item: item[1].S):
            if (*key[:2], *key[3:5]) == ("attention", "attention", mode, heads) and (number := value(row)):
                lines.setdefault(row.impl, []).append((row.S, number))
        if lines:
            yield Chart(f"{heads}{name}: {title}", sorted(lines.items()), log_x=True, log_y=log_y).html()


def memory_charts(found: Measurements) -> Iterator[str]:
    """Of the backward pass, whose peak includes what the forward pass saves."""
    yield from charts_by_heads(found, "peak of both passes, GiB", {"bwd": ""}, lambda row: row.peak_gib)
    timed: dict[str, list[Row]] = {}
    for key, row in found.rows.items():
        if (*key[:2], key[3]) == ("attention", "attention", "bwd"):
            timed.setdefault(f"{key[2]} {key[4]}", []).append(row)
    missing = [name for name, rows in timed.items() if not any(row.peak_gib for row in rows)]
    if missing:
        yield note(f"no peak recorded for: {'; '.join(sorted(missing))}")


def branch_bars(found: Measurements) -> Iterator[str]:
    """Time by branch: a bar per length."""
    measured = [key[2:] for key in found.rows if key[:2] == ("attention", "selected")]
    for impl, mode, heads in sorted({key[:3] for key in measured}, key=str):
        bars: dict[str, dict[str, float]] = {}
        for length in sorted(key[3] for key in measured if key[:3] == (impl, mode, heads)):
            rows = {op: found.rows.get(("attention", op, impl, mode, heads, length)) for op in BRANCH_OPS}
            times = {op: row.p50_ms for op, row in rows.items() if row is not None}
            if len(times) > 1:
                bars[f"{length:,}"] = times
        if bars:
            yield stacked_bars(f"{impl} {mode}, {heads}: milliseconds by branch", BRANCH_OPS, bars)


def ceiling_parts(found: Measurements, gpu: str) -> Iterator[str]:
    """Shares of the matmul rate, and of memory's for ops that are bound by it."""
    kind = gpu_kind(gpu)
    if kind is None:
        return
    _, flops, rate = GPUS[kind]

    def share(row: Row) -> float | None:
        return 1e5 * row_flops(row) / row.p50_ms / flops if row.dtype != "float32" else None

    yield from charts_by_heads(found, f"% of {flops / 1e12:,.0f} TFLOP/s", PASSES, share, log_y=False)
    rows = []
    branches = [row for row in found.of("attention") if row.op in BRANCH_OPS]
    for row in sorted(branches, key=lambda row: (BRANCH_OPS.index(row.op), row.mode, row.impl, row.S)):
        work, moved = row_flops(row) / row.p50_ms * 1e3, row_bytes(row) / row.p50_ms * 1e3
        if work or moved:
            what = [f"{row.op} {row.mode}", row.impl, str(heads_of(row)), f"{row.S:,}"]
            rows.append([*what, f"{work / flops:.0%}" if work else "", f"{moved / rate:.0%}" if moved else ""])
    if rows:
        head = ["branch", "implementation", "heads", "tokens", "matmul", "memory"]
        yield grid(f"Branches: shares of {flops / 1e12:,.0f} TFLOP/s and {rate / 1e12:.1f} TB/s", head, rows)


def decode_parts(found: Measurements) -> Iterator[str]:
    rows = found.of("decode")
    limits = {(row.mode, heads_of(row), row.S): row.p50_ms for row in rows if row.impl == "bytes-limit"}
    lines = []
    for row in rows:
        limit = limits.get((row.mode, heads_of(row), row.S))
        if row.impl.startswith("nsa") and limit is not None:
            what = [heads_of(row).dims, row.mode, f"{row.S:,} x {row.B}"]
            lines.append([*what, f"{row.p50_ms:.3f}", f"{limit:.3f}", f"{limit / row.p50_ms:.0%}"])
    if lines:
        head = ["heads", "step", "tokens x rows", "NSA, ms", "its bytes by a copy, ms", "share of the copy's rate"]
        yield grid("A decode step and the bandwidth ceiling", head, lines)


def train_parts(found: Measurements) -> Iterator[str]:
    """Charts of the largest batch at each length, and a table of all."""
    rows = sorted(found.of("train"), key=lambda row: (row.S, row.B))
    for column, title in {"tokens_per_s": "tokens/s", "peak_gib": "peak memory, GiB"}.items():
        lines: dict[str, dict[float, float]] = {}
        for row in rows:
            if number := getattr(row, column):
                lines.setdefault(f"{row.impl}, {heads_of(row).dims}", {})[row.S] = number
        if lines:
            drawn = [(label, list(points.items())) for label, points in lines.items()]
            yield Chart(f"Training, largest batch: {title}", drawn, log_x=True).html()
    cells = []
    for row in rows:
        what = [row.impl, heads_of(row).dims, f"{row.S:,} x {row.B}", f"{row.p50_ms:.1f}"]
        peak = "" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        cells.append([*what, f"{row.tokens_per_s or 0:,.0f}", peak])
    if cells:
        head = ["implementation", "heads", "tokens x batch", "ms per step", "tokens/s", "peak, GiB"]
        yield grid("Training steps", head, cells)


def host_table(found: Measurements) -> Iterator[str]:
    rows = [
        [f"{row.op}, {row.mode}", row.impl, heads_of(row).dims, f"{row.S:,}", f"{row.p50_ms:.3f}"]
        for row in found.of("host")
    ]
    if rows:
        head = ["call", "implementation", "heads", "tokens", "p50"]
        yield grid("CPU time of an eager call, milliseconds", head, rows)


def origin_table(rows: list[Row], files: list[Path]) -> str:
    origin = {"files": ", ".join(map(str, files)), "rows": f"{len(rows):,}"}
    for name in ("gpu", "torch", "triton", "commit", "date"):
        origin[name] = ", ".join(sorted({str(getattr(row, name)) for row in rows if getattr(row, name)}))
    return table(origin)


def page_of_rows(rows: list[Row], files: list[Path]) -> str:
    gpus = sorted({row.gpu for row in rows}, key=lambda gpu: gpu == "cpu")
    dtypes = sorted({row.dtype for row in rows})
    tiles = {"rows": f"{len(rows):,}", "newest": max(row.date for row in rows)}
    parts = [tiles_html("Benchmarks", tiles | {"GPUs": escape(", ".join(gpus))})]
    for gpu, dtype in product(gpus, dtypes):
        found = Measurements(row for row in rows if (row.gpu, row.dtype) == (gpu, dtype))
        if not found.rows:
            continue
        name = f"{gpu}, {dtype}" if len(dtypes) > 1 else gpu
        drawn = {
            "speedup over dense attention": [*speedup_charts(found), *break_even_table(found)],
            "time": charts_by_heads(found, "milliseconds", PASSES, lambda row: row.p50_ms),
            "memory": memory_charts(found),
            "time by branch": branch_bars(found),
            "training": train_parts(found),
            "decoding": decode_parts(found),
            "host": host_table(found),
            "ceilings": ceiling_parts(found, gpu),
        }
        shown = {title: "".join(content) for title, content in drawn.items()}
        parts += [section(f"{name}: {title}", [content]) for title, content in shown.items()]
        missing = [f"{title} (nsa bench {SUITE_OF[title]})" for title, content in shown.items() if not content]
        if missing:
            parts.append(section(f"{name}: not measured", [note("; ".join(missing))]))
    return render_page("Benchmarks", [*parts, section("Origin", [origin_table(rows, files)])])


def run(args: argparse.Namespace) -> int:
    given = bool(args.rows) or RESULTS_FOLDER.is_dir()
    require(given, "rows", str(RESULTS_FOLDER), "files of rows; this default is there in a checkout only")
    files = files_of_rows(args.rows or [RESULTS_FOLDER])
    rows = [row for file in files for row in read_rows(file)]
    require(bool(rows), "rows", [str(file) for file in files], "files with at least one row")
    make_folder(args.out.parent)
    replace_text(args.out, page_of_rows(rows, files))
    print(f"wrote {args.out}")
    return 0
