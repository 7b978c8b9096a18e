"""Training throughput: the trainer's step on synthetic tokens.

nsa bench train --preset 125m --seq-len 2048 --batch-size 8 --attention nsa --steps 20
nsa bench train --preset 125m --seq-len 2048 8192 32768 --tokens 65536 --attention nsa dense
nsa bench train --preset 125m --batch-size 1 2 4 --attention nsa dense --out benchmarks/results/h200/train.csv

`nsa plan` uses a row whose model, length, batch size, backend and mode are those of the planned run.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from nsa.backends.routing import router
from nsa.bench import gate
from nsa.bench.attention import AttentionShape
from nsa.bench.runner import Pass, Runner, Suite, Task, Timing
from nsa.config import check_fields, require, require_positive_int
from nsa.data import Batch, synthetic
from nsa.dtypes import DTYPES, dtype_name
from nsa.model import LM, LMConfig
from nsa.results import quantiles
from nsa.train.step import TrainStep, autocast

# Moves the parameters without diverging on random tokens.
LR = 1e-5
# Tokens on which a model is compared with the reference: so few that every block is selected.
GATE_TOKENS = 256


def model_shape(config: LMConfig, batch: int, length: int) -> AttentionShape:
    c = config.attn
    assert c.d_k == c.d_v, "as in every preset"
    return AttentionShape(batch, length, c.n_heads, c.n_kv_groups, c.d_k)


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """The configuration of one measurement; a ValueError if a count or the dtype is wrong."""

    model: LMConfig
    batch_size: int
    steps: int = 20
    warmup: int = 5
    dtype: str = "bfloat16"
    device: str = "cuda"
    compile: bool = False
    cuda_graphs: bool = False
    gc: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {sorted(DTYPES)}")


class TrainRunner:
    """A model, its training step and a batch of random tokens."""

    def __init__(self, bench: TrainBench) -> None:
        self.bench = bench
        self.device = torch.device(bench.device)
        torch.manual_seed(0)
        with self.device:
            self.model = LM(bench.model)
        self.model.recompute = bench.gc
        dtype, graphs = DTYPES[bench.dtype], bench.cuda_graphs
        self.step = TrainStep(self.model, dtype=dtype, compile=bench.compile, cuda_graphs=graphs)
        config = bench.model
        tokens = synthetic(bench.batch_size, config.seq_len, config.vocab_size, seed=0, device=self.device)
        self.batch = Batch(*tokens, cu_seqlens=None)

    def run(self, steps: int) -> list[float]:
        """Milliseconds of each step, read at the end: the host runs ahead, as in training."""
        on_gpu = self.device.type == "cuda"
        events = [torch.cuda.Event(enable_timing=True) if on_gpu else None for _ in range(steps + 1)]
        seconds = []
        for number, event in enumerate(events):
            if number:
                self.step([self.batch], LR)
            if event is not None:
                event.record()
            seconds.append(time.perf_counter())
        if not on_gpu:
            return [(end - begin) * 1e3 for begin, end in pairwise(seconds)]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(filter(None, events))]

    def task(self) -> Task:
        """Warm up, and describe what is left to do: which backends run is known then, and the memory of a capture."""
        router().counts.calls.clear()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.run(self.bench.warmup)
        calls = ", ".join(f"{op}:{backend} {times}" for (op, backend), times in sorted(router().counts.calls.items()))
        n_parameters = f"{sum(self.model.parameter_counts().values()) / 1e6:.1f}M parameters"
        print(f"{self.impl()}, {n_parameters}, backends of the warm-up: {calls or 'torch SDPA'}", flush=True)
        # Replaying a graph allocates nothing: the memory of its capture counts.
        captured = torch.cuda.max_memory_allocated() if self.bench.cuda_graphs else 0
        batch, length = self.bench.batch_size, self.bench.model.seq_len
        steps = Pass("train", partial(self.measure, captured), tokens=batch * length)
        shape = model_shape(self.bench.model, batch, length)
        return Task("train", "train", self.impl(), shape, lambda: iter([steps]), self.error)

    def measure(self, captured: int) -> Timing:
        """Milliseconds of the steps and the peak memory, at least `captured` bytes."""
        # What the gate compared with.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = self.run(self.bench.steps)
        length = self.bench.model.seq_len
        flops = self.bench.batch_size * length * self.model.flops_per_token(length)
        print(f"{flops / quantiles(times)[1] / 1e9:.2f} TFLOP/s of model FLOPs:", end=" ")
        return times, max(captured, torch.cuda.max_memory_allocated()) if self.device.type == "cuda" else None

    def error(self) -> float:
        """The error of the logits of a short sequence, in units of the tolerance."""
        tokens = self.batch.tokens[:1, :GATE_TOKENS]
        with self.device:
            # Other kinds of attention run SDPA alone.
            backend = "reference" if set(self.bench.model.kinds) == {"nsa"} else "sdpa"
            specification = LM(self.bench.model.with_backend(backend))
        within = partial(autocast, self.device, DTYPES[self.bench.dtype])
        return gate.module_error(self.model, specification, tokens, within)

    def impl(self) -> str:
        """Named after the backends that ran: under `auto` there may be several."""
        backends = sorted({backend for _, backend in router().counts.calls})
        kind = self.bench.model.attention
        name = f"{kind}-{'+'.join(backends) or 'sdpa'}{'-gc' if self.bench.gc else ''}"
        return name + ("-graphs" if self.bench.cuda_graphs else "-compiled" if self.bench.compile else "")

    def check_sync(self) -> None:
        """Run steps in which a host synchronization is an error; a ValueError on a CPU, which has none."""
        require(self.device.type == "cuda", "--check-sync", f"given with --device {self.device}", "a CUDA device")
        self.run(self.bench.warmup)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                self.step([self.batch], LR)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def step_clock(each: Pass) -> Timing:
    """A run times its steps itself."""
    found: Any = each.call()
    return found


def benches(args: argparse.Namespace, runner: Runner) -> Iterator[TrainBench]:
    on_gpu = runner.device != "cpu"
    preset = LMConfig.preset(args.preset or ("125m" if on_gpu else "tiny"))
    given = {name: getattr(args, name) for name in ("steps", "warmup", "compile", "gc")}
    given |= {"dtype": dtype_name(runner.dtype), "device": runner.device}
    given["cuda_graphs"] = on_gpu if args.cuda_graphs is None else args.cuda_graphs
    for seq_len in args.seq_len or [preset.seq_len]:
        require_positive_int("--seq-len", seq_len)
        fits = args.tokens is None or args.tokens % seq_len == 0
        require(fits, "--tokens", args.tokens, f"a multiple of --seq-len, {seq_len}")
        for attention in args.attention:
            model = replace(preset, attention=attention, seq_len=seq_len).with_backend(args.backend)
            default = args.tokens // seq_len if args.tokens is not None else 8 if on_gpu else 4
            for size in args.batch_size or [default]:
                yield TrainBench(model=model, batch_size=size, **given)


def tasks(args: argparse.Namespace, runner: Runner) -> Iterator[Task]:
    for bench in benches(args, runner):
        # CUDA graphs of an earlier measurement would keep its memory, and so would cycles.
        torch.compiler.reset()
        gc.collect()
        if args.check_sync:
            TrainRunner(bench).check_sync()
            print("no host synchronization in a training step")
        else:
            yield TrainRunner(bench).task()


run = Suite(tasks, lambda args, device: step_clock).run
