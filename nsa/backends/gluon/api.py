"""What the kernels take from Gluon, the low-level language inside Triton, whose API differs from version to version."""

from __future__ import annotations

import re

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# The versions with which the kernels were compiled and their machine code read: what another one makes of them would
# show at run time only.
VERSIONS = ("3.6", "3.7")
# As in 3.7, 3.7.1, 3.6.0.post1 and 3.7.0+cu130.
found = re.match(r"\d+\.\d+", triton.__version__)
if found is None or found[0] not in VERSIONS:
    raise ImportError(f"Gluon changes with Triton; the kernels are for {', '.join(VERSIONS)}, not {triton.__version__}")

# Among the warps of one partition. Renamed in Triton 3.7.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

__all__ = [
    "TensorDescriptor",
    "barrier",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
