"""Measures again what `benchmarks/results/h200/` and the README record, on this GPU, the first steps first.

python benchmarks/record.py --list
python benchmarks/record.py --minutes 9 --out rows --commit "$(git rev-parse --short HEAD)" --steps attention host
python benchmarks/record.py --minutes 9 --out rows --baseline ../before --steps compare bits

A step that may not end in time is left out. `compare` and `bits` hold this tree against another one, of `--baseline`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

TREE = Path(__file__).resolve().parent.parent
DENSE = "nsa-triton dense-cudnn dense-fa2"
COMMIT = "--commit {commit}"
LENGTHS = "1024 2048 4096 8192 16384 32768 65536 131072"


class Step(NamedTuple):
    """Commands that belong together; the words after `python`."""

    seconds: int
    commands: tuple[str, ...]

    @property
    def compares(self) -> bool:
        """Whether commands run in the baseline as well: those that name a `{side}`."""
        return any("{side}" in command for command in self.commands)


def attention(heads: str, lengths: str, more: str = "", file: str = "attention") -> str:
    shapes = f"--heads {heads} --lengths {lengths}"
    return f"-m nsa bench attention --cuda-graphs {shapes} --out {{out}}/{file}.csv {COMMIT} {more}"


def train(more: str) -> str:
    return f"-m nsa bench train --preset 125m --attention nsa dense --out {{out}}/train.csv {COMMIT} {more}"


def profile(heads: str, lengths: str, more: str = "") -> str:
    script = f"{TREE}/benchmarks/kernel_profile.py"
    return f"{script} --heads {heads} --lengths {lengths} --out {{out}}/ncu.csv {COMMIT} {more}"


STEPS = {
    "compare": Step(
        150,
        (
            *[attention("64/4/128", "8192 65536", "--impl nsa-triton", "{side}")] * 2,
            "-m nsa bench compare {out}/before.csv {out}/after.csv --bound 0.02",
        ),
    ),
    "bits": Step(
        90,
        (
            f"{TREE}/benchmarks/bits.py --out {{out}}/{{side}}.json",
            f"{TREE}/benchmarks/bits.py --compare {{out}}/before.json {{out}}/after.json",
        ),
    ),
    "attention": Step(
        260,
        (
            attention("64/4/128", LENGTHS, f"--impl {DENSE}"),
            attention("32/8/128 12/2/64", LENGTHS, f"--impl {DENSE}"),
            attention("12/2/64", "2048", f"--batch-size 8 --impl {DENSE}", "attention-batch-8"),
        ),
    ),
    "host": Step(30, ("-m nsa bench host --heads 12/2/64 --lengths 2048 8192 --out {out}/host.csv --commit {commit}",)),
    "train": Step(
        190,
        (
            train("--tokens 16384 --seq-len 2048"),
            train("--tokens 32768 --seq-len 4096 8192 16384 32768"),
            train("--tokens 65536 --seq-len 65536"),
            train("--tokens 16384 --seq-len 2048 --compile --no-cuda-graphs"),
        ),
    ),
    "decode": Step(150, ("-m nsa bench decode --out {out}/decode.csv --commit {commit}",)),
    "generate": Step(90, ("-m nsa bench generate --prefill 65536 --out {out}/generate.csv --commit {commit}",)),
    "profile": Step(
        150,
        (
            profile("64/4/128", "8192 65536"),
            profile("32/8/128 12/2/64", "65536"),
            profile("12/2/64", "2048", "--batch-size 8"),
        ),
    ),
    "tests": Step(590, ("-m pytest tests/gpu -q",)),
    "sanitize": Step(590, ("tests/gpu/sanitize.py",)),
}


def commands(step: Step, out: Path, commit: str, baseline: Path | None) -> list[tuple[Path, list[str]]]:
    """Each command of a step, with the tree in which it runs; before and after alternate."""
    sides = {"after": TREE} if baseline is None else {"before": baseline, "after": TREE}
    found = []
    for command in step.commands:
        for side, tree in sides.items() if "{side}" in command else [("after", TREE)]:
            measured = commit if side == "after" else "baseline"
            found.append((tree, shlex.split(command.format(out=out, side=side, commit=measured))))
    return found


def run(tree: Path, words: list[str], seconds: float) -> str:
    """Run one command in a tree; returns how it ended."""
    print(f"$ python {shlex.join(words)}", flush=True)
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run([sys.executable, *words], cwd=tree, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "stopped: the time was up"
    return "done" if done.returncode == 0 else f"status {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=["attention", "host", "train"])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("rows"), help="the folder for the CSV files")
    parser.add_argument("--commit", default="unknown", help="the commit to record")
    parser.add_argument("--baseline", type=Path, help="a checkout of another commit")
    parser.add_argument("--list", action="store_true", help="only show the commands")
    args = parser.parse_args()
    deadline, out = time.monotonic() + 60 * args.minutes, args.out.resolve()
    if any(STEPS[name].compares for name in args.steps) and args.baseline is None:
        parser.error("--steps compare and bits need --baseline, a checkout of another commit")
    table = Table("step", "seconds", "command", "result")
    results = []
    for name in STEPS if args.list else args.steps:
        started = time.monotonic()
        for tree, words in commands(STEPS[name], out, args.commit, args.baseline):
            left = deadline - time.monotonic()
            if args.list:
                result = "not run"
            elif left < STEPS[name].seconds - (time.monotonic() - started):
                result = f"left out: {left:.0f} s left"
            else:
                out.mkdir(parents=True, exist_ok=True)
                result = run(tree, words, left)
            results.append(result)
            table.add_row(name, str(STEPS[name].seconds), shlex.join(words), result)
    Console(width=200 if not sys.stdout.isatty() else None).print(table)
    return 0 if args.list or all(result == "done" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
