"""A library that crashes, hangs or lies is tried in a process of its own: the run survives, and says what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import flash_standin
import pytest
import torch
from flash_standin import FAULTS, CannotBeLoaded, FloatingPointException, Raising, StandIn

import nsa
from nsa.backends import sdpa
from nsa.backends.flash import FlashBackend
from nsa.backends.flash.libraries import Library, TorchLibrary
from nsa.backends.flash.repro import repro_script
from nsa.backends.flash.trial import cases_of, main
from nsa.backends.probe import NOT_STARTED, RESTART, Outcome, Subject, Verdicts, report, run_cases
from nsa.backends.problem import Problem
from nsa.backends.routing import Router
from nsa.data import Batch
from nsa.model import LM, PRESETS
from nsa.ops import library as op_library
from nsa.settings import Settings
from nsa.train.step import TrainStep

TESTS = str(Path(flash_standin.__file__).parent)
ROOT = str(Path(nsa.__file__).parent.parent)
PROBLEM = Problem(
    op="sliding", batch=1, n_queries=64, n_keys=64, n_heads=2, n_groups=1, d_k=8, d_v=8, dtype=torch.float32
)
SUBJECT = Subject(library="stand-in", version="0", gpu="cpu", driver="none", torch="2", cuda="none")
INSISTS = Settings.load(environ={"NSA_USE_FA2": "1"})


@pytest.fixture
def children_find_the_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{TESTS}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


SOME = ("one token", "a window across tiles")


def probe_quickly(
    library: Library, problem: Problem, width: int, dtype: torch.dtype, names: tuple[str, ...] = SOME
) -> list[Outcome]:
    """As the backend's own, with less patience and fewer cases."""
    command = [sys.executable, "-m", "nsa.backends.flash.trial", library.address, problem.device]
    cases = [case for case in cases_of(problem, width, dtype) if case["name"] in names]
    return run_cases(command, cases, case_seconds=2.0)


def backend_of(library: Any, folder: Path, prober: Any = probe_quickly) -> FlashBackend:
    return FlashBackend(INSISTS, (library,), folder=folder, prober=prober)


def losses_of(router: Router, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The trainer's own step on a tiny model, twice."""
    monkeypatch.setattr(op_library, "router", lambda: router)
    torch.manual_seed(0)
    step = TrainStep(LM(replace(PRESETS["tiny"], seq_len=64)), dtype=torch.float32, compile=False)
    tokens = torch.randint(0, 60, (2, 65), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], None)
    return [step([batch], lr=1e-3).loss.item() for _ in range(2)]


WORDS = {
    "Raising": "only supports Ampere",
    "NotFinite": "o is not finite",
    "WrongKeys": "off by",
    "Segfaulting": "killed by SIGSEGV",
    "FloatingPointException": "killed by SIGFPE",
    "Hanging": "hung: no answer in 2 s",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_survived_reported_and_training_goes_on_with_the_same_losses(
    fault: Any,
    tmp_path: Path,
    children_find_the_stand_ins: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = Router([backend_of(fault(), tmp_path), sdpa], INSISTS)
    losses = losses_of(router, monkeypatch)
    text = caplog.text
    for part in (WORDS[fault.__name__], "a window across tiles", "q=(1, 257, ", "strides", "torch 2"):
        assert part in text, part

    calls = router.counts.as_dict()["calls"]
    assert calls["sliding/sdpa"] > 0
    assert calls["compressed/sdpa"] > 0
    assert not [name for name in calls if name.endswith("/flash")]
    assert losses == losses_of(Router([sdpa], Settings()), monkeypatch)


def test_a_right_library_passes_the_whole_probe_and_serves(
    tmp_path: Path, children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = FlashBackend(INSISTS, (StandIn(),), folder=tmp_path)
    router = Router([flash, sdpa], INSISTS)
    losses = losses_of(router, monkeypatch)
    (outcomes,) = flash.tried.values()
    assert len(outcomes) == 10
    assert [outcome.problem for outcome in outcomes] == [None] * 10
    calls = router.counts.as_dict()["calls"]
    assert calls["sliding/flash"] > 0
    assert calls["compressed/flash"] > 0
    torch.testing.assert_close(losses, losses_of(Router([sdpa], Settings()), monkeypatch), atol=1e-5, rtol=1e-5)


def test_what_fails_only_in_the_run_is_counted_and_the_next_backend_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router([backend_of(Raising(), tmp_path, prober=lambda *_: []), sdpa], INSISTS)
    losses = losses_of(router, monkeypatch)
    counts = router.counts.as_dict()
    assert any("only supports Ampere" in name for name in counts["failures"])
    # Only the forward pass fails, once for each layer and step; every call is served all the same.
    assert set(counts["failures"].values()) == {4}
    assert counts["calls"]["compressed/flash"] == 4, "the gradients"
    assert losses == losses_of(Router([sdpa], Settings()), monkeypatch)


def test_a_verdict_holds_for_the_cases_like_the_problem(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    flash = backend_of(FloatingPointException(), tmp_path, partial(probe_quickly, names=(*SOME, "documents")))
    assert "killed by SIGFPE" in str(flash.supports(PROBLEM))
    assert "nsa doctor --probe" in str(flash.supports(replace(PROBLEM, op="compressed", backward=True)))
    assert flash.supports(replace(PROBLEM, packed=True)) is None, "the child after the crash tried the rest"


def test_a_verdict_is_found_again_by_the_next_process(tmp_path: Path) -> None:
    asked = []

    def prober(*given: Any) -> list[Outcome]:
        asked.append(given)
        return [Outcome(case="x", feature="dense", backward=True, problem="hung")]

    for _ in range(3):
        assert "hung" in str(backend_of(StandIn(), tmp_path, prober).supports(PROBLEM))
    assert len(asked) == 1
    other_version = StandIn(version="1")
    assert "hung" in str(backend_of(other_version, tmp_path, prober).supports(PROBLEM))
    assert "hung" in str(backend_of(StandIn(), tmp_path, prober).supports(replace(PROBLEM, d_k=16)))
    assert len(asked) == 3, "another version and another width are tried by themselves"
    mended = [Outcome(case="x", feature="dense", backward=True)]
    (library, subject, outcomes) = backend_of(StandIn(), tmp_path, lambda *_: mended).probe_all(PROBLEM)[0]
    assert (library.version, subject.version, outcomes) == ("0", "0", mended)
    assert backend_of(StandIn(), tmp_path, prober).supports(PROBLEM) is None, "trying again replaces the verdict"


def test_a_child_that_cannot_start_is_said_and_not_remembered(
    tmp_path: Path, children_find_the_stand_ins: None
) -> None:
    flash = backend_of(CannotBeLoaded(), tmp_path)
    assert NOT_STARTED in str(flash.supports(PROBLEM))
    assert "no_such_name" in str(flash.supports(PROBLEM))
    assert not list(tmp_path.iterdir())


def test_verdicts_survive_their_file_and_a_broken_file_says_nothing(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path / "deep", SUBJECT)
    assert verdicts.get("kind") is None
    wrong = Outcome(
        case="a", feature="packed", backward=True, problem="hung", call="q=(1)", request={"lengths": [1, 2]}
    )
    verdicts.put("kind", [wrong])
    verdicts.put("other", [])
    assert verdicts.get("kind") == [wrong]
    assert json.loads(verdicts.path.read_text())["subject"]["library"] == "stand-in"
    assert [path.name for path in verdicts.path.parent.iterdir()] == [SUBJECT.file_name], "no temporary file is left"
    for broken in ("", "[]", "{}", '{"kinds": {"kind": [{"case": 1, "no": 2}]}}', '{"kinds": [1]}'):
        verdicts.path.write_text(broken)
        assert verdicts.get("kind") is None
    verdicts.forget()
    verdicts.forget()
    assert not verdicts.path.exists()


def test_a_subject_s_file_differs_by_everything_a_verdict_depends_on() -> None:
    names = {SUBJECT.file_name}
    for change in ({"version": "1"}, {"gpu": "NVIDIA H200"}, {"driver": "570.1"}, {"torch": "2.11"}, {"cuda": "13.0"}):
        names.add(replace(SUBJECT, **change).file_name)
    assert len(names) == 6
    assert all("/" not in name and " " not in name for name in names)


def test_the_child_restarts_after_an_error_that_may_have_broken_its_gpu(
    children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = cases_of(PROBLEM, 8, torch.float32)
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    monkeypatch.setattr(sys, "stdin", lines.splitlines())
    with pytest.raises(SystemExit) as ended:
        main("flash_standin:Raising", "cpu")
    assert ended.value.code == RESTART
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(answer) for answer in answers] == [["call"], ["problem"]] * 2
    assert answers[1] == {"problem": None}
    assert "RuntimeError" in answers[3]["problem"]


def test_a_report_is_complete() -> None:
    wrong = Outcome(
        case="documents", feature="packed", backward=True, problem="killed by SIGFPE", call="q=(168, 2, 8):bfloat16",
        request={"lengths": [1, 130, 37]},
    )  # fmt: skip
    text = report(replace(SUBJECT, gpu="NVIDIA H200", driver="570.1"), [wrong, replace(wrong, problem=None)])
    for part in (
        "stand-in 0",
        "NVIDIA H200",
        "driver 570.1",
        "cuda none",
        "1 of 2 cases",
        "SIGFPE",
        "q=(168",
        "[1, 130",
    ):
        assert part in text


def failed(library: Any, call: str = "") -> Outcome:
    case = next(case for case in cases_of(PROBLEM, 8, torch.float32) if case["name"] == "a window across tiles")
    return Outcome(
        case=case["name"], feature="dense", backward=True, problem="killed by SIGFPE", call=call, request=case
    )


def test_the_repro_script_reproduces_the_crash_in_one_file(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    library = FloatingPointException()
    path = tmp_path / "repro.py"
    path.write_text(repro_script(library, SUBJECT, failed(library)))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == -8, done.stderr
    assert "q=(1, 257, 2, 8)" in done.stdout


def test_the_repro_script_of_torch_s_kernels_needs_torch_alone(tmp_path: Path) -> None:
    """Run on a CPU, it gets as far as the call: torch says that it has no such kernel there."""
    library = TorchLibrary()
    path = tmp_path / "repro.py"
    path.write_text(repro_script(library, SUBJECT, failed(library)))
    assert "nsa" not in {
        line.split()[1].split(".")[0] for line in path.read_text().splitlines() if "import" in line[:7]
    }
    environment = {**os.environ, "PYTHONPATH": ""}
    words = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path += {sys.path!r}; import runpy; sys.argv = ['x', 'cpu']; ",
    ]
    words[-1] += f"runpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert "_flash_attention_forward" in done.stderr
    assert "CPU" in done.stderr
    assert "window=100" in done.stdout


def test_what_a_library_prints_is_no_answer(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import sys\nfor line in sys.stdin:\n"
        "    print('warning: {odd}')\n    print('{\"call\": \"f\"}')\n    print('[1]')\n"
        "    print('{\"problem\": null}', flush=True)\n"
    )
    case = {"name": "one", "feature": "dense", "backward": False}
    (outcome,) = run_cases([sys.executable, str(script)], [case], case_seconds=10.0)
    assert (outcome.problem, outcome.call) == (None, "f")


def test_a_folder_that_cannot_be_written_costs_only_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    subject = Subject.here("stand-in", "1", "cpu")
    for folder in (tmp_path / "file" / "below", None):
        verdicts = Verdicts(folder, subject)
        verdicts.put("kind", [])
        assert verdicts.get("kind") is None
    assert "cannot be kept" in caplog.text
