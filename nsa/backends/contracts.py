"""What each FlashAttention library accepts, checked before it is called: a wrong input is a sentence, never a crash.

These kernels trust their callers. A misaligned row, offsets that go backwards or a gradient past 2^31 elements end in
an illegal access, a floating point exception or a hang, and take the process with them. `limits` answers from sizes
alone, so a router can ask before any tensor exists; `violations` looks at the tensors of one call, without waiting for
the GPU; `value_violations` reads offsets back to the host, so only the probe asks it: under
`strict` the ops have read the offsets already.

Where a limit comes from a known defect, the defect is named beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
# A thread loads 16 bytes at once: rows must start at multiples of that.
LOAD_BYTES = 16
# Backward passes keep dQ in fp32, in rows and columns of whole tiles, and count its elements in 32 bits.
TILE_ROWS = 128
TILE_COLUMNS, WIDEST_STEP, WIDEST_TILE = 32, 192, 256
MOST_ELEMENTS = 2**31
# Lengths and windows are C ints: a larger number loses its upper bits, and a window past 2^32 becomes a few keys.
LARGEST_INT = 2**31 - 1
# The scale is a C float: a larger number is infinite, a smaller one zero.
FLOAT = torch.finfo(torch.float32)
# Sequences and heads are the second and third dimension of the launch grid.
MOST_GRID = 65_535
# Less shared memory a program than an A100 or H100 has.
SMALL_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))

Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The limits of one library. All of them align a causal mask at the last query and the last key."""

    library: str
    capabilities: tuple[int, ...]  # major versions
    widest: int = 256
    width_step: int = 8
    # Widths (Dk, Dv) that may differ in a forward pass; a backward pass needs them equal.
    unequal_widths: tuple[tuple[int, int], ...] = ()
    # Widths whose gradient needs more shared memory than `SMALL_SHARED_MEMORY` has: above the first, up to the second.
    wide_gradients: tuple[int, int] | None = None
    # Whether a sequence of a varlen call may have no token.
    takes_empty_sequences: bool = True
    dtypes: tuple[torch.dtype, ...] = HALF
    device: str = "cuda"


# Kernels of FlashAttention 2.x, as torch carries them: `aten._flash_attention_forward` and `_backward`.
TORCH = Contract(library="torch", capabilities=(8, 9, 10, 11, 12), wide_gradients=(192, 224))
# flash_attn from 2.7 on: earlier versions return other tuples and take a window as a pair.
FLASH_ATTN_2 = Contract(library="flash_attn", capabilities=(8, 9, 10, 11, 12), wide_gradients=(192, 224))
# Dao-AILab/flash-attention#1254: a varlen backward waits forever on an empty sequence.
FLASH_ATTN_3 = Contract(
    library="flash_attn_3", capabilities=(9,), unequal_widths=((192, 128),), takes_empty_sequences=False
)
# Dao-AILab/flash-attention#2470 (a division by zero on the host, SIGFPE) and #2562 (an illegal access): empty ones.
FLASH_ATTN_4 = Contract(
    library="flash_attn_4",
    capabilities=(9, 10),
    widest=128,
    unequal_widths=((192, 128),),
    takes_empty_sequences=False,
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call as it is about to be made: `q [B,S,H,D]`, `k` and `v [B,N,G,D]`, or without `B` and with offsets.

    `window` counts the keys a query sees, its own included; the libraries count those before it, `window - 1`.
    `used_k`: how many of each sequence's keys count, where they are slots of a cache. `room_after`: rows after the last
    sequence belong to nobody, and what the call leaves there is never read. `do`, `o` and `lse`: of a backward pass.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool = True
    window: int | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_q: int | None = None
    max_k: int | None = None
    used_k: Tensor | None = None
    room_after: bool = False
    do: Tensor | None = None
    o: Tensor | None = None
    lse: Tensor | None = None

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def backward(self) -> bool:
        return self.do is not None

    @property
    def n_sequences(self) -> int:
        return self.cu_seqlens_q.numel() - 1 if self.cu_seqlens_q is not None else self.q.shape[0]

    @property
    def window_size(self) -> tuple[int, int]:
        """`(left, right)` as the libraries count: inclusive, -1 for no bound."""
        left = -1 if self.window is None else self.window - 1
        return left, 0 if self.causal else -1

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """What the kernels read rows of, by name."""
        named = {"q": self.q, "k": self.k, "v": self.v, "do": self.do, "o": self.o}
        return {name: x for name, x in named.items() if x is not None}

    def __str__(self) -> str:
        """Everything a report needs to rebuild the call, values aside."""
        shown = self.tensors | ({} if self.lse is None else {"lse": self.lse})
        parts = [
            f"{name}={tuple(x.shape)}:{str(x.dtype).removeprefix('torch.')}:strides{x.stride()}"
            for name, x in shown.items()
        ]
        parts += [f"causal={self.causal}", f"window={self.window}", f"scale={self.scale:g}"]
        if self.varlen:
            parts += [f"sequences={self.n_sequences}", f"max_q={self.max_q}", f"max_k={self.max_k}"]
        return " ".join(parts)


def limits(
    contract: Contract,
    capability: Capability | None,
    *,
    dtype: torch.dtype,
    d_k: int,
    d_v: int,
    n_heads: int,
    n_groups: int,
    n_sequences: int,
    tile_rows: int,
    backward: bool,
) -> Iterator[str]:
    """Why sizes alone forbid a call; nothing when they do not. `tile_rows`: what `rows_in_tiles` says."""
    name = contract.library
    if capability is not None and capability[0] not in contract.capabilities:
        own, supported = ".".join(map(str, capability)), ", ".join(f"{major}.x" for major in contract.capabilities)
        yield f"the GPU's capability is {own}, {name} runs on {supported}: use another backend"
    if dtype not in contract.dtypes:
        yield f"the dtype is {dtype}, {name} takes fp16 and bf16: cast the inputs, or set NSA_FA2_PREF_FP16=1 for fp32"
    for label, width in (("keys", d_k), ("values", d_v)):
        if width % contract.width_step:
            yield f"the {label} are {width} wide, {name} takes multiples of {contract.width_step}: pad them with zeros"
        elif width > contract.widest and (d_k, d_v) not in contract.unequal_widths:
            yield f"the {label} are {width} wide, {name} takes at most {contract.widest}: use another backend"
    if d_k != d_v and (backward or (d_k, d_v) not in contract.unequal_widths):
        yield f"keys are {d_k} and values {d_v} wide, {name} takes equal widths: pad the narrower ones with zeros"
    if backward and contract.wide_gradients is not None and capability in SMALL_SHARED_MEMORY:
        above, up_to = contract.wide_gradients
        if above < max(d_k, d_v) <= up_to:
            wide = max(d_k, d_v)
            yield f"the gradient at width {wide} needs the shared memory of an A100 or H100: pad to {contract.widest}"
    if n_groups < 1 or n_heads % n_groups:
        yield f"{n_heads} query heads on {n_groups} key heads: the first must be a multiple of the second"
    if n_sequences < 1:
        yield "there is no sequence: do not call"
    for label, count in (("sequences", n_sequences), ("heads", n_heads)):
        if count > MOST_GRID:
            yield f"{count} {label} do not fit a launch grid, at most {MOST_GRID}: split the batch"
    if backward:
        elements = tile_rows * n_heads * width_in_tiles(max(d_k, d_v))
        if elements > MOST_ELEMENTS:
            yield f"the gradient sums {elements} elements, {name} counts up to 2^31 of them: split the batch"


def width_in_tiles(width: int) -> int:
    """Columns of the same sum: kernels above the widest step are all written for the widest head."""
    return -(-width // TILE_COLUMNS) * TILE_COLUMNS if width <= WIDEST_STEP else WIDEST_TILE


def rows_in_tiles(n_sequences: int, length: int, *, varlen: bool) -> int:
    """Rows of the fp32 sum behind dQ. `length`: queries of each sequence, or of all together where they vary."""
    if varlen:
        return length + TILE_ROWS * n_sequences
    return n_sequences * -(-length // TILE_ROWS) * TILE_ROWS


def violations(call: Call, contract: Contract, capability: Capability | None) -> list[str]:
    """Every reason not to make this call, found without waiting for the device."""
    found = list(kind_violations(call)) or list(shape_violations(call))
    if found:
        # The rest reads the shapes that have just been found wrong.
        return found
    found += limits(
        contract,
        capability,
        dtype=call.q.dtype,
        d_k=call.q.shape[-1],
        d_v=call.v.shape[-1],
        n_heads=call.q.shape[-2],
        n_groups=call.k.shape[-2],
        n_sequences=call.n_sequences,
        tile_rows=rows_in_tiles(call.n_sequences, call.q.shape[-3], varlen=call.varlen),
        backward=call.backward,
    )
    found += tensor_violations(call, contract)
    found += mask_violations(call)
    found += offset_violations(call) if call.varlen else unread_violations(call)
    return found


def kind_violations(call: Call) -> Iterator[str]:
    """What has no shape that could be asked for."""
    given: dict[str, object] = {**call.tensors, "lse": call.lse}
    given |= {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k, "used_k": call.used_k}
    for name, x in given.items():
        if isinstance(x, Tensor):
            if x.is_nested:
                yield f"{name} is a nested tensor: pass a plain one"
        elif x is not None:
            yield f"{name} is a {type(x).__name__}: pass a tensor"


def shape_violations(call: Call) -> Iterator[str]:
    dims = 3 if call.varlen else 4
    layout = "[tokens, heads, width]" if call.varlen else "[batch, tokens, heads, width]"
    for name, x in call.tensors.items():
        if x.dim() != dims:
            yield f"{name} has {x.dim()} dimensions; pass {dims}, {layout}"
            return
    q, k, v = call.q, call.k, call.v
    if k.shape[:-1] != v.shape[:-1]:
        yield f"k is {tuple(k.shape)} and v {tuple(v.shape)}: all but the width must be equal"
    if q.shape[-1] != k.shape[-1]:
        yield f"q is {q.shape[-1]} and k {k.shape[-1]} wide: pass equal widths"
    if not call.varlen and q.shape[0] != k.shape[0]:
        yield f"q has {q.shape[0]} rows of a batch and k {k.shape[0]}: pass equally many"
    if (call.cu_seqlens_q is None) != (call.cu_seqlens_k is None):
        yield "only one of cu_seqlens_q and cu_seqlens_k is given: pass both, or neither"
    if call.backward:
        expected = (*q.shape[:-1], v.shape[-1])
        for name in ("do", "o"):
            given = tuple(call.tensors[name].shape) if name in call.tensors else None
            if given != expected:
                yield f"{name} is {given}: pass {expected}, one row for every query"
        rows = (q.shape[1], q.shape[0]) if call.varlen else (q.shape[0], q.shape[2], q.shape[1])
        if call.lse is None or tuple(call.lse.shape) != rows or call.lse.dtype != torch.float32:
            kind = "missing" if call.lse is None else f"{tuple(call.lse.shape)} of {call.lse.dtype}"
            yield f"lse is {kind}: pass {rows} in fp32, as the forward pass returned it"
    elif call.o is not None or call.lse is not None:
        yield "o or lse is given without do: pass all three, or none in a forward pass"


def tensor_violations(call: Call, contract: Contract) -> Iterator[str]:
    device = call.q.device
    right_kind = device.type == contract.device
    for name, x in call.tensors.items():
        if x.layout != torch.strided:
            yield f"{name} is {x.layout}: pass .to_dense()"
            continue
        if not right_kind or x.device != device:
            yield f"{name} is on {x.device}: move it to the {contract.device} device of q"
        if x.dtype != call.q.dtype:
            yield f"{name} is {x.dtype} and q {call.q.dtype}: pass one dtype"
        if x.numel() == 0:
            yield f"{name} is empty, {tuple(x.shape)}: do not call"
        elif not aligned(x):
            yield f"{name} has strides {x.stride()} and starts at byte {x.data_ptr() % LOAD_BYTES} of 16: pass .clone()"
    # Not among the rows: the kernels walk it without asking for its strides.
    if call.lse is not None:
        if call.lse.device != device:
            yield f"lse is on {call.lse.device}: move it to q's device, {device}"
        if not call.lse.is_contiguous():
            yield f"lse has strides {call.lse.stride()}: pass .contiguous()"


def aligned(x: Tensor) -> bool:
    """Every row starts where a 16-byte load may, and is contiguous."""
    # Asked of every tensor of every call: no list is made.
    step = LOAD_BYTES // x.element_size()
    shape, (*outer, last) = x.shape, x.stride()
    if x.data_ptr() % LOAD_BYTES or (last != 1 and shape[-1] != 1):
        return False
    return not any(stride % step and size > 1 for size, stride in zip(shape, outer, strict=False))


def mask_violations(call: Call) -> Iterator[str]:
    if not fits_float(call.scale):
        yield f"scale is {call.scale!r}: pass a positive number that fp32 holds"
    if call.window is not None and not fits_int(call.window):
        yield f"window is {call.window}: pass an integer of at least 1, a query sees itself, and at most {LARGEST_INT}"
    if call.window is not None and not call.causal:
        yield "a window without a causal mask would look ahead: pass causal=True"
    n_queries, n_keys = call.q.shape[-3], call.k.shape[-3]
    # With offsets, lengths are values on the device.
    if call.causal and not call.varlen and n_queries > n_keys:
        first = n_queries - n_keys
        yield f"the mask ends at the last query and key, the first {first} queries see none: leave them out"


def fits_float(number: object) -> bool:
    """A positive number that a C float holds."""
    return isinstance(number, int | float) and not isinstance(number, bool) and FLOAT.tiny <= number <= FLOAT.max


def fits_int(number: object) -> bool:
    """A positive number that a C int holds."""
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= LARGEST_INT


def unread_violations(call: Call) -> Iterator[str]:
    """What a call without offsets would take and not look at."""
    if call.used_k is not None:
        yield "used_k is given without offsets, and would not be read: pass cu_seqlens_q and cu_seqlens_k"
    for name, longest in (("max_q", call.max_q), ("max_k", call.max_k)):
        if longest is not None:
            yield f"{name} is {longest} without offsets: leave it out, the shapes say it"
    if call.room_after:
        yield "room_after is set without offsets: leave it out, every row is a sequence's"


def offset_violations(call: Call) -> Iterator[str]:
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    offsets = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    for name, x in (offsets if call.used_k is None else offsets | {"used_k": call.used_k}).items():
        if x.dtype != torch.int32:
            yield f"{name} is {x.dtype}: pass int32"
        if x.device != call.q.device:
            yield f"{name} is on {x.device}: move it to q's device, {call.q.device}"
        expected = call.n_sequences if name == "used_k" else call.n_sequences + 1
        if x.dim() != 1 or x.numel() != expected:
            yield f"{name} has shape {tuple(x.shape)}: pass ({expected},)"
        elif not x.is_contiguous():
            yield f"{name} has stride {x.stride()}: pass .contiguous()"
    for name, longest, total in (("max_q", call.max_q, call.q.shape[0]), ("max_k", call.max_k, call.k.shape[0])):
        if not fits_int(longest):
            bound = f"any upper bound such as {total}, up to {LARGEST_INT}"
            yield f"{name} is {longest}: pass the longest sequence, or {bound}"
    if call.used_k is not None and call.backward:
        yield "used_k has no gradient: train on whole sequences"
    # Dao-AILab/flash-attention#1537: with max_q = 1 the heads of a group become queries, one for every sequence.
    if call.max_q == 1 and call.q.shape[0] != call.n_sequences:
        yield f"max_q is 1 for {call.q.shape[0]} queries in {call.n_sequences} sequences: pass max_q=2"


def value_violations(call: Call, contract: Contract) -> list[str]:
    """What offsets say that only their values can tell. Waits for the device."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return []
    wrong = list(kind_violations(call))
    if wrong:
        return wrong
    given = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    for name, x in given.items():
        if x.dim() != 1 or x.numel() < 2:
            return [f"{name} has shape {tuple(x.shape)}: pass one number more than there are sequences"]
    found = []
    lengths = {}
    totals = {"cu_seqlens_q": call.q.shape[0], "cu_seqlens_k": call.k.shape[0]}
    for name, x in given.items():
        total = totals[name]
        values = x.tolist()
        lengths[name] = [b - a for a, b in pairwise(values)]
        if values[0] != 0:
            found.append(f"{name} starts at {values[0]}: start at 0")
        if min(lengths[name]) < 0:
            found.append(f"{name} goes backwards, {values}: pass non-decreasing offsets")
        if values[-1] > total:
            found.append(
                f"{name} ends at {values[-1]}, past the {total} rows it points into: pass offsets of these rows"
            )
        if values[-1] < total and not call.room_after:
            unowned = f"{name} ends at {values[-1]}, before the {total} rows it points into"
            found.append(f"{unowned}: end at {total}, or set room_after and never read the rest")
        if not contract.takes_empty_sequences and 0 in lengths[name]:
            found.append(f"{name} has an empty sequence, which {contract.library} does not survive: leave it out")
    n_queries, room = lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]
    n_keys, counted = room, "cu_seqlens_k"
    if call.used_k is not None:
        # Offsets then say where a row of the cache starts, and not how long it is.
        n_keys, counted = call.used_k.flatten().tolist(), "used_k"
        for used, most in zip(n_keys, room, strict=False):
            if not 0 <= used <= most:
                found.append(f"used_k has {used} keys in a sequence of {most}: pass 0 to {most}")
    for name, sizes, longest in (("cu_seqlens_q", n_queries, call.max_q), (counted, n_keys, call.max_k)):
        if longest is not None and max(sizes, default=0) > longest:
            found.append(f"a sequence of {name} is {max(sizes)} long, above max {longest}: pass its length")
    if call.causal:
        for queries, keys in zip(n_queries, n_keys, strict=False):
            if queries > keys:
                hidden = f"{queries} queries on {keys} keys: the first {queries - keys} see none"
                found.append(f"a sequence has {hidden}, leave them out")
    return found
