"""The flags of `nsa inspect`."""

from __future__ import annotations

import argparse

from nsa.commands.types import add_device_arguments, folder, path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what a trained NSA model attends to in a text: selected blocks, window, compressed attention and gates "
        "of every token, on one page that needs no network."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  nsa inspect runs/demo --text nsa/attention.py -o page.html\n"
        '  nsa inspect runs/demo --prompt "def main():" --json - | python -m json.tool'
    )
    parser.add_argument("run", type=folder, metavar="RUN", help="the folder of a run, or of one of its checkpoints")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", help="a text file; -: stdin")
    source.add_argument("--prompt", metavar="TEXT", help="the text itself")
    parser.add_argument("-o", "--out", type=path, metavar="PAGE", help="write the page here")
    parser.add_argument("--json", type=path, metavar="FILE", help="write everything as JSON; -: stdout")
    parser.add_argument("--max-tokens", type=int, default=32768, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--top", type=int, default=4, metavar="N", help="compression blocks per token (default: 4)")
    add_device_arguments(parser, "of matmuls (default: as saved)")
