"""The quality study: NSA against dense and sliding attention, its branches and its gate, within a time budget.

    python benchmarks/study.py --scale 26m --minutes 9.3 --grace 7 --pack study.tar.gz  # on an H200: ten minutes
    python benchmarks/study.py --minutes 25                                   # 125m at 8k tokens
    python benchmarks/study.py --minutes 25 --arms nsa dense                  # some arms
    python benchmarks/study.py --scale 26m --minutes 0 --out RESULTS          # CSVs and plots of the records in RESULTS
    python benchmarks/study.py --scale tiny --minutes 5 --work runs/tiny-study --out runs/tiny-results

Stages: data (Python source found on this machine, mixed with synthetic recall), arms (each a normal `nsa train`),
context extension of the finished arms in --extend, evaluation (`nsa eval`), report (CSVs and plots). Call it again to
continue: an arm whose record is in --out is not run again, one that was stopped resumes from its checkpoint in --work.
An arm that would not end in time, judged by those before it, is left for the next call.

Where a scale has several slots, as many commands share the GPU, and their own speed means nothing: before them a
process per shape of model compiles its training step (which also fills the compiler's caches) while the data is
prepared, and then each measures its step alone on the GPU. Seconds in the results are steps times that.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import select
import shlex
import signal
import site
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from arms import (
    SCALES,
    Arm,
    Scale,
    arm_config,
    extended_name,
    extensions,
    make_arms,
    shape_of,
    train_values,
)
from jobs import Job, Queue, environment

from nsa.config import require
from nsa.data.config import Batch
from nsa.data.recall import mixed_documents, python_files, write_corpus
from nsa.dtypes import DTYPES
from nsa.evaluation.plots import draw_evaluation
from nsa.files import replace_text, replacing
from nsa.model import LM, LMConfig
from nsa.origin import commit
from nsa.train.config import TrainConfig
from nsa.train.run_folder import CONFIG, METRICS, REPORT, read_lines
from nsa.train.step import TrainStep, autocast, to_device, wait_asleep
from nsa.train.warmup import warm_up

TASKS = ("needle", "recall", "loss")
# Of a run, what is packed.
PACKED = (CONFIG, METRICS, REPORT)
# The corpus of Python source alone that nothing is trained on, and one file in how many is for it.
PLAIN, PLAIN_EVERY = "plain", 10
# Seconds that a stopped run gets to write its checkpoint.
GRACE_S = 60
# Seconds that no arm takes less than, for the first one.
LEAST_S = 20
# Steps before a measurement, which compile and capture CUDA graphs, and the seconds that it takes at least.
WARM_STEPS, TIMED_S = 6, 0.5
# Seconds after which a measurement is given up.
MEASURE_S = 15.0


def measure_step(config: TrainConfig, lock: Path) -> None:
    """Compile the training step of a config, print a line, and on a line of input measure it and print its seconds.

    Processes with the same `lock` compile the attention kernels one after the other, each with all cores: the second
    finds most of them in Triton's cache.
    """
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    size = (config.batch_size, config.model.seq_len)
    tokens, targets = (torch.randint(config.model.vocab_size, size) for _ in range(2))
    batch = to_device(Batch(tokens, targets, None), device)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        warm_up(config, Batch(tokens, targets, None), device, dtype, print)
    model = LM(config.model).to(device)
    with torch.no_grad(), autocast(device, dtype):
        # As validation runs it.
        model(batch.tokens, batch.targets)
    options: dict[str, Any] = {
        "cuda_graphs": config.cuda_graphs,
        "grad_clip": config.grad_clip,
        "weight_decay": config.weight_decay,
    }
    step = TrainStep(model, dtype=dtype, compile=config.compile, **options)

    def run(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            step([batch], 1e-5)
        wait_asleep(device)
        return time.perf_counter() - began

    run(WARM_STEPS)
    print("ready", file=sys.__stdout__, flush=True)
    sys.stdin.readline()
    # The first steps after a pause are slower.
    run(2)
    count = 1 + round(TIMED_S / run(1))
    print(run(count) / count, file=sys.__stdout__, flush=True)


class Study:
    """Runs the stages until the time is up.

    Args:
        scale: The sizes.
        work: Folder of data and runs, which may be lost between calls.
        out: Folder of results, which are small and kept.
        minutes: The budget of this call.
        grace_s: Seconds that runs get to save after it.
        packed: Archive of results, logs and metrics, written after each command.
    """

    def __init__(
        self,
        scale: Scale,
        work: Path,
        out: Path,
        minutes: float,
        grace_s: float = GRACE_S,
        packed: Path | None = None,
    ) -> None:
        self.scale, self.work, self.out, self.packed = scale, work.resolve(), out.resolve(), packed
        self.began = time.monotonic()
        self.queue = Queue(self.work, self.began + 60 * minutes, grace_s, scale.slots, self.save)
        # Seconds of a step alone on the GPU, by the shape of an arm.
        self.step_s: dict[tuple[Any, ...], float] = {}

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.queue.left

    # Stages.

    def run(self, arms: Sequence[Arm], extend: Sequence[str]) -> None:
        """All stages but the report."""
        longer = [made for arm in arms if arm.name in extend for made in extensions(self.scale, arm)]
        # The shortest extensions first.
        longer.sort(key=lambda arm: arm.seq_len)
        measuring = self.measure([*arms, *longer])
        self.data()
        self.finish_measuring(measuring)
        seconds = self.step_seconds()
        self.step_s = {shape_of(arm): seconds[arm.name] for arm in [*arms, *longer] if arm.name in seconds}
        names = [arm.name for arm in arms]
        # What there is no result without: the arms to extend, their extensions and the maps of those.
        first = [arm for arm in arms if arm.name in extend]
        rest = [arm for arm in arms if arm.name not in extend]
        before, after = ([self.train_job(arm) for arm in part] for part in ([*first, *longer], rest))
        evals = self.eval_jobs(names, [name for name in extend if name in names])
        self.queue.run(job for job in (*before, *evals, *after) if job is not None)

    def measure(self, arms: Sequence[Arm]) -> dict[str, subprocess.Popen[str]]:
        """Start a process for the first arm of each shape that is not measured yet; `finish_measuring` reads them."""
        known = self.step_seconds()
        first: dict[tuple[Any, ...], str] = {}
        for arm in arms:
            first.setdefault(shape_of(arm), arm.name)
        words = [sys.executable, __file__, "--minutes", "0", "--scale", self.scale.name]
        words += ["--work", str(self.work), "--measure"]
        started = {}
        for name in first.values():
            if self.scale.slots > 1 and self.left > 0 and name not in known:
                with self.queue.log_of(f"measure {name}").open("wb") as log:
                    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                    started[name] = subprocess.Popen([*words, name], **pipes, text=True, env=environment())
        return started

    def finish_measuring(self, processes: Mapping[str, subprocess.Popen[str]]) -> None:
        """Wait until all are compiled, or `warm_s` since the start; then let one after the other measure its step."""
        until = min(self.began + self.scale.warm_s, self.queue.deadline)
        found, ready = self.step_seconds(), {}
        waiting = dict(processes)
        while waiting:
            for name, process in list(waiting.items()):
                assert process.stdout is not None
                if process.poll() is not None or select.select([process.stdout], [], [], 0)[0]:
                    ready[name] = waiting.pop(name)
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        for name, process in waiting.items():
            self.queue.say(f"{name} is not measured: it was not compiled within {self.scale.warm_s:.0f} s")
            process.kill()
        for name, process in ready.items():
            assert process.stdin is not None
            assert process.stdout is not None
            line = ""
            if process.stdout.readline() == "ready\n":
                process.stdin.write("\n")
                process.stdin.flush()
                answered = select.select([process.stdout], [], [], MEASURE_S)[0]
                line = process.stdout.readline() if answered else ""
            if line:
                found[name] = float(line)
                self.queue.say(f"{name}: {1000 * found[name]:.2f} ms per step alone")
            else:
                self.queue.say(f"{name} is not measured")
                process.kill()
        # They end together: what each takes to exit is not waited for before the next one's turn.
        end = time.monotonic() + MEASURE_S
        for name, process in processes.items():
            try:
                process.communicate(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.queue.say(f"{name} was measured and does not exit")
                process.kill()
                process.communicate()
        if found:
            replace_text(self.out / "steps.json", json.dumps(found, indent=1) + "\n")

    def step_seconds(self) -> dict[str, float]:
        """The measured seconds of a step alone on the GPU, by the name of the arm that was measured."""
        path = self.out / "steps.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def data(self) -> None:
        """Corpora with one tokenizer: Python source with recall, of documents as long as each sequence length asks, and
        without."""
        bpe = ["--train-bpe", str(self.scale.vocab)] if self.scale.vocab else []
        options = corpus_options(self.scale)
        missing = [name for name in options if not (self.work / name / "manifest.json").is_file()]
        if not missing or self.left < LEAST_S:
            self.queue.left_out |= dict.fromkeys([f"data {name}" for name in missing], "the time is up")
            return
        files, jobs = python_files(python_folders()), []
        plain = files[::PLAIN_EVERY]
        trained = sorted({*files} - {*plain})
        for name in missing:
            documents = mixed_documents(plain if name == PLAIN else trained, **options[name])
            write_corpus(self.work / f"{name}.jsonl", documents)
            words = ["data", "prepare", "--source", "jsonl", "--path", f"{name}.jsonl", "--out", name]
            tokenizer, after = (bpe, ()) if name == "base" else (["--tokenizer", "base"], ("data base",))
            jobs.append(Job(f"data {name}", partial(list, [*words, *tokenizer]), after=after))
        self.queue.run(jobs)

    def record_of(self, arm: Arm) -> Path:
        return self.out / "arms" / f"{arm.name}.json"

    def train_job(self, arm: Arm) -> Job | None:
        """The training of an arm; None where it is recorded."""
        if self.record_of(arm).is_file():
            command = shlex.join(["nsa", *self.train_command(arm)])
            recorded = json.loads(self.record_of(arm).read_text())["command"]
            accepted = f"{recorded!r}, as in {self.record_of(arm)}, or another --out and --work"
            # With no time left there is only a report, of whatever is recorded.
            require(command == recorded or self.left <= 0, f"the command of {arm.name}", command, accepted)
            return None
        after = () if arm.start is None else (arm.start,)
        began: list[float] = []

        def words() -> list[str] | None:
            began.append(time.monotonic())
            data = self.work / arm.data / "manifest.json"
            start = data if arm.start is None else self.work / "runs" / arm.start / "model.json"
            return self.train_command(arm) if data.is_file() and start.is_file() else None

        def finish() -> bool:
            return self.keep(arm, time.monotonic() - began[-1])

        return Job(arm.name, words, finish, after, partial(self.expected, arm))

    def keep(self, arm: Arm, seconds: float) -> bool:
        """Record an arm; returns whether it came to its end."""
        run = self.work / "runs" / arm.name
        ends = [record for record in read_lines(run / METRICS) if record["kind"] == "end"]
        if not ends:
            return False
        record = self.summary(arm, run, ends[-1]) | {"wall_s": round(seconds, 1)}
        self.record_of(arm).parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.record_of(arm), json.dumps(record, indent=1) + "\n")
        return True

    def expected(self, arm: Arm) -> float:
        """Seconds that an arm takes: as those that are recorded, per token."""
        tokens = arm.steps * arm.batch_size * arm.seq_len
        known = [record for record in self.records() if (record["start"] is None) == (arm.start is None)]
        rates = [record["wall_s"] / record["tokens"] for record in known]
        return max(LEAST_S, tokens * mean(rates) if rates else 0.0)

    def train_command(self, arm: Arm) -> list[str]:
        values = train_values(self.scale, arm)
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        data = ["--dataset", "shards", "--data-path", arm.data]
        sizes = ["--steps", str(arm.steps), "--batch-size", str(arm.batch_size)]
        return ["train", "--config", self.scale.config, "--out", f"runs/{arm.name}", *data, *sizes, *sets]

    def summary(self, arm: Arm, run: Path, end: dict[str, Any]) -> dict[str, Any]:
        """What is kept of a run."""
        metrics = read_lines(run / METRICS)
        shared = self.scale.slots > 1
        step_s = self.step_s.get(shape_of(arm))
        own = None if shared else end["tokens_per_s"]
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
            "tokens_per_s": round(tokens_per_step / step_s, 1) if step_s else own,
            "skipped": end["skipped"],
            "fallbacks": end["fallbacks"],
            "gates": next((r["mean"] for r in reversed(metrics) if r["kind"] == "gates"), None),
            "curve": curve(metrics, tokens_per_step, step_s=step_s, shared=shared),
            "commit": commit(),
            "torch": str(torch.__version__),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "command": shlex.join(["nsa", *self.train_command(arm)]),
        }

    def eval_jobs(self, arms: Sequence[str], extended: Sequence[str]) -> list[Job]:
        """Needle and recall of the longest extensions, the loss by position of what they extend, and of the arms, side
        by side, the loss on plain text and the needle at lengths up to the training's."""
        s = self.scale
        longest = [extended_name(name, max(s.extend)) for name in extended]
        lengths = ["--lengths", *map(str, s.lengths), "--samples", str(s.samples)]
        many = ["--keys", *map(str, s.keys), "--hops", *map(str, s.hops)]
        few = ["--lengths", *map(str, s.short_lengths)]
        return [
            self.eval_job("needle", longest, [*lengths, "--depths", str(s.depths)], self.out),
            self.eval_job("recall", longest, [*lengths, *many], self.out),
            self.eval_job("loss", extended, ["--windows", "8"], self.out),
            self.eval_job(
                "needle", arms, [*few, "--depths", "5", "--samples", str(s.samples)], self.out / "arms-needle"
            ),
            self.eval_job(
                "loss",
                arms,
                ["--dataset", "shards", "--data-path", PLAIN, "--windows", str(16 * s.samples)],
                self.out / "arms-plain",
            ),
        ]

    def eval_job(self, task: str, names: Sequence[str], flags: Sequence[str], out: Path) -> Job:
        """`nsa eval` of those of the runs that are there, after all of them."""

        def words() -> list[str] | None:
            there = [f"runs/{name}" for name in names if (self.work / "runs" / name / "model.json").is_file()]
            result = out / f"{task}.json"
            if result.is_file() and json.loads(result.read_text())["flags"]["runs"] == there:
                return []
            return (
                ["eval", task, *there, *flags, "--chunk", str(self.scale.chunk), "--out", str(out)] if there else None
            )

        place = "" if out == self.out else f" in {out.name}"
        name = f"eval {task} of {'-'.join(names)}{place}"
        return Job(name, words, after=tuple(names), seconds=lambda: LEAST_S / 2)

    # Results.

    def records(self) -> list[dict[str, Any]]:
        files = sorted((self.out / "arms").glob("*.json")) if (self.out / "arms").is_dir() else []
        return [json.loads(path.read_text()) for path in files]

    def save(self) -> None:
        """CSVs of all arms that are recorded, and the archive: all that is left if this process is killed."""
        records = self.records()
        left_out = ("start", "gates", "curve", "command", "fallbacks")
        gates = [
            {"arm": record["arm"], "layer": layer, **values}
            for record in records
            for layer, values in enumerate(record["gates"] or [])
            if values
        ]
        for name, rows in (
            ("arms", [{key: value for key, value in record.items() if key not in left_out} for record in records]),
            ("curves", [{"arm": record["arm"], **point} for record in records for point in record["curve"]]),
            ("gates", gates),
        ):
            if rows:
                write_csv(self.out / f"{name}.csv", rows)
        self.pack()

    def report(self) -> None:
        """Plots and a table of all arms that are recorded."""
        records = self.records()
        if not records:
            return
        if find_spec("matplotlib") is None:
            self.queue.say("no plots: matplotlib is not installed")
        else:
            draw_curves(records, self.out / "curves.png")
            # Where results were packed on a machine without matplotlib.
            for found in (path for task in TASKS for path in self.out.rglob(f"{task}.json")):
                if not found.with_suffix(".png").is_file():
                    draw_evaluation(found.stem, json.loads(found.read_text())["rows"], found.with_suffix(".png"))
        print(f"{'arm':<20}{'parameters':>14}{'tokens':>14}{'loss':>9}{'tokens/s':>12}")
        for r in sorted(records, key=lambda r: (r["start"] is not None, r["loss"])):
            rate = r["tokens_per_s"] or 0
            print(f"{r['arm']:<20}{r['parameters']:>14,}{r['tokens']:>14,}{r['loss']:>9.4f}{rate:>12,.0f}")

    def pack(self) -> None:
        """Write a tar.gz of the results, the logs and what the runs logged: all but data and parameters."""
        if self.packed is None:
            return
        self.packed.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.packed) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            archive.add(self.out, self.out.name)
            for name in ("logs", *(f"runs/*/{file}" for file in PACKED)):
                for found in sorted(self.work.glob(name)):
                    archive.add(found, Path(self.out.name, found.relative_to(self.work)))


def corpus_options(scale: Scale) -> dict[str, dict[str, Any]]:
    """The arguments of `mixed_documents`, by the name of the corpus."""
    lengths = {"base": scale.seq_len, **{extended_name("long", length): length for length in scale.extend}}
    lengths[PLAIN] = scale.seq_len
    made = {}
    for seed, (name, length) in enumerate(lengths.items()):
        longer = int(name != "base")
        # Up to the window or longer: a BPE has between 3 and 4 characters per token, bytes have one.
        longest = (4 if scale.vocab else 1) * length
        made[name] = {
            "n_chars": (scale.chars, scale.long_chars)[longer],
            "recall_share": 0.0 if name == PLAIN else scale.recall_share[longer],
            "recall_chars": (longest // 4, longest),
            "dense_share": scale.dense_share[longer],
            "seed": seed,
        }
    return made


def python_folders() -> list[Path]:
    """Where this machine has Python source: the standard library and the installed packages."""
    roots = {Path(path) for path in (*sysconfig.get_paths().values(), *site.getsitepackages())}
    return sorted(path for path in roots if path.name.startswith(("python", "site-", "dist-")) and path.is_dir())


def curve(
    metrics: Sequence[dict[str, Any]], tokens_per_step: int, *, step_s: float | None = None, shared: bool = False
) -> list[dict[str, Any]]:
    """The loss by tokens and seconds of training alone: without compilation, validation and waiting in between.

    Training losses are means over the steps since the last point. Of a run that shared the GPU (`shared`), seconds are
    its steps times `step_s`, or None.
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
                "seconds": round(seconds if not shared else step * step_s, 3) if step_s or not shared else None,
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
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(1, 2)
    own = sorted((record for record in records if record["start"] is None), key=lambda record: record["loss"])
    for index, record in enumerate(own):
        points = [point for point in record["curve"] if point["valid_loss"] is not None and point["step"] > 0]
        for axis, key in zip(axes, ("tokens", "seconds"), strict=True):
            xs, ys = [point[key] for point in points], [point["valid_loss"] for point in points]
            style = "--" if record["arm"].startswith(("dense", "sliding")) else "-"
            label = f"{record['arm']}: {record['loss']:.3f}"
            axis.plot(xs, ys, style, label=label, color=colormaps["tab20"](index % 20), linewidth=1.4)
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
    parser.add_argument("--grace", type=float, default=GRACE_S, help="seconds that runs get to save after the budget")
    parser.add_argument("--measure", metavar="ARM", help="only compile and measure a step; what the study calls")
    parser.add_argument("--steps", type=int, help="of each arm (default: the scale's)")
    parser.add_argument("--work", type=Path, default=Path("runs/study"), help="data and runs")
    parser.add_argument("--out", type=Path, default=Path("runs/results/study"), help="results")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="an archive of results, logs and metrics to write")
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
    if args.measure is not None:
        longer = {arm.name: arm for name in arms for arm in extensions(scale, arms[name])}
        with redirect_stdout(sys.stderr):
            measure_step(arm_config(scale, {**arms, **longer}[args.measure]), args.work / "compile.lock")
        return 0
    study = Study(scale, args.work, args.out, args.minutes, args.grace, args.pack)
    for folder in (study.work, study.out):
        folder.mkdir(parents=True, exist_ok=True)
    # `timeout` sends it: what runs is then stopped, and what there is reported.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        study.run([arms[name] for name in args.arms or arms], args.extend)
    finally:
        signal.signal(signal.SIGTERM, before)
        try:
            study.report()
        finally:
            study.save()
    print(json.dumps({"done": [record["arm"] for record in study.records()], "left": study.queue.left_out}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
