"""The study runs end to end on a CPU, within its budget, and continues where an earlier call stopped."""

from __future__ import annotations

import csv
import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from waiting import PATIENCE_S

from nsa.cli import main as run_nsa
from nsa.data.recall import mixed_documents, python_files
from nsa.data.tokenizer import train_bpe
from nsa.model import LM
from nsa.train.config import load_config

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("study")
    sys.path.remove(str(FOLDER))
    for name in ("study", "arms", "jobs"):
        del sys.modules[name]


@pytest.mark.parametrize("name", ["125m", "26m", "tiny"])
def test_an_arm_is_as_large_as_it_says(study: ModuleType, name: str) -> None:
    scale = study.SCALES[name]
    arms = {arm.name: arm for arm in study.make_arms(scale)}

    def model(arm: str) -> LM:
        values = {"device": "cpu", "compile": False, **study.train_values(scale, arms[arm])}
        with torch.device("meta"):
            return LM(load_config(scale.config, values).model)

    def flops(arm: str) -> float:
        return arms[arm].steps * model(arm).flops_per_token(scale.seq_len)

    counts = {arm: sum(model(arm).parameter_counts().values()) for arm in ("nsa", "dense", "dense-flops", "sliding")}
    assert all(count == pytest.approx(counts["nsa"], rel=0.02) for count in counts.values())
    # A run of 4 steps is as near as a step allows.
    assert flops("dense-flops") == pytest.approx(flops("nsa"), rel=max(0.02, 0.5 / scale.steps))


def test_the_arms_are_those_that_the_issue_asks_for(study: ModuleType) -> None:
    arms = {arm.name: arm.sets for arm in study.make_arms(study.SCALES["125m"])}
    assert list(arms)[:3] == ["nsa", "dense", "dense-flops"]
    assert {sets["model.attn.drop_branch"] for name, sets in arms.items() if "-no-" in name and "gate" not in name} == {
        "cmp",
        "sel",
        "win",
    }
    assert {
        "nsa-gate-bias",
        "nsa-gate-softmax",
        "nsa-gate-no-decay",
        "nsa-branch-norm",
        "nsa-lr",
        "nsa-seed",
        "sliding",
    } <= set(arms)


@pytest.mark.slow
def test_gates_start_as_in_the_arms_that_are_recorded(study: ModuleType) -> None:
    scale = study.SCALES["26m"]
    arms = {arm.name: study.train_values(scale, arm)["model.attn.gate_bias"] for arm in study.make_arms(scale)}
    opened = {name for name, bias in arms.items() if bias == 2.0}
    assert opened == {name for name in arms if "gate-bias" in name}
    assert {bias for name, bias in arms.items() if name not in opened} == {0.0}


def test_one_token_in_forty_is_of_an_answer(study: ModuleType) -> None:
    pytest.importorskip("tokenizers")
    files = python_files([FOLDER.parent / "nsa"])
    options = study.corpus_options(study.SCALES["26m"])
    corpora = {name: list(mixed_documents(files, **given | {"n_chars": 10**6})) for name, given in options.items()}
    tokenizer = train_bpe(corpora["base"], 4096)
    assert options[study.PLAIN]["recall_share"] == 0
    del corpora[study.PLAIN]
    for texts in corpora.values():
        lines = [line.split() for text in texts for line in text.splitlines() if line.startswith("# recall ")]
        # All but the mark, the word and the key that is asked for.
        answers = sum(len(words) - 3 for words in lines)
        assert answers > 0.025 * sum(len(tokenizer.encode(text)) for text in texts)


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


def test_seconds_of_a_run_that_shared_the_gpu_are_measured_ones(study: ModuleType) -> None:
    metrics = [
        {"kind": "step", "step": 1, "loss": 4.0},
        {"kind": "speed", "step": 2, "step_s": 0.5},
        {"kind": "eval", "step": 2, "loss": 3.0},
    ]
    (point,) = study.curve(metrics, 10, step_s=0.1, shared=True)
    assert point["seconds"] == 0.2
    (point,) = study.curve(metrics, 10, shared=True)
    assert point["seconds"] is None


def test_arms_that_differ_in_no_kernel_are_measured_once(study: ModuleType) -> None:
    arms = {arm.name: study.shape_of(arm) for arm in study.make_arms(study.SCALES["26m"])}
    for name in ("nsa-lr", "nsa-seed", "nsa-gate-bias", "nsa-gate-no-decay"):
        assert arms[name] == arms["nsa"]
    assert arms["dense-flops"] == arms["dense"]
    assert len(set(arms.values())) == 10


def new_queue(study: ModuleType, folder: Path, seconds: float = PATIENCE_S, slots: int = 2) -> Any:
    return study.Queue(folder, time.monotonic() + seconds, 1.0, slots)


class Process:
    """Ends with status 0 after being asked so many times."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def poll(self) -> int | None:
        self.polls -= 1
        return 0 if self.polls < 0 else None

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> None: ...


def test_jobs_take_the_slots_in_order_and_wait_for_others(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[set[str]] = []
    queue = new_queue(study, tmp_path)

    def start(name: str, words: Sequence[str]) -> Process:
        began.append({name, *(job.name for job in queue.running)})
        return Process(2)

    monkeypatch.setattr(queue, "start", start)
    job = partial(study.Job, words=lambda: ["x"])
    second = job("second", after=("first",))
    queue.run([job("first"), second, job("third"), study.Job("never", lambda: None), study.Job("no", lambda: [])])
    assert began == [{"first"}, {"first", "third"}, {"second"}]
    assert list(queue.left_out) == ["never"]


def test_a_queue_ends_at_its_deadline(study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = new_queue(study, tmp_path, seconds=0.5, slots=1)
    monkeypatch.setattr(queue, "start", lambda name, words: Process(10**9))
    queue.run([study.Job(name, lambda: ["x"]) for name in ("stuck", "waits")])
    assert set(queue.left_out) == {"stuck", "waits"}


@pytest.fixture
def commands(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run `nsa` in this process, which saves its imports, and list what was run; no step is measured."""
    ran: list[str] = []

    def start(self: Any, name: str, words: Sequence[str]) -> Process:
        ran.append(" ".join(words[:2]) if words[0] != "train" else f"train {words[words.index('--out') + 1]}")
        monkeypatch.chdir(self.work)
        assert run_nsa(list(words)) == 0
        return Process(0)

    monkeypatch.setattr(study.Queue, "start", start)
    monkeypatch.setattr(study.Study, "measure", lambda self, arms: {})
    measured = {"nsa": 0.1, "nsa-256": 0.2, "nsa-512": 0.3, "nsa-no-sel": 0.1, "dense": 0.1}
    monkeypatch.setattr(study.Study, "step_seconds", lambda self: measured)
    return ran


def test_the_maps_come_before_what_they_do_not_need(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study.Study, "measure", lambda self, arms: {})
    monkeypatch.setattr(study.Study, "data", lambda self: None)
    queued: list[str] = []
    monkeypatch.setattr(study.Queue, "run", lambda self, jobs: queued.extend(job.name for job in jobs))
    scale = study.SCALES["26m"]
    study.Study(scale, tmp_path, tmp_path, 1).run(study.make_arms(scale), ["nsa", "dense"])
    extended = [f"{arm}-{length}k" for length in (8, 32, 64) for arm in ("nsa", "dense")]
    maps = [f"eval {task} of nsa-64k-dense-64k" for task in ("needle", "recall")]
    assert queued[:10] == ["nsa", "dense", *extended, *maps]
    assert len(queued) == len(set(queued)) == len(study.make_arms(scale)) + len(extended) + 5


@pytest.mark.slow
def test_it_runs_end_to_end_and_only_once(
    study: ModuleType, commands: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arm_names = ["nsa", "nsa-no-sel", "nsa-branch-norm", "dense"]
    words = ["--scale", "tiny", "--minutes", "30", "--arms", *arm_names, "--extend", "nsa", "dense"]
    words += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    packed = tmp_path / "packed" / "study.tar.gz"
    assert study.main([*words, "--pack", str(packed)]) == 0
    trained = ["nsa", "dense", "nsa-256", "dense-256", "nsa-512", "dense-512", "nsa-no-sel", "nsa-branch-norm"]
    evaluated = ["eval needle", "eval recall", "eval loss"]
    trains = [f"train runs/{name}" for name in trained]
    assert commands == ["data prepare"] * 4 + trains[:-2] + evaluated + trains[-2:] + ["eval needle", "eval loss"]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(last["done"]) == sorted(trained)
    assert last["left"] == {}
    out = tmp_path / "out"
    arms = {row["arm"]: row for row in csv.DictReader((out / "arms.csv").open())}
    assert set(arms) == set(trained)
    curves = list(csv.DictReader((out / "curves.csv").open()))
    assert {row["arm"] for row in curves} == set(trained)
    assert {row["seconds"] for row in curves if row["arm"] == "nsa"} == {str(round(0.1 * n, 3)) for n in range(5)}
    assert {row["seconds"] for row in curves if row["arm"] == "dense-256"} == {""}
    gates = [row for row in csv.DictReader((out / "gates.csv").open()) if row["arm"] == "nsa-no-sel"]
    assert [float(row["sel"]) for row in gates] == [0.0]
    for name in ("needle", "recall", "loss"):
        assert {row["run"] for row in csv.DictReader((out / f"{name}.csv").open())} <= set(trained)
    before = list(csv.DictReader((out / "arms-needle" / "needle.csv").open()))
    assert {row["run"] for row in before} == set(arm_names)
    assert {row["run"] for row in csv.DictReader((out / "arms-plain" / "loss.csv").open())} == set(arm_names)
    for path in (out.rglob("*.json"), out.rglob("*.csv")):
        assert not any(str(tmp_path) in file.read_text() for file in path)
    assert (out / "curves.png").is_file()
    with tarfile.open(packed) as archive:
        names = set(archive.getnames())
    assert {"out/arms.csv", "out/needle.json", "out/curves.png"} <= names
    assert {f"out/runs/{name}/{file}" for name in trained for file in study.PACKED} <= names
    assert not any(name.endswith((".safetensors", ".bin")) for name in names)

    # Again: nothing is left to do, even if the runs are gone.
    commands.clear()
    assert study.main(words) == 0
    assert commands == []
    with pytest.raises(ValueError, match="--steps 5"):
        study.main([*words, "--steps", "5"])


def test_a_study_that_is_terminated_packs_what_there_is(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout` sends SIGTERM at the end of a call."""
    work, out, packed = (tmp_path / name for name in ("work", "out", "study.tar.gz"))
    results = {"out/arms/nsa.json", "out/arms.csv", "out/curves.csv", "out/needle.json"}

    def names() -> set[str]:
        with tarfile.open(packed) as archive:
            return set(archive.getnames())

    def run(self: Any, arms: Sequence[Any], extend: Sequence[str]) -> None:
        write_results(out)
        # After each command: nothing can be packed after SIGKILL.
        self.queue.saved()
        assert results <= names()
        packed.unlink()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE_S)

    monkeypatch.setattr(study.Study, "run", run)
    words = ["--scale", "tiny", "--minutes", "1", "--work", str(work), "--out", str(out), "--pack", str(packed)]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        study.main(words)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert results <= names()


def write_results(out: Path) -> None:
    """Records of an arm and a needle map, as a machine without matplotlib writes them."""
    point = {"step": 4, "tokens": 40, "seconds": 1.0, "train_loss": 3.5, "valid_loss": 3.0}
    record = {"arm": "nsa", "start": None, "steps": 4, "tokens": 40, "loss": 3.0, "tokens_per_s": 40.0, "parameters": 9}
    record |= {"gates": None, "curve": [point], "command": "", "fallbacks": {}}
    cell = {"run": "nsa", "task": "needle", "length": 64, "value": 0.5, "accuracy": 1.0, "loss": 0.0, "samples": 1}
    (out / "arms").mkdir(parents=True)
    (out / "arms" / "nsa.json").write_text(json.dumps(record))
    (out / "needle.json").write_text(json.dumps({"rows": [cell]}))


def test_a_report_draws_the_pictures_that_are_missing(study: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_results(tmp_path)
    words = ["--scale", "tiny", "--minutes", "0", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    assert study.main(words) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {"curves.png", "needle.png"}


@pytest.mark.slow
def test_a_measured_process_that_does_not_exit_is_killed(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "MEASURE_S", 5.0)
    text = "echo ready; read line; echo 0.25; exec sleep 600"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(["sh", "-c", text], **pipes, text=True)
    made = study.Study(study.SCALES["tiny"], tmp_path, tmp_path, 1)
    made.finish_measuring({"nsa": process})
    assert made.step_seconds() == {"nsa": 0.25}
    assert process.returncode == -signal.SIGKILL


def test_what_does_not_fit_the_budget_is_left(
    study: ModuleType, commands: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--scale", "tiny", "--minutes", "0", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert study.main(words) == 0
    assert commands == []
    left = json.loads(capsys.readouterr().out.splitlines()[-1])["left"]
    assert {"data base", "nsa", "dense"} <= set(left)


def test_a_command_is_stopped_at_the_deadline(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that gets SIGTERM writes a checkpoint (tests/train/test_train_stop.py) and resumes in the next call."""
    program = tmp_path / "python"
    text = '#!/bin/sh\ntrap "echo $3 > stopped; exit 0" TERM\ntouch started\nwhile :; do sleep 0.1; done\n'
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    queue = new_queue(study, tmp_path)
    queue.grace_s = PATIENCE_S

    collect = queue.collect

    def ended() -> None:
        # The time is up once the command can be stopped.
        if (tmp_path / "started").exists():
            queue.deadline = time.monotonic()
        collect()

    monkeypatch.setattr(queue, "collect", ended)
    monkeypatch.setattr(queue, "slots", 1)
    queue.run([study.Job("run", lambda: ["train"]), study.Job("waits", lambda: ["train"])])
    assert (tmp_path / "stopped").read_text() == "train\n"
    assert list(queue.left_out) == ["waits"]
