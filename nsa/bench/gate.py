"""The gate of a benchmark: what is timed gives the reference's results, at the shape that is timed.

The reference in fp64 computes the outputs of a few queries from all keys, and what they give to every gradient. The
implementation computes everything, with an upstream gradient that is 0 elsewhere. `nsa.testing` defines the tolerance,
for which plain torch in the same dtype does the same computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nsa import ops, reference
from nsa.bench.runner import Context
from nsa.config import NSAConfig
from nsa.functional import attention_kwargs, hyperparameter_kwargs
from nsa.sequences import COMPRESSED_NAMES, SELECTED_NAMES, SELECTION_NAMES
from nsa.testing import max_error, tolerance

# Queries at the beginning, in the middle and at the end.
CHUNK = 16
# A block whose importance differs from another's by less than bf16 inputs resolve may be selected in its place.
IMPORTANCE_TOLERANCE = 1e-3

Leaves = tuple[Tensor, ...]
# The rows of the output, from leaves of any dtype.
Expected = Callable[[Leaves, slice], Tensor]


def sampled_rows(length: int) -> list[slice]:
    if length <= 3 * CHUNK:
        return [slice(0, length)]
    return [slice(start, start + CHUNK) for start in (0, (length - CHUNK) // 2, length - CHUNK)]


def worst_ratio(found: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest error of a tensor as a multiple of its tolerance."""
    triples = zip(found, plain, exact, strict=True)
    return max(max_error(x, e) / max(tolerance(p, e), 1e-30) for x, p, e in triples)


def sampled_error(forward: Callable[[], Tensor], leaves: Leaves, expected: Expected) -> float:
    """The error of the output `[B, S, ...]` at `sampled_rows(S)` and of its gradients, in units of the tolerance."""
    with torch.enable_grad():
        out = forward()
        rows = sampled_rows(out.shape[1])
        sampled = torch.cat([out[:, each] for each in rows], dim=1)
        upstream = torch.randn_like(sampled)
        found = (sampled.detach(), *torch.autograd.grad(sampled, leaves, upstream))
        own_dtype = out.dtype
        del out

        def by_reference(dtype: torch.dtype) -> Leaves:
            own = tuple(x.detach().to(dtype).requires_grad_() for x in leaves)
            o = torch.cat([expected(own, each) for each in rows], dim=1)
            return o.detach(), *torch.autograd.grad(o, own, upstream.to(dtype))

        return worst_ratio(found, by_reference(own_dtype), by_reference(torch.float64))


def module_error(module: nn.Module, specification: nn.Module, inputs: Tensor, within: Context = nullcontext) -> float:
    """The error of a module on inputs so short that every block is selected, in units of the tolerance.
    `specification`: the same module with the reference as backend, exact in fp64, and plain torch within `within`."""
    specification.load_state_dict(module.state_dict())
    with torch.no_grad():
        with within():
            found, plain = module(inputs), specification(inputs)
        wide = inputs.double() if inputs.is_floating_point() else inputs
        return worst_ratio([found], [plain], [specification.double()(wide)])


def starts(x: Tensor, rows: slice) -> Tensor:
    return torch.full((x.shape[0],), rows.start, dtype=torch.int32, device=x.device)


def expect_compressed(config: NSAConfig, leaves: Leaves, rows: slice) -> Tensor:
    """The compressed branch; leaves q, k_cmp, v_cmp."""
    q, k, v = leaves
    where = hyperparameter_kwargs(config, COMPRESSED_NAMES)
    return reference.compressed_attention(q[:, rows], k, v, **where, q_start=starts(q, rows))[0]


def expect_selected(config: NSAConfig, indices: Tensor, leaves: Leaves, rows: slice) -> Tensor:
    """The selected branch with the blocks that the implementation selected; leaves q, k, v."""
    q, k, v = leaves
    where = hyperparameter_kwargs(config, SELECTED_NAMES)
    return reference.selected_attention(q[:, rows], k, v, indices[:, rows], **where, q_start=starts(q, rows))[0]


def expect_sliding(window: int, leaves: Leaves, rows: slice) -> Tensor:
    """The sliding branch, or causal attention if the window reaches all keys; leaves q, k, v."""
    q, k, v = leaves
    return reference.sliding_attention(q[:, rows], k, v, window=window, q_start=starts(q, rows))[0]


def expect_nsa(config: NSAConfig, indices: Tensor, leaves: Leaves, rows: slice) -> Tensor:
    """The whole attention; leaves q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates."""
    q, *keys_values, gates = leaves
    cmp, sel, win = ((q, *keys_values[at : at + 2]) for at in (0, 2, 4))
    o_cmp, o_sel = expect_compressed(config, cmp, rows), expect_selected(config, indices, sel, rows)
    return reference.combine(o_cmp, o_sel, expect_sliding(config.w, win, rows), gates[:, rows])


def selected_indices(config: NSAConfig, q: Tensor, k_cmp: Tensor, v_cmp: Tensor) -> Tensor:
    """The blocks that the backend of `config` selects."""
    with torch.no_grad():
        _, lse = ops.compressed_attention(q, k_cmp, v_cmp, **attention_kwargs(config, COMPRESSED_NAMES))
        return ops.select_blocks(q, k_cmp, lse, **attention_kwargs(config, SELECTION_NAMES))


def selection_error(config: NSAConfig, indices: Tensor, q: Tensor, *compressed: Tensor) -> float:
    """The error of a selection `indices [B, S, G, n]` at `sampled_rows(S)`, in units of what is allowed."""
    rows = sampled_rows(q.shape[1])
    return max(importance_error(config, indices[:, at], starts(q, at), q[:, at], *compressed) for at in rows)


@torch.no_grad()
def importance_error(config: NSAConfig, indices: Tensor, q_start: Tensor, *tensors: Tensor) -> float:
    """How much less important a selected block is than the best that was left out, as a multiple of what rounding may
    exchange; infinity if a forced block is missing or a block is there twice. `tensors`: q, k_cmp, v_cmp."""
    c, (q, k_cmp, v_cmp) = config, (x.double() for x in tensors)
    blocks: dict[str, Any] = {**hyperparameter_kwargs(c, COMPRESSED_NAMES), "q_start": q_start}
    _, lse = reference.compressed_attention(q, k_cmp, v_cmp, **blocks)
    importance = reference.selection_importance(q, k_cmp, lse, select_block=c.l_sel, **blocks)
    own = ((q_start[:, None] + torch.arange(q.shape[1], device=q.device)) // c.l_sel)[:, :, None, None]
    j = torch.arange(importance.shape[-1], device=q.device)
    forced = (j <= own) & ((j < c.n_init) | (j > own - c.n_local))
    importance = importance.masked_fill(forced, torch.inf).masked_fill(j > own, -torch.inf)
    best = importance.topk(min(c.n_sel, len(j)), dim=-1).values
    valid = indices >= 0
    taken = importance.gather(-1, indices.clamp_min(0).long()).masked_fill(~valid, torch.inf)
    ascending = (indices.diff(dim=-1) > 0) | ~valid[..., 1:]
    complete = valid.sum(dim=-1) == best.isfinite().logical_or(best == torch.inf).sum(dim=-1)
    has_forced = (taken.isinf() & valid).sum(dim=-1) == forced.expand_as(importance).sum(dim=-1).clamp_max(c.n_sel)
    if not bool(ascending.all() and complete.all() and has_forced.all()):
        return torch.inf
    least = best.where(best.isfinite(), torch.inf).amin(dim=-1)
    lacking = (1 - taken.amin(dim=-1) / least).where(least.isfinite(), 0.0)
    return float(lacking.max()) / IMPORTANCE_TOLERANCE
