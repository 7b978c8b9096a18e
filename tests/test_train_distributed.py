"""Two ranks compute what one does, and one goes on where two stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training import config_file, lines_of, losses, small_run

from nsa.train import Trainer
from nsa.train.distributed import any_rank, from_first, mean_over_ranks


def torchrun(folder: Path, out: Path, *words: str, ranks: int = 2) -> str:
    """The small run with half of its batch on each of two ranks."""
    file = config_file(folder, small_run(out, kind="nsa", batch_size=1, log_every=2, stats_every=4))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, "-m", "nsa.cli", "train", "--config", file, "--out", str(out), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_alone(out: Path, **changes: object) -> dict[int, float]:
    Trainer(small_run(out, kind="nsa", **changes)).train()
    return losses(out)


@pytest.mark.parametrize(("parallel", "accum"), [("ddp", 2), ("fsdp", 1)])
def test_two_ranks_are_one_and_one_goes_on(parallel: str, accum: int, tmp_path: Path) -> None:
    alone = run_alone(tmp_path / "alone", accum=accum)
    out = tmp_path / "two"
    printed = torchrun(tmp_path, out, "--parallel", parallel, "--accum", str(accum), "--steps", "4")
    assert f" parallel={parallel} ranks=2 " in printed.splitlines()[0]
    assert printed.count("[boot]") == 1
    two = losses(out)
    assert list(two) == [1, 2, 3, 4]
    # The order of a sum and nothing else differs.
    assert two == pytest.approx({step: alone[step] for step in two}, rel=1e-5)
    assert len(lines_of(out, "gates")) == 1

    again = run_alone(out, accum=accum)
    assert again == pytest.approx(alone, rel=1e-5)


def test_mixed_precision_shards_learn_what_autocast_does(tmp_path: Path) -> None:
    alone = run_alone(tmp_path / "alone", dtype="bfloat16", accum=2, steps=3)
    words = ["--parallel", "fsdp", "--dtype", "bfloat16", "--accum", "2", "--steps", "3", "--gc"]
    torchrun(tmp_path, tmp_path / "two", *words)
    assert losses(tmp_path / "two") == pytest.approx(alone, rel=2e-3)


def test_alone_there_is_nobody_to_ask() -> None:
    x = torch.tensor(3.0)
    assert mean_over_ranks(x) == 3.0
    assert any_rank(True, x.device)
    assert not any_rank(False, x.device)
    assert from_first("here") == "here"
