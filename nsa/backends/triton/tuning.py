"""The tiles of kernels by GPU: those measured, from a file, and the user's own file over it.

    {"sm_90": {"thresholds": {"query_from_heads": 32},
               "tiles": {"scores": {"half": {"128": {"tile": {"block_m": 256, ...}, "measured": {"ms": 6.3, ...}}}}}}}

`measured` says where and when, or is null for a tile that was compiled and never timed. Files need not be complete: a
tile for a large head_dim is used for smaller ones too, and a GPU without an entry takes its nearest relative's.
`nsa bench tune` measures and writes; nothing is searched for when a kernel runs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, ItemsView, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import torch

from nsa import settings
from nsa.files import make_folder, replace_text

PACKAGED = Path(__file__).with_name("tuned.json")

# scores-few-heads: for groups so small that what is kept per query, not per head, fills the registers.
KERNELS = (
    *(f"{branch}-{kernel}" for branch in ("compressed", "sliding") for kernel in ("forward", "dq", "dkv")),
    *("scores", "scores-few-heads", "selected-forward-query", "selected-forward-block", "selected-backward"),
    *("combine-forward", "combine-backward"),
)
# query_from_heads: heads per group from which on the selected forward goes by query, not by block.
# dense_up_to_blocks: up to how many blocks per selected one the selected forward reads all blocks of a sequence.
THRESHOLDS = ("query_from_heads", "dense_up_to_blocks")
DTYPE_CLASSES = ("half", "fp32")
# 192: one of keys and values has a head_dim above 128, the other does not.
HEAD_DIM_CLASSES = (64, 128, 192, 256)
# Fields of tiles by the names that users' files may still have.
RENAMED = {"whole": "max_block_keys", "least": "min_row_tiles", "mask_all": "single_loop"}

GpuFamily = tuple[int, int]
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Key:
    gpu: GpuFamily
    kernel: str
    dtype: str
    head_dim: int

    def __str__(self) -> str:
        return f"{family_name(self.gpu)} {self.kernel} {self.dtype} {self.head_dim}"


@dataclass(frozen=True)
class TunedTile:
    """A tile's fields as the file has them; `build` makes the tile."""

    tile: Mapping[str, Any]
    measured: Mapping[str, Any] | None
    file: Path


@dataclass(frozen=True)
class Tuned:
    """The contents of one or several files of tiles."""

    tiles: Mapping[Key, TunedTile]
    thresholds: Mapping[tuple[GpuFamily, str], int]

    def over(self, other: Tuned) -> Tuned:
        """Both, with the entries of this one where both have one."""
        return Tuned({**other.tiles, **self.tiles}, {**other.thresholds, **self.thresholds})

    def tile(self, kernel: str, kind: type[T], gpu: GpuFamily, head_dim: int, dtype: str) -> T:
        """The tile for a class of head_dims, from the nearest relative that has one, else that of a larger class."""
        families = relatives(gpu, {key.gpu for key in self.tiles})
        for wide in HEAD_DIM_CLASSES[HEAD_DIM_CLASSES.index(head_dim) :]:
            for family in families:
                key = Key(family, kernel, dtype, wide)
                if key in self.tiles:
                    return build(kind, key, self.tiles[key])
        raise LookupError(f"no tile for {Key(gpu, kernel, dtype, head_dim)}")

    def threshold(self, name: str, gpu: GpuFamily) -> int:
        for family in relatives(gpu, {family for family, _ in self.thresholds}):
            if (family, name) in self.thresholds:
                return self.thresholds[family, name]
        raise LookupError(f"no threshold {name} for {family_name(gpu)}")


def is_large(gpu: GpuFamily) -> bool:
    """Hopper and data-center Blackwell: matmuls read shared memory, of which a CTA may have 227 KiB. The others hold
    both factors in registers, and most of them give a CTA 99 KiB."""
    return (9, 0) <= gpu < (12, 0)


def relatives(gpu: GpuFamily, families: Collection[GpuFamily]) -> list[GpuFamily]:
    """Families whose tiles suit `gpu`, the nearest first: never a large GPU's for one that is not, nor the reverse."""

    def distance(family: GpuFamily) -> tuple[bool, int]:
        return family[0] != gpu[0], abs(10 * (family[0] - gpu[0]) + family[1] - gpu[1])

    return sorted((family for family in families if is_large(family) == is_large(gpu)), key=distance)


def head_dim_class(d_k: int, d_v: int) -> int:
    narrow, wide = sorted((d_k, d_v))
    if wide <= 128:
        return 64 if wide <= 64 else 128
    return 192 if narrow <= 128 else 256


def dtype_class(dtype: torch.dtype) -> str:
    return "fp32" if dtype == torch.float32 else "half"


def family_name(gpu: GpuFamily) -> str:
    return f"sm_{gpu[0]}{gpu[1]}"


# What launchers ask, once for each kind of problem.


@cache
def tuned() -> Tuned:
    """The tiles of this process: the user's file over the packaged one."""
    user = user_file()
    packaged = read_tuned(PACKAGED)
    return read_tuned(user).over(packaged) if user is not None and is_file(user) else packaged


@cache
def pick_tile(kernel: str, kind: type[T], gpu: GpuFamily, d_k: int, d_v: int, dtype: torch.dtype) -> T:
    return tuned().tile(kernel, kind, gpu, head_dim_class(d_k, d_v), dtype_class(dtype))


def user_file(config: settings.Settings | None = None) -> Path | None:
    """The path of the user's own tiles, existing or not; None for a user without a home. By default those of this
    process."""
    config = config or settings.current()
    return settings.expand_home(config.tuned_tiles)


def is_file(path: Path) -> bool:
    """False also in a folder without permission."""
    return os.path.isfile(path)


def origin(user: Path | None) -> str:
    """Describe where tiles come from; `user` is the user's file."""
    if user is None or not is_file(user):
        return f"{PACKAGED} ({user or 'a home folder'} is no file)"
    return f"{user} ({len(read_tuned(user).tiles)} tiles) over {PACKAGED}"


# The file.


def refuse(path: Path, where: str, found: str, accepted: str) -> NoReturn:
    raise ValueError(f"tiles file {path}: {where} {found}; accepted: {accepted}")


def build(kind: type[T], key: Key, entry: TunedTile) -> T:
    """The tile itself; a field that it has not, or of another type, is an error."""
    kinds = get_type_hints(kind)
    for name, value in entry.tile.items():
        if name not in kinds:
            refuse(
                entry.file, str(key), f"has a field {name!r}", f"{', '.join(kinds)}; `nsa bench tune` writes it again"
            )
        types = get_args(kinds[name]) or (kinds[name],)
        # An exact type: True is no number of warps.
        if type(value) not in types:
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            refuse(entry.file, str(key), f"has {name} = {value!r}", names)
        if name.startswith("block_") or name.endswith(("warps", "elements")):
            if value < 1 or value & (value - 1):
                refuse(entry.file, str(key), f"has {name} = {value!r}", "a power of two")
        elif type(value) is int and value < 0:
            refuse(entry.file, str(key), f"has {name} = {value!r}", "0 or more")
    needed = [field.name for field in fields(kind) if field.default is MISSING]  # type: ignore[arg-type]
    if not set(needed) <= set(entry.tile):
        refuse(entry.file, str(key), f"has only {', '.join(entry.tile) or 'no field'}", f"at least {', '.join(needed)}")
    return kind(**entry.tile)


def read_tuned(path: Path) -> Tuned:
    tiles: dict[Key, TunedTile] = {}
    thresholds: dict[tuple[GpuFamily, str], int] = {}

    def members(node: Any, where: str, known: Collection[str] | None = None) -> ItemsView[str, Any]:
        if not isinstance(node, dict):
            refuse(path, where, f"is {node!r}", "an object")
        for name in node:
            if known is not None and name not in known:
                refuse(path, where, f"has {name!r}", ", ".join(known))
        return node.items()

    for name, family in members(parse_tuned(path), "the file"):
        gpu = parse_family(path, name)
        parts = dict(members(family, name, ("thresholds", "tiles")))
        for threshold, value in members(parts.get("thresholds", {}), f"{name} thresholds", THRESHOLDS):
            if type(value) is not int or value < 0:
                refuse(path, f"{name} {threshold}", f"is {value!r}", "an integer of at least 0")
            thresholds[gpu, threshold] = value
        for kernel, dtypes in members(parts.get("tiles", {}), f"{name} tiles", KERNELS):
            for dtype, dims in members(dtypes, f"{name} {kernel}", DTYPE_CLASSES):
                for head_dim, entry in members(dims, f"{name} {kernel} {dtype}", [*map(str, HEAD_DIM_CLASSES)]):
                    key = Key(gpu, kernel, dtype, int(head_dim))
                    given = dict(members(entry, str(key), ("tile", "measured")))
                    given_fields = members(given.get("tile"), f"{key} tile")
                    tile = {RENAMED.get(name, name): value for name, value in given_fields}
                    measured = given.get("measured")
                    tiles[key] = TunedTile(tile, None if measured is None else dict(members(measured, str(key))), path)
    return Tuned(tiles, thresholds)


def parse_tuned(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"tiles file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tiles file {path} is not JSON: {error}") from None


def parse_family(path: Path, name: str) -> GpuFamily:
    found = re.fullmatch(r"sm_(\d+)(\d)", name)
    if found is None:
        refuse(path, "the file", f"has {name!r}", "GPU families, as in sm_90")
    return int(found[1]), int(found[2])


def write_tuned(path: Path, content: Tuned) -> None:
    """Replace the file atomically: readers see the old one or the new one."""
    make_folder(path.parent)
    replace_text(path, rendered(nested(content)) + "\n")


def nested(content: Tuned) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for gpu in sorted({key.gpu for key in content.tiles} | {gpu for gpu, _ in content.thresholds}):
        family: dict[str, Any] = {"thresholds": {}, "tiles": {}}
        root[family_name(gpu)] = family
        for name in THRESHOLDS:
            if (gpu, name) in content.thresholds:
                family["thresholds"][name] = content.thresholds[gpu, name]
        for key in sorted(
            content.tiles, key=lambda key: (KERNELS.index(key.kernel), DTYPE_CLASSES.index(key.dtype), key)
        ):
            if key.gpu == gpu:
                entry = content.tiles[key]
                by_head_dim = family["tiles"].setdefault(key.kernel, {}).setdefault(key.dtype, {})
                by_head_dim[str(key.head_dim)] = {"tile": entry.tile, "measured": entry.measured}
    return root


def rendered(node: Any, indent: int = 0) -> str:
    """JSON with a line for each tile."""
    if not isinstance(node, dict) or "tile" in node or not any(isinstance(inner, dict) for inner in node.values()):
        return json.dumps(node)
    margin = " " * (indent + 2)
    lines = [f"{margin}{json.dumps(name)}: {rendered(inner, indent + 2)}" for name, inner in node.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
