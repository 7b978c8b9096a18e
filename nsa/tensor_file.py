"""Tensors in a file of the safetensors format: 8 bytes with the header's length, the header in JSON, the data.

Written here rather than by the safetensors library, so that the checksum is computed on the way to the disk without a
second copy in memory, the file is durable, and neither checkpoints nor exports need more than torch. Any reader of the
format reads these files. Every header is checked against the size of the file: a mapped file that is shorter than its
header claims would end the process with SIGBUS.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
import os
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from nsa.files import is_natural, parse_json, replacing

# The names that the format has for torch's dtypes.
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
STORED_DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U8": torch.uint8, "BOOL": torch.bool}
STORED_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"


class Written(NamedTuple):
    """A file as it went to the disk."""

    bytes: int
    sha256: str


class Entry(NamedTuple):
    """One tensor of a file; `begin` and `end` count from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Written:
    """Write contiguous CPU tensors durably; the size and checksum of the file."""
    # Wide elements first: each tensor then begins at a multiple of its element's size, as a view of the file needs.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {} if metadata is None else {METADATA: metadata}
    end = 0
    for key, x in ordered:
        begin, end = end, end + x.numel() * x.element_size()
        header[key] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    total = 0
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text, *(raw(x) for _, x in ordered)]
    with replacing(path) as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            total += len(part)
    return Written(total, digest.hexdigest())


def raw(x: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; `Tensor.numpy` would need NumPy and knows no bfloat16."""
    assert x.is_contiguous()
    size = x.numel() * x.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(x.data_ptr())).cast("B") if size else memoryview(b"")


def read_header(file: IO[bytes]) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Every tensor of an open file by its name, and the file's metadata; a ValueError where the header is malformed or
    the file too short."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"{size:,} bytes, too short for a header of {length:,}, or the header has over 100 MB")
    header = parse_json(file.read(length))
    metadata = header.pop(METADATA, None)
    entries = {key: parse_entry(key, value, start=8 + length, size=size) for key, value in header.items()}
    return entries, metadata if isinstance(metadata, dict) else {}


def parse_entry(key: str, value: Any, *, start: int, size: int) -> Entry:
    name = f"tensor {key[:80]!r}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise ValueError(f"{name} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED_DTYPES:
        raise ValueError(f"{name} has dtype {str(dtype)[:40]!r}; accepted: {', '.join(STORED_DTYPES)}")
    if not is_sizes(shape) or not is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has a shape or data_offsets that are not integers from 0 to 2**63 - 1")
    begin, end = offsets
    expected = math.prod(shape) * STORED_DTYPES[dtype].itemsize
    if end - begin != expected or start + end > size:
        sizes = f"its data_offsets are {offsets}, and the file has {size - start:,} bytes of data"
        raise ValueError(f"{name} of shape {str(shape)[:80]} takes {expected} bytes, {sizes}")
    return Entry(STORED_DTYPES[dtype], tuple(shape), start + begin, start + end)


def is_sizes(value: Any) -> bool:
    """Whether it is a list of sizes or offsets that torch can hold."""
    return isinstance(value, list) and len(value) <= 64 and all(map(is_natural, value))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The file's tensors, as views of the mapped file: only what is used is read. A ValueError names a damaged file."""
    return read_tensors_and_metadata(path)[0]


def read_tensors_and_metadata(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `read_tensors` does, and the file's metadata."""
    try:
        with path.open("rb") as file:
            entries, metadata = read_header(file)
            # Copy on write: torch requires writable memory, which is never written.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return {key: view(mapped, entry) for key, entry in entries.items()}, metadata
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def view(mapped: mmap.mmap, entry: Entry) -> Tensor:
    count = math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    if entry.begin % entry.dtype.itemsize:
        # Files of other writers need not be aligned.
        x = torch.frombuffer(bytearray(mapped[entry.begin : entry.end]), dtype=entry.dtype)
    else:
        x = torch.frombuffer(mapped, dtype=entry.dtype, count=count, offset=entry.begin)
    return x.view(entry.shape)
