"""`nsa report`: a run on one page, `report.html`, drawn from the files of its folder alone; or several side by side.

A run that is still going can be drawn too. A chart is left out if the metrics have no lines for it. What a page is made
of is in `nsa.train.report.charts`.
"""

from __future__ import annotations

import argparse
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from nsa.config import BRANCHES, require
from nsa.files import make_folder, parse_json, replace_text
from nsa.train.config import flat
from nsa.train.report import charts
from nsa.train.report.charts import Chart, Point, card, note, section, table, tiles_html
from nsa.train.run_folder import CONFIG, HEARTBEAT, METRICS, REPORT, RUN_INFO, read_lines, run_names
from nsa.train.yaml_file import read_yaml

SAMPLES = 4
# Between heartbeats further apart than this the run was stopped.
PAUSE_S = 900

Record = dict[str, Any]


def write_report(run: Path, out: Path | None = None) -> Path:
    """Draw the run in a folder as `report.html` in it, or as `out`; a ValueError if it is no folder with metrics."""
    path, text = run / REPORT if out is None else out, page(RunLines(run))
    make_folder(path.parent)
    replace_text(path, text)
    return path


class RunLines:
    """The lines in the files of a run's folder; a ValueError if it has neither metrics nor heartbeats."""

    def __init__(self, run: Path) -> None:
        require(run.is_dir(), "run", str(run), "the folder of a run")
        found = any((run / name).exists() for name in (METRICS, HEARTBEAT))
        require(found, "run", str(run), f"a folder with {METRICS} or {HEARTBEAT}, as `nsa train` writes it")
        self.folder = run
        self.records, self.beats = read_lines(run / METRICS), read_lines(run / HEARTBEAT)
        self.points = points_of(self.records, self.beats)
        self.seconds = run_seconds(self.beats)
        self.config = dotted(lambda: read_yaml(run / CONFIG))
        self.info = dotted(lambda: parse_json((run / RUN_INFO).read_bytes()))

    def any_kind(self, field: str) -> list[Point]:
        return next((points for (_, name), points in self.points.items() if name == field), [])

    def last(self, kind: str) -> Record:
        return next((record for record in reversed(self.records) if record.get("kind") == kind), {})

    def failures(self) -> dict[str, int] | None:
        """The last counts of failures by reason; None where there are none in the metrics."""
        for record in reversed(self.records):
            counts = record.get("counts") if record.get("kind") == "fallbacks" else record.get("fallbacks")
            if isinstance(counts, dict):
                return {str(reason): int(times) for reason, times in counts.items() if is_finite(times)}
        return None


def dotted(read: Callable[[], Record]) -> Record:
    """The values of a file by dotted key; none where it cannot be read."""
    try:
        return dict(flat(read()))
    except (OSError, ValueError):
        return {}


def points_of(records: list[Record], beats: list[Record]) -> dict[tuple[str, str], list[Point]]:
    """All numbers that have a step, by kind and field. If a step was repeated after a resume, the last one counts."""
    values: dict[tuple[str, str], dict[int, float]] = {}

    def add(kind: str, record: Record) -> None:
        for field, value in record.items():
            if field not in ("step", "time") and is_finite(value) and isinstance(record.get("step"), int):
                values.setdefault((kind, field), {})[record["step"]] = float(value)

    for record in records:
        add(str(record.get("kind")), record)
    logged = {field for _, field in values}
    for beat in beats:
        add("heartbeat", {field: value for field, value in beat.items() if field not in logged})
    return {name: [(float(step), y) for step, y in sorted(by_step.items())] for name, by_step in values.items()}


def run_seconds(beats: list[Record]) -> dict[int, float]:
    """Seconds that the run took from its first heartbeat to each, without pauses."""
    timed = [beat for beat in beats if is_finite(beat.get("time")) and isinstance(beat.get("step"), int)]
    seconds, total = {}, 0.0
    for earlier, later in pairwise([*timed[:1], *timed]):
        gap = later["time"] - earlier["time"]
        total += gap if 0 < gap < PAUSE_S else 0.0
        seconds[later["step"]] = total
    return seconds


def is_finite(value: object) -> bool:
    # An integer of any length is none: it may be too large for a float.
    return math.isfinite(value) if isinstance(value, float) else type(value) is int and abs(value) < 2**63


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


# Titles of charts; other fields follow under their own name.
TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_s": "Tokens/s",
    "step_s": "Seconds per step",
    "data_wait": "Waiting for data, fraction of time",
    "mfu": "MFU, fraction of the peak FLOP/s",
    "gpu_util": "GPU utilization",
    "memory_gib": "GPU memory, GiB",
    "cpu_cores": "CPU cores in use",
    "cost": "Cost so far",
}
# These get a smoothed line too.
NOISY = ("loss", "grad_norm")
LABELS = {"step": "training", "eval": "validation"}


def page(run: RunLines) -> str:
    failures = {reason: f"{n:,}" for reason, n in (run.failures() or {}).items()}
    info = {name: as_text(value) for name, value in run.info.items()}
    path = run.folder / CONFIG
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    config = [card(CONFIG, f"<pre>{escape(text)}</pre>")] if text else []
    parts = [
        header(run),
        section("Curves", [chart.html() for chart in curves(run)]),
        section("Gates", gates(run.records)),
        section("Selection", distances(run.last("distances"))),
        section("Fallbacks", [table(failures)] if failures else []),
        section("Samples", samples(run.records)),
        section("Configuration", config),
        section("Environment", [table(info)] if info else []),
    ]
    return charts.render_page(run.folder.resolve().name, parts)


def header(run: RunLines) -> str:
    tiles: dict[str, str] = {}
    steps = [r["step"] for r in [*run.records, *run.beats] if isinstance(r.get("step"), int)]
    if steps:
        planned = run.config.get("steps")
        goes_on = is_finite(planned) and max(steps) < planned
        tiles["steps"] = f"{max(steps):,}" + (f" <small>of {planned:,}</small>" if goes_on else "")
    for kind, name in (("eval", "validation loss"), ("step", "training loss")):
        points = run.points.get((kind, "loss"))
        if points:
            first, last = points[0][1], points[-1][1]
            tiles[name] = f"{last:.3f}" if len(points) == 1 else f"<small>{first:.3f} →</small> {last:.3f}"
    # The summary of a run at its end has a rate too, without a step.
    rates, end = run.any_kind("tokens_per_s"), run.last("end").get("tokens_per_s")
    if rates:
        tiles["tokens/s, median"] = f"{median(y for _, y in rates):,.0f}"
    elif is_finite(end):
        tiles["tokens/s"] = f"{end:,.0f}"
    if len(run.seconds) > 1:
        tiles["time"] = duration(max(run.seconds.values()))
    failures = run.failures()
    if failures is not None:
        tiles["fallbacks"] = f"{sum(failures.values()):,}" if failures else "none"
    return tiles_html(run.folder.resolve().name, tiles)


def curves(run: RunLines) -> list[Chart]:
    result = []
    for field in dict.fromkeys([*TITLES, *(field for _, field in run.points)]):
        lines = {kind: points for (kind, name), points in run.points.items() if name == field and len(points) > 1}
        # A counter that stayed at 0 gets no chart.
        if field not in TITLES:
            lines = {kind: points for kind, points in lines.items() if any(y != 0 for _, y in points)}
        if lines:
            order = sorted(lines, key=lambda kind: [*LABELS, kind].index(kind))
            labels = [LABELS.get(kind, kind) if len(lines) > 1 or field == "loss" else "" for kind in order]
            named = [(label, lines[kind]) for label, kind in zip(labels, order, strict=True)]
            result.append(Chart(TITLES.get(field, field.replace("_", " ").capitalize()), named, field in NOISY))
    return result


def gates(records: list[Record]) -> list[str]:
    """The gates by branch over the run, and by layer at its end."""
    lines = [record for record in records if record.get("kind") == "gates" and isinstance(record.get("step"), int)]
    parts = []
    for field, title in (("mean", "Mean gate"), ("entropy", "Gate entropy, bits")):
        by_step = {record["step"]: layers for record in lines if (layers := layers_of(record.get(field)))}
        if not by_step:
            continue
        if len(by_step) > 1:
            over_time: list[tuple[str, list[Point]]] = [(branch, []) for branch in BRANCHES]
            for step, layers in sorted(by_step.items()):
                for branch, points in over_time:
                    values = [x[branch] for x in layers.values() if branch in x]
                    points.append((float(step), sum(values) / (len(values) or 1)))
            parts.append(Chart(f"{title}, mean of the layers", over_time).html())
        last = max(by_step)
        parts.append(charts.heat_table(f"{title} by layer, step {last:,}", BRANCHES, by_step[last]))
    return parts


def layers_of(value: Any) -> dict[int, dict[str, float]]:
    """The layers that have gates."""
    return {
        index: {branch: float(layer[branch]) for branch in BRANCHES if is_finite(layer.get(branch))}
        for index, layer in enumerate(value if isinstance(value, list) else ())
        if isinstance(layer, dict)
    }


def distances(record: Record) -> list[str]:
    """A histogram of how far back the selected blocks lie, in bins that double."""
    counts, step = record.get("counts"), record.get("step")
    if not isinstance(counts, list) or not any(is_finite(count) and count > 0 for count in counts):
        return []
    bins = {"0": sum(filter(is_finite, counts[:1]))}
    low = 1
    while low < len(counts):
        bins[f"{low}" if low == 1 else f"{low}–"] = sum(filter(is_finite, counts[low : 2 * low]))
        low *= 2
    when = f", step {step:,}" if isinstance(step, int) else ""
    title = f"Selected blocks by how many blocks back they lie, in bins that double{when}"
    return [card(title, charts.bar_chart("Distances", bins, "blocks"))]


def samples(records: list[Record]) -> list[str]:
    found = [record for record in records if record.get("kind") in ("sample", "end")]
    texts = [(record.get("step"), record.get("text", record.get("sample"))) for record in found]
    # A run's summary repeats its last sample.
    once = {text: step for step, text in reversed(texts) if isinstance(text, str)}
    titles = [("At the end" if step is None else f"Step {step:,}", text) for text, step in once.items()]
    return [card(title, f"<pre>{escape(text)}</pre>") for title, text in titles[:SAMPLES]]


# Settings that decide what a loss is of.
LOSS_OF = {"data.name", "data.path", "data.source", "data.text_key", "data.tokenizer", "model.vocab_size"}
# What differs between any two runs.
NOT_COMPARED = ("out", "hash", "environment.command", "environment.machine", "environment.system")


class ComparedRun(RunLines):
    """A run with the name that it has on the page, and its settings."""

    def __init__(self, run: Path, label: str) -> None:
        super().__init__(run)
        self.label, self.settings = label, {**self.config, **self.info}

    @property
    def tokens_per_step(self) -> float | None:
        """The tokens per step by the config, else by the speed that was logged; None where neither is known."""
        sizes: list[Any] = [self.settings.get(name) for name in ("batch_size", "accum", "model.seq_len")]
        if all(isinstance(size, int) for size in sizes):
            return float(math.prod(sizes) * (self.settings.get("ranks") or 1))
        rates = dict(self.any_kind("tokens_per_s"))
        found = [rates[step] * seconds for step, seconds in self.any_kind("step_s") if step in rates]
        return median(found) if found else None

    def loss(self, kind: str) -> list[Point]:
        """The losses by step; the running median of noisy training losses."""
        points = self.points.get((kind, "loss"), [])
        return charts.middle(points) if kind == "step" and len(points) > 20 else points

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
        return [self.label, f"{steps:,.0f}", tokens, *losses, rate, time, str(sum((self.failures() or {}).values()))]


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
    other = ", ".join(sorted(LOSS_OF & {name for name, *_ in rows}))
    caveat = f"Losses compare only if the text and the tokens are the same. The runs differ in {other}."
    parts = [
        tiles_html(title, {"runs": str(len(runs)), "settings that differ": str(len(rows))}),
        section("Ends", [charts.grid("Where each run is", SUMMARY, [run.summary() for run in found])]),
        section("Loss", [note(caveat) if other else "", *charts_of(found, LOSS_CHARTS)]),
        section("Speed", charts_of(found, SPEED_CHARTS)),
        section("Settings", [charts.grid("Settings that differ", ["", *labels], rows)] if rows else []),
    ]
    make_folder(out.parent)
    replace_text(out, charts.render_page(title, parts))
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
