"""Tokenize a corpus once: files of tokens that training maps into memory.

nsa data prepare --source text --path books/ --out data/books
nsa data check data/books
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from nsa.config import require, require_positive_int
from nsa.data.config import DataConfig, Split
from nsa.data.documents import VALID_EVERY, Documents, IndexedDocuments
from nsa.data.loader import open_documents
from nsa.data.pools import split_texts
from nsa.data.shards import SUFFIX, Shard, ShardWriter
from nsa.data.tokenizer import Tokenizer, load_tokenizer, train_bpe

# Characters of the training documents that a BPE is trained on: more makes it no better.
BPE_CHARACTERS = 100_000_000

# Seconds between two lines where nobody sees a bar.
LINE_EVERY = 10.0

SPLITS: tuple[Split, ...] = get_args(Split)


def prepare(
    config: DataConfig,
    out: Path,
    *,
    bpe_vocab_size: int | None = None,
    shard_tokens: int = 2**27,
    limit_tokens: int | None = None,
) -> dict[Split, ShardWriter]:
    """Write the documents of `config` into `out`, in one pass over them; a BPE of their own takes a part of another."""
    require(config.source not in ("shards", "synthetic"), "source", config.source, "a source of text")
    require(not list(out.glob(f"*{SUFFIX}")), "out", str(out), f"a folder without {SUFFIX} files")
    require_positive_int("shard_tokens", shard_tokens)
    documents = open_documents(config)
    tokenizer = load_tokenizer(config.tokenizer or "bytes")
    if bpe_vocab_size is not None:
        require(config.tokenizer is None, "tokenizer", config.tokenizer, "none, where a BPE is trained")
        print(f"training a BPE of {bpe_vocab_size:,} tokens on {documents.name}", flush=True)
        tokenizer = train_bpe(training_texts(documents), bpe_vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out)
    writers = {split: ShardWriter(out, split, tokenizer, shard_tokens) for split in SPLITS}
    try:
        write(documents, tokenizer, writers, doc_batch=config.doc_batch, limit_tokens=limit_tokens)
        found = sum(writer.tokens for writer in writers.values())
        require(found > 0, documents.name, "0 tokens", "a corpus with at least one document that is not empty")
        for split, writer in writers.items():
            require(
                writer.tokens > 0,
                f"the {split} split of {documents.name}",
                "0 tokens",
                f"more or longer documents: one in {VALID_EVERY} is for validation, and of fewer than {VALID_EVERY} "
                "the end of each",
            )
        for writer in writers.values():
            writer.publish()
    finally:
        for writer in writers.values():
            writer.discard()
    return writers


def write(
    documents: Documents,
    tokenizer: Tokenizer,
    writers: dict[Split, ShardWriter],
    *,
    doc_batch: int,
    limit_tokens: int | None,
) -> None:
    """Up to the limit; and beyond it one chunk's documents for a split that has none, without which no run starts."""
    total = documents.n_chunks if isinstance(documents, IndexedDocuments) else None
    shown = show_progress(total)
    try:
        # The order does not matter: training shuffles the windows.
        wanted = writers
        for done, chunk in enumerate(documents.chunks(0, 0, 0, None), 1):
            for split, writer in wanted.items():
                texts = split_texts(chunk, split, few=documents.few)
                for begin in range(0, len(texts), doc_batch):
                    writer.add(tokenizer.encode_documents(texts[begin : begin + doc_batch]))
            tokens = sum(writer.tokens for writer in writers.values())
            shown.show(done, f"{tokens:,} tokens")
            if limit_tokens is not None and tokens >= limit_tokens:
                wanted = {split: writer for split, writer in writers.items() if not writer.tokens}
                if not wanted:
                    return
    finally:
        shown.close()


def training_texts(documents: Documents) -> Iterator[str]:
    seen = 0
    for chunk in documents.chunks(0, 0, 0, None):
        for text in split_texts(chunk, "train", few=documents.few):
            yield text
            seen += len(text)
            if seen >= BPE_CHARACTERS:
                return


class Lines:
    """Now and then a line."""

    def __init__(self, total: int | None) -> None:
        self.total, self.next = total, time.monotonic() + LINE_EVERY

    def show(self, done: int, text: str) -> None:
        if done == self.total or time.monotonic() >= self.next:
            self.next = time.monotonic() + LINE_EVERY
            print(f"{done:,}{f' of {self.total:,}' if self.total else ''} chunks, {text}", flush=True)

    def close(self) -> None:
        """Nothing to put away."""


class Bar:
    def __init__(self, total: int | None) -> None:
        rich = import_module("rich.progress")
        self.bar: Any = rich.Progress(
            rich.BarColumn(),
            rich.TaskProgressColumn(),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
            rich.TextColumn("{task.description}"),
        )
        self.task = self.bar.add_task("", total=total)
        self.bar.start()

    def show(self, done: int, text: str) -> None:
        self.bar.update(self.task, completed=done, description=text)

    def close(self) -> None:
        self.bar.stop()


def show_progress(total: int | None) -> Lines | Bar:
    return Bar(total) if find_spec("rich") is not None and sys.stdout.isatty() else Lines(total)


def run(args: argparse.Namespace) -> int:
    return run_check(args.folder) if args.data_command == "check" else run_prepare(args)


def run_prepare(args: argparse.Namespace) -> int:
    config = DataConfig(
        source=args.source,
        path=args.path,
        name=args.name,
        tokenizer=args.tokenizer,
        text_key=args.text_key,
        doc_batch=args.doc_batch,
    )
    if args.limit_tokens is not None:
        require_positive_int("--limit-tokens", args.limit_tokens)
    writers = prepare(
        config,
        args.out,
        bpe_vocab_size=args.train_bpe,
        shard_tokens=args.shard_tokens,
        limit_tokens=args.limit_tokens,
    )
    for split, writer in writers.items():
        print(f"{split}: {writer.documents:,} documents, {writer.tokens:,} tokens, {len(writer.paths)} files")
    vocab_size = writers["train"].vocab_size
    # A window stays within its file, and needs one token more than it scores.
    longest = min(writer.longest for writer in writers.values()) - 1
    print(
        f"go on with: nsa train --set data.source=shards --set data.path={args.out} "
        f"(model.vocab_size: at least {vocab_size}, model.seq_len: at most {longest})"
    )
    counts = {split: {"documents": w.documents, "tokens": w.tokens} for split, w in writers.items()}
    print(json.dumps({"out": str(args.out), "vocab_size": vocab_size, **counts}))
    return 0


def run_check(folder: Path) -> int:
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    require(bool(paths), "folder", str(folder), f"a folder with {SUFFIX} files")
    tokenizer = load_tokenizer(folder)
    for path in paths:
        shard = Shard(path)
        shard.check_tokenizer(tokenizer)
        shard.check_tokens()
        print(f"{path.name}: {shard.header.documents:,} documents, {shard.header.tokens:,} tokens, intact")
    return 0
