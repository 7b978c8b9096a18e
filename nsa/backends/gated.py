"""Gradients of a gated branch, for backends whose backward passes do not fuse the gate.

Of `gate * o` the gradient of `o` is `gate * do`, and `dq` adds to that of the other branches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from nsa.sequences import Upstream

Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def gated_upstreams(do: Tensor, gates: Tensor, products: Tensor) -> tuple[Upstream, ...]:
    """One per branch, from `gates` and `products = sum(do * o)`, both `[B,S,Hq,3]`."""
    pairs = zip(gates.unbind(dim=-1), products.unbind(dim=-1), strict=True)
    return tuple(Upstream(do, None, gate, product) for gate, product in pairs)


def without_gate(backward: Backward) -> Backward:
    """A backward pass `(..., upstream, saved, branch)` without a gate as one that takes a gate and a `dq` to add to."""

    @wraps(backward)
    def run(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        *owner, upstream, saved, branch = args
        plain = upstream
        if upstream.gate is not None:
            plain = Upstream(upstream.do * upstream.gate[..., None], upstream.dlse)
        dq, dk, dv = backward(*owner, plain, saved, branch, **options)
        return (dq if upstream.dq is None else upstream.dq.add_(dq)), dk, dv

    return run
