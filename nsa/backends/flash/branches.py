"""The compressed and the sliding branch, each as one call of a FlashAttention library, and its gradients.

A `Plan` says how a branch's tensors enter that call and how its results leave it: folded for the compressed branch,
without the batch dimension where sequences have lengths of their own. Widths that a library does not take are filled up
with zeros, which change no score and no output; but never in a cache, which a step must not copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.backends.contracts import Call, Contract, aligned
from nsa.backends.flash.fold import Fold, PackedFold, PlainFold
from nsa.backends.flash.libraries import Library, run_backward, run_forward
from nsa.backends.routing import CallRefused
from nsa.geometry import n_compressed_of
from nsa.sequences import Compressed, Saved, Sliding, Upstream

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Plan:
    """`enter` and `leave` move query-shaped tensors, `[B,S,H,...]`, into the call and back, with a fill for rows that
    see nothing; the other two move keys. `mask`: the rest of the call. `cached`: keys are slots of a cache."""

    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor, float], Tensor]
    enter_keys: Callable[[Tensor], Tensor]
    leave_keys: Callable[[Tensor], Tensor]
    mask: dict[str, Any]
    cached: bool = False


def common_width(d_k: int, d_v: int, contract: Contract) -> int:
    """The width at which keys and values are passed: equal, and a multiple of what the library takes."""
    return -(-max(d_k, d_v) // contract.width_step) * contract.width_step


def safe_offsets(cu_seqlens: Tensor, total: int) -> Tensor:
    """Offsets that point at no row that is not there, whatever the values; legal ones stay as they are.

    Values on a GPU are not looked at unless `strict` asks for it: a wrong one may give wrong numbers, as on every other
    path, but must not read memory that is not the caller's.
    """
    offsets = cu_seqlens.clamp(0, total).cummax(0).values
    offsets[:1] = 0
    offsets[-1:] = total
    return offsets


def dense_plan(window: int | None) -> Plan:
    return Plan(lambda x: x, lambda x, fill: x, lambda k: k, lambda k: k, {"window": window})


def packed_plan(q: Tensor, cu_seqlens: Tensor, window: int) -> Plan:
    offsets = safe_offsets(cu_seqlens, q.shape[1])
    # The longest document is a value on the device: the whole row is its bound, and one query would not be (#1537).
    longest = max(q.shape[1], 2)
    mask = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_q": longest, "max_k": longest, "window": window}
    return Plan(lambda x: x[0], lambda x, fill: x[None], lambda k: k[0], lambda k: k[None], mask)


def cached_plan(q: Tensor, k: Tensor, used: Tensor, *, causal: bool, window: int | None) -> Plan:
    """Row `b` of the batch sees the first `used[b]` keys; the mask ends at the last query and the last of those."""
    batch, length = q.shape[:2]
    device = q.device
    rows, apart = cache_rows(k), cache_stride(k)
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32)
    empty = (used <= 0).view(-1, 1)

    def leave(x: Tensor, fill: float) -> Tensor:
        x = x.unflatten(0, (batch, length))
        return x.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), fill)

    mask = {
        "causal": causal,
        "window": window,
        "cu_seqlens_q": starts * length,
        "cu_seqlens_k": (starts * apart).clamp_max(rows),
        "used_k": used.clamp(0, k.shape[1]).int(),
        "max_q": length,
        "max_k": k.shape[1],
    }
    return Plan(lambda x: x.flatten(0, 1), leave, rows_of_cache, unsupported_gradient, mask, cached=True)


def cache_stride(k: Tensor) -> int:
    """Keys between the first of one row and the first of the next: a cache has room after those in use."""
    if k.shape[0] == 1:
        return k.shape[1]
    if k.stride(1) <= 0 or k.stride(0) % k.stride(1) or k.stride(0) < k.shape[1] * k.stride(1):
        raise CallRefused(f"the rows of a cache with strides {k.stride()} do not follow each other without a copy")
    return k.stride(0) // k.stride(1)


def cache_rows(k: Tensor) -> int:
    return (k.shape[0] - 1) * cache_stride(k) + k.shape[1]


def rows_of_cache(k: Tensor) -> Tensor:
    """All rows of the batch one after the other, `[keys, G, D]`, with the room between them: always a view."""
    return k.as_strided((cache_rows(k), *k.shape[2:]), k.stride()[1:], k.storage_offset())


def check_cache(q: Tensor, k: Tensor, v: Tensor, width: int, dtype: torch.dtype) -> None:
    """A step with a cache makes one query and must not copy all keys for it, or read other keys than its own."""
    if dtype != q.dtype:
        raise CallRefused(f"a cast to {dtype} would copy the cache at every step")
    if not k.shape[-1] == v.shape[-1] == width:
        raise CallRefused(f"zeros up to width {width} would copy the cache at every step")
    if cache_stride(k) != cache_stride(v):
        apart = f"keys of the cache are {cache_stride(k)} apart and its values {cache_stride(v)}"
        raise CallRefused(f"rows of {apart}, one offset serves both: give them the same room")
    if not (aligned(k) and aligned(v)):
        raise CallRefused("aligning its rows would copy the cache at every step")


def unsupported_gradient(k: Tensor) -> Tensor:
    raise ValueError("q_start is given; accepted: None in a backward pass, a cache is not trained through")


def folded_plan(fold: Fold) -> Plan:
    if isinstance(fold, PlainFold):
        return Plan(fold.fold, fold.unfold, lambda k: k, lambda k: k, {})
    longest = max(fold.n_chunks, 2)
    mask = {"cu_seqlens_q": fold.offsets, "cu_seqlens_k": fold.offsets, "max_q": longest, "max_k": longest}
    # A row has a slot for every stride, its documents fewer blocks: `unfold` and `leave_keys` read none of the rest.
    mask["room_after"] = True

    def leave_keys(k: Tensor) -> Tensor:
        return k.masked_fill(fold.unused()[:, None, None], 0.0)[None]

    return Plan(lambda x: fold.fold(x)[0], lambda x, fill: fold.unfold(x[None], fill), lambda k: k[0], leave_keys, mask)


def compressed_plan(q: Tensor, k: Tensor, branch: Compressed) -> Plan:
    n_keys, n_groups = k.shape[1:3]
    block, stride, sequences = branch.block, branch.stride, branch.sequences
    if sequences.q_start is not None:
        return cached_plan(q, k, n_compressed_of(sequences.q_start + 1, block, stride), causal=False, window=None)
    if sequences.cu_seqlens is None:
        return folded_plan(PlainFold(q.shape[1], n_keys, n_groups, block, stride))
    offsets = safe_offsets(sequences.cu_seqlens, q.shape[1])
    return folded_plan(PackedFold(q.shape[1], n_keys, n_groups, block, stride, offsets))


def sliding_plan(q: Tensor, k: Tensor, branch: Sliding) -> Plan:
    sequences = branch.sequences
    # No query sees more keys than there are, and a library narrows the number to 32 bits.
    window = min(branch.window, k.shape[1])
    if sequences.q_start is not None:
        return cached_plan(q, k, sequences.q_start + q.shape[1], causal=True, window=window)
    return dense_plan(window) if sequences.cu_seqlens is None else packed_plan(q, sequences.cu_seqlens, window)


def ready(x: Tensor, width: int, given: torch.dtype, dtype: torch.dtype) -> Tensor:
    """As the library takes it; the same tensor where it already is. Only what has q's dtype, `given`, is cast with it:
    any other is for the contract to refuse."""
    if x.dtype == given:
        x = x.to(dtype)
    if x.shape[-1] < width:
        x = F.pad(x, (0, width - x.shape[-1]))
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


def forward_call(
    library: Library, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, dtype: torch.dtype
) -> Call:
    width = common_width(q.shape[-1], v.shape[-1], library.contract)
    if plan.cached:
        check_cache(q, k, v, width, dtype)
    return Call(
        q=ready(plan.enter(q), width, q.dtype, dtype),
        k=ready(plan.enter_keys(k), width, q.dtype, dtype),
        v=ready(plan.enter_keys(v), width, q.dtype, dtype),
        scale=scale,
        **plan.mask,
    )


def attend(
    library: Library, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`o [B,S,Hq,Dv]` in q's dtype and `lse [B,S,Hq]`."""
    o, lse = run_forward(library, forward_call(library, q, k, v, plan, scale, dtype))
    o = plan.leave(o, 0.0)[..., : v.shape[-1]].to(q.dtype)
    return o.contiguous(), plan.leave(lse.transpose(-1, -2), NEGATIVE_INFINITY).contiguous()


def gradients(
    library: Library, upstream: Upstream, saved: Saved, plan: Plan, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    do, dlse, *_ = upstream
    q, k, v, o, lse, _ = saved
    call = forward_call(library, q, k, v, plan, scale, dtype)
    width = call.q.shape[-1]
    # Gradients of a mean over many tokens are smaller than what fp16 holds: a cast takes them at another scale.
    cast = dtype != q.dtype
    do, unit = in_units(do) if cast else (do, None)
    # Rows that see nothing stay outside of the call, and places that hold no query have zeros for everything.
    call = replace(
        call,
        do=ready(plan.enter(do), width, q.dtype, dtype),
        o=ready(plan.enter(o), width, q.dtype, dtype),
        lse=plan.enter(lse).transpose(-1, -2).contiguous(),
    )
    dq, dk, dv = (times(x, unit) for x in run_backward(library, call))
    if dlse is not None:
        dlse, unit = in_units(dlse) if cast else (dlse, None)
        more_dq, more_dk = (times(x, unit) for x in normaliser_gradients(library, call, plan.enter(dlse)))
        dq, dk = dq + more_dq, dk + more_dk
    dq, dk = plan.leave(dq, 0.0), plan.leave_keys(dk)
    dv = plan.leave_keys(dv)
    parts = ((dq, q), (dk, k), (dv, v))
    dq, dk, dv = (x[..., : like.shape[-1]].to(like.dtype).contiguous() for x, like in parts)
    return dq, dk, dv


def in_units(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` in units of a power of two, the largest of it about 1, and that unit: a tensor, which nobody waits for."""
    largest = x.abs().amax().float()
    # What is not finite stays so in any unit, and a zero in the unit 1; fp32 holds no other powers.
    exponent = torch.frexp(largest.where(largest.isfinite(), 1.0)).exponent.clamp(-126, 127)
    unit = torch.exp2(exponent.float())
    return x / unit, unit


def times(x: Tensor, unit: Tensor | None) -> Tensor:
    """A gradient out of its unit, in fp32; as it is where it has none."""
    return x if unit is None else x.float() * unit


def normaliser_gradients(library: Library, call: Call, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """What a gradient of the normaliser adds to dq and dk, which the libraries do not compute.

    The normaliser's derivative in a score is the probability: dq gains `scale * dlse * P k` and dk gains
    `scale * P^T (dlse * q)`. The first is attention with the keys for values, the second its gradient in the values.
    """
    over_keys = replace(call, v=call.k, do=None, o=None, lse=None)
    mean_key, _ = run_forward(library, over_keys)
    weighted = (call.q * dlse[..., None]).to(call.q.dtype)
    _, _, more_dk = run_backward(library, replace(over_keys, do=weighted, o=mean_key, lse=call.lse))
    return mean_key * (call.scale * dlse[..., None]), more_dk * call.scale
