"""Gradients that raise when they are differentiated again.

`torch.autograd.function.once_differentiable` is not enough. It raises only if an incoming gradient requires grad and
the engine visits the node: `torch.autograd.grad` skips every node that does not lead to the given tensors, and a second
derivative without it is wrong, not missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def differentiable_once(
    message: str, grads: Sequence[Tensor | None], sources: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """`grads`, which raise a RuntimeError with `message` when they are differentiated with respect to `sources`, the
    tensors that they were computed from."""
    linked = [x for x in sources if x is not None and x.requires_grad]
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not linked:
        return tuple(grads)
    tensors = [x for x in grads if x is not None]
    guarded = iter(DifferentiableOnce.apply(message, len(tensors), *tensors, *linked))
    return tuple(None if x is None else next(guarded) for x in grads)


class DifferentiableOnce(torch.autograd.Function):
    """The identity on the first `n_grads` tensors; its backward raises."""

    @staticmethod
    def forward(ctx: Any, message: str, n_grads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(x.view_as(x) for x in tensors[:n_grads])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(ctx.message)
