"""The tables of README.md, from the rows in `benchmarks/results/h200`: python benchmarks/tables.py

`tests/test_docs.py` fails where README.md has another table than this prints.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "h200"
NSA, CUDNN, FA2 = "nsa-triton-graphs", "dense-cudnn-graphs", "dense-fa2-graphs"
SHAPES = ("64/4/128", "32/8/128", "12/2/64")
BOTH = ("fwd", "bwd")

# (implementation, mode, heads/groups/head_dim, batch, length): a row of the CSV file, the latest of each kind.
Rows = dict[tuple[str, str, str, int, int], dict[str, str]]


def read(suite: str) -> Rows:
    with (RESULTS / f"{suite}.csv").open(newline="") as file:
        return {
            (row["impl"], row["mode"], f"{row['Hq']}/{row['G']}/{row['Dk']}", int(row["B"]), int(row["S"])): row
            for row in csv.DictReader(file)
        }


def milliseconds(rows: Rows, impl: str, shape: str, length: int, modes: Iterable[str] = BOTH) -> float:
    return sum(float(rows[impl, mode, shape, 1, length]["p50_ms"]) for mode in modes)


def crossover(rows: Rows, peer: str, shape: str, modes: Sequence[str]) -> float:
    """The length from which NSA is faster than `peer`, interpolated between measured lengths on logarithmic axes."""
    lengths = sorted(length for impl, mode, at, _, length in rows if (impl, mode, at) == (NSA, modes[0], shape))
    lead = {
        n: math.log2(milliseconds(rows, peer, shape, n, modes) / milliseconds(rows, NSA, shape, n, modes))
        for n in lengths
    }
    before = max(n for n in lengths if lead[n] < 0)
    after = min(n for n in lengths if n > before)
    share = lead[before] / (lead[before] - lead[after])
    return float(before * (after / before) ** share)


def crossover_table() -> str:
    rows = read("attention")
    lines = []
    for shape in SHAPES:
        starts = [f"{crossover(rows, CUDNN, shape, modes) / 1000:.1f}k" for modes in (("fwd",), ("bwd",), BOTH)]
        gains = [
            f"{milliseconds(rows, CUDNN, shape, n) / milliseconds(rows, NSA, shape, n):.1f}x"
            for n in (2048, 8192, 32768, 65536, 131072)
        ]
        lines.append([shape, *starts, *gains])
    head = ["heads/groups/head_dim", "forward", "backward", "both", "2k", "8k", "32k", "64k", "128k"]
    return table(head, lines)


def attention_table() -> str:
    rows = read("attention")

    def cell(impl: str, shape: str, length: int) -> str:
        return " / ".join(digits(milliseconds(rows, impl, shape, length, [mode])) for mode in BOTH)

    cases = [("64/4/128", n) for n in (8192, 32768, 65536, 131072)]
    cases += [(shape, n) for shape in SHAPES[1:] for n in (65536, 131072)]
    lines = [[shape, f"{n:,}", *(cell(impl, shape, n) for impl in (NSA, CUDNN, FA2))] for shape, n in cases]
    return table(["heads/groups/head_dim", "tokens", "NSA, `triton`", "dense, cuDNN", "dense, FA-2"], lines)


def training_table() -> str:
    rows = read("train")
    lines = []
    for batch, length in ((8, 2048), (8, 4096), (4, 8192), (2, 16384), (1, 32768), (1, 65536)):
        ours, dense = (rows[impl, "train", "12/2/64", batch, length] for impl in (NSA, "dense-sdpa-graphs"))
        rates = [float(row["tokens_per_s"]) for row in (ours, dense)]
        peaks = [f"{float(row['peak_gib']):.1f}" for row in (ours, dense)]
        lines.append(
            [f"{length:,} x {batch}", *(f"{rate:,.0f}" for rate in rates), f"{rates[0] / rates[1]:.2f}x", *peaks]
        )
    return table(["tokens x sequences", "NSA", "dense", "speedup", "NSA, GiB", "dense, GiB"], lines)


def digits(x: float) -> str:
    """Three of them."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


if __name__ == "__main__":
    print(crossover_table(), attention_table(), training_table(), sep="\n\n")
