"""`nsa train`: flags to config, config to run. `nsa.commands.train` has the flags, with examples."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nsa import settings
from nsa.commands.train import CONFIG_KEYS, OTHERS
from nsa.config import require
from nsa.model.config import LMConfig
from nsa.progress import say, warn_on_first_rank
from nsa.train.config import TrainConfig, load_config, moved, parse_set
from nsa.train.run_folder import require_checkpoint


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: The parsed flags of `nsa train`.

    Returns:
        The exit status.

    Raises:
        ValueError: A flag or the config has a wrong value.
    """
    if args.ddp is not None and settings.first_on_machine():
        note = "is no longer needed: under torchrun ddp is the default, and --parallel chooses another"
        say(f"nsa train: --ddp {args.ddp} {note}", error=True)
    with warn_on_first_rank():
        config = config_from(args, settings.current())
    # Imports torch, after errors in flags and config were reported.
    if args.diff is not None:
        from nsa.train.run_info import describe_difference

        print(describe_difference(args.diff, config))
        return 0
    from nsa.train.loop import launch

    return launch(config)


def config_from(args: argparse.Namespace, env: settings.Settings) -> TrainConfig:
    """The config: the command line beats the environment, which beats the file."""
    given = {name: value for name, value in vars(args).items() if name not in OTHERS and value is not None}
    given = {CONFIG_KEYS.get(name, name): value for name, value in given.items()} | parse_set(args.set)
    if args.resume is None:
        given = (init_keys(args.init) if args.init is not None else {}) | given
        return load_config("tiny" if args.config is None else args.config, given, env=env)
    require(args.init is None, "--init", str(args.init), "none with --resume, which starts from a checkpoint")
    require(args.config is None, "--config", args.config, "none with --resume, which uses the run's own config")
    require(args.resume.is_dir(), "--resume", str(args.resume), "the folder of a run")
    require("out" not in given, "--out", str(given.get("out")), "none with --resume, which writes to the run's folder")
    require_checkpoint(args.resume, "--resume")
    # As the run was configured, whatever the environment says now.
    return load_config(args.resume, moved(args.resume) | given | {"out": str(args.resume)}, env=settings.Settings())


def init_keys(folder: Path) -> dict[str, Any]:
    """The keys of a config that come from a Transformers folder, a run or its export: the model, but for its length,
    and the tokenizer."""
    # These import torch.
    from nsa.model.checkpoint import MODEL_CONFIG, name_in_errors, read_model_values
    from nsa.model.llama import CONFIG_FILE, lm_config, read_fields

    names: Iterable[str] = ("vocab_size", "n_layers", "hidden", "attention", "tie_embeddings", "norm_eps")
    if (folder / MODEL_CONFIG).is_file() and not (folder / CONFIG_FILE).is_file():
        with name_in_errors(folder / MODEL_CONFIG):
            model = LMConfig.from_dict(read_model_values(folder)).to_dict()
        names = model.keys() - {"attn", "seq_len"}
    else:
        model = lm_config(read_fields(folder), seq_len=1).to_dict()
    attn = {f"model.attn.{name}": value for name, value in model["attn"].items() if name not in ("backend", "strict")}
    found = {"init": str(folder), "data.tokenizer": str(folder), **{f"model.{name}": model[name] for name in names}}
    return found | attn
