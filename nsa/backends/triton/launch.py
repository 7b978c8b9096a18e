"""Kernel launches at little host cost: what shapes decide is bound once, a call passes tensors.

Triton's own launch path binds keyword arguments, specializes each of them, looks the kernel up: 30 to 60 us per call.
A `Launch` takes that path once and then calls the compiled kernel directly. It lives in a plan that its launcher caches
by `layout`, so everything Triton specializes on is fixed by then, except the alignment of pointers: that is the key.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa import settings
from nsa.backends.gluon import KernelFailure

if settings.triton_interpreted():
    from nsa.backends.triton import interpreter

    interpreter.mend()

# What Triton raises where a GPU cannot take a kernel.
LAUNCH_FAILURES = (OutOfResources, CompilationError, PTXASError)
# What takes every launch to have its kernel compiled, and runs none: see `ahead`.
COLLECTING: ContextVar[Any] = ContextVar("collecting", default=None)

# Plans that a launcher keeps: sequence lengths may never repeat, and memory must not grow with them.
MAX_PLANS = 256


class Layout(NamedTuple):
    """The layout of a tensor, which a plan may depend on: all but its values and its exact address."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool


def layout(x: Tensor) -> Layout:
    return Layout(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)


def new_layout(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Layout:
    """The layout of a tensor that `torch.empty` makes."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * size)
    return Layout(torch.Size(shape), tuple(reversed(steps)), dtype, device, aligned=True)


def strides(**layouts: Layout | None) -> dict[str, int]:
    """`stride_qb`, `stride_qt`, `stride_qh` for `q_bth=layout(q)`, and so on; zeros for a tensor that is not there.

    Where the last axis is not named, a kernel takes it to be contiguous.
    """
    found = {}
    for name, x in layouts.items():
        tensor, _, axes = name.partition("_")
        if x is not None and len(axes) < len(x.shape):
            contiguous = x.strides[-1] == 1 or x.shape[-1] == 1 or 0 in x.shape
            assert contiguous, f"{name}: the last axis of {tuple(x.shape)} has stride {x.strides[-1]}"
        for i, axis in enumerate(axes):
            found[f"stride_{tensor}{axis}"] = 0 if x is None else x.strides[i]
    return found


class Launch:
    """A kernel with its grid and every argument that is known beforehand: strides, counts, constants, options.

    The remaining arguments are passed by name: pointers, descriptors, and integers that the kernel is not specialized
    on (`do_not_specialize`). An argument must be a tensor or None in every call of one `Launch`, never either.
    """

    __slots__ = ("bound", "grid", "kernel", "places", "runners", "template")

    def __init__(self, kernel: Any, grid: tuple[int, ...], **bound: Any) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.bound = bound
        self.places = {name: i for i, name in enumerate(kernel.arg_names)}
        self.template = [bound.get(name) for name in kernel.arg_names]
        self.runners: dict[tuple[bool, ...], Callable[..., None]] = {}

    def __call__(self, **free: Any) -> None:
        collector = COLLECTING.get()
        if collector is not None:
            collector.submit(self, free)
            return
        values, places, key = self.template.copy(), self.places, []
        for name, x in free.items():
            if isinstance(x, Tensor):
                # As a number: of a tensor, Triton's launcher would ask the driver where it lies.
                x = x.data_ptr()
                key.append(x % 16 == 0)
            else:
                key.append(x is None)
            values[places[name]] = x
        # What is left of the arguments' specialization once shapes, strides and dtypes are fixed.
        runner = self.runners.get(tuple(key))
        if runner is not None:
            runner(*values)
            return
        tensors = (getattr(x, "base", x) for x in free.values())  # of a descriptor, what it describes
        device = next(x.device for x in tensors if isinstance(x, Tensor))
        # Triton loads and launches on the current device, which need not be the one of the tensors.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                compiled = self.kernel[self.grid](**free, **self.bound)
            except (*LAUNCH_FAILURES, RuntimeError) as error:
                # RuntimeError: what a compiler pass or the driver raises.
                if self.kernel.is_gluon() and not isinstance(error, torch.OutOfMemoryError):
                    raise KernelFailure(f"{self.kernel.__name__} failed: {shorten(str(error), 300)}") from error
                raise
        # The interpreter compiles nothing.
        if compiled is not None:
            self.runners[tuple(key)] = runner_of(compiled, self.grid, device.index)


def runner_of(compiled: Any, grid: tuple[int, ...], device: int) -> Callable[..., None]:
    """Launches a compiled kernel on the current stream of the device that it was loaded on, as Triton's JIT does, but
    without its launch hooks."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    there: AbstractContextManager[Any] = nullcontext()
    x, y, z = grid

    def runner(*args: Any) -> None:
        with there if current_device() == device else torch.cuda.device(device):
            run(x, y, z, current_stream(device), function, metadata, None, None, None, *args)

    return runner


class BoxDescriptor:
    """Makes tensor descriptors (TMA) of one layout and box. What they hold besides the pointer is checked once."""

    __slots__ = ("fields", "kind")
    kind: Any

    def __init__(self, x: Layout, box: tuple[int, ...], *shared: Any, kind: Any = TensorDescriptor) -> None:
        base = torch.empty(0, dtype=x.dtype, device="meta")
        self.kind, self.fields = kind, vars(kind(base, list(x.shape), list(x.strides), list(box), *shared))

    def __call__(self, x: Tensor) -> Any:
        made = self.kind.__new__(self.kind)
        made.__dict__.update(self.fields)
        made.base = x
        return made
