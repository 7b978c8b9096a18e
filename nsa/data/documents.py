"""Documents in chunks: text files, JSON lines and parquet, in any order; data sets of the Hugging Face hub, streamed.

A chunk is what is read at once: a file, a thousand lines, a row group. Every document has a number that does not depend
on the shuffle, and that decides whether it is for training or for validation.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from nsa.config import require
from nsa.data.config import HUB, DataConfig
from nsa.data.shuffle import Permutation
from nsa.files import naming_file

# One document in this many is for validation, so that no text is in both splits.
VALID_EVERY = 20
# Documents in a chunk of a JSON-lines file, and of a stream.
LINES, ROWS = 1024, 1000
# Bytes at either end of a file that its fingerprint is of: hashing all of a large corpus would take minutes.
ENDS = 4096
FINEWEB_EDU, FINEWEB_EDU_SUBSET = "HuggingFaceFW/fineweb-edu", "sample-10BT"
# Folders of the standard library to leave out: tests, installed packages, data written as code.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
SKIPPED_FOLDERS |= {"__pycache__", "encodings", "pydoc_data"}
SUFFIXES = {"text": (".txt", ".md", ".rst"), "jsonl": (".jsonl", ".ndjson"), "parquet": (".parquet",)}


class DocumentChunk(NamedTuple):
    """Documents that are read at once."""

    texts: Sequence[str]
    first: int  # the number of the first one
    bookmark: Any = None  # with which a stream resumes at the beginning of this chunk; JSON types


# Called with documents that cannot be read: where they are, what is wrong, how many they are. If it returns, they are
# skipped.
OnBad = Callable[[str, str, int], None]


def stop(where: str, problem: str, documents: int) -> None:
    raise ValueError(f"{where} {problem}")


class Documents(ABC):
    """A source of documents. Those that cannot be read go to `on_bad`."""

    name: str  # for the boot line
    fingerprint: str  # identifies the corpus: a position in one is meaningless in another
    doing = "opening"  # what it is reading, for the message of a stall
    on_bad: OnBad
    text_key = ""

    @property
    def few(self) -> bool:
        """Fewer than VALID_EVERY documents: each of them is split, instead of the set."""
        return False

    @abstractmethod
    def chunks(self, seed: int, epoch: int, first: int, bookmark: Any) -> Iterator[DocumentChunk]:
        """The chunks of an epoch from number `first` on, whose `bookmark` may be known."""

    def bad(self, where: str, problem: object, documents: int = 1) -> str:
        """The text of documents that cannot be read: none."""
        self.on_bad(where, str(problem), documents)
        return ""

    def text(self, value: object, where: str) -> str:
        """A cell's text; "" for None, and for what tokenizers do not take: JSON can spell half a surrogate pair."""
        if value is None:
            return ""
        if not isinstance(value, str):
            return self.bad(where, f"has no text: {self.text_key!r} is a {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return self.bad(where, f"is not text that UTF-8 can encode: {error}")
        return value


class IndexedDocuments(Documents):
    """Chunks that can be read in any order: an epoch is a permutation of them, and resuming costs nothing."""

    def __init__(self, files: Sequence[Path], root: Path, on_bad: OnBad, text_key: str = "") -> None:
        self.files, self.on_bad, self.text_key = files, on_bad, text_key
        self.bytes = sum(path.stat().st_size for path in files)
        marks = {str(path.relative_to(root)): fingerprint(path) for path in files}
        self.fingerprint = hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:16]
        # Of each chunk: its file, its place in the file, the number of its first document, and how many it has.
        self.index: list[tuple[Path, Any, int, int]] = []
        self.n_documents = 0

    def add(self, path: Path, place: Any, documents: int) -> None:
        """The next chunk of the index."""
        self.index.append((path, place, self.n_documents, documents))
        self.n_documents += documents

    def describe(self, name: str, unit: str = "") -> str:
        count = f"{self.n_documents:,} {unit}, " if unit else ""
        return f"{name} ({len(self.files):,} files, {count}{self.bytes / 1e6:.1f} MB)"

    @abstractmethod
    def read(self, index: int) -> DocumentChunk: ...

    @abstractmethod
    def where(self, index: int) -> str:
        """The file of a chunk and the place in it, for messages."""

    @property
    def n_chunks(self) -> int:
        return len(self.index)

    @property
    def few(self) -> bool:
        return self.n_documents < VALID_EVERY

    def chunks(self, seed: int, epoch: int, first: int, bookmark: Any) -> Iterator[DocumentChunk]:
        order = Permutation(self.n_chunks, seed, epoch)
        for position in range(first, self.n_chunks):
            self.doing = f"reading {self.where(order[position])}"
            yield self.read(order[position])


class TextFiles(IndexedDocuments):
    """A file is a document."""

    def __init__(self, files: Sequence[Path], root: Path, on_bad: OnBad, name: str, errors: str = "strict") -> None:
        super().__init__(files, root, on_bad)
        self.errors = errors
        for path in files:
            self.add(path, None, 1)
        self.name = self.describe(name)

    def where(self, index: int) -> str:
        return str(self.files[index])

    def read(self, index: int) -> DocumentChunk:
        path = self.files[index]
        try:
            with naming_file(path):
                text = path.read_text(encoding="utf-8", errors=self.errors)
        except UnicodeDecodeError as error:
            text = self.bad(str(path), f"is not UTF-8 text: {error}")
        return DocumentChunk([text], index)


class JsonLines(IndexedDocuments):
    """A line is a document. The files are read once when opened, to find the lines."""

    def __init__(self, files: Sequence[Path], root: Path, on_bad: OnBad, text_key: str) -> None:
        super().__init__(files, root, on_bad, text_key)
        for path in files:
            offset, number = 0, 1
            with naming_file(path), path.open("rb") as file:
                while lines := list(islice(file, LINES)):
                    # The place: the offset of the first line, and its number in the file.
                    self.add(path, (offset, number), len(lines))
                    offset, number = offset + sum(map(len, lines)), number + len(lines)
        self.name = self.describe("jsonl", "lines")

    def where(self, index: int) -> str:
        path, (_, number), _, count = self.index[index]
        return f"{path}, lines {number} to {number + count - 1}"

    def read(self, index: int) -> DocumentChunk:
        path, (offset, number), first, count = self.index[index]
        with naming_file(path), path.open("rb") as file:
            file.seek(offset)
            lines = [file.readline() for _ in range(count)]
        return DocumentChunk([self.parse(line, f"{path}:{number + i}") for i, line in enumerate(lines)], first)

    def parse(self, line: bytes, where: str) -> str:
        line = line.strip()
        if not line:
            return ""
        try:
            values = json.loads(line)
        # Brackets that nest too deeply are a RecursionError.
        except (ValueError, RecursionError) as error:
            return self.bad(where, f"is not a line of JSON: {error}")
        text = values.get(self.text_key) if isinstance(values, dict) else None
        if isinstance(text, str):
            return self.text(text, where)
        found = type(values).__name__
        if isinstance(values, dict):
            found = shorten(str({key: type(value).__name__ for key, value in sorted(values.items())}), 300)
        return self.bad(where, f"has no text: data.text_key is {self.text_key!r}, the line has {found}")


class Parquet(IndexedDocuments):
    """A row is a document, a row group is a chunk."""

    def __init__(self, files: Sequence[Path], root: Path, on_bad: OnBad, text_key: str) -> None:
        super().__init__(files, root, on_bad, text_key)
        for path in files:
            with self.open(path) as file:
                columns = file.schema_arrow.names
                require(text_key in columns, "data.text_key", text_key, f"a column of {path}: {columns}")
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    require(rows >= 0, f"the number of rows of {path}, row group {group}", rows, "0 or more")
                    self.add(path, group, rows)
        self.name = self.describe("parquet", "rows")

    @contextmanager
    def open(self, path: Path) -> Iterator[Any]:
        arrow = import_module("pyarrow")
        try:
            with import_module("pyarrow.parquet").ParquetFile(path) as file:
                yield file
        except (arrow.ArrowException, OSError) as error:
            # pyarrow raises OSErrors of its own, without a number and without the file's name.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(f"{path} is not a parquet file: {error}") from error

    def where(self, index: int) -> str:
        path, group, _, _ = self.index[index]
        return f"{path}, row group {group}"

    def read(self, index: int) -> DocumentChunk:
        path, group, first, rows = self.index[index]
        where, arrow = self.where(index), import_module("pyarrow")
        with self.open(path) as file:
            try:
                column = file.read_row_group(group, columns=[self.text_key])[self.text_key]
            # A page that does not decompress is an OSError.
            except (arrow.ArrowException, OSError) as error:
                return DocumentChunk([self.bad(where, f"cannot be read: {error}", rows)] * rows, first)
        texts = []
        for row, cell in enumerate(column):
            try:
                texts.append(self.text(cell.as_py(), f"{where}, row {row}"))
            # Text that is not UTF-8 is found only here.
            except UnicodeDecodeError as error:
                texts.append(self.bad(f"{where}, row {row}", f"is not UTF-8 text: {error}"))
        return DocumentChunk(texts, first)


class HubDocuments(Documents):
    """A data set of the Hugging Face hub, streamed in its own order.

    A stream has no random access: the documents of each chunk are shuffled, and then the windows of each pool. The
    bookmark of a chunk, which `datasets` provides, goes into the checkpoint: resuming reads on from there.
    """

    def __init__(self, dataset: str, subset: str | None, on_bad: OnBad, text_key: str) -> None:
        require_package("datasets", f"hf:{dataset}")
        self.dataset, self.subset, self.text_key, self.on_bad = dataset, subset, text_key, on_bad
        self.name = f"hf:{dataset}" + (f" ({subset})" if subset else "")
        self.fingerprint = self.name

    def chunks(self, seed: int, epoch: int, first: int, bookmark: Any) -> Iterator[DocumentChunk]:
        self.doing = f"opening {self.name}"
        stream = import_module("datasets").load_dataset(self.dataset, self.subset, split="train", streaming=True)
        if bookmark is not None:
            stream.load_state_dict(bookmark)
        elif first:
            stream = stream.skip(first * ROWS)
        rows = iter(stream)
        while True:
            self.doing = f"reading documents {first * ROWS:,} to {(first + 1) * ROWS - 1:,} of {self.name}"
            texts = [self.cell(row, number) for number, row in enumerate(islice(rows, ROWS), first * ROWS)]
            if not texts:
                return
            yield DocumentChunk(texts, first * ROWS, bookmark)
            first, bookmark = first + 1, stream.state_dict()

    def cell(self, row: dict[str, Any], number: int) -> str:
        require(self.text_key in row, "data.text_key", self.text_key, f"a column of {self.name}: {sorted(row)}")
        return self.text(row[self.text_key], f"document {number:,} of {self.name}")


def fingerprint(path: Path) -> str:
    """A hash of the size and both ends of a file; a copy has the same."""
    with naming_file(path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for begin in (0, max(0, size - ENDS)):
            file.seek(begin)
            digest.update(file.read(ENDS))
    return digest.hexdigest()


def standard_library() -> TextFiles:
    """Python's own source files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    require(bool(files), "the standard library", str(root), "a folder with Python source files")
    # A stray byte must not stop the source that works everywhere.
    return TextFiles(files, root, stop, "stdlib", errors="replace")


def find_files(path: str, suffixes: Sequence[str]) -> tuple[list[Path], Path]:
    """The files, sorted, and the folder that their names are relative to."""
    given = Path(path).expanduser()
    if given.is_file():
        return [given], given.parent
    if given.is_dir():
        files = sorted(file for suffix in suffixes for file in given.rglob(f"*{suffix}") if file.is_file())
        require(bool(files), "data.path", path, f"a folder with files that end in {', '.join(suffixes)}")
        return files, given
    files = sorted(file for file in map(Path, glob(str(given), recursive=True)) if file.is_file())
    require(bool(files), "data.path", path, "a file, a folder, or a pattern that files match")
    return files, Path(os.path.commonpath([file.parent for file in files]))


def require_package(package: str, source: str) -> None:
    accepted = f"another one, because the package `{package}` is not installed (pip install {package})"
    require(find_spec(package) is not None, "data.source", source, accepted)


def open_documents(config: DataConfig, on_bad: OnBad = stop) -> Documents:
    """The documents of a config whose source is text."""
    if config.source == "stdlib":
        return standard_library()
    if config.source == "fineweb_edu":
        return HubDocuments(FINEWEB_EDU, config.name or FINEWEB_EDU_SUBSET, on_bad, config.text_key)
    if config.source.startswith(HUB):
        return HubDocuments(config.source.removeprefix(HUB), config.name, on_bad, config.text_key)
    assert config.path is not None
    files, root = find_files(config.path, SUFFIXES[config.source])
    if config.source == "text":
        return TextFiles(files, root, on_bad, "text")
    if config.source == "jsonl":
        return JsonLines(files, root, on_bad, config.text_key)
    require_package("pyarrow", config.source)
    return Parquet(files, root, on_bad, config.text_key)
