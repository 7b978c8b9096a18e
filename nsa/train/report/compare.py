"""Several runs on one page: losses against tokens and seconds, their ends, and the settings that differ."""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from nsa.config import require
from nsa.files import make_folder, replace_text
from nsa.train.report import RunLines, as_text, duration, write_report
from nsa.train.report.charts import Chart, Point, grid, middle, render_page, section, tiles_html
from nsa.train.run_folder import run_names

# What differs between any two runs.
NOT_COMPARED = ("out", "hash", "environment.command", "environment.machine", "environment.system")


class ComparedRun(RunLines):
    """A run with the name that it has on the page, and its settings."""

    def __init__(self, run: Path, label: str) -> None:
        super().__init__(run)
        self.label, self.settings = label, {**self.config, **self.info}

    @property
    def tokens_per_step(self) -> float | None:
        """By the config, else by the speed that was logged; None where neither is known."""
        sizes: list[Any] = [self.settings.get(name) for name in ("batch_size", "accum", "model.seq_len")]
        if all(isinstance(size, int) for size in sizes):
            return float(math.prod(sizes) * (self.settings.get("ranks") or 1))
        rates = dict(self.any_kind("tokens_per_s"))
        found = [rates[step] * seconds for step, seconds in self.any_kind("step_s") if step in rates]
        return median(found) if found else None

    def loss(self, kind: str) -> list[Point]:
        """By step; the running median of noisy training losses."""
        points = self.points.get((kind, "loss"), [])
        return middle(points) if kind == "step" and len(points) > 20 else points

    def by_tokens(self, points: list[Point]) -> list[Point]:
        per_step = self.tokens_per_step
        return [] if per_step is None else [(step * per_step, value) for step, value in points]

    def by_seconds(self, points: list[Point]) -> list[Point]:
        """Between heartbeats, interpolated."""
        beats = sorted(self.seconds.items())
        steps = [step for step, _ in beats]

        def at(step: float) -> float:
            place = bisect_left(steps, step)
            (early, begin), (late, end) = beats[max(place - 1, 0)], beats[place]
            return begin + (end - begin) * (step - early) / max(late - early, 1)

        return [(at(step), value) for step, value in points if steps and steps[0] <= step <= steps[-1]]

    def summary(self) -> list[str]:
        """A row of the first table, as `SUMMARY` names it."""
        steps = max((step for points in self.points.values() for step, _ in points), default=0.0)
        losses = [f"{points[-1][1]:.4f}" if (points := self.loss(kind)) else "" for kind in ("eval", "step")]
        rates = self.any_kind("tokens_per_s")
        rate = f"{median(y for _, y in rates):,.0f}" if rates else ""
        tokens = f"{steps * self.tokens_per_step:,.0f}" if self.tokens_per_step else ""
        time = duration(max(self.seconds.values())) if self.seconds else ""
        failed = sum((self.failures() or {}).values())
        return [self.label, f"{steps:,.0f}", tokens, *losses, rate, time, str(failed)]


Charted = dict[str, Callable[[ComparedRun], list[Point]]]
LOSS_CHARTS: Charted = {
    "Validation loss by tokens": lambda run: run.by_tokens(run.loss("eval")),
    "Validation loss by seconds since the first log step": lambda run: run.by_seconds(run.loss("eval")),
    "Training loss by tokens": lambda run: run.by_tokens(run.loss("step")),
    "Training loss by seconds since the first log step": lambda run: run.by_seconds(run.loss("step")),
}
SPEED_CHARTS: Charted = {
    "Tokens/s by step": lambda run: run.any_kind("tokens_per_s"),
    "GPU memory by step, GiB": lambda run: run.any_kind("memory_gib"),
}
SUMMARY = ("run", "steps", "tokens", "validation loss", "training loss", "tokens/s", "time", "fallbacks")


def write_comparison(runs: list[Path], out: Path) -> Path:
    """Draw several runs, at least two, on the page `out`; a ValueError if one is no folder with metrics."""
    require(len(runs) > 1, "runs", [str(run) for run in runs], "at least two, to compare")
    labels = run_names(runs)
    found = [ComparedRun(run, label) for run, label in zip(runs, labels, strict=True)]
    title = " and ".join(labels) if len(labels) < 4 else f"{len(labels)} runs"
    rows = list(differences(found))
    parts = [
        tiles_html(title, {"runs": str(len(runs)), "settings that differ": str(len(rows))}),
        section("Ends", [grid("Where each run is", SUMMARY, [run.summary() for run in found])]),
        section("Loss", charts_of(found, LOSS_CHARTS)),
        section("Speed", charts_of(found, SPEED_CHARTS)),
        section("Settings", [grid("Settings that differ", ["", *labels], rows)] if rows else []),
    ]
    make_folder(out.parent)
    replace_text(out, render_page(title, parts))
    return out


def charts_of(runs: list[ComparedRun], titles: Charted) -> list[str]:
    """A chart per title with a line per run, of those that some run has points for."""
    lines = {title: [(run.label, of(run)) for run in runs] for title, of in titles.items()}
    return [Chart(title, found).html() for title, found in lines.items() if any(points for _, points in found)]


def differences(runs: list[ComparedRun]) -> Iterator[list[str]]:
    """Settings whose values are not all equal, with those of each run."""
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [as_text(run.settings[name]) if name in run.settings else "" for run in runs]
        if len(set(values)) > 1 and not name.startswith(NOT_COMPARED):
            yield [name, *values]


def run(args: argparse.Namespace) -> int:
    """`nsa report`: the page of a run, finished or still going, or of several; returns the exit status."""
    if len(args.runs) == 1:
        path = write_report(args.runs[0], args.out)
    else:
        path = write_comparison(args.runs, args.out or args.runs[0].parent / "compare.html")
    print(f"wrote {path}")
    return 0
