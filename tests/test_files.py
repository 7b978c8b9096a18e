"""Files that a run keeps: on disk when they have their name, whatever happens in between."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from power_cut import Disk
from training import small_run

from nsa import files
from nsa.train import Trainer
from nsa.train.storage import Index


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path, monkeypatch)
    yield disk
    disk.close()


@pytest.mark.parametrize("size", [0, 1, 100, 300_000])
def test_every_byte_is_in_the_kernel_at_fsync(size: int, tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "deep" / "er" / "file"
    files.make_folder(path.parent)
    with files.replacing(path) as file:
        file.write(b"x" * size)
    assert disk.survivors() == {"deep/er/file": b"x" * size}


def test_all_that_a_run_keeps_survives_a_power_cut(tmp_path: Path, disk: Disk) -> None:
    out = tmp_path / "runs" / "mine"
    assert Trainer(small_run(out, kind="nsa", save_every=1, keep=2)).train() is not None
    written = {str(path.relative_to(tmp_path)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    # Lines are added to the logs and are not synced one by one.
    logs = ("metrics.jsonl", "heartbeat.jsonl", ".lock", "events.out")
    written = {name: content for name, content in written.items() if not any(log in name for log in logs)}
    assert {"config.yaml", "run.json", "model.json", "model.safetensors", "tokenizer.json", "report.html"} <= {
        Path(name).name for name in written
    }
    survivors = disk.survivors()
    assert {name: survivors.get(name) for name in written} == written


def test_at_no_moment_is_there_a_checkpoint_that_is_not_whole(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power fails after every single fsync of a run."""
    seen = []

    def sync_and_cut(descriptor: int) -> None:
        disk.sync(descriptor)
        survivors = disk.survivors()
        steps = {Path(name).parent for name in survivors if Path(name).parent.name.partition("step_")[2].isdigit()}
        for step in steps:
            replica = tmp_path.parent / f"{tmp_path.name}-cut" / str(len(seen)) / step.name
            replica.mkdir(parents=True)
            for name, content in survivors.items():
                if Path(name).parent == step:
                    assert content is not None, name
                    (replica / Path(name).name).write_bytes(content)
            index = Index.read(replica)
            index.check(replica, index.files)
        seen.append(steps)

    monkeypatch.setattr(files, "sync", sync_and_cut)
    trainer = Trainer(small_run(tmp_path / "run", steps=4, save_every=1, keep=1))
    assert trainer.train() is not None
    first = next(number for number, steps in enumerate(seen) if steps)
    assert all(seen[first:]), "once there is one, there is always one"
    assert {step.name for steps in seen for step in steps} >= {f"step_{n}" for n in range(5)}


def test_a_write_that_fails_leaves_the_old_file_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(OSError, match=str(path)) as raised:
        files.replace_text(path, "new")
    assert raised.value.errno == errno.ENOSPC
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"file": "old"}


def test_foreign_files_and_links_are_not_removed_or_written(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    for name in ("file.tmp", ".file.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "theirs")
    (tmp_path / "file.part").write_text("theirs")
    before = {each.name: each.read_text() for each in tmp_path.iterdir()}
    files.replace_text(tmp_path / "file", "new")
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == before | {"file": "new"}
    assert (tmp_path / "file.tmp").is_symlink()


def test_the_mode_of_a_new_file_is_that_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    files.replace_text(tmp_path / "file", "new")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_that_cannot_be_made_is_named_by_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "file"
    with pytest.raises(FileNotFoundError) as raised:
        files.replace_text(path, "new")
    assert raised.value.filename == str(path)


@pytest.mark.parametrize("folder", [".", "..", "/"])
def test_a_folder_in_place_of_a_file_is_named(folder: str) -> None:
    with pytest.raises(IsADirectoryError) as raised:
        files.replace_text(Path(folder), "new")
    assert raised.value.filename == folder


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000])
def test_json_that_is_no_object_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        files.parse_json(data)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=f"{2**40:,}"):
        files.read_limited(path, 2**20)
