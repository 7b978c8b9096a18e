"""Two ranks compute what one does, and one goes on where two stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import Start, rank_variables
from training import config_file, lines_of, losses, small_run
from waiting import PATIENCE_S, wait_until

from nsa.data import DataConfig
from nsa.train import Trainer
from nsa.train.distributed import all_finite, any_rank, from_all, from_first, mean_over_ranks, require_same
from nsa.train.storage import Index

pytestmark = pytest.mark.slow


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def train_words(folder: Path, out: Path, *words: str) -> list[str]:
    """The small run with half of its batch on each of two ranks."""
    file = config_file(folder, small_run(out, kind="nsa", batch_size=1, log_every=2, stats_every=4))
    return ["train", "--config", file, "--out", str(out), *words]


def command(folder: Path, out: Path, *words: str) -> list[str]:
    return [*LAUNCHER, "-m", "nsa.cli", *train_words(folder, out, *words)]


def start_two(folder: Path, first: list[str], second: list[str] | None = None) -> list[Start]:
    """Two ranks without a launcher, in forks, which save its imports and theirs."""
    variables = rank_variables(2)
    return [Start(argv, folder / f"printed-{i}", **variables[i]) for i, argv in enumerate([first, second or first])]


def train_two(folder: Path, out: Path, *words: str) -> str:
    """What the first of two ranks prints, once both have succeeded."""
    (status, printed), (other, said) = (rank.wait() for rank in start_two(folder, train_words(folder, out, *words)))
    assert (status, other) == (0, 0), printed + said
    return printed


def torchrun(folder: Path, out: Path, *words: str) -> str:
    done = subprocess.run(command(folder, out, *words), capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def newest(out: Path) -> Path:
    return max((out / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)


def run_alone(out: Path, **changes: object) -> dict[int, float]:
    Trainer(small_run(out, kind="nsa", **changes)).train()
    return losses(out)


@pytest.mark.parametrize(("parallel", "accum"), [("ddp", 2), ("fsdp", 1)])
def test_two_ranks_are_one_and_one_goes_on(parallel: str, accum: int, tmp_path: Path) -> None:
    alone = run_alone(tmp_path / "alone", accum=accum)
    out = tmp_path / "two"
    words = ("--parallel", parallel, "--accum", str(accum), "--steps", "4", "--sample-every", "2")
    printed = (torchrun if parallel == "ddp" else train_two)(tmp_path, out, *words)
    # Half way and at the end.
    assert [sample["step"] for sample in lines_of(out, "sample")] == [2, 4]
    assert f" parallel={parallel} ranks=2 " in printed.splitlines()[0]
    assert printed.count("[boot]") == 1
    two = losses(out)
    assert list(two) == [1, 2, 3, 4]
    # The order of a sum and nothing else differs.
    assert two == pytest.approx({step: alone[step] for step in two}, rel=1e-5)
    assert len(lines_of(out, "gates")) == 1
    # Validated on the same sequences, whoever has which.
    assert (
        Index.read(out / "checkpoints" / "step_4").validation_id == Index.read(newest(tmp_path / "alone")).validation_id
    )

    again = run_alone(out, accum=accum)
    assert again == pytest.approx(alone, rel=1e-5)


def test_packed_documents_count_by_their_tokens_whoever_has_them(tmp_path: Path) -> None:
    # The last token of a document has no next one to be scored by: short ones leave few, long ones many.
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "ab" * (1 + 40 * (n % 3 == 0))}) + "\n" for n in range(300)))
    data = DataConfig(source="jsonl", path=str(texts), prefetch=False, pack=True)
    alone = run_alone(tmp_path / "alone", data=data)
    words = ("--parallel", "ddp", "--pack", "--dataset", "jsonl", "--data-path", str(texts))
    train_two(tmp_path, tmp_path / "two", *words)
    assert losses(tmp_path / "two") == pytest.approx(alone, rel=1e-5)


def test_ranks_warn_once_at_the_start_and_by_name_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config_file(tmp_path, small_run(tmp_path / "run", warmup=4, steps=6))
    # Logged by the config, warned of by the settings, and logged and warned of in the run.
    (tmp_path / "trains.py").write_text(
        "import logging, warnings\n"
        "from nsa import cli\n"
        "from nsa.train import Trainer\n"
        "step = Trainer.step\n"
        "def warns(trainer, number, batches):\n"
        "    logging.getLogger('nsa').warning('step %d is slow', number)\n"
        "    warnings.warn('old code')\n"
        "    return step(trainer, number, batches)\n"
        "Trainer.step = warns\n"
        "raise SystemExit(cli.main())\n"
    )
    monkeypatch.setenv("NSA_SEQ_LENGHT", "32")
    words = ["train", "--config", file, "--out", str(tmp_path / "run"), "--parallel", "ddp", "--steps", "3"]
    done = subprocess.run(
        [*LAUNCHER, str(tmp_path / "trains.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warmup 4 -> 2") == 1
    assert done.stderr.count("UserWarning: NSA_SEQ_LENGHT") == 1
    assert done.stderr.count("UserWarning: old code") == 1
    assert done.stderr.count("step 2 is slow") == 2
    assert done.stderr.count("rank 1: step 2 is slow") == 1


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


ENDLESS = ("--parallel", "ddp", "--steps", "1000000", "--log-every", "1000000", "--stats-every", "0")


def wait_for_a_step(out: Path) -> None:
    """The first step is logged."""
    wait_until((out / "heartbeat.jsonl").is_file)


def ranks_of(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.mark.parametrize("end", ["everyone is asked", "the launcher is killed"])
def test_all_ranks_stop_and_save_between_log_steps(end: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with subprocess.Popen(command(tmp_path, out, *ENDLESS), stdout=subprocess.PIPE, text=True) as launcher:
        wait_for_a_step(out)
        ranks = ranks_of(launcher.pid)
        if end == "the launcher is killed":
            launcher.kill()
        else:
            for pid in [*ranks, launcher.pid]:
                os.kill(pid, signal.SIGTERM)
        printed, _ = launcher.communicate(timeout=PATIENCE_S)
        wait_until(lambda: not any(map(running, ranks)))
    why = ".*launcher.*" if end == "the launcher is killed" else "(SIGTERM|another rank)"
    assert re.search(rf"\[stop\] {why}: step \d+ is saved", printed)


def test_all_ranks_stop_and_save_when_one_is_asked(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first, second = start_two(tmp_path, train_words(tmp_path, out, *ENDLESS))
    wait_for_a_step(out)
    second.kill(signal.SIGTERM)
    status, printed = first.wait()
    assert (status, second.wait()[0]) == (0, 0)
    assert re.search(r"\[stop\] another rank: step \d+ is saved", printed)


def test_ranks_whose_data_fails_keep_what_they_have(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(400):
        # One that is not read before the run has begun.
        (texts / f"{n:03}.txt").write_bytes(b"\xff" if n == 7 else b"some words of a text\n" * 10)
    out = tmp_path / "run"
    words = (
        "--parallel",
        "ddp",
        "--steps",
        "1000",
        "--log-every",
        "1000",
        "--stats-every",
        "0",
        "--save-every",
        "1000",
    )
    data = (
        "--dataset",
        "text",
        "--data-path",
        str(texts),
        "--set",
        "data.doc_batch=4",
        "--set",
        "data.shuffle_tokens=640",
    )
    ranks = start_two(tmp_path, train_words(tmp_path, out, *words, *data))
    (status, printed), (other, _) = (rank.wait() for rank in ranks)
    assert 0 not in (status, other)
    assert re.search(r"007\.txt .*UTF-8", printed)
    saved = re.search(r"\[stop\] no data: step (\d+) is saved", printed)
    assert saved is not None, printed
    assert newest(out).name == f"step_{saved[1]}"


def test_a_rank_that_is_killed_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with subprocess.Popen(
        command(tmp_path, out, *ENDLESS), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as launcher:
        wait_for_a_step(out)
        ranks = ranks_of(launcher.pid)
        os.kill(ranks[-1], signal.SIGKILL)
        _, said = launcher.communicate(timeout=PATIENCE_S)
    assert "another rank" in said
    assert f"--out {out}" in said
    assert not any(map(running, ranks))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--lr", "0.5"], "lr on rank 1 is 0.5"),
        (["--batch-size", "2"], "batch_size on rank 1 is 2"),
        # The same flags, and another corpus behind them.
        (["--data-path", "other.txt"], "fingerprint "),
    ],
)
def test_ranks_with_different_runs_are_rejected_before_training(
    words: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one.txt", "other.txt"):
        (tmp_path / name).write_text(f"some words of {name}\n" * 400)
    out = tmp_path / "run"
    data = DataConfig(source="text", path=str(tmp_path / "one.txt"), prefetch=False)
    file = config_file(tmp_path, small_run(out, batch_size=1, data=data))
    monkeypatch.chdir(tmp_path)
    argv = ["train", "--config", file, "--out", str(out), "--parallel", "ddp"]
    for status, said in [rank.wait() for rank in start_two(tmp_path, argv, [*argv, *words])]:
        assert status == 2, said
        assert key in said
        assert re.search(f"{key}.*; accepted: .*rank 0", said)
    assert not out.exists()


def test_mixed_precision_shards_learn_what_autocast_does(tmp_path: Path) -> None:
    alone = run_alone(tmp_path / "alone", dtype="bfloat16", accum=2, steps=3)
    words = ["--parallel", "fsdp", "--dtype", "bfloat16", "--accum", "2", "--steps", "3", "--gc"]
    train_two(tmp_path, tmp_path / "two", *words)
    assert losses(tmp_path / "two") == pytest.approx(alone, rel=2e-3)


def test_alone_there_is_nobody_to_ask() -> None:
    x = torch.tensor(3.0)
    assert mean_over_ranks(x) == 3.0
    assert any_rank(True, x.device)
    assert not any_rank(False, x.device)
    assert from_first("here") == "here"
    assert from_all(["here"]) == ["here"]
    require_same({"lr": 0.1})
    assert all_finite([x], x.device)
    assert not all_finite([x, x * float("nan")], x.device)
