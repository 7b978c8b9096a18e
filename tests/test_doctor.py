"""`nsa doctor` and the command line around it: every section is there, and a backend that is off is caught."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doctoring import SHAPE, off_by, patient

from nsa import cli, doctor, machine, settings
from nsa.backends import reference, sdpa, triton
from nsa.backends.measured_routes import MeasuredRoute
from nsa.backends.problem import OPS, Problem
from nsa.backends.routing import BackendFailure, ImportFailed, Router
from nsa.settings import SETTINGS, Settings

# Small heads: these tests are about the report.
SMALL = ["--heads", "2", "--groups", "1", "--d-k", "8", "--d-v", "4", "--device", "cpu"]


def run_doctor(*flags: str, backends: tuple[Any, ...] = (sdpa, reference)) -> int:
    return doctor.run(
        cli.parser_of("doctor").parse_args([*SMALL, *flags]), make_router=lambda config: Router(backends, config)
    )


def test_a_healthy_machine_has_every_section_and_status_0(
    capsys: pytest.CaptureFixture[str], environment: Callable[..., None]
) -> None:
    assert run_doctor() == 0
    text = capsys.readouterr().out
    for section in ("versions", "backends", "settings", "what ran in this process", "route", "self-test", "verdict"):
        assert f"\n{section}\n" in f"\n{text}"
    for setting in SETTINGS:
        assert setting.env in text
        assert setting.meaning in text
    rows = [line.split()[:2] for line in text.splitlines()]
    for op in OPS:
        assert ["sdpa", op] in rows
    assert ["flash", "no:"] in rows
    assert ["sdpa", "yes"] in rows


def test_a_wrong_backend_is_named_with_its_error_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = patient(sliding_backward=off_by(sdpa.sliding_backward, 0, 0.25))
    assert run_doctor("--json", backends=(wrong, sdpa, reference)) == 1
    text = capsys.readouterr().out
    assert re.search(r"triton .*sliding .*dq, fixed-length, float32.* 2\.50e-01", text)
    assert 'backend="sdpa"' in text
    assert "WRONG" in text
    report = json.loads(text.splitlines()[-1])
    assert report["healthy"] is False
    assert {c["backend"] for c in report["checks"] if not c["agrees"]} == {"triton"}


@pytest.mark.parametrize("error", [BackendFailure("out of shared memory"), RuntimeError("x"), ValueError("x")])
def test_a_backend_that_raises_is_a_finding_not_a_crash(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error

    assert run_doctor("--json", backends=(patient(selected_forward=raises, select_blocks=raises), sdpa)) == 1
    text = capsys.readouterr().out
    for op in ("selected", "scores"):
        assert re.search(rf"triton .*{op} .*fixed-length, float32.*{type(error).__name__}: {error}", text)
    assert [c["error"] for c in json.loads(text.splitlines()[-1])["checks"] if not c["agrees"]] == [None] * 6


def test_a_backend_without_a_cache_is_looked_at_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    def supports(problem: Problem) -> str | None:
        return "whole sequences only" if problem.cached else None

    assert run_doctor(backends=(patient(supports=supports), sdpa)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [words for words in lines if words[:2] == ["triton", "sliding"]]
    assert [row[-1] for row in rows] == ["ok", "only"]
    assert rows[1][3] == "cached"


def test_a_backend_that_declines_is_not_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(backends=(patient(supports=lambda problem: "no GPU"), sdpa)) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"triton\b.*: no GPU", text)) == len(OPS) + 1, "one per op, and the route"


def test_when_sdpa_is_wrong_the_reference_is_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = patient(name="sdpa", combine_backward=off_by(sdpa.combine_backward, 0, 1.0))
    assert run_doctor(backends=(wrong, reference)) == 1
    assert 'backend="reference"' in capsys.readouterr().out


def test_a_route_that_differs_by_op_and_direction_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    def supports(problem: Problem) -> str | None:
        if problem.op == "sliding" and problem.backward:
            return "no backward"
        return "only sliding" if problem.op != "sliding" else None

    assert run_doctor(backends=(patient(supports=supports), sdpa)) == 0
    text = capsys.readouterr().out
    assert ["sliding", "triton", "sdpa"] in [line.split()[:3] for line in text.splitlines()]
    assert "triton for compress, compress (values), compressed, scores, selected, combine: only sliding" in text
    assert "triton for sliding backward: no backward" in text


def test_kernels_are_reported_only_of_a_backend_that_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton, "kernel_set", lambda *_: "those for Hopper")
    run_doctor()
    assert "those for Hopper" not in capsys.readouterr().out


def test_kernels_are_reported_as_the_self_test_left_them(capsys: pytest.CaptureFixture[str]) -> None:
    failures: list[Exception] = []

    def forward(*args: Any) -> Any:
        if not failures:
            raise BackendFailure("out of shared memory")
        return sdpa.sliding_forward(*args)

    def recover(failure: Exception) -> str:
        failures.append(failure)
        return "other kernels"

    found = patient(sliding_forward=forward, recover_from=recover, kernel_set=lambda *_: f"others after {failures}")
    assert run_doctor(backends=(found, sdpa)) == 0
    assert "others after [BackendFailure('out of shared memory')]" in capsys.readouterr().out


def test_kernels_are_reported_of_both_passes(capsys: pytest.CaptureFixture[str]) -> None:
    found = patient(kernel_set=lambda problem, forward, backward, *_: f"{forward[-1]}, {backward[-1:]}")
    run_doctor(backends=(found, sdpa))
    assert "combine, ['combine']" in capsys.readouterr().out


def test_settings_show_value_source_and_effect(
    capsys: pytest.CaptureFixture[str], environment: Callable[..., None], tmp_path: Path
) -> None:
    environment(NSA_FORCE_PARITY="0", NSA_SEQ_LEN="512", NSA_SEQ_LENS="1")
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"seq_len": 1, "batch_size": 4}))
    assert run_doctor("--settings-file", str(file), "--setting", "force_parity=on", "--json") == 0
    text = capsys.readouterr().out
    states = {state["name"]: state for state in json.loads(text.splitlines()[-1])["settings"]}
    expected = {
        "force_parity": (True, "command line"),
        "seq_len": (512, "environment"),
        "batch_size": (4, "file"),
        "no_gc": (False, "default"),
    }
    assert {name: (states[name]["value"], states[name]["source"]) for name in expected} == expected
    assert re.search(r"NSA_SEQ_LENS .*NSA_SEQ_LEN\b", text)
    assert re.search(r"sdpa: NSA_FORCE_PARITY .*command line", text)
    # No flash backend in this router, so its settings say that they do nothing.
    assert "flash" in states["use_fa2"]["missing"]
    assert states["sdpa_audit"]["missing"] is None


def test_the_file_of_the_tiles_is_named(
    capsys: pytest.CaptureFixture[str], environment: Callable[..., None], tmp_path: Path
) -> None:
    file = tmp_path / "tiles.json"
    environment(NSA_TUNED_TILES=str(file))
    for content, reported in (
        (None, f"({file} is "),
        ("{}", f"{file} (0 tiles) over"),
        ("[]", f"WRONG: tiles file {file}"),
    ):
        if content is not None:
            file.write_text(content)
        assert run_doctor("--json") == (1 if "WRONG" in reported else 0)
        text = capsys.readouterr().out
        assert reported in next(line for line in text.splitlines() if "tiles of " in line)
        assert reported in json.loads(text.splitlines()[-1])["tiles"]


@pytest.mark.parametrize("by_file", [False, True], ids=["--setting", "--settings-file"])
def test_tiles_are_those_of_the_settings_that_are_asked_about(
    by_file: bool, capsys: pytest.CaptureFixture[str], environment: Callable[..., None], tmp_path: Path
) -> None:
    tiles, file = tmp_path / "tiles.json", tmp_path / "settings.json"
    file.write_text(json.dumps({"tuned_tiles": str(tiles)}))
    flags = ["--settings-file", str(file)] if by_file else ["--setting", f"tuned_tiles={tiles}"]
    tiles.write_text("{}")
    assert run_doctor(*flags) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "tiles of " in line)
    assert f"{tiles} (0 tiles)" in line
    assert "self-test" in line, "which read other tiles"
    tiles.write_text("{bad")
    assert run_doctor(*flags) == 1
    assert capsys.readouterr().out.count(f"WRONG: tiles file {tiles} is not JSON") == 2


def test_a_misspelt_variable_is_in_the_report_only(
    capsys: pytest.CaptureFixture[str], environment: Callable[..., None], recwarn: pytest.WarningsRecorder
) -> None:
    environment(NSA_SEQ_LENS="1")
    assert run_doctor() == 0
    assert "NSA_SEQ_LENS" in capsys.readouterr().out
    # On a GPU the kernels read this process's settings too.
    settings.current()
    assert not [warning for warning in recwarn if "NSA_SEQ_LENS" in str(warning.message)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--setting", "use_fa=1"], "'use_fa' .*use_fa2"),
        (["--setting", "seq_len=x"], "seq_len .*'x'"),
        (["--settings-file", "/nowhere.json"], "/nowhere.json"),
        (["--heads", "3", "--groups", "2"], "n_heads is 3"),
        (["--seq-len", "0"], "seq_len is 0"),
    ],
)
def test_a_wrong_argument_is_status_2_and_a_sentence(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *SMALL, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("nsa doctor: error: ")
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err)
    assert not captured.out


@pytest.mark.parametrize(("error", "status"), [(ValueError("x is 1"), 2), (FileNotFoundError("no y"), 2)])
def test_any_command_turns_a_wrong_value_into_a_line(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("nsa.bench.run", run)
    assert cli.main(["bench", "train"]) == status
    assert capsys.readouterr().err == f"nsa bench: error: {error}\n"


def test_a_bug_in_a_command_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("nsa.bench.run", run)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["bench", "train"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_a_wrong_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cuda"]) == 2
    assert "device is 'cuda'; accepted: 'cpu'" in capsys.readouterr().err


def test_unavailable_backend_is_shown_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa.backends.triton.available", lambda: "no such package")
    assert cli.main(["doctor", *SMALL]) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"triton\b.*no such package", text)) >= 2, "backends and route"
    assert ["triton", "compressed"] not in [line.split()[:2] for line in text.splitlines()]


def test_a_backend_that_is_broken_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor("--json", backends=(ImportFailed("triton", "broken: undefined symbol"), sdpa)) == 1
    text = capsys.readouterr().out
    assert text.count("undefined symbol") >= 3, "backends, verdict and JSON"
    states = {state["name"]: state for state in json.loads(text.splitlines()[-1])["backends"]}
    assert [name for name, state in states.items() if state["broken"]] == ["triton"]


def test_key_and_value_compressions_are_routed_separately(capsys: pytest.CaptureFixture[str]) -> None:
    def supports(problem: Problem) -> str | None:
        return "8 wide" if problem.op == "compress" and problem.d_k == 8 else None

    assert run_doctor(backends=(patient(supports=supports), sdpa)) == 0
    rows = [line.split("  ")[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("  compress")]
    backends = {cells[0]: [cell.strip() for cell in cells[1:] if cell][:2] for cells in rows}
    assert backends["compress"] == ["sdpa", "sdpa"]
    assert backends["compress (values)"] == ["triton", "triton"]


@pytest.mark.parametrize(
    ("version", "known"),
    [("3.3.1", 0), ("3.4.0", 2), ("3.6.0+git1234", 3), ("3.7.0", 3), ("3.7.1", 2), ("4.0.0", 0),
     ("of unknown version", 0), (None, 0)],
)  # fmt: skip
def test_the_triton_versions_that_miscompile_are_known(version: str | None, known: int) -> None:
    assert len(machine.triton_notes(version)) == known


def test_an_affected_triton_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "triton_version", lambda: "3.6.0")
    assert "transposed accumulator" in (machine.find_versions().triton_note or "")
    assert "ptxas 12.8" in (machine.find_versions().triton_note or "")
    monkeypatch.setattr(machine, "triton_version", lambda: None)
    assert machine.find_versions().triton_note is None


def test_the_driver_is_read_from_the_kernel_module(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert machine.nvidia_driver(path) == "unknown"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: 12"
    )
    assert machine.nvidia_driver(path) == "570.133.20"


def test_a_gpu_is_named_with_capability_and_driver(capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor.diagnose(SHAPE, Router([sdpa, reference], Settings()), environ={})
    report = replace(report, gpus=(machine.Gpu("NVIDIA H200", "9.0", 139.8, "570.1"),), checks=())
    assert "gpu        NVIDIA H200, capability 9.0, 139.8 GiB, driver 570.1" in doctor.render_report(report)


def test_counters_of_this_process_are_shown(environment: Callable[..., None]) -> None:
    from nsa import ops

    q = torch.randn(1, 8, 2, 4)
    ops.sliding_attention(q, q, q, window=4)
    report = doctor.diagnose(SHAPE, Router([sdpa], Settings()), environ={})
    assert report.counts["calls"] == {"sliding/sdpa": 1}
    assert "calls  sliding/sdpa  1" in doctor.render_report(report)


def test_the_command_line_shows_commands_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, expected in ((["--version"], "nsa 0."), (["--help"], "examples:")):
        assert cli.main(flags) == 0
        assert expected in capsys.readouterr().out
    for flags in ([], ["docter"]):
        assert cli.main(flags) == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: nsa {name}")
    assert f"  nsa {name}" in text or f"example: nsa {name}" in text


@pytest.mark.slow
def test_the_installed_command_reads_the_environment() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    root = Path(cli.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "nsa.cli", "doctor", *SMALL, "--json"],
        env=clean | {"NSA_FORCE_PARITY": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.strip().startswith("force_parity")]
    assert line.split()[:4] == ["force_parity", "NSA_FORCE_PARITY", "on", "environment"]
    report = json.loads(done.stdout.splitlines()[-1])
    assert {route["backend"] for route in report["routes"]["forward"].values()} == {"reference"}
    assert report["healthy"] is True


def test_a_huge_shape_is_reduced_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor("--heads", "4096", "--groups", "1", "--d-k", "256", "--d-v", "256") == 0
    assert "3 heads in 1 groups, head_dim 16/16" in capsys.readouterr().out


def test_the_doctor_says_which_measurements_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    routes = [MeasuredRoute(gpu=gpu, op="sliding", order=("triton", "sdpa")) for gpu in ("NVIDIA H200", "NVIDIA A100")]
    path = tmp_path / "routes.json"
    path.write_text("{}")
    monkeypatch.setattr(doctor, "routes_path", lambda: path)
    router = Router([sdpa], Settings(), routes, gpu="NVIDIA H200 NVL")
    assert f"1 of 2 in {path} are for NVIDIA H200" in doctor.routes_origin(router)
    path.unlink()
    assert f"{path} is missing" in doctor.routes_origin(router)
