"""A probe with fewer cases and a shorter time limit than the backend's own, for the tests of probing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from nsa.backends.flash import FlashBackend
from nsa.backends.flash.cases import cases_of
from nsa.backends.flash.libraries import Library
from nsa.backends.flash.probe import Outcome, Subject, run_cases
from nsa.backends.problem import Problem
from nsa.sequences import Sequences, Sliding
from nsa.settings import Settings

PROBLEM = Problem(
    op="sliding", batch=1, n_queries=64, n_keys=64, n_heads=2, n_groups=1, d_k=8, d_v=8, dtype=torch.float32
)
SUBJECT = Subject(library="stand-in", version="0", gpu="cpu", driver="none", torch="2", cuda="none", cases="1")
FORCED_ON = Settings.load(environ={"NSA_USE_FA2": "1"})
SOME = ("one token", "a window across tiles", "documents", "a few queries on a cache")
OWN = ("the problem's own shape", "the longest of its class")


def probe_quickly(
    library: Library,
    problem: Problem,
    head_dim: int,
    dtype: torch.dtype,
    names: tuple[str, ...] = SOME,
    seconds: float = 20.0,
) -> list[Outcome]:
    """As the backend's own, with fewer cases and a shorter time limit."""
    command = [sys.executable, "-P", "-m", "nsa.backends.flash.probe_child", library.address, problem.device]
    cases = [case for case in cases_of(problem, head_dim, dtype) if case["name"] in names]
    return run_cases(command, cases, case_seconds=seconds)


def no_probe(*_: Any) -> list[Outcome]:
    """For a backend that trusts its library."""
    return []


def backend_of(library: Any, folder: Path | None, prober: Any = probe_quickly) -> FlashBackend:
    return FlashBackend(FORCED_ON, (library,), folder=folder, prober=prober)


def sliding(q: torch.Tensor, window: int) -> Sliding:
    """The sliding branch of fixed-length rows, with a scale of 1."""
    return Sliding(Sequences(q.shape[0], q.shape[1], q.device), window, 1.0)
