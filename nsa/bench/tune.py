"""Measures the kernels' tiles on this GPU and writes the fastest into the file that the library then reads.

    nsa bench tune                                              # every kernel, three head_dims, into the user's file
    nsa bench tune --kernels scores --heads 64/4/128 --length 65536
    nsa bench tune --out nsa/backends/triton/tuned.json         # the packaged file, which keeps its other GPUs

A tile must give the results of the tile in use, which `nsa doctor` and the tests compare with the reference; one that
does not, or does not fit this GPU, is listed and never selected. The file is written after each kernel, so a run may be
interrupted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa import settings
from nsa.backends import triton as backend
from nsa.backends.triton import tuning
from nsa.backends.triton.tuning import GpuFamily, Key, Tuned, TunedTile
from nsa.bench.attention import AttentionShape, parse_heads
from nsa.bench.runner import CudaClock, measure_if_right
from nsa.config import require, require_positive_int
from nsa.progress import Progress, progress
from nsa.results import origin_columns, quantiles
from nsa.testing import TOLERANCE_ROUNDINGS, relative_error

if TYPE_CHECKING:
    from nsa.bench.kernels import Workbench

SHAPES = ("64/4/128", "12/2/64", "16/2/256")
# Relative error that a tile may have: a bf16 result is rounded by at most half of its eps.
ALLOWED = TOLERANCE_ROUNDINGS * torch.finfo(torch.bfloat16).eps / 2
# Share of queries whose selection may differ, because two blocks are nearly equal.
ALLOWED_ROWS = 1e-3
# Heads per group at which the selected forward by query and by block are compared.
GROUP_SIZES = (4, 8, 16, 32, 64)
# Lengths at which the dense forward is compared with both, as multiples of the tokens that a query selects.
DENSE_LENGTHS = (2, 4, 8)
SPARSE_METHODS = ("selected-forward-query", "selected-forward-block")

Run = Callable[[Any], tuple[Tensor, ...]]
Timer = Callable[[Callable[[], object]], list[float]]


@dataclass(frozen=True)
class TileTime:
    """The time of one tile; None, with the reason in `note`, if it cannot be selected."""

    tile: Any
    ms: float | None
    note: str = ""


@dataclass(frozen=True)
class Candidates:
    """The tiles to measure for one kernel at one shape, the one in use first."""

    kernel: str
    shape: AttentionShape
    tiles: Sequence[Any]

    @property
    def title(self) -> str:
        return f"{self.kernel} {self.shape}"


def error_ratio(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The error of the worst tensor, as a multiple of what is allowed."""

    def ratio(a: Tensor, e: Tensor) -> float:
        if e.is_floating_point():
            return relative_error(a, e) / ALLOWED
        return float((a != e).any(dim=-1).double().mean()) / ALLOWED_ROWS

    return max(ratio(a, e) for a, e in zip(actual, expected, strict=True))


def try_tiles(tiles: Sequence[Any], run: Run, timer: Timer, show: Callable[[Any], None]) -> list[TileTime]:
    """The time of each tile that runs and agrees with the first one that runs."""
    outcomes: list[TileTime] = []
    expected: tuple[Tensor, ...] | None = None

    def error(tile: Any) -> float:
        nonlocal expected
        result = run(tile)
        # Compared with itself, a NaN shows.
        ratio = error_ratio(result, expected or result)
        if ratio <= 1:
            expected = expected or result
        return ratio

    for tile in tiles:
        show(tile)
        ms, note = measure_if_right(partial(error, tile), lambda tile=tile: quantiles(timer(partial(run, tile)))[1])  # type: ignore[misc]
        outcomes.append(TileTime(tile, ms, note))
    return outcomes


def fastest(outcomes: Sequence[TileTime]) -> TileTime | None:
    """The fastest tile; None if no tile runs."""
    timed = [outcome for outcome in outcomes if outcome.ms is not None]
    return min(timed, key=lambda outcome: outcome.ms or 0.0, default=None)


def crossover(times: Mapping[int, tuple[float, float]]) -> int:
    """The smallest size from which on the first method is faster; one past the largest size if it never is."""
    return min(sizes_won(times, reverse=True), default=max(times) + 1)


def last_faster_size(times: Mapping[int, tuple[float, float]]) -> int:
    """The largest size up to which the first method is faster; 0 if it is slower at the smallest."""
    return max(sizes_won(times, reverse=False), default=0)


def sizes_won(times: Mapping[int, tuple[float, float]], *, reverse: bool) -> Iterator[int]:
    """Sizes in order, or from the largest on, up to the first at which the first method is not faster."""
    return takewhile(lambda size: times[size][0] < times[size][1], sorted(times, reverse=reverse))


class Tuner:
    """Measures tiles and thresholds, and writes them into `out` over what it holds; `origin` is recorded with each."""

    def __init__(self, out: Path, gpu: GpuFamily, origin: Mapping[str, Any], bar: Progress, timer: Timer) -> None:
        self.out, self.gpu, self.origin, self.bar, self.timer = out, gpu, origin, bar, timer
        self.found = tuning.read_tuned(out) if tuning.is_file(out) else Tuned({}, {})
        self.done = 0

    def show(self, text: str) -> None:
        self.done += 1
        self.bar.show(self.done, text)

    def keep(self, found: Tuned) -> None:
        self.found = found.over(self.found)
        tuning.write_tuned(self.out, self.found)

    def median_ms(self, call: Callable[[], object], text: str) -> float:
        self.show(text)
        return quantiles(self.timer(call))[1]

    def measure(self, candidates: Candidates, run: Run) -> list[TileTime]:
        """Time the candidates and keep the fastest; returns every result."""
        title, shape = candidates.title, candidates.shape
        outcomes = try_tiles(candidates.tiles, run, self.timer, lambda tile: self.show(f"{title} {tile}"))
        best = fastest(outcomes)
        if best is not None:
            measured = {"shape": str(shape), "ms": best.ms, **self.origin}
            key = Key(self.gpu, candidates.kernel, "half", tuning.head_dim_class(shape.head_dim, shape.head_dim))
            self.keep(Tuned({key: TunedTile(asdict(best.tile), measured, self.out)}, {}))
        return outcomes

    def sparse_times(self, bench: Workbench, shape: AttentionShape, threshold: str) -> tuple[float, float]:
        """Milliseconds of the selected forward by query and by block."""
        from nsa.bench.kernels import tile_in_use

        tiles = [tile_in_use(kernel, shape, self.gpu, self.found.over(tuning.tuned())) for kernel in SPARSE_METHODS]
        by_query, by_block = (
            self.median_ms(partial(bench.run, kernel, tile), f"{threshold}: {kernel} {shape}")
            for kernel, tile in zip(SPARSE_METHODS, tiles, strict=True)
        )
        return by_query, by_block

    def compare_methods(self, length: int, smooth: float) -> dict[int, tuple[float, float]]:
        """Milliseconds of the selected forward by query and by block, by heads per group; keeps the threshold."""
        from nsa.bench.kernels import Workbench

        times: dict[int, tuple[float, float]] = {}
        for heads in GROUP_SIZES:
            shape = AttentionShape(batch=1, length=length, n_heads=heads, n_groups=1, head_dim=128)
            times[heads] = self.sparse_times(Workbench(shape, smooth), shape, "query_from_heads")
        self.keep(Tuned({}, {(self.gpu, "query_from_heads"): crossover(times)}))
        return times

    def compare_dense(self, smooth: float) -> dict[int, tuple[float, float]]:
        """Milliseconds of the dense selected forward and of the faster sparse one, by DENSE_LENGTHS; keeps the
        threshold."""
        from nsa.bench.kernels import Workbench

        heads = parse_heads(SHAPES[0])
        config = AttentionShape(1, 1, *heads).config("triton")
        times: dict[int, tuple[float, float]] = {}
        for blocks in DENSE_LENGTHS:
            shape = AttentionShape(1, blocks * config.n_sel * config.l_sel, *heads)
            bench = Workbench(shape, smooth)
            dense = self.median_ms(bench.select_densely, f"dense_up_to_blocks: selected-forward-dense {shape}")
            times[blocks] = dense, min(self.sparse_times(bench, shape, "dense_up_to_blocks"))
        self.keep(Tuned({}, {(self.gpu, "dense_up_to_blocks"): last_faster_size(times)}))
        return times


def render_tiles(outcomes: Mapping[Candidates, Sequence[TileTime]]) -> str:
    """All tiles of each kernel, fastest first, those that cannot be selected last."""
    lines = []
    for candidates, tried in outcomes.items():
        lines.append(candidates.title)
        in_order = sorted(tried, key=lambda outcome: float("inf") if outcome.ms is None else outcome.ms)
        for place, outcome in enumerate(in_order):
            in_use = " (was in use)" if outcome.tile == candidates.tiles[0] else ""
            ms = "       -   " if outcome.ms is None else f"{outcome.ms:8.3f} ms"
            mark = ">" if place == 0 and outcome.ms is not None else " "
            lines.append(f"{mark} {ms}  {outcome.tile}{in_use} {outcome.note}".rstrip())
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """`nsa bench tune`: returns 0 if every kernel has a tile that runs, else 1."""
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
    from nsa.bench.kernels import Workbench, is_used, tiles_to_measure

    gpu = torch.cuda.get_device_capability()
    shapes = [AttentionShape(args.batch_size, args.length, *parse_heads(text)) for text in args.heads or SHAPES]
    searches = [
        Candidates(kernel, shape, tuple(tiles_to_measure(kernel, shape, gpu, tuning.tuned())))
        for shape in shapes
        for kernel in kernels
        if kernel in tuning.KERNELS and is_used(kernel, shape)
    ]
    compare, compare_dense = (name in kernels for name in tuning.THRESHOLDS)
    steps = sum(len(search.tiles) for search in searches)
    steps += len(SPARSE_METHODS) * len(GROUP_SIZES) if compare else 0
    steps += (1 + len(SPARSE_METHODS)) * len(DENSE_LENGTHS) if compare_dense else 0
    require(steps > 0, "--kernels", " ".join(kernels), "a kernel that these --heads use")

    out = args.out or tuning.user_file()
    if out is None:
        raise ValueError("--out is not given; accepted: a file, because there is no home folder for the default one")
    origin = origin_columns(torch.device("cuda"), args.commit)
    outcomes: dict[Candidates, list[TileTime]] = {}
    times: dict[int, tuple[float, float]] = {}
    dense_times: dict[int, tuple[float, float]] = {}
    with closing(progress(steps)) as bar, torch.no_grad():
        tuner = Tuner(out, gpu, origin, bar, CudaClock().times)
        for shape in dict.fromkeys(search.shape for search in searches):
            bench = Workbench(shape, args.smooth)
            for search in searches:
                if search.shape == shape:
                    outcomes[search] = tuner.measure(search, partial(bench.run, search.kernel))
        if compare:
            times = tuner.compare_methods(args.length, args.smooth)
        if compare_dense:
            dense_times = tuner.compare_dense(args.smooth)
    print(render_tiles(outcomes))
    for heads, (query, block) in times.items():
        print(f"selected forward, {heads} heads per group: {query:.3f} ms by query, {block:.3f} ms by block")
    for blocks, (dense, other) in dense_times.items():
        print(f"selected forward, {blocks} blocks per selected one: {dense:.3f} ms dense, {other:.3f} ms sparse")
    without = [search.title for search, tried in outcomes.items() if fastest(tried) is None]
    for title in without:
        print(f"{title}: no tile runs; the one in use stays")
    print(json.dumps({"file": str(tuner.out), "gpu": tuning.family_name(gpu), "without": without}))
    return 1 if without else 0
