"""Computes the routes of `configs/routes.json` from the rows of `nsa bench flash`.

Only orders that differ from the default one (our kernels, FlashAttention, SDPA) are written. FlashAttention goes before
our kernels where it is at least 1.2 times as fast at every group size and window measured: a layer's gate and the sum
of `dq`, which ours fuse, are not in these times. It goes behind SDPA where it is not 1.2 times as fast as that. Varlen
rows never put it before our kernels: its cost there grows with the number of documents, which a route does not know.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from nsa.backends.gpu import gpu_family
from nsa.backends.measured_routes import MeasuredRoute, load_routes
from nsa.backends.routing import BACKEND_MODULES
from nsa.files import make_folder, replace_text
from nsa.results import Row

# How the suite of varlen rows ends.
VARLEN = "-packed"
# Below this speedup, the risk of someone else's kernels is not worth it.
WORTH_IT = 1.2
# The rows that stand for a backend.
BACKEND_OF_IMPL = {"nsa-triton": "triton", "flash-torch": "flash", "flash-flash_attn": "flash", "nsa-sdpa": "sdpa"}

# Milliseconds by backend, then by what a route does not distinguish: suite (window), batch, heads, groups and dtype.
Times = dict[str, dict[tuple[Any, ...], float]]
Order = tuple[str, ...]


# What a route distinguishes besides the length: GPU family, op, head_dim, mode, and whether it is varlen.
RouteSubject = tuple[str, str, int, Any, bool]


def measured_orders(rows: Sequence[Row]) -> dict[RouteSubject, dict[int, Order]]:
    """The order of the backends by length, wherever several were measured."""
    times: dict[tuple[RouteSubject, int], Times] = defaultdict(lambda: defaultdict(dict))
    # Torch's kernels are tried first: where they have a row, it is entered last.
    for row in sorted(rows, key=lambda row: row.impl == "flash-torch"):
        if row.impl in BACKEND_OF_IMPL and row.suite.startswith("flash"):
            subject = (gpu_family(row.gpu), row.op, row.Dk, row.mode, row.suite.endswith(VARLEN))
            shape = (row.suite, row.B, row.Hq, row.G, row.dtype)
            times[subject, row.S][BACKEND_OF_IMPL[row.impl]][shape] = row.p50_ms
    found: dict[RouteSubject, dict[int, Order]] = defaultdict(dict)
    for (subject, length), timed in sorted(times.items()):
        order = order_of(timed, varlen=subject[-1])
        if order:
            found[subject][length] = order
    return found


def measured_routes(rows: Sequence[Row]) -> list[MeasuredRoute]:
    """The routes that differ from the default order."""
    found = []
    for subject, orders in measured_orders(rows).items():
        gpu, op, head_dim, mode, varlen = subject
        for low, high, order in ranges(orders):
            if order != tuple(name for name in BACKEND_MODULES if name in order):
                shape: dict[str, Any] = {"min_length": low, "max_length": high, "head_dims": (head_dim,)}
                found.append(MeasuredRoute(gpu=gpu, op=op, order=order, mode=mode, varlen=varlen, **shape))
    return found


def order_of(times: Times, *, varlen: bool = False) -> Order:
    """Fastest first, by the mean over the shapes that all backends have; empty if nothing can be compared."""
    shared = set.intersection(*(set(timed) for timed in times.values()))
    if not shared or len(times) == 1:
        return ()
    mean = {name: math.fsum(math.log(timed[shape]) for shape in shared) for name, timed in times.items()}
    order = sorted(times, key=lambda name: (mean[name], name))
    if "flash" in times and not worth_it(times, than="sdpa"):
        return (*(name for name in order if name != "flash"), "flash")
    if order[:2] == ["flash", "triton"] and (varlen or not worth_it(times, than="triton")):
        order[:2] = ["triton", "flash"]
    return tuple(order)


def worth_it(times: Times, than: str) -> bool:
    """Whether FlashAttention is so much faster on every shape of the other backend."""
    flash, other = times["flash"], times.get(than, {})
    return bool(other) and all(shape in flash and other[shape] >= WORTH_IT * flash[shape] for shape in other)


def ranges(orders: dict[int, Order]) -> Iterator[tuple[int, int | None, Order]]:
    """Neighboring lengths with one order become one range, open-ended if at least two lengths up to the longest share
    it. Nothing is claimed between two lengths that differ, nor below the shortest."""
    for order, neighbors in groupby(sorted(orders), orders.__getitem__):
        lengths = list(neighbors)
        open_ended = len(lengths) > 1 and lengths[-1] == max(orders)
        yield lengths[0], None if open_ended else lengths[-1], order


def write_routes(path: Path, rows: Sequence[Row]) -> None:
    """Replace what the file says about the GPUs, branches, head_dims, directions and layouts of the rows. The rest
    stays, behind the new routes: the router applies the first that covers a problem."""
    measured = measured_orders(rows)

    def replaced(old: MeasuredRoute) -> bool:
        dims = old.head_dims or ()
        return len(dims) == 1 and (old.gpu, old.op, dims[0], old.mode, old.varlen) in measured

    routes = [*measured_routes(rows), *(old for old in load_routes(path) if not replaced(old))]
    origin = {"by": "nsa bench flash", "rows": len(rows), "date": max(row.date for row in rows)}
    origin["commit"] = ", ".join(sorted({row.commit for row in rows if row.commit})) or "unknown"
    make_folder(path.parent)
    lines = ",\n".join(f"  {json.dumps(as_json(route))}" for route in routes)
    replace_text(path, f'{{\n "measured": {json.dumps(origin)},\n "routes": [\n{lines}\n ]\n}}\n')


def as_json(route: MeasuredRoute) -> dict[str, Any]:
    """The route as JSON, without what is left at its default."""
    defaults = {field.name: field.default for field in fields(MeasuredRoute)}
    return {name: value for name, value in asdict(route).items() if value != defaults[name]}
