"""`nsa train`: the flags, and the run they ask for.

nsa train                                              # a minute or two on two CPU cores
nsa train --attention dense                            # the same with dense attention: the A/B is one flag
nsa train --config 125m --batch-size 8 --steps 2000    # on a GPU: bf16, compiled, CUDA graphs
nsa train --resume runs/tiny-nsa-20261115-120000       # go on; so does the same --out a second time
torchrun --nproc-per-node 8 -m nsa.cli train --config 125m
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nsa import settings
from nsa.config import require
from nsa.model import ATTENTION_KINDS
from nsa.train.boot import describe_difference
from nsa.train.config import DTYPES, TrainConfig, load_config, moved, parse_set
from nsa.train.distributed import Ranks, from_first, ranks
from nsa.train.guards import WATCHDOG, Asked, RunStopped, Watchdog
from nsa.train.loop import Trainer, listen

# Flags that are keys of the config under another name; the others are spelled as their key is.
KEYS = {
    "attention": "model.attention",
    "backend": "model.attn.backend",
    "seq_len": "model.seq_len",
    "dataset": "data.source",
    "data_path": "data.path",
    "tokenizer": "data.tokenizer",
    "pack": "data.pack",
    "on_stall": "data.on_stall",
    "accum_batches": "accum",
}


# How gloo and NCCL say that a process at the other end has ended.
LOST = ("closed by peer", "Connection reset", "remote process exited", "Broken pipe")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a language model. What is not said here comes from the environment (NSA_SEQ_LEN, NSA_BATCH_SIZE, "
        "NSA_ACCUM, NSA_NO_GC, NSA_FWE_*), then from the config."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  nsa train                       a minute or two on two CPU cores\n"
        "  nsa train --attention dense     the same with dense attention\n"
        "  nsa train --config 125m --steps 2000 --batch-size 8 --set model.attn.w=256 --set schedule=wsd\n"
        "  nsa train --resume runs/NAME    go on where that run stopped\n"
        "  torchrun --nproc-per-node 8 -m nsa.cli train --config 1b --parallel fsdp"
    )
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    start = parser.add_argument_group("what to run")
    start.add_argument(
        "--config", "--preset", help="a name in configs/, a YAML file, or the folder of a run like it (default: tiny)"
    )
    start.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config, dotted")
    start.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with the run in this folder, as it was configured"
    )
    start.add_argument("--out", help="the run's folder; goes on with the run in it (default: a new one under runs/)")
    start.add_argument("--diff", type=Path, metavar="RUN", help="show how this start differs from that run's, and stop")
    model = parser.add_argument_group("model")
    model.add_argument(
        "--attention", type=kinds, help=f"{', '.join(ATTENTION_KINDS)}; or one a layer, with commas between them"
    )
    model.add_argument("--seq-len", type=int, help="tokens in a sequence")
    model.add_argument("--backend", help="who computes NSA's branches; a named one never falls back")
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", help="stdlib, synthetic, text, jsonl, parquet, shards, fineweb_edu or hf:NAME")
    data.add_argument("--data-path", help="a file, a folder or a pattern, for the sources that read files")
    data.add_argument("--tokenizer", help="bytes, a tokenizer.json or a folder with one")
    data.add_argument("--pack", **switch, help="documents do not see each other")
    data.add_argument("--on-stall", help="synthetic, retry or abort: when no batch comes for data.stall_timeout_s")
    run = parser.add_argument_group("run")
    run.add_argument(
        "--steps", type=int, help="optimizer steps; fewer than the config's: its warm-up and decay shrink with them"
    )
    run.add_argument("--batch-size", type=int, help="sequences in a batch of one rank")
    run.add_argument("--accum-batches", "--accum", type=int, help="batches in a step")
    run.add_argument("--lr", type=float, help="peak learning rate")
    run.add_argument("--warmup", type=int, help="steps up to the peak")
    run.add_argument("--seed", type=int)
    for flag in ("log", "eval", "sample", "stats", "save"):
        run.add_argument(f"--{flag}-every", type=int, metavar="N", help="steps")
    run.add_argument("--eval-batches", type=int, metavar="N")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    machine.add_argument(
        "--dtype", choices=sorted(DTYPES), help="of products (default: bfloat16 on a GPU, else float32)"
    )
    machine.add_argument("--compile", **switch, help="torch.compile (default: on a GPU)")
    machine.add_argument(
        "--cuda-graphs", **switch, help="(default: on a GPU, where shapes are fixed and ranks are one)"
    )
    machine.add_argument("--gc", **switch, help="activation checkpointing (default: off)")
    machine.add_argument("--parallel", choices=("ddp", "fsdp", "none"), help="(default: ddp under torchrun)")
    guards = parser.add_argument_group("guards")
    guards.add_argument("--min-tokens-per-s", type=float, metavar="N", help="stop, with a profile, if it is slower")
    guards.add_argument(
        "--watchdog-s", type=float, metavar="N", help="seconds without a step before stacks are written"
    )


def kinds(text: str) -> str | list[str]:
    return text.split(",") if "," in text else text


def run(args: argparse.Namespace) -> int:
    config = config_from(args, settings.current())
    if args.diff is not None:
        print(describe_difference(args.diff, config))
        return 0
    if config.device.startswith("cuda"):
        # What little the host computes, batches and their shuffling, would wake a thread on every core.
        torch.set_num_threads(1)
    try:
        with ranks(config.device, config.parallel) as own:
            # A name with the time in it may differ from rank to rank.
            config = replace(config, out=Path(from_first(str(config.out))))
            with listen(own) as signals, telling_of_lost_ranks(own, config.out):
                # Nothing is done yet that would have to be kept.
                with signals.waiting(), starting(config):
                    trainer = Trainer(config, own)
                summary = trainer.train(signals)
            if summary is not None and own.first:
                print(summary)
                print(f'go on with: nsa generate --run {config.out} --prompt "import "')
    except Asked:
        print("[stop] asked to before the first step: nothing was done")
    except RunStopped as stopped:
        print(f"nsa train: stopped: {stopped}", file=sys.stderr)
        return 1
    return 0


def starting(config: TrainConfig) -> Watchdog:
    """For data that is opened and read before the run has a watchdog of its own."""
    return Watchdog(
        config.out / WATCHDOG,
        config.watchdog_s,
        describe=lambda: "the run has not begun: its data is opened, its model made",
        rescue=lambda: "no checkpoint: nothing is learned yet",
    )


@contextmanager
def telling_of_lost_ranks(own: Ranks, out: Path) -> Iterator[None]:
    """Says what to do, and at once: a launcher ends all ranks soon after one is gone."""
    try:
        yield
    except RuntimeError as error:
        if own.size == 1 or not any(word in str(error) for word in LOST):
            raise
        print(
            f"nsa train: another rank is gone; its own words, if it had any, are above. Go on with the same command "
            f"and --out {out}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(1) from error


def config_from(args: argparse.Namespace, env: settings.Settings) -> TrainConfig:
    """The command line, else the environment, else the config's file."""
    own = ("config", "set", "resume", "diff")
    given = {KEYS.get(name, name): value for name, value in vars(args).items() if name not in own and value is not None}
    given |= parse_set(args.set)
    if args.resume is None:
        return load_config(args.config or "tiny", given, env=env)
    require(args.config is None, "--config", args.config, "nothing with --resume, which takes the run's own")
    require(args.resume.is_dir(), "--resume", str(args.resume), "the folder of a run")
    require("out" not in given, "--out", given.get("out"), "nothing with --resume, which goes on in the run's folder")
    # As it was configured: what the environment says now was part of that, or is not meant.
    return load_config(args.resume, moved(args.resume) | given | {"out": str(args.resume)}, env=settings.Settings())
