"""Every source on small files, every tokenizer, and what is said when a file is not what it should be."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nsa.data import Batch, DataConfig, Loader, hub, load_tokenizer, open_loader, prepare, shards, train_bpe
from nsa.data import documents as documents_module
from nsa.data.documents import ENDS, fingerprint
from nsa.data.loader import open_documents
from nsa.data.shards import Shard

needs_tokenizers = pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs tokenizers")
needs_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="needs pyarrow")

TEXTS = [f"document {index:02}: " + "abcdefgh"[index % 8] * (5 + index) for index in range(45)]


def opened(config: DataConfig, split: str = "train", **values: Any) -> Loader:
    return open_loader(config, **{"split": split, "batch_size": 1, "seq_len": 16, "seed": 0, **values})


def epoch(config: DataConfig, split: str, tokens: int) -> str:
    """The text of an epoch's windows, in no order."""
    with opened(config, split) as loader:
        batches = list(islice(loader, (tokens - 1) // 16))
        return "\n".join(loader.tokenizer.decode(batch.tokens[0].tolist()) for batch in batches)


def text_files(folder: Path, texts: list[str] = TEXTS) -> Path:
    for index, text in enumerate(texts):
        path = folder / f"part_{index % 3}" / f"{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def jsonl_file(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


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
        ("text", "missing", "data.path is '.*missing'; accepted: a file, a folder, or a pattern that files match"),
        ("text", ".", "data.path is '.*'; accepted: a folder with files that end in .txt, .md, .rst"),
        ("jsonl", ".", "a folder with files that end in .jsonl"),
        ("shards", ".", r"a folder with train-\*.tokens, as `nsa data prepare` writes it"),
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
        pytest.raises(ValueError, match=r"the train split of text .* tokens'; accepted: at least seq_len \+ 1 = 17"),
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
def test_a_file_that_is_no_text_is_named_with_the_traceback_of_who_read_it(prefetch: bool, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"abc\xff\xfe")
    loader = opened(DataConfig(source="text", path=str(tmp_path), prefetch=prefetch))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"bad.txt is not UTF-8 text: .* position 3") as caught:
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
        ('{"text": "cut', r"corpus.jsonl:31 is not a line of JSON: Unterminated string"),
        ('{"body": "x"}', r"corpus.jsonl:31 has no text: data.text_key is 'text', the line has \['body'\]"),
        ('{"text": 3}', r"corpus.jsonl:31 has no text"),
        ("[1]", r"corpus.jsonl:31 has no text: .* the line has list"),
        ("\udcff", r"corpus.jsonl:31 is not a line of JSON"),
        (r'{"text": "half a pair: \ud800"}', r"corpus.jsonl:31 is not text that UTF-8 can hold: .*surrogates"),
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
    with pytest.raises(ValueError, match=r"data.text_key is 'body'; accepted: a column of .*\['text', 'id'\]"):
        opened(DataConfig(source="parquet", path=str(path), text_key="body"))
    with (
        opened(DataConfig(source="parquet", path=str(path), text_key="id")) as loader,
        pytest.raises(ValueError, match=r"row group ., row 0: 'id' is a int"),
    ):
        next(loader)
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"corpus.parquet is not a parquet file"):
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
        pytest.raises(ValueError, match=r"corpus.parquet, row group 0 cannot be read: "),
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
        pytest.raises(ValueError, match=r"corpus.parquet, row group 0 cannot be read: "),
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
    monkeypatch.setattr(hub, "ROWS", 6)
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
    monkeypatch.setattr(hub, "ROWS", 6)
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
        pytest.raises(
            ValueError, match=r"data.text_key is 'body'; accepted: a column of hf:org/corpus: \['id', 'text'\]"
        ),
    ):
        next(loader)


def test_a_hub_row_that_is_no_text_is_named(stand_in: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", [*TEXTS[:9], "half a pair: \ud800"])
    with (
        opened(DataConfig(source="hf:org/corpus")) as loader,
        pytest.raises(ValueError, match="document 9 of hf:org/corpus is not text that UTF-8 can hold"),
    ):
        next(loader)


def test_the_hub_without_datasets_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"data.source is 'hf:org/corpus'; .*pip install datasets"):
        opened(DataConfig(source="hf:org/corpus"))


# Tokenizers.


def test_bytes_survive_saving(tmp_path: Path) -> None:
    load_tokenizer("bytes").save(tmp_path / "run")
    tokenizer = load_tokenizer(tmp_path / "run")
    assert tokenizer.name == "bytes"
    assert tokenizer.vocab_size == 256
    assert tokenizer.decode(tokenizer.encode("naïve → code")) == "naïve → code"
    assert tokenizer.decode([0x64, 50_000]) == "d\N{REPLACEMENT CHARACTER}"
    assert tokenizer.encode_documents(["ab", ""])[0].tolist() == [97, 98, 0]


def test_byte_0_is_left_out_of_text_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would end the document it is in."""
    tokenizer = load_tokenizer("bytes")
    rows = tokenizer.encode_documents(["a\0b", "cd"]) + tokenizer.encode_documents(["\0e\0"])
    assert [row.tolist() for row in rows] == [[97, 98, 0], [99, 100, 0], [101, 0]]
    (warning,) = caplog.messages
    assert "byte 0 ends a document" in warning
    assert r"begins with 'a\x00b'" in warning
    (tmp_path / "a.txt").write_text("0123\0" * 100)
    with opened(DataConfig(source="text", path=str(tmp_path))) as loader:
        # The one document has no end within its first 380 characters.
        assert all(0 not in next(loader).tokens for _ in range(19))
    assert len(caplog.messages) == 2, "another source says it again"


@needs_tokenizers
def test_a_bpe_of_your_own_is_saved_and_loaded_again(tmp_path: Path) -> None:
    tokenizer = train_bpe(TEXTS, 300)
    assert tokenizer.name == train_bpe(TEXTS, 300).name, "the same text gives the same tokenizer"
    assert 257 < tokenizer.vocab_size <= 300
    text = "document 07: naïve → 字"
    assert len(tokenizer.encode(text)) < len(text.encode())
    tokenizer.save(tmp_path / "run")
    for place in (tmp_path / "run", tmp_path / "run" / "tokenizer.json", str(tmp_path / "run")):
        loaded = load_tokenizer(place)
        assert loaded.name == tokenizer.name
        assert loaded.vocab_size == tokenizer.vocab_size
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
        assert loaded.decode([*loaded.encode("ab"), 50_000]) == "ab\N{REPLACEMENT CHARACTER}"
        (row,) = loaded.encode_documents(["ab"])
        assert row.tolist() == [*loaded.encode("ab"), loaded.end]
        assert loaded.decode([loaded.end]) == "<|endoftext|>"


@needs_tokenizers
def test_text_that_names_the_end_of_a_document_does_not_end_it(tmp_path: Path) -> None:
    tokenizer = train_bpe(TEXTS, 300)
    (row,) = tokenizer.encode_documents(["a<|endoftext|>b"])
    assert row.tolist().count(tokenizer.end) == 1
    assert tokenizer.decode(tokenizer.encode("a<|endoftext|>b")) == "a<|endoftext|>b"


@needs_tokenizers
def test_a_model_with_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.save(tmp_path)
    path = jsonl_file(tmp_path / "corpus.jsonl")
    config = DataConfig(source="jsonl", path=str(path), tokenizer=str(tmp_path))
    size = tokenizer.vocab_size
    with pytest.raises(ValueError, match=rf"model.vocab_size is 256; accepted: at least {size}, .* BPE-"):
        opened(config, vocab_size=256)
    with opened(config, vocab_size=size) as loader:
        assert loader.vocab_size == size
        assert next(loader).tokens.max() < size


@needs_tokenizers
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "accepted: 'bytes', a tokenizer.json, or a folder that holds one"),
        ("{", "a file with JSON"),
        ("{}", "a tokenizer.json that can be read"),
    ],
)
def test_a_wrong_tokenizer_file_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer is '.*tokenizer.json'; .*{message}"):
        load_tokenizer(path)


@needs_tokenizers
def test_a_tokenizer_that_ends_no_document_is_refused(tmp_path: Path) -> None:
    train_bpe(TEXTS, 300).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(ValueError, match="a token that ends a document"):
        load_tokenizer(path)


def test_a_tokenizer_file_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("nsa.data.tokenizer.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        load_tokenizer(tmp_path)


# Shards.


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args(words))


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    path = jsonl_file(tmp_path / "corpus.jsonl")
    out = tmp_path / "shards"
    assert command("prepare", "--source", "jsonl", "--path", str(path), "--shard-tokens", "300", "--out", str(out)) == 0
    return out


def test_prepared_tokens_are_the_documents(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, list[str]] = {"train": [], "valid": []}
    for path in sorted(prepared.glob("*.tokens")):
        shard = Shard(path)
        assert shard.tokens.dtype == torch.uint16
        rows = shard.tokens.long().tolist()
        borders = shard.offsets.tolist()
        for begin, end in pairwise(borders):
            assert rows[end - 1] == 0
            found[path.name.split("-")[0]].append(bytes(rows[begin : end - 1]).decode())
    assert len(list(prepared.glob("train-*"))) > 2
    assert not list(prepared.glob("*.part"))
    assert sorted(found["valid"]) == [TEXTS[0], TEXTS[20], TEXTS[40]]
    assert sorted(found["train"] + found["valid"]) == TEXTS
    assert command("check", str(prepared)) == 0
    printed = capsys.readouterr().out
    assert "train-00000.tokens" in printed
    assert "intact" in printed


def test_prepare_says_what_it_made_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command("prepare", "--source", "text", "--path", str(text_files(tmp_path / "in")), "--out", str(out))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("45 of 45 chunks, ")
    assert "train: 42 documents" in lines[1]
    assert "valid: 3 documents" in lines[2]
    assert f"nsa train --set data.source=shards --set data.path={out}" in lines[3]
    valid = json.loads(lines[-1])["valid"]["tokens"]
    assert f"(model.vocab_size: at least 256, model.seq_len: at most {valid - 1})" in lines[3]
    with opened(DataConfig(source="shards", path=str(out)), split="valid", seq_len=valid - 1) as loader:
        next(loader)
    assert json.loads(lines[-1])["valid"]["documents"] == 3


def test_shards_are_read_shuffled_with_their_borders(prepared: Path) -> None:
    config = DataConfig(source="shards", path=str(prepared), pack=True)
    counts = [Shard(path).header.tokens for path in sorted(prepared.glob("train-*"))]
    windows = sum((count - 1) // 16 for count in counts)
    with opened(config) as loader:
        batches = list(islice(loader, windows))
        assert loader.source == f"shards ({len(counts)} files, {sum(counts):,} tokens)"
        again = list(islice(loader, windows))
    rows = sorted(batch.tokens[0].tolist() for batch in batches)
    assert rows == sorted(batch.tokens[0].tolist() for batch in again), "the next epoch has the same windows"
    assert [b.tokens.tolist() for b in batches] != [b.tokens.tolist() for b in again], "in another order"
    for tokens, targets, cu_seqlens in batches:
        assert cu_seqlens is not None
        ends = tokens[0] == 0
        assert torch.equal(targets[0] == -100, ends)
        borders = (ends.nonzero().flatten() + 1).tolist()
        assert cu_seqlens.tolist() == sorted({0, 16, *borders})


def test_resume_within_shards_is_exact_on_any_number_of_ranks(prepared: Path) -> None:
    config = DataConfig(source="shards", path=str(prepared))

    def rows(batch: Batch) -> list[list[int]]:
        return batch.tokens.tolist()

    with opened(config) as alone:
        expected = [row for batch in islice(alone, 240) for row in rows(batch)]
    state: dict[str, Any] | None = None
    seen: list[list[int]] = []
    for world_size in (1, 3, 2, 4):
        loaders = [opened(config, rank=rank, world_size=world_size, batch_size=2) for rank in range(world_size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        seen += [row for _ in range(12) for loader in loaders for row in rows(next(loader))]
        state = json.loads(json.dumps(loaders[0].state_dict()))
        for loader in loaders:
            loader.close()
    assert seen == expected


@needs_tokenizers
def test_shards_bring_their_own_tokenizer(tmp_path: Path) -> None:
    path, out = jsonl_file(tmp_path / "corpus.jsonl"), tmp_path / "out"
    words = ["prepare", "--source", "jsonl", "--path", str(path), "--train-bpe", "300", "--out", str(out)]
    assert command(*words) == 0
    config = DataConfig(source="shards", path=str(out))
    with opened(config) as loader:
        assert loader.tokenizer.name.startswith("BPE-")
        text = "".join(loader.tokenizer.decode(next(loader).tokens[0].tolist()) for _ in range(20))
        assert "document" in text
    with opened(DataConfig(source="shards", path=str(out), tokenizer=str(out))) as loader:
        next(loader)
    train_bpe(TEXTS[:9], 280).save(tmp_path / "other")
    for other in (str(tmp_path / "other"), "bytes"):
        with pytest.raises(
            ValueError, match=r"data.tokenizer is '(.*other|bytes)'; accepted: '.*out' or none: .* own, BPE-"
        ):
            opened(DataConfig(source="shards", path=str(out), tokenizer=other))


@needs_tokenizers
def test_a_tokenizer_that_others_tokens_were_made_with_is_refused(tmp_path: Path) -> None:
    """Of the same size, so that every token is a word to it."""
    texts = {"a": TEXTS, "b": [text.upper() for text in TEXTS]}
    for name in texts:
        path = jsonl_file(tmp_path / f"{name}.jsonl", texts[name])
        words = ("--path", str(path), "--train-bpe", "270", "--out", str(tmp_path / name))
        assert command("prepare", "--source", "jsonl", *words) == 0
    a, b = (load_tokenizer(tmp_path / name) for name in texts)
    assert a.vocab_size == b.vocab_size
    assert a.name != b.name
    a.save(tmp_path / "b")
    message = rf"the tokenizer beside .*-00000.tokens is '{a.name}'; accepted: '{b.name}', which the tokens were made"
    with pytest.raises(ValueError, match=message):
        opened(DataConfig(source="shards", path=str(tmp_path / "b")))
    with pytest.raises(ValueError, match=message):
        command("check", str(tmp_path / "b"))
    assert command("check", str(tmp_path / "a")) == 0


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    large = load_tokenizer("bytes")
    large.vocab_size = 100_000
    writer = shards.ShardWriter(tmp_path, "train", large, 2**20)
    writer.add([torch.tensor([99_999, 0, 65_536], dtype=torch.int32)])
    writer.publish()
    shard = Shard(tmp_path / "train-00000.tokens")
    shard.check_tokens()
    assert shard.tokens.long().tolist() == [99_999, 0, 65_536]
    with pytest.raises(ValueError, match="token is 100000; accepted: below the vocabulary of 100000"):
        writer.add([torch.tensor([100_000], dtype=torch.int32)])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:40], "it has 40 bytes, its header alone would have 128"),
        (lambda data: data[:-8], "bytes, its header says"),
        (lambda data: data + b"x", "bytes, its header says"),
        (lambda data: b"PK\3\4" + data[4:], "it begins with"),
        (lambda data: data[:8] + b"\1" + data[9:], "it has version 1, this is for version 2"),
        (lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:], "its header does not match its CRC"),
        (lambda data: data[:44] + b"other" + data[49:], "its header does not match its CRC"),
        (lambda data: data[:-4] + bytes([data[-4] ^ 1]) + data[-3:], "its document offsets do not match their CRC"),
    ],
    ids=["cut header", "cut", "longer", "another format", "version", "header", "tokenizer", "offsets"],
)
def test_a_damaged_shard_is_refused_when_opened(damage: Any, message: str, prepared: Path) -> None:
    path = prepared / "train-00001.tokens"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"train-00001.tokens is no intact file of tokens: .*{message}"):
        opened(DataConfig(source="shards", path=str(prepared)))


def test_damaged_tokens_are_found_by_the_check(prepared: Path) -> None:
    path = prepared / "train-00001.tokens"
    data = bytearray(path.read_bytes())
    data[shards.HEADER_BYTES + 36] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="its tokens do not match their CRC"):
        command("check", str(prepared))


def test_a_token_that_no_vocabulary_has_is_named_where_it_is_read(prepared: Path) -> None:
    """Not by the embedding, in the middle of a run."""
    path = prepared / "train-00001.tokens"
    data = bytearray(path.read_bytes())
    place = shards.HEADER_BYTES + 2 * 20
    data[place : place + 2] = b"\xff\xff"
    path.write_bytes(data)
    with (
        opened(DataConfig(source="shards", path=str(prepared))) as loader,
        pytest.raises(ValueError, match=rf"train-00001.tokens .* its token 20, at byte {place}, is 65535, .* has 256"),
    ):
        list(islice(loader, 200))


def test_shards_that_are_too_short_are_refused(prepared: Path) -> None:
    with pytest.raises(ValueError, match=r"accepted: a file with at least seq_len \+ 1 = 4,097"):
        opened(DataConfig(source="shards", path=str(prepared)), seq_len=4096)


def test_prepare_does_not_write_over_shards(prepared: Path, tmp_path: Path) -> None:
    words = ("prepare", "--source", "jsonl", "--path", str(tmp_path / "corpus.jsonl"))
    with pytest.raises(ValueError, match=r"out is '.*shards'; accepted: a folder without .tokens files"):
        command(*words, "--out", str(prepared))


def test_prepare_that_fails_leaves_no_part_of_a_corpus(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 30) + "broken\n")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"corpus.jsonl:1351 is not a line of JSON"):
        command("prepare", "--source", "jsonl", "--path", str(path), "--shard-tokens", "500", "--out", str(out))
    assert [path.name for path in out.iterdir()] == ["tokenizer.json"]


def test_prepare_of_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="accepted: a corpus with at least one document that is not empty"):
        command("prepare", "--path", str(tmp_path), "--out", str(tmp_path / "out"))
    with pytest.raises(ValueError, match="source is 'synthetic'; accepted: a source of text"):
        command("prepare", "--source", "synthetic", "--out", str(tmp_path / "out"))


def test_prepare_stops_at_the_limit(tmp_path: Path) -> None:
    words = ("prepare", "--path", str(text_files(tmp_path / "in")), "--out", str(tmp_path / "out"))
    assert command(*words, "--limit-tokens", "200") == 0
    total = sum(Shard(path).header.tokens for path in (tmp_path / "out").glob("*.tokens"))
    assert 200 <= total < 300


@pytest.mark.parametrize("limit", ["1", "200", "700"])
def test_prepare_keeps_a_document_for_validation_whatever_the_limit(limit: str, tmp_path: Path) -> None:
    words = ("prepare", "--path", str(text_files(tmp_path / "in")), "--out", str(tmp_path / "out"))
    assert command(*words, "--limit-tokens", limit) == 0
    documents = {split: Shard(tmp_path / "out" / f"{split}-00000.tokens").header.documents for split in prepare.SPLITS}
    assert min(documents.values()) >= 1
    total = sum(Shard(path).header.tokens for path in (tmp_path / "out").glob("*.tokens"))
    assert total < int(limit) + 2 * max(map(len, TEXTS))


def test_prepare_refuses_a_corpus_that_leaves_nothing_for_validation(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "a.txt").write_text("too short")
    with pytest.raises(
        ValueError, match=r"the valid split of text .* is '0 tokens'; accepted: more or longer documents"
    ):
        command("prepare", "--path", str(tmp_path / "a.txt"), "--out", str(out))
    assert not list(out.glob("*.tokens"))


@pytest.mark.parametrize("words", [["--help"], ["prepare", "--help"]])
def test_help_shows_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(*words)
    assert "nsa data prepare --source text --path books/ --out data/books" in capsys.readouterr().out
