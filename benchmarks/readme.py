"""The tables and the picture of README.md, from the rows in `benchmarks/results/h200`.

python benchmarks/readme.py                              # print the tables; tests/test_docs.py compares them
python benchmarks/readme.py --write README.md            # put them in place of the old ones
python benchmarks/readme.py --plot docs/speedup.svg      # draw the picture
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "h200"
NSA, CUDNN, FA2 = "nsa-triton-graphs", "dense-cudnn-graphs", "dense-fa2-graphs"
SHAPES = ("64/4/128", "32/8/128", "12/2/64")
COLOURS = ("#064e38", "#4fae8c", "#b0722f")
MODES = {"fwd": "forward", "bwd": "backward"}
BOTH = tuple(MODES)

# (implementation, mode, heads/groups/head_dim, batch, length): a row of the CSV file, the latest of each kind.
Rows = dict[tuple[str, str, str, int, int], dict[str, str]]


def read(suite: str) -> Rows:
    """Of the file of that name, which may have rows of other suites beside them."""
    with (RESULTS / f"{suite}.csv").open(newline="") as file:
        return {
            (row["impl"], row["mode"], f"{row['Hq']}/{row['G']}/{row['Dk']}", int(row["B"]), int(row["S"])): row
            for row in csv.DictReader(file)
            if row["suite"] == suite
        }


def milliseconds(rows: Rows, impl: str, shape: str, length: int, modes: Iterable[str]) -> float:
    return sum(float(rows[impl, mode, shape, 1, length]["p50_ms"]) for mode in modes)


def speedup(rows: Rows, shape: str, length: int, modes: Sequence[str]) -> float:
    """How many times as fast as dense attention by cuDNN."""
    return milliseconds(rows, CUDNN, shape, length, modes) / milliseconds(rows, NSA, shape, length, modes)


def measured_lengths(rows: Rows, shape: str) -> list[int]:
    return sorted({length for impl, _, at, _, length in rows if (impl, at) == (NSA, shape)})


def crossover(rows: Rows, shape: str, modes: Sequence[str]) -> float:
    """The length from which NSA is faster than cuDNN, interpolated between measured lengths on logarithmic axes."""
    lengths = measured_lengths(rows, shape)
    lead = {n: math.log2(speedup(rows, shape, n, modes)) for n in lengths}
    before = max(n for n in lengths if lead[n] < 0)
    after = min(n for n in lengths if n > before)
    share = lead[before] / (lead[before] - lead[after])
    return float(before * (after / before) ** share)


def crossover_table() -> str:
    rows = read("attention")
    lines = []
    for shape in SHAPES:
        starts = [f"{crossover(rows, shape, modes) / 1000:.1f}k" for modes in (("fwd",), ("bwd",), BOTH)]
        gains = [f"{speedup(rows, shape, n, BOTH):.1f}x" for n in (2048, 8192, 32768, 65536, 131072)]
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


def decode_table() -> str:
    rows = read("decode")
    lines = []
    for (impl, mode, shape, batch, length), row in rows.items():
        if (impl, mode) == (NSA, "decode-1"):
            dense, limit = (float(rows[x, mode, shape, batch, length]["p50_ms"]) for x in (CUDNN, "bytes-limit"))
            ours = float(row["p50_ms"])
            times = [f"{x:.3f}" for x in (ours, dense, limit)]
            lines.append([shape, f"{length:,} x {batch}", *times, f"{dense / ours:.1f}x"])
    head = ["heads/groups/head_dim", "tokens x rows", "NSA", "dense, cuDNN", "reading NSA's bytes", "speedup"]
    return table(head, lines)


def digits(x: float) -> str:
    """Three of them."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def draw(out: Path) -> None:
    """The speedup over dense attention by cuDNN, by length: one panel per direction, one line per shape."""
    import matplotlib

    matplotlib.use("Agg")
    # The same rows give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "nsa"
    from matplotlib import pyplot

    rows = read("attention")
    figure, axes = pyplot.subplots(1, len(MODES), figsize=(10, 3.6), sharey=True)
    for axis, (mode, name) in zip(axes, MODES.items(), strict=True):
        axis.axhline(1, color="#999999", linestyle="--", linewidth=1)
        for shape, colour in zip(SHAPES, COLOURS, strict=True):
            lengths = measured_lengths(rows, shape)
            heads, groups, head_dim = shape.split("/")
            label = f"{heads} heads, {groups} groups, head_dim {head_dim}"
            axis.plot(lengths, [speedup(rows, shape, n, [mode]) for n in lengths], "o-", color=colour, label=label)
        axis.set(title=name, xlabel="sequence length", xscale="log", yscale="log")
        axis.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
        axis.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["0.25x", "0.5x", "1x", "2x", "4x", "8x"])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("speedup over dense (cuDNN)")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


def write(page: Path, tables: Sequence[str]) -> None:
    """Replace each table of `page` that has the head of one of `tables`."""
    blocks = {new.split("\n")[0]: new for new in tables}
    parts = page.read_text().split("\n\n")
    page.write_text("\n\n".join(blocks.get(part.split("\n")[0], part) for part in parts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the tables of README.md, or update it.")
    parser.add_argument("--write", type=Path, help="replace the tables of this page instead")
    parser.add_argument("--plot", type=Path, help="write the picture here instead")
    args = parser.parse_args()
    tables = [crossover_table(), attention_table(), training_table(), decode_table()]
    if args.write is not None:
        write(args.write, tables)
    if args.plot is not None:
        draw(args.plot)
    if args.write is None and args.plot is None:
        print(*tables, sep="\n\n")
