"""The layer's projections and MLPs as few autograd nodes, for eager mode on a GPU.

Left to autograd, a layer of ten Linears is some forty nodes, and the host needs longer to issue them than the GPU to
compute them. Here the projections with their rotation are one node, and each two-layer MLP is another, with the
gradients written out. The arithmetic is autograd's own, product by product. A compiler does better by itself, and
anything but a plain `nn.Linear` (adapters, quantized weights, hooks, autocast) takes the plain path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nsa.rope import Angles, fused

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def applies(x: Tensor, *linears: nn.Module) -> bool:
    """Whether `x` goes through plain Linears of its own dtype, eagerly, on a GPU whose kernels rotate."""
    if not fused(x) or torch.is_autocast_enabled("cuda") or type(x) not in (Tensor, nn.Parameter):
        return False
    return all(is_plain(linear, x.dtype) for linear in linears)


def is_plain(linear: nn.Module, dtype: torch.dtype) -> bool:
    if type(linear) is not nn.Linear or any(getattr(linear, hooks) for hooks in HOOKS):
        return False
    return type(linear.weight) is nn.Parameter and linear.weight.dtype == dtype


def project(
    x: Tensor,
    q_proj: nn.Linear,
    k_proj: nn.Linear,
    v_proj: nn.Linear,
    angles: Angles,
    n_groups: int,
    widths: tuple[int, int],
) -> tuple[Tensor, ...]:
    """Queries `[B,S,Hq,Dk]`, then the keys and the values of the branches, `[B,S,G,D]` each.

    Everything is rotated but values and, where branches have keys of their own, the first keys.
    """
    out: tuple[Tensor, ...] = Project.apply(x, q_proj.weight, k_proj.weight, v_proj.weight, *angles, n_groups, *widths)
    return out


class Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_q: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        cos: Tensor,
        sin: Tensor,
        groups: int,
        d_k: int,
        d_v: int,
    ) -> tuple[Tensor, ...]:
        from nsa.backends.triton.rope import rotate_one

        ctx.save_for_backward(x, w_q, w_k, w_v, cos, sin)
        ctx.set_materialize_grads(False)
        rows = x.reshape(-1, x.shape[-1])
        shape = x.shape[:2]
        q = torch.mm(rows, w_q.t()).view(*shape, -1, d_k)
        ks = torch.mm(rows, w_k.t()).view(*shape, -1, groups, d_k).unbind(2)
        vs = torch.mm(rows, w_v.t()).view(*shape, -1, groups, d_v).unbind(2)
        rotated = ks[1:] or ks
        ctx.n_plain = len(ks) - len(rotated)
        return (
            rotate_one(q, cos, sin, False),
            *ks[: ctx.n_plain],
            *(rotate_one(k, cos, sin, False) for k in rotated),
            *vs,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from nsa.backends.triton.rope import rotate_one

        x, w_q, w_k, w_v, cos, sin = ctx.saved_tensors
        n_kv = len(grads) // 2
        dks, dvs = grads[:n_kv], grads[n_kv:]
        rows = x.reshape(-1, x.shape[-1])
        needs_x, *needed = ctx.needs_input_grad[:4]

        def turned_back(g: Tensor | None) -> Tensor | None:
            return None if g is None else rotate_one(g, cos, sin, True)

        dks = (*dks[: ctx.n_plain], *map(turned_back, dks[ctx.n_plain :]))
        sides = ((w_q, turned_back(dq)), (w_k, beside(dks)), (w_v, beside(dvs)))
        dx, weights = None, []
        for (weight, dy), needs_weight in zip(sides, needed, strict=True):
            if dy is None:
                weights.append(None)
                continue
            dy = dy.view(rows.shape[0], -1)
            weights.append(torch.mm(dy.t(), rows) if needs_weight else None)
            if needs_x:
                dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
        return (None if dx is None else dx.view(x.shape), *weights, None, None, None, None, None)


def beside(grads: tuple[Tensor | None, ...]) -> Tensor | None:
    """Gradients of what one product gave, side by side: `[B,S,n,G,D]`; a missing one is zeros."""
    there = next((g for g in grads if g is not None), None)
    if there is None:
        return None
    return torch.stack([torch.zeros_like(there) if g is None else g for g in grads], dim=2)


def mlp(x: Tensor, inner: nn.Linear, outer: nn.Linear) -> Tensor:
    """`outer(silu(inner(x)))`."""
    out: Tensor = MLP.apply(x, inner.weight, inner.bias, outer.weight, outer.bias)
    return out


class MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, b_2: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        z = torch.addmm(b_1, rows, w_1.t())
        h = torch.nn.functional.silu(z)
        ctx.save_for_backward(rows, z, h, w_1, w_2)
        return torch.addmm(b_2, h, w_2.t()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, z, h, w_1, w_2 = ctx.saved_tensors
        needs_x, needs_inner, _, needs_outer, _ = ctx.needs_input_grad
        lead = dy.shape[:-1]
        dy = dy.reshape(-1, dy.shape[-1])
        outer = (torch.mm(dy.t(), h), dy.sum(0)) if needs_outer else (None, None)
        if not (needs_x or needs_inner):
            return None, None, None, *outer
        dz = torch.ops.aten.silu_backward(torch.mm(dy, w_2), z)
        inner = (torch.mm(dz.t(), rows), dz.sum(0)) if needs_inner else (None, None)
        return torch.mm(dz, w_1).view(*lead, -1) if needs_x else None, *inner, *outer
