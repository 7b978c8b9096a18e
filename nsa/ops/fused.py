"""The whole attention as one op and one backward op: selection, the three branches and the gated sum.

Together, because their gradients share `do` and `dq`: autograd would hold three copies of either.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa import checks
from nsa.backends.stages import plan_of, run_together
from nsa.ops.registry import Op, empty_indices, empty_output, fake_gradients, schema_arguments
from nsa.sequences import ATTENTION_NAMES, Saved

INPUTS = "q k_cmp v_cmp k_sel v_sel k_win v_win gates"
OUTPUTS = "indices o_cmp lse_cmp o_sel lse_sel o_win lse_win"
REST = ("cu_seqlens q_start window_start", ATTENTION_NAMES, "scale")
N_INPUTS, N_PLACES = 8, 3
N_SELECT = N_INPUTS + N_PLACES + ATTENTION_NAMES.index("n_select")


def run_forward(*args: Any) -> tuple[Tensor, ...]:
    inputs, places, rest = args[:N_INPUTS], args[N_INPUTS : N_INPUTS + N_PLACES], args[N_INPUTS + N_PLACES :]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    plan, branches = plan_of(inputs, places, rest, backward=False)
    compressed, selection, selected, sliding = branches
    if checks.can_read_values(q, rest[-1]):
        checks.check_attention_values(inputs, branches, rest[-1])
    o_cmp, lse_cmp = plan.compressed(q, k_cmp, v_cmp, compressed)
    indices = plan.select(q, k_cmp, lse_cmp, selection)
    o_sel, lse_sel, o_win, lse_win = run_together(
        (plan.selected, plan.sliding), "selected_sliding_forward", q, k_sel, v_sel, indices, k_win, v_win, branches
    ) or (*plan.selected(q, k_sel, v_sel, indices, selected), *plan.sliding(q, k_win, v_win, sliding))
    o = plan.combine(o_cmp, o_sel, o_win, gates)
    return o.contiguous(), indices, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win


def fake_forward(*args: Any) -> tuple[Tensor, ...]:
    (o, _), *branches = (empty_output(*args) for _ in range(4))
    return o, empty_indices(args[0], args[1], args[N_SELECT]), *(x for pair in branches for x in pair)


def run_backward(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """`args`: the inputs, the outputs of the forward pass but the first, and the rest."""
    inputs, outputs, args = args[:N_INPUTS], args[N_INPUTS : N_INPUTS + 7], args[N_INPUTS + 7 :]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = inputs
    indices, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win = outputs
    plan, branches = plan_of(inputs, args[:N_PLACES], args[N_PLACES:], backward=True)
    # The gates' gradients are also what a softmax's gradient is made of.
    d_gates, upstreams = plan.combine(do, (o_cmp, o_sel, o_win), (lse_cmp, lse_sel, lse_win), gates, k_sel.shape[2])
    saved = (
        Saved(q, k_cmp, v_cmp, o_cmp, lse_cmp),
        Saved(q, k_sel, v_sel, o_sel, lse_sel, indices),
        Saved(q, k_win, v_win, o_win, lse_win),
    )
    return *plan.branches_backward(upstreams, saved, branches), d_gates.contiguous()


SCHEMAS = schema_arguments(INPUTS, *REST), schema_arguments(f"do {INPUTS} {OUTPUTS}", *REST)
ATTENTION: Op[tuple[Tensor, ...]] = Op("attention", SCHEMAS[0], run_forward, fake_forward, outputs=8)
ATTENTION_BACKWARD: Op[Any] = Op("attention_backward", SCHEMAS[1], run_backward, fake_gradients(1, N_INPUTS), outputs=8)
# Only `o` is a result; the other outputs are there for the backward pass, and for callers that want the selection.
ATTENTION.differentiate(ATTENTION_BACKWARD, lambda given, out: (*given[:N_INPUTS], *out[1:], *given[N_INPUTS:]))
