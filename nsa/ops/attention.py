"""The whole attention as one op and one backward op: selection, the three branches and the gate.

Together, because their gradients share `do` and `dq`: autograd would hold three copies of either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa import checks
from nsa.ops.branches import combine_shape
from nsa.ops.registry import ROUTING, define, differentiate, empty_gradients, empty_output, shape_of, stage
from nsa.sequences import Compressed, Saved, Selected, Selection, Sequences, Sliding, Upstream

TENSORS = "Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor k_sel, Tensor v_sel, Tensor k_win, Tensor v_win, Tensor gates"
OUTPUTS = "Tensor o_cmp, Tensor lse_cmp, Tensor o_sel, Tensor lse_sel, Tensor o_win, Tensor lse_win"
PLACES = "Tensor? cu_seqlens, Tensor? q_start, Tensor? window_start"
INTEGERS = "int block, int stride, int select_block, int n_select, int n_init, int n_local, int window"
REST = f"{PLACES}, {INTEGERS}, float scale, {ROUTING}"
N_INPUTS, N_PLACES, N_REST = 8, 3, 13


def sequences_of(
    q: Tensor, cu_seqlens: Tensor | None, q_start: Tensor | None, window_start: Tensor | None
) -> tuple[Sequences, Sequences]:
    """As the compressed and selected keys see them, and as the sliding ones do, which a cache starts later."""
    sequences = Sequences(q.shape[0], q.shape[1], q.device, cu_seqlens, q_start)
    if q_start is window_start:
        return sequences, sequences
    return sequences, Sequences(q.shape[0], q.shape[1], q.device, cu_seqlens, window_start)


def run_forward(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    window_start: Tensor | None,
    block: int,
    stride: int,
    select_block: int,
    n_select: int,
    n_init: int,
    n_local: int,
    window: int,
    scale: float,
    backend: str,
    strict: bool,
) -> tuple[Tensor, ...]:
    sequences, in_window = sequences_of(q, cu_seqlens, q_start, window_start)
    compressed = Compressed(sequences, block, stride, scale)
    sliding = Sliding(in_window, window, scale)
    if checks.can_read_values(q, strict):
        checks.check_branch_values(compressed, k_cmp, "k_cmp", [], strict)
        checks.check_branch_values(sliding, k_win, "k_win", [], strict, start="window_start")
        checks.check_q_start_values(q_start, q.shape[1], k_sel.shape[1], "k_sel", strict)
        checks.check_gates_values(gates, strict)
        checks.check_finite(strict, q=q, k_cmp=k_cmp, v_cmp=v_cmp, k_sel=k_sel, v_sel=v_sel, k_win=k_win, v_win=v_win)

    where = (q, backend, strict)
    kind: dict[str, bool] = {"packed": cu_seqlens is not None, "cached": q_start is not None}
    run = stage("compressed", "compressed_forward", shape_of(q, k_cmp, v_cmp), *where, **kind)
    o_cmp, lse_cmp = run(q, k_cmp, v_cmp, compressed)
    run = stage("scores", "select_blocks", shape_of(q, k_cmp, k_cmp), *where, **kind)
    selection = Selection(sequences, block, stride, select_block, n_select, n_init, n_local, scale)
    indices = run(q, k_cmp, lse_cmp, selection)
    run = stage("selected", "selected_forward", shape_of(q, k_sel, v_sel), *where, **kind)
    o_sel, lse_sel = run(q, k_sel, v_sel, indices, Selected(sequences, select_block, scale))
    run = stage("sliding", "sliding_forward", shape_of(q, k_win, v_win), *where, **kind)
    o_win, lse_win = run(q, k_win, v_win, sliding)
    run = stage("combine", "combine_forward", combine_shape(o_cmp), *where)
    o = run(o_cmp, o_sel, o_win, gates)
    return o.contiguous(), indices, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win


def fake_forward(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    n_select = rest[11]
    indices = q.new_empty(q.shape[0], q.shape[1], k_cmp.shape[2], n_select, dtype=torch.int32)
    (o, _), *branches = (empty_output(q, v_cmp) for _ in range(4))
    return o, indices, *(x for pair in branches for x in pair)


def run_backward(
    do: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    indices: Tensor,
    o_cmp: Tensor,
    lse_cmp: Tensor,
    o_sel: Tensor,
    lse_sel: Tensor,
    o_win: Tensor,
    lse_win: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    window_start: Tensor | None,
    block: int,
    stride: int,
    select_block: int,
    n_select: int,
    n_init: int,
    n_local: int,
    window: int,
    scale: float,
    backend: str,
    strict: bool,
) -> tuple[Tensor, ...]:
    sequences, in_window = sequences_of(q, cu_seqlens, q_start, window_start)
    where = (q, backend, strict)
    kind: dict[str, bool] = {"packed": cu_seqlens is not None, "cached": q_start is not None, "backward": True}

    # The gates' gradients are also what a softmax's gradient is made of.
    run = stage("combine", "gates_backward", combine_shape(o_cmp), *where, backward=True)
    products = run(do, o_cmp, o_sel, o_win, gates)
    g_cmp, g_sel, g_win = gates.unbind(dim=-1)
    p_cmp, p_sel, p_win = products.unbind(dim=-1)
    # One dq for all three: the first makes it, the others add to it.
    run = stage("selected", "selected_backward", shape_of(q, k_sel, v_sel), *where, **kind)
    saved = Saved(q, k_sel, v_sel, o_sel, lse_sel, indices)
    dq, dk_sel, dv_sel = run(Upstream(do, None, g_sel, p_sel), saved, Selected(sequences, select_block, scale))
    run = stage("sliding", "sliding_backward", shape_of(q, k_win, v_win), *where, **kind)
    saved = Saved(q, k_win, v_win, o_win, lse_win)
    dq, dk_win, dv_win = run(Upstream(do, None, g_win, p_win, dq), saved, Sliding(in_window, window, scale))
    run = stage("compressed", "compressed_backward", shape_of(q, k_cmp, v_cmp), *where, **kind)
    saved = Saved(q, k_cmp, v_cmp, o_cmp, lse_cmp)
    dq, dk_cmp, dv_cmp = run(Upstream(do, None, g_cmp, p_cmp, dq), saved, Compressed(sequences, block, stride, scale))
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, products.to(gates.dtype).contiguous()


ATTENTION = define(
    "attention",
    f"{TENSORS}, {REST}",
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    run_forward,
    fake_forward,
)
ATTENTION_BACKWARD = define(
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


differentiate(ATTENTION, save, gradients)
