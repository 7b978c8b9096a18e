"""A library that crashes, hangs or lies is tried in a process of its own: the run survives, and says what happened."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_standin import (
    FAULTS,
    BackwardDying,
    BackwardRaising,
    CannotBeLoaded,
    DyingWhenLoaded,
    FloatingPointException,
    Full,
    LoadedOnce,
    Raising,
    StandIn,
)
from probing import INSISTS, PROBLEM, SOME, SUBJECT, backend_of, probe_quickly, sliding

from nsa.backends import sdpa, stages
from nsa.backends.flash import FlashBackend
from nsa.backends.flash.cases import CODE, SOURCES, digest
from nsa.backends.flash.libraries import Library
from nsa.backends.preferences import Preference
from nsa.backends.probe import NOT_STARTED, Outcome, Subject, Verdicts
from nsa.backends.problem import Problem
from nsa.backends.routing import BackendFailure, Fault, Router
from nsa.data import Batch
from nsa.model import LM, PRESETS
from nsa.settings import Settings
from nsa.train.step import TrainStep


def losses_of(router: Router, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The trainer's own step on a tiny model, twice."""
    monkeypatch.setattr(stages, "router", lambda: router)
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
        router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, 4), **options)
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
    router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, 4))
    assert sum(router.counts.failures.values()) == 1
    with pytest.raises(BackendFailure, match=r"loading the library.*strict forbids"):
        router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, 4), strict=True)


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


def test_a_library_whose_limits_forbid_the_problem_is_not_probed(tmp_path: Path) -> None:
    flash = backend_of(StandIn(), tmp_path, lambda *_: pytest.fail("it was probed"))
    for changes in ({"d_k": 264}, {"dtype": torch.float64}, {"op": "attention", "d_k": 264}, {"op": "combine"}):
        assert flash.probe_all(replace(PROBLEM, **changes)) == []
    assert not list(tmp_path.iterdir())


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
    router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, 4))
    counts = router.counts.as_dict()
    assert counts["calls"] == {"sliding/sdpa": 1}
    assert any(error.__name__ in name for name in counts["failures"])


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
