"""The type of each kernel's tile. It is declared beside the kernel, so this imports Triton, as tuning.py does not."""

from __future__ import annotations

from pathlib import Path

from nsa.backends.triton import combine, selection, tiles, tuning
from nsa.backends.triton.selected import SelectedBackwardTile, SelectedForwardTile

RANGED: dict[str, type] = {"forward": tiles.Tile, "dq": tiles.Tile, "dkv": tiles.SplitTile}
TILE_TYPES: dict[str, type] = {
    **{f"{branch}-{part}": kind for branch in ("compressed", "sliding") for part, kind in RANGED.items()},
    **dict.fromkeys(("scores", "scores-few-heads"), selection.SelectionTile),
    **dict.fromkeys(("selected-forward-query", "selected-forward-block"), SelectedForwardTile),
    "selected-backward": SelectedBackwardTile,
    **dict.fromkeys(("combine-forward", "combine-backward"), combine.CombineTile),
}


def check_file(path: Path) -> None:
    """A ValueError names the first tile of a tiles file that does not fit its kernel."""
    for key, entry in tuning.read_tuned(path).tiles.items():
        tuning.build(TILE_TYPES[key.kernel], key, entry)
