"""`nsa eval lm-eval`: what is refused, and with lm-eval-harness (`make lm-eval`) the tasks themselves."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from training import ATTN

pytest.importorskip("tokenizers")

from nsa.cli import main
from nsa.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from nsa.evaluation.harness import HARNESS_PACKAGES, check_no_code, check_tasks
from nsa.export import export_run
from nsa.model import LM, LMConfig

installed = all(find_spec(name) is not None for name in HARNESS_PACKAGES)
needs_harness = pytest.mark.skipif(not installed, reason="lm-eval-harness is not installed: `make lm-eval`")


def exported(folder: Path, tokenizer: Tokenizer) -> Path:
    torch.manual_seed(0)
    export_run(LM(LMConfig(vocab_size=512, n_layers=1, hidden=48, seq_len=64, attn=ATTN)), tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. VAR = 12345\n"
    questions = "Memorize and track the chain(s) of variable assignment hidden in the following text. Find all"
    return exported(tmp_path_factory.mktemp("models") / "tiny", train_bpe([text * 9, questions * 9], 512))


@pytest.mark.skipif(installed, reason="lm-eval-harness is installed")
def test_a_missing_package_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "lm-eval", str(folder)]) == 2
    assert "nsa[eval]" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["niah_single_2", "ruler_qa_squad", "ruler", "hellaswag"])
def test_tasks_that_need_the_network_are_refused(task: str) -> None:
    with pytest.raises(ValueError, match=f"{task}.*niah_single_1.*fwe"):
        check_tasks(["vt", task])


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_in_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    """The harness would trust the code of a tokenizer."""
    folder = exported(tmp_path / "model", ByteTokenizer())
    check_no_code(folder)
    fields: dict[str, Any] = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**fields, "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}))
    with pytest.raises(ValueError, match="auto_map"):
        check_no_code(folder)


def test_runs_pickles_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nsa export"):
        check_no_code(tmp_path)
    folder = exported(tmp_path / "model", ByteTokenizer())
    (folder / "tokenizer_config.json").rename(folder / "elsewhere.json")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        check_no_code(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        check_no_code(folder)


@needs_harness
def test_the_harness_asks_the_registered_class(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that happens to know one answer of two gets half of the score."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.ruler import prepare_niah

    asked: list[Any] = []
    generate = HFLM.generate_until

    def answered(self: Any, requests: list[Any], **kwargs: Any) -> list[str]:
        asked.extend([type(self.model).__name__, *(len(self.tok_encode(r.args[0])) for r in requests)])
        found = generate(self, requests, **kwargs)
        return [*found[:-1], f"it is {requests[-1].doc['outputs'][0]}."]

    monkeypatch.setattr(HFLM, "generate_until", answered)
    monkeypatch.setattr(prepare_niah, "tqdm", lambda rows, **options: list(rows)[:2])
    words = ["eval", "lm-eval", str(folder), "--tasks", "niah_single_1", "--lengths", "1536", "--samples", "2"]
    assert main([*words, "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert asked[0] == "NSALlamaForCausalLM"
    # Not cut to the 64 tokens that the model was trained with.
    assert all(1000 < n <= 1536 - 128 for n in asked[1:])
    rows = list(csv.DictReader((tmp_path / "lm-eval.csv").open()))
    assert rows == [{"run": "tiny", "task": "niah_single_1", "length": "1536", "accuracy": "0.5", "samples": "2"}]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mean"] == {"tiny": 0.5}
    assert (tmp_path / "lm-eval.png").is_file()


@needs_harness
@pytest.mark.slow
@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"])
def test_every_task_runs_without_a_network(folder: Path, tmp_path: Path, task: str) -> None:
    words = ["eval", "lm-eval", str(folder), "--tasks", task, "--lengths", "2048", "--samples", "1", "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    row = next(csv.DictReader((tmp_path / "lm-eval.csv").open()))
    assert (row["task"], row["samples"]) == (task, "1")


@needs_harness
@pytest.mark.parametrize(("task", "length"), [("vt", 4096), ("cwe", 1536), ("cwe", 4096)])
def test_prompts_that_cannot_be_made_are_refused(
    tmp_path: Path, task: str, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With bytes, what the harness would try to make never fits, and it would not stop trying."""
    folder = exported(tmp_path / "model", ByteTokenizer())
    assert main(["eval", "lm-eval", str(folder), "--tasks", task, "--lengths", str(length), "--device", "cpu"]) == 2
    assert task in capsys.readouterr().err
