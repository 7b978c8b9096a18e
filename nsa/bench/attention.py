"""Attention without the layer, from q, k, v and gates to o, and each branch, next to dense attention.

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
from nsa.config import NSAConfig, require
from nsa.functional import nsa_attention
from nsa.results import Row, append, make_row

DENSE = {"dense-fa2": SDPBackend.FLASH_ATTENTION, "dense-cudnn": SDPBackend.CUDNN_ATTENTION}
WARMUP_MS, MEASURE_MS = 50, 300
MIN_CALLS = 3


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one attention call; keys and values have the same head_dim."""

    batch: int
    length: int
    n_heads: int
    n_groups: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.n_heads}/{self.n_groups}/{self.head_dim} B={self.batch} S={self.length}"

    @property
    def columns(self) -> dict[str, int]:
        """The shape columns of a row."""
        sizes = (self.batch, self.length, self.n_heads, self.n_groups, self.head_dim, self.head_dim)
        return dict(zip(("B", "S", "Hq", "G", "Dk", "Dv"), sizes, strict=True))

    def config(self, backend: str) -> NSAConfig:
        """The paper's hyperparameters at these sizes, with mean compression."""
        d = self.head_dim
        heads: dict[str, Any] = {"n_heads": self.n_heads, "n_kv_groups": self.n_groups, "d_k": d, "d_v": d}
        return NSAConfig(dim=self.n_heads * d, **heads, phi="mean", backend=backend)


@dataclass(frozen=True)
class Inputs:
    """Leaves of one attention call, with gradients."""

    q: Tensor  # [B, S, Hq, D]
    k: Tensor  # [B, S, G, D]
    v: Tensor  # [B, S, G, D]
    gates: Tensor  # [B, S, Hq, 3]

    @classmethod
    def of(cls, shape: AttentionShape, dtype: torch.dtype, device: str, smooth: float) -> Inputs:
        """Random tensors. `smooth` in [0, 1): correlation of neighbouring queries, which select mostly the same blocks
        in a trained model."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, head_dim: int) -> Tensor:
            size = (shape.batch, shape.length, heads, head_dim)
            return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

        q = normal(shape.n_heads, shape.head_dim)
        if smooth:
            q = smoothed(q, smooth)
        k, v = (normal(shape.n_groups, shape.head_dim) for _ in range(2))
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


def nsa_forward(inputs: Inputs, config: NSAConfig) -> Tensor:
    """NSA with mean compression and one K/V for the three branches."""
    means: dict[str, Any] = {"block": config.l, "stride": config.d, "backend": config.backend}
    k_cmp, v_cmp = (ops.compress_mean(x, **means) for x in (inputs.k, inputs.v))
    return nsa_attention(inputs.q, k_cmp, v_cmp, inputs.k, inputs.v, inputs.k, inputs.v, inputs.gates, config=config)


def dense_forward(inputs: Inputs) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@dataclass(frozen=True)
class Task:
    """A forward function of fixed tensors, and the tensors that get a gradient."""

    op: str
    impl: str
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def attention_task(impl: str, inputs: Inputs, shape: AttentionShape) -> Task:
    if impl in DENSE:
        tensors = (inputs.q, inputs.k, inputs.v)
        return Task("attention", impl, lambda: dense_forward(inputs), tensors, lambda: sdpa_kernel(DENSE[impl]))
    config = shape.config(impl.removeprefix("nsa-"))
    return Task("attention", impl, lambda: nsa_forward(inputs, config), (inputs.q, inputs.k, inputs.v, inputs.gates))


def branch_tasks(impl: str, inputs: Inputs, shape: AttentionShape) -> Iterator[Task]:
    """Each stage alone, on the outputs of the stages before it."""
    config = shape.config(impl.removeprefix("nsa-"))
    backend: dict[str, Any] = {"backend": config.backend}
    compression: dict[str, Any] = {"block": config.l, "stride": config.d, **backend}
    counts = {"n_select": config.n_sel, "n_init": config.n_init, "n_local": config.n_local}
    selection: dict[str, Any] = {"select_block": config.l_sel, **counts, **compression}
    q, k, v, gates = inputs.q, inputs.k, inputs.v, inputs.gates
    with torch.no_grad():
        k_cmp, v_cmp = (ops.compress_mean(x, **compression) for x in (k, v))
    k_cmp.requires_grad_()
    v_cmp.requires_grad_()
    o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, **compression)
    indices = ops.select_blocks(q, k_cmp, lse, **selection)
    a, b, c = (torch.randn_like(o_cmp).requires_grad_() for _ in range(3))
    yield Task("compress", impl, lambda: ops.compress_mean(k, **compression), (k,))
    keys = (q, k_cmp, v_cmp)
    yield Task("compressed", impl, lambda: ops.compressed_attention(*keys, **compression)[0], keys)
    yield Task("scores", impl, lambda: ops.select_blocks(q, k_cmp, lse, **selection), ())
    blocks: dict[str, Any] = {"select_block": config.l_sel, **backend}
    yield Task("selected", impl, lambda: ops.selected_attention(q, k, v, indices, **blocks)[0], (q, k, v))
    yield Task("sliding", impl, lambda: ops.sliding_attention(q, k, v, window=config.w, **backend)[0], (q, k, v))
    yield Task("combine", impl, lambda: ops.combine(a, b, c, gates, **backend), (a, b, c, gates))


def time_calls(
    call: Callable[[], object], *, warmup_ms: float = WARMUP_MS, measure_ms: float = MEASURE_MS, most: int = 200
) -> list[float]:
    """Milliseconds of single calls, by CUDA events, with a cold L2 cache. The host does not wait for a call, so its own
    time shows only where it is slower than the GPU."""
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
    return times(max(MIN_CALLS, min(most, round(measure_ms / rough))))


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The replay of `call` as one CUDA graph, for the GPU's time alone.

    The caller is on a side stream, and the forward pass must have run there too: its backward uses the same stream.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph.replay


def peak_bytes(call: Callable[[], object]) -> int:
    """Peak allocated memory of one call, inputs included."""
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()


def measure_task(
    task: Task, shape: AttentionShape, dtype: torch.dtype, suite: str, commit: str | None, graphs: bool = False
) -> Iterator[Row]:
    """A row for forward and, with leaves, one for backward, whose peak memory is that of both passes."""
    prepared = captured if graphs else lambda call: call

    def row(mode: str, times: list[float], peak: int) -> Row:
        impl = task.impl + ("-graphs" if graphs else "")
        columns = {"suite": suite, "op": task.op, "impl": impl, "mode": mode, **shape.columns}
        return make_row(times, columns, dtype=dtype, device="cuda", commit=commit, peak_bytes=peak)

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
    """`"64/4/128"` to 64 query heads, 4 groups and head_dim 128; a ValueError for anything else."""
    parts = text.split("/")
    accepted = "heads/groups/head_dim, as in 64/4/128"
    require(len(parts) == 3 and all(p.isdigit() for p in parts), "--heads", text, accepted)
    n_heads, n_groups, head_dim = map(int, parts)
    require(min(n_heads, n_groups, head_dim) > 0, "--heads", text, "numbers of at least 1")
    require(n_heads % n_groups == 0, "--heads", text, "a multiple of the groups as heads")
    return n_heads, n_groups, head_dim


def run(args: argparse.Namespace) -> int:
    """`nsa bench attention`: returns the exit status."""
    require(torch.cuda.is_available(), "nsa bench attention", "started without a GPU", "a machine with a CUDA GPU")
    require(0 <= args.smooth < 1, "--smooth", args.smooth, "a number in [0, 1)")
    suite = "attention" if not args.smooth else f"attention-smooth-{args.smooth:g}"
    for heads in map(parse_heads, args.heads):
        for length in args.lengths:
            run_shape(AttentionShape(args.batch_size, length, *heads), args, suite)
    return 0


def run_shape(shape: AttentionShape, args: argparse.Namespace, suite: str) -> None:
    inputs = Inputs.of(shape, torch.bfloat16, "cuda", args.smooth)
    for impl in args.impl:
        tasks: Iterable[Task] = [attention_task(impl, inputs, shape)]
        if args.branches and impl not in DENSE:
            # Lazily: the branches' inputs must not count in the peak memory of the whole.
            tasks = chain(tasks, branch_tasks(impl, inputs, shape))
        try:
            for task in tasks:
                measure_and_print(task, shape, args, suite)
        except torch.OutOfMemoryError as error:
            # Go on with the other implementations and shapes.
            print(f"{impl} is skipped at {shape}: {str(error).splitlines()[0]}")
    print(json.dumps(asdict(shape)))


def measure_and_print(task: Task, shape: AttentionShape, args: argparse.Namespace, suite: str) -> None:
    """Measure one task, print its rows and append them to `args.out`."""
    for row in measure_task(task, shape, torch.bfloat16, suite, args.commit, args.cuda_graphs):
        print(
            f"{row.Hq}/{row.G}/{row.Dk} B={row.B} S={row.S:<7} {row.op:<10} {row.impl:<18} {row.mode} "
            f"{row.p50_ms:9.3f} ms   peak {row.peak_gib:.2f} GiB",
            flush=True,
        )
        if args.out is not None:
            append(args.out, row)
