"""Pictures of evaluations: loss by position, needle maps, recall. Needs matplotlib, which is imported here alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Of runs, in order; distinguishable for most kinds of color blindness.
COLORS = ("#0b6e4f", "#333333", "#b0722f", "#3a6ea5", "#a3456b", "#7a7a2e")
# Maps side by side.
MAX_COLUMNS = 5


def draw_evaluation(name: str, rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw the rows of `nsa eval NAME` to a file whose suffix is the format."""
    from matplotlib.figure import Figure

    figures = {"loss": loss_figure, "needle": needle_figure, "recall": recall_figure, "lm-eval": harness_figure}
    figure = figures[name](Figure, rows)
    figure.tight_layout()
    figure.savefig(out, dpi=130)


def by_run(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    return runs


def plain_label(run: str) -> str:
    """A name as matplotlib shows it: without math, and in the legend even if it begins with an underscore."""
    return ("\u200b" if run.startswith("_") else "") + run.replace("$", r"\$")


def loss_figure(new: Any, rows: Sequence[dict[str, Any]]) -> Any:
    figure = new(figsize=(6.4, 4))
    axis = figure.subplots()
    for index, (run, own) in enumerate(by_run(rows).items()):
        # The first row is the whole.
        middles = [(row["begin"] + row["end"]) / 2 for row in own[1:]]
        label = f"{plain_label(run)}: {own[0]['loss']:.3f}"
        axis.plot(middles, [row["loss"] for row in own[1:]], label=label, color=COLORS[index % len(COLORS)])
    axis.set(xscale="log", xlabel="position", ylabel="loss, nats per token")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
    return figure


def needle_figure(new: Any, rows: Sequence[dict[str, Any]]) -> Any:
    """One map per run: depth down, length to the right, the darker the more accurate."""
    runs = by_run(rows)
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["value"] for row in rows})
    columns = min(len(runs), MAX_COLUMNS)
    lines = -(-len(runs) // columns)
    figure = new(figsize=(1.8 + max(2.5, 0.5 * len(lengths)) * columns, (1.3 + 0.27 * len(depths)) * lines))
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for unused in axes[len(runs) :]:
        unused.set_axis_off()
    for axis, (run, own) in zip(axes, runs.items(), strict=False):
        found = {(row["value"], row["length"]): row["accuracy"] for row in own}
        grid = [[found[depth, length] for length in lengths] for depth in depths]
        axis.imshow(grid, vmin=0, vmax=1, cmap="YlGn", aspect="auto")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                color = "#ffffff" if value > 0.6 else "#222222"
                axis.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=color)
        axis.set_xticks(range(len(lengths)), [short(length) for length in lengths], fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
        axis.set_title(f"{plain_label(run)}: {sum(map(sum, grid)) / sum(map(len, grid)):.1%}", fontsize=9)
        axis.set(xlabel="tokens", ylabel="depth")
    return figure


def recall_figure(new: Any, rows: Sequence[dict[str, Any]]) -> Any:
    """A panel per task and length: accuracy over the number of keys or hops, a line per run."""
    tasks = [task for task in ("keys", "hops") if any(row["task"] == task for row in rows)]
    lengths = sorted({row["length"] for row in rows})
    figure = new(figsize=(2.6 * len(lengths) + 1, 2.5 * len(tasks) + 0.6))
    axes = figure.subplots(len(tasks), len(lengths), squeeze=False)
    for line, task in zip(axes, tasks, strict=True):
        for axis, length in zip(line, lengths, strict=True):
            for index, (run, own) in enumerate(by_run(rows).items()):
                points = [(r["value"], r["accuracy"]) for r in own if (r["task"], r["length"]) == (task, length)]
                xs, ys = zip(*sorted(points), strict=True)
                axis.plot(
                    range(len(xs)), ys, marker="o", ms=4, label=plain_label(run), color=COLORS[index % len(COLORS)]
                )
                axis.set_xticks(range(len(xs)), [f"{x:g}" for x in xs], fontsize=7)
            axis.set_ylim(-0.03, 1.03)
            axis.set_title(f"{task}, {short(length)} tokens", fontsize=8)
            axis.grid(alpha=0.25)
    axes[0][0].legend(frameon=False, fontsize=7)
    return figure


def harness_figure(new: Any, rows: Sequence[dict[str, Any]]) -> Any:
    """A panel per task: accuracy over the length, a line per model."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = new(figsize=(2.6 * len(tasks) + 1, 3.1))
    for axis, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for index, (run, own) in enumerate(by_run(rows).items()):
            points = sorted((row["length"], row["accuracy"]) for row in own if row["task"] == task)
            axis.plot(
                *zip(*points, strict=True), marker="o", ms=4, label=plain_label(run), color=COLORS[index % len(COLORS)]
            )
        axis.set_title(task, fontsize=8)
        axis.set(xlabel="tokens", ylim=(-0.03, 1.03))
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=7)
    return figure


def short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else f"{length:,}"
