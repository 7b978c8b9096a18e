"""Saved caches: the rows of one or several layers, and their tokens, in one file of the safetensors format.

    layers.0.lengths, .high_water, .crop_floor int32 [B]
    layers.0.selected.0, ...                   [B, slots, ...]: keys, values and with fp8 their scales, by slot
    tokens                                     int64 [B, longest], -1 past a row's end

The metadata has the format's name and version, the config and form of each cache, and a checksum of everything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa.cache.store import Ring, bits
from nsa.config import NSAConfig, require
from nsa.files import is_natural, parse_json
from nsa.tensor_file import raw, read_tensors_and_metadata, write_tensors

if TYPE_CHECKING:
    from nsa.cache.rows import RowCache

FORMAT, VERSION = "nsa-cache", 1
# What of a config does not change the content of a cache.
RUNTIME_FIELDS = ("backend", "strict")


def save_caches(
    path: Path, caches: Sequence[RowCache], *, tokens: Sequence[Sequence[int]] | None = None, model: str = ""
) -> None:
    """Write the contents of `caches`.

    Args:
        path: Replaced if it exists.
        caches: Of one layer, or of all layers of a model, in order.
        tokens: The token ids of each row, as many as it holds.
        model: Identifies the weights that the rows were computed with.

    Raises:
        ValueError: A row of `tokens` has another length than the row of the caches, or something that is no token id.
    """
    tensors: dict[str, Tensor] = {}
    described: list[dict[str, Any]] = []
    for index, cache in enumerate(caches):
        for name, x in cache_tensors(cache).items():
            tensors[f"layers.{index}.{name}"] = x.cpu().contiguous()
        sizes = {"max_len": cache.max_len, "max_rollback": cache.max_rollback, "dtype": str(cache.dtype)}
        described.append({**cache.saved_form(), **sizes, "config": content_config(cache.config)})
    if tokens is not None:
        lengths = caches[0].lengths.tolist()
        require([len(row) for row in tokens] == lengths, "tokens", [len(row) for row in tokens], f"{lengths} tokens")
        for index, row in enumerate(tokens):
            require(all(map(is_natural, row)), f"tokens[{index}]", row, "integers of at least 0")
        width = max(lengths)
        padded = [[*row, *[-1] * (width - len(row))] for row in tokens]
        tensors["tokens"] = torch.tensor(padded, dtype=torch.int64).view(len(padded), width)
    about = json.dumps({"version": VERSION, "model": model, "caches": described}, sort_keys=True)
    write_tensors(path, tensors, {"format": FORMAT, "about": about, "sha256": checksum(tensors, about)})


def content_config(config: NSAConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in RUNTIME_FIELDS}


def cache_tensors(cache: RowCache) -> dict[str, Tensor]:
    """The tensors of a cache by slot, whether it is paged or not, as far as they are in use."""
    longest = int(cache.lengths.max())
    used = cache.slots_for(max(1, longest))
    tensors = {"lengths": cache.lengths, "high_water": cache.high_water, "crop_floor": cache.crop_floor}
    for name, store in cache.stores().items():
        n = store.slots if isinstance(store, Ring) else min(used[name], store.slots)
        index = torch.arange(n, device=cache.device).expand(cache.batch_size, -1)
        for part, x in enumerate(store.stored(index)):
            tensors[f"{name}.{part}"] = x
    return tensors


def checksum(tensors: dict[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(raw(x))
    return digest.hexdigest()


@dataclass(frozen=True)
class SavedCaches:
    """The content of a file."""

    path: Path
    model: str
    forms: list[dict[str, Any]]  # of each cache: kind, sizes, dtype, config
    tensors: dict[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Of the caches' keys and values."""
        found = getattr(torch, str(self.forms[0].get("dtype")).removeprefix("torch."), None)
        require(isinstance(found, torch.dtype), f"the dtype in {self.path}", self.forms[0].get("dtype"), "one of torch")
        assert isinstance(found, torch.dtype)
        return found

    def tokens(self) -> list[list[int]] | None:
        """The token ids of each row; None: the file has none."""
        if "tokens" not in self.tensors:
            return None
        lengths = self.tensor("lengths", 0).tolist()
        return [row[:n] for row, n in zip(self.tensors["tokens"].tolist(), lengths, strict=True)]

    def tensor(self, name: str, layer: int) -> Tensor:
        key = f"layers.{layer}.{name}"
        require(key in self.tensors, f"the tensors in {self.path}", sorted(self.tensors), f"one named {key}")
        return self.tensors[key]

    def form(self, layer: int, config: NSAConfig, *, kind: str, n_layers: int = 1) -> dict[str, Any]:
        """What the file says of one cache; a ValueError for another number of them, or another kind or config."""
        require(len(self.forms) == n_layers, f"caches in {self.path}", len(self.forms), f"{n_layers}")
        form = self.forms[layer]
        require(form["kind"] == kind, f"the kind of cache in {self.path}", form["kind"], kind)
        expected = content_config(config)
        for name, value in form["config"].items():
            require(value == expected.get(name), f"{name} in {self.path}", value, f"the layer's, {expected.get(name)}")
        return form

    @torch.no_grad()
    def restore(
        self, cache: RowCache, layer: int, *, rows: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> None:
        """Fill an empty cache, whose `batch_size` and `max_len` may differ from those that were saved.

        Args:
            cache: With as many rows as `rows`.
            layer: Which of the saved caches it is filled from.
            rows: The saved row of each row. Default: as saved.
            lengths: How many tokens of each row are kept. Default: all.

        Raises:
            ValueError: The rows do not fit, or `lengths` removes more tokens than can be rolled back.
        """
        source = torch.arange(len(self.tensor("lengths", layer))) if rows is None else torch.tensor(rows)
        saved, high_water, floor = (
            self.tensor(name, layer)[source] for name in ("lengths", "high_water", "crop_floor")
        )
        kept = saved if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        fits = kept.shape == cache.lengths.shape and bool(((kept >= 0) & (kept <= saved)).all())
        require(fits, f"lengths of rows in {self.path}", kept.tolist(), f"{cache.batch_size}, at most {saved.tolist()}")
        stores = {name: self.store_tensors(cache, name, layer) for name in cache.stores()}
        cache.make_room(kept.tolist())
        new_floor = torch.zeros_like(kept)
        for name, store in cache.stores().items():
            values = tuple(bits(x)[source].view(x.dtype) for x in stores[name])
            n_saved = values[0].shape[1]
            if isinstance(store, Ring):
                # By position, as the number of slots may differ.
                n = min(n_saved, store.slots)
                position = kept[:, None] - n + torch.arange(n)
                held_from = torch.stack([high_water - n_saved, floor - store.full_reach, kept - n]).amax(0).clamp_min(0)
                lost = (held_from > (kept - store.reach).clamp_min(0)) & (kept > 0)
                accepted = f"{saved.tolist()}, less at most max_rollback = {self.forms[layer]['max_rollback']}"
                require(not bool(lost.any()), f"lengths of rows in {self.path}", kept.tolist(), accepted)
                row = torch.arange(len(kept))[:, None]
                values = tuple(bits(x)[row, position.clamp_min(0) % n_saved].view(x.dtype) for x in values)
                index, keep = position.clamp_min(0) % store.slots, position >= 0
                new_floor = torch.maximum(new_floor, torch.where(held_from > 0, held_from + store.reach, 0))
            else:
                index = torch.arange(n_saved).expand(len(kept), -1)
                keep = index < cache.slots_of(name, kept)[:, None]
            index, keep = index.to(cache.device), keep.to(cache.device)
            store.store(index, tuple(x.to(cache.device) for x in values), keep)
        cache.lengths.copy_(kept)
        cache.high_water.copy_(kept)
        cache.crop_floor.copy_(new_floor)
        cache.longest = int(kept.max())

    def store_tensors(self, cache: RowCache, name: str, layer: int) -> list[Tensor]:
        """The saved tensors of one store, with the shapes and dtypes that `cache` has."""
        found = [self.tensor(f"{name}.{part}", layer) for part in range(len(cache.stores()[name].tensors()))]
        for x, like in zip(found, cache.stores()[name].tensors(), strict=True):
            fits = x.dtype == like.dtype and x.dim() == like.dim() and x.shape[2:] == like.shape[2:]
            accepted = f"{like.dtype}, [B, slots, {', '.join(map(str, like.shape[2:]))}]"
            require(fits, f"{name} in {self.path}", (x.dtype, tuple(x.shape)), accepted)
        return found


def read_saved(path: Path) -> SavedCaches:
    """Read a file that `save_caches` wrote; a ValueError names `path` if it is damaged, or no such file."""
    tensors, metadata = read_tensors_and_metadata(path)
    accepted = f"a file that NSACache.save wrote, of version {VERSION}"
    require(metadata.get("format") == FORMAT, f"the format of {path}", metadata.get("format"), accepted)
    text = str(metadata.get("about"))
    if checksum(tensors, text) != metadata.get("sha256"):
        raise ValueError(f"{path} is damaged: its content does not have the checksum that was saved with it")
    about = parse_json(text, f"{path} is damaged")
    require(about.get("version") == VERSION, f"the version of {path}", about.get("version"), accepted)
    return SavedCaches(path, about["model"], about["caches"], tensors)
