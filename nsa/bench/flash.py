"""Where FlashAttention wins: the compressed and the sliding branch by every path, and the thresholds file from that.

    nsa bench flash --out benchmarks/results/h200/flash.csv --plot docs/flash.png --write configs/routes.json
    nsa bench flash --rows benchmarks/results/h200/flash.csv --write configs/routes.json   # anew from rows, no GPU

`sdpa-*` rows are torch's kernels for comparison only, no backend is made of them: the compressed branch folded, the
sliding one cut into bands of a window's queries over two windows' keys under a mask, which torch's flash kernel does
not take. Laying out is not counted. Times are the GPU's alone, by graph replay.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa import settings
from nsa.backends import policy, sdpa, triton
from nsa.backends.flash import FlashBackend
from nsa.backends.flash.cases import kind_of, posed
from nsa.backends.flash.fold import PlainFold
from nsa.backends.flash.libraries import find_libraries
from nsa.backends.problem import Problem
from nsa.bench.attention import captured, peak_bytes, time_calls
from nsa.bench.plot import COLOURS, NAMES, OTHER_COLOUR, mark_lengths
from nsa.bench.results import Row, append, environment, quantiles, read
from nsa.bench.thresholds import PACKED, WORTH_IT, as_json, thresholds, write_thresholds
from nsa.config import require
from nsa.geometry import n_compressed
from nsa.sequences import Compressed, Saved, Sequences, Sliding, Upstream

BLOCK, STRIDE, WINDOW = 32, 16, 512
SDPA_KERNELS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
# The math kernel writes its scores out, in fp32, and keeps several of them for a backward pass.
MOST_SCORE_BYTES = 4 << 30
# A thousand timings in a few minutes: each has what settles a ratio, not what a published figure has.
MEASURE_MS, MOST_CALLS = 20.0, 20
PROBES_AT_ONCE = 8
LINE_STYLES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Point:
    """One shape of one branch."""

    op: str
    length: int
    n_heads: int
    group_size: int
    width: int
    window: int = WINDOW
    # Of equal length, one after the other; 1: a plain row.
    documents: int = 1

    @property
    def n_groups(self) -> int:
        return self.n_heads // self.group_size

    @property
    def suite(self) -> str:
        window = f"-w{self.window}" if self.op == "sliding" else ""
        return f"flash{window}{PACKED if self.packed else ''}"

    @property
    def packed(self) -> bool:
        return self.documents > 1

    @property
    def knob(self) -> int:
        """What of a call its problem does not tell."""
        return self.window if self.op == "sliding" else STRIDE

    def offsets(self, device: str) -> Tensor | None:
        """`cu_seqlens` of a varlen point."""
        ends = [self.length * i // self.documents for i in range(self.documents + 1)]
        return torch.tensor(ends, dtype=torch.int32, device=device) if self.packed else None

    def branch(self, offsets: Tensor | None, device: torch.device) -> Compressed | Sliding:
        """As a backend takes it. Made anew for each call: what follows from the offsets is part of its cost."""
        sequences, scale = Sequences(1, self.length, device, offsets), self.width**-0.5
        if self.op == "sliding":
            return Sliding(sequences, self.window, scale)
        return Compressed(sequences, BLOCK, STRIDE, scale)

    def problem(self, dtype: torch.dtype, *, backward: bool) -> Problem:
        return Problem(
            op=self.op,
            batch=1,
            n_queries=self.length,
            n_keys=self.n_keys,
            n_heads=self.n_heads,
            n_groups=self.n_groups,
            d_k=self.width,
            d_v=self.width,
            dtype=dtype,
            device="cuda",
            backward=backward,
            packed=self.packed,
        )

    @property
    def n_keys(self) -> int:
        if self.op == "sliding":
            return self.length
        return self.length // STRIDE if self.packed else n_compressed(self.length, BLOCK, STRIDE)

    def inputs(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)

        def normal(length: int, heads: int) -> Tensor:
            return torch.randn(1, length, heads, self.width, generator=generator, device=device, dtype=dtype)

        return normal(self.length, self.n_heads), normal(self.n_keys, self.n_groups), normal(self.n_keys, self.n_groups)


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one path, ready to be timed."""

    impl: str
    mode: str
    call: Callable[[], object]


def backend_passes(impl: str, backend: Any, point: Point, qkv: tuple[Tensor, ...]) -> Iterator[Pass]:
    """A backend's own two functions, which the ops call; nothing where it declines."""
    for backward in (False, True):
        reason = backend.supports(point.problem(qkv[0].dtype, backward=backward))
        if reason is not None:
            print(f"{impl} declines {point}: {reason}")
            return
    forward, backward = (getattr(backend, f"{point.op}_{way}") for way in ("forward", "backward"))
    device = qkv[0].device
    offsets = point.offsets(device.type)
    yield Pass(impl, "fwd", lambda: forward(*qkv, point.branch(offsets, device)))
    saved = Saved(*qkv, *forward(*qkv, point.branch(offsets, device)))
    upstream = Upstream(torch.randn_like(saved.o))
    yield Pass(impl, "bwd", lambda: backward(upstream, saved, point.branch(offsets, device)))


@dataclass(frozen=True)
class Layout:
    """A branch as dense attention: `q [B,G*h,S,D]`, `k` and `v [B,G,N,D]`, and a mask where it is not causal."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None

    @property
    def score_bytes(self) -> int:
        return 4 * self.q[..., 0].numel() * self.k.shape[2]


def folded(point: Point, qkv: tuple[Tensor, ...]) -> Layout:
    q, k, v = qkv
    fold = PlainFold(point.length, point.n_keys, point.n_groups, BLOCK, STRIDE)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (fold.fold(q), k, v))
    return Layout(q, k, v)


def banded(point: Point, qkv: tuple[Tensor, ...]) -> Layout:
    """A window of queries after the other, each over its own keys and the window before."""
    q, k, v = qkv
    window = min(point.window, point.length)
    bands = q[0].unflatten(0, (-1, window)).transpose(1, 2).contiguous()
    # [bands, G, D, 2w] as `unfold` leaves it.
    before = [F.pad(x[0], (0, 0, 0, 0, window, 0)).unfold(0, 2 * window, window) for x in (k, v)]
    keys, values = (x.transpose(2, 3).contiguous() for x in before)
    ahead = torch.arange(2 * window, device=q.device) - torch.arange(window, device=q.device)[:, None]
    seen = ((ahead > 0) & (ahead <= window)).expand(len(bands), 1, -1, -1).clone()
    # Nothing comes before the first.
    seen[0, ..., :window] = False
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
    return Layout(bands, keys, values, bias)


def by_group(layout: Layout) -> Layout:
    """Every group a row of the batch with one key head: for a kernel that knows no groups."""
    q, k, v = layout.q, layout.k, layout.v
    mask = layout.mask
    if mask is not None:
        mask = mask.expand(-1, k.shape[1], -1, -1).flatten(0, 1)[:, None]
    return Layout(
        q.unflatten(1, (k.shape[1], -1)).flatten(0, 1), k.flatten(0, 1)[:, None], v.flatten(0, 1)[:, None], mask
    )


def attend(layout: Layout, kernel: SDPBackend) -> Tensor:
    q, k, v, mask = layout.q, layout.k, layout.v, layout.mask
    if k.shape[1] == 1:
        # Every head sees the one key head, without a copy.
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        mask = None if mask is None else mask.expand(-1, q.shape[1], -1, -1)
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def sdpa_passes(impl: str, point: Point, qkv: tuple[Tensor, ...]) -> Iterator[Pass]:
    """Torch's SDPA on the branch laid out as it takes it: the kernel alone, the layout not counted."""
    kernel = SDPA_KERNELS[impl]
    layout = folded(point, qkv) if point.op == "compressed" else banded(point, qkv)
    if kernel == SDPBackend.MATH and layout.score_bytes > MOST_SCORE_BYTES:
        print(f"{impl} is left out on {point}: its scores take {layout.score_bytes / 2**30:.1f} GiB")
        return
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        layout = by_group(layout)
    leaves = tuple(x.requires_grad_() for x in (layout.q, layout.k, layout.v))

    def forward() -> Tensor:
        return attend(layout, kernel)

    def inference() -> Tensor:
        with torch.no_grad():
            return forward()

    yield Pass(impl, "fwd", inference)
    out = forward()
    do = torch.randn_like(out)
    yield Pass(impl, "bwd", lambda: torch.autograd.grad(out, leaves, do, retain_graph=True))


def flash_backends() -> dict[str, FlashBackend]:
    """Each library that is here as a backend of its own."""
    return {
        f"flash-{library.contract.library}": FlashBackend(settings.current(), (library,))
        for library in find_libraries()[0]
    }


def probe_ahead(backends: Sequence[FlashBackend], points: Sequence[Point], dtype: torch.dtype) -> None:
    """Have every kind of call tried, several side by side: most of a probe is the start of its process."""
    asked = {}
    for point in points:
        problem = point.problem(dtype, backward=False)
        # The router asks before it knows the window, the call itself after.
        for each in (posed(problem), posed(problem, point.knob)):
            asked[kind_of(each, point.width, dtype)] = each
    print(f"{len(asked)} kinds of calls are probed first, unless they have been", flush=True)
    with ThreadPoolExecutor(min(PROBES_AT_ONCE, os.cpu_count() or 1)) as pool:
        for backend in backends:
            list(pool.map(backend.supports, asked.values()))


def passes(point: Point, qkv: tuple[Tensor, ...], flash: Mapping[str, FlashBackend]) -> Iterator[Pass]:
    """Every path of the point, one after the other; one that fails is said and left out."""
    backends: dict[str, Any] = {"nsa-sdpa": sdpa, "nsa-triton": triton, **flash}
    paths = {impl: partial(backend_passes, impl, backend, point, qkv) for impl, backend in backends.items()}
    paths |= {impl: partial(sdpa_passes, impl, point, qkv) for impl in sdpa_kernels(point)}
    for path in paths.values():
        try:
            yield from path()
        except RuntimeError as error:
            print(f"{path.args[0]} fails on {point}: {first_line(error)}")


def sdpa_kernels(point: Point) -> list[str]:
    """Torch's kernels that the branch can be laid out for: in whole bands, without documents; flash takes no mask."""
    if point.packed or (point.op == "sliding" and point.length % min(point.window, point.length)):
        return []
    return [impl for impl in SDPA_KERNELS if point.op == "compressed" or impl != "sdpa-flash"]


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def measure(point: Point, dtype: torch.dtype, commit: str | None, flash: Mapping[str, FlashBackend]) -> Iterator[Row]:
    where = environment(torch.device("cuda"), commit)
    for each in passes(point, point.inputs(dtype, "cuda"), flash):
        try:
            peak = peak_bytes(each.call)
            # As one graph: what the host needs for a launch says nothing about a kernel, and varies by the minute.
            replay = captured(each.call)
            p20, p50, p80 = quantiles(time_calls(replay, warmup_ms=0, measure_ms=MEASURE_MS, most=MOST_CALLS))
        except RuntimeError as error:
            # Out of memory, or a kernel that this shape has not: the others are still worth knowing.
            print(f"{each.impl} {each.mode} fails on {point}: {first_line(error)}")
            continue
        yield Row(
            suite=point.suite,
            op=point.op,
            impl=each.impl,
            mode=each.mode,
            B=1,
            S=point.length,
            Hq=point.n_heads,
            G=point.n_groups,
            Dk=point.width,
            Dv=point.width,
            dtype=str(dtype).removeprefix("torch."),
            p20_ms=p20,
            p50_ms=p50,
            p80_ms=p80,
            peak_gib=round(peak / 2**30, 3),
            tokens_per_s=None,
            **where,
        )


def table(rows: Sequence[Row]) -> str:
    """Every path against our SDPA path: how many times as fast."""
    lines = [f"{'op':<11}{'mode':<5}{'width':>5}{'group':>6}{'S':>8}  times as fast as nsa-sdpa"]
    for point, found in sorted(by_point(rows).items()):
        base = found.get("nsa-sdpa")
        if base is not None:
            times = "  ".join(f"{impl} {base / ms:.2f}" for impl, ms in sorted(found.items()) if impl != "nsa-sdpa")
            kind = f" ({point.suite.removeprefix('flash-')})" if point.suite != "flash" else ""
            shape = f"{point.op:<11}{point.mode:<5}{point.width:>5}{point.group_size:>6}{point.length:>8}"
            lines.append(f"{shape}  {times}{kind}")
    return "\n".join(lines)


class Measured(NamedTuple):
    """What two rows must share to be compared."""

    gpu: str
    suite: str
    op: str
    mode: str
    width: int
    group_size: int
    length: int
    batch: int
    n_heads: int
    dtype: str


def by_point(rows: Sequence[Row]) -> dict[Measured, dict[str, float]]:
    found: dict[Measured, dict[str, float]] = defaultdict(dict)
    for row in rows:
        shape = (row.gpu, row.suite, row.op, row.mode, row.Dk, row.Hq // row.G, row.S, row.B, row.Hq, row.dtype)
        found[Measured(*shape)][row.impl] = row.p50_ms
    return found


# branch, direction: width: path, heads a group: length: times as fast as SDPA
Ratios = dict[tuple[str, str], dict[int, dict[tuple[str, int], dict[int, float]]]]


def ratios(rows: Sequence[Row]) -> Ratios:
    """Of plain rows, the sliding ones at the paper's window."""
    found: Ratios = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for point, times in by_point(rows).items():
        base = times.pop("nsa-sdpa", None)
        if point.suite in ("flash", f"flash-w{WINDOW}") and base is not None:
            for impl, ms in times.items():
                found[point.op, point.mode][point.width][impl, point.group_size][point.length] = base / ms
    gpus = sorted({row.gpu for row in rows})
    require(len(gpus) < 2, "rows", gpus, "those of one GPU, for a plot")
    require(bool(found), "rows", len(rows), "rows of nsa-sdpa among them, which the others are held against")
    return found


def draw(rows: Sequence[Row], out: Path) -> None:
    """Speed against SDPA over the length: a row of panels for each branch and direction, a column for each width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    found = ratios(rows)
    widths = sorted({width for panels in found.values() for width in panels})
    lines = {line for panels in found.values() for by_line in panels.values() for line in by_line}
    colours = {impl: COLOURS.get(impl, OTHER_COLOUR) for impl in sorted({impl for impl, _ in lines})}
    styles = dict(zip(sorted({size for _, size in lines}), cycle(LINE_STYLES), strict=False))
    size = (3.6 * len(widths), 2.9 * len(found) + 0.6)
    figure, axes = pyplot.subplots(len(found), len(widths), figsize=size, squeeze=False, sharey="row")
    for row, ((op, mode), panels) in zip(axes, sorted(found.items()), strict=True):
        for axis, width in zip(row, widths, strict=True):
            for (impl, heads), points in sorted(panels[width].items()):
                axis.plot(*zip(*sorted(points.items()), strict=True), styles[heads], marker=".", color=colours[impl])
            axis.axhline(1, color=COLOURS["nsa-sdpa"])
            axis.axhline(WORTH_IT, color="#cc4444", linewidth=0.8)
            axis.set(title=f"{op} {NAMES[mode]}, width {width}", xscale="log", yscale="log")
            axis.set_yticks([0.25, 0.5, 1, 2, 5, 10], ["1/4", "1/2", "1", "2", "5", "10"])
            mark_lengths(axis, {length for points in panels[width].values() for length in points})
            axis.grid(alpha=0.25)
        row[0].set_ylabel("times as fast as nsa-sdpa")
    legend = [Line2D([], [], color=colour, label=impl) for impl, colour in colours.items()]
    legend += [Line2D([], [], color=COLOURS["nsa-sdpa"], label="nsa-sdpa")]
    legend += [Line2D([], [], color="#cc4444", linewidth=0.8, label=f"worth it: {WORTH_IT}")]
    legend += [Line2D([], [], color="#333333", linestyle=s, label=f"{n} heads a group") for n, s in styles.items()]
    gpus = ", ".join(sorted({row.gpu for row in rows}))
    figure.suptitle(f"{gpus}, batch 1, window {WINDOW}", fontsize=9, color="#666666")
    figure.tight_layout(rect=(0, 0.6 / size[1], 1, 1))
    figure.legend(handles=legend, loc="lower center", ncols=5, frameon=False, fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=90)
    pyplot.close(figure)


def points(args: argparse.Namespace) -> Iterator[Point]:
    for width in args.widths:
        for size in args.group_sizes:
            require(args.heads % size == 0, "--group-sizes", size, f"a divisor of the {args.heads} heads")
            for length in args.lengths:
                yield Point("compressed", length, args.heads, size, width)
                for window in args.windows:
                    yield Point("sliding", length, args.heads, size, width, window)
                if size == args.group_sizes[0]:
                    packed = {"documents": args.documents}
                    yield Point("compressed", length, args.heads, size, width, **packed)
                    yield Point("sliding", length, args.heads, size, width, args.windows[-1], **packed)


def run(args: argparse.Namespace) -> int:
    rows = read(args.rows) if args.rows is not None else list(measure_all(args))
    require(bool(rows), "--rows", str(args.rows), "a file with at least one row")
    print(table(rows))
    if args.plot is not None:
        draw(rows, args.plot)
    found = thresholds(rows)
    if args.write is not None:
        require(
            bool(found),
            "--write",
            str(args.write),
            "rows of several backends to compare, as nsa bench flash makes them",
        )
        write_thresholds(args.write, found, rows)
    print(json.dumps([as_json(preference) for preference in found]))
    return 0


def measure_all(args: argparse.Namespace) -> Iterator[Row]:
    off = sorted({flag.why for flag in policy.flags(settings.current()).values() if flag.state == "off"})
    for why in off:
        raise ValueError(
            f"{why}, and nsa bench flash calls the FlashAttention libraries: unset it, or pass --rows FILE"
        )
    require(torch.cuda.is_available(), "nsa bench flash", "started without a GPU", "a CUDA GPU, or --rows FILE")
    print("sdpa-flash takes no mask and is left out of the sliding branch; no sdpa-* row is packed or of a broken band")
    flash, all_points = flash_backends(), list(points(args))
    probe_ahead(list(flash.values()), all_points, torch.bfloat16)
    # A graph is recorded on a stream of its own, and a backward pass runs where its forward pass did.
    with torch.cuda.stream(torch.cuda.Stream()):
        yield from measure_points(all_points, args, flash)


def measure_points(
    all_points: Sequence[Point], args: argparse.Namespace, flash: Mapping[str, FlashBackend]
) -> Iterator[Row]:
    for point in all_points:
        for row in measure(point, torch.bfloat16, args.commit, flash):
            print(f"{point} {row.impl:<18} {row.mode} {row.p50_ms:9.3f} ms   peak {row.peak_gib:.2f} GiB", flush=True)
            if args.out is not None:
                append(args.out, row)
            yield row
