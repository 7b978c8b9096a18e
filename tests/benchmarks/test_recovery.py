"""The proof of recovery runs end to end on a CPU, and continues where an earlier call stopped."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nsa.cli import main as run_nsa

pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "benchmarks"
RUNS = ["dense-256", "dense-512", "gated-256", "gated-512"]


@pytest.fixture(scope="module")
def recovery() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("recovery")
    sys.path.remove(str(FOLDER))
    for name in ("recovery", "study", "arms", "jobs"):
        del sys.modules[name]


@pytest.fixture
def stages(recovery: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run `nsa` in this process, which saves its imports, and list what was run."""
    ran: list[str] = []

    def run_together(self: Any, stages: Mapping[str, Sequence[str]]) -> bool:
        monkeypatch.chdir(self.work)
        for name, words in stages.items():
            if not self.is_done(name):
                ran.append(name)
                self.finish(name, run_nsa(list(words)))
        return all(map(self.is_done, stages))

    monkeypatch.setattr(recovery.Recovery, "run_together", run_together)
    return ran


@pytest.mark.slow
def test_it_runs_end_to_end_and_only_once(
    recovery: ModuleType, stages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--scale", "tiny", "--minutes", "30", "--steps", "4", "--arms", "gated"]
    words += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert recovery.main(words) == 0
    assert stages == ["data", "dense-from-scratch", "convert-export", "convert-gated", "compared", *RUNS]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"done": True, "left": []}
    rows = list(csv.DictReader((tmp_path / "out" / "recovery.csv").open()))
    points = recovery.by_run(rows)
    assert [f"{arm}-{length}" for arm, length in points] == ["dense-from-scratch-256", *RUNS]
    # All arms of a length start and end after the same tokens, and see the same validation text.
    for length in (256, 512):
        assert len({tuple(p["tokens"] for p in points[arm, length]) for arm in ("dense", "gated")}) == 1
    start, ends = points["dense", 256][0], points["dense-from-scratch", 256][-1]
    assert start["valid_loss"] == pytest.approx(ends["valid_loss"], rel=1e-4)
    assert start["valid_loss"] != points["gated", 256][0]["valid_loss"]
    assert (tmp_path / "out" / "recovery.png").is_file()
    assert not any(str(tmp_path) in path.read_text() for path in (tmp_path / "out").glob("*.csv"))

    # Again: nothing is left to do; a plot can be drawn from the results alone.
    stages.clear()
    assert recovery.main(words) == 0
    assert stages == []
    (tmp_path / "out" / "recovery.png").unlink()
    assert recovery.main(["--plot", str(tmp_path / "out" / "recovery.csv"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "recovery.png").is_file()


def test_a_failed_stage_is_shown_and_ends_the_call(
    recovery: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = recovery.Recovery(recovery.SCALES["tiny"], tmp_path, tmp_path, 5, ["dense"])
    assert not made.run_together({"good": ["--version"], "bad": ["train", "--config", "missing"]})
    assert made.is_done("good")
    assert made.left_out == ["bad"]
    assert "missing" in capsys.readouterr().out
    # What is done is not run again.
    assert made.run_together({"good": ["train", "--config", "missing"]})


def test_a_call_that_is_cut_reports_what_there_is(recovery: ModuleType, tmp_path: Path) -> None:
    """Runs are stopped at the deadline; they ended at different tokens, or never reached a validation."""
    made = recovery.Recovery(recovery.SCALES["tiny"], tmp_path, tmp_path, 0, ["dense", "gated", "select"])
    assert not made.run_together({"cut": ["train", "--config", "tiny", "--out", "runs/cut"]})
    assert made.left_out == ["cut"]
    made.report()
    assert not list(tmp_path.glob("recovery.*"))

    for name, losses in {"dense-from-scratch": [5.0, 4.0], "dense-256": [4.0, 3.5, 3.0], "gated-256": [4.5]}.items():
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        lines = [{"kind": "eval", "step": 2 * i, "loss": loss} for i, loss in enumerate(losses)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        made.report()
        assert (tmp_path / "recovery.png").is_file()
        (tmp_path / "recovery.png").unlink()
    points = recovery.by_run(list(csv.DictReader((tmp_path / "recovery.csv").open())))
    assert [p["valid_loss"] for p in points["dense", 256]] == [4.0, 3.5, 3.0]
    assert points["gated", 256] == [{"tokens": 0, "valid_loss": 4.5}]


def test_steps_that_were_slow_are_planned_as_slow(recovery: ModuleType, tmp_path: Path) -> None:
    made = recovery.Recovery(recovery.SCALES["tiny"], tmp_path, tmp_path, 5, ["dense"])
    run = tmp_path / "runs" / recovery.PRETRAINED
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    assert made.slowness() == 1.0
    lines = [{"kind": "speed", "step": i, "step_s": step_s} for i, step_s in enumerate([90.0, 1.5, 1.5])]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert made.slowness() == 1.5 / recovery.SCALES["tiny"].step_s["dense"][0]


def test_the_steps_are_planned_once(recovery: ModuleType, tmp_path: Path) -> None:
    plans = []
    for minutes in (3, 30):
        made = recovery.Recovery(recovery.SCALES["125m"], tmp_path, tmp_path, minutes, recovery.ARMS)
        plans.append(made.planned("recover", [8192, 32768], 60 * minutes))
    share = recovery.SCALES["125m"].share[1]
    assert plans == [{8192: 180, 32768: round(share * 180)}] * 2
