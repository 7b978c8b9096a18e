"""Kernels compiled ahead: every launch is handed over, none runs, and progress counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from nsa import settings
from nsa.backends.triton import ahead
from nsa.backends.triton.launch import COLLECTING, Launch


class Compiled:
    run = "loaded"


class Kernel:
    """Stands for a JIT function: counts compilations and launches."""

    arg_names = ("x", "N")
    __name__ = "kernel"

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.launched = 0
        self.device_caches: dict[int, Compiled] = {}

    def warmup(self, **arguments: Any) -> Compiled:
        self.compiled.append(arguments)
        self.device_caches[0] = Compiled()
        return Compiled()

    def __getitem__(self, grid: Any) -> Any:
        def launch(**arguments: Any) -> None:
            self.launched += 1

        return launch


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "triton_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_what_threads_loaded_is_not_launched() -> None:
    kernel = Kernel()
    ahead.compile_ahead(lambda: Launch(kernel, (1,), N=1)(x=torch.zeros(4)))
    assert kernel.compiled
    assert not kernel.device_caches


def test_every_launch_is_compiled_and_none_runs() -> None:
    kernel = Kernel()
    launches = [Launch(kernel, (n,), N=n) for n in (1, 2, 3)]
    x = torch.zeros(4)
    seen = []
    count = ahead.compile_ahead(
        lambda: [launch(x=x) for launch in launches], lambda name, done, total: seen.append((name, done, total))
    )
    assert count == 3
    assert kernel.launched == 0
    assert sorted(arguments["N"] for arguments in kernel.compiled) == [1, 2, 3]
    assert seen == [("kernel", 1, 3), ("kernel", 2, 3), ("kernel", 3, 3)]
    launches[0](x=x)
    assert kernel.launched == 1


def test_a_computation_that_raises_leaves_launching_as_it_was() -> None:
    with pytest.raises(RuntimeError, match="halfway"):
        ahead.compile_ahead(lambda: (_ for _ in ()).throw(RuntimeError("halfway")))
    assert COLLECTING.get() is None


def test_a_kernel_that_cannot_be_compiled_fails_where_it_is_used() -> None:
    class Broken(Kernel):
        def warmup(self, **arguments: Any) -> Compiled:
            raise RuntimeError("no such instruction")

    kernel = Broken()
    launch = Launch(kernel, (1,), N=1)
    assert ahead.compile_ahead(lambda: launch(x=torch.zeros(1))) == 1
