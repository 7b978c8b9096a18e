"""Attention alone: from q, raw k, v and gates to o, and each branch, beside dense attention in the same run.

nsa bench attention --heads 64/4/128 12/2/64 --lengths 8192 65536 --out benchmarks/results/h200/attention.csv
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa import ops
from nsa.bench.results import Row, append, environment, quantiles
from nsa.config import NSAConfig, require
from nsa.functional import nsa_attention

DENSE = {"dense-fa2": SDPBackend.FLASH_ATTENTION, "dense-cudnn": SDPBackend.CUDNN_ATTENTION}
WARMUP_MS, MEASURE_MS = 50, 300
FEWEST_CALLS = 3


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    n_heads: int
    n_groups: int
    width: int

    def config(self, backend: str) -> NSAConfig:
        dim = self.n_heads * self.width
        return NSAConfig(
            dim=dim,
            n_heads=self.n_heads,
            n_kv_groups=self.n_groups,
            d_k=self.width,
            d_v=self.width,
            phi="mean",
            backend=backend,
        )


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, device: str, smooth: float) -> Inputs:
        """Random tensors. `smooth` in [0, 1) makes each query resemble the one before it, as in a trained model, whose
        neighbouring queries choose mostly the same blocks."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, width: int) -> Tensor:
            size = (shape.batch, shape.length, heads, width)
            return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

        q = normal(shape.n_heads, shape.width)
        if smooth:
            q = smoothed(q, smooth)
        k, v = normal(shape.n_groups, shape.width), normal(shape.n_groups, shape.width)
        gates = normal(shape.n_heads, 3).sigmoid()
        q, k, v, gates = (x.to(dtype).requires_grad_() for x in (q, k, v, gates))
        return cls(q, k, v, gates)


def smoothed(q: Tensor, share: float) -> Tensor:
    """A moving average along the sequence: each query keeps `share` of the one before it, at unit variance."""
    reach = max(2, round(4 / (1 - share)))
    weights = share ** torch.arange(reach, device=q.device, dtype=q.dtype)
    weights = weights / weights.norm()
    padded = F.pad(q, (0, 0, 0, 0, reach - 1, 0))
    total = torch.zeros_like(q)
    for back, weight in enumerate(weights.tolist()):
        total += weight * padded[:, reach - 1 - back : reach - 1 - back + q.shape[1]]
    return total


def whole_nsa(inputs: Inputs, config: NSAConfig) -> Tensor:
    """Mean compression and one K/V for the three branches."""
    means: dict[str, Any] = {"block": config.l, "stride": config.d, "backend": config.backend}
    k_cmp, v_cmp = (ops.compress_mean(x, **means) for x in (inputs.k, inputs.v))
    return nsa_attention(inputs.q, k_cmp, v_cmp, inputs.k, inputs.v, inputs.k, inputs.v, inputs.gates, config=config)


def dense(inputs: Inputs) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@dataclass(frozen=True)
class Task:
    """A forward function of fixed tensors, and which of them get a gradient."""

    op: str
    impl: str
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def whole_task(impl: str, inputs: Inputs, shape: Shape) -> Task:
    if impl in DENSE:
        tensors = (inputs.q, inputs.k, inputs.v)
        return Task("attention", impl, lambda: dense(inputs), tensors, lambda: sdpa_kernel(DENSE[impl]))
    config = shape.config(impl.removeprefix("nsa-"))
    return Task("attention", impl, lambda: whole_nsa(inputs, config), (inputs.q, inputs.k, inputs.v, inputs.gates))


def branch_tasks(impl: str, inputs: Inputs, shape: Shape) -> Iterator[Task]:
    """Each stage on its own, on the inputs the stages before it give."""
    config = shape.config(impl.removeprefix("nsa-"))
    backend: dict[str, Any] = {"backend": config.backend}
    compression: dict[str, Any] = {"block": config.l, "stride": config.d, **backend}
    selection: dict[str, Any] = {
        "select_block": config.l_sel,
        "n_select": config.n_sel,
        "n_init": config.n_init,
        "n_local": config.n_local,
    }
    q, k, v, gates = inputs.q, inputs.k, inputs.v, inputs.gates
    with torch.no_grad():
        k_cmp, v_cmp = (ops.compress_mean(x, **compression) for x in (k, v))
    k_cmp.requires_grad_()
    v_cmp.requires_grad_()
    o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, **compression)
    indices = ops.select_blocks(q, k_cmp, lse, **compression, **selection)
    a, b, c = (torch.randn_like(o_cmp).requires_grad_() for _ in range(3))
    yield Task("compress", impl, lambda: ops.compress_mean(k, **compression), (k,))
    yield Task(
        "compressed",
        impl,
        lambda: ops.compressed_attention(q, k_cmp, v_cmp, **compression)[0],
        (q, k_cmp, v_cmp),
    )
    yield Task("scores", impl, lambda: ops.select_blocks(q, k_cmp, lse, **compression, **selection), ())
    yield Task(
        "selected",
        impl,
        lambda: ops.selected_attention(q, k, v, indices, select_block=config.l_sel, **backend)[0],
        (q, k, v),
    )
    yield Task("sliding", impl, lambda: ops.sliding_attention(q, k, v, window=config.w, **backend)[0], (q, k, v))
    yield Task("combine", impl, lambda: ops.combine(a, b, c, gates, **backend), (a, b, c, gates))


def time_calls(
    call: Callable[[], object], *, warmup_ms: float = WARMUP_MS, measure_ms: float = MEASURE_MS, most: int = 200
) -> list[float]:
    """Milliseconds of single calls, by events; a buffer larger than the cache is overwritten before each. Nothing waits
    for a call, so that the host runs ahead and what it costs shows only where it is slower than the GPU."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def times(count: int) -> list[float]:
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
        for begin, end in events:
            flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    times(1)
    rough = max(times(1)[0], 1e-3)
    if rough < warmup_ms:
        times(round(warmup_ms / rough))
    return times(max(FEWEST_CALLS, min(most, round(measure_ms / rough))))


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The same work as one CUDA graph: what is timed is then the GPU's time alone.

    The caller is on a side stream, where the forward pass must have run too: a backward pass runs where it did.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph.replay


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that is allocated at once, inputs included."""
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()


def measure(
    task: Task, shape: Shape, dtype: torch.dtype, suite: str, commit: str | None, graphs: bool = False
) -> Iterator[Row]:
    """Rows for forward and, where there is a gradient, backward, with the peak of a forward and backward pass."""
    prepared = captured if graphs else lambda call: call

    def row(mode: str, times: list[float], peak: int) -> Row:
        p20, p50, p80 = quantiles(times)
        return Row(
            suite=suite,
            op=task.op,
            impl=task.impl + ("-graphs" if graphs else ""),
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
            peak_gib=round(peak / 2**30, 3),
            tokens_per_s=None,
            **environment(torch.device("cuda"), commit),
        )

    def gradients(out: Tensor, grad: Tensor, *, again: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, task.leaves, grad, retain_graph=again)

    def both() -> object:
        out = task.forward()
        return gradients(out, torch.randn_like(out), again=False)

    with task.within(), torch.cuda.stream(torch.cuda.Stream()):
        with torch.no_grad():
            task.forward()
            peak = peak_bytes(task.forward)
            yield row("fwd", time_calls(prepared(task.forward)), peak)
        if task.leaves:
            both()
            peak = peak_bytes(both)
            out = task.forward()
            grad = torch.randn_like(out)
            yield row("bwd", time_calls(prepared(lambda: gradients(out, grad, again=True))), peak)


def parse_heads(text: str) -> tuple[int, int, int]:
    parts = text.split("/")
    require(len(parts) == 3 and all(p.isdigit() for p in parts), "--heads", text, "heads/groups/width, as in 64/4/128")
    n_heads, n_groups, width = map(int, parts)
    require(min(n_heads, n_groups, width) > 0, "--heads", text, "numbers of at least 1")
    require(n_heads % n_groups == 0, "--heads", text, "as many heads in every group")
    return n_heads, n_groups, width


def run(args: argparse.Namespace) -> int:
    require(torch.cuda.is_available(), "nsa bench attention", "started without a GPU", "a machine with a CUDA GPU")
    require(0 <= args.smooth < 1, "--smooth", args.smooth, "a number in [0, 1)")
    suite = "attention" if not args.smooth else f"attention-smooth-{args.smooth:g}"
    for n_heads, n_groups, width in map(parse_heads, args.heads):
        for length in args.lengths:
            run_shape(Shape(args.batch_size, length, n_heads, n_groups, width), args, suite)
    return 0


def run_shape(shape: Shape, args: argparse.Namespace, suite: str) -> None:
    inputs = Inputs.of(shape, torch.bfloat16, "cuda", args.smooth)
    for impl in args.impl:
        tasks: Iterable[Task] = [whole_task(impl, inputs, shape)]
        if args.branches and impl not in DENSE:
            # The branches' own inputs are made when their turn comes: they must not count in the whole's memory.
            tasks = chain(tasks, branch_tasks(impl, inputs, shape))
        try:
            for task in tasks:
                report(task, shape, args, suite)
        except torch.OutOfMemoryError as error:
            # The others, and other shapes, are still worth knowing.
            print(f"{impl} is left out at {shape}: {str(error).splitlines()[0]}")
    print(json.dumps(asdict(shape)))


def report(task: Task, shape: Shape, args: argparse.Namespace, suite: str) -> None:
    for row in measure(task, shape, torch.bfloat16, suite, args.commit, args.cuda_graphs):
        print(
            f"{row.Hq}/{row.G}/{row.Dk} B={row.B} S={row.S:<7} {row.op:<10} {row.impl:<18} {row.mode} "
            f"{row.p50_ms:9.3f} ms   peak {row.peak_gib:.2f} GiB",
            flush=True,
        )
        if args.out is not None:
            append(args.out, row)
