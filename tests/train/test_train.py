"""The step and the run: same seed, same numbers; every promise of the first and the last lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training import config_file, lines_of, small_run

from nsa import cli
from nsa.config import IGNORED
from nsa.data import Batch, synthetic
from nsa.data.config import DataConfig
from nsa.data.tokenizer import ByteTokenizer
from nsa.model import LM, PRESETS, load_model
from nsa.train import Trainer, TrainStep, learning_rate, run_info
from nsa.train.distributed import Ranks
from nsa.train.run_stats import attention_stats, watching

CPU = Ranks(torch.device("cpu"))


def random_batch(rows: int, length: int = 16) -> Batch:
    return Batch(*synthetic(rows, length, 256, seed=0, device="cpu"), cu_seqlens=None)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_learning_rate_rises_then_falls_to_its_floor(schedule: str) -> None:
    how = {"peak": 1.0, "warmup": 10, "floor": 0.1, "schedule": schedule, "decay": 20 if schedule == "wsd" else 0}
    rates = [learning_rate(step, 100, **how) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert (rates[78] == 1.0) == (schedule == "wsd")


def test_accumulation_equals_one_batch_with_ignored_targets() -> None:
    config = small_run(Path()).model
    tokens, targets, _ = random_batch(4)
    targets = targets.clone()
    targets[:2, :12] = IGNORED
    updated = []
    for batches in ([(tokens, targets)], [(tokens[:2], targets[:2]), (tokens[2:], targets[2:])]):
        torch.manual_seed(0)
        model = LM(config).double()
        result = TrainStep(model, dtype=torch.float32, compile=False)([Batch(*b, None) for b in batches], lr=1e-3)
        updated.append((tuple(result), model.state_dict()))
    torch.testing.assert_close(updated[0], updated[1], check_dtype=False, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_that_is_not_finite_changes_nothing(dtype: torch.dtype) -> None:
    """Parameters, moments and step counts stay; the next step is the one that would have come without it."""
    results = []
    for spoiled in (False, True):
        torch.manual_seed(0)
        model = LM(small_run(Path()).model)
        update = TrainStep(model, dtype=dtype, compile=False)
        update([random_batch(2)], lr=1e-3)
        if spoiled:
            before = {name: x.clone() for name, x in model.state_dict().items()}
            handle = model.norm.register_forward_hook(lambda module, args, y: y * float("inf"))
            result = update([random_batch(2)], lr=1e-3)
            handle.remove()
            assert result.skipped == 1
            assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        result = update([random_batch(2)], lr=1e-3)
        assert result.skipped == 0
        results.append((result.loss, [*update.optimizer.state.values()], model.state_dict()))
    tolerance = {} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(results[0], results[1], **(tolerance or {"atol": 0, "rtol": 0}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_loss_that_is_not_finite_is_enough_to_change_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = LM(small_run(Path()).model)
    update = TrainStep(model, dtype=dtype, compile=False)
    update([random_batch(2)], lr=1e-3)
    tokens, targets, _ = random_batch(2)
    update.scaler.scale(model(tokens, targets)).backward()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    result = update.apply(torch.tensor(float("inf")), 1e-3)
    assert torch.isfinite(result.grad_norm)
    assert result.skipped == 1
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert {float(state["step"]) for state in update.optimizer.state.values()} == {1.0}


def test_first_line_names_everything_that_runs(tmp_path: Path) -> None:
    config = small_run(tmp_path, kind="nsa")
    line = run_info.boot_line(config, LM(config.model), "the data", CPU)
    assert line.startswith("[boot] effective config: S=32 B=2 accum=1 gc=off attention=nsa ")
    assert " device=cpu dtype=float32 compile=off cuda_graphs=off parallel=none ranks=1 " in line
    for branch in ("compress", "compressed", "scores", "selected", "sliding", "combine"):
        assert f" {branch}=sdpa " in line
    assert f" hash={config.hash} " in line
    assert line.endswith("data=the data")
    assert "\n" not in line


def test_first_line_of_other_attentions(tmp_path: Path) -> None:
    dense = small_run(tmp_path, gc=True, accum=3)
    line = run_info.boot_line(dense, LM(dense.model), "", CPU)
    assert " accum=3 gc=on attention=dense " in line
    assert " backend=torch-sdpa " in line
    model = replace(dense.model, n_layers=3, attention=("nsa", "dense", "nsa"))
    mixed = small_run(tmp_path, model=model, data=DataConfig(source="synthetic", pack=True))
    line = run_info.boot_line(mixed, LM(mixed.model), "", CPU)
    assert " attention=nsa*2+dense*1 " in line
    assert " selected=sdpa " in line
    assert " dense=torch-sdpa " in line


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_a_run_leaves_metrics_a_model_and_a_report(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    config = small_run(out, kind, eval_every=3, sample_every=3, stats_every=3, price_per_hour=2.0)
    trainer = Trainer(config)
    summary = trainer.train()
    assert summary is not None
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("[boot] effective config: ")
    assert [line.split()[1] for line in printed[1:]] == ["1/6", "3/6", "4/6", "6/6"]

    steps = lines_of(out, "step")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert set(steps[0]) == {"step", "loss", "grad_norm", "lr"}
    evaluated = [(record["step"], record["loss"]) for record in lines_of(out, "eval")]
    assert [step for step, _ in evaluated] == [0, 3, 6]
    assert (evaluated[0][1], evaluated[-1][1]) == (summary.loss_start, summary.loss_end)
    assert [record["step"] for record in lines_of(out, "sample")] == [3, 6]
    assert [record["step"] for record in lines_of(out, "gates")] == ([3, 6] if kind == "nsa" else [])
    speed = lines_of(out, "speed")
    assert {"step", "tokens_per_s", "step_s", "data_wait", "cpu_cores", "cost"} == set(speed[-1])
    assert speed[-1]["tokens_per_s"] * speed[-1]["step_s"] == pytest.approx(trainer.tokens_per_step, rel=1e-3)
    assert all("ms/step" in line for line in printed[2:])
    # What still takes time after the last step, with its sizes.
    assert re.search(r"validation \(2 batches\).*sample \(8 tokens\)", printed[-1])
    assert summary.tokens_per_s is not None
    assert summary.tokens_per_s > 0
    assert summary.fallbacks == {}
    assert summary.sample.startswith("def ")
    assert "fallbacks: none" in str(summary)
    assert summary.report == out / "report.html"
    assert summary.report.is_file()
    assert (out / "tokenizer.json").is_file()
    assert (out / "model.safetensors").stat().st_mode == (out / "model.json").stat().st_mode
    record = json.loads((out / "run.json").read_text())
    assert record["hash"] == config.hash
    assert record["environment"]["torch"] == torch.__version__
    assert {"driver", "cuda", "cudnn", "nvml", "tf32", "variables"} <= set(record["environment"])
    assert run_info.config_of(out) == config

    loaded = load_model(out)
    for name, parameter in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter)


def test_packed_documents_train(tmp_path: Path) -> None:
    data = DataConfig(source="text", path=str(Path(run_info.__file__).parent / "*.py"), pack=True, prefetch=False)
    trainer = Trainer(small_run(tmp_path, kind="nsa", data=data, steps=2))
    assert trainer.validator.batches[0].cu_seqlens is not None
    summary = trainer.train()
    assert summary is not None


def test_a_run_of_one_step_claims_no_speed(tmp_path: Path) -> None:
    summary = Trainer(small_run(tmp_path, steps=1)).train()
    assert summary is not None
    assert summary.tokens_per_s is None
    assert "tokens/s" not in str(summary)
    assert "not measured" in str(summary)
    (end,) = lines_of(tmp_path, "end")
    # The report is written from this line, so it is not there yet.
    assert (end["tokens_per_s"], end["report"]) == (None, None)


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Trainer(small_run(tmp_path / name, kind="nsa", steps=3)).train()
    assert lines_of(tmp_path / "a", "step") == lines_of(tmp_path / "b", "step")


def test_looking_at_the_attention_leaves_nothing_behind() -> None:
    model = LM(small_run(Path(), kind="nsa").model)
    batch = random_batch(2, 32)
    expected = model(batch.tokens, batch.targets)
    gates, distances = attention_stats(model, batch, torch.float32).values()
    assert set(gates["mean"][0]) == {"cmp", "sel", "win"}
    # Every query of every group takes all the blocks there are, up to n_sel = 4 of 8 tokens.
    assert sum(distances["counts"]) == 2 * 8 * (1 + 2 + 3 + 4)
    attention = model.blocks[0].attention
    assert not attention._forward_hooks
    assert not attention._forward_pre_hooks
    assert torch.equal(model(batch.tokens, batch.targets), expected)
    with watching(model) as nothing:
        assert nothing == {}


def test_a_tokenizer_must_fit_the_vocabulary(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    with pytest.raises(ValueError, match=r"model\.vocab_size is 100"):
        Trainer(replace(config, model=replace(config.model, vocab_size=100)))


def test_a_prompt_without_tokens_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may have no token for any of its characters, and the run would find out at its end."""
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [])
    with pytest.raises(ValueError, match="sample_prompt is 'def '"):
        Trainer(small_run(tmp_path))


def test_a_run_in_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    out = tmp_path / "r\udcff"
    summary = Trainer(small_run(out)).train()
    assert summary is not None
    assert summary.report == out / "report.html"
    assert "\\udcff" in summary.report.read_text()


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ([], {"NSA_SEQ_LEN": "abc"}, "NSA_SEQ_LEN is 'abc'"),
        (["--steps", "-1"], {}, "steps is -1"),
        (["--device", "gpu"], {}, "device is 'gpu'"),
        (["--set", "stpes=3"], {}, "'stpes' is not "),
        (["--dataset", "text", "--data-path", "/nowhere"], {}, "/nowhere"),
        (["--parallel", "ddp"], {}, "parallel is 'ddp'; accepted: 'none'"),
        (["--resume", "/nowhere"], {}, "/nowhere"),
        pytest.param(
            ["--device", "cuda"],
            {},
            "device is 'cuda'; accepted: 'cpu'",
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
    tmp_path: Path,
) -> None:
    environment(**variables)
    out = [] if "--resume" in words else ["--out", str(tmp_path / "run")]
    assert cli.main(["train", "--device", "cpu", *out, *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("nsa train: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_the_command_trains_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], environment: Callable[..., None]
) -> None:
    words = ["--steps", "2", "--seq-len", "32", "--batch-size", "1", "--attention", "dense", "--out", str(tmp_path)]
    assert cli.main(["train", "--preset", "tiny", "--device", "cpu", *words, "--set", "sample_tokens=8"]) == 0
    printed = capsys.readouterr().out
    assert "validation loss" in printed
    assert f"report {tmp_path / 'report.html'}" in printed
    assert f"nsa generate --run {tmp_path}" in printed
    words = ["--resume", str(tmp_path), "--steps", "3"]
    assert cli.main(["train", *words]) == 0
    printed = capsys.readouterr().out
    assert f"[resume] step 2 of {tmp_path}" in printed
    assert "[resume] steps: 2 -> 3" in printed
    assert cli.main(["train", "--config", str(tmp_path), "--diff", str(tmp_path), "--lr", "1e-4"]) == 0
    printed = capsys.readouterr().out
    assert "lr: 0.003 -> 0.0001" in printed
    assert "steps" not in printed
    (tmp_path / "run.json").write_text('{"ha')
    assert cli.main(["train", "--config", str(tmp_path), "--diff", str(tmp_path)]) == 2
    assert f"nsa train: error: {tmp_path / 'run.json'} is damaged: " in capsys.readouterr().err


def test_changes_on_resume_are_reported_and_each_start_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(small_run(tmp_path, steps=2)).train()
    Trainer(small_run(tmp_path, steps=6, batch_size=4)).train()
    assert re.search(r"\[resume\] tokens .* 64 on 1 .* 128 on 1; --accum-batches", capsys.readouterr().out)
    Trainer(small_run(tmp_path, steps=8, batch_size=4)).train()
    assert "--accum-batches" not in capsys.readouterr().out
    record = json.loads((tmp_path / "run.json").read_text())
    assert [record["from_step"], *(start["from_step"] for start in record["before"])] == [6, 0, 2]
    with pytest.raises(ValueError, match=r"steps is 7; accepted: at least .*\b8\b"):
        Trainer(small_run(tmp_path, steps=7, batch_size=4)).train()
    (tmp_path / "run.json").write_text('{"ha')
    with pytest.raises(ValueError, match=r"run.json is damaged"):
        Trainer(small_run(tmp_path, steps=9, batch_size=4)).train()
    assert max(record["step"] for record in lines_of(tmp_path, "step")) == 8


def test_gates_are_exempt_from_weight_decay_if_asked() -> None:
    model = LM(PRESETS["tiny"])
    gates = {p for block in model.blocks for p in block.attention.gate.parameters()}
    for exempt in (False, True):
        update = TrainStep(model, dtype=torch.float32, compile=False, gate_decay=not exempt)
        decayed, kept = (set(group["params"]) for group in update.optimizer.param_groups)
        matrices = {p for p in model.parameters() if p.dim() >= 2}
        assert decayed == (matrices - gates if exempt else matrices)
        assert decayed | kept == set(model.parameters())


def test_a_run_starts_from_the_parameters_of_another(tmp_path: Path) -> None:
    first = small_run(tmp_path / "first", "nsa", steps=2)
    Trainer(first).train()
    longer = replace(first.model, seq_len=64)
    second = replace(first, out=tmp_path / "second", model=longer, init=str(first.out), lr=1e-9)
    Trainer(second).train()
    before, after = load_model(first.out), load_model(second.out)
    for (name, x), y in zip(before.state_dict().items(), after.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=0, msg=name)
    # What is resumed does not need them any more.
    Trainer(replace(second, init=str(tmp_path / "gone"))).train()


def test_parameters_that_do_not_fit_are_named(tmp_path: Path) -> None:
    first = small_run(tmp_path / "first", "nsa", steps=1)
    Trainer(first).train()
    other = replace(first, out=tmp_path / "other", init=str(first.out), model=replace(first.model, hidden=32))
    with pytest.raises(ValueError, match=r"model\.safetensors .*not fit"):
        Trainer(other)
    with pytest.raises(ValueError, match="folder is"):
        Trainer(replace(other, init=str(tmp_path / "nowhere")))


def test_the_init_flag_takes_the_model_of_a_run(tmp_path: Path) -> None:
    first = small_run(tmp_path / "first", "nsa", steps=1)
    Trainer(first).train()
    other = replace(first, out=tmp_path / "other", model=replace(first.model, hidden=32, seq_len=64))
    words = ["train", "--config", config_file(tmp_path, other), "--init", str(first.out), "--out", str(other.out)]
    assert cli.main(words) == 0
    assert load_model(other.out).config == replace(first.model, seq_len=64)
    (first.out / "model.json").write_text("{}")
    assert cli.main(words) == 2
