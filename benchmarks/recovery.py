"""Recovery of converted models: dense training, conversion to NSA, and training on, within a time budget.

    python benchmarks/recovery.py --minutes 8                 # on an H200: the 125m model at 8k and 32k tokens
    python benchmarks/recovery.py --scale tiny --minutes 2 --work runs/tiny-recovery --out runs/tiny-results

Stages, each a normal `nsa` command: data (Python source found on this machine, mixed with synthetic recall), dense
training, export as a LlamaForCausalLM, conversion by the recipes, and from there training of the dense and the
converted models on the same tokens, all of them at once. The loss before the first step is that of the model as it was
converted. At the deadline runs are stopped, and what they have shown so far is reported. Call it again to continue: a
stage that is done is not run again, and a stopped run resumes.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from arms import extended_name
from study import curve, python_folders, write_csv

import nsa
from nsa.data.recall import mixed_documents, python_files, write_corpus
from nsa.files import replace_text
from nsa.origin import commit
from nsa.train.run_folder import METRICS, read_lines

PRETRAINED = "dense-from-scratch"
ARMS = ("dense", "gated", "select")
# Seconds between two lines of progress.
LINE_EVERY_S = 10.0
# Seconds that stopped runs get to write their checkpoints.
STOP_S = 25
# How many times as long a step takes where several runs share the GPU, beyond the time of the other runs' steps.
SHARING = 1.4


@dataclass(frozen=True)
class Scale:
    """The sizes of the runs."""

    config: str
    # Batch size by sequence length; the first length is that of the dense training.
    batch_size: dict[int, int]
    # Expected seconds of a step by arm, in the order of the lengths; and of what a run needs before its first step.
    step_s: dict[str, tuple[float, ...]]
    start_s: float
    # Share of the steps' time that goes to the dense training.
    dense_share: float
    # Steps at each length relative to those at the first.
    share: tuple[float, ...]
    vocab: int  # of the BPE; 0: bytes
    chars: int
    lr: float
    # No more than what the dense training ends with, a tenth of `lr`: a higher one undoes some of it first.
    recover_lr: float
    sets: dict[str, Any]
    # Logits are compared over so many tokens.
    compared: tuple[int, ...]
    # Hyperparameters of NSA in the conversion.
    changes: tuple[str, ...] = ()


SCALES = {
    "125m": Scale(
        config="125m",
        batch_size={8192: 2, 32768: 1},
        step_s={"dense": (0.06, 0.26), "gated": (0.065, 0.15), "select": (0.06, 0.14)},
        start_s=35,
        dense_share=0.35,
        share=(1.0, 0.6),
        vocab=16384,
        chars=100_000_000,
        lr=1e-3,
        recover_lr=1e-4,
        sets={"model.attn.rope_theta": 500_000.0, "eval_batches": 8, "sample_tokens": 1},
        compared=(512, 1024, 2048, 4096, 8192, 16384),
    ),
    "tiny": Scale(
        config="tiny",
        batch_size={256: 2, 512: 1},
        step_s=dict.fromkeys(ARMS, (0.5, 0.5)),
        start_s=5,
        dense_share=0.4,
        share=(1.0, 0.5),
        vocab=0,
        chars=300_000,
        lr=3e-3,
        recover_lr=3e-4,
        sets={"eval_batches": 1, "sample_tokens": 1, "model.n_layers": 1},
        compared=(192, 256),
        changes=("n_sel=3", "w=64"),
    ),
}


class Recovery:
    """Runs the stages until the time is up.

    Args:
        scale: The sizes.
        work: Folder of data, models and runs.
        out: Folder of results, which are small and kept.
        minutes: The budget of this call.
        arms: Which of `ARMS` are trained on.
        steps: At the first length (default: what the budget allows).
    """

    def __init__(
        self, scale: Scale, work: Path, out: Path, minutes: float, arms: Sequence[str], steps: int | None = None
    ) -> None:
        self.scale, self.work, self.out = scale, work.resolve(), out.resolve()
        self.arms, self.steps = arms, steps
        self.deadline = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def say(self, text: str) -> None:
        print(f"[recovery] {self.left:.0f} s left: {text}", flush=True)

    # Commands.

    def run_together(self, stages: Mapping[str, Sequence[str]]) -> bool:
        """Run the `nsa` commands of stages that are not done yet, at once; returns whether all stages are done now.

        The output of each goes to `NAME.log`. At the deadline they get SIGTERM.
        """
        paths = os.pathsep.join([str(Path(nsa.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        running: dict[str, subprocess.Popen[bytes]] = {}
        for name, words in stages.items():
            if self.is_done(name):
                continue
            self.say(f"nsa {shlex.join(words)}")
            with self.log_of(name).open("ab") as log:
                # In the folder of the runs, so that no path of this machine is part of a result.
                running[name] = subprocess.Popen(
                    [sys.executable, "-m", "nsa", *words],
                    cwd=self.work,
                    env={**os.environ, "PYTHONPATH": paths},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        stopping = False
        while running:
            until_next = self.left + (STOP_S if stopping else 0)
            try:
                next(iter(running.values())).wait(timeout=max(0.1, min(LINE_EVERY_S, until_next)))
            except subprocess.TimeoutExpired:
                self.say(", ".join(f"{name} {self.progress_of(name)}" for name in running))
            for name in [name for name, process in running.items() if process.poll() is not None]:
                self.finish(name, running.pop(name).returncode)
            if self.left <= 0 and not stopping:
                stopping = True
                for process in running.values():
                    process.send_signal(signal.SIGTERM)
            if self.left < -STOP_S:
                for process in running.values():
                    process.kill()
        return all(self.is_done(name) for name in stages)

    def finish(self, name: str, status: int) -> None:
        """Mark a stage as done, or show why it is not."""
        stopped = self.work / "runs" / name / METRICS
        ended = not stopped.is_file() or any(line["kind"] == "end" for line in read_lines(stopped))
        if status == 0 and ended:
            replace_text(self.marker_of(name), "")
            self.say(f"{name} is done")
            return
        self.left_out.append(name)
        last = self.log_of(name).read_text(errors="replace").splitlines()[-15:]
        print(f"[recovery] {name} ended with status {status}:", *last, sep="\n  ", flush=True)

    def marker_of(self, name: str) -> Path:
        return self.work / f"{name}.done"

    def is_done(self, name: str) -> bool:
        return self.marker_of(name).is_file()

    def log_of(self, name: str) -> Path:
        return self.out / f"{name}.log"

    def progress_of(self, name: str) -> str:
        path = self.work / "runs" / name / METRICS
        lines = read_lines(path) if path.is_file() else []
        done = next((line for line in reversed(lines) if line["kind"] == "step"), None)
        return "starts" if done is None else f"step {done['step']}"

    # Stages.

    def data(self) -> bool:
        corpus, length = self.work / "corpus.jsonl", max(self.scale.batch_size)
        if not self.is_done("data"):
            self.say("collect Python source of this machine")
            # Of a BPE, three characters per token.
            longest = (3 if self.scale.vocab else 1) * length * 3 // 4
            texts = mixed_documents(
                python_files(python_folders()),
                n_chars=self.scale.chars,
                # What is far back matters in these documents, and in few others.
                recall_share=0.3,
                recall_chars=(min(200, longest), longest),
                seed=0,
            )
            write_corpus(corpus, texts)
            shutil.rmtree(self.work / "data", ignore_errors=True)
        bpe = ["--train-bpe", str(self.scale.vocab)] if self.scale.vocab else []
        words = ["data", "prepare", "--source", "jsonl", "--path", corpus.name, "--out", "data", *bpe]
        return self.run_together({"data": words})

    def pretrain(self) -> bool:
        s = self.scale
        length = next(iter(s.batch_size))
        # The recovery has a start of its own.
        steps_s = self.left - 2 * s.start_s
        steps = self.planned("pretrain", [length], s.dense_share * steps_s / s.step_s["dense"][0])
        own = {key: value for key, value in s.sets.items() if key.startswith("model.")}
        sets = {"model.attention": "dense", **own}
        return self.run_together({PRETRAINED: self.train_words(PRETRAINED, length, steps[length], s.lr, sets)})

    def convert(self) -> bool:
        """The dense model as Transformers has it, and converted by each recipe."""
        recipes = [arm for arm in self.arms if arm != "dense"]
        for name, folder in {"export": "dense", **{recipe: recipe for recipe in recipes}}.items():
            if not self.is_done(f"convert-{name}"):
                shutil.rmtree(self.work / "models" / folder, ignore_errors=True)
        if not self.run_together({"convert-export": ["export", f"runs/{PRETRAINED}", "--to", "models/dense"]}):
            return False
        return self.run_together({f"convert-{recipe}": self.convert_words(recipe, recipe) for recipe in recipes})

    def convert_words(self, recipe: str, name: str, lengths: Sequence[int] = ()) -> list[str]:
        changes = [word for change in self.scale.changes for word in ("--set", change)]
        words = ["convert", "--from", "models/dense", "--to", f"models/{name}", "--recipe", recipe, *changes]
        device = ["--device", "cuda"] if torch.cuda.is_available() else []
        return [*words, *device, "--lengths", *map(str, lengths)]

    def recover(self) -> bool:
        """Train every arm on at every length, and meanwhile compare the logits of `select` with the dense ones."""
        s = self.scale
        # All run at once: the GPU's time is divided among them.
        per_unit = sum(part * s.step_s[arm][i] for arm in self.arms for i, part in enumerate(s.share))
        per_unit *= SHARING * self.slowness()
        steps = self.planned("recover", list(s.batch_size), (self.left - s.start_s) / per_unit)
        if not self.is_done("compared"):
            shutil.rmtree(self.work / "models" / "compared", ignore_errors=True)
        stages = {"compared": self.convert_words("select", "compared", s.compared)}
        for arm in self.arms:
            for length in s.batch_size:
                name = extended_name(arm, length)
                words = self.train_words(name, length, steps[length], s.recover_lr, {})
                stages[name] = [*words, "--init", f"models/{arm}"]
        return self.run_together(stages)

    def slowness(self) -> float:
        """How many times as long as expected a step of the dense training took."""
        lines = read_lines(self.work / "runs" / PRETRAINED / METRICS)
        found = [line["step_s"] for line in lines if line["kind"] == "speed" and "step_s" in line]
        return median(found) / self.scale.step_s["dense"][0] if found else 1.0

    def planned(self, stage: str, lengths: Sequence[int], steps: float) -> dict[int, int]:
        """Steps at each length: `steps` at the first, at least ten; the same in every call."""
        path = self.work / f"{stage}.json"
        if not path.is_file():
            first = max(10, round(steps)) if self.steps is None else self.steps
            found = {n: max(2, round(part * first)) for n, part in zip(lengths, self.scale.share, strict=False)}
            replace_text(path, json.dumps(found) + "\n")
        return {int(length): count for length, count in json.loads(path.read_text()).items()}

    def train_words(self, name: str, length: int, steps: int, lr: float, sets: Mapping[str, Any]) -> list[str]:
        every = max(1, steps // 6)
        values: dict[str, Any] = {
            "data.shuffle_tokens": 2**22,
            **{key: value for key, value in self.scale.sets.items() if not key.startswith("model.")},
            **dict.fromkeys(("sample_every", "save_every", "stats_every"), 0),
            "eval_every": every,
            "log_every": max(1, every // 2),
            "warmup": max(1, steps // 20),
            "lr": lr,
            # Several runs share the GPU.
            "min_tokens_per_s": 0,
            **sets,
        }
        sizes = ["--seq-len", str(length), "--steps", str(steps), "--batch-size", str(self.scale.batch_size[length])]
        flags = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        data = ["--dataset", "shards", "--data-path", "data"]
        return ["train", "--config", self.scale.config, "--out", f"runs/{name}", *data, *sizes, *flags]

    # Results.

    def report(self) -> None:
        """A CSV of all losses so far, a table and a plot."""
        origin = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": str(torch.__version__),
            "commit": commit(),
            "date": f"{datetime.now():%Y-%m-%d}",
        }
        rows: list[dict[str, Any]] = []
        runs = {PRETRAINED: (PRETRAINED, next(iter(self.scale.batch_size)))}
        runs |= {extended_name(arm, length): (arm, length) for arm in self.arms for length in self.scale.batch_size}
        for name, (arm, length) in runs.items():
            path = self.work / "runs" / name / METRICS
            points = curve(read_lines(path), self.scale.batch_size[length] * length) if path.is_file() else []
            # Runs share the GPU: what a step took means nothing.
            rows += [
                {"arm": arm, "seq_len": length, **{k: v for k, v in p.items() if k != "seconds"}, **origin}
                for p in points
            ]
        if not rows:
            return
        write_csv(self.out / "recovery.csv", rows)
        print(f"{'arm':<20}{'tokens':>8}{'loss at the start':>19}{'at the end':>12}{'after tokens':>14}")
        for (arm, length), points in by_run(rows).items():
            first, last = points[0], points[-1]
            print(f"{arm:<20}{length:>8,}{first['valid_loss']:>19.4f}{last['valid_loss']:>12.4f}{last['tokens']:>14,}")
        if find_spec("matplotlib") is None:
            self.say("no plot: matplotlib is not installed")
        else:
            draw(rows, self.out / "recovery.png")


def by_run(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The points of each run that have a validation loss."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["valid_loss"] not in (None, ""):
            point = {"tokens": int(row["tokens"]), "valid_loss": float(row["valid_loss"])}
            found.setdefault((row["arm"], int(row["seq_len"])), []).append(point)
    return found


def draw(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Validation loss against tokens: of the dense training, then since the conversion, one plot per length. The first
    point after the conversion is the model as it was converted."""
    from matplotlib.figure import Figure

    runs = by_run(rows)
    plots = sorted({(arm != PRETRAINED, length) for arm, length in runs})
    if not plots:
        return
    styles = {
        PRETRAINED: ("dense, from scratch", "#5b6472", "-"),
        "dense": ("dense, trained on", "#5b6472", "--"),
        "gated": ("nsa convert --recipe gated", "#c2410c", "-"),
        "select": ("nsa convert --recipe select", "#1d4ed8", "-"),
    }
    figure = Figure(figsize=(5.6 * len(plots), 4.2), layout="constrained")
    for axis, (after, length) in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
        own = {arm: points for (arm, n), points in runs.items() if n == length and (arm != PRETRAINED) == after}
        # Runs that were stopped ended at different tokens; losses are compared where all have one.
        end = min(points[-1]["tokens"] for points in own.values())
        for arm, points in own.items():
            name, color, line = styles[arm]
            losses = [point["valid_loss"] for point in points if point["tokens"] <= end]
            xs, ys = [point["tokens"] / 1e6 for point in points], [point["valid_loss"] for point in points]
            label = f"{name}: {losses[0]:.3f} to {losses[-1]:.3f}"
            axis.plot(xs, ys, line, color=color, label=label, marker="o", ms=3)
        since = "million tokens after the conversion" if after else "million tokens"
        axis.set(xlabel=since, ylabel="validation loss", title=f"{length:,} tokens of context")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="the budget of this call; decides how many steps are trained")
    parser.add_argument("--scale", choices=SCALES, default="125m")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="(default: all)")
    parser.add_argument("--steps", type=int, help="at the first length (default: what --minutes allows)")
    parser.add_argument("--work", type=Path, default=Path("runs/recovery"), help="data, models and runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"), help="results")
    parser.add_argument("--plot", type=Path, metavar="CSV", help="only draw recovery.png in --out from these results")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plot is not None:
        with args.plot.open(newline="") as file:
            draw(list(csv.DictReader(file)), args.out / "recovery.png")
        return 0
    if args.minutes is None:
        parser.error("--minutes is missing")
    # The dense model comes first: the others are converted from it.
    arms = [arm for arm in ARMS if arm in {"dense", *args.arms}]
    recovery = Recovery(SCALES[args.scale], args.work, args.out, args.minutes, arms, args.steps)
    recovery.work.mkdir(parents=True, exist_ok=True)
    done = recovery.data() and recovery.pretrain() and recovery.convert() and recovery.recover()
    recovery.report()
    print(json.dumps({"done": done, "left": recovery.left_out}))
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
