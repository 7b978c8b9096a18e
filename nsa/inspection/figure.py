"""A picture of an inspection for a notebook. Needs matplotlib, which is imported here alone."""

from __future__ import annotations

from typing import Any

import torch

from nsa.config import BRANCHES
from nsa.inspection.record import Inspection

# Rows of a selection map: a figure has no more pixels.
MAP_ROWS = 512


def figure(inspection: Inspection, *, layer: int | None = None, group: int = 0) -> Any:
    """The gates by layer, the distances of selected blocks, keys read per token, and who selects what in one layer.

    Args:
        inspection: What to show.
        layer: Of the selection map. None: the last one.
        group: Of the selection map.

    Returns:
        A matplotlib figure, which a notebook shows.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    layer = max(inspection.layers) if layer is None else layer
    made = Figure(figsize=(10, 7.5), layout="constrained")
    (gates, distances), (reads, selection) = made.subplots(2, 2)

    means = [[record.gate_mean[branch] for branch in BRANCHES] for record in inspection.layers.values()]
    made.colorbar(gates.imshow(means, vmin=0, vmax=1, cmap="Greens", aspect="auto"), ax=gates)
    gates.set_xticks(range(len(BRANCHES)), BRANCHES)
    gates.set_yticks(range(len(means)), list(inspection.layers))
    gates.set(title="mean gate", ylabel="layer")

    counts = inspection.distances
    distances.bar(range(len(counts)), [count / max(1, sum(counts)) for count in counts], width=1.0)
    distances.set(title="selected blocks", xlabel="blocks back", ylabel="share", yscale="log")

    length = len(inspection.tokens)
    reads.plot(inspection.reads.tolist(), label="NSA")
    reads.plot(range(1, length + 1), label="dense")
    reads.set(title="keys read per token", xlabel="position")
    reads.legend(frameon=False)

    n_blocks = -(-length // inspection.config.l_sel)
    shown = inspection.layers[layer].selected[:: -(-length // MAP_ROWS), group].long()
    # One column more, for -1.
    grid = torch.zeros(shown.shape[0], n_blocks + 1).scatter_(1, shown.where(shown >= 0, n_blocks), 1.0)[:, :n_blocks]
    selection.imshow(grid.tolist(), cmap="Greens", aspect="auto", extent=(0, n_blocks, length, 0))
    selection.set(title=f"selection in layer {layer}, group {group}", xlabel="block", ylabel="token")
    return made
