"""Figures of docs/kernels.md: what bounds each kernel, and the targets that are missed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from recorded import BOTH, COMPARED, MODES, NSA, SHAPES, digits, measured, records, table, training_rows

from nsa.bench.report import break_even
from nsa.evaluation.plots import short

LONG_KERNEL_MS = 0.3
# Of a pass, the least share of a kernel that is listed.
LISTED_SHARE = 0.08
# A kernel whose busiest unit is busy for less, in percent, is bound by something else.
BUSY = 80
UNITS = {"tensor": "tensor cores", "exp": "exponentials", "alu": "integer ALU", "l1": "L1/shared", "l2": "L2"}
UNITS |= {"dram": "DRAM"}


class Target(NamedTuple):
    """Milliseconds wanted of a forward and a backward pass: first, and then."""

    shape: str
    batch: int
    length: int
    first: tuple[float, float]
    then: tuple[float, float]


TARGETS = (
    Target("64/4/128", 1, 65536, (24.5, 55), (20, 48)),
    Target("64/4/128", 1, 131072, (72, 160), (62, 140)),
    Target("64/4/128", 1, 8192, (1.85, 4.2), (1.6, 3.8)),
    Target("32/8/128", 1, 65536, (15, 29), (13, 26)),
    Target("12/2/64", 1, 65536, (3.6, 5.9), (3.2, 5.2)),
    Target("12/2/64", 8, 2048, (0.36, 0.80), (0.30, 0.65)),
)
MOST_PEAK_GIB, MOST_EVEN_TOKENS = 9.5, 6000
TRAINING_TARGETS = {(8, 2048): 320_000, (1, 32768): 285_000}


def profile_of(shape: str, batch: int, length: int, mode: str) -> list[dict[str, str]]:
    """The profiled kernels of one pass, the longest first; none where it was not profiled."""
    wanted = [*shape.split("/"), str(batch), str(length), mode]
    names = ("Hq", "G", "Dk", "B", "S", "mode")
    rows = [row for row in records("h200/ncu.csv") if [row[name] for name in names] == wanted]
    return sorted(rows, key=lambda row: -float(row["ms"]))


def busiest(row: dict[str, str]) -> tuple[float, str]:
    """How busy the busiest unit was, in percent, and which one that is, or are."""
    busy = {name: float(row[f"{unit}_pct"]) for unit, name in UNITS.items()}
    top = max(busy.values())
    return top, " and ".join(name for name, x in busy.items() if x == top)


def bounds_table() -> str:
    """How busy each unit was in the kernels that take long at 64/4/128, 64k; what was busiest is bold."""
    lines = []
    for mode in MODES:
        for row in profile_of("64/4/128", 1, 65536, mode):
            if float(row["ms"]) < LONG_KERNEL_MS:
                continue
            top = f"{busiest(row)[0]:.0f}"
            busy = [f"{float(row[f'{unit}_pct']):.0f}" for unit in UNITS]
            cells = [row["launches"], digits(float(row["ms"])), *(f"**{x}**" if x == top else x for x in busy)]
            lines.append([row["stage"], f"`{row['kernel']}`", *cells])
    return table(["stage", "kernel", "launches", "ms", *UNITS.values()], lines)


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def missed_targets() -> Iterator[tuple[Target, str, float, float, float]]:
    """Each target with the pass that misses the second time wanted, what was measured, and both times."""
    found = measured("attention", "attention-batch-8")
    for target in TARGETS:
        heads = replace(SHAPES[target.shape], batch=target.batch)
        for mode, first, then in zip(MODES, target.first, target.then, strict=True):
            ms = found.ms(NSA, heads, target.length, [mode])
            if ms > then:
                yield target, mode, ms, first, then


def targets_table() -> str:
    """The passes that miss a time wanted, and the busiest unit of the kernels that take most of their time."""
    lines = []
    for target, mode, ms, first, then in missed_targets():
        rows = profile_of(target.shape, target.batch, target.length, mode)
        total = sum(float(row["ms"]) for row in rows)
        kernels = [
            f"{row['kernel'].removesuffix('_kernel')} ({row['stage'].split()[0]}) "
            f"{float(row['ms']) / total:.0%}: {busiest(row)[1]} {busiest(row)[0]:.0f}"
            for row in rows
            if float(row["ms"]) >= LISTED_SHARE * total
        ]
        where = f"{target.shape}, {short(target.length)}" + (f" x {target.batch}" if target.batch > 1 else "")
        wanted = f"{first:g}, {verdict(ms <= first)}"
        cells = [f"{ms:.3f}" if ms < 1 else digits(ms), wanted, f"{then:g}", "; ".join(kernels) or "not profiled"]
        lines.append([where, MODES[mode], *cells])
    return table(["shape", "pass", "ms", "first target", "second target", "kernels, share, busiest unit in %"], lines)


def kernel_sentences() -> Iterator[str]:
    shares = []
    for mode in MODES:
        rows = profile_of("64/4/128", 1, 65536, mode)
        times = [(float(row["ms"]), busiest(row)[0] >= BUSY) for row in rows]
        shares.append(sum(ms for ms, busy in times if busy) / sum(ms for ms, _ in times))
    yield (
        f"{shares[0]:.0%} of the forward and {shares[1]:.0%} of the backward time is spent in kernels that keep a unit "
        f"busy for {BUSY} % or more"
    )
    found = measured("attention")
    start = break_even(found.speedups(SHAPES["64/4/128"], BOTH, **COMPARED)) or 0
    yield (
        f"faster than cuDNN's dense attention, forward and backward, from {start:,.0f} tokens on "
        f"(at most {MOST_EVEN_TOKENS:,} wanted: {verdict(start <= MOST_EVEN_TOKENS)})"
    )
    peak = found.rows["attention", "attention", NSA, "bwd", SHAPES["64/4/128"], 65536].peak_gib or math.inf
    yield f"peaks at {peak:.1f} GiB (at most {MOST_PEAK_GIB} wanted: {verdict(peak <= MOST_PEAK_GIB)})"
    rows = training_rows()
    for (batch, length), wanted in TRAINING_TARGETS.items():
        rate = rows[f"{NSA}-graphs", batch, length].tokens_per_s or 0.0
        yield f"{rate:,.0f} tokens per second at {length:,} x {batch} ({wanted:,} wanted: {verdict(rate >= wanted)})"
