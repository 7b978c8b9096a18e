"""The flags of `nsa generate`."""

from __future__ import annotations

import argparse

from nsa.commands.types import path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Continue a prompt with a model that `nsa train` wrote."
    parser.epilog = 'example: nsa generate --run runs/tiny-nsa --prompt "def main(" --temperature 0.8 --top-k 40'
    parser.add_argument("--run", type=path, help="the run's folder (default: the newest under runs/)")
    parser.add_argument(
        "--prompt", action="append", help="text to continue; may be given several times (default: 'def ')"
    )
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token")
    parser.add_argument("--top-k", type=int, help="sample among the k most likely tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
