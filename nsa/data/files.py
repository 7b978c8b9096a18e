"""What the readers and writers of data share: bounded reads, JSON from others, unfinished files, a lock on a folder."""

from __future__ import annotations

import errno
import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nsa.config import require
from nsa.files import make_folder, open_no_link

LOCK = ".lock"


def read_text(path: Path, max_bytes: int) -> str:
    """The UTF-8 text of a file.

    Raises:
        ValueError: it has more than `max_bytes`, or is not UTF-8.
    """
    size = path.stat().st_size
    require(size <= max_bytes, f"the size of {path}", size, f"at most {max_bytes:,} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def parse_json(text: str | bytes, problem: str) -> Any:
    """JSON that anyone may have written. An error begins with `problem`."""
    try:
        return json.loads(text)
    # Brackets that nest too deeply are a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{problem}: {error}") from error


def aside(path: Path) -> Path:
    """Where a file is written until it is complete."""
    return path.with_name(path.name + ".part")


@contextmanager
def locked(folder: Path, argument: str) -> Iterator[None]:
    """Create `folder` and be its only writer. The lock ends with the process; a file system without locks has none.

    Raises:
        ValueError: another process holds the lock; it names `argument`.
    """
    make_folder(folder)
    with open(folder / LOCK, "a", opener=open_no_link) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            free = error.errno not in (errno.EACCES, errno.EAGAIN)
            require(free, argument, str(folder), "a folder that no other process is writing to at this moment")
        yield
