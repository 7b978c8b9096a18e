"""Configs: what a file, the environment and the command line say together, and what they may not say."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import config_file, small_run

from nsa import cli, train
from nsa.model import LM, PRESETS
from nsa.settings import Settings
from nsa.train.command import config_from
from nsa.train.config import (
    TrainConfig,
    configs_folder,
    diff,
    fitted_schedule,
    keys_of,
    load_config,
    merged,
    moved,
    to_tree,
    write_yaml,
)

NAMES = sorted(path.stem for path in configs_folder().glob("*.yaml"))
PLAIN = Settings.load(environ={})


def parse(*words: str) -> argparse.Namespace:
    return cli.parser_of("train").parse_args(["--device", "cpu", *words])


def test_every_promised_config_is_there() -> None:
    assert NAMES == ["125m", "125m-32k", "1b", "340m", "tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_a_config_loads_and_has_its_dense_twin(name: str) -> None:
    config = load_config(name, env=PLAIN)
    twin = load_config(name, {"model.attention": "dense"}, env=PLAIN)
    assert set(diff(config, twin)) == {"model.attention"}
    with torch.device("meta"):
        sizes = [sum(LM(c.model).parameter_counts().values()) for c in (config, twin)]
    expected = {"tiny": 0.5e6, "125m": 125e6, "125m-32k": 125e6, "340m": 345e6, "1b": 1.1e9}[name]
    assert sizes[0] == pytest.approx(expected, rel=0.05)
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_presets_are_the_configs(name: str) -> None:
    assert load_config(name, env=PLAIN).model == PRESETS[name]


@pytest.mark.parametrize("preset", ["nano", "[tiny]", "7"])
def test_an_unknown_preset_is_named_with_its_file(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"model: {{preset: {preset}}}")
    with pytest.raises(ValueError, match=rf"model\.preset in {path}.*{preset.strip('[]')}.*125m"):
        load_config(path, env=PLAIN)


def test_a_file_may_change_its_preset(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: {preset: tiny, n_layers: 3, attn: {w: 64}}\nsteps: 1\nbatch_size: 1\nlr: 0.1")
    tiny = PRESETS["tiny"]
    assert load_config(path, env=PLAIN).model == replace(tiny, n_layers=3, attn=replace(tiny.attn, w=64))


def test_precedence_is_command_line_then_environment_then_file() -> None:
    env = Settings.load(
        environ={"NSA_SEQ_LEN": "128", "NSA_BATCH_SIZE": "3", "NSA_ACCUM": "2", "NSA_NO_GC": "1",
                 "NSA_FWE_DOC_BATCH": "7", "NSA_FWE_PREFETCH": "0", "NSA_FWE_Q": "9"}
    )  # fmt: skip
    assert config_from(parse(), PLAIN).model.seq_len == 512
    config = config_from(parse("--batch-size", "5"), env)
    assert (config.model.seq_len, config.batch_size, config.accum, config.gc) == (128, 5, 2, False)
    assert (config.data.doc_batch, config.data.prefetch, config.data.queue) == (7, False, 9)
    assert config_from(parse("--seq-len", "64", "--gc"), env).model.seq_len == 64
    assert config_from(parse("--gc"), env).gc
    assert config_from(parse("--no-gc"), PLAIN).gc is False
    assert config_from(parse("--steps", "3", "--set", "steps=4"), PLAIN).steps == 4


def test_a_parser_of_ones_own_takes_the_flags_of_training() -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    assert config_from(parser.parse_args(["--device", "cpu", "--seq-len", "64"]), PLAIN).model.seq_len == 64


def test_any_key_can_be_set() -> None:
    words = ["model.attn.w=64", "lr=1e-4", "data.pack=true", "model.attention=[nsa, dense]", "schedule=wsd", "decay=5"]
    config = config_from(parse(*(x for word in words for x in ("--set", word))), PLAIN)
    assert (config.model.attn.w, config.lr, config.data.pack) == (64, 1e-4, True)
    assert config.model.attention == ("nsa", "dense")
    assert (config.schedule, config.decay) == ("wsd", 5)
    config = config_from(
        parse("--attention", "sliding,bigbird", "--accum-batches", "3", "--dataset", "synthetic"), PLAIN
    )
    assert config.model.attention == ("sliding", "bigbird")
    assert (config.accum, config.data.source) == (3, "synthetic")


def test_defaults_follow_the_device() -> None:
    config = config_from(parse(), PLAIN)
    assert (config.device, config.dtype, config.compile, config.cuda_graphs) == ("cpu", "float32", False, False)
    assert config.out.parent == Path("runs")
    on_gpu = config_from(parse("--device", "cuda"), PLAIN)
    assert (on_gpu.dtype, on_gpu.compile, on_gpu.cuda_graphs) == ("bfloat16", True, True)
    assert not config_from(parse("--device", "cuda", "--pack"), PLAIN).cuda_graphs
    assert not config_from(parse("--device", "cuda", "--no-compile"), PLAIN).cuda_graphs
    assert config.gc is on_gpu.gc is False


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("steps", 0, "steps is 0"),
        ("steps", "many", "steps is 'many'"),
        ("lr", "fast", "lr is 'fast'"),
        ("model.seq_len", -1, "seq_len is -1"),
        ("model.atn", {}, r"'model\.atn' is not .*is model\.attn"),
        ("warm_up", 3, "'warm_up' is not .*is warmup"),
        ("data.sorce", "text", r"'data\.sorce' is not .*is data\.source"),
        ("data.source", 3, "data.source is 3; accepted: text"),
        ("model", 3, "model is 3; accepted: keys"),
        ("model", None, "model is None; accepted: keys"),
        ("schedule", "linear", "schedule is 'linear'"),
        ("decay", 3, "decay is 3; accepted: 0 for .*cosine"),
        ("warmup", 180, "warmup is 180; accepted: .*steps = 180"),
        ("weight_decay", False, "weight_decay is False"),
        ("lr_floor", False, "lr_floor is False"),
        ("dtype", "int8", "dtype is 'int8'"),
        ("compile", "yes please", "compile is 'yes please'"),
        ("grad_compression", "bf16", "grad_compression is 'bf16'"),
        ("sample_prompt", "", "sample_prompt is ''"),
        ("sample_prompt", "\ud800", "sample_prompt is"),
    ],
)
def test_wrong_values_and_typos_are_named(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("tiny", {key: value}, env=PLAIN)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("125m", {}, (2000, 0)),
        ("125m", {"steps": 60000}, (2000, 0)),
        ("125m", {"steps": 2000}, (80, 0)),
        ("125m", {"steps": 2000, "warmup": 500}, (500, 0)),
        ("125m", {"steps": 2000, "schedule": "wsd"}, (80, 200)),
        ("125m", {"schedule": "wsd", "decay": 7}, (2000, 7)),
        ("340m", {"steps": 5000}, (200, 1000)),
        ("340m", {"steps": 5000, "decay": 4800}, (200, 4800)),
        ("340m", {"steps": 5000, "schedule": "wsd"}, (200, 1000)),
        ("340m", {"schedule": "cosine"}, (2000, 0)),
        ("340m", {"steps": 1}, (0, 1)),
    ],
)
def test_a_shorter_run_has_the_shape_of_the_whole_one(
    name: str, changes: dict[str, Any], expected: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(name, changes, env=PLAIN)
    assert (config.warmup, config.decay) == expected
    logged = [record.getMessage() for record in caplog.records]
    if changes == {"steps": 5000}:
        assert len(logged) == 1
        assert re.match("steps is 5000 .*50000; .*warmup 2000 -> 200, decay 10000 -> 1000$", logged[0])
    elif "steps" not in changes:
        assert logged == []


@given(st.data())
def test_a_schedule_that_fits_its_steps_fits_fewer(data: st.DataObject) -> None:
    whole = data.draw(st.integers(2, 100))
    warmup = data.draw(st.integers(0, whole - 1))
    file = {"schedule": "wsd", "steps": whole, "warmup": warmup, "decay": data.draw(st.integers(1, whole - warmup))}
    steps = data.draw(st.integers(1, whole))
    fitted = fitted_schedule(file | {"steps": steps}, file, {"steps": steps})
    assert 1 <= fitted["decay"] <= steps - fitted["warmup"]
    assert fitted["warmup"] < steps


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("125m", {"steps": 2000, "warmup": 2000}, "warmup is 2000; accepted: .*steps = 2000"),
        ("340m", {"steps": 5000, "decay": 4801}, "decay is 4801; accepted: 1 to 4800 for wsd"),
        ("340m", {"decay": 0}, "decay is 0; accepted: 1 to 48000 for wsd"),
    ],
)
def test_a_schedule_that_was_said_and_does_not_fit_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(name, changes, env=PLAIN)


def test_what_excludes_each_other_is_refused() -> None:
    for changes, why in (({"data.pack": True}, "data.pack"), ({"parallel": "ddp"}, "parallel = ddp")):
        with pytest.raises(ValueError, match=f"cuda_graphs is True; accepted: False with {why}"):
            load_config("tiny", {"device": "cuda", "cuda_graphs": True, **changes}, env=PLAIN)
    with pytest.raises(ValueError, match="dtype is 'float16'"):
        load_config("tiny", {"parallel": "fsdp", "dtype": "float16"}, env=PLAIN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "is not YAML"),
        ("- 1", "list"),
        ("steps: 3", r"lacks \['batch_size', 'lr', 'model'\]"),
        ("{steps: 3, batch_size: 1, lr: 1, model: {vocab_size: 3}}", "model.attn"),
        ("!!python/object/apply:os.system ['false']", "is not YAML"),
    ],
)
def test_a_wrong_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(path, env=PLAIN)


def test_a_name_that_is_not_there_has_a_neighbor() -> None:
    with pytest.raises(ValueError, match=r"config is 'timy'; accepted: .* is tiny$"):
        load_config("timy", env=PLAIN)
    with pytest.raises(ValueError, match=r"config is 'nowhere\.yaml'; accepted: .*file"):
        load_config("nowhere.yaml", env=PLAIN)


def test_a_name_is_a_config_and_a_path_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"--resume is 'tiny'; accepted: .*folder"):
        config_from(parse("--resume", "tiny"), PLAIN)
    run = Path("tiny")
    run.mkdir()
    write_yaml(run / "config.yaml", small_run(run))
    assert config_from(parse("--config", "tiny"), PLAIN).steps == 180
    assert config_from(parse("--config", "./tiny"), PLAIN).steps == 6
    (run / "checkpoints" / "step_0").mkdir(parents=True)
    assert config_from(parse("--resume", "tiny"), PLAIN).steps == 6
    assert load_config(run, env=PLAIN).steps == 6


def test_resumed_run_keeps_its_config_in_any_environment(tmp_path: Path) -> None:
    write_yaml(tmp_path / "config.yaml", small_run(tmp_path))
    (tmp_path / "checkpoints" / "step_0").mkdir(parents=True)
    other = Settings.load(environ={"NSA_BATCH_SIZE": "4", "NSA_SEQ_LEN": "64"})
    assert config_from(parse("--resume", str(tmp_path)), other).batch_size == 2
    assert config_from(parse("--resume", str(tmp_path), "--batch-size", "3"), other).batch_size == 3


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    for config in (
        small_run(tmp_path),
        small_run(tmp_path, model=replace(small_run(tmp_path).model, n_layers=2, attention=("nsa", "dense"))),
    ):
        again = load_config(config_file(tmp_path, config), {"out": str(tmp_path)}, env=PLAIN)
        assert again == config
        assert again.hash == config.hash


def test_the_hash_is_of_what_runs_not_of_where() -> None:
    config = small_run(Path("a"))
    assert replace(config, out=Path("b")).hash == config.hash
    assert replace(config, lr=1e-3).hash != config.hash
    assert diff(config, replace(config, lr=1e-3, out=Path("b"))) == {"lr": (1e-2, 1e-3)}


def test_a_mapping_is_laid_over_and_anything_else_replaces() -> None:
    values = {"a.b": 1, "a.c.d": 2}
    values = merged(values, {"a.c.e": 3, "a.b": 4, "x.y": 5})
    assert to_tree(values) == {"a": {"b": 4, "c": {"d": 2, "e": 3}}, "x": {"y": 5}}
    assert to_tree(merged(values, {"a.c": None}))["a"] == {"b": 4, "c": None}
    assert to_tree(merged({"a.c": None}, {"a.c.d": 1})) == {"a": {"c": {"d": 1}}}


def test_every_key_is_known_by_its_dotted_name() -> None:
    keys = set(keys_of(TrainConfig))
    assert {"steps", "model.attn.w", "model.attn.rope_scaling.factor", "data.on_stall"} <= keys


def test_the_doctor_validates_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], environment: Callable[..., None]
) -> None:
    file = config_file(tmp_path, small_run(tmp_path, kind="nsa"))
    assert cli.main(["doctor", "--config", file, "--set", f"out={tmp_path / 'run'}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "[OK] Environment validated"
    assert not (tmp_path / "run").exists()

    environment(NSA_SEQLEN="3")
    words = ["--set", "data.source=text", "--set", "data.path=/nowhere", "--set", "model.attn.backend=triton"]
    assert cli.main(["doctor", "--config", file, *words]) == 1
    printed = capsys.readouterr().out
    wrong = printed[printed.index("[WRONG]") :]
    for said in ("NSA_SEQLEN is not ", "runs compressed", "train data: ", "/nowhere"):
        assert said in wrong
    assert "[OK]" not in printed


def test_the_doctor_takes_a_shape_or_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--config", "tiny", "--heads", "3"]) == 2
    assert re.search("--heads is 3; accepted: .*--config", capsys.readouterr().err)
    assert cli.main(["doctor", "--set", "steps=3"]) == 2
    assert re.search("--set is .*; accepted: .*--config", capsys.readouterr().err)


def test_doctor_reports_full_disk_and_folder_of_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa.train import preflight
    from nsa.train.distributed import Ranks
    from nsa.train.run_info import save_run_info

    config = small_run(tmp_path)
    save_run_info(config, step=0, ranks=Ranks(torch.device("cpu")))
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: argparse.Namespace(free=1024))
    other = replace(config, model=replace(config.model, hidden=32))
    first, second = preflight.folder_problems(other)
    assert "another model.hidden" in first
    assert "0.0 GiB free" in second
    preflight.try_step(small_run(tmp_path, kind="nsa"), torch.device("cpu"))


def test_a_run_goes_on_with_other_ranks_and_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_yaml(tmp_path / "config.yaml", replace(small_run(tmp_path), parallel="ddp"))
    assert moved(tmp_path) == {"parallel": "auto", "cuda_graphs": "auto"}
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    assert moved(tmp_path) == {}
    write_yaml(tmp_path / "config.yaml", replace(small_run(tmp_path), device="cuda", compile=True, cuda_graphs=True))
    assert set(moved(tmp_path)) == {"parallel", "device", "compile", "cuda_graphs"}


@pytest.mark.parametrize("launched", [False, True])
def test_rounded_gradients_stay_behind_with_ddp_and_the_gpus(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process on a machine with a GPU, and several on a machine without."""
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: launched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not launched)
    run = replace(small_run(tmp_path), device="cuda", parallel="ddp", grad_compression="bf16")
    write_yaml(tmp_path / "config.yaml", run)
    config = load_config(tmp_path, moved(tmp_path), env=PLAIN)
    assert config.grad_compression == "none"
    assert (config.parallel, config.device) == (("ddp", "cpu") if launched else ("none", "cuda"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("device", name) for name in ("mps", "meta", "cpu:3", "cuda:x")),
        ("out", 5),
        ("out", None),
        ("out", ""),
        ("cuda_graphs", True),
    ],
)
def test_what_no_run_can_have_is_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key} is "):
        load_config("tiny", {"device": "cpu", key: value}, env=Settings())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_doctor_names_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--config", "tiny", "--set", "device=cuda"]) == 1
    assert "device is 'cuda'; accepted: 'cpu'" in capsys.readouterr().out


def test_runs_of_the_same_second_have_folders_of_their_own() -> None:
    assert len({load_config("tiny", env=PLAIN).out for _ in range(20)}) == 20
