"""Benchmarks: `nsa bench SUITE`. A suite is a module here with `run(args)`; `results.py` writes its rows."""

from __future__ import annotations

import argparse
from importlib import import_module


def run(args: argparse.Namespace) -> int:
    """Run the suite `args.suite` and return its exit status."""
    status: int = import_module(f"nsa.bench.{args.suite}").run(args)
    return status
