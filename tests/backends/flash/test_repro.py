"""A failed probe leaves a report, and a single script that fails in the same way."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_standin import FloatingPointException, StandIn, VarlenBackwardFault, WrongKeys
from probing import PROBLEM, SUBJECT, probe_quickly

from nsa.backends.flash.cases import cases_of
from nsa.backends.flash.libraries import TorchLibrary
from nsa.backends.flash.probe import Outcome, report
from nsa.backends.flash.repro import repro_script

CASE = next(case for case in cases_of(PROBLEM, 8, torch.float32) if case["name"] == "a window across tiles")
FAILED = Outcome(case=CASE["name"], layout="fixed", problem="killed by SIGFPE", request=CASE)


def test_a_report_has_the_direction_the_call_and_the_machine(children_find_the_stand_ins: None) -> None:
    outcomes = probe_quickly(VarlenBackwardFault(), replace(PROBLEM, varlen=True), 8, torch.float32)
    text = report(replace(SUBJECT, gpu="NVIDIA H200", driver="570.1"), outcomes)
    for part in (
        "stand-in 0",
        "NVIDIA H200",
        "driver 570.1",
        "cuda none",
        "1 of 1 cases",
        "documents: killed by SIGFPE in backward",
        "backward: q=(168, 2, 8)",
        "do=(168, 2, 8)",
        "o=(168, 2, 8)",
        "lse=(2, 168):float32",
        "cu_seqlens_q=[0, 1, 131, 168]",
        "lengths [1, 130, 37]",
    ):
        assert part in text
    assert "RuntimeWarning" not in text


@pytest.mark.slow
def test_a_cached_case_is_laid_out_as_a_slice_of_a_cache(children_find_the_stand_ins: None) -> None:
    (outcome,) = probe_quickly(StandIn(), replace(PROBLEM, cached=True), 8, torch.float32)
    # The longest row bounds the keys, and the last row has no free slots after it.
    assert "max_k=300 cu_seqlens_q=[0, 5, 10] cu_seqlens_k=[0, 311, 611] used_k=[7, 300]" in outcome.call


def run_repro(tmp_path: Path, library: Any, outcome: Outcome = FAILED) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "repro.py"
    path.write_text(repro_script(library, replace(SUBJECT, gpu=outcome.case), outcome))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)


def test_the_script_of_a_crash_crashes(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    done = run_repro(tmp_path, FloatingPointException())
    assert done.returncode == -8, done.stderr
    assert "q=(1, 257, 2, 8)" in done.stdout


def test_the_script_of_wrong_results_fails(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    done = run_repro(tmp_path, WrongKeys())
    assert done.returncode == 1
    assert "wrong: o " in done.stderr


@pytest.mark.slow
def test_the_script_succeeds_on_a_right_library_and_odd_texts(
    tmp_path: Path, children_find_the_stand_ins: None
) -> None:
    odd = 'C:\\Users\\x \\N """quoted""" \x00 \udc80 \u00fc'
    done = run_repro(
        tmp_path, StandIn(), replace(FAILED, problem=odd, case=odd, call=odd, request=CASE | {"name": odd})
    )
    assert done.returncode == 0, done.stderr
    assert "survived" in done.stdout


@pytest.mark.slow
def test_the_script_of_torch_s_kernels_needs_torch_alone(tmp_path: Path) -> None:
    """On a CPU it gets as far as the call: torch has no such kernel there."""
    path = tmp_path / "repro.py"
    path.write_text(repro_script(TorchLibrary(), SUBJECT, FAILED))
    imported = {line.split()[1].split(".")[0] for line in path.read_text().splitlines() if "import" in line[:7]}
    assert "nsa" not in imported
    code = f"import sys; sys.path += {sys.path!r}; import runpy; sys.argv = ['x', 'cpu']; "
    code += f"runpy.run_path({str(path)!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": ""}
    words = [sys.executable, "-S", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert "_flash_attention_forward" in done.stderr
    assert "CPU" in done.stderr
    assert "window=4" in done.stdout
