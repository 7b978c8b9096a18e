"""Tokens in files that are mapped into memory: what `nsa data prepare` writes, and the pools made of them.

A folder holds `train-00000.tokens`, `valid-00000.tokens`, ... and the tokenizer. A file is, all little-endian:

    128 bytes   magic, version, bytes per token, vocabulary, CRC-32 of the tokens and of the offsets, number of tokens
                and of documents, name of the tokenizer (which has its hash), CRC-32 of all that
    tokens      uint16 or uint32, documents one after the other, each with its end; zeros up to a multiple of 8 bytes
    offsets     int64 [documents + 1]: where each document begins, and the number of tokens

Opening a file checks everything but the tokens, which takes no time; `check_tokens` reads those too. A window that is
read is only checked for tokens that no vocabulary has: a model would fail on those far from here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from nsa.config import require
from nsa.data.config import Split
from nsa.data.pools import Pool, Window
from nsa.data.shuffle import Permutation
from nsa.data.tokenizer import Tokenizer, load_tokenizer

MAGIC = b"NSATOKEN"
# 2 names the tokenizer.
VERSION = 2
FIELDS = struct.Struct("<8s5I2Q32s")
SEAL = struct.Struct("<I")
HEADER_BYTES = 128
SUFFIX = ".tokens"
DTYPES = {2: torch.uint16, 4: torch.uint32}

# Read at once when tokens are checked.
BLOCK = 2**24


class Header(NamedTuple):
    magic: bytes
    version: int
    width: int
    vocab_size: int
    tokens_crc: int
    offsets_crc: int
    tokens: int
    documents: int
    # Filled up with zeros.
    tokenizer: bytes

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.rstrip(b"\0").decode()

    def pack(self) -> bytes:
        fields = FIELDS.pack(*self)
        return (fields + SEAL.pack(crc32(fields))).ljust(HEADER_BYTES, b"\0")

    @property
    def offsets_at(self) -> int:
        return HEADER_BYTES + -(-self.tokens * self.width // 8) * 8

    @property
    def file_bytes(self) -> int:
        return self.offsets_at + (self.documents + 1) * 8


class Shard:
    """One file, checked and mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        memory = torch.from_file(str(path), size=self.header.file_bytes, dtype=torch.uint8)
        end = HEADER_BYTES + self.header.tokens * self.header.width
        self.tokens = memory[HEADER_BYTES:end].view(DTYPES[self.header.width])
        self.offsets = memory[self.header.offsets_at :].view(torch.int64)
        damaged(
            crc32(raw(self.offsets)) == self.header.offsets_crc, path, "its document offsets do not match their CRC"
        )

    def check_tokens(self) -> None:
        """Read every token: does what was written still stand there?"""
        found = 0
        for block in self.tokens.split(BLOCK):
            found = crc32(raw(block), found)
        damaged(found == self.header.tokens_crc, self.path, "its tokens do not match their CRC")

    def read(self, begin: int, end: int) -> Tensor:
        """int64."""
        tokens = self.tokens[begin:end].to(torch.int64)
        if int(tokens.max()) >= self.header.vocab_size:
            first = int((tokens >= self.header.vocab_size).nonzero()[0])
            damaged(
                False,
                self.path,
                f"its token {begin + first:,}, at byte {HEADER_BYTES + (begin + first) * self.header.width:,}, is "
                f"{tokens[first]}, and its vocabulary has {self.header.vocab_size:,}",
            )
        return tokens

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Another one would give its words to these tokens, and nothing would fail."""
        require(
            tokenizer.name == self.header.tokenizer_name,
            f"the tokenizer beside {self.path}",
            tokenizer.name,
            f"{self.header.tokenizer_name!r}, which the tokens were made with",
        )


def read_header(path: Path) -> Header:
    with path.open("rb") as file:
        start = file.read(HEADER_BYTES)
    damaged(len(start) == HEADER_BYTES, path, f"it has {len(start)} bytes, its header alone would have {HEADER_BYTES}")
    header = Header(*FIELDS.unpack_from(start))
    damaged(header.magic == MAGIC, path, f"it begins with {header.magic!r}, not {MAGIC!r}")
    # Before the seal, which is elsewhere in another version.
    damaged(header.version == VERSION, path, f"it has version {header.version}, this is for version {VERSION}")
    (seal,) = SEAL.unpack_from(start, FIELDS.size)
    damaged(seal == crc32(start[: FIELDS.size]), path, "its header does not match its CRC")
    damaged(header.width in DTYPES, path, f"it has {header.width} bytes per token")
    found = path.stat().st_size
    damaged(found == header.file_bytes, path, f"it has {found:,} bytes, its header says {header.file_bytes:,}")
    return header


def damaged(sound: bool, path: Path, what: str) -> None:
    if not sound:
        raise ValueError(f"{path} is no intact file of tokens: {what}; `nsa data prepare` writes it anew")


class ShardWriter:
    """Documents into files of about `shard_tokens` each.

    They are written aside and get their names together, in `publish`: a part of a corpus must not pass for the whole.
    """

    def __init__(self, folder: Path, split: Split, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.vocab_size, self.tokenizer_name = tokenizer.vocab_size, tokenizer.name.encode()
        self.width = 2 if self.vocab_size <= 2**16 else 4
        # Of all files, the one that is being written included.
        self.paths: list[Path] = []
        # `longest`: tokens of the file with the most.
        self.tokens = self.documents = self.longest = 0
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
            data = raw(document.to(DTYPES[self.width]))
            self.file.write(data)
            self.crc = crc32(data, self.crc)
            self.offsets.append(self.offsets[-1] + len(document))
            self.tokens += len(document)
            self.documents += 1
            if self.offsets[-1] >= self.shard_tokens:
                self.finish()

    def open(self) -> None:
        self.paths.append(self.folder / f"{self.split}-{len(self.paths):05}{SUFFIX}")
        self.file = aside(self.paths[-1]).open("wb")
        self.file.write(bytes(HEADER_BYTES))
        self.offsets, self.crc = [0], 0

    def finish(self) -> None:
        """Close the file that is being written, if any."""
        if self.file is None:
            return
        offsets = raw(torch.tensor(self.offsets))
        count = self.offsets[-1]
        self.longest = max(self.longest, count)
        header = Header(
            magic=MAGIC,
            version=VERSION,
            width=self.width,
            vocab_size=self.vocab_size,
            tokens_crc=self.crc,
            offsets_crc=crc32(offsets),
            tokens=count,
            documents=len(self.offsets) - 1,
            tokenizer=self.tokenizer_name,
        )
        self.file.write(bytes(header.offsets_at - HEADER_BYTES - count * self.width) + offsets)
        self.file.seek(0)
        self.file.write(header.pack())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None

    def publish(self) -> None:
        """Everything is there: the files get their names."""
        self.finish()
        for path in self.paths:
            aside(path).rename(path)

    def discard(self) -> None:
        """Leave nothing of what was not published."""
        if self.file is not None:
            self.file.close()
        for path in self.paths:
            aside(path).unlink(missing_ok=True)


def aside(path: Path) -> Path:
    return path.with_suffix(".part")


def raw(tensor: Tensor) -> bytes:
    # Numpy would do this too, and is not needed for anything else here.
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


class ShardPool(Pool):
    """All windows of all files: an epoch. A window stays within its file."""

    def __init__(self, shards: Sequence[Shard], seq_len: int, seed: int, epoch: int) -> None:
        self.shards, self.seq_len = shards, seq_len
        # The number of windows up to each file.
        self.ends = list(accumulate(max(0, (shard.header.tokens - 1) // seq_len) for shard in shards))
        self.mark = {"epoch": epoch}
        self.order = Permutation(self.ends[-1], seed, epoch)

    def window(self, index: int) -> Window:
        number = self.order[index]
        at = bisect_right(self.ends, number)
        shard = self.shards[at]
        begin = (number - (self.ends[at - 1] if at else 0)) * self.seq_len
        end = begin + self.seq_len + 1
        first, last = torch.searchsorted(shard.offsets[:-1], torch.tensor([begin, end])).tolist()
        return Window(shard.read(begin, end), shard.offsets[first:last] - begin)


class ShardPools:
    """Every rank reads only the windows that are its own."""

    def __init__(self, folder: Path, *, tokenizer: str | None, split: Split, seq_len: int, seed: int) -> None:
        self.shards = [Shard(path) for path in find_shards(folder, split)]
        self.tokenizer = own_tokenizer(folder, tokenizer, self.shards)
        self.seq_len, self.seed = seq_len, seed
        self.doing = f"reading {folder}"
        tokens = sum(shard.header.tokens for shard in self.shards)
        self.name = f"shards ({len(self.shards):,} files, {tokens:,} tokens)"
        headers = b"".join(shard.header.pack() for shard in self.shards)
        self.fingerprint = hashlib.sha256(headers).hexdigest()[:16]
        require(
            self.pool(0).ends[-1] > 0,
            f"the {split} split of {folder}",
            f"{tokens:,} tokens",
            f"a file with at least seq_len + 1 = {seq_len + 1:,}",
        )

    def pools(self, mark: dict[str, Any] | None) -> Iterator[Pool]:
        epoch = mark["epoch"] if mark else 0
        while True:
            yield self.pool(epoch)
            epoch += 1

    def pool(self, epoch: int) -> ShardPool:
        return ShardPool(self.shards, self.seq_len, self.seed, epoch)


def find_shards(folder: Path, split: Split) -> list[Path]:
    paths = sorted(folder.glob(f"{split}-*{SUFFIX}"))
    require(bool(paths), "data.path", str(folder), f"a folder with {split}-*{SUFFIX}, as `nsa data prepare` writes it")
    return paths


def own_tokenizer(folder: Path, asked: str | None, shards: Sequence[Shard]) -> Tokenizer:
    """The one the tokens were made with; another one that was asked for is an error."""
    tokenizer = load_tokenizer(folder)
    for shard in shards:
        shard.check_tokenizer(tokenizer)
    if asked is not None:
        require(
            load_tokenizer(asked).name == tokenizer.name,
            "data.tokenizer",
            asked,
            f"{str(folder)!r} or none: the shards have their own, {tokenizer.name}",
        )
    return tokenizer
