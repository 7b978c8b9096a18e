"""Gradients that cannot be differentiated again, and say so.

`torch.autograd.function.once_differentiable` is not enough. It raises only where an incoming gradient requires grad,
and only if the engine comes by: asked for the gradient of given tensors, `torch.autograd.grad` leaves out every node
that does not lead to them. What is left out makes the second derivative wrong, not missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def differentiable_once(
    message: str, grads: Sequence[Tensor | None], sources: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """`grads` of a backward pass. With `create_graph`, to differentiate them with respect to `sources`, which they were
    computed from, raises a RuntimeError with `message`."""
    linked = [x for x in sources if x is not None and x.requires_grad]
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not linked:
        return tuple(grads)
    given = [x for x in grads if x is not None]
    handed_on = iter(DifferentiableOnce.apply(message, len(given), *given, *linked))
    return tuple(None if x is None else next(handed_on) for x in grads)


class DifferentiableOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, n_grads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(x.view_as(x) for x in tensors[:n_grads])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(ctx.message)
