"""A Gluon kernel that a GPU cannot take: Triton's kernels run the call, and every one after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

# First: it skips this file where kernels cannot run.
from interpreted import INTERPRETED  # isort: skip
from op_arguments import attention_arguments
from test_decode import CASES, StepInputs
from test_gluon_fused import SERVED

from nsa import NSAAttention, NSAConfig, ops
from nsa.backends import gluon
from nsa.backends import triton as backend
from nsa.backends.gluon import tiles
from nsa.backends.gluon.tiles import StepTile
from nsa.backends.routing import BackendFailure, router
from nsa.ops import fused

if not INTERPRETED:
    pytest.skip("on a GPU the kernels do not fail", allow_module_level=True)
if gluon.import_failure() is not None:
    pytest.skip(gluon.import_failure(), allow_module_level=True)

from triton.experimental.gluon._runtime import GluonJITFunction

TOO_LARGE = OutOfResources(300000, 232448, "shared memory")


@pytest.fixture
def off(environment: Callable[..., None]) -> Iterator[None]:
    """A process of its own, as far as Gluon is concerned: without it, as Triton's interpreter is."""

    def forget() -> None:
        gluon.failures.cache_clear()
        backend.forget_gluon_plans()

    forget()
    yield
    forget()


@pytest.fixture
def failing(off: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes launch plans pick Gluon's kernels from here on, all of which fail."""

    def fail(error: Exception = TOO_LARGE) -> None:
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(GluonJITFunction, "run", run)
        # Else the reason would be that the interpreter has no Gluon.
        monkeypatch.setattr(gluon, "settings", SimpleNamespace(triton_interpreted=lambda: False))
        backend.forget_gluon_plans()

    return fail


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((1, 64, 4, 128), (1, 64, 1, 128), (1, 64, 1, 128))
    return [torch.randn(shape, dtype=torch.float16).requires_grad_() for shape in shapes]


def attend(inputs: list[Tensor], name: str = "triton", *, strict: bool = False) -> Tensor:
    return ops.sliding_attention(*inputs, window=16, backend=name, strict=strict)[0]


def gradients(o: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(o.square().sum(), inputs)


@pytest.mark.parametrize(
    "error",
    [
        TOO_LARGE,
        PTXASError("out of registers"),
        CompilationError("", None, "no such layout"),
        RuntimeError("PassManager::run failed"),
    ],
    ids=type,
)
def test_triton_s_kernel_runs_the_call(
    error: Exception, failing: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    inputs = leaves()
    expected = attend(inputs)
    failing(error)
    with caplog.at_level(logging.WARNING, logger="nsa"):
        assert all(torch.equal(attend(inputs), expected) for _ in range(2))
        attend([x[:, :32] for x in inputs])
    assert "hopper_forward_kernel" in str(gluon.unavailable())
    assert str(error).splitlines()[-1].split(".")[0] in str(gluon.unavailable())
    (message,) = caplog.messages
    assert str(gluon.unavailable()) in message
    assert router().counts.as_dict()["calls"] == {"sliding/triton": 4}


def test_triton_s_kernels_run_a_backward_pass(failing: Callable[..., None]) -> None:
    inputs = leaves()
    outputs = [attend(inputs) for _ in range(2)]
    expected = gradients(outputs[0], inputs)
    failing()
    assert all(map(torch.equal, gradients(outputs[1], inputs), expected))
    assert "hopper_dkv_kernel" in str(gluon.unavailable())


def attend_first_blocks(length: int, n_select: int) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Inputs of the selected branch, and the call that attends to their first blocks."""
    torch.manual_seed(0)
    shapes = ((1, length, 8, 128), (1, length, 1, 128), (1, length, 1, 128))
    inputs = [torch.randn(shape, dtype=torch.float16).requires_grad_() for shape in shapes]
    own = (torch.arange(length) // 64)[None, :, None, None]
    blocks = torch.arange(n_select).expand(1, length, 1, n_select)
    indices = blocks.masked_fill(blocks > own, -1).int()
    return inputs, lambda: ops.selected_attention(*inputs, indices, select_block=64, backend="triton")[0]


def test_triton_s_kernel_runs_the_selected_forward_pass(failing: Callable[..., None]) -> None:
    # Just longer than what is read densely.
    _, attend_blocks = attend_first_blocks(length=261, n_select=1)
    expected = attend_blocks()
    failing()
    assert all(torch.equal(attend_blocks(), expected) for _ in range(2))
    assert "hopper_block_kernel" in str(gluon.unavailable())


def test_triton_s_kernel_runs_the_selected_backward_pass(failing: Callable[..., None]) -> None:
    inputs, attend_blocks = attend_first_blocks(length=70, n_select=2)
    outputs = [attend_blocks() for _ in range(2)]
    expected = gradients(outputs[0], inputs)
    failing()
    assert all(map(torch.equal, gradients(outputs[1], inputs), expected))
    assert "hopper_block_backward_kernel" in str(gluon.unavailable())


@pytest.mark.slow
def test_branches_at_once_run_one_by_one(failing: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in attention_arguments(SERVED, "triton", torch.half)]
    expected = fused.run_forward(*arguments)
    failing()
    monkeypatch.setattr(tiles, "pick_forward", lambda *layouts: None)
    for _ in range(2):
        assert all(map(torch.equal, fused.run_forward(*arguments), expected))
    assert "hopper_selected_sliding_kernel" in str(gluon.unavailable())
    assert router().counts.failures.total() == 1


def test_a_step_of_decoding_runs_after_recovery(failing: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = StepInputs(CASES["one token"])
    expected = inputs.run()
    failing()

    def pick(*layouts: Any) -> StepTile | None:
        return None if gluon.unavailable() else StepTile(block_n=layouts[-1], num_stages=2)

    monkeypatch.setattr(tiles, "pick_step", pick)
    with pytest.raises(gluon.KernelFailure, match="hopper_compressed_step_kernel") as raised:
        inputs.run()
    assert backend.recover_from(raised.value) is not None
    assert all(map(torch.equal, inputs.run(), expected))


def test_a_layer_s_step_runs_again_after_recovery(off: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = NSAAttention(NSAConfig(dim=8, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, backend="triton"))
    x, run, failed = torch.randn(1, 1, 8), backend.decode_step, []

    def step() -> Tensor:
        with torch.no_grad():
            return layer(x, cache=layer.new_cache(1, 8))

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise gluon.KernelFailure("no room")
        return run(*args, **kwargs)

    expected = step()
    monkeypatch.setattr(backend, "decode_step", fail_once)
    assert torch.equal(step(), expected)
    assert gluon.failures() == ["no room"]


@pytest.mark.parametrize("name", ["triton", "auto"])
def test_strict_forbids_triton_s_kernels(
    name: str, failing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "explicit_only", lambda problem: None)
    failing()
    for _ in range(2):
        with pytest.raises(BackendFailure, match=r"hopper_forward_kernel .*shared memory"):
            attend(leaves(), name, strict=True)
    assert gluon.unavailable() is None


def test_a_strict_call_rules_nothing_out_for_the_others(
    failing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "explicit_only", lambda problem: None)
    inputs = leaves()
    expected = attend(inputs)
    failing()
    with pytest.raises(BackendFailure, match="hopper_forward_kernel"):
        attend(inputs, "auto", strict=True)
    assert torch.equal(attend(inputs, "auto"), expected)
    assert router().counts.as_dict()["calls"] == {"sliding/triton": 2}


def test_strict_calls_run_too_once_the_process_has_left_gluon(failing: Callable[..., None]) -> None:
    inputs = leaves()
    expected = attend(inputs)
    failing()
    attend(inputs)
    assert torch.equal(attend(inputs, strict=True), expected)


def test_another_failure_is_no_reason_to_give_up_gluon() -> None:
    assert backend.recover_from(BackendFailure("no memory")) is None
    assert gluon.failures() == []
