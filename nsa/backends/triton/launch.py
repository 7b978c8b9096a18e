"""Kernel launches at little host cost: what shapes decide is bound once, a call passes tensors.

Triton's own launch path binds keyword arguments, specializes each of them and looks the kernel up: 30 to 60 us a call.
A `Launch` takes that path once and then calls the compiled kernel directly. It lives in a plan that its launcher caches
by `layout`, so everything Triton specializes on is fixed by then, except the alignment of pointers: that is the key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]


def layout(x: Tensor) -> Layout:
    """What a plan may depend on: all of `x` but its values."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0


def alignment(x: Any) -> bool | None:
    """What is left of an argument's specialization once shapes, strides and dtypes are fixed."""
    return x.data_ptr() % 16 == 0 if isinstance(x, Tensor) else None if x is None else True


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
        self.runners: dict[tuple[bool | None, ...], Callable[..., None]] = {}

    def __call__(self, **free: Any) -> None:
        key = tuple(map(alignment, free.values()))
        runner = self.runners.get(key)
        if runner is None:
            compiled = self.kernel[self.grid](**free, **self.bound)
            # The interpreter compiles nothing.
            if compiled is not None:
                self.runners[key] = compiled[self.grid]
            return
        values = self.template.copy()
        places = self.places
        for name, x in free.items():
            values[places[name]] = x
        runner(*values)
