"""The sliding branch: every query sees its own token and the `window - 1` before it, within its document."""

from __future__ import annotations

from torch import Tensor

from nsa.backends.triton.ranged_backward import ranged_backward
from nsa.backends.triton.ranged_forward import ranged_forward
from nsa.backends.triton.tiles import BackwardTile, Tile, sliding_ranges


def sliding_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    assert q_start is None, "cached queries are served by the decode kernels"
    ranges = sliding_ranges(q.shape[1], window, cu_seqlens)
    return ranged_forward(q, k, v, ranges, scale, tile)


def sliding_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    gate: Tensor | None = None,
    product: Tensor | None = None,
    into: Tensor | None = None,
    tile: BackwardTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert q_start is None, "cached queries have no backward"
    ranges = sliding_ranges(q.shape[1], window, cu_seqlens)
    return ranged_backward(do, dlse, q, k, v, o, lse, ranges, scale, tile, gate, product, into)
