"""Synthetic recall: text that states the values of keys, and asks for them later.

    # note kazu 883               a value
    # note bewo kazu              a link: bewo has the value of kazu
    # recall bewo kazu 883        a question with its answer, every link down to the value

Each step of an answer copies what followed the same key in an earlier line (induction), which is the least that a model
with two layers learns of attention; what it needs is to attend to that line, however far back. Keys and values are so
few, and have a space before them wherever they occur, that a BPE trained on this text has a token for each of them: one
that splits them asks for several tokens to be matched and copied, which is learned later. Keys are no words of Python
source, so that filler has none.

Recall is learned from near to far. Part of the documents are dense: notes, and questions in the very next lines. In the
others the distance from a chain's last note to its question is anything up to the document's length, near ones the more
often. One corpus with both is a curriculum by itself, in any order of the documents: what is near is learned first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from nsa.config import require
from nsa.data.documents import SKIPPED_FOLDERS
from nsa.files import replacing

SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]
NOTE_KEYS = [first + second for first in SYLLABLES for second in ("wo", "zu")]
NOTE_VALUES = range(800, 900)
# Chains of a dense document, at most, and characters of filler for each further one of the others.
DENSE_CHAINS = 8
CHARS_PER_CHAIN = 40
# Questions per chain of a dense document, and at most of the others.
DENSE_QUESTIONS, MAX_QUESTIONS = 3, 4
# First questions at log-uniform distances.
NEAR_SHARE = 1 / 3
# Notes of a chain in a training document, at most; and how many chains have more than one.
MAX_HOPS = 4
LINKED_SHARE = 0.25
# Files past this are data written as code.
MAX_FILE_BYTES = 400_000


class Chain(NamedTuple):
    """A value that a key has by way of other keys; the key in question comes first."""

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
    """Chains of which no two have a key or a value in common.

    Args:
        rng: Decides the keys and values.
        hops: The notes of each chain.

    Returns:
        One chain for each of `hops`.

    Raises:
        ValueError: There are not enough keys or values.
    """
    require(
        sum(hops) <= len(NOTE_KEYS), "the sum of hops", sum(hops), f"at most {len(NOTE_KEYS)}, the keys that there are"
    )
    require(
        len(hops) <= len(NOTE_VALUES), "the number of chains", len(hops), f"at most {len(NOTE_VALUES)}, one per value"
    )
    keys, values = iter(rng.sample(NOTE_KEYS, sum(hops))), rng.sample(NOTE_VALUES, len(hops))
    return [Chain(tuple(islice(keys, count)), str(value)) for count, value in zip(hops, values, strict=True)]


def recall_document(rng: Random, filler: Sequence[str]) -> str:
    """A training document: the lines of `filler` with notes between them, and questions after each chain.

    The distance of a chain's first question is uniform or log-uniform up to the document's length; more are anywhere
    after it. Without filler the document is dense: all questions follow in the next lines.

    Args:
        rng: Decides all else.
        filler: Lines; may be empty.

    Returns:
        The document, with a line break at its end.
    """
    ends = list(accumulate(len(line) + 1 for line in filler))
    length = ends[-1] if ends else 0
    most = min(DENSE_CHAINS + length // CHARS_PER_CHAIN, len(NOTE_VALUES))
    count = round(most ** rng.uniform(0.7, 1))
    hops = [rng.randint(2, MAX_HOPS) if rng.random() < LINKED_SHARE else 1 for _ in range(count)]
    while sum(hops) > len(NOTE_KEYS):
        hops.pop()
    notes: list[tuple[float, str]] = []
    questions: list[tuple[float, str]] = []
    for chain in make_chains(rng, hops):
        near, far = (length + 1) ** rng.random() - 1, length * rng.random()
        distance = near if rng.random() < NEAR_SHARE else far
        last = rng.uniform(0, length - distance)
        final, *others = rng.sample(chain.notes, len(chain.notes))
        notes += [(last, final), *((rng.uniform(0, last), note) for note in others)]
        place = last + distance
        for _ in range(rng.randint(1, MAX_QUESTIONS) if filler else DENSE_QUESTIONS):
            questions.append((place, chain.question + chain.answer))
            place = rng.uniform(place, length)
    rng.shuffle(questions)
    # Sorting is stable: in the same place notes come first.
    placed = sorted([*zip(ends, filler, strict=True), *notes, *questions], key=lambda entry: entry[0])
    return "\n".join(line for _, line in placed) + "\n"


def python_files(folders: Sequence[Path]) -> list[Path]:
    """Python source, without tests, generated data and links.

    Args:
        folders: Searched with all that they hold.

    Returns:
        The files, in a fixed order.
    """
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
    files: Sequence[Path],
    *,
    n_chars: int,
    recall_share: float,
    recall_chars: tuple[int, int],
    dense_share: float = 0.5,
    seed: int,
) -> Iterator[str]:
    """Source files mixed with recall documents whose filler is from other source files, which are no documents: else
    text for validation would be in the filler of training documents.

    Args:
        files: Text files, each used once: as a document, or as filler, which starts over at its end.
        n_chars: Stop after about so many characters, or where no file is left.
        recall_share: Of recall documents, in characters, 0 to 1.
        recall_chars: Fewest and most characters of filler of a recall document that is not dense.
        dense_share: Of recall documents, in characters, those without filler.
        seed: Decides the order of the files and all else.

    Yields:
        One document after the other.

    Raises:
        ValueError: There is no file, or a number is out of range.
    """
    require(bool(files), "files", list(files), "at least one file")
    for name, share in (("recall_share", recall_share), ("dense_share", dense_share)):
        require(0 <= share <= 1, name, share, "a fraction from 0 to 1")
    low, high = recall_chars
    require(0 < low <= high, "recall_chars", recall_chars, "two positive numbers in ascending order")
    rng = Random(seed)
    order = rng.sample(files, len(files))
    cut = min(len(files), max(1, round(recall_share * len(files)))) if recall_share else 0
    filler, documents = cycled_lines(order[:cut]), iter(order[cut:])
    done = recalled = dense = 0
    while done < n_chars:
        if recalled < recall_share * (done + 1):
            lines: list[str] = []
            if dense >= dense_share * recalled:
                wanted = rng.uniform(low, high)
                while wanted > 0:
                    lines.append(next(filler))
                    wanted -= len(lines[-1]) + 1
            text = recall_document(rng, lines)
            recalled += len(text)
            dense += 0 if lines else len(text)
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
    """Write documents as JSON lines, for `nsa data prepare --source jsonl`.

    Args:
        path: Replaced if it exists; its folder is created.
        documents: Texts.

    Returns:
        The number of documents.
    """
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for text in documents:
            file.write(json.dumps({"text": text}).encode() + b"\n")
            count += 1
    return count
