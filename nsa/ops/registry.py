"""How an op is registered with torch: schema, body, fake and autograd.

By `torch.library.Library` itself: the wrappers of `custom_op` and `register_autograd` cost 0.3 ms of host time a call.
An op's body runs with real tensors, below autograd. Forward and backward are ops of their own, so that a compiled graph
holds both and nothing else of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.backends.problem import Problem
from nsa.backends.routing import Stage, router

LIBRARY = torch.library.Library("nsa", "DEF")

# What every op takes after its tensors and hyperparameters.
ROUTING = "str backend, bool strict"


def define(name: str, arguments: str, returns: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register `nsa::name`. Returns the op, to be called with all of its arguments by position."""
    LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nsa::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.nsa, name).default


def differentiate(
    op: Any, save: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Sequence[Tensor | None]]
) -> None:
    """Let `backward(ctx, *grads)` be the gradient of `op`; `save(ctx, inputs, output)` keeps what it needs.

    Gradients of gradients and forward-mode derivatives raise: there are no formulas for them.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*inputs)
            save(ctx, inputs, output)
            # A gradient that does not come stays None: zeros would be computed with.
            ctx.set_materialize_grads(False)
            return output

        @staticmethod
        @once_differentiable  # type: ignore[untyped-decorator]
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return backward(ctx, *grads)

    name = op._schema.name.removeprefix("nsa::")
    Differentiable.__name__ = Differentiable.__qualname__ = name
    LIBRARY.impl(name, Differentiable.apply, "Autograd")


def stage(
    op: str,
    function: str,
    shape: tuple[int, ...],
    like: Tensor,
    backend: str,
    strict: bool,
    *,
    backward: bool = False,
    packed: bool = False,
    cached: bool = False,
) -> Stage:
    """The function of the backend that runs `op` on a `shape` of `(batch, queries, keys, heads, groups, d_k, d_v)`.

    Found once for each problem: a repeated call costs a look-up.
    """
    stages = router().stages
    key = (op, function, shape, like.dtype, like.device, backend, strict, backward, packed, cached)
    found = stages.get(key)
    if found is None:
        names = ("batch", "n_queries", "n_keys", "n_heads", "n_groups", "d_k", "d_v")
        problem = Problem(
            op=op,
            dtype=like.dtype,
            device=like.device.type,
            backward=backward,
            packed=packed,
            cached=cached,
            **dict(zip(names, shape, strict=True)),
        )
        found = router().remember(key, Stage(router(), problem, function, backend, strict))
    return found


def shape_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """As `stage` takes it, of `q [B,S,Hq,Dk]`, `k [B,N,G,Dk]` and `v [B,N,G,Dv]`."""
    batch, n_queries, n_heads, d_k = q.shape
    return batch, n_queries, k.shape[1], n_heads, k.shape[2], d_k, v.shape[3]


def empty_output(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of `(o, lse)`."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def empty_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs)
