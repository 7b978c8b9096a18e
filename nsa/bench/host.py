"""Host time of an eager call, as users make it, without torch.compile, and its number of launches.

nsa bench host --heads 12/2/64 --lengths 2048 8192 --out benchmarks/results/h200/host.csv

Host time is what the CPU needs to issue a call: calls are issued back to back without waiting for the GPU, on a shape
small enough that the GPU keeps up. Wall time, which is printed too, includes the GPU.

A repeated call of a small shape is replayed as a CUDA graph (`nsa/replay.py`). `NSA_REPLAY=0` measures the launches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nsa.attention import NSAAttention
from nsa.bench import gate
from nsa.bench.attention import AttentionShape, Inputs, attention_task, parse_heads
from nsa.bench.runner import Pass, Runner, Suite, Task, Timing, cpu_clock
from nsa.config import NSAConfig, require
from nsa.model.dense import DenseAttention
from nsa.results import quantiles

WARMUP_CALLS, CALLS, REPETITIONS = 10, 10, 20


def host_tasks(shape: AttentionShape, dtype: torch.dtype, device: str, backend: str) -> Iterator[Task]:
    """Attention on given tensors and a whole layer, NSA and dense."""
    inputs = Inputs.of(shape, dtype, device, 0.0)
    for impl in (f"nsa-{backend}", "dense-sdpa"):
        yield attention_task("host", impl, inputs, shape, eager_passes)
    config = NSAConfig(**{**shape.config(backend).to_dict(), "phi": "mlp"})
    x = torch.randn(shape.batch, shape.length, config.dim, device=device, dtype=dtype, requires_grad=True)
    kinds: dict[str, type[nn.Module]] = {f"nsa-{backend}": NSAAttention, "dense-sdpa": DenseAttention}
    for impl, kind in kinds.items():
        layer = kind(config).to(device, dtype)
        backends = {**config.to_dict(), "backend": "reference" if kind is NSAAttention else "sdpa"}
        specification = kind(NSAConfig(**backends)).to(device, dtype)
        short = x.detach()[:, : config.n_sel * config.l_sel // 4]
        error = partial(gate.module_error, layer, specification, short)
        passes = partial(eager_passes, partial(layer, x), (x, *layer.parameters()))
        yield Task("host", "layer", impl, shape, passes, error)


def host_clock(each: Pass) -> Timing:
    """Milliseconds of the host per call, for each repetition of `CALLS`; prints the wall time, with the GPU, too."""
    for _ in range(WARMUP_CALLS):
        each.call()
    host, wall = [], []
    for _ in range(REPETITIONS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            each.call()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        host.append((issued - begin) / CALLS * 1e3)
        wall.append((time.perf_counter() - begin) / CALLS * 1e3)
    print(f"wall time {quantiles(wall)[1]:.3f} ms:", end=" ")
    return host, None


def count_launches(call: Callable[[], object]) -> int:
    """Kernels, copies and memsets that one call launches on the GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        call()
        torch.cuda.synchronize()
    events = found.events() or []
    # The ranges of `record_function` are no launches.
    return sum(e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation for e in events)


def eager_passes(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Iterator[Pass]:
    yield Pass("fwd", torch.no_grad()(forward))
    yield Pass("fwd+bwd", lambda: torch.autograd.grad(forward().sum(), leaves))


def tasks(args: argparse.Namespace, runner: Runner) -> Iterator[Task]:
    # On a CPU a call is its computation.
    default_heads, default_length = ("4/2/32", 512) if runner.device == "cpu" else ("12/2/64", 2048)
    lengths = args.lengths or [default_length]
    require(min(lengths) > 0, "--lengths", lengths, "numbers of at least 1")
    for sizes in map(parse_heads, args.heads or [default_heads]):
        for length in lengths:
            shape = AttentionShape(args.batch_size, length, *sizes)
            yield from host_tasks(shape, runner.dtype, runner.device, args.backend)


def show_launches(args: argparse.Namespace, runner: Runner) -> None:
    """Count launches. Last: a profiler slows every later launch of the process."""
    if runner.device == "cpu":
        print("no CUDA GPU: times are those of the CPU path, computation included; launches are not counted")
        return
    for task in tasks(args, runner):
        counts = (f"{each.mode} {count_launches(each.call)} launches" for each in task.passes())
        print(task.title, "   ".join(counts), flush=True)


# On a CPU a call is its computation: a few of them are enough.
run = Suite(tasks, lambda args, device: cpu_clock if device == "cpu" else host_clock, finish=show_launches).run
