"""This machine: devices, versions, GPUs, and settings of torch and the driver that change speed or memory.

`nsa doctor` prints it; `run.json` records it.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

import nsa
from nsa import settings
from nsa.backends import triton
from nsa.backends.gpu import nvidia_driver
from nsa.config import require
from nsa.origin import package_version
from nsa.settings import Settings

# Known problems of Triton, by first and last version.
TRITON_NOTES = {
    ((3, 4, 0), (3, 7, 0)): (
        "Triton 3.4.0 to 3.7.0 miscompiles, on Hopper, a dot whose operand is a transposed accumulator: gradients come "
        "out wrong without an error. The kernels of this library avoid that form; other Triton kernels here may not. "
        "3.7.1 is fixed."
    ),
    ((3, 5, 0), (3, 7, 1)): (
        "ptxas 12.8, which Triton 3.5 to 3.7.1 bring, miscompiles, on Hopper, a lone loop of two dots whose first has "
        "rows in registers from before the loop: results come out wrong without an error. The kernels of this library "
        "avoid that form, and its tests read their machine code; other Triton kernels here may not."
    ),
    ((3, 4, 0), (3, 7, 1)): (
        "Triton 3.4.0 to 3.7.1 miscompiles a reduction over several warps after some reshapes: parts are written over "
        "each other, and results differ from run to run. The kernels of this library avoid that form, and its tests "
        "read their layouts; other Triton kernels here may not. 3.8 is fixed."
    ),
}


@dataclass(frozen=True)
class Versions:
    nsa: str
    python: str
    torch: str
    triton: str | None
    triton_note: str | None


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    memory_gib: float
    driver: str


def usable_device(name: str | None) -> torch.device:
    """The device `name` (None: the first GPU, else the CPU), or a `ValueError` where torch cannot use it."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is {name!r}; accepted: 'cpu' or 'cuda'") from None
    require(device.type in ("cpu", "cuda"), "device", name, "'cpu' or 'cuda'")
    if device.type == "cuda":
        require(torch.cuda.is_available(), "device", name, "'cpu', because torch sees no GPU here")
        count = torch.cuda.device_count()
        require((device.index or 0) < count, "device", name, f"an index below {count}, the GPUs that torch sees here")
    return device


def find_versions() -> Versions:
    found = triton_version()
    note = "\n".join(triton_notes(found)) or None
    return Versions(nsa.__version__, platform.python_version(), str(torch.__version__), found, note)


def triton_version() -> str | None:
    """The version of Triton, without importing it; None where there is none."""
    if not triton.installed():
        return None
    found = map(package_version, ("triton", "pytorch-triton", "triton-windows"))
    return next(filter(None, found), "of unknown version")


def triton_notes(version: str | None) -> list[str]:
    release = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    if release is None:
        return []
    found = tuple(map(int, release.groups()))
    return [note for (first, last), note in TRITON_NOTES.items() if first <= found <= last]


def find_gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    driver = nvidia_driver()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gib = [round(gpu.total_memory / 2**30, 1) for gpu in properties]
    return tuple(Gpu(x.name, f"{x.major}.{x.minor}", n, driver) for x, n in zip(properties, gib, strict=True))


def runtime() -> dict[str, Any]:
    """Driver, libraries, and torch's settings of TF32 and of the allocator."""
    return {
        "driver": nvidia_driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        # Without it the training log has no gpu_util.
        "nvml": find_spec("pynvml") is not None,
        "tf32": {
            "matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
            "cudnn": torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
        },
        "variables": settings.torch_variables(),
    }


def debug_modes(config: Settings) -> list[str]:
    """Debugging aids that are on and slow every step down."""
    found = [
        f"{config.describe(name)}: {settings.BY_NAME[name].meaning}"
        for name in ("force_parity", "sdpa_audit", "debug_timing")
        if getattr(config, name)
    ]
    if torch.is_anomaly_enabled():
        found.append("torch's anomaly mode is on: every backward keeps and checks the stack of its forward")
    if settings.torch_variables().get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        found.append("CUDA_LAUNCH_BLOCKING is on: every launch waits for its kernel to end")
    return found
