"""Building blocks of pages: charts as inline SVG, cards, tables, and the file that holds them.

A page is self-contained: charts, styles and script are inside, and its content security policy forbids any request.
JavaScript only adds the numbers under the pointer. The color scheme follows the browser's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from statistics import median
from string import Template
from typing import NamedTuple

# Points of a line: the chart has no more pixels.
POINTS = 600
WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 10, 30
# Colors of lines; further ones begin again.
N_COLORS = 6
# A line of so few points shows each of them.
DOTS = 12

Point = tuple[float, float]


def render_page(title: str, body: Iterable[str], style: str = "", script: str = "") -> str:
    """A page of the parts in `body`, without the empty ones; `style` and `script` are added to those of every page."""
    folder, names = files(__package__), ("page.html", "style.css", "hover.js")
    page, own_style, own_script = (folder.joinpath(name).read_text() for name in names)
    content = "\n".join(part for part in body if part)
    parts = {"style": own_style + style, "script": own_script + script, "body": content}
    return Template(page).substitute(title=escape(title), **parts)


@dataclass(frozen=True)
class Chart:
    """Lines over the steps."""

    title: str
    lines: list[tuple[str, list[Point]]]
    smooth: bool = False
    # Lengths along the bottom, by powers of 2; ratios or times that double.
    log_x: bool = False
    log_y: bool = False

    def html(self) -> str:
        names = [label if points else "" for label, points in self.lines]
        return card(f"{escape(self.title)}{legend(names)}", self.svg())

    def svg(self) -> str:
        xs, ys = ([point[at] for _, points in self.lines for point in points] for at in (0, 1))
        across = Axis.of(min(xs), max(xs), 5, LEFT, WIDTH - RIGHT, log=self.log_x)
        up = Axis.of(*((min(ys), max(ys)) if self.log_y else span(ys)), 4, HEIGHT - BOTTOM, TOP, log=self.log_y)
        x_of, y_of = across.at, up.at
        out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">']
        for y, label in up.marks:
            out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>')
            out.append(f'<text x="{LEFT - 8}" y="{y_of(y) + 4:.1f}" text-anchor="end">{label}</text>')
        for x, label in across.marks:
            out.append(f'<text x="{x_of(x):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>')
        shown = []
        for i, (label, points) in enumerate(self.lines):
            # A line without points keeps its color for the chart that has some.
            if not points:
                continue
            few, style = thin(points), f"line c{i % N_COLORS}"
            smooth = self.smooth and len(points) > 20
            out.append(drawn(few, x_of, y_of, style + (" faint" if smooth else "")))
            if smooth:
                out.append(drawn(thin(middle(points)), x_of, y_of, style))
            shown.append([label, [[round(x_of(x), 1), f"{number(x)}: {number(y)}"] for x, y in few]])
        data = escape(json.dumps(shown), quote=True)
        out.append(f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        out.append(f'<rect class="hover" width="{WIDTH}" height="{HEIGHT}" data-lines="{data}"/></svg>')
        return "".join(out)


class Axis(NamedTuple):
    """Marks of an axis with their labels, and where a value lies on it."""

    marks: list[tuple[float, str]]
    at: Callable[[float], float]

    @classmethod
    def of(cls, low: float, high: float, wanted: int, begin: float, end: float, *, log: bool) -> Axis:
        """An axis from `begin` to `end` in pixels; with `log` the marks are powers of 2."""
        if not log:
            marks = ticks(low, high, wanted)
            return cls([(mark, number(mark)) for mark in marks], scale(marks, begin, end))
        first, last = math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9)
        powers = list(range(first, max(last, first + 1) + 1))
        place = scale([float(power) for power in powers], begin, end)
        shown = powers[:: 1 + len(powers) // 9]
        return cls([(2.0**power, length_label(power)) for power in shown], lambda value: place(math.log2(value)))


def length_label(exponent: int) -> str:
    """`128k` for 2^17, as lengths are written."""
    return f"{2 ** (exponent - 10)}k" if exponent >= 10 else f"{2.0**exponent:g}"


def drawn(points: list[Point], x_of: Callable[[float], float], y_of: Callable[[float], float], style: str) -> str:
    few = points if len(points) <= DOTS else []
    dots = "".join(f'<circle class="{style}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.5"/>' for x, y in few)
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
    return f'<polyline class="{style}" points="{path}"/>{dots}'


def thin(points: list[Point]) -> list[Point]:
    """Keep at most `POINTS` points: the lowest and the highest of each bucket, so that no spike is lost."""
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
    # Five digits: ticks may be a quarter of a decimal place apart.
    return f"{value:.5g}".replace("e-0", "e-")


def card(caption: str, content: str) -> str:
    return f'<figure class="card"><figcaption>{caption}</figcaption>{content}</figure>'


def note(text: str) -> str:
    """A line of text where a chart or a table would be."""
    return f'<p class="note">{escape(text)}</p>'


def bar_chart(name: str, bins: dict[str, float], unit: str) -> str:
    """A bar per bin with its share of all, as SVG."""
    total, most, bars = sum(bins.values()), max(bins.values()), []
    width, floor = (WIDTH - LEFT - RIGHT) / len(bins), HEIGHT - BOTTOM
    for i, (label, count) in enumerate(bins.items()):
        tall, x = (floor - TOP - 16) * count / most, LEFT + i * width
        center = f'x="{x + width / 2:.1f}" text-anchor="middle"'
        bars.append(
            f'<rect class="bar" x="{x + 2:.1f}" y="{floor - tall:.1f}" width="{width - 4:.1f}" height="{tall:.1f}">'
            f"<title>{count:,.0f} {unit}</title></rect>"
            f'<text {center} y="{floor - tall - 4:.1f}">{100 * count / total:.0f}%</text>'
            f'<text {center} y="{HEIGHT - 8}">{label}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(bars)}</svg>'


def stacked_bars(title: str, names: Sequence[str], bars: dict[str, dict[str, float]]) -> str:
    """A horizontal bar per name, divided by what `bars[name]` says, with its sum."""
    rows = []
    for label, parts in bars.items():
        total = sum(parts.values())
        cells = "".join(
            f'<i class="c{names.index(name) % N_COLORS}" style="width:{100 * value / total:.2f}%"'
            f' title="{escape(name)}: {number(value)}, {value / total:.0%}"></i>'
            for name, value in parts.items()
        )
        bar = f'<td class="wide"><div class="bars">{cells}</div></td>'
        rows.append(f"<tr><th>{escape(label)}</th>{bar}<td>{number(total)}</td></tr>")
    return card(f"{escape(title)}{legend(names)}", f"<table>{''.join(rows)}</table>")


def legend(names: Sequence[str]) -> str:
    keys = ((i % N_COLORS, name) for i, name in enumerate(names) if name)
    return "".join(f'<span class="key c{color}">{escape(name)}</span>' for color, name in keys)


def tiles_html(title: str, tiles: dict[str, str]) -> str:
    """The head of a page: its title, and numbers with their names; values are HTML."""
    shown = "".join(f"<div><b>{value}</b><span>{escape(name)}</span></div>" for name, value in tiles.items())
    return f'<header><h1>{escape(title)}</h1><div class="tiles">{shown}</div></header>'


def section(title: str, parts: Iterable[str]) -> str:
    content = "".join(parts)
    return f'<section><h2>{escape(title)}</h2><div class="cards">{content}</div></section>' if content else ""


def heat_table(caption: str, names: Sequence[str], layers: Mapping[int, Mapping[str, float]]) -> str:
    """A row per layer with its fraction of each name, the larger the darker; empty where it has none."""

    def cell(value: float | None) -> str:
        if value is None:
            return "<td></td>"
        return f'<td style="--v:{100 * min(max(value, 0.0), 1.0):.0f}%">{value:.2f}</td>'

    head = "".join(f"<th>{name}</th>" for name in names)
    cells = {layer: "".join(cell(values.get(name)) for name in names) for layer, values in layers.items()}
    rows = "".join(f"<tr><th>{layer}</th>{shown}</tr>" for layer, shown in cells.items())
    return card(caption, f'<div class="scroll"><table class="heat"><tr><th>layer</th>{head}</tr>{rows}</table></div>')


def table(values: dict[str, str]) -> str:
    """Names and their values."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in values.items())
    return f'<figure class="card"><table>{rows}</table></figure>'


def grid(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with column names, whose first column names the row."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    shown = [(escape(first), "".join(f"<td>{escape(x)}</td>" for x in rest)) for first, *rest in rows]
    lines = "".join(f"<tr><th>{first}</th>{rest}</tr>" for first, rest in shown)
    return card(escape(caption), f'<div class="scroll"><table class="grid-table"><tr>{cells}</tr>{lines}</table></div>')
