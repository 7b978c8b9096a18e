"""Host time of an eager call, as users make it: no CUDA graph, no torch.compile, and its number of launches.

nsa bench host --heads 12/2/64 --lengths 2048 8192 --out benchmarks/results/h200/host.csv

Host time is what the CPU needs to issue a call: calls are issued back to back without waiting for the GPU, on a shape
small enough that the GPU keeps up. Wall time, which is printed too, includes the GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nsa.attention import NSAAttention
from nsa.bench.attention import AttentionShape, Inputs, Task, dense_forward, nsa_forward, parse_heads
from nsa.config import NSAConfig, require
from nsa.model.dense import DenseAttention
from nsa.results import Row, append, make_row, quantiles

WARMUP, CALLS, REPETITIONS = 10, 10, 20


def tasks(shape: AttentionShape, dtype: torch.dtype, device: str, backend: str) -> Iterator[Task]:
    """Attention on given tensors and a whole layer, NSA and dense."""
    inputs = Inputs.of(shape, dtype, device, 0.0)
    leaves = (inputs.q, inputs.k, inputs.v, inputs.gates)
    config = shape.config(backend)
    yield Task("attention", f"nsa-{backend}", lambda: nsa_forward(inputs, config), leaves)
    yield Task("attention", "dense-sdpa", lambda: dense_forward(inputs), leaves[:3])
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
    """Milliseconds per call for each repetition of `CALLS`: of the host alone, and including the GPU."""
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
    """Kernels, copies and memsets that one call launches on the GPU."""
    wait()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        call()
        wait()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events() or [])


def calls_of(task: Task) -> dict[str, Callable[[], Any]]:
    """What is measured of a task, by mode."""

    def forward() -> Tensor:
        with torch.no_grad():
            return task.forward()

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(task.forward().sum(), task.leaves)

    return {"fwd": forward, "fwd+bwd": both}


def measure_host(
    task: Task, shape: AttentionShape, dtype: torch.dtype, device: str, commit: str | None
) -> Iterator[Row]:
    """A row per mode, printed as it is measured."""
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for mode, call in calls_of(task).items():
        host, wall = host_times(call, wait)
        columns = {"suite": "host", "op": task.op, "impl": task.impl, "mode": mode, **shape.columns}
        row = make_row(host, columns, dtype=dtype, device=device, commit=commit)
        times = f"host {row.p50_ms:7.3f} ms   wall {quantiles(wall)[1]:7.3f} ms"
        print(f"{shape!s:<28} {task.op:<10} {task.impl:<12} {mode:<8} {times}", flush=True)
        yield row


def run(args: argparse.Namespace) -> int:
    """`nsa bench host`: returns the exit status."""
    require(min(args.lengths) > 0, "--lengths", args.lengths, "numbers of at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("no CUDA GPU: times are those of the CPU path, computation included; launches are not counted")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = [parse_heads(text) for text in args.heads]
    shapes = [AttentionShape(args.batch_size, length, *sizes) for sizes in heads for length in args.lengths]
    for shape in shapes:
        for task in tasks(shape, dtype, device, args.backend):
            for row in measure_host(task, shape, dtype, device, args.commit):
                if args.out is not None:
                    append(args.out, row)
    if device == "cuda":
        # Last: a profiler slows every later launch of the process.
        for shape in shapes:
            for task in tasks(shape, dtype, device, args.backend):
                counts = {mode: count_launches(call, torch.cuda.synchronize) for mode, call in calls_of(task).items()}
                launches = "   ".join(f"{mode} {count} launches" for mode, count in counts.items())
                print(f"{shape!s:<28} {task.op:<10} {task.impl:<12} {launches}", flush=True)
    return 0
