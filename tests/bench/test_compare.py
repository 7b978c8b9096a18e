"""Only what is slower beyond the noise, or gone, is a regression."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_rows import ROW

from nsa import cli
from nsa.results import Row, append


def timed(p20: float, p50: float, p80: float, peak: float | None = 12.5, **changes: object) -> Row:
    return replace(ROW, p20_ms=p20, p50_ms=p50, p80_ms=p80, peak_gib=peak, **changes)  # type: ignore[arg-type]


def write(path: Path, *rows: Row) -> str:
    for row in rows:
        append(path, row)
    return str(path)


BEFORE = timed(9.8, 10.0, 10.4)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (timed(9.8, 10.0, 10.4), ""),
        # Beyond the bound, but within the spread; and the other way round.
        (timed(10.3, 11.0, 11.5), ""),
        (timed(10.41, 10.45, 10.5), ""),
        (timed(10.5, 10.6, 10.7), "slower"),
        (timed(8.0, 8.1, 8.2), "faster"),
        (timed(9.8, 10.0, 10.4, 13.2), "memory"),
        (timed(9.8, 10.0, 10.4, None), ""),
        (timed(12.0, 12.1, 12.2, 14.0), "slower memory"),
    ],
)
def test_verdicts(after: Row, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a.csv", BEFORE), write(tmp_path / "b.csv", after)
    status = cli.main(["bench", "compare", a, b])
    *lines, last = capsys.readouterr().out.splitlines()
    assert status == int(verdict not in ("", "faster"))
    assert [line[:14].strip() for line in lines] == ([verdict] if verdict else [])
    assert json.loads(last)["compared"] == 1


def test_the_bound_is_a_flag(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.csv", BEFORE), write(tmp_path / "b.csv", timed(10.5, 10.6, 10.7))
    assert cli.main(["bench", "compare", a, b, "--bound", "0.1"]) == 0


def test_the_last_row_of_a_subject_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "h200"
    write(folder / "train.csv", timed(20.0, 21.0, 22.0), BEFORE, replace(BEFORE, S=4096))
    (folder / "other.csv").write_text("a,b\n1,2\n")
    b = write(tmp_path / "b.csv", replace(BEFORE, commit="new"), replace(BEFORE, S=8192))
    assert cli.main(["bench", "compare", str(folder), b]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "other.csv" in lines[0]
    assert json.loads(last) == {"compared": 1, "worse": 0, "gone": 0, "only_before": 1, "only_after": 1}


GRAPHS, DENSE = replace(BEFORE, impl="nsa-sdpa-graphs"), replace(BEFORE, impl="dense-sdpa")


@pytest.mark.parametrize(
    ("after", "lines", "status"),
    [
        ([DENSE, BEFORE], ["gone           train train nsa-sdpa-graphs train 12/2/64 B=8 S=2048"], 1),
        # Nothing in common.
        ([BEFORE], ["gone           train train nsa-sdpa-graphs", "gone           train train dense-sdpa"], 1),
        ([GRAPHS, DENSE, replace(BEFORE, S=4096)], [], 0),
    ],
)
def test_a_row_of_a_measured_shape_that_is_gone_is_a_regression(
    after: list[Row], lines: list[str], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a.csv", GRAPHS, DENSE), write(tmp_path / "b.csv", *after)
    assert cli.main(["bench", "compare", a, b]) == status
    *printed, last = capsys.readouterr().out.splitlines()
    assert all(line.startswith(start) for line, start in zip(printed, lines, strict=True))
    assert json.loads(last)["gone"] == len(lines)


def test_a_shape_that_was_not_measured_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a.csv", BEFORE, replace(BEFORE, S=4096)), write(tmp_path / "b.csv", BEFORE)
    assert cli.main(["bench", "compare", a, b]) == 0
    assert capsys.readouterr().out.startswith("not measured   train train nsa-sdpa train 12/2/64 B=8 S=4096")


@pytest.mark.parametrize(
    ("impl", "commit", "status"), [("nsa-sdpa", "abc1234", 0), ("nsa-sdpa", "older", 1), ("dense-sdpa", "older", 0)]
)
def test_runs_of_the_same_code_are_noise(impl: str, commit: str, status: int, tmp_path: Path) -> None:
    slow = timed(10.9, 11.0, 11.2, impl=impl, commit=commit)
    a = write(tmp_path / "a.csv", slow, replace(BEFORE, impl=impl))
    b = write(tmp_path / "b.csv", timed(11.1, 11.1, 11.1, impl=impl))
    assert cli.main(["bench", "compare", a, b]) == status


@pytest.mark.parametrize(
    ("dense", "noted"),
    [
        ({"dense-sdpa": 15.0}, True),
        ({"dense-sdpa": 5.0}, False),
        ({"dense-sdpa": 10.0}, False),
        ({"dense-sdpa": 10.0, "dense-fa2": 15.0}, True),
        ({"dense-sdpa": 5.0, "dense-fa2": 15.0}, False),
    ],
)
def test_a_note_says_where_dense_attention_is_slower_too(
    dense: dict[str, float], noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.csv", BEFORE, *(replace(BEFORE, impl=impl) for impl in dense))
    moved = [timed(ms, ms, ms, impl=impl) for impl, ms in dense.items()]
    # That of another shape says nothing.
    append(tmp_path / "a.csv", replace(DENSE, S=4096))
    b = write(tmp_path / "b.csv", timed(14.0, 14.0, 14.0), timed(15.0, 15.0, 15.0, impl=DENSE.impl, S=4096), *moved)
    assert cli.main(["bench", "compare", a, b]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "nsa-sdpa" in line)
    assert ("1.50x" in line) == noted


def test_files_without_a_common_subject_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a.csv", BEFORE), write(tmp_path / "b.csv", replace(BEFORE, gpu="NVIDIA A100"))
    assert cli.main(["bench", "compare", a, b]) == 2
    assert "same subject" in capsys.readouterr().err
