"""Small problems in eager loops: a function of tensors that comes again is one launch of a CUDA graph.

A layer is about a hundred kernels, which a small one runs faster than Python can launch them. So what is called for the
third time with the same shapes is captured as a graph. A call copies its inputs into fixed memory, launches the graph
and copies the results out: nothing that a caller holds is ever overwritten, and all captures share that memory. The
kernels are the same, and so is every bit of the results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import prod
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nsa import settings
from nsa.backends.routing import router
from nsa.captures import NotCapturableError, try_to_capture
from nsa.cuda_graph import capture_graph
from nsa.dtypes import matmul_dtype

DEVICE = "cuda"
# Elements of the input up to which launching takes the host longer than computing, and copying, takes a GPU.
MAX_ATTENTION, MAX_LAYER = 4 << 20, 12 << 20
# Other backends may keep tables that they replace one day.
REPLAYABLE = ("triton",)
# Bytes. Triton's kernels are compiled for pointers that torch's allocator aligns.
BLOCK_ALIGNMENT = 256


class Pack:
    """How tensors lie in one block of memory, which has their dtype if they share one, else bytes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        dtypes = {x.dtype for x in tensors}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self.layouts = [(x.shape, torch.empty(x.shape, device="meta").stride(), x.dtype) for x in tensors]
        self.offsets, self.size = [], 0
        for x in tensors:
            self.offsets.append(self.size // self.dtype.itemsize)
            self.size += -(-x.numel() * x.element_size() // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT

    def tensors(self, block: Tensor) -> list[Tensor]:
        """The tensors in `block`, contiguous. No views: changing one in place is no change of the others."""
        found = []
        for offset, (shape, stride, dtype) in zip(self.offsets, self.layouts, strict=True):
            if dtype != self.dtype:
                part = block[offset : offset + prod(shape) * dtype.itemsize].view(dtype)
                found.append(part.view(shape).data)
            else:
                found.append(block.as_strided(shape, stride, offset).data)
        return found


class SharedMemory(NamedTuple):
    """The memory that the captures for one stream share: functions on one stream never overlap."""

    pool: torch.cuda.MemPool
    stream: torch.cuda.Stream  # to capture on
    lock: threading.RLock  # a call is several: copy, launch, copy
    buffers: WeakValueDictionary[tuple[Any, ...], Tensor]  # inputs and outputs, for as long as a graph uses them
    broken: threading.Event  # set by a capture that failed: pool and stream may not have left it

    def buffer(self, role: object, like: Tensor) -> Tensor:
        key = (role, like.shape, like.dtype)
        found = self.buffers.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            self.buffers[key] = found
        return found


@lru_cache(maxsize=32)
def memory(device: torch.device, stream: int) -> SharedMemory:
    """The shared memory of functions that run on `stream`."""
    del stream
    with torch.cuda.device(device):
        pool, side = torch.cuda.MemPool(), torch.cuda.Stream(device)
    return SharedMemory(pool, side, threading.RLock(), WeakValueDictionary(), threading.Event())


Results = Sequence[Tensor | Sequence[Tensor]]


class ReplayedFunction:
    """`function(*inputs)` as a graph, captured for tensors laid out as `inputs` are. Of its results, those in a
    sequence come as one block; `packs` has their layout. Raises NotCapturableError for a backend that may not be
    replayed, and after a capture that failed."""

    def __init__(self, function: Callable[..., Results], inputs: Sequence[Tensor]) -> None:
        device = inputs[0].device
        self.memory = memory(device, current_stream(device))
        if self.memory.broken.is_set():
            raise NotCapturableError
        self.inputs = [self.memory.buffer(("in", i), x) for i, x in enumerate(inputs)]
        self.packs: list[Pack | None] = []
        self.outputs: list[Tensor] = []
        # Tensors of one dtype are copied by one kernel.
        dtypes = dict.fromkeys(x.dtype for x in inputs)
        self.copied = [[i for i, x in enumerate(inputs) if x.dtype == dtype] for dtype in dtypes]
        with self.memory.lock, torch.inference_mode(False), torch.no_grad(), torch.autocast(DEVICE, enabled=False):
            self.copy_in([x.detach() for x in inputs])
            with router().counts.record() as self.calls:
                # Kernels must be compiled, and tables made.
                for i, result in enumerate(function(*self.inputs)):
                    pack, like = None, result
                    if not isinstance(result, Tensor):
                        pack = Pack(result)
                        like = torch.empty(pack.size // pack.dtype.itemsize, dtype=pack.dtype, device=device)
                    self.packs.append(pack)
                    self.outputs.append(self.memory.buffer(("out", i), cast(Tensor, like)))
            if any(backend not in REPLAYABLE for _, backend in self.calls):
                # It may wait for the device, which a capture does not survive.
                raise NotCapturableError
            self.calls[("graph", "replay")] = 1
            run = partial(self.run, function)
            try:
                self.graph = capture_graph(run, pool=self.memory.pool, stream=self.memory.stream)
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError):
                    self.memory.broken.set()
                raise

    def run(self, function: Callable[..., Results]) -> None:
        for pack, output, result in zip(self.packs, self.outputs, function(*self.inputs), strict=True):
            if pack is None:
                output.copy_(cast(Tensor, result))
            else:
                torch._foreach_copy_(pack.tensors(output), list(result))

    def copy_in(self, inputs: Sequence[Tensor]) -> None:
        for places in self.copied:
            torch._foreach_copy_([self.inputs[i] for i in places], [inputs[i] for i in places])

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        with self.memory.lock:
            self.copy_in(inputs)
            self.graph.replay()
            router().counts.add_calls(self.calls)
            return [x.clone() for x in self.outputs]


class BothPasses:
    """A forward pass as a graph, and its backward pass, which is captured when it first comes."""

    def __init__(self, function: Callable[..., Results], inputs: Sequence[Tensor]) -> None:
        self.forward = ReplayedFunction(function, inputs)
        self.backward: ReplayedFunction | None = None
        self.captures_backward = True

    def find_backward(self, function: Callable[..., Results], inputs: Sequence[Tensor]) -> ReplayedFunction | None:
        """`function` as a graph; None where it is to be called."""
        if torch.cuda.is_current_stream_capturing():
            return None
        if self.backward is None and self.captures_backward:
            self.backward = try_to_capture(partial(ReplayedFunction, function, inputs))
            self.captures_backward = self.backward is not None
        return self.backward


def can_replay(x: Tensor, most: int, backend: str, strict: bool) -> bool:
    """Whether an eager call with fixed-length sequences, and `x` for its largest input, may be replayed: one of up to
    `most` elements."""
    if x.device.type != DEVICE or prod(x.shape) > most or strict or backend not in ("auto", "triton"):
        return False
    if torch.cuda.is_current_stream_capturing() or not settings.current().replay or router().logs_calls:
        return False
    # Activation checkpointing compares what is saved with what it saved in the first pass.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return not hooked and x.dtype != torch.float64 and has_pools()


@cache
def has_pools() -> bool:
    """Whether the allocator has pools of memory: cudaMallocAsync has none."""
    return torch.cuda.get_allocator_backend() == "native"


def situation(x: Tensor) -> tuple[Any, ...]:
    """A key of all that a graph depends on besides shapes: stream, dtype, precision, and whether gradients are
    computed."""
    matmul = torch._C._get_fp32_precision_getter("cuda", "matmul")
    sums = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    half_sums = torch._C._get_cublas_allow_fp16_reduced_precision_reduction()
    accumulation = torch._C._get_cublas_allow_fp16_accumulation()
    stream, dtype = current_stream(x.device), matmul_dtype(x)
    return x.device, stream, x.dtype, dtype, torch.is_grad_enabled(), matmul, sums, half_sums, accumulation


def addresses(tensors: Sequence[Tensor | None]) -> tuple[tuple[int, torch.Size], ...]:
    """The addresses and shapes of tensors: a slice may start where the whole tensor did."""
    return tuple([(x.data_ptr(), x.shape) for x in tensors if x is not None])


def current_stream(device: torch.device) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream
