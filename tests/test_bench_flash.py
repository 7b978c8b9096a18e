"""From timings to thresholds: who is listed where, ranges, and the file that `auto` reads."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bench_rows
import pytest
import torch
from torch.nn.attention import SDPBackend

from nsa import bench, cli
from nsa.backends import sdpa
from nsa.backends.preferences import Preference, load_preferences, preferences_path
from nsa.backends.problem import Problem
from nsa.backends.routing import Router
from nsa.bench import flash
from nsa.bench.flash import Point, table
from nsa.bench.results import Row, append, read
from nsa.bench.thresholds import as_json, order_of, ranges, thresholds, write_thresholds
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
    impls = {"triton": "nsa-triton", "flash": "flash-torch", "sdpa": "nsa-sdpa"}
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
        ({"sdpa": {4: 3.0}, "flash": {4: 1.0}, "triton": {4: 1.2}}, ("flash", "triton", "sdpa")),
        ({"sdpa": {4: 3.0}, "flash": {4: 2.9}, "triton": {4: 1.0}}, ("triton", "sdpa")),
        # At every group size, or not at all.
        ({"sdpa": {4: 3.0, 16: 1.0}, "flash": {4: 1.0, 16: 1.0}}, ("sdpa",)),
        ({"sdpa": {4: 3.0, 16: 3.0}, "flash": {4: 1.0}}, ("sdpa",)),
        # Before our kernels it must be as much faster than they are, on every shape.
        ({"sdpa": {4: 3.0}, "flash": {4: 1.0}, "triton": {4: 1.19}}, ("triton", "flash", "sdpa")),
        (
            {"sdpa": {4: 9.0, 16: 9.0}, "flash": {4: 1.0, 16: 1.0}, "triton": {4: 9.0, 16: 1.1}},
            ("triton", "flash", "sdpa"),
        ),
        # But not behind SDPA because our kernels are slower than that.
        ({"sdpa": {4: 1.2}, "flash": {4: 1.0}, "triton": {4: 1.3}}, ("flash", "sdpa", "triton")),
        # Nothing to compare with: nothing is claimed.
        ({"flash": {4: 1.0}}, ()),
        ({"sdpa": {4: 1.0}}, ()),
        ({"sdpa": {4: 1.0}, "triton": {16: 1.0}}, ()),
        # Means over the shapes that both have.
        ({"sdpa": {4: 2.0, 16: 2.0}, "triton": {4: 1.0}}, ("triton", "sdpa")),
    ],
)
def test_the_order_is_by_speed_and_flash_must_be_worth_it(
    times: dict[str, dict[int, float]], expected: tuple[str, ...]
) -> None:
    assert order_of(times) == expected


def test_neighbouring_lengths_with_one_order_are_one_range_and_what_lies_between_two_orders_is_nobody_s() -> None:
    a, b = ("sdpa",), ("flash", "sdpa")
    assert list(ranges({1024: a, 2048: a, 4096: b, 8192: b})) == [(1024, 2048, a), (4096, None, b)]
    # One length alone shows nothing of longer ones.
    assert list(ranges({1024: a})) == [(1024, 1024, a)]
    assert list(ranges({4096: a, 1024: a, 2048: b})) == [(1024, 1024, a), (2048, 2048, b), (4096, 4096, a)]


def test_thresholds_follow_from_the_rows_alone() -> None:
    rows = timed(1024, sdpa=1.0, flash=1.0) + timed(4096, sdpa=2.0, flash=1.0)
    rows += [replace(row, mode="bwd") for row in timed(1024, sdpa=2.0, flash=1.0, triton=0.5)]
    # A path that is no backend, and another suite, change nothing.
    rows += [replace(ROW, impl="sdpa-cudnn", p50_ms=0.01), replace(ROW, suite="attention")]
    subject = {"gpu": "NVIDIA H200", "op": "compressed", "head_widths": (64,), "packed": False}
    expected = [
        Preference(**subject, mode="bwd", min_length=1024, max_length=1024, order=("triton", "flash", "sdpa")),
        Preference(**subject, mode="fwd", min_length=1024, max_length=1024, order=("sdpa",)),
        Preference(**subject, mode="fwd", min_length=4096, max_length=4096, order=("flash", "sdpa")),
    ]
    assert thresholds(rows) == expected


def orders(rows: list[Row]) -> list[tuple[str, ...]]:
    return [preference.order for preference in thresholds(rows)]


def test_flash_must_be_worth_it_at_every_window() -> None:
    rows = [replace(row, op="sliding", suite="flash-w512") for row in timed(sdpa=2.0, flash=1.0)]
    assert orders(rows) == [("flash", "sdpa")]
    close, far = (
        [replace(row, op="sliding", suite="flash-w128") for row in timed(sdpa=ms, flash=1.0)] for ms in (1.1, 1.3)
    )
    assert orders(rows + close) == [("sdpa",)]
    assert orders(rows + far) == [("flash", "sdpa")]


def test_packed_rows_speak_for_packed_rows_alone() -> None:
    """In which FlashAttention never goes first: what it costs grows with the number of documents."""
    plain = timed(sdpa=4.0, flash=1.0, triton=2.0)
    for ms, order in ((1.0, ("triton", "flash", "sdpa")), (9.0, ("triton", "sdpa"))):
        packed = [replace(row, suite="flash-packed") for row in timed(sdpa=4.0, flash=ms, triton=2.0)]
        found = {one.packed: one.order for one in thresholds(plain + packed)}
        assert found == {False: ("flash", "triton", "sdpa"), True: order}


@pytest.mark.parametrize("other", [{"Hq": 64, "G": 16}, {"dtype": "float32"}, {"B": 4}], ids=str)
def test_only_rows_of_one_shape_are_compared(other: dict[str, object]) -> None:
    """Flash was fast on a smaller problem; on the one that SDPA was timed on it is no faster."""
    small = timed(flash=1.0)
    large = [replace(row, **other) for row in timed(sdpa=4.0, flash=4.0)]
    assert orders(small + large) == [("sdpa",)]


def test_a_sweep_of_one_width_leaves_the_others_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    rows = [
        replace(row, Dk=width, mode=mode)
        for row in timed(sdpa=2.0, flash=1.0)
        for width in (64, 128)
        for mode in ("fwd", "bwd")
    ]
    write_thresholds(path, thresholds(rows), rows)
    anew = [replace(row, Dk=64, mode="fwd") for row in timed(sdpa=1.0, flash=1.0)]
    write_thresholds(path, thresholds(anew), anew)
    orders = {(one.head_widths, one.mode): one.order for one in load_preferences(path)}
    assert orders == {
        ((64,), "fwd"): ("sdpa",),
        ((64,), "bwd"): ("flash", "sdpa"),
        ((128,), "fwd"): ("flash", "sdpa"),
        ((128,), "bwd"): ("flash", "sdpa"),
    }


def test_the_flash_attn_package_s_rows_count_where_torch_s_kernels_have_none() -> None:
    package = [replace(row, impl="flash-flash_attn") for row in timed(flash=1.0)]
    assert orders(timed(sdpa=2.0) + package) == [("flash", "sdpa")]
    # Torch's kernels are called first: it is their time that counts, whichever was measured later.
    for rows in (timed(sdpa=2.0, flash=1.9) + package, package + timed(sdpa=2.0, flash=1.9)):
        assert orders(rows) == [("sdpa",)]


@pytest.mark.parametrize("op", ["compressed", "sliding"])
@pytest.mark.parametrize("window", [8, 32, 64, 512])
@pytest.mark.parametrize("grouped", [True, False])
def test_sdpa_is_timed_on_the_branch_itself(op: str, window: int, grouped: bool) -> None:
    """What a kernel computes on the layout is the branch: every key and value counts as it does there."""
    point = Point(op, 64, 4, 2, 8, window)
    qkv = point.inputs(torch.float32, "cpu")
    layout = flash.folded(point, qkv) if op == "compressed" else flash.banded(point, qkv)
    found = flash.attend(layout if grouped else flash.by_group(layout), SDPBackend.MATH)
    exact, _ = getattr(sdpa, f"{op}_forward")(*qkv, point.branch(point.offsets("cpu"), torch.device("cpu")))
    if op == "sliding":
        assert layout.mask is not None
        bands = exact[0].unflatten(0, (-1, min(window, 64))).transpose(1, 2)
        torch.testing.assert_close(found.view_as(bands), bands)
    else:
        assert layout.mask is None
        fold = flash.PlainFold(64, point.n_keys, 2, flash.BLOCK, flash.STRIDE)
        plain = fold.unfold(found.reshape(1, -1, *found.shape[-2:]).transpose(1, 2), 0.0)
        torch.testing.assert_close(plain, exact)


def test_every_kernel_of_sdpa_is_timed_where_it_takes_the_branch(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = ["sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math"]
    assert flash.sdpa_kernels(Point("compressed", 64, 4, 2, 8)) == kernels
    assert flash.sdpa_kernels(Point("sliding", 64, 4, 2, 8)) == kernels[1:]
    assert flash.sdpa_kernels(Point("sliding", 64, 4, 2, 8, documents=2)) == []
    assert flash.sdpa_kernels(Point("sliding", 100, 4, 2, 8, window=64)) == []
    point = Point("compressed", 128, 4, 2, 8)
    qkv = point.inputs(torch.float32, "cpu")
    found = list(flash.sdpa_passes("sdpa-math", point, qkv))
    assert [(each.impl, each.mode) for each in found] == [("sdpa-math", "fwd"), ("sdpa-math", "bwd")]
    for each in found:
        each.call()
    assert not capsys.readouterr().out


def test_the_math_kernel_is_left_out_where_its_scores_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flash, "MOST_SCORE_BYTES", 1000)
    point = Point("compressed", 128, 4, 2, 8)
    assert list(flash.sdpa_passes("sdpa-math", point, point.inputs(torch.float32, "cpu"))) == []
    assert "sdpa-math is left out" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["compressed", "sliding"])
def test_a_packed_point_is_a_row_of_documents(op: str) -> None:
    point = Point(op, 100, 4, 2, 8, 16, documents=3)
    assert point.suite == ("flash-packed" if op == "compressed" else "flash-w16-packed")
    assert point.problem(torch.bfloat16, backward=False).packed
    assert point.offsets("cpu").tolist() == [0, 33, 66, 100]
    q, k, v = point.inputs(torch.float32, "cpu")
    found = list(flash.backend_passes("nsa-sdpa", sdpa, point, (q, k, v)))
    assert [each.mode for each in found] == ["fwd", "bwd"]
    for each in found:
        each.call()


@pytest.mark.parametrize("variable", ["NSA_USE_FA2", "NSA_USE_FA2_WIN"])
def test_what_is_switched_off_is_not_measured(variable: str, environment: Callable[..., None]) -> None:
    environment(**{variable: "0"})
    with pytest.raises(ValueError, match=rf"{variable} is off \(environment\), and nsa bench flash calls .* unset it"):
        bench.run(parse())


def test_the_file_is_what_the_router_reads_and_keeps_what_others_measured(tmp_path: Path) -> None:
    path = tmp_path / "configs" / "routes.json"
    other = Preference(gpu="NVIDIA A100", op="compressed", order=("sdpa",))
    selected = Preference(gpu="NVIDIA H200", op="selected", order=("triton",))
    write_thresholds(path, [other, selected], [ROW])
    rows = timed(4096, sdpa=2.0, flash=1.0)
    for _ in range(2):
        write_thresholds(path, thresholds(rows), rows)
    found = load_preferences(path)
    assert found == (*thresholds(rows), other, selected)
    assert json.loads(path.read_text())["measured"] == {
        "by": "nsa bench flash",
        "rows": 2,
        "date": "2026-11-15",
        "commit": "abc1234",
    }

    assert found[0].gpu == "NVIDIA H200"

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
    return cli.parser_of("bench").parse_args(["flash", *words])


def test_the_command_turns_rows_into_a_file_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    plain = [point for point in found if not point.packed]
    assert len(set(found)) == len(found)
    assert len(plain) == 4 * 2 * 3 * 3
    # Packed: both branches at every width and length, for one group size.
    assert {(point.op, point.width, point.length) for point in found if point.packed} == {
        (op, width, length)
        for op in ("compressed", "sliding")
        for width in (64, 96, 128, 192)
        for length in (1024, 8192, 65536)
    }
    assert {point.width for point in plain} == {64, 96, 128, 192}
    assert {point.window for point in flash.points(parse()) if point.op == "sliding"} == {128, 512}
    with pytest.raises(ValueError, match="--group-sizes is 3; accepted: a divisor of the 16 heads"):
        list(flash.points(parse("--group-sizes", "3")))


def test_every_kind_of_call_is_probed_ahead_once() -> None:
    asked = []
    points = [Point("sliding", length, 16, 4, 64, window) for length in (1024, 1000) for window in (128, 512)]
    points += [Point("compressed", 1024, 16, 4, 64), Point("compressed", 1024, 16, 4, 64, documents=8)]
    flash.probe_ahead([SimpleNamespace(supports=asked.append)], points, torch.bfloat16)
    # Two lengths of one class are one kind, two windows are two.
    assert Counter((problem.op, problem.knob, problem.packed) for problem in asked) == {
        ("sliding", 128, False): 1,
        ("sliding", 512, False): 1,
        ("compressed", 16, False): 1,
        ("compressed", 16, True): 1,
    }


def test_a_point_poses_the_problem_that_the_ops_would() -> None:
    point = Point("compressed", 100, 16, 4, 64)
    q, k, v = point.inputs(torch.float32, "cpu")
    assert (q.shape, k.shape, v.shape) == ((1, 100, 16, 64), (1, 5, 4, 64), (1, 5, 4, 64))
    o, lse = sdpa.compressed_forward(q, k, v, point.branch(None, torch.device("cpu")))
    assert o.shape == q.shape
    assert lse.shape == (1, 100, 16)
    problem = point.problem(torch.bfloat16, backward=True)
    assert (problem.n_keys, problem.n_groups, problem.backward) == (5, 4, True)


def test_without_a_gpu_only_rows_can_be_used() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="--rows FILE"):
        bench.run(parse())


def test_the_table_that_ships_follows_from_the_rows_that_ship() -> None:
    root = Path(__file__).resolve().parent.parent
    rows = read(root / "benchmarks" / "results" / "h200" / "flash.csv")
    assert list(load_preferences(preferences_path())) == thresholds(rows)


def test_rows_of_two_gpus_are_never_held_against_each_other(tmp_path: Path) -> None:
    other = [replace(row, gpu="NVIDIA A100-SXM4-80GB") for row in timed(flash=100.0)]
    assert "flash-torch 2.00" in table([*timed(sdpa=2.0, flash=1.0), *other])
    with pytest.raises(ValueError, match="those of one GPU"):
        flash.draw([*timed(sdpa=2.0, flash=1.0), *other], tmp_path / "flash.png")


def test_rows_that_compare_nothing_write_nothing(tmp_path: Path) -> None:
    source, routes = tmp_path / "train.csv", tmp_path / "routes.json"
    append(source, bench_rows.ROW)
    with pytest.raises(ValueError, match="rows of several backends"):
        bench.run(parse("--rows", str(source), "--write", str(routes)))
    assert not routes.exists()


def test_new_lines_go_before_what_the_file_still_says(tmp_path: Path) -> None:
    """An older line may cover more: the router takes the first."""
    path = tmp_path / "routes.json"
    write_thresholds(path, [Preference(gpu="NVIDIA H200", op="compressed", order=("sdpa", "flash"))], [ROW])
    rows = timed(sdpa=2.0, flash=1.0)
    write_thresholds(path, thresholds(rows), rows)
    assert [one.order for one in load_preferences(path)] == [("flash", "sdpa"), ("sdpa", "flash")]
