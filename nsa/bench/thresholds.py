"""From the rows of `nsa bench flash` to the lines of `configs/routes.json`.

`auto` takes our kernels. FlashAttention is listed after them where it is at least 1.2 times as fast as our SDPA path at
every group size and window measured, and before them where it is as much faster than they are too: what a layer saves
by them, the gate and the sum of `dq` in the same pass, is not in these times. In packed rows it stays behind them: what
it costs there grows with the number of documents, which a route does not know.
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

from nsa.backends.preferences import Preference, gpu_family, load_preferences
from nsa.bench.results import Row
from nsa.files import make_folder, replace_text

# How the suite of a row of several documents ends.
PACKED = "-packed"
# How much faster than another path FlashAttention must be to go before it: below, a crash of someone else's code is not
# worth it.
WORTH_IT = 1.2
# The rows that stand for a backend.
BACKENDS = {"nsa-triton": "triton", "flash-torch": "flash", "flash-flash_attn": "flash", "nsa-sdpa": "sdpa"}


def thresholds(rows: Sequence[Row]) -> list[Preference]:
    """Per GPU, branch, width, direction and kind of row: which backends to try in which order, by ranges of lengths."""
    chosen: dict[tuple[str, str, int, str, bool], dict[int, tuple[str, ...]]] = defaultdict(dict)
    for (gpu, op, width, mode, packed, length), times in times_of(rows).items():
        order = order_of(times, packed=packed)
        if order:
            chosen[gpu, op, width, mode, packed][length] = order
    found = []
    for (gpu, op, width, mode, packed), orders in sorted(chosen.items()):
        for low, high, order in ranges(orders):
            shape: dict[str, Any] = {"gpu": gpu, "op": op, "head_widths": (width,), "mode": mode, "packed": packed}
            found.append(Preference(**shape, order=order, min_length=low, max_length=high))
    return found


# backend: what the file does not tell apart, the window of a suite, batch, heads, groups and dtype: milliseconds
Shape = tuple[str, int, int, int, str]
Times = dict[str, dict[Shape, float]]
# Family of GPUs, branch, width, direction, packed, length
Kind = tuple[str, str, int, str, bool, int]


def shape_of(row: Row) -> Shape:
    return row.suite, row.B, row.Hq, row.G, row.dtype


def times_of(rows: Sequence[Row]) -> dict[Kind, Times]:
    """The latest row of each backend; of the flash backend the library's that it would call."""
    found: dict[Kind, Times] = defaultdict(lambda: defaultdict(dict))
    # Torch's kernels are tried first: where they have a row, it is the last to be entered.
    for row in sorted(rows, key=lambda row: row.impl == "flash-torch"):
        backend = BACKENDS.get(row.impl)
        if backend is not None and row.suite.startswith("flash"):
            kind = (gpu_family(row.gpu), row.op, row.Dk, row.mode, row.suite.endswith(PACKED), row.S)
            found[kind][backend][shape_of(row)] = row.p50_ms
    return found


def order_of(times: Times, *, packed: bool = False) -> tuple[str, ...]:
    """Fastest first by the mean over the shapes that all have; nothing where nothing can be compared."""
    listed = dict(times)
    # Where it is not worth it, FlashAttention is not listed, which keeps `auto` from it.
    if "flash" in listed and not worth_it(listed, than="sdpa"):
        del listed["flash"]
    shared = set.intersection(*(set(timed) for timed in listed.values())) if listed else set()
    if not shared or len(times) == 1:
        return ()
    mean = {name: math.fsum(math.log(timed[shape]) for shape in shared) for name, timed in listed.items()}
    order = sorted(listed, key=lambda name: (mean[name], name))
    if order[:2] == ["flash", "triton"] and (packed or not worth_it(listed, than="triton")):
        order[:2] = ["triton", "flash"]
    return tuple(order)


def worth_it(times: Times, than: str) -> bool:
    """Whether FlashAttention is so much faster on every shape that the other path has."""
    flash, other = times["flash"], times.get(than, {})
    return bool(other) and all(shape in flash and other[shape] >= WORTH_IT * flash[shape] for shape in other)


def ranges(orders: dict[int, tuple[str, ...]]) -> Iterator[tuple[int, int | None, tuple[str, ...]]]:
    """Neighbouring lengths with one order become one range, which goes on past the longest if two of them show it.
    Between two that differ, as below the shortest, nothing was measured and nothing is claimed."""
    for order, neighbours in groupby(sorted(orders), orders.__getitem__):
        lengths = list(neighbours)
        goes_on = len(lengths) > 1 and lengths[-1] == max(orders)
        yield lengths[0], None if goes_on else lengths[-1], order


def write_thresholds(path: Path, found: Sequence[Preference], rows: Sequence[Row]) -> None:
    """Replace what the file says about the same GPUs, branches, widths, directions and rows; the rest of it stays,
    behind what is new: the router takes the first line that covers a problem."""

    def subject(preference: Preference) -> tuple[Any, ...]:
        return preference.gpu, preference.op, preference.head_widths, preference.mode, preference.packed

    measured = set(map(subject, found))
    kept = [old for old in load_preferences(path) if subject(old) not in measured]
    origin = {"by": "nsa bench flash", "rows": len(rows), "date": max(row.date for row in rows)}
    origin["commit"] = ", ".join(sorted({row.commit for row in rows if row.commit})) or "unknown"
    make_folder(path.parent)
    lines = ",\n".join(f"  {json.dumps(as_json(preference))}" for preference in (*found, *kept))
    replace_text(path, f'{{\n "measured": {json.dumps(origin)},\n "preferences": [\n{lines}\n ]\n}}\n')


def as_json(preference: Preference) -> dict[str, Any]:
    """Without what is left at its default."""
    defaults = {field.name: field.default for field in fields(Preference)}
    return {name: value for name, value in asdict(preference).items() if value != defaults[name]}
