"""The ops as torch sees them: schema, fake and autograd of each; what `torch.compile` traces.

An op's body runs with real tensors: it looks at values where it may, and hands the problem to the router. Forward and
backward are ops of their own, so that a compiled graph holds both and nothing else of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from nsa.backends.problem import Problem
from nsa.backends.routing import router
from nsa.geometry import n_compressed
from nsa.ops import checks


def problem_of(
    op: str,
    q: Tensor,
    k: Tensor,
    d_v: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    *,
    backward: bool = False,
) -> Problem:
    return Problem(
        op=op,
        batch=q.shape[0],
        n_queries=q.shape[1],
        n_keys=k.shape[1],
        n_heads=q.shape[2],
        n_groups=k.shape[2],
        d_k=q.shape[3],
        d_v=d_v,
        dtype=q.dtype,
        device=q.device.type,
        backward=backward,
        packed=cu_seqlens is not None,
        cached=q_start is not None,
    )


def empty_output(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of `(o, lse)`."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def empty_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs)


def compress_problem(
    x: Tensor, length: int, width: int, cu_seqlens: Tensor | None, *, backward: bool = False
) -> Problem:
    """Of `x`, the tokens or the gradients of their blocks: the rows, the groups and the dtype."""
    batch, _, groups, _ = x.shape
    return Problem(
        op="compress",
        batch=batch,
        n_queries=length,
        n_keys=length,
        n_heads=groups,
        n_groups=groups,
        d_k=width,
        d_v=width,
        dtype=x.dtype,
        device=x.device.type,
        backward=backward,
        packed=cu_seqlens is not None,
    )


def empty_blocks(x: Tensor, cu_seqlens: Tensor | None, block: int, stride: int, width: int) -> Tensor:
    batch, length, groups, _ = x.shape
    n_slots = n_compressed(length, block, stride) if cu_seqlens is None else length // stride
    return x.new_empty(batch, n_slots, groups, width)


@custom_op("nsa::compress_mean", mutates_args=())
def compress_mean(x: Tensor, cu_seqlens: Tensor | None, block: int, stride: int, backend: str, strict: bool) -> Tensor:
    checks.check_cu_seqlens_values(cu_seqlens, x.shape[1], strict)
    checks.check_finite(strict, x=x)
    problem = compress_problem(x, x.shape[1], x.shape[3], cu_seqlens)
    knobs: dict[str, Any] = {"block": block, "stride": stride, "cu_seqlens": cu_seqlens}
    mean = router().run(problem, "compress_mean_forward", x, **knobs, backend=backend, strict=strict)
    return mean.contiguous()


@compress_mean.register_fake
def _(x: Tensor, cu_seqlens: Tensor | None, block: int, stride: int, *rest: Any) -> Tensor:
    return empty_blocks(x, cu_seqlens, block, stride, x.shape[3])


@custom_op("nsa::compress_mean_backward", mutates_args=())
def compress_mean_backward(
    dout: Tensor, cu_seqlens: Tensor | None, length: int, block: int, stride: int, backend: str, strict: bool
) -> Tensor:
    problem = compress_problem(dout, length, dout.shape[3], cu_seqlens, backward=True)
    knobs: dict[str, Any] = {"length": length, "block": block, "stride": stride, "cu_seqlens": cu_seqlens}
    dx = router().run(problem, "compress_mean_backward", dout, **knobs, backend=backend, strict=strict)
    return dx.contiguous()


@compress_mean_backward.register_fake
def _(dout: Tensor, cu_seqlens: Tensor | None, length: int, *rest: Any) -> Tensor:
    batch, _, groups, width = dout.shape
    return dout.new_empty(batch, length, groups, width)


@custom_op("nsa::gather_blocks", mutates_args=())
def gather_blocks(
    x: Tensor, position: Tensor, cu_seqlens: Tensor | None, block: int, stride: int, backend: str, strict: bool
) -> Tensor:
    checks.check_cu_seqlens_values(cu_seqlens, x.shape[1], strict)
    checks.check_finite(strict, x=x, position=position)
    problem = compress_problem(x, x.shape[1], x.shape[3], cu_seqlens)
    knobs: dict[str, Any] = {"block": block, "stride": stride, "cu_seqlens": cu_seqlens}
    blocks = router().run(problem, "gather_blocks_forward", x, position, **knobs, backend=backend, strict=strict)
    return blocks.contiguous()


@gather_blocks.register_fake
def _(x: Tensor, position: Tensor, cu_seqlens: Tensor | None, block: int, stride: int, *rest: Any) -> Tensor:
    return empty_blocks(x, cu_seqlens, block, stride, block * x.shape[3])


@custom_op("nsa::gather_blocks_backward", mutates_args=())
def gather_blocks_backward(
    dout: Tensor, cu_seqlens: Tensor | None, length: int, block: int, stride: int, backend: str, strict: bool
) -> tuple[Tensor, Tensor]:
    problem = compress_problem(dout, length, dout.shape[3] // block, cu_seqlens, backward=True)
    knobs: dict[str, Any] = {"length": length, "block": block, "stride": stride, "cu_seqlens": cu_seqlens}
    dx, dposition = router().run(problem, "gather_blocks_backward", dout, **knobs, backend=backend, strict=strict)
    return dx.contiguous(), dposition.contiguous()


@gather_blocks_backward.register_fake
def _(dout: Tensor, cu_seqlens: Tensor | None, length: int, block: int, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, _, groups, width = dout.shape
    return dout.new_empty(batch, length, groups, width // block), dout.new_empty(block, width // block)


def save_compression(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Both are linear: the gradients need no tensor of theirs, only where the blocks lay."""
    x, *_, cu_seqlens, block, stride, backend, strict = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.knobs = (x.shape[1], block, stride, backend, strict)


def differentiate_mean(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dx = compress_mean_backward(dout.contiguous(), *ctx.saved_tensors, *ctx.knobs)
    return (dx, *[None] * 5)


def differentiate_gather(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dx, dposition = gather_blocks_backward(dout.contiguous(), *ctx.saved_tensors, *ctx.knobs)
    return (dx, dposition, *[None] * 5)


compress_mean.register_autograd(differentiate_mean, setup_context=save_compression)
gather_blocks.register_autograd(differentiate_gather, setup_context=save_compression)


@custom_op("nsa::compressed_attention", mutates_args=())
def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    block: int,
    stride: int,
    scale: float,
    backend: str,
    strict: bool,
) -> tuple[Tensor, Tensor]:
    checks.check_cu_seqlens_values(cu_seqlens, q.shape[1], strict)
    checks.check_compressed_values(k_cmp, block, stride, cu_seqlens, strict)
    capacity = k_cmp.shape[1] * stride + block - 1
    checks.check_q_start_values(q_start, q.shape[1], capacity, "k_cmp", strict)
    checks.check_finite(strict, q=q, k_cmp=k_cmp, v_cmp=v_cmp)
    return router().run(
        problem_of("compressed", q, k_cmp, v_cmp.shape[3], cu_seqlens, q_start),
        "compressed_forward",
        q,
        k_cmp,
        v_cmp,
        block=block,
        stride=stride,
        scale=scale,
        cu_seqlens=cu_seqlens,
        q_start=q_start,
        backend=backend,
        strict=strict,
    )


@compressed_attention.register_fake
def _(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_output(q, v_cmp)


@custom_op("nsa::compressed_attention_backward", mutates_args=())
def compressed_attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    block: int,
    stride: int,
    scale: float,
    backend: str,
    strict: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return router().run(
        problem_of("compressed", q, k_cmp, v_cmp.shape[3], cu_seqlens, q_start, backward=True),
        "compressed_backward",
        do,
        dlse,
        q,
        k_cmp,
        v_cmp,
        o,
        lse,
        block=block,
        stride=stride,
        scale=scale,
        cu_seqlens=cu_seqlens,
        q_start=q_start,
        backend=backend,
        strict=strict,
    )


@compressed_attention_backward.register_fake
def _(do: Tensor, dlse: Tensor | None, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return empty_gradients(q, k_cmp, v_cmp)


@custom_op("nsa::select_blocks", mutates_args=())
def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    block: int,
    stride: int,
    select_block: int,
    n_select: int,
    n_init: int,
    n_local: int,
    scale: float,
    backend: str,
    strict: bool,
) -> Tensor:
    checks.check_cu_seqlens_values(cu_seqlens, q.shape[1], strict)
    checks.check_compressed_values(k_cmp, block, stride, cu_seqlens, strict)
    capacity = k_cmp.shape[1] * stride + block - 1
    checks.check_q_start_values(q_start, q.shape[1], capacity, "k_cmp", strict)
    # The normaliser of a row that sees nothing is -inf.
    checks.check_finite(strict, q=q, k_cmp=k_cmp, lse=lse.masked_fill(lse == float("-inf"), 0.0) if strict else lse)
    return router().run(
        problem_of("scores", q, k_cmp, q.shape[3], cu_seqlens, q_start),
        "select_blocks",
        q,
        k_cmp,
        lse,
        block=block,
        stride=stride,
        select_block=select_block,
        n_select=n_select,
        n_init=n_init,
        n_local=n_local,
        scale=scale,
        cu_seqlens=cu_seqlens,
        q_start=q_start,
        backend=backend,
        strict=strict,
    )


@select_blocks.register_fake
def _(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    block: int,
    stride: int,
    select_block: int,
    n_select: int,
    *rest: Any,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k_cmp.shape[2], n_select, dtype=torch.int32)


@custom_op("nsa::selected_attention", mutates_args=())
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    select_block: int,
    scale: float,
    backend: str,
    strict: bool,
) -> tuple[Tensor, Tensor]:
    checks.check_cu_seqlens_values(cu_seqlens, q.shape[1], strict)
    checks.check_q_start_values(q_start, q.shape[1], k.shape[1], "k", strict)
    checks.check_indices_values(indices, select_block, k.shape[1], cu_seqlens, strict)
    checks.check_finite(strict, q=q, k=k, v=v)
    return router().run(
        problem_of("selected", q, k, v.shape[3], cu_seqlens, q_start),
        "selected_forward",
        q,
        k,
        v,
        indices,
        select_block=select_block,
        scale=scale,
        cu_seqlens=cu_seqlens,
        q_start=q_start,
        backend=backend,
        strict=strict,
    )


@selected_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_output(q, v)


@custom_op("nsa::selected_attention_backward", mutates_args=())
def selected_attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    select_block: int,
    scale: float,
    backend: str,
    strict: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return router().run(
        problem_of("selected", q, k, v.shape[3], cu_seqlens, q_start, backward=True),
        "selected_backward",
        do,
        dlse,
        q,
        k,
        v,
        indices,
        o,
        lse,
        select_block=select_block,
        scale=scale,
        cu_seqlens=cu_seqlens,
        q_start=q_start,
        backend=backend,
        strict=strict,
    )


@selected_attention_backward.register_fake
def _(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return empty_gradients(q, k, v)


@custom_op("nsa::sliding_attention", mutates_args=())
def sliding_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    window: int,
    scale: float,
    backend: str,
    strict: bool,
) -> tuple[Tensor, Tensor]:
    checks.check_cu_seqlens_values(cu_seqlens, q.shape[1], strict)
    checks.check_q_start_values(q_start, q.shape[1], k.shape[1], "k", strict)
    checks.check_finite(strict, q=q, k=k, v=v)
    return router().run(
        problem_of("sliding", q, k, v.shape[3], cu_seqlens, q_start),
        "sliding_forward",
        q,
        k,
        v,
        window=window,
        scale=scale,
        cu_seqlens=cu_seqlens,
        q_start=q_start,
        backend=backend,
        strict=strict,
    )


@sliding_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_output(q, v)


@custom_op("nsa::sliding_attention_backward", mutates_args=())
def sliding_attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    window: int,
    scale: float,
    backend: str,
    strict: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return router().run(
        problem_of("sliding", q, k, v.shape[3], cu_seqlens, q_start, backward=True),
        "sliding_backward",
        do,
        dlse,
        q,
        k,
        v,
        o,
        lse,
        window=window,
        scale=scale,
        cu_seqlens=cu_seqlens,
        q_start=q_start,
        backend=backend,
        strict=strict,
    )


@sliding_attention_backward.register_fake
def _(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return empty_gradients(q, k, v)


def save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep tensors and scalars apart, in the order the backward op takes them."""
    tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
    # The last two tensors are cu_seqlens and q_start; the outputs go before them.
    ctx.save_for_backward(*tensors[:-2], *output, *tensors[-2:])
    ctx.knobs = inputs[len(tensors) :]
    # The normaliser is rarely part of a loss; a missing gradient then stays None instead of a tensor of zeros.
    ctx.set_materialize_grads(False)


def differentiate(op: Any, backward_op: Any, n_fixed: int = 0) -> None:
    """Let `backward_op` be the gradient of `op` in q, k and v; `n_fixed` tensors after them have none."""

    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing recomputes them, and refuses to a second time.
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[3 + n_fixed]) if do is None else do.contiguous()
        grads = backward_op(do, dlse, *saved, *ctx.knobs)
        return (*grads, *[None] * (n_fixed + 2 + len(ctx.knobs)))

    op.register_autograd(backward, setup_context=save_attention)


differentiate(compressed_attention, compressed_attention_backward)
differentiate(selected_attention, selected_attention_backward, n_fixed=1)
differentiate(sliding_attention, sliding_attention_backward)


@custom_op("nsa::combine", mutates_args=())
def combine(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str, strict: bool) -> Tensor:
    return mix(o_cmp, o_sel, o_win, gates, backend, strict)


def mix(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str, strict: bool) -> Tensor:
    checks.check_finite(strict, o_cmp=o_cmp, o_sel=o_sel, o_win=o_win, gates=gates)
    problem = problem_of("combine", o_cmp, o_sel, o_cmp.shape[3])
    o = router().run(problem, "combine_forward", o_cmp, o_sel, o_win, gates, backend=backend, strict=strict)
    return o.contiguous()


@combine.register_fake
def _(o_cmp: Tensor, *rest: Any) -> Tensor:
    return o_cmp.new_empty(o_cmp.shape)


@custom_op("nsa::combine_backward", mutates_args=())
def combine_backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str, strict: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem = problem_of("combine", o_cmp, o_sel, o_cmp.shape[3], backward=True)
    grads = router().run(problem, "combine_backward", do, o_cmp, o_sel, o_win, gates, backend=backend, strict=strict)
    d_cmp, d_sel, d_win, d_gates = (x.contiguous() for x in grads)
    return d_cmp, d_sel, d_win, d_gates


@combine_backward.register_fake
def _(do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return empty_gradients(o_cmp, o_sel, o_win, gates)


def save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.knobs = inputs[4:]


def differentiate_combine(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    return (*combine_backward(do.contiguous(), *ctx.saved_tensors, *ctx.knobs), None, None)


combine.register_autograd(differentiate_combine, setup_context=save_combine)
