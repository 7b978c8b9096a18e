"""Gradients of the gated mixture, branch by branch, for backends that know plain gradients alone.

With `o = sum_b g_b * o_b` gate `b` gets the gradient `do . o_b`, branch `b` gets `g_b * do`, and all three add to the
same `dq`. A backend may define `gates_backward`, the gates' gradients `[B,S,Hq,3]` as exact as it sums, and
`gated_<op>_backward`, which takes `gate [B,S,Hq]`, the gate's gradient as `product`, which a softmax's gradient is made
of too, and `into`, the `dq` so far, and needs no pass over memory for them. What it does not define is made up here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

PREFIX = "gated_"


def function_of(backend: Any, name: str) -> Callable[..., Any]:
    """The backend's function of that name, or what stands for it."""
    own: Callable[..., Any] | None = getattr(backend, name, None)
    if own is not None:
        return own
    if name == "gates_backward":
        return lambda *args: backend.combine_backward(*args)[3]
    if name.startswith(PREFIX):
        return with_gate(getattr(backend, name.removeprefix(PREFIX)))
    raise AttributeError(f"backend {backend.name} has no {name}")


def with_gate(backward: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def gated(
        do: Tensor, *args: Any, gate: Tensor, product: Tensor, into: Tensor | None, **knobs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = backward(do * gate[..., None], *args, **knobs)
        return (dq if into is None else into.add_(dq)), dk, dv

    return gated
