"""Where checkpoints lie: a storage for `torch.distributed.checkpoint` that holds no pickle.

Each rank writes one file in the safetensors format, and rank 0 the `index.json` (see `nsa.train.index`). The folder is
written under a temporary name and renamed when all of it is on disk: a folder under its own name is complete, or was
damaged later, which the checksums tell.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
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

from nsa.files import TEMPORARY, make_folder, sync_folder
from nsa.tensor_file import DTYPES, NAMES, Written, read_tensors, write_tensors
from nsa.train.index import INDEX, Chunk, Index, Stored
from nsa.train.run_folder import LEFTOVER, REMOVED, REPLACED


@dataclass
class Writer(StorageWriter):
    """Writes one checkpoint to `folder`. Every rank has one; torch's planner says which rank writes what, and for
    tensors that all ranks hold alike it shares the work out."""

    folder: Path
    step: int
    loss: float | None
    judge: str
    good: bool
    # This rank's part, as JSON text: what the caller does with its dictionary afterwards no longer matters.
    extra: str
    # What rank 0 does when the folder has its name.
    then: Callable[[], None]
    # Rank 0 alone has all of them.
    extras: list[str] = field(default_factory=list)

    @property
    def aside(self) -> Path:
        return self.folder.with_name(self.folder.name + TEMPORARY)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer, one checkpoint: nothing to begin anew."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The plans say all that a rank has to know."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # What a rank adds travels with its plan.
        return replace(plan, storage_data=self.extra)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.extras = [plan.storage_data for plan in plans]
        make_folder(self.folder.parent)
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
        Index(self.step, self.loss, self.judge, extra, files, tensors, self.good).write(self.aside / INDEX)
        replaced = self.folder.with_name(self.folder.name + REPLACED)
        if self.folder.exists():
            # The same step again: a folder cannot be renamed onto another.
            self.folder.rename(replaced)
        self.aside.rename(self.folder)
        sync_folder(self.folder.parent)
        # The new one has its name: what cannot be deleted now is left to the next save.
        with suppress(OSError):
            discard(replaced)
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
    """What a process that was killed left behind; files of other names are somebody else's."""
    recover(folder)
    for path in folder.iterdir():
        if LEFTOVER.fullmatch(path.name):
            discard(path)


def remove(folder: Path) -> None:
    """Rename first: what is half deleted must not look like a checkpoint, not even after a power cut."""
    doomed = folder.with_name(folder.name + REMOVED)
    folder.rename(doomed)
    sync_folder(folder.parent)
    discard(doomed)


def discard(path: Path) -> None:
    """Delete a folder, or the link to one: what a link leads to is not ours."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
