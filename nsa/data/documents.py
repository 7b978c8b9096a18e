"""Documents, in chunks that can be read in any order: what text files, JSON lines and parquet have in common.

A chunk is the least that is read at once: a file, a thousand lines, a row group. Every document has a number that
does not depend on the shuffle, and that number decides whether it is for training or for validation.
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
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, Protocol

from nsa.config import require
from nsa.data.files import parse_json
from nsa.data.shuffle import Permutation
from nsa.files import naming_file

# One document in this many is kept for validation, so that no text is in both.
VALID_EVERY = 20

# Lines of a JSON-lines file in one chunk.
LINES = 1024

# Bytes at either end of a file that its fingerprint is of: all of a large corpus would be minutes at every start.
ENDS = 4096

# Folders of the standard library that are not the library: its tests, what was installed into it, data written as code.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}

SUFFIXES = {
    "text": (".txt", ".md", ".rst"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}


class Chunk(NamedTuple):
    texts: Sequence[str]
    # The number of the first one.
    first: int
    # What a stream needs to come back to the beginning of this chunk; JSON types.
    bookmark: Any = None


# Called with a document that cannot be read: where it is, what is wrong, and how many documents that concerns. If it
# returns, they are left out.
OnBad = Callable[[str, str, int], None]


def stop(where: str, problem: str, documents: int) -> None:
    raise ValueError(f"{where} {problem}")


class Documents(Protocol):
    # For the boot line.
    name: str
    # Of what is read: a position in one corpus means nothing in another.
    fingerprint: str
    # What is being waited for, for the message if it never comes.
    doing: str

    @property
    def few(self) -> bool:
        """Fewer than VALID_EVERY documents: then each is cut, not the set of them."""
        ...

    def chunks(self, seed: int, epoch: int, first: int, bookmark: Any) -> Iterator[Chunk]:
        """The chunks of an epoch from the `first` on; `bookmark` is the one that came with it, or None."""
        ...


class IndexedDocuments(ABC):
    """Chunks that can be read in any order, so an epoch is a shuffle of them and resuming costs nothing."""

    name: str
    doing = "nothing yet"

    def __init__(self, files: Sequence[Path], root: Path, on_bad: OnBad) -> None:
        self.files, self.on_bad = files, on_bad
        self.bytes = sum(path.stat().st_size for path in files)
        marks = {str(path.relative_to(root)): fingerprint(path) for path in files}
        self.fingerprint = hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:16]

    @property
    @abstractmethod
    def n_chunks(self) -> int: ...

    @property
    @abstractmethod
    def n_documents(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Chunk: ...

    @abstractmethod
    def where(self, index: int) -> str:
        """Which file, and where in it, for messages."""

    @property
    def few(self) -> bool:
        return self.n_documents < VALID_EVERY

    def chunks(self, seed: int, epoch: int, first: int, bookmark: Any) -> Iterator[Chunk]:
        order = Permutation(self.n_chunks, seed, epoch)
        for position in range(first, self.n_chunks):
            self.doing = f"reading {self.where(order[position])}"
            yield self.read(order[position])


class TextFiles(IndexedDocuments):
    """A file is a document."""

    def __init__(
        self, files: Sequence[Path], root: Path, *, name: str, errors: str = "strict", on_bad: OnBad = stop
    ) -> None:
        super().__init__(files, root, on_bad)
        self.errors = errors
        self.name = f"{name} ({len(files):,} files, {self.bytes / 1e6:.1f} MB)"

    @property
    def n_chunks(self) -> int:
        return len(self.files)

    @property
    def n_documents(self) -> int:
        return len(self.files)

    def where(self, index: int) -> str:
        return str(self.files[index])

    def read(self, index: int) -> Chunk:
        path = self.files[index]
        try:
            with naming_file(path):
                return Chunk([path.read_text(encoding="utf-8", errors=self.errors)], index)
        except UnicodeDecodeError as error:
            self.on_bad(str(path), f"is not UTF-8 text: {error}", 1)
            return Chunk([""], index)


class JsonLines(IndexedDocuments):
    """A line is a document. The files are read once when opened, to know where the lines are."""

    def __init__(self, files: Sequence[Path], root: Path, *, text_key: str, on_bad: OnBad = stop) -> None:
        super().__init__(files, root, on_bad)
        self.text_key = text_key
        # File, offset of its first line, number of that line in the file (from 1), lines, number of its first document.
        self.index: list[tuple[Path, int, int, int, int]] = []
        self.total = 0
        for path in files:
            self.add(path)
        self.name = f"jsonl ({len(files):,} files, {self.total:,} lines, {self.bytes / 1e6:.1f} MB)"

    def add(self, path: Path) -> None:
        offset, begin, count, number = 0, 0, 0, 1
        with naming_file(path), path.open("rb") as file:
            for line in file:
                offset += len(line)
                count += 1
                if count == LINES:
                    self.index.append((path, begin, number, count, self.total))
                    self.total, number, begin, count = self.total + count, number + count, offset, 0
        if count:
            self.index.append((path, begin, number, count, self.total))
            self.total += count

    @property
    def n_chunks(self) -> int:
        return len(self.index)

    @property
    def n_documents(self) -> int:
        return self.total

    def where(self, index: int) -> str:
        path, _, number, count, _ = self.index[index]
        return f"{path}, lines {number} to {number + count - 1}"

    def read(self, index: int) -> Chunk:
        path, offset, number, count, first = self.index[index]
        with naming_file(path), path.open("rb") as file:
            file.seek(offset)
            lines = [file.readline() for _ in range(count)]
        return Chunk([self.parse(line, f"{path}:{number + i}") for i, line in enumerate(lines)], first)

    def parse(self, line: bytes, where: str) -> str:
        line = line.strip()
        if not line:
            return ""
        try:
            return self.text(parse_json(line, "is not a line of JSON"))
        except ValueError as error:
            self.on_bad(where, str(error), 1)
            return ""

    def text(self, values: Any) -> str:
        text = values.get(self.text_key) if isinstance(values, dict) else None
        if not isinstance(text, str):
            found = type(values).__name__
            if isinstance(values, dict):
                kinds = {key: type(value).__name__ for key, value in sorted(values.items())}
                found = shorten(str(kinds), 300)
            raise ValueError(f"has no text: data.text_key is {self.text_key!r}, the line has {found}")
        return encodable(text)


class Parquet(IndexedDocuments):
    """A row is a document, a row group is a chunk."""

    def __init__(self, files: Sequence[Path], root: Path, *, text_key: str, on_bad: OnBad = stop) -> None:
        super().__init__(files, root, on_bad)
        self.text_key = text_key
        # File, row group, number of its first document, rows.
        self.index: list[tuple[Path, int, int, int]] = []
        self.total = 0
        for path in files:
            self.add(path)
        self.name = f"parquet ({len(files):,} files, {self.total:,} rows, {self.bytes / 1e6:.1f} MB)"

    @contextmanager
    def open(self, path: Path) -> Iterator[Any]:
        arrow = import_module("pyarrow")
        try:
            with import_module("pyarrow.parquet").ParquetFile(path) as file:
                yield file
        except (arrow.ArrowException, OSError) as error:
            # pyarrow makes OSErrors of its own, without a number and without the file's name.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(f"{path} is not a parquet file: {error}") from error

    def add(self, path: Path) -> None:
        with self.open(path) as file:
            columns = file.schema_arrow.names
            require(self.text_key in columns, "data.text_key", self.text_key, f"a column of {path}: {columns}")
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                require(rows >= 0, f"the number of rows of {path}, row group {group}", rows, "0 or more")
                self.index.append((path, group, self.total, rows))
                self.total += rows

    @property
    def n_chunks(self) -> int:
        return len(self.index)

    @property
    def n_documents(self) -> int:
        return self.total

    def where(self, index: int) -> str:
        path, group, _, _ = self.index[index]
        return f"{path}, row group {group}"

    def read(self, index: int) -> Chunk:
        path, group, first, rows = self.index[index]
        arrow = import_module("pyarrow")
        with self.open(path) as file:
            try:
                column = file.read_row_group(group, columns=[self.text_key])[self.text_key]
            # A page that does not unpack is an OSError.
            except (arrow.ArrowException, OSError) as error:
                self.on_bad(self.where(index), f"cannot be read: {error}", rows)
                return Chunk([""] * rows, first)
        return Chunk([self.text(cell, f"{self.where(index)}, row {row}") for row, cell in enumerate(column)], first)

    def text(self, cell: Any, where: str) -> str:
        try:
            text = cell.as_py()
        # Text that is not UTF-8 is found only here.
        except UnicodeDecodeError as error:
            self.on_bad(where, f"is not UTF-8 text: {error}", 1)
            return ""
        if not (text is None or isinstance(text, str)):
            self.on_bad(where, f"has no text: {self.text_key!r} is a {type(text).__name__}", 1)
            return ""
        return text or ""


def fingerprint(path: Path) -> str:
    """Of the size and both ends. Not of the time it was written, so that a copy is the same corpus."""
    with naming_file(path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for begin in (0, max(0, size - ENDS)):
            file.seek(begin)
            digest.update(file.read(ENDS))
    return digest.hexdigest()


def encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text: tokenizers would fail on it without saying where."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not text that UTF-8 can hold: {error}") from error
    return text


def standard_library(root: Path | None = None) -> TextFiles:
    """Python's own source files; `root` for another folder of them."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
    require(bool(files), "root", str(root), "a folder with Python source files")
    # A stray byte in someone's Python must not stop the one source that always works.
    return TextFiles(files, root, name="stdlib", errors="replace")


def open_files(source: str, path: str, text_key: str, on_bad: OnBad = stop) -> IndexedDocuments:
    """The documents of the files that `path` names: a file, a folder, or a pattern."""
    files, root = find_files(path, SUFFIXES[source])
    if source == "text":
        return TextFiles(files, root, name="text", on_bad=on_bad)
    if source == "jsonl":
        return JsonLines(files, root, text_key=text_key, on_bad=on_bad)
    require(
        find_spec("pyarrow") is not None,
        "data.source",
        source,
        "another one, because the package `pyarrow` is not installed (pip install pyarrow)",
    )
    return Parquet(files, root, text_key=text_key, on_bad=on_bad)


def find_files(path: str, suffixes: Sequence[str]) -> tuple[list[Path], Path]:
    """Sorted, and the folder that their names are told from."""
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
