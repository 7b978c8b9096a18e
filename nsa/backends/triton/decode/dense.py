"""A decode step of dense attention between the projections: append, split-KV attention over all keys, merge.

The compressed branch with blocks of one token is dense attention: key `i` is visible from position `i` on. What pools
its probabilities for a selection is left out, and there is no gate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nsa.backends.triton.decode.plan import DecodeTile, Form, Hyperparameters, plan_decode
from nsa.backends.triton.decode.step import plan_append
from nsa.backends.triton.launch import layout
from nsa.backends.triton.tiles import row_contiguous
from nsa.sequences import Pair

# Keys of a split, at least, and splits of a row, at most: each leaves an output of all heads in fp32 to be merged.
MIN_SPLIT = 256
MAX_SPLITS = 64


class DenseStore(NamedTuple):
    """A cache's tensors: keys and values `[B,places+1,G,D]`, `[B]` int32 lengths and high-water marks, and RoPE's
    `frequencies`, fp64 `[Dk/2]`."""

    pair: Pair
    lengths: Tensor
    high_water: Tensor
    frequencies: Tensor


def step_tile(max_len: int) -> DecodeTile:
    """Splits follow from the cache's capacity alone: a row does not depend on the others, nor a grid on the lengths."""
    return DecodeTile(split=max(MIN_SPLIT, triton.next_power_of_2(triton.cdiv(max_len, MAX_SPLITS))))


def dense_step(
    q: Tensor,
    new: Pair,
    store: DenseStore,
    scale: float,
    max_len: int,
    *,
    counts: Tensor | None = None,
    tile: DecodeTile | None = None,
) -> Tensor:
    """Append `T` new tokens per row to a cache, and attend from them to all up to their own.

    The launch before must write neither the cache's lengths nor `counts` (`common.py`).

    Args:
        q: `[B,T,Hq,Dk]`, like the keys not rotated.
        new: keys and values `[B,T,G,D]`.
        store: the cache, written in place; its lengths last.
        scale: of the scores.
        max_len: tokens that the cache holds. A token at or past `max_len` is dropped.
        counts: int64 `[B]`, contiguous, how many of the `T` tokens are real, the first ones.

    Returns:
        `o [B,T,Hq,Dv]`.
    """
    q = row_contiguous(q)
    (k, v), counted = store.pair, counts is not None
    kv = layout(k), layout(v)
    append = plan_append(layout(q), (layout(new[0]), layout(new[1])), kv, max_len, counted, Form())
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    how = Hyperparameters(1, 1, 1, 0, 0, 0, 0, scale, max_len, "cmp")
    attention = plan_decode(
        layout(rotated), kv, kv, kv, None, how, tile or step_tile(max_len), Form(), commits=True, counted=counted
    )
    shape, dtype, device = attention.arrivals
    arrivals = torch.empty(shape, dtype=dtype, device=device)
    given: dict[str, Any] = {} if counts is None else {"counts": counts}
    append(
        q=q,
        k_sel=new[0],
        v_sel=new[1],
        q_out=rotated,
        arrivals=arrivals,
        selected_k=k,
        selected_v=v,
        start=store.lengths,
        frequencies=store.frequencies,
        position_offset=0,
        **given,
    )
    pairs = store.pair, store.pair, store.pair
    committed = {"lengths": store.lengths, "high_water": store.high_water, **given}
    o, _ = attention.run(rotated, *pairs, None, store.lengths, arrivals, None, None, **committed)
    return o
