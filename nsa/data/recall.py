"""Synthetic recall: text that states the values of keys, and asks for them later.

    # note kxqt = 83921             a value
    # note bwzp = kxqt              a link: bwzp has the value of kxqt
    # recall bwzp = kxqt = 83921    a question with its answer, every link down to the value

Each step of an answer is a lookup of one earlier line: a small model can learn it, and what it needs is attention to
that line, however far back. Keys and values are preceded by a space wherever they occur: a BPE splits them alike.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from nsa.config import require
from nsa.data.documents import SKIPPED
from nsa.files import replacing

# Characters of text per chain in a training document, at least.
CHARS_PER_CHAIN = 60
# Links of a chain in a training document, at most.
MAX_HOPS = 4
# Files past this are data written as code.
MAX_FILE_BYTES = 400_000


class Chain(NamedTuple):
    """A value that a key has by way of other keys; the key that is asked for comes first."""

    keys: tuple[str, ...]
    value: str

    @property
    def notes(self) -> list[str]:
        """The lines that state it, the value's first."""
        ends = (*self.keys[1:], self.value)
        return [f"# note {key} = {end}" for key, end in zip(self.keys, ends, strict=True)][::-1]

    @property
    def question(self) -> str:
        return f"# recall {self.keys[0]} ="

    @property
    def answer(self) -> str:
        return f" {' = '.join((*self.keys[1:], self.value))}"


def make_chains(rng: Random, hops: Sequence[int]) -> list[Chain]:
    """Chains of so many notes each; no two have a key or a value in common."""
    keys: set[str] = set()
    while len(keys) < sum(hops):
        keys.add("".join(rng.choices(string.ascii_lowercase, k=4)))
    values = [str(value) for value in rng.sample(range(10_000, 100_000), len(hops))]
    # In an order that does not depend on the hashes of this process.
    ordered = sorted(keys)
    rng.shuffle(ordered)
    chains = []
    for count, value in zip(hops, values, strict=True):
        chains.append(Chain(tuple(ordered[:count]), value))
        ordered = ordered[count:]
    return chains


def recall_document(rng: Random, filler: Sequence[str]) -> str:
    """A training document: the lines of `filler` with notes between them, and a question somewhere after each chain and
    again at the end."""
    room = max(1, sum(len(line) + 1 for line in filler) // CHARS_PER_CHAIN)
    # As often a few chains as many: log-uniform.
    count = round(min(room, 64) ** rng.random())
    # Half of them have no link.
    hops = [max(1, rng.randint(2 - MAX_HOPS, MAX_HOPS)) for _ in range(count)]
    chains = make_chains(rng, hops)
    placed: list[tuple[float, str]] = []
    for chain in chains:
        places = [rng.random() for _ in chain.notes]
        placed += zip(places, chain.notes, strict=True)
        placed.append((rng.uniform(max(places), 1), chain.question + chain.answer))
    lines = [(index / max(1, len(filler)), line) for index, line in enumerate(filler)]
    body = [line for _, line in sorted(lines + placed, key=lambda entry: entry[0])]
    asked = rng.sample(chains, len(chains))
    return "\n".join([*body, *(chain.question + chain.answer for chain in asked)]) + "\n"


def python_files(folders: Sequence[Path]) -> list[Path]:
    """Python source under `folders`, without tests, generated data and links out of them, in a fixed order."""
    found = {
        path
        for folder in folders
        for path in folder.rglob("*.py")
        if path.is_file()
        and not path.is_symlink()
        and not (SKIPPED - {"site-packages", "dist-packages"}) & set(path.relative_to(folder).parts)
        and 0 < path.stat().st_size <= MAX_FILE_BYTES
    }
    return sorted(found)


def mixed_documents(
    files: Sequence[Path], *, n_chars: int, recall_share: float, recall_chars: tuple[int, int], seed: int
) -> Iterator[str]:
    """Source files mixed with recall documents whose filler is other source files.

    Args:
        files: Text files, each used once as a document.
        n_chars: Stop after about so many characters.
        recall_share: Of recall documents, in characters, 0 to 1.
        recall_chars: Fewest and most characters of filler of a recall document; their lengths are log-uniform.
        seed: Decides the order of the files and all else.

    Raises:
        ValueError: There is no file, or a number is out of range.
    """
    require(bool(files), "files", list(files), "at least one file")
    require(0 <= recall_share <= 1, "recall_share", recall_share, "a fraction from 0 to 1")
    low, high = recall_chars
    require(0 < low <= high, "recall_chars", recall_chars, "two positive numbers in ascending order")
    rng = Random(seed)
    order = rng.sample(files, len(files))
    filler = cycled_lines(rng.sample(files, len(files)))
    done = recalled = 0
    at = 0
    while done < n_chars:
        if recalled < recall_share * (done + 1) or at == len(order):
            if recall_share == 0:
                return
            wanted, lines = low * (high / low) ** rng.random(), []
            while wanted > 0:
                lines.append(next(filler))
                wanted -= len(lines[-1]) + 1
            text = recall_document(rng, lines)
            recalled += len(text)
        else:
            text = order[at].read_text(encoding="utf-8", errors="replace")
            at += 1
        done += len(text)
        yield text


def cycled_lines(files: Sequence[Path]) -> Iterator[str]:
    while True:
        yield ""
        for path in files:
            yield from path.read_text(encoding="utf-8", errors="replace").splitlines()


def write_corpus(path: Path, documents: Iterator[str]) -> int:
    """Write documents as JSON lines, for `nsa data prepare --source jsonl`; returns how many."""
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for text in documents:
            file.write(json.dumps({"text": text}).encode() + b"\n")
            count += 1
    return count
