"""The child process of a probe: however it ends, its answers are read, and nothing of it is left."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from flash_standin import CPU_CONTRACT, OddBytes, StandIn, TalkingHang
from probing import FORCED_ON, PROBLEM, SUBJECT, backend_of, probe_quickly
from waiting import PATIENCE_S, wait_until

from nsa.backends.flash import FlashBackend, contracts, probe_child
from nsa.backends.flash.cases import cases_of
from nsa.backends.flash.libraries import Library
from nsa.backends.flash.probe import NOT_STARTED, START_SECONDS, STOPPED, Outcome, end, report, run_cases
from nsa.backends.flash.probe_child import LOADING, main

PARTS = ["making the call", "forward", "backward", "the comparison", None]


def answers_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_child_stops_after_an_error_that_may_lose_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = cases_of(PROBLEM, 8, torch.float32)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(case) + "\n" for case in cases)))
    with pytest.raises(SystemExit) as ended:
        main("flash_standin:Raising", "cpu", str(tmp_path / "answers"))
    assert ended.value.code == STOPPED
    answers = answers_of(tmp_path / "answers")
    stages = [(answer["case"], answer.get("stage")) for answer in answers]
    tiles = "a window across tiles"
    assert stages.pop(0) == ("", LOADING)
    assert stages == [("one token", part) for part in PARTS] + [(tiles, PARTS[0]), (tiles, PARTS[1]), (tiles, None)]
    assert answers[5] == {"case": "one token", "problem": None}
    assert "RuntimeError in forward" in answers[-1]["problem"]


def test_a_gpu_that_cannot_be_had_is_not_a_case_s_failure(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    with pytest.raises(SystemExit, match="no_such_device"):
        main("flash_standin:StandIn", "no_such_device", str(path))
    assert not path.exists()


def test_a_gradient_that_the_contract_forbids_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts, "WIDE_GRADIENTS", (0, 8))
    contract = replace(CPU_CONTRACT, capabilities=(8,))
    monkeypatch.setattr(probe_child, "load_library", lambda _: StandIn(contract=contract))
    monkeypatch.setattr("nsa.backends.flash.libraries.capability_of", lambda _: (8, 9))
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(cases_of(PROBLEM, 8, torch.float32)[0])))
    main("any", "cpu", str(tmp_path / "answers"))
    answers = answers_of(tmp_path / "answers")
    assert [answer.get("stage") for answer in answers] == [LOADING, *(part for part in PARTS if part != "backward")]
    assert answers[-1]["problem"] is None


def test_loading_has_the_time_limit_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's own watchdog would otherwise end it before its parent reports a hang."""
    allowed = []

    def load(address: str) -> Library:
        assert allowed[-1] > START_SECONDS
        return StandIn()

    monkeypatch.setattr(probe_child, "end_after", allowed.append)
    monkeypatch.setattr(probe_child, "load_library", load)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    main("any", "cpu", str(tmp_path / "answers"))
    assert min(allowed) < START_SECONDS, "a case has less"


@pytest.mark.slow
def test_a_hanging_child_without_a_parent_ends_itself(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    code = "import sys; from nsa.backends.flash import probe_child as child; "
    code += "child.CASE_SECONDS, child.MARGIN_SECONDS = 2.0, 0.0; child.main(*sys.argv[1:])"
    cases = "".join(json.dumps(case) + "\n" for case in cases_of(PROBLEM, 8, torch.float32))
    words = [sys.executable, "-c", code, "flash_standin:Hanging", "cpu", str(tmp_path / "answers")]
    done = subprocess.run(words, input=cases, text=True, capture_output=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_a_child_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unkillable:
        pid, stderr = 0, None

        def wait(self, timeout: float) -> None:
            raise subprocess.TimeoutExpired("child", timeout)

    monkeypatch.setattr(os, "killpg", lambda *_: None)
    end(Unkillable())  # type: ignore[arg-type]


CHILD = """import json, os, signal, sys, time
def answer(**fields):
    open(sys.argv[1], "a").write(json.dumps(fields) + "\\n")
"""
LOAD = 'answer(case="", stage="loading the library", call=""); '
# Answers every case, and does something else in the second.
EACH = """
for line in sys.stdin:
    name = json.loads(line)["name"]
    answer(case=name, stage="making the call", call="")
    if name == "two":
        {end}
    answer(case=name, stage="forward", call=f"call of {{name}}")
    answer(case=name, problem=None)
"""


def outcomes_of(tmp_path: Path, code: str, *, start: float = PATIENCE_S, case: float = PATIENCE_S) -> list[Outcome]:
    """Of three cases, `one`, `two` and `three`."""
    script = tmp_path / "child.py"
    script.write_text(CHILD + code)
    cases = [{"name": name, "layout": "fixed", "backward": False} for name in ("one", "two", "three")]
    return run_cases([sys.executable, str(script)], cases, start_seconds=start, case_seconds=case)


@pytest.mark.parametrize(
    ("code", "problem", "transient"),
    [
        (f"{LOAD} os.abort()", f"killed by SIGABRT in {LOADING}", False),
        pytest.param(f"{LOAD} time.sleep(60)", f" 10 s in {LOADING}", False, marks=pytest.mark.slow),
        (f"{LOAD} sys.exit('no module of that name')", NOT_STARTED, True),
        (f"{LOAD} os.kill(os.getpid(), signal.SIGKILL)", NOT_STARTED, True),
        ("os.abort()", NOT_STARTED, True),
        ("time.sleep(60)", NOT_STARTED, True),
        ("sys.exit(3)", NOT_STARTED, True),
    ],
    ids=["died", "hung", "error", "out of memory", "died before", "hung before", "ended before"],
)
def test_only_a_crash_while_loading_is_the_library_s_failure(
    code: str, problem: str, transient: bool, tmp_path: Path
) -> None:
    # One that must print before it hangs gets the time to.
    start = PATIENCE_S if "sleep" not in code else 10.0 if LOAD in code else 1.0
    (outcome,) = outcomes_of(tmp_path, code, start=start)
    assert problem in str(outcome.problem)
    assert outcome.transient is transient


@pytest.mark.slow
def test_loading_may_take_longer_than_a_case(tmp_path: Path) -> None:
    outcomes = outcomes_of(tmp_path, f"{LOAD} time.sleep(4); {EACH.format(end='pass')}".replace("; \n", "\n"), case=3.0)
    assert [outcome.problem for outcome in outcomes] == [None] * 3


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("os.abort()", f"killed by SIGABRT in {PARTS[0]}"),
        pytest.param("time.sleep(60)", f"hung: .* 5 s in {PARTS[0]}", marks=pytest.mark.slow),
        ("sys.exit(0)", f".* status 0 in {PARTS[0]}"),
        (f"answer(case='two', problem='raised'); sys.exit({STOPPED})", "raised"),
    ],
)
def test_the_first_case_that_fails_settles_the_verdict(end: str, problem: str, tmp_path: Path) -> None:
    one, two = outcomes_of(tmp_path, EACH.format(end=end), case=5.0 if "sleep" in end else PATIENCE_S)
    assert (one.problem, one.call) == (None, "call of one")
    assert re.fullmatch(problem, str(two.problem))
    assert (two.call, two.transient) == ("", False)
    assert report(SUBJECT, [two]).splitlines()[2].strip(), "where it was"


def test_answers_are_matched_by_name(tmp_path: Path) -> None:
    """The second case has no answer; what is printed, or answered for nobody, does not count."""
    code = """
print(json.dumps({"case": "two", "problem": None}), flush=True)
answer(case="nobody", problem=None)
for name in ("three", "two", "one"):
    answer(case=name, stage="forward", call=f"call of {name}")
    if name != "two":
        answer(case=name, problem=None)
"""
    one, two = outcomes_of(tmp_path, code)
    assert (one.problem, one.call) == (None, "call of one")
    assert re.fullmatch(r".* status 0 in forward", str(two.problem))
    assert two.call == "call of two"


def test_a_child_imports_nothing_from_the_working_directory(
    tmp_path: Path, children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stray in ("nsa/__init__.py", "random.py"):
        (tmp_path / stray).parent.mkdir(exist_ok=True)
        (tmp_path / stray).write_text("raise SystemExit('a stray module was imported')")
    monkeypatch.chdir(tmp_path)
    assert FlashBackend(FORCED_ON, (StandIn(),), folder=None).supports(PROBLEM) is None


def test_a_child_finds_the_library_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the environment nor the working directory knows the folder."""
    (tmp_path / "a_library_elsewhere.py").write_text("from flash_standin import StandIn")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    library = StandIn(address="a_library_elsewhere:StandIn")
    assert FlashBackend(FORCED_ON, (library,), folder=None).supports(PROBLEM) is None


def test_odd_bytes_and_unnamed_signals_are_reported(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    reason = str(backend_of(OddBytes(), tmp_path).supports(PROBLEM))
    assert "killed by signal 40 in forward: \ufffd\ufffd\ufffd crash" in reason


@pytest.mark.slow
def test_a_hang_that_prints_is_killed_with_its_children(
    tmp_path: Path, children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    offspring = tmp_path / "offspring"
    monkeypatch.setenv("OFFSPRING", str(offspring))
    flash = backend_of(TalkingHang(), tmp_path / "verdicts", partial(probe_quickly, seconds=5.0))
    assert "hung: " in str(flash.supports(PROBLEM))
    stat = Path(f"/proc/{offspring.read_text()}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        wait_until(lambda: stat.read_text().split()[2] == "Z")
    (kept,) = (tmp_path / "verdicts").glob("*/*.json")
    assert kept.stat().st_size < 10_000


@pytest.mark.parametrize("executable", ["", None, "/no/such/python"])
def test_a_child_that_cannot_be_started_ends_no_run(
    executable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert NOT_STARTED in str(FlashBackend(FORCED_ON, (StandIn(),), folder=tmp_path).supports(PROBLEM))
    assert not list(tmp_path.iterdir())
