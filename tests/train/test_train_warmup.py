"""A run says what it compiles before its first step, and compiles a layer's kernels at once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.data import Batch
from nsa.model import PRESETS
from nsa.train import warmup

TINY = PRESETS["tiny"]


def batch() -> Batch:
    tokens = torch.zeros(2, 40, dtype=torch.long)
    return Batch(tokens, tokens, None)


class Compiling:
    """A backend whose kernels are compiled: runs the computation and reports two kernels."""

    name = "compiling"

    def __init__(self) -> None:
        self.ran = 0

    def compile_ahead(self, computation: Callable[[], Any], progress: Callable[[str, int, int], None]) -> int:
        computation()
        self.ran += 1
        for done in (1, 2):
            progress("some_kernel", done, 2)
        return 2


def test_layer_kernels_are_compiled_by_the_backend_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Compiling()
    real = warmup.router()
    stand_in = SimpleNamespace(route=real.route, backends={"sdpa": backend})
    monkeypatch.setattr(warmup, "router", lambda: stand_in)
    seen = []
    warmup.compile_kernels(TINY, batch(), torch.device("cpu"), torch.float32, lambda *progress: seen.append(progress))
    assert backend.ran == 1
    assert seen == [("some_kernel", 1, 2), ("some_kernel", 2, 2)]


def test_a_backend_that_compiles_nothing_is_left_alone() -> None:
    warmup.compile_kernels(TINY, batch(), torch.device("cpu"), torch.float32, lambda *_: pytest.fail("a kernel"))


def test_a_run_on_a_cpu_says_nothing() -> None:
    said: list[str] = []
    warmup.warm_up(SimpleNamespace(), batch(), torch.device("cpu"), torch.float32, said.append)  # type: ignore[arg-type]
    assert said == []
