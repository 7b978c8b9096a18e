"""The flags of `nsa data`."""

from __future__ import annotations

import argparse

from nsa.commands.types import path
from nsa.data.config import HUB, SOURCES

EXAMPLES = """examples:
  nsa data prepare --source text --path books/ --out data/books
  nsa data prepare --source jsonl --path wiki.jsonl --train-bpe 16384 --out data/wiki
  nsa data prepare --source fineweb_edu --tokenizer tokenizer.json --limit-tokens 1000000000 --out data/fwe
  nsa data prepare --source text --path 'src/**/*.py' --on-bad skip --out data/src
  nsa data check data/books
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Prepare training data. `nsa data COMMAND --help` explains one command."
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    make = commands.add_parser("prepare", help="tokenize a corpus into files that training reads", epilog=EXAMPLES)
    make.description = "Tokenize a corpus into files that training reads."
    make.formatter_class = argparse.RawDescriptionHelpFormatter
    sources = ", ".join(name for name in SOURCES if name not in ("shards", "synthetic"))
    make.add_argument("--source", default="text", help=f"{sources} or {HUB}NAME (default: text)")
    make.add_argument("--path", help="a file, a folder or a pattern such as 'src/**/*.py'")
    make.add_argument("--name", help="the configuration of a data set of the hub")
    make.add_argument("--text-key", default="text", help="the field or column with the text (default: text)")
    make.add_argument("--tokenizer", help="bytes (the default), a tokenizer.json, or a folder with one")
    make.add_argument("--train-bpe", type=int, metavar="N", help="train a BPE of N tokens on this corpus, and use it")
    make.add_argument("--shard-tokens", type=int, default=2**27, help="tokens in a file (default: %(default)s)")
    make.add_argument("--limit-tokens", type=int, help="stop after about so many (default: the whole corpus)")
    make.add_argument("--doc-batch", type=int, default=256, help="documents tokenized at once (default: %(default)s)")
    bad = "a document that cannot be read: stop, or list it in skipped.jsonl and go on (default: %(default)s)"
    make.add_argument("--on-bad", choices=("stop", "skip"), default="stop", help=bad)
    make.add_argument("--out", type=path, required=True, help="the folder to write")
    check = commands.add_parser("check", help="compare a prepared folder, every token of it, with what was written")
    check.add_argument("folder", type=path)
    manifest = "for a folder that an older version wrote: list its files, as they are now, in manifest.json"
    check.add_argument("--write-manifest", action="store_true", help=manifest)
