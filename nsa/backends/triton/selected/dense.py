"""Forward of the selected branch for sequences of which every query selects a good part: causal tiles, masked.

Every query of 2,048 tokens selects half of the blocks, so a tile of queries reads nearly all of them in any case: then
it is cheapest to read them in order, once for all queries of the tile, with no list of blocks and no partials. The work
grows with the square of the length, so it is for short sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.backends.triton.ranged_forward import RangedForwardPlan
from nsa.backends.triton.selected.index import Bitmap, Shapes, Tables
from nsa.backends.triton.tiles import Tile, Visibility, candidates, pick_forward, tile_width


def dense_tile(shapes: Shapes) -> Tile | None:
    """A tile whose keys do not straddle blocks; None where there is none."""
    usual = pick_forward(shapes.q, shapes.v, sliding=False)
    # The others are for GPUs that take the first of them.
    others = candidates("forward", tile_width(shapes.d_k, shapes.d_v))
    tiles = (usual, *others) if usual in others else (usual,)
    return next((tile for tile in tiles if shapes.select_block % tile.block_n == 0), None)


class DenseForward:
    """The plan of `dense`, for fixed-length sequences."""

    method = "dense"

    def __init__(self, shapes: Shapes, scale: float, tile: Tile) -> None:
        self.bitmap = Bitmap(shapes, 0, shapes.n_tokens)
        # Every token up to the query's own.
        causal = Visibility(sliding=False, span=1, stride=1, varlen=False, offset=shapes.offset)
        self.attend = RangedForwardPlan(shapes.q, shapes.k, shapes.v, causal, scale, tile, shapes.select_block)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, tables: Tables, o: Tensor, lse: Tensor
    ) -> None:
        """Writes `o` and natural `lse`."""
        word = torch.zeros(self.bitmap.shape, dtype=torch.int32, device=q.device)
        self.bitmap.mark(
            p_indices=indices, p_word=word, p_doc_start=tables.doc_start, p_block_offset=tables.offset, **tables.start
        )
        self.attend.launch(**self.attend.described(q, k, v), p_o=o, p_lse=lse, p_word=word, **tables.start)
