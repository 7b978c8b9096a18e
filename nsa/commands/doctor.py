"""The flags of `nsa doctor`."""

from __future__ import annotations

import argparse

from nsa.commands.types import DTYPE_NAMES, add_config_arguments, path, set_help

# The default shape to route: a 125M model's.
SHAPE = {"batch": 8, "seq_len": 2048, "heads": 12, "groups": 2, "d_k": 64, "d_v": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    set_help(
        parser,
        "Report versions, settings, which backend runs a shape, and whether every backend is right. The exit status is "
        "0 only if every backend agrees with the reference, with --probe every library passes, and with --config this "
        "machine is ready for the run: it has the run's device, no debug mode is on, and a step is not ten times "
        "slower than planned.",
        "nsa doctor",
        "nsa doctor --seq-len 65536 --heads 64 --groups 4 --d-k 192 --d-v 128 --device cuda",
        "nsa doctor --setting force_parity=on --json | tail -1",
        "nsa doctor --config 125m --set batch_size=16     is this machine ready for that run?",
    )
    shape = parser.add_argument_group("the shape to route (default: a 125M model's, or the config's)")
    for name, default in SHAPE.items():
        shape.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"default: {default}")
    shape.add_argument("--dtype", choices=DTYPE_NAMES, help="default: bfloat16 on cuda, float32 elsewhere")
    shape.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add_config_arguments(parser.add_argument_group("a planned run: is this machine ready for it?"))
    group = parser.add_argument_group("settings to try, over the environment, which other commands read alone")
    group.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    group.add_argument("--settings-file", metavar="FILE", help="a JSON object of settings")
    flash = parser.add_argument_group("FlashAttention")
    flash.add_argument("--probe", action="store_true", help="probe its libraries again, each in a child process")
    flash.add_argument("--repro", type=path, metavar="FILE", help="probe, and write the first failure as a script")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on the last line")
