"""What a run does when something goes wrong: it says so, keeps what it has, and goes on from there."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training import config_file, lines_of, losses, small_run
from waiting import PATIENCE_S, wait_until

from nsa import cli
from nsa.data import Batch
from nsa.data.config import DataConfig
from nsa.train import TrainConfig, Trainer, components, loop, run_info
from nsa.train.guards import RunStopped, Signals, Watchdog, branch_profile, load_batches, save_batches
from nsa.train.run_folder import RunLog
from nsa.train.step import StepResult


class Interfering(Trainer):
    """`before[step]` is called before that step, with the trainer."""

    before: dict[int, Any]

    def step(self, step: int, batches: list[Batch]) -> StepResult:
        self.before.get(step, lambda trainer: None)(self)
        return super().step(step, batches)


def interfering(config: Any, before: dict[int, Any]) -> Interfering:
    trainer = Interfering(config)
    trainer.before = before
    return trainer


def spoil(trainer: Trainer) -> None:
    """The next forward is not finite."""

    def once(module: Any, args: Any, y: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return y * float("nan")

    handle = trainer.model.norm.register_forward_hook(once)


def test_a_step_that_is_not_finite_is_skipped_counted_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[Batch]] = []

    def spoil_and_note(trainer: Trainer) -> None:
        seen.append(trainer.fetched)
        spoil(trainer)

    trainer = interfering(small_run(tmp_path, accum=2), {2: spoil_and_note})
    summary = trainer.train()
    assert summary is not None
    assert summary.skipped == 1
    assert [record["step"] for record in lines_of(tmp_path, "step") if "skipped" in record] == [3]
    assert "[skip] step 3: loss nan" in capsys.readouterr().out
    kept = load_batches(tmp_path / "skipped" / "step_3.safetensors")
    assert len(kept) == 2
    for one, other in zip(kept, seen[0], strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.targets, other.targets)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_batches_for_replay_keep_their_documents(tmp_path: Path) -> None:
    batch = Batch(torch.arange(6)[None], torch.arange(6)[None], torch.tensor([0, 2, 6], dtype=torch.int32))
    (again,) = load_batches(save_batches(tmp_path / "x" / "step_1.safetensors", [batch]))
    assert again.cu_seqlens is not None
    assert all(torch.equal(a, b) for a, b in zip(again, batch, strict=True))


def test_too_many_in_a_row_stop_the_run_with_the_last_good_state(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    Trainer(small_run(whole)).train()
    run = tmp_path / "run"
    before = dict.fromkeys(range(3, 6), spoil)
    config = small_run(run, max_skips=3, steps=20, log_every=1)
    with pytest.raises(RunStopped, match=r"3 steps .*not finite.* step 6\b"):
        interfering(config, before).train()
    # Three good steps, three that changed nothing: what follows is what would have followed the three.
    good = interfering(small_run(tmp_path / "good", steps=3), {})
    good.train()
    again = Trainer(config)
    assert again.checkpointer.resume() == 6
    for name, x in again.model.state_dict().items():
        assert torch.equal(x, good.model.state_dict()[name])
    again.loader.close()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what it puts in the background with SIGINT ignored, nohup with SIGHUP, and the tests with it."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signal_saves_and_the_next_start_resumes_exactly(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(number) for number in Signals.NUMBERS]
    Trainer(small_run(tmp_path / "whole", kind="nsa")).train()
    run = small_run(tmp_path / "run", kind="nsa")
    assert interfering(run, {2: lambda trainer: os.kill(os.getpid(), number)}).train() is None
    assert f"[stop] {number.name}: step 3 is saved" in capsys.readouterr().out
    assert [signal.getsignal(number) for number in Signals.NUMBERS] == handlers
    summary = Trainer(run).train()
    assert summary is not None
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert lines_of(tmp_path / "run", "eval") == lines_of(tmp_path / "whole", "eval")


def test_a_signal_before_the_first_step_is_heard_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data may be opened for minutes."""
    handlers = [signal.getsignal(number) for number in Signals.NUMBERS]
    open_data = Trainer.open_data

    def slowly(trainer: Trainer, split: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return open_data(trainer, split)

    monkeypatch.setattr(Trainer, "open_data", slowly)
    assert cli.main(["train", "--config", config_file(tmp_path, small_run(tmp_path / "run"))]) == 0
    assert re.search(r"\[stop\] .*first step", capsys.readouterr().out)
    assert [signal.getsignal(number) for number in Signals.NUMBERS] == handlers


@pytest.mark.usefixtures("interruptible")
def test_a_second_signal_is_not_held_back() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_what_a_launcher_passes_on_is_no_second_signal() -> None:
    with Signals(forwarded=True) as signals:
        signals.echo_s = PATIENCE_S
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == "SIGINT"
        signals.echo_s = 0.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    holds = (
        "import sys; from pathlib import Path; from nsa.files import locked\n"
        "with locked(Path(sys.argv[1]), 'out'): print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"out is .*process"):
            Trainer(small_run(tmp_path)).train()
        other.kill()
    assert Trainer(small_run(tmp_path)).train() is not None, "the lock goes with its process"


def test_what_comes_after_too_many_skips_is_written_down(tmp_path: Path) -> None:
    """It is part of what is saved: there was no log step in between."""
    before = dict.fromkeys((1, 2, 3, 7), spoil)
    run = interfering(small_run(tmp_path, max_skips=3, steps=10, log_every=100), before)
    with pytest.raises(RunStopped, match=r"3 steps .*not finite.* step 4: step 10 is saved"):
        run.train()
    assert list(losses(tmp_path)) == list(range(1, 11))
    assert sorted(path.name for path in (tmp_path / "skipped").iterdir()) == [
        f"step_{step}.safetensors" for step in (2, 3, 4, 8)
    ]


def test_full_disk_for_the_log_names_the_file_and_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: RunLog, step: int, **values: object) -> None:
        raise OSError(errno.ENOSPC, "heartbeat.jsonl: No space left on device")

    monkeypatch.setattr(RunLog, "heartbeat", full)
    with pytest.raises(OSError, match=r"heartbeat\.jsonl"):
        Trainer(small_run(tmp_path, log_every=2)).train()
    said = capsys.readouterr().out
    assert "[stop] [Errno 28] heartbeat.jsonl: No space left on device: step 1 is saved" in said


def test_a_batch_that_cannot_be_kept_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "skipped").write_text("a file where the folder should be")
    assert interfering(small_run(tmp_path, log_every=1), {2: spoil}).train() is not None
    assert re.search(r"batch .*not .*: .*skipped", capsys.readouterr().out)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    first = Trainer(config).train()
    again = Trainer(config).train()
    assert first is not None
    assert again is not None
    assert (again.loss_start, again.loss_end, again.sample) == (first.loss_start, first.loss_end, first.sample)
    assert len(lines_of(tmp_path, "step")) == 6


def test_data_that_fails_costs_nothing_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(small_run(tmp_path))
    real = trainer.loader

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def __iter__(self) -> Iterator[Batch]:
            if trainer.done == 4:
                raise OSError("the disk is gone")
            return iter(real)

    monkeypatch.setattr(trainer, "loader", Failing())
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.train()
    assert trainer.checkpoints.steps()[-1] == 4
    assert [line["step"] for line in lines_of(tmp_path, "step")] == [1, 2, 3, 4]


@pytest.mark.usefixtures("interruptible")
def test_a_signal_ends_the_wait_for_data_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(small_run(tmp_path))
    real = trainer.loader

    class Hanging:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def __iter__(self) -> Iterator[Batch]:
            if trainer.done == 3:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
                time.sleep(PATIENCE_S)
            return iter(real)

    monkeypatch.setattr(trainer, "loader", Hanging())
    began = time.monotonic()
    assert trainer.train() is None
    assert time.monotonic() - began < PATIENCE_S
    assert trainer.checkpoints.steps()[-1] == 3
    assert [line["step"] for line in lines_of(tmp_path, "step")] == [1, 2, 3]


def test_a_start_that_fails_is_not_what_the_run_goes_on_as(tmp_path: Path) -> None:
    config = small_run(tmp_path, kind="nsa")
    Trainer(replace(config, steps=4)).train()
    before = (tmp_path / "config.yaml").read_text()
    wrong = replace(config, model=config.model.with_backend("triton"))
    with pytest.raises(ValueError, match=r"supports .*backend='triton'"):
        Trainer(wrong).train()
    assert (tmp_path / "config.yaml").read_text() == before
    assert Trainer(config).train() is not None
    assert (tmp_path / "config.yaml").read_text() != before


def test_a_run_that_breaks_at_once_goes_on_from_its_start(tmp_path: Path) -> None:
    def spoil(trainer: Trainer) -> None:
        with torch.no_grad():
            trainer.model.norm.weight.fill_(float("nan"))

    config = small_run(tmp_path / "run", max_skips=2, save_every=100)
    with pytest.raises(RunStopped, match=r"good .*step 0;"):
        interfering(config, {1: spoil}).train()
    Trainer(config).train()
    Trainer(small_run(tmp_path / "whole")).train()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert [line["step"] for line in lines_of(tmp_path / "run", "eval")] == [0, 6]


def test_a_model_that_is_broken_is_not_kept_as_the_last_good_one(tmp_path: Path) -> None:
    config = small_run(tmp_path, save_every=2, log_every=1, max_skips=2, steps=20)
    trainer = Trainer(config)
    step = trainer.step

    def spoil(number: int, batches: list[Batch]) -> StepResult:
        if number == 3:
            with torch.no_grad():
                trainer.model.norm.weight.fill_(float("nan"))
        return step(number, batches)

    trainer.step = spoil  # type: ignore[method-assign]
    with pytest.raises(RunStopped, match=r"finite loss.*: .*good .*step 2;"):
        trainer.train()
    assert trainer.checkpoints.steps()[-1] == 2


def broken_from_step_4(config: TrainConfig) -> Interfering:
    """Its parameters give no finite loss from then on; the checkpoint of step 4 is good."""

    def spoil(trainer: Trainer) -> None:
        with torch.no_grad():
            trainer.model.norm.weight.fill_(float("nan"))

    return interfering(replace(config, save_every=2, log_every=1, max_skips=8), {4: spoil})


def test_a_broken_model_is_neither_kept_nor_exported_at_the_end(tmp_path: Path) -> None:
    trainer = broken_from_step_4(small_run(tmp_path))
    with pytest.raises(RunStopped, match=r"exported: step 6 .*not saved.*good .*step 4\."):
        trainer.train()
    assert trainer.checkpoints.steps()[-1] == 4
    assert not (tmp_path / "model.json").exists()


def test_a_broken_model_is_not_kept_when_a_signal_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = broken_from_step_4(small_run(tmp_path, steps=20))
    trainer.before[6] = lambda trainer: os.kill(os.getpid(), signal.SIGTERM)
    assert trainer.train() is None
    assert trainer.checkpoints.steps()[-1] == 4
    assert re.search(r"\[stop\] SIGTERM: step 7 .*not saved, ", capsys.readouterr().out)


def test_a_broken_model_is_not_what_the_watchdog_saves(tmp_path: Path) -> None:
    trainer = Trainer(small_run(tmp_path))
    with torch.no_grad():
        trainer.model.norm.weight[0] = float("nan")
    assert re.match("no checkpoint: .*not finite", trainer.checkpointer.rescue())
    assert trainer.checkpoints.steps() == []
    trainer.loader.close()


def test_a_broken_model_is_not_sampled_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = broken_from_step_4(small_run(tmp_path, steps=8, sample_every=3))
    with pytest.raises(RunStopped):
        trainer.train()
    assert [line["step"] for line in lines_of(tmp_path, "sample")] == [3]
    assert re.search(r"\[sample\] none .*step 6: .*finite", capsys.readouterr().out)


@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_a_run_on_one_branch_goes_on(branch: str, tmp_path: Path) -> None:
    config = small_run(tmp_path, kind="nsa", steps=2)
    config = replace(config, model=replace(config.model, attn=replace(config.model.attn, force_branch=branch)))
    trainer = Trainer(config)
    trainer.train()
    # DDP waits for the gradient of every parameter that asks for one.
    assert len(trainer.update.optimizer.state) == len(trainer.update.parameters)
    Trainer(replace(config, steps=3)).train()
    assert list(losses(tmp_path)) == [1, 2, 3]


def test_every_checkpoint_has_a_loss_to_be_compared_by(tmp_path: Path) -> None:
    trainer = Trainer(small_run(tmp_path, eval_every=4, save_every=3))
    trainer.train()
    assert all(trainer.checkpoints.loss(step) is not None for step in trainer.checkpoints.steps())


def test_noise_does_not_stand_in_for_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    real = run_info.open_loader

    def note(data: DataConfig, **kwargs: Any) -> Any:
        asked[kwargs["split"]] = data.on_stall
        return real(data, **kwargs)

    monkeypatch.setattr(run_info, "open_loader", note)
    config = small_run(tmp_path)
    Trainer(replace(config, data=replace(config.data, on_stall="synthetic"))).loader.close()
    assert asked == {"train": "synthetic", "valid": "retry"}


def test_a_short_run_is_judged_at_its_end(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="at least 1,000,000,000"):
        Trainer(small_run(tmp_path, kind="nsa", min_tokens_per_s=1e9)).train()


def test_the_watchdog_writes_down_where_everyone_is_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(small_run(tmp_path, kind="nsa", watchdog_s=0.3))
    real = trainer.fetch

    def slow(*given: Any) -> list[Batch] | None:
        stalled = tmp_path / "watchdog.txt"
        if trainer.done == 3:
            wait_until(lambda: stalled.is_file() and "step 3 is saved" in stalled.read_text())
        return real(*given)

    monkeypatch.setattr(trainer, "fetch", slow)
    trainer.train()
    text = (tmp_path / "watchdog.txt").read_text()
    assert "no step " in text
    assert "steps done: 3" in text
    assert "'tokens': (2, 32)" in text
    assert "'sliding': 'sdpa'" in text
    assert "Current thread" in text
    assert "in slow" in text
    assert re.search(f"step 3 is saved .*{tmp_path / 'checkpoints'}", text)
    assert "[watchdog] no step " in capsys.readouterr().err


@pytest.mark.parametrize("phase", ["resume", "run", "finish"])
def test_the_watchdog_watches_from_the_first_file_to_the_last(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(small_run(tmp_path, steps=1, watchdog_s=0.3))
    owner: Any = {"resume": trainer.checkpointer, "run": trainer.validator, "finish": trainer}[phase]
    intact, stalled = getattr(owner, phase), tmp_path / "watchdog.txt"

    def slowly() -> Any:
        wait_until(lambda: stalled.is_file() and "in slowly" in stalled.read_text())
        return intact()

    monkeypatch.setattr(owner, phase, slowly)
    assert trainer.train() is not None


def test_the_watchdog_watches_the_data_being_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slowly(config: TrainConfig, ranks: object) -> None:
        wait_until(lambda: stalled.is_file() and "no checkpoint: " in stalled.read_text())
        raise RunStopped("enough")

    stalled = tmp_path / "run" / "watchdog.txt"

    monkeypatch.setattr(loop, "Trainer", slowly)
    file = config_file(tmp_path, small_run(tmp_path / "run", watchdog_s=0.3))
    assert cli.main(["train", "--config", file, "--out", str(tmp_path / "run")]) == 1
    assert "not started" in stalled.read_text()
    assert "in slowly" in stalled.read_text()
    assert "[watchdog] no checkpoint: " in capsys.readouterr().err


def test_nobody_alone_blames_another_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: TrainConfig, ranks: object) -> None:
        raise RuntimeError("the source said: Connection reset")

    monkeypatch.setattr(loop, "Trainer", fail)
    file = config_file(tmp_path, small_run(tmp_path / "run"))
    with pytest.raises(RuntimeError, match="the source said"):
        cli.main(["train", "--config", file, "--out", str(tmp_path / "run")])


def test_the_watchdog_names_the_file_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text " * 200)
    data = DataConfig(source="text", path=str(tmp_path / "a.txt"), prefetch=False)
    trainer = Trainer(small_run(tmp_path / "run", data=data))
    began, release = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        began.set()
        release.wait(PATIENCE_S)
        raise OSError("released")

    monkeypatch.setattr(trainer.loader.pools.documents, "read", hang)

    def wait() -> None:
        with pytest.raises(OSError, match="released"):
            next(trainer.loader)

    thread = threading.Thread(target=wait)
    thread.start()
    assert began.wait(PATIENCE_S)
    time.sleep(1.1)
    described = trainer.describe()
    release.set()
    thread.join()
    waited = r"[1-9]\d* s .*, [1-9]\d* .*next batch"
    assert re.search(rf"data: text .*, last seen reading .*a\.txt; {waited}", described)


def test_the_watchdog_saves_no_half_a_step(tmp_path: Path) -> None:
    trainer = Trainer(small_run(tmp_path))
    with trainer.checkpointer.changing:
        assert re.match("no checkpoint: .*state", trainer.checkpointer.rescue())
    assert trainer.checkpoints.steps() == []
    assert "step 0 is saved" in trainer.checkpointer.rescue()
    trainer.loader.close()


def test_the_watchdog_is_gone_when_the_run_is(tmp_path: Path) -> None:
    """A process that ended with it awake died of SIGABRT."""
    for _ in range(20):
        with Watchdog(tmp_path / "watchdog.txt", 600.0, describe=str, rescue=str) as watchdog:
            pass
        assert not watchdog.thread.is_alive()


@pytest.mark.slow
def test_the_watchdog_sleeps_while_all_is_well(tmp_path: Path) -> None:
    rescues: list[str] = []
    path = tmp_path / "dog.txt"
    with Watchdog(path, 1.5, describe=lambda: "here", rescue=lambda: rescues.append("x") or "saved") as dog:
        longest = 0.0
        for _ in range(16):
            time.sleep(0.1)
            longest = max(longest, time.monotonic() - dog.last)
            dog.beat()
        # The machine may have stood still for that long.
        assert not rescues or max(longest, time.monotonic() - dog.last) >= dog.seconds
        wait_until(lambda: rescues and "saved" in path.read_text())
    assert "here" in path.read_text()
    dog.thread.join(PATIENCE_S)
    assert "nsa-watchdog" not in [thread.name for thread in threading.enumerate()]


def test_a_full_disk_does_not_keep_the_watchdog_from_saving(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").touch()
    dog = Watchdog(tmp_path / "full" / "dog.txt", 60, describe=lambda: "the last batches", rescue=lambda: "saved")
    dog.report_stall(60)
    said = capfd.readouterr().err
    assert " 60 s; " in said
    assert re.search(r"dog\.txt .*: \[Errno", said)
    assert "the last batches" in said
    assert "in test_a_full_disk_does_not_keep_the_watchdog_from_saving" in said
    assert said.endswith("[watchdog] saved\n")


def test_a_run_that_is_too_slow_stops_with_its_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "SMOKE_STEPS", 3)
    config = small_run(tmp_path / "slow", kind="nsa", steps=8, min_tokens_per_s=1e9)
    with pytest.raises(RunStopped, match="at least 1,000,000,000") as stopped:
        Trainer(config).train()
    for op in ("compressed", "select_blocks", "selected", "sliding", "combine"):
        assert op in str(stopped.value)
    assert len(lines_of(tmp_path / "slow", "step")) == 4
    fast = Trainer(small_run(tmp_path / "fast", kind="nsa", steps=5, min_tokens_per_s=0.001))
    assert fast.train() is not None


def test_a_dense_profile_names_its_attention(tmp_path: Path) -> None:
    trainer = Trainer(small_run(tmp_path))
    text = branch_profile(trainer.model, trainer.validator.batches[0], torch.float32)
    assert "scaled_dot_product_attention" in text
    assert all(p.grad is None for p in trainer.model.parameters())
    trainer.loader.close()
