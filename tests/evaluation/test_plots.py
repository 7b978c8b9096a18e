"""Pictures of evaluations."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from nsa.evaluation.plots import draw_evaluation, harness_figure, loss_figure, needle_figure, recall_figure


@pytest.mark.parametrize("n_runs", [1, 5, 7])
def test_every_run_has_a_needle_map(n_runs: int) -> None:
    values = {(length, depth): float(depth == 1.0) for length in (512, 1024) for depth in (0.0, 0.5, 1.0)}
    rows = [
        {"run": f"run{i}", "length": length, "value": depth, "accuracy": value}
        for i in range(n_runs)
        for (length, depth), value in values.items()
    ]
    maps = [axis for axis in needle_figure(Figure, rows).axes if axis.images]
    assert [axis.get_title().split(":")[0] for axis in maps] == [f"run{i}" for i in range(n_runs)]
    for axis in maps:
        (image,) = axis.images
        assert image.get_array().tolist() == [[0, 0], [0, 0], [1, 1]]  # type: ignore[union-attr]
        for text, value in zip(axis.texts, image.get_array().ravel(), strict=True):  # type: ignore[union-attr]
            # What is written in a cell can be read.
            cell = image.cmap(image.norm(value))
            assert abs(sum(to_rgb(text.get_color())) - sum(cell[:3])) > 1


@pytest.mark.parametrize("name", ["loss", "needle", "recall", "lm-eval"])
def test_any_name_of_a_run_is_shown_as_it_is(name: str, tmp_path: Path) -> None:
    runs = ["$x_$y", "_hidden", r"a\$b$"]
    whole = {"begin": 0, "end": 8, "loss": 1.0, "length": 512, "value": 1.0, "accuracy": 0.5, "task": "keys"}
    rows = [{"run": run, **whole} for run in runs for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_evaluation(name, rows, tmp_path / "out.png")
    figures = {"loss": loss_figure, "needle": needle_figure, "recall": recall_figure, "lm-eval": harness_figure}
    figure = figures[name](Figure, rows)
    axes = figure.axes
    texts = [axis.title for axis in axes] if name == "needle" else axes[0].get_legend().get_texts()
    shown = [text._preprocess_math(text.get_text()) for text in texts]
    assert [text.replace("\u200b", "").split(":")[0] for text, _ in shown] == runs
    assert not any(math for _, math in shown)
