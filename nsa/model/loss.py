"""The language-model loss without ever holding the logits of a whole batch.

The logits of a 125M model at `S = 2048, B = 8` are 3.3 GB in fp32, and a loss needs several copies. Here a few rows at
a time are multiplied, reduced to their loss and turned into their gradient, all in the forward; the backward only
scales what is already there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100

# Rows whose logits are alive at once: enough to fill a GPU's matrix units, 0.4 GB of fp32 at a vocabulary of 50k.
ROWS = 2048

# Columns are added up to a multiple of this and masked: a matrix whose rows do not start on an aligned address, as a
# vocabulary of 50257 gives, falls off the fast path of the matrix units.
ALIGNMENT = 64


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, rows: int = ROWS) -> Tensor:
    """Mean cross-entropy of `x [..., D] @ weight[V, D].T` against `targets [...]`; targets of -100 do not count.

    Products are taken in `x`'s dtype, softmax and sums in fp32 or wider.
    """
    x, targets = x.flatten(0, -2), targets.flatten()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return ChunkedCrossEntropy.apply(x, weight, targets, rows)
    table = aligned(weight, x.dtype)
    total = sum(
        row_losses(logp, t).sum() for _, t, logp in log_softmax_chunks(x, table, weight.shape[0], targets, rows)
    )
    return total / counted(targets)


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        vocabulary = weight.shape[0]
        table = aligned(weight, x.dtype)
        grad_x = torch.empty_like(x)
        grad_table = torch.zeros(table.shape, dtype=sum_dtype(x), device=x.device)
        total = torch.zeros((), dtype=sum_dtype(x), device=x.device)
        for chunk, t, logp in log_softmax_chunks(x, table, vocabulary, targets, rows):
            total = total + row_losses(logp, t).sum()
            # d loss / d logits = softmax - one_hot. Rows that do not count are masked in the products' narrow side.
            grad = logp.exp_()
            grad.scatter_add_(1, t.clamp_min(0)[:, None], -torch.ones_like(grad[:, :1]))
            grad = grad.to(x.dtype)
            counts = (t != IGNORE)[:, None]
            grad_x[chunk] = (grad @ table) * counts
            grad_table += grad.T @ (x[chunk] * counts)
        count = counted(targets)
        ctx.save_for_backward(grad_x, grad_table[:vocabulary].to(weight.dtype), count)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_weight, count = ctx.saved_tensors
        # Divided here, not in the forward: a softmax over many rows would underflow in fp16.
        scale = grad_loss / count
        return grad_x * scale.to(grad_x.dtype), grad_weight * scale.to(grad_weight.dtype), None, None


def log_softmax_chunks(
    x: Tensor, table: Tensor, vocabulary: int, targets: Tensor, rows: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """`(rows, targets, log-probabilities)` chunk by chunk."""
    for first in range(0, x.shape[0], rows):
        chunk = slice(first, first + rows)
        logits = F.linear(x[chunk], table)
        logits[:, vocabulary:] = float("-inf")
        yield chunk, targets[chunk], logits.log_softmax(dim=-1, dtype=sum_dtype(x))


def row_losses(logp: Tensor, targets: Tensor) -> Tensor:
    picked = logp.gather(1, targets.clamp_min(0)[:, None]).squeeze(1)
    return -picked.where(targets != IGNORE, 0.0)


def aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The head's table in `dtype`, with rows of zeros up to a multiple of `ALIGNMENT`."""
    return F.pad(weight.to(dtype), (0, 0, 0, -weight.shape[0] % ALIGNMENT))


def counted(targets: Tensor) -> Tensor:
    return (targets != IGNORE).sum().clamp_min(1)


def sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
