"""Benchmarks: `nsa bench SUITE`. A suite is a module with `add_arguments` and `run`; its rows go through results.py."""

from __future__ import annotations

import argparse

from nsa.bench import attention, flash, plot, train, trained, tune

SUITES = {
    "train": (train, "throughput of the training step"),
    "attention": (attention, "attention alone, whole and by branch, beside dense"),
    "trained": (trained, "attention alone on what a trained model gives it, beside noise"),
    "flash": (flash, "where FlashAttention wins, and the thresholds file from that"),
    "tune": (tune, "the kernels' tiles, and write the fastest into a file"),
    "plot": (plot, "draw what the others measured"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure, and draw what was measured. `nsa bench SUITE --help` explains one suite."
    parser.epilog = "example: nsa bench train --preset 125m --seq-len 2048 --batch-size 8"
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, (module, summary) in SUITES.items():
        module.add_arguments(suites.add_parser(name, help=summary))


def run(args: argparse.Namespace) -> int:
    module, _ = SUITES[args.suite]
    return module.run(args)
