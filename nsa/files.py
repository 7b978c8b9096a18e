"""Files that survive a power cut, the lock of a folder, and JSON that is checked before it is believed.

Everything a run keeps is written by `replacing`: to a temporary file, flushed, synced, renamed into place, and the
folder synced. Before the rename the old file is intact, after it the new one is on disk.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import uuid4

from nsa.config import require

TEMPORARY = ".tmp"
LOCK = ".lock"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the name `path` when the block ends; if the block raises, what was there stays."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # A unique name, opened exclusively: no other file is replaced, no link written through.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}{TEMPORARY}")
    try:
        with naming_file(path, temporary):
            with temporary.open("xb") as file:
                yield file
                sync_file(file)
            temporary.replace(path)
            sync_folder(path.parent)
    except BaseException:
        # Cleaning up must not hide the error that made it necessary.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming_file(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """An `OSError` in this block names `path`, also if it occurs on its `temporary` or without a name."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 in place of what `path` holds, durably; what is no text, as in a name, is escaped."""
    with replacing(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def open_no_link(path: str, flags: int) -> int:
    """An `opener` for `open` that refuses a symbolic link: what it leads to is not ours to write to."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, "a symbolic link, which is not written through", path) from None


def is_at(path: Path, file: IO[Any]) -> bool:
    """Whether `path` is still the open `file`. Does not open it again: closing it would release a lock on it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents, each synced into its own parent."""
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def can_write_in(folder: Path) -> bool:
    """Whether a file can be created in `folder`, or in the nearest of its parents that exists."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        TemporaryFile(dir=there).close()
    except OSError:
        return False
    return True


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_file(file: IO[bytes]) -> None:
    # Python's buffer first: fsync knows only what the kernel has.
    file.flush()
    sync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Names in a folder (new, renamed, removed) are on disk once the folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path, argument: str) -> Iterator[Callable[[], bool]]:
    """Create `folder` and be its only writer until the block or the process ends, on file systems that have locks; a
    ValueError names `argument` if another process is. Yields a function that returns whether the folder is still the
    one that was locked: not deleted, moved or replaced."""
    make_folder(folder)
    path = folder / LOCK
    with open(path, "a", opener=open_no_link) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            free = error.errno not in (errno.EACCES, errno.EAGAIN)
            require(free, argument, str(folder), "a folder that no other process is writing to")
        yield lambda: is_at(path, file)


def read_limited(path: Path, limit: int) -> bytes:
    """All of a file, if it has at most `limit` bytes: decided before anything is allocated."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{size:,} bytes; accepted: at most {limit:,}")
        return file.read(limit)


def read_text(path: Path, limit: int) -> str:
    """The UTF-8 text of a file with at most `limit` bytes; a ValueError names `path`."""
    try:
        return read_limited(path, limit).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise ValueError(f"{path} is too large: {error}") from None


def parse_json(data: str | bytes, problem: str = "") -> dict[str, Any]:
    """The JSON object in `data`; a ValueError, which starts with `problem`, if it is none, is nested too deeply, or has
    a number too long to convert."""
    prefix = f"{problem}: " if problem else ""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"{prefix}nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{prefix}a JSON {type(value).__name__}; accepted: an object")
    return value


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object of a file with at most `limit` bytes; a ValueError names `path`."""
    return parse_json(read_text(path, limit), f"{path} is damaged")


def check_json(value: Any, expected: Any, name: str = "") -> None:
    """A ValueError names the first part of `value` that is not as `expected`: what a function accepts; a list of any
    length, each as the one in it; a tuple of as many; or a dict by key, whose key `...` stands for every key."""
    if isinstance(expected, dict) and isinstance(value, dict):
        for key in value if ... in expected else expected:
            part = key if key.isidentifier() else reprlib.repr(key)
            check_json(value.get(key), expected.get(..., expected.get(key)), f"{name}.{part}" if name else part)
    elif isinstance(expected, list) and isinstance(value, list):
        for entry in value:
            check_json(entry, expected[0], f"an entry of {name}")
    elif isinstance(expected, tuple) and isinstance(value, list) and len(value) == len(expected):
        for i, (entry, part) in enumerate(zip(value, expected, strict=True)):
            check_json(entry, part, f"{name}[{i}]")
    elif not (callable(expected) and expected(value)):
        raise ValueError(f"{name} is {reprlib.repr(value)}, which is not valid")


def is_natural(value: object) -> bool:
    """Whether it is an integer of at least 0 that torch can hold."""
    return type(value) is int and 0 <= value < 2**63


def is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
