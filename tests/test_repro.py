"""A crash leaves a report, and a script of one file that crashes the same way."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_standin import BackwardFault, FloatingPointException, NotFinite, StandIn, WrongKeys
from probing import PROBLEM, SUBJECT, probe_quickly

from nsa.backends.flash.cases import cases_of
from nsa.backends.flash.libraries import TorchLibrary
from nsa.backends.flash.repro import repro_script
from nsa.backends.probe import Outcome, Subject, report


def test_a_report_is_complete() -> None:
    wrong = Outcome(
        case="documents", feature="packed", problem="killed by SIGFPE", call="q=(168, 2, 8):bfloat16",
        request={"lengths": [1, 130, 37]},
    )  # fmt: skip
    text = report(replace(SUBJECT, gpu="NVIDIA H200", driver="570.1"), [wrong, replace(wrong, problem=None)])
    for part in (
        "stand-in 0",
        "NVIDIA H200",
        "driver 570.1",
        "cuda none",
        "1 of 2 cases",
        "SIGFPE",
        "q=(168",
        "[1, 130",
    ):
        assert part in text


def failed(library: Any, call: str = "") -> Outcome:
    case = next(case for case in cases_of(PROBLEM, 8, torch.float32) if case["name"] == "a window across tiles")
    return Outcome(case=case["name"], feature="dense", problem="killed by SIGFPE", call=call, request=case)


def test_the_repro_script_reproduces_the_crash_in_one_file(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    library = FloatingPointException()
    path = tmp_path / "repro.py"
    path.write_text(repro_script(library, SUBJECT, failed(library)))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == -8, done.stderr
    assert "q=(1, 257, 2, 8)" in done.stdout


def test_the_repro_script_of_torch_s_kernels_needs_torch_alone(tmp_path: Path) -> None:
    """Run on a CPU, it gets as far as the call: torch says that it has no such kernel there."""
    library = TorchLibrary()
    path = tmp_path / "repro.py"
    path.write_text(repro_script(library, SUBJECT, failed(library)))
    assert "nsa" not in {
        line.split()[1].split(".")[0] for line in path.read_text().splitlines() if "import" in line[:7]
    }
    environment = {**os.environ, "PYTHONPATH": ""}
    words = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path += {sys.path!r}; import runpy; sys.argv = ['x', 'cpu']; ",
    ]
    words[-1] += f"runpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert "_flash_attention_forward" in done.stderr
    assert "CPU" in done.stderr
    assert "window=4" in done.stdout


def test_a_report_says_which_direction_crashed_on_what(tmp_path: Path, children_find_the_stand_ins: None) -> None:
    outcomes = probe_quickly(BackwardFault(), PROBLEM, 8, torch.float32, ("documents", "a few queries on a cache"))
    text = report(SUBJECT, outcomes)
    for part in (
        "documents: killed by SIGFPE in backward",
        "backward: q=(168, 2, 8)",
        "do=(168, 2, 8)",
        "o=(168, 2, 8)",
        "lse=(2, 168):float32",
        "cu_seqlens_q=[0, 1, 131, 168]",
    ):
        assert part in text
    assert "RuntimeWarning" not in text
    # As a branch passes a slice of a cache: the longest row bounds the keys, and the last has no room after it.
    assert "max_k=300 cu_seqlens_q=[0, 5, 10] cu_seqlens_k=[0, 311, 611] used_k=[7, 300]" in outcomes[1].call


@pytest.mark.parametrize(("library", "says"), [(WrongKeys, "o is off by"), (NotFinite, "o is not finite")])
def test_the_repro_script_of_wrong_numbers_fails(
    library: Any, says: str, tmp_path: Path, children_find_the_stand_ins: None
) -> None:
    done = run_repro(tmp_path, library())
    assert done.returncode == 1
    assert f"wrong: {says}" in done.stderr


def test_the_repro_script_of_a_right_library_succeeds_whatever_its_texts_are(
    tmp_path: Path, children_find_the_stand_ins: None
) -> None:
    odd = 'C:\\Users\\x \\N """quoted""" \x00 \udc80 \u00fc'
    subject = replace(SUBJECT, gpu=odd)
    outcome = replace(failed(StandIn(), call=odd), problem=odd, case=odd)
    outcome = replace(outcome, request={**outcome.request, "name": odd})
    done = run_repro(tmp_path, StandIn(), subject, outcome)
    assert done.returncode == 0, done.stderr
    assert "survived, and right" in done.stdout


def run_repro(
    tmp_path: Path, library: Any, subject: Subject = SUBJECT, outcome: Outcome | None = None
) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "repro.py"
    path.write_text(repro_script(library, subject, outcome or failed(library)))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
