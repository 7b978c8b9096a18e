"""The ops as torch sees them: schemas, fakes, autograd, compilation, autocast."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    BRANCHES,
    COMPRESSIONS,
    Case,
    Inputs,
    assert_close,
    assert_same_bits,
    attend,
    compression_inputs,
    compression_results,
    random_inputs,
    results,
)
from op_arguments import (
    CASES,
    FIXED,
    NAMES,
    VARLEN,
    WHOLE,
    attention_arguments,
    attention_backward_arguments,
    branch_arguments,
    branch_backward_arguments,
    combine_arguments,
    compression_arguments,
    compression_backward_arguments,
    head_major,
    op_of,
    selection_arguments,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa import NSAAttention, NSAConfig, ops, reference
from nsa.backends import routing

# What torch itself checks of an op.


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_op_passes_opcheck(branch: str, kind: str) -> None:
    op = op_of(NAMES[branch])
    torch.library.opcheck(op, branch_arguments(branch, CASES[kind], "sdpa"))


# Backward ops are checked with sdpa: the reference differentiates itself by `torch.func` inside the op, where opcheck's
# dispatch modes cannot follow. What its backward returns is compared with the fakes further down.
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_backward_op_passes_opcheck(branch: str, kind: str) -> None:
    op = op_of(f"{NAMES[branch]}_backward")
    for with_lse in (True, False) if kind == next(iter(CASES)) else (True,):
        torch.library.opcheck(op, branch_backward_arguments(branch, CASES[kind], "sdpa", with_lse=with_lse))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("kind", CASES)
def test_the_choice_op_passes_opcheck(kind: str, backend: str) -> None:
    torch.library.opcheck(op_of("select_blocks"), selection_arguments(CASES[kind], backend))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("op", COMPRESSIONS)
def test_a_compression_op_passes_opcheck(op: str, kind: str, backend: str) -> None:
    torch.library.opcheck(op_of(op), compression_arguments(op, WHOLE[kind], backend))


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("op", COMPRESSIONS)
def test_a_compression_backward_op_passes_opcheck(op: str, kind: str) -> None:
    arguments = compression_backward_arguments(op, WHOLE[kind], "sdpa")
    torch.library.opcheck(op_of(f"{op}_backward"), arguments)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_the_combine_op_passes_opcheck(backend: str) -> None:
    leaves = [x.requires_grad_() for x in combine_arguments()]
    torch.library.opcheck(op_of("combine"), (*leaves, backend, False))


def test_the_combine_backward_op_passes_opcheck() -> None:
    arguments = (torch.randn(2, 5, 6, 4), *combine_arguments(), "sdpa", False)
    torch.library.opcheck(op_of("combine_backward"), arguments)


@pytest.mark.parametrize("kind", CASES)
def test_the_attention_ops_pass_opcheck(kind: str) -> None:
    torch.library.opcheck(op_of("attention"), attention_arguments(CASES[kind], "sdpa"))
    torch.library.opcheck(op_of("attention_backward"), attention_backward_arguments(CASES[kind], "sdpa"))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("kind", CASES)
def test_the_attention_is_that_of_its_stages(kind: str, backend: str) -> None:
    case = CASES[kind]
    arguments = attention_arguments(case, backend, torch.float64)
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = leaves = arguments[:8]
    cu_seqlens, q_start = arguments[8:10]
    where = {"cu_seqlens": cu_seqlens, "q_start": q_start, "backend": backend}
    o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, **case.compression, **where)
    indices = ops.select_blocks(q, k_cmp, lse, **case.selection, **where)
    o_sel, _ = ops.selected_attention(q, k_sel, v_sel, indices, select_block=case.select_block, **where)
    o_win, _ = ops.sliding_attention(q, k_win, v_win, window=case.window, **where)
    parts = ops.combine(o_cmp, o_sel, o_win, gates, backend=backend)
    hyperparameters = {**case.selection, "window": case.window, "window_start": q_start}
    whole, selected = ops.attention(*leaves, **hyperparameters, **where)
    assert torch.equal(whole, parts)
    assert torch.equal(selected, indices)
    do = torch.randn_like(whole)
    for got, want in zip(*(torch.autograd.grad(o, leaves, do) for o in (whole, parts)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class Counting(TorchDispatchMode):
    """Counts the calls of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "nsa":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def test_a_layer_call_crosses_one_op_each_way() -> None:
    attn = NSAAttention(NSAConfig(dim=16, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, phi="mean"))
    with Counting() as counting:
        attn(torch.randn(1, 70, 16)).sum().backward()
    compression = {"compress_mean": 2, "compress_mean_backward": 2}
    assert counting.calls == {"attention": 1, "attention_backward": 1, **compression}


# What a compiler believes about an op must be what it does.


def described(outputs: Tensor | tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # Where there is one there is no step to the next: nobody asks for that stride.
    steps = [tuple(step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1) for x in outputs]
    return [(tuple(x.shape), step, x.dtype, x.device) for x, step in zip(outputs, steps, strict=True)]


def imagined(op: Callable[..., Any], arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    with FakeTensorMode() as mode:
        return described(op(*[mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_op_returns_the_strides_its_fake_promises(branch: str, backend: str) -> None:
    for case in CASES.values():
        forward = tuple(map(head_major, branch_arguments(branch, case, backend)))
        op = op_of(NAMES[branch])
        assert described(op(*forward)) == imagined(op, forward)
        backward = tuple(map(head_major, branch_backward_arguments(branch, case, backend)))
        op = op_of(f"{NAMES[branch]}_backward")
        assert described(op(*backward)) == imagined(op, backward)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("op", COMPRESSIONS)
def test_a_compression_op_returns_the_strides_its_fake_promises(op: str, kind: str, backend: str) -> None:
    forward = tuple(map(head_major, compression_arguments(op, WHOLE[kind], backend)))
    assert described(op_of(op)(*forward)) == imagined(op_of(op), forward)
    backward = tuple(map(head_major, compression_backward_arguments(op, WHOLE[kind], backend)))
    backward_op = op_of(f"{op}_backward")
    assert described(backward_op(*backward)) == imagined(backward_op, backward)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_the_combine_ops_return_the_strides_their_fakes_promise(backend: str) -> None:
    tensors = tuple(map(head_major, combine_arguments()))
    forward = (*tensors, backend, False)
    assert described(op_of("combine")(*forward)) == imagined(op_of("combine"), forward)
    backward = (torch.randn(2, 5, 6, 4), *forward)
    assert described(op_of("combine_backward")(*backward)) == imagined(op_of("combine_backward"), backward)


# Compilation.


def all_ops(
    case: Case, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, position: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    varlen = {"cu_seqlens": cu_seqlens}
    k_cmp = ops.compress_mean(k, **case.compression, **varlen)
    v_cmp = ops.gather_blocks(v, position, **case.compression, **varlen).unflatten(3, (case.block, -1)).sum(dim=3)
    o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, **case.compression, **varlen)
    indices = ops.select_blocks(q, k_cmp, lse, **case.selection, **varlen)
    o_sel, _ = ops.selected_attention(q, k, v, indices, select_block=case.select_block, **varlen)
    o_win, _ = ops.sliding_attention(q, k, v, window=case.window, **varlen)
    return ops.combine(o_cmp, o_sel, o_win, gates)


def with_gradients(function: Callable[..., Tensor], inputs: Inputs, case: Case) -> dict[str, Tensor]:
    q, k, v = inputs.of("sliding")
    position = torch.linspace(-1, 1, case.block * case.d_v).view(case.block, case.d_v)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, inputs.gates, position)]
    o = function(case, *leaves, case.cu_seqlens)
    grads = torch.autograd.grad(o.square().sum(), leaves)
    return {"o": o.detach(), **dict(zip(("dq", "dk", "dv", "dgates", "dposition"), grads, strict=True))}


@pytest.mark.parametrize("kind", ["fixed", "varlen"])
def test_tensors_without_data_give_shapes_and_gradients(kind: str) -> None:
    case = CASES[kind]
    arguments = random_inputs(case, torch.float32).map(lambda x: x.to("meta"))
    q, k, v = (x.requires_grad_() for x in arguments.of("sliding"))
    gates, position = arguments.gates.requires_grad_(), torch.empty(case.block, case.d_v, device="meta")
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.to("meta")
    o = all_ops(case, q, k, v, gates, position, cu_seqlens)
    assert (o.shape, o.device.type) == (arguments.of("compressed")[0].shape[:3] + v.shape[3:], "meta")
    assert [x.shape for x in torch.autograd.grad(o.sum(), (q, k, v, gates))] == [q.shape, k.shape, v.shape, gates.shape]
    with torch.no_grad():
        assert all_ops(case, q, k, v, gates, position, cu_seqlens).shape == o.shape


@pytest.mark.parametrize("kind", ["fixed", "varlen"])
def test_all_ops_compile_into_one_graph_that_matches_eager(kind: str) -> None:
    case = CASES[kind]
    inputs = random_inputs(case, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(all_ops, fullgraph=True, backend="aot_eager")
    assert_close(with_gradients(compiled, inputs, case), with_gradients(all_ops, inputs, case), 1e-6)


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("op", COMPRESSIONS)
def test_compression_compiles_into_one_graph_that_matches_eager(op: str, kind: str) -> None:
    case = WHOLE[kind]
    tensors = compression_inputs(op, case, torch.float32)
    torch._dynamo.reset()
    compiled = SimpleNamespace(**{op: torch.compile(getattr(ops, op), fullgraph=True, backend="aot_eager")})
    assert_same_bits(compression_results(compiled, op, tensors, case), compression_results(ops, op, tensors, case))


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
@pytest.mark.parametrize("op", COMPRESSIONS)
def test_compression_and_gradient_compile_once_for_all_lengths(op: str, varlen: bool) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")

    def run(*tensors: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return getattr(ops, op)(*tensors, **FIXED.compression, cu_seqlens=cu_seqlens)

    compiled = torch.compile(run, fullgraph=True, backend=graphs, dynamic=True)
    for length in (24, 33, 47):
        case = FIXED.but(length=length, batch=1, documents=(length - 11, 11) if varlen else None)
        tensors = [x.requires_grad_() for x in compression_inputs(op, case, torch.float32)]
        expected, got = (f(*tensors, cu_seqlens=case.cu_seqlens) for f in (run, compiled))
        assert torch.equal(got, expected)
        grads = (torch.autograd.grad(x.square().sum(), tensors) for x in (got, expected))
        assert all(map(torch.equal, *grads))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("branch", BRANCHES)
def test_compiled_op_is_not_recompiled_for_new_lengths(branch: str) -> None:
    torch._dynamo.reset()
    graphs = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=keep, dynamic=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        if branch == "compressed":
            return ops.compressed_attention(q, k, v, block=8, stride=4)[0]
        if branch == "selected":
            return ops.selected_attention(q, k, v, indices, select_block=8)[0]
        return ops.sliding_attention(q, k, v, window=16)[0]

    # No length or number of blocks equals another size: torch would take equal sizes for one and the same.
    for length in (24, 33, 47):
        case = FIXED.but(length=length)
        inputs = random_inputs(case, torch.float32)
        got = compiled(*inputs.of(branch), inputs.indices)
        torch.testing.assert_close(got, attend(ops, branch, inputs, case)[0])
    assert len(graphs) == 1


def test_a_wrong_shape_is_refused_under_compilation_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: ops.sliding_attention(q, k, v, window=7), backend="aot_eager")
    q, k, v = random_inputs(FIXED, torch.float32).of("sliding")
    with pytest.raises(ValueError, match=r"^k\.shape\[1\]"):
        compiled(q, k[:, :-1], v[:, :-1])


# Gradients.


def assert_refused(gradient: Tensor, leaf: Tensor, op: str) -> None:
    """Also where the leaf has a second path to the result: without an error, only that one would count."""
    result = (gradient * leaf.square()).sum()
    with pytest.raises(RuntimeError, match=f"{op} .* once"):
        torch.autograd.grad(result, leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match=f"{op} .* once"):
        result.backward(retain_graph=True)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_gradient_of_a_gradient_is_refused_by_name(branch: str) -> None:
    case = FIXED
    inputs = random_inputs(case)
    leaves = tuple(x.requires_grad_() for x in inputs.of(branch))
    o, _ = attend(ops, branch, inputs, case, leaves)
    # Linear in o too: the gradient that comes in does not require grad then.
    for loss in (o.square().sum(), o.sum()):
        (dq,) = torch.autograd.grad(loss, leaves[:1], create_graph=True)
        assert_refused(dq, leaves[0], f"{branch}_attention")


@pytest.mark.parametrize("op", COMPRESSIONS)
def test_second_derivative_of_a_compression_is_rejected_by_name(op: str) -> None:
    leaves = [x.requires_grad_() for x in compression_inputs(op, FIXED)]
    out = getattr(ops, op)(*leaves, **FIXED.compression)
    (dx,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    assert_refused(dx, leaves[0], op)


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("op", COMPRESSIONS)
def test_activation_checkpointing_changes_no_compression_bit(op: str, kind: str) -> None:
    case = WHOLE[kind]
    tensors = compression_inputs(op, case, torch.float32)

    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(getattr(ops, op), *args, use_reentrant=False, **kwargs)

    got = compression_results(SimpleNamespace(**{op: again}), op, tensors, case)
    assert_same_bits(got, compression_results(ops, op, tensors, case))


def test_compression_saves_only_cu_seqlens_for_backward() -> None:
    kept = []
    leaves = [x.requires_grad_() for x in compression_inputs("gather_blocks", VARLEN)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ops.gather_blocks(*leaves, **VARLEN.compression, cu_seqlens=VARLEN.cu_seqlens)
    assert [tuple(x.shape) for x in kept] == [tuple(VARLEN.cu_seqlens.shape)]


@pytest.mark.parametrize("op", COMPRESSIONS)
def test_compression_accepts_a_non_contiguous_output_gradient(op: str) -> None:
    leaves = [x.requires_grad_() for x in compression_inputs(op, FIXED)]
    out = getattr(ops, op)(*leaves, **FIXED.compression)
    ones = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    # The gradient of a sum is one number seen through strides of zero.
    for got, wanted in zip(torch.autograd.grad(out.sum(), leaves), ones, strict=True):
        assert torch.equal(got, wanted)


def test_a_gradient_of_combines_gradient_is_refused_by_name() -> None:
    leaves = [x.requires_grad_() for x in combine_arguments()]
    (d_cmp,) = torch.autograd.grad(ops.combine(*leaves).square().sum(), leaves[:1], create_graph=True)
    assert_refused(d_cmp, leaves[0], "combine")


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_loss_may_use_the_output_or_the_lse_alone(branch: str) -> None:
    inputs = random_inputs(FIXED)
    for place in (0, 1):
        grads = []
        for module in (ops, reference):
            leaves = tuple(x.clone().requires_grad_() for x in inputs.of(branch))
            out = attend(module, branch, inputs, FIXED, leaves)[place]
            loss = out.masked_fill(out.isinf(), 0.0).square().sum()
            grads.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
        for got, expected in zip(*grads, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_gradient_that_is_not_contiguous_is_taken_as_it_is(branch: str) -> None:
    inputs = random_inputs(FIXED)
    leaves = tuple(x.requires_grad_() for x in inputs.of(branch))
    o, _ = attend(ops, branch, inputs, FIXED, leaves)
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, leaves, do, retain_graph=True)
    # The gradient of a sum is one number seen through strides of zero.
    strided = do.transpose(1, 3).contiguous().transpose(1, 3)
    for got, wanted in zip(torch.autograd.grad(o, leaves, strided, retain_graph=True), expected, strict=True):
        assert torch.equal(got, wanted)
    ones = torch.autograd.grad(o, leaves, torch.ones_like(o), retain_graph=True)
    for got, wanted in zip(torch.autograd.grad(o.sum(), leaves), ones, strict=True):
        assert torch.equal(got, wanted)


def test_inputs_are_left_as_they_were() -> None:
    inputs = random_inputs(FIXED, torch.float32)
    kept = copy.deepcopy(inputs)
    for branch in BRANCHES:
        results(ops, branch, inputs, FIXED)
    for x, y in zip((*inputs.for_attention, inputs.indices), (*kept.for_attention, kept.indices), strict=True):
        assert torch.equal(x, y)


def sliding_of(q: Tensor) -> Tensor:
    return ops.sliding_attention(q, *random_inputs(FIXED).of("sliding")[1:], window=7)[0]


def through_func(q: Tensor) -> None:
    torch.func.jvp(sliding_of, (q,), (torch.ones_like(q),))


def through_dual_numbers(q: Tensor) -> None:
    with forward_ad.dual_level():
        sliding_of(forward_ad.make_dual(q, torch.ones_like(q)))


@pytest.mark.parametrize("derive", [through_func, through_dual_numbers])
def test_a_forward_mode_derivative_raises(derive: Callable[[Tensor], None]) -> None:
    q = random_inputs(FIXED).q
    with pytest.raises(RuntimeError, match=r"forward|functorch"):
        derive(q)


# Autocast.


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_autocast_changes_neither_dtype_nor_value_of_a_branch(branch: str, backend: str) -> None:
    inputs = random_inputs(FIXED, torch.float32)
    expected = results(ops, branch, inputs, FIXED, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(ops, branch, inputs, FIXED, backend=backend)
    for name in expected:
        assert got[name].dtype == expected[name].dtype, name
    assert_close(got, expected, 1e-6)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_autocast_changes_no_choice_of_blocks(backend: str) -> None:
    arguments = selection_arguments(Case(length=150, groups=2, heads=2, select_block=4), backend)
    expected = op_of("select_blocks")(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(op_of("select_blocks")(*arguments), expected)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("op", COMPRESSIONS)
def test_autocast_changes_neither_dtype_nor_value_of_compression(op: str, backend: str) -> None:
    tensors = compression_inputs(op, FIXED, torch.float32)
    expected = compression_results(ops, op, tensors, FIXED, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = compression_results(ops, op, tensors, FIXED, backend=backend)
    assert {x.dtype for x in got.values()} == {torch.float32}
    assert_same_bits(got, expected)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_autocast_changes_neither_dtype_nor_value_of_combine(backend: str) -> None:
    tensors = combine_arguments()
    expected = ops.combine(*tensors, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ops.combine(*tensors, backend=backend)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


# Which backend runs.


def test_auto_on_a_cpu_runs_sdpa(environment: Callable[..., None]) -> None:
    environment()
    inputs = random_inputs(FIXED, torch.float32)
    for branch in BRANCHES:
        attend(ops, branch, inputs, FIXED)
    for op in COMPRESSIONS:
        compression_results(ops, op, compression_inputs(op, FIXED, torch.float32), FIXED)
    calls = routing.router().counts.calls
    assert {name for _, name in calls} == {"sdpa"}
    assert {op for op, _ in calls} == {*BRANCHES, "compress"}
    # Both of them, forward and backward.
    assert calls["compress", "sdpa"] == 4


def test_parity_mode_runs_the_reference_for_a_named_backend(environment: Callable[..., None]) -> None:
    environment(NSA_FORCE_PARITY="1")
    inputs = random_inputs(FIXED, torch.float32)
    for branch in BRANCHES:
        attend(ops, branch, inputs, FIXED, backend="sdpa")
    for op in COMPRESSIONS:
        compression_results(ops, op, compression_inputs(op, FIXED, torch.float32), FIXED, backend="sdpa")
    assert {name for _, name in routing.router().counts.calls} == {"reference"}


def test_mixture_works_for_one_more_version() -> None:
    tensors, options = attention_arguments(FIXED, "sdpa")[:8], {"window": FIXED.window, "backend": "sdpa"}
    o, indices = ops.attention(*tensors, **FIXED.selection, **options)
    options |= {**FIXED.compression, "select_block": FIXED.select_block}
    with pytest.warns(DeprecationWarning, match=r"ops\.mixture .*attention") as warned:
        old = ops.mixture(*tensors, **options, branches=None, indices=indices)
    assert warned[0].filename == __file__
    both = [[x, *torch.autograd.grad(x.sum(), tensors)] for x in (old, o)]
    for found, expected in zip(*both, strict=True):
        torch.testing.assert_close(found, expected)
