"""Synthetic recall: text that states the values of keys, and asks for them later.

    # note kati 583               a value
    # note bewo kati              a link: bewo has the value of kati
    # recall bewo kati 583        a question with its answer, every link down to the value

Each step of an answer copies what followed the same key in an earlier line (induction), which is the least that a model
with two layers learns of attention; what it needs is to attend to that line, however far back. Keys and values are so
few, and have a space before them wherever they occur, that a BPE trained on this text has a token for each of them: one
that splits them asks for several tokens to be matched and copied, which is learned later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from nsa.config import require
from nsa.data.documents import SKIPPED_FOLDERS
from nsa.files import replacing

SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]
NOTE_KEYS = [first + second for first in SYLLABLES for second in SYLLABLES[::22]]
NOTE_VALUES = range(350, 600)
# Characters of text per chain in a training document, at least.
CHARS_PER_CHAIN = 10
# Chains of a training document, at most.
MAX_CHAINS = 124
# Notes of a chain in a training document, at most; and how many chains have more than one.
MAX_HOPS = 4
LINKED_SHARE = 0.25
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
        return [f"# note {key} {end}" for key, end in zip(self.keys, ends, strict=True)][::-1]

    @property
    def question(self) -> str:
        return f"# recall {self.keys[0]}"

    @property
    def answer(self) -> str:
        return f" {' '.join((*self.keys[1:], self.value))}"


def make_chains(rng: Random, hops: Sequence[int]) -> list[Chain]:
    """Chains of so many notes each; no two have a key or a value in common."""
    require(
        sum(hops) <= len(NOTE_KEYS), "the sum of hops", sum(hops), f"at most {len(NOTE_KEYS)}, the keys that there are"
    )
    require(
        len(hops) <= len(NOTE_VALUES), "the number of chains", len(hops), f"at most {len(NOTE_VALUES)}, one per value"
    )
    keys, values = iter(rng.sample(NOTE_KEYS, sum(hops))), rng.sample(NOTE_VALUES, len(hops))
    return [Chain(tuple(islice(keys, count)), str(value)) for count, value in zip(hops, values, strict=True)]


def recall_document(rng: Random, filler: Sequence[str]) -> str:
    """A training document: the lines of `filler` with notes between them, and a question somewhere after each chain and
    again at the end."""
    room = max(1, sum(len(line) + 1 for line in filler) // CHARS_PER_CHAIN)
    # As often a few chains as many: log-uniform.
    count = round(min(room, MAX_CHAINS) ** rng.random())
    hops = [rng.randint(2, MAX_HOPS) if rng.random() < LINKED_SHARE else 1 for _ in range(count)]
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
        and not (SKIPPED_FOLDERS - {"site-packages", "dist-packages"}) & set(path.relative_to(folder).parts)
        and 0 < path.stat().st_size <= MAX_FILE_BYTES
    }
    return sorted(found)


def mixed_documents(
    files: Sequence[Path], *, n_chars: int, recall_share: float, recall_chars: tuple[int, int], seed: int
) -> Iterator[str]:
    """Source files mixed with recall documents whose filler is from other source files, which are no documents: else
    text for validation would be in the filler of training documents.

    Args:
        files: Text files, each used once: as a document, or as filler, which starts over at its end.
        n_chars: Stop after about so many characters, or where no file is left.
        recall_share: Of recall documents, in characters, 0 to 1.
        recall_chars: Fewest and most characters of filler of a recall document. The density of lengths `n` is
            proportional to `n ** -1.5`: about half of all filler is in documents above a quarter of the longest,
            and there are enough short ones, from which recall is learned first.
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
    cut = min(len(files), max(1, round(recall_share * len(files)))) if recall_share else 0
    filler, documents = cycled_lines(order[:cut]), iter(order[cut:])
    done = recalled = 0
    while done < n_chars:
        if recalled < recall_share * (done + 1):
            wanted, lines = (low**-0.5 + rng.random() * (high**-0.5 - low**-0.5)) ** -2, []
            while wanted > 0:
                lines.append(next(filler))
                wanted -= len(lines[-1]) + 1
            text = recall_document(rng, lines)
            recalled += len(text)
        else:
            path = next(documents, None)
            if path is None:
                return
            text = path.read_text(encoding="utf-8", errors="replace")
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
