"""The flags of `nsa generate`."""

from __future__ import annotations

import argparse

from nsa.commands.types import add_device_arguments, folder, path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Continue prompts with a model that `nsa train` wrote. Text goes to stdout, speeds to stderr."
    parser.epilog = 'example: nsa generate --run runs/tiny-nsa --prompt "def main(" --temperature 0.8 --top-k 40'
    parser.add_argument("--run", type=folder, help="the run's folder (default: the newest under runs/)")
    add_device_arguments(parser, "of the model (default: as saved)")

    prompts = parser.add_argument_group("prompts").add_mutually_exclusive_group()
    prompt = "text to continue; repeat for a batch (default: 'def ')"
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help=prompt)
    file = "one prompt, all of it; repeat for a batch; -: stdin"
    prompts.add_argument("--prompt-file", action="append", metavar="FILE", help=file)
    prompts.add_argument("--prompts", metavar="FILE", help="a batch, one prompt per line; -: stdin")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.8, help="0: greedy (default: 0.8)")
    sampling.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    sampling.add_argument("--top-p", type=float, metavar="P", help="sample from the most likely tokens that sum to P")
    min_p = "sample from tokens at least P times as likely as the likeliest"
    sampling.add_argument("--min-p", type=float, metavar="P", help=min_p)
    penalty = "above 1: make tokens seen before less likely"
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help=penalty)
    sampling.add_argument("--seed", type=int, default=0, help="row b of a batch draws from seed + b")

    end = parser.add_argument_group("length")
    end.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="per prompt (default: 200)")
    end.add_argument("--max-len", type=int, metavar="N", help="end a row at N tokens, its prompt included")
    end.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    end.add_argument("--ignore-end", action="store_true", help="go on after the token that ends a document")

    speed = parser.add_argument_group("speed")
    lookup = "speculate up to N tokens from the text so far; 0: off"
    speed.add_argument("--prompt-lookup", type=int, default=0, metavar="N", help=lookup)
    speed.add_argument("--lookup-ngram", type=int, default=3, metavar="N", help="tokens that must repeat (default: 3)")
    speed.add_argument("--prefill-chunk", type=int, default=8192, metavar="N", help="prompt tokens per prefill step")
    speed.add_argument(
        "--cuda-graph", action=argparse.BooleanOptionalAction, default=True, help="on a GPU, replay a step as a graph"
    )
    caches = parser.add_argument_group("caches")
    caches.add_argument("--save-cache", type=path, metavar="FILE", help="save the processed prompts")
    caches.add_argument("--load-cache", type=path, metavar="FILE", help="start from saved prompts; give new ones whole")
    caches.add_argument("--quantize", choices=("fp8",), help="store keys and values in fp8")
    caches.add_argument("--page-size", type=int, metavar="N", help="paged caches with N tokens per page")
    parser.add_argument("--hide-prompt", action="store_true", help="print the new text alone")
