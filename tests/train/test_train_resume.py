"""Kill -9 at any moment: the next start goes on with the losses, to the bit, of a run that nobody killed."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from forked import Start
from training import config_file, lines_of, losses, small_run

from nsa.train.config import TrainConfig

STEPS = 24


def config(out: Path) -> TrainConfig:
    # A checkpoint a step: a kill finds one half written more often than not.
    return small_run(out, kind="nsa", steps=STEPS, save_every=1, log_every=1, eval_every=8)


def start(file: str, out: Path) -> Start:
    return Start(["train", "--config", file, "--out", str(out)], out.parent / "printed")


def finish(run: Start) -> None:
    status, printed = run.wait()
    assert status == 0, printed


@pytest.mark.slow
def test_kills_change_no_bit(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Three times here; `pytest tests/train/test_train_resume.py --kills 20` for longer."""
    chance = random.Random(pytestconfig.getoption("--kills"))
    out, whole = tmp_path / "run", tmp_path / "whole"
    file = config_file(tmp_path, config(out))
    for _ in range(pytestconfig.getoption("--kills")):
        run = start(file, out)
        while not run.printed.is_file() or "[boot]" not in run.printed.read_text():
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 1.5))
        run.kill()
        run.wait()
    finish(start(file, out))
    # In a fork too: what other tests did to torch may show in the last bit.
    finish(start(file, whole))
    assert losses(out) == losses(whole)
    evaluated = {record["step"]: record["loss"] for record in lines_of(out, "eval")}
    assert evaluated == {record["step"]: record["loss"] for record in lines_of(whole, "eval")}
