"""The study runs end to end on a CPU, within its budget, and continues where an earlier call stopped."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nsa.cli import main as run_nsa
from nsa.model import LM
from nsa.train.config import load_config

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "study.py"


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("study", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["study"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["study"]


def cost(config: Any, sets: dict[str, Any], *, flops: bool) -> float:
    with torch.device("meta"):
        model = LM(load_config(config, {"device": "cpu", "compile": False, **sets}).model)
    return model.flops_per_token(model.config.seq_len) if flops else sum(model.parameter_counts().values())


@pytest.mark.parametrize("name", ["125m", "tiny"])
@pytest.mark.parametrize(("arm", "flops"), [("dense", False), ("dense-flops", True), ("sliding", False)])
def test_an_arm_is_as_large_as_it_says(study: ModuleType, name: str, arm: str, flops: bool) -> None:
    scale = study.SCALES[name]
    base = study.model_sets(scale)
    arms = {made.name: made for made in study.make_arms(scale)}
    own = cost(scale.config, base | arms[arm].sets, flops=flops)
    assert own == pytest.approx(cost(scale.config, base, flops=flops), rel=0.02)


def test_the_arms_are_those_that_the_issue_asks_for(study: ModuleType) -> None:
    arms = {arm.name: arm.sets for arm in study.make_arms(study.SCALES["125m"])}
    assert list(arms)[:3] == ["nsa", "dense", "dense-flops"]
    assert {sets["model.attn.drop_branch"] for name, sets in arms.items() if "-no-" in name and "gate" not in name} == {
        "cmp",
        "sel",
        "win",
    }
    assert {"nsa-gate-bias", "nsa-gate-softmax", "nsa-gate-no-decay", "nsa-lr", "nsa-seed", "sliding"} <= set(arms)


def test_a_curve_counts_training_alone(study: ModuleType) -> None:
    metrics = [
        {"kind": "eval", "step": 0, "loss": 5.0},
        *({"kind": "step", "step": step, "loss": float(step)} for step in range(1, 5)),
        {"kind": "speed", "step": 2, "step_s": 0.5},
        {"kind": "speed", "step": 4, "step_s": 1.0},
        {"kind": "eval", "step": 4, "loss": 3.0},
    ]
    points = study.curve(metrics, 10)
    assert [(p["tokens"], p["seconds"], p["train_loss"], p["valid_loss"]) for p in points] == [
        (0, 0.0, None, 5.0),
        (20, 1.0, 1.5, None),
        (40, 3.0, 3.5, 3.0),
    ]


@pytest.fixture
def commands(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run `nsa` in this process, which saves its imports, and list what was run."""
    ran: list[str] = []

    def command(self: Any, words: Sequence[str]) -> int:
        ran.append(" ".join(words[:2]) if words[0] != "train" else f"train {words[words.index('--out') + 1]}")
        monkeypatch.chdir(self.work)
        return run_nsa(list(words))

    monkeypatch.setattr(study.Study, "command", command)
    return ran


@pytest.mark.slow
def test_it_runs_end_to_end_and_only_once(
    study: ModuleType, commands: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--scale", "tiny", "--minutes", "30", "--arms", "nsa", "nsa-no-sel", "dense", "--extend", "nsa", "dense"]
    words += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert study.main(words) == 0
    trained = ["nsa", "nsa-no-sel", "dense", "nsa-256", "nsa-512", "dense-256", "dense-512"]
    evaluated = ["eval needle", "eval recall", "eval loss"]
    assert commands == ["data prepare"] * 2 + [f"train runs/{name}" for name in trained] + evaluated
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(last["done"]) == sorted(trained)
    assert last["left"] == []
    out = tmp_path / "out"
    arms = {row["arm"]: row for row in csv.DictReader((out / "arms.csv").open())}
    assert set(arms) == set(trained)
    curves = list(csv.DictReader((out / "curves.csv").open()))
    assert {row["arm"] for row in curves} == set(trained)
    assert float(curves[-1]["seconds"]) > 0
    gates = [row for row in csv.DictReader((out / "gates.csv").open()) if row["arm"] == "nsa-no-sel"]
    assert [float(row["sel"]) for row in gates] == [0.0]
    for name in ("needle", "recall", "loss"):
        assert {row["run"] for row in csv.DictReader((out / f"{name}.csv").open())} <= set(trained)
    for path in (out.rglob("*.json"), out.rglob("*.csv")):
        assert not any(str(tmp_path) in file.read_text() for file in path)
    assert (out / "curves.png").is_file()

    # Again: nothing is left to do, even if the runs are gone.
    commands.clear()
    assert study.main(words) == 0
    assert commands == []
    with pytest.raises(ValueError, match="steps of nsa is 5"):
        study.main([*words, "--steps", "5"])


def test_what_does_not_fit_the_budget_is_left(
    study: ModuleType, commands: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--scale", "tiny", "--minutes", "0", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert study.main(words) == 0
    assert commands == []
    left = json.loads(capsys.readouterr().out.splitlines()[-1])["left"]
    assert {"data base", "nsa", "dense", "nsa-long"} <= set(left)


def test_a_command_is_told_to_stop_at_the_deadline(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that gets SIGTERM writes a checkpoint (tests/train/test_train_stop.py) and resumes in the next call."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\ntrap "echo $3 > stopped; exit 0" TERM\nwhile :; do sleep 0.1; done\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    made = study.Study(study.SCALES["tiny"], tmp_path, tmp_path, minutes=0)
    assert made.command(["train"]) is None
    assert (tmp_path / "stopped").read_text() == "train\n"
