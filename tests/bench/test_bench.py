"""Benchmark rows survive their file, and the training benchmark measures the trainer's own step."""

from __future__ import annotations

import argparse
import json
import sys
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from bench_rows import ROW

from nsa import bench, cli
from nsa.bench import trained
from nsa.bench.compare import csv_header
from nsa.bench.plot import draw_figure, rows_digest
from nsa.bench.runner import Runner
from nsa.bench.train import TrainBench, TrainRunner, benches, step_clock
from nsa.functional import nsa_attention
from nsa.model import LM, PRESETS, LMConfig
from nsa.results import COLUMNS, append, origin_columns, quantiles, read_rows

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# Other files there have columns of their own.
FILES_OF_ROWS = [file for file in sorted(RESULTS.rglob("*.csv")) if csv_header(file) == list(COLUMNS)]


def parse(*words: str) -> argparse.Namespace:
    return cli.parser_of("bench").parse_args(
        ["train", "--preset", "tiny", "--device", "cpu", "--dtype", "float32", *words]
    )


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_of_training_can_be_timed(name: str) -> None:
    args = parse("--preset", name, "--attention", "nsa", "dense")
    runner = Runner(step_clock, torch.bfloat16, "cuda", args)
    assert [bench.model for bench in benches(args, runner)] == [
        PRESETS[name],
        replace(PRESETS[name], attention="dense"),
    ]


def test_columns_are_the_agreed_ones() -> None:
    shape, times = "B S Hq G Dk Dv dtype", "p20_ms p50_ms p80_ms peak_gib tokens_per_s"
    agreed = f"suite op impl mode {shape} {times} gpu torch triton commit date"
    assert " ".join(COLUMNS) == agreed


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "h200" / "train.csv"
    odd = replace(ROW, peak_gib=None, tokens_per_s=None, triton=None, commit=None, gpu='a "name", with a comma')
    append(path, ROW)
    append(path, odd)
    assert read_rows(path) == [ROW, odd]
    assert path.read_text().count("suite,op") == 1


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv.*a,b.*suite,op"):
        append(path, ROW)


@pytest.mark.parametrize("name", [".", "a/rows.csv", "a", "b"])
def test_a_file_that_takes_no_rows_is_refused_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_text("a,b\n1,2\n")
    (tmp_path / "b").write_bytes(b"\xff\xfe\n")
    words = ["--device", "cpu", "--preset", "tiny", "--out", str(tmp_path / name)]
    assert cli.main(["bench", "train", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert str(tmp_path / name) in printed.err


@pytest.mark.parametrize("name", [".", "rows"])
def test_a_picture_has_a_suffix(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one it would be written beside the name that is reported."""
    out = str(tmp_path / name)
    assert cli.main(["bench", "plot", "--rows", str(FILES_OF_ROWS[0]), "--out", out]) == 2
    assert f"--out is {str(Path(out))!r}" in capsys.readouterr().err


def test_quantiles_are_of_the_times() -> None:
    assert quantiles([float(x) for x in range(11)]) == (2.0, 5.0, 8.0)


def test_environment_says_where_a_row_comes_from() -> None:
    found = origin_columns(torch.device("cpu"))
    assert found["gpu"] == "cpu"
    assert found["torch"] == torch.__version__
    assert set(found) == {"gpu", "torch", "triton", "commit", "date"}


@pytest.mark.parametrize(("words", "impl"), [((), "nsa-sdpa"), (("--attention", "dense"), "dense-sdpa")])
def test_the_command_measures_and_appends(
    words: tuple[str, ...], impl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.csv"
    shape = ["--seq-len", "32", "--batch-size", "2", "--steps", "2", "--warmup", "1", "--out", str(path)]
    assert bench.run(parse(*shape, *words)) == 0
    (row,) = read_rows(path)
    assert (row.suite, row.op, row.mode, row.impl) == ("train", "train", "train", impl)
    assert (row.B, row.S, row.Hq, row.G) == (2, 32, 4, 1)
    assert row.p20_ms <= row.p50_ms <= row.p80_ms
    assert row.tokens_per_s == pytest.approx(2 * 32 / row.p50_ms * 1e3, rel=1e-3)
    assert row.peak_gib is None
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == [asdict(row)]


@pytest.mark.parametrize(
    ("words", "impl"),
    [(("--attention", "sliding"), "sliding-sdpa"), (("--attention", "longformer", "--gc"), "longformer-sdpa-gc")],
    ids=str,
)
def test_a_row_names_what_ran(words: tuple[str, ...], impl: str, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    assert bench.run(parse("--seq-len", "32", "--steps", "1", "--warmup", "1", "--out", str(path), *words)) == 0
    assert [row.impl for row in read_rows(path)] == [impl]


def test_every_batch_size_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    shape = ["--seq-len", "32", "--batch-size", "1", "3", "--steps", "1", "--warmup", "1", "--out", str(path)]
    assert bench.run(parse(*shape)) == 0
    assert [(row.B, row.S) for row in read_rows(path)] == [(1, 32), (3, 32)]


def test_a_measurement_holds_no_model_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[LM]] = []
    alive: list[int] = []

    def counted(config: LMConfig) -> LM:
        alive.append(sum(model() is not None for model in models))
        models.append(weakref.ref(made := LM(config)))
        return made

    monkeypatch.setattr("nsa.bench.train.LM", counted)
    assert bench.run(parse("--seq-len", "32", "--batch-size", "1", "2", "--steps", "1", "--warmup", "1")) == 0
    # Each is made and compared with the specification: nothing of the first is left for the second.
    assert alive == [0, 1, 0, 1]


def test_what_is_measured_trains() -> None:
    model = replace(PRESETS["tiny"], attention="dense", seq_len=32)
    runner = TrainRunner(TrainBench(model=model, batch_size=2, steps=2, warmup=1, dtype="float32", device="cpu"))
    before = [p.detach().clone() for p in runner.model.parameters()]
    assert len(runner.run(2)) == 2
    assert not any(torch.equal(old, new) for old, new in zip(before, runner.model.parameters(), strict=True))


def test_a_sync_can_only_be_looked_for_on_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"--check-sync is .*cpu"):
        bench.run(parse("--check-sync", "--seq-len", "32", "--batch-size", "1", "--warmup", "1"))


def test_what_a_trained_layer_is_given_is_what_it_attends_with() -> None:
    torch.manual_seed(0)
    model = LM(PRESETS["tiny"])
    layer = trained.middle_layer(model)
    inputs = []
    hook = layer.register_forward_hook(lambda _, args, y: inputs.append((args[0], y)))
    tensors, shared = trained.inputs_of_layer(model, layer, torch.randint(256, (2, 200)), torch.bfloat16)
    hook.remove()
    _, y = inputs[0]
    o = nsa_attention(*tensors, config=layer.config)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer.o_proj(o.flatten(2)), y, atol=1e-2, rtol=1e-2)
    assert 0 < shared <= 1


def test_blocks_in_common_with_the_query_before() -> None:
    indices = torch.tensor([[[0, -1]], [[0, 1]], [[1, 2]], [[3, 4]]])[None]
    # Of [0, 1] one, of [1, 2] one, of [3, 4] none.
    assert trained.shared_selection(indices) == pytest.approx(2 / 6)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES_OF_ROWS, ids=lambda file: file.stem)
def test_the_rows_of_every_suite_can_be_plotted(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["bench", "plot", "--rows", str(file), "--out", str(tmp_path / "rows.svg")]) == 0
    assert "<svg" in (tmp_path / "rows.svg").read_text()


def test_a_broken_matplotlib_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["bench", "plot", "--rows", str(FILES_OF_ROWS[0]), "--out", str(tmp_path / "rows.svg")]) == 2
    assert "matplotlib" in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ending", ["pdf", "jpg"])
def test_plots_are_drawn_in_other_formats(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_figure([ROW], tmp_path / f"rows.{ending}")
    assert (tmp_path / f"rows.{ending}").stat().st_size > 0


def test_of_rows_of_the_same_kind_the_last_is_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    shown: list[list[float]] = []
    monkeypatch.setattr(Axes, "plot", lambda axis, xs, ys, **style: shown.append(ys))
    monkeypatch.setattr(Axes, "legend", lambda axis, **style: None)
    old, new = (replace(ROW, mode="fwd", p50_ms=ms) for ms in (9.0, 3.0))
    draw_figure([old, new], tmp_path / "rows.png")
    assert shown == [[3.0]]
    assert rows_digest([old, new]).encode() in (tmp_path / "rows.png").read_bytes()
    assert rows_digest([new]) == rows_digest([old, new]) != rows_digest([old])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_no_step_waits_for_the_gpu(attention: str) -> None:
    model = replace(PRESETS["tiny"], attention=attention)
    TrainRunner(TrainBench(model=model, batch_size=2, warmup=2)).check_sync()
