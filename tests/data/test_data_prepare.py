"""`nsa data prepare`: what it writes and prints, and what it leaves behind when it fails."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from corpora import TEXTS, command, jsonl_file, needs_tokenizers, opened, text_files
from power_cut import Disk
from waiting import PATIENCE_S

from nsa import cli, files
from nsa.data import DataConfig, prepare, train_bpe
from nsa.data.shards import Shard


def test_prepare_says_what_it_made_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command("prepare", "--source", "text", "--path", str(text_files(tmp_path / "in")), "--out", str(out))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("chunk 45/45  ")
    assert "train: 42 documents" in lines[1]
    assert "valid: 3 documents" in lines[2]
    valid = json.loads(lines[-1])["valid"]["tokens"]
    assert f"model.vocab_size: at least 256, model.seq_len: at most {valid - 1}" in lines[3]
    assert f"nsa train --dataset shards --data-path {out} " in lines[4]
    with opened(DataConfig(source="shards", path=str(out)), split="valid", seq_len=valid - 1) as loader:
        next(loader)
    assert json.loads(lines[-1])["valid"]["documents"] == 3


def test_prepare_does_not_write_over_shards(tmp_path: Path) -> None:
    words = ("prepare", "--path", str(text_files(tmp_path / "in")), "--out", str(tmp_path / "out"))
    assert command(*words) == 0
    with pytest.raises(ValueError, match=r"out is '.*out'; accepted: .*\.tokens"):
        command(*words)
    assert command("check", str(tmp_path / "out")) == 0


@needs_tokenizers
def test_prepare_does_not_write_over_another_tokenizer(tmp_path: Path) -> None:
    """One that is the same is kept: its folder may be the one that is written."""
    path, out = str(text_files(tmp_path / "in")), tmp_path / "out"
    train_bpe(TEXTS, 300).save(out)
    before = (out / "tokenizer.json").read_bytes()
    with pytest.raises(ValueError, match=r"out is '.*out'; accepted: .*tokenizer\.json"):
        command("prepare", "--path", path, "--out", str(out))
    assert command("prepare", "--path", path, "--tokenizer", str(out), "--out", str(out)) == 0
    assert (out / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize("path", ["in", "nothing"])
def test_prepare_keeps_a_manifest_that_it_did_not_write(path: str, tmp_path: Path) -> None:
    text_files(tmp_path / "in")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "manifest.json").write_text('{"name": "my extension"}')
    with pytest.raises(ValueError, match=r"manifest\.json|nothing"):
        command("prepare", "--path", str(tmp_path / path), "--out", str(tmp_path))
    assert (tmp_path / "manifest.json").read_text() == '{"name": "my extension"}'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train-bpe", "256"], "--train-bpe is 256; accepted: .*257"),
        (["--train-bpe", str(10**9)], "--train-bpe is 1000000000; accepted: "),
        (["--train-bpe", "300", "--tokenizer", "bytes"], "tokenizer is 'bytes'; accepted: none"),
        (["--limit-tokens", "0"], "--limit-tokens is 0"),
        (["--shard-tokens", "-1"], "shard_tokens is -1"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_is_written(words: list[str], message: str, tmp_path: Path) -> None:
    path = text_files(tmp_path / "in")
    with pytest.raises(ValueError, match=message):
        command("prepare", "--path", str(path), *words, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# The command that it prints.


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        pytest.param(["--train-bpe", "400"], TEXTS * 9, marks=needs_tokenizers),
        ([], TEXTS),
        # Shorter than any default, in a folder whose name a shell would take apart.
        (["--shard-tokens", "30"], ["only a few words in it"] * 40),
    ],
    ids=["bpe", "bytes", "short"],
)
def test_the_printed_command_runs(
    words: list[str], texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl_file(tmp_path / "corpus.jsonl", texts)
    assert command("prepare", "--source", "jsonl", "--path", str(path), *words, "--out", str(tmp_path / "a b$c")) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train with: nsa train ")]
    train = shlex.split(line.removeprefix("train with: nsa "))
    quick = ["--device", "cpu", "--steps", "2", "--eval-batches", "1", "--batch-size", "1", "--set", "sample_tokens=1"]
    assert cli.main([*train, *quick, "--out", str(tmp_path / "run")]) == 0


# Documents that cannot be read.


def bad_text(folder: Path) -> tuple[Path, list[str]]:
    text_files(folder)
    names = [str(folder / "part_1" / "bad.txt"), str(folder / "part_2" / "worse.txt")]
    for name in names:
        Path(name).write_bytes(b"abc\xff\xfe")
    return folder, names


def bad_jsonl(folder: Path) -> tuple[Path, list[str]]:
    path = jsonl_file(folder / "corpus.jsonl")
    bad = ["{", "[1]", '{"text": 3}', '{"text": "half a pair: \\ud800"}', '"\udcff"']
    with path.open("ab") as file:
        file.write("\n".join(bad).encode(errors="surrogateescape"))
    return path, [f"{path}:{len(TEXTS) + 1 + i}" for i in range(len(bad))]


def bad_parquet(folder: Path) -> tuple[Path, list[str]]:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "corpus.parquet"
    rows = [text.encode() for text in TEXTS]
    rows[7] = b"abc\xff"
    parquet.write_table(arrow.table({"text": arrow.array(rows).view(arrow.string())}), path, row_group_size=5)
    return path, [f"{path}, row group 1, row 2"]


@pytest.mark.parametrize(("source", "corpus"), [("text", bad_text), ("jsonl", bad_jsonl), ("parquet", bad_parquet)])
def test_bad_documents_stop_it_or_are_left_out_and_listed(
    source: str, corpus: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    path, bad = corpus(tmp_path / "in")
    out = tmp_path / "out"
    words = ("prepare", "--source", source, "--path", str(path), "--out", str(out))
    with pytest.raises(ValueError, match="|".join(re.escape(where) for where in bad)):
        command(*words)
    assert not list(out.glob("*.tokens*"))
    assert command(*words, "--on-bad", "skip") == 0
    printed = capsys.readouterr().out
    assert f"skipped: {len(bad)} documents" in printed
    assert json.loads(printed.splitlines()[-1])["skipped"] == len(bad)
    rows = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
    assert sorted(row["document"] for row in rows) == sorted(bad)
    assert all(row["problem"] for row in rows)
    kept = sum(Shard(path).header.documents for path in out.glob("*.tokens"))
    assert kept == len(TEXTS) - (source == "parquet")
    assert command("check", str(out)) == 0


def test_a_list_of_skipped_documents_is_not_replaced(tmp_path: Path) -> None:
    path, _ = bad_jsonl(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "skipped.jsonl").write_text("notes")
    with pytest.raises(ValueError, match=r"skipped\.jsonl"):
        command("prepare", "--source", "jsonl", "--path", str(path), "--out", str(out), "--on-bad", "skip")
    assert [file.name for file in out.iterdir()] == ["skipped.jsonl"]
    assert (out / "skipped.jsonl").read_text() == "notes"


def test_unreadable_row_group_counts_all_its_rows_as_skipped(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "corpus.parquet"
    texts = [f"{index} " + "many words " * 50 for index in range(60)]
    table = arrow.table({"text": texts})
    parquet.write_table(table, path, compression="snappy", use_dictionary=False, row_group_size=30)
    data = bytearray(path.read_bytes())
    data[100:1000] = b"\xff" * 900
    path.write_bytes(data)
    words = ("prepare", "--source", "parquet", "--path", str(path), "--out", str(tmp_path / "out"))
    assert command(*words, "--on-bad", "skip") == 0
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert (row["document"], row["documents"]) == (f"{path}, row group 0", 30)


def test_corpus_of_bad_documents_is_an_error_with_their_count(tmp_path: Path) -> None:
    path = jsonl_file(tmp_path / "corpus.jsonl")
    words = ("prepare", "--source", "jsonl", "--path", str(path), "--text-key", "body", "--out", str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"45 documents.*data.text_key is 'body', .*{.*'text': 'str'}"):
        command(*words, "--on-bad", "skip")


# What is left behind.


def prepare_in_a_child(tmp_path: Path, *, before: str) -> subprocess.Popen[str]:
    """`nsa data prepare` of corpus.jsonl into out, after `before`."""
    words = ["data", "prepare", "--source", "jsonl", "--path", str(tmp_path / "corpus.jsonl")]
    words += ["--shard-tokens", "5000", "--out", str(tmp_path / "out")]
    code = f"import sys\nfrom nsa import cli\nfrom nsa.data import prepare\n{before}\nsys.exit(cli.main({words!r}))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# Makes documents without end, and says when the first file is there.
ENDLESS = """
import signal

# A test run in the background has these ignored, and a child inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from itertools import count
real = prepare.open_documents
class Endless:
    name, few = "endless", False
    def __init__(self, *args):
        self.inner = real(*args)
    def chunks(self, *place):
        for number in count():
            if number == 9:
                print("begun", flush=True)
            yield from self.inner.chunks(*place)
prepare.open_documents = Endless
"""


def left_in(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name != ".lock")


@pytest.mark.usefixtures("children_find_the_stand_ins")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
def test_one_process_prepares_a_folder_and_a_signal_cleans_up(number: int, tmp_path: Path) -> None:
    jsonl_file(tmp_path / "corpus.jsonl")
    out = tmp_path / "out"
    child = prepare_in_a_child(tmp_path, before=ENDLESS)
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    words = ("prepare", "--source", "jsonl", "--path", str(tmp_path / "corpus.jsonl"), "--out", str(out))
    with pytest.raises(ValueError, match=r"out is '.*out'; accepted: .*process"):
        command(*words)
    assert any(name.endswith(".part") for name in left_in(out)), "the other process goes on"
    child.send_signal(number)
    child.communicate(timeout=PATIENCE_S)
    assert child.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert left_in(out) == []
    # Whatever a killed one has left does not get into the way of the next.
    assert command(*words) == 0
    assert left_in(out) == ["manifest.json", "tokenizer.json", "train-00000.tokens", "valid-00000.tokens"]


@pytest.mark.usefixtures("children_find_the_stand_ins")
def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files fails as a full disk does: at a write, and again when the file is closed."""
    jsonl_file(tmp_path / "corpus.jsonl", TEXTS * 40)
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    child = prepare_in_a_child(tmp_path, before=limit)
    _, error = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 2
    assert error.count("\n") == 1
    assert "train-00000.tokens" in error
    assert left_in(tmp_path / "out") == []


@pytest.mark.parametrize("failing", ["train-00001.tokens", "valid-00000.tokens", "manifest.json"])
def test_a_rename_that_fails_leaves_nothing(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, real in (("rename", Path.rename), ("replace", Path.replace)):

        def failing_once(self: Path, target: Path, real: Any = real) -> Path:
            if target.name == failing:
                raise OSError(f"no room for {failing}")
            return real(self, target)

        monkeypatch.setattr(Path, name, failing_once)
    path, out = jsonl_file(tmp_path / "corpus.jsonl"), tmp_path / "out"
    words = ("prepare", "--source", "jsonl", "--path", str(path), "--shard-tokens", "300", "--out", str(out))
    with pytest.raises(OSError, match=failing):
        command(*words)
    assert left_in(out) == []


def test_data_set_with_unrenamed_files_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a power cut in the middle of the renames leaves it."""
    path, out = jsonl_file(tmp_path / "corpus.jsonl"), tmp_path / "out"
    monkeypatch.setattr(prepare.ShardWriter, "publish", lambda self: None)
    command("prepare", "--source", "jsonl", "--path", str(path), "--out", str(out))
    with pytest.raises(ValueError, match=r"train-00000\.tokens .*missing"):
        command("check", str(out))


@pytest.mark.parametrize("bad", ["", "broken\n"])
def test_prepared_data_is_complete_or_rejected_after_a_power_cut(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power fails after every single fsync."""
    root, cuts = tmp_path / "disk", tmp_path / "cuts"
    root.mkdir()
    path = jsonl_file(tmp_path / "corpus.jsonl")
    path.write_text(path.read_text() + bad)
    disk = Disk(root, monkeypatch)
    whole = []

    def check(at: Path) -> bool:
        for name, content in disk.survivors().items():
            if (root / name).is_dir():
                continue
            assert content is not None or name.endswith((".part", ".tmp", ".lock")), name
            (at / name).parent.mkdir(parents=True, exist_ok=True)
            (at / name).write_bytes(content or b"")
        try:
            return command("check", str(at / "deep" / "out")) == 0
        except ValueError:
            return False

    def sync_and_cut(descriptor: int) -> None:
        disk.sync(descriptor)
        whole.append(check(cuts / str(len(whole))))

    monkeypatch.setattr(files, "sync", sync_and_cut)
    out = root / "deep" / "out"
    words = ("prepare", "--source", "jsonl", "--path", str(path), "--shard-tokens", "300", "--on-bad", "skip")
    assert command(*words, "--out", str(out)) == 0
    first = whole.index(True)
    assert all(whole[first:])
    assert first > 0
    written = {str(each.relative_to(root)): each.read_bytes() for each in out.iterdir() if each.name != ".lock"}
    assert ("deep/out/skipped.jsonl" in written) == bool(bad)
    survivors = disk.survivors()
    disk.close()
    assert {name: survivors.get(name) for name in written} == written


def test_prepare_that_fails_leaves_no_part_of_a_corpus(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 30) + "broken\n")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"corpus\.jsonl:1351 .*JSON"):
        command("prepare", "--source", "jsonl", "--path", str(path), "--shard-tokens", "500", "--out", str(out))
    assert [path.name for path in out.iterdir()] == [".lock"]


def test_prepare_of_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"text .* is '0 tokens'; accepted: .*document"):
        command("prepare", "--path", str(tmp_path), "--out", str(tmp_path / "out"))
    with pytest.raises(ValueError, match="source is 'synthetic'; accepted: "):
        command("prepare", "--source", "synthetic", "--out", str(tmp_path / "out"))


def test_prepare_stops_at_the_limit(tmp_path: Path) -> None:
    words = ("prepare", "--path", str(text_files(tmp_path / "in")), "--out", str(tmp_path / "out"))
    assert command(*words, "--limit-tokens", "200") == 0
    total = sum(Shard(path).header.tokens for path in (tmp_path / "out").glob("*.tokens"))
    assert 200 <= total < 300


@pytest.mark.parametrize("size", ["shard_tokens", "limit_tokens", "bpe_vocab_size"])
def test_a_wrong_size_is_named_before_anything_is_written(size: str, tmp_path: Path) -> None:
    config = DataConfig(source="text", path=str(text_files(tmp_path / "in")))
    with pytest.raises(ValueError, match=f"^{size} is 0"):
        prepare.prepare(config, tmp_path / "out", **{size: 0})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("limit", ["1", "200", "700"])
def test_prepare_keeps_a_validation_document_at_any_token_limit(limit: str, tmp_path: Path) -> None:
    words = ("prepare", "--path", str(text_files(tmp_path / "in")), "--out", str(tmp_path / "out"))
    assert command(*words, "--limit-tokens", limit) == 0
    documents = {split: Shard(tmp_path / "out" / f"{split}-00000.tokens").header.documents for split in prepare.SPLITS}
    assert min(documents.values()) >= 1
    total = sum(Shard(path).header.tokens for path in (tmp_path / "out").glob("*.tokens"))
    assert total < int(limit) + 2 * max(map(len, TEXTS))


def test_prepare_rejects_a_corpus_without_validation_tokens(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "a.txt").write_text("too short")
    with pytest.raises(ValueError, match=r"valid split .* is '0 tokens'; accepted: .*documents"):
        command("prepare", "--path", str(tmp_path / "a.txt"), "--out", str(out))
    assert not list(out.glob("*.tokens"))


@pytest.mark.parametrize("words", [["--help"], ["prepare", "--help"]])
def test_help_shows_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(*words)
    assert "nsa data prepare --source " in capsys.readouterr().out
