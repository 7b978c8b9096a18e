"""`nsa report`: the page of a run, finished or still going, or of several runs side by side.

nsa report runs/demo
nsa report runs/nsa runs/dense -o compare.html
"""

from __future__ import annotations

import argparse

from nsa.train.report import write_report
from nsa.train.report.compare import write_comparison


def run(args: argparse.Namespace) -> int:
    """Write the page; returns the exit status."""
    if len(args.runs) == 1:
        path = write_report(args.runs[0], args.out)
    else:
        path = write_comparison(args.runs, args.out or args.runs[0].parent / "compare.html")
    print(f"wrote {path}")
    return 0
