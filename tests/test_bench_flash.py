"""From timings to thresholds: who is listed where, ranges, and the file that `auto` reads."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import bench_rows
import pytest
import torch

from nsa import bench
from nsa.backends import sdpa
from nsa.backends.problem import Problem
from nsa.backends.routing import Preference, Router, load_preferences
from nsa.bench import flash
from nsa.bench.flash import Point, as_json, order_of, ranges, table, thresholds, write_thresholds
from nsa.bench.results import Row, append
from nsa.settings import Settings

ROW = replace(
    bench_rows.ROW,
    suite="flash",
    op="compressed",
    mode="fwd",
    B=1,
    S=4096,
    Hq=16,
    G=4,
    p20_ms=1.0,
    p50_ms=1.0,
    p80_ms=1.0,
    peak_gib=0.1,
    tokens_per_s=None,
)


def timed(length: int = 4096, group_size: int = 4, **milliseconds: float) -> list[Row]:
    """Rows of one shape, one for each path: `timed(sdpa=2.0, flash=1.0)`."""
    impls = {backend: impl for impl, backend in flash.BACKENDS.items()}
    return [
        replace(ROW, impl=impls[backend], S=length, G=16 // group_size, p50_ms=ms)
        for backend, ms in milliseconds.items()
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"sdpa": {4: 1.2}, "flash": {4: 1.0}}, ("flash", "sdpa")),
        ({"sdpa": {4: 1.19}, "flash": {4: 1.0}}, ("sdpa",)),
        ({"sdpa": {4: 3.0}, "flash": {4: 2.0}, "triton": {4: 1.0}}, ("triton", "flash", "sdpa")),
        ({"sdpa": {4: 3.0}, "flash": {4: 1.0}, "triton": {4: 2.0}}, ("flash", "triton", "sdpa")),
        ({"sdpa": {4: 3.0}, "flash": {4: 2.9}, "triton": {4: 1.0}}, ("triton", "sdpa")),
        # At every group size, or not at all.
        ({"sdpa": {4: 3.0, 16: 1.0}, "flash": {4: 1.0, 16: 1.0}}, ("sdpa",)),
        ({"sdpa": {4: 3.0, 16: 3.0}, "flash": {4: 1.0}}, ("sdpa",)),
        # Nothing to compare with: nothing is claimed.
        ({"flash": {4: 1.0}}, ("sdpa",)),
        ({"sdpa": {4: 1.0}}, ("sdpa",)),
        # Means over the shapes that both have.
        ({"sdpa": {4: 2.0, 16: 2.0}, "triton": {4: 1.0}}, ("triton", "sdpa")),
    ],
)
def test_the_order_is_by_speed_and_flash_must_be_worth_it(
    times: dict[str, dict[int, float]], expected: tuple[str, ...]
) -> None:
    assert order_of(times) == expected


def test_neighbouring_lengths_with_one_order_are_one_range() -> None:
    a, b = ("sdpa",), ("flash", "sdpa")
    assert list(ranges({1024: a, 2048: a, 4096: b, 8192: b})) == [(1024, 4095, a), (4096, None, b)]
    assert list(ranges({1024: a})) == [(1024, None, a)]
    assert list(ranges({1024: a, 2048: b, 4096: a})) == [(1024, 2047, a), (2048, 4095, b), (4096, None, a)]


def test_thresholds_follow_from_the_rows_alone() -> None:
    rows = timed(1024, sdpa=1.0, flash=1.0) + timed(4096, sdpa=2.0, flash=1.0)
    rows += [replace(row, mode="bwd") for row in timed(1024, sdpa=2.0, flash=1.0, triton=0.5)]
    # A path that is no backend, and a window that the file does not speak of, change nothing.
    rows += [replace(ROW, impl="sdpa-cudnn", p50_ms=0.01), replace(ROW, suite="flash-w128", op="sliding")]
    expected = [
        Preference(
            gpu="NVIDIA H200", op="compressed", mode="bwd", head_widths=(64,), min_length=1024,
            order=("triton", "flash", "sdpa"),
        ),
        Preference(
            gpu="NVIDIA H200", op="compressed", mode="fwd", head_widths=(64,), min_length=1024, max_length=4095,
            order=("sdpa",),
        ),
        Preference(
            gpu="NVIDIA H200", op="compressed", mode="fwd", head_widths=(64,), min_length=4096, order=("flash", "sdpa")
        ),
    ]  # fmt: skip
    assert thresholds(rows) == expected


def test_the_file_is_what_the_router_reads_and_keeps_what_others_measured(tmp_path: Path) -> None:
    path = tmp_path / "configs" / "routes.json"
    other = Preference(gpu="NVIDIA A100", op="compressed", order=("sdpa",))
    selected = Preference(gpu="NVIDIA H200", op="selected", order=("triton",))
    write_thresholds(path, [other, selected], [ROW])
    rows = timed(4096, sdpa=2.0, flash=1.0)
    for _ in range(2):
        write_thresholds(path, thresholds(rows), rows)
    found = load_preferences(path)
    assert found == (other, selected, *thresholds(rows))
    assert json.loads(path.read_text())["measured"] == {
        "by": "nsa bench flash",
        "rows": 2,
        "date": "2026-11-15",
        "commit": "abc1234",
    }

    class Flash:
        name = "flash"

        def supports(self, problem: Problem) -> str | None:
            return None

    router = Router([Flash(), sdpa], Settings(), found, gpu="NVIDIA H200")
    problem = Point("compressed", 4096, 16, 4, 64).problem(torch.bfloat16, backward=False)
    assert router.route(problem).chosen == "flash"
    assert router.route(replace(problem, d_k=128)).chosen == "sdpa"
    assert router.route(replace(problem, n_queries=4095)).chosen == "sdpa"
    assert router.route(replace(problem, backward=True)).chosen == "sdpa"


def test_defaults_are_not_written() -> None:
    assert as_json(Preference(gpu="x", op="sliding", order=("sdpa",))) == {
        "gpu": "x",
        "op": "sliding",
        "order": ("sdpa",),
    }


def test_the_table_says_how_many_times_as_fast() -> None:
    text = table([*timed(sdpa=3.0, flash=2.0, triton=1.0), replace(ROW, impl="sdpa-cudnn", p50_ms=0.5)])
    (line,) = text.splitlines()[1:]
    assert "flash-torch 1.50" in line
    assert "nsa-triton 3.00" in line
    assert "sdpa-cudnn 6.00" in line


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["flash", *words])


def test_the_command_turns_rows_into_a_file_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs it")
    source, routes, picture = tmp_path / "flash.csv", tmp_path / "routes.json", tmp_path / "flash.png"
    for length in (1024, 4096):
        for row in timed(length, sdpa=2.0, flash=1.0, triton=1.5):
            append(source, row)
            append(source, replace(row, op="sliding", suite="flash-w512", mode="bwd", Dk=128))
    assert bench.run(parse("--rows", str(source), "--write", str(routes), "--plot", str(picture))) == 0
    assert len(load_preferences(routes)) == 2
    assert picture.stat().st_size > 10_000
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["op"] for row in last} == {"compressed", "sliding"}


def test_the_sweep_covers_every_width_group_length_and_window() -> None:
    found = list(flash.points(parse("--windows", "128", "512")))
    assert len(found) == len(set(found)) == 4 * 2 * 4 * 3
    assert {point.width for point in found} == {64, 96, 128, 192}
    with pytest.raises(ValueError, match="--group-sizes is 3; accepted: a divisor of the 16 heads"):
        list(flash.points(parse("--group-sizes", "3")))


def test_a_point_poses_the_problem_that_the_ops_would() -> None:
    point = Point("compressed", 100, 16, 4, 64)
    q, k, v = point.inputs(torch.float32, "cpu")
    assert (q.shape, k.shape, v.shape) == ((1, 100, 16, 64), (1, 5, 4, 64), (1, 5, 4, 64))
    o, lse = sdpa.compressed_forward(q, k, v, **point.knobs)
    assert o.shape == q.shape
    assert lse.shape == (1, 100, 16)
    problem = point.problem(torch.bfloat16, backward=True)
    assert (problem.n_keys, problem.n_groups, problem.backward) == (5, 4, True)


def test_without_a_gpu_only_rows_can_be_used() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="--rows FILE"):
        bench.run(parse())
