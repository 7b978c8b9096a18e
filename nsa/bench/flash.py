"""Compares FlashAttention with the other backends for both branches, and writes `configs/routes.json` from that.

    nsa bench flash --out benchmarks/results/h200/flash.csv --plot docs/flash.png --write configs/routes.json
    nsa bench flash --rows benchmarks/results/h200/flash.csv --write configs/routes.json   # from existing rows, no GPU

Times are GPU time alone, measured by replaying a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nsa import reference, settings
from nsa.backends import sdpa, triton
from nsa.backends.flash import FlashBackend, policy
from nsa.backends.flash.cases import flash_problem, kind_of
from nsa.backends.flash.libraries import find_libraries
from nsa.backends.problem import SIZES, Problem
from nsa.bench import gate
from nsa.bench.attention import AttentionShape
from nsa.bench.flash_routes import VARLEN, WORTH_IT, as_json, measured_orders, measured_routes, write_routes
from nsa.bench.plot import IMPL_COLORS, MODE_LABELS, OTHER_COLOR, mark_lengths, save_figure, why_no_plots
from nsa.bench.runner import CudaClock, Pass, Runner, Suite, Task
from nsa.config import require
from nsa.geometry import n_compressed
from nsa.results import Row, read_rows
from nsa.sequences import Compressed, Saved, Sequences, Sliding, Upstream

BLOCK, STRIDE, WINDOW = 32, 16, 512
# Tokens at which results are compared with the reference.
GATE_LENGTH = 1024
PROBES_AT_ONCE = 8
LINE_STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
WORTH_IT_COLOR = "#cc4444"


@dataclass(frozen=True)
class FlashPoint(AttentionShape):
    """One shape of one branch, in a batch of 1."""

    op: str
    window: int = WINDOW
    documents: int = 1  # of equal length; 1: a fixed-length row

    @property
    def varlen(self) -> bool:
        return self.documents > 1

    @property
    def suite(self) -> str:
        window = f"-w{self.window}" if self.op == "sliding" else ""
        return f"flash{window}{VARLEN if self.varlen else ''}"

    @property
    def n_keys(self) -> int:
        if self.op == "sliding":
            return self.length
        return self.length // STRIDE if self.varlen else n_compressed(self.length, BLOCK, STRIDE)

    def offsets(self, device: str) -> Tensor | None:
        ends = [self.length * i // self.documents for i in range(self.documents + 1)]
        return torch.tensor(ends, dtype=torch.int32, device=device) if self.varlen else None

    def branch(self, offsets: Tensor | None, device: torch.device) -> Compressed | Sliding:
        """The branch that a backend is given. Built anew for each call: what follows from the offsets is part of its
        cost."""
        sequences, scale = Sequences(1, self.length, device, offsets), self.head_dim**-0.5
        if self.op == "sliding":
            return Sliding(sequences, self.window, scale)
        return Compressed(sequences, BLOCK, STRIDE, scale)

    def problem(self, dtype: torch.dtype, *, backward: bool) -> Problem:
        numbers = (1, self.length, self.n_keys, self.n_heads, self.n_groups, self.head_dim, self.head_dim)
        sizes: dict[str, Any] = dict(zip(SIZES, numbers, strict=True))
        return Problem(op=self.op, dtype=dtype, device="cuda", backward=backward, varlen=self.varlen, **sizes)

    def inputs(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)

        def normal(length: int, heads: int) -> Tensor:
            return torch.randn(1, length, heads, self.head_dim, generator=generator, device=device, dtype=dtype)

        return normal(self.length, self.n_heads), normal(self.n_keys, self.n_groups), normal(self.n_keys, self.n_groups)


def both_passes(backend: Any, point: FlashPoint, qkv: tuple[Tensor, ...]) -> Iterator[Pass]:
    """`fwd` and `bwd` as `nsa.ops` calls them."""
    forward, backward = (getattr(backend, f"{point.op}_{way}") for way in ("forward", "backward"))
    device = qkv[0].device
    offsets = point.offsets(device.type)
    yield Pass("fwd", lambda: forward(*qkv, point.branch(offsets, device)))
    saved = Saved(*qkv, *forward(*qkv, point.branch(offsets, device)))
    upstream = Upstream(torch.ones_like(saved.o))
    yield Pass("bwd", lambda: backward(upstream, saved, point.branch(offsets, device)))


def gate_error(backend: Any, point: FlashPoint, dtype: torch.dtype, device: str) -> float:
    """The error of outputs and gradients at the point with a shorter sequence, in units of the tolerance."""
    short = replace(point, length=min(point.length, GATE_LENGTH))
    qkv = short.inputs(dtype, device)
    o, dqkv = (each.call() for each in both_passes(backend, short, qkv))
    offsets = short.offsets(device)

    def by_reference(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = tuple(x.to(dtype).requires_grad_() for x in qkv)
        branch: dict[str, Any] = {"block": BLOCK, "stride": STRIDE}
        if point.op == "sliding":
            branch = {"window": point.window}
        function = getattr(reference, f"{point.op}_attention")
        with torch.enable_grad():
            o, _ = function(*leaves, **branch, cu_seqlens=offsets)
            return o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))

    found: Any = (o[0], *dqkv)  # type: ignore[index,misc]
    return gate.worst_ratio(found, by_reference(dtype), by_reference(torch.float64))


def probe_ahead(backends: Sequence[FlashBackend], points: Sequence[FlashPoint], dtype: torch.dtype) -> None:
    """Probe every kind of call, several at once: most of a probe is the start of its process."""
    kinds = {}
    for point in points:
        problem = point.problem(dtype, backward=False)
        # `supports` is called before the window is known, the call itself after.
        for each in (flash_problem(problem), flash_problem(problem, point.window if point.op == "sliding" else STRIDE)):
            kinds[kind_of(each, point.head_dim, dtype)] = each
    print(f"probing {len(kinds)} kinds of calls, except those with a verdict", flush=True)
    with ThreadPoolExecutor(min(PROBES_AT_ONCE, os.cpu_count() or 1)) as pool:
        for backend in backends:
            list(pool.map(backend.supports, kinds.values()))


def speedups(rows: Sequence[Row]) -> Iterator[tuple[Row, dict[str, float]]]:
    """The row of our SDPA backend, wherever it was measured, and how many times as fast each other backend is."""
    found: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        shape = (row.gpu, row.suite, row.op, row.mode, row.Dk, row.Hq // row.G, row.S, row.B, row.Hq, row.dtype)
        found[shape][row.impl] = row
    for _, timed in sorted(found.items()):
        if (base := timed.pop("nsa-sdpa", None)) is not None:
            yield base, {impl: base.p50_ms / row.p50_ms for impl, row in sorted(timed.items())}


def speedup_table(rows: Sequence[Row]) -> str:
    lines = [f"{'op':<11}{'mode':<5}{'head_dim':>8}{'group':>6}{'S':>8}  speedup over nsa-sdpa"]
    for row, found in speedups(rows):
        shape = f"{row.op:<11}{row.mode:<5}{row.Dk:>8}{row.Hq // row.G:>6}{row.S:>8}"
        suite = f" ({row.suite.removeprefix('flash-')})" if row.suite != "flash" else ""
        lines.append(f"{shape}  {'  '.join(f'{impl} {times:.2f}' for impl, times in found.items())}{suite}")
    return "\n".join(lines)


def draw_speedups(rows: Sequence[Row], out: Path) -> None:
    """Plot the speedups of fixed-length rows, at the paper's window, over the length: a row of panels per branch and
    direction, a column per head_dim."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    gpus = sorted({row.gpu for row in rows})
    require(len(gpus) == 1, "rows", gpus, "those of one GPU, for a plot")
    # op, mode, head_dim: impl, group size: length: speedup
    panels: Any = defaultdict(lambda: defaultdict(dict))
    for base, found in speedups(rows):
        if base.suite in ("flash", f"flash-w{WINDOW}"):
            for impl, times in found.items():
                panels[base.op, base.mode, base.Dk][impl, base.Hq // base.G][base.S] = times
    require(bool(panels), "rows", len(rows), "rows of nsa-sdpa among them, which the others are compared with")
    passes, head_dims = sorted({panel[:2] for panel in panels}), sorted({panel[2] for panel in panels})
    drawn = {line for lines in panels.values() for line in lines}
    impls, group_sizes = (sorted(set(names)) for names in zip(*drawn, strict=True))
    styles = dict(zip(group_sizes, cycle(LINE_STYLES), strict=False))
    size = (3.6 * len(head_dims), 2.9 * len(passes) + 0.6)
    figure = Figure(figsize=size)
    axes = figure.subplots(len(passes), len(head_dims), squeeze=False, sharey="row")
    for axis, ((op, mode), head_dim) in zip(axes.flat, product(passes, head_dims), strict=True):
        lines = panels[op, mode, head_dim]
        for (impl, group_size), line in sorted(lines.items()):
            color = IMPL_COLORS.get(impl, OTHER_COLOR)
            axis.plot(*zip(*sorted(line.items()), strict=True), styles[group_size], marker=".", color=color)
        axis.axhline(1, color=IMPL_COLORS["nsa-sdpa"])
        axis.axhline(WORTH_IT, color=WORTH_IT_COLOR, linewidth=0.8)
        axis.set(title=f"{op} {MODE_LABELS[mode]}, head_dim {head_dim}", xscale="log", yscale="log")
        axis.set_yticks([0.25, 0.5, 1, 2, 5, 10], ["1/4", "1/2", "1", "2", "5", "10"])
        mark_lengths(axis, {length for line in lines.values() for length in line})
        axis.grid(alpha=0.25)
        if head_dim == head_dims[0]:
            axis.set_ylabel("speedup over nsa-sdpa")
    legend = [Line2D([], [], color=IMPL_COLORS.get(impl, OTHER_COLOR), label=impl) for impl in [*impls, "nsa-sdpa"]]
    legend += [Line2D([], [], color=WORTH_IT_COLOR, linewidth=0.8, label=f"worth it: {WORTH_IT}")]
    legend += [Line2D([], [], color="#333333", linestyle=s, label=f"{n} heads per group") for n, s in styles.items()]
    figure.legend(handles=legend, loc="lower center", ncols=5, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.6 / size[1], 1, 1))
    save_figure(figure, f"{gpus[0]}, batch 1, window {WINDOW}", rows, out, dpi=90)


def points(args: argparse.Namespace) -> Iterator[FlashPoint]:
    for head_dim in args.head_dims:
        for size in args.group_sizes:
            require(args.heads % size == 0, "--group-sizes", size, f"a divisor of the {args.heads} heads")
            for length in args.lengths:
                shape = (1, length, args.heads, args.heads // size, head_dim)
                yield FlashPoint(*shape, "compressed")
                yield from (FlashPoint(*shape, "sliding", window) for window in args.windows)
                if size == args.group_sizes[0]:
                    yield FlashPoint(*shape, "compressed", documents=args.documents)
                    yield FlashPoint(*shape, "sliding", args.windows[-1], args.documents)


def finish(args: argparse.Namespace, runner: Runner) -> None:
    """Print, plot and write what follows from the rows, measured or read."""
    rows = runner.rows if args.rows is None else read_rows(args.rows)
    require(bool(rows), "--rows", str(args.rows), "a file with at least one row")
    print(speedup_table(rows))
    if args.plot is not None and (reason := why_no_plots()):
        runner.leave_out(str(args.plot), reason)
    elif args.plot is not None:
        draw_speedups(rows, args.plot)
    if args.write is not None:
        compared = bool(measured_orders(rows))
        require(compared, "--write", str(args.write), "rows of several backends to compare, as nsa bench flash writes")
        write_routes(args.write, rows)
    print(json.dumps([as_json(route) for route in measured_routes(rows)]))


def tasks(args: argparse.Namespace, runner: Runner) -> Iterator[Task]:
    """Both branches at every point on every backend; none where rows are read."""
    if args.rows is not None:
        return
    config = settings.current()
    for flag in policy.flags(config).values():
        if flag.state == "off":
            raise ValueError(f"{flag.why}, and nsa bench flash calls FlashAttention: unset it, or pass --rows FILE")
    require(torch.cuda.is_available(), "nsa bench flash", "started without a GPU", "a CUDA GPU, or --rows FILE")
    flash = {f"flash-{one.contract.library}": FlashBackend(config, (one,)) for one in find_libraries()[0]}
    all_points, dtype = list(points(args)), runner.dtype
    probe_ahead(list(flash.values()), all_points, dtype)
    for point in all_points:
        qkv = point.inputs(dtype, "cuda")
        backends: dict[str, Any] = {"nsa-sdpa": sdpa, "nsa-triton": triton, **flash}
        for impl, backend in backends.items():
            reasons = (backend.supports(point.problem(dtype, backward=backward)) for backward in (False, True))
            reason = next(filter(None, reasons), None)
            if reason is not None:
                runner.leave_out(f"{impl}, {point.suite} {point.op} at {point}", reason)
                continue
            passes = partial(both_passes, backend, point, qkv)
            error = partial(gate_error, backend, point, dtype, "cuda")
            yield Task(point.suite, point.op, impl, point, passes, error)


# A thousand timings in a few minutes: enough for a ratio, not for a published figure.
CLOCK = CudaClock(graphs=True, warmup_ms=0, measure_ms=20.0, max_calls=20)
run = Suite(tasks, lambda args, device: CLOCK, finish).run
