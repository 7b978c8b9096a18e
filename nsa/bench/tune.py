"""Measures the kernels' tiles on the GPU at hand and writes the fastest into the file that the library then reads.

    nsa bench tune                                              # every kernel, three widths, into the user's file
    nsa bench tune --kernels scores --heads 64/4/128 --length 65536
    nsa bench tune --out nsa/backends/triton/tuned.json         # the packaged file, which keeps its other GPUs

A tile must give what the tile in use gives, which `nsa doctor` and the tests hold to the reference; one that is off, or
does not fit this GPU, is shown and never chosen. The file is written after each kernel, so a run may be cut short.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa import settings
from nsa.backends import triton as backend
from nsa.backends.triton import tuning
from nsa.backends.triton.tuning import Entry, Gpu, Key, Tuned
from nsa.bench.attention import Shape, parse_heads, time_calls
from nsa.bench.results import environment, quantiles
from nsa.config import require, require_positive_int
from nsa.train.progress import Progress, progress

SHAPES = ("64/4/128", "12/2/64", "16/2/256")
# A few roundings of bf16.
ALLOWED = 4 * 2.0**-8
# Rows whose choice of blocks may differ, because two blocks are nearly equal.
ALLOWED_ROWS = 1e-3
# Groups at which the two ways through the selected blocks are compared.
GROUP_SIZES = (4, 8, 16, 32, 64)
# Lengths at which reading every block is compared with both, as multiples of what a query's chosen blocks hold.
DENSE_LENGTHS = (2, 4, 8)
SPARSE_METHODS = ("selected-forward-query", "selected-forward-block")

Run = Callable[[Any], tuple[Tensor, ...]]
Timer = Callable[[Callable[[], object]], list[float]]


@dataclass(frozen=True)
class Outcome:
    """`ms` is None where a tile cannot be chosen, and `note` says why."""

    tile: Any
    ms: float | None
    note: str = ""


@dataclass(frozen=True)
class Trial:
    """One kernel at one shape, and the tiles to measure, the one in use first."""

    kernel: str
    shape: Shape
    tiles: Sequence[Any]

    @property
    def title(self) -> str:
        return f"{self.kernel} {described(self.shape)}"


def described(shape: Shape) -> str:
    return f"{shape.n_heads}/{shape.n_groups}/{shape.width} B={shape.batch} S={shape.length}"


def difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """How far off the worst tensor is, as a multiple of what is allowed."""
    return max(tensor_difference(a, e) for a, e in zip(actual, expected, strict=True))


def tensor_difference(actual: Tensor, expected: Tensor) -> float:
    if not expected.is_floating_point():
        return float((actual != expected).any(dim=-1).double().mean()) / ALLOWED_ROWS
    a, e = actual.float(), expected.float()
    # A query that sees nothing has -inf on both sides.
    off = (a - e).masked_fill_(a == e, 0.0)
    e = e.masked_fill(e.isinf(), 0.0)
    # One element far off shows in the largest, all of them a little off in the norm.
    shares = [size(off) / size(e).clamp_min(torch.finfo(torch.float32).tiny) for size in (largest, torch.norm)]
    return float(torch.stack(shares).max().nan_to_num(nan=torch.inf, posinf=torch.inf)) / ALLOWED


def largest(x: Tensor) -> Tensor:
    return x.abs().max()


def try_tiles(tiles: Sequence[Any], run: Run, timer: Timer, show: Callable[[Any], None]) -> list[Outcome]:
    """Each tile's time, if it runs and gives what the first that runs gives."""
    outcomes: list[Outcome] = []
    expected: tuple[Tensor, ...] | None = None
    for tile in tiles:
        show(tile)
        try:
            result = run(tile)
            # Against itself, what is not a number shows.
            off = difference(result, expected or result)
            if off <= 1:
                expected = expected or result
                outcomes.append(Outcome(tile, quantiles(timer(partial(run, tile)))[1]))
            else:
                outcomes.append(Outcome(tile, None, f"wrong: {off:.1f} times what is allowed off the tile in use"))
        except RuntimeError as error:
            # The launchers make one of what Triton raises; torch has its own, of memory.
            first = str(error).strip().splitlines() or [type(error).__name__]
            outcomes.append(Outcome(tile, None, f"does not run: {first[0][:120]}"))
    return outcomes


def fastest(outcomes: Sequence[Outcome]) -> Outcome | None:
    timed = [outcome for outcome in outcomes if outcome.ms is not None]
    return min(timed, key=lambda outcome: outcome.ms or 0.0, default=None)


def crossover(times: Mapping[int, tuple[float, float]]) -> int:
    """The smallest size from which on the first way is the faster one; one past the largest where it never is."""
    start = max(times) + 1
    for size in sorted(times, reverse=True):
        first, second = times[size]
        if first >= second:
            break
        start = size
    return start


def longest_ahead(times: Mapping[int, tuple[float, float]]) -> int:
    """The largest size up to which the first way is the faster one; 0 where it is not even at the smallest."""
    end = 0
    for size in sorted(times):
        first, second = times[size]
        if first >= second:
            break
        end = size
    return end


class Tuner:
    """Measures, and keeps what it finds: in `found`, over what the file had before, and in the file."""

    def __init__(self, out: Path, gpu: Gpu, where: Mapping[str, Any], bar: Progress, timer: Timer) -> None:
        self.out, self.gpu, self.where, self.bar, self.timer = out, gpu, where, bar, timer
        self.found = tuning.read(out) if tuning.is_file(out) else Tuned({}, {})
        self.done = 0

    def show(self, text: str) -> None:
        self.done += 1
        self.bar.show(self.done, text)

    def keep(self, found: Tuned) -> None:
        self.found = found.over(self.found)
        tuning.write(self.out, self.found)

    def measure(self, trial: Trial, run: Run) -> list[Outcome]:
        outcomes = try_tiles(trial.tiles, run, self.timer, lambda tile: self.show(f"{trial.title} {tile}"))
        best = fastest(outcomes)
        if best is not None:
            measured = {"shape": described(trial.shape), "ms": best.ms, **self.where}
            key = Key(self.gpu, trial.kernel, "half", tuning.width_class(trial.shape.width, trial.shape.width))
            self.keep(Tuned({key: Entry(asdict(best.tile), measured, self.out)}, {}))
        return outcomes

    def compare_methods(self, length: int, smooth: float) -> dict[int, tuple[float, float]]:
        """Milliseconds of the selected forward by query and by block, for each size of a group; keeps the threshold."""
        from nsa.bench.kernels import Workbench, tile_in_use

        times: dict[int, tuple[float, float]] = {}
        for heads in GROUP_SIZES:
            shape = Shape(batch=1, length=length, n_heads=heads, n_groups=1, width=128)
            bench, ms = Workbench(shape, smooth), []
            for kernel in SPARSE_METHODS:
                self.show(f"query_from_heads: {kernel} {described(shape)}")
                tile = tile_in_use(kernel, shape, self.gpu, self.found.over(tuning.tuned()))
                ms.append(quantiles(self.timer(partial(bench.run, kernel, tile)))[1])
            times[heads] = ms[0], ms[1]
        self.keep(Tuned({}, {(self.gpu, "query_from_heads"): crossover(times)}))
        return times

    def compare_dense(self, smooth: float) -> dict[int, tuple[float, float]]:
        """Milliseconds of the selected forward over every block and by the better other way, for each of DENSE_LENGTHS;
        keeps the threshold."""
        from nsa.bench.kernels import Workbench, tile_in_use

        n_heads, n_groups, width = parse_heads(SHAPES[0])
        config = Shape(1, 1, n_heads, n_groups, width).config("triton")
        times: dict[int, tuple[float, float]] = {}
        for blocks in DENSE_LENGTHS:
            shape = Shape(1, blocks * config.n_sel * config.l_sel, n_heads, n_groups, width)
            bench, ms = Workbench(shape, smooth), []
            self.show(f"dense_up_to_blocks: selected-forward-dense {described(shape)}")
            dense = quantiles(self.timer(bench.select_densely))[1]
            for kernel in SPARSE_METHODS:
                self.show(f"dense_up_to_blocks: {kernel} {described(shape)}")
                tile = tile_in_use(kernel, shape, self.gpu, self.found.over(tuning.tuned()))
                ms.append(quantiles(self.timer(partial(bench.run, kernel, tile)))[1])
            times[blocks] = dense, min(ms)
        self.keep(Tuned({}, {(self.gpu, "dense_up_to_blocks"): longest_ahead(times)}))
        return times


def table(outcomes: Mapping[Trial, Sequence[Outcome]]) -> str:
    """Every tile, the fastest of each kernel first and the unusable last."""
    lines = []
    for trial, tried in outcomes.items():
        lines.append(trial.title)
        in_order = sorted(tried, key=lambda outcome: float("inf") if outcome.ms is None else outcome.ms)
        for place, outcome in enumerate(in_order):
            in_use = " (was in use)" if outcome.tile == trial.tiles[0] else ""
            ms = "       -   " if outcome.ms is None else f"{outcome.ms:8.3f} ms"
            mark = ">" if place == 0 and outcome.ms is not None else " "
            lines.append(f"{mark} {ms}  {outcome.tile}{in_use} {outcome.note}".rstrip())
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """0 where every kernel has a tile."""
    known = (*tuning.KERNELS, *tuning.THRESHOLDS)
    kernels = args.kernels or known
    for kernel in kernels:
        require(kernel in known, "--kernels", kernel, f"one of {', '.join(known)}")
    missing = "TRITON_INTERPRET is set" if settings.triton_interpreted() else backend.available()
    if missing is not None:
        raise ValueError(f"nsa bench tune measures on a GPU: {missing}")
    require(0 <= args.smooth < 1, "--smooth", args.smooth, "a number in [0, 1)")
    for flag in ("length", "batch_size"):
        require_positive_int(flag, getattr(args, flag))
    # Triton is imported from here on.
    from nsa.bench.kernels import Workbench, serves, tiles_worth_measuring

    gpu = torch.cuda.get_device_capability()
    shapes = [Shape(args.batch_size, args.length, *parse_heads(text)) for text in args.heads or SHAPES]
    trials = [
        Trial(kernel, shape, tuple(tiles_worth_measuring(kernel, shape, gpu, tuning.tuned())))
        for shape in shapes
        for kernel in kernels
        if kernel in tuning.KERNELS and serves(kernel, shape)
    ]
    compare, compare_dense = (name in kernels for name in tuning.THRESHOLDS)
    steps = sum(len(trial.tiles) for trial in trials)
    steps += len(SPARSE_METHODS) * len(GROUP_SIZES) if compare else 0
    steps += (1 + len(SPARSE_METHODS)) * len(DENSE_LENGTHS) if compare_dense else 0
    require(steps > 0, "--kernels", " ".join(kernels), "a kernel that these --heads use")

    bar = progress(steps)
    where = environment(torch.device("cuda"), args.commit)
    out = args.out or tuning.user_file()
    if out is None:
        raise ValueError("--out is not given; accepted: a file, there being no home folder to put one in")
    tuner = Tuner(out, gpu, where, bar, time_calls)
    outcomes: dict[Trial, list[Outcome]] = {}
    times: dict[int, tuple[float, float]] = {}
    dense_times: dict[int, tuple[float, float]] = {}
    try:
        with torch.no_grad():
            for shape in dict.fromkeys(trial.shape for trial in trials):
                bench = Workbench(shape, args.smooth)
                for trial in trials:
                    if trial.shape == shape:
                        outcomes[trial] = tuner.measure(trial, partial(bench.run, trial.kernel))
            if compare:
                times = tuner.compare_methods(args.length, args.smooth)
            if compare_dense:
                dense_times = tuner.compare_dense(args.smooth)
    finally:
        bar.close()
    print(table(outcomes))
    for heads, (query, block) in times.items():
        print(f"selected forward, {heads} heads a group: {query:.3f} ms by query, {block:.3f} ms by block")
    for blocks, (dense, other) in dense_times.items():
        print(
            f"selected forward, {blocks} blocks for each chosen: {dense:.3f} ms over all, {other:.3f} ms by the chosen"
        )
    without = [trial.title for trial, tried in outcomes.items() if fastest(tried) is None]
    for title in without:
        print(f"{title}: no tile runs; the one in use stays")
    print(json.dumps({"file": str(tuner.out), "gpu": tuning.family_name(gpu), "without": without}))
    return 1 if without else 0
