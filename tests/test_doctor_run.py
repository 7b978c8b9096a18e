"""`nsa doctor --config`: OK only where the run can start, at a speed that is worth it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench_rows import ROW
from doctoring import SHAPE
from training import small_run

from nsa import cli, doctor, settings
from nsa.backends import reference, sdpa
from nsa.backends.routing import Router
from nsa.settings import Settings
from nsa.train import plan, preflight
from nsa.train.config import load_config


@pytest.fixture(autouse=True)
def no_self_test(monkeypatch: pytest.MonkeyPatch, environment: Callable[..., None]) -> None:
    """Whether backends are right is looked at elsewhere."""
    monkeypatch.setattr(doctor, "self_test", lambda *_: [])


def test_the_runtime_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check_run(tmp_path)
    finally:
        torch.set_float32_matmul_precision(before)
    text = capsys.readouterr().out
    report = json.loads(text.splitlines()[-1])["runtime"]
    assert set(report) == {"driver", "cuda", "cudnn", "nvml", "tf32", "variables"}
    assert report["tf32"]["matmul"] is True
    assert report["variables"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
    rows = {line.split()[0] for line in text.split("backends\n")[0].splitlines()[1:] if line.strip()}
    assert {"driver", "cuda", "cudnn", "nvml", "tf32", "variables"} <= rows


def check_run(tmp_path: Path, *flags: str, **changes: Any) -> int:
    """`nsa doctor --config` on a small run; the device is not named unless `flags` do."""
    tree = small_run(tmp_path / "run", kind="nsa", **changes).to_dict()
    for name in ("device", "out"):
        del tree[name]
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(tree))))
    args = cli.parser_of("doctor").parse_args(
        ["--config", str(path), "--set", f"out={tmp_path / 'run'}", "--json", *flags]
    )
    return doctor.run(args, make_router=lambda config: Router((sdpa, reference), config))


def found_in(text: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(text.splitlines()[-1])
    return report


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@without_gpu
def test_run_that_fits_this_machine_is_ready_with_a_timed_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], environment: Callable[..., None]
) -> None:
    environment(NSA_PREFILL_BATCHED="1", NSA_USE_SEL_PACK="1", NSA_SEL_RANGES_V2="1")
    assert check_run(tmp_path) == 0
    text = capsys.readouterr().out
    assert "[OK]" in text
    for name in settings.RETIRED:
        assert re.search(f"{name} .*no longer", text)
    report = found_in(text)
    assert (report["ready"], report["problems"]) == (True, [])
    assert "tokens/s" in report["notes"][0]
    assert "timed" in report["notes"][0]


@without_gpu
def test_routes_are_those_of_the_runs_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_run(tmp_path, "--set", "model.attn.backend=reference") == 0
    routes = found_in(capsys.readouterr().out)["routes"]
    assert {route["backend"] for found in routes.values() for route in found.values()} == {"reference"}
    config = load_config("125m", {"model.attn.l": 64})
    report = doctor.diagnose(SHAPE, Router((sdpa, reference), Settings()), environ={}, attn=config.model.attn)
    assert report.forward.routes["compressed"].problem.n_keys == 1


@without_gpu
@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"steps": 10**9}], ids=["bf16", "years"])
def test_a_run_that_is_meant_for_a_gpu_is_not_ready_without_one(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_run(tmp_path, **changes) == 1
    text = capsys.readouterr().out
    assert "[OK]" not in text
    (problem,) = found_in(text)["problems"]
    assert problem.startswith("device is 'cpu'")
    # Unless the CPU is asked for; then its speed is reported.
    flags = ["--device", "cpu"] if "dtype" in changes else ["--set", "device=cpu"]
    assert check_run(tmp_path, *flags, **changes) == 0
    text = capsys.readouterr().out
    assert "[OK]" in text
    assert "tokens/s" in found_in(text)["notes"][0]


@without_gpu
def test_a_step_too_long_for_this_cpu_is_estimated(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: Callable[..., None],
) -> None:
    monkeypatch.setattr(preflight, "try_step", lambda *_: pytest.fail("a step of minutes was run"))
    monkeypatch.setattr(preflight, "CPU_TRIED_S", 0.0)
    assert check_run(tmp_path, "--device", "cpu") == 0
    assert "estimated" in found_in(capsys.readouterr().out)["notes"][0]


@without_gpu
@pytest.mark.parametrize("name", ["NSA_DEBUG_TIMING", "NSA_SDPA_AUDIT", "NSA_FORCE_PARITY", "CUDA_LAUNCH_BLOCKING"])
def test_a_debugging_aid_is_not_ready_for_a_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], environment: Callable[..., None]
) -> None:
    environment(**{name: "1"})
    assert check_run(tmp_path) == 1
    text = capsys.readouterr().out
    assert "[OK]" not in text
    (problem,) = found_in(text)["problems"]
    assert problem.startswith(f"{name} is on")
    environment(**{name: "0"})
    assert check_run(tmp_path) == 0


@without_gpu
def test_anomaly_mode_is_not_ready_for_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], environment: Callable[..., None]
) -> None:
    with torch.autograd.set_detect_anomaly(True):
        assert check_run(tmp_path) == 1
    (problem,) = found_in(capsys.readouterr().out)["problems"]
    assert "anomaly" in problem


@pytest.mark.parametrize(("seconds", "slow"), [(0.2, False), (2.0, True)])
def test_a_step_on_a_gpu_is_compared_with_the_plan(seconds: float, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(ROW, impl="nsa-triton-graphs", tokens_per_s=100_000.0)
    monkeypatch.setattr(plan, "measurements", lambda folder: [row])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(preflight, "try_step", lambda config, device: seconds)
    config = load_config("125m", {"device": "cuda", "parallel": "none"})
    notes: list[str] = []
    problems = list(preflight.device_problems(config, notes, True, runs=True))
    # 16,384 tokens at 100,000 per second.
    assert "164 ms" in notes[0]
    assert f"{seconds * 1e3:,.0f} ms" in notes[0]
    assert [("12 times" in problem, "164 ms" in problem) for problem in problems] == [(True, True)] * slow
