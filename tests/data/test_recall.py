"""Recall documents can be answered from what stands before each question, and mix with other text as asked."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.data import DataConfig
from nsa.data.prepare import prepare
from nsa.data.recall import (
    DENSE_QUESTIONS,
    NOTE_KEYS,
    NOTE_VALUES,
    make_chains,
    mixed_documents,
    python_files,
    recall_document,
    write_corpus,
)
from nsa.data.tokenizer import train_bpe

NOTE, RECALL = re.compile(r"# note (\w+) (\w+)"), re.compile(r"# recall (\w+) (.+)")


def check_questions(text: str) -> int:
    """Every question follows from the notes before it; returns how many there are."""
    known: dict[str, str] = {}
    asked = 0
    for line in text.splitlines():
        if note := NOTE.fullmatch(line):
            assert note[1] not in known
            known[note[1]] = note[2]
        elif question := RECALL.fullmatch(line):
            asked += 1
            key, answer = question[1], question[2].split()
            for step in answer:
                assert known[key] == step
                key = step
            assert answer[-1].isdigit()
    return asked


@given(seed=st.integers(0, 10_000), n_lines=st.integers(0, 200))
def test_every_question_is_answered_by_notes_before_it(seed: int, n_lines: int) -> None:
    filler = [f"x = {index}" for index in range(n_lines)]
    text = recall_document(Random(seed), filler)
    assert check_questions(text) >= 1
    assert [line for line in text.splitlines() if not line.startswith("#")] == filler
    assert text == recall_document(Random(seed), filler)


@given(seed=st.integers(0, 10_000))
def test_a_dense_document_asks_for_every_chain_in_the_next_lines(seed: int) -> None:
    lines = recall_document(Random(seed), []).splitlines()
    notes = [line for line in lines if NOTE.fullmatch(line)]
    questions = [line for line in lines if RECALL.fullmatch(line)]
    assert lines == notes + questions
    values = [note for note in notes if note.split()[-1].isdigit()]
    assert len(questions) == DENSE_QUESTIONS * len(values)
    assert set(map(questions.count, questions)) == {DENSE_QUESTIONS}


def distances(text: str) -> list[int]:
    """Of each question, the lines since its key occurred last."""
    found, last = [], {}
    for at, line in enumerate(text.splitlines()):
        if match := NOTE.fullmatch(line):
            last[match[1]] = at
        elif match := RECALL.fullmatch(line):
            found.append(at - last[match[1]])
            last[match[1]] = at
    return found


def test_distances_cover_the_document_from_near_to_far() -> None:
    rng, n_lines = Random(0), 500
    texts = [recall_document(rng, ["x = 1234567890"] * n_lines) for _ in range(40)]
    found = [distance / len(text.splitlines()) for text in texts for distance in distances(text)]
    shares = [sum(low <= d < high for d in found) / len(found) for low, high in pairwise((0, 0.01, 0.1, 0.3, 0.6, 1))]
    assert all(share > 0.05 for share in shares), shares


def test_a_chain_states_and_asks_for_every_link() -> None:
    (chain,) = make_chains(Random(0), [3])
    a, b, c = chain.keys
    assert chain.notes == [f"# note {c} {chain.value}", f"# note {b} {c}", f"# note {a} {b}"]
    assert chain.question + chain.answer == f"# recall {a} {b} {c} {chain.value}"


def test_a_bpe_has_a_token_for_each_key_and_value() -> None:
    pytest.importorskip("tokenizers")
    rng = Random(0)
    tokenizer = train_bpe([recall_document(rng, ["x = 1"] * 200) for _ in range(400)], 4096)
    for word in (*NOTE_KEYS, *NOTE_VALUES):
        assert len(tokenizer.encode(f" {word}")) == 1
    (chain,) = make_chains(rng, [3])
    assert len(tokenizer.encode(chain.answer)) == 3


@pytest.mark.parametrize("hops", [[201], [1] * 101])
def test_more_keys_or_values_than_there_are_are_refused(hops: list[int]) -> None:
    with pytest.raises(ValueError, match="at most"):
        make_chains(Random(0), hops)


def sources(folder: Path, count: int = 60) -> list[Path]:
    for index in range(count):
        (folder / f"f{index}.py").write_text("\n".join(f"name_{index}_{line} = {line}" for line in range(40)))
    (folder / "tests").mkdir()
    (folder / "tests" / "test_x.py").write_text("x = 1")
    (folder / "empty.py").touch()
    return python_files([folder])


def test_tests_and_empty_files_are_left_out(tmp_path: Path) -> None:
    assert len(sources(tmp_path)) == 60


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_corpus_has_the_share_of_recall_that_is_asked(share: float, tmp_path: Path) -> None:
    files = sources(tmp_path)
    texts = list(mixed_documents(files, n_chars=15_000, recall_share=share, recall_chars=(100, 800), seed=1))
    total = sum(map(len, texts))
    recalled = sum(len(text) for text in texts if "# recall" in text)
    assert recalled / total == pytest.approx(share, abs=0.1)
    assert 15_000 <= total < 20_000
    for text in texts:
        check_questions(text)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_recall_has_the_share_without_filler_that_is_asked(share: float, tmp_path: Path) -> None:
    sizes = {"n_chars": 30_000, "recall_share": 1.0, "recall_chars": (100, 800)}
    texts = list(mixed_documents(sources(tmp_path), **sizes, dense_share=share, seed=1))  # type: ignore[arg-type]
    dense = [text for text in texts if all(line.startswith("#") for line in text.splitlines())]
    assert sum(map(len, dense)) / sum(map(len, texts)) == pytest.approx(share, abs=0.1)


def test_no_file_is_both_a_document_and_filler(tmp_path: Path) -> None:
    files = sources(tmp_path)
    texts = list(mixed_documents(files, n_chars=10**9, recall_share=0.3, recall_chars=(100, 800), seed=1))
    own = {name for text in texts if "# recall" not in text for name in re.findall(r"name_\d+_", text)}
    filler = {name for text in texts if "# recall" in text for name in re.findall(r"name_\d+_", text)}
    assert len(own) == 42
    assert filler
    assert not own & filler
    recalled = sum(len(text) for text in texts if "# recall" in text)
    assert recalled / sum(map(len, texts)) == pytest.approx(0.3, abs=0.05), "the share holds to the last file"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("recall_share", 1.5), ("recall_share", -0.1), ("dense_share", 1.5), ("recall_chars", (5, 2)), ("files", [])],
)
def test_a_wrong_argument_of_a_corpus_is_named(name: str, wrong: object, tmp_path: Path) -> None:
    given = {"files": sources(tmp_path), "recall_share": 0.5, "recall_chars": (10, 20), name: wrong}
    with pytest.raises(ValueError, match=name):
        next(mixed_documents(n_chars=10, seed=0, **given))  # type: ignore[arg-type]


def test_a_corpus_can_be_prepared_for_training(tmp_path: Path) -> None:
    texts = list(mixed_documents(sources(tmp_path), n_chars=20_000, recall_share=0.5, recall_chars=(50, 90), seed=1))
    corpus = tmp_path / "corpus.jsonl"
    assert write_corpus(corpus, iter(texts)) == len(texts)
    assert [json.loads(line)["text"] for line in corpus.read_text().splitlines()] == texts
    writers = prepare(DataConfig(source="jsonl", path=str(corpus)), tmp_path / "shards")
    assert sum(writer.documents for writer in writers.values()) == len(texts)
