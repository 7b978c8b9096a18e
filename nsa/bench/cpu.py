"""The suites at sizes that a CPU runs in about a minute: for a machine without a GPU, and to try the rest.

nsa bench cpu --out cpu.csv
"""

from __future__ import annotations

import argparse

from nsa import bench
from nsa.commands.bench import SUITES, add_arguments

CPU_COMMANDS = (
    "attention --branches --heads 4/1/32 --lengths 256 1024 4096",
    "train --preset tiny --seq-len 256 1024 --batch-size 1 --attention nsa dense --steps 5 --warmup 1",
)


def run(args: argparse.Namespace) -> int:
    """`nsa bench cpu`: returns 1 if a result was wrong, else 0."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    status = 0
    for command in CPU_COMMANDS:
        print(f"nsa bench {command} --device cpu", flush=True)
        own = parser.parse_args([*command.split(), "--device", "cpu"])
        own.out, own.commit = args.out, args.commit
        status = max(status, bench.run(own))
    others = sorted(set(SUITES) - {"branches", *(command.split()[0] for command in CPU_COMMANDS)})
    print(f"not in this suite: {', '.join(others)}")
    return status
