"""`manifest.json`: the files of a prepared data set, so that a missing one is noticed.

    {"version": 1, "files": {"train-00000.tokens": {"bytes": 4096, "header_sha256": "..."}, ...}}

A shard's header holds the CRC-32 of its tokens and of its offsets, and the name of its tokenizer, which has a hash of
`tokenizer.json`. So the hash of the header identifies all of them without reading them.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from nsa.config import require
from nsa.data.config import SPLITS, Split
from nsa.files import is_natural, is_sha256, parse_json, read_text, replace_text

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
SUFFIX = ".tokens"

# Enough for 500,000 files.
MAX_MANIFEST_BYTES = 2**26

FILE_NAME = re.compile(rf"({'|'.join(SPLITS)})-([0-9]{{5,9}}){re.escape(SUFFIX)}")


class Listed(NamedTuple):
    bytes: int
    header_sha256: str


class Manifest(NamedTuple):
    files: dict[str, Listed]

    def of(self, split: Split) -> dict[str, Listed]:
        return {name: listed for name, listed in self.files.items() if name.startswith(f"{split}-")}

    def write(self, folder: Path) -> None:
        files = {name: listed._asdict() for name, listed in self.files.items()}
        replace_text(folder / MANIFEST, json.dumps({"version": MANIFEST_VERSION, "files": files}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a data set.

        Raises:
            ValueError: it is missing, or not what `write` writes.
        """
        path = folder / MANIFEST
        if not path.is_file():
            old = any(folder.glob(f"*{SUFFIX}"))
            command = f"nsa data check --write-manifest {shlex.quote(str(folder))}"
            hint = f"; if all files of an older data set are there, `{command}` adds it"
            accepted = f"a folder with {MANIFEST} and *{SUFFIX} files, as `nsa data prepare` writes it"
            require(False, "data.path", str(folder), accepted + hint * old)
        values = parse_json(read_text(path, MAX_MANIFEST_BYTES), f"{path} is not JSON")
        version, files = values.get("version"), values.get("files")
        check_entry(path, "version", version, version == MANIFEST_VERSION, str(MANIFEST_VERSION))
        check_entry(path, "files", files, isinstance(files, dict), "an object")
        assert isinstance(files, dict)
        manifest = cls({name: listed(path, name, files[name]) for name in sorted(files)})
        manifest.check_names(path)
        return manifest

    def check_names(self, path: Path) -> None:
        """Every split is there, and its files are numbered from 0 without a gap."""
        for name in self.files:
            known = FILE_NAME.fullmatch(name) is not None
            check_entry(path, "a file's name", name, known, f"train-00000{SUFFIX}, valid-00000{SUFFIX} and the like")
        for split in SPLITS:
            numbers = [int(name.removeprefix(f"{split}-").removesuffix(SUFFIX)) for name in self.of(split)]
            missing = sorted(set(range(len(numbers) or 1)) - set(numbers))
            check_entry(path, f"the numbers of its {split} files", numbers, not missing, f"{missing[:1]} among them")

    def compare(self, folder: Path) -> None:
        """The files of `folder` are those listed, each with its size.

        Raises:
            ValueError: a file is missing, has another size, or is not listed.
        """
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


def listed(path: Path, name: str, values: Any) -> Listed:
    where = f"files[{name[:60]!r}]"
    keys = list(Listed._fields)
    check_entry(path, where, values, isinstance(values, dict) and sorted(values) == keys, f"an object with {keys}")
    size, sha256 = values["bytes"], values["header_sha256"]
    check_entry(path, f"{where}.bytes", size, is_natural(size), "a size in bytes")
    check_entry(path, f"{where}.header_sha256", sha256, is_sha256(sha256), "64 hexadecimal digits")
    return Listed(size, sha256)


def check_entry(path: Path, name: str, value: object, sound: bool, accepted: str) -> None:
    if not sound:
        raise ValueError(f"{path}: {name} is {repr(value)[:100]}; accepted: {accepted}")
