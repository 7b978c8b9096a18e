"""The compressed and the sliding branch, each as the ranges its queries see."""

from __future__ import annotations

from torch import Tensor

from nsa.backends.gated import without_gate
from nsa.backends.sdpa.ranged import Tiling, ranged_backward, ranged_forward
from nsa.sequences import Compressed, Saved, Selection, Sliding, Upstream

# Queries per tile. The window's band multiplies `tile * (tile + window)` scores for `tile * window` that count; the
# compressed branch's slice does not grow with the tile.
SLIDING_TILE = 256
COMPRESSED_TILE = 512


def compressed_tiling(branch: Compressed | Selection, n_keys: int) -> Tiling:
    sequences = branch.sequences

    def width(tile: int, c1: int) -> int:
        # A block comes with a whole stride of tokens, in a varlen batch too: no more blocks than strides before the
        # last query.
        return n_keys if sequences.q_start is not None else min(n_keys, c1 // branch.stride)

    tile = min(COMPRESSED_TILE, sequences.length)
    return Tiling(branch.ranges(n_keys), tile=tile, along=False, before=0, width=width)


def sliding_tiling(branch: Sliding, n_keys: int) -> Tiling:
    length = branch.sequences.length
    reach = min(branch.window, n_keys) - 1

    def width(tile: int, c1: int) -> int:
        # The keys of a cache run ahead of the queries by at most as many as there are more of them.
        return reach + tile + n_keys - length

    return Tiling(branch.ranges(n_keys), tile=min(SLIDING_TILE, length), along=True, before=reach, width=width)


def compressed_forward(q: Tensor, k: Tensor, v: Tensor, branch: Compressed) -> tuple[Tensor, Tensor]:
    return ranged_forward(q, k, v, compressed_tiling(branch, k.shape[1]), branch.scale)


@without_gate
def compressed_backward(upstream: Upstream, saved: Saved, branch: Compressed) -> tuple[Tensor, Tensor, Tensor]:
    return ranged_backward(upstream, saved, compressed_tiling(branch, saved.k.shape[1]), branch.scale)


def sliding_forward(q: Tensor, k: Tensor, v: Tensor, branch: Sliding) -> tuple[Tensor, Tensor]:
    return ranged_forward(q, k, v, sliding_tiling(branch, k.shape[1]), branch.scale)


@without_gate
def sliding_backward(upstream: Upstream, saved: Saved, branch: Sliding) -> tuple[Tensor, Tensor, Tensor]:
    return ranged_backward(upstream, saved, sliding_tiling(branch, saved.k.shape[1]), branch.scale)
