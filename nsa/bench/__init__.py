"""Benchmarks: `nsa bench SUITE`.

The module of a suite has a `SUITE`, which `nsa.bench.runner` runs; that of another command has `run(args)`.
"""

from __future__ import annotations

import argparse
from importlib import import_module

# By suite, its module.
SUITES = {name: name for name in ("attention", "decode", "flash", "generate", "host", "train", "trained")} | {
    "branches": "attention"
}


def run(args: argparse.Namespace) -> int:
    """Run the suite or command `args.suite` and return its exit status."""
    if args.suite in SUITES:
        return run_suite(args)
    status: int = import_module(f"nsa.bench.{args.suite}").run(args)
    return status


def run_suite(args: argparse.Namespace) -> int:
    """Measure the suite `args.suite`; returns 1 if a result was wrong, else 0."""
    status: int = import_module(f"nsa.bench.{SUITES[args.suite]}").SUITE.run(args)
    return status
