"""Files that survive a power cut, and JSON that is checked before it is believed.

Everything a run keeps is written by `replacing`: to a temporary file, flushed, synced, renamed into place, and the
folder synced. Before the rename the old file is intact, after it the new one is on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

TEMPORARY = ".tmp"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the name `path` when the block ends; if the block raises, what was there stays.

    Raises:
        OSError: The file cannot be written; it names `path`.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        # Unlinked first, then opened exclusively: a symlink of that name must not be written through.
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            yield file
            # Python's buffer first: fsync knows only what the kernel has.
            file.flush()
            sync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        # Cleaning up must not hide the error that made it necessary.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # A full disk names no file.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def replace_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 in place of what `path` holds, durably."""
    with replacing(path) as file:
        file.write(text.encode())


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents, each synced into its own parent."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Names in a folder (new, renamed, removed) are on disk once the folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def read_limited(path: Path, limit: int) -> bytes:
    """All of a file, if it has at most `limit` bytes: decided before anything is allocated."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{size:,} bytes; accepted: at most {limit:,}")
        return file.read(limit)


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        ValueError: It is not JSON, is nested too deeply, has a number too long to convert, or is not an object.
    """
    try:
        value = json.loads(data.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}; accepted: an object")
    return value
