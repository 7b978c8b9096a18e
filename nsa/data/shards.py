"""Files of tokens, which `nsa data prepare` writes, and the pools that read them.

A folder holds `train-00000.tokens`, `valid-00000.tokens`, ..., the tokenizer, and the manifest that lists them. A file
is, all little-endian:

    128 bytes   magic, version, bytes per token, vocabulary, CRC-32 of the tokens and of the offsets, number of tokens
                and of documents, name of the tokenizer (which includes its hash), CRC-32 of all that
    tokens      uint16 or uint32, concatenated documents, each with its end token; zeros up to a multiple of 8 bytes
    offsets     int64 [documents + 1]: where each document begins, and the number of tokens

Opening a file checks everything but the tokens; `check_tokens` reads those too. A window that is read is checked for
tokens beyond the vocabulary. Files are read, not mapped: a mapped file that is truncated later ends the process with
SIGBUS.

`manifest.json` lists the files, so that a missing one is noticed:

    {"version": 1, "files": {"train-00000.tokens": {"bytes": 4096, "header_sha256": "..."}, ...}}

The hash of a file's header identifies its tokens, offsets and tokenizer without reading them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from nsa.config import require
from nsa.data.config import SPLITS, Split
from nsa.data.pools import Pool, Window
from nsa.data.shuffle import Permutation
from nsa.data.tokenizer import Tokenizer, load_tokenizer
from nsa.files import check_json, is_natural, is_sha256, naming_file, read_json, replace_text, sync_file, sync_folder
from nsa.tensor_file import raw

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
SUFFIX = ".tokens"

# Enough for 500,000 files.
MAX_MANIFEST_BYTES = 2**26

FILE_NAME = re.compile(rf"({'|'.join(SPLITS)})-([0-9]{{5,9}}){re.escape(SUFFIX)}")
MAGIC = b"NSATOKEN"
SHARD_VERSION = 2
FIELDS = struct.Struct("<8s5I2Q32s")
SEAL = struct.Struct("<I")
HEADER_BYTES = 128
TOKEN_DTYPES = {2: torch.uint16, 4: torch.uint32}

# Tokens or offsets read at once when all are checked.
CHECK_BLOCK = 2**22
# Every so many offsets, one is kept in memory; divides CHECK_BLOCK.
COARSE_EVERY = 256


def unfinished(path: Path) -> Path:
    """The name under which a file is written until it is complete."""
    return path.with_name(path.name + ".part")


class Listed(NamedTuple):
    bytes: int
    header_sha256: str


MANIFEST_FORMAT = {"files": {...: {"bytes": is_natural, "header_sha256": is_sha256}}}


class Manifest(NamedTuple):
    files: dict[str, Listed]

    def of(self, split: Split) -> dict[str, Listed]:
        return {name: listed for name, listed in self.files.items() if name.startswith(f"{split}-")}

    def write(self, folder: Path) -> None:
        files = {name: listed._asdict() for name, listed in self.files.items()}
        replace_text(folder / MANIFEST, json.dumps({"version": MANIFEST_VERSION, "files": files}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a data set; a ValueError if it is missing, or not what `write` writes."""
        path = folder / MANIFEST
        if not path.is_file():
            old = any(folder.glob(f"*{SUFFIX}"))
            command = f"nsa data check --write-manifest {shlex.quote(str(folder))}"
            hint = f"; if all files of an older data set are there, `{command}` adds it"
            accepted = f"a folder with {MANIFEST} and *{SUFFIX} files, as `nsa data prepare` writes it"
            require(False, "data.path", str(folder), accepted + hint * old)
        values = read_json(path, MAX_MANIFEST_BYTES)
        version = values.get("version")
        require(version == MANIFEST_VERSION, f"{path}: version", version, str(MANIFEST_VERSION))
        try:
            check_json(values, MANIFEST_FORMAT)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        manifest = cls({name: Listed(x["bytes"], x["header_sha256"]) for name, x in sorted(values["files"].items())})
        manifest.check_names(path)
        return manifest

    def check_names(self, path: Path) -> None:
        """Every split is there, and its files are numbered from 0 without a gap."""
        for name in self.files:
            like = f"train-00000{SUFFIX}, valid-00000{SUFFIX} and the like"
            require(FILE_NAME.fullmatch(name) is not None, f"the name of a file in {path}", name[:100], like)
        for split in SPLITS:
            numbers = [int(name.removeprefix(f"{split}-").removesuffix(SUFFIX)) for name in self.of(split)]
            missing = sorted(set(range(len(numbers) or 1)) - set(numbers))
            require(not missing, f"the numbers of the {split} files in {path}", numbers, f"{missing[:1]} among them")

    def compare(self, folder: Path) -> None:
        """A ValueError unless the files of `folder` are those listed, each with its size."""
        found = {path.name: path.stat().st_size for path in folder.glob(f"*{SUFFIX}")}
        sizes = {name: file.bytes for name, file in self.files.items()}
        problems = [
            *(f"{name} is missing" for name in sizes if name not in found),
            *(f"{n} has {found[n]:,} bytes, not {sizes[n]:,}" for n in sizes if found.get(n, sizes[n]) != sizes[n]),
            *(f"{name} is not listed" for name in found if name not in sizes),
        ]
        if problems:
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ValueError(f"{folder} is not what its {MANIFEST} lists: {'; '.join(problems[:3])}{more}")


class Header(NamedTuple):
    """The first 128 bytes of a file."""

    magic: bytes
    version: int
    width: int
    vocab_size: int
    tokens_crc: int
    offsets_crc: int
    tokens: int
    documents: int
    tokenizer: bytes  # padded with zeros

    def pack(self) -> bytes:
        fields = FIELDS.pack(*self)
        return (fields + SEAL.pack(crc32(fields))).ljust(HEADER_BYTES, b"\0")

    @property
    def listed(self) -> Listed:
        """The file's entry in the manifest."""
        return Listed(self.file_bytes, hashlib.sha256(self.pack()).hexdigest())

    @property
    def offsets_at(self) -> int:
        return HEADER_BYTES + -(-self.tokens * self.width // 8) * 8

    @property
    def file_bytes(self) -> int:
        return self.offsets_at + (self.documents + 1) * 8


class Shard:
    """One file, checked when it is opened; every read checks that it is still the same file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.coarse: list[
            int
        ] = []  # every COARSE_EVERY-th offset: all of them would fill the memory for a trillion tokens
        with open_file(path) as file:
            self.header = read_shard_header(file, path)
            self.status = os.fstat(file)
            self.check_offsets(file)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Its file descriptor."""
        with open_file(self.path) as file:
            status = os.fstat(file)
            check_size(self.path, status.st_size, self.header)
            check_shard(os.path.samestat(status, self.status), self.path, "it was replaced after it was opened")
            yield file

    def read(self, file: int, at: int, dtype: torch.dtype, count: int) -> Tensor:
        """`count` numbers from byte `at` on."""
        data = bytearray(os.pread(file, count * dtype.itemsize, at))
        check_shard(len(data) == count * dtype.itemsize, self.path, "it was truncated while it was read")
        return torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)

    def offsets(self, file: int, first: int, last: int) -> Tensor:
        return self.read(file, self.header.offsets_at + 8 * first, torch.int64, last - first)

    def tokens(self, file: int, begin: int, end: int) -> Tensor:
        """int64, each below the vocabulary."""
        width, vocab_size = self.header.width, self.header.vocab_size
        tokens = self.read(file, HEADER_BYTES + begin * width, TOKEN_DTYPES[width], end - begin).to(torch.int64)
        if len(tokens) and int(tokens.max()) >= vocab_size:
            first = int((tokens >= vocab_size).nonzero()[0])
            place = f"{begin + first:,}, at byte {HEADER_BYTES + (begin + first) * width:,}"
            wrong = f"its token {place}, is {tokens[first]}, and its vocabulary has {vocab_size:,}"
            check_shard(False, self.path, wrong)
        return tokens

    def window(self, begin: int, end: int) -> Window:
        first = max(0, bisect_left(self.coarse, begin) - 1) * COARSE_EVERY
        last = min(bisect_left(self.coarse, end) * COARSE_EVERY, self.header.documents)
        with self.opened() as file:
            tokens, offsets = self.tokens(file, begin, end), self.offsets(file, first, last)
        first, last = torch.searchsorted(offsets, torch.tensor([begin, end])).tolist()
        return Window(tokens, offsets[first:last] - begin)

    def check_offsets(self, file: int) -> None:
        found, last, ascending = 0, -1, True
        for first in range(0, self.header.documents + 1, CHECK_BLOCK):
            block = self.offsets(file, first, min(first + CHECK_BLOCK, self.header.documents + 1))
            found = crc32(raw_bytes(block), found)
            ascending &= last < int(block[0]) and bool((block.diff() > 0).all()) and (first > 0 or int(block[0]) == 0)
            last = int(block[-1])
            self.coarse += block[::COARSE_EVERY].tolist()
        check_shard(found == self.header.offsets_crc, self.path, "its document offsets do not match their CRC")
        whole = ascending and last == self.header.tokens
        check_shard(whole, self.path, f"its document offsets do not ascend from 0 to its {self.header.tokens:,} tokens")

    def check_tokens(self) -> None:
        """Read every token and compare their checksum."""
        found = 0
        with self.opened() as file:
            for begin in range(0, self.header.tokens, CHECK_BLOCK):
                tokens = self.tokens(file, begin, min(begin + CHECK_BLOCK, self.header.tokens))
                found = crc32(raw_bytes(tokens.to(TOKEN_DTYPES[self.header.width])), found)
        check_shard(found == self.header.tokens_crc, self.path, "its tokens do not match their CRC")


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming_file(path):
            yield file
    finally:
        os.close(file)


def read_shard_header(file: int, path: Path) -> Header:
    start = os.pread(file, HEADER_BYTES, 0)
    size = len(start)
    check_shard(size == HEADER_BYTES, path, f"it has {size} bytes, its header alone would have {HEADER_BYTES}")
    header = Header(*FIELDS.unpack_from(start))
    check_shard(header.magic == MAGIC, path, f"it begins with {header.magic!r}, not {MAGIC!r}")
    # Before the checksum, whose place depends on the version.
    version = header.version
    check_shard(version == SHARD_VERSION, path, f"it has version {version}, this is for version {SHARD_VERSION}")
    (seal,) = SEAL.unpack_from(start, FIELDS.size)
    check_shard(seal == crc32(start[: FIELDS.size]), path, "its header does not match its CRC")
    check_shard(header.width in TOKEN_DTYPES, path, f"it has {header.width} bytes per token")
    check_shard(1 <= header.vocab_size <= 2 ** (8 * header.width), path, f"its vocabulary is {header.vocab_size:,}")
    check_shard(header.tokenizer.isascii(), path, f"its tokenizer is named {header.tokenizer!r}")
    # Before anything is allocated by the header's sizes.
    check_size(path, os.fstat(file).st_size, header)
    return header


def check_size(path: Path, found: int, header: Header) -> None:
    check_shard(found == header.file_bytes, path, f"it has {found:,} bytes, its header says {header.file_bytes:,}")


def check_shard(sound: bool, path: Path, problem: str) -> None:
    if not sound:
        raise ValueError(f"{path} is no intact file of tokens: {problem}; `nsa data prepare` writes it again")


class ShardWriter:
    """Writes documents into files of about `shard_tokens` each.

    Files are written under temporary names and renamed together, in `publish`: a part of a corpus must not pass for the
    whole.
    """

    def __init__(self, folder: Path, split: Split, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.vocab_size, self.tokenizer_name = tokenizer.vocab_size, tokenizer.name.encode()
        self.width = 2 if self.vocab_size <= 2**16 else 4
        self.paths: list[Path] = []  # of all files, including the one that is being written
        self.headers: list[Header] = []  # of complete files
        self.tokens = self.documents = 0
        # Of the file that is being written.
        self.file: Any = None
        self.offsets: list[int] = []
        self.crc = 0

    def add(self, documents: Sequence[Tensor]) -> None:
        for document in documents:
            if self.file is None:
                self.open()
            top = int(document.max())
            require(top < self.vocab_size, "token", top, f"below the vocabulary of {self.vocab_size}")
            data = raw_bytes(document.to(TOKEN_DTYPES[self.width]))
            with naming_file(self.paths[-1]):
                self.file.write(data)
            self.crc = crc32(data, self.crc)
            self.offsets.append(self.offsets[-1] + len(document))
            self.tokens += len(document)
            self.documents += 1
            if self.offsets[-1] >= self.shard_tokens:
                self.finish()

    def open(self) -> None:
        self.paths.append(self.folder / f"{self.split}-{len(self.paths):05}{SUFFIX}")
        self.file = unfinished(self.paths[-1]).open("wb")
        self.file.write(bytes(HEADER_BYTES))
        self.offsets, self.crc = [0], 0

    def finish(self) -> None:
        """Close the file that is being written, if any."""
        if self.file is None:
            return
        offsets = raw_bytes(torch.tensor(self.offsets))
        count, documents = self.offsets[-1], len(self.offsets) - 1
        sizes, crcs = (self.width, self.vocab_size), (self.crc, crc32(offsets))
        header = Header(MAGIC, SHARD_VERSION, *sizes, *crcs, count, documents, self.tokenizer_name)
        with naming_file(self.paths[-1]):
            self.file.write(bytes(header.offsets_at - HEADER_BYTES - count * self.width) + offsets)
            self.file.seek(0)
            self.file.write(header.pack())
            sync_file(self.file)
            self.file.close()
        self.file = None
        self.headers.append(header)

    @property
    def longest(self) -> int:
        """Tokens of the largest file."""
        return max((header.tokens for header in self.headers), default=0)

    @property
    def listed(self) -> dict[str, Listed]:
        return {path.name: header.listed for path, header in zip(self.paths, self.headers, strict=True)}

    def publish(self) -> None:
        """Rename the files durably, once all are complete."""
        self.finish()
        for path in self.paths:
            unfinished(path).rename(path)
        sync_folder(self.folder)

    def discard(self) -> None:
        """Remove every file of this writer."""
        if self.file is not None:
            # On a full disk, closing fails as writing did.
            with suppress(OSError):
                self.file.close()
        for path in self.paths:
            unfinished(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def raw_bytes(tensor: Tensor) -> bytes:
    return bytes(raw(tensor.contiguous()))


class ShardPools:
    """A pool is an epoch: all windows of all files, each within one. Every rank reads only its own."""

    mark_keys: tuple[str, ...] = ("epoch",)

    def __init__(self, folder: Path, *, tokenizer: str | None, split: Split, seq_len: int, seed: int) -> None:
        manifest = Manifest.read(folder)
        manifest.compare(folder)
        self.tokenizer, self.shards = open_shards(folder, manifest.of(split))
        if tokenizer is not None:
            accepted = f"{str(folder)!r} or none: the shards have their own, {self.tokenizer.name}"
            require(load_tokenizer(tokenizer).name == self.tokenizer.name, "data.tokenizer", tokenizer, accepted)
        self.seq_len, self.seed = seq_len, seed
        self.doing = f"reading {folder}"
        tokens = sum(shard.header.tokens for shard in self.shards)
        self.name = f"shards ({len(self.shards):,} files, {tokens:,} tokens)"
        headers = b"".join(shard.header.pack() for shard in self.shards)
        self.fingerprint = hashlib.sha256(headers).hexdigest()[:16]
        accepted = f"a file with at least seq_len + 1 = {seq_len + 1:,}"
        # Cumulative numbers of windows.
        self.ends = list(accumulate(max(0, (shard.header.tokens - 1) // seq_len) for shard in self.shards))
        require(self.ends[-1] > 0, f"the {split} split of {folder}", f"{tokens:,} tokens", accepted)

    def pools(self, mark: dict[str, Any] | None) -> Iterator[Pool]:
        return map(self.pool, count(mark["epoch"] if mark else 0))

    def pool(self, epoch: int) -> Pool:
        return Pool({"epoch": epoch}, Permutation(self.ends[-1], self.seed, epoch), self.read)

    def read(self, number: int) -> Window:
        at = bisect_right(self.ends, number)
        begin = (number - (self.ends[at - 1] if at else 0)) * self.seq_len
        return self.shards[at].window(begin, begin + self.seq_len + 1)


def open_shards(folder: Path, files: dict[str, Listed]) -> tuple[Tokenizer, list[Shard]]:
    """The files that a manifest lists, and the tokenizer beside them, which their tokens were made with."""
    tokenizer, shards = load_tokenizer(folder), [Shard(folder / name) for name in files]
    for shard, listed in zip(shards, files.values(), strict=True):
        check_shard(shard.header.listed == listed, shard.path, "its header is not the one that the manifest lists")
        name = shard.header.tokenizer.rstrip(b"\0").decode()
        accepted = f"{name!r}, which the tokens were made with"
        require(tokenizer.name == name, f"the tokenizer beside {shard.path}", tokenizer.name, accepted)
    return tokenizer, shards
