"""`nsa export` and `nsa train --init`: a run becomes a Transformers folder, and a folder a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training import config_file, lines_of, small_run

from nsa.cli import main
from nsa.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from nsa.model import load_model
from nsa.model.llama import llama_tensors, read_weights
from nsa.train.loop import Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with NSA."""
    out = tmp_path_factory.mktemp("run") / "run"
    torch.manual_seed(0)
    Trainer(small_run(out, "nsa")).train()
    return out


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_run_is_exported_with_all_that_belongs_to_it(run: Path, tmp_path: Path, dtype: str | None) -> None:
    to = tmp_path / "model"
    assert main(["export", str(run), "--to", str(to), *(["--dtype", dtype] if dtype else [])]) == 0
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in to.iterdir()} == names
    assert json.loads((to / "config.json").read_text())["eos_token_id"] == 0
    expected = llama_tensors(load_model(run))
    for name, x in read_weights(to).items():
        assert x.dtype == (torch.bfloat16 if dtype else torch.float32)
        torch.testing.assert_close(x, expected[name].to(x.dtype), atol=0, rtol=0)


def test_the_exported_byte_tokenizer_gives_the_same_tokens(run: Path, tmp_path: Path) -> None:
    main(["export", str(run), "--to", str(tmp_path)])
    path, own = tmp_path / "tokenizer.json", ByteTokenizer()
    # By its name, which shards of bytes were made with.
    assert load_tokenizer(tmp_path).name == own.name
    found = FileTokenizer(path.read_text(), str(path))
    assert (found.vocab_size, found.end) == (256, 0)
    for text in ("def f(x):\n\treturn x  # é 漢字 🙂", "".join(map(chr, range(1, 300)))):
        assert found.encode(text) == own.encode(text)
        assert found.decode(own.encode(text)) == text


def test_a_folder_with_files_is_not_written_to(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("")
    assert main(["export", str(run), "--to", str(tmp_path)]) == 2
    assert "--to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_run_starts_from_an_exported_folder(run: Path, tmp_path: Path) -> None:
    """Its first validation loss is the last one of the run before; resumed, it does not need the folder."""
    model, out = tmp_path / "model", tmp_path / "second"
    main(["export", str(run), "--to", str(model)])
    # Another model in the config: that of the folder wins.
    file = config_file(tmp_path, small_run(out, "dense", save_every=3))
    flags = ["--seq-len", "32", "--device", "cpu", "--out", str(out)]
    assert main(["train", "--config", file, "--init", str(model), *flags, "--steps", "3"]) == 0
    first = lines_of(out, "eval")[0]["loss"]
    assert first == pytest.approx(lines_of(run, "end")[0]["loss_end"], rel=1e-5)
    assert load_model(out).config.kinds == ("nsa",)
    for path in model.iterdir():
        path.unlink()
    assert main(["train", "--resume", str(out), "--steps", "4"]) == 0


def test_a_start_that_cannot_work_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    main(["export", str(run), "--to", str(model)])
    file = config_file(tmp_path, small_run(tmp_path / "out", "nsa"))
    start = ["train", "--config", file, "--device", "cpu", "--out", str(tmp_path / "out"), "--init"]
    (tmp_path / "empty").mkdir()
    for words, named in (
        ([str(tmp_path / "empty")], "config.json"),
        ([str(model), "--set", "model.hidden=32"], "mlp.down_proj.weight"),
        ([str(model), "--set", "model.vocab_size=100"], "vocab_size"),
        ([str(model), "--resume", str(run)], "--resume"),
    ):
        assert main([*start, *words]) == 2, words
        assert named in capsys.readouterr().err
    (model / "tokenizer.json").unlink()
    assert main([*start, str(model)]) == 2
    assert "tokenizer" in capsys.readouterr().err
