"""`nsa inspect`: a text through a model, as a page or as JSON.

nsa inspect runs/demo --prompt "def main():" -o page.html
"""

from __future__ import annotations

import argparse
import json

from nsa.config import require
from nsa.dtypes import DTYPES
from nsa.files import can_write_in, make_folder, replace_text
from nsa.generate import read_source, require_text, write_out
from nsa.generation.text import where_not_finite
from nsa.inspection.page import write_page
from nsa.inspection.record import inspect_model
from nsa.machine import usable_device
from nsa.progress import LINE_EVERY_S, progress, say
from nsa.train.run_model import load_run


def run(args: argparse.Namespace) -> int:
    require(args.out is not None or args.json is not None, "--out and --json", None, "at least one of the two")
    require(args.out != args.json, "--json", str(args.json), "another file than --out")
    for flag, out in (("--out", args.out), ("--json", args.json)):
        require(out is None or not out.is_dir(), flag, str(out), "the name of a file")
        written = out is not None and str(out) != "-"
        require(not written or can_write_in(out.parent), flag, str(out), "a file in a folder that can be written")
    device = usable_device(args.device)
    text = args.prompt if args.text is None else read_source(args.text, "--text")
    require_text("--prompt" if args.text is None else "--text", text)
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    model, tokenizer = load_run(args.run, device)
    total = model.config.kinds.count("nsa")
    # Where JSON goes to stdout, nothing else does.
    shown = None if str(args.json) == "-" else progress(total, unit="layer", every_s=LINE_EVERY_S)

    def show(layer: int) -> None:
        if shown is not None:
            shown.show(layer, f"of {args.run.resolve().name}")

    try:
        found = inspect_model(
            model, tokenizer, text, top=args.top, max_tokens=args.max_tokens, dtype=dtype, progress=show
        )
    finally:
        if shown is not None:
            shown.close()
    if not all(bool(record.gates.isfinite().all()) for record in found.layers.values()):
        raise ValueError(f"{args.run} gives gates that are not finite: {where_not_finite(model)}")
    if len(found.tokens) == args.max_tokens and len(tokenizer.encode(text)) > args.max_tokens:
        say(f"left out: what follows the first {args.max_tokens:,} tokens (--max-tokens)", error=True)
    if args.out is not None:
        write_page(found, args.out, f"{args.run.resolve().name}: {len(found.tokens):,} tokens")
        say(f"wrote {args.out} ({args.out.stat().st_size / 2**20:.1f} MiB)", error=True)
    if args.json is not None:
        values = json.dumps(found.to_dict()) + "\n"
        if str(args.json) == "-":
            write_out(values)
        else:
            make_folder(args.json.parent)
            replace_text(args.json, values)
    return 0
