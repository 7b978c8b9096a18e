"""The ops of single stages: each attention branch, the selection of blocks, the gated sum.

The three branches differ in their hyperparameters and in what they see; each is a description, from which its forward
op, its backward op and their fakes are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa import checks
from nsa.ops.registry import ROUTING, Op, empty_gradients, empty_output, shape_of, stage
from nsa.sequences import Compressed, Saved, Selected, Selection, Sequences, Sliding, Upstream

PLACES = "Tensor? cu_seqlens, Tensor? q_start"


class Branch:
    """`nsa::<name>_attention` and its backward. `kind(sequences, *hyperparameters, scale)` is what backends are given;
    `hyperparameters` are the names of its integers, in that order."""

    def __init__(self, name: str, kind: type, hyperparameters: Sequence[str], *, keys: str = "k", values: str = "v"):
        self.name = name
        self.kind = kind
        self.keys = keys
        self.values = values
        self.indices = kind is Selected
        self.n_tensors = 4 if self.indices else 3
        tensors = f"Tensor q, Tensor {keys}, Tensor {values}" + (", Tensor indices" if self.indices else "")
        integers = "".join(f"int {x}, " for x in hyperparameters)
        rest = f"{PLACES}, {integers}float scale, {ROUTING}"
        op = f"{name}_attention"
        self.forward = Op(op, f"{tensors}, {rest}", "(Tensor, Tensor)", self.run_forward, self.fake_forward)
        arguments = f"Tensor do, Tensor? dlse, {tensors}, Tensor o, Tensor lse, {rest}"
        returns = "(Tensor, Tensor, Tensor)"
        self.backward = Op(f"{op}_backward", arguments, returns, self.run_backward, self.fake_backward)
        self.forward.differentiate(self.save, self.gradients)

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        *indices, cu_seqlens, q_start = rest[: self.n_tensors - 1]
        *hyperparameters, backend, strict = rest[self.n_tensors - 1 :]
        branch = self.kind(Sequences(q.shape[0], q.shape[1], q.device, cu_seqlens, q_start), *hyperparameters)
        checks.check_branch_values(branch, k, self.keys, indices, strict)
        checks.check_finite(strict, **{"q": q, self.keys: k, self.values: v})
        where: dict[str, bool] = {"packed": cu_seqlens is not None, "cached": q_start is not None}
        run = stage(self.name, f"{self.name}_forward", shape_of(q, k, v), q, backend, strict, **where)
        return run(q, k, v, *indices, branch)

    def run_backward(self, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        *indices, o, lse, cu_seqlens, q_start = rest[: self.n_tensors + 1]
        *hyperparameters, backend, strict = rest[self.n_tensors + 1 :]
        branch = self.kind(Sequences(q.shape[0], q.shape[1], q.device, cu_seqlens, q_start), *hyperparameters)
        where: dict[str, bool] = {"packed": cu_seqlens is not None, "cached": q_start is not None, "backward": True}
        run = stage(self.name, f"{self.name}_backward", shape_of(q, k, v), q, backend, strict, **where)
        return run(Upstream(do, dlse), Saved(q, k, v, o, lse, *indices), branch)

    def fake_forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return empty_output(q, v)

    def fake_backward(
        self, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        return empty_gradients(q, k, v)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        # In the order of the backward op: inputs, outputs, cu_seqlens and q_start.
        ctx.save_for_backward(*inputs[: self.n_tensors], *output, *inputs[self.n_tensors : self.n_tensors + 2])
        ctx.rest = inputs[self.n_tensors + 2 :]

    def gradients(self, ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing recomputes them, and refuses to a second time.
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[self.n_tensors]) if do is None else do.contiguous()
        grads = self.backward(do, dlse, *saved, *ctx.rest)
        return (*grads, *[None] * (self.n_tensors - 1 + len(ctx.rest)))


COMPRESSED = Branch("compressed", Compressed, ("block", "stride"), keys="k_cmp", values="v_cmp")
SELECTED = Branch("selected", Selected, ("select_block",))
SLIDING = Branch("sliding", Sliding, ("window",))


def run_select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    q_start: Tensor | None,
    *hyperparameters: Any,
) -> Tensor:
    *hyperparameters, backend, strict = hyperparameters
    selection = Selection(Sequences(q.shape[0], q.shape[1], q.device, cu_seqlens, q_start), *hyperparameters)
    checks.check_branch_values(selection, k_cmp, "k_cmp", [], strict)
    # The LSE of a row that sees nothing is -inf.
    checks.check_finite(strict, q=q, k_cmp=k_cmp, lse=lse.masked_fill(lse == float("-inf"), 0.0) if strict else lse)
    where: dict[str, bool] = {"packed": cu_seqlens is not None, "cached": q_start is not None}
    run = stage("scores", "select_blocks", shape_of(q, k_cmp, k_cmp), q, backend, strict, **where)
    indices: Tensor = run(q, k_cmp, lse, selection)
    return indices


def fake_select_blocks(q: Tensor, k_cmp: Tensor, *rest: Any) -> Tensor:
    n_select = rest[6]
    return q.new_empty(q.shape[0], q.shape[1], k_cmp.shape[2], n_select, dtype=torch.int32)


INTEGERS = ("block", "stride", "select_block", "n_select", "n_init", "n_local")
SELECT_BLOCKS = Op(
    "select_blocks",
    f"Tensor q, Tensor k_cmp, Tensor lse, {PLACES}, {''.join(f'int {x}, ' for x in INTEGERS)}float scale, {ROUTING}",
    "Tensor",
    run_select_blocks,
    fake_select_blocks,
)


def combine_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The gated sum has no keys: every head is a group of its own, one row per query."""
    batch, length, heads, width = shape
    return batch, length, length, heads, heads, width, width


def run_combine(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str, strict: bool) -> Tensor:
    checks.check_finite(strict, o_cmp=o_cmp, o_sel=o_sel, o_win=o_win, gates=gates)
    run = stage("combine", "combine_forward", combine_shape(o_cmp.shape), o_cmp, backend, strict)
    o: Tensor = run(o_cmp, o_sel, o_win, gates)
    return o.contiguous()


def run_combine_backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str, strict: bool
) -> tuple[Tensor, ...]:
    run = stage("combine", "combine_backward", combine_shape(o_cmp.shape), o_cmp, backend, strict, backward=True)
    return tuple(x.contiguous() for x in run(do, o_cmp, o_sel, o_win, gates))


TENSORS = "Tensor o_cmp, Tensor o_sel, Tensor o_win, Tensor gates"
COMBINE = Op("combine", f"{TENSORS}, {ROUTING}", "Tensor", run_combine, lambda o_cmp, *_: o_cmp.new_empty(o_cmp.shape))
COMBINE_BACKWARD = Op(
    "combine_backward",
    f"Tensor do, {TENSORS}, {ROUTING}",
    "(Tensor, Tensor, Tensor, Tensor)",
    run_combine_backward,
    lambda do, *inputs: empty_gradients(*inputs[:4]),
)


def save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]


def combine_gradients(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 6
    return (*COMBINE_BACKWARD(do.contiguous(), *ctx.saved_tensors, *ctx.rest), None, None)


COMBINE.differentiate(save_combine, combine_gradients)
