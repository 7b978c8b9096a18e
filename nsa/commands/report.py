"""The flags of `nsa report`."""

from __future__ import annotations

import argparse

from nsa.commands.types import path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Draw a run, finished or still going, on one page that needs no network; or compare several."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "examples:\n  nsa report runs/demo\n  nsa report runs/nsa runs/dense -o compare.html"
    parser.add_argument("runs", type=path, nargs="+", metavar="RUN", help="folders that `nsa train` writes")
    default = "(default: report.html in the run; compare.html beside the first)"
    parser.add_argument("-o", "--out", type=path, metavar="PAGE", help=default)
