"""Group-major copies of the inputs: the heads of a group share its keys.

`q [B,S,Hq,D]` becomes `[B*G, S, h, D]`, so that one matmul covers all heads of a group and keys are never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.dtypes import HALF_DTYPES

# Score elements in memory at once: enough to fill a GPU, few enough for the caches of a CPU. The fused kernel stores no
# scores; there the budget bounds the mask and the gathered rows.
MAX_SCORES = {"cuda": 1 << 26, "cpu": 1 << 22}
MAX_FUSED_SCORES = 1 << 28


def score_budget(x: Tensor, *, fused: bool) -> int:
    return MAX_FUSED_SCORES if fused else MAX_SCORES.get(x.device.type, MAX_SCORES["cuda"])


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matmul operands: a GPU multiplies half precision with fp32 sums, a CPU casts it to fp32."""
    return torch.float32 if x.dtype in HALF_DTYPES and x.device.type == "cpu" else x.dtype


def group_queries(x: Tensor, n_groups: int) -> Tensor:
    """`[B,S,Hq,D]` to `[B*G, S, h, D]`."""
    x = x.to(compute_dtype(x)).unflatten(2, (n_groups, -1))
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def group_rows(x: Tensor, n_groups: int) -> Tensor:
    """`[B,S,Hq]` to `[B*G, S, h]`."""
    return x.unflatten(2, (n_groups, -1)).transpose(1, 2).flatten(0, 1).contiguous()


def group_lse(lse: Tensor, n_groups: int) -> Tensor:
    """`lse` for a backward pass: +inf for a row without visible keys, which makes its probabilities exactly zero."""
    return group_rows(lse.masked_fill(lse == float("-inf"), float("inf")), n_groups)


def ungroup_queries(x: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """`[B*G, S, h, D]` (or without `D`) back to `[B,S,Hq,D]`."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3).to(dtype).contiguous()


def group_keys(x: Tensor) -> Tensor:
    """`[B,N,G,D]` to `[B*G, N, D]`."""
    return x.to(compute_dtype(x)).transpose(1, 2).flatten(0, 1).contiguous()


def ungroup_keys(x: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """`[B*G, N, D]` back to `[B,N,G,D]`; always a copy, because an op's output must start at its storage."""
    x = x.unflatten(0, (batch, -1)).transpose(1, 2)
    return x.to(dtype, memory_format=torch.contiguous_format, copy=True)
