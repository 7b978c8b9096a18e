"""Facts about the GPU of this process that several modules need."""

from __future__ import annotations

import re
from pathlib import Path

import torch

# Compute capabilities with less shared memory per SM than an A100 or H100.
SMALL_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))


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
