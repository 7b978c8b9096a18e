"""Numbers about a run: how fast it is, what the GPU does, and what the attention does in each layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from nsa.attention import NSAAttention, NSAStats
from nsa.backends.gpu import GPUS, gpu_kind
from nsa.backends.routing import counts_so_far
from nsa.data import Batch
from nsa.model import LM
from nsa.train.step import autocast


class Clock:
    """How long the run takes, and how long the steps of a log interval take with nothing else in between."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.earlier = 0.0  # seconds of the run before this process
        self.began = (0.0, 0.0, 0.0)
        self.speed: dict[str, float] = {}  # of the last timed interval, as it is logged; empty: not known
        self.tokens_per_s = 0.0
        self.timed = (0, 0.0)  # tokens and seconds of all timed intervals

    def begin(self, waited: float) -> None:
        """An interval starts; `waited`: seconds spent waiting for data so far."""
        self.began = (time.perf_counter(), time.process_time(), waited)

    def end(self, steps: int, tokens: int, waited: float, *, timed: bool) -> None:
        """The interval ends after so many steps; one that includes warm-up is not `timed`."""
        if not timed:
            return
        now = (time.perf_counter(), time.process_time(), waited)
        seconds, cpu, wait = (end - begin for end, begin in zip(now, self.began, strict=True))
        self.tokens_per_s = tokens / seconds
        self.speed = {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "step_s": round(seconds / steps, 6),
            "data_wait": round(wait / seconds, 4),
            "cpu_cores": round(cpu / seconds, 2),
        }
        self.timed = (self.timed[0] + tokens, self.timed[1] + seconds)

    def numbers(self, s_per_token_at_peak: float | None, price_per_hour: float) -> dict[str, float]:
        """The numbers of the log's "speed"; the first argument is None where the GPU's peak is not known."""
        found = dict(self.speed)
        if found and s_per_token_at_peak is not None:
            found["mfu"] = round(self.tokens_per_s * s_per_token_at_peak, 4)
        if price_per_hour:
            found["cost"] = round(self.total / 3600 * price_per_hour, 2)
        return found

    @property
    def total(self) -> float:
        """Seconds of the run, everything in it."""
        return self.earlier + time.perf_counter() - self.started

    @property
    def mean_rate(self) -> float | None:
        """Tokens per second over all timed intervals."""
        tokens, seconds = self.timed
        return tokens / seconds if tokens else None


def log_line(loss: float, lr: float, speed: Mapping[str, float], steps_left: int, skipped: int) -> str:
    """The line printed at a log step; `speed` is as logged, and may lack any of its numbers."""
    parts = [f"loss {loss:.3f}", f"lr {lr:.2e}"]
    if "tokens_per_s" in speed:
        parts += [f"{speed['tokens_per_s']:,.0f} tokens/s", f"{speed['step_s'] * 1e3:,.0f} ms/step"]
    if "mfu" in speed:
        parts.append(f"MFU {speed['mfu']:.1%}")
    if "step_s" in speed and steps_left:
        minutes, seconds = divmod(round(steps_left * speed["step_s"]), 60)
        parts.append(f"ETA {minutes // 60}:{minutes % 60:02}:{seconds:02}")
    if "cost" in speed:
        parts.append(f"cost {speed['cost']:.2f}")
    if skipped:
        parts.append(f"skipped {skipped}")
    return "  ".join(parts)


@contextmanager
def watching(
    model: LM, before: Callable[[int, NSAAttention, Tensor], None] = lambda index, attention, x: None
) -> Iterator[dict[int, NSAStats]]:
    """Collect the statistics of every NSA layer of the forwards in this block, by layer; `before` is called with the
    number, the module and the input `[B, S, dim]` of each."""
    found: dict[int, NSAStats] = {}
    handles = []
    for index, block in enumerate(model.blocks):
        attention = block.attention
        if isinstance(attention, NSAAttention):

            def ask(module: Any, args: Any, kwargs: dict[str, Any], index: int = index) -> tuple[Any, dict[str, Any]]:
                before(index, module, args[0])
                return args, {**kwargs, "return_stats": True}

            def take(module: Any, args: Any, result: Any, index: int = index) -> Any:
                y, found[index] = result
                return y

            handles.append(attention.register_forward_pre_hook(ask, with_kwargs=True))
            handles.append(attention.register_forward_hook(take))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_stats(model: LM, batch: Batch, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Statistics of gates and selection on one batch, for the log's "gates" and "distances"; empty without NSA."""
    with watching(model) as found, autocast(batch.tokens.device, dtype):
        model(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens)
    if not found:
        return {}
    layers = [found.get(index) for index in range(len(model.blocks))]
    gates = {
        "mean": [None if stats is None else stats.gate_mean for stats in layers],
        "entropy": [None if stats is None else stats.gate_entropy for stats in layers],
    }
    counted = [stats.selected_distance.tolist() for stats in found.values()]
    return {"gates": gates, "distances": {"counts": [sum(x) for x in zip_longest(*counted, fillvalue=0)]}}


def peak_flops(device: torch.device) -> float | None:
    """The peak FLOP/s of the device; None where it is not known."""
    gpu = gpu_kind(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if gpu is None else GPUS[gpu].flops


class GpuNumbers:
    """Memory and utilization of the GPU, for the log's "speed"; `log` gets one message if the latter is missing."""

    def __init__(self, device: torch.device, log: Callable[[str], None]) -> None:
        self.device, self.log, self.logged = device, log, False

    def numbers(self) -> dict[str, Any]:
        """Empty on a CPU. Does not wait for the GPU."""
        if self.device.type != "cuda":
            return {}
        found = {"memory_gib": round(torch.cuda.max_memory_allocated(self.device) / 2**30, 3)}
        nvml: Any = None
        try:
            nvml = import_module("pynvml")
            # Of the last second.
            return found | {"gpu_util": torch.cuda.utilization(self.device) / 100}
        except ImportError:
            why = "nvidia-ml-py is not installed (pip install 'nsa[gpu]')"
        except (RuntimeError, nvml.NVMLError) as error:
            # A driver of another version, or a MIG slice, which does not count this.
            why = str(error)
        if not self.logged:
            self.log(f"[log] no gpu_util: {why}")
        self.logged = True
        return found


def fallbacks() -> dict[str, int]:
    """Failures of backends at run time, and how often each happened."""
    failures = counts_so_far().failures
    return {f"{op} on {backend}: {reason}": times for (op, backend, reason), times in failures.items()}
