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
from typing import NamedTuple

from nsa.config import require
from nsa.data.config import SPLITS, Split
from nsa.files import check_json, is_natural, is_sha256, parse_json, read_text, replace_text

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
SUFFIX = ".tokens"

# Enough for 500,000 files.
MAX_MANIFEST_BYTES = 2**26

FILE_NAME = re.compile(rf"({'|'.join(SPLITS)})-([0-9]{{5,9}}){re.escape(SUFFIX)}")


class Listed(NamedTuple):
    bytes: int
    header_sha256: str


def is_version(value: object) -> bool:
    return value == MANIFEST_VERSION


MANIFEST_FORMAT = {"version": is_version, "files": {...: {"bytes": is_natural, "header_sha256": is_sha256}}}


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
        values = parse_json(read_text(path, MAX_MANIFEST_BYTES), f"{path} is not JSON")
        try:
            check_json(values, MANIFEST_FORMAT)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        files = {name: Listed(x["bytes"], x["header_sha256"]) for name, x in sorted(values["files"].items())}
        manifest = cls(files)
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
