"""Group-major copies of the inputs: a group's heads share its keys.

`q [B,S,Hq,D]` becomes `[B*G, S, h, D]`, so that one product serves all heads of a group and keys are never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Score elements alive at once where scores are written out. On a GPU a chunk must be large enough to fill it; on a CPU
# small enough for its caches. Where they are fused away, what is bounded is the mask and the gathered rows.
SCORE_BUDGET = {"cuda": 1 << 26, "cpu": 1 << 22}
FUSED_SCORE_BUDGET = 1 << 28


def score_budget(x: Tensor, *, fused: bool) -> int:
    return FUSED_SCORE_BUDGET if fused else SCORE_BUDGET.get(x.device.type, SCORE_BUDGET["cuda"])


def compute_dtype(x: Tensor) -> torch.dtype:
    """Half precision is multiplied as it is on a GPU, with fp32 sums; a CPU has no such product and widens it."""
    if x.dtype in (torch.float16, torch.bfloat16) and x.device.type == "cpu":
        return torch.float32
    return x.dtype


def sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def group_queries(x: Tensor, n_groups: int) -> Tensor:
    """`[B,S,Hq,D]` to `[B*G, S, h, D]`."""
    x = x.to(compute_dtype(x)).unflatten(2, (n_groups, -1))
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def group_rows(x: Tensor, n_groups: int) -> Tensor:
    """`[B,S,Hq]` to `[B*G, S, h]`."""
    return x.unflatten(2, (n_groups, -1)).transpose(1, 2).flatten(0, 1).contiguous()


def group_normalisers(lse: Tensor, n_groups: int) -> Tensor:
    """`lse` for a backward pass: a row that saw nothing gets +inf, which makes its probabilities exactly zero."""
    return group_rows(lse.masked_fill(lse == float("-inf"), float("inf")), n_groups)


def ungroup_queries(x: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """`[B*G, S, h, D]` (or without `D`) back to `[B,S,Hq,D]`."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3).to(dtype).contiguous()


def group_keys(x: Tensor) -> Tensor:
    """`[B,N,G,D]` to `[B*G, N, D]`."""
    return x.to(compute_dtype(x)).transpose(1, 2).flatten(0, 1).contiguous()


def ungroup_keys(x: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """`[B*G, N, D]` back to `[B,N,G,D]`; copied also where a slice is contiguous by itself: an output of an op begins
    its storage."""
    x = x.unflatten(0, (batch, -1)).transpose(1, 2)
    return x.to(dtype, memory_format=torch.contiguous_format, copy=True)
