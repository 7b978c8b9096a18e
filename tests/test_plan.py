"""Plans: memory near what was measured, speed that says where it comes from, wrong words with the nearest right one."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_rows import ROW

from nsa import cli
from nsa.backends.routing import build_router
from nsa.bench.results import Row, append
from nsa.model import LM, LMConfig
from nsa.settings import Settings
from nsa.train import plan as planning
from nsa.train import preflight
from nsa.train.config import TrainConfig, load_config
from nsa.train.plan import GIB, PEAK_FLOPS, RESULTS, Plan, measurements, plan, render


def config(**overrides: object) -> TrainConfig:
    given = {"device": "cuda", "parallel": "none"} | {name.replace("__", "."): x for name, x in overrides.items()}
    return load_config("125m", given)


def on_paper(model: LMConfig) -> LM:
    with torch.device("meta"):
        return LM(model)


def row(**changes: object) -> Row:
    return replace(ROW, **({"impl": "nsa-triton", "peak_gib": 8.0, "tokens_per_s": 200_000.0} | changes))


def test_a_measured_model_runs_as_fast_as_it_was_measured() -> None:
    found = plan(config(), "h200", price=2.0, rows=[row(), row(impl="nsa-sdpa", tokens_per_s=60_000.0)])
    assert found.gpu == "H200"
    assert found.source.startswith("measured: nsa-triton, B 8, S 2048, 200,000 tokens/s")
    assert found.tokens_per_s == pytest.approx(200_000)
    assert found.step_s == pytest.approx(8 * 2048 / 200_000)
    assert found.total_s == pytest.approx(found.step_s * config().steps)
    assert found.cost == pytest.approx(found.total_s / 3600 * 2.0)
    assert found.fits


def test_another_model_or_length_is_carried_over_by_flops() -> None:
    rows = [row(), row(S=32768, B=1, tokens_per_s=150_000.0)]
    deep = config(model__n_layers=24)
    found = plan(deep, "H200", rows=rows)
    assert found.source.startswith("carried over by FLOPs from: nsa-triton, B 8, S 2048")
    more = on_paper(deep.model).flops_per_token(2048) / on_paper(config().model).flops_per_token(2048)
    assert found.tokens_per_s == pytest.approx(200_000 / more)
    long = plan(config(model__seq_len=20_000), "H200", rows=rows)
    assert "S 32768" in long.source, "the nearest length"


def test_a_gpu_without_rows_takes_the_part_of_the_peak_and_says_so() -> None:
    there, here = plan(config(), "H200", rows=[row()]), plan(config(), "A100", rows=[row()])
    assert here.source.startswith("assumed: ")
    assert "of the peak, as nsa-triton" in here.source
    assert here.tokens_per_s / there.tokens_per_s == pytest.approx(PEAK_FLOPS["A100"] / PEAK_FLOPS["H200"])
    nothing = plan(config(), "A100", rows=[row(impl="dense-sdpa"), row(gpu="cpu"), row(tokens_per_s=None)])
    assert nothing.source == "estimated from FLOPs alone: at most 20% of the peak; nothing measured"


def test_a_model_of_another_size_takes_no_measured_rate() -> None:
    """The 80 million tokens a second of a tiny model that the rate of a large one gave."""
    for name in ("tiny", "1b"):
        found = plan(load_config(name, {"device": "cuda", "parallel": "none"}), "H200", rows=[row()])
        assert found.source.startswith("estimated from FLOPs alone: at most 20% of the peak; no model of a like size")
        if name == "tiny":
            assert found.tokens_per_s < 1e7
            assert " 0.6 ms" in render(load_config(name, {"device": "cuda"}), [found])
    assert plan(load_config("340m", {"device": "cuda"}), "H200", rows=[row()]).source.startswith("carried over")


def test_only_rows_of_what_the_run_has_are_taken() -> None:
    graphs = row(impl="nsa-triton-graphs", tokens_per_s=300_000.0)
    compiled = row(impl="nsa-triton-compiled", tokens_per_s=250_000.0)
    eager, torchs = row(), row(impl="nsa-sdpa", tokens_per_s=60_000.0)
    several = config(parallel="ddp", cuda_graphs=False)
    assert "nsa-triton-graphs" in plan(config(), "H200", rows=[eager, graphs, torchs]).source
    # Ranks turn graphs off, also where the config is one of a single process.
    for given in (several, config()):
        assert "nsa-triton-compiled" in plan(given, "H200", gpus=8, rows=[eager, graphs, compiled, torchs]).source
    assert "nsa-triton," in plan(config(compile=False, cuda_graphs=False), "H200", rows=[eager, compiled]).source
    # `auto` would not take torch's own path only because it alone was measured without graphs.
    without = plan(several, "H200", gpus=8, rows=[graphs, torchs])
    assert without.source.endswith("no model of a like size was measured with backend auto without CUDA graphs")
    assert without.tokens_per_s < 8 * plan(config(), "H200", rows=[graphs]).tokens_per_s
    named = config(model__attn__backend="sdpa")
    assert "nsa-sdpa," in plan(named, "H200", rows=[graphs, torchs]).source
    assert "measured with backend sdpa at all" in plan(named, "H200", rows=[graphs]).source


def test_kinds_are_not_mixed_up() -> None:
    rows = [row(), row(impl="dense-sdpa", tokens_per_s=400_000.0)]
    dense = plan(config(model__attention="dense"), "H200", rows=rows)
    assert "dense-sdpa" in dense.source
    assert dense.tokens_per_s == pytest.approx(400_000)


# Peaks that an H200 showed once: memory is held to these whatever rows the folder has today.
PEAKS = [row(impl="nsa-triton-graphs", peak_gib=8.832), row(impl="dense-sdpa-graphs", peak_gib=7.252)]


@pytest.mark.parametrize("row", [*measurements(RESULTS), *PEAKS], ids=lambda row: f"{row.impl}-{row.S}")
def test_memory_is_near_every_measured_peak_of_a_fused_path(row: Row) -> None:
    if row.impl.startswith("nsa-sdpa") or row.peak_gib is None or (row.Hq, row.dtype) != (12, "bfloat16"):
        pytest.skip("torch's own path keeps other things, and other heads are other models")
    kind = row.impl.split("-")[0]
    given = config(model__attention=kind, model__seq_len=row.S, batch_size=row.B)
    assert 0.9 < plan(given, "H200").memory.total / GIB / row.peak_gib < 1.3


def test_memory_follows_the_choices() -> None:
    plain = plan(config(), "H200").memory
    params = sum(on_paper(config().model).parameter_counts().values())
    assert (plain.gradients, plain.optimizer) == (4 * params, 8 * params)
    gc = plan(config(gc=True), "H200")
    assert gc.memory.activations < plain.activations / 3
    assert gc.tokens_per_s == pytest.approx(plan(config(), "H200").tokens_per_s * 3 / 4)
    assert gc.source.endswith("times 3/4, which is arithmetic, for gc")
    sharded = plan(config(parallel="fsdp", cuda_graphs=False), "H200", gpus=8).memory
    assert sharded.optimizer == plain.optimizer / 8
    assert sharded.activations == plain.activations
    assert plan(config(batch_size=16), "H200").memory.activations == 2 * plain.activations
    assert not plan(config(batch_size=512), "H200").fits


def test_more_gpus_are_faster_and_cost_the_same() -> None:
    one, eight = (
        plan(config(parallel="ddp", cuda_graphs=False), "H200", gpus=gpus, price=1.0, rows=[row()]) for gpus in (1, 8)
    )
    assert eight.tokens_per_s == pytest.approx(8 * one.tokens_per_s)
    assert eight.tokens_per_step == 8 * one.tokens_per_step
    assert eight.step_s == pytest.approx(one.step_s)
    assert eight.cost == pytest.approx(8 * one.cost), "eight times the tokens in the same steps"


def test_wrong_words_are_named() -> None:
    with pytest.raises(ValueError, match=r"gpu is 'H20'; accepted: one of .*; the nearest is H200"):
        plan(config(), "H20")
    with pytest.raises(ValueError, match="gpus is 0"):
        plan(config(), "H200", gpus=0)
    with pytest.raises(ValueError, match=r"price is -1.0"):
        plan(config(), "H200", price=-1.0)
    with pytest.raises(ValueError, match="dtype is 'float32'"):
        plan(config(dtype="float32"), "H200")


def parse(*words: str) -> argparse.Namespace:
    return cli.parser_of("plan").parse_args(words)


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path / "h200" / "train.csv", row())
    words = ["--config", "125m", "--gpu", "H200", "RTX 4090", "--price", "2", "--results", str(tmp_path)]
    assert planning.run(parse(*words, "--set", "steps=1000", "--set", "batch_size=64")) == 0
    printed = capsys.readouterr().out
    table, _, last = printed.rstrip("\n").rpartition("\n")
    assert "1,000 steps of 131,072 tokens" in table
    assert "where it does not fit" in table
    plans = json.loads(last)
    assert [(entry["gpu"], entry["fits"]) for entry in plans] == [("H200", True), ("RTX 4090", False)]
    assert planning.run(parse("--config", "tiny", "--gpus", "2", "--results", str(tmp_path / "none"))) == 0
    assert "nothing measured" in capsys.readouterr().out


def test_every_gpu_has_a_peak_and_mixed_layers_can_be_planned() -> None:
    assert planning.MEMORY_GIB.keys() == PEAK_FLOPS.keys()
    kinds = ["nsa"] * 6 + ["dense", "sliding", "longformer"] * 2
    mixed = config(model__attention=kinds)
    assert isinstance(mixed.model, LMConfig)
    found = plan(mixed, "B200")
    assert isinstance(found, Plan)
    assert "B200" in render(mixed, [found])


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_a_file_where_the_run_s_folder_should_be_is_a_problem(below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    given = load_config("tiny", {"device": "cpu", "out": str(file / below)})
    assert [problem for problem in preflight.folder_problems(given) if f"{file} is a file" in problem]


def test_a_device_that_is_not_there_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    """Before anything is put on it; the other problems are listed too."""
    given = load_config("tiny", {"device": "cuda:99", "data.source": "text", "data.path": str(tmp_path)})
    absent = preflight.missing_device(given)
    assert absent is not None
    assert absent.startswith("device is 'cuda:99'; accepted: ")
    found = preflight.problems(given, build_router(Settings()), {})
    assert found[0] == absent
    assert all("data: data.path is" in problem for problem in found[1:])
    assert len(found) == 3
    assert preflight.missing_device(load_config("tiny", {"device": "cpu"})) is None
