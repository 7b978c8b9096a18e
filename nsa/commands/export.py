"""The flags of `nsa export`."""

from __future__ import annotations

import argparse

from nsa.commands.types import DTYPE_NAMES, folder, path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a trained model as a Transformers folder: safetensors, config, tokenizer, generation config. NSA "
        "becomes NSALlamaForCausalLM (import nsa.hf loads it), dense attention LlamaForCausalLM."
    )
    parser.epilog = "example: nsa export runs/demo --to models/demo --dtype bfloat16"
    parser.add_argument("run", type=folder, metavar="RUN", help="the run's folder")
    parser.add_argument("--to", type=path, metavar="DIR", required=True, help="a new folder")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="of the parameters (default: as saved)")
