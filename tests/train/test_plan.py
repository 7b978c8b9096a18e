"""Plans: memory near what was measured, speed that says where it comes from, wrong words with the nearest right one."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_rows import ROW
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa import cli
from nsa.backends.routing import build_router
from nsa.data import DataConfig, load_tokenizer, train_bpe
from nsa.data.documents import standard_library
from nsa.data.prepare import list_files
from nsa.data.shards import ShardWriter
from nsa.model import LM, LMConfig
from nsa.results import Row, append
from nsa.settings import Settings
from nsa.train import plan as planning
from nsa.train import preflight
from nsa.train.config import TrainConfig, load_config
from nsa.train.plan import GIB, GPUS, RESULTS, RunPlan, find_corpus, launch_s, measurements, plan_run, render


def config(**overrides: object) -> TrainConfig:
    given = {"device": "cuda", "parallel": "none"} | {name.replace("__", "."): x for name, x in overrides.items()}
    return load_config("125m", given)


def on_paper(model: LMConfig) -> LM:
    with torch.device("meta"):
        return LM(model)


def row(**changes: object) -> Row:
    return replace(ROW, **({"impl": "nsa-triton-graphs", "peak_gib": 8.0, "tokens_per_s": 200_000.0} | changes))


def test_a_measured_run_is_as_fast_as_it_was_measured() -> None:
    found = plan_run(config(), "h200", price=2.0, rows=[row(), row(impl="nsa-sdpa-graphs", tokens_per_s=60_000.0)])
    assert (found.gpu, found.basis) == ("H200", "measured")
    assert found.source.startswith("measured: nsa-triton-graphs, B 8, S 2048, 200,000 tokens/s")
    assert found.tokens_per_s == pytest.approx(200_000)
    assert found.step_s == pytest.approx(8 * 2048 / 200_000)
    assert found.total_s == pytest.approx(found.step_s * config().steps)
    assert found.cost == pytest.approx(found.total_s / 3600 * 2.0)
    assert found.fits


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 1},
        {"model__seq_len": 512},
        {"model__n_layers": 24},
        {"compile": False, "cuda_graphs": False},
        {"data__pack": True},
        {"gc": True},
        {"dtype": "float16"},
        {"model__attention": "sliding"},
        {"model__attention": "longformer"},
        {"model__attention": "bigbird"},
        {"model__attention": ["nsa"] * 6 + ["dense"] * 6},
        {"model__attn__backend": "sdpa"},
        {"model__attn__backend": "reference"},
    ],
    ids=str,
)
def test_unmeasured_step_time_is_an_estimate_above_launch_time(changes: dict[str, object]) -> None:
    """Not the rate of another batch, length, kind of attention or backend."""
    rows = [row(), row(impl="dense-sdpa-graphs", tokens_per_s=400_000.0)]
    given = config(**changes)
    found = plan_run(given, "H200", rows=rows)
    assert found.basis != "measured"
    assert found.source.startswith("estimate: ")
    assert found.step_s > launch_s(given.model)
    assert found.tokens_per_s not in (pytest.approx(200_000, rel=1e-3), pytest.approx(400_000, rel=1e-3))


@pytest.mark.slow
@settings(max_examples=5)
@given(batch=st.integers(1, 64), length=st.integers(1, 64).map(lambda n: 64 * n))
def test_step_time_grows_with_batch_and_exceeds_launch_time(batch: int, length: int) -> None:
    small, large = (
        plan_run(config(batch_size=n, model__seq_len=length), "H200", rows=[row(B=1000)]) for n in (batch, batch + 1)
    )
    assert launch_s(config().model) < small.step_s < large.step_s


def test_a_row_of_the_batch_size_is_found(tmp_path: Path) -> None:
    for changes in ({}, {"B": 1, "tokens_per_s": 150_000.0}, {"B": 1, "impl": "nsa-sdpa-graphs"}):
        append(tmp_path / "h200" / "train.csv", row(**changes))
    rows = measurements(tmp_path)
    for batch, rate in ((8, 200_000), (1, 150_000)):
        found = plan_run(config(batch_size=batch), "H200", rows=rows)
        assert (found.basis, found.tokens_per_s) == ("measured", pytest.approx(rate))
    # The nearest in tokens of a batch.
    assert "B 1, S 2048" in plan_run(config(batch_size=2), "H200", rows=rows).source
    assert "B 8, S 2048" in plan_run(config(batch_size=6), "H200", rows=rows).source


def test_parity_takes_no_rate_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = row()
    parity = Settings.load(environ={"NSA_FORCE_PARITY": "1"})
    monkeypatch.setattr(planning.settings, "current", lambda: parity)
    found = plan_run(config(), "H200", rows=[kernels])
    assert found.basis == "estimated"
    assert found.tokens_per_s < 20_000
    reference = row(impl="nsa-reference", tokens_per_s=3_000.0)
    assert "nsa-reference" in plan_run(config(), "H200", rows=[kernels, reference]).source
    # Dense attention is torch's own under parity too.
    dense = row(impl="dense-sdpa-graphs", tokens_per_s=400_000.0)
    assert plan_run(config(model__attention="dense"), "H200", rows=[dense]).basis == "measured"


def test_activation_checkpointing_has_rows_of_its_own() -> None:
    plain, gc = row(), row(impl="nsa-triton-gc-graphs", tokens_per_s=150_000.0)
    assert plan_run(config(), "H200", rows=[gc]).basis == "estimated"
    assert plan_run(config(), "H200", rows=[plain, gc]).tokens_per_s == pytest.approx(200_000)
    found = plan_run(config(gc=True), "H200", rows=[plain, gc])
    assert (found.basis, found.tokens_per_s) == ("measured", pytest.approx(150_000))


def test_another_model_or_length_is_scaled_by_flops() -> None:
    rows = [row(), row(S=32768, B=1, tokens_per_s=150_000.0)]
    deep = config(model__n_layers=24)
    found = plan_run(deep, "H200", rows=rows)
    assert found.basis == "scaled"
    assert "scaled by FLOPs from nsa-triton-graphs, B 8, S 2048" in found.source
    more = on_paper(deep.model).flops_per_token(2048) / on_paper(config().model).flops_per_token(2048)
    assert found.step_s == pytest.approx(8 * 2048 / 200_000 * more + launch_s(deep.model))
    long = plan_run(config(model__seq_len=20_000), "H200", rows=rows)
    assert "S 32768" in long.source, "the nearest length"


def test_unmeasured_gpu_uses_the_fraction_of_peak_and_says_so() -> None:
    there, here = plan_run(config(), "H200", rows=[row()]), plan_run(config(), "A100", rows=[row()])
    assert here.basis == "assumed"
    assert "as nsa-triton-graphs" in here.source
    arithmetic = here.step_s - launch_s(config().model)
    assert there.step_s / arithmetic == pytest.approx(GPUS["A100"].flops / GPUS["H200"].flops)
    nothing = plan_run(config(), "A100", rows=[row(impl="dense-sdpa"), row(gpu="cpu"), row(tokens_per_s=None)])
    assert (nothing.basis, "nothing measured" in nothing.source) == ("estimated", True)


def test_a_model_of_another_size_takes_no_measured_rate() -> None:
    """The 80 million tokens per second of a tiny model that the rate of a large one gave."""
    for name in ("tiny", "1b"):
        found = plan_run(load_config(name, {"device": "cuda", "parallel": "none"}), "H200", rows=[row()])
        assert found.basis == "estimated"
        assert "similar size" in found.source
        if name == "tiny":
            assert found.tokens_per_s < 1e7
            assert " 0.6" in render(load_config(name, {"device": "cuda"}), [found])
    assert plan_run(load_config("340m", {"device": "cuda"}), "H200", rows=[row()]).basis == "scaled"


def test_only_rows_of_what_the_run_has_are_taken() -> None:
    graphs = row(tokens_per_s=300_000.0)
    compiled = row(impl="nsa-triton-compiled", tokens_per_s=250_000.0)
    eager, torchs = row(impl="nsa-triton"), row(impl="nsa-sdpa", tokens_per_s=60_000.0)
    several = config(parallel="ddp", cuda_graphs=False)
    assert "nsa-triton-graphs" in plan_run(config(), "H200", rows=[eager, graphs, torchs]).source
    # Ranks turn graphs off, also where the config is one of a single process.
    for run in (several, config()):
        assert "nsa-triton-compiled" in plan_run(run, "H200", gpus=8, rows=[eager, graphs, compiled, torchs]).source
    assert "nsa-triton," in plan_run(config(compile=False, cuda_graphs=False), "H200", rows=[eager, compiled]).source
    # `auto` would not take torch's own path only because it alone was measured without graphs.
    without = plan_run(several, "H200", gpus=8, rows=[graphs, torchs])
    assert re.search("backend auto .*CUDA graphs", without.source)
    assert without.tokens_per_s < 8 * plan_run(config(), "H200", rows=[graphs]).tokens_per_s
    named = config(model__attn__backend="sdpa")
    assert "nsa-sdpa," in plan_run(named, "H200", rows=[graphs, torchs]).source
    assert "backend sdpa " in plan_run(named, "H200", rows=[graphs]).source


def test_kinds_are_not_mixed_up() -> None:
    rows = [row(), row(impl="dense-sdpa-graphs", tokens_per_s=400_000.0), row(impl="sliding-triton-graphs")]
    dense = plan_run(config(model__attention="dense"), "H200", rows=rows)
    assert "dense-sdpa" in dense.source
    assert dense.tokens_per_s == pytest.approx(400_000)
    assert plan_run(config(model__attention="sliding"), "H200", rows=rows).basis == "measured"


# Peaks that an H200 showed once: memory is held to these whatever rows the folder has today.
PEAKS = [row(peak_gib=8.832), row(impl="dense-sdpa-graphs", peak_gib=7.252)]


def is_fused(row: Row) -> bool:
    """Torch's own path and the alternatives keep other things, and other heads are other models."""
    return row.impl.startswith(("nsa-triton", "dense")) and (row.Hq, row.dtype) == (12, "bfloat16")


FUSED = [row for row in (*measurements(RESULTS), *PEAKS) if is_fused(row) and row.peak_gib is not None]


def test_there_are_measured_peaks_of_both_attentions() -> None:
    assert {row.impl.split("-")[0] for row in FUSED} == {"nsa", "dense"}


@pytest.mark.parametrize("row", FUSED, ids=lambda row: f"{row.impl}-{row.B}-{row.S}")
def test_memory_is_near_every_measured_peak_of_a_fused_path(row: Row) -> None:
    assert row.peak_gib is not None
    kind = row.impl.split("-")[0]
    given = config(model__attention=kind, model__seq_len=row.S, batch_size=row.B, gc="-gc" in row.impl)
    found = plan_run(given, "H200").memory.total / GIB
    # The peaks of the parts do not fall together, which shows where a batch is small.
    assert 0.9 * row.peak_gib < found < max(1.3 * row.peak_gib, row.peak_gib + 1)


def test_memory_follows_the_choices() -> None:
    plain = plan_run(config(), "H200").memory
    params = sum(on_paper(config().model).parameter_counts().values())
    assert (plain.gradients, plain.optimizer) == (4 * params, 8 * params)
    gc = plan_run(config(gc=True), "H200")
    assert gc.memory.activations < plain.activations / 3
    launches = launch_s(config().model)
    assert gc.step_s - launches == pytest.approx((plan_run(config(), "H200").step_s - launches) * 4 / 3)
    assert gc.source.endswith("for gc")
    sharded = plan_run(config(parallel="fsdp", cuda_graphs=False), "H200", gpus=8).memory
    assert sharded.optimizer == plain.optimizer / 8
    assert sharded.activations == plain.activations
    assert plan_run(config(batch_size=16), "H200").memory.activations == 2 * plain.activations
    assert not plan_run(config(batch_size=512), "H200").fits


def test_more_gpus_are_faster_and_cost_the_same() -> None:
    one, eight = (
        plan_run(config(parallel="ddp", cuda_graphs=False), "H200", gpus=gpus, price=1.0, rows=[row()])
        for gpus in (1, 8)
    )
    assert eight.tokens_per_s == pytest.approx(8 * one.tokens_per_s)
    assert eight.tokens_per_step == 8 * one.tokens_per_step
    assert eight.step_s == pytest.approx(one.step_s)
    assert eight.cost == pytest.approx(8 * one.cost), "eight times the tokens in the same steps"


def test_wrong_words_are_named() -> None:
    with pytest.raises(ValueError, match=r"gpu is 'H20'; accepted: .* is H200"):
        plan_run(config(), "H20")
    with pytest.raises(ValueError, match="gpus is 0"):
        plan_run(config(), "H200", gpus=0)
    with pytest.raises(ValueError, match=r"price is -1.0"):
        plan_run(config(), "H200", price=-1.0)
    with pytest.raises(ValueError, match="dtype is 'float32'"):
        plan_run(config(dtype="float32"), "H200")


def parse(*words: str) -> argparse.Namespace:
    return cli.parser_of("plan").parse_args(words)


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path / "h200" / "train.csv", row())
    words = ["--config", "125m", "--gpu", "H200", "RTX 4090", "--price", "2", "--results", str(tmp_path)]
    assert planning.run(parse(*words, "--set", "steps=1000", "--set", "batch_size=64")) == 0
    printed = capsys.readouterr().out
    table, _, last = printed.rstrip("\n").rpartition("\n")
    assert "1,000 steps of 131,072 tokens" in table
    assert "50,001 are unused" in table
    assert "not fit" in table
    plans = json.loads(last)
    assert [(entry["gpu"], entry["fits"]) for entry in plans] == [("H200", True), ("RTX 4090", False)]
    assert {entry["unused_vocabulary"] for entry in plans} == {50_001}
    assert plans[0]["passes"] == pytest.approx(1000 * 131_072 / standard_library().bytes)
    empty = tmp_path / "none"
    empty.mkdir()
    assert planning.run(parse("--config", "tiny", "--gpus", "2", "--results", str(empty))) == 0
    assert "nothing measured" in capsys.readouterr().out


def test_passes_are_counted_in_tokens_of_the_run_s_own_tokenizer(tmp_path: Path) -> None:
    texts = [f"line {n} of a text that repeats itself\n" * (1 + n % 7) for n in range(40)]
    size = sum(map(len, texts))
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_bpe(texts, 300).save(tmp_path / "bpe")
    bpe = load_tokenizer(tmp_path / "bpe")
    tokens = sum(len(bpe.encode(text)) for text in texts)
    assert tokens < size / 2

    def counted(**data: str) -> float | None:
        return find_corpus(DataConfig(**data), seq_len=8).tokens

    assert counted(source="text", path=str(folder)) == size
    # From a sample of the files, in proportion to their bytes.
    assert counted(source="text", path=str(folder), tokenizer=str(tmp_path / "bpe")) == pytest.approx(tokens, rel=0.2)
    # Every line is read, and each document has an end.
    assert counted(source="jsonl", path=str(tmp_path / "lines.jsonl")) == size + len(texts)
    assert counted(source="synthetic") is None


def test_shards_know_their_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    for split in ("train", "valid"):
        writer = ShardWriter(tmp_path, split, tokenizer, 100)
        writer.add(tokenizer.encode_documents(["x" * 30] * 20))
        writer.publish()
    tokenizer.save(tmp_path)
    list_files(tmp_path).write(tmp_path)
    corpus = find_corpus(DataConfig(source="shards", path=str(tmp_path)), seq_len=8)
    assert corpus.tokens == 20 * 31
    assert corpus.passes(20 * 31 * 3.5) == 3.5


def test_a_plan_is_made_where_the_data_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--set", "data.source=shards", "--set", f"data.path={tmp_path / 'elsewhere'}"]
    assert planning.run(parse("--config", "125m", *data)) == 0
    table, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    assert str(tmp_path / "elsewhere") in table
    assert json.loads(last)[0]["passes"] is None


def test_mixed_layers_can_be_planned() -> None:
    kinds = ["nsa"] * 6 + ["dense", "sliding", "longformer"] * 2
    mixed = config(model__attention=kinds)
    assert isinstance(mixed.model, LMConfig)
    found = plan_run(mixed, "B200")
    assert isinstance(found, RunPlan)
    assert "B200" in render(mixed, [found])


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_a_file_where_the_run_s_folder_should_be_is_a_problem(below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    given = load_config("tiny", {"device": "cpu", "out": str(file / below)})
    assert [problem for problem in preflight.folder_problems(given) if f"{file} is " in problem]


def test_a_device_that_is_not_there_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    """Before anything is put on it; the other problems are listed too."""
    given = load_config("tiny", {"device": "cuda:99", "data.source": "text", "data.path": str(tmp_path)})
    absent = preflight.missing_device(given)
    assert absent is not None
    assert absent.startswith("device is 'cuda:99'; accepted: ")
    found = preflight.problems(given, build_router(Settings()))
    assert found[0] == absent
    assert all("data: data.path is" in problem for problem in found[1:])
    assert len(found) == 3
    assert preflight.missing_device(load_config("tiny", {"device": "cpu"})) is None
