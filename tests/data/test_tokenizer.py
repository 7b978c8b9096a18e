"""Tokenizers: what they save and load again, and the error for one that does not fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from corpora import TEXTS, jsonl_file, needs_tokenizers, opened

from nsa.data import DataConfig, load_tokenizer, train_bpe


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
    assert "byte 0 " in warning
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
    with pytest.raises(ValueError, match=rf"model.vocab_size is 256; accepted: .*{size}, .* BPE-"):
        opened(config, vocab_size=256)
    with opened(config, vocab_size=size) as loader:
        assert loader.vocab_size == size
        assert next(loader).tokens.max() < size


@needs_tokenizers
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"accepted: 'bytes', .*tokenizer\.json, .*folder"),
        ("{", "JSON"),
        ("{}", ": Model missing"),
    ],
)
def test_a_wrong_tokenizer_file_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer is '.*tokenizer.json'; .*{message}"):
        load_tokenizer(path)


def word_level(**changes: Any) -> str:
    """A tokenizer.json of three words."""
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "</s>": 2}, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": {**model, **changes.pop("model", {})}, **changes})


@needs_tokenizers
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "JSON: .*deep"),
        ("1" * 10_000, "JSON"),
        ("\x00", "JSON"),
        ("null", "an object"),
        ("[]", "an object"),
        ('"bytes"', "an object"),
        ('{"type": ["bytes"]}', "can be read"),
        (word_level(model={"type": 7}), "can be read"),
        (word_level(model={"vocab": {"a": "b"}}), "can be read"),
        (word_level(model={"vocab": {"a": -1}}), "can be read"),
        (word_level(model={"vocab": {"a": 2**32}}), "can be read"),
        (word_level(model={"vocab": {}}), "vocabulary"),
        (word_level(added_tokens={"id": 1}), "can be read"),
        (word_level(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}), "can be read"),
        # The package panics.
        (word_level(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "can be read"),
    ],
)
def test_a_crafted_tokenizer_is_an_error_that_names_it(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer is '.*tokenizer.json'; accepted: .*{message}"):
        load_tokenizer(tmp_path)


def test_non_text_or_oversized_tokenizer_file_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json .*UTF-8.* byte 7"):
        load_tokenizer(path)
    os.truncate(path, 10**12)
    with pytest.raises(ValueError, match=r"tokenizer\.json .*: 1,000,000,000,000 bytes; accepted: "):
        load_tokenizer(path)


@pytest.mark.parametrize("size", [512, 0, "256", None, [256]])
def test_bytes_have_256_tokens(size: object, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"type": "bytes", "vocab_size": size}))
    with pytest.raises(ValueError, match=r"vocab_size in .*tokenizer.json is .*; accepted: 256"):
        load_tokenizer(tmp_path)


@needs_tokenizers
@pytest.mark.parametrize("token", [2**24, 2**32 - 1])
def test_a_token_beyond_any_vocabulary_is_refused(token: int, tmp_path: Path) -> None:
    """A model would need a row for each, and 32 bits hold only half of them."""
    (tmp_path / "tokenizer.json").write_text(word_level(model={"vocab": {"[UNK]": 0, "a": token, "</s>": 2}}))
    with pytest.raises(ValueError, match=rf"tokenizer.json is {token}; accepted: below 16,777,216"):
        load_tokenizer(tmp_path)


@needs_tokenizers
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_tokenizer_that_fails_on_a_text_is_named(prefetch: bool, tmp_path: Path) -> None:
    """The package raises a bare Exception where a word is unknown and there is no word for that."""
    (tmp_path / "tokenizer.json").write_text(word_level(model={"vocab": {"a": 1, "</s>": 2}}))
    tokenizer = load_tokenizer(tmp_path)
    message = r"tokenizer is '.*tokenizer.json'; accepted: .*Missing \[UNK\] token"
    with pytest.raises(ValueError, match=message):
        tokenizer.encode("unknown")
    config = DataConfig(
        source="jsonl", path=str(jsonl_file(tmp_path / "a.jsonl")), tokenizer=str(tmp_path), prefetch=prefetch
    )
    with opened(config) as loader, pytest.raises(ValueError, match=message):
        next(loader)


@needs_tokenizers
def test_signal_exception_is_not_taken_for_a_tokenizer_error() -> None:
    tokenizer = train_bpe(TEXTS, 300)

    class Stop(Exception):
        pass

    for error in (Stop, KeyboardInterrupt, SystemExit, MemoryError):
        with pytest.raises(error), tokenizer.naming_errors("do anything"):
            raise error


@needs_tokenizers
def test_a_tokenizer_that_ends_no_document_is_refused(tmp_path: Path) -> None:
    train_bpe(TEXTS, 300).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(ValueError, match=r"tokenizer is '.*'; accepted: .*<\|endoftext\|>"):
        load_tokenizer(path)


def test_missing_tokenizers_package_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("nsa.data.tokenizer.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        load_tokenizer(tmp_path)
