"""The contracts of the FlashAttention libraries. A call outside of them is never made.

These kernels trust their callers: a misaligned row or a gradient past 2^31 elements ends in an illegal access, a
floating-point exception or a hang, which takes the process down. `limits` answers from sizes alone, so the router can
ask before any tensor exists; `violations` applies it to one call. What our own code guarantees about the tensors of a
call is asserted (`check_call`). Nothing here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nsa.backends.gpu import SMALL_SHARED_MEMORY

HALF = (torch.float16, torch.bfloat16)
HEAD_DIM_STEP = 8
# A thread loads 16 bytes at once: rows must start at multiples of that.
LOAD_BYTES = 16
# Backward passes keep dQ in fp32, padded to whole tiles, and count its elements in 32 bits.
TILE_ROWS = 128
TILE_COLUMNS, WIDEST_STEP, WIDEST_TILE = 32, 192, 256
MAX_GRADIENT_ELEMENTS = 2**31
# Lengths and windows are C ints: a larger number loses its upper bits.
MAX_INT = 2**31 - 1
# The scale is a C float.
FLOAT = torch.finfo(torch.float32)
# Sequences and heads are the second and third dimension of the launch grid.
MAX_GRID = 65_535
# Head dims, above the first up to the second, whose gradient does not fit the GPUs of SMALL_SHARED_MEMORY.
WIDE_GRADIENTS = (192, 224)

Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The limits of one library. All of them align a causal mask at the last query and the last key."""

    library: str
    capabilities: tuple[int, ...] = (8, 9, 10, 11, 12)  # major versions
    max_head_dim: int = 256
    dtypes: tuple[torch.dtype, ...] = HALF
    device: str = "cuda"


# FlashAttention-2 as torch ships it: `aten._flash_attention_forward` and `_backward`.
TORCH = Contract(library="torch")
# flash_attn from 2.7 on: earlier versions return other tuples.
FLASH_ATTN_2 = Contract(library="flash_attn")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: `q [B,S,H,D]`, `k` and `v [B,N,G,D]`; with offsets (varlen) without `B`.

    `window` counts the keys that a query sees, itself included; the libraries count those before it, `window - 1`.
    `used_k`: how many of each sequence's keys count, where they are slots of a cache. `do`, `o`, `lse`: for a backward
    pass.
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
    do: Tensor | None = None
    o: Tensor | None = None
    lse: Tensor | None = None

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

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
        """The tensors whose rows the kernels read, by name."""
        named = {"q": self.q, "k": self.k, "v": self.v, "do": self.do, "o": self.o}
        return {name: x for name, x in named.items() if x is not None}

    def __str__(self) -> str:
        """Everything that a report needs to rebuild the call, values aside."""
        parts = []
        for name, x in (self.tensors | ({} if self.lse is None else {"lse": self.lse})).items():
            parts.append(f"{name}={tuple(x.shape)}:{str(x.dtype).removeprefix('torch.')}:strides{x.stride()}")
        parts.append(f"causal={self.causal} window={self.window} scale={self.scale:g}")
        if self.varlen:
            parts.append(f"sequences={self.n_sequences} max_q={self.max_q} max_k={self.max_k}")
        return " ".join(parts)


def limits(
    contract: Contract,
    capability: Capability | None,
    *,
    dtype: torch.dtype,
    head_dim: int,
    n_heads: int,
    n_sequences: int,
    gradient_rows: int | None,
) -> Iterator[str]:
    """Why sizes, as the library would get them (padded, folded, cast), forbid a call; nothing if they do not.

    `capability`: the GPU's, None on a CPU. `gradient_rows`: `rows_in_tiles` of a backward pass.
    """
    name = contract.library
    if capability is not None and capability[0] not in contract.capabilities:
        own, supported = ".".join(map(str, capability)), ", ".join(f"{major}.x" for major in contract.capabilities)
        yield f"the GPU's capability is {own}, {name} runs on {supported}"
    if dtype not in contract.dtypes:
        yield f"the dtype is {dtype}, {name} takes fp16 and bf16 (NSA_FA2_PREF_FP16=1 casts fp32)"
    if head_dim > contract.max_head_dim:
        yield f"head_dim is {head_dim}, {name} takes at most {contract.max_head_dim}"
    for label, count in (("sequences", n_sequences), ("heads", n_heads)):
        if not 1 <= count <= MAX_GRID:
            yield f"{count} {label} do not fit a launch grid of 1 to {MAX_GRID}"
    if gradient_rows is None:
        return
    if capability in SMALL_SHARED_MEMORY and WIDE_GRADIENTS[0] < head_dim <= WIDE_GRADIENTS[1]:
        yield f"the gradient at head_dim {head_dim} needs the shared memory of an A100 or H100"
    # Kernels above the widest step are all written for the widest head.
    columns = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS if head_dim <= WIDEST_STEP else WIDEST_TILE
    elements = gradient_rows * n_heads * columns
    if elements > MAX_GRADIENT_ELEMENTS:
        yield f"dQ has {elements} elements in whole tiles, {name} counts up to 2^31 of them: split the batch"


def rows_in_tiles(n_sequences: int, length: int, *, varlen: bool) -> int:
    """Rows of the fp32 dQ. `length`: queries of each sequence, or with `varlen` of all of them."""
    return length + TILE_ROWS * n_sequences if varlen else n_sequences * -(-length // TILE_ROWS) * TILE_ROWS


def violations(call: Call, contract: Contract, capability: Capability | None) -> list[str]:
    """Why this call must not be made, as far as a user's input can be the cause."""
    check_call(call, contract)
    length, n_heads, head_dim = call.q.shape[-3:]
    rows = None if call.do is None else rows_in_tiles(call.n_sequences, length, varlen=call.varlen)
    sizes: dict[str, Any] = {"head_dim": head_dim, "n_heads": n_heads, "n_sequences": call.n_sequences}
    found = list(limits(contract, capability, dtype=call.q.dtype, **sizes, gradient_rows=rows))
    scale_fits = FLOAT.tiny <= call.scale <= FLOAT.max
    return found if scale_fits else [*found, f"scale is {call.scale!r}, which fp32 does not hold"]


def check_call(call: Call, contract: Contract) -> None:
    """Assert what the branches and the probe guarantee: the kernels read wrong memory, or hang, where it is not so."""
    q, k, v = call.q, call.k, call.v
    assert q.device.type == contract.device, q.device
    for name, x in call.tensors.items():
        assert x.dim() == (3 if call.varlen else 4), (name, x.shape)
        assert (x.dtype, x.device) == (q.dtype, q.device), (name, x.dtype, x.device)
        assert x.numel() > 0, (name, x.shape)
        assert aligned(x), (name, x.stride())
    assert k.shape == v.shape, (k.shape, v.shape)
    assert q.shape[-1] == k.shape[-1], (q.shape, k.shape)
    assert q.shape[-2] % k.shape[-2] == 0, (q.shape, k.shape)
    assert call.window is None or (call.causal and 1 <= call.window <= MAX_INT), call.window
    if call.do is not None:
        assert call.o is not None
        assert call.lse is not None
        assert q.shape == call.do.shape == call.o.shape, (call.do.shape, call.o.shape)
        assert call.lse.shape == lse_shape(q), call.lse.shape
        # The kernels do not ask for its strides.
        assert call.lse.dtype == torch.float32, call.lse.dtype
        assert call.lse.is_contiguous(), call.lse.stride()
        assert call.used_k is None, "a cache has no gradient"
    if not call.varlen:
        assert call.used_k is None
        # The mask ends at the last query and key: the first of more queries than keys would see nothing.
        assert not call.causal or q.shape[1] <= k.shape[1], (q.shape, k.shape)
        return
    assert call.cu_seqlens_k is not None
    n = call.n_sequences
    for offsets, size in ((call.cu_seqlens_q, n + 1), (call.cu_seqlens_k, n + 1), (call.used_k, n)):
        if offsets is not None:
            assert (offsets.dtype, offsets.device, offsets.shape) == (torch.int32, q.device, (size,)), offsets
            assert offsets.is_contiguous(), offsets.stride()
    for longest in (call.max_q, call.max_k):
        assert 1 <= (longest or 0) <= MAX_INT, longest
    # Dao-AILab/flash-attention#1537: with max_q = 1 the heads of a group become queries, one for each sequence.
    assert call.max_q != 1 or q.shape[0] == call.n_sequences, (q.shape, call.n_sequences)


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """`[H,tokens]` of a varlen `q`, else `[B,H,S]`."""
    *batch, tokens, heads, _ = q.shape
    return (*batch, heads, tokens)


def aligned(x: Tensor) -> bool:
    """Whether every row is contiguous and starts where a 16-byte load may."""
    # Called for every tensor of every call: builds no list.
    step = LOAD_BYTES // x.element_size()
    shape, (*outer, last) = x.shape, x.stride()
    if x.data_ptr() % LOAD_BYTES or (last != 1 and shape[-1] != 1):
        return False
    return not any(stride % step and size > 1 for size, stride in zip(shape, outer, strict=False))
