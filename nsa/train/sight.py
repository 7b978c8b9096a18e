"""Numbers about a run that have to be asked for: what the attention does, layer by layer, and what the machine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from nsa.attention import NSAAttention, NSAStats
from nsa.backends.routing import counts_so_far
from nsa.data import Batch
from nsa.model import LM
from nsa.train.step import autocast

# Dense bf16 and fp16 products a second, as the makers state them, by a part of the name that torch gives the GPU.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


@contextmanager
def watching(model: LM) -> Iterator[dict[int, NSAStats]]:
    """What every NSA layer does in forwards in here, by layer. Outside of it nothing is left in the model."""
    found: dict[int, NSAStats] = {}
    handles = []
    for index, block in enumerate(model.blocks):
        attention = block.attention
        if isinstance(attention, NSAAttention):

            def ask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
                return args, {**kwargs, "return_stats": True}

            def take(module: nn.Module, args: tuple[Any, ...], result: Any, index: int = index) -> Any:
                y, found[index] = result
                return y

            handles += [
                attention.register_forward_pre_hook(ask, with_kwargs=True),
                attention.register_forward_hook(take),
            ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_stats(model: LM, batch: Batch, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What the gates and the selection do on one batch, for the log's "gates" and "distances"; None without NSA."""
    with watching(model) as found, autocast(batch.tokens.device, dtype):
        model(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens)
    if not found:
        return None
    layers = [found.get(index) for index in range(len(model.blocks))]
    gates = {
        "mean": [None if stats is None else stats.gate_mean for stats in layers],
        "entropy": [None if stats is None else stats.gate_entropy for stats in layers],
    }
    counted = [stats.selected_distance.tolist() for stats in found.values()]
    return gates, {"counts": [sum(counts) for counts in zip_longest(*counted, fillvalue=0)]}


def peak_flops(device: torch.device) -> float | None:
    """None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class GpuNumbers:
    """What the GPU holds and how busy it is, for the log's "speed"; `say` hears once why a number is missing."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self.device = device
        self.say = say
        self.told = False

    def numbers(self) -> dict[str, Any]:
        """Nothing on a CPU. Does not wait for the GPU."""
        if self.device.type != "cuda":
            return {}
        found = {"memory_gib": round(torch.cuda.max_memory_allocated(self.device) / 2**30, 3)}
        busy = gpu_util(self.device)
        if isinstance(busy, float):
            return found | {"gpu_util": busy}
        if not self.told:
            self.say(f"[log] no gpu_util: {busy}")
        self.told = True
        return found


def gpu_util(device: torch.device) -> float | str:
    """The part of the last second in which the GPU was busy, or why that is not known."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return "nvidia-ml-py is not installed (pip install 'nsa[gpu]')"
    try:
        return torch.cuda.utilization(device) / 100
    except (RuntimeError, nvml.NVMLError) as error:
        # A driver of another version, or a GPU in parts, which does not count this.
        return str(error)


def fallbacks() -> dict[str, int]:
    """Backends that said yes and failed while they ran, and how often."""
    failures = counts_so_far().failures
    return {f"{op} on {backend}: {reason}": times for (op, backend, reason), times in failures.items()}
