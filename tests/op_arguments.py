"""The arguments of every op of `nsa.ops`, in its schema's order, for the tests that call ops as torch does.

The last two are always the backend's name and whether it is strict.
"""

from __future__ import annotations

from typing import Any

import torch
from helpers import BRANCHES, Case, attend, compression_inputs, random_inputs
from torch import Tensor

from nsa import reference

FIXED = Case(length=40, batch=2, groups=2, heads=3, d_k=4, d_v=6)
VARLEN = Case(length=40, documents=(13, 0, 1, 26), groups=2, heads=3, d_k=4, d_v=6)
CACHED = FIXED.but(seed=3)
# Tensors that are contiguous by chance, as slices or in another order of dimensions, show where there is one of a kind.
CASES = {
    "fixed": FIXED,
    "varlen": VARLEN,
    "cached": CACHED,
    "one head per group": FIXED.but(heads=1),
    "one group": FIXED.but(batch=1, groups=1),
}
WHOLE = {"fixed": FIXED, "varlen": VARLEN, "short": FIXED.but(length=5)}
NAMES = {"compressed": "compressed_attention", "selected": "selected_attention", "sliding": "sliding_attention"}


def op_of(name: str) -> Any:
    """The op as torch knows it."""
    return getattr(torch.ops.nsa, name).default


def where_queries_lie(case: Case) -> tuple[Tensor | None, Tensor | None]:
    """`cu_seqlens, q_start` of a case."""
    return case.cu_seqlens, torch.tensor([12, 9], dtype=torch.int32) if case is CACHED else None


def hyperparameters(branch: str, case: Case) -> tuple[Any, ...]:
    own = {
        "compressed": (case.block, case.stride),
        "selected": (case.select_block,),
        "sliding": (case.window,),
    }[branch]
    return (*own, case.d_k**-0.5)


def branch_arguments(branch: str, case: Case, backend: str) -> tuple[Any, ...]:
    """The arguments of a branch's forward op, in the schema's order."""
    inputs = random_inputs(case, torch.float32)
    q, k, v = inputs.of(branch)
    indices = inputs.indices
    if case is CACHED:
        q, indices = q[:, :17].contiguous(), indices[:, :17].contiguous()
    selected = (indices,) if branch == "selected" else ()
    tensors = tuple(x.requires_grad_() for x in (q, k, v))
    return (*tensors, *selected, *where_queries_lie(case), *hyperparameters(branch, case), backend, False)


def branch_backward_arguments(branch: str, case: Case, backend: str, *, with_lse: bool = True) -> tuple[Any, ...]:
    """The arguments of a branch's backward op: gradients, then inputs, outputs, places and hyperparameters."""
    forward = [x.detach() if isinstance(x, Tensor) else x for x in branch_arguments(branch, case, backend)]
    n_tensors = 4 if branch == "selected" else 3
    o, lse = op_of(NAMES[branch])(*forward)
    dlse = torch.randn_like(lse) if with_lse else None
    return (torch.randn_like(o), dlse, *forward[:n_tensors], o, lse, *forward[n_tensors:])


def selection_arguments(case: Case, backend: str) -> tuple[Any, ...]:
    inputs = random_inputs(case, torch.float32)
    places = where_queries_lie(case)
    q = inputs.q[:, :17].contiguous() if case is CACHED else inputs.q
    where = dict(zip(("cu_seqlens", "q_start"), places, strict=True))
    _, lse = attend(reference, "compressed", inputs, case, (q, inputs.k_cmp, inputs.v_cmp), **where)
    return (q, inputs.k_cmp, lse, *places, *case.selection.values(), case.d_k**-0.5, backend, False)


def compression_arguments(op: str, case: Case, backend: str) -> tuple[Any, ...]:
    leaves = [x.requires_grad_() for x in compression_inputs(op, case, torch.float32)]
    return (*leaves, case.cu_seqlens, case.block, case.stride, backend, False)


def compression_backward_arguments(op: str, case: Case, backend: str) -> tuple[Any, ...]:
    *_, cu_seqlens, block, stride, backend, strict = arguments = compression_arguments(op, case, backend)
    dout = torch.randn_like(op_of(op)(*arguments).detach())
    return (dout, cu_seqlens, case.length, block, stride, backend, strict)


def combine_arguments(head_dim: int = 4) -> tuple[Tensor, ...]:
    return (*(torch.randn(2, 5, 6, head_dim) for _ in range(3)), torch.rand(2, 5, 6, 3))


def attention_arguments(case: Case, backend: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The arguments of the whole attention: tensors, places and hyperparameters."""
    places = where_queries_lie(case)
    inputs = random_inputs(case, dtype)
    q = inputs.q[:, :17].contiguous() if case is CACHED else inputs.q
    gates = torch.rand(*q.shape[:3], 3, dtype=dtype)
    # A gate may be closed altogether.
    gates[:, ::3, 0] = 0.0
    keys = [x for branch in BRANCHES for x in inputs.of(branch)[1:]]
    leaves = [x.detach().clone().requires_grad_() for x in (q, *keys, gates)]
    return (*leaves, *places, places[1], *case.selection.values(), case.window, case.d_k**-0.5, backend, False)


def attention_backward_arguments(case: Case, backend: str) -> tuple[Any, ...]:
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in attention_arguments(case, backend)]
    o, *saved = op_of("attention")(*arguments)
    return (torch.randn_like(o), *arguments[:8], *saved, *arguments[8:])


def head_major(x: Any) -> Any:
    """The same values with the head dimension outside the sequence: strides as a projection may leave them."""
    if not isinstance(x, Tensor) or x.dim() < 3:
        return x
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2)
