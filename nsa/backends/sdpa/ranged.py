"""Attention in which every query sees one contiguous range `[lo, hi)` of keys.

The compressed branch (complete blocks of one's document) and the sliding branch (the last `w` tokens of it) are both
of this form, for plain, packed and cached sequences. Each chunk of queries multiplies with the slice of keys that can
hold its ranges, so memory is bounded by the chunk and the window costs a band, not a square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.backends.sdpa.layout import (
    MASKED,
    group_keys,
    group_queries,
    group_rows,
    product,
    score_budget,
    sum_dtype,
    ungroup_keys,
    ungroup_queries,
)


@dataclass(frozen=True)
class Ranges:
    """`lo`, `hi` `[B or 1, S]`: what each query sees. `span(c0, c1)`: a slice of keys that holds the ranges of a chunk,
    known without looking at `lo` and `hi`. `max_chunk`: past this many queries a chunk only adds masked work."""

    lo: Tensor
    hi: Tensor
    span: Callable[[int, int], tuple[int, int]]
    max_chunk: int

    def chunks(self, n_queries: int, n_heads: int, device: torch.device) -> Iterator[tuple[int, int, int, int]]:
        """`(c0, c1, k0, k1)`: queries `[c0, c1)` need no key outside `[k0, k1)`."""
        c0 = 0
        while c0 < n_queries:
            size = self.max_chunk
            while size > 16 and size * n_heads * self.width(c0, min(c0 + size, n_queries)) > score_budget(device):
                size //= 2
            c1 = min(c0 + size, n_queries)
            yield c0, c1, *self.span(c0, c1)
            c0 = c1

    def width(self, c0: int, c1: int) -> int:
        k0, k1 = self.span(c0, c1)
        return k1 - k0

    def hidden(self, c0: int, c1: int, k0: int, k1: int) -> Tensor:
        """`[B or 1, 1, C, 1, K]`, to lie over scores `[B, G, C, h, K]`."""
        key = torch.arange(k0, k1, device=self.lo.device)
        lo, hi = self.lo[:, c0:c1, None], self.hi[:, c0:c1, None]
        return ((key < lo) | (key >= hi))[:, None, :, None]

    def empty(self) -> Tensor:
        """`[B or 1, S]`: queries that see nothing."""
        return self.lo >= self.hi


def chunk_scores(q: Tensor, k: Tensor, hidden: Tensor, batch: int, scale: float, fill: float = MASKED) -> Tensor:
    """`[B*G, C, h, K]` scaled scores of a chunk, `fill` where hidden."""
    rows, length, heads = q.shape[:3]
    scores = product(q.flatten(1, 2), k.transpose(1, 2)).mul_(scale)
    scores.view(batch, rows // batch, length, heads, -1).masked_fill_(hidden, fill)
    return scores.view(rows, length, heads, -1)


def softmax_with_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and log-normaliser over the last dimension; the largest probability is 1 / sum(exp(s - max))."""
    p = scores.softmax(dim=-1)
    return p, scores.amax(dim=-1) - p.amax(dim=-1).log()


def ranged_forward(q: Tensor, k: Tensor, v: Tensor, ranges: Ranges, scale: float) -> tuple[Tensor, Tensor]:
    batch, n_queries, n_heads, _ = q.shape
    n_groups = k.shape[2]
    qg, kg, vg = group_queries(q, n_groups), group_keys(k), group_keys(v)
    o = torch.zeros(*qg.shape[:3], v.shape[-1], dtype=sum_dtype(q), device=q.device)
    lse = torch.full(qg.shape[:3], float("-inf"), dtype=sum_dtype(q), device=q.device)
    for c0, c1, k0, k1 in ranges.chunks(n_queries, batch * n_heads, q.device):
        if k1 <= k0:
            continue
        scores = chunk_scores(qg[:, c0:c1], kg[:, k0:k1], ranges.hidden(c0, c1, k0, k1), batch, scale)
        p, lse[:, c0:c1] = softmax_with_lse(scores)
        o[:, c0:c1] = product(p.flatten(1, 2).to(vg.dtype), vg[:, k0:k1]).view_as(o[:, c0:c1])
    o, lse = ungroup_queries(o, batch, q.dtype), ungroup_queries(lse, batch, lse.dtype)
    empty = ranges.empty()[..., None]
    return o.masked_fill_(empty[..., None], 0.0), lse.masked_fill_(empty, float("-inf"))


def ranged_backward(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, ranges: Ranges, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, n_queries, n_heads, _ = q.shape
    n_groups = k.shape[2]
    qg, kg, vg, dog = group_queries(q, n_groups), group_keys(k), group_keys(v), group_queries(do, n_groups)
    lse_g, delta = backward_rows(do, dlse, o, lse, n_groups)
    dq = torch.zeros(qg.shape, dtype=sum_dtype(q), device=q.device)
    dk = torch.zeros(kg.shape, dtype=sum_dtype(q), device=q.device)
    dv = torch.zeros(vg.shape, dtype=sum_dtype(q), device=q.device)
    for c0, c1, k0, k1 in ranges.chunks(n_queries, batch * n_heads, q.device):
        if k1 <= k0:
            continue
        q_c, do_c = qg[:, c0:c1], dog[:, c0:c1].flatten(1, 2)
        hidden = ranges.hidden(c0, c1, k0, k1)
        p = chunk_scores(q_c, kg[:, k0:k1], hidden, batch, scale, fill=float("-inf"))
        p = p.sub_(lse_g[:, c0:c1, :, None]).exp_().flatten(1, 2)
        dv[:, k0:k1] += product(p.to(vg.dtype).transpose(1, 2), do_c)
        ds = product(do_c, vg[:, k0:k1].transpose(1, 2)).sub_(delta[:, c0:c1].flatten(1, 2)[..., None])
        ds = ds.mul_(p).mul_(scale).to(kg.dtype)
        dq[:, c0:c1] = product(ds, kg[:, k0:k1]).view_as(dq[:, c0:c1])
        dk[:, k0:k1] += product(ds.transpose(1, 2), q_c.flatten(1, 2))
    return ungroup_queries(dq, batch, q.dtype), ungroup_keys(dk, batch, k.dtype), ungroup_keys(dv, batch, v.dtype)


def backward_rows(do: Tensor, dlse: Tensor, o: Tensor, lse: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Per query and head, `[B*G, S, h]`: the normaliser, and what `dp` is reduced by in `ds = p * (dp - delta)`.

    A row that sees nothing has `lse = -inf`; any finite value serves it, because its probabilities are zero anyway.
    """
    total = sum_dtype(do)
    delta = (do.to(total) * o.to(total)).sum(dim=-1) - dlse.to(total)
    finite_lse = lse.masked_fill(lse == float("-inf"), 0.0)
    return group_rows(finite_lse, n_groups), group_rows(delta, n_groups)
