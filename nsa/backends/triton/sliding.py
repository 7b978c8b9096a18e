"""The sliding branch: every query sees its own token and the `window - 1` before it, within its document."""

from __future__ import annotations

from torch import Tensor

from nsa.backends.triton.ranged_backward import ranged_backward
from nsa.backends.triton.ranged_forward import ranged_forward
from nsa.backends.triton.tiles import BackwardTile
from nsa.sequences import Saved, Sliding, Upstream

sliding_forward = ranged_forward


def sliding_backward(
    upstream: Upstream, saved: Saved, branch: Sliding, tile: BackwardTile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq, dk, dv`."""
    return ranged_backward(upstream, saved, branch.ranges(saved.k.shape[1]), branch.scale, tile)
