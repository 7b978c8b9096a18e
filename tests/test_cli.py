"""The command line: what is known before torch is imported, what a wrong word gets, and how output may end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from generating import small_model

import nsa
from nsa import cli
from nsa.data.tokenizer import ByteTokenizer
from nsa.model import save_model
from nsa.train.config import TrainConfig
from nsa.train.keys import ABSENT, ALIASES, keys_of, replacement

ROOT = Path(nsa.__file__).parents[1]


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    return {**own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*words: str, folder: Path | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nsa", *words],
        cwd=folder,
        env={**environment(), **settings},
        capture_output=True,
        text=True,
        check=False,
    )


# Runs the command line in a fresh interpreter, then prints its status and whether torch was imported.
AFTERWARDS = """
import sys
from nsa.cli import main
status = main(sys.argv[1:])
print("STATUS", status, "torch" in sys.modules)
"""


def status_and_torch(*words: str) -> tuple[int, bool]:
    done = subprocess.run(
        [sys.executable, "-c", AFTERWARDS, *words], env=environment(), capture_output=True, text=True, check=True
    )
    _, status, torch = done.stdout.splitlines()[-1].split()
    return int(status), torch == "True"


@pytest.mark.parametrize(
    "words",
    ["--help", "--version", *(f"{name} --help" for name in cli.COMMANDS), "bench train --help", "data prepare --help"],
)
def test_help_does_not_import_torch(words: str) -> None:
    assert status_and_torch(*words.split()) == (0, False)


@pytest.mark.parametrize(
    "words",
    [
        "trian",
        "train --stepz 3",
        "train --steps many",
        "train --config nowhere.yaml",
        "train --set model.attn.ww=3",
        "train --set steps=0",
        "train --set model.n_layers=-1",
        "plan --set model.attn.ww=3",
        "plan --gpu",
        "doctor --config tiny --set model.attn.ww=3",
        "generate --temperature warm",
        "generate --run nowhere",
        "eval loss nowhere",
        "inspect nowhere",
        "bench attention --lenghts 3",
        "data prepare",
    ],
)
def test_a_mistake_is_reported_without_torch(words: str) -> None:
    assert status_and_torch(*words.split()) == (2, False)


def test_a_mistake_in_a_config_file_is_reported_without_torch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{model: {attn: {ww: 3}}}")
    for command in ("train", "plan", "doctor"):
        assert status_and_torch(command, "--config", str(tmp_path / "run.yaml")) == (2, False)


@pytest.mark.parametrize("columns", ["1", "2", "12"])
def test_a_narrow_terminal_is_no_error(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["plan", "--help"]) == 0
    assert "--price" in capsys.readouterr().out


def test_help_takes_little_time() -> None:
    """In CPU time, the best of a few tries: the machine may be busy. torch alone takes several times as long."""

    def used() -> float:
        times = os.times()
        return times.children_user + times.children_system

    tries: list[float] = []
    while len(tries) < 3 or (min(tries) > 1.0 and len(tries) < 6):
        begin = used()
        assert run("train", "--help").returncode == 0
        tries.append(used() - begin)
    assert min(tries) <= 1.0


def test_the_package_is_a_program() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"nsa {nsa.__version__}\n")


# Output that cannot be written.


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "train --help", "plan --config tiny"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_it_without_a_word(words: str, unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "nsa", *words.split()],
        env={**environment(), "PYTHONUNBUFFERED": unbuffered},
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""
    # argparse itself ignores that help cannot be written.
    assert done.returncode in ((0, 141) if unbuffered and "--help" in words else (141,))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nsa", "plan", "--config", "tiny"],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "No space left" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "2> /dev/full"])
def test_streams_that_take_nothing_change_no_status(streams: str, tmp_path: Path) -> None:
    save_model(small_model("dense", 256), tmp_path)
    ByteTokenizer().save(tmp_path)
    words = {"generate --device cpu --max-new-tokens 2 --run": 0, "data check": 2}
    for command, status in words.items():
        line = f"unset PYTHONUNBUFFERED; exec {sys.executable} -m nsa {command} {tmp_path} {streams}"
        done = subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr


def test_text_that_stderr_does_not_take_changes_no_status() -> None:
    program = "import sys, warnings; from nsa import cli; cli.run_command = lambda _: bool(warnings.warn('one'))"
    line = f'unset PYTHONUNBUFFERED; exec {sys.executable} -c "{program}; sys.exit(int(cli.main([])))" 2> /dev/full'
    assert subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_names_that_are_no_text_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a line of text\n" * 200)
    for words in (["prepare", "--path", "in.txt", "--out", "d\udcff"], ["check", "d\udcff"]):
        done = run("data", *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "\\udcff" in done.stdout


def test_a_broken_pipe_that_is_not_the_output_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(args: object) -> int:
        raise BrokenPipeError(32, "a server hung up")

    monkeypatch.setattr("nsa.bench.run", lose)
    assert cli.main(["bench", "attention"]) == 2
    assert "a server hung up" in capsys.readouterr().err


# Memory that runs out.


@pytest.mark.parametrize("kind", ["python", "cpu", "gpu"])
def test_out_of_memory_is_one_line_that_says_what_to_lower(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def exhaust(args: object) -> int:
        if kind == "gpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nmore")
        if kind == "cpu":
            torch.empty(2**50, dtype=torch.uint8)
        raise MemoryError

    monkeypatch.setattr("nsa.train.run", exhaust)
    assert cli.main(["train"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--batch-size" in line
    assert "--seq-len" in line


def test_another_runtime_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("nsa.train.run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train"])


# Names that people bring from elsewhere.


KEYS = set(keys_of(TrainConfig))


def test_an_alias_names_keys_that_exist_and_is_none_itself() -> None:
    for alias, phrase in ALIASES.items():
        named = phrase.replace(",", " ").split()
        assert named[0] in KEYS, alias
        assert {word for word in named if word.startswith(("model.", "data."))} <= KEYS
        assert alias not in KEYS
    assert not set(ABSENT) & (KEYS | set(ALIASES))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gradient_checkpointing", "gc"),
        ("accumulate_grad_batches", "accum"),
        ("gradient_accumulation_steps", "accum"),
        ("learning_rate", "lr"),
        ("precision", "dtype"),
        ("ddp", "parallel"),
        ("devices", "parallel"),
        ("window", "model.attn.w"),
        ("top_k", "model.attn.n_sel"),
        ("vocab", "model.vocab_size"),
        ("seed_everything", "seed"),
        ("model_name", "--init"),
        ("resume_from_checkpoint", "--resume"),
        ("model.num_layers", "model.n_layers"),
        ("w", "model.attn.w"),
        ("attn.w", "model.attn.w"),
        ("model.w", "model.attn.w"),
        ("seq_len", "model.seq_len"),
        ("warm_up", "warmup"),
        ("nsa", "model.attn"),
        ("nsa.l_sel", "model.attn.l_sel"),
        ("train.out_dir", "out"),
        ("runtime.use_triton_sel", "model.attn.backend"),
        ("runtime.sel_triton_min_L", "model.attn.backend"),
        ("runtime.fa2_min_len_win", "NSA_FA2_MIN_LEN_WIN"),
        ("runtime.fa2_min_len_cmp", "NSA_FA2_MIN_LEN_CMP"),
        ("runtime.compile_cmp_win", "compile"),
    ],
)
def test_a_name_from_elsewhere_gets_the_key_that_replaces_it(name: str, key: str) -> None:
    said = replacement(name, KEYS)
    assert key in said.replace(",", " ").split()
    assert "nearest" not in said or name == "warm_up"


@pytest.mark.parametrize("name", ["llama", "mistral", "model.llama", "Llama-3", "gpt2"])
def test_the_name_of_a_model_as_a_key_gets_the_answer_of_config(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--config", "llama"]) == 2
    answer = capsys.readouterr().err.rpartition("; ")[2]
    assert ".yaml" in answer
    assert cli.main(["train", "--set", f"{name}=1"]) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("name", ["zzz", "model.zzz", "model.attn.zzz", "dropout", "optimizer", "train", "runtime"])
def test_a_name_like_no_other_gets_no_misleading_neighbor(name: str) -> None:
    assert "nearest" not in replacement(name, KEYS)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--model", "--config .*--init"),
        ("--num-gpus", "--parallel"),
        ("--learning_rate", "--lr"),
        ("--gradient-checkpointing", "--gc"),
        ("--accumulate_grad_batches", "--accum-batches"),
        ("--precision", "--dtype"),
        ("--batch_size", "--batch-size"),
        ("--num-layers", "--set model.n_layers=VALUE"),
        ("--weight-decay", "--set weight_decay=VALUE"),
        ("--grad-clip", "--set grad_clip=VALUE"),
        ("--stepz", "--steps"),
        ("--local-path", "--data-path"),
        ("--save", "--out"),
        ("--loader-timeout", "--set data.stall_timeout_s=VALUE"),
        ("--synthetic-on-fail", "--on-stall"),
    ],
)
def test_a_flag_from_elsewhere_gets_the_flag_that_replaces_it(
    flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", flag, "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf" {meant} .*\(", line)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("eval loss . --seq_len 3", "--seq-len"),
        ("data prepare --out a --doc_batch 3", "--doc-batch"),
        ("bench attention --head 3 --cuda_graphs", "--cuda-graphs"),
    ],
)
def test_a_command_of_a_command_reports_its_own_flags(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nsa {' '.join(words.split()[:2])}: error: ")
    assert re.search(rf" {meant} .*\(", line)


@pytest.mark.parametrize(("flag", "key"), [("--seq-len", "model.seq_len"), ("--attention", "model.attention")])
def test_a_flag_of_train_gets_its_key_elsewhere(flag: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", flag, "3"]) == 2
    assert f"--set {key}=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--ddp", "0"], ["--ddp", "1"], ["--ddp"]])
def test_an_old_runbooks_ddp_flag_is_noticed_and_changes_nothing(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[TrainConfig] = []
    monkeypatch.setattr("nsa.train.loop.launch", lambda config: started.append(config) or 0)
    assert cli.main(["train", "--device", "cpu", "--out", "a"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["train", "--device", "cpu", "--out", "a", *words]) == 0
    said = capsys.readouterr().err
    assert "--ddp" in said
    assert started[0] == started[1]


# Paths.


@pytest.mark.parametrize(
    "words",
    [["--out", ""], ["--out", " "], ["--resume", ""], ["--diff", ""], ["--config", ""], ["--set", "out="]],
)
def test_an_empty_path_is_not_the_current_folder(words: list[str], tmp_path: Path) -> None:
    done = run("train", *words, folder=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    args = cli.parser_of("train").parse_args(["--out", "~/a", "--resume", "~/b", "--diff", "~/c"])
    assert [args.out, args.resume, args.diff] == [tmp_path / name for name in "abc"]
    assert cli.parser_of("generate").parse_args(["--run", "~"]).run == tmp_path


# Every message names the argument or the file, and the value.


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("train --resume nowhere", "nowhere"),
        ("train --resume file.txt", "file.txt"),
        ("train --diff nowhere", "nowhere"),
        ("train --config file.txt", "file.txt"),
        ("train --config binary.yaml", "binary.yaml"),
        ("train --config empty.yaml", "empty.yaml"),
        ("train --config partial.yaml", "partial.yaml"),
        ("train --dataset text", "data.path"),
        ("train --backend nope", "model.attn.backend is 'nope'"),
        ("train --attention nsa,nope", "model.attention"),
        ("train --device tpu", "device is 'tpu'"),
        ("train --warmup 9999", "warmup is 9999"),
        ("train --set model.attn.rope_scaling.factor=0.5", "model.attn.rope_scaling.factor is 0.5"),
        ("train --set data.on_stall=zzz", "data.on_stall is 'zzz'"),
        ("plan --results nowhere", "nowhere"),
        ("plan --set dtype=float32", "dtype is 'float32'"),
        ("doctor --settings-file list.json", "list.json"),
        ("doctor --settings-file deep.json", "deep.json"),
        ("doctor --settings-file unknown.json", "unknown.json"),
        ("doctor --settings-file wrong.json", "wrong.json"),
        ("bench train --device zz", "device is 'zz'"),
        ("generate --run nowhere", "nowhere"),
    ],
)
def test_a_message_names_the_argument_and_the_value(
    words: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "file.txt": b"x",
        "binary.yaml": b"\xff",
        "empty.yaml": b"",
        "partial.yaml": b"steps: 3",
        "list.json": b"[1]",
        "deep.json": b"[" * 100_000,
        "unknown.json": b'{"zzz": 1}',
        "wrong.json": b'{"seq_len": "x"}',
    }.items():
        (tmp_path / name).write_bytes(text)
    assert cli.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
