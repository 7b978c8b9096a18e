"""Where checkpoints lie: a storage for `torch.distributed.checkpoint` that holds no pickle.

Each rank writes one file in the safetensors format, and rank 0 an `index.json` that says which part of which tensor is
in which file, with the checksum of each file and of itself. The folder is written aside and renamed when all of it is
on the disk: a folder under its own name is whole, or was damaged later, which the checksums tell.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

INDEX = "index.json"
# What ends so is no checkpoint: being written, replaced, or on its way out.
ASIDE = ".tmp"
REPLACED = ".replaced" + ASIDE
REMOVED = ".removed" + ASIDE

# The names that the safetensors format has for torch's dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Damaged(Exception):
    """What was read is not what was written; the text says what differs."""


@dataclass(frozen=True)
class Written:
    """A file as it went to the disk."""

    bytes: int
    sha256: str


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
    """What a checkpoint holds. `judge` names the data that `loss` is of. `extra` has one entry a rank that saved, plain
    JSON."""

    step: int
    loss: float | None
    judge: str
    extra: list[dict[str, Any]]
    files: dict[str, Written]
    tensors: dict[str, Stored]

    def write(self, path: Path) -> None:
        body = {
            "step": self.step,
            "loss": self.loss,
            "judge": self.judge,
            "extra": self.extra,
            "files": {name: [file.bytes, file.sha256] for name, file in self.files.items()},
            "tensors": {
                name: [x.dtype, x.size, [[c.offsets, c.sizes, c.file, c.key] for c in x.chunks]]
                for name, x in self.tensors.items()
            },
        }
        text = json.dumps(body, separators=(",", ":"))
        # The checksum stands before what it is of, on a line of its own: a torn file has the one and not the other.
        with path.open("w") as file:
            file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")
            sync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Of a checkpoint's folder; `Damaged` where it is missing or was changed."""
        try:
            checksum, _, text = (folder / INDEX).read_text(encoding="utf-8", errors="replace").partition("\n")
        except FileNotFoundError:
            raise Damaged(f"{INDEX} is missing") from None
        except OSError as error:
            raise Damaged(f"{INDEX} cannot be read: {error.strerror}") from error
        text = text.removesuffix("\n")
        if hashlib.sha256(text.encode()).hexdigest() != checksum:
            raise Damaged(f"{INDEX} does not have the checksum that it was written with")
        body = json.loads(text)
        try:
            return cls.of(body)
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{INDEX} is none of this version: {error!r}") from error

    @classmethod
    def of(cls, body: dict[str, Any]) -> Index:
        return cls(
            step=body["step"],
            loss=body["loss"],
            # Where it is not said, the loss is compared with no other.
            judge=body.get("judge", ""),
            extra=body["extra"],
            files={name: Written(*file) for name, file in body["files"].items()},
            tensors={
                name: Stored(
                    dtype,
                    tuple(size),
                    tuple(Chunk(tuple(offsets), tuple(sizes), file, key) for offsets, sizes, file, key in chunks),
                )
                for name, (dtype, size, chunks) in body["tensors"].items()
            },
        )

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """`Damaged` unless the files of these names are what was written."""
        for name in names:
            path, written = folder / Path(name).name, self.files[name]
            try:
                with path.open("rb") as file:
                    found = Written(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
            except FileNotFoundError:
                raise Damaged(f"{name} is missing") from None
            except OSError as error:
                raise Damaged(f"{name} cannot be read: {error.strerror}") from error
            if found.bytes != written.bytes:
                raise Damaged(f"{name} has {found.bytes:,} bytes instead of {written.bytes:,}")
            if found.sha256 != written.sha256:
                raise Damaged(f"{name} does not have the checksum that it was written with")


# The safetensors format: the header's length in 8 bytes, the header in JSON, the tensors' bytes one after the other.
# Written here rather than by the library so that the checksum is taken of what passes by, without a second copy in
# memory, and so that a checkpoint needs torch alone.


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> Written:
    """Write CPU tensors, and wait until they are on the disk."""
    # Wide elements first: each tensor then begins at a multiple of its element's size, as a view of the file needs.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {}
    end = 0
    for key, x in ordered:
        begin, end = end, end + x.numel() * x.element_size()
        header[key] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    total = 0
    with path.open("wb") as file:
        parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text, *(raw(x) for _, x in ordered)]
        for part in parts:
            file.write(part)
            digest.update(part)
            total += len(part)
        sync(file.fileno())
    return Written(total, digest.hexdigest())


def raw(x: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; `Tensor.numpy` would need NumPy and knows no bfloat16."""
    assert x.is_contiguous()
    size = x.numel() * x.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(x.data_ptr())).cast("B") if size else memoryview(b"")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The file's tensors, as views of the mapped file: only what is looked at is read."""
    with path.open("rb") as file:
        # Copy on write: torch asks for memory that may be written, and nobody writes it.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8:start])
    tensors = {}
    for key, entry in header.items():
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if begin == end:
            tensors[key] = torch.empty(shape, dtype=dtype)
        else:
            count = (end - begin) // dtype.itemsize
            tensors[key] = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + begin).view(shape)
    return tensors


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """A new name in a folder is on the disk once the folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class Writer(StorageWriter):
    """Writes one checkpoint to `folder`. Every rank has one; torch's planner says which rank writes what, and for
    tensors that all ranks hold alike it shares the work out."""

    folder: Path
    step: int
    loss: float | None
    judge: str
    # This rank's part, as JSON text: what the caller does with its dictionary afterwards no longer matters.
    extra: str
    # What rank 0 does when the folder has its name.
    then: Callable[[], None]
    # Rank 0 alone has all of them.
    extras: list[str] = field(default_factory=list)

    @property
    def aside(self) -> Path:
        return self.folder.with_name(self.folder.name + ASIDE)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer, one checkpoint: nothing to begin anew."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The plans say all that a rank has to know."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # What a rank adds travels with its plan.
        return replace(plan, storage_data=self.extra)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.extras = [plan.storage_data for plan in plans]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder.parent)
        self.aside.mkdir()
        return [replace(plan, storage_data=f"rank_{rank:05}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = plan.storage_data
        tensors: dict[str, Tensor] = {}
        chunks: list[tuple[MetadataIndex, Chunk]] = []
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
            chunk = item.tensor_data.chunk
            whole = chunk.sizes == item.tensor_data.size
            key = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, chunk.offsets))}"
            x = planner.resolve_data(item)
            assert isinstance(x, Tensor)
            tensors[key] = x.detach().cpu().contiguous()
            chunks.append((item.index, Chunk(tuple(chunk.offsets), tuple(chunk.sizes), name, key)))
        done: Future[list[WriteResult]] = Future()
        if tensors:
            written = write_tensors(self.aside / name, tensors)
            done.set_result([WriteResult(index, written.bytes, (chunk, written)) for index, chunk in chunks])
        else:
            done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all have written: the index, then the folder under its name."""
        files: dict[str, Written] = {}
        chunks: dict[str, list[Chunk]] = {}
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
        Index(self.step, self.loss, self.judge, extra, files, tensors).write(self.aside / INDEX)
        sync_folder(self.aside)
        replaced = self.folder.with_name(self.folder.name + REPLACED)
        if self.folder.exists():
            # The same step again: a folder cannot be renamed onto another.
            self.folder.rename(replaced)
        self.aside.rename(self.folder)
        sync_folder(self.folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        self.then()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads one checkpoint whose index is known: every rank reads the parts it holds, whoever wrote them."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One reader, one checkpoint: nothing to begin anew."""

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[x.dtype]),
                    torch.Size(x.size),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in x.chunks],
                )
                for name, x in self.index.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The index says it all."""

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
                opened[chunk.file] = read_tensors(self.folder / Path(chunk.file).name)
            source = opened[chunk.file][chunk.key]
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def recover(folder: Path) -> None:
    """A process killed between the two renames of a replacement left a checkpoint without its name: give it back."""
    for path in folder.glob(f"*{REPLACED}"):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if not original.exists():
            path.rename(original)


def remove_leftovers(folder: Path) -> None:
    """What a process that was killed left aside."""
    recover(folder)
    for path in folder.glob(f"*{ASIDE}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove(folder: Path) -> None:
    """Take the name away first: what is half deleted must not look like a checkpoint."""
    aside = folder.with_name(folder.name + REMOVED)
    folder.rename(aside)
    shutil.rmtree(aside)
