"""Host time of an eager call, the way users make it: no CUDA graph, nothing compiled, the launches counted.

nsa bench host --heads 12/2/64 --lengths 2048 8192 --out benchmarks/results/h200/host.csv

Host time is what the CPU needs to issue a call: calls follow one another with the GPU running behind, on a shape small
enough that it keeps up, and the clock stops before anything waits. Wall time, printed beside it, includes the GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nsa.attention import NSAAttention
from nsa.bench.attention import Inputs, Shape, dense, parse_heads, whole_nsa
from nsa.bench.results import Row, append, environment, quantiles
from nsa.config import NSAConfig, require
from nsa.model.dense import DenseAttention

WARMUP, CALLS, REPETITIONS = 10, 10, 20


@dataclass(frozen=True)
class Task:
    """A forward call and what it is differentiated in."""

    op: str
    impl: str
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward().sum(), self.leaves)


def tasks(shape: Shape, dtype: torch.dtype, device: str, backend: str) -> Iterator[Task]:
    """Attention from ready tensors and a whole layer, NSA and dense."""
    inputs = Inputs.of(shape, dtype, device, 0.0)
    leaves = (inputs.q, inputs.k, inputs.v, inputs.gates)
    config = shape.config(backend)
    yield Task("attention", f"nsa-{backend}", lambda: whole_nsa(inputs, config), leaves)
    yield Task("attention", "dense-sdpa", lambda: dense(inputs), leaves[:3])
    layer_config = NSAConfig(**{**config.to_dict(), "phi": "mlp"})
    x = torch.randn(shape.batch, shape.length, config.dim, device=device, dtype=dtype, requires_grad=True)
    layers: dict[str, nn.Module] = {
        f"nsa-{backend}": NSAAttention(layer_config),
        "dense-sdpa": DenseAttention(layer_config),
    }
    for impl, layer in layers.items():
        layer = layer.to(device, dtype)
        yield Task("layer", impl, lambda layer=layer: layer(x), (x, *layer.parameters()))  # type: ignore[misc]


def host_times(call: Callable[[], Any], wait: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Milliseconds per call, over some repetitions of `CALLS`: of the host alone, and with the GPU waited for."""
    for _ in range(WARMUP):
        call()
    host, wall = [], []
    for _ in range(REPETITIONS):
        wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        issued = time.perf_counter()
        wait()
        host.append((issued - begin) / CALLS * 1e3)
        wall.append((time.perf_counter() - begin) / CALLS * 1e3)
    return host, wall


def count_launches(call: Callable[[], Any], wait: Callable[[], None]) -> int:
    """Kernels, copies and memsets that one call puts on the GPU."""
    wait()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        call()
        wait()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events() or [])


def calls_of(task: Task) -> dict[str, Callable[[], Any]]:
    def forward() -> Tensor:
        with torch.no_grad():
            return task.forward()

    return {"fwd": forward, "fwd+bwd": task.both}


def measure(task: Task, shape: Shape, dtype: torch.dtype, device: str, commit: str | None) -> Iterator[Row]:
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for mode, call in calls_of(task).items():
        host, wall = host_times(call, wait)
        p20, p50, p80 = quantiles(host)
        times = f"host {p50:7.3f} ms   wall {quantiles(wall)[1]:7.3f} ms"
        print(f"{name_of(shape):<28} {task.op:<10} {task.impl:<12} {mode:<8} {times}", flush=True)
        yield Row(
            suite="host",
            op=task.op,
            impl=task.impl,
            mode=mode,
            B=shape.batch,
            S=shape.length,
            Hq=shape.n_heads,
            G=shape.n_groups,
            Dk=shape.width,
            Dv=shape.width,
            dtype=str(dtype).removeprefix("torch."),
            p20_ms=p20,
            p50_ms=p50,
            p80_ms=p80,
            peak_gib=None,
            tokens_per_s=None,
            **environment(torch.device(device), commit),
        )


def name_of(shape: Shape) -> str:
    return f"{shape.n_heads}/{shape.n_groups}/{shape.width} B={shape.batch} S={shape.length}"


def run(args: argparse.Namespace) -> int:
    require(min(args.lengths) > 0, "--lengths", args.lengths, "numbers of at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("no CUDA GPU: these are times of the CPU path, computation included, and no launches are counted")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = [parse_heads(text) for text in args.heads]
    shapes = [Shape(args.batch_size, length, *sizes) for sizes in heads for length in args.lengths]
    for shape in shapes:
        for task in tasks(shape, dtype, device, args.backend):
            for row in measure(task, shape, dtype, device, args.commit):
                if args.out is not None:
                    append(args.out, row)
    if device == "cuda":
        # Last: once a profiler has run, it slows every later launch of the process.
        for shape in shapes:
            for task in tasks(shape, dtype, device, args.backend):
                counts = {mode: count_launches(call, torch.cuda.synchronize) for mode, call in calls_of(task).items()}
                told = "   ".join(f"{mode} {count} launches" for mode, count in counts.items())
                print(f"{name_of(shape):<28} {task.op:<10} {task.impl:<12} {told}", flush=True)
    return 0
