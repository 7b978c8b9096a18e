"""Facts about the GPU of this process that several modules need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch

# Compute capabilities with less shared memory per SM than an A100 or H100.
SMALL_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))


class GpuPeaks(NamedTuple):
    """The peaks of a kind of GPU, as its vendor states them."""

    memory_gib: int
    flops: float  # dense bf16 and fp16, per second
    bytes: float  # of memory, per second


# By a part of the name that torch gives the GPU.
GPUS = {
    "B200": GpuPeaks(180, 2250e12, 8.0e12),
    "H200": GpuPeaks(141, 989e12, 4.8e12),
    "H100": GpuPeaks(80, 989e12, 3.35e12),
    "A100": GpuPeaks(80, 312e12, 2.04e12),
    "L40S": GpuPeaks(48, 362e12, 0.864e12),
    "RTX 4090": GpuPeaks(24, 165e12, 1.008e12),
}


def gpu_kind(name: str) -> str | None:
    """The key of `GPUS` in the name of a GPU; None for another one."""
    return next((kind for kind in GPUS if kind in name), None)


def gpu_name() -> str:
    """The current CUDA device's name, or "cpu" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def gpu_family(name: str) -> str:
    """The GPU's name without memory size and form factor: "NVIDIA A100" for "NVIDIA A100-SXM4-80GB"."""
    return re.split(r"[ -](?:SXM|PCI|NVL|HBM|\d+ ?GB)", name, maxsplit=1)[0]


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The driver's version, which the kernel module reports on Linux; "unknown" elsewhere."""
    if not path.is_file():
        return "unknown"
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    return found.group(1) if found else "unknown"
