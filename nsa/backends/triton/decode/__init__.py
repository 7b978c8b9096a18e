"""One decode step, 1 to 8 new tokens per batch row over a cache, rows of any lengths: its attention in four launches.

1. `compressed.py`: split-KV attention over the compressed cache; each tile pools its probabilities to blocks.
2. `select.py`: importance from the pooled probabilities and the best blocks.
3. `near.py`: the sliding window and the forced blocks, which start while the blocks are selected; the selected blocks.
4. `merge.py`: split-KV partials to branch outputs, gates, the sum.

`step.py` puts the append to the cache and the emission of finished compressed blocks before them. `dense.py` is a step
of dense attention, by the first and the last. `linear.py` has the layer's matmuls for a step's few rows, with the
norms, activations and residuals around them.

Lengths are read on the device alone, and grids follow from the cache's capacity: a captured step can be replayed at any
length. Results are bitwise deterministic, and those of the attention do not depend on the other rows of the batch
(`plan.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.backends.triton.decode.dense import DenseStore, dense_step
from nsa.backends.triton.decode.linear import Norm, Weights, linear_step
from nsa.backends.triton.decode.plan import DecodeTile, Form, GateLayer, Hyperparameters, Pages, plan_decode
from nsa.backends.triton.decode.step import Mlp, Projected, Stores, decode_step
from nsa.backends.triton.launch import layout
from nsa.backends.triton.tiles import row_contiguous
from nsa.sequences import Pair

__all__ = [
    "DecodeTile",
    "DenseStore",
    "GateLayer",
    "Hyperparameters",
    "Mlp",
    "Norm",
    "Pages",
    "Projected",
    "Stores",
    "Weights",
    "decode_attention",
    "decode_step",
    "dense_step",
    "linear_step",
]


def decode_attention(
    q: Tensor,
    compressed: Pair,
    selected: Pair,
    window: Pair,
    gates: Tensor,
    start: Tensor,
    how: Hyperparameters,
    tile: DecodeTile | None = None,
) -> tuple[Tensor, Tensor]:
    """NSA of the last `T` tokens of every row; their keys and values are in the stores already.

    Args:
        q: `[B,T,Hq,Dk]`, rotated; `T` is 1 to 8.
        compressed: keys `[B,N+1,G,Dk]` and values `[B,N+1,G,Dv]` of the complete blocks; `N` is what `max_len` tokens
            have. The last place of each store is spare and never read.
        selected: keys and values `[B,max_len+1,G,D]` by position.
        window: keys and values `[B,P+1,G,D]`, position `p` at place `p % P`; `P` is at least the window and `T - 1`, or
            `max_len`.
        gates: `[B,T,Hq,3]`.
        start: int32 `[B]`, position of each row's first new token.
        how: the hyperparameters and `max_len`. A token at or past `max_len` gets a finite output that means nothing.

    Returns:
        `o [B,T,Hq,Dv]` and the selected blocks `[B,T,G,n_select]`, int32, ascending, -1 where there are fewer.
    """
    q = row_contiguous(q)
    pairs = compressed, selected, window
    layouts = tuple((layout(k), layout(v)) for k, v in pairs)
    plan = plan_decode(layout(q), *layouts, layout(gates), how, tile or DecodeTile(), Form())
    shape, dtype, device = plan.arrivals
    arrivals = torch.zeros(shape, dtype=dtype, device=device)
    return plan.run(q, *pairs, gates, start, arrivals, None, None)
