"""A run that is asked to stop, or that an error ends, saves what is done, and soon."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import config_file, lines_of, losses, small_run
from waiting import wait_until

from nsa import cli
from nsa.data import Batch
from nsa.train import Trainer, components, run_stats
from nsa.train.guards import RunStopped, Signals, Watchdog
from nsa.train.run_stats import GpuNumbers
from nsa.train.step import StepResult


def ask(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    """The tests may have been started with SIGINT or SIGHUP ignored."""
    numbers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# Signals.


@given(st.lists(st.sampled_from([signal.SIGHUP, signal.SIGUSR1, signal.SIGINT]), max_size=6))
def test_only_the_second_interrupt_ends_the_process(numbers: list[signal.Signals]) -> None:
    """A closed terminal sends SIGHUP twice, and a scheduler's warning is followed by SIGTERM."""
    interrupts = 0
    with Signals() as signals:
        for number in numbers:
            interrupts += number == signal.SIGINT
            if interrupts == 2:
                with pytest.raises(KeyboardInterrupt):
                    ask(number)
                return
            ask(number)
        assert signals.received == (numbers[0].name if numbers else None)


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals() as signals:
        ask(signal.SIGHUP)
        assert signals.received is None
        ask(signal.SIGUSR1)
        assert signals.received == "SIGUSR1"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.fixture
def asked_while_sampling(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A signal comes at the start of every sample; how many tokens each had in the end."""
    lengths: list[int] = []
    real = components.generate

    def interrupted(*given: Any, **how: Any) -> torch.Tensor:
        ask()
        new = real(*given, **how)
        lengths.append(new.shape[1])
        return new

    monkeypatch.setattr(components, "generate", interrupted)
    return lengths


def test_a_sample_does_not_delay_a_stop(tmp_path: Path, asked_while_sampling: list[int]) -> None:
    trainer = Trainer(small_run(tmp_path, sample_every=3, sample_tokens=500))
    assert trainer.train() is None
    assert asked_while_sampling == [1]
    assert trainer.checkpoints.steps()[-1] == 3
    assert lines_of(tmp_path, "sample") == []


def test_finished_run_is_complete_when_its_sample_is_cut_short(tmp_path: Path, asked_while_sampling: list[int]) -> None:
    summary = Trainer(small_run(tmp_path, sample_tokens=500)).train()
    assert summary is not None
    assert asked_while_sampling == [1]
    assert (tmp_path / "model.json").is_file()
    assert len(lines_of(tmp_path, "end")) == 1


@pytest.mark.parametrize("step", [0, 3, 6])
@pytest.mark.parametrize(
    "often", [{"eval_every": 3}, {"eval_every": 0, "save_every": 3}], ids=lambda keys: str([*keys])
)
def test_a_validation_does_not_delay_a_stop_and_is_made_up_for(
    often: dict[str, int], step: int, tmp_path: Path
) -> None:
    config = small_run(tmp_path / "run", **often, eval_batches=40)
    trainer = Trainer(config)
    forwards = 0

    def note(module: Any, given: Any, y: Any) -> None:
        nonlocal forwards
        if trainer.done == step and not torch.is_grad_enabled():
            forwards += 1
            if forwards == 2:
                ask()

    trainer.model.register_forward_hook(note)
    assert trainer.train() is None
    # The second, and one to see whether the parameters can be saved.
    assert forwards == 3
    assert trainer.checkpoints.steps()[-1] == step
    again, whole = Trainer(config), Trainer(small_run(tmp_path / "whole", **often, eval_batches=40))
    assert again.train() is not None
    whole.train()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert lines_of(tmp_path / "run", "eval") == lines_of(tmp_path / "whole", "eval")
    assert again.checkpoints.best() == whole.checkpoints.best()


# Errors.


class Failing(Trainer):
    """Raises `error` at `place`, once four steps are done."""

    error: BaseException
    place: str

    def fails(self, place: str) -> None:
        if self.done == 4 and place == self.place:
            raise self.error

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        self.fails("before the update")
        return super().step(step, batches)


def failing(out: Path, error: BaseException, place: str) -> Failing:
    trainer = Failing(small_run(out, eval_every=4, sample_every=4, stats_every=4, save_every=100))
    trainer.error, trainer.place = error, place
    _, stats, validator, sampler, _ = trainer.components
    owners = {"log": (trainer.logger, "report"), "validation": (validator, "run"), "stats": (stats, "run")}
    owners["sample"] = (sampler, "generate")
    if place in owners:
        owner, name = owners[place]
        intact = getattr(owner, name)
        setattr(owner, name, lambda *given: (trainer.fails(place), intact(*given))[1])
    if place == "data":
        real = trainer.loader

        class Loader:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def __iter__(self) -> Iterator[Batch]:
                trainer.fails("data")
                return iter(real)

        trainer.loader = Loader()  # type: ignore[assignment]
    return trainer


PLACES = ("data", "before the update", "log", "validation", "stats", "sample")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "error", [Exception("no such token"), KeyError("x"), MemoryError("full"), RuntimeError("CUDA")]
)
def test_whatever_ends_the_run_costs_no_step(
    error: Exception, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = failing(tmp_path / "run", error, place)
    # What a tokenizer raises becomes one line.
    with pytest.raises(RunStopped if type(error) is Exception else type(error), match=str(error)):
        trainer.train()
    assert trainer.checkpoints.steps()[-1] == 4
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]
    assert capsys.readouterr().out.count("step 4 is saved") == 1
    trainer.place = ""
    assert Trainer(trainer.config).train() is not None
    Trainer(small_run(tmp_path / "whole")).train()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_half_an_update_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(small_run(tmp_path, save_every=2))
    real = trainer.update.optimizer.step

    def breaks() -> None:
        real()
        if trainer.done == 3:
            raise RuntimeError("the update broke off")

    monkeypatch.setattr(trainer.update.optimizer, "step", breaks)
    with pytest.raises(RuntimeError, match="broke off"):
        trainer.train()
    assert trainer.checkpoints.steps()[-1] == 2


def test_a_tokenizer_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Trainer.fetch

    def fetch(trainer: Trainer) -> list[Batch]:
        if trainer.done == 2:
            monkeypatch.setattr(type(trainer.loader), "__next__", lambda loader: refuse())
        return real(trainer)

    def refuse() -> None:
        raise Exception("no such token")

    monkeypatch.setattr(Trainer, "fetch", fetch)
    file = config_file(tmp_path, small_run(tmp_path / "run"))
    assert cli.main(["train", "--config", file, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr()
    assert "no such token" in said.err
    assert said.err.count("\n") == 1
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir()


# The watchdog.


@pytest.mark.parametrize("error", [KeyError("gone"), UnicodeError("a name"), MemoryError()])
def test_the_watchdog_outlives_what_it_asks(error: Exception, tmp_path: Path) -> None:
    def fails() -> str:
        raise error

    path = tmp_path / "dog.txt"
    with Watchdog(path, 0.1, describe=fails, rescue=fails) as dog:
        first = dog.thread
        wait_until(lambda: path.is_file() and path.read_text().count("rescue failed") == 2)
        dog.beat()
        assert dog.thread is first
    assert repr(error) in path.read_text()


def test_the_watchdog_writes_names_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "dog.txt"
    dog = Watchdog(path, 60, describe=lambda: os.fsdecode(b"caf\xe9.txt"), rescue=lambda: "saved")
    dog.report_stall(60)
    assert path.read_text().endswith("saved\n\n")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watchdog_that_died_is_reported_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ends_the_thread() -> str:
        raise SystemExit

    with Watchdog(tmp_path / "dog.txt", 0.1, describe=ends_the_thread, rescue=str) as dog:
        first = dog.thread
        assert first is not None
        wait_until(lambda: not first.is_alive())
        dog.describe = lambda: "here"
        dog.beat()
        assert capsys.readouterr().err.count("[watchdog]") == 1
        wait_until(lambda: (tmp_path / "dog.txt").is_file() and "here" in (tmp_path / "dog.txt").read_text())


def test_a_watchdog_of_any_patience_lives(tmp_path: Path) -> None:
    with Watchdog(tmp_path / "dog.txt", 1e300, describe=str, rescue=str) as dog:
        assert dog.thread is not None
        dog.thread.join(0.2)
        assert dog.thread.is_alive()


def test_a_run_does_not_depend_on_its_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "nsa-watchdog":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    assert Trainer(small_run(tmp_path)).train() is not None
    assert capsys.readouterr().err.count("can't start new thread") == 1


# What a run holds and logs.


def test_batches_are_not_held_until_the_next_log_step(tmp_path: Path) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Counting(Trainer):
        def step(self, step: int, batches: list[Batch]) -> StepResult:
            if step == 5:
                with torch.no_grad():
                    self.model.norm.weight[0] = float("nan")
            seen.extend(weakref.ref(batch.tokens) for batch in batches)
            alive.append(sum(each() is not None for each in seen))
            return super().step(step, batches)

    with pytest.raises(RunStopped):
        Counting(small_run(tmp_path, steps=20, log_every=1000, max_skips=15)).train()
    # Those of this step, and those of the one before, which the watchdog would describe.
    assert max(alive) <= 2
    assert len(list((tmp_path / "skipped").iterdir())) == 15


@pytest.mark.parametrize("missing", ["package", "driver", "nothing"])
def test_why_gpu_util_is_missing_is_logged_once(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def find(name: str) -> Any:
        if missing == "package":
            raise ModuleNotFoundError(name)
        return SimpleNamespace(NVMLError=NVMLError)

    def utilization(device: torch.device) -> int:
        if missing == "driver":
            raise NVMLError("Driver/library version mismatch")
        return 50

    monkeypatch.setattr(run_stats, "import_module", find)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    said: list[str] = []
    gpu = GpuNumbers(torch.device("cuda"), said.append)
    found = [gpu.numbers() for _ in range(3)]
    if missing == "nothing":
        assert found == [{"memory_gib": 1.0, "gpu_util": 0.5}] * 3
        assert said == []
    else:
        assert found == [{"memory_gib": 1.0}] * 3
        (text,) = said
        assert {"package": "nvidia-ml-py", "driver": "mismatch"}[missing] in text
