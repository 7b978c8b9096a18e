"""What a call costs the host: functions of ours before a kernel is launched, and objects that are made on the way."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE  # isort: skip

import nsa
from nsa import ops, settings
from nsa.backends import gluon
from nsa.backends.gluon import tiles
from nsa.backends.triton import branches, ranged_forward, selected
from nsa.backends.triton.launch import Launch

PACKAGE = Path(nsa.__file__).parent
LIMIT = 7
COMPRESSION = {"mlp": "gather_forward_kernel", "mean": "mean_forward_kernel"}
INDEX = {"mark_kernel", "count_kernel", "place_kernel", "cut_kernel"}
SELECTED = {
    "dense": {"mark_kernel"},
    "block": {"split_kernel", *INDEX, "block_kernel", "common_kernel"},
    "query": {"split_kernel", "common_kernel", "query_kernel"},
}
FUSED = "hopper_selected_sliding_kernel"


def frames(stack: traceback.StackSummary) -> list[str]:
    """Those of ours, from the layer's forward on to the launch, in whose place this is called."""
    own = [f"{Path(frame.filename).stem}.{frame.name}" for frame in stack if PACKAGE in Path(frame.filename).parents]
    return [*own[own.index("attention.forward") :], "launch.__call__"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    found = []

    def recorded(self: Launch, **free: Any) -> None:
        """In place of the launch: no value is read back, so what was not computed changes no path."""
        found.append((self.kernel.__name__, frames(traceback.extract_stack())))

    monkeypatch.setattr(Launch, "__call__", recorded)
    return found


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on Hopper, in a process without TRITON_INTERPRET. No other test is to find these plans."""
    plans = (branches.plan_forward, branches.runs_together, ranged_forward.plan)
    monkeypatch.setattr(gluon, "unavailable", lambda: None)
    monkeypatch.setattr(tiles, "capability", lambda device: (9, 0))
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


def run_layer(length: int, training: bool, dtype: torch.dtype = torch.float32, **changed: Any) -> None:
    sizes = {"n_heads": 2, "d_k": 16, "d_v": 16, **changed}
    config = nsa.NSAConfig(dim=32, n_kv_groups=1, l=8, d=4, l_sel=64, n_sel=4, w=16, backend="triton", **sizes)
    layer = nsa.NSAAttention(config).to(DEVICE, dtype)
    with torch.set_grad_enabled(training):
        layer(torch.randn(1, length, 32, device=DEVICE, dtype=dtype, requires_grad=training))


def assert_few_frames(launched: list[tuple[str, list[str]]], expected: set[str]) -> None:
    assert {*expected, "score_kernel", "select_kernel", "combine_forward_kernel"} <= dict(launched).keys()
    for kernel, path in launched:
        assert len(path) <= LIMIT, f"{kernel}: {' > '.join(path)}"


@pytest.mark.parametrize("phi", ["mlp", "mean"])
@pytest.mark.parametrize("method", ["dense", "block", "query"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_layer_launches_kernels_within_few_frames(
    phi: str, method: str, training: bool, launched: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = selected.plan_forward
    # It otherwise depends on the GPU and the length.
    monkeypatch.setattr(selected, "plan_forward", lambda *args: plan(*args[:-1], method))
    run_layer(600, training, phi=phi)
    assert_few_frames(launched, {"ranged_forward_kernel", COMPRESSION[phi], *SELECTED[method]})


@pytest.mark.skipif(gluon.import_failure() is not None, reason="needs Gluon")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_fused_branches_launch_within_few_frames(
    training: bool, launched: list[tuple[str, list[str]]], usable: None
) -> None:
    run_layer(1100, training, torch.float16, n_heads=16, d_k=128, d_v=128)
    assert_few_frames(launched, {"hopper_forward_kernel", "split_kernel", "hopper_block_kernel", FUSED, *INDEX})
    # By itself, neither of the two.
    assert [kernel for kernel, _ in launched].count("hopper_forward_kernel") == 1
    assert "common_kernel" not in dict(launched)


# What is made in every call: the key that a plan is found by, and tuples of this call's own tensors.
PER_CALL = {"Layout", "LayerAngles", "Parameters", "CommonSplit", "Segments", "Saved", "Upstream", "StartedPass"}


def constructors() -> dict[CodeType, str]:
    """The code that makes an object of each dataclass and NamedTuple of ours that is loaded, and its name."""
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] == "nsa"]
    found = {x for module in loaded for x in vars(module).values() if isinstance(x, type)}
    own = [x for x in found if x.__module__.startswith("nsa.") and (is_dataclass(x) or hasattr(x, "_make"))]
    return {(x.__init__ if is_dataclass(x) else x.__new__).__code__: x.__name__ for x in own}


def layer_call(phi: str) -> Callable[[], torch.Tensor]:
    config = nsa.NSAConfig(
        dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=16, backend="triton", phi=phi
    )
    layer, x = nsa.NSAAttention(config).to(DEVICE), torch.randn(1, 40, 32, device=DEVICE, requires_grad=True)
    return lambda: layer(x)


def op_call(op: Callable[..., Any], **sizes: int) -> Callable[[], torch.Tensor]:
    q, k, v = (torch.randn(1, 40, n, 16, device=DEVICE, requires_grad=True) for n in (2, 1, 1))
    tensors = (k,) if op is ops.compress_mean else (q, k, v)
    return lambda: op(*tensors, **sizes, backend="triton")[0]


CALLS = {
    "layer": lambda: layer_call("mlp"),
    "layer with means": lambda: layer_call("mean"),
    "compress_mean": lambda: op_call(ops.compress_mean, block=8, stride=4),
    "sliding_attention": lambda: op_call(ops.sliding_attention, window=16),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_warm_call_makes_no_descriptions(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from the shapes of fixed-length sequences is made in the first call of these shapes."""
    monkeypatch.setattr(Launch, "__call__", lambda self, **free: None)
    monkeypatch.setattr(settings, "current", lambda: settings.Settings.load(environ={"NSA_REPLAY": "0"}))
    run, made = CALLS[call](), set()
    run().sum().backward()
    names = constructors()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in names:
            made.add(names[frame.f_code])

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(record)
        try:
            run().sum().backward()
        finally:
            sys.setprofile(None)
    assert "Layout" in made
    assert made <= PER_CALL
