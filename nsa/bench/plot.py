"""Plots of benchmark files: `nsa bench plot`. Reads rows, measures nothing.

nsa bench plot --rows benchmarks/results/h200/attention.csv --out docs/attention.png
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from nsa.bench.compare import latest_rows
from nsa.config import require
from nsa.files import make_folder
from nsa.results import Row, read_rows

# NSA in green, darkest for the kernels; dense attention in gray.
IMPL_COLORS = {
    "nsa-triton": "#0b6e4f",
    "nsa-triton-compiled": "#064e38",
    "nsa-triton-graphs": "#064e38",
    "nsa-sdpa": "#9fd3b4",
    "nsa-sdpa-compiled": "#4fae8c",
    "nsa-sdpa-graphs": "#4fae8c",
    "dense-fa2": "#9a9a9a",
    "dense-cudnn": "#333333",
    "dense-sdpa": "#9a9a9a",
    "dense-sdpa-compiled": "#333333",
    "dense-sdpa-graphs": "#333333",
    "flash-torch": "#3a6ea5",
    "flash-flash_attn": "#1f3f66",
    "sdpa-flash": "#9a9a9a",
    "sdpa-cudnn": "#333333",
    "sdpa-efficient": "#b0722f",
    "sdpa-math": "#dcb98f",
}
OTHER_COLOR = "#b0722f"
# In the order of their panels.
MODE_LABELS = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward", "train": "training"}
MODE_LABELS |= {f"decode-{n}": f"decode step, {n} token{'s'[: n > 1]} per row" for n in range(1, 9)}


def why_no_plots() -> str | None:
    """Why nothing can be plotted; None if it can."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        return f"matplotlib cannot be imported: {error} (pip install 'nsa[plots]')"
    return None


def draw_figure(rows: list[Row], out: Path) -> None:
    """Plot one line per implementation over the sequence length: tokens/s for training, else milliseconds. Of rows of
    the same kind the last counts, as they are appended. The file's description identifies the rows."""
    from matplotlib.figure import Figure

    rows = list(latest_rows(rows).values())
    panels: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        panels[row.mode, f"{row.op}, heads {row.Hq}/{row.G}/{row.Dk}"][row.impl].append(row)
    # One row of panels per mode, one column per shape.
    modes = sorted({mode for mode, _ in panels}, key=lambda mode: [*MODE_LABELS, mode].index(mode))
    shapes = list(dict.fromkeys(shape for _, shape in panels))
    figure = Figure(figsize=(5.2 * len(shapes), 3.8 * len(modes)))
    axes = figure.subplots(len(modes), len(shapes), squeeze=False)
    for axis, (mode, shape) in zip(axes.flat, product(modes, shapes), strict=True):
        if (mode, shape) in panels:
            draw_panel(axis, mode, shape, panels[mode, shape])
        else:
            axis.axis("off")
    # Below the title.
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.25 / (3.8 * len(modes))))
    save_figure(figure, ", ".join(sorted({row.gpu for row in rows})), rows, out, dpi=130)


def save_figure(figure: Any, title: str, rows: Iterable[Row], out: Path, dpi: int) -> None:
    figure.suptitle(title, fontsize=9, color="#666666")
    make_folder(out.parent)
    # Other formats do not take a description.
    described = out.suffix.lower() in (".png", ".svg")
    figure.savefig(out, dpi=dpi, metadata={"Description": rows_digest(rows)} if described else None)


def rows_digest(rows: Iterable[Row]) -> str:
    """The same for rows with the same measurements, in any order."""
    return f"rows {sha256(repr(sorted(map(repr, latest_rows(rows).values()))).encode()).hexdigest()[:16]}"


def draw_panel(axis: Any, mode: str, shape: str, lines: Mapping[str, list[Row]]) -> None:
    rate = mode == "train"
    for impl, points in sorted(lines.items()):
        points = sorted(points, key=lambda row: row.S)
        values = [(row.tokens_per_s or 0.0) / 1e3 if rate else row.p50_ms for row in points]
        color = IMPL_COLORS.get(impl, IMPL_COLORS.get(impl.removesuffix("-graphs"), OTHER_COLOR))
        axis.plot([row.S for row in points], values, marker="o", label=impl, color=color)
    axis.set(
        title=f"{shape}: {MODE_LABELS.get(mode, mode)}",
        xlabel="sequence length",
        ylabel="thousand tokens/s" if rate else "milliseconds",
        xscale="log",
        yscale="linear" if rate else "log",
    )
    mark_lengths(axis, {row.S for points in lines.values() for row in points})
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    if rate:
        axis.set_ylim(bottom=0)


def mark_lengths(axis: Any, lengths: Collection[int]) -> None:
    axis.set_xticks(sorted(lengths), [f"{n // 1024}k" if n >= 1024 else str(n) for n in sorted(lengths)])
    axis.minorticks_off()


def run(args: argparse.Namespace) -> int:
    rows = [row for path in args.rows for row in read_rows(path)]
    require(args.out.suffix != "", "--out", str(args.out), "a picture with its format as suffix, such as .png or .svg")
    require(bool(rows), "--rows", [str(path) for path in args.rows], "files with at least one row")
    if reason := why_no_plots():
        raise ValueError(f"{reason}; nsa bench report draws rows without it")
    draw_figure(rows, args.out)
    print(f"wrote {args.out}")
    return 0
