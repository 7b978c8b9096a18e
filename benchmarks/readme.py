"""Every measured figure of README.md and docs/, from the rows in `benchmarks/results`; tests compare them.

python benchmarks/readme.py                              # print the tables and the other figures, page by page
python benchmarks/readme.py --write README.md            # put its tables in place of the old ones
python benchmarks/readme.py --plot docs/speedup.svg      # draw the picture of README.md
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

from nsa.bench.flash_routes import VARLEN, WORTH_IT
from nsa.bench.report import Heads, Measurements, break_even
from nsa.data.recall import NOTE_VALUES
from nsa.evaluation.plots import short
from nsa.model import LM
from nsa.results import Row, read_rows
from nsa.train.config import load_config
from nsa.train.plan import GIB, plan_run

RESULTS = Path(__file__).resolve().parent / "results"
NSA, CUDNN, FA2 = "nsa-triton", "dense-cudnn", "dense-fa2"
SHAPES = {f"{h}/{g}/{d}": Heads(h, g, d, 1) for h, g, d in ((64, 4, 128), (32, 8, 128), (12, 2, 64))}
COLORS = ("#064e38", "#4fae8c", "#b0722f")
MODES = {"fwd": "forward", "bwd": "backward"}
BOTH = tuple(MODES)
COMPARED = {"ours": NSA, "dense": CUDNN}
MEMORY_LENGTHS = (2048, 8192, 32768, 131072)


@cache
def rows_of(*names: str, machine: str = "h200") -> list[Row]:
    return [row for name in names for row in read_rows(RESULTS / machine / f"{name}.csv")]


def records(name: str | Path) -> list[dict[str, str]]:
    """The rows of a file with columns of its own."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def measured(*names: str) -> Measurements:
    return Measurements(rows_of(*names))


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


def training_rows() -> dict[tuple[str, int, int], Row]:
    """By implementation, batch and length; the last row of each kind."""
    return {(row.impl, row.B, row.S): row for row in rows_of("train")}


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


def readme_sentences() -> Iterator[str]:
    """What the text says, in any number of lines."""
    compiled = training_rows()["nsa-triton-compiled", 8, 2048].tokens_per_s or 0
    yield f"`--compile --no-cuda-graphs` gives {compiled:,.0f} tokens per second."
    host = {(row.op, row.impl, row.mode): row.p50_ms for row in rows_of("host") if row.S == 2048}
    forward, both = ([host["layer", impl, mode] for impl in ("nsa-auto", "dense-sdpa")] for mode in ("fwd", "fwd+bwd"))
    yield (
        f"{forward[0]:.2f} ms of CPU time (dense {forward[1]:.2f} ms), forward and backward {both[0]:.2f} ms "
        f"(dense {both[1]:.2f} ms)"
    )
    yield f"an attention forward takes {host['attention', 'nsa-auto', 'fwd']:.2f} ms"
    rates = list(training_rates())
    before = max(length for _, length, ours, dense in rates if ours < dense)
    after = min(length for _, length, *_ in rates if length > before)
    yield f"A 125M model (12/2/64) overtakes its dense twin between {short(before)} and {short(after)} tokens"
    arms = {row["arm"]: row for row in records("h200/study/arms.csv")}
    size, tokens = (int(arms["nsa"][name]) / 1e6 for name in ("parameters", "tokens"))
    yield f"at {size:.0f}M parameters and on {tokens:.1f}M tokens"
    yield f"is below that of dense attention, by {float(arms['dense']['loss']) - float(arms['nsa']['loss']):.3f};"


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


# docs/evaluation.md

# The folders of the studies, and what their tables are told apart by.
STUDIES = {"study": "", "study-long": ", long study"}


def arms_table(title: str, file: Path) -> str:
    """A study's runs, by context and loss."""
    lines, other = [], file.parent / "arms-plain" / "loss.csv"
    plain = losses_of(other) if other.is_file() else {}
    for row in sorted(records(file), key=lambda row: (int(row["seq_len"]), float(row["loss"]))):
        cells = [short(int(row["seq_len"])), f"`{row['arm']}`", f"{int(row['parameters']) / 1e6:.1f}M"]
        cells += [f"{int(row['tokens']) / 1e6:.1f}M", f"{float(row['loss']):.3f}"]
        if plain:
            cells.append(f"{plain[row['arm']]:.3f}" if row["arm"] in plain else "")
        lines.append([*cells, f"{float(row['tokens_per_s']):,.0f}" if row["tokens_per_s"] else ""])
    losses = ["validation loss", "on plain text"] if plain else ["validation loss"]
    return table([title, "arm", "parameters", "tokens", *losses, "tokens per second"], lines)


def accuracy_table(title: str, file: Path) -> str:
    """By run, task and length: right answers; of needles over all depths."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in records(file):
        task = "needle" if row["task"] == "needle" else f"{row['task']} {row['value']}"
        found.setdefault((row["run"], task), {}).setdefault(int(row["length"]), []).append(float(row["accuracy"]))
    lengths = sorted({length for scores in found.values() for length in scores})
    lines = [
        [f"`{run}`", task, *(f"{sum(scores[n]) / len(scores[n]):.0%}" for n in lengths)]
        for (run, task), scores in found.items()
    ]
    return table([title, "task", *map(short, lengths)], lines)


def long_table(file: Path) -> str:
    """The long run at each validation."""
    lines = [
        [f"{int(row['step']):,}", f"{int(row['tokens']) / 1e6:.1f}M", f"{float(row['seconds']):.0f}"]
        + [f"{float(row[key]):.3f}" if row[key] else "" for key in ("train_loss", "valid_loss")]
        for row in records(file)
    ]
    return table(["step", "tokens", "seconds", "training loss", "validation loss"], lines)


def evaluation_tables(results: Path = RESULTS / "h200") -> list[Callable[[], str]]:
    """Of those results that are there."""
    tables: dict[str, Callable[[Path], str]] = {}
    for study, words in STUDIES.items():
        tables |= {
            f"{study}/arms.csv": partial(arms_table, f"context{words}"),
            f"{study}/needle.csv": partial(accuracy_table, f"after the extension{words}"),
            f"{study}/recall.csv": partial(accuracy_table, f"recall after the extension{words}"),
            f"{study}/arms-needle/needle.csv": partial(accuracy_table, f"before the extension{words}"),
        }
    tables["long.csv"] = long_table
    return [partial(make, results / name) for name, make in tables.items() if (results / name).is_file()]


def losses_of(file: Path) -> dict[str, float]:
    """By arm or run; the first row of a run is the whole."""
    return {row.get("arm") or row["run"]: float(row["loss"]) for row in reversed(records(file))}


def loss_between(file: Path, run: str, begin: int, end: int) -> float:
    """The mean loss of the tokens at these positions."""
    rows = [row for row in records(file) if row["run"] == run][1:]
    inside = [row for row in rows if begin <= int(row["begin"]) and int(row["end"]) <= end]
    return sum(float(row["loss"]) * int(row["tokens"]) for row in inside) / sum(int(row["tokens"]) for row in inside)


def needles_found(file: Path, run: str) -> dict[int, float]:
    """Right answers over all depths, by length."""
    found: dict[int, list[float]] = {}
    for row in records(file):
        if (row["run"], row["task"]) == (run, "needle"):
            found.setdefault(int(row["length"]), []).append(float(row["accuracy"]))
    return {length: mean(scores) for length, scores in found.items()}


def evaluation_sentences() -> Iterator[str]:
    study = RESULTS / "h200" / "study"
    (tokens,) = {int(row["tokens"]) for row in records(study / "arms.csv") if row["arm"] in ("nsa", "dense")}
    yield f"{tokens / 1e6:.1f}M tokens per arm"
    needle, recall, arms_needle = (study / name for name in ("needle.csv", "recall.csv", "arms-needle/needle.csv"))
    (samples,) = {row["samples"] for file in (needle, recall, arms_needle) for row in records(file)}
    yield f"have {samples} prompts per length and depth, or per number of keys or hops"
    yield f"one of the {len(NOTE_VALUES)} values is right in {1 / len(NOTE_VALUES):.0%} of them"
    arms, window = losses_of(study / "arms.csv"), load_config("125m", {"device": "cpu"}).model.attn.w
    yield f"NSA's validation loss is {arms['nsa']:.3f}, that of dense attention {arms['dense']:.3f}"
    places = study / "loss.csv"
    total, near, far = (
        loss_between(places, "dense", *span) - loss_between(places, "nsa", *span)
        for span in ((0, 2048), (0, window), (window, 2048))
    )
    (count,) = {int(row["tokens"]) // 2048 for row in records(places) if row["end"] == "2048" and row["begin"] == "0"}
    yield f"Of the {count} windows in `loss.csv` NSA leads by {total:.3f}: by {near:.3f} at positions 0 to {window - 1}"
    yield f"and by {far:.3f} after them"
    found = {arm: needles_found(arms_needle, arm) for arm in ("nsa", "nsa-no-sel", "nsa-no-cmp")}
    lead = {arm: arms["dense"] - arms[arm] for arm in ("nsa-no-sel", "sliding")}
    yield f"finds at most {max(found['nsa-no-sel'].values()):.0%} of the notes at any length"
    yield f"is still {lead['nsa-no-sel']:.3f} below dense attention"
    yield f"and the sliding window, which has no gates, {lead['sliding']:.3f}."
    curve = {row["step"]: row["valid_loss"] for row in records(study / "curves.csv") if row["arm"] == "nsa-no-cmp"}
    best, drop = min(arms, key=lambda arm: (arm.endswith("k"), arms[arm])), float(curve["2000"]) - float(curve["2250"])
    yield f"`{best}` ends at {arms[best]:.3f}, after a drop of {drop:.3f} from step 2,000 to 2,250"
    yield f"finds {found['nsa-no-cmp'][512]:.0%} of the notes in 512 tokens, where `nsa` finds {found['nsa'][512]:.0%}."
    behind = [arms[arm] - arms["nsa"] for arm in ("nsa-no-sel", "nsa-no-win", "nsa-lr")]
    yield f"selection the loss is {behind[0]:.3f} higher than that of `nsa`, without the window {behind[1]:.3f}."
    yield f"2e-3 (`nsa-lr`) costs NSA {behind[2]:.3f}"
    yield f"{needles_found(needle, 'nsa-64k')[4096]:.0%} of all notes in 4k tokens"
    first = [row for row in records("h200/study/gates.csv") if row["arm"] == "nsa" and int(row["layer"]) < 2]
    largest = max(float(row[branch]) for row in first for branch in ("cmp", "sel", "win"))
    yield f"each branch's mean gate ends at {largest:.3f} or less"
    sizes = {"n_layers": 6, "hidden": 1408, "vocab_size": 256, "attn.dim": 512, "attn.n_heads": 8}
    config = load_config("125m", {"device": "cpu", **{f"model.{name}": size for name, size in sizes.items()}})
    with torch.device("meta"):
        parameters = sum(x.numel() for x in LM(config.model).parameters())
    yield f"{parameters / 1e6:.1f}M parameters (`--config 125m` with `model.n_layers=6`, `model.hidden=1408`"


def longer_study_sentences(study: Path = RESULTS / "h200" / "study-long") -> Iterator[str]:
    """Of the study with two seeds; nothing while its folder is absent."""
    if not study.is_dir():
        return
    kinds = {"nsa": "NSA", "dense": "dense attention"}
    rows = {row["arm"]: row for row in records(study / "arms.csv")}
    steps, tokens, window = (int(rows["nsa"][name]) for name in ("steps", "tokens", "seq_len"))
    yield f"{steps:,} steps, {tokens / 1e6:.1f}M tokens per arm"
    losses = {"the validation loss": "arms.csv", "the loss on plain text": "arms-plain/loss.csv"}
    for text, arms in ((text, losses_of(study / name)) for text, name in losses.items() if (study / name).is_file()):
        ends = [f"{arms[arm]:.3f} of {kind} ({arms[f'{arm}-seed']:.3f} with" for arm, kind in kinds.items()]
        yield f"{text} is {' the other seed) and '.join(ends)} the other seed)"
        apart = [f"{abs(arms[arm] - arms[f'{arm}-seed']):.3f} ({kind})" for arm, kind in kinds.items()]
        yield f"the seeds differ by {' and '.join(apart)}"
    places = study / "loss.csv"
    for begin, end in ((0, window // 4), (window // 2, window)) if places.is_file() else ():
        shown = [f"{loss_between(places, arm, begin, end):.3f} of {kind}" for arm, kind in kinds.items()]
        yield f"at positions {begin:,} to {end - 1:,} the loss is {' and '.join(shown)}"
    for arm in kinds:
        for name, run in (("arms-needle/needle.csv", arm), ("needle.csv", f"{arm}-64k")):
            found = needles_found(study / name, run) if (study / name).is_file() else {}
            if found:
                yield f"`{run}` finds {', '.join(f'{found[n]:.0%} at {short(n)}' for n in sorted(found))}"


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


# docs/kernels.md

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
        wanted = f"{first:g}, met" if ms <= first else f"{first:g}, missed"
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
        f"({MOST_EVEN_TOKENS:,} were wanted at most)"
    )
    key = ("attention", "attention", NSA, "bwd", SHAPES["64/4/128"], 65536)
    yield f"peaks at {found.rows[key].peak_gib:.1f} GiB ({MOST_PEAK_GIB} were wanted at most)"
    rows = training_rows()
    for (batch, length), wanted in TRAINING_TARGETS.items():
        rate = rows[f"{NSA}-graphs", batch, length].tokens_per_s or 0.0
        yield f"{rate:,.0f} tokens per second at {length:,} x {batch} ({wanted:,} wanted)"


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
    "README.md": (crossover_table, attention_table, training_table, memory_table, decode_table),
    "docs/evaluation.md": evaluation_tables(),
    "docs/flash-integration.md": (flash_table,),
    "docs/inference.md": (fp8_table,),
    "docs/kernels.md": (bounds_table, targets_table),
    "docs/transformers.md": (recovery_table,),
}
SENTENCES: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": readme_sentences,
    "docs/evaluation.md": lambda: chain(evaluation_sentences(), longer_study_sentences()),
    "docs/flash-integration.md": flash_sentences,
    "docs/inference.md": inference_sentences,
    "docs/kernels.md": kernel_sentences,
    "docs/perf-log.md": log_sentences,
    "docs/training.md": plan_sentences,
    "docs/transformers.md": recovery_sentences,
}


def digits(x: float) -> str:
    """Three of them."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]], rule: str = "---", *, spaced: bool = True) -> str:
    cells = [rule] * len(head)
    divider = f"| {' | '.join(cells)} |" if spaced else f"|{'|'.join(cells)}|"
    return "\n".join([f"| {' | '.join(head)} |", divider, *(f"| {' | '.join(line)} |" for line in lines)])


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
