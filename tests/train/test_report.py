"""What a run writes down survives what happens to the run, and the page is drawn from it alone."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import tomllib
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browsing import Browser

import nsa
from nsa import cli
from nsa.train import report
from nsa.train.report import write_comparison, write_report
from nsa.train.report.charts import POINTS, middle, number, thin, ticks
from nsa.train.run_folder import RunLog, read_lines


def full_run(folder: Path) -> RunLog:
    log = RunLog(folder, resume=False)
    for step in range(1, 41):
        log.write("step", step=step, loss=5 / step, grad_norm=1.0, lr=1e-3 / step)
    for step in (20, 40):
        log.write("eval", step=step, loss=5.5 / step)
        log.write("speed", step=step, tokens_per_s=1000.0 + step, data_wait=0.01, mfu=0.4, odd_number=step)
        gates = {"cmp": 0.25, "sel": 0.5, "win": 0.75}
        log.write("gates", step=step, mean=[gates, None], entropy=[gates, None])
        log.heartbeat(step, loss=1.0, gpu_util=0.97)
    log.write("distances", step=40, counts=[10, 20, 5, 5, 0, 0, 1])
    log.write("fallbacks", step=40, counts={"selected on triton: <too large>": 2})
    log.write("sample", step=40, text="def <b>bold</b>():\n    pass")
    (folder / "config.yaml").write_text("steps: 40\n")
    (folder / "run.json").write_text(json.dumps({"hash": "abc", "environment": {"torch": "2.13", "gpu": None}}))
    return log


class Checker(HTMLParser):
    """Every tag that is opened is closed, and nothing is fetched."""

    VOID = ("meta", "line", "rect", "polyline", "circle", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert tag not in ("img", "link", "iframe", "object", "embed", "audio", "video"), tag
        assert not {"src", "href", "srcset", "xlink:href"} & {name for name, _ in attrs}, attrs
        if tag not in self.VOID or (tag == "rect" and self.rawdata[self.offset_of() :].split(">", 1)[0][-1] != "/"):
            self.open.append(tag)

    def offset_of(self) -> int:
        line, column = self.getpos()
        return sum(len(text) + 1 for text in self.rawdata.split("\n")[: line - 1]) + column

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(path: Path) -> str:
    text = path.read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert not re.search(r"https?:|url\(|@import", text), "nothing from the network"
    assert "default-src 'none'" in text
    return text


def captions(text: str) -> list[str]:
    return [re.sub("<span.*", "", caption) for caption in re.findall(r"<figcaption>(.*?)</figcaption>", text)]


def test_the_page_shows_everything_there_is(tmp_path: Path) -> None:
    full_run(tmp_path).close()
    text = checked(write_report(tmp_path))
    assert [re.split(", | for | by ", caption)[0] for caption in captions(text)] == [
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Tokens/s",
        "Waiting",
        "MFU",
        "GPU utilization",
        "Odd number",
        "Mean gate",
        "Mean gate",
        "Gate entropy",
        "Gate entropy",
        "Selected blocks",
        "Step 40",
        "config.yaml",
    ]
    for said in ("training", "validation", "selected on triton: &lt;too large&gt;", "environment.torch", "steps: 40"):
        assert said in text
    assert "def &lt;b&gt;bold&lt;/b&gt;():" in text, "what a model says is text, not page"
    assert "prefers-color-scheme: dark" in text


def test_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    log = RunLog(tmp_path, resume=False)
    log.write("eval", step=0, loss=2.0)
    log.close()
    text = checked(write_report(tmp_path))
    assert "<h2>" not in text
    assert "2.000" in text


def test_counts_of_heartbeats_are_drawn_of_a_finished_run(tmp_path: Path) -> None:
    log = RunLog(tmp_path, resume=False)
    for step in (1, 2, 3):
        log.write("step", step=step, loss=1.0, **({"skipped": True} if step == 2 else {}))
        log.heartbeat(step, loss=1.0, skipped=int(step > 1), stand_ins=int(step > 2))
    log.write("end", skipped=1, stand_ins=1)
    log.close()
    assert captions(checked(write_report(tmp_path))) == ["Loss", "Skipped", "Stand ins"]


def test_non_finite_numbers_leave_a_gap_and_valid_json(tmp_path: Path) -> None:
    log = RunLog(tmp_path, resume=False)
    for step, loss in enumerate([1.0, math.nan, math.inf, 2.0]):
        log.write("step", step=step, loss=loss)
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines] == [1.0, "nan", "inf", 2.0]
    assert "nan" not in checked(write_report(tmp_path)).split("</style>")[1].split("<script>")[0]


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run is .*; accepted: .*metrics\.jsonl"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match=r"run is '.*none'; accepted: "):
        write_report(tmp_path / "none")


def test_odd_lines_do_not_stop_the_page(tmp_path: Path) -> None:
    lines = [
        '{"kind": "gates", "step": 1, "mean": "x", "entropy": [1, {}]}',
        '{"kind": "distances", "counts": []}',
        '{"kind": "sample", "text": 3}',
        '{"kind": "end", "fallbacks": {}}',
        "[1, 2]",
        "not json",
        '{"step": true, "loss": "x"}',
        '{"kind": "step", "step": 1, "loss": 1.5}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "run.json").write_text("{torn")
    assert "<b>none</b>" in checked(write_report(tmp_path))


def test_a_step_done_again_counts_as_it_was_last(tmp_path: Path) -> None:
    log = RunLog(tmp_path, resume=False)
    for step, loss in ((1, 4.0), (2, 9.0)):
        log.write("step", step=step, loss=loss)
    log.close()
    log = RunLog(tmp_path, resume=True)
    for step, loss in ((2, 3.0), (3, 2.0)):
        log.write("step", step=step, loss=loss)
    log.close()
    text = checked(write_report(tmp_path))
    assert "9" not in re.findall(r"<polyline[^>]*>", text)[0].split('class="')[0]
    assert [text for _, text in json.loads(unescape_data(text))[0][1]] == ["1: 4", "2: 3", "3: 2"]


def unescape_data(text: str) -> str:
    return re.findall(r'data-lines="(.*?)"', text)[0].replace("&quot;", '"')


def test_a_torn_line_is_dropped_on_resume(tmp_path: Path) -> None:
    full_run(tmp_path).close()
    path = tmp_path / "metrics.jsonl"
    before = read_lines(path)
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 41, "lo')
    assert read_lines(path) == before
    log = RunLog(tmp_path, resume=True)
    log.write("step", step=41, loss=1.0)
    log.close()
    assert read_lines(path) == [*before, {"kind": "step", "step": 41, "loss": 1.0}]
    assert len(path.read_text().splitlines()) == len(before) + 1


ODD = ["1" + "0" * 400, "1" * 5000, "[" * 100_000 + "]" * 100_000, '"x"', "[]", "{}", "true", "null", "-1", "1e308"]


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("key", ["kind", "step", "loss", "mean", "counts", "text", "sample", "time", "fallbacks"])
def test_a_line_with_anything_in_it_is_drawn_or_left_out(key: str, value: str, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    full_run(run).close()
    (run / "run.json").write_text(f'{{"{key}": {value}}}')
    for name in ("metrics.jsonl", "heartbeat.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        odd = [f"{line.rstrip()[:-1]}, {json.dumps(key)}: {value}}}\n" for line in lines[-3:]]
        (run / name).write_text("".join([*lines, *odd]))
    shutil.copytree(run, other)
    assert cli.main(["report", str(run)]) == 0
    assert cli.main(["report", str(run), str(other), "-o", str(tmp_path / "two.html")]) == 0
    assert {step for line in read_lines(run / "metrics.jsonl") if (step := line["step"])} <= set(range(1, 41))


def test_a_new_run_begins_with_empty_files(tmp_path: Path) -> None:
    full_run(tmp_path).close()
    log = RunLog(tmp_path, resume=False)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    RunLog(tmp_path / "other", resume=True).close()


def test_lines_are_there_at_once_and_beats_have_the_time(tmp_path: Path) -> None:
    log = RunLog(tmp_path, resume=False)
    log.write("step", step=1, loss=1.0)
    log.heartbeat(1, loss=1.0)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"kind": "step", "step": 1, "loss": 1.0}]
    beat = read_lines(tmp_path / "heartbeat.jsonl")[0]
    assert beat.pop("time") > 1.7e9
    assert beat == {"step": 1, "loss": 1.0}
    log.close()


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, resume=False)
    log.write("sample", step=1, text="words make no board")
    assert not (tmp_path / "tensorboard").exists()
    log.write("step", step=2, loss=1.5)
    log.write("gates", step=2, mean=[{"cmp": 0.5}, None])
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert sorted(board.Tags()["scalars"]) == ["gates/mean/0/cmp", "step/loss"]
    assert [(event.step, event.value) for event in board.Scalars("step/loss")] == [(2, 1.5)]


def test_without_tensorboard_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.train.run_folder.find_spec", lambda name: None)
    log = RunLog(tmp_path, resume=False)
    log.write("step", step=1, loss=1.0)
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heartbeat.jsonl", "metrics.jsonl"]


def test_full_disk_for_tensorboard_loses_only_the_charts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    log = RunLog(tmp_path, resume=False)
    log.write("step", step=1, loss=1.0)
    (events,) = (tmp_path / "tensorboard").iterdir()
    # The file that TensorBoard appends to from now on, by name or by its descriptor.
    events.unlink()
    events.symlink_to("/dev/full")
    assert log.board is not None
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), log.board.file.fileno())
    with pytest.warns(RuntimeWarning, match="No space left"):
        log.write("step", step=2, loss=1.0)
    log.write("step", step=3, loss=1.0)
    log.close()
    assert not capfd.readouterr().err
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_broken_tensorboard_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.train.run_folder.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    log = RunLog(tmp_path, resume=False)
    with pytest.warns(RuntimeWarning, match="TensorBoard"):
        log.write("step", step=1, loss=1.0)
    log.write("step", step=2, loss=1.0)
    log.close()


def test_many_points_become_few_and_keep_their_spikes() -> None:
    points = [(float(i), 1.0) for i in range(50_000)]
    points[31_234] = (31_234.0, 99.0)
    few = thin(points)
    assert len(few) <= POINTS
    assert (31_234.0, 99.0) in few
    assert few == sorted(few)
    assert max(y for _, y in middle(points)) == 1.0, "a spike does not move the middle"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.1, 2.2), (0, 6e-4), (-3, 50_000), (5, 5), (0, 0)])
def test_ticks_are_round_and_around_the_values(low: float, high: float) -> None:
    marks = ticks(low, high, 4)
    assert marks[0] <= low
    assert marks[-1] >= high
    assert 2 <= len(marks) <= 7
    assert marks == sorted(set(marks))


def test_numbers_read_well() -> None:
    assert [number(x) for x in (0, 0.25, 6e-4, 1234, 297_319.5, 1.5e6, -2e9)] == [
        "0",
        "0.25",
        "0.0006",
        "1234",
        "297.3k",
        "1.5M",
        "-2G",
    ]


@pytest.mark.parametrize(("low", "high"), [(9e-5, 1.1e-4), (1.62, 1.63), (2.1, 2.2), (1e-7, 4e-7), (1000, 1010)])
def test_no_two_ticks_have_the_same_label(low: float, high: float) -> None:
    labels = [number(tick) for tick in ticks(low, high, 4)]
    assert len(set(labels)) == len(labels)
    assert [float(label) for label in labels] == pytest.approx(ticks(low, high, 4), rel=1e-5)


def test_what_the_page_is_made_of_is_package_data() -> None:
    folder = Path(report.__file__).parent
    assets = [path for path in folder.iterdir() if path.suffix in (".html", ".css", ".js")]
    assert len(assets) == 3
    project = tomllib.loads((Path(nsa.__file__).parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["nsa.train.report"]
    assert all(any(path.match(pattern) for pattern in patterns) for path in assets)


def test_a_name_that_looks_like_a_placeholder_is_shown_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "$body"
    full_run(run).close()
    assert "<title>$body</title>" in write_report(run).read_text()


# Of a run that still goes, of several runs, and in a browser.


def test_a_run_that_still_goes_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = full_run(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("steps: 180\n")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 41, "lo')
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    path = tmp_path / "run" / "report.html"
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert "40 <small>of 180</small>" in path.read_text()
    assert cli.main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").read_text() == path.read_text()
    log.close()


def logged(folder: Path, losses: list[float], *, batch_size: int, seconds: float) -> Path:
    """A run of 4,096 tokens per sequence that validates every ten steps."""
    folder.mkdir()
    lines = [{"kind": "eval", "step": 10 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    beats = [{"time": 1e9 + seconds * i, "step": 10 * i} for i in range(len(losses) + 1)]
    (folder / "heartbeat.jsonl").write_text("".join(json.dumps(beat) + "\n" for beat in beats))
    (folder / "config.yaml").write_text(
        f"steps: 40\nbatch_size: {batch_size}\naccum: 1\nmodel: {{seq_len: 4096}}\nlr: 0.001\nout: {folder}\n"
    )
    return folder


def test_runs_are_compared_by_tokens_and_by_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = logged(tmp_path / "small", [4.0, 3.0], batch_size=2, seconds=5)
    large = logged(tmp_path / "large", [3.5, 2.5], batch_size=4, seconds=20)
    assert cli.main(["report", str(small), str(large)]) == 0
    path = tmp_path / "compare.html"
    assert capsys.readouterr().out == f"wrote {path}\n"
    text = path.read_text()
    found = [json.loads(unescape(data)) for data in re.findall(r'data-lines="([^"]+)"', text)]
    by_tokens, by_seconds = ({label: [shown for _, shown in points] for label, points in chart} for chart in found)
    assert by_tokens["small"] == ["81.92k: 4", "163.8k: 3"]
    assert by_tokens["large"] == ["163.8k: 3.5", "327.7k: 2.5"]
    assert by_seconds["small"] == ["5: 4", "10: 3"]
    assert by_seconds["large"] == ["20: 3.5", "40: 2.5"]
    assert "<th>batch_size</th><td>2</td><td>4</td>" in text
    assert "<th>lr</th>" not in text
    assert "<th>out</th>" not in text
    Checker().feed(text)


@pytest.mark.parametrize(
    ("settings", "named"), [("", []), ("data: {source: text, path: b}", ["data.path, data.source"])]
)
def test_losses_of_other_data_have_a_caveat(settings: str, named: list[str], tmp_path: Path) -> None:
    runs = [logged(tmp_path / name, [4.0, 3.0], batch_size=2, seconds=5) for name in ("one", "two")]
    with (runs[1] / "config.yaml").open("a") as file:
        file.write(settings)
    text = write_comparison(runs, tmp_path / "compare.html").read_text()
    assert re.findall(r'class="note">[^<]*?([\w.]+(?:, [\w.]+)*)\.<', text) == named


def test_a_run_keeps_its_color_where_another_has_no_points(tmp_path: Path) -> None:
    late = logged(tmp_path / "late", [], batch_size=2, seconds=5)
    early = logged(tmp_path / "early", [4.0, 3.0], batch_size=2, seconds=5)
    text = write_comparison([late, early], tmp_path / "compare.html").read_text()
    assert '<span class="key c1">early</span>' in text
    assert "key c0" not in text
    shown = [json.loads(unescape(data)) for data in re.findall(r'data-lines="([^"]+)"', text)]
    assert shown
    assert all(label == "early" and points for chart in shown for label, points in chart)


def test_one_run_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs is"):
        write_comparison([tmp_path], tmp_path / "compare.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_open_without_a_problem(scheme: str, browser: Browser, tmp_path: Path) -> None:
    full_run(tmp_path / "run").close()
    other = logged(tmp_path / "other", [4.0, 3.0], batch_size=2, seconds=5)
    write_comparison([tmp_path / "run", other], tmp_path / "compare.html")
    for path in (write_report(tmp_path / "run"), tmp_path / "compare.html"):
        page = browser.open(path, "figure svg", scheme)
        page.locator(".hover").first.hover()
        assert page.locator("#tip").inner_text()
        assert not browser.problems


@pytest.mark.slow
def test_a_run_of_32k_steps_paints_within_two_seconds(browser: Browser, tmp_path: Path) -> None:
    log = full_run(tmp_path)
    for step in range(41, 32_001):
        log.write("step", step=step, loss=5 / step, grad_norm=1.0 + step % 7, lr=1e-3 / step)
    # Distances of a text of 32k tokens.
    log.write("distances", step=32_000, counts=list(range(512, 0, -1)))
    log.close()
    page = browser.open(write_report(tmp_path), "figure svg")
    paints = page.evaluate("performance.getEntriesByType('paint').map(entry => entry.startTime)")
    assert paints
    assert max(paints) < 2000
    assert not browser.problems
