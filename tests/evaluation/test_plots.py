"""Pictures of evaluations."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from nsa.evaluation.plots import needle_figure


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
