"""Benchmarks: `nsa bench SUITE`. A suite is a module here with `run`; its rows go through results.py."""

from __future__ import annotations

import argparse
from importlib import import_module


def run(args: argparse.Namespace) -> int:
    status: int = import_module(f"nsa.bench.{args.suite}").run(args)
    return status
