"""Where the new tokens of a step go in a cache, and where their queries are placed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.sequences import Pair


class NewTokens(NamedTuple):
    """Where a step's `T` new tokens go, and where their queries are placed.

    Every query must lie among the keys, even one of padding or of a token that does not fit. Where a row's queries
    would run past the end, they start `shift` positions earlier, rotated so that the queries of tokens that fit stay at
    their positions and the others come before them.
    """

    position: Tensor  # [B, T], at most max_len of the new tokens: the rest is padding or does not fit
    keep: Tensor  # [B, T] which of them are real and fit
    q_start: Tensor  # [B] position of the first query
    shift: Tensor | None  # [B]; None: no row's queries are rotated

    @classmethod
    def place(cls, start: Tensor, end: Tensor, n_new: int, max_len: int, *, crowded: bool) -> NewTokens:
        """`start, end [B]`: row lengths before and after. `crowded`: some row's queries may run past `max_len`."""
        n_queries = min(n_new, max_len)
        position = start[:, None] + torch.arange(n_queries, device=start.device)
        q_start = start.clamp_max(max_len - n_queries) if crowded else start
        # A single query cannot be rotated.
        return cls(position, position < end[:, None], q_start, start - q_start if crowded and n_new > 1 else None)

    def rotate_queries(self, x: Tensor) -> Tensor:
        """`[B, n_new, ...]` in the order of the tokens to `[B, T, ...]` in the order of the queries."""
        if self.shift is None:
            return x
        n_queries = self.position.shape[1]
        return take(x, (torch.arange(n_queries, device=x.device) - self.shift[:, None]) % n_queries)

    def restore_order(self, x: Tensor, n_new: int) -> Tensor:
        """`[B, T, ...]` in the order of the queries back to `[B, n_new, ...]` in the order of the tokens."""
        if self.shift is None:
            return x
        return take(x, (torch.arange(n_new, device=x.device) + self.shift[:, None]) % x.shape[1])


def take(x: Tensor, index: Tensor) -> Tensor:
    """`x [B, N, ...]` at `index [B, M]`: `[B, M, ...]`."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[row, index.long()]


def pair_of(tensors: Iterable[Tensor]) -> Pair:
    k, v = tensors
    return k, v
