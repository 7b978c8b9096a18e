"""Training throughput: the trainer's step on synthetic tokens.

nsa bench train --preset 125m --seq-len 2048 --batch-size 8 --attention nsa --steps 20
nsa bench train --preset 125m --seq-len 2048 8192 32768 --tokens 65536 --attention nsa dense
nsa bench train --preset 125m --batch-size 1 2 4 --attention nsa dense --out benchmarks/results/h200/train.csv

`nsa plan` uses a row whose model, length, batch size, backend and mode are those of the planned run.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from nsa.backends.routing import router
from nsa.config import require, require_positive_int
from nsa.data import Batch, synthetic
from nsa.generate import usable_device
from nsa.model import LM, LMConfig
from nsa.results import Row, append, make_row
from nsa.train.step import DTYPES, TrainStep

# Moves the parameters without diverging on random tokens.
LR = 1e-5


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
    commit: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "steps", "warmup"):
            require_positive_int(name, getattr(self, name))
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {sorted(DTYPES)}")


@dataclass(frozen=True)
class Measurement:
    """A row and what else is printed with it."""

    row: Row
    tflops: float
    params: int
    calls: dict[str, int]  # calls by op and backend in the measured steps

    def __str__(self) -> str:
        r = self.row
        peak = "" if r.peak_gib is None else f"   peak {r.peak_gib:.2f} GiB"
        calls = ", ".join(f"{name} {times}" for name, times in self.calls.items())
        lines = [f"{r.impl}, {self.params / 1e6:.1f}M parameters, {r.gpu}"]
        lines += [f"B={r.B} S={r.S} heads={r.Hq}/{r.G} D={r.Dk}/{r.Dv} {r.dtype}"]
        lines += [f"step p20 {r.p20_ms:.1f}  p50 {r.p50_ms:.1f}  p80 {r.p80_ms:.1f} ms{peak}"]
        lines += [f"{r.tokens_per_s:,.0f} tokens/s   {self.tflops:.2f} TFLOP/s of model FLOPs"]
        return "\n".join([*lines, f"backends: {calls or 'torch SDPA'}"])


class Runner:
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
        self.wait()
        if not on_gpu:
            return [(end - begin) * 1e3 for begin, end in pairwise(seconds)]
        return [begin.elapsed_time(end) for begin, end in pairwise(filter(None, events))]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self) -> Measurement:
        """Warm up, then time `bench.steps` steps."""
        self.reset_counts()
        self.run(self.bench.warmup)
        # Replaying a graph makes no calls and allocates nothing: the calls and memory of its capture count.
        if not self.bench.cuda_graphs:
            self.reset_counts()
        times = self.run(self.bench.steps)
        attn = self.bench.model.attn
        columns: dict[str, Any] = {"suite": "train", "op": "train", "impl": self.impl(), "mode": "train"}
        columns |= {"B": self.bench.batch_size, "S": self.bench.model.seq_len}
        columns |= {"Hq": attn.n_heads, "G": attn.n_kv_groups, "Dk": attn.d_k, "Dv": attn.d_v}
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        dtype, commit = DTYPES[self.bench.dtype], self.bench.commit
        row = make_row(times, columns, dtype=dtype, device=self.device, commit=commit, peak_bytes=peak)
        rate = row.B * row.S / row.p50_ms * 1e3
        row = replace(row, tokens_per_s=round(rate, 1))
        calls = {f"{op}:{backend}": times for (op, backend), times in sorted(router().counts.calls.items())}
        flops = rate * self.model.flops_per_token(self.bench.model.seq_len)
        return Measurement(row, flops / 1e12, sum(self.model.parameter_counts().values()), calls)

    def reset_counts(self) -> None:
        router().counts.calls.clear()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def impl(self) -> str:
        """Named after the backends that ran: under `auto` there may be several."""
        backends = sorted({backend for _, backend in router().counts.calls})
        kind = self.bench.model.attention
        name = f"{kind}-{'+'.join(backends) or 'sdpa'}{'-gc' if self.bench.gc else ''}"
        return name + ("-graphs" if self.bench.cuda_graphs else "-compiled" if self.bench.compile else "")

    def check_sync(self, steps: int = 3) -> None:
        """Run steps in which a host synchronization is an error; a ValueError on a CPU, which has none."""
        require(self.device.type == "cuda", "--check-sync", f"given with --device {self.device}", "a CUDA device")
        self.run(self.bench.warmup)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(steps):
                self.step([self.batch], LR)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.wait()


def run(args: argparse.Namespace) -> int:
    """`nsa bench train`: returns the exit status."""
    on_gpu = torch.cuda.is_available()
    if args.device is not None:
        usable_device(args.device)
    preset = LMConfig.preset(args.preset or ("125m" if on_gpu else "tiny"))
    for seq_len in args.seq_len or [preset.seq_len]:
        require_positive_int("--seq-len", seq_len)
        fits = args.tokens is None or args.tokens % seq_len == 0
        require(fits, "--tokens", args.tokens, f"a multiple of --seq-len, {seq_len}")
        for attention in args.attention:
            model = replace(preset, attention=attention, seq_len=seq_len).with_backend(args.backend)
            default = args.tokens // seq_len if args.tokens is not None else 8 if on_gpu else 4
            for size in args.batch_size or [default]:
                run_one(bench_of(args, model, size), args)
    return 0


def bench_of(args: argparse.Namespace, model: LMConfig, batch_size: int) -> TrainBench:
    on_gpu = torch.cuda.is_available()
    given = {name: getattr(args, name) for name in ("steps", "warmup", "compile", "gc", "commit")}
    given["dtype"] = args.dtype or ("bfloat16" if on_gpu else "float32")
    given["device"] = args.device or ("cuda" if on_gpu else "cpu")
    given["cuda_graphs"] = on_gpu if args.cuda_graphs is None else args.cuda_graphs
    return TrainBench(model=model, batch_size=batch_size, **given)


def run_one(bench: TrainBench, args: argparse.Namespace) -> None:
    # CUDA graphs of an earlier measurement would keep its memory.
    torch.compiler.reset()
    runner = Runner(bench)
    if args.check_sync:
        runner.check_sync()
        print("no host synchronization in a training step")
        return
    measurement = runner.measure()
    print(measurement)
    if args.out is not None:
        append(args.out, measurement.row)
    print(json.dumps(asdict(measurement.row)), flush=True)
