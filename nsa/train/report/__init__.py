"""A run on one page: `report.html`, drawn from the files of the run's folder alone.

A run that is still going can be drawn too. A chart is left out if the metrics have no lines for it.
`nsa.train.report.charts` is what the page is made of, `nsa.train.report.compare` draws several runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from nsa.config import BRANCHES, require
from nsa.files import make_folder, parse_json, replace_text
from nsa.train.config import flat
from nsa.train.report.charts import Chart, Point, bar_chart, card, heat_table, render_page, section, table, tiles_html
from nsa.train.run_folder import CONFIG, HEARTBEAT, METRICS, REPORT, RUN_INFO, read_lines
from nsa.train.yaml_file import read_yaml

SAMPLES = 4
# Between heartbeats further apart than this the run was stopped.
PAUSE_S = 900

Record = dict[str, Any]


def write_report(run: Path, out: Path | None = None) -> Path:
    """Draw a run.

    Args:
        run: its folder.
        out: the file to write; default: `report.html` in the folder.

    Returns:
        The path of the report.

    Raises:
        ValueError: `run` is no folder with metrics.
    """
    path, text = run / REPORT if out is None else out, page(RunLines(run))
    make_folder(path.parent)
    replace_text(path, text)
    return path


class RunLines:
    """What the files of a run's folder say; a ValueError if it has neither metrics nor heartbeats."""

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
    """By kind and field every number that has a step. Of a step that was repeated after a resume, the last counts."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    logged = {field for record in records for field in record}
    beats = [{name: value for name, value in beat.items() if name == "step" or name not in logged} for beat in beats]
    for record in [*records, *({"kind": "heartbeat", **beat} for beat in beats)]:
        for field, value in record.items():
            if field not in ("step", "time") and is_finite(value) and isinstance(record.get("step"), int):
                values.setdefault((str(record.get("kind")), field), {})[record["step"]] = float(value)
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
    parts = [
        header(run),
        section("Curves", [chart.html() for chart in charts(run)]),
        section("Gates", gates(run.records)),
        section("Selection", distances(run.records)),
        section("Fallbacks", [table(failures)] if failures else []),
        section("Samples", samples(run.records)),
        section("Configuration", config_file(run.folder)),
        section("Environment", [table(info)] if info else []),
    ]
    return render_page(run.folder.resolve().name, parts)


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


def charts(run: RunLines) -> list[Chart]:
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
        parts.append(heat_table(f"{title} by layer, step {last:,}", BRANCHES, by_step[last]))
    return parts


def layers_of(value: Any) -> dict[int, dict[str, float]]:
    """The layers that have gates."""
    return {
        index: {branch: float(layer[branch]) for branch in BRANCHES if is_finite(layer.get(branch))}
        for index, layer in enumerate(value if isinstance(value, list) else ())
        if isinstance(layer, dict)
    }


def distances(records: list[Record]) -> list[str]:
    """A histogram of how far back the selected blocks lie, in bins that double."""
    record = next((record for record in reversed(records) if record.get("kind") == "distances"), {})
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
    return [card(title, bar_chart("Distances", bins, "blocks"))]


def samples(records: list[Record]) -> list[str]:
    found = [record for record in records if record.get("kind") in ("sample", "end")]
    texts = [(record.get("step"), record.get("text", record.get("sample"))) for record in found]
    # A run's summary repeats its last sample.
    once = {text: step for step, text in reversed(texts) if isinstance(text, str)}
    titles = [("At the end" if step is None else f"Step {step:,}", text) for text, step in once.items()]
    return [card(title, f"<pre>{escape(text)}</pre>") for title, text in titles[:SAMPLES]]


def config_file(run: Path) -> list[str]:
    """The content of the config; of an export, its model's."""
    path = next((run / name for name in (CONFIG, "train.json", "model.json") if (run / name).is_file()), None)
    if path is None:
        return []
    return [card(path.name, f"<pre>{escape(path.read_text(encoding='utf-8', errors='replace'))}</pre>")]
