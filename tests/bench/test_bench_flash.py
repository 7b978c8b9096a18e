"""From timings to measured routes: orders, ranges of lengths, and the file that `auto` reads."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_rows
import pytest
import torch

from nsa import bench, cli
from nsa.backends import sdpa
from nsa.backends.measured_routes import MeasuredRoute, load_routes, routes_path
from nsa.backends.routing import Router
from nsa.bench import flash
from nsa.bench.flash import FlashPoint, speedup_table
from nsa.bench.flash_routes import measured_routes, order_of, ranges, write_routes
from nsa.results import Row, append, read_rows
from nsa.settings import Settings

ROW = replace(
    bench_rows.ROW, suite="flash", op="compressed", mode="fwd", B=1, S=4096, Hq=16, G=4, p20_ms=1.0, p50_ms=1.0,
    p80_ms=1.0, peak_gib=0.1, tokens_per_s=None,
)  # fmt: skip
FLASH_FIRST = {"sdpa": 4.0, "flash": 1.0, "triton": 2.0}
FLASH_LAST = {"sdpa": 4.0, "flash": 4.0, "triton": 2.0}
DEFAULT = {"sdpa": 4.0, "flash": 2.0, "triton": 1.0}


def timed(length: int = 4096, group_size: int = 4, **milliseconds: float) -> list[Row]:
    """Rows of one shape, one per path: `timed(sdpa=2.0, flash=1.0)`."""
    impls = {"triton": "nsa-triton", "flash": "flash-torch", "sdpa": "nsa-sdpa"}
    return [
        replace(ROW, impl=impls[backend], S=length, G=16 // group_size, p50_ms=ms)
        for backend, ms in milliseconds.items()
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"sdpa": {4: 1.2}, "flash": {4: 1.0}}, ("flash", "sdpa")),
        ({"sdpa": {4: 1.19}, "flash": {4: 1.0}}, ("sdpa", "flash")),
        ({"sdpa": {4: 3.0}, "flash": {4: 2.0}, "triton": {4: 1.0}}, ("triton", "flash", "sdpa")),
        ({"sdpa": {4: 3.0}, "flash": {4: 1.0}, "triton": {4: 1.2}}, ("flash", "triton", "sdpa")),
        ({"sdpa": {4: 3.0}, "flash": {4: 2.9}, "triton": {4: 1.0}}, ("triton", "sdpa", "flash")),
        # At every group size, or not at all.
        ({"sdpa": {4: 3.0, 16: 1.0}, "flash": {4: 1.0, 16: 1.0}}, ("sdpa", "flash")),
        ({"sdpa": {4: 3.0, 16: 3.0}, "flash": {4: 1.0}}, ("sdpa", "flash")),
        # Before our kernels it must be as much faster than they are, on every shape.
        ({"sdpa": {4: 3.0}, "flash": {4: 1.0}, "triton": {4: 1.19}}, ("triton", "flash", "sdpa")),
        (
            {"sdpa": {4: 9.0, 16: 9.0}, "flash": {4: 1.0, 16: 1.0}, "triton": {4: 9.0, 16: 1.1}},
            ("triton", "flash", "sdpa"),
        ),
        # But not behind SDPA because our kernels are slower than that.
        ({"sdpa": {4: 1.2}, "flash": {4: 1.0}, "triton": {4: 1.3}}, ("flash", "sdpa", "triton")),
        # Nothing to compare with.
        ({"flash": {4: 1.0}}, ()),
        ({"sdpa": {4: 1.0}, "triton": {16: 1.0}}, ()),
        # Means over the shapes that both have.
        ({"sdpa": {4: 2.0, 16: 2.0}, "triton": {4: 1.0}}, ("triton", "sdpa")),
    ],
)
def test_the_order_is_by_speed_and_flash_must_be_worth_it(
    times: dict[str, dict[Any, float]], expected: tuple[str, ...]
) -> None:
    assert order_of(times) == expected


def test_neighboring_lengths_with_one_order_are_one_range() -> None:
    a, b = ("sdpa",), ("flash", "sdpa")
    assert list(ranges({1024: a, 2048: a, 4096: b, 8192: b})) == [(1024, 2048, a), (4096, None, b)]
    # One length alone says nothing about longer ones.
    assert list(ranges({4096: a, 1024: a, 2048: b})) == [(1024, 1024, a), (2048, 2048, b), (4096, 4096, a)]


def test_only_what_differs_from_the_default_order_is_a_route() -> None:
    rows = timed(1024, **FLASH_LAST) + timed(4096, **FLASH_FIRST) + timed(8192, **DEFAULT)
    rows += [replace(row, mode="bwd") for row in timed(1024, **DEFAULT)]
    # A path that is no backend, and another suite, change nothing.
    rows += [replace(ROW, impl="sdpa-cudnn", p50_ms=0.01), replace(ROW, suite="attention")]
    subject: dict[str, Any] = {"gpu": "NVIDIA H200", "op": "compressed", "head_dims": (64,), "varlen": False}
    assert measured_routes(rows) == [
        MeasuredRoute(**subject, mode="fwd", min_length=1024, max_length=1024, order=("triton", "sdpa", "flash")),
        MeasuredRoute(**subject, mode="fwd", min_length=4096, max_length=4096, order=("flash", "triton", "sdpa")),
    ]


def orders(rows: list[Row]) -> list[tuple[str, ...]]:
    return [route.order for route in measured_routes(rows)]


def test_flash_must_be_worth_it_at_every_window() -> None:
    wide, close, far = (
        [replace(row, op="sliding", suite=f"flash-w{window}") for row in timed(**{**FLASH_FIRST, "triton": ms})]
        for window, ms in ((512, 2.0), (128, 1.1), (128, 1.3))
    )
    assert orders(wide) == orders(wide + far) == [("flash", "triton", "sdpa")]
    assert orders(wide + close) == []


def test_varlen_rows_never_put_flash_before_our_kernels() -> None:
    """Its cost grows with the number of documents."""
    for times, order in ((FLASH_FIRST, None), (FLASH_LAST, ("triton", "sdpa", "flash"))):
        varlen = [replace(row, suite="flash-packed") for row in timed(**times)]
        found = {one.varlen: one.order for one in measured_routes(timed(**FLASH_FIRST) + varlen)}
        assert found == {False: ("flash", "triton", "sdpa")} | ({} if order is None else {True: order})


@pytest.mark.parametrize("other", [{"Hq": 64, "G": 16}, {"dtype": "float32"}, {"B": 4}], ids=str)
def test_only_rows_of_one_shape_are_compared(other: dict[str, object]) -> None:
    """Flash was fast on a smaller problem; on the one that SDPA was timed on it is no faster."""
    large = [replace(row, **other) for row in timed(sdpa=4.0, flash=4.0)]
    assert orders(timed(flash=1.0) + large) == [("sdpa", "flash")]


def test_torch_s_kernels_count_before_the_flash_attn_package() -> None:
    package = [replace(row, impl="flash-flash_attn") for row in timed(flash=4.0)]
    assert orders(timed(sdpa=4.0, triton=2.0) + package) == [("triton", "sdpa", "flash")]
    # They are called first, whichever was measured later.
    for rows in (timed(**DEFAULT) + package, package + timed(**DEFAULT)):
        assert orders(rows) == []


def test_the_file_keeps_what_other_sweeps_measured(tmp_path: Path) -> None:
    path = tmp_path / "configs" / "routes.json"
    rows = [
        replace(row, Dk=dim, mode=mode) for row in timed(**FLASH_FIRST) for dim in (64, 128) for mode in ("fwd", "bwd")
    ]
    write_routes(path, rows)
    other = {"gpu": "NVIDIA A100", "op": "compressed", "order": ["sdpa", "flash"]}
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"routes": [*content["routes"], other]}))
    # Another sweep of one head_dim and direction finds the default order there.
    again = [replace(row, Dk=64, mode="fwd") for row in timed(**DEFAULT)]
    for _ in range(2):
        write_routes(path, again)
    found = [(one.gpu, one.head_dims, one.mode) for one in load_routes(path)]
    h200 = [("NVIDIA H200", (dim,), mode) for dim, mode in ((64, "bwd"), (128, "bwd"), (128, "fwd"))]
    assert found == [*h200, ("NVIDIA A100", None, None)]
    measured = {"by": "nsa bench flash", "rows": 3, "date": "2026-11-15", "commit": "abc1234"}
    assert json.loads(path.read_text())["measured"] == measured
    # A new route goes before what the file still says: the router applies the first.
    newer = [replace(row, gpu="NVIDIA A100-SXM4-80GB") for row in timed(**FLASH_FIRST)]
    write_routes(path, newer)
    assert load_routes(path)[0].head_dims == (64,)
    assert load_routes(path)[0].gpu == "NVIDIA A100"


def test_the_router_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    write_routes(path, timed(**FLASH_FIRST))
    backends = [SimpleNamespace(name=name, supports=lambda _: None) for name in ("triton", "flash")]
    router = Router([*backends, sdpa], Settings(), load_routes(path), gpu="NVIDIA H200")
    problem = FlashPoint(1, 4096, 16, 4, 64, "compressed").problem(torch.bfloat16, backward=False)
    assert router.route(problem).backend == "flash"
    for changes in ({"d_k": 128}, {"n_queries": 4095}, {"backward": True}):
        assert router.route(replace(problem, **changes)).backend == "triton", "the default order"


def test_the_routes_that_ship_follow_from_the_rows_that_ship() -> None:
    root = Path(__file__).resolve().parents[2]
    rows = read_rows(root / "benchmarks" / "results" / "h200" / "flash.csv")
    assert list(load_routes(routes_path())) == measured_routes(rows)


@pytest.mark.parametrize("op", ["compressed", "sliding"])
@pytest.mark.parametrize("documents", [1, 3])
def test_a_point_is_timed_as_the_ops_would_run_it(op: str, documents: int) -> None:
    point = FlashPoint(1, 100, 4, 2, 8, op, 16, documents)
    assert point.suite == ("flash" if op == "compressed" else "flash-w16") + ("-packed" if documents > 1 else "")
    problem = point.problem(torch.bfloat16, backward=True)
    n_keys = 100 if op == "sliding" else 6 if documents > 1 else 5
    assert (problem.n_keys, problem.n_groups, problem.backward, problem.varlen) == (n_keys, 2, True, documents > 1)
    if documents > 1:
        assert point.offsets("cpu").tolist() == [0, 33, 66, 100]
    found = {each.mode: each.call for each in flash.both_passes(sdpa, point, point.inputs(torch.float32, "cpu"))}
    assert flash.gate_error(sdpa, point, torch.float32, "cpu") <= 1
    o, lse = found["fwd"]()
    assert (o.shape, lse.shape) == ((1, 100, 4, 8), (1, 100, 4))
    assert [x.shape[1] for x in found["bwd"]()] == [100, n_keys, n_keys]


@pytest.mark.parametrize("variable", ["NSA_USE_FA2", "NSA_USE_FA2_WIN"])
def test_what_is_switched_off_is_not_measured(variable: str, environment: Callable[..., None]) -> None:
    environment(**{variable: "0"})
    with pytest.raises(ValueError, match=rf"{variable} is off \(environment\)"):
        bench.run(parse())


def test_the_table_shows_speedups() -> None:
    other = [replace(row, gpu="NVIDIA A100-SXM4-80GB") for row in timed(flash=100.0)]
    text = speedup_table([*timed(sdpa=3.0, flash=2.0, triton=1.0), replace(ROW, impl="sdpa-cudnn", p50_ms=0.5), *other])
    (line,) = text.splitlines()[1:]
    for part in ("flash-torch 1.50", "nsa-triton 3.00", "sdpa-cudnn 6.00"):
        assert part in line


def parse(*words: str) -> argparse.Namespace:
    return cli.parser_of("bench").parse_args(["flash", *words])


def test_the_command_turns_rows_into_a_file_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, routes, picture = tmp_path / "flash.csv", tmp_path / "routes.json", tmp_path / "flash.png"
    for length in (1024, 4096):
        for row in timed(length, **FLASH_FIRST):
            append(source, row)
            append(source, replace(row, op="sliding", suite="flash-w512", mode="bwd", Dk=128))
    assert bench.run(parse("--rows", str(source), "--write", str(routes), "--plot", str(picture))) == 0
    assert len(load_routes(routes)) == 2
    assert picture.stat().st_size > 10_000
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["op"] for row in last} == {"compressed", "sliding"}


def test_a_plot_is_of_one_gpu(tmp_path: Path) -> None:
    other = [replace(row, gpu="NVIDIA A100-SXM4-80GB") for row in timed(flash=100.0)]
    with pytest.raises(ValueError, match="rows is"):
        flash.draw_speedups([*timed(sdpa=2.0, flash=1.0), *other], tmp_path / "flash.png")


def test_rows_that_compare_nothing_write_nothing(tmp_path: Path) -> None:
    source, routes = tmp_path / "train.csv", tmp_path / "routes.json"
    append(source, bench_rows.ROW)
    with pytest.raises(ValueError, match="--write is"):
        bench.run(parse("--rows", str(source), "--write", str(routes)))
    assert not routes.exists()


def test_the_sweep_covers_every_head_dim_group_length_and_window() -> None:
    found = list(flash.points(parse("--windows", "128", "512")))
    fixed = [point for point in found if not point.varlen]
    assert len(set(found)) == len(found)
    assert len(fixed) == 4 * 2 * 3 * 3
    # Varlen: both branches at every head_dim and length, for one group size.
    assert Counter((point.op, point.head_dim) for point in found if point.varlen) == {
        (op, head_dim): 3 for op in ("compressed", "sliding") for head_dim in (64, 96, 128, 192)
    }
    with pytest.raises(ValueError, match="--group-sizes is 3"):
        list(flash.points(parse("--group-sizes", "3")))


def test_every_kind_of_call_is_probed_ahead_once() -> None:
    asked = []
    points = [FlashPoint(1, length, 16, 4, 64, "sliding", window) for length in (1024, 1000) for window in (128, 512)]
    points += [FlashPoint(1, 1024, 16, 4, 64, "compressed", documents=n) for n in (1, 8)]
    flash.probe_ahead([SimpleNamespace(supports=asked.append)], points, torch.bfloat16)
    # Two lengths of one class are one kind, two windows are two.
    assert Counter((problem.op, problem.window_or_stride, problem.varlen) for problem in asked) == {
        ("sliding", 128, False): 1,
        ("sliding", 512, False): 1,
        ("compressed", 16, False): 1,
        ("compressed", 16, True): 1,
    }


def test_without_a_gpu_only_rows_can_be_used() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="--rows FILE"):
        bench.run(parse())


def test_the_old_name_of_head_dims_is_read() -> None:
    assert parse("--widths", "64") == parse("--head-dims", "64")
