"""The flags of `nsa convert`."""

from __future__ import annotations

import argparse

from nsa.commands.types import DTYPE_NAMES, folder, path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Turn a dense Llama, Mistral, Qwen2 or Qwen3 in a Transformers folder into a model with NSA, and print how far "
        "its logits and its perplexity are from the dense model's. Recipes: select has no new parameters and equals "
        "the dense model up to n_sel * l_sel tokens; gated adds a phi that starts as the mean and a gate, for "
        "continued training; full also gives each branch a copy of K/V; dense turns a model of select back."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  nsa convert --from models/llama --to models/llama-nsa\n"
        "  nsa convert --from models/llama --to models/llama-gated --recipe gated --set n_sel=32\n"
        "  nsa convert --from models/llama-nsa --to models/back --recipe dense"
    )
    parser.add_argument("--from", dest="source", type=folder, metavar="DIR", required=True, help="the dense model")
    parser.add_argument("--to", type=path, metavar="DIR", required=True, help="a new folder")
    recipes = ("select", "gated", "full", "dense")
    parser.add_argument("--recipe", choices=recipes, default="select", help="(default: select)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a hyperparameter: n_sel=32")
    compare = parser.add_argument_group("comparison")
    lengths = [512, 1024, 2048, 4096]
    shown = "compare over so many tokens (default: 512 1024 2048 4096; none: do not compare)"
    compare.add_argument("--lengths", type=int, nargs="*", default=lengths, metavar="N", help=shown)
    compare.add_argument("--text", type=path, metavar="FILE", help="the text (default: Python's standard library)")
    compare.add_argument("--device", default="cpu", help="(default: cpu)")
    compare.add_argument("--dtype", choices=DTYPE_NAMES, help="of both models (default: as saved)")
