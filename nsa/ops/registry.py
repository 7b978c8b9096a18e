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
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from nsa.backends.problem import Problem
from nsa.backends.routing import Stage, router

LIBRARY = torch.library.Library("nsa", "DEF")

PLAIN = (Tensor, torch.nn.Parameter)

# What every op takes after its tensors and hyperparameters.
ROUTING = "str backend, bool strict"


class Op:
    """One op of ours. Called as a Python function it takes the short way in plain eager mode: to its body, or to its
    autograd function, without crossing torch's dispatcher. Whatever watches or transforms ops (compilation, dispatch
    modes, tensor subclasses, the profiler) sees `nsa::name`.
    """

    def __init__(self, name: str, arguments: str, returns: str, body: Callable[..., Any], fake: Callable[..., Any]):
        LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"nsa::{name}", fake, lib=LIBRARY)
        self.name = name
        self.body = body
        self.overload = getattr(torch.ops.nsa, name).default
        self.function: type[torch.autograd.Function] | None = None

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() or not is_plain(args[0]):
            return self.overload(*args)
        if self.function is not None and (torch.is_grad_enabled() or forward_ad._current_level >= 0):
            return self.function.apply(*args)
        return self.body(*args)

    def differentiate(
        self, save: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Sequence[Tensor | None]]
    ) -> None:
        """Let `backward(ctx, *grads)` be the gradient; `save(ctx, inputs, output)` keeps what it needs.

        Gradients of gradients and forward-mode derivatives raise: there are no formulas for them.
        """
        op = self

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                if is_plain(inputs[0]):
                    output = op.body(*inputs)
                else:
                    with torch._C._AutoDispatchBelowAutograd():
                        output = op.overload(*inputs)
                save(ctx, inputs, output)
                # A gradient that does not come stays None: zeros would be computed with.
                ctx.set_materialize_grads(False)
                return output

            @staticmethod
            @once_differentiable  # type: ignore[untyped-decorator]
            def backward(ctx: Any, *grads: Tensor | None) -> Any:
                return backward(ctx, *grads)

        Differentiable.__name__ = Differentiable.__qualname__ = self.name
        LIBRARY.impl(self.name, Differentiable.apply, "Autograd")
        self.function = Differentiable


def is_plain(x: Any) -> bool:
    """Whether nothing but autograd looks at what happens to `x`."""
    return (
        type(x) in PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch.autograd._profiler_enabled()
    )


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
        found = router().remember(stages, key, Stage(router(), problem, function, backend, strict))
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
