"""Benchmarks: `nsa bench SUITE`. Each name of `nsa.commands.bench` has a module here with `run(args)`."""

from __future__ import annotations

import argparse
from importlib import import_module


def run(args: argparse.Namespace) -> int:
    """Run the suite or command `args.suite` and return its exit status."""
    module = "attention" if args.suite == "branches" else args.suite
    status: int = import_module(f"nsa.bench.{module}").run(args)
    return status
