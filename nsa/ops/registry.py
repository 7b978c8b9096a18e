"""How an op is registered with torch: schema, body, fake and autograd.

By `torch.library.Library` itself: the wrappers of `custom_op` and `register_autograd` cost 0.3 ms of host time per
call. An op's body runs with real tensors, below autograd. Forward and backward are ops of their own, so that a compiled
graph holds both and nothing else of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nsa.dtypes import sum_dtype
from nsa.once import differentiable_once

LIBRARY = torch.library.Library("nsa", "DEF")
PLAIN = (Tensor, torch.nn.Parameter)
R = TypeVar("R")


def schema_arguments(tensors: str, optional: str = "", integers: Sequence[str] = (), floats: str = "") -> str:
    """Names, separated by spaces, as arguments in torch's schema language. Every op ends in `backend` and `strict`."""
    kinds = {"Tensor": tensors.split(), "Tensor?": optional.split(), "int": integers, "float": floats.split()}
    named = [f"{kind} {name}" for kind, names in kinds.items() for name in names]
    return ", ".join([*named, "str backend", "bool strict"])


class Op(Generic[R]):
    """One op of ours, `nsa::name`. Called from Python in plain eager mode it goes straight to its body, or to its
    autograd function, without crossing torch's dispatcher. Whatever observes or transforms ops (compilation, dispatch
    modes, tensor subclasses, the profiler) sees `nsa::name`."""

    def __init__(
        self, name: str, schema: str, body: Callable[..., R], fake: Callable[..., R], *, outputs: int = 1
    ) -> None:
        returns = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
        LIBRARY.define(f"{name}({schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"nsa::{name}", fake, lib=LIBRARY)
        self.name, self.body = name, body
        self.overload = getattr(torch.ops.nsa, name).default
        self.function: type[torch.autograd.Function] | None = None

    def entry(self, x: Any) -> Callable[..., R]:
        """The function to call for a first argument `x`."""
        if torch.compiler.is_compiling() or not is_plain(x):
            return self.overload
        if self.function is not None and (torch.is_grad_enabled() or forward_ad._current_level >= 0):
            return self.function.apply
        return self.body

    def __call__(self, *args: Any) -> R:
        return self.entry(args[0])(*args)

    def differentiate(
        self, backward: Op[Any], keep: Callable[[tuple[Any, ...], Any], tuple[Any, ...]], *, results: int = 1
    ) -> None:
        """Let `backward` compute the gradients of the first inputs from those of the first `results` outputs.

        `keep(inputs, output)` returns the arguments that `backward` takes after these gradients: tensors, then others.
        Gradients of gradients and forward-mode derivatives raise: there are no formulas for them.
        """
        op = self
        once = f"nsa.ops.{self.name} is differentiable once. For second derivatives, use nsa.reference"
        n_inputs = len(self.overload._schema.arguments)
        n_saved = sum("Tensor" in str(x.type) for x in backward.overload._schema.arguments) - results

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                if is_plain(inputs[0]):
                    output = op.body(*inputs)
                else:
                    with torch._C._AutoDispatchBelowAutograd():
                        output = op.overload(*inputs)
                kept = keep(inputs, output)
                ctx.save_for_backward(*kept[:n_saved])
                ctx.rest = kept[n_saved:]
                if isinstance(output, tuple):
                    ctx.mark_non_differentiable(*output[results:])
                # A gradient that does not come stays None: zeros would be computed with.
                ctx.set_materialize_grads(False)
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> Any:
                given = [x if x is None else x.contiguous() for x in grads[:results]]
                if all(x is None for x in given):
                    return (None,) * n_inputs
                # Saved tensors are read once: activation checkpointing recomputes them, and refuses to a second time.
                saved = ctx.saved_tensors
                with torch.no_grad():
                    found = backward(*given, *saved, *ctx.rest)
                found = (found,) if isinstance(found, Tensor) else found
                if torch.is_grad_enabled():
                    found = differentiable_once(once, found, (*saved, *grads))
                return (*found, *[None] * (n_inputs - len(found)))

        def dispatched(*inputs: Any) -> Any:
            """Compiled code runs below autograd, and still arrives here."""
            return (op.body if op.entry(inputs[0]) is op.body else Differentiable.apply)(*inputs)

        Differentiable.__name__ = Differentiable.__qualname__ = self.name
        LIBRARY.impl(self.name, dispatched, "Autograd")
        self.function = Differentiable


def is_plain(x: Any) -> bool:
    """Whether nothing but autograd observes the ops on `x`, which has data."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    return type(x) in PLAIN and not (modes or x.is_meta or torch._C._is_tracing() or torch.autograd._profiler_enabled())


def empty_output(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """A branch's `(o, lse)`."""
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=sum_dtype(q))


def empty_indices(q: Tensor, k: Tensor, n_select: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k.shape[2], n_select, dtype=torch.int32)


def fake_gradients(first: int, count: int) -> Callable[..., tuple[Tensor, ...]]:
    """The fake of a backward op: gradients of `count` of its arguments, from `first` on."""
    return lambda *args: tuple(x.new_empty(x.shape) for x in args[first : first + count])
