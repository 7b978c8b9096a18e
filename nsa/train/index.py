"""`index.json` of a checkpoint: which part of which tensor is in which file, and the checksum of each file.

All that is read from it is checked here, before anything is allocated by it. A mismatch is `Damaged`: the checkpoint
is passed over, whoever or whatever changed it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.files import parse_json, read_limited, replacing
from nsa.tensor_file import DTYPES, Written, is_sizes, read_header

INDEX = "index.json"
# About 150 bytes for each tensor of each rank, and 20 kB for the state of a rank.
MAX_BYTES = 2**28
SHA256 = re.compile(r"[0-9a-f]{64}")
FILE = re.compile(r"rank_[0-9]{5,}\.safetensors")


class Damaged(Exception):
    """What was read is not what was written; the text says what differs."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where it is: `offsets` and `sizes` in the tensor, `key` in `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class Stored:
    """A whole tensor."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds.

    `judge` names the data that `loss` is of. `good`: loss, gradients and parameters were finite. `extra` has one entry
    for each rank that saved, plain JSON.
    """

    step: int
    loss: float | None
    judge: str
    extra: list[dict[str, Any]]
    files: dict[str, Written]
    tensors: dict[str, Stored]
    good: bool = True

    def write(self, path: Path) -> None:
        body = {
            "step": self.step,
            "loss": self.loss,
            "judge": self.judge,
            "good": self.good,
            "extra": self.extra,
            "files": {name: [file.bytes, file.sha256] for name, file in self.files.items()},
            "tensors": {
                name: [x.dtype, x.size, [[c.offsets, c.sizes, c.file, c.key] for c in x.chunks]]
                for name, x in self.tensors.items()
            },
        }
        text = json.dumps(body, separators=(",", ":"))
        # The checksum stands before what it is of, on a line of its own: a torn file has the one and not the other.
        with replacing(path) as file:
            file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of the checkpoint in `folder`, whose name has to be that of the index's step.

        Raises:
            Damaged: It is missing, was changed, or is of another step.
        """
        try:
            checksum, _, text = read_limited(folder / INDEX, MAX_BYTES).partition(b"\n")
            text = text.removesuffix(b"\n")
            if hashlib.sha256(text).hexdigest().encode() != checksum:
                raise Damaged(f"{INDEX} does not have the checksum that it was written with")
            index = cls.parse(parse_json(text))
        except FileNotFoundError:
            raise Damaged(f"{INDEX} is missing") from None
        except OSError as error:
            raise Damaged(f"{INDEX} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise Damaged(f"{INDEX} is not of this version: {error}") from error
        if folder.name != f"step_{index.step}":
            raise Damaged(f"{INDEX} is of step {index.step}: the folder was renamed or copied")
        return index

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Index:
        """From JSON of any shape; a `ValueError` names the first entry that is wrong."""
        step, loss, extra = body.get("step"), body.get("loss"), body.get("extra")
        # Without a judge, the loss is compared with no other; versions before `good` saved nothing else.
        judge, good = body.get("judge", ""), body.get("good", True)
        check(type(step) is int and 0 <= step < 2**63, "step", step)
        check(loss is None or type(loss) is float or (type(loss) is int and abs(loss) < 2**63), "loss", loss)
        check(isinstance(judge, str), "judge", judge)
        check(isinstance(good, bool), "good", good)
        check(isinstance(extra, list) and extra and all(isinstance(x, dict) for x in extra), "extra", extra)
        files = {name: parse_file(name, file) for name, file in items("files", body.get("files"))}
        tensors = {name: parse_tensor(name, x, files) for name, x in items("tensors", body.get("tensors"))}
        return cls(step, loss, judge, extra, files, tensors, good)  # type: ignore[arg-type]  # checked above

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """`Damaged` unless the files of these names are what was written, and hold the tensors they should."""
        held: dict[str, list[tuple[str, Stored, Chunk]]] = {}
        for tensor, x in self.tensors.items():
            for chunk in x.chunks:
                held.setdefault(chunk.file, []).append((tensor, x, chunk))
        for name in names:
            written = self.files[name]
            try:
                with (folder / name).open("rb") as file:
                    found = Written(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
                    if found.bytes != written.bytes:
                        raise Damaged(f"{name} has {found.bytes:,} bytes instead of {written.bytes:,}")
                    if found.sha256 != written.sha256:
                        raise Damaged(f"{name} does not have the checksum that it was written with")
                    entries = read_header(file)
            except FileNotFoundError:
                raise Damaged(f"{name} is missing") from None
            except OSError as error:
                raise Damaged(f"{name} cannot be read: {error.strerror}") from error
            except ValueError as error:
                raise Damaged(f"{name}: {error}") from error
            for tensor, x, chunk in held.get(name, []):
                entry = entries.get(chunk.key)
                if entry is None or (entry.dtype, entry.shape) != (DTYPES[x.dtype], chunk.sizes):
                    raise Damaged(f"{name} does not hold {tensor!r} as {INDEX} says")


def check(holds: object, name: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} cannot be {reprlib.repr(value)}")


def items(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    check(isinstance(value, dict), name, value)
    return value.items()


def parse_file(name: str, value: Any) -> Written:
    check(FILE.fullmatch(name), "the name of a file", name)
    check(isinstance(value, list) and len(value) == 2, f"file {name!r}", value)
    size, digest = value
    check(type(size) is int and 0 <= size < 2**63, f"the size of {name!r}", size)
    check(isinstance(digest, str) and SHA256.fullmatch(digest), f"the checksum of {name!r}", digest)
    return Written(size, digest)


def parse_tensor(name: str, value: Any, files: dict[str, Written]) -> Stored:
    name = f"tensor {reprlib.repr(name)}"
    check(isinstance(value, list) and len(value) == 3, name, value)
    dtype, size, listed = value
    check(isinstance(dtype, str) and dtype in DTYPES, f"the dtype of {name}", dtype)
    check(is_sizes(size), f"the shape of {name}", size)
    check(isinstance(listed, list), f"the chunks of {name}", listed)
    chunks = [parse_chunk(name, chunk, size, files) for chunk in listed]
    if not covers(chunks, size):
        raise ValueError(f"the chunks of {name} do not cover its shape {size} exactly")
    return Stored(dtype, tuple(size), tuple(chunks))


def parse_chunk(name: str, value: Any, size: list[int], files: dict[str, Written]) -> Chunk:
    name = f"a chunk of {name}"
    check(isinstance(value, list) and len(value) == 4, name, value)
    offsets, sizes, file, key = value
    check(is_sizes(offsets) and is_sizes(sizes) and len(offsets) == len(sizes) == len(size), name, value)
    check(all(offset + n <= end for offset, n, end in zip(offsets, sizes, size, strict=True)), name, value)
    check(isinstance(file, str) and file in files, f"the file of {name}", file)
    check(isinstance(key, str), f"the key of {name}", key)
    return Chunk(tuple(offsets), tuple(sizes), file, key)


# Offsets and sizes.
Box = tuple[tuple[int, ...], tuple[int, ...]]


def covers(chunks: Sequence[Chunk], size: Sequence[int]) -> bool:
    """Whether boxes within a tensor cover each of its elements once: their volumes add up and no two overlap."""
    boxes = sorted((c.offsets, c.sizes) for c in chunks if math.prod(c.sizes))
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(size):
        return False
    # Shards lie one after the other along the first dimension: each is compared with those it meets there.
    open_boxes: list[Box] = []
    for box in boxes:
        open_boxes = [other for other in open_boxes if size and overlap(box, other, dims=1)]
        if any(overlap(box, other, dims=len(size)) for other in open_boxes):
            return False
        open_boxes.append(box)
    return True


def overlap(one: Box, other: Box, *, dims: int) -> bool:
    """Whether the first `dims` sides of two boxes have a point in common."""
    return all(
        max(one[0][dim], other[0][dim]) < min(one[0][dim] + one[1][dim], other[0][dim] + other[1][dim])
        for dim in range(dims)
    )
