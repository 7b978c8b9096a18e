"""Forward of the selected branch where queries choose a good part of all blocks: plain causal tiles, the rest masked.

Half of the blocks of 2,048 tokens are chosen by every query, so a tile of queries reads nearly all of them whatever way
it goes about it: then it is cheapest to read them in order, once for all queries of the tile, with no list of blocks
and no partial results. The work grows with the square of the length, so it is for short sequences.
"""

from __future__ import annotations

from torch import Tensor

from nsa.backends.triton.ranged_forward import Chosen, ranged_forward
from nsa.backends.triton.selected_index import Blocks, mark
from nsa.backends.triton.tiles import Ranges, Tile, candidates, pick_forward, tile_width

# Every token up to the query's own.
CAUSAL = Ranges(sliding=False, span=1, stride=1)


def dense_tile(q: Tensor, v: Tensor, select_block: int) -> Tile | None:
    """A tile whose keys do not straddle blocks; None where there is none."""
    usual = pick_forward(q, v, sliding=False)
    # The others are for GPUs that take the first of them.
    others = candidates("forward", tile_width(q.shape[-1], v.shape[-1]))
    tiles = (usual, *others) if usual in others else (usual,)
    return next((tile for tile in tiles if select_block % tile.block_n == 0), None)


def dense_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    select_block: int,
    scale: float,
    tile: Tile,
) -> None:
    """Writes `o` and natural `lse`; one document a row."""
    chosen = Chosen(mark(indices, Blocks.of(q.shape[1], select_block, None)), select_block)
    ranged_forward(q, k, v, CAUSAL, scale, tile, chosen, (o, lse))
