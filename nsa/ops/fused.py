"""The whole attention as one op and one backward op: selection, the three branches and the gated sum.

Together, because their gradients share `do` and `dq`: autograd would hold three copies of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nsa import checks
from nsa.backends.routing import router
from nsa.backends.stages import plan_of
from nsa.once import differentiable_once
from nsa.ops.registry import Op, empty_indices, empty_output, fake_gradients, schema_arguments
from nsa.replay import BothPasses, Results, can_replay, situation
from nsa.sequences import Saved

INPUTS = "q k_cmp v_cmp k_sel v_sel k_win v_win gates"
OUTPUTS = "indices o_cmp lse_cmp o_sel lse_sel o_win lse_win"
ATTENTION_PLACES = "cu_seqlens q_start window_start"
REST = (ATTENTION_PLACES, "block stride select_block n_select n_init n_local window", "scale")
N_INPUTS, N_PLACES = 8, 3
ATTENTION_ONCE = "nsa.ops.attention is differentiable once. For second derivatives, use nsa.reference"


def run_forward(*args: Any) -> tuple[Tensor, ...]:
    inputs, places, rest = args[:N_INPUTS], args[N_INPUTS : N_INPUTS + N_PLACES], args[N_INPUTS + N_PLACES :]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    plan, branches = plan_of(inputs, places, rest, backward=False)
    compressed, selection, selected, sliding = branches
    if checks.can_read_values(q, rest[-1]):
        checks.check_attention_values(inputs, branches, rest[-1])
    o_cmp, lse_cmp = plan.compressed(q, k_cmp, v_cmp, compressed)
    indices = plan.select(q, k_cmp, lse_cmp, selection)
    o_sel, lse_sel = plan.selected(q, k_sel, v_sel, indices, selected)
    o_win, lse_win = plan.sliding(q, k_win, v_win, sliding)
    o = plan.combine(o_cmp, o_sel, o_win, gates)
    return o.contiguous(), indices, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win


def fake_forward(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (o, _), *branches = (empty_output(q, k_cmp, v_cmp) for _ in range(4))
    return o, empty_indices(q, k_cmp, rest[11]), *(x for pair in branches for x in pair)


def run_backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """`args`: the inputs, the outputs of the forward pass but the first, and the rest."""
    inputs, outputs, args = args[:N_INPUTS], args[N_INPUTS : N_INPUTS + 7], args[N_INPUTS + 7 :]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    indices, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win = outputs
    plan, branches = plan_of(inputs, args[:N_PLACES], args[N_PLACES:], backward=True)
    compressed, _, selected, sliding = branches
    # The gates' gradients are also what a softmax's gradient is made of.
    outputs, lses = (o_cmp, o_sel, o_win), (lse_cmp, lse_sel, lse_win)
    d_gates, (to_cmp, to_sel, to_win) = plan.combine(do, outputs, lses, gates, k_sel.shape[2])
    # One dq for all three: the first makes it, the others add to it.
    saved = Saved(q, k_sel, v_sel, o_sel, lse_sel, indices)
    dq, dk_sel, dv_sel = plan.selected(to_sel, saved, selected)
    saved = Saved(q, k_win, v_win, o_win, lse_win)
    dq, dk_win, dv_win = plan.sliding(to_win._replace(dq=dq), saved, sliding)
    saved = Saved(q, k_cmp, v_cmp, o_cmp, lse_cmp)
    dq, dk_cmp, dv_cmp = plan.compressed(to_cmp._replace(dq=dq), saved, compressed)
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, d_gates.contiguous()


ATTENTION: Op[tuple[Tensor, ...]] = Op(
    "attention", schema_arguments(INPUTS, *REST), run_forward, fake_forward, outputs=8
)
ATTENTION_BACKWARD: Op[tuple[Tensor, ...]] = Op(
    "attention_backward",
    schema_arguments(f"do {INPUTS} {OUTPUTS}", *REST),
    run_backward,
    fake_gradients(1, N_INPUTS),
    outputs=8,
)
# Only `o` is a result; the other outputs are there for the backward pass, and for whoever looks at the selection.
ATTENTION.differentiate(
    ATTENTION_BACKWARD, lambda inputs, outputs: (*inputs[:N_INPUTS], *outputs[1:], *inputs[N_INPUTS:])
)


class AttentionReplay(BothPasses):
    """Both passes for inputs of one layout, as graphs."""

    def __init__(self, inputs: Sequence[Tensor], rest: tuple[Any, ...], differentiable: bool) -> None:
        self.rest = rest

        def run(*inputs: Tensor) -> Results:
            o, indices, *saved = run_forward(*inputs, *[None] * N_PLACES, *rest)
            return (o, indices, saved) if differentiable else (o, indices)

        super().__init__(run, inputs)

    def run_backward(self, do: Tensor, *kept: Tensor) -> tuple[Sequence[Tensor]]:
        pack = self.forward.packs[2]
        assert pack is not None
        return (run_backward(do, *kept[:-1], *pack.views(kept[-1]), *[None] * N_PLACES, *self.rest),)

    def replay_backward(self, do: Tensor, *kept: Tensor) -> Sequence[Tensor]:
        """`kept`: the inputs, the selected blocks, and the block of the other outputs."""
        backward = self.find_backward(self.run_backward, [do, *kept])
        if backward is None:
            (grads,) = self.run_backward(do.contiguous(), *kept)
            return grads
        (block,) = backward(do, *kept)
        pack = backward.packs[0]
        assert pack is not None
        return pack.views(block)


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
            return (None,) * (1 + N_INPUTS)
        kept = ctx.saved_tensors
        with torch.no_grad():
            grads = ctx.replay.replay_backward(do, *kept)
        if torch.is_grad_enabled():
            grads = differentiable_once(ATTENTION_ONCE, grads, (*kept, do))
        return (None, *grads)


def replay_attention(inputs: tuple[Tensor, ...], rest: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """The attention of fixed-length sequences and the selected blocks; None where this call is not to be replayed.

    `rest`: the arguments of `nsa::attention` after `inputs` and the places of queries.
    """
    q, differentiable = inputs[0], torch.is_grad_enabled()
    # A compiler cannot look into what follows.
    if ATTENTION.entry(q) is ATTENTION.overload or forward_ad._current_level >= 0 or not can_replay(q, *rest[-2:]):
        return None
    layouts = [(x.shape, x.dtype) for x in inputs]
    make = partial(AttentionReplay, inputs, rest, differentiable)
    found: AttentionReplay | None = router().recordings.find((*situation(q), *rest, *layouts), make)
    if found is None:
        return None
    o, indices = ReplayAttention.apply(found, *inputs) if differentiable else found.forward(*inputs)
    return o, indices
