"""The ops of single stages: each attention branch, the selection of blocks, the gated sum.

The three branches differ in their hyperparameters and in what they see; each is a description, from which its forward
op, its backward op and their fakes are made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa import checks
from nsa.backends.stages import Stage, attention_shape, combine_shape, stage
from nsa.ops.registry import Op, empty_indices, empty_output, fake_gradients, schema_arguments
from nsa.sequences import Compressed, Saved, Selected, Selection, Sliding, Upstream, branch_of, hyperparameters

PLACES = "cu_seqlens q_start"


def prepare_call(
    op: str, function: str, kind: type, q: Tensor, k: Tensor, v: Tensor, args: tuple[Any, ...], *, backward: bool
) -> tuple[Stage, Any]:
    """The stage that runs, and the branch that it is given, for the `args` of an op from `cu_seqlens` on."""
    cu_seqlens, q_start, *values, backend, strict = args
    flags = {"backward": backward, "varlen": cu_seqlens is not None, "cached": q_start is not None}
    branch = branch_of(kind, q, q.shape[1], cu_seqlens, q_start, *values)
    return stage(op, function, attention_shape(q, k, v), q, backend, strict, **flags), branch


class Branch:
    """`nsa::<name>_attention` and its backward, for a `kind` of branch, which is what backends are given."""

    def __init__(self, name: str, kind: type, *, keys: str = "k", values: str = "v") -> None:
        self.name, self.kind, self.keys, self.values = name, kind, keys, values
        self.indices = int(kind is Selected)
        n = 3 + self.indices
        tensors, rest = f"q {keys} {values}" + " indices" * self.indices, (PLACES, hyperparameters(kind), "scale")
        op, run = f"{name}_attention", self.run_forward
        self.forward: Op[tuple[Tensor, Tensor]] = Op(op, schema_arguments(tensors, *rest), run, empty_output, outputs=2)
        schema = f"Tensor? do, Tensor? dlse, {schema_arguments(f'{tensors} o lse', *rest)}"
        backward: Op[Any] = Op(f"{op}_backward", schema, self.run_backward, fake_gradients(2, 3), outputs=3)
        self.forward.differentiate(backward, lambda inputs, o_lse: (*inputs[:n], *o_lse, *inputs[n:]), results=2)

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
        indices, args = args[: self.indices], args[self.indices :]
        run, branch = prepare_call(self.name, f"{self.name}_forward", self.kind, q, k, v, args, backward=False)
        checks.check_branch_values(branch, k, self.keys, indices, args[-1])
        checks.check_finite(args[-1], **{"q": q, self.keys: k, self.values: v})
        return run(q, k, v, *indices, branch)

    def run_backward(self, do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
        (*indices, o, lse), args = args[: self.indices + 2], args[self.indices + 2 :]
        run, branch = prepare_call(self.name, f"{self.name}_backward", self.kind, q, k, v, args, backward=True)
        upstream = Upstream(torch.zeros_like(o) if do is None else do, dlse)
        return run(upstream, Saved(q, k, v, o, lse, *indices), branch)


COMPRESSED = Branch("compressed", Compressed, keys="k_cmp", values="v_cmp")
SELECTED = Branch("selected", Selected)
SLIDING = Branch("sliding", Sliding)


def run_select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, *args: Any) -> Any:
    run, selection = prepare_call("scores", "select_blocks", Selection, q, k_cmp, k_cmp, args, backward=False)
    strict = args[-1]
    checks.check_branch_values(selection, k_cmp, "k_cmp", [], strict)
    # The LSE of a row that sees nothing is -inf.
    checks.check_finite(strict, q=q, k_cmp=k_cmp, lse=lse.masked_fill(lse == float("-inf"), 0.0) if strict else lse)
    return run(q, k_cmp, lse, selection)


SELECT_SCHEMA = schema_arguments("q k_cmp lse", PLACES, hyperparameters(Selection), "scale")
# After q, k_cmp, lse and PLACES.
SELECT_N_AT = 5 + hyperparameters(Selection).index("n_select")
SELECT_BLOCKS: Op[Tensor] = Op(
    "select_blocks", SELECT_SCHEMA, run_select_blocks, lambda *args: empty_indices(args[0], args[1], args[SELECT_N_AT])
)


def run_combine(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str, strict: bool) -> Any:
    checks.check_finite(strict, o_cmp=o_cmp, o_sel=o_sel, o_win=o_win, gates=gates)
    run = stage("combine", "combine_forward", combine_shape(o_cmp, o_cmp.shape[3]), o_cmp, backend, strict)
    return run(o_cmp, o_sel, o_win, gates).contiguous()


def run_combine_backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *inputs, backend, strict = args
    run = stage("combine", "combine_backward", combine_shape(do, do.shape[3]), do, backend, strict, backward=True)
    return tuple(x.contiguous() for x in run(do, *inputs))


COMBINE_INPUTS = "o_cmp o_sel o_win gates"
COMBINE: Op[Tensor] = Op("combine", schema_arguments(COMBINE_INPUTS), run_combine, lambda o, *_: o.new_empty(o.shape))
COMBINE_BACKWARD: Op[Any] = Op(
    "combine_backward", schema_arguments(f"do {COMBINE_INPUTS}"), run_combine_backward, fake_gradients(1, 4), outputs=4
)
COMBINE.differentiate(COMBINE_BACKWARD, lambda inputs, _: inputs)
