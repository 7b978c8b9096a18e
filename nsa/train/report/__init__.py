"""A run on one page: `report.html`, drawn from the files of the run's folder alone.

A run that is still going can be drawn too. A chart is left out if the metrics have no lines for it.
`nsa.train.report.charts` is what the page is made of, `nsa.train.report.compare` draws several runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
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
    """Draw the run in the folder `run`.

    Args:
        run: The folder.
        out: The file to write; default: `report.html` in it.

    Returns:
        The path of the report.

    Raises:
        ValueError: `run` is no folder with metrics.
    """
    path, text = run / REPORT if out is None else out, page(run)
    make_folder(path.parent)
    replace_text(path, text)
    return path


def lines_of(run: Path) -> tuple[list[Record], list[Record]]:
    """The metrics and the heartbeats of a run; a ValueError if the folder has neither."""
    require(run.is_dir(), "run", str(run), "the folder of a run")
    found = [name for name in (METRICS, HEARTBEAT) if (run / name).exists()]
    require(bool(found), "run", str(run), f"a folder with {METRICS} or {HEARTBEAT}, as `nsa train` writes it")
    return read_lines(run / METRICS), read_lines(run / HEARTBEAT)


def page(run: Path) -> str:
    records, beats = lines_of(run)
    series, reasons = gather(records, beats), failures(records)
    parts = [
        header(run, records, beats, series),
        section("Curves", [chart.html() for chart in charts(series)]),
        section("Gates", gates(records)),
        section("Selection", distances(records)),
        section("Fallbacks", [table({reason: f"{n:,}" for reason, n in reasons.items()})] if reasons else []),
        section("Samples", samples(records)),
        section("Configuration", first_file(run, ("config.yaml", "train.json", "model.json"))),
        section("Environment", environment_table(run)),
    ]
    return render_page(run.resolve().name, parts)


# Numbers by step.


@dataclass(frozen=True)
class Series:
    kind: str
    field: str
    points: list[Point]


def gather(records: list[Record], beats: list[Record]) -> list[Series]:
    """Every number that has a step. Of a step that was repeated after a resume, the last value counts."""
    values: dict[tuple[str, str], dict[int, float]] = {}

    def add(kind: str, record: Record) -> None:
        step = record.get("step")
        if isinstance(step, int):
            for field, value in record.items():
                if field not in ("step", "time") and is_number(value):
                    values.setdefault((kind, field), {})[step] = float(value)

    for record in records:
        add(str(record.get("kind")), record)
    known = {field for _, field in values}
    for beat in beats:
        add("heartbeat", {field: value for field, value in beat.items() if field not in known})
    return [
        Series(kind, field, [(float(step), value) for step, value in sorted(by_step.items())])
        for (kind, field), by_step in values.items()
    ]


def is_number(value: object) -> bool:
    # An integer of any length is none: it may be too large for a float.
    return math.isfinite(value) if isinstance(value, float) else type(value) is int and abs(value) < 2**63


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


def charts(series: list[Series]) -> list[Chart]:
    fields = list(dict.fromkeys([*TITLES, *(s.field for s in series)]))
    result = []
    for field in fields:
        lines = [s for s in series if s.field == field and len(s.points) > 1]
        # A counter that stayed at 0 gets no chart.
        lines = [s for s in lines if field in TITLES or any(y != 0 for _, y in s.points)]
        lines.sort(key=lambda s: list(LABELS).index(s.kind) if s.kind in LABELS else len(LABELS))
        if lines:
            name = TITLES.get(field, field.replace("_", " ").capitalize())
            labels = [LABELS.get(s.kind, s.kind) if len(lines) > 1 or field == "loss" else "" for s in lines]
            result.append(Chart(name, list(zip(labels, (s.points for s in lines), strict=True)), field in NOISY))
    return result


# The parts of the page.


def header(run: Path, records: list[Record], beats: list[Record], series: list[Series]) -> str:
    by_name = {(s.kind, s.field): s.points for s in series}
    tiles: dict[str, str] = {}
    steps = [r["step"] for r in [*records, *beats] if isinstance(r.get("step"), int)]
    if steps:
        planned = settings_of(run).get("steps")
        goes_on = is_number(planned) and max(steps) < planned
        tiles["steps"] = f"{max(steps):,}" + (f" <small>of {planned:,}</small>" if goes_on else "")
    for kind, name in (("eval", "validation loss"), ("step", "training loss")):
        points = by_name.get((kind, "loss"))
        if points:
            first, last = points[0][1], points[-1][1]
            tiles[name] = f"{last:.3f}" if len(points) == 1 else f"<small>{first:.3f} →</small> {last:.3f}"
    rates = next((s.points for s in series if s.field == "tokens_per_s" and s.points), None)
    end = last_of(records, "end")
    if rates:
        tiles["tokens/s, median"] = f"{median(y for _, y in rates):,.0f}"
    elif is_number(end.get("tokens_per_s")):
        tiles["tokens/s"] = f"{end['tokens_per_s']:,.0f}"
    times = run_seconds(beats)
    if len(times) > 1:
        tiles["time"] = duration(max(times.values()))
    reasons = failures(records)
    if reasons is not None:
        tiles["fallbacks"] = f"{sum(reasons.values()):,}" if reasons else "none"
    return tiles_html(run.resolve().name, tiles)


def run_seconds(beats: list[Record]) -> dict[int, float]:
    """Seconds that the run took from its first heartbeat to each, without pauses."""
    timed = [beat for beat in beats if is_number(beat.get("time")) and isinstance(beat.get("step"), int)]
    seconds, total = {}, 0.0
    for earlier, later in pairwise([*timed[:1], *timed]):
        gap = later["time"] - earlier["time"]
        total += gap if 0 < gap < PAUSE_S else 0.0
        seconds[later["step"]] = total
    return seconds


def settings_of(run: Path) -> dict[str, Any]:
    """The keys of the run's config, dotted; none where it has no config that can be read."""
    try:
        return dict(flat(read_yaml(run / CONFIG)))
    except (OSError, ValueError):
        return {}


def duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


def last_of(records: list[Record], kind: str) -> Record:
    return next((record for record in reversed(records) if record.get("kind") == kind), {})


def gates(records: list[Record]) -> list[str]:
    """The gates by branch over the run, and by layer at its end."""
    lines = [record for record in records if record.get("kind") == "gates" and isinstance(record.get("step"), int)]
    parts = []
    for field, title in (("mean", "Mean gate"), ("entropy", "Gate entropy, bits")):
        by_step = {record["step"]: layers_of(record.get(field)) for record in lines}
        by_step = {step: layers for step, layers in sorted(by_step.items()) if layers}
        if not by_step:
            continue
        over_time: list[tuple[str, list[Point]]] = []
        for branch in BRANCHES:
            values = {step: [x[branch] for x in layers.values() if branch in x] for step, layers in by_step.items()}
            over_time.append(
                (branch, [(float(step), sum(found) / (len(found) or 1)) for step, found in values.items()])
            )
        if len(by_step) > 1:
            parts.append(Chart(f"{title}, mean of the layers", over_time).html())
        step, layers = list(by_step.items())[-1]
        parts.append(heat_table(f"{title} by layer, step {step:,}", BRANCHES, layers))
    return parts


def layers_of(value: Any) -> dict[int, dict[str, float]]:
    """The layers that have gates."""
    if not isinstance(value, list):
        return {}
    layers = {index: layer for index, layer in enumerate(value) if isinstance(layer, dict)}
    return {
        index: {branch: float(layer[branch]) for branch in BRANCHES if is_number(layer.get(branch))}
        for index, layer in layers.items()
    }


def distances(records: list[Record]) -> list[str]:
    """A histogram of how far back the selected blocks lie, in bins that double."""
    record = last_of(records, "distances")
    counts = record.get("counts")
    if not isinstance(counts, list) or not any(is_number(count) and count > 0 for count in counts):
        return []
    bins: dict[str, float] = {}
    low = 0
    while low < len(counts):
        high = low if low == 0 else 2 * low - 1
        bins[f"{low}" if high == low else f"{low}–"] = sum(filter(is_number, counts[low : high + 1]))
        low = high + 1
    step = record.get("step")
    when = f", step {step:,}" if isinstance(step, int) else ""
    title = f"Selected blocks by how many blocks back they lie, in bins that double{when}"
    return [card(title, bar_chart("Distances", bins, "blocks"))]


def failures(records: list[Record]) -> dict[str, int] | None:
    """The last counts of failures by reason; None where there are none in the metrics."""
    for record in reversed(records):
        counts = record.get("counts") if record.get("kind") == "fallbacks" else record.get("fallbacks")
        if isinstance(counts, dict):
            return {str(reason): int(times) for reason, times in counts.items() if is_number(times)}
    return None


def samples(records: list[Record]) -> list[str]:
    found = [record for record in records if record.get("kind") in ("sample", "end")]
    texts = [(record.get("step"), record.get("text", record.get("sample"))) for record in found]
    # A run's summary repeats its last sample.
    once = {text: step for step, text in reversed(texts) if isinstance(text, str)}
    titles = [("At the end" if step is None else f"Step {step:,}", text) for text, step in once.items()]
    return [card(title, f"<pre>{escape(text)}</pre>") for title, text in titles[:SAMPLES]]


def first_file(run: Path, names: Iterable[str]) -> list[str]:
    """The content of the first of the files that exists."""
    for name in names:
        if (run / name).is_file():
            text = escape((run / name).read_text(encoding="utf-8", errors="replace"))
            return [card(name, f"<pre>{text}</pre>")]
    return []


def environment_table(run: Path) -> list[str]:
    path = run / RUN_INFO
    if not path.is_file():
        return []
    try:
        values = flat(parse_json(path.read_bytes()))
    except ValueError:
        return first_file(run, (path.name,))
    return [table({name: as_text(value) for name, value in values})]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
