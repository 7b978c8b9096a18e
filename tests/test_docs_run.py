"""The code blocks of README.md and docs/ run: Python as it stands, commands of `nsa` with small sizes, on the CPU."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from docs_pages import PAGES, ROOT, Line, fenced, shell_lines

from nsa.cli import main, parser_of

# By command: flags that make it small. They come last, so that their values replace those that are shown. Others run
# as they stand.
SMALL = {
    "train": "--device cpu --steps 2 --warmup 0 --batch-size 1 --eval-batches 1 --set sample_tokens=1",
    "generate": "--device cpu --max-new-tokens 4",
    "data prepare": "--tokenizer bytes",
    "data prepare --train-bpe": "--train-bpe 300",
    "eval loss": "--device cpu --seq-len 256 --windows 1",
    "eval needle": "--device cpu --lengths 256 --depths 1 --samples 1",
    "eval recall": "--device cpu --lengths 512 --keys 2 --hops 1 --samples 1",
    "inspect": "--device cpu --max-tokens 64",
    "convert": "--device cpu --lengths 64",
    "bench attention": "--device cpu --heads 2/1/16 --lengths 64",
    "bench train": "--device cpu --steps 1 --warmup 1 --seq-len 128",
    "doctor": "--device cpu --seq-len 32 --heads 2 --groups 1 --d-k 16 --d-v 16",
    "doctor --config": "--device cpu",
}
# What is parsed only, and why.
NOT_RUN = {
    "torchrun": "starts processes: tests/train/test_train_distributed.py",
    "bench attention --cuda-graphs": "needs a GPU",
    "bench decode": "needs a GPU",
    "bench generate": "needs a GPU",
    "bench flash": "needs a GPU",
    "doctor --probe": "starts a process for each library: tests/backends/flash/test_probe.py",
    "eval lm-eval": "needs lm-eval-harness: tests/evaluation/test_harness.py",
    "serve": "does not end: tests/serving/test_serving_page.py",
}
# A model that a CPU trains in no time, and text that is there.
CONFIG = """
model: {preset: tiny, n_layers: 1, seq_len: 64}
data: {source: synthetic}
steps: 2
batch_size: 1
lr: 0.001
"""
STAND_INS = {
    **{("train", "--config", name): ["small.yaml"] for name in ("tiny", "125m", "125m-32k")},
    ("doctor", "--config", "125m"): ["small.yaml"],
    ("bench", "--preset", "125m"): ["tiny"],
    ("data", "--source", "fineweb_edu"): ["text", "--path", "books"],
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `make demo`, after two steps."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "small.yaml").write_text(CONFIG)
    words = ["train", "--config", str(folder / "small.yaml"), "--out", str(folder / "demo"), *SMALL["train"].split()]
    assert main(words) == 0
    return folder / "demo"


@pytest.fixture
def desk(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages name."""
    for shown in ("nsa", "README.md", "configs"):
        (tmp_path / shown).symlink_to(ROOT / shown)
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    for folder in ("books", "docs", "models"):
        (tmp_path / folder).mkdir()
    text = (ROOT / "LICENSE").read_text()
    for index in range(40):
        (tmp_path / "books" / f"{index}.txt").write_text(f"{index} {text}")
    (tmp_path / "small.yaml").write_text(CONFIG)
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "question.txt").write_text("What may I do?")
    (tmp_path / "questions.txt").write_text("import os\ndef main(")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, demo: Path, desk: Path, run_line: Callable[[Line], int]) -> None:
    text = page.read_text()
    for run in set(re.findall(r"runs/[\w-]+", text)) - set(re.findall(r"--out (runs/[\w-]+)", text)):
        shutil.copytree(demo, desk / run)
    # A command may need what another block writes further down.
    waiting = run_lines(shell_lines(text), run_line)
    for block in fenced(text, "python"):
        # A client is run with its server, in tests/serving/test_serving_page.py.
        if "import OpenAI" not in block:
            exec(shorter(block), {})
    while waiting:
        failed = run_lines(waiting, run_line)
        assert len(failed) < len(waiting), [line.text for line in failed]
        waiting = failed


def run_lines(lines: list[Line], run_line: Callable[[Line], int]) -> list[Line]:
    """Run them in order; those that failed."""
    return [line for line in lines if run_line(line) != 0]


def shorter(block: str) -> str:
    """A quarter of the longest lengths: the same calls, in seconds."""
    return re.sub(r"\b(1000|4096|8192)\b(?=, 768|\))", lambda match: str(int(match[0]) // 4), block)


@pytest.fixture
def run_line(environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[[Line], int]:
    """Run a line in this process; its exit status."""

    def run(line: Line) -> int:
        program = line.programs[-1]
        if program[:2] == ["python", "-c"]:
            exec(program[2], {})
        if not line.command:
            return 0
        if program[0] in NOT_RUN or any(" ".join(line.command).startswith(name) for name in NOT_RUN):
            for word in line.command:
                if word.startswith("models/"):
                    Path(word).mkdir(parents=True, exist_ok=True)
            parser_of(line.command[0]).parse_args(line.command[1:])
            return 0
        environment(**line.variables)
        piped = b"".join(Path(name).read_bytes() for cat in line.programs[:-1] for name in cat[1:])
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(piped)))
        return main(small(line.command))

    return run


def small(words: list[str]) -> list[str]:
    """The words after `nsa`, with small sizes."""
    kinds = [kind for kind in SMALL if kind.split()[0] == words[0] and set(kind.split()) <= set(words)]
    pairs = zip(["", *words], words, strict=False)
    shown = [part for before, word in pairs for part in STAND_INS.get((words[0], before, word), [word])]
    return [*shown, *SMALL[max(kinds, key=len)].split()] if kinds else shown
