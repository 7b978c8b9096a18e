"""Measures again what `benchmarks/results/h200/` and the README record, on this GPU, the first steps first.

python benchmarks/record.py --list
python benchmarks/record.py --minutes 9 --out rows --commit "$(git rev-parse --short HEAD)" --steps attention host
python benchmarks/record.py --minutes 9 --out rows --baseline ../before --steps compare bits

A command that may not end in time is left out. `compare` and `bits` hold this tree against that of `--baseline`.
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
FLEX = "nsa-triton dense-cudnn dense-flex"
COMMIT = "--commit {commit}"
LENGTHS = "1024 2048 4096 8192 16384 32768 65536 131072"


class Command(NamedTuple):
    """The words after `python`, and the seconds that they take on a slow machine."""

    seconds: int
    words: str

    @property
    def compares(self) -> bool:
        """Whether it runs in the baseline as well."""
        return "{side}" in self.words


def attention(seconds: int, heads: str, lengths: str, more: str = "", file: str = "attention") -> Command:
    shapes = f"--heads {heads} --lengths {lengths}"
    return Command(seconds, f"-m nsa bench attention {shapes} --out {{out}}/{file}.csv {COMMIT} {more}")


def host(heads: str, lengths: str) -> Command:
    return Command(40, f"-m nsa bench host --heads {heads} --lengths {lengths} --out {{out}}/host.csv {COMMIT}")


def generate(seconds: int, shapes: str) -> Command:
    return Command(seconds, f"-m nsa bench generate {shapes} --out {{out}}/generate.csv {COMMIT}")


def train(seconds: int, more: str) -> Command:
    words = f"-m nsa bench train --preset 125m --attention nsa dense --out {{out}}/train.csv {COMMIT} {more}"
    return Command(seconds, words)


def profile(seconds: int, heads: str, lengths: str, more: str = "") -> Command:
    script = f"{TREE}/benchmarks/kernel_profile.py"
    return Command(seconds, f"{script} --heads {heads} --lengths {lengths} --out {{out}}/ncu.csv {COMMIT} {more}")


BITS = f"{TREE}/benchmarks/bits.py"
STEPS: dict[str, tuple[Command, ...]] = {
    "compare": (
        *[attention(40, "64/4/128", "8192 65536", "--cuda-graphs --impl nsa-triton", "{side}")] * 2,
        Command(10, "-m nsa bench compare {out}/before.csv {out}/after.csv --bound 0.02"),
    ),
    "bits": (
        Command(60, f"{BITS} --out {{out}}/{{side}}.json"),
        Command(10, f"{BITS} --compare {{out}}/before.json {{out}}/after.json"),
    ),
    "attention": (
        attention(150, "64/4/128", LENGTHS, f"--cuda-graphs --impl {DENSE}"),
        attention(150, "32/8/128 12/2/64", LENGTHS, f"--cuda-graphs --impl {DENSE}"),
        attention(25, "12/2/64", "2048", f"--batch-size 8 --cuda-graphs --impl {DENSE}", "attention-batch-8"),
        attention(35, "64/4/128", "8192", "--impl nsa-triton dense-cudnn"),
        attention(80, "64/4/128", "8192 32768 65536", f"--cuda-graphs --impl {FLEX}", "attention-flex"),
    ),
    "host": (host("12/2/64", "2048 8192"), host("64/4/128", "8192")),
    "train": (
        train(150, "--tokens 16384 --seq-len 2048 --compile --no-cuda-graphs"),
        train(60, "--tokens 16384 --seq-len 2048"),
        train(240, "--tokens 32768 --seq-len 4096 8192 16384 32768"),
        train(120, "--tokens 65536 --seq-len 65536"),
    ),
    "decode": (Command(150, f"-m nsa bench decode --out {{out}}/decode.csv {COMMIT}"),),
    "generate": (generate(150, "--batch-size 1 32 --lengths 2048 8192 32768 131072 --prefill 65536"),),
    "profile": (
        profile(90, "64/4/128", "8192 65536 131072"),
        profile(60, "32/8/128 12/2/64", "65536"),
        profile(30, "12/2/64", "2048", "--batch-size 8"),
    ),
    # The machine code too: the GPU's machine may have another Triton than CI.
    "tests": (Command(590, "-m pytest tests/gpu tests/kernels/test_gluon_compile.py -q"),),
    "sanitize": (Command(590, "tests/gpu/sanitize.py"),),
}


def commands(step: str, out: Path, commit: str, baseline: Path | None) -> list[tuple[Path, int, list[str]]]:
    """Each command of a step, with the tree in which it runs and its seconds; before and after alternate."""
    sides = {"after": TREE} if baseline is None else {"before": baseline, "after": TREE}
    found = []
    for command in STEPS[step]:
        for side, tree in sides.items() if command.compares else [("after", TREE)]:
            measured = commit if side == "after" else "baseline"
            words = command.words.format(out=out, side=side, commit=measured)
            found.append((tree, command.seconds, shlex.split(words)))
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
    parser.add_argument("--baseline", type=lambda folder: Path(folder).resolve(), help="a checkout of another commit")
    parser.add_argument("--list", action="store_true", help="only show the commands")
    args = parser.parse_args()
    deadline, out = time.monotonic() + 60 * args.minutes, args.out.resolve()
    if args.baseline is None and any(command.compares for name in args.steps for command in STEPS[name]):
        parser.error("--steps compare and bits need --baseline, a checkout of another commit")
    table = Table("step", "seconds", "command", "result")
    results = []
    for name in STEPS if args.list else args.steps:
        for tree, seconds, words in commands(name, out, args.commit, args.baseline):
            left = deadline - time.monotonic()
            if args.list:
                result = "not run"
            elif left < seconds:
                result = f"left out: {left:.0f} s left"
            else:
                out.mkdir(parents=True, exist_ok=True)
                result = run(tree, words, left)
            results.append(result)
            table.add_row(name, str(seconds), shlex.join(words), result)
    Console(width=200 if not sys.stdout.isatty() else None).print(table)
    return 0 if args.list or all(result == "done" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
