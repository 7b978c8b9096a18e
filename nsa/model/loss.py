"""Cross-entropy of a language model without storing the logits of a whole batch.

The logits of a 125M model at `S = 2048, B = 8` are 3.3 GB in fp32, and a loss needs several copies. Here the forward
computes logits, loss and gradient for a few rows at a time; the backward only scales the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.config import IGNORED, require
from nsa.dtypes import sum_dtype
from nsa.once import differentiable_once

ONCE_ONLY = (
    "chunked_cross_entropy is differentiable once: its forward computes the gradient without autograd. For second "
    "derivatives, apply torch.nn.functional.cross_entropy to the logits"
)

# Rows whose logits are in memory at once: enough to fill a GPU, 0.4 GB of fp32 at a vocabulary of 50k.
CHUNK_ROWS = 2048

# The vocabulary is padded to a multiple of this and masked: unaligned rows, as with 50257 tokens, make matmuls slow.
ALIGNMENT = 64


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, rows: int = CHUNK_ROWS, strict: bool = False
) -> Tensor:
    """Mean cross-entropy of the logits `x @ weight.T`, differentiable once.

    Matmuls are in `x`'s dtype, softmax and sums in fp32 or fp64.

    Args:
        x: `[..., D]`.
        weight: `[V, D]`.
        targets: int64 `[...]`, each in `[0, V)`, or -100 for a position that is ignored.
        rows: Rows whose logits are in memory at once.
        strict: Check the values of `targets` on a GPU too, which synchronizes.

    Returns:
        A scalar. Where the values of `targets` are not checked (on a GPU without `strict`, and in compiled code), a
        target outside the vocabulary makes the loss and every gradient NaN.

    Raises:
        ValueError: `targets` is not shaped like `x` without its last dimension, or has a value outside the vocabulary.
    """
    shape = tuple(x.shape[:-1])
    require(tuple(targets.shape) == shape, "targets.shape", tuple(targets.shape), f"that of x without D, {shape}")
    x, targets, vocabulary = x.flatten(0, -2), targets.flatten(), weight.shape[0]
    if (strict or targets.device.type == "cpu") and not torch.compiler.is_compiling():
        wrong = targets[~is_valid(targets, vocabulary)]
        require(wrong.numel() == 0, "targets", wrong[:1].tolist(), f"{IGNORED}, or 0 to {vocabulary - 1}")
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        # Empty tensors that link a second derivative to x and weight without holding memory.
        links = x[:0].clone(), weight[:0].clone()
        return ChunkedCrossEntropy.apply(x, weight, targets, rows, *links)
    table = padded_table(weight, x.dtype)
    total = sum(row_losses(logp, t).sum() for _, t, logp in log_softmax_chunks(x, table, vocabulary, targets, rows))
    return total / n_counted(targets, vocabulary)


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, *links: Tensor) -> Tensor:
        vocabulary = weight.shape[0]
        table = padded_table(weight, x.dtype)
        grad_x = torch.empty_like(x)
        grad_table = torch.zeros(table.shape, dtype=sum_dtype(x), device=x.device)
        total = torch.zeros((), dtype=sum_dtype(x), device=x.device)
        for chunk, t, logp in log_softmax_chunks(x, table, vocabulary, targets, rows):
            total = total + row_losses(logp, t).sum()
            # d loss / d logits = softmax - one_hot. Ignored rows are masked in the smaller factors of the matmuls.
            grad = logp.exp_()
            grad.scatter_add_(1, as_index(t, grad), -torch.ones_like(grad[:, :1]))
            grad = grad.to(x.dtype)
            counts = (t != IGNORED)[:, None]
            grad_x[chunk] = (grad @ table) * counts
            grad_table += grad.T @ (x[chunk] * counts)
        count = n_counted(targets, vocabulary)
        ctx.save_for_backward(grad_x, grad_table[:vocabulary].to(weight.dtype), count, *links)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, count, *links = ctx.saved_tensors
        # Divided here, not in the forward, where it would underflow in fp16.
        scale = grad_loss / count
        with torch.no_grad():
            scaled = grad_x * scale.to(grad_x.dtype), grad_weight * scale.to(grad_weight.dtype)
        return *differentiable_once(ONCE_ONLY, scaled, (grad_loss, *links)), None, None, None, None


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
    picked = logp.gather(1, as_index(targets, logp)).squeeze(1)
    return -picked.where(targets != IGNORED, 0.0)


def as_index(targets: Tensor, logp: Tensor) -> Tensor:
    """`[rows, 1]`, clamped to the table; `n_counted` handles invalid targets."""
    return targets.clamp(0, logp.shape[1] - 1)[:, None]


def padded_table(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The head's weight in `dtype`, with rows of zeros up to a multiple of `ALIGNMENT`."""
    return F.pad(weight.to(dtype), (0, 0, 0, -weight.shape[0] % ALIGNMENT))


def is_valid(targets: Tensor, vocabulary: int) -> Tensor:
    return (targets == IGNORED) | ((targets >= 0) & (targets < vocabulary))


def n_counted(targets: Tensor, vocabulary: int) -> Tensor:
    """Targets that are not ignored, at least 1; NaN if any is invalid. Divides the loss and every gradient."""
    count = (targets != IGNORED).sum().clamp_min(1)
    # Counted, not `all()`: torch 2.11 fuses that with the softmax into a kernel that Triton 3.6 cannot compile.
    n_invalid = (~is_valid(targets, vocabulary)).sum()
    return torch.where(n_invalid == 0, count, float("nan"))
