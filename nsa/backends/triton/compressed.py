"""The compressed branch: every query sees its document's blocks from the first to the last that is complete."""

from __future__ import annotations

from torch import Tensor

from nsa.backends.triton.ranged_backward import ranged_backward
from nsa.backends.triton.ranged_forward import ranged_forward
from nsa.backends.triton.tiles import BackwardTile
from nsa.sequences import Compressed, Saved, Upstream

compressed_forward = ranged_forward


def compressed_backward(
    upstream: Upstream, saved: Saved, branch: Compressed, tile: BackwardTile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv`."""
    return ranged_backward(upstream, saved, branch.ranges(saved.k.shape[1]), branch.scale, tile)
