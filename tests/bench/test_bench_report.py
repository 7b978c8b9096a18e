"""The page of benchmarks shows the rows' numbers, needs no network, and opens in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from bench_rows import ROW
from browsing import Browser

from nsa import cli
from nsa.bench.report import Heads, Measurements, break_even, keys_seen, row_flops
from nsa.results import Row, append, read_rows

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
HEADS = Heads(64, 4, 128, 1)


def attention(impl: str, length: int, ms: float, mode: str = "fwd", op: str = "attention", **changes: object) -> Row:
    shape = {"B": 1, "S": length, "Hq": 64, "G": 4, "Dk": 128, "Dv": 128}
    times = {"p20_ms": ms, "p50_ms": ms, "p80_ms": ms, "tokens_per_s": None}
    return replace(ROW, suite="attention", op=op, impl=impl, mode=mode, **shape, **times, **changes)  # type: ignore[arg-type]


def test_speedups_are_over_dense_attention() -> None:
    rows = [attention("nsa-triton-graphs", n, 1.0) for n in (1024, 4096)]
    rows += [attention("dense-cudnn-graphs", n, ms) for n, ms in ((1024, 0.5), (4096, 2.0))]
    # Eager calls do not replace graphs, whichever is later; other GPUs' rows are others'.
    rows += [attention("nsa-triton", 1024, 9.0), attention("dense-fa2-graphs", 1024, 0.1)]
    found = Measurements(rows)
    assert found.speedups(HEADS, ("fwd",)) == [(1024, 0.5), (4096, 2.0)]
    assert found.speedups(HEADS, ("fwd", "bwd")) == []
    assert break_even(found.speedups(HEADS, ("fwd",))) == pytest.approx(2048)


def test_a_graphs_row_keeps_the_peak_of_the_eager_one() -> None:
    eager, graphs = attention("nsa-triton", 1024, 9.0, peak_gib=2.5), attention("nsa-triton-graphs", 1024, 1.0)
    (row,) = Measurements([eager, replace(graphs, peak_gib=None)]).rows.values()
    assert (row.p50_ms, row.peak_gib) == (1.0, 2.5)
    (row,) = Measurements([eager, replace(graphs, peak_gib=3.0)]).rows.values()
    assert row.peak_gib == 3.0


def test_a_single_peak_is_drawn_and_a_missing_one_named(tmp_path: Path) -> None:
    append(tmp_path / "rows.csv", attention("nsa-triton", 8192, 1.0, "bwd", peak_gib=2.5))
    append(tmp_path / "rows.csv", attention("dense-fa2-graphs", 8192, 1.0, "bwd", peak_gib=None))
    memory = draw(tmp_path / "bench.html", tmp_path / "rows.csv").split(": memory</h2>")[1].split("</section>")[0]
    (lines,) = (json.loads(unescape(data)) for data in re.findall(r'data-lines="([^"]+)"', memory))
    assert [(impl, points[0][1]) for impl, points in lines] == [("nsa-triton", "8192: 2.5")]
    (missing,) = re.findall(r'class="note">([^<]+)<', memory)
    assert "dense-fa2 64/4/128" in missing
    assert "nsa-triton" not in missing


def test_what_was_not_measured_is_named(tmp_path: Path) -> None:
    append(tmp_path / "rows.csv", ROW)
    text = draw(tmp_path / "bench.html", tmp_path / "rows.csv")
    assert "(nsa bench branches)" in text
    assert "(nsa bench train)" not in text


def test_the_default_rows_are_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "report"]) == 2
    assert "checkout" in capsys.readouterr().err


def test_files_that_are_left_out_take_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path / "rows.csv", ROW)
    for name in "abc":
        (tmp_path / f"{name}.csv").write_text("x\n1\n")
    draw(tmp_path / "bench.html", tmp_path)
    assert len([line for line in capsys.readouterr().out.splitlines() if "left out" in line]) == 1


def test_break_even_is_only_claimed_between_lengths() -> None:
    assert break_even([(1024, 0.5), (2048, 0.9)]) is None
    assert break_even([(1024, 1.5), (2048, 1.9)]) == 0
    # Faster, then slower again: from the last change on.
    assert break_even([(1024, 2.0), (2048, 0.5), (8192, 2.0)]) == pytest.approx(4096)


def test_flops_are_those_of_the_keys_that_are_seen() -> None:
    assert keys_seen("attention", "dense-cudnn", 1023) == 512
    assert keys_seen("sliding", "nsa-triton", 512) == pytest.approx(256.5)
    forward = row_flops(attention("dense-cudnn", 1023, 1.0))
    assert forward == 2 * 1023 * 64 * 256 * 512
    assert row_flops(attention("dense-cudnn", 1023, 1.0, "bwd")) == 2.5 * forward
    branches = [row_flops(attention("nsa-triton", 8192, 1.0, op=op)) for op in ("compressed", "selected", "sliding")]
    assert sum(branches) == pytest.approx(row_flops(attention("nsa-triton", 8192, 1.0)))


def draw(out: Path, *rows: Path) -> str:
    assert cli.main(["bench", "report", *map(str, rows), "-o", str(out)]) == 0
    return out.read_text()


def test_the_page_of_the_recorded_rows(tmp_path: Path) -> None:
    text = draw(tmp_path / "bench.html", RESULTS)
    assert not re.search(r"https?:|url\(|@import|<link|<img|\bsrc=", text)
    assert "default-src 'none'" in text
    charts = {json.loads(unescape(data))[0][0]: unescape(data) for data in re.findall(r'data-lines="([^"]+)"', text)}
    assert charts
    found = Measurements(row for row in read_rows(RESULTS / "h200" / "attention.csv"))
    length = break_even(found.speedups(HEADS, ("fwd",)))
    assert f"<td>{length:,.0f}</td>" in text
    for title in ("speedup", "memory", "training", "decoding", "host", "ceilings"):
        assert f"<h2>NVIDIA H200: {title}" in text


def test_branches_are_bars_and_shares(tmp_path: Path) -> None:
    times = {"compress": 1.0, "compressed": 2.0, "scores": 1.0, "selected": 4.0, "sliding": 1.0, "combine": 1.0}
    for op, ms in times.items():
        append(tmp_path / "rows.csv", attention("nsa-triton", 8192, ms, op=op))
    text = draw(tmp_path / "bench.html", tmp_path / "rows.csv")
    assert 'style="width:40.00%" title="selected: 4, 40%"' in text
    assert "<th>selected fwd</th><td>nsa-triton</td>" in text
    assert "<h2>NVIDIA H200: time " in text


def test_training_has_one_point_per_length_and_a_row_per_batch(tmp_path: Path) -> None:
    for batch, rate in ((8, 800.0), (1, 100.0)):
        append(tmp_path / "rows.csv", replace(ROW, B=batch, tokens_per_s=rate))
    text = draw(tmp_path / "bench.html", tmp_path / "rows.csv")
    rates = json.loads(unescape(re.findall(r'data-lines="([^"]+)"', text)[0]))
    assert [shown for _, points in rates for _, shown in points] == ["2048: 800"]
    assert "<td>2,048 x 1</td>" in text
    assert "<td>2,048 x 8</td>" in text


def test_dtypes_and_value_dims_are_not_compared_with_each_other(tmp_path: Path) -> None:
    append(tmp_path / "rows.csv", replace(ROW, tokens_per_s=800.0))
    append(tmp_path / "rows.csv", replace(ROW, tokens_per_s=100.0, dtype="float32"))
    text = draw(tmp_path / "bench.html", tmp_path / "rows.csv")
    for dtype, rate in (("bfloat16", 800), ("float32", 100)):
        section = text.split(f"<h2>NVIDIA H200, {dtype}: training</h2>")[1].split("</section>")[0]
        assert re.findall(r"<td>(\d+)</td><td>12.50</td>", section) == [str(rate)]
    rows = [attention("nsa-triton", 1024, 1.0), replace(attention("dense-cudnn", 1024, 2.0), Dv=64)]
    found = Measurements(rows)
    assert [str(heads) for heads in found.heads()] == ["64/4/128 (d_v 64)", "64/4/128"]
    assert not any(found.speedups(heads, ("fwd",)) for heads in found.heads())


def test_a_path_without_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert cli.main(["bench", "report", str(tmp_path), "-o", str(tmp_path / "bench.html")]) == 2
    assert f"'{tmp_path}'; accepted: " in capsys.readouterr().err


def test_names_of_a_file_are_text_on_the_page(tmp_path: Path) -> None:
    names = {"gpu": "<script>gpu</script>", "commit": "<script>commit</script>"}
    for impl in ("nsa-<script>", "dense-cudnn"):
        for length in (1024, 2048):
            append(tmp_path / "rows.csv", attention(impl, length, 1.0, **names))
    text = draw(tmp_path / "bench.html", tmp_path / "rows.csv")
    # The page's own.
    assert text.count("<script>") == 1
    assert "&lt;script&gt;gpu" in text


@pytest.mark.parametrize("content", ["train,op\n", "\0", "a" * 200_000])
def test_a_damaged_file_is_named(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path / "rows.csv", ROW)
    with (tmp_path / "rows.csv").open("a") as file:
        file.write(content)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\0")
    assert cli.main(["bench", "report", str(tmp_path), "-o", str(tmp_path / "bench.html")]) == 2
    assert "rows.csv, line " in capsys.readouterr().err


@pytest.mark.parametrize("ms", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_row_that_nothing_can_measure_is_named(ms: float, tmp_path: Path) -> None:
    for row in (ROW, replace(ROW, p50_ms=ms)):
        append(tmp_path / "rows.csv", row)
    with pytest.raises(ValueError, match=rf"rows\.csv, line 3, .*{ms}"):
        read_rows(tmp_path / "rows.csv")


def test_a_missing_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", str(tmp_path / "none"), "-o", str(tmp_path / "bench.html")]) == 2
    assert f"'{tmp_path / 'none'}'; accepted: " in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_without_a_problem(scheme: str, browser: Browser, tmp_path: Path) -> None:
    draw(tmp_path / "bench.html", RESULTS)
    page = browser.open(tmp_path / "bench.html", "figure svg", scheme)
    page.locator(".hover").first.hover()
    assert page.locator("#tip").inner_text()
    assert not browser.problems
