"""`nsa generate`: where prompts come from, what is printed, and how it may end."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import TEXTS, needs_tokenizers
from docs_pages import ROOT
from generating import small_model

from nsa import cli, generate
from nsa.backends.triton import MAX_STEP_TOKENS
from nsa.data import train_bpe
from nsa.data.tokenizer import ByteTokenizer
from nsa.generate import OrderedRows, generate_text, newest_run
from nsa.generation.decoder import Decoder
from nsa.machine import usable_device
from nsa.model import save_model


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    """The words of a command that continues prompts with a small model, always the same way."""
    save_model(small_model("nsa", vocab_size=256).float(), tmp_path / "run")
    words = ["generate", "--run", str(tmp_path / "run"), "--device", "cpu"]
    return [*words, "--max-new-tokens", "12", "--temperature", "0", "--ignore-end"]


def continuation(prompt: str, n_new: int = 12) -> str:
    model = small_model("nsa", vocab_size=256).float()
    return generate_text(model, ByteTokenizer(), [prompt], n_new, temperature=0, end=None)[0]


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"prompts": "import "}, "prompts"), ({"prompts": [b"a"]}, "prompts"), ({"stop_strings": "##"}, "stop_strings")],
)
def test_a_string_for_a_list_of_strings_is_refused(changes: dict[str, Any], name: str) -> None:
    """It would be taken for as many prompts, or ends, as it has characters."""
    with pytest.raises(ValueError, match=f"^{name} is"):
        generate_text(small_model("nsa", 256), ByteTokenizer(), **{"prompts": ["a"], "max_new_tokens": 1, **changes})


def test_the_command_continues_every_prompt(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*run, "--prompt", "def f(", "--prompt", "import"]) == 0
    out, err = capsys.readouterr()
    assert out == f"def f({continuation('def f(')}\nimport{continuation('import')}\n"
    prefill, decode, read = err.splitlines()
    assert prefill.startswith("prefill: 12 tokens")
    assert decode.startswith("decode: 22 tokens")
    assert "11 steps" in decode
    assert "dense" in read


def test_prompts_come_from_files_lines_and_stdin(
    run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n")
    (tmp_path / "b.txt").write_bytes("zwölf\r\ntwo\n".encode())

    def printed(*words: str, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        assert cli.main([*run, "--hide-prompt", *words]) == 0
        return capsys.readouterr().out

    a, b = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    whole = [continuation("one\n"), continuation("zwölf\r\ntwo\n")]
    assert printed("--prompt-file", a, "--prompt-file", b) == "".join(f"{text}\n" for text in whole)
    lines = "".join(f"{continuation(line)}\n" for line in ("zwölf", "two"))
    assert printed("--prompts", b) == lines
    assert printed("--prompts", "-", stdin="zwölf\ntwo") == lines
    assert printed("--prompt-file", "-", stdin="one\n") == f"{whole[0]}\n"


def test_the_documented_drafts_run_in_the_decode_kernels() -> None:
    """A step feeds the last token and the draft."""
    found = re.findall(r"--prompt-lookup (\d+)", (ROOT / "docs" / "inference.md").read_text())
    assert len(found) >= 3
    assert all(1 + int(n) <= MAX_STEP_TOKENS for n in found)


def test_prompt_lookup_and_chunks_print_the_same_text(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for words in ([], ["--prompt-lookup", "4", "--lookup-ngram", "1"], ["--prefill-chunk", "5"]):
        assert cli.main([*run, "--prompt", "abcabcabcabc", *words]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]


def test_text_ends_before_a_stop_string(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = continuation("import")
    stop = text[4:6]
    assert cli.main([*run, "--hide-prompt", "--prompt", "import", "--stop", stop]) == 0
    assert capsys.readouterr().out == text[: text.index(stop)] + "\n"


def test_rows_are_written_in_order_as_they_grow() -> None:
    written: list[str] = []
    finished: set[int] = set()
    rows = OrderedRows(written.append, ["A", "B", "C"])
    rows.add(["1", "1", "1"], finished.__contains__)
    assert written == ["A1"]
    finished.add(1)
    rows.add(["2", "2", "2"], finished.__contains__)
    assert written == ["A1", "2"]
    finished.add(0)
    rows.add(["3", "", "3"], finished.__contains__)
    assert written == ["A1", "2", "3\n", "B12\n", "C123"]
    finished.add(2)
    rows.add(["", "", ""], finished.__contains__)
    assert "".join(written) == "A123\nB12\nC123\n"


def test_an_interrupt_prints_what_there_is(
    run: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = [], Decoder.step

    def interrupted(self: Decoder, width: int = 1) -> None:
        steps.append(width)
        if len(steps) == 5:
            raise KeyboardInterrupt
        step(self, width)

    monkeypatch.setattr(Decoder, "step", interrupted)
    assert cli.main([*run, "--prompt", "def f(", "--prompt", "import"]) == 130
    out, err = capsys.readouterr()
    assert out == f"def f({continuation('def f(', 5)}\nimport{continuation('import', 5)}\n"
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_command_quietly(run: list[str]) -> None:
    words = [sys.executable, "-m", "nsa", *run, "--max-new-tokens", "2000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment()) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 141


def child_environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def test_a_character_that_stdout_does_not_have_is_escaped(run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.main([*run, "--prompt", "é"]) == 0
    assert stdout.buffer.getvalue().startswith(b"\\xe9")


@pytest.mark.parametrize(("index", "printed"), [(1, "[1002, 605] "), (2, "[0, 100] 29")])
def test_the_cache_examples_of_the_documentation_run(
    index: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()
    # The first needs a trained model.
    blocks = re.findall(r"^```python$(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    exec(blocks[index], {})
    assert capsys.readouterr().out.startswith(printed)


def test_a_prefill_in_chunks_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    for done in (8, 16, 20):
        generate.show_prefill(done, 20)
    shown = capsys.readouterr().err
    assert "8/20" in shown
    assert "16/20" in shown
    assert shown.endswith("\033[K")


@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_gives_no_text_and_a_status(
    value: float, temperature: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_model("nsa", vocab_size=256).float()
    model.layers[1].mlp.outer.weight.data[3, 5] = value
    save_model(model, tmp_path)
    words = ["--run", str(tmp_path), "--device", "cpu", "--max-new-tokens", "4", "--temperature", temperature]
    assert cli.main(["generate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(tmp_path) in err
    assert "layers.1.mlp.outer.weight" in err


@needs_tokenizers
def test_tokenizer_larger_than_model_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(small_model("dense", vocab_size=256).float(), tmp_path)
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.save(tmp_path)
    assert cli.main(["generate", "--device", "cpu", "--run", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert all(word in line for word in (str(tmp_path), "256", str(tokenizer.vocab_size)))


def test_a_wrong_value_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(small_model("dense", vocab_size=256).float(), tmp_path / "empty").unlink()
    save_model(small_model("dense", vocab_size=256).float(), tmp_path / "run")
    wrong = [
        (["--run", str(tmp_path / "nowhere")], "nowhere'; accepted: "),
        (["--run", str(tmp_path / "empty")], "model.safetensors or model.pt"),
        (["--device", "gpu"], "device is 'gpu'"),
        (["--seed", "-1"], "--seed is -1"),
        (["--run", str(tmp_path / "run"), "--prompt", ""], "--prompt is ''"),
        (["--run", str(tmp_path / "run"), "--prompt", "a\udcff"], r"--prompt is 'a\udcff'"),
        (["--seed", str(2**70)], f"--seed is {2**70}"),
    ]
    if not torch.cuda.is_available():
        wrong.append((["--device", "cuda"], "device is 'cuda'; accepted: 'cpu', "))
    for words, message in wrong:
        assert cli.main(["generate", "--device", "cpu", *words]) == 2
        line = capsys.readouterr().err
        assert line.startswith("nsa generate: error: ")
        assert message in line
        assert line.count("\n") == 1


def test_a_damaged_model_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model("dense", vocab_size=256).float()
    safe, plain, config = (tmp_path / name for name in ("model.safetensors", "model.pt", "model.json"))

    def check(path: Path, data: bytes, what: str = "is damaged") -> None:
        before = path.read_bytes()
        path.write_bytes(data)
        assert cli.main(["generate", "--device", "cpu", "--run", str(tmp_path)]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"nsa generate: error: {path} {what}: ")
        assert line.count("\n") == 1
        path.write_bytes(before)

    save_model(model, tmp_path)
    for data in (b"", b"{", b"\xff", b"[]", b'{"layers": 1}'):
        check(config, data)
    if safe.is_file():
        whole = safe.read_bytes()
        other = save_model(small_model("nsa", vocab_size=256).float(), tmp_path / "other").read_bytes()
        for data in (b"", whole[: len(whole) // 2]):
            check(safe, data)
        check(safe, other, "does not fit model.json")
        safe.unlink()
    torch.save(model.state_dict(), plain)
    whole = plain.read_bytes()
    for data in (b"", b"no model", whole[: len(whole) // 2]):
        check(plain, data)


def test_no_run_to_generate_from_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        newest_run(tmp_path)


@pytest.mark.parametrize("device", ["meta", "xpu", "mps"])
def test_a_device_that_is_neither_cpu_nor_cuda_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=f"device is '{device}'"):
        usable_device(device)
