"""The specification as a backend: forward as it stands, backward by autograd through a second forward.

It serves `backend="reference"` and parity runs. It builds whole score matrices: for short sequences only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa import reference
from nsa.backends.problem import Problem

name = "reference"

combine_forward = reference.combine
compress_mean_forward = reference.compress_mean
gather_blocks_forward = reference.gather_blocks
select_blocks = reference.select_blocks


def contiguous(forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """As the ops' fakes promise; with one head a group einsum leaves its own order."""

    def run(*args: Any, **knobs: Any) -> tuple[Tensor, Tensor]:
        o, lse = forward(*args, **knobs)
        return o.contiguous(), lse.contiguous()

    return run


compressed_forward = contiguous(reference.compressed_attention)
selected_forward = contiguous(reference.selected_attention)
sliding_forward = contiguous(reference.sliding_attention)


def supports(problem: Problem) -> str | None:
    """Everything is served, slowly."""
    return None


def gradients(
    forward: Callable[..., Any], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...], *fixed: Tensor, **knobs: Any
) -> tuple[Tensor, ...]:
    """`torch.func.vjp`, because the body of a custom op runs below the layer where plain autograd records."""
    pull_back = torch.func.vjp(lambda *leaves: forward(*leaves, *fixed, **knobs), *inputs)[1]
    return tuple(g.contiguous() for g in pull_back(grads if len(grads) > 1 else grads[0]))


def attention_gradients(forward: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def backward(
        do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, **knobs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = (do, torch.zeros_like(lse) if dlse is None else dlse)
        dq, dk, dv = gradients(forward, (q, k, v), grads, **knobs)
        return dq, dk, dv

    return backward


compressed_backward = attention_gradients(reference.compressed_attention)
sliding_backward = attention_gradients(reference.sliding_attention)


def selected_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    **knobs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = (do, torch.zeros_like(lse) if dlse is None else dlse)
    dq, dk, dv = gradients(reference.selected_attention, (q, k, v), grads, indices, **knobs)
    return dq, dk, dv


def combine_backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_cmp, d_sel, d_win, d_gates = gradients(reference.combine, (o_cmp, o_sel, o_win, gates), (do,))
    return d_cmp, d_sel, d_win, d_gates


# Both compressions are linear: their gradients are the same wherever they are taken, and nothing was kept for them.


def compress_mean_backward(dout: Tensor, *, length: int, **knobs: Any) -> Tensor:
    batch, _, groups, width = dout.shape
    (dx,) = gradients(reference.compress_mean, (dout.new_zeros(batch, length, groups, width),), (dout,), **knobs)
    return dx


def gather_blocks_backward(dout: Tensor, *, length: int, block: int, **knobs: Any) -> tuple[Tensor, Tensor]:
    batch, _, groups, width = dout.shape
    x = dout.new_zeros(batch, length, groups, width // block)
    position = dout.new_zeros(block, width // block)
    dx, dposition = gradients(reference.gather_blocks, (x, position), (dout,), block=block, **knobs)
    return dx, dposition
