"""A library that crashes, hangs or is wrong is tried in a child process: the run survives and reports it."""

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
    Hanging,
    Raising,
    StandIn,
)
from probing import FORCED_ON, PROBLEM, SUBJECT, backend_of, no_probe, probe_quickly, sliding

from nsa.backends import sdpa, stages
from nsa.backends.flash import FlashBackend
from nsa.backends.flash.cases import CASE_SOURCES, CODE, digest
from nsa.backends.flash.libraries import Library
from nsa.backends.flash.probe import NOT_STARTED, Outcome, Subject, Verdicts
from nsa.backends.measured_routes import MeasuredRoute
from nsa.backends.routing import BackendFailure, FailureReason, Router
from nsa.data import Batch
from nsa.model import LM, PRESETS
from nsa.settings import Settings
from nsa.train.step import TrainStep

RIGHT = Outcome(case="x", layout="fixed")
HUNG = replace(RIGHT, problem="hung")


def losses_of(router: Router, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The trainer's own step on a tiny model, twice."""
    monkeypatch.setattr(stages, "router", lambda: router)
    torch.manual_seed(0)
    step = TrainStep(LM(replace(PRESETS["tiny"], seq_len=64)), dtype=torch.float32, compile=False)
    tokens = torch.randint(0, 60, (2, 65), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], None)
    return [step([batch], lr=1e-3).loss.item() for _ in range(2)]


def run_sliding(router: Router, **options: Any) -> None:
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 64, 1, 8)
    router.run(PROBLEM, "sliding_forward", q, k, k, sliding(q, 4), **options)


WORDS = {
    "Raising": "only supports Ampere",
    "WrongKeys": "off by",
    "Segfaulting": "SIGSEGV",
    "Hanging": "hung: ",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_training_survives_a_fault_with_the_same_losses(
    fault: Any,
    tmp_path: Path,
    children_find_the_stand_ins: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prober = partial(probe_quickly, seconds=5.0 if fault is Hanging else 20.0)
    router = Router([backend_of(fault(), tmp_path, prober), sdpa], FORCED_ON)
    losses = losses_of(router, monkeypatch)
    for part in (WORDS[fault.__name__], "a window across tiles", "q=(1, 257, ", "strides", "torch 2"):
        assert part in caplog.text, part
    calls, failures = router.counts.as_dict().values()
    assert {name.split(":")[0] for name in failures} == {"sliding/flash", "compressed/flash"}
    assert all(WORDS[fault.__name__] in name for name in failures)
    assert sum(failures.values()) == calls["sliding/sdpa"] + calls["compressed/sdpa"]
    assert not [name for name in calls if name.endswith("/flash")]
    assert losses == losses_of(Router([sdpa], Settings()), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "word"), [(BackwardRaising, "Ampere"), (BackwardDying, "SIGFPE in backward")])
def test_training_survives_a_fault_of_the_backward_pass_alone(
    fault: Any, word: str, tmp_path: Path, children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = [MeasuredRoute(gpu="cpu", op=op, order=("flash", "sdpa"), mode="bwd") for op in ("sliding", "compressed")]
    prober = probe_quickly if fault is BackwardDying else no_probe
    router = Router([sdpa, FlashBackend(Settings(), (fault(),), folder=tmp_path, prober=prober)], Settings(), routes)
    losses = losses_of(router, monkeypatch)
    calls, failures = router.counts.as_dict().values()
    assert {name.split(":")[0] for name in failures} == {"sliding/flash", "compressed/flash"}
    assert all(word in name for name in failures)
    assert not [name for name in calls if name.endswith("/flash")]
    assert losses == losses_of(Router([sdpa], Settings()), monkeypatch)


@pytest.mark.slow
def test_a_right_library_passes_the_whole_probe_and_runs(
    tmp_path: Path, children_find_the_stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = FlashBackend(FORCED_ON, (StandIn(),), folder=tmp_path)
    router = Router([flash, sdpa], FORCED_ON)
    losses = losses_of(router, monkeypatch)
    for problem in (replace(PROBLEM, varlen=True), replace(PROBLEM, cached=True)):
        assert flash.supports(problem) is None
    assert {outcome.layout for outcomes in flash.tried.values() for outcome in outcomes} == {
        "fixed",
        "varlen",
        "cached",
    }
    for outcomes in flash.tried.values():
        assert [outcome.problem for outcome in outcomes if outcome.problem] == []
        assert len(outcomes) >= 5
    calls = router.counts.as_dict()["calls"]
    assert calls["sliding/flash"] > 0
    assert calls["compressed/flash"] > 0
    torch.testing.assert_close(losses, losses_of(Router([sdpa], Settings()), monkeypatch), atol=1e-5, rtol=1e-5)


def test_what_fails_only_in_the_run_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router([backend_of(Raising(), tmp_path, no_probe), sdpa], FORCED_ON)
    losses = losses_of(router, monkeypatch)
    counts = router.counts.as_dict()
    assert any("only supports Ampere" in name for name in counts["failures"])
    # Only the forward pass fails, once per layer and step.
    assert set(counts["failures"].values()) == {4}
    assert counts["calls"]["compressed/flash"] == 4, "the backward passes"
    # The stand-in sums in another order.
    torch.testing.assert_close(losses, losses_of(Router([sdpa], Settings()), monkeypatch), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_verdict_holds_for_one_layout(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    flash = backend_of(FloatingPointException(), tmp_path)
    assert "SIGFPE" in str(flash.supports(PROBLEM))
    assert "nsa doctor --probe" in str(flash.supports(replace(PROBLEM, op="compressed", backward=True)))
    assert flash.supports(replace(PROBLEM, varlen=True)) is None
    assert [outcome.case for outcomes in flash.tried.values() for outcome in outcomes][-1] == "documents"


def test_a_verdict_is_kept_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def prober(*given: Any) -> list[Outcome]:
        asked.append(given)
        return [HUNG]

    for _ in range(3):
        assert "hung" in str(backend_of(StandIn(), tmp_path, prober).supports(PROBLEM))
    assert len(asked) == 1
    assert caplog.text.count("probing stand-in 0 on cpu") == 1
    backend_of(StandIn(version="1"), tmp_path, prober).supports(PROBLEM)
    backend_of(StandIn(), tmp_path, prober).supports(replace(PROBLEM, d_k=16))
    assert len(asked) == 3, "another version and another head_dim are tried"
    monkeypatch.setattr("nsa.backends.flash.backend.CODE", "other cases")
    backend_of(StandIn(), tmp_path, prober).supports(PROBLEM)
    assert len(asked) == 4, "so are other cases"
    whole = replace(PROBLEM, op="attention")
    (library, subject, outcomes) = backend_of(StandIn(), tmp_path, lambda *_: [RIGHT]).probe_all(whole)[0]
    assert (library.version, subject.version, outcomes) == ("0", "0", [RIGHT])
    assert backend_of(StandIn(), tmp_path, prober).supports(PROBLEM) is None, "the verdict is replaced"


def test_strict_raises_on_a_kept_verdict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the second process nothing is probed; it is counted and logged all the same."""
    backend_of(StandIn(), tmp_path, lambda *_: [HUNG]).supports(PROBLEM)

    def run(config: Settings, **options: Any) -> Router:
        flash = FlashBackend(config, (StandIn(),), folder=tmp_path, prober=lambda *_: pytest.fail("it is kept"))
        router = Router([flash, sdpa], config)
        run_sliding(router, **options)
        return router

    caplog.clear()
    assert sum(run(FORCED_ON).counts.failures.values()) == 1
    assert " in sliding_forward on " in caplog.text
    with pytest.raises(BackendFailure, match=r"hung.*strict"):
        run(FORCED_ON, strict=True)
    for variables in ({"NSA_USE_FA2": "0"}, {"NSA_FA2_MIN_LEN_WIN": "128"}):
        assert not run(Settings.load(environ=variables), strict=True).counts.failures


def test_the_next_library_runs_where_one_failed(tmp_path: Path) -> None:
    def prober(library: Library, *_: Any) -> list[Outcome]:
        return [HUNG if library.version == "0" else RIGHT]

    bad, good = StandIn(), StandIn(version="1")
    assert FlashBackend(FORCED_ON, (bad, good), folder=tmp_path, prober=prober).choose(PROBLEM) is good
    narrow = StandIn(version="1", contract=replace(good.contract, max_head_dim=4, library="narrow"))
    both = FlashBackend(FORCED_ON, (bad, narrow), folder=tmp_path, prober=prober)
    assert isinstance(both.supports(PROBLEM), FailureReason), "the first would run if it worked"
    assert not isinstance(both.supports(replace(PROBLEM, d_k=264)), FailureReason), "a limit is a limit"


def test_each_gpu_of_a_process_has_its_own_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    copies = [tmp_path / source.name for source in CASE_SOURCES]
    for source, copy in zip(CASE_SOURCES, copies, strict=True):
        copy.write_bytes(source.read_bytes())
    found = [digest(copies)]
    assert found == [CODE]
    for copy in copies:
        copy.write_text(copy.read_text() + "# changed")
        found.append(digest(copies))
    assert len(set(found)) == len(CASE_SOURCES) + 1


def test_verdict_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    verdicts = Verdicts(tmp_path / "deep", SUBJECT)
    assert verdicts.get("kind") is None
    wrong = replace(HUNG, call="q=(1)", request={"lengths": [1, 2]})
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
    # Without a folder that can be written, a verdict holds for this process only.
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "below", None):
        Verdicts(folder, SUBJECT).put("kind", [])
        assert Verdicts(folder, SUBJECT).get("kind") is None
    assert "cannot save" in caplog.text


def test_processes_that_probe_at_once_keep_each_other_s_verdicts(tmp_path: Path) -> None:
    kinds = [f"kind {n}" for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda kind: Verdicts(tmp_path, SUBJECT).put(kind, [replace(RIGHT, case=kind)]), kinds))
    assert [Verdicts(tmp_path, SUBJECT).get(kind)[0].case for kind in kinds] == kinds


def test_a_subject_s_folder_depends_on_all_of_it() -> None:
    names = {SUBJECT.name}
    for name in ("version", "gpu", "driver", "torch", "cuda", "cases"):
        names.add(replace(SUBJECT, **{name: "NVIDIA H200"}).name)
    assert len(names) == 7
    assert all("/" not in name and " " not in name for name in names)


def test_a_library_that_dies_while_loading_has_failed(
    tmp_path: Path, children_find_the_stand_ins: None, caplog: pytest.LogCaptureFixture
) -> None:
    dying = backend_of(DyingWhenLoaded, tmp_path)
    again = backend_of(DyingWhenLoaded, tmp_path, lambda *_: pytest.fail("it is kept"))
    for flash in (dying, again):
        reason = flash.supports(PROBLEM)
        assert isinstance(reason, FailureReason)
        assert "SIGSEGV in " in reason
    assert "SIGSEGV in " in caplog.text
    router = Router([again, sdpa], FORCED_ON)
    run_sliding(router)
    assert sum(router.counts.failures.values()) == 1


@pytest.mark.parametrize(
    ("library", "word"),
    [
        pytest.param(Full(), "out of memory", id="full"),
        pytest.param(CannotBeLoaded, NOT_STARTED, id="cannot be loaded", marks=pytest.mark.slow),
    ],
)
def test_a_transient_failure_is_not_kept(
    library: Any, word: str, tmp_path: Path, children_find_the_stand_ins: None
) -> None:
    reason = backend_of(library, tmp_path / "verdicts").supports(PROBLEM)
    assert word in str(reason)
    assert not isinstance(reason, FailureReason), "a strict run goes on"
    assert not (tmp_path / "verdicts").exists()


def test_a_library_whose_limits_forbid_the_problem_is_not_probed(tmp_path: Path) -> None:
    flash = backend_of(StandIn(), tmp_path, lambda *_: pytest.fail("it was probed"))
    for changes in ({"d_k": 264}, {"dtype": torch.float64}):
        assert flash.probe_all(replace(PROBLEM, op="attention", **changes)) == []
    assert not list(tmp_path.iterdir())


def test_probing_again_tries_each_branch_and_layout(tmp_path: Path) -> None:
    asked = []

    def prober(library: Library, problem: Any, *_: Any) -> list[Outcome]:
        asked.append((problem.op, problem.layout, problem.window_or_stride, problem.n_keys))
        return [RIGHT]

    flash = backend_of(StandIn(), tmp_path, prober)
    flash.supports(replace(PROBLEM, batch=2))
    ((_, _, outcomes),) = flash.probe_all(replace(PROBLEM, op="attention"), block=8, stride=4, window=24)
    assert outcomes == [RIGHT], "the same call, once"
    sliding = [("sliding", layout, 24, 64) for layout in ("fixed", "varlen", "cached")]
    assert sorted(asked[1:]) == sorted([*sliding, ("compressed", "fixed", 4, 15), ("compressed", "varlen", 4, 15)])
    flash.supports(replace(PROBLEM, batch=2))
    assert len(asked) == 7, "the other verdict was discarded"


@pytest.mark.parametrize("error", [ValueError, AssertionError, OSError, KeyError, ZeroDivisionError, SystemError])
def test_whatever_a_library_raises_the_next_backend_runs(error: type[Exception], tmp_path: Path) -> None:
    class Failing(StandIn):
        def forward(self, call: Any) -> Any:
            raise error("bad head dim")

    router = Router([backend_of(Failing(), tmp_path, no_probe), sdpa], FORCED_ON)
    run_sliding(router)
    calls, failures = router.counts.as_dict().values()
    assert calls == {"sliding/sdpa": 1}
    assert any(error.__name__ in name for name in failures)
