"""The compressed branch: every query sees its document's blocks from the first to the last that is complete."""

from __future__ import annotations

from torch import Tensor

from nsa.backends.triton.ranged_backward import ranged_backward
from nsa.backends.triton.ranged_forward import ranged_forward
from nsa.backends.triton.tiles import BackwardTile, Tile, compressed_ranges


def compressed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    stride: int,
    scale: float,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    assert q_start is None, "cached queries are served by the decode kernels"
    ranges = compressed_ranges(q.shape[1], k.shape[1], block, stride, cu_seqlens)
    return ranged_forward(q, k, v, ranges, scale, tile)


def compressed_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    block: int,
    stride: int,
    scale: float,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    gate: Tensor | None = None,
    product: Tensor | None = None,
    into: Tensor | None = None,
    tile: BackwardTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert q_start is None, "cached queries have no backward"
    ranges = compressed_ranges(q.shape[1], k.shape[1], block, stride, cu_seqlens)
    return ranged_backward(do, dlse, q, k, v, o, lse, ranges, scale, tile, gate, product, into)
