"""The compressed and the sliding branch, each as one call of a FlashAttention library, and its gradients.

A `Plan` says how a branch's tensors enter that call and how its results leave it: folded for the compressed branch,
without the batch dimension for varlen sequences. Head dims that a library does not take are padded with zeros, which
change no score and no output; but never in a cache, which a decode step must not copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.backends.flash.contracts import HEAD_DIM_STEP, Call, aligned
from nsa.backends.flash.fold import FixedFold, VarlenFold
from nsa.backends.flash.libraries import Library, call_library
from nsa.backends.routing import CallUnsupported
from nsa.geometry import n_compressed_of
from nsa.sequences import Compressed, Saved, Sliding, Upstream

NEGATIVE_INFINITY = float("-inf")


def unchanged(x: Tensor, fill: float = 0.0) -> Tensor:
    return x


@dataclass(frozen=True)
class CallPlan:
    """`enter` and `leave` move query-shaped tensors, `[B,S,H,...]`, into the call and back, with a fill for rows that
    see no key; the other two move keys. `mask`: the rest of the call. `cached`: keys are slots of a cache."""

    mask: dict[str, Any]
    enter: Callable[[Tensor], Tensor] = unchanged
    leave: Callable[[Tensor, float], Tensor] = unchanged
    enter_keys: Callable[[Tensor], Tensor] = unchanged
    leave_keys: Callable[[Tensor], Tensor] = unchanged
    cached: bool = False


def padded(d_k: int, d_v: int) -> int:
    """The head_dim at which keys and values are passed."""
    return -(-max(d_k, d_v) // HEAD_DIM_STEP) * HEAD_DIM_STEP


def safe_offsets(cu_seqlens: Tensor, total: int) -> Tensor:
    """Offsets clamped to rows that exist; legal ones are unchanged. Values on a GPU are not read unless `strict`: a
    wrong one may give wrong numbers, but must not read memory that is not the caller's."""
    offsets = cu_seqlens.clamp(0, total).cummax(0).values
    offsets[:1] = 0
    offsets[-1:] = total
    return offsets


def varlen_mask(offsets: Tensor, total: int) -> dict[str, Any]:
    # The longest document is a value on the device: the whole row bounds it, but never with 1 (#1537).
    longest = max(total, 2)
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_q": longest, "max_k": longest}


def compressed_plan(q: Tensor, k: Tensor, branch: Compressed) -> CallPlan:
    sequences = branch.sequences
    if sequences.q_start is not None:
        used = n_compressed_of(sequences.q_start + 1, branch.block, branch.stride)
        return cached_plan(q, k, used, causal=False, window=None)
    sizes = (q.shape[1], k.shape[1], k.shape[2], branch.block, branch.stride)
    if sequences.cu_seqlens is None:
        fixed = FixedFold(*sizes)
        return CallPlan({}, fixed.fold, fixed.unfold)
    fold = VarlenFold(*sizes, safe_offsets(sequences.cu_seqlens, q.shape[1]))
    # There is a key slot for every stride, and fewer blocks: rows after the last document are never read.
    return CallPlan(
        varlen_mask(fold.offsets, fold.n_chunks),
        enter=lambda x: fold.fold(x)[0],
        leave=lambda x, fill: fold.unfold(x[None], fill),
        enter_keys=lambda k: k[0],
        leave_keys=lambda k: k.masked_fill(fold.unused()[:, None, None], 0.0)[None],
    )


def sliding_plan(q: Tensor, k: Tensor, branch: Sliding) -> CallPlan:
    sequences = branch.sequences
    # A library narrows the window to 32 bits; no query sees more keys than there are.
    window = min(branch.window, k.shape[1])
    if sequences.q_start is not None:
        return cached_plan(q, k, sequences.q_start + q.shape[1], causal=True, window=window)
    if sequences.cu_seqlens is None:
        return CallPlan({"window": window})
    mask = varlen_mask(safe_offsets(sequences.cu_seqlens, q.shape[1]), q.shape[1]) | {"window": window}
    return CallPlan(mask, lambda x: x[0], lambda x, fill: x[None], lambda k: k[0], lambda k: k[None])


def cached_plan(q: Tensor, k: Tensor, used: Tensor, *, causal: bool, window: int | None) -> CallPlan:
    """Row `b` of the batch sees its first `used[b]` keys; the mask ends at the last query and the last of those."""
    batch, length = q.shape[:2]
    apart = cache_stride(k)
    slots = (batch - 1) * apart + k.shape[1]
    starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32)
    empty = (used <= 0).view(-1, 1)

    def leave(x: Tensor, fill: float) -> Tensor:
        x = x.unflatten(0, (batch, length))
        return x.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), fill)

    def all_slots(k: Tensor) -> Tensor:
        """`[slots, G, D]`: the rows of the batch with the free slots between them, always a view."""
        return k.as_strided((slots, *k.shape[2:]), k.stride()[1:], k.storage_offset())

    mask: dict[str, Any] = {"causal": causal, "window": window, "max_q": length, "max_k": k.shape[1]}
    mask |= {"cu_seqlens_q": starts * length, "cu_seqlens_k": (starts * apart).clamp_max(slots)}
    mask["used_k"] = used.clamp(0, k.shape[1]).int()
    return CallPlan(mask, lambda x: x.flatten(0, 1), leave, enter_keys=all_slots, cached=True)


def cache_stride(k: Tensor) -> int:
    """Slots between the first keys of two rows: a cache has free slots after those in use."""
    if k.shape[0] == 1:
        return k.shape[1]
    if k.stride(1) <= 0 or k.stride(0) % k.stride(1) or k.stride(0) < k.shape[1] * k.stride(1):
        raise CallUnsupported(f"a cache with strides {k.stride()} cannot be viewed as one row after the other")
    return k.stride(0) // k.stride(1)


def check_cache(q: Tensor, k: Tensor, v: Tensor, head_dim: int, dtype: torch.dtype) -> None:
    """A decode step computes one query: it must not copy all keys for it, or read keys of another row."""
    if dtype != q.dtype:
        raise CallUnsupported(f"a cast to {dtype} would copy the cache at every step")
    if not k.shape[-1] == v.shape[-1] == head_dim:
        raise CallUnsupported(f"padding to head_dim {head_dim} would copy the cache at every step")
    apart = (cache_stride(k), cache_stride(v))
    if len(set(apart)) > 1:
        raise CallUnsupported(f"the cache has {apart} slots per row of keys and values: one offset must hold for both")
    if not (aligned(k) and aligned(v)):
        raise CallUnsupported("aligning its rows would copy the cache at every step")


def ready(x: Tensor, head_dim: int, given: torch.dtype, dtype: torch.dtype) -> Tensor:
    """`x` in the form that the library takes; the same tensor if it already is. Only what has q's dtype, `given`, is
    cast with it."""
    if x.dtype == given:
        x = x.to(dtype)
    if x.shape[-1] < head_dim:
        x = F.pad(x, (0, head_dim - x.shape[-1]))
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


def forward_call(q: Tensor, k: Tensor, v: Tensor, plan: CallPlan, scale: float, dtype: torch.dtype) -> Call:
    head_dim = padded(q.shape[-1], v.shape[-1])
    if plan.cached:
        check_cache(q, k, v, head_dim, dtype)
    entered = {"q": plan.enter(q), "k": plan.enter_keys(k), "v": plan.enter_keys(v)}
    tensors: dict[str, Any] = {name: ready(x, head_dim, q.dtype, dtype) for name, x in entered.items()}
    return Call(**tensors, scale=scale, **plan.mask)


def attend_branch(
    library: Library, q: Tensor, k: Tensor, v: Tensor, plan: CallPlan, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`o [B,S,Hq,Dv]` in q's dtype and `lse [B,S,Hq]`."""
    o, lse = call_library(library, "forward", forward_call(q, k, v, plan, scale, dtype))
    o = plan.leave(o, 0.0)[..., : v.shape[-1]].to(q.dtype)
    return o.contiguous(), plan.leave(lse.transpose(-1, -2), NEGATIVE_INFINITY).contiguous()


def gradients(
    library: Library, upstream: Upstream, saved: Saved, plan: CallPlan, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`dq`, `dk` and `dv`, shaped as `q`, `k` and `v`."""
    do, dlse, *_ = upstream
    q, k, v, o, lse, _ = saved
    call = forward_call(q, k, v, plan, scale, dtype)
    head_dim = call.q.shape[-1]
    # Gradients of a mean over many tokens underflow in fp16: a cast rescales them.
    cast = dtype != q.dtype
    do, unit = in_units(do) if cast else (do, None)
    do, o = (ready(plan.enter(x), head_dim, q.dtype, dtype) for x in (do, o))
    call = replace(call, do=do, o=o, lse=plan.enter(lse).transpose(-1, -2).contiguous())
    dq, dk, dv = (times(x, unit) for x in call_library(library, "backward", call))
    if dlse is not None:
        dlse, unit = in_units(dlse) if cast else (dlse, None)
        more_dq, more_dk = (times(x, unit) for x in lse_gradients(library, call, plan.enter(dlse)))
        dq, dk = dq + more_dq, dk + more_dk
    pairs = ((plan.leave(dq, 0.0), q), (plan.leave_keys(dk), k), (plan.leave_keys(dv), v))
    dq, dk, dv = (x[..., : like.shape[-1]].to(like.dtype).contiguous() for x, like in pairs)
    return dq, dk, dv


def in_units(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` divided by a power of two such that its largest element is about 1, and that power, on the device."""
    largest = x.abs().amax().float()
    # Non-finite values stay so in any unit; fp32 holds no other powers.
    exponent = torch.frexp(largest.where(largest.isfinite(), 1.0)).exponent.clamp(-126, 127)
    unit = torch.exp2(exponent.float())
    return x / unit, unit


def times(x: Tensor, unit: Tensor | None) -> Tensor:
    return x if unit is None else x.float() * unit


def lse_gradients(library: Library, call: Call, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """The terms that the gradient of the LSE adds to dq and dk, which the libraries do not compute.

    The LSE's derivative in a score is the probability: dq gains `scale * dlse * P k` and dk gains
    `scale * P^T (dlse * q)`. The first is attention with the keys for values, the second its gradient in the values.
    """
    over_keys = replace(call, v=call.k, do=None, o=None, lse=None)
    mean_key, _ = call_library(library, "forward", over_keys)
    weighted = (call.q * dlse[..., None]).to(call.q.dtype)
    _, _, more_dk = call_library(library, "backward", replace(over_keys, do=weighted, o=mean_key, lse=call.lse))
    return mean_key * (call.scale * dlse[..., None]), more_dk * call.scale
