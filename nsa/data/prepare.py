"""Tokenize a corpus once, into files of tokens that training reads.

nsa data prepare --source text --path books/ --out data/books
nsa data check data/books
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, get_args

from nsa.config import require, require_positive_int
from nsa.data.config import DataConfig, Split
from nsa.data.documents import VALID_EVERY, Documents, IndexedDocuments, OnBad, stop
from nsa.data.files import aside, locked
from nsa.data.loader import open_documents
from nsa.data.manifest import MANIFEST, SUFFIX, Manifest
from nsa.data.pools import split_texts
from nsa.data.shards import Shard, ShardWriter, open_shards
from nsa.data.tokenizer import FILE, Tokenizer, check_bpe_vocabulary, load_tokenizer, train_bpe
from nsa.files import replace_text

# Characters of the training documents that a BPE is trained on: more makes it no better.
BPE_CHARACTERS = 100_000_000

# Seconds between two lines where nobody sees a bar.
LINE_EVERY = 10.0

SPLITS: tuple[Split, ...] = get_args(Split)

# The documents that `--on-bad skip` left out, one JSON object per line.
SKIPPED = "skipped.jsonl"

# What `nsa train` without a config trains at.
DEFAULT_SEQ_LEN = 512


class Skipped:
    """`on_bad` for `prepare`: leaves documents out and remembers them."""

    def __init__(self) -> None:
        # Where: what is wrong, and how many documents. A document that is read twice is one.
        self.found: dict[str, tuple[str, int]] = {}

    def __call__(self, where: str, problem: str, documents: int) -> None:
        self.found[where] = problem, documents

    def __len__(self) -> int:
        return sum(documents for _, documents in self.found.values())

    def __str__(self) -> str:
        """For the end of a message."""
        if not self.found:
            return ""
        where, (problem, _) = next(iter(self.found.items()))
        return f" ({len(self):,} documents were skipped; the first: {where} {problem})"

    def write(self, path: Path) -> None:
        rows = [{"document": where, "problem": what, "documents": n} for where, (what, n) in self.found.items()]
        replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def prepare(
    config: DataConfig,
    out: Path,
    *,
    bpe_vocab_size: int | None = None,
    shard_tokens: int = 2**27,
    limit_tokens: int | None = None,
    on_bad: OnBad = stop,
) -> dict[Split, ShardWriter]:
    """Write the documents of `config` into `out`, in one pass over them; a BPE of their own takes a part of another.

    Args:
        config: where the documents come from, and the tokenizer.
        out: a folder without shards. After an error nothing is left in it but its lock.
        bpe_vocab_size: train a BPE of so many tokens.
        shard_tokens: tokens per file, about.
        limit_tokens: stop after about so many.
        on_bad: called with each document that cannot be read. By default that is an error.

    Returns:
        What was written, by split.

    Raises:
        ValueError: a wrong argument, a bad document, a split without tokens, or a folder that another process writes.
    """
    require(config.source not in ("shards", "synthetic"), "source", config.source, "a source of text")
    require_positive_int("shard_tokens", shard_tokens)
    if limit_tokens is not None:
        require_positive_int("limit_tokens", limit_tokens)
    if bpe_vocab_size is not None:
        require(config.tokenizer is None, "tokenizer", config.tokenizer, "none, where a BPE is trained")
        check_bpe_vocabulary("bpe_vocab_size", bpe_vocab_size)
    require_no_shards(out)
    documents = open_documents(config, on_bad)
    tokenizer = load_tokenizer(config.tokenizer or "bytes")
    with locked(out, "out"):
        # Again: another process may have written some before it released the lock.
        require_no_shards(out)
        remove_leftovers(out)
        if bpe_vocab_size is not None:
            print(f"training a BPE of {bpe_vocab_size:,} tokens on {documents.name}", flush=True)
            tokenizer = train_bpe(training_texts(documents), bpe_vocab_size)
        there = load_tokenizer(out).name if (out / FILE).is_file() else None
        require(there in (None, tokenizer.name), "out", str(out), f"a folder without a {FILE} of another tokenizer")
        writers = {split: ShardWriter(out, split, tokenizer, shard_tokens) for split in SPLITS}
        try:
            write(documents, tokenizer, writers, doc_batch=config.doc_batch, limit_tokens=limit_tokens)
            publish(out, documents, tokenizer, writers)
        except BaseException:
            for path in [out / MANIFEST] + [out / FILE] * (there is None):
                path.unlink(missing_ok=True)
            for writer in writers.values():
                writer.discard()
            raise
    return writers


def require_no_shards(out: Path) -> None:
    require(not any(out.glob(f"*{SUFFIX}")), "out", str(out), f"a folder without {SUFFIX} files")


def remove_leftovers(out: Path) -> None:
    """What a process that was killed had not finished."""
    for split in SPLITS:
        for path in out.glob(aside(Path(f"{split}-[0-9]*{SUFFIX}")).name):
            path.unlink()


def publish(out: Path, documents: Documents, tokenizer: Tokenizer, writers: dict[Split, ShardWriter]) -> None:
    found = sum(writer.tokens for writer in writers.values())
    require(found > 0, documents.name, "0 tokens", "a corpus with at least one document that is not empty")
    for split, writer in writers.items():
        writer.finish()
        require(
            writer.longest > 1,
            f"the {split} split of {documents.name}",
            f"{writer.tokens} tokens",
            f"more or longer documents: one in {VALID_EVERY} is for validation, and of fewer than {VALID_EVERY} "
            "the end of each",
        )
    tokenizer.save(out)
    # Before the files get their names: a set of which some have theirs is then known to be incomplete.
    files = {name: listed for writer in writers.values() for name, listed in writer.listed.items()}
    Manifest(files).write(out)
    for writer in writers.values():
        writer.publish()


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
    if args.data_command == "check":
        return run_check(args.folder, write_manifest=args.write_manifest)
    with ending_on_signals():
        return run_prepare(args)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise, so that unfinished files are removed. One that is ignored (nohup) stays so."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def run_prepare(args: argparse.Namespace) -> int:
    out: Path = args.out
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
    if args.train_bpe is not None:
        check_bpe_vocabulary("--train-bpe", args.train_bpe)
    skipped = Skipped()
    try:
        writers = prepare(
            config,
            out,
            bpe_vocab_size=args.train_bpe,
            shard_tokens=args.shard_tokens,
            limit_tokens=args.limit_tokens,
            on_bad=skipped if args.on_bad == "skip" else stop,
        )
    except ValueError as error:
        raise ValueError(f"{error}{skipped}") from error
    for split, writer in writers.items():
        print(f"{split}: {writer.documents:,} documents, {writer.tokens:,} tokens, {len(writer.paths)} files")
    if skipped:
        skipped.write(out / SKIPPED)
        print(f"skipped: {len(skipped):,} documents that could not be read, listed in {out / SKIPPED}")
    vocab_size = writers["train"].vocab_size
    # A window stays within its file, and needs one token more than it scores.
    longest = min(writer.longest for writer in writers.values()) - 1
    command = [
        "nsa",
        "train",
        "--dataset",
        "shards",
        "--data-path",
        str(out),
        "--set",
        f"model.vocab_size={vocab_size}",
    ]
    print(f"model.vocab_size: at least {vocab_size}, model.seq_len: at most {longest}")
    print(f"go on with: {shlex.join([*command, '--seq-len', str(min(longest, DEFAULT_SEQ_LEN))])}")
    counts = {split: {"documents": w.documents, "tokens": w.tokens} for split, w in writers.items()}
    print(json.dumps({"out": str(out), "vocab_size": vocab_size, **counts, "skipped": len(skipped)}))
    return 0


def run_check(folder: Path, *, write_manifest: bool) -> int:
    require(folder.is_dir(), "folder", str(folder), "a folder that `nsa data prepare` wrote")
    manifest = list_files(folder) if write_manifest else Manifest.read(folder)
    manifest.compare(folder)
    tokenizer = load_tokenizer(folder)
    for shard in open_shards(folder, manifest.files):
        shard.check_tokenizer(tokenizer)
        shard.check_tokens()
        print(f"{shard.path.name}: {shard.header.documents:,} documents, {shard.header.tokens:,} tokens, intact")
    if write_manifest:
        manifest.write(folder)
    print(f"{folder}: all {len(manifest.files):,} files of {MANIFEST} are there and intact")
    return 0


def list_files(folder: Path) -> Manifest:
    """A manifest of the files that are there."""
    require(not (folder / MANIFEST).exists(), "--write-manifest", str(folder), f"a folder without {MANIFEST}")
    manifest = Manifest({path.name: Shard(path).header.listed for path in sorted(folder.glob(f"*{SUFFIX}"))})
    manifest.check_names(folder)
    return manifest
