"""What is on disk if the power fails now: what was synced, and nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nsa import files


class Disk:
    """Records every fsync: the bytes a file had in the kernel then, and the names a folder had.

    Names and bytes that were never synced do not survive. That is the least a file system guarantees; most keep more.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, int]] = {}
        # Keeps inode numbers from being used again.
        self.held: list[int] = []
        monkeypatch.setattr(files, "sync", self.sync)

    def sync(self, descriptor: int) -> None:
        self.held.append(os.dup(descriptor))
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(descriptor) as entries:
                self.folders[found.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            # Read through the kernel, which does not know what Python still buffers.
            self.contents[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def survivors(self, folder: int | None = None, at: str = "") -> dict[str, bytes | None]:
        """Path below the root to its content; None: the name survived and the content did not."""
        found: dict[str, bytes | None] = {}
        inode = self.root.stat().st_ino if folder is None else folder
        for name, child in self.folders.get(inode, {}).items():
            if child in self.folders:
                found |= self.survivors(child, f"{at}{name}/")
            else:
                found[f"{at}{name}"] = self.contents.get(child)
        return found

    def close(self) -> None:
        for descriptor in self.held:
            os.close(descriptor)
