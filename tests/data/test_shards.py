"""Shards of tokens: `nsa data prepare` writes them, the loader reads them, and damage is found."""

from __future__ import annotations

import errno
import json
import os
import shutil
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from corpora import TEXTS, command, jsonl_file, needs_tokenizers, opened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nsa.data import Batch, DataConfig, load_tokenizer, shards, train_bpe
from nsa.data.shards import Manifest, Shard


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    path = jsonl_file(tmp_path / "corpus.jsonl")
    out = tmp_path / "shards"
    assert command("prepare", "--source", "jsonl", "--path", str(path), "--shard-tokens", "300", "--out", str(out)) == 0
    return out


def contents(shard: Shard) -> tuple[list[int], list[int]]:
    """Its tokens and offsets."""
    header = shard.header
    with shard.opened() as file:
        return shard.tokens(file, 0, header.tokens).tolist(), shard.offsets(file, 0, header.documents + 1).tolist()


def test_prepared_tokens_are_the_documents(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, list[str]] = {"train": [], "valid": []}
    for path in sorted(prepared.glob("*.tokens")):
        shard = Shard(path)
        assert shard.header.width == 2
        rows, borders = contents(shard)
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
def test_tokenizer_other_than_the_one_of_the_tokens_is_rejected(tmp_path: Path) -> None:
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
    message = rf"tokenizer .*-00000.tokens is '{a.name}'; accepted: '{b.name}'"
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
    assert contents(shard) == ([99_999, 0, 65_536], [0, 3])
    with pytest.raises(ValueError, match=r"token is 100000; accepted: below .*100000"):
        writer.add([torch.tensor([100_000], dtype=torch.int32)])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"PK\3\4" + data[4:], "begins with"),
        (lambda data: data[:8] + b"\1" + data[9:], "version 1, .*version 2"),
        (lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:], "header .*CRC"),
        (lambda data: data[:44] + b"other" + data[49:], "header .*CRC"),
        (lambda data: data[:-4] + bytes([data[-4] ^ 1]) + data[-3:], "document offsets .*CRC"),
    ],
    ids=["another format", "version", "header", "tokenizer", "offsets"],
)
def test_a_damaged_shard_is_refused_when_opened(damage: Any, message: str, prepared: Path) -> None:
    path = prepared / "train-00001.tokens"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"train-00001.tokens is .*: .*{message}"):
        opened(DataConfig(source="shards", path=str(prepared)))


@pytest.mark.parametrize("size", [0, 40, -8, 1], ids=["empty", "cut header", "cut", "longer"])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_shard_of_another_size_is_refused(size: int, split: str, prepared: Path) -> None:
    path = prepared / f"{split}-00000.tokens"
    os.truncate(path, size if size in (0, 40) else path.stat().st_size + size)
    refused(prepared, rf"{path.name} has {path.stat().st_size} bytes")
    with pytest.raises(ValueError, match=rf"{path.name} is .*: it has "):
        Shard(path)


def refused(folder: Path, message: str) -> None:
    """By the check and by training, which opens both splits."""
    with pytest.raises(ValueError, match=message):
        command("check", str(folder))
    with pytest.raises(ValueError, match=message), opened(DataConfig(source="shards", path=str(folder))):
        opened(DataConfig(source="shards", path=str(folder)), split="valid")


@pytest.mark.parametrize("pattern", ["train-00000*", "train-00002*", "valid-*", "train-*"])
def test_a_missing_file_is_noticed(pattern: str, prepared: Path) -> None:
    names = sorted(path.name for path in prepared.glob(pattern))
    for name in names:
        (prepared / name).unlink()
    refused(prepared, f"{names[0]} is missing")


def test_a_file_that_does_not_belong_is_noticed(prepared: Path) -> None:
    shutil.copy(prepared / "train-00000.tokens", prepared / "train-00009.tokens")
    refused(prepared, "train-00009.tokens .*listed")


def test_files_that_changed_places_are_noticed(prepared: Path) -> None:
    """Each is sound by itself, and may have the size of the other."""
    first, second = prepared / "train-00000.tokens", prepared / "train-00001.tokens"
    writer = shards.ShardWriter(prepared, "train", load_tokenizer("bytes"), 2**20)
    header = Shard(first).header
    tokens = torch.arange(header.tokens) % 7
    starts = contents(Shard(first))[1]
    writer.add([tokens[a:b] for a, b in pairwise(starts)])
    writer.publish()
    assert second.is_file()
    assert Shard(first).header.file_bytes == header.file_bytes
    refused(prepared, "train-00000.tokens is .*: .*header .*manifest")


def test_data_set_of_an_older_version_can_be_given_a_manifest(prepared: Path) -> None:
    path = prepared / "manifest.json"
    written = json.loads(path.read_text())
    path.unlink()
    refused(prepared, "data.path is .*--write-manifest")
    assert command("check", "--write-manifest", str(prepared)) == 0
    assert json.loads(path.read_text()) == written
    assert command("check", str(prepared)) == 0
    with pytest.raises(ValueError, match=r"--write-manifest is .*shards'; accepted: .*manifest\.json"):
        command("check", "--write-manifest", str(prepared))


@pytest.mark.parametrize(("missing", "number"), [("train-00001.tokens", 1), ("valid-00000.tokens", 0)])
def test_no_manifest_is_written_of_files_with_a_gap(missing: str, number: int, prepared: Path) -> None:
    for name in ("manifest.json", missing):
        (prepared / name).unlink()
    with pytest.raises(ValueError, match=rf"{missing[:5]} files in .* is .*; accepted: \[{number}\]"):
        command("check", "--write-manifest", str(prepared))
    assert not (prepared / "manifest.json").exists()


ENTRY = {"bytes": 128, "header_sha256": "0" * 64}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is damaged"),
        ("[" * 100_000, "is damaged: .*deep"),
        ("1" * 10_000, "is damaged"),
        ("[]", "an object"),
        ("{}", "version is None"),
        ({"version": 2}, "version is 2; accepted: 1"),
        ({"files": []}, r"files is \[\]"),
        ({"files": {}}, "train files in"),
        ({"files": {"train-00000.tokens": ENTRY}}, "valid files in"),
        ({"files": {"../train-00000.tokens": ENTRY}}, "name of .* is '../train"),
        ({"files": {"train-00000.tokens": 7}}, "files.'train-00000.tokens' is 7"),
        ({"files": {"train-00000.tokens": {**ENTRY, "bytes": "1"}}}, "bytes is '1'"),
        ({"files": {"train-00000.tokens": {**ENTRY, "bytes": -1}}}, "bytes is -1"),
        ({"files": {"train-00000.tokens": {**ENTRY, "bytes": 10**30}}}, "bytes is 1000"),
        ({"files": {"train-00000.tokens": {**ENTRY, "bytes": True}}}, "bytes is True"),
        ({"files": {"train-00000.tokens": {**ENTRY, "header_sha256": None}}}, "header_sha256 is None"),
        ({"files": {"train-00000.tokens": {"more": 1, "bytes": 128}}}, "header_sha256 is None"),
    ],
)
def test_a_wrong_manifest_is_named_with_the_value(content: Any, message: str, prepared: Path) -> None:
    text = content if isinstance(content, str) else json.dumps({"version": 1, **content})
    (prepared / "manifest.json").write_text(text)
    refused(prepared, f"(?=.*manifest.json).*{message}")


def test_a_manifest_that_is_too_large_is_not_read(prepared: Path) -> None:
    os.truncate(prepared / "manifest.json", 10**12)
    refused(prepared, "manifest.json .*: 1,000,000,000,000 bytes")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


@given(values=JSON, key=st.sampled_from(["version", "files", "train-00000.tokens", "bytes", "header_sha256"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bad_manifest_value_is_a_value_error_naming_the_file(values: Any, key: str, tmp_path: Path) -> None:
    def replaced(part: Any) -> Any:
        return {k: values if k == key else replaced(v) for k, v in part.items()} if isinstance(part, dict) else part

    sound = {"version": 1, "files": {name: dict(ENTRY) for name in ("train-00000.tokens", "valid-00000.tokens")}}
    (tmp_path / "manifest.json").write_text(json.dumps(replaced(sound)))
    # Nothing else, whatever the value: where it happens to be valid, the files are missing.
    with pytest.raises(ValueError, match=r"manifest\.json"):
        Manifest.read(tmp_path).compare(tmp_path)


# A shard that changes while a run reads it.


def truncated_while_read(folder: Path) -> None:
    for path in folder.glob("train-*.tokens"):
        os.truncate(path, 0)


def replaced_while_read(folder: Path) -> None:
    for path in folder.glob("train-*.tokens"):
        # At once: a thread reads ahead.
        shutil.copy(path, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def removed_while_read(folder: Path) -> None:
    for path in folder.glob("train-*.tokens"):
        path.unlink()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (truncated_while_read, ValueError, " 0 bytes, "),
        (replaced_while_read, ValueError, "was replaced"),
        (removed_while_read, FileNotFoundError, "No such file"),
    ],
)
def test_shard_changed_while_being_read_is_an_error_naming_it(
    change: Any, error: type[Exception], message: str, prepared: Path
) -> None:
    """A mapped file would end the process with SIGBUS, or go on with other tokens."""
    with opened(DataConfig(source="shards", path=str(prepared))) as loader:
        next(loader)
        change(prepared)
        with pytest.raises(error, match=rf"(?=.*train-0000\d\.tokens).*{message}"):
            # More than were made ahead.
            list(islice(loader, 30))


def test_a_file_that_is_cut_between_two_reads_is_an_error(prepared: Path) -> None:
    """The size was right a moment ago."""
    shard = Shard(prepared / "train-00000.tokens")
    with shard.opened() as file:
        os.truncate(shard.path, 200)
        with pytest.raises(ValueError, match=r"train-00000.tokens .* was truncated"):
            shard.tokens(file, 0, 100)


def test_a_read_that_fails_names_the_file(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(prepared / "train-00000.tokens")

    def pread(file: int, count: int, at: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(OSError, match=r"Input/output error: '.*train-00000.tokens'"):
        shard.window(0, 10)


# Headers and offsets that fit their checksums and still are wrong.


def forged(path: Path, offsets: list[int] | None = None, **fields: Any) -> Path:
    """The file with another header, or other offsets, and the checksums to go with them."""
    header = Shard(path).header
    data = bytearray(path.read_bytes())
    if offsets is not None:
        data[header.offsets_at :] = shards.raw_bytes(torch.tensor(offsets))
        fields |= {"offsets_crc": crc32(data[header.offsets_at :]), "documents": len(offsets) - 1}
    data[: shards.HEADER_BYTES] = header._replace(**fields).pack()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": 2**63}, "bytes, .*header"),
        ({"documents": 2**60}, "bytes, .*header"),
        ({"width": 3}, "3 bytes per"),
        ({"vocab_size": 0}, "vocabulary is 0"),
        ({"vocab_size": 2**31}, "vocabulary is 2,147,483,648"),
        ({"tokenizer": b"\xff" * 32}, r"tokenizer is .*\\xff"),
        ({"offsets": [0, -5, 10]}, "ascend"),
        ({"offsets": [0, 2**62]}, "ascend"),
        ({"offsets": [3]}, "ascend"),
        ({"offsets": [0, 9, 9]}, "ascend"),
    ],
)
def test_a_forged_shard_is_refused(fields: dict[str, Any], message: str, prepared: Path) -> None:
    path = forged(prepared / "train-00000.tokens", **fields)
    with pytest.raises(ValueError, match=rf"train-00000.tokens is .*: .*{message}"):
        Shard(path)


def test_a_forged_token_is_found_by_the_check(prepared: Path) -> None:
    path = prepared / "train-00000.tokens"
    shard = Shard(forged(path, vocab_size=100))
    with pytest.raises(ValueError, match=r"train-00000.tokens .* token \d+, .* vocabulary has 100"):
        shard.check_tokens()


def test_damaged_tokens_are_found_by_the_check(prepared: Path) -> None:
    path = prepared / "train-00001.tokens"
    data = bytearray(path.read_bytes())
    data[shards.HEADER_BYTES + 36] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"its tokens .*CRC"):
        command("check", str(prepared))


def test_token_outside_the_vocabulary_is_reported_when_read(prepared: Path) -> None:
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
    with pytest.raises(ValueError, match=r"accepted: .*seq_len \+ 1 = 4,097"):
        opened(DataConfig(source="shards", path=str(prepared)), seq_len=4096)
