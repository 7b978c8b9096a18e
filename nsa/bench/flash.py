"""Where FlashAttention wins: the compressed and the sliding branch by every path, and the thresholds file from that.

    nsa bench flash --out benchmarks/results/h200/flash.csv --plot docs/flash.png --write configs/routes.json
    nsa bench flash --rows benchmarks/results/h200/flash.csv --write configs/routes.json   # anew from rows, no GPU

`auto` takes FlashAttention where it is at least 1.2 times as fast as SDPA at every group size measured, and our kernels
where they are faster than both. `sdpa-*` rows are torch's kernels on the folded compressed branch, for comparison only:
no backend is made of them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa import settings
from nsa.backends import sdpa, triton
from nsa.backends.flash import FlashBackend
from nsa.backends.flash.fold import PlainFold
from nsa.backends.flash.libraries import find_libraries
from nsa.backends.problem import Problem
from nsa.backends.routing import Preference, load_preferences
from nsa.bench.attention import time_calls
from nsa.bench.plot import COLOURS, OTHER_COLOUR
from nsa.bench.results import Row, add_output_arguments, append, environment, quantiles, read
from nsa.config import require
from nsa.geometry import n_compressed

BLOCK, STRIDE, WINDOW = 32, 16, 512
# How much faster than SDPA FlashAttention must be to be chosen: below, a crash of someone else's code is not worth it.
WORTH_IT = 1.2
# The rows that stand for a backend. Torch's kernels are the ones the flash backend tries first.
BACKENDS = {"nsa-triton": "triton", "flash-torch": "flash", "nsa-sdpa": "sdpa"}
SDPA_KERNELS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Point:
    """One shape of one branch."""

    op: str
    length: int
    n_heads: int
    group_size: int
    width: int
    window: int = WINDOW

    @property
    def n_groups(self) -> int:
        return self.n_heads // self.group_size

    @property
    def suite(self) -> str:
        return f"flash-w{self.window}" if self.op == "sliding" else "flash"

    @property
    def knobs(self) -> dict[str, Any]:
        own = {"window": self.window} if self.op == "sliding" else {"block": BLOCK, "stride": STRIDE}
        return {**own, "scale": self.width**-0.5, "cu_seqlens": None, "q_start": None}

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
        )

    @property
    def n_keys(self) -> int:
        return self.length if self.op == "sliding" else n_compressed(self.length, BLOCK, STRIDE)

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
    yield Pass(impl, "fwd", lambda: forward(*qkv, **point.knobs))
    o, lse = forward(*qkv, **point.knobs)
    do = torch.randn_like(o)
    yield Pass(impl, "bwd", lambda: backward(do, None, *qkv, o, lse, **point.knobs))


def sdpa_passes(impl: str, point: Point, qkv: tuple[Tensor, ...]) -> Iterator[Pass]:
    """Torch's SDPA on the folded branch: the kernel alone, folding not counted."""
    q, k, v = qkv
    fold = PlainFold(point.length, point.n_keys, point.n_groups, BLOCK, STRIDE)
    folded, keys, values = (x.transpose(1, 2).detach().requires_grad_() for x in (fold.fold(q), k, v))

    def forward() -> Tensor:
        with sdpa_kernel(SDPA_KERNELS[impl]):
            return F.scaled_dot_product_attention(folded, keys, values, is_causal=True, enable_gqa=True)

    def inference() -> Tensor:
        with torch.no_grad():
            return forward()

    yield Pass(impl, "fwd", inference)
    out = forward()
    do = torch.randn_like(out)
    yield Pass(impl, "bwd", lambda: torch.autograd.grad(out, (folded, keys, values), do, retain_graph=True))


def passes(point: Point, qkv: tuple[Tensor, ...]) -> Iterator[Pass]:
    """Every path of the point, one after the other; one that fails is said and left out."""
    paths: dict[str, Callable[[], Iterator[Pass]]] = {
        "nsa-sdpa": lambda: backend_passes("nsa-sdpa", sdpa, point, qkv),
        "nsa-triton": lambda: backend_passes("nsa-triton", triton, point, qkv),
    }
    for library in find_libraries()[0]:
        impl = f"flash-{library.contract.library}"
        backend = FlashBackend(settings.current(), (library,))
        paths[impl] = lambda impl=impl, backend=backend: backend_passes(impl, backend, point, qkv)  # type: ignore[misc]
    if point.op == "compressed":
        for impl in SDPA_KERNELS:
            paths[impl] = lambda impl=impl: sdpa_passes(impl, point, qkv)  # type: ignore[misc]
    for impl, path in paths.items():
        try:
            yield from path()
        except RuntimeError as error:
            print(f"{impl} fails on {point}: {first_line(error)}")


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def measure(point: Point, dtype: torch.dtype, commit: str | None) -> Iterator[Row]:
    where = environment(torch.device("cuda"), commit)
    for each in passes(point, point.inputs(dtype, "cuda")):
        torch.cuda.reset_peak_memory_stats()
        try:
            p20, p50, p80 = quantiles(time_calls(each.call))
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
            peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 3),
            tokens_per_s=None,
            **where,
        )


# From rows to thresholds.


def thresholds(rows: Sequence[Row]) -> list[Preference]:
    """Per GPU, branch, width and direction: which backends to try in which order, by ranges of lengths."""
    chosen: dict[tuple[str, str, int, str], dict[int, tuple[str, ...]]] = defaultdict(dict)
    for (gpu, op, width, mode, length), times in times_of(rows).items():
        chosen[gpu, op, width, mode][length] = order_of(times)
    found = []
    for (gpu, op, width, mode), orders in sorted(chosen.items()):
        for low, high, order in ranges(orders):
            shape: dict[str, Any] = {"gpu": gpu, "op": op, "head_widths": (width,), "mode": mode}
            found.append(Preference(**shape, order=order, min_length=low, max_length=high))
    return found


Times = dict[str, dict[int, float]]  # backend: group size: milliseconds


def times_of(rows: Sequence[Row]) -> dict[tuple[str, str, int, str, int], Times]:
    """The latest row of each backend; windows other than the usual one are for the table, not for the file."""
    found: dict[tuple[str, str, int, str, int], Times] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        backend = BACKENDS.get(row.impl)
        if backend is not None and row.suite in ("flash", f"flash-w{WINDOW}"):
            found[row.gpu, row.op, row.Dk, row.mode, row.S][backend][row.Hq // row.G] = row.p50_ms
    return found


def order_of(times: Times) -> tuple[str, ...]:
    """Fastest first. FlashAttention is listed only where it is worth it at every group size that SDPA has."""
    listed = dict(times)
    flash, plain = listed.get("flash"), listed.get("sdpa")
    if flash is not None:
        worth_it = plain is not None and all(size in flash and plain[size] >= WORTH_IT * flash[size] for size in plain)
        if not worth_it:
            del listed["flash"]
    # Means are comparable only over the same shapes.
    shared = set.intersection(*(set(by_size) for by_size in listed.values())) if listed else set()
    if not shared:
        return ("sdpa",)
    mean = {name: math.fsum(math.log(by_size[size]) for size in shared) for name, by_size in listed.items()}
    return tuple(sorted(listed, key=lambda name: (mean[name], name)))


def ranges(orders: dict[int, tuple[str, ...]]) -> Iterator[tuple[int, int | None, tuple[str, ...]]]:
    """Neighbouring lengths with one order become one range; nothing is claimed below the shortest that was measured,
    and past the longest its order stays."""
    lengths = sorted(orders)
    low = lengths[0]
    for here, following in zip(lengths, [*lengths[1:], None], strict=True):
        if following is None:
            yield low, None, orders[here]
        elif orders[following] != orders[here]:
            yield low, following - 1, orders[here]
            low = following


def write_thresholds(path: Path, found: Sequence[Preference], rows: Sequence[Row]) -> None:
    """Replace what the file says about these GPUs and branches; the rest of it stays."""
    measured = {(preference.gpu, preference.op) for preference in found}
    kept = [old for old in load_preferences(path) if (old.gpu, old.op) not in measured]
    origin = {"by": "nsa bench flash", "rows": len(rows), "date": max(row.date for row in rows)}
    origin["commit"] = ", ".join(sorted({row.commit for row in rows if row.commit})) or "unknown"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(as_json(preference))}" for preference in (*kept, *found))
    path.write_text(f'{{\n "measured": {json.dumps(origin)},\n "preferences": [\n{lines}\n ]\n}}\n')


def as_json(preference: Preference) -> dict[str, Any]:
    """Without what is left at its default."""
    defaults = {field.name: field.default for field in fields(Preference)}
    return {name: value for name, value in asdict(preference).items() if value != defaults[name]}


def table(rows: Sequence[Row]) -> str:
    """Every path against SDPA: how many times as fast."""
    lines = [f"{'op':<11}{'mode':<5}{'width':>5}{'group':>6}{'S':>8}  times as fast as nsa-sdpa"]
    for (suite, op, mode, width, size, length), found in sorted(by_shape(rows).items()):
        base = found.get("nsa-sdpa")
        if base is not None:
            ratios = "  ".join(f"{impl} {base / ms:.2f}" for impl, ms in sorted(found.items()) if impl != "nsa-sdpa")
            window = f" ({suite.removeprefix('flash-')})" if op == "sliding" else ""
            lines.append(f"{op:<11}{mode:<5}{width:>5}{size:>6}{length:>8}  {ratios}{window}")
    return "\n".join(lines)


def by_shape(rows: Sequence[Row]) -> dict[tuple[str, str, str, int, int, int], dict[str, float]]:
    found: dict[tuple[str, str, str, int, int, int], dict[str, float]] = defaultdict(dict)
    for row in rows:
        found[row.suite, row.op, row.mode, row.Dk, row.Hq // row.G, row.S][row.impl] = row.p50_ms
    return found


def draw(rows: Sequence[Row], out: Path) -> None:
    """Speed against SDPA over the length: a row of panels for each branch and direction, a column for each width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[tuple[str, str], dict[int, dict[tuple[str, int], dict[int, float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for (suite, op, mode, width, size, length), found in by_shape(rows).items():
        if suite in ("flash", f"flash-w{WINDOW}") and "nsa-sdpa" in found:
            for impl, ms in found.items():
                lines[op, mode][width][impl, size][length] = found["nsa-sdpa"] / ms
    require(bool(lines), "rows", len(rows), "rows of nsa-sdpa among them, which the others are held against")
    widths = sorted({width for panels in lines.values() for width in panels})
    sizes = sorted({size for panels in lines.values() for by_line in panels.values() for _, size in by_line})
    styles = {size: ("-", "--", ":", "-.")[i % 4] for i, size in enumerate(sizes)}
    shape = (len(lines), len(widths))
    figure, axes = pyplot.subplots(*shape, figsize=(4.2 * shape[1], 3.2 * shape[0]), squeeze=False)
    for row, ((op, mode), panels) in zip(axes, sorted(lines.items()), strict=True):
        for axis, width in zip(row, widths, strict=True):
            for (impl, size), points in sorted(panels[width].items()):
                lengths = sorted(points)
                colour = COLOURS.get(impl, OTHER_COLOUR)
                values = [points[length] for length in lengths]
                axis.plot(
                    lengths, values, styles[size], marker=".", color=colour, label=f"{impl}, {size} heads a group"
                )
            axis.axhline(WORTH_IT, color="#cc4444", linewidth=0.8)
            axis.set(title=f"{op} {mode}, width {width}", xlabel="sequence length", xscale="log", yscale="log")
            axis.grid(alpha=0.25)
        row[0].set_ylabel("times as fast as nsa-sdpa")
        next(axis for axis in row if axis.lines[:-1]).legend(frameon=False, fontsize=6)
    figure.suptitle(", ".join(sorted({row.gpu for row in rows})), fontsize=9, color="#666666")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def points(args: argparse.Namespace) -> Iterator[Point]:
    for width in args.widths:
        for size in args.group_sizes:
            require(args.heads % size == 0, "--group-sizes", size, f"a divisor of the {args.heads} heads")
            for length in args.lengths:
                yield Point("compressed", length, args.heads, size, width)
                for window in args.windows:
                    yield Point("sliding", length, args.heads, size, width, window)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Time the compressed and the sliding branch by every path, and write which serves which range."
    parser.epilog = "example: nsa bench flash --out flash.csv --plot flash.png --write configs/routes.json"
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 96, 128, 192])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--group-sizes", nargs="+", type=int, default=[4, 16], help="query heads a group")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--windows", nargs="+", type=int, default=[WINDOW])
    parser.add_argument("--rows", type=Path, help="measure nothing: take the rows of this CSV file")
    parser.add_argument("--plot", type=Path, help="draw the rows here")
    parser.add_argument("--write", type=Path, help="write the thresholds file here; auto reads configs/routes.json")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    rows = read(args.rows) if args.rows is not None else list(measure_all(args))
    require(bool(rows), "--rows", str(args.rows), "a file with at least one row")
    print(table(rows))
    if args.plot is not None:
        draw(rows, args.plot)
    found = thresholds(rows)
    if args.write is not None:
        write_thresholds(args.write, found, rows)
    print(json.dumps([as_json(preference) for preference in found]))
    return 0


def measure_all(args: argparse.Namespace) -> Iterator[Row]:
    require(torch.cuda.is_available(), "nsa bench flash", "started without a GPU", "a CUDA GPU, or --rows FILE")
    for point in points(args):
        for row in measure(point, torch.bfloat16, args.commit):
            print(f"{point} {row.impl:<18} {row.mode} {row.p50_ms:9.3f} ms   peak {row.peak_gib:.2f} GiB", flush=True)
            if args.out is not None:
                append(args.out, row)
            yield row
