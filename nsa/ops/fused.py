"""The whole attention as one op and one backward op: selection, the three branches and the gate.

Together, because their gradients share `do` and `dq`: autograd would hold three copies of either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa import checks
from nsa.backends.routing import Stage
from nsa.ops import registry
from nsa.ops.branches import combine_shape
from nsa.ops.registry import ROUTING, Op, empty_gradients, empty_output, shape_of, stage
from nsa.sequences import Compressed, Saved, Selected, Selection, Sequences, Sliding, Upstream

TENSORS = "Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor k_sel, Tensor v_sel, Tensor k_win, Tensor v_win, Tensor gates"
OUTPUTS = "Tensor o_cmp, Tensor lse_cmp, Tensor o_sel, Tensor lse_sel, Tensor o_win, Tensor lse_win"
PLACES = "Tensor? cu_seqlens, Tensor? q_start, Tensor? window_start"
INTEGERS = "int block, int stride, int select_block, int n_select, int n_init, int n_local, int window"
REST = f"{PLACES}, {INTEGERS}, float scale, {ROUTING}"
N_INPUTS, N_PLACES, N_REST = 8, 3, 13


class Plan:
    """Who computes each stage of one problem, forward or backward; of fixed-length sequences also what each branch
    sees, which then follows from shapes alone."""

    def __init__(
        self, inputs: tuple[Tensor, ...], places: tuple[Tensor | None, ...], rest: tuple[Any, ...], *, backward: bool
    ) -> None:
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, _ = inputs
        *_, backend, strict = rest
        kind = {"packed": places[0] is not None, "cached": places[1] is not None}
        way = "backward" if backward else "forward"

        def find(op: str, function: str, shape: tuple[int, ...], **flags: bool) -> Stage:
            return stage(op, function, shape, q, backend, strict, backward=backward, **flags)

        self.compressed = find("compressed", f"compressed_{way}", shape_of(q, k_cmp, v_cmp), **kind)
        self.selected = find("selected", f"selected_{way}", shape_of(q, k_sel, v_sel), **kind)
        self.sliding = find("sliding", f"sliding_{way}", shape_of(q, k_win, v_win), **kind)
        rows = (*q.shape[:3], v_cmp.shape[3])
        self.combine = find("combine", "gates_backward" if backward else "combine_forward", combine_shape(rows))
        if not backward:
            self.select = find("scores", "select_blocks", shape_of(q, k_cmp, k_cmp), **kind)
        self.branches = None if any(x is not None for x in places) else branches_of(q, places, rest)


def branches_of(
    q: Tensor, places: tuple[Tensor | None, ...], rest: tuple[Any, ...]
) -> tuple[Compressed, Selection, Selected, Sliding]:
    cu_seqlens, q_start, window_start = places
    block, stride, select_block, n_select, n_init, n_local, window, scale, _, _ = rest
    # A cache hands out fewer sliding keys than it has selected ones: the queries start elsewhere in them.
    sequences = Sequences(q.shape[0], q.shape[1], q.device, cu_seqlens, q_start)
    in_window = Sequences(q.shape[0], q.shape[1], q.device, cu_seqlens, window_start)
    return (
        Compressed(sequences, block, stride, scale),
        Selection(sequences, block, stride, select_block, n_select, n_init, n_local, scale),
        Selected(sequences, select_block, scale),
        Sliding(in_window if window_start is not q_start else sequences, window, scale),
    )


def plan_of(
    inputs: tuple[Tensor, ...], places: tuple[Tensor | None, ...], rest: tuple[Any, ...], *, backward: bool
) -> tuple[Plan, tuple[Compressed, Selection, Selected, Sliding]]:
    """Made once for each problem: a repeated call costs a look-up."""
    q, k_cmp, v_cmp, k_sel, _, k_win, _, _ = inputs
    kind = (backward, places[0] is None, places[1] is None)
    key = (q.shape, k_cmp.shape, v_cmp.shape[3], k_sel.shape[1], k_win.shape[1], q.dtype, q.device, kind, rest)
    plans = registry.router().plans
    plan = plans.get(key)
    if plan is None:
        plan = registry.router().remember(plans, key, Plan(inputs, places, rest, backward=backward))
    return plan, plan.branches or branches_of(q, places, rest)


def run_forward(*args: Any) -> tuple[Tensor, ...]:
    inputs, places, rest = args[:N_INPUTS], args[N_INPUTS : N_INPUTS + N_PLACES], args[N_INPUTS + N_PLACES :]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    plan, (compressed, selection, selected, sliding) = plan_of(inputs, places, rest, backward=False)
    if checks.can_read_values(q, rest[-1]):
        check_values(inputs, places, compressed, sliding, rest[-1])
    o_cmp, lse_cmp = plan.compressed(q, k_cmp, v_cmp, compressed)
    indices = plan.select(q, k_cmp, lse_cmp, selection)
    o_sel, lse_sel = plan.selected(q, k_sel, v_sel, indices, selected)
    o_win, lse_win = plan.sliding(q, k_win, v_win, sliding)
    o = plan.combine(o_cmp, o_sel, o_win, gates)
    return o.contiguous(), indices, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win


def check_values(
    inputs: tuple[Tensor, ...],
    places: tuple[Tensor | None, ...],
    compressed: Compressed,
    sliding: Sliding,
    strict: bool,
) -> None:
    q, k_cmp, _, k_sel, _, k_win, _, gates = inputs
    checks.check_branch_values(compressed, k_cmp, "k_cmp", [], strict)
    checks.check_branch_values(sliding, k_win, "k_win", [], strict, start="window_start")
    checks.check_q_start_values(places[1], q.shape[1], k_sel.shape[1], "k_sel", strict)
    checks.check_gates_values(gates, strict)
    names = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
    checks.check_finite(strict, **dict(zip(names, inputs, strict=True)))


def fake_forward(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    n_select = rest[11]
    indices = q.new_empty(q.shape[0], q.shape[1], k_cmp.shape[2], n_select, dtype=torch.int32)
    (o, _), *branches = (empty_output(q, v_cmp) for _ in range(4))
    return o, indices, *(x for pair in branches for x in pair)


def run_backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """`args`: the inputs, the outputs of the forward pass but the first, and the rest."""
    inputs, outputs, args = args[:N_INPUTS], args[N_INPUTS : N_INPUTS + 7], args[N_INPUTS + 7 :]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    indices, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win = outputs
    plan, branches = plan_of(inputs, args[:N_PLACES], args[N_PLACES:], backward=True)
    compressed, _, selected, sliding = branches
    # The gates' gradients are also what a softmax's gradient is made of.
    products = plan.combine(do, o_cmp, o_sel, o_win, gates)
    g_cmp, g_sel, g_win = gates.unbind(dim=-1)
    p_cmp, p_sel, p_win = products.unbind(dim=-1)
    # One dq for all three: the first makes it, the others add to it.
    saved = Saved(q, k_sel, v_sel, o_sel, lse_sel, indices)
    dq, dk_sel, dv_sel = plan.selected(Upstream(do, None, g_sel, p_sel), saved, selected)
    saved = Saved(q, k_win, v_win, o_win, lse_win)
    dq, dk_win, dv_win = plan.sliding(Upstream(do, None, g_win, p_win, dq), saved, sliding)
    saved = Saved(q, k_cmp, v_cmp, o_cmp, lse_cmp)
    dq, dk_cmp, dv_cmp = plan.compressed(Upstream(do, None, g_cmp, p_cmp, dq), saved, compressed)
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, products.to(gates.dtype).contiguous()


ATTENTION = Op(
    "attention",
    f"{TENSORS}, {REST}",
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    run_forward,
    fake_forward,
)
ATTENTION_BACKWARD = Op(
    "attention_backward",
    f"Tensor do, {TENSORS}, Tensor indices, {OUTPUTS}, {REST}",
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    run_backward,
    lambda do, *inputs: empty_gradients(*inputs[:N_INPUTS]),
)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    places, ctx.rest = inputs[N_INPUTS : N_INPUTS + N_PLACES], inputs[N_INPUTS + N_PLACES :]
    ctx.save_for_backward(*inputs[:N_INPUTS], *output[1:], *places)
    # Only `o` is a result; the others are here for the backward pass, and for whoever looks at the selection.
    ctx.mark_non_differentiable(*output[1:])


def gradients(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * (N_INPUTS + N_REST)
    return (*ATTENTION_BACKWARD(do.contiguous(), *ctx.saved_tensors, *ctx.rest), *[None] * N_REST)


ATTENTION.differentiate(save, gradients)
