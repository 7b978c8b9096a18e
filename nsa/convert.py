"""`nsa convert`: a dense Transformers model with NSA in place of its attention, and how far the two are apart."""

from __future__ import annotations

import argparse
import shlex
from importlib.util import find_spec
from typing import Any

from nsa.config import require, require_positive_int
from nsa.machine import usable_device
from nsa.train.config import parse_set


def run(args: argparse.Namespace) -> int:
    require(find_spec("transformers") is not None, "transformers", "not installed", "pip install 'nsa[hf]'")
    from nsa.hf.convert import convert_back, convert_folder
    from nsa.hf.distance import DISTANCE_HEADER, logit_distances, text_tokens

    for length in args.lengths:
        require_positive_int("--lengths", length)
    device = str(usable_device(args.device))
    changes: dict[str, Any] = parse_set(args.set)
    if args.recipe == "dense":
        require(not changes, "--set", args.set, "none with --recipe dense")
        convert_back(args.source, args.to)
        print(f"{args.to}: the dense model, with the parameters of {args.source}")
        return 0
    # Before anything is written: the text may be missing.
    tokens = text_tokens(args.source, max(args.lengths), args.text) if args.lengths else None
    c = convert_folder(args.source, args.to, args.recipe, changes)
    exact = {"select": "equal to the dense model up to", "gated": "close to it up to", "full": "close to it up to"}
    print(f"{args.to}: {args.recipe}, {exact[args.recipe]} n_sel * l_sel = {c.n_sel * c.l_sel:,} tokens")
    if tokens is not None:
        found = logit_distances(args.source, args.to, tokens, args.lengths, device=device, dtype=args.dtype)
        print(DISTANCE_HEADER, *found, sep="\n")
        if tokens.shape[1] < max(args.lengths):
            print(f"the text has {tokens.shape[1]:,} tokens: no comparison at longer --lengths")
    length = max(8192, 2 * c.n_sel * c.l_sel)
    flags = f"--config 125m --seq-len {length} --lr 3e-5 --steps 500 --dataset text --data-path DIR"
    print(f"recover longer contexts with:\n  nsa train --init {shlex.quote(str(args.to))} {flags}")
    return 0
