"""`nsa data`: tokenize a corpus into files that training reads, and check such files."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType

from nsa.config import require, require_positive_int
from nsa.data.config import SPLITS, DataConfig, Split
from nsa.data.documents import VALID_EVERY, Documents, IndexedDocuments, OnBad, open_documents, stop
from nsa.data.pools import split_texts
from nsa.data.shards import MANIFEST, SUFFIX, Manifest, Shard, ShardWriter, open_shards, unfinished
from nsa.data.tokenizer import TOKENIZER_FILE, Tokenizer, check_bpe_vocabulary, load_tokenizer, train_bpe
from nsa.files import locked, replace_text
from nsa.progress import LINE_EVERY_S, progress

# Characters of the training documents that a BPE is trained on: more does not improve it.
BPE_CHARACTERS = 100_000_000
# The documents that `--on-bad skip` skipped, one JSON object per line.
SKIPPED_FILE = "skipped.jsonl"
# The sequence length of the config that `nsa train` uses by default.
DEFAULT_SEQ_LEN = 512


class Skipped:
    """`on_bad` for `prepare`: skips documents and records them."""

    def __init__(self) -> None:
        # By place: what is wrong, and how many documents. A document that is read twice counts once.
        self.found: dict[str, tuple[str, int]] = {}

    def __call__(self, where: str, problem: str, documents: int) -> None:
        self.found[where] = problem, documents

    def __len__(self) -> int:
        return sum(documents for _, documents in self.found.values())

    def __str__(self) -> str:
        """The text for the end of an error message."""
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
    """Tokenize the documents of `config` into the files of `out`.

    Args:
        config: The source of the documents, and the tokenizer.
        out: A folder without shards. After an error only its lock is left in it.
        bpe_vocab_size: Train a BPE with this vocabulary size on the corpus.
        shard_tokens: Tokens per file, approximately.
        limit_tokens: Stop after approximately this many.
        on_bad: Called with each document that cannot be read; by default an error.

    Returns:
        The writer of each split, with the counts of what was written.

    Raises:
        ValueError: An argument is wrong, a document cannot be read, a split has no tokens, or another process writes
            to the folder.
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
        # Again: another process may have held the lock meanwhile.
        require_no_shards(out)
        if (out / MANIFEST).exists():
            # That of a killed process is replaced; any other file is an error.
            Manifest.read(out)
        for split in SPLITS:
            # The unfinished files of a killed process.
            for path in out.glob(unfinished(Path(f"{split}-[0-9]*{SUFFIX}")).name):
                path.unlink()
        if bpe_vocab_size is not None:
            print(f"training a BPE of {bpe_vocab_size:,} tokens on {documents.name}", flush=True)
            tokenizer = train_bpe(training_texts(documents), bpe_vocab_size)
        there = load_tokenizer(out).name if (out / TOKENIZER_FILE).is_file() else None
        accepted = f"a folder without a {TOKENIZER_FILE} of another tokenizer"
        require(there in (None, tokenizer.name), "out", str(out), accepted)
        writers = {split: ShardWriter(out, split, tokenizer, shard_tokens) for split in SPLITS}
        try:
            write_shards(documents, tokenizer, writers, config.doc_batch, limit_tokens)
            publish(out, documents, tokenizer, writers)
        except BaseException:
            for path in [out / MANIFEST] + [out / TOKENIZER_FILE] * (there is None):
                path.unlink(missing_ok=True)
            for writer in writers.values():
                writer.discard()
            raise
    return writers


def require_no_shards(out: Path) -> None:
    require(not any(out.glob(f"*{SUFFIX}")), "out", str(out), f"a folder without {SUFFIX} files")


def publish(out: Path, documents: Documents, tokenizer: Tokenizer, writers: dict[Split, ShardWriter]) -> None:
    found = sum(writer.tokens for writer in writers.values())
    require(found > 0, documents.name, "0 tokens", "a corpus with at least one document that is not empty")
    for split, writer in writers.items():
        writer.finish()
        accepted = f"more or longer documents: one in {VALID_EVERY}, or the end of each of fewer, is for valid"
        require(writer.longest > 1, f"the {split} split of {documents.name}", f"{writer.tokens} tokens", accepted)
    tokenizer.save(out)
    # Before the files are renamed: a set of which only some are is then known to be incomplete.
    Manifest({name: listed for writer in writers.values() for name, listed in writer.listed.items()}).write(out)
    for writer in writers.values():
        writer.publish()


def write_shards(
    documents: Documents, tokenizer: Tokenizer, writers: dict[Split, ShardWriter], doc_batch: int, limit: int | None
) -> None:
    """Write documents up to the limit, and beyond it until each split has a document, without which no run starts."""
    total = documents.n_chunks if isinstance(documents, IndexedDocuments) else None
    with closing(progress(total, unit="chunk", every_s=LINE_EVERY_S)) as shown:
        # The order does not matter: training shuffles the windows.
        wanted = writers
        for done, chunk in enumerate(documents.chunks(0, 0, 0, None), 1):
            for split, writer in wanted.items():
                texts = split_texts(chunk, split, few=documents.few)
                for begin in range(0, len(texts), doc_batch):
                    writer.add(tokenizer.encode_documents(texts[begin : begin + doc_batch]))
            tokens = sum(writer.tokens for writer in writers.values())
            shown.show(done, f"{tokens:,} tokens")
            if limit is not None and tokens >= limit:
                wanted = {split: writer for split, writer in writers.items() if not writer.tokens}
                if not wanted:
                    return


def training_texts(documents: Documents) -> Iterator[str]:
    seen = 0
    for chunk in documents.chunks(0, 0, 0, None):
        for text in split_texts(chunk, "train", few=documents.few):
            yield text
            seen += len(text)
            if seen >= BPE_CHARACTERS:
                return


def run(args: argparse.Namespace) -> int:
    if args.data_command == "check":
        return run_check(args.folder, write_manifest=args.write_manifest)
    # So that unfinished files are removed. An ignored SIGHUP (nohup) stays ignored.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, exit_on_signal)
    try:
        return run_prepare(args)
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def run_prepare(args: argparse.Namespace) -> int:
    out: Path = args.out
    names = ("source", "path", "name", "tokenizer", "text_key", "doc_batch")
    config = DataConfig(**{name: getattr(args, name) for name in names})
    if args.limit_tokens is not None:
        require_positive_int("--limit-tokens", args.limit_tokens)
    if args.train_bpe is not None:
        check_bpe_vocabulary("--train-bpe", args.train_bpe)
    if args.on_bad == "skip":
        # It may be the user's, or of a data set whose files are elsewhere.
        require(not (out / SKIPPED_FILE).exists(), "--out", str(out), f"a folder without {SKIPPED_FILE}")
    skipped = Skipped()
    sizes = {"bpe_vocab_size": args.train_bpe, "shard_tokens": args.shard_tokens, "limit_tokens": args.limit_tokens}
    try:
        writers = prepare(config, out, **sizes, on_bad=skipped if args.on_bad == "skip" else stop)
    except ValueError as error:
        raise ValueError(f"{error}{skipped}") from error
    for split, writer in writers.items():
        print(f"{split}: {writer.documents:,} documents, {writer.tokens:,} tokens, {len(writer.paths)} files")
    if skipped:
        skipped.write(out / SKIPPED_FILE)
        print(f"skipped: {len(skipped):,} documents that could not be read, listed in {out / SKIPPED_FILE}")
    vocab_size = writers["train"].vocab_size
    # A window lies within one file, and has one token more than its targets.
    longest = min(writer.longest for writer in writers.values()) - 1
    flags = f"--set model.vocab_size={vocab_size} --seq-len {min(longest, DEFAULT_SEQ_LEN)}"
    print(f"model.vocab_size: at least {vocab_size}, model.seq_len: at most {longest}")
    print(f"train with: nsa train --dataset shards --data-path {shlex.quote(str(out))} {flags}")
    counts = {split: {"documents": w.documents, "tokens": w.tokens} for split, w in writers.items()}
    print(json.dumps({"out": str(out), "vocab_size": vocab_size, **counts, "skipped": len(skipped)}))
    return 0


def run_check(folder: Path, *, write_manifest: bool) -> int:
    require(folder.is_dir(), "folder", str(folder), "a folder that `nsa data prepare` wrote")
    manifest = list_files(folder) if write_manifest else Manifest.read(folder)
    manifest.compare(folder)
    _, shards = open_shards(folder, manifest.files)
    for shard in shards:
        shard.check_tokens()
        print(f"{shard.path.name}: {shard.header.documents:,} documents, {shard.header.tokens:,} tokens, intact")
    if write_manifest:
        manifest.write(folder)
    print(f"{folder}: all {len(manifest.files):,} files of {MANIFEST} are there and intact")
    return 0


def list_files(folder: Path) -> Manifest:
    """A manifest of the files in a folder."""
    require(not (folder / MANIFEST).exists(), "--write-manifest", str(folder), f"a folder without {MANIFEST}")
    manifest = Manifest({path.name: Shard(path).header.listed for path in sorted(folder.glob(f"*{SUFFIX}"))})
    manifest.check_names(folder)
    return manifest
