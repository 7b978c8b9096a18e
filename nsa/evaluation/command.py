"""`nsa eval`: evaluates runs and writes a table, JSON, CSV and a picture.

nsa eval loss runs/demo
nsa eval needle runs/nsa runs/dense --lengths 4096 16384 65536
nsa eval lm-eval models/nsa models/dense --tasks niah_single_1 vt --lengths 4096
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import nsa
from nsa.config import require, require_positive_int
from nsa.data import DataConfig
from nsa.data.tokenizer import TOKENIZER_FILE
from nsa.evaluation.forward import EvalModel, open_models
from nsa.evaluation.harness import harness_rows
from nsa.evaluation.loss import evaluate_loss
from nsa.evaluation.plots import draw_evaluation
from nsa.evaluation.recall import Cell, Score, check_cells, evaluate_cells, library_texts
from nsa.files import can_write_in, make_folder, replace_text
from nsa.generate import read_source
from nsa.generation.text import where_not_finite
from nsa.machine import usable_device
from nsa.progress import LINE_EVERY_S, aligned_columns, progress, say
from nsa.results import origin_columns
from nsa.train.run_folder import CONFIG, plain
from nsa.train.run_model import run_of
from nsa.train.yaml_file import read_yaml

Rows = list[dict[str, Any]]


def run(args: argparse.Namespace) -> int:
    device = usable_device(args.device)
    out = args.out or default_out(args.runs[0])
    require(can_write_in(out), "--out", str(out), "a folder that can be written")
    differing: list[str] = []
    rows = harness_rows(args, device) if args.eval_command == "lm-eval" else own_rows(args, device, differing)
    written = write_results(out, args.eval_command, rows, device, args, differing)
    for difference in differing:
        say(f"not comparable: {difference}")
    tables = {"loss": loss_table, "lm-eval": harness_table}
    say(tables.get(args.eval_command, accuracy_tables)(rows))
    written += draw_picture(args.eval_command, rows, out)
    shown = {"out": [str(path) for path in written], "mean": means(rows), "not_comparable": differing}
    say(json.dumps(plain(shown)))
    return 0


def default_out(folder: Path) -> Path:
    """`eval/` of the run, and of a checkpoint a folder of its name in there."""
    run = run_of(folder)
    return run / "eval" if run == folder else run / "eval" / folder.resolve().name


def own_rows(args: argparse.Namespace, device: torch.device, differing: list[str]) -> Rows:
    """Rows of the runs; what keeps them from being compared is appended to `differing`."""
    chunk = (65536 if device.type == "cuda" else 8192) if args.chunk is None else args.chunk
    require_positive_int("--chunk", chunk)
    subjects = open_models(args.runs, device=device, dtype=args.dtype, chunk=chunk)
    differing += mismatches(subjects, args)
    rows = loss_rows(subjects, args) if args.eval_command == "loss" else cell_rows(subjects, args)
    for subject in subjects:
        if not all(math.isfinite(row["loss"]) for row in rows if row["run"] == subject.name):
            say(f"{subject.name} gives losses that are not finite: {where_not_finite(subject.model)}")
    return rows


def mismatches(subjects: Sequence[EvalModel], args: argparse.Namespace) -> Iterator[str]:
    """What the runs do not have in common and a comparison needs."""
    if len({subject.tokenizer.name for subject in subjects}) > 1:
        yield "the runs have different tokenizers, so that a token is not the same amount of text"
    if args.eval_command == "loss":
        texts = [data_of(run_of(subject.run), args) for subject in subjects]
        if len({(data.source, data.path, data.name, data.text_key) for data in texts}) > 1:
            yield "the runs have different validation data; --dataset gives them the same"
        if args.seq_len is None and len({subject.model.config.seq_len for subject in subjects}) > 1:
            yield "the runs have windows of different lengths; --seq-len gives them the same"


def loss_rows(subjects: Sequence[EvalModel], args: argparse.Namespace) -> Rows:
    rows: Rows = []
    with closing(progress(len(subjects) * args.windows, unit="window", every_s=LINE_EVERY_S)) as shown:
        for index, subject in enumerate(subjects):
            seq_len = subject.model.config.seq_len if args.seq_len is None else args.seq_len

            def show(done: int, before: int = index * args.windows, name: str = subject.name) -> None:
                shown.show(before + done, name)

            data = data_of(run_of(subject.run), args)
            loss, bins = evaluate_loss(subject, data, seq_len=seq_len, windows=args.windows, progress=show)
            shared = {"run": subject.name, "length": seq_len}
            rows.append({**shared, "begin": 0, "end": seq_len, "loss": loss, "tokens": sum(b.tokens for b in bins)})
            rows += [{**shared, **vars(b)} for b in bins]
    return rows


def data_of(run: Path, args: argparse.Namespace) -> DataConfig:
    """The data that the flags name, else the run's own; the standard library for an export without a config. Always the
    run's tokenizer."""
    if args.dataset is not None or not (run / CONFIG).is_file():
        data = DataConfig(source=args.dataset or "stdlib", path=args.data_path)
    else:
        require(args.data_path is None, "--data-path", args.data_path, "none without --dataset")
        data = DataConfig(**read_yaml(run / CONFIG)["data"])
    own = (run / TOKENIZER_FILE).is_file() and data.source != "shards"
    return replace(data, tokenizer=str(run)) if own else data


def cell_rows(subjects: Sequence[EvalModel], args: argparse.Namespace) -> Rows:
    cells = possible_cells(subjects, args)
    texts: Callable[[], Iterator[str]] = library_texts
    if args.haystack is not None:
        text = read_source(str(args.haystack), "--haystack")
        texts = lambda: iter([text])  # noqa: E731
    rows: Rows = []
    with closing(progress(len(subjects) * len(cells), unit="cell", every_s=LINE_EVERY_S)) as shown:

        def show(name: str, score: Score) -> None:
            rows.append({"run": name, **score.cell._asdict(), **vars(score)})
            del rows[-1]["cell"]
            shown.show(len(rows), f"{name}: {score.cell.task} {score.cell.value:g}, {score.cell.length:,} tokens")

        for subject in subjects:
            evaluate_cells(subject, cells, samples=args.samples, texts=texts, progress=partial(show, subject.name))
    return rows


def possible_cells(subjects: Sequence[EvalModel], args: argparse.Namespace) -> list[Cell]:
    """The cells of `--lengths`, or of the longest model's length and the possible halves, quarters and eighths of
    it."""

    def checked(lengths: Sequence[int]) -> list[Cell]:
        cells = cells_of(args, lengths)
        for subject in subjects:
            check_cells(subject.tokenizer, cells, args.samples)
        return cells

    lengths = args.lengths or [max(subject.model.config.seq_len for subject in subjects)]
    cells = checked(lengths)
    try:
        while args.lengths is None and len(lengths) < 4 and lengths[0] // 2 >= 64:
            cells = checked(lengths := [lengths[0] // 2, *lengths])
    except ValueError as error:
        say(f"left out: shorter prompts: {error}")
    return cells


def cells_of(args: argparse.Namespace, lengths: Sequence[int]) -> list[Cell]:
    if args.eval_command == "needle":
        require_positive_int("--depths", args.depths)
        depths = [index / max(1, args.depths - 1) for index in range(args.depths)]
        return [Cell("needle", length, depth) for length in lengths for depth in depths]
    require(bool(args.keys or args.hops), "--keys and --hops", [], "at least one number")
    asked = [("keys", n) for n in args.keys] + [("hops", n) for n in args.hops]
    return [Cell(task, length, n) for task, n in asked for length in lengths]


def means(rows: Rows) -> dict[str, float]:
    """The loss of each run, or the mean accuracy over its cells."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if "accuracy" in row or row["end"] - row["begin"] == row["length"]:
            found.setdefault(row["run"], []).append(row["accuracy" if "accuracy" in row else "loss"])
    return {name: round(sum(values) / len(values), 4) for name, values in found.items()}


def write_results(
    out: Path, name: str, rows: Rows, device: torch.device, args: argparse.Namespace, differing: list[str]
) -> list[Path]:
    """Write `NAME.json` and `NAME.csv`; returns the paths."""
    make_folder(out)
    paths = [out / f"{name}.json", out / f"{name}.csv"]
    flags = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    flags |= {"runs": [str(run) for run in args.runs]}
    del flags["out"]
    origin = origin_columns(device)
    values = {"nsa": nsa.__version__, "device": origin.pop("gpu"), **origin}
    values |= {"flags": flags, "mean": means(rows), "not_comparable": differing, "rows": rows}
    replace_text(paths[0], json.dumps(plain(values), indent=1) + "\n")
    replace_text(paths[1], csv_text(rows))
    return paths


def draw_picture(name: str, rows: Rows, out: Path) -> list[Path]:
    """Write `NAME.png` where matplotlib can be imported; returns the paths of what was written."""
    path = out / f"{name}.png"
    try:
        draw_evaluation(name, rows, path)
    except ImportError as error:
        say(f"no picture: matplotlib cannot be imported: {error} (pip install 'nsa[plots]')")
        return []
    return [path]


def csv_text(rows: Rows) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return text.getvalue()


def loss_table(rows: Rows) -> str:
    runs = list(dict.fromkeys(row["run"] for row in rows))
    spans = list(dict.fromkeys((row["begin"], row["end"]) for row in rows))
    found = {(row["run"], row["begin"], row["end"]): f"{row['loss']:.4f}" for row in rows}
    cells = [[f"{a}-{b - 1}", *(found.get((run, a, b), "") for run in runs)] for a, b in spans]
    return aligned_columns([["position", *runs], *cells])


def accuracy_tables(rows: Rows) -> str:
    blocks = []
    for run, task in dict.fromkeys((row["run"], row["task"]) for row in rows):
        own = [row for row in rows if (row["run"], row["task"]) == (run, task)]
        lengths = list(dict.fromkeys(row["length"] for row in own))
        found = {(row["value"], row["length"]): f"{row['accuracy']:.0%}" for row in own}
        values = list(dict.fromkeys(row["value"] for row in own))
        head = ["depth" if task == "needle" else task, *(f"{length:,}" for length in lengths)]
        lines = [
            [f"{value:.0%}" if task == "needle" else f"{value:g}", *(found[value, length] for length in lengths)]
            for value in values
        ]
        blocks.append(f"{run}: accuracy\n{aligned_columns([head, *lines])}")
    return "\n\n".join(blocks)


def harness_table(rows: Rows) -> str:
    cells = [[r["run"], r["task"], f"{r['length']:,}", f"{r['accuracy']:.0%}", str(r["samples"])] for r in rows]
    return aligned_columns([["model", "task", "tokens", "accuracy", "samples"], *cells])
