"""Every backend on a GPU: the reference's numbers, bitwise determinism, and no waiting for the device."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from against_fp64 import assert_close_to_fp64, whole_results
from helpers import (
    BRANCHES,
    COMPRESSIONS,
    Case,
    Inputs,
    assert_norms_close,
    assert_same_bits,
    compression_inputs,
    compression_results,
    random_inputs,
)
from torch import Tensor

from nsa import NSAAttention, NSAConfig, ops, reference

BACKENDS = ("sdpa", "triton")
CONFIGS = {name: NSAConfig(dim=128, n_heads=12, n_kv_groups=2, d_k=64, d_v=64, backend=name) for name in BACKENDS}
# Each compiles kernels of its own.
RANDOM_SHAPES = 60
PAPER = {"block": 32, "stride": 16, "select_block": 64, "n_select": 16, "n_init": 1, "n_local": 2, "window": 512}
CASES = {
    "fixed": Case(length=1500, groups=2, heads=6, d_k=64, d_v=64, **PAPER),
    "varlen": Case(length=1500, groups=2, heads=6, d_k=64, d_v=64, documents=(1, 0, 700, 31, 768), **PAPER),
    "batch": Case(length=333, batch=3, groups=1, heads=3, d_k=48, d_v=32, **PAPER),
    "unaligned-head_dim": Case(length=150, batch=2, groups=2, heads=1, d_k=20, d_v=12, **PAPER),
    "one-token": Case(length=1, batch=2, groups=2, heads=4, d_k=64, d_v=64, **PAPER),
    "few-blocks": Case(length=700, groups=2, heads=16, d_k=128, d_v=128, **{**PAPER, "n_select": 4, "window": 100}),
}
# Longer than what `n_select` blocks hold, so that the methods of the selected forward differ in what they read. Every
# shape has one dtype: each more is a dozen kernels to compile.
METHODS = ("dense", "block", "query")
METHOD_CASES = {
    "64-h1": (Case(length=2111, groups=4, heads=1, d_k=64, d_v=64, **PAPER), torch.bfloat16),
    "64-h64": (Case(length=1283, groups=1, heads=64, d_k=64, d_v=64, **PAPER), torch.float16),
    "128-h3": (Case(length=1537, batch=2, groups=2, heads=3, d_k=128, d_v=128, **PAPER), torch.float16),
    "128-h16": (Case(length=2500, groups=2, heads=16, d_k=128, d_v=128, **PAPER), torch.bfloat16),
    "192-128-h16": (Case(length=2049, groups=1, heads=16, d_k=192, d_v=128, **PAPER), torch.bfloat16),
    "256-h64": (Case(length=1111, groups=1, heads=64, d_k=256, d_v=256, **PAPER), torch.bfloat16),
    "64-h3-fp32": (Case(length=1301, groups=2, heads=3, d_k=64, d_v=64, **PAPER), torch.float32),
}


def outputs_and_gradients(module, branch: str, inputs: Inputs, case: Case, *, with_lse: bool, **options):
    """Like the CPU tests' `results`, on the GPU, and with or without a gradient of the LSE."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs.of(branch))
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.cuda()
    if branch == "compressed":
        o, lse = module.compressed_attention(*leaves, **case.compression, cu_seqlens=cu_seqlens, **options)
    elif branch == "selected":
        o, lse = module.selected_attention(
            *leaves, inputs.indices, select_block=case.select_block, cu_seqlens=cu_seqlens, **options
        )
    else:
        o, lse = module.sliding_attention(*leaves, window=case.window, cu_seqlens=cu_seqlens, **options)
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator).bfloat16().to(o)
    dlse = torch.randn(lse.shape, generator=generator).bfloat16().to(lse)
    heads = [(o, do), (lse, dlse)] if with_lse else [(o, do)]
    heads = [(x, grad) for x, grad in heads if x.requires_grad]
    dq, dk, dv = torch.autograd.grad([x for x, _ in heads], leaves, [grad for _, grad in heads])
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("with_lse", [False, True], ids=["o", "o-and-lse"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_branch_matches_fp64_and_is_bitwise_deterministic(
    backend: str, branch: str, case: Case, dtype: torch.dtype, with_lse: bool
) -> None:
    if backend == "triton" and case.d_k % 16:
        pytest.skip("the kernels decline head_dims that are not multiples of 16")
    inputs = random_inputs(case, dtype).map(Tensor.cuda)
    wide = inputs.to(torch.float64)
    ours = outputs_and_gradients(ops, branch, inputs, case, with_lse=with_lse, backend=backend)
    again = outputs_and_gradients(ops, branch, inputs, case, with_lse=with_lse, backend=backend)
    exact = outputs_and_gradients(reference, branch, wide, case, with_lse=with_lse)
    plain = outputs_and_gradients(reference, branch, inputs, case, with_lse=with_lse)
    assert_close_to_fp64(ours, exact, plain, case)
    assert_same_bits(ours, again)


@pytest.mark.parametrize("name", METHOD_CASES)
@pytest.mark.parametrize("method", METHODS)
def test_each_selected_branch_method_matches_the_fp64_reference(
    method: str, name: str, selected_by: Callable[[str | None], list[str]]
) -> None:
    case, dtype = METHOD_CASES[name]
    inputs = random_inputs(case, dtype).map(Tensor.cuda)
    inputs = inputs.but(indices=selected_like_in_use(inputs, case))
    taken = selected_by(method)
    ours = outputs_and_gradients(ops, "selected", inputs, case, with_lse=True, backend="triton")
    again = outputs_and_gradients(ops, "selected", inputs, case, with_lse=True, backend="triton")
    assert taken == [method] * 2
    exact = outputs_and_gradients(reference, "selected", inputs.to(torch.float64), case, with_lse=True)
    plain = outputs_and_gradients(reference, "selected", inputs, case, with_lse=True)
    assert_close_to_fp64(ours, exact, plain, case)
    assert_same_bits(ours, again)


def selected_like_in_use(inputs: Inputs, case: Case) -> Tensor:
    """The last half of the queries select as in use: neighbors have their first and their own blocks in common. The
    others' selection stays random: few blocks or none, some of them not yet seen."""
    q, k_cmp, v_cmp = (x.float() for x in inputs.of("compressed"))
    _, lse = reference.compressed_attention(q, k_cmp, v_cmp, **case.compression)
    selected = reference.select_blocks(q, k_cmp, lse, **case.selection)
    half = case.length // 2
    return torch.cat([inputs.indices[:, :half], selected[:, half:]], dim=1)


def compression_on_gpu(module, op: str, tensors: tuple[Tensor, ...], case: Case, **options) -> dict[str, Tensor]:
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.cuda()
    return compression_results(module, op, tensors, case, cu_seqlens=cu_seqlens, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("op", COMPRESSIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compression_matches_fp64_and_is_bitwise_deterministic(
    backend: str, op: str, case: Case, dtype: torch.dtype
) -> None:
    if backend == "triton" and case.d_k % 16:
        pytest.skip("the kernels decline head_dims that are not multiples of 16")
    tensors = tuple(x.cuda() for x in compression_inputs(op, case, dtype))
    ours = compression_on_gpu(ops, op, tensors, case, backend=backend)
    again = compression_on_gpu(ops, op, tensors, case, backend=backend)
    exact = compression_on_gpu(reference, op, tuple(x.double() for x in tensors), case)
    plain = compression_on_gpu(reference, op, tensors, case)
    assert_close_to_fp64(ours, exact, plain, case)
    assert_same_bits(ours, again)


@pytest.mark.parametrize("case", [CASES["fixed"], CASES["varlen"]], ids=["fixed", "varlen"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_choice_of_blocks_is_the_reference_s(backend: str, case: Case) -> None:
    inputs = random_inputs(case, torch.float32).map(Tensor.cuda)
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.cuda()
    q, k_cmp, v_cmp = inputs.of("compressed")
    _, lse = reference.compressed_attention(q, k_cmp, v_cmp, **case.compression, cu_seqlens=cu_seqlens)
    ours = ops.select_blocks(q, k_cmp, lse, **case.selection, cu_seqlens=cu_seqlens, backend=backend)
    exact = reference.select_blocks(q.double(), k_cmp.double(), lse.double(), **case.selection, cu_seqlens=cu_seqlens)
    assert torch.equal(ours, exact)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_combine_matches_the_fp64_reference(backend: str, dtype: torch.dtype) -> None:
    case = CASES["batch"]
    leaves = [torch.randn(3, 333, 3, 32, device="cuda").to(dtype) for _ in range(3)]
    leaves.append(torch.rand(3, 333, 3, 3, device="cuda").to(dtype))
    do = torch.randn(3, 333, 3, 32, device="cuda").to(dtype)

    def run(module, tensors: list[Tensor], **options) -> dict[str, Tensor]:
        tensors = [x.detach().requires_grad_() for x in tensors]
        o = module.combine(*tensors, **options)
        grads = torch.autograd.grad(o, tensors, do.to(o.dtype))
        return {"o": o.detach(), "d_cmp": grads[0], "d_sel": grads[1], "d_win": grads[2], "d_gates": grads[3]}

    exact, plain = run(reference, [x.double() for x in leaves]), run(reference, leaves)
    assert_close_to_fp64(run(ops, leaves, backend=backend), exact, plain, case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["fixed", "varlen", "one-token", "few-blocks"])
def test_attention_matches_fp64_and_is_bitwise_deterministic(kind: str, dtype: torch.dtype, backend: str) -> None:
    case = CASES[kind]
    gates = torch.rand(case.batch, case.length, case.n_heads, 3, device="cuda")
    gates[:, ::5] = 0.0
    got, again, exact, plain = whole_results(case, dtype, backend, gates)
    assert_close_to_fp64(got, exact, plain, case)
    assert_same_bits(got, again)


@pytest.mark.parametrize("gate", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_gradients_stay_accurate_with_a_nearly_closed_gate(backend: str, gate: float) -> None:
    """With a loss scale, as fp16 is trained with: the gradients are well within fp16's range, `gate * p` is not."""
    case = CASES["fixed"]
    gates = torch.full((case.batch, case.length, case.n_heads, 3), gate, device="cuda")
    got, _, exact, plain = whole_results(case, torch.float16, backend, gates, size=1024.0)
    assert_norms_close(got, exact, plain)


def random_case(seed: int) -> tuple[Case, torch.dtype]:
    """A shape that the kernels claim to take, of any kind."""
    pick = random.Random(seed).choice
    length = pick([1, 2, 15, 31, 32, 33, 63, 64, 65, 127, 200, 257, 400, 511, 513, 640])
    documents = None
    if pick([True, False, False]):
        cuts = sorted(random.Random(seed + 1).choices(range(length + 1), k=pick([1, 2, 5])))
        documents = tuple(b - a for a, b in pairwise([0, *cuts, length]))
    stride = pick([8, 16])
    n_init, n_local = pick([0, 1, 2]), pick([0, 1, 2])
    head_dim = pick([64, 80, 96, 128, 192, 256])
    case = Case(
        length=length,
        documents=documents,
        batch=1 if documents else pick([1, 2]),
        groups=pick([1, 2, 3]),
        heads=pick([1, 2, 3, 4, 6, 8, 12, 16, 32, 64]),
        d_k=head_dim,
        d_v=128 if head_dim == 192 else head_dim,
        stride=stride,
        block=stride * pick([1, 2, 4]),
        select_block=pick([32, 64, 128]),
        n_init=n_init,
        n_local=n_local,
        n_select=max(1, n_init + n_local + pick([0, 1, 5, 13])),
        window=pick([1, 16, 100, 512]),
        seed=seed,
    )
    return case, pick([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])


@pytest.mark.parametrize("seed", range(RANDOM_SHAPES))
def test_a_random_shape_matches_the_fp64_reference(seed: int, selected_by: Callable[[str | None], list[str]]) -> None:
    case, dtype = random_case(seed)
    # Left to itself, so short a sequence would go by `dense`, which takes no varlen batch.
    selected_by(random.Random(f"method {seed}").choice(METHODS if case.documents is None else METHODS[1:]))
    inputs = random_inputs(case, dtype).map(Tensor.cuda)
    wide = inputs.to(torch.float64)
    for branch in BRANCHES:
        ours = outputs_and_gradients(ops, branch, inputs, case, with_lse=True, backend="triton")
        exact = outputs_and_gradients(reference, branch, wide, case, with_lse=True)
        plain = outputs_and_gradients(reference, branch, inputs, case, with_lse=True)
        assert_close_to_fp64(ours, exact, plain, case)
    for op in COMPRESSIONS:
        tensors = tuple(x.cuda() for x in compression_inputs(op, case, dtype))
        ours = compression_on_gpu(ops, op, tensors, case, backend="triton")
        exact = compression_on_gpu(reference, op, tuple(x.double() for x in tensors), case)
        assert_close_to_fp64(ours, exact, compression_on_gpu(reference, op, tensors, case), case)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_training_step_never_waits_for_the_device(config: NSAConfig) -> None:
    attn = NSAAttention(config).cuda()
    x = torch.randn(2, 700, config.dim, device="cuda", requires_grad=True)
    cu_seqlens = torch.tensor([0, 1, 300, 700], dtype=torch.int32, device="cuda")
    mask = torch.ones(2, 700, dtype=torch.bool, device="cuda")
    mask[0, :100] = False

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = attn(x).sum() + attn(x[:1], cu_seqlens=cu_seqlens).sum() + attn(x, attention_mask=mask).sum()
        loss.backward()

    step()
    with waiting_is_an_error():
        step()


@pytest.mark.parametrize("backend", BACKENDS)
def test_decoding_never_waits_and_replays_as_a_cuda_graph(backend: str) -> None:
    attn = NSAAttention(CONFIGS[backend]).cuda().bfloat16().eval()
    x = torch.randn(3, 200, attn.config.dim, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole = attn(x)
        cache = attn.new_cache(3, 256, static=True)
        attn(x[:, :150], cache=cache)
        token = x[:, :1].clone()
        # Warm up on a copy, on a side stream, as capture asks for.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            attn(token, cache=copy.deepcopy(cache))
        torch.cuda.current_stream().wait_stream(stream)

        graph = torch.cuda.CUDAGraph()
        lengths = cache.lengths.clone()
        with torch.cuda.graph(graph):
            y = attn(token, cache=cache)
        cache.lengths.copy_(lengths)
        cache.high_water.copy_(lengths)
        for t in range(150, 200):
            token.copy_(x[:, t : t + 1])
            graph.replay()
            torch.testing.assert_close(y, whole[:, t : t + 1], atol=2e-2, rtol=2e-2)
        assert cache.lengths.tolist() == [200, 200, 200]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_peak_memory_is_linear_in_the_length(config: NSAConfig) -> None:
    def peak(length: int) -> int:
        attn = NSAAttention(config).cuda().bfloat16()
        x = torch.randn(1, length, config.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attn(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    # Long enough that every chunk is at its budget.
    assert peak(65_536) <= 2.2 * peak(32_768)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_inductor_equals_eager_in_forward_and_backward(config: NSAConfig) -> None:
    attn = NSAAttention(config).cuda()
    x = torch.randn(2, 500, config.dim, device="cuda", requires_grad=True)
    dy = torch.randn(2, 500, config.dim, device="cuda")
    leaves = {"x": x, **dict(attn.named_parameters())}

    def run(module: Callable[[Tensor], Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.autocast("cuda", torch.bfloat16):
            y = module(x)
        return y.detach(), torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))

    torch._dynamo.reset()
    eager, eager_gradients = run(attn)
    compiled, gradients = run(torch.compile(attn, fullgraph=True))
    torch.testing.assert_close(compiled, eager, atol=2e-2, rtol=2e-2)
    # Sums over a thousand tokens: elements that cancelled have no digits to compare.
    for name, got, expected in zip(leaves, gradients, eager_gradients, strict=True):
        off = float((got - expected).norm() / expected.norm())
        assert off <= 2e-2, f"the gradient of {name} is off by {off:.1e} of its norm"
