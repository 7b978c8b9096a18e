"""The flags of `nsa plan`."""

from __future__ import annotations

import argparse

from nsa.commands.types import add_config_arguments, folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Memory, step time, total time and cost of a run, from the model and from measured rates."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  nsa plan --config 125m --gpu H200 --price 2.0\n"
        "  nsa plan --config 1b --gpu H200 H100 --gpus 8 --set parallel=fsdp --set gc=true\n\n"
        "The last line is the same as JSON."
    )
    add_config_arguments(parser, default="125m")
    parser.add_argument("--gpu", nargs="+", default=["H200"], help="such as H200 or A100, or several (default: H200)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="how many of them (default: %(default)s)")
    parser.add_argument("--price", type=float, help="of one GPU for an hour (default: no cost is shown)")
    parser.add_argument("--results", type=folder, help="the folder of measurements (default: this checkout's)")
