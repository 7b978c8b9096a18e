"""A run on one page: `report.html`, drawn from the files of the run's folder alone.

The page is self-contained: charts, styles and script are inside, and its content security policy forbids any request.
JavaScript only adds the numbers under the pointer. The color scheme follows the browser's. A chart is left out if the
metrics have no lines for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from nsa.config import BRANCHES, require
from nsa.files import replace_text
from nsa.train.run_folder import HEARTBEAT, METRICS, REPORT, read_lines

# Points of a line: the chart has no more pixels.
POINTS = 600
WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 10, 30
SAMPLES = 4
# Between heartbeats further apart than this the run was stopped.
PAUSE_S = 900

Point = tuple[float, float]
Record = dict[str, Any]


def write_report(run: Path) -> Path:
    """Draw the run in the folder `run`.

    Returns:
        The path of the report.

    Raises:
        ValueError: `run` is no folder with metrics.
    """
    require(run.is_dir(), "run", str(run), "the folder of a run")
    found = [name for name in (METRICS, HEARTBEAT) if (run / name).exists()]
    require(bool(found), "run", str(run), f"a folder with {METRICS} or {HEARTBEAT}, as `nsa train` writes it")
    path = run / REPORT
    replace_text(path, page(run))
    return path


def page(run: Path) -> str:
    records, beats = read_lines(run / METRICS), read_lines(run / HEARTBEAT)
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
    body = "\n".join(part for part in parts if part)
    page, style, script = (
        files(__name__).joinpath(name).read_text() for name in ("page.html", "style.css", "hover.js")
    )
    return Template(page).substitute(title=escape(run.resolve().name), style=style, script=script, body=body)


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
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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


@dataclass(frozen=True)
class Chart:
    """Lines over the steps."""

    title: str
    lines: list[tuple[str, list[Point]]]
    smooth: bool = False

    def html(self) -> str:
        legend = "".join(
            f'<span class="key c{i}">{escape(label)}</span>' for i, (label, _) in enumerate(self.lines) if label
        )
        return card(f"{escape(self.title)}{legend}", self.svg())

    def svg(self) -> str:
        everything = [point for _, points in self.lines for point in points]
        x_ticks = ticks(min(x for x, _ in everything), max(x for x, _ in everything), 5)
        y_ticks = ticks(*span([y for _, y in everything]), 4)
        x_of = scale(x_ticks, LEFT, WIDTH - RIGHT)
        y_of = scale(y_ticks, HEIGHT - BOTTOM, TOP)
        out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">']
        for y in y_ticks:
            out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>')
            out.append(f'<text x="{LEFT - 8}" y="{y_of(y) + 4:.1f}" text-anchor="end">{number(y)}</text>')
        for x in x_ticks:
            out.append(f'<text x="{x_of(x):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{number(x)}</text>')
        shown = []
        for i, (label, points) in enumerate(self.lines):
            few = thin(points)
            smooth = self.smooth and len(points) > 20
            out.append(drawn(few, x_of, y_of, f"line c{i}" + (" faint" if smooth else "")))
            if smooth:
                out.append(drawn(thin(middle(points)), x_of, y_of, f"line c{i}"))
            shown.append([label, [[round(x_of(x), 1), f"{number(x)}: {number(y)}"] for x, y in few]])
        data = escape(json.dumps(shown), quote=True)
        out.append(f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        out.append(f'<rect class="hover" width="{WIDTH}" height="{HEIGHT}" data-lines="{data}"/></svg>')
        return "".join(out)


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


def drawn(points: list[Point], x_of: Callable[[float], float], y_of: Callable[[float], float], style: str) -> str:
    few = points if len(points) < 3 else []
    dots = "".join(f'<circle class="{style}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.5"/>' for x, y in few)
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
    return f'<polyline class="{style}" points="{path}"/>{dots}'


def thin(points: list[Point]) -> list[Point]:
    """At most `POINTS` points: the lowest and the highest of each bucket, so that no spike is lost."""
    if len(points) <= POINTS:
        return points
    size = math.ceil(2 * len(points) / POINTS)
    kept: list[Point] = []
    for i in range(0, len(points), size):
        bucket = points[i : i + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept


def middle(points: list[Point]) -> list[Point]:
    """The running median, which follows a slope without lag and ignores spikes."""
    reach = min(50, max(2, len(points) // 120))
    values = [y for _, y in points]
    return [(x, median(values[max(0, i - reach) : i + reach + 1])) for i, (x, _) in enumerate(points)]


def span(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest value; the top 1 % (a first loss, a spike) is cut off where it would flatten all others."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return (low, usual) if high - low > 8 * (usual - low) > 0 else (low, high)


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers, the first at or below `low`, the last at or above `high`."""
    if high <= low:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def scale(marks: list[float], begin: float, end: float) -> Callable[[float], float]:
    low, high = marks[0], marks[-1]
    # Values that `span` cut off are drawn at the edge.
    return lambda value: begin + (end - begin) * (min(max(value, low), high) - low) / (high - low)


def number(value: float) -> str:
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}"
    if size == 0 or size >= 1e-3:
        return f"{value:.4g}"
    return f"{value:.1e}".replace("e-0", "e-")


# The parts of the page.


def card(caption: str, content: str) -> str:
    return f'<figure class="card"><figcaption>{caption}</figcaption>{content}</figure>'


def section(title: str, parts: Iterable[str]) -> str:
    content = "".join(parts)
    return f'<section><h2>{title}</h2><div class="cards">{content}</div></section>' if content else ""


def header(run: Path, records: list[Record], beats: list[Record], series: list[Series]) -> str:
    by_name = {(s.kind, s.field): s.points for s in series}
    tiles: dict[str, str] = {}
    steps = [r["step"] for r in [*records, *beats] if isinstance(r.get("step"), int)]
    if steps:
        tiles["steps"] = f"{max(steps):,}"
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
    times = [beat["time"] for beat in beats if is_number(beat.get("time"))]
    if len(times) > 1:
        gaps = [later - earlier for earlier, later in pairwise(times)]
        tiles["time"] = duration(sum(gap for gap in gaps if 0 < gap < PAUSE_S))
    reasons = failures(records)
    if reasons is not None:
        tiles["fallbacks"] = f"{sum(reasons.values()):,}" if reasons else "none"
    shown = "".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in tiles.items())
    return f'<header><h1>{escape(run.resolve().name)}</h1><div class="tiles">{shown}</div></header>'


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
        over_time: list[tuple[str, list[Point]]] = [
            (branch, [(float(step), branch_mean(layers, branch)) for step, layers in by_step.items()])
            for branch in BRANCHES
        ]
        if len(by_step) > 1:
            parts.append(Chart(f"{title}, mean of the layers", over_time).html())
        step, layers = list(by_step.items())[-1]
        rows = "".join(
            f"<tr><th>{index}</th>" + "".join(cell(layer.get(branch)) for branch in BRANCHES) + "</tr>"
            for index, layer in layers.items()
        )
        head = "".join(f"<th>{branch}</th>" for branch in BRANCHES)
        heat = f'<table class="heat"><tr><th>layer</th>{head}</tr>{rows}</table>'
        parts.append(card(f"{title} by layer, step {step:,}", heat))
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


def branch_mean(layers: dict[int, dict[str, float]], branch: str) -> float:
    values = [layer[branch] for layer in layers.values() if branch in layer]
    return sum(values) / len(values) if values else 0.0


def cell(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    return f'<td style="--v:{100 * min(max(value, 0.0), 1.0):.0f}%">{value:.2f}</td>'


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
    total, most = sum(bins.values()), max(bins.values())
    bars = []
    width = (WIDTH - LEFT - RIGHT) / len(bins)
    floor = HEIGHT - BOTTOM
    for i, (label, count) in enumerate(bins.items()):
        tall = (floor - TOP - 16) * count / most
        x = LEFT + i * width
        centre = f'x="{x + width / 2:.1f}" text-anchor="middle"'
        bars.append(
            f'<rect class="bar" x="{x + 2:.1f}" y="{floor - tall:.1f}" width="{width - 4:.1f}" height="{tall:.1f}">'
            f"<title>{count:,.0f} blocks</title></rect>"
            f'<text {centre} y="{floor - tall - 4:.1f}">{100 * count / total:.0f}%</text>'
            f'<text {centre} y="{HEIGHT - 8}">{label}</text>'
        )
    step = record.get("step")
    when = f", step {step:,}" if isinstance(step, int) else ""
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Distances">{"".join(bars)}</svg>'
    return [card(f"Selected blocks by how many blocks back they lie, in bins that double{when}", svg)]


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
    path = run / "run.json"
    if not path.is_file():
        return []
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return first_file(run, (path.name,))
    return [table(dict(flat_entries("", values)))]


def flat_entries(name: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from flat_entries(f"{name}.{key}" if name else str(key), entry)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


def table(values: dict[str, str]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in values.items())
    return f'<figure class="card"><table>{rows}</table></figure>'
