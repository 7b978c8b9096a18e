"""Every source on small files, and the error when a file is not what it should be."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from corpora import TEXTS, jsonl_file, opened, text_files

from nsa.data import DataConfig
from nsa.data import documents as documents_module
from nsa.data.documents import ENDS, fingerprint, open_documents

needs_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow")


def epoch(config: DataConfig, split: str, tokens: int) -> str:
    """The text of an epoch's windows, in no order."""
    with opened(config, split) as loader:
        batches = list(islice(loader, (tokens - 1) // 16))
        return "\n".join(loader.tokenizer.decode(batch.tokens[0].tolist()) for batch in batches)


def parquet_file(path: Path, texts: list[str] = TEXTS) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": texts, "id": list(range(len(texts)))}), path, row_group_size=7)
    return path


def source_files(source: str, folder: Path) -> Path:
    if source == "text":
        return text_files(folder)
    if source == "jsonl":
        return jsonl_file(folder / "corpus.jsonl")
    return parquet_file(folder / "corpus.parquet")


FILES = ["text", "jsonl", pytest.param("parquet", marks=needs_pyarrow)]


@pytest.mark.parametrize("source", FILES)
def test_files_are_read_and_split_by_document(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "LINES", 4)
    config = DataConfig(source=source, path=str(source_files(source, tmp_path)), shuffle_tokens=200)
    documents = open_documents(config)
    texts = [text for chunk in documents.chunks(0, 0, 0, None) for text in chunk.texts]
    assert sorted(texts) == TEXTS
    assert texts != TEXTS, "an epoch is shuffled"
    assert sorted(text for chunk in documents.chunks(0, 1, 0, None) for text in chunk.texts) == TEXTS
    found = {}
    for split in ("train", "valid"):
        kept = [text for i, text in enumerate(TEXTS) if (i % 20 == 0) == (split == "valid")]
        seen = epoch(config, split, sum(len(text) + 1 for text in kept))
        # A name may be cut by the border of a window, so what is sought are the letters after it.
        found[split] = {length for length in range(5, 50) for letter in "abcdefgh" if letter * length in seen}
        assert len(seen) > 0.8 * sum(map(len, kept))
    assert found["train"]
    assert found["valid"]


@pytest.mark.parametrize("source", FILES)
def test_resume_within_files_is_exact(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "LINES", 4)
    config = DataConfig(source=source, path=str(source_files(source, tmp_path)), shuffle_tokens=100, doc_batch=3)
    with opened(config) as whole:
        for _ in range(60):
            state = json.loads(json.dumps(whole.state_dict()))
            expected = next(whole)
            with opened(config) as resumed:
                resumed.load_state_dict(state)
                assert torch.equal(next(resumed).tokens, expected.tokens)


def test_a_path_is_a_file_a_folder_or_a_pattern(tmp_path: Path) -> None:
    text_files(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")

    def count(path: Path) -> int:
        documents = open_documents(DataConfig(source="text", path=str(path)))
        return len(list(documents.chunks(0, 0, 0, None)))

    assert count(tmp_path) == 45
    assert count(tmp_path / "part_1") == 15
    assert count(tmp_path / "part_0" / "00.txt") == 1
    assert count(tmp_path / "**" / "*1.txt") == 5


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path: Path) -> None:
    fingerprints = []
    for name in ("a", "b"):
        text_files(tmp_path / name)
        fingerprints.append(open_documents(DataConfig(source="text", path=str(tmp_path / name))).fingerprint)
    assert fingerprints[0] == fingerprints[1]
    changed = tmp_path / "b" / "part_0" / "00.txt"
    was = changed.read_text()
    for text in ("longer than it was before, by a good deal", was[:-1] + "~", "~" + was[1:]):
        changed.write_text(text)
        assert open_documents(DataConfig(source="text", path=str(tmp_path / "b"))).fingerprint != fingerprints[0]


@pytest.mark.parametrize("place", [0, -1])
def test_the_fingerprint_sees_both_ends_of_a_long_file(place: int, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    text = bytearray(b"a" * 3 * ENDS)
    path.write_bytes(text)
    before = fingerprint(path)
    text[place] = ord("b")
    path.write_bytes(text)
    assert fingerprint(path) != before


def test_one_document_serves_training_and_validation(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("T" * 1900 + "V" * 100)
    config = DataConfig(source="text", path=str(path))
    assert set(epoch(config, "train", 1901)) <= {"T", "\0", "\n"}
    assert set(epoch(config, "valid", 101)) <= {"V", "\0", "\n"}


# Wrong files.


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        ("text", "missing", "data.path is '.*missing'; accepted: .*pattern"),
        ("text", ".", r"data.path is '.*'; accepted: .*\.txt, \.md, \.rst"),
        ("jsonl", ".", r"data.path is '.*'; accepted: .*\.jsonl"),
        ("shards", ".", r"data.path is '.*'; accepted: .*manifest\.json .*\*\.tokens .*`nsa data prepare`"),
    ],
)
def test_a_path_without_data_is_named(source: str, path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        opened(DataConfig(source=source, path=str(tmp_path / path)))


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("content", ["", "short"])
def test_an_empty_corpus_is_an_error(content: str, prefetch: bool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    config = DataConfig(source="text", path=str(tmp_path), prefetch=prefetch)
    with (
        opened(config) as loader,
        pytest.raises(ValueError, match=r"train split of .* tokens'; accepted: .*seq_len \+ 1 = 17"),
    ):
        next(loader)


def test_an_empty_jsonl_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with (
        opened(DataConfig(source="jsonl", path=str(tmp_path))) as loader,
        pytest.raises(ValueError, match="'0 tokens'"),
    ):
        next(loader)


@pytest.mark.parametrize("prefetch", [False, True])
def test_non_text_file_error_names_it_and_keeps_the_traceback(prefetch: bool, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"abc\xff\xfe")
    loader = opened(DataConfig(source="text", path=str(tmp_path), prefetch=prefetch))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"bad\.txt .*UTF-8.* position 3") as caught:
            next(loader)
        assert "documents.py" in [Path(str(entry.path)).name for entry in caught.traceback]
        if not prefetch:
            break
    loader.close()


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    with opened(DataConfig(source="text", path=str(path))) as loader:
        path.unlink()
        with pytest.raises(FileNotFoundError, match=r"a\.txt"):
            next(loader)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"corpus.jsonl:31 .*JSON: Unterminated string"),
        ('{"body": "x"}', r"corpus.jsonl:31 .*data.text_key is 'text', .*{'body': 'str'}"),
        ('{"text": 3}', r"corpus.jsonl:31 .*data.text_key .*{'text': 'int'}"),
        ('{"text": ' + "[" * 100_000, r"corpus.jsonl:31 .*JSON: .*recursion"),
        ("[1]", r"corpus.jsonl:31 .*data.text_key .* list$"),
        ("\udcff", r"corpus.jsonl:31 .*JSON"),
        (r'{"text": "half a pair: \ud800"}', r"corpus.jsonl:31 .*UTF-8.*: .*surrogates"),
    ],
)
def test_a_bad_line_is_named_by_its_number(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "LINES", 8)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[30] = line
    # A line that is empty is no document, but it is a line.
    lines[2] = ""
    path = tmp_path / "corpus.jsonl"
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with opened(DataConfig(source="jsonl", path=str(path))) as loader, pytest.raises(ValueError, match=message):
        next(loader)


@needs_pyarrow
def test_a_wrong_parquet_file_is_named(tmp_path: Path) -> None:
    path = parquet_file(tmp_path / "corpus.parquet")
    with pytest.raises(ValueError, match=r"data.text_key is 'body'; accepted: .*\['text', 'id'\]"):
        opened(DataConfig(source="parquet", path=str(path), text_key="body"))
    with (
        opened(DataConfig(source="parquet", path=str(path), text_key="id")) as loader,
        pytest.raises(ValueError, match=r"row group ., row 0 .*: 'id' is a int"),
    ):
        next(loader)
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"corpus\.parquet is not .*parquet"):
        opened(DataConfig(source="parquet", path=str(path)))


@needs_pyarrow
def test_a_parquet_page_that_does_not_unpack_is_named(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "corpus.parquet"
    texts = [f"{index} " + "many words " * 50 for index in range(60)]
    parquet.write_table(arrow.table({"text": texts}), path, compression="snappy", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[100:1500] = b"\xff" * 1400
    path.write_bytes(data)
    with (
        opened(DataConfig(source="parquet", path=str(path))) as loader,
        pytest.raises(ValueError, match=r"corpus\.parquet, row group 0 cannot .*: "),
    ):
        next(loader)


@needs_pyarrow
def test_parquet_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "corpus.parquet"
    column = arrow.array([b"abc\xff"]).view(arrow.string())
    parquet.write_table(arrow.table({"text": column}), path)
    with (
        opened(DataConfig(source="parquet", path=str(path))) as loader,
        pytest.raises(ValueError, match=r"corpus\.parquet, row group 0, row 0 .*UTF-8"),
    ):
        next(loader)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(documents_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"data.source is 'parquet'; .*pip install pyarrow"):
        opened(DataConfig(source="parquet", path=str(tmp_path)))


# The hub, with a stand-in for `datasets`.


class Stream:
    """What of `IterableDataset` is used: rows in order, a state after the last row given, and skip."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.next = rows, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.next < len(self.rows):
            self.next += 1
            yield self.rows[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def skip(self, count: int) -> Stream:
        self.next = count
        return self


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str, streaming: bool) -> Stream:
        calls.append((name, subset, split, streaming))
        return Stream([{"text": text, "id": i} for i, text in enumerate([*TEXTS, None])])

    module = ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(documents_module, "ROWS", 6)
    return calls


@pytest.mark.parametrize(
    ("source", "name", "asked"),
    [
        ("hf:org/corpus", None, ("org/corpus", None, "train", True)),
        ("hf:org/corpus", "small", ("org/corpus", "small", "train", True)),
        ("fineweb_edu", None, ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", True)),
        ("fineweb_edu", "CC-MAIN-2024-10", ("HuggingFaceFW/fineweb-edu", "CC-MAIN-2024-10", "train", True)),
    ],
)
def test_hub_data_sets_are_streamed(
    source: str, name: str | None, asked: tuple[Any, ...], stand_in: list[tuple[Any, ...]]
) -> None:
    with opened(DataConfig(source=source, name=name)) as loader:
        assert "document" in loader.tokenizer.decode(torch.cat([next(loader).tokens[0] for _ in range(9)]).tolist())
        assert asked[0] in loader.source
    assert stand_in[0] == asked


def test_resume_within_a_stream_is_exact(stand_in: list[tuple[Any, ...]]) -> None:
    config = DataConfig(source="hf:org/corpus", shuffle_tokens=100, doc_batch=3)
    with opened(config) as whole:
        # Into the second epoch.
        for _ in range(160):
            state = json.loads(json.dumps(whole.state_dict()))
            expected = next(whole)
            with opened(config) as resumed:
                resumed.load_state_dict(state)
                assert torch.equal(next(resumed).tokens, expected.tokens)
    assert state["pool"]["epoch"] == 1
    assert state["pool"]["bookmark"]["next"] > 0


def test_the_real_package_streams_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` itself, on a folder in place of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(documents_module, "ROWS", 6)
    (tmp_path / "corpus").mkdir()
    for part in range(3):
        rows = [json.dumps({"text": f"{part}: {text}", "id": i}) + "\n" for i, text in enumerate(TEXTS)]
        (tmp_path / "corpus" / f"{part}.jsonl").write_text("".join(rows))
    config = DataConfig(source=f"hf:{tmp_path / 'corpus'}", shuffle_tokens=100, doc_batch=3)
    with opened(config) as whole:
        seen = []
        for step in range(40):
            state = json.loads(json.dumps(whole.state_dict()))
            expected = next(whole)
            seen += expected.tokens.flatten().tolist()
            if step % 8 == 0:
                with opened(config) as resumed:
                    resumed.load_state_dict(state)
                    assert torch.equal(next(resumed).tokens, expected.tokens)
        assert state["pool"]["bookmark"] is not None
        assert "2: " in whole.tokenizer.decode(seen), "every file is read"


def test_a_hub_column_that_is_not_there_is_named(stand_in: list[tuple[Any, ...]]) -> None:
    with (
        opened(DataConfig(source="hf:org/corpus", text_key="body")) as loader,
        pytest.raises(ValueError, match=r"data.text_key is 'body'; accepted: .*hf:org/corpus: \['id', 'text'\]"),
    ):
        next(loader)


def test_a_hub_row_that_is_no_text_is_named(stand_in: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", [*TEXTS[:9], "half a pair: \ud800"])
    with (
        opened(DataConfig(source="hf:org/corpus")) as loader,
        pytest.raises(ValueError, match=r"document 9 of hf:org/corpus .*UTF-8"),
    ):
        next(loader)


def test_the_hub_without_datasets_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"data.source is 'hf:org/corpus'; .*pip install datasets"):
        opened(DataConfig(source="hf:org/corpus"))
