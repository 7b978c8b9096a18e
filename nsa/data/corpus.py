"""Text that is on every machine: the source files of Python's own standard library, one byte a token.

Nothing is downloaded, the same Python gives the same tokens, and a model that learns it writes something one can judge.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nsa.config import require

# Folders of the library that are not the library: its tests, what was installed into it, data written as code.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}

# One file in this many is kept for validation, so that no text is in both.
VALID_EVERY = 20

# Between two files. It does not occur in source code.
SEPARATOR = b"\0"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Corpus:
    """Two streams of byte tokens, uint8 on the CPU."""

    train: Tensor
    valid: Tensor
    source: str
    vocab_size: int = 256

    def batch(self, split: str, batch_size: int, length: int, *, seed: int, step: int) -> Batch:
        """`(tokens, targets)`, each `[B, S]` int64: random windows that depend on `seed` and `step` alone.

        So a run that is resumed at a step sees what it would have seen, on any device.
        """
        require(split in ("train", "valid"), "split", split, "'train' or 'valid'")
        stream = self.train if split == "train" else self.valid
        require(len(stream) > length, "length", length, f"less than the {len(stream)} tokens of {split}")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        first = torch.randint(len(stream) - length, (batch_size, 1), generator=generator)
        window = stream[first + torch.arange(length + 1)].long()
        return window[:, :-1], window[:, 1:]


def standard_library(root: Path | None = None) -> Corpus:
    """The corpus of the Python that runs this; `root` for another folder of Python files."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
    require(len(files) >= 2, "root", str(root), "a folder with Python source files")
    texts = [path.read_bytes() + SEPARATOR for path in files]
    valid = stream_of(texts[::VALID_EVERY])
    train = stream_of([text for index, text in enumerate(texts) if index % VALID_EVERY])
    source = f"{root} ({len(files)} files, {(len(train) + len(valid)) / 1e6:.1f} MB)"
    return Corpus(train, valid, source)


def stream_of(texts: Sequence[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    """What is not UTF-8, or no byte at all (a vocabulary may be larger), shows as the replacement character."""
    return bytes(min(token, 0xFF) for token in tokens).decode(errors="replace")


def synthetic(batch_size: int, length: int, vocab_size: int, *, seed: int, device: torch.device | str) -> Batch:
    """Uniformly random `(tokens, targets)`, made on the device: for benchmarks, where only shapes matter."""
    generator = torch.Generator(device).manual_seed(seed)
    window = torch.randint(vocab_size, (batch_size, length + 1), generator=generator, device=device)
    return window[:, :-1], window[:, 1:]
