"""Benchmarks: `nsa bench SUITE`.

The module of a suite has a `SUITE`, which `nsa.bench.runner` runs; that of another command has `run(args)`.
"""

from __future__ import annotations

import argparse
from importlib import import_module

# By suite, its module.
SUITES = {name: name for name in ("attention", "decode", "flash", "host", "train", "trained")} | {
    "branches": "attention"
}


def run(args: argparse.Namespace) -> int:
    """Run the suite or command `args.suite` and return its exit status."""
    module = import_module(f"nsa.bench.{SUITES.get(args.suite, args.suite)}")
    status: int = module.SUITE.run(args) if args.suite in SUITES else module.run(args)
    return status
