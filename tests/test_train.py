"""The corpus, the step and the run: same seed, same numbers; every promise of the first and the last lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa import NSAConfig, cli, train
from nsa.data import Corpus, decode, encode, standard_library, synthetic
from nsa.model import LM, LMConfig, load_model
from nsa.settings import Settings
from nsa.train.loop import TrainConfig, Trainer, boot_line, config_from
from nsa.train.step import TrainStep, learning_rate


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder of 40 source files, two of them not to be read."""
    root = tmp_path / "lib"
    for index in range(38):
        path = root / ("package" if index % 2 else ".") / f"module_{index:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value_{index:02} = {index}\n" * 20)
    for folder in ("test", "site-packages"):
        (root / folder).mkdir()
        (root / folder / "hidden.py").write_text("HIDDEN = 1\n")
    return root


@pytest.fixture(autouse=True)
def short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.train.loop.SAMPLE_LENGTH", 8)


def small_run(out: Path, kind: str = "dense", **changes: object) -> TrainConfig:
    attn = NSAConfig(dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=8)
    model = LMConfig(vocab_size=256, n_layers=1, hidden=64, seq_len=32, attn=attn, attention=kind)
    config = TrainConfig(model=model, steps=6, batch_size=2, lr=1e-2, out=out, log_every=4, eval_batches=2)
    return replace(config, **changes)


def lines_of(out: Path, kind: str) -> list[dict[str, object]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record.pop("kind") == kind]


def test_corpus_is_the_same_every_time_and_split_by_file(library: Path) -> None:
    corpus, again = standard_library(library), standard_library(library)
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.valid, again.valid)
    train_text, valid_text = decode(corpus.train.tolist()), decode(corpus.valid.tolist())
    for index in range(38):
        assert (f"value_{index:02}" in train_text) != (f"value_{index:02}" in valid_text)
    assert "HIDDEN" not in train_text + valid_text


def test_python_has_a_corpus_of_its_own() -> None:
    corpus = standard_library()
    assert len(corpus.train) > 1_000_000
    assert len(corpus.valid) > 50_000
    assert "import " in decode(corpus.valid[:100_000].tolist())


def test_batches_depend_on_seed_and_step_alone(library: Path) -> None:
    corpus = standard_library(library)
    tokens, targets = corpus.batch("train", 3, 16, seed=1, step=5)
    assert tokens.shape == targets.shape == (3, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, corpus.batch("train", 3, 16, seed=1, step=5)[0])
    assert not torch.equal(tokens, corpus.batch("train", 3, 16, seed=1, step=6)[0])
    assert not torch.equal(tokens, corpus.batch("train", 3, 16, seed=2, step=5)[0])


def test_text_survives_the_tokens() -> None:
    assert decode(encode("naïve → code")) == "naïve → code"
    assert decode([0x64, 50_000]) == "d\N{REPLACEMENT CHARACTER}"


def test_learning_rate_rises_then_falls_to_its_floor() -> None:
    rates = [learning_rate(step, 100, peak=1.0, warmup=10, floor=0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_accumulated_batches_are_one_larger_batch() -> None:
    config = small_run(Path()).model
    tokens, targets = synthetic(4, 16, 256, seed=0, device="cpu")
    updated = []
    for batches in ([(tokens, targets)], [(tokens[:2], targets[:2]), (tokens[2:], targets[2:])]):
        torch.manual_seed(0)
        model = LM(config).double()
        result = TrainStep(model, dtype=torch.float32, compile=False)(batches, lr=1e-3)
        updated.append((result, model.state_dict()))
    torch.testing.assert_close(updated[0], updated[1], check_dtype=False, atol=1e-6, rtol=1e-5)


def test_first_line_names_everything_that_runs(library: Path, tmp_path: Path) -> None:
    corpus = standard_library(library)
    line = boot_line(small_run(tmp_path, kind="nsa"), LM(small_run(tmp_path, kind="nsa").model), corpus)
    assert line.startswith("[boot] effective config: S=32 B=2 accum=1 gc=off attention=nsa ")
    assert " device=cpu dtype=float32 compile=off " in line
    for branch in ("compress", "compressed", "scores", "selected", "sliding", "combine"):
        assert f" {branch}=sdpa " in line
    assert line.endswith(f"data={corpus.source}")
    assert "\n" not in line


def test_first_line_of_a_dense_run(library: Path, tmp_path: Path) -> None:
    config = small_run(tmp_path, gc=True, accum=3)
    line = boot_line(config, LM(config.model), standard_library(library))
    assert " accum=3 gc=on attention=dense " in line
    assert " backend=torch-sdpa " in line


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_a_run_leaves_metrics_and_a_model(
    kind: str, library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    trainer = Trainer(small_run(out, kind), standard_library(library))
    summary = trainer.train()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("[boot] effective config: ")
    assert [line.split()[1] for line in printed[1:]] == ["4/6", "6/6"]

    steps = lines_of(out, "step")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert set(steps[0]) == {"step", "loss", "grad_norm", "lr"}
    assert [record["loss"] for record in lines_of(out, "eval")] == [summary.loss_start, summary.loss_end]
    assert summary.loss_end < summary.loss_start
    assert summary.tokens_per_s > 0
    assert summary.fallbacks == {}
    assert summary.sample.startswith("def ")
    assert "fallbacks: none" in str(summary)

    loaded = load_model(out)
    for name, parameter in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter)


def test_a_run_of_one_step_claims_no_speed(library: Path, tmp_path: Path) -> None:
    summary = Trainer(small_run(tmp_path, steps=1), standard_library(library)).train()
    assert summary.tokens_per_s is None
    assert "tokens/s" not in str(summary)
    assert "speed not measured: the first step is not timed" in str(summary)
    assert lines_of(tmp_path, "end")[0]["tokens_per_s"] is None


def test_the_same_seed_gives_the_same_run(library: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        Trainer(small_run(tmp_path / name, kind="nsa", steps=3), standard_library(library)).train()
    assert lines_of(tmp_path / "a", "step") == lines_of(tmp_path / "b", "step")


def test_a_loss_that_is_not_finite_stops_the_run(library: Path, tmp_path: Path) -> None:
    trainer = Trainer(small_run(tmp_path), standard_library(library))
    with torch.no_grad():
        trainer.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 1 is nan"):
        trainer.train()


def test_a_corpus_must_fit_the_vocabulary(library: Path, tmp_path: Path) -> None:
    config = small_run(tmp_path)
    corpus = standard_library(library)
    wide = Corpus(corpus.train, corpus.valid, corpus.source, vocab_size=300)
    with pytest.raises(ValueError, match="vocab_size is 256"):
        Trainer(config, wide)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(["--device", "cpu", *words])


def test_the_command_line_beats_the_environment_which_beats_the_preset() -> None:
    env = Settings.load(environ={"NSA_SEQ_LEN": "128", "NSA_BATCH_SIZE": "3", "NSA_ACCUM": "2", "NSA_NO_GC": "1"})
    plain = Settings.load(environ={})
    assert config_from(parse(), plain).model.seq_len == 512
    config = config_from(parse("--batch-size", "5"), env)
    assert (config.model.seq_len, config.batch_size, config.accum, config.gc) == (128, 5, 2, False)
    assert config_from(parse("--seq-len", "64", "--gc"), env).model.seq_len == 64
    assert config_from(parse("--gc"), env).gc


def test_defaults_follow_the_device() -> None:
    config = config_from(parse(), Settings.load(environ={}))
    assert (config.device, config.dtype, config.compile) == ("cpu", "float32", False)
    assert config.out.parent == Path("runs")
    assert config_from(parse("--device", "cuda"), Settings.load(environ={})).dtype == "bfloat16"


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        config_from(parse("--steps", "0"), Settings.load(environ={}))
    with pytest.raises(ValueError, match="seq_len is -1"):
        config_from(parse("--seq-len", "-1"), Settings.load(environ={}))


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ([], {"NSA_SEQ_LEN": "abc"}, "NSA_SEQ_LEN is 'abc'"),
        (["--steps", "-1"], {}, "steps is -1"),
        (["--device", "gpu"], {}, "device is 'gpu'"),
        pytest.param(
            ["--device", "cuda"],
            {},
            "device is 'cuda'; accepted: 'cpu', because torch sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
        ),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(
    words: list[str],
    variables: dict[str, str],
    message: str,
    environment: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment(**variables)
    assert cli.main(["train", "--device", "cpu", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("nsa train: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_the_command_trains_and_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "2", "--seq-len", "32", "--batch-size", "1", "--attention", "dense", "--out", str(tmp_path)]
    assert train.run(parse(*words)) == 0
    printed = capsys.readouterr().out
    assert "validation loss" in printed
    assert f"nsa generate --run {tmp_path}" in printed
