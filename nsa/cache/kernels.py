"""Which kernels write and read a cache: those of the Triton backend where they run, else none."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from nsa import rope, settings
from nsa.backends import triton


def cache_kernels(backend: str, dtype: torch.dtype, x: Tensor) -> ModuleType | None:
    """The module of the kernels for a cache of `dtype` that holds `x`, or None, where torch's operations run.

    A compiler fuses those itself. Triton's interpreter, which is slow, runs by name alone.
    """
    if backend not in ("auto", "triton") or dtype not in triton.KERNEL_DTYPES or settings.current().force_parity:
        return None
    interpreted = backend == "triton" and x.device.type == "cpu" and settings.triton_interpreted()
    runs = rope.fused(x) or (interpreted and not torch.compiler.is_compiling())
    return triton.load("prefill")[0] if runs else None
