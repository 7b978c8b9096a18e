"""The files of a checkpoint: a storage for `torch.distributed.checkpoint` that holds no pickle.

Each rank writes one safetensors file, and rank 0 `index.json`: which part of which tensor is in which file, and the
checksum of each file. The folder is written under a temporary name and renamed once all of it is on disk: a folder
under its own name is complete, or was damaged later, which the checksums reveal.

All that is read from an index is checked before anything is allocated by it. A mismatch is `Damaged`, whatever caused
it, and the checkpoint is passed over.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from nsa.files import check_json, is_natural, is_number, is_sha256, make_folder, parse_json, read_limited, replacing
from nsa.tensor_file import NAMES, STORED_DTYPES, Written, is_sizes, read_header, read_tensors, write_tensors
from nsa.train.run_folder import clear_folder, name_checkpoint, temporary_name

INDEX = "index.json"
# About 150 bytes for each tensor of each rank, and 20 kB for the state of a rank.
MAX_INDEX_BYTES = 2**28
RANK_FILE = re.compile(r"rank_[0-9]{5,}\.safetensors")


class Damaged(Exception):
    """A checkpoint is not as it was written; the message says what differs."""


class TensorChunk(NamedTuple):
    """A box of a tensor and where it is: `offsets` and `sizes` in the tensor, `key` in `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


class Stored(NamedTuple):
    """A tensor and the chunks that it consists of."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]


class Index(NamedTuple):
    """The index of a checkpoint's contents.

    `validation_id`, in the file "judge", identifies the data that `loss` is of. `good`: loss, gradients and parameters
    were finite. `extra` has one entry for each rank that saved, plain JSON.
    """

    step: int
    loss: float | None
    validation_id: str
    extra: list[dict[str, Any]]
    files: dict[str, Written]
    tensors: dict[str, Stored]
    good: bool = True

    def write(self, path: Path) -> None:
        body = self._asdict()
        body["judge"] = body.pop("validation_id")
        text = json.dumps(body, separators=(",", ":"))
        # The checksum comes first, on a line of its own, so that a truncated file does not match it.
        with replacing(path) as file:
            file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of the checkpoint in `folder`; `Damaged` if it is missing, was changed, or is of another step."""
        with errors_as_damage(INDEX, " is not of this version"):
            checksum, _, text = read_limited(folder / INDEX, MAX_INDEX_BYTES).partition(b"\n")
            text = text.removesuffix(b"\n")
            if hashlib.sha256(text).hexdigest().encode() != checksum:
                raise Damaged(f"{INDEX} does not have the checksum that it was written with")
            index = cls.parse(parse_json(text))
        if folder.name != f"step_{index.step}":
            raise Damaged(f"{INDEX} is of step {index.step}: the folder was renamed or copied")
        return index

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Index:
        """Parse JSON of any shape; a `ValueError` names the first entry that is wrong."""
        # Earlier versions saved good states alone, and did not write either key.
        body = {"judge": "", "good": True, **body}
        check_json(body, INDEX_FORMAT)
        files = {name: Written(*file) for name, file in body["files"].items()}
        strange = [name for name in files if not RANK_FILE.fullmatch(name)]
        if strange:
            raise ValueError(f"the name of a file cannot be {reprlib.repr(strange[0])}")
        tensors = {}
        for name, (dtype, size, listed) in body["tensors"].items():
            chunks = tuple(TensorChunk(tuple(offsets), tuple(sizes), *place) for offsets, sizes, *place in listed)
            unlisted = [chunk.file for chunk in chunks if chunk.file not in files]
            if unlisted:
                raise ValueError(f"the file {reprlib.repr(unlisted[0])} of tensor {reprlib.repr(name)} is not listed")
            if not covers(chunks, size):
                raise ValueError(f"the chunks of tensor {reprlib.repr(name)} do not cover its shape {size} exactly")
            tensors[name] = Stored(dtype, tuple(size), chunks)
        return cls(body["step"], body["loss"], body["judge"], body["extra"], files, tensors, body["good"])

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """`Damaged` unless the files of these names are what was written, and hold the tensors they should."""
        held: dict[str, list[tuple[str, Stored, TensorChunk]]] = {}
        for tensor, x in self.tensors.items():
            for chunk in x.chunks:
                held.setdefault(chunk.file, []).append((tensor, x, chunk))
        for name in names:
            written = self.files[name]
            with errors_as_damage(name), (folder / name).open("rb") as file:
                found = Written(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
                if found.bytes != written.bytes:
                    raise Damaged(f"{name} has {found.bytes:,} bytes instead of {written.bytes:,}")
                if found.sha256 != written.sha256:
                    raise Damaged(f"{name} does not have the checksum that it was written with")
                entries, _ = read_header(file)
            for tensor, x, chunk in held.get(name, []):
                entry = entries.get(chunk.key)
                if entry is None or (entry.dtype, entry.shape) != (STORED_DTYPES[x.dtype], chunk.sizes):
                    raise Damaged(f"{name} does not hold {tensor!r} as {INDEX} says")


@contextmanager
def errors_as_damage(name: str, problem: str = "") -> Iterator[None]:
    """Errors of reading the file `name` as `Damaged`; `problem`: what a `ValueError` means."""
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Damaged(f"{name}{problem}: {error}") from error


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_dtype(value: object) -> bool:
    return isinstance(value, str) and value in STORED_DTYPES


INDEX_FORMAT: dict[str, Any] = {
    "step": is_natural,
    "loss": lambda value: value is None or is_number(value),
    "judge": is_text,
    "good": lambda value: isinstance(value, bool),
    "extra": lambda value: isinstance(value, list) and value and all(isinstance(x, dict) for x in value),
    "files": {...: (is_natural, is_sha256)},
    # Dtype, shape, and for each chunk offsets, sizes, file and key.
    "tensors": {...: (is_dtype, is_sizes, [(is_sizes, is_sizes, is_text, is_text)])},
}


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def covers(chunks: Sequence[TensorChunk], size: Sequence[int]) -> bool:
    """Whether the chunks of a tensor cover each of its elements once: their volumes add up and no two overlap."""
    for c in chunks:
        same = len(c.offsets) == len(c.sizes) == len(size)
        if not same or any(at + n > end for at, n, end in zip(c.offsets, c.sizes, size, strict=True)):
            return False
    boxes = sorted((c.offsets, c.sizes) for c in chunks if math.prod(c.sizes))
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(size):
        return False
    # Shards lie one after the other along the first dimension: each is compared with those it meets there.
    open_boxes: list[Box] = []
    for box in boxes:
        open_boxes = [other for other in open_boxes if size and boxes_overlap(box, other, dims=1)]
        if any(boxes_overlap(box, other, dims=len(size)) for other in open_boxes):
            return False
        open_boxes.append(box)
    return True


def boxes_overlap(one: Box, other: Box, *, dims: int) -> bool:
    """Whether the first `dims` sides of two boxes have a point in common."""
    sides = list(zip(*one, *other, strict=True))[:dims]
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in sides)


class OneCheckpoint:
    """The methods that torch requires of a storage of several checkpoints; a writer and a reader here are for one."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


@dataclass
class Writer(OneCheckpoint, StorageWriter):
    """Writes one checkpoint to `folder`. Every rank has one; torch's planner decides which rank writes what, and
    distributes tensors that all ranks hold alike."""

    folder: Path
    index: Index  # without extra, files and tensors, which this adds
    extra: str  # this rank's part, as JSON text: the caller may change its dictionary afterwards
    then: Callable[[], None]  # called on rank 0 once the folder has its name
    extras: list[str] = field(default_factory=list)  # those of all ranks, on rank 0

    @property
    def aside(self) -> Path:
        return temporary_name(self.folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The plans hold all that a rank needs."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=self.extra)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.extras = [plan.storage_data for plan in plans]
        make_folder(self.folder.parent)
        clear_folder(self.folder.parent)
        self.aside.mkdir()
        return [replace(plan, storage_data=f"rank_{rank:05}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = plan.storage_data
        tensors: dict[str, Tensor] = {}
        chunks: list[tuple[Any, TensorChunk]] = []
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
            chunk = item.tensor_data.chunk
            whole = chunk.sizes == item.tensor_data.size
            key = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"
            x = planner.resolve_data(item)
            assert isinstance(x, Tensor)
            tensors[key] = x.detach().cpu().contiguous()
            chunks.append((item.index, TensorChunk(tuple(chunk.offsets), tuple(chunk.sizes), name, key)))
        done: Future[list[WriteResult]] = Future()
        written = write_tensors(self.aside / name, tensors) if tensors else Written(0, "")
        done.set_result([WriteResult(index, written.bytes, (chunk, written)) for index, chunk in chunks])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, then name the folder; on rank 0, when all have written."""
        files: dict[str, Written] = {}
        chunks: dict[str, list[TensorChunk]] = {}
        for result in (result for rank in results for result in rank):
            chunk, files[result.storage_data[0].file] = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(chunk)
        for name, written in files.items():
            path = self.aside / name
            if not path.is_file() or path.stat().st_size != written.bytes:
                raise OSError(f"{path} was written by another rank and is not here: the ranks need one shared folder")
        tensors = {}
        for name, x in metadata.state_dict_metadata.items():
            assert isinstance(x, TensorStorageMetadata)
            tensors[name] = Stored(NAMES[x.properties.dtype], tuple(x.size), tuple(chunks[name]))
        extra = [json.loads(text) for text in self.extras]
        self.index._replace(extra=extra, files=files, tensors=tensors).write(self.aside / INDEX)
        name_checkpoint(self.folder)
        self.then()


class Reader(OneCheckpoint, StorageReader):
    """Reads one checkpoint: every rank reads the parts it holds, whichever rank wrote them."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index

    def read_metadata(self) -> Metadata:
        found: dict[str, Any] = {}
        for name, x in self.index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in x.chunks]
            properties = TensorProperties(dtype=STORED_DTYPES[x.dtype])
            found[name] = TensorStorageMetadata(properties, torch.Size(x.size), chunks)
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The index holds all that is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = {(name, chunk.offsets): chunk for name, x in self.index.tensors.items() for chunk in x.chunks}
        opened: dict[str, dict[str, Tensor]] = {}
        for item in plan.items:
            offsets = item.storage_index.offset
            assert offsets is not None
            chunk = places[item.storage_index.fqn, tuple(offsets)]
            if chunk.file not in opened:
                opened[chunk.file] = read_tensors(self.folder / chunk.file)
            source = opened[chunk.file][chunk.key]
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
