"""A probe with less patience and fewer cases than the backend's own, for the tests of probing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from nsa.backends.flash import FlashBackend
from nsa.backends.flash.cases import cases_of
from nsa.backends.flash.libraries import Library
from nsa.backends.probe import Outcome, Subject, run_cases
from nsa.backends.problem import Problem
from nsa.sequences import Sequences, Sliding
from nsa.settings import Settings

PROBLEM = Problem(
    op="sliding", batch=1, n_queries=64, n_keys=64, n_heads=2, n_groups=1, d_k=8, d_v=8, dtype=torch.float32
)
SUBJECT = Subject(library="stand-in", version="0", gpu="cpu", driver="none", torch="2", cuda="none", cases="1")
INSISTS = Settings.load(environ={"NSA_USE_FA2": "1"})
SOME = ("one token", "a window across tiles")
OWN = ("the problem's own shape", "the longest of its class")


def probe_quickly(
    library: Library, problem: Problem, width: int, dtype: torch.dtype, names: tuple[str, ...] = SOME
) -> list[Outcome]:
    """As the backend's own, with less patience and fewer cases."""
    command = [sys.executable, "-P", "-m", "nsa.backends.flash.trial", library.address, problem.device]
    cases = [case for case in cases_of(problem, width, dtype) if case["name"] in names]
    return run_cases(command, cases, case_seconds=2.0)


def backend_of(library: Any, folder: Path, prober: Any = probe_quickly) -> FlashBackend:
    return FlashBackend(INSISTS, (library,), folder=folder, prober=prober)


def sliding(q: torch.Tensor, window: int) -> Sliding:
    """The sliding branch of fixed-length rows, with a scale of 1."""
    return Sliding(Sequences(q.shape[0], q.shape[1], q.device), window, 1.0)
