"""The gated mixture as one op: its gradient is that of the three branches, which share `do` and `dq`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from nsa.backends.problem import Problem
from nsa.ops import checks, library
from nsa.ops.library import empty_gradients, mix, problem_of


@custom_op("nsa::mixture", mutates_args=())
def mixture(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    o_cmp: Tensor,
    lse_cmp: Tensor,
    o_sel: Tensor,
    lse_sel: Tensor,
    o_win: Tensor,
    lse_win: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    window_start: Tensor | None,
    block: int,
    stride: int,
    select_block: int,
    window: int,
    scale: float,
    backend: str,
    strict: bool,
) -> Tensor:
    """The gated sum of branches that were computed without autograd; its gradient is that of all of them."""
    length = q.shape[1]
    checks.check_cu_seqlens_values(cu_seqlens, length, strict)
    checks.check_compressed_values(k_cmp, block, stride, cu_seqlens, strict)
    checks.check_indices_values(indices, select_block, k_sel.shape[1], cu_seqlens, strict)
    checks.check_q_start_values(q_start, length, k_cmp.shape[1] * stride + block - 1, "k_cmp", strict)
    checks.check_q_start_values(q_start, length, k_sel.shape[1], "k_sel", strict)
    checks.check_q_start_values(window_start, length, k_win.shape[1], "k_win", strict, start="window_start")
    checks.check_finite(strict, q=q, k_cmp=k_cmp, v_cmp=v_cmp, k_sel=k_sel, v_sel=v_sel, k_win=k_win, v_win=v_win)
    checks.check_gates_values(gates, strict)
    return mix(o_cmp, o_sel, o_win, gates, backend, strict)


@mixture.register_fake
def _(*inputs: Any) -> Tensor:
    o_cmp = inputs[8]
    return o_cmp.new_empty(o_cmp.shape)


@custom_op("nsa::mixture_backward", mutates_args=())
def mixture_backward(
    do: Tensor,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    o_cmp: Tensor,
    lse_cmp: Tensor,
    o_sel: Tensor,
    lse_sel: Tensor,
    o_win: Tensor,
    lse_win: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    window_start: Tensor | None,
    block: int,
    stride: int,
    select_block: int,
    window: int,
    scale: float,
    backend: str,
    strict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    whole: dict[str, Any] = {"scale": scale, "cu_seqlens": cu_seqlens}
    g_cmp, g_sel, g_win = gates.unbind(dim=-1)

    def problem(op: str, k: Tensor, v: Tensor) -> Problem:
        return problem_of(op, q, k, v.shape[3], cu_seqlens, q_start, backward=True)

    def run(shown: str, part: Problem, function: str, *args: Tensor | None, **knobs: Any) -> Any:
        # A profile shows the branches' gradients apart, as if they were ops of their own.
        with torch.profiler.record_function(f"nsa::{shown}_backward"):
            return library.router().run(part, function, *args, **knobs, backend=backend, strict=strict)

    products = run(
        "combine",
        problem_of("combine", o_cmp, o_sel, o_cmp.shape[3], backward=True),
        "gates_backward",
        *(do, o_cmp, o_sel, o_win, gates),
    )
    p_cmp, p_sel, p_win = products.unbind(dim=-1)
    # One dq for all three: the first makes it, the others add to it.
    dq, dk_sel, dv_sel = run(
        "selected_attention",
        problem("selected", k_sel, v_sel),
        "gated_selected_backward",
        *(do, None, q, k_sel, v_sel, indices, o_sel, lse_sel),
        select_block=select_block,
        q_start=q_start,
        gate=g_sel,
        product=p_sel,
        into=None,
        **whole,
    )
    dq, dk_win, dv_win = run(
        "sliding_attention",
        problem("sliding", k_win, v_win),
        "gated_sliding_backward",
        *(do, None, q, k_win, v_win, o_win, lse_win),
        window=window,
        q_start=window_start,
        gate=g_win,
        product=p_win,
        into=dq,
        **whole,
    )
    dq, dk_cmp, dv_cmp = run(
        "compressed_attention",
        problem("compressed", k_cmp, v_cmp),
        "gated_compressed_backward",
        *(do, None, q, k_cmp, v_cmp, o_cmp, lse_cmp),
        block=block,
        stride=stride,
        q_start=q_start,
        gate=g_cmp,
        product=p_cmp,
        into=dq,
        **whole,
    )
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, products.to(gates.dtype).contiguous()


@mixture_backward.register_fake
def _(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return empty_gradients(*inputs[:8])


def save_mixture(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:18])
    ctx.knobs = inputs[18:]


def differentiate_mixture(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    grads = mixture_backward(do.contiguous(), *ctx.saved_tensors, *ctx.knobs)
    # What the branches gave, the choice and the knobs have no gradient here.
    return (*grads, *[None] * (10 + len(ctx.knobs)))


mixture.register_autograd(differentiate_mixture, setup_context=save_mixture)
