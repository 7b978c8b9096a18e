"""The model of a run is there while the run goes, of any of its checkpoints, and is the one that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training import small_run

from nsa.cli import main
from nsa.model import LM, load_model, save_model
from nsa.tensor_file import read_tensors, write_tensors
from nsa.train import Trainer, loop
from nsa.train.run_model import load_run, run_of
from nsa.train.storage import INDEX, Index, TensorChunk


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "nsa"
    Trainer(small_run(out, "nsa", steps=4, save_every=2, eval_every=2)).train()
    return out


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """As the run was before its end: without the exported model."""
    run = tmp_path / "run"
    for path in finished.rglob("*"):
        if path.is_file() and not path.name.startswith("model."):
            copy = run / path.relative_to(finished)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    return run


def equal_parameters(one: LM, other: LM) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == named and torch.equal(x, y) for (name, x), (named, y) in pairs)


def test_the_newest_checkpoint_is_the_model(finished: Path, stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_run(stopped)
    assert equal_parameters(model, load_model(finished))
    assert not model.training
    assert model.config.attn.backend == "auto"
    assert tokenizer.name == load_run(finished)[1].name
    assert "step 4" in capsys.readouterr().err


def test_the_export_of_an_earlier_end_is_not_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was resumed, and its second end could not be exported."""
    Trainer(small_run(tmp_path, "nsa", steps=2)).train()
    monkeypatch.setattr(loop, "export", lambda *given: fail())
    with pytest.raises(OSError, match="no space"):
        Trainer(small_run(tmp_path, "nsa", steps=3)).train()
    found = load_run(tmp_path)[0]
    assert equal_parameters(found, load_run(tmp_path / "checkpoints" / "step_3")[0])
    assert not equal_parameters(found, load_model(tmp_path))


def fail() -> None:
    raise OSError("no space")


def test_the_export_is_the_model_where_it_is_not_older(finished: Path, tmp_path: Path) -> None:
    """Its last checkpoint was deleted, and its config is of another version."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints" / "step_4")
    (run / "config.yaml").write_text("old_key: 1\n")
    assert equal_parameters(load_run(run)[0], load_model(finished))
    # As earlier versions exported it, without its step.
    save_model(load_model(finished), run)
    assert equal_parameters(load_run(run)[0], load_model(finished))


def test_a_checkpoint_by_name_is_that_step_s(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished / "checkpoints" / "step_2"
    early, late = load_run(folder)[0], load_run(finished)[0]
    assert not torch.equal(early.head_weight, late.head_weight)
    assert "step 2" in capsys.readouterr().err
    assert run_of(folder) == finished
    assert run_of(finished) == finished


def test_the_shards_of_several_ranks_are_put_together(finished: Path, stopped: Path) -> None:
    """As FSDP writes them: each rank has half of the rows of a matrix, and rank 0 all vectors."""
    folder = stopped / "checkpoints" / "step_4"
    index = Index.read(folder)
    whole = {name: x.clone() for name, x in read_tensors(folder / "rank_00000.safetensors").items()}
    ranks: list[dict[str, Tensor]] = [{}, {}]
    tensors = {}
    for name, stored in index.tensors.items():
        shards = whole[name].chunk(2) if whole[name].ndim == 2 else (whole[name],)
        chunks = []
        for rank, x in enumerate(shards):
            ranks[rank][name] = x.contiguous()
            offsets = (rank * len(shards[0]), 0) if len(shards) == 2 else (0,) * x.ndim
            chunks.append(TensorChunk(offsets, tuple(x.shape), f"rank_{rank:05}.safetensors", name))
        tensors[name] = stored._replace(chunks=tuple(chunks))
    files = {f"rank_{rank:05}.safetensors": own for rank, own in enumerate(ranks)}
    written = {name: write_tensors(folder / name, own) for name, own in files.items()}
    index._replace(files=written, tensors=tensors).write(folder / INDEX)
    assert equal_parameters(load_run(stopped)[0], load_model(finished))


def test_a_damaged_checkpoint_is_passed_over(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stopped / "checkpoints" / "step_4" / "rank_00000.safetensors").write_bytes(b"")
    load_run(stopped)
    assert "step 2" in capsys.readouterr().err
    with pytest.raises(ValueError, match="step_4: rank_00000"):
        load_run(stopped / "checkpoints" / "step_4")


def test_a_config_of_another_model_is_refused(stopped: Path) -> None:
    text = (stopped / "config.yaml").read_text()
    (stopped / "config.yaml").write_text(text.replace("n_layers: 1", "n_layers: 2"))
    with pytest.raises(ValueError, match="another model"):
        load_run(stopped)


def test_commands_take_a_run_that_goes_and_a_checkpoint(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = stopped / "checkpoints" / "step_2"
    assert main(["eval", "loss", str(stopped), str(step), "--windows", "1"]) == 0
    means = json.loads(capsys.readouterr().out.splitlines()[-1])["mean"]
    assert set(means) == {"run", "step_2"}
    assert (stopped / "eval" / "loss.csv").is_file()
    assert main(["eval", "needle", str(step), "--lengths", "64", "--depths", "1", "--samples", "1"]) == 0
    assert (stopped / "eval" / "step_2" / "needle.csv").is_file()
    assert main(["inspect", str(step), "--prompt", "some text", "-o", str(stopped / "page.html")]) == 0
    assert main(["generate", "--run", str(step), "--prompt", "x", "--max-new-tokens", "2"]) == 0


def test_a_run_without_its_tokenizer_is_refused(stopped: Path) -> None:
    (stopped / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_run(stopped)
