"""The flags of `nsa train`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from nsa.commands.types import add_config_arguments, add_device_arguments, folder, path, set_help
from nsa.model.config import ATTENTION_KINDS
from nsa.train.config import TrainConfig
from nsa.train.keys import ABSENT, ALIASES, keys_of

# Flags whose key of the config has another name.
CONFIG_KEYS = {
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

# Flags that are not keys of the config.
OTHERS = ("config", "set", "resume", "init", "diff", "ddp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `nsa train`.

    Args:
        parser: What parses them for `nsa.train.run`.
    """
    set_help(
        parser,
        "Train a language model. What is not given here comes from the environment (NSA_SEQ_LEN, NSA_BATCH_SIZE, "
        "NSA_ACCUM, NSA_NO_GC, NSA_FWE_*), then from the config.",
        "nsa train                       a minute or two on two CPU cores",
        "nsa train --attention dense     the same with dense attention",
        "nsa train --config 125m --steps 2000 --batch-size 8 --set model.attn.w=256 --set schedule=wsd",
        "nsa train --resume runs/NAME    resume that run",
        "nsa train --init models/NAME    start from a model of `nsa export` or `nsa convert`",
        "torchrun --nproc-per-node 8 -m nsa train --config 1b --parallel fsdp",
    )
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    start = parser.add_argument_group("what to run")
    add_config_arguments(start, names=("--config", "--preset"))
    start.add_argument("--resume", type=path, metavar="RUN", help="resume the run in this folder, with its own config")
    start.add_argument("--out", type=path, help="the run's folder; resumes a run in it (default: new, under runs/)")
    start.add_argument("--init", type=folder, metavar="DIR", help="start from the model and tokenizer in DIR")
    start.add_argument("--diff", type=path, metavar="RUN", help="show how this start differs from that run's, and stop")
    model = parser.add_argument_group("model")
    model.add_argument("--attention", type=kinds, help=f"{', '.join(ATTENTION_KINDS)}; or one per layer, with commas")
    model.add_argument("--seq-len", type=int, help="tokens in a sequence")
    model.add_argument("--backend", help="the backend of NSA's branches; a named one never falls back")
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", help="stdlib, synthetic, text, jsonl, parquet, shards, fineweb_edu or hf:NAME")
    data.add_argument("--data-path", help="a file, a folder or a pattern, for the sources that read files")
    data.add_argument("--tokenizer", help="bytes, a tokenizer.json or a folder with one")
    data.add_argument("--pack", **switch, help="documents do not attend to each other")
    data.add_argument("--on-stall", help="synthetic, retry or abort: when no batch comes for data.stall_timeout_s")
    run = parser.add_argument_group("run")
    shorter = "with fewer than the config's, its warm-up and decay shrink in proportion"
    run.add_argument("--steps", type=int, help=f"optimizer steps; {shorter}")
    run.add_argument("--batch-size", type=int, help="sequences in a batch of one rank")
    run.add_argument("--accum-batches", "--accum", type=int, help="batches per step")
    run.add_argument("--lr", type=float, help="peak learning rate")
    run.add_argument("--warmup", type=int, help="steps up to the peak")
    run.add_argument("--seed", type=int)
    for flag in ("log", "eval", "sample", "stats", "save"):
        run.add_argument(f"--{flag}-every", type=int, metavar="N", help="steps")
    run.add_argument("--eval-batches", type=int, metavar="N")
    machine = parser.add_argument_group("machine")
    add_device_arguments(machine, "of matmuls (default: bfloat16 on a GPU, else float32)")
    machine.add_argument("--compile", **switch, help="torch.compile (default: on a GPU)")
    machine.add_argument("--cuda-graphs", **switch, help="(default: on a GPU, with fixed shapes and one rank)")
    machine.add_argument("--gc", **switch, help="activation checkpointing (default: off)")
    machine.add_argument("--parallel", choices=("ddp", "fsdp", "none"), help="(default: ddp under torchrun)")
    # Accepted from the scripts of an older trainer.
    machine.add_argument("--ddp", nargs="?", const="1", choices=("0", "1"), help=argparse.SUPPRESS)
    # Else taken for an abbreviation of --save-every.
    machine.add_argument("--save", type=replaced_by_out, help=argparse.SUPPRESS)
    guards = parser.add_argument_group("guards")
    slowest = "stop, with a profile, below this speed; 0: never (default: a tenth of what `nsa plan` has for this GPU)"
    guards.add_argument("--min-tokens-per-s", type=float, metavar="N", help=slowest)
    guards.add_argument("--watchdog-s", type=float, metavar="N", help="seconds without a step before it is reported")


def replaced_by_out(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError("use --out")


def kinds(text: str) -> str | list[str]:
    return text.split(",") if "," in text else text


def suggestion(name: str, flags: Sequence[str]) -> str | None:
    """A hint for an unknown flag `--name` that another trainer has; `flags`: those that exist."""
    leaf = name.replace("-", "_")
    if leaf == "model":
        return "use --config for its size, --init for its parameters"
    if leaf in ABSENT:
        return f"nothing replaces it: {ABSENT[leaf]}"
    key = ALIASES.get(leaf) or CONFIG_KEYS.get(leaf) or (leaf if leaf in keys_of(TrainConfig) else None)
    if key is None:
        return None
    first = key.replace(",", " ").split()[0]
    flag = f"--{next((own for own, meant in CONFIG_KEYS.items() if meant == first), first)}".replace("_", "-")
    return f"use {flag}" if flag in flags else f"use --set {first}=VALUE"
