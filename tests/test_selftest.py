"""The self-test: every op and gradient is compared, and a backend that is off is caught."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doctoring import SHAPE, off_by, patient

from nsa import selftest
from nsa.backends import sdpa
from nsa.backends.problem import OPS
from nsa.backends.routing import BackendFailure
from nsa.selftest import Check
from nsa.sequences import Saved, Upstream

# The ways in which the gradient of a branch is taken.
GATED = ("gated", "gated and added")

LABELS = ("", " with dlse", *(f" {label}" for label in GATED))


def examine(*backends: Any) -> list[Check]:
    return selftest.self_test(backends, SHAPE)


def failing(checks: list[Check]) -> set[tuple[str, str, str]]:
    return {(check.backend, check.op, check.quantity) for check in checks if not check.agrees}


def test_every_op_and_gradient_is_checked_in_every_layout() -> None:
    checks = examine(sdpa)
    looked_at = {(check.op, check.quantity, check.case) for check in checks}
    attention = {
        op: ["o", "lse", *(f"d{x}{label}" for x in leaves for label in LABELS)]
        for op, leaves in (("compressed", ("q", "k_cmp", "v_cmp")), ("selected", "qkv"), ("sliding", "qkv"))
    }
    quantities = {
        **attention,
        "compress": ["mean", "dk", "blocks", "dv", "dposition"],
        "scores": ["missed"],
        "combine": ["o", "do_cmp", "do_sel", "do_win", "dgates", "dgates alone"],
    }
    whole = {(op, q, case) for op in OPS for q in quantities[op] for case in ("fixed-length", "varlen")}
    forward = {(op, q, "cached") for op in attention for q in ("o", "lse")} | {("scores", "missed", "cached")}
    assert looked_at == whole | forward
    assert not failing(checks)
    assert all(0 < check.allowed < 1e-3 for check in checks)


@pytest.mark.parametrize(
    ("function", "which", "op", "quantity", "by"),
    [
        ("compressed_forward", 0, "compressed", "o", 1e-3),
        ("compressed_backward", 1, "compressed", "dk_cmp", math.nan),
        ("selected_forward", 1, "selected", "lse", 1e-3),
        ("selected_backward", 2, "selected", "dv", 1e-3),
        ("sliding_backward", 0, "sliding", "dq", 1e-3),
        ("combine_backward", 3, "combine", "dgates", math.nan),
        ("gather_blocks_backward", 1, "compress", "dposition", 1e-3),
    ],
)
def test_one_wrong_element_is_caught(function: str, which: int, op: str, quantity: str, by: float) -> None:
    wrong = patient(**{function: off_by(getattr(sdpa, function), which, by)})
    found = failing(examine(wrong, sdpa))
    assert ("triton", op, quantity) in found
    assert {(backend, op) for backend, op, _ in found} == {("triton", op)}


@pytest.mark.parametrize(
    ("function", "quantity"),
    [("compress_mean_forward", "mean"), ("compress_mean_backward", "dk"), ("gather_blocks_forward", "blocks")],
)
def test_a_wrong_compression_is_caught(function: str, quantity: str) -> None:
    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        return getattr(sdpa, function)(*args, **kwargs).roll(1, dims=1)

    assert failing(examine(patient(**{function: wrong}), sdpa)) == {("triton", "compress", quantity)}


def test_a_path_of_its_own_for_training_is_looked_at_too() -> None:
    """Nobody asks for the gradient of `lse` in training, and a backend may then compute the others differently."""

    def backward(upstream: Upstream, *args: Any) -> Any:
        off = upstream._replace(do=upstream.do * 1.001)
        return sdpa.sliding_backward(off if upstream.dlse is None else upstream, *args)

    found = failing(examine(patient(sliding_backward=backward)))
    expected = {f"d{x}{label}" for x in "qkv" for label in LABELS if label != " with dlse"}
    assert found == {("triton", "sliding", quantity) for quantity in expected}


@pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
@pytest.mark.parametrize(
    ("wrong", "labels"),
    [
        (lambda given, dk: dk * 0 + 7 if given.gate is not None else dk, (" gated", " gated and added")),
        (lambda given, dk: dk * 0 + 7 if given.dq is not None else dk, (" gated and added",)),
    ],
    ids=["always", "where it is added to"],
)
def test_a_layer_s_own_gradient_is_looked_at(
    branch: str, wrong: Callable[[Upstream, torch.Tensor], torch.Tensor], labels: tuple[str, ...]
) -> None:
    """A layer never runs the backward of a branch without a gate."""
    right = getattr(sdpa, f"{branch}_backward")

    def backward(upstream: Upstream, *args: Any) -> Any:
        dq, dk, dv = right(upstream, *args)
        return dq, wrong(upstream, dk), dv

    found = failing(examine(patient(**{f"{branch}_backward": backward})))
    name = "dk_cmp" if branch == "compressed" else "dk"
    assert found == {("triton", branch, f"{name}{label}") for label in labels}


@pytest.mark.parametrize(
    ("changed", "quantities"),
    [
        ({"gate": lambda x: x.contiguous().sqrt()}, {f"d{x} {label}" for x in "qkv" for label in GATED}),
        ({"product": lambda x: x + 1}, {f"d{x} {label}" for x in "qk" for label in GATED}),
        ({"dq": lambda x: None}, {"dq gated and added"}),
    ],
    ids=["gate", "product", "dq"],
)
def test_a_gate_a_product_or_a_sum_that_is_misread_is_caught(changed: dict[str, Any], quantities: set[str]) -> None:
    ((name, misread),) = changed.items()

    def backward(upstream: Upstream, saved: Saved, branch: Any) -> Any:
        """As a kernel has it: `delta` is made of the product."""
        if upstream.gate is None:
            return sdpa.sliding_backward(upstream, saved, branch)
        do, _, gate, product, before, _ = upstream._replace(**{name: misread(getattr(upstream, name))})
        # The gradient of `lse` moves `delta`.
        delta = gate * ((do * saved.o).sum(dim=-1) - product)
        dq, dk, dv = sdpa.sliding_backward(Upstream(do * gate[..., None], delta), saved, branch)
        return dq if before is None else before + dq, dk, dv

    found = failing(examine(patient(sliding_backward=backward)))
    assert found == {("triton", "sliding", quantity) for quantity in quantities}


def test_wrong_gradients_of_the_gates_alone_are_caught() -> None:
    def prepare(*args: Any) -> Any:
        d_gates, upstreams = sdpa.prepare_backward(*args)
        return d_gates.roll(1, dims=-1), upstreams

    assert failing(examine(patient(prepare_backward=prepare))) == {("triton", "combine", "dgates alone")}


def test_a_branch_that_is_prepared_wrongly_is_caught() -> None:
    def prepare(*args: Any) -> Any:
        d_gates, (cmp, sel, win) = sdpa.prepare_backward(*args)
        return d_gates, (cmp, sel, win._replace(gate=win.gate * 1.01))

    found = failing(examine(patient(prepare_backward=prepare)))
    assert found == {("triton", "sliding", f"d{x} {label}") for x in "qkv" for label in GATED}


def changed_selection(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: change(sdpa.select_blocks(*args, **kwargs))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x.flip(-1), id="not ascending"),
        pytest.param(lambda x: x.long(), id="another dtype"),
        pytest.param(lambda x: x[..., :-1], id="too few"),
        pytest.param(lambda x: x.where(x != 0, -1), id="without the first block"),
        pytest.param(lambda x: x.where(x < 0, x + 1), id="blocks that have not begun"),
    ],
)
def test_a_wrong_selection_is_caught(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert failing(examine(patient(select_blocks=changed_selection(change)))) == {("triton", "scores", "missed")}


def test_a_worse_selection_is_caught() -> None:
    def by_the_opposite(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return sdpa.select_blocks(-q, *args, **kwargs)

    checks = examine(patient(select_blocks=by_the_opposite))
    assert failing(checks) == {("triton", "scores", "missed")}
    assert all(check.error < 100 for check in checks)


def test_an_error_that_no_input_explains_is_not_a_finding() -> None:
    def has_a_bug(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("a bug")

    for function in ("sliding_forward", "select_blocks"):
        with pytest.raises(TypeError, match="a bug"):
            examine(patient(**{function: has_a_bug}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_requested_dtype_is_tested_besides_fp32(dtype: torch.dtype) -> None:
    checks = selftest.self_test([sdpa], replace(SHAPE, dtype=dtype))
    assert {check.dtype for check in checks} == {"float32", str(dtype).removeprefix("torch.")}
    assert not failing(checks)


def test_compiled_kernels_are_tested_in_the_requested_dtype_only() -> None:
    checks = selftest.self_test([patient(compiles=True), sdpa], replace(SHAPE, dtype=torch.bfloat16))
    found = {(check.backend, check.dtype) for check in checks}
    assert found == {("triton", "bfloat16"), ("sdpa", "bfloat16"), ("sdpa", "float32")}


def test_backends_are_asked_while_kernels_compile() -> None:
    """A backend that starts a process to answer does not make the compiler wait."""
    compiling = threading.Event()
    functions = {name: getattr(sdpa, name) for name in dir(sdpa) if not name.startswith("_")}
    slow = SimpleNamespace(**{**functions, "name": "slow"})
    slow.supports = lambda problem: None if compiling.wait(10) else "not asked while kernels compile"
    slow.compile_ahead = lambda run, progress: compiling.set()
    checks = selftest.self_test([slow], SHAPE)
    assert checks
    assert not failing(checks)
    assert not any(check.note for check in checks)


def test_a_backend_that_recovers_is_tested_further() -> None:
    recovered: list[Exception] = []

    def forward(*args: Any) -> Any:
        if not recovered:
            raise BackendFailure("out of shared memory")
        return sdpa.sliding_forward(*args)

    def recover(failure: Exception) -> str | None:
        recovered.append(failure)
        return "other kernels"

    assert not failing(examine(patient(sliding_forward=forward, recover_from=recover)))
    assert len(recovered) == 1


def test_an_error_in_the_requested_dtype_only_is_caught() -> None:
    def forward(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        o, lse = sdpa.sliding_forward(q, *args, **kwargs)
        return (o * 1.1, lse) if q.dtype == torch.bfloat16 else (o, lse)

    wrong = patient(sliding_forward=forward)
    assert not failing(examine(wrong))
    assert ("triton", "sliding", "o") in failing(selftest.self_test([wrong], replace(SHAPE, dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("function", "op"),
    [("compressed_forward", "compressed"), ("select_blocks", "scores"), ("sliding_forward", "sliding")],
)
def test_a_backend_that_misplaces_cached_queries_is_caught(function: str, op: str) -> None:
    def misplaced(*args: Any) -> Any:
        *tensors, branch = args
        if branch.sequences.q_start is not None:
            branch = replace(branch, sequences=replace(branch.sequences, q_start=branch.sequences.q_start - 20))
        return getattr(sdpa, function)(*tensors, branch)

    wrong = [check for check in examine(patient(**{function: misplaced})) if not check.agrees]
    assert {(check.op, check.case) for check in wrong} == {(op, "cached")}


@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 2, 64), (2, 1, 128)], ids=str)
def test_few_heads_are_no_false_alarm(shape: tuple[int, int, int]) -> None:
    """Where a row has few keys, `dq` is what two sums leave of each other: rounding, and nothing else."""
    heads, groups, head_dim = shape
    problem = replace(SHAPE, n_heads=heads, n_groups=groups, d_k=head_dim, d_v=head_dim)
    assert not failing(selftest.self_test([sdpa], problem))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dims", [(192, 128), (17, 16), (128, 512), (512, 384), (64, 64), (4, 8)])
def test_head_dims_that_differ_still_do_where_they_are_cut(
    head_dims: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    shape = replace(SHAPE, d_k=head_dims[0], d_v=head_dims[1], device=device)
    small = selftest.reduced_shape(shape, dtype)
    assert (small.d_k > small.d_v) == (head_dims[0] > head_dims[1])
    assert (small.d_k < small.d_v) == (head_dims[0] < head_dims[1])
    assert small.d_k <= shape.d_k
    assert small.d_v <= shape.d_v


def test_head_dims_that_a_gpu_takes_are_left_alone() -> None:
    small = selftest.reduced_shape(replace(SHAPE, d_k=256, d_v=192, device="cuda"), torch.bfloat16)
    assert (small.d_k, small.d_v) == (256, 192)
