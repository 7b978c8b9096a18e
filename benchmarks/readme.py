"""Every measured figure of README.md and docs/, from the rows in `benchmarks/results`; tests compare them.

python benchmarks/readme.py                              # print the tables and the other figures, page by page
python benchmarks/readme.py --write README.md            # put its tables in place of the old ones
python benchmarks/readme.py --plot docs/speedup.svg      # draw the picture of README.md
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from figures_of_kernels import bounds_table, kernel_sentences, targets_table
from figures_of_study import (
    LONGEST,
    evaluation_tables,
    losses_of,
    needles_found,
    study_sentences,
)
from recorded import (
    BOTH,
    COMPARED,
    CUDNN,
    FA2,
    MEMORY_LENGTHS,
    MODES,
    NSA,
    RESULTS,
    SHAPES,
    digits,
    measured,
    records,
    rows_of,
    table,
    training_rows,
)

from nsa.bench.flash_routes import VARLEN, WORTH_IT
from nsa.bench.report import Heads, break_even
from nsa.config import NSAConfig
from nsa.evaluation.plots import short
from nsa.results import Row
from nsa.train.config import load_config
from nsa.train.plan import GIB, plan_run

COLORS = ("#064e38", "#4fae8c", "#b0722f")

# README.md


def crossover_table() -> str:
    found, lines = measured("attention"), []
    for shape, heads in SHAPES.items():
        starts = [break_even(found.speedups(heads, modes, **COMPARED)) for modes in (("fwd",), ("bwd",), BOTH)]
        gains = dict(found.speedups(heads, BOTH, **COMPARED))
        shown = [f"{gains[n]:.1f}x" if n in gains else "-" for n in (2048, 8192, 32768, 65536, 131072)]
        lines.append([shape, *(f"{(start or 0) / 1000:.1f}k" for start in starts), *shown])
    head = ["heads/groups/head_dim", "forward", "backward", "both", "2k", "8k", "32k", "64k", "128k"]
    return table(head, lines)


def attention_table() -> str:
    found = measured("attention")

    def cell(impl: str, shape: str, length: int) -> str:
        return " / ".join(digits(found.ms(impl, SHAPES[shape], length, [mode])) for mode in BOTH)

    lengths = {"64/4/128": (8192, 32768, 65536, 131072), "32/8/128": (32768, 65536), "12/2/64": (65536, 131072)}
    cases = [(shape, n) for shape, each in lengths.items() for n in each]
    lines = [[shape, f"{n:,}", *(cell(impl, shape, n) for impl in (NSA, CUDNN, FA2))] for shape, n in cases]
    return table(["heads/groups/head_dim", "tokens", "NSA, `triton`", "dense, cuDNN", "dense, FA-2"], lines)


def flex_table() -> str:
    found = measured("attention-flex")

    def cell(impl: str, length: int) -> str:
        return " / ".join(digits(found.ms(impl, SHAPES["64/4/128"], length, [mode])) for mode in BOTH)

    lines = [[f"{n:,}", *(cell(impl, n) for impl in (CUDNN, "dense-flex"))] for n in (8192, 32768, 65536)]
    return table(["64/4/128, tokens", "dense, cuDNN", "dense, FlexAttention"], lines)


def training_rates() -> Iterator[tuple[int, int, float, float]]:
    """Batch, length, and tokens per second of NSA and dense attention."""
    rows = training_rows()
    for batch, length in ((8, 2048), (8, 4096), (4, 8192), (2, 16384), (1, 32768), (1, 65536)):
        ours, dense = (rows[f"{impl}-graphs", batch, length].tokens_per_s or 0.0 for impl in (NSA, "dense-sdpa"))
        yield batch, length, ours, dense


def training_table() -> str:
    lines = [
        [f"{length:,} x {batch}", f"{ours:,.0f}", f"{dense:,.0f}", f"{ours / dense:.2f}x"]
        for batch, length, ours, dense in training_rates()
    ]
    return table(["tokens x sequences", "NSA", "dense", "speedup"], lines)


def memory_table() -> str:
    """Peaks of attention and of training steps, of every size that both NSA and dense attention have them of."""
    found, lines = measured("attention", "attention-batch-8", "train"), []
    cases = [("attention", BOTH, heads, n, CUDNN) for heads in found.heads() for n in MEMORY_LENGTHS]
    cases += [("train", ("train",), Heads(12, 2, 64, batch), n, "dense-sdpa") for batch, n, *_ in training_rates()]
    for suite, modes, heads, length, dense in cases:
        subjects = [[(suite, suite, impl, mode, heads, length) for mode in modes] for impl in (NSA, dense)]
        peaks = [[row.peak_gib for key in each if (row := found.rows.get(key))] for each in subjects]
        if length in MEMORY_LENGTHS and all(len(each) == len(modes) and all(each) for each in peaks):
            name = "training step, 125M" if suite == "train" else f"attention, {replace(heads, batch=1)}"
            cells = [" / ".join(f"{peak:.2f}" for peak in each) for each in peaks]
            lines.append([name, f"{length:,} x {heads.batch}", *cells])
    return table(["peak memory, GiB", "tokens x sequences", "NSA", "dense"], lines)


def decode_table() -> str:
    rows = {
        (row.impl, row.mode, row.Hq, row.G, row.Dk, row.B, row.S): row
        for row in rows_of("decode")
        if row.suite == "decode"
    }
    lines = []
    for (impl, mode, *shape), row in rows.items():
        if (impl, mode) == (f"{NSA}-graphs", "decode-1"):
            dense, limit = (rows[x, mode, *shape].p50_ms for x in (f"{CUDNN}-graphs", "bytes-limit"))
            times = [f"{x:.3f}" for x in (row.p50_ms, dense, limit)]
            lines.append([f"{row.Hq}/{row.G}/{row.Dk}", f"{row.S:,} x {row.B}", *times, f"{dense / row.p50_ms:.1f}x"])
    head = ["heads/groups/head_dim", "tokens x rows", "NSA", "dense, cuDNN", "reading NSA's bytes", "speedup"]
    return table(head, lines)


def generation_rows() -> dict[tuple[str, str, int, int], Row]:
    """The rows of `nsa bench generate`, by implementation, mode, batch and length."""
    return {(row.impl, row.mode, row.B, row.S): row for row in rows_of("generate")}


def generation_table() -> str:
    rows, lines = generation_rows(), []
    for (impl, mode, batch, length), row in rows.items():
        if (impl, mode) == (f"{NSA}-graphs", "decode-1"):
            dense, limit = (rows[other, mode, batch, length].p50_ms for other in ("dense-triton-graphs", "bytes-limit"))
            times = [f"{x:.3f}" for x in (row.p50_ms, dense, limit)]
            lines.append([f"{length:,} x {batch}", *times, f"{row.tokens_per_s:,.0f}", f"{dense / row.p50_ms:.2f}x"])
    head = ["whole model, tokens x rows", "NSA", "dense", "reading NSA's bytes", "tokens per second", "speedup"]
    return table(head, lines)


def readme_sentences() -> Iterator[str]:
    """What the text says, in any number of lines."""
    config = NSAConfig(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64)
    assert config.d == 16
    yield f"reads a sixteenth of the context and at most {config.n_sel * config.l_sel + config.w:,} tokens more."
    ours, dense = (
        {length: row.p50_ms for (*key, length), row in generation_rows().items() if key == [impl, "decode-1", 1]}
        for impl in (f"{NSA}-graphs", "dense-triton-graphs")
    )
    yield f"up to {short(max(length for length in ours if ours[length] > dense[length]))} tokens it is slower."
    compiled, dense_rate = (
        training_rows()[f"{impl}-compiled", 8, 2048].tokens_per_s or 0 for impl in ("nsa-triton", "dense-sdpa")
    )
    yield f"`--compile --no-cuda-graphs` gives {compiled:,.0f} tokens per second (dense {dense_rate:,.0f})"
    host = {(row.S, row.op, row.impl, row.mode): row.p50_ms for row in rows_of("host") if row.Hq == 12}

    def host_time(length: int, op: str, mode: str) -> str:
        ours, dense = (host[length, op, impl, mode] for impl in ("nsa-auto", "dense-sdpa"))
        return f"{ours:.2f} ms (dense {dense:.2f} ms)"

    short_layer = (host_time(2048, "layer", mode) for mode in ("fwd", "fwd+bwd"))
    yield f"a layer's forward takes {', forward and backward '.join(short_layer)}"
    yield f"an attention forward takes {host_time(2048, 'attention', 'fwd')}"
    yield f"At 8,192 tokens a layer's forward and backward take {host_time(8192, 'layer', 'fwd+bwd')}"
    yield f"launched kernel by kernel, takes {host_time(8192, 'attention', 'fwd+bwd')}"
    rates = list(training_rates())
    before = max(length for _, length, ours, dense in rates if ours < dense)
    after = min(length for _, length, *_ in rates if length > before)
    yield f"A 125M model (12/2/64) overtakes its dense twin between {short(before)} and {short(after)} tokens"
    size = int(records("h200/study-long/arms.csv")[0]["parameters"]) / 1e6
    yield f"at {size:.0f}M parameters"
    double, seeds = (RESULTS / "h200" / f"study-{name}" for name in ("double", "seeds"))
    losses = losses_of(double / "arms.csv") | losses_of(seeds / "arms.csv")
    yield f"{losses['nsa-double']:.3f} and {losses['dense-double']:.3f} after 10,000 steps"
    behind = [losses[f"nsa-double-{n}"] - losses[f"dense-double-{n}"] for n in ("8k", "32k", "64k")]
    yield f"behind by {min(behind):.3f} to {max(behind):.3f}"
    short_texts = needles_found(double / "arms-needle" / "needle.csv", LONGEST)
    yield f"{short_texts[1024]:.0%} of the notes in 1,024 tokens, where every block is selected"
    yield f"and {short_texts[2048]:.0%} in 2,048"
    ours, dense = (needles_found(x / "needle.csv", f"{y}-double-64k") for x, y in ((double, "nsa"), (seeds, "dense")))
    yield f"then {ours[4096]:.0%} in 4k and {ours[65536]:.0%} in 64k"
    assert dense[4096] == 1
    yield f"where dense attention finds 100% and {dense[65536]:.0%}"
    yield f"(`gate_bias` {NSAConfig.gate_bias:.0f},"
    attn = NSAConfig(dim=64, n_heads=1, n_kv_groups=1, d_k=64, d_v=64)
    assert attn.n_sel * attn.l_sel == 1024


# docs/transformers.md


def recovery_losses(length: int) -> tuple[int, int, dict[str, tuple[float, float]]]:
    """Steps and tokens after which all models of a length were validated last; by model the loss before and then."""
    rows = [row for row in records("h200/recovery.csv") if row["valid_loss"] and int(row["seq_len"]) == length]
    steps = {int(row["tokens"]): int(row["step"]) for row in rows if row["arm"] == "dense"}
    curves = {
        arm: {int(row["tokens"]): float(row["valid_loss"]) for row in rows if row["arm"] == arm}
        for arm in ("dense", "gated", "select")
    }
    last = max(set.intersection(*map(set, curves.values())))
    return steps[last], last, {arm: (losses[0], losses[last]) for arm, losses in curves.items()}


def recovery_table() -> str:
    """By length and model: the loss as converted, and after the most tokens that all models of a length have seen."""
    lines = []
    for length in (8192, 32768):
        _, last, losses = recovery_losses(length)
        lines += [[f"{length:,}", arm, f"{a:.3f}", f"{b:.3f}", f"{last:,}"] for arm, (a, b) in losses.items()]
    return table(["context", "model", "as converted", "trained on", "after tokens"], lines)


def recovery_sentences() -> Iterator[str]:
    (steps, _, short_losses), (long_steps, _, long_losses) = map(recovery_losses, (8192, 32768))
    (dense, trained), (_, long_trained) = short_losses.pop("dense"), long_losses.pop("dense")
    before = max(int(row["tokens"]) for row in records("h200/recovery.csv") if row["arm"] == "dense-from-scratch")
    yield f"a dense model of {before / 1e6:.0f} million tokens, then {steps} steps at 8k and {long_steps} at 32k tokens"
    costs, behind = zip(*((a - dense, b - trained) for a, b in short_losses.values()), strict=True)
    yield f"At 8k tokens the conversion costs {max(costs):.3f}; after {steps} steps the converted models are"
    yield f"({dense:.3f}), and {max(behind):.3f} behind the dense model trained on with the same tokens."
    ends = {arm: b - long_trained for arm, (_, b) in long_losses.items()}
    yield f"end {ends['gated']:.3f} (`gated`) and {ends['select']:.3f} (`select`) behind."


# docs/training.md


def plan_sentences() -> Iterator[str]:
    above = []
    for row in rows_of("train"):
        if row.impl.startswith((NSA, "dense")) and row.peak_gib is not None and row.Hq == 12:
            sizes = {"attention": row.impl.split("-")[0], "seq_len": row.S}
            own: dict[str, object] = {f"model.{name}": size for name, size in sizes.items()}
            own |= {"device": "cuda", "parallel": "none", "batch_size": row.B, "gc": "-gc" in row.impl}
            above.append(plan_run(load_config("125m", own), "H200").memory.total / GIB / row.peak_gib - 1)
    yield f"{100 * min(above):.0f} to {100 * max(above):.0f} % above what was measured on the H200"


# docs/flash-integration.md


def ratios(ours: str, theirs: str, keep: Callable[[Row], bool]) -> list[float]:
    """Time of `theirs` over that of `ours` in the rows of `nsa bench flash`, shape by shape."""
    times = {
        (row.suite, row.op, row.mode, row.Dk, row.G, row.S, row.impl): row.p50_ms
        for row in rows_of("flash")
        if keep(row)
    }
    shapes = {key[:-1] for key in times}
    return [
        times[*shape, theirs] / times[*shape, ours]
        for shape in sorted(shapes)
        if (*shape, theirs) in times and (*shape, ours) in times
    ]


def flash_table() -> str:
    lines = []
    for op in ("compressed", "sliding"):
        for mode, name in MODES.items():
            for dim in (64, 96, 128, 192):
                lines.append([f"{op} {name}", str(dim), *flash_cells(op, mode, dim)])
    head = ["branch, direction", "head_dim", "1k", "8k", "64k", "varlen 1k, 8k, 64k", "over SDPA"]
    return table(head, lines, rule="---", spaced=False)


def is_varlen(row: Row) -> bool:
    return row.suite.endswith(VARLEN)


def flash_cells(op: str, mode: str, dim: int) -> Iterator[str]:
    def of(row: Row) -> bool:
        return (row.op, row.mode, row.Dk) == (op, mode, dim)

    def gains(length: int, *, varlen: bool) -> list[float]:
        return ratios(NSA, "flash-torch", lambda row: of(row) and length == row.S and is_varlen(row) == varlen)

    lengths = (1024, 8192, 65536)
    for length in lengths:
        fixed = gains(length, varlen=False)
        span = f"{min(fixed):.2f} to {max(fixed):.2f}"
        yield f"**{span}**" if max(fixed) <= 1 / WORTH_IT else span
    yield ", ".join(f"{gains(length, varlen=True)[0]:.2f}" for length in lengths)
    over = ratios(NSA, "nsa-sdpa", of)
    yield f"{min(over):.1f} to {max(over):.1f}"


def flash_sentences() -> Iterator[str]:
    over = ratios(
        "flash-torch", "nsa-sdpa", lambda row: (row.op, row.S, row.suite) != ("compressed", 1024, "flash-packed")
    )
    yield f"Torch's FlashAttention-2 is {min(over):.1f} to {max(over):.0f} times as fast as our SDPA backend"

    def wins_from(op: str) -> str:
        subjects = {(op, "bwd", 192, length): length for length in (1024, 8192, 65536)}
        worst = {
            length: max(ratios(NSA, "flash-torch", lambda r, s=s: (r.op, r.mode, r.Dk, r.S) == s and not is_varlen(r)))
            for s, length in subjects.items()
        }
        return short(min(length for length, ratio in worst.items() if ratio <= 1 / WORTH_IT))

    yield (
        f"from {wins_from('compressed')} tokens for the compressed branch and from {wins_from('sliding')} for the "
        "sliding branch"
    )

    def peak(impl: str, op: str) -> float:
        suite = "flash" if op == "compressed" else "flash-w512"
        found = [
            row.peak_gib or 0.0
            for row in rows_of("flash")
            if (row.suite, row.op, row.mode, row.Dk, row.S, row.Hq // row.G, row.impl)
            == (suite, op, "bwd", 192, 65536, 4, impl)
        ]
        return found[-1]

    yield (
        f"peaks at {peak('flash-torch', 'compressed'):.1f} GiB (ours {peak(NSA, 'compressed'):.1f}), the sliding "
        f"branch at {peak('flash-torch', 'sliding'):.1f} (ours {peak(NSA, 'sliding'):.1f})"
    )

    def over_ours(mode: str, dim: int) -> float:
        subject = ("compressed", mode, dim, 65536, "flash")
        found = ratios("sdpa-cudnn", NSA, lambda row: (row.op, row.mode, row.Dk, row.S, row.suite) == subject)
        return sum(found) / len(found)

    yield (
        f"cuDNN is the fastest: {over_ours('fwd', 64):.1f} times as fast as our kernels forward "
        f"({over_ours('fwd', 192):.1f} at head_dim 192); backward as fast at head_dim 64, {over_ours('bwd', 128):.1f} "
        f"times as fast at 128 and about {over_ours('bwd', 192):.0f} times at 192."
    )


# docs/inference.md


def fp8_table() -> str:
    lines = []
    for row in records("cpu/fp8_cache.csv"):
        error = float(row["logit_rms_error"]) / float(row["logit_std"])
        cells = [row["model"], row["dtype"], row["cache"], f"{error:.2%}", f"{float(row['kl']):.1e}"]
        cells += [f"{float(row['same_top_token']):.1%}", f"{float(row['loss']):.3f}"]
        lines.append([*cells, f"{float(row['same_selected_blocks']):.1%}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def inference_sentences() -> Iterator[str]:
    took = {mode: row.p50_ms for (_, mode, _, length), row in generation_rows().items() if length == 65536}
    yield f"64k tokens take {took['fwd']:.0f} ms without a cache, {took['prefill']:.0f} ms through one"
    yield f"and {took['prefill-8192']:.0f} ms in chunks of 8k"
    losses = {(row["model"], row["dtype"], row["cache"]): float(row["loss"]) for row in records("cpu/fp8_cache.csv")}
    moved = [
        abs(losses[model, dtype, "fp8"] - loss) for (model, dtype, cache), loss in losses.items() if cache == dtype
    ]
    yield f"the loss moves by {math.ceil(1000 * max(moved)) / 1000:.3f} at most."
    limits = {(row.mode, row.S): row.p50_ms for row in rows_of("decode") if (row.impl, row.Hq) == ("bytes-limit", 64)}
    times = {n: f"{limits['decode-4', n] / limits['decode-1', n]:.2f}" for n in (8192, 65536, 131072)}
    yield (
        f"must read {times[8192]} times the bytes of one token at 8k, {times[65536]} times at 64k and {times[131072]} "
        "times at 128k"
    )


# docs/perf-log.md, where it cites a file


def log_sentences() -> Iterator[str]:
    rows = {(row.op, row.mode, row.S): row.p50_ms for row in rows_of("attention-trained")}
    pairs = {
        length: [" / ".join(digits(rows[op, mode, length]) for mode in BOTH) for op in ("trained", "random")]
        for length in (32768, 65536)
    }
    yield f"at 32k {pairs[32768][0]} against {pairs[32768][1]}, at 64k {pairs[65536][0]} against {pairs[65536][1]}"


# By page: tables, which must be there as they are, and what the text says, in any number of lines.
TABLES: dict[str, Sequence[Callable[[], str]]] = {
    "README.md": (
        *(crossover_table, attention_table, flex_table, training_table),
        *(memory_table, decode_table, generation_table),
    ),
    "docs/evaluation.md": evaluation_tables(),
    "docs/flash-integration.md": (flash_table,),
    "docs/inference.md": (fp8_table,),
    "docs/kernels.md": (bounds_table, targets_table),
    "docs/transformers.md": (recovery_table,),
}
SENTENCES: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": readme_sentences,
    "docs/evaluation.md": study_sentences,
    "docs/flash-integration.md": flash_sentences,
    "docs/inference.md": inference_sentences,
    "docs/kernels.md": kernel_sentences,
    "docs/perf-log.md": log_sentences,
    "docs/training.md": plan_sentences,
    "docs/transformers.md": recovery_sentences,
}


def draw(out: Path) -> None:
    """The speedup over dense attention by cuDNN, by length: one panel per direction, one line per shape."""
    import matplotlib

    matplotlib.use("Agg")
    # The same rows give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "nsa"
    from matplotlib import pyplot

    found = measured("attention")
    figure, axes = pyplot.subplots(1, len(MODES), figsize=(10, 3.6), sharey=True)
    for axis, (mode, name) in zip(axes, MODES.items(), strict=True):
        axis.axhline(1, color="#999999", linestyle="--", linewidth=1)
        for heads, color in zip(SHAPES.values(), COLORS, strict=True):
            lengths, gains = zip(*found.speedups(heads, [mode], **COMPARED), strict=True)
            label = f"{heads.n_heads} heads, {heads.n_groups} groups, head_dim {heads.head_dim}"
            axis.plot(lengths, gains, "o-", color=color, label=label)
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


def write(page: Path, tables: Iterable[Callable[[], str]]) -> None:
    """Replace each table of `page` whose first two columns are those of one of `tables`; those that it lacks go to its
    end."""

    def head(table: str) -> tuple[str, ...]:
        return tuple(table.split("\n")[0].split("|")[:3])

    blocks = {head(new): new for new in (make() for make in tables)}
    parts = page.read_text().rstrip("\n").split("\n\n")
    heads = [head(part) for part in parts]
    parts = [blocks.get(head, part) for head, part in zip(heads, parts, strict=True)]
    page.write_text("\n\n".join([*parts, *(new for head, new in blocks.items() if head not in heads)]) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the measured figures of README.md and docs/, or update a page.")
    parser.add_argument("--write", type=Path, help="replace the tables of this page instead")
    parser.add_argument("--plot", type=Path, help="write the picture of README.md here instead")
    args = parser.parse_args()
    if args.write is not None:
        name = str(args.write.resolve().relative_to(RESULTS.resolve().parents[1]))
        write(args.write, TABLES.get(name, ()))
    if args.plot is not None:
        draw(args.plot)
    if args.write is None and args.plot is None:
        for page in {**TABLES, **SENTENCES}:
            print(f"# {page}", *(make() for make in TABLES.get(page, ())), sep="\n\n")
            print("", *SENTENCES.get(page, lambda: iter(()))(), "", sep="\n")
