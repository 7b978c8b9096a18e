"""The reference as a backend: its forward, and autograd through a second forward as backward.

Used for `backend="reference"` and parity runs. It builds full score matrices, so it is for short sequences only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nsa import reference
from nsa.backends.gated import gated_upstreams, without_gate
from nsa.backends.problem import Problem
from nsa.sequences import Pooling, Saved, Selection, Upstream

name = "reference"

combine_forward = reference.combine


def supports(problem: Problem) -> str | None:
    """Return None: every problem is supported."""
    return None


def arguments_of(branch: Any) -> dict[str, Any]:
    """A branch object as keyword arguments of a function of `nsa.reference`."""
    named = {field.name: getattr(branch, field.name) for field in fields(branch) if field.name != "sequences"}
    named["cu_seqlens"] = branch.sequences.cu_seqlens
    return named if isinstance(branch, Pooling) else {**named, "q_start": branch.sequences.q_start}


def select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, selection: Selection) -> Tensor:
    return reference.select_blocks(q, k_cmp, lse, **arguments_of(selection))


def compress_mean_forward(x: Tensor, pooling: Pooling) -> Tensor:
    return reference.compress_mean(x, **arguments_of(pooling))


def gather_blocks_forward(x: Tensor, position: Tensor, pooling: Pooling) -> Tensor:
    return reference.gather_blocks(x, position, **arguments_of(pooling))


def attention_forward(attention: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Contiguous outputs, as the ops' fakes promise; with one head per group einsum returns others."""

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        *tensors, branch = args
        o, lse = attention(*tensors, **arguments_of(branch))
        return o.contiguous(), lse.contiguous()

    return forward


compressed_forward = attention_forward(reference.compressed_attention)
selected_forward = attention_forward(reference.selected_attention)
sliding_forward = attention_forward(reference.sliding_attention)


def vjp(
    forward: Callable[..., Any], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...], *fixed: Tensor, **arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of `inputs`; `torch.func.vjp`, because autograd does not record inside the body of an op."""
    pullback = torch.func.vjp(lambda *leaves: forward(*leaves, *fixed, **arguments), *inputs)[1]
    return tuple(g.contiguous() for g in pullback(grads if len(grads) > 1 else grads[0]))


def attention_backward(attention: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    @without_gate
    def backward(upstream: Upstream, saved: Saved, branch: Any) -> tuple[Tensor, Tensor, Tensor]:
        grads = (upstream.do, torch.zeros_like(saved.lse) if upstream.dlse is None else upstream.dlse)
        fixed = () if saved.indices is None else (saved.indices,)
        dq, dk, dv = vjp(attention, (saved.q, saved.k, saved.v), grads, *fixed, **arguments_of(branch))
        return dq, dk, dv

    return backward


compressed_backward = attention_backward(reference.compressed_attention)
selected_backward = attention_backward(reference.selected_attention)
sliding_backward = attention_backward(reference.sliding_attention)


def combine_backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_cmp, d_sel, d_win, d_gates = vjp(reference.combine, (o_cmp, o_sel, o_win, gates), (do,))
    return d_cmp, d_sel, d_win, d_gates


def prepare_backward(
    do: Tensor, outputs: Sequence[Tensor], lses: Sequence[Tensor], gates: Tensor, n_groups: int
) -> tuple[Tensor, tuple[Upstream, ...]]:
    o_cmp, o_sel, o_win = outputs
    *_, products = combine_backward(do, o_cmp, o_sel, o_win, gates)
    return products, gated_upstreams(do, gates, products)


# Both compressions are linear: their gradients do not depend on the input, and nothing is saved for them.


def compress_mean_backward(dout: Tensor, pooling: Pooling) -> Tensor:
    batch, _, groups, head_dim = dout.shape
    x = dout.new_zeros(batch, pooling.sequences.length, groups, head_dim)
    (dx,) = vjp(reference.compress_mean, (x,), (dout,), **arguments_of(pooling))
    return dx


def gather_blocks_backward(dout: Tensor, pooling: Pooling) -> tuple[Tensor, Tensor]:
    batch, _, groups, block_dim = dout.shape
    position = dout.new_zeros(pooling.block, block_dim // pooling.block)
    x = dout.new_zeros(batch, pooling.sequences.length, groups, position.shape[1])
    dx, dposition = vjp(reference.gather_blocks, (x, position), (dout,), **arguments_of(pooling))
    return dx, dposition
