"""Shards of tokens: `nsa data prepare` writes them, the loader reads them, and damage is found."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import TEXTS, jsonl_file, needs_tokenizers, opened, text_files

from nsa import cli
from nsa.data import Batch, DataConfig, load_tokenizer, prepare, shards, train_bpe
from nsa.data.shards import Shard


def command(*words: str) -> int:
    return prepare.run(cli.parser_of("data").parse_args(words))


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
