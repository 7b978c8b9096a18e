"""The process in which a library is tried: however it ends, what it had to say is heard, and nothing of it is left."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from flash_standin import CPU_CONTRACT, OddBytes, StandIn, TalkingHang, WrongAndTalking
from probing import INSISTS, PROBLEM, SOME, SUBJECT, backend_of, probe_quickly

from nsa.backends.flash import FlashBackend, trial
from nsa.backends.flash.cases import cases_of
from nsa.backends.flash.libraries import Library
from nsa.backends.flash.trial import LOADING, main
from nsa.backends.probe import NOT_STARTED, RESTART, START_SECONDS, Outcome, end, report, run_cases


def test_the_child_restarts_after_an_error_that_may_have_broken_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = cases_of(PROBLEM, 8, torch.float32)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(case) + "\n" for case in cases)))
    path = tmp_path / "answers"
    with pytest.raises(SystemExit) as ended:
        main("flash_standin:Raising", "cpu", str(path))
    assert ended.value.code == RESTART
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    stages = [(answer["case"], answer.get("stage")) for answer in answers]
    parts = ["making the call", "forward", "backward", "the comparison", None]
    tiles = "a window across tiles"
    assert stages.pop(0) == ("", LOADING)
    assert stages == [("one token", part) for part in parts] + [(tiles, parts[0]), (tiles, parts[1]), (tiles, None)]
    assert answers[5] == {"case": "one token", "problem": None}
    assert "RuntimeError in forward" in answers[-1]["problem"]


def test_a_gpu_that_cannot_be_had_is_the_start_s_failure_and_no_case_s(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    with pytest.raises(SystemExit, match="no_such_device"):
        main("flash_standin:StandIn", "no_such_device", str(path))
    assert not path.exists()


def test_a_gradient_that_the_contract_forbids_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = replace(CPU_CONTRACT, wide_gradients=(0, 8), capabilities=(8,))
    monkeypatch.setattr("nsa.backends.flash.trial.load", lambda _: StandIn(contract=forbidden))
    monkeypatch.setattr("nsa.backends.flash.libraries.capability_of", lambda _: (8, 9))
    case = cases_of(PROBLEM, 8, torch.float32)[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(case)))
    path = tmp_path / "answers"
    main("any", "cpu", str(path))
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert [answer.get("stage") for answer in answers] == [
        LOADING,
        "making the call",
        "forward",
        "the comparison",
        None,
    ]
    assert answers[-1]["problem"] is None


def test_loading_has_the_time_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's own watch would otherwise end it before its parent can say that it hung."""
    allowed = []

    def load(address: str) -> Library:
        assert allowed[-1] > START_SECONDS
        return StandIn()

    monkeypatch.setattr(trial, "end_after", allowed.append)
    monkeypatch.setattr(trial, "load", load)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    main("any", "cpu", str(tmp_path / "answers"))
    assert min(allowed) < START_SECONDS, "a case has less"


def test_a_hanging_child_without_a_parent_ends_by_itself(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    code = "import sys; from nsa.backends.flash import trial; trial.CASE_SECONDS, trial.MARGIN_SECONDS = 2.0, 0.0; "
    code += "trial.main(*sys.argv[1:])"
    cases = "".join(json.dumps(case) + "\n" for case in cases_of(PROBLEM, 8, torch.float32))
    words = [sys.executable, "-c", code, "flash_standin:Hanging", "cpu", str(tmp_path / "answers")]
    done = subprocess.run(words, input=cases, text=True, capture_output=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_nobody_waits_for_a_child_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unkillable:
        pid, stderr = 0, None

        def wait(self, timeout: float) -> None:
            raise subprocess.TimeoutExpired("child", timeout)

    monkeypatch.setattr(os, "killpg", lambda *_: None)
    end(Unkillable())  # type: ignore[arg-type]


CASE = {"name": "one", "feature": "dense", "backward": False}
CHILD = """import json, sys
def say(**fields):
    open(sys.argv[1], "a").write(json.dumps(fields) + "\\n")
"""


def outcomes_of(tmp_path: Path, code: str, *names: str, start: float = 120.0, case: float = 10.0) -> list[Outcome]:
    script = tmp_path / "child.py"
    script.write_text(CHILD + code)
    # Each with a feature of its own: a crash settles the verdict on one.
    cases = [{**CASE, "name": name, "feature": name} for name in names or ("one",)]
    return run_cases([sys.executable, str(script)], cases, start_seconds=start, case_seconds=case)


SAY_LOADING = 'import os, signal, time; say(case="", stage="loading the library", call=""); '


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (f"{SAY_LOADING} os.abort()", "killed by SIGABRT in loading the library"),
        (f"{SAY_LOADING} time.sleep(60)", "hung: no answer in 3 s in loading the library"),
    ],
)
def test_what_dies_or_hangs_while_it_is_loaded_fails_every_case_for_good(
    tmp_path: Path, code: str, problem: str
) -> None:
    outcomes = outcomes_of(tmp_path, code, "one", "two", "three", start=3.0)
    assert [(outcome.problem, outcome.transient) for outcome in outcomes] == [(problem, False)] * 3
    assert problem in report(SUBJECT, outcomes)


@pytest.mark.parametrize(
    "code",
    [
        f"{SAY_LOADING} sys.exit('no module of that name')",
        f"{SAY_LOADING} os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.abort()",
        "import time; time.sleep(60)",
        "sys.exit(3)",
    ],
    ids=["error", "out-of-memory", "died-before", "hung-before", "ended-before"],
)
def test_a_start_that_fails_otherwise_says_nothing_about_the_library(tmp_path: Path, code: str) -> None:
    outcomes = outcomes_of(tmp_path, code, "one", "two", start=3.0)
    assert len(outcomes) == 2
    assert all(NOT_STARTED in str(outcome.problem) and outcome.transient for outcome in outcomes)


def test_loading_may_take_longer_than_a_case(tmp_path: Path) -> None:
    code = f"{SAY_LOADING} time.sleep(2); say(case='one', problem=None)"
    (outcome,) = outcomes_of(tmp_path, code, case=0.5)
    assert outcome.problem is None


@pytest.mark.parametrize("stray", ["nsa/__init__.py", "random.py"])
def test_a_child_runs_this_package_whatever_the_working_directory_holds(
    stray: str, tmp_path: Path, children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / stray).parent.mkdir(exist_ok=True)
    (tmp_path / stray).write_text("raise SystemExit('a stray module was imported')")
    monkeypatch.chdir(tmp_path)
    assert FlashBackend(INSISTS, (StandIn(),), folder=None).supports(PROBLEM) is None


def test_a_child_finds_the_library_that_this_process_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the environment nor the working directory knows the folder."""
    (tmp_path / "a_library_elsewhere.py").write_text("from flash_standin import StandIn")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    library = StandIn(address="a_library_elsewhere:StandIn")
    assert FlashBackend(INSISTS, (library,), folder=None).supports(PROBLEM) is None


def test_answers_are_matched_by_name_and_a_missing_one_is_a_failure(tmp_path: Path) -> None:
    """The second case is never answered; what is printed, or answered for nobody, counts for none."""
    code = """
names = [json.loads(line)["name"] for line in sys.stdin]
print(json.dumps({"case": "two", "problem": None}), flush=True)
say(case="nobody", problem=None)
for name in reversed(names):
    say(case=name, stage="forward", call=f"call of {name}")
    if name != "two":
        say(case=name, problem=None)
"""
    one, two, three = outcomes_of(tmp_path, code, "one", "two", "three")
    assert (one.problem, one.call) == (None, "call of one")
    assert (two.problem, two.call) == ("ended with status 0 in forward", "call of two")
    assert (three.problem, three.call) == (None, "call of three")


def test_a_child_that_dies_while_it_makes_a_call_is_not_shown_with_the_one_before(tmp_path: Path) -> None:
    code = """
import os
for line in sys.stdin:
    name = json.loads(line)["name"]
    say(case=name, stage="making the call", call="")
    if name == "two":
        os.abort()
    say(case=name, stage="forward", call="f")
    say(case=name, problem=None)
"""
    one, two = outcomes_of(tmp_path, code, "one", "two")
    assert (one.problem, one.call) == (None, "f")
    assert (two.problem, two.call) == ("killed by SIGABRT in making the call", "")
    assert "before the call" in report(SUBJECT, [two])


@pytest.mark.parametrize(
    ("end", "tried"), [("os.abort()", "abd"), ("time.sleep(60)", "abd"), (f"sys.exit({RESTART})", "abcd")]
)
def test_after_a_crash_or_a_hang_nothing_more_of_its_feature_is_tried(tmp_path: Path, end: str, tried: str) -> None:
    """An error that the child survives says so much less, and the rest of its feature makes the report."""
    script = tmp_path / "child.py"
    code = f"""
import os, time
for line in sys.stdin:
    case = json.loads(line)
    say(case=case["name"], stage="forward")
    if case["name"] == "b":
        {f'say(case="b", problem="raised"); {end}' if "exit" in end else end}
    say(case=case["name"], problem=None)
"""
    script.write_text(CHILD + code)
    features = {"a": "dense", "b": "dense", "c": "dense", "d": "packed"}
    cases = [{**CASE, "name": name, "feature": feature} for name, feature in features.items()]
    outcomes = run_cases([sys.executable, str(script)], cases, case_seconds=1.0)
    assert [outcome.case for outcome in outcomes] == list(tried)
    assert [outcome.case for outcome in outcomes if outcome.problem] == ["b"]


def test_what_a_library_prints_moves_no_verdict(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    flash = backend_of(WrongAndTalking(), tmp_path, partial(probe_quickly, names=(*SOME, "documents")))
    assert "off by" in str(flash.supports(PROBLEM))
    (outcomes,) = flash.tried.values()
    assert [outcome.problem is None for outcome in outcomes] == [True, False, True]


def test_odd_bytes_and_signals_without_a_name_are_survived(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    reason = str(backend_of(OddBytes(), tmp_path).supports(PROBLEM))
    assert "killed by signal 40 in forward: \ufffd\ufffd\ufffd crash" in reason


def test_a_hang_that_prints_is_ended_with_all_that_it_started(
    tmp_path: Path, children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    offspring = tmp_path / "offspring"
    monkeypatch.setenv("OFFSPRING", str(offspring))
    assert "hung: no answer in 2 s" in str(backend_of(TalkingHang(), tmp_path / "verdicts").supports(PROBLEM))
    stat = Path(f"/proc/{offspring.read_text()}/stat")
    patience = time.monotonic() + 10
    # It may end between a look and the next.
    with suppress(FileNotFoundError, ProcessLookupError):
        while stat.read_text().split()[2] != "Z":
            assert time.monotonic() < patience, "the child of the child lives on"
    (kept,) = (tmp_path / "verdicts").iterdir()
    assert kept.stat().st_size < 10_000


@pytest.mark.parametrize("executable", ["", None, "/no/such/python"])
def test_a_child_that_cannot_be_started_ends_no_run(
    executable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    flash = FlashBackend(INSISTS, (StandIn(),), folder=tmp_path)
    assert NOT_STARTED in str(flash.supports(PROBLEM))
    assert not list(tmp_path.iterdir())
