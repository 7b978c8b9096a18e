"""`nsa.ops.attention` of small problems in eager loops, as CUDA graphs: see `replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nsa.backends.routing import router
from nsa.once import differentiable_once
from nsa.replay import MAX_ATTENTION, BothPasses, Results, can_replay, situation

ONCE_ONLY_ATTENTION = "nsa.ops.attention is differentiable once. For second derivatives, use nsa.reference"

Passes = tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]


class AttentionReplay(BothPasses):
    """Both passes for inputs of one layout, as graphs."""

    def __init__(self, passes: Passes, inputs: Sequence[Tensor], rest: tuple[Any, ...], differentiable: bool) -> None:
        forward, self.differentiate = passes
        # Fixed-length sequences have no `cu_seqlens`, `q_start` and `window_start`.
        self.rest = (None, None, None, *rest)

        def run(*inputs: Tensor) -> Results:
            o, indices, *saved = forward(*inputs, *self.rest)
            return (o, indices, saved) if differentiable else (o, indices)

        super().__init__(run, inputs)

    def run_backward(self, do: Tensor, *kept: Tensor) -> tuple[Sequence[Tensor]]:
        pack = self.forward.packs[2]
        assert pack is not None
        return (self.differentiate(do, *kept[:-1], *pack.tensors(kept[-1]), *self.rest),)

    def replay_backward(self, do: Tensor, *kept: Tensor) -> Sequence[Tensor]:
        """`kept`: the inputs, the selected blocks, and the block of the other outputs."""
        backward = self.find_backward(self.run_backward, [do, *kept])
        if backward is None:
            (grads,) = self.run_backward(do.contiguous(), *kept)
            return grads
        (block,) = backward(do, *kept)
        pack = backward.packs[0]
        assert pack is not None
        return pack.tensors(block)


class ReplayAttention(torch.autograd.Function):
    """The attention of `inputs`: `o [B,S,Hq,Dv]`, and the indices of the selected blocks."""

    @staticmethod
    def forward(ctx: Any, replay: AttentionReplay, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        o, indices, block = replay.forward(*inputs)
        ctx.replay = replay
        ctx.save_for_backward(*inputs, indices, block)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return o, indices

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * len(ctx.needs_input_grad)
        kept = ctx.saved_tensors
        with torch.no_grad():
            grads = ctx.replay.replay_backward(do, *kept)
        if torch.is_grad_enabled():
            grads = differentiable_once(ONCE_ONLY_ATTENTION, grads, (*kept, do))
        return (None, *grads)


def replay_attention(passes: Passes, inputs: tuple[Tensor, ...], rest: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """The attention of fixed-length sequences and the selected blocks; None where this call is not to be replayed.
    `passes`: the bodies of `nsa::attention` and its backward; `inputs`: their tensors; `rest`: what follows the places
    of queries."""
    q, differentiable = inputs[0], torch.is_grad_enabled()
    if forward_ad._current_level >= 0 or not can_replay(q, MAX_ATTENTION, *rest[-2:]):
        return None
    layouts = [(x.shape, x.dtype) for x in inputs]
    make = partial(AttentionReplay, passes, inputs, rest, differentiable)
    found: AttentionReplay | None = router().captures.find((*situation(q), *rest, *layouts), make)
    if found is None:
        return None
    o, indices = ReplayAttention.apply(found, *inputs) if differentiable else found.forward(*inputs)
    return o, indices
