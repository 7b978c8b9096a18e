"""The quality study: NSA against dense and sliding attention, its branches and its gate, within a time budget.

    python benchmarks/study.py --minutes 25                                   # on an H200: 125m at 8k tokens
    python benchmarks/study.py --minutes 25 --arms nsa dense                  # some arms
    python benchmarks/study.py --scale tiny --minutes 5 --work runs/tiny-study --out runs/tiny-results

Stages: data (Python source found on this machine, mixed with synthetic recall), arms (each a normal `nsa train`),
context extension of the finished arms in --extend, evaluation (`nsa eval`), report (CSVs and plots). Call it again to
continue: an arm whose record is in --out is not run again, one that was stopped resumes from its checkpoint in --work.
An arm that would not end in time, judged by those before it, is left for the next call.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import signal
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import nsa
from nsa.config import require
from nsa.data.recall import mixed_documents, python_files, write_corpus
from nsa.files import replace_text
from nsa.model import LM, LMConfig
from nsa.origin import commit
from nsa.train.config import load_config
from nsa.train.run_folder import METRICS, read_lines

# Seconds that a stopped run gets to write its checkpoint.
GRACE_S = 60
# Seconds that no arm takes less than, for the first one.
LEAST_S = 20


@dataclass(frozen=True)
class Scale:
    """The sizes of a study."""

    config: str
    seq_len: int
    batch_size: int
    steps: int
    # Of the one long run, with a batch of one.
    long_steps: int
    lr: float
    other_lr: float
    # Of the BPE; 0: bytes.
    vocab: int
    # Characters of the corpora: for the arms, for the extension.
    chars: int
    long_chars: int
    # Sequence length and steps of each extension; each starts from the one before.
    extend: dict[int, int]
    # Of needle and recall prompts.
    lengths: tuple[int, ...]
    samples: int
    depths: int
    keys: tuple[int, ...]
    hops: tuple[int, ...]
    # Multiple of the MLP's hidden size.
    round_to: int
    # Most tokens of an evaluation's forward pass.
    chunk: int
    sets: dict[str, Any] = field(default_factory=dict)


SCALES = {
    "125m": Scale(
        config="125m",
        seq_len=8192,
        batch_size=4,
        steps=900,
        long_steps=10_000,
        lr=1e-3,
        other_lr=2e-3,
        vocab=16384,
        chars=120_000_000,
        long_chars=30_000_000,
        extend={32768: 120, 65536: 60},
        lengths=(4096, 8192, 16384, 32768, 65536),
        samples=4,
        depths=11,
        keys=(1, 4, 16, 64),
        hops=(1, 2, 3, 4),
        round_to=64,
        chunk=131072,
        # Room for longer contexts than the arms are trained on.
        sets={"model.attn.rope_theta": 500_000.0, "eval_batches": 8},
    ),
    "tiny": Scale(
        config="tiny",
        seq_len=128,
        batch_size=2,
        steps=4,
        long_steps=6,
        lr=3e-3,
        other_lr=6e-3,
        vocab=0,
        chars=200_000,
        long_chars=100_000,
        extend={256: 2, 512: 2},
        lengths=(256, 384),
        samples=1,
        depths=2,
        keys=(1, 2),
        hops=(2,),
        round_to=8,
        chunk=256,
        sets={"eval_batches": 1, "sample_tokens": 1, "model.n_layers": 1, "model.attn.w": 32, "model.attn.n_sel": 3},
    ),
}


@dataclass(frozen=True)
class Arm:
    """One training run: what it changes, in dotted keys."""

    name: str
    sets: dict[str, Any]
    steps: int
    seq_len: int
    batch_size: int
    data: str = "base"
    # The arm whose parameters it starts from.
    start: str | None = None


def make_arms(scale: Scale) -> list[Arm]:
    """The arms in the order of their importance."""
    base = load_config(scale.config, {"device": "cpu", "compile": False, **model_sets(scale)}).model
    equal_parameters = {"model.hidden": dense_hidden(base, scale.round_to, flops=False)}
    dense = {"model.attention": "dense", **equal_parameters}
    changes: dict[str, dict[str, Any]] = {
        "nsa": {},
        "dense": dense,
        "dense-flops": {"model.attention": "dense", "model.hidden": dense_hidden(base, scale.round_to, flops=True)},
        "sliding": {"model.attention": "sliding", "model.window": base.attn.w, **equal_parameters},
        **{f"nsa-no-{branch}": {"model.attn.drop_branch": branch} for branch in ("cmp", "sel", "win")},
        "nsa-gate-bias": {"model.attn.gate_bias": 2.0},
        "nsa-gate-softmax": {"model.attn.gate": "softmax"},
        "nsa-gate-no-decay": {"gate_decay": False},
        "nsa-lr": {"lr": scale.other_lr},
        "dense-lr": {"lr": scale.other_lr, **dense},
        "nsa-seed": {"seed": 1},
        "dense-seed": {"seed": 1, **dense},
    }
    arms = [Arm(name, sets, scale.steps, scale.seq_len, scale.batch_size) for name, sets in changes.items()]
    return [*arms, Arm("nsa-long", {}, scale.long_steps, scale.seq_len, 1)]


def model_sets(scale: Scale) -> dict[str, Any]:
    vocab = {"model.vocab_size": scale.vocab or 256, "model.seq_len": scale.seq_len}
    return {**vocab, **{key: value for key, value in scale.sets.items() if key.startswith("model.")}}


def dense_hidden(nsa: LMConfig, round_to: int, *, flops: bool) -> int:
    """The MLP's hidden size with which a dense model has NSA's parameters, or NSA's FLOPs per token at this length."""

    def cost(config: LMConfig) -> float:
        with torch.device("meta"):
            model = LM(config)
        return model.flops_per_token(config.seq_len) if flops else sum(model.parameter_counts().values())

    dense = replace(nsa, attention="dense")
    per_unit = (cost(replace(dense, hidden=dense.hidden + round_to)) - cost(dense)) / round_to
    hidden = dense.hidden + (cost(nsa) - cost(dense)) / per_unit
    return max(round_to, round(hidden / round_to) * round_to)


def extensions(scale: Scale, arm: Arm) -> list[Arm]:
    """Runs that continue an arm at longer and longer contexts, with a batch of one and a tenth of its learning rate."""
    made, start = [], arm.name
    for seq_len, steps in scale.extend.items():
        name = extended_name(arm.name, seq_len)
        sets = {**arm.sets, "lr": round(arm.sets.get("lr", scale.lr) / 10, 9)}
        made.append(Arm(name, sets, steps, seq_len, 1, data="long", start=start))
        start = name
    return made


class Study:
    """Runs the stages until the time is up.

    Args:
        scale: The sizes.
        work: Folder of data and runs, which may be lost between calls.
        out: Folder of results, which are small and kept.
        minutes: The budget of this call.
    """

    def __init__(self, scale: Scale, work: Path, out: Path, minutes: float) -> None:
        self.scale, self.work, self.out = scale, work.resolve(), out.resolve()
        self.deadline = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def command(self, words: Sequence[str]) -> int | None:
        """Run one `nsa` command; None where the time was up and it was told to stop."""
        line = [sys.executable, "-m", "nsa", *words]
        print(f"[study] {self.left:.0f} s left: nsa {shlex.join(words)}", flush=True)
        # In the folder of the runs, so that no path of this machine is part of a result.
        paths = os.pathsep.join([str(Path(nsa.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(line, cwd=self.work, env={**os.environ, "PYTHONPATH": paths})
        try:
            return process.wait(timeout=max(1.0, self.left))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None

    def enough(self, name: str, seconds: float) -> bool:
        """Whether so many seconds are left; if not, `name` is listed as left out."""
        if self.left >= seconds:
            return True
        self.left_out.append(name)
        print(f"[study] left for the next call: {name}, about {seconds:.0f} s", flush=True)
        return False

    # Stages.

    def data(self) -> None:
        """Two corpora with one tokenizer: Python source with recall, and longer documents for the extension."""
        # Characters per token of a BPE; bytes have one.
        width = 3 if self.scale.vocab else 1
        lengths = {"base": self.scale.seq_len, "long": max(self.scale.extend)}
        sizes = {"base": self.scale.chars, "long": self.scale.long_chars}
        shares = {"base": 0.2, "long": 0.5}
        files: list[Path] = []
        for seed, (name, n_chars) in enumerate(sizes.items()):
            shards = self.work / name
            if (shards / "manifest.json").is_file() or not self.enough(f"data {name}", LEAST_S):
                continue
            files = files or python_files(python_folders())
            corpus = self.work / f"{name}.jsonl"
            longest = width * lengths[name] * 3 // 4
            recall_chars = (min(200, longest), longest)
            texts = mixed_documents(
                files, n_chars=n_chars, recall_share=shares[name], recall_chars=recall_chars, seed=seed
            )
            write_corpus(corpus, texts)
            bpe = ["--train-bpe", str(self.scale.vocab)] if self.scale.vocab else []
            tokenizer = bpe if name == "base" else ["--tokenizer", "base"]
            self.command(["data", "prepare", "--source", "jsonl", "--path", corpus.name, "--out", name, *tokenizer])
            corpus.unlink()

    def record_of(self, arm: Arm) -> Path:
        return self.out / "arms" / f"{arm.name}.json"

    def train(self, arm: Arm) -> bool:
        """Train an arm and record it; returns whether it is done."""
        if self.record_of(arm).is_file():
            steps = json.loads(self.record_of(arm).read_text())["steps"]
            accepted = f"{steps}, as in {self.record_of(arm)}, or another --out and --work"
            require(steps == arm.steps, f"the steps of {arm.name}", arm.steps, accepted)
            return True
        if arm.start is not None and not (self.work / "runs" / arm.start / "model.json").is_file():
            self.left_out.append(f"{arm.name}, which needs the run of {arm.start}")
            return False
        if not self.enough(arm.name, self.expected(arm)):
            return False
        began, run = time.monotonic(), self.work / "runs" / arm.name
        words = self.train_command(arm)
        status = self.command(words)
        if status not in (0, None):
            self.left_out.append(f"{arm.name}, which failed with status {status}")
        ends = [record for record in read_lines(run / METRICS) if record["kind"] == "end"]
        if status != 0 or not ends:
            return False
        record = self.summary(arm, run, ends[-1], words) | {"wall_s": round(time.monotonic() - began, 1)}
        self.record_of(arm).parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.record_of(arm), json.dumps(record, indent=1) + "\n")
        return True

    def expected(self, arm: Arm) -> float:
        """Seconds that an arm takes: as those that are recorded, per token."""
        tokens = arm.steps * arm.batch_size * arm.seq_len
        known = [record for record in self.records() if (record["start"] is None) == (arm.start is None)]
        return max([LEAST_S, *(record["wall_s"] * tokens / record["tokens"] for record in known)])

    def train_command(self, arm: Arm) -> list[str]:
        s = self.scale
        every = max(1, arm.steps // 10)
        values: dict[str, Any] = {
            **model_sets(s),
            "model.seq_len": arm.seq_len,
            **s.sets,
            "eval_every": every,
            "stats_every": max(1, arm.steps // 5),
            "log_every": max(1, min(20, every)),
            "sample_every": 0,
            "save_every": 0,
            "warmup": max(1, arm.steps // 10),
            "lr": s.lr,
            **arm.sets,
        }
        if arm.start is not None:
            values["init"] = f"runs/{arm.start}"
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        data = ["--dataset", "shards", "--data-path", arm.data]
        sizes = ["--steps", str(arm.steps), "--batch-size", str(arm.batch_size)]
        return ["train", "--config", s.config, "--out", f"runs/{arm.name}", *data, *sizes, *sets]

    def summary(self, arm: Arm, run: Path, end: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
        """What is kept of a run."""
        metrics = read_lines(run / METRICS)
        with torch.device("meta"):
            model = LM(LMConfig.from_dict(json.loads((run / "model.json").read_text())))
        tokens_per_step = arm.batch_size * arm.seq_len
        return {
            "arm": arm.name,
            "start": arm.start,
            "seq_len": arm.seq_len,
            "parameters": sum(model.parameter_counts().values()),
            "flops_per_token": round(model.flops_per_token(arm.seq_len)),
            "steps": arm.steps,
            "tokens": arm.steps * tokens_per_step,
            "loss": end["loss_end"],
            "tokens_per_s": end["tokens_per_s"],
            "skipped": end["skipped"],
            "fallbacks": end["fallbacks"],
            "gates": next((r["mean"] for r in reversed(metrics) if r["kind"] == "gates"), None),
            "curve": curve(metrics, tokens_per_step),
            "commit": commit(),
            "torch": str(torch.__version__),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "command": shlex.join(["nsa", *words]),
        }

    def evaluate(self, arms: Sequence[str]) -> None:
        """Needle and recall of the longest extensions, and the loss by position of the arms, side by side."""
        s = self.scale
        longest = [extended_name(name, max(s.extend)) for name in arms]
        runs = {"needle": longest, "recall": longest, "loss": list(arms)}
        lengths = [str(length) for length in s.lengths]
        flags = {
            "needle": ["--lengths", *lengths, "--depths", str(s.depths), "--samples", str(s.samples)],
            "recall": ["--lengths", *lengths, "--samples", str(s.samples)],
            "loss": ["--windows", "8"],
        }
        flags["recall"] += ["--keys", *map(str, s.keys), "--hops", *map(str, s.hops)]
        for name, names in runs.items():
            there = [f"runs/{run}" for run in names if (self.work / "runs" / run / "model.json").is_file()]
            result = self.out / f"{name}.json"
            done = result.is_file() and json.loads(result.read_text())["flags"]["runs"] == there
            if done or not there or not self.enough(f"eval {name}", LEAST_S):
                continue
            words = ["eval", name, *there, *flags[name], "--chunk", str(s.chunk), "--out", str(self.out)]
            status = self.command(words)
            if status != 0:
                self.left_out.append(f"eval {name}, which ended with status {status}")

    # Results.

    def records(self) -> list[dict[str, Any]]:
        files = sorted((self.out / "arms").glob("*.json")) if (self.out / "arms").is_dir() else []
        return [json.loads(path.read_text()) for path in files]

    def report(self) -> None:
        """CSVs and plots of all arms that are recorded."""
        records = self.records()
        if not records:
            return
        left_out = ("start", "gates", "curve", "command", "fallbacks")
        rows = [{name: value for name, value in record.items() if name not in left_out} for record in records]
        write_csv(self.out / "arms.csv", rows)
        curves = [{"arm": record["arm"], **point} for record in records for point in record["curve"]]
        write_csv(self.out / "curves.csv", curves)
        gates = [
            {"arm": record["arm"], "layer": layer, **values}
            for record in records
            for layer, values in enumerate(record["gates"] or [])
            if values
        ]
        if gates:
            write_csv(self.out / "gates.csv", gates)
        if find_spec("matplotlib") is None:
            print("[study] no plots: matplotlib is not installed")
        else:
            draw_curves(records, self.out / "curves.png")
        print(f"{'arm':<20}{'parameters':>14}{'tokens':>14}{'loss':>9}{'tokens/s':>12}")
        for r in sorted(records, key=lambda r: (r["start"] is not None, r["loss"])):
            rate = r["tokens_per_s"] or 0
            print(f"{r['arm']:<20}{r['parameters']:>14,}{r['tokens']:>14,}{r['loss']:>9.4f}{rate:>12,.0f}")


def python_folders() -> list[Path]:
    """Where this machine has Python source: the standard library and the installed packages."""
    roots = {Path(path) for path in (*sysconfig.get_paths().values(), *site.getsitepackages())}
    return sorted(path for path in roots if path.name.startswith(("python", "site-", "dist-")) and path.is_dir())


def extended_name(arm: str, seq_len: int) -> str:
    return f"{arm}-{seq_len // 1024}k" if seq_len >= 1024 else f"{arm}-{seq_len}"


def curve(metrics: Sequence[dict[str, Any]], tokens_per_step: int) -> list[dict[str, Any]]:
    """The loss by tokens and seconds of training alone: without compilation, validation and waiting in between.

    Training losses are means over the steps since the last point.
    """
    speeds = {r["step"]: r["step_s"] for r in metrics if r["kind"] == "speed" and "step_s" in r}
    losses = {r["step"]: r["loss"] for r in metrics if r["kind"] == "step"}
    valid = {r["step"]: r["loss"] for r in metrics if r["kind"] == "eval"}
    usual = mean(speeds.values()) if speeds else 0.0
    points, seconds, last = [], 0.0, 0
    for step in sorted({*speeds, *valid}):
        seconds += (step - last) * speeds.get(step, usual)
        own = [losses[s] for s in range(last + 1, step + 1) if isinstance(losses.get(s), float)]
        points.append(
            {
                "step": step,
                "tokens": step * tokens_per_step,
                "seconds": round(seconds, 3),
                "train_loss": round(mean(own), 5) if own else None,
                "valid_loss": valid.get(step),
            }
        )
        last = step
    return points


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw_curves(records: Sequence[dict[str, Any]], out: Path) -> None:
    """Validation loss against tokens and against seconds, of the arms that start from nothing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(1, 2)
    for record in records:
        if record["start"] is not None:
            continue
        points = [point for point in record["curve"] if point["valid_loss"] is not None and point["step"] > 0]
        for axis, key in zip(axes, ("tokens", "seconds"), strict=True):
            xs, ys = [point[key] for point in points], [point["valid_loss"] for point in points]
            style = "--" if record["arm"].startswith(("dense", "sliding")) else "-"
            axis.plot(xs, ys, style, label=f"{record['arm']}: {record['loss']:.3f}", linewidth=1.4)
    for axis, key in zip(axes, ("tokens", "seconds of training"), strict=True):
        axis.set(xlabel=key, ylabel="validation loss")
        axis.grid(alpha=0.25)
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="the budget of this call")
    parser.add_argument("--scale", choices=SCALES, default="125m")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="(default: all, the most important first)")
    parser.add_argument("--extend", nargs="*", default=["nsa", "dense"], metavar="ARM", help="(default: nsa dense)")
    parser.add_argument("--steps", type=int, help="of each arm (default: the scale's)")
    parser.add_argument("--work", type=Path, default=Path("runs/study"), help="data and runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200/study"), help="results")
    args = parser.parse_args(argv)
    scale = SCALES[args.scale]
    if args.steps is not None:
        scale = replace(scale, steps=args.steps)
    if scale.vocab and find_spec("tokenizers") is None:
        print("[study] bytes in place of a BPE: the package tokenizers is not installed")
        scale = replace(scale, vocab=0)
    arms = {arm.name: arm for arm in make_arms(scale)}
    unknown = {*(args.arms or []), *args.extend} - set(arms)
    if unknown:
        parser.error(f"no arm {sorted(unknown)}; accepted: {list(arms)}")
    study = Study(scale, args.work, args.out, args.minutes)
    for folder in (study.work, study.out):
        folder.mkdir(parents=True, exist_ok=True)
    study.data()
    done = [name for name in args.arms or arms if study.train(arms[name])]
    extended = [name for name in args.extend if name in done]
    for name in extended:
        for arm in extensions(scale, arms[name]):
            study.train(arm)
    if extended:
        study.evaluate(extended)
    study.report()
    print(json.dumps({"done": [record["arm"] for record in study.records()], "left": study.left_out}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
