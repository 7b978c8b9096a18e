"""A run's folder: nothing in it is lost, whoever moves it, and nothing of others is touched."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from training import config_file, lines_of, losses, small_run

from nsa import cli
from nsa.data import Batch
from nsa.model import load_model
from nsa.train import Trainer
from nsa.train.guards import RunStopped, Signals
from nsa.train.run_info import read_run_info
from nsa.train.step import StepResult

Change = Callable[[Trainer], None]


def changed_before(config: Any, changes: dict[int, Change]) -> Trainer:
    """A run in which `changes[step]` happens before that step."""

    class Changed(Trainer):
        def step(self, step: int, batches: list[Batch]) -> StepResult:
            if step in changes:
                self.checkpoints.wait()
                changes[step](self)
            return super().step(step, batches)

    return Changed(config)


# Resuming without a checkpoint.


@pytest.mark.parametrize("left", ["no folder", "an empty one", "half a checkpoint", "a file"])
@pytest.mark.parametrize("flag", ["--resume", "--out"])
def test_resuming_without_checkpoint_is_an_error_and_keeps_files(
    flag: str, left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    Trainer(small_run(run)).train()
    shutil.rmtree(run / "checkpoints")
    if left == "a file":
        (run / "checkpoints").write_text("")
    elif left != "no folder":
        (run / "checkpoints" / ("step_3.tmp" if left == "half a checkpoint" else "")).mkdir(parents=True)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    config = ["--config", config_file(tmp_path, small_run(run))]
    assert cli.main(["train", flag, str(run), *(config if flag == "--out" else [])]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{flag.removeprefix('--') if flag == '--out' else flag} is {str(run)!r}" in error
    assert f"--out {run}" in error, "what to do"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_run_without_checkpoints_restarts_once_metrics_are_moved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(small_run(run)).train()
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").rename(tmp_path / "old.jsonl")
    config = config_file(tmp_path, small_run(run))
    assert cli.main(["train", "--config", config, "--out", str(run)]) == 0
    assert list(losses(run)) == list(range(1, 7))


def test_run_killed_before_its_first_step_starts_again(tmp_path: Path) -> None:
    run = tmp_path / "run"

    class Killed(Trainer):
        def step(self, step: int, batches: list[Batch]) -> StepResult:
            raise SystemExit(137)

    with pytest.raises(SystemExit):
        Killed(small_run(run)).train()
    assert lines_of(run, "eval")
    assert Trainer(small_run(run)).train() is not None


def test_resume_finds_a_checkpoint_that_was_being_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Trainer(small_run(run)).train()
    (run / "checkpoints" / "step_6").rename(run / "checkpoints" / "step_6.replaced.tmp")
    assert cli.main(["train", "--resume", str(run), "--steps", "7"]) == 0
    assert list(losses(run)) == list(range(1, 8))


# The folder changes during the run.


def test_deleted_run_folder_stops_the_run_and_loses_no_step(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    config = small_run(run, log_every=1, save_every=2)
    trainer = changed_before(config, {4: lambda trainer: shutil.rmtree(run)})
    with pytest.raises(RunStopped, match="step 5 is saved"):
        trainer.train()
    assert read_run_info(run)["hash"] == config.hash
    assert cli.main(["train", "--resume", str(run)]) == 0
    Trainer(small_run(whole)).train()
    assert losses(run) == {6: losses(whole)[6]}


def test_a_folder_that_is_moved_keeps_what_it_has(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    trainer = changed_before(small_run(run, log_every=1, save_every=2), {4: lambda trainer: run.rename(moved)})
    with pytest.raises(RunStopped, match="step 5 is saved"):
        trainer.train()
    assert list(losses(moved)) == [1, 2, 3, 4]
    assert Trainer(small_run(moved)).checkpointer.resume() == 4
    assert Trainer(small_run(run)).checkpointer.resume() == 5


@pytest.mark.parametrize("name", ["metrics.jsonl", "heartbeat.jsonl"])
@pytest.mark.parametrize("replaced", [False, True])
def test_deleted_or_replaced_log_is_rewritten_and_reported(
    name: str, replaced: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(trainer: Trainer) -> None:
        (tmp_path / name).unlink()
        if replaced:
            (tmp_path / name).write_text('{"kind": "theirs"}\n')

    assert changed_before(small_run(tmp_path, log_every=1), {3: lose}).train() is not None
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[log]")]
    assert any(str(tmp_path / name) in line and "step 4" in line for line in said)
    lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert [line["kind"] for line in lines if "step" not in line and line.get("kind") != "end"] == ["theirs"] * replaced
    assert min(line["step"] for line in lines if "step" in line) == 4
    assert max(line["step"] for line in lines if "step" in line) == 6


@pytest.mark.parametrize("names", [("config.yaml",), ("run.json",), ("config.yaml", "run.json")])
def test_a_deleted_config_is_written_again(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: dict[str, bytes] = {}

    def lose(trainer: Trainer) -> None:
        kept.update({name: (tmp_path / name).read_bytes() for name in names})
        for name in names:
            (tmp_path / name).unlink()

    assert changed_before(small_run(tmp_path, log_every=1), {3: lose}).train() is not None
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[log]")]
    assert len(said) == 1
    assert all(str(tmp_path / name) in said[0] for name in names)
    assert {name: (tmp_path / name).read_bytes() for name in names} == kept
    assert cli.main(["train", "--resume", str(tmp_path)]) == 0


def test_commands_printed_for_a_folder_with_spaces_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "it's a $run"

    def printed(start: str) -> list[str]:
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(start)]
        return shlex.split(line.removeprefix(f"{start} nsa"))

    stop: dict[int, Change] = {3: lambda trainer: trainer.signals.handle(signal.SIGTERM, None)}
    assert changed_before(small_run(run), stop).train() is None
    assert cli.main(printed("resume with:")) == 0
    assert cli.main([*printed("generate with:"), "--max-new-tokens", "1"]) == 0
    deleted = changed_before(small_run(run, steps=9, log_every=1), {7: lambda trainer: shutil.rmtree(run)})
    with pytest.raises(RunStopped) as stopped:
        deleted.train()
    assert cli.main(shlex.split(str(stopped.value).partition("Resume with: nsa")[2])) == 0


def test_a_lock_that_is_deleted_alone_is_taken_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    code = f"import fcntl; fcntl.lockf(open({str(run / '.lock')!r}, 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    others = []

    def another_locks_it(trainer: Trainer) -> None:
        others.append(subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode)

    changes: dict[int, Change] = {3: lambda trainer: (run / ".lock").unlink(), 4: another_locks_it}
    assert changed_before(small_run(run, log_every=1), changes).train() is not None
    assert others == [1], "it is held"
    assert str(run / ".lock") in capsys.readouterr().out
    assert list(losses(run)) == list(range(1, 7))


def test_a_folder_that_another_run_has_taken_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def take(trainer: Trainer) -> None:
        shutil.rmtree(run)
        run.mkdir()
        (run / ".lock").touch()
        (run / "config.yaml").write_text("theirs")

    with pytest.raises(RunStopped, match=r"step 5 .*not saved"):
        changed_before(small_run(run, log_every=1), {4: take}).train()
    assert sorted(path.name for path in run.iterdir()) == [".lock", "config.yaml"]
    assert (run / "config.yaml").read_text() == "theirs"


def test_folder_deleted_after_the_last_save_is_saved_again(tmp_path: Path) -> None:
    """The step is saved already, where nobody can find it."""
    trainer = Trainer(small_run(tmp_path / "run", save_every=1))
    trainer.advance(trainer.fetch())
    trainer.checkpointer.save_if_finite()
    shutil.rmtree(tmp_path / "run")
    trainer.checkpointer.save_if_finite()
    assert trainer.checkpoints.steps()[-1] == 1
    trainer.loader.close()


@pytest.mark.parametrize("during", ["validation", "sample"])
def test_a_folder_deleted_after_the_last_step_can_be_resumed(
    during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    trainer = Trainer(small_run(run))
    owner, name = (trainer.validator, "run") if during == "validation" else (trainer.sampler, "generate")
    real = getattr(owner, name)

    def deleting(*args: Any) -> Any:
        result = real(*args)
        if trainer.done == trainer.config.steps:
            shutil.rmtree(run)
        return result

    monkeypatch.setattr(owner, name, deleting)
    with pytest.raises(RunStopped, match="step 6 is saved"):
        trainer.train()
    assert cli.main(["train", "--resume", str(run)]) == 0


# Good checkpoints.


def without_gradients(trainer: Trainer) -> None:
    """From now on the loss is finite and its gradients are not."""
    trainer.model.norm.weight.register_hook(lambda grad: grad * float("nan"))


def test_steps_with_non_finite_gradients_keep_the_last_good_one(tmp_path: Path) -> None:
    config = small_run(tmp_path, steps=20, save_every=1, log_every=1, keep=2, max_skips=6)
    trainer = changed_before(config, {3: without_gradients})
    with pytest.raises(RunStopped, match=r"step 9 is saved.*good .*step 3;"):
        trainer.train()
    checkpoints = trainer.checkpoints
    assert checkpoints.last_good() == 3
    assert {2, 3} <= set(checkpoints.steps()), "as many as are kept"
    assert checkpoints.steps()[-1] == 9, "what is newest may recover"
    assert checkpoints.best() in (0, 1, 2, 3)
    # Nothing was learned in between, and nothing is lost.
    assert torch.equal(*(state(tmp_path, step) for step in (3, 9)))


@pytest.mark.parametrize("steps", [6, 8])
def test_resuming_makes_no_checkpoint_good(steps: int, tmp_path: Path) -> None:
    """A run that ends, or is stopped, among steps that were skipped, and is started again."""
    config = small_run(tmp_path, steps=6, save_every=3, keep=1)
    assert changed_before(config, {4: without_gradients}).train() is not None
    trainer = Trainer(small_run(tmp_path, steps=steps, save_every=3, keep=1))
    stopped = Signals()
    stopped.received = "SIGTERM" if steps > 6 else None
    trainer.train(stopped)
    assert trainer.checkpoints.steps()[-1] == 6
    assert trainer.checkpoints.last_good() == 3


def test_the_watchdog_saves_skipped_steps_as_not_good(tmp_path: Path) -> None:
    saved: list[str] = []
    changes: dict[int, Change] = {3: without_gradients, 5: lambda t: saved.append(t.checkpointer.rescue())}
    trainer = changed_before(small_run(tmp_path, save_every=0, log_every=100), changes)
    trainer.checkpointer.changing = threading.RLock()  # type: ignore[assignment]  # as between two steps
    assert trainer.train() is not None
    assert len(saved) == 1
    assert re.fullmatch(f"step 5 .*{trainer.checkpoints.folder}", saved[0])
    assert not trainer.checkpoints.is_good(5)


def state(run: Path, step: int) -> torch.Tensor:
    trainer = Trainer(small_run(run))
    trainer.checkpoints.steps = lambda: [step]  # type: ignore[method-assign]
    trainer.checkpoints.load(trainer.model, trainer.update.optimizer)
    trainer.loader.close()
    return trainer.model.norm.weight.detach().clone()


def test_one_step_without_finite_gradients_is_forgotten(tmp_path: Path) -> None:
    def once(trainer: Trainer) -> None:
        handle = trainer.model.norm.weight.register_hook(lambda grad: (handle.remove(), grad * float("nan"))[1])

    trainer = changed_before(small_run(tmp_path, save_every=1, log_every=1, keep=2), {3: once})
    assert trainer.train() is not None
    assert trainer.skips.total == 1
    assert 4 not in trainer.checkpoints.steps()
    assert trainer.checkpoints.last_good() == 6


def test_nan_validation_is_reported_at_once_and_saving_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: dict[int, str] = {}

    def spoil_validation(trainer: Trainer) -> None:
        def hook(module: Any, args: Any, y: torch.Tensor) -> torch.Tensor:
            return y if torch.is_grad_enabled() else y * float("nan")

        trainer.model.norm.register_forward_hook(hook)

    config = small_run(tmp_path, steps=10, save_every=2, log_every=1, keep=2)
    changes: dict[int, Change] = {4: spoil_validation}
    changes[6] = lambda trainer: said.update({6: capsys.readouterr().out})
    changes[9] = lambda trainer: said.update({9: str(trainer.checkpoints.steps())})
    with pytest.raises(RunStopped, match=r"exported: step 10 is saved.*good .*step 4\."):
        changed_before(config, changes).train()
    assert re.search(r"\[eval\] step 6: .* nan", said[6])
    assert "[save] step 6 is saved" in said[6]
    assert said[9] == "[2, 4, 8]", "the good ones, and the newest"
    assert [line["step"] for line in lines_of(tmp_path, "eval") if line["loss"] == "nan"] == [6, 8, 10]
    assert Trainer(config).checkpointer.resume() == 10


# The export.


def test_the_export_replaces_its_own_files_and_no_others(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    mine = (
        *("model.py", "model.onnx", "model.gguf", "model.pt", "model.safetensors.bak", "export.txt"),
        *("model.safetensors.tmp", "model.json.tmp", "config.yaml.tmp", "tokenizer.json.tmp", "report.html.tmp"),
    )

    def put(trainer: Trainer) -> None:
        for name in mine:
            (run / name).write_text(name)
        (run / "model.d").mkdir()
        elsewhere.mkdir()
        (elsewhere / "theirs").write_text("theirs")
        (run / "export.tmp").symlink_to(elsewhere)

    trainer = changed_before(small_run(run), {2: put})
    assert trainer.train() is not None
    assert {name: (run / name).read_text() for name in mine} == {name: name for name in mine}
    assert (run / "model.d").is_dir()
    assert [path.name for path in elsewhere.iterdir()] == ["theirs"]
    assert torch.equal(load_model(run).norm.weight, trainer.model.norm.weight)
    # And once more: these are its own.
    assert Trainer(small_run(run, steps=7)).train() is not None


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.json", "tokenizer.json", "run.json", "metrics.jsonl", "report.html"]
)
def test_folder_with_foreign_files_is_rejected_before_training(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "theirs"
    out.mkdir()
    (out / name).write_text("theirs")
    assert cli.main(["train", "--config", config_file(tmp_path, small_run(out)), "--out", str(out)]) == 2
    assert name in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == [name]


@pytest.mark.parametrize("beside", ["nothing", "a model"])
def test_a_config_of_the_user_in_the_folder_is_not_replaced(
    beside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "experiment"
    config = Path(config_file(out, small_run(out))).rename(out / "config.yaml")
    config.write_text("# Why these sizes\n" + config.read_text())
    if beside == "a model":
        (out / "model.safetensors").write_text("theirs")
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert cli.main(["train", "--config", str(config), "--out", str(out)]) == 2
    assert "config.yaml" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_start_killed_between_its_first_files_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.train.run_info.write_yaml", lambda *_: sys.exit(137))
    with pytest.raises(SystemExit):
        Trainer(small_run(tmp_path)).train()
    assert not (tmp_path / "config.yaml").exists()
    monkeypatch.undo()
    assert Trainer(small_run(tmp_path)).train() is not None


@pytest.mark.parametrize("name", [".lock", "heartbeat.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("again", [False, True])
def test_a_link_in_a_runs_folder_is_not_written_through(
    name: str, again: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    theirs.write_text("theirs")
    if again:
        Trainer(small_run(run)).train()
        (run / name).unlink()
    run.mkdir(exist_ok=True)
    (run / name).symlink_to(theirs)
    before = sorted(run.rglob("*"))
    config = config_file(tmp_path, small_run(run, steps=7))
    assert cli.main(["train", "--config", config, "--out", str(run)]) == 2
    assert name in capsys.readouterr().err
    assert theirs.read_text() == "theirs"
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("name", [".lock", "heartbeat.jsonl", "metrics.jsonl", "watchdog.txt"])
def test_link_made_after_the_check_is_not_written_through(name: str, tmp_path: Path) -> None:
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    theirs.write_text("theirs")
    trainer = Trainer(small_run(run, watchdog_s=0.01))
    run.mkdir()
    (run / name).symlink_to(theirs)
    with nullcontext() if name == "watchdog.txt" else pytest.raises(OSError, match=name):
        trainer.train()
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize("content", ["[]", "1", "", "[" * 100_000, '{"before": 1}', '{"environment": []}'])
def test_a_run_record_of_any_content_is_refused_in_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(small_run(tmp_path)).train()
    (tmp_path / "run.json").write_text(content)
    capsys.readouterr()
    assert cli.main(["train", "--resume", str(tmp_path), "--steps", "7"]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "run.json") in error
    assert error.count("\n") == 1


def test_the_record_of_a_start_is_json(tmp_path: Path) -> None:
    Trainer(small_run(tmp_path)).train()
    assert json.loads((tmp_path / "run.json").read_text()) == read_run_info(tmp_path)
