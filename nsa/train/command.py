"""`nsa train`: from the flags to the run.

nsa train                                              # a minute or two on two CPU cores
nsa train --attention dense                            # the same with dense attention: the A/B is one flag
nsa train --config 125m --batch-size 8 --steps 2000    # on a GPU: bf16, compiled, CUDA graphs
nsa train --resume runs/tiny-nsa-20261115-120000       # go on; so does the same --out a second time
torchrun --nproc-per-node 8 -m nsa train --config 125m
"""

from __future__ import annotations

import argparse
import sys

from nsa import settings
from nsa.commands.train import KEYS, OTHERS
from nsa.config import require
from nsa.train.config import TrainConfig, load_config, moved, parse_set
from nsa.train.rank_log import one_voice
from nsa.train.run_folder import require_checkpoint


def run(args: argparse.Namespace) -> int:
    if args.ddp is not None and settings.first_on_machine():
        note = "is no longer needed: under torchrun ddp is the default, and --parallel chooses another"
        print(f"nsa train: --ddp {args.ddp} {note}", file=sys.stderr)
    with one_voice():
        config = config_from(args, settings.current())
    # Only now: what is wrong with flags and config was reported without waiting for torch.
    if args.diff is not None:
        from nsa.train.boot import describe_difference

        print(describe_difference(args.diff, config))
        return 0
    from nsa.train.launch import launch

    return launch(config)


def config_from(args: argparse.Namespace, env: settings.Settings) -> TrainConfig:
    """The command line, else the environment, else the config's file."""
    said = {name: value for name, value in vars(args).items() if name not in OTHERS and value is not None}
    given = {KEYS.get(name, name): value for name, value in said.items()} | parse_set(args.set)
    if args.resume is None:
        return load_config("tiny" if args.config is None else args.config, given, env=env)
    require(args.config is None, "--config", args.config, "nothing with --resume, which takes the run's own")
    require(args.resume.is_dir(), "--resume", str(args.resume), "the folder of a run")
    require(
        "out" not in given, "--out", str(given.get("out")), "nothing with --resume, which goes on in the run's folder"
    )
    require_checkpoint(args.resume, "--resume")
    # As it was configured: what the environment says now was part of that, or is not meant.
    return load_config(args.resume, moved(args.resume) | given | {"out": str(args.resume)}, env=settings.Settings())
