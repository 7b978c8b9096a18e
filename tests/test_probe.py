"""A library that crashes, hangs or lies is tried in a process of its own: the run survives, and says what happened."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import flash_standin
import pytest
import torch
from flash_standin import (
    CPU_CONTRACT,
    FAULTS,
    BackwardDying,
    BackwardFault,
    BackwardRaising,
    BatchFault,
    CannotBeLoaded,
    DyingWhenLoaded,
    FloatingPointException,
    Full,
    LoadedOnce,
    LongFault,
    LongWindow,
    NotFinite,
    OddBytes,
    Raising,
    StandIn,
    TalkingHang,
    WindowFault,
    WrongAndTalking,
    WrongKeys,
)

import nsa
from nsa.backends import sdpa
from nsa.backends.flash import FlashBackend, trial
from nsa.backends.flash.cases import (
    CODE,
    MOST_ELEMENTS,
    MOST_TOKENS,
    SOURCES,
    cases_of,
    digest,
    kind_of,
    make_call,
    posed,
)
from nsa.backends.flash.libraries import Library, TorchLibrary
from nsa.backends.flash.repro import repro_script
from nsa.backends.flash.trial import LOADING, Answers, difference, main, try_case, written_out
from nsa.backends.preferences import Preference
from nsa.backends.probe import (
    NOT_STARTED,
    RESTART,
    START_SECONDS,
    Outcome,
    Subject,
    Verdicts,
    end,
    report,
    run_cases,
)
from nsa.backends.problem import Problem
from nsa.backends.routing import BackendFailure, Fault, Router
from nsa.data import Batch
from nsa.geometry import n_compressed
from nsa.model import LM, PRESETS
from nsa.ops import library as op_library
from nsa.settings import Settings
from nsa.train.step import TrainStep

TESTS = str(Path(flash_standin.__file__).parent)
ROOT = str(Path(nsa.__file__).parent.parent)
PROBLEM = Problem(
    op="sliding", batch=1, n_queries=64, n_keys=64, n_heads=2, n_groups=1, d_k=8, d_v=8, dtype=torch.float32
)
SUBJECT = Subject(library="stand-in", version="0", gpu="cpu", driver="none", torch="2", cuda="none", cases="1")
INSISTS = Settings.load(environ={"NSA_USE_FA2": "1"})


@pytest.fixture
def children_find_the_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{TESTS}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


SOME = ("one token", "a window across tiles")
OWN = ("the problem's own shape", "the longest of its class")


def probe_quickly(
    library: Library, problem: Problem, width: int, dtype: torch.dtype, names: tuple[str, ...] = SOME
) -> list[Outcome]:
    """As the backend's own, with less patience and fewer cases."""
    command = [sys.executable, "-P", "-m", "nsa.backends.flash.trial", library.address, problem.device]
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

    counts = router.counts.as_dict()
    calls = counts["calls"]
    assert calls["sliding/sdpa"] > 0
    assert calls["compressed/sdpa"] > 0
    assert {name.split(":")[0] for name in counts["failures"]} == {"sliding/flash", "compressed/flash"}
    assert all(WORDS[fault.__name__] in name for name in counts["failures"])
    assert sum(counts["failures"].values()) == calls["sliding/sdpa"] + calls["compressed/sdpa"]
    assert not [name for name in calls if name.endswith("/flash")]
    assert losses == losses_of(Router([sdpa], Settings()), monkeypatch)


@pytest.mark.parametrize(
    ("fault", "says"), [(BackwardRaising, "only supports Ampere"), (BackwardDying, "SIGFPE in backward")]
)
def test_a_fault_in_gradients_alone_is_survived_where_a_measured_line_asks_for_them(
    fault: Any, says: str, tmp_path: Path, children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [Preference(gpu="cpu", op=op, order=("flash", "sdpa"), mode="bwd") for op in ("sliding", "compressed")]
    prober = probe_quickly if fault is BackwardDying else (lambda *_: [])
    router = Router([sdpa, FlashBackend(Settings(), (fault(),), folder=tmp_path, prober=prober)], Settings(), lines)
    losses = losses_of(router, monkeypatch)
    counts = router.counts.as_dict()
    assert {name.split(":")[0] for name in counts["failures"]} == {"sliding/flash", "compressed/flash"}
    assert all(says in name for name in counts["failures"])
    assert not [name for name in counts["calls"] if name.endswith("/flash")]
    assert losses == losses_of(Router([sdpa], Settings()), monkeypatch)


def test_a_right_library_passes_the_whole_probe_and_serves(
    tmp_path: Path, children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = FlashBackend(INSISTS, (StandIn(),), folder=tmp_path)
    router = Router([flash, sdpa], INSISTS)
    losses = losses_of(router, monkeypatch)
    assert {kind.split("-")[3].rstrip("0123456789") for _, kind in flash.tried} == {"sliding", "compressed"}
    for outcomes in flash.tried.values():
        assert [outcome.problem for outcome in outcomes] == [None] * 13
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
    # The stand-in's own gradients: its sums have another order, which some builds of torch show and others do not.
    torch.testing.assert_close(losses, losses_of(Router([sdpa], Settings()), monkeypatch), atol=1e-5, rtol=1e-5)


def test_a_verdict_holds_for_the_cases_like_the_problem(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    flash = backend_of(FloatingPointException(), tmp_path, partial(probe_quickly, names=(*SOME, "documents")))
    assert "killed by SIGFPE" in str(flash.supports(PROBLEM))
    assert "nsa doctor --probe" in str(flash.supports(replace(PROBLEM, op="compressed", backward=True)))
    assert flash.supports(replace(PROBLEM, packed=True)) is None, "the child after the crash tried the rest"


def test_a_verdict_is_found_again_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def prober(*given: Any) -> list[Outcome]:
        asked.append(given)
        return [Outcome(case="x", feature="dense", problem="hung")]

    for _ in range(3):
        assert "hung" in str(backend_of(StandIn(), tmp_path, prober).supports(PROBLEM))
    assert len(asked) == 1
    assert caplog.text.count("probing stand-in 0 on cpu") == 1, "who waits is told why, once"
    other_version = StandIn(version="1")
    assert "hung" in str(backend_of(other_version, tmp_path, prober).supports(PROBLEM))
    assert "hung" in str(backend_of(StandIn(), tmp_path, prober).supports(replace(PROBLEM, d_k=16)))
    assert len(asked) == 3, "another version and another width are tried by themselves"
    monkeypatch.setattr("nsa.backends.flash.backend.CODE", "other cases")
    assert "hung" in str(backend_of(StandIn(), tmp_path, prober).supports(PROBLEM))
    assert len(asked) == 4, "so are other cases"
    mended = [Outcome(case="x", feature="dense")]
    (library, subject, outcomes) = backend_of(StandIn(), tmp_path, lambda *_: mended).probe_all(PROBLEM)[0]
    assert (library.version, subject.version, outcomes) == ("0", "0", mended)
    assert backend_of(StandIn(), tmp_path, prober).supports(PROBLEM) is None, "trying again replaces the verdict"


def test_strict_forbids_what_a_remembered_verdict_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the second process nothing is probed: the counters and the log say it all the same."""
    bad = [Outcome(case="x", feature="dense", problem="hung")]
    backend_of(StandIn(), tmp_path, lambda *_: bad).supports(PROBLEM)
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)

    def run(config: Settings, **options: Any) -> Router:
        flash = FlashBackend(config, (StandIn(),), folder=tmp_path, prober=lambda *_: pytest.fail("it is remembered"))
        router = Router([flash, sdpa], config)
        knobs = {"window": 4, "scale": 1.0, "cu_seqlens": None, "q_start": None}
        router.run(PROBLEM, "sliding_forward", q, k, k, **knobs, **options)
        return router

    caplog.clear()
    assert sum(run(INSISTS).counts.failures.values()) == 1
    assert "flash failed in sliding_forward" in caplog.text
    with pytest.raises(BackendFailure, match=r"hung.*strict forbids"):
        run(INSISTS, strict=True)
    for keeps_away in ({}, {"NSA_USE_FA2": "0"}, {"NSA_FA2_MIN_LEN_WIN": "128"}):
        assert not run(Settings.load(environ=keeps_away), strict=True).counts.failures


def test_a_library_that_is_sound_makes_up_for_one_that_is_not(tmp_path: Path) -> None:
    def prober(library: Library, *_: Any) -> list[Outcome]:
        return [Outcome(case="x", feature="dense", problem="hung" if library.version == "0" else None)]

    bad, good = StandIn(), StandIn(version="1")
    assert FlashBackend(INSISTS, (bad, good), folder=tmp_path, prober=prober).choose(PROBLEM) is good
    narrow = StandIn(version="1", contract=replace(good.contract, widest=4, library="narrow"))
    both = FlashBackend(INSISTS, (bad, narrow), folder=tmp_path, prober=prober)
    assert isinstance(both.supports(PROBLEM), Fault), "without the fault the first would serve"
    assert not isinstance(both.supports(replace(PROBLEM, d_k=264)), Fault), "a limit is a limit"


def test_each_gpu_of_a_process_has_a_verdict_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def prober(*_: Any) -> list[Outcome]:
        asked.append(Subject.here("stand-in", "0", "cpu").gpu)
        return []

    flash = backend_of(StandIn(), tmp_path, prober)
    for gpu in ("A100", "RTX 4090", "A100"):
        monkeypatch.setattr(Subject, "here", partial(lambda *_, gpu: replace(SUBJECT, gpu=gpu), gpu=gpu))
        flash.supports(PROBLEM)
    assert asked == ["A100", "RTX 4090"]


def test_a_verdict_rests_on_all_the_code_that_made_it(tmp_path: Path) -> None:
    assert {source.name for source in SOURCES} == {"cases.py", "libraries.py", "trial.py", "contracts.py"}
    copies = [tmp_path / source.name for source in SOURCES]
    for source, copy in zip(SOURCES, copies, strict=True):
        copy.write_bytes(source.read_bytes())
    assert digest(copies) == CODE
    found = {CODE}
    for copy in copies:
        copy.write_text(copy.read_text() + "# changed")
        found.add(digest(copies))
    assert len(found) == 5


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
    wrong = Outcome(case="a", feature="packed", problem="hung", call="q=(1)", request={"lengths": [1, 2]})
    verdicts.put("kind", [wrong])
    verdicts.put("other", [])
    assert verdicts.get("kind") == [wrong]
    assert sorted(verdicts.read()) == [[], [wrong]]
    files = sorted((tmp_path / "deep" / SUBJECT.name).iterdir())
    assert [file.name for file in files] == ["kind.json", "other.json"], "no temporary file is left"
    assert json.loads(files[0].read_text())["subject"]["library"] == "stand-in"
    for broken in ("", "[]", "{}", '{"outcomes": [{"case": 1, "no": 2}]}', '{"outcomes": [1]}'):
        files[0].write_text(broken)
        assert verdicts.get("kind") is None
    assert verdicts.read() == [[]]
    verdicts.forget()
    verdicts.forget()
    assert verdicts.read() == []


def test_processes_that_probe_at_once_lose_nothing_of_each_other_s(tmp_path: Path) -> None:
    kinds = [f"kind {n}" for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda kind: Verdicts(tmp_path, SUBJECT).put(kind, [Outcome(case=kind, feature="dense")]), kinds))
    assert [Verdicts(tmp_path, SUBJECT).get(kind)[0].case for kind in kinds] == kinds


def test_a_subject_s_folder_differs_by_everything_a_verdict_depends_on() -> None:
    names = {SUBJECT.name}
    for name in ("version", "gpu", "driver", "torch", "cuda", "cases"):
        names.add(replace(SUBJECT, **{name: "NVIDIA H200"}).name)
    assert len(names) == 7
    assert all("/" not in name and " " not in name for name in names)


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


def test_a_report_is_complete() -> None:
    wrong = Outcome(
        case="documents", feature="packed", problem="killed by SIGFPE", call="q=(168, 2, 8):bfloat16",
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
    return Outcome(case=case["name"], feature="dense", problem="killed by SIGFPE", call=call, request=case)


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
    assert "window=4" in done.stdout


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


def test_a_library_that_dies_while_it_is_loaded_is_a_failure_that_is_remembered(
    tmp_path: Path, children_find_the_stand_ins: None, caplog: pytest.LogCaptureFixture
) -> None:
    dying = backend_of(DyingWhenLoaded(), tmp_path, partial(probe_quickly, names=(*SOME, "documents")))
    again = backend_of(DyingWhenLoaded(), tmp_path, lambda *_: pytest.fail("it is remembered"))
    for flash in (dying, again):
        for problem in (PROBLEM, replace(PROBLEM, op="compressed")):
            reason = flash.supports(problem)
            assert isinstance(reason, Fault)
            assert "killed by SIGSEGV in loading the library" in reason
    assert "one token: killed by SIGSEGV in loading the library" in caplog.text
    assert {outcome.feature for outcomes in again.tried.values() for outcome in outcomes} == {"dense", "packed"}
    router = Router([again, sdpa], INSISTS)
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)
    knobs: dict[str, Any] = {"window": 4, "scale": 1.0, "cu_seqlens": None, "q_start": None}
    router.run(PROBLEM, "sliding_forward", q, k, k, **knobs)
    assert sum(router.counts.failures.values()) == 1
    with pytest.raises(BackendFailure, match=r"loading the library.*strict forbids"):
        router.run(PROBLEM, "sliding_forward", q, k, k, **knobs, strict=True)


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


@pytest.mark.parametrize(("heads", "groups", "width"), [(2, 1, 64), (8, 8, 128), (1, 1, 256)])
@pytest.mark.parametrize("layout", ["dense", "packed", "cached"])
def test_a_window_of_one_key_too_many_is_found_in_half_precision(
    layout: str, heads: int, groups: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process is no child to be ended.
    monkeypatch.setattr(trial, "end_after", lambda _: None)
    sizes = {"n_heads": heads, "n_groups": groups, "d_k": width, "d_v": width, "dtype": torch.bfloat16}
    fixed = [
        case
        for case in cases_of(replace(PROBLEM, **sizes), width, torch.bfloat16)
        if case["feature"] == layout and case["window"] and case["name"] not in OWN
    ]
    answers = Answers(str(tmp_path / "answers"))
    assert [try_case(StandIn(), case, "cpu", answers) for case in fixed] == [None] * len(fixed)
    assert any("off by" in str(try_case(LongWindow(), case, "cpu", answers)) for case in fixed)


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


@pytest.mark.parametrize("library", [Full, LoadedOnce])
def test_what_says_nothing_about_the_library_is_not_remembered(
    library: Any, tmp_path: Path, children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADED", str(tmp_path / "loaded"))
    flash = backend_of(library(), tmp_path / "verdicts", partial(probe_quickly, names=(*SOME, "documents")))
    reason = flash.supports(PROBLEM)
    assert reason is not None
    # Nor does it end a strict run, unless the library died as well.
    assert isinstance(reason, Fault) is (library is LoadedOnce)
    assert not (tmp_path / "verdicts").exists()
    assert backend_of(StandIn(), tmp_path / "verdicts").supports(PROBLEM) is None


# The problem's own shape is tried, and a verdict counts for shapes like it.


@pytest.mark.parametrize(
    ("library", "changes"),
    [
        (LongFault, {"n_queries": 300, "n_keys": 300}),
        (LongFault, {"n_queries": 270, "n_keys": 270}),
        (BatchFault, {"batch": 2}),
        (BatchFault, {"batch": 2, "op": "compressed", "n_keys": 3}),
    ],
)
def test_a_crash_at_the_problem_s_own_shape_is_found_before_the_run_meets_it(
    library: Any, changes: dict[str, Any], tmp_path: Path, children_find_the_stand_ins: None
) -> None:
    flash = backend_of(library(), tmp_path, partial(probe_quickly, names=OWN))
    assert flash.supports(PROBLEM) is None
    assert "killed by SIGFPE in forward" in str(flash.supports(replace(PROBLEM, **changes)))
    again = backend_of(library(), tmp_path, lambda *_: pytest.fail("both are remembered"))
    assert again.supports(PROBLEM) is None
    assert "SIGFPE" in str(again.supports(replace(PROBLEM, **changes)))


def test_a_window_is_tried_before_the_call_that_has_it(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    flash = backend_of(WindowFault(), tmp_path, partial(probe_quickly, names=OWN))
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)
    options: dict[str, Any] = {"scale": 1.0, "cu_seqlens": None, "q_start": None}
    with pytest.raises(BackendFailure, match="SIGFPE"):
        flash.sliding_forward(q, k, k, window=33, **options)
    flash.sliding_forward(q, k, k, window=34, **options)


def test_a_verdict_on_one_window_keeps_no_other_from_being_served(tmp_path: Path) -> None:
    def prober(library: Library, problem: Any, *_: Any) -> list[Outcome]:
        return [Outcome(case="x", feature="dense", problem="hung" if problem.knob == 33 else None)]

    library = StandIn()
    router = Router([backend_of(library, tmp_path, prober), sdpa], INSISTS)
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)
    options: dict[str, Any] = {"scale": 1.0, "cu_seqlens": None, "q_start": None}
    for window in (34, 33, 34, 33):
        router.run(PROBLEM, "sliding_forward", q, k, k, window=window, **options)
    assert dict(router.counts.calls) == {("sliding", "flash"): 2, ("sliding", "sdpa"): 2}
    assert list(router.counts.failures.values()) == [2]
    with pytest.raises(BackendFailure, match=r"hung.*strict forbids"):
        router.run(PROBLEM, "sliding_forward", q, k, k, window=33, **options, strict=True)
    router.run(PROBLEM, "sliding_forward", q, k, k, window=34, **options, strict=True)


def test_lengths_up_to_a_power_of_two_share_a_verdict() -> None:
    def kind(**changes: Any) -> str:
        return kind_of(replace(PROBLEM, **changes), 8, torch.float32)

    def length(n: int) -> dict[str, int]:
        return {"n_queries": n, "n_keys": n}

    assert kind(**length(1)) == kind(**length(256)) != kind(**length(257)) == kind(**length(512))
    assert kind(batch=1) != kind(batch=2) == kind(batch=3)
    assert len({kind(), kind(packed=True), kind(cached=True), kind(op="compressed")}) == 4
    assert kind(**length(2**16)) == kind(**length(2**20)), "longer ones are tried at the same length"
    assert kind_of(posed(PROBLEM, 512), 8, torch.float32) == kind() != kind_of(posed(PROBLEM, 4), 8, torch.float32)


@pytest.mark.parametrize("length", [1, 64, 255, 256, 2048, 4000, 4096, 2**20])
def test_a_pack_is_tried_as_one_document_and_as_several(length: int) -> None:
    problem = replace(PROBLEM, packed=True, n_queries=length, n_keys=length)
    own, longest = [case for case in cases_of(problem, 8, torch.float32) if case["name"] in OWN]
    assert own["lengths"] == [min(length, MOST_TOKENS)]
    assert len(longest["lengths"]) == 3
    assert min(longest["lengths"]) > 0
    assert sum(longest["lengths"]) >= own["lengths"][0]


@pytest.mark.parametrize("op", ["sliding", "compressed"])
@pytest.mark.parametrize("layout", ["dense", "packed", "cached"])
def test_a_large_problem_is_tried_at_a_size_that_fits(op: str, layout: str) -> None:
    batch = 1 if layout == "packed" else 300
    queries = 1 if layout == "cached" else 2**18
    keys = 2**18 if op == "sliding" or layout == "cached" else 2**14
    problem = Problem(
        op=op, batch=batch, n_queries=queries, n_keys=keys, n_heads=64, n_groups=4, d_k=128, d_v=128,
        dtype=torch.bfloat16, packed=layout == "packed", cached=layout == "cached",
    )  # fmt: skip
    own = [case for case in cases_of(problem, 128, torch.bfloat16) if case["name"] in OWN]
    assert own
    for case in own:
        rows = case["batch"] * case.get("queries", sum(case["lengths"]))
        assert rows <= MOST_TOKENS
        assert sum(case["lengths"]) <= MOST_TOKENS
        assert rows * case["heads"] * 128 <= MOST_ELEMENTS
        assert case["batch"] == 1 or batch > 1


def test_attention_written_out_in_tiles_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in cases_of(replace(PROBLEM, batch=2), 8, torch.float32):
        call = make_call(case, "cpu")
        do = torch.randn_like(call.q) if case["backward"] else None
        whole = written_out(call, do)
        with monkeypatch.context() as small:
            small.setattr("nsa.backends.flash.trial.TILE_QUERIES", 7)
            rounded = {name: x.float() for name, x in whole.items()}
            assert difference(call, rounded, do) is None
            tiled = written_out(call, do)
        for name, x in whole.items():
            torch.testing.assert_close(tiled[name], x, equal_nan=True)


def test_a_stride_s_heads_are_counted_once_the_call_tells_it(tmp_path: Path) -> None:
    flash = backend_of(StandIn(), tmp_path, lambda *_: [])
    problem = Problem(
        op="compressed", batch=512, n_queries=64, n_keys=3, n_heads=32, n_groups=2, d_k=128, d_v=128,
        dtype=torch.bfloat16, backward=True,
    )  # fmt: skip
    assert flash.supports(posed(problem, 2)) is None
    assert flash.supports(replace(problem, n_keys=31)) is None, "so many keys tell a stride of 2"
    assert "2^31" in str(flash.supports(problem)), "so few tell 16"
    assert "2^31" in str(flash.supports(posed(problem, 16)))
    assert "80000 heads" in str(flash.supports(posed(replace(problem, n_heads=5000, backward=False), 16)))
    assert flash.supports(replace(problem, n_keys=0, n_heads=5000, n_groups=1)) is None, "nothing is called"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(("block", "stride"), [(32, 16), (16, 16), (64, 16), (8, 4)])
@pytest.mark.parametrize("length", [2048, 172_032, 174_720, 262_144])
def test_a_compressed_gradient_is_forbidden_before_its_call_where_the_call_would_be(
    length: int, block: int, stride: int, packed: bool, tmp_path: Path
) -> None:
    """At 64 heads of width 192 the sums of 174,762 queries are the last that 32 bits count."""
    n_keys = length // stride if packed else n_compressed(length, block, stride)
    problem = Problem(
        op="compressed", batch=1, n_queries=length, n_keys=n_keys, n_heads=64, n_groups=4, d_k=192, d_v=192,
        dtype=torch.bfloat16, backward=True, packed=packed,
    )  # fmt: skip
    flash = backend_of(StandIn(), tmp_path, lambda *_: [])
    called = flash.forbids(StandIn(), posed(problem, stride))
    assert flash.forbids(StandIn(), problem) == called
    assert (called is None) is (length < 174_720)
    if called is not None:
        assert flash.supports(problem) == f"stand-in: {called}"


def test_a_library_whose_limits_forbid_the_problem_is_not_probed(tmp_path: Path) -> None:
    flash = backend_of(StandIn(), tmp_path, lambda *_: pytest.fail("it was probed"))
    for changes in ({"d_k": 264}, {"dtype": torch.float64}, {"op": "attention", "d_k": 264}, {"op": "combine"}):
        assert flash.probe_all(replace(PROBLEM, **changes)) == []
    assert not list(tmp_path.iterdir())


def test_probing_tries_the_window_and_the_stride_that_it_is_told(tmp_path: Path) -> None:
    asked = []

    def prober(library: Library, problem: Any, *_: Any) -> list[Outcome]:
        asked.append((problem.op, problem.knob, problem.n_keys))
        return []

    whole = replace(PROBLEM, op="attention")
    backend_of(StandIn(), tmp_path, prober).probe_all(whole, block=8, stride=4, window=24)
    assert asked == [("sliding", 24, 64), ("compressed", 4, 15)]


def test_folded_heads_are_tried_as_far_as_a_grid_reaches() -> None:
    many = replace(PROBLEM, n_heads=8192, n_groups=8192)
    heads = {case["name"]: case["heads"] for case in cases_of(many, 8, torch.float16)}
    assert heads["folded heads"] == 7 * 8192


def test_probing_the_whole_attention_is_probing_its_branches_and_forgets_the_rest(tmp_path: Path) -> None:
    asked = []

    def prober(library: Library, problem: Problem, *_: Any) -> list[Outcome]:
        asked.append((problem.op, problem.n_keys))
        return [Outcome(case="x", feature="dense")]

    flash = backend_of(StandIn(), tmp_path, prober)
    flash.supports(replace(PROBLEM, batch=2))
    ((_, _, outcomes),) = flash.probe_all(replace(PROBLEM, op="attention"))
    assert len(outcomes) == 1, "the same call, once"
    flash.supports(PROBLEM)
    flash.supports(replace(PROBLEM, op="compressed", n_keys=3))
    assert asked == [("sliding", 64), ("sliding", 64), ("compressed", 3)]
    flash.supports(replace(PROBLEM, batch=2))
    assert len(asked) == 4


@pytest.mark.parametrize(
    "error",
    [
        ValueError, AssertionError, AttributeError, OSError, IndexError, KeyError, NotImplementedError,
        ZeroDivisionError, NameError, SystemError, EOFError,
    ],
)  # fmt: skip
def test_whatever_a_library_raises_the_next_backend_serves(error: type[Exception], tmp_path: Path) -> None:
    class Failing(StandIn):
        def forward(self, call: Any) -> Any:
            raise error("bad head dim")

    router = Router([backend_of(Failing(), tmp_path, lambda *_: []), sdpa], INSISTS)
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)
    router.run(PROBLEM, "sliding_forward", q, k, k, window=4, scale=1.0, cu_seqlens=None, q_start=None)
    counts = router.counts.as_dict()
    assert counts["calls"] == {"sliding/sdpa": 1}
    assert any(error.__name__ in name for name in counts["failures"])


def test_a_report_says_which_direction_crashed_on_what(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    outcomes = probe_quickly(BackwardFault(), PROBLEM, 8, torch.float32, ("documents", "a few queries on a cache"))
    text = report(SUBJECT, outcomes)
    for part in (
        "documents: killed by SIGFPE in backward",
        "backward: q=(168, 2, 8)",
        "do=(168, 2, 8)",
        "o=(168, 2, 8)",
        "lse=(2, 168):float32",
        "cu_seqlens_q=[0, 1, 131, 168]",
    ):
        assert part in text
    assert "RuntimeWarning" not in text
    # As a branch passes a slice of a cache: the longest row bounds the keys, and the last has no room after it.
    assert "max_k=300 cu_seqlens_q=[0, 5, 10] cu_seqlens_k=[0, 311, 611] used_k=[7, 300]" in outcomes[1].call


@pytest.mark.parametrize(("library", "says"), [(WrongKeys, "o is off by"), (NotFinite, "o is not finite")])
def test_the_repro_script_of_wrong_numbers_fails(
    library: Any, says: str, tmp_path: Path, children_find_the_stand_ins: None
) -> None:
    done = run_repro(tmp_path, library())
    assert done.returncode == 1
    assert f"wrong: {says}" in done.stderr


def test_the_repro_script_of_a_right_library_succeeds_whatever_its_texts_are(
    tmp_path: Path, children_find_the_stand_ins: None
) -> None:
    odd = 'C:\\Users\\x \\N """quoted""" \x00 \udc80 \u00fc'
    subject = replace(SUBJECT, gpu=odd)
    outcome = replace(failed(StandIn(), call=odd), problem=odd, case=odd)
    outcome = replace(outcome, request={**outcome.request, "name": odd})
    done = run_repro(tmp_path, StandIn(), subject, outcome)
    assert done.returncode == 0, done.stderr
    assert "survived, and right" in done.stdout


def run_repro(
    tmp_path: Path, library: Any, subject: Subject = SUBJECT, outcome: Outcome | None = None
) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "repro.py"
    path.write_text(repro_script(library, subject, outcome or failed(library)))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)


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
