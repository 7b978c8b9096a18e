"""The compressed and the sliding branch, each as the key ranges that its queries see."""

from __future__ import annotations

from torch import Tensor

from nsa.backends.gated import without_gate
from nsa.backends.sdpa.ranged import Tiling, tiled_backward, tiled_forward
from nsa.sequences import Compressed, Saved, Selection, Sliding, Upstream, ranges_of

# Queries per tile. The sliding branch computes `tile * (tile + window)` scores for `tile * window` visible ones; in the
# compressed branch the keys of a tile do not depend on its size.
SLIDING_TILE = 256
COMPRESSED_TILE = 512


def compressed_tiling(branch: Compressed | Selection, n_keys: int) -> Tiling:
    sequences = branch.sequences

    def n_slice_keys(tile: int, c1: int) -> int:
        # A block takes a whole stride of tokens, in a varlen batch too: no more blocks than strides before `c1`.
        return n_keys if sequences.q_start is not None else min(n_keys, c1 // branch.stride)

    tile = min(COMPRESSED_TILE, sequences.length)
    return Tiling(ranges_of(branch, n_keys), tile=tile, along=False, before=0, n_slice_keys=n_slice_keys)


def sliding_tiling(branch: Sliding, n_keys: int) -> Tiling:
    length = branch.sequences.length
    reach = min(branch.window, n_keys) - 1

    def n_slice_keys(tile: int, c1: int) -> int:
        # The keys of a cache are ahead of the queries by at most the difference of their numbers.
        return reach + tile + n_keys - length

    tile = min(SLIDING_TILE, length)
    return Tiling(ranges_of(branch, n_keys), tile=tile, along=True, before=reach, n_slice_keys=n_slice_keys)


def compressed_forward(q: Tensor, k: Tensor, v: Tensor, branch: Compressed) -> tuple[Tensor, Tensor]:
    return tiled_forward(q, k, v, compressed_tiling(branch, k.shape[1]), branch.scale)


@without_gate
def compressed_backward(upstream: Upstream, saved: Saved, branch: Compressed) -> tuple[Tensor, Tensor, Tensor]:
    return tiled_backward(upstream, saved, compressed_tiling(branch, saved.k.shape[1]), branch.scale)


def sliding_forward(q: Tensor, k: Tensor, v: Tensor, branch: Sliding) -> tuple[Tensor, Tensor]:
    return tiled_forward(q, k, v, sliding_tiling(branch, k.shape[1]), branch.scale)


@without_gate
def sliding_backward(upstream: Upstream, saved: Saved, branch: Sliding) -> tuple[Tensor, Tensor, Tensor]:
    return tiled_backward(upstream, saved, sliding_tiling(branch, saved.k.shape[1]), branch.scale)
