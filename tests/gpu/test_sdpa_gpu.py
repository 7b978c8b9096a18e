"""The torch path on a GPU: the reference's numbers, the same bits twice, and no waiting for the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers import BRANCHES, Case, Inputs, assert_same_bits, assert_within_derived_tolerance, random_inputs
from torch import Tensor

from nsa import NSAAttention, NSAConfig, ops, reference

CONFIG = NSAConfig(dim=128, n_heads=12, n_kv_groups=2, d_k=64, d_v=64, backend="sdpa")
PAPER = {"block": 32, "stride": 16, "select_block": 64, "n_select": 16, "n_init": 1, "n_local": 2, "window": 512}
CASES = {
    "plain": Case(length=1500, groups=2, heads=6, d_k=64, d_v=64, **PAPER),
    "packed": Case(length=1500, groups=2, heads=6, d_k=64, d_v=64, documents=(1, 0, 700, 31, 768), **PAPER),
    "batch": Case(length=333, batch=3, groups=1, heads=3, d_k=48, d_v=32, **PAPER),
    "unaligned-width": Case(length=150, batch=2, groups=2, heads=1, d_k=20, d_v=12, **PAPER),
    "one-token": Case(length=1, batch=2, groups=2, heads=4, d_k=64, d_v=64, **PAPER),
    "few-blocks": Case(length=700, groups=2, heads=16, d_k=128, d_v=128, **{**PAPER, "n_select": 4, "window": 100}),
}


def outputs_and_gradients(module, branch: str, inputs: Inputs, case: Case, *, with_lse: bool, **options):
    """Like the CPU tests' `results`, on the GPU, and with or without a gradient of the normaliser."""
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
def test_a_branch_matches_the_fp64_reference_twice_with_the_same_bits(
    branch: str, case: Case, dtype: torch.dtype, with_lse: bool
) -> None:
    inputs = random_inputs(case, dtype).map(Tensor.cuda)
    wide = inputs.to(torch.float64)
    ours = outputs_and_gradients(ops, branch, inputs, case, with_lse=with_lse, backend="sdpa")
    again = outputs_and_gradients(ops, branch, inputs, case, with_lse=with_lse, backend="sdpa")
    exact = outputs_and_gradients(reference, branch, wide, case, with_lse=with_lse)
    plain = outputs_and_gradients(reference, branch, inputs, case, with_lse=with_lse)
    assert_within_derived_tolerance(ours, exact, plain)
    assert_same_bits(ours, again)


@pytest.mark.parametrize("case", [CASES["plain"], CASES["packed"]], ids=["plain", "packed"])
def test_the_choice_of_blocks_is_the_reference_s(case: Case) -> None:
    inputs = random_inputs(case, torch.float32).map(Tensor.cuda)
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.cuda()
    q, k_cmp, v_cmp = inputs.of("compressed")
    _, lse = reference.compressed_attention(q, k_cmp, v_cmp, **case.compression, cu_seqlens=cu_seqlens)
    ours = ops.select_blocks(q, k_cmp, lse, **case.selection, cu_seqlens=cu_seqlens, backend="sdpa")
    exact = reference.select_blocks(q.double(), k_cmp.double(), lse.double(), **case.selection, cu_seqlens=cu_seqlens)
    assert torch.equal(ours, exact)


def test_a_training_step_never_waits_for_the_device() -> None:
    attn = NSAAttention(CONFIG).cuda()
    x = torch.randn(2, 700, CONFIG.dim, device="cuda", requires_grad=True)
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


def test_decoding_never_waits_and_replays_as_a_cuda_graph() -> None:
    attn = NSAAttention(CONFIG).cuda().bfloat16().eval()
    x = torch.randn(3, 200, CONFIG.dim, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole = attn(x)
        cache = attn.new_cache(3, 256, static=True)
        attn(x[:, :150], cache=cache)
        token = x[:, :1].clone()
        # Warm up on a copy, on a side stream, as capture asks for.
        stream = torch.cuda.Stream()
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


def test_peak_memory_is_linear_in_the_length() -> None:
    def peak(length: int) -> int:
        attn = NSAAttention(CONFIG).cuda().bfloat16()
        x = torch.randn(1, length, CONFIG.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attn(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    # Long enough that every chunk is at its budget.
    assert peak(65_536) <= 2.2 * peak(32_768)


def test_compiled_with_inductor_equals_eager() -> None:
    attn = NSAAttention(CONFIG).cuda()
    x = torch.randn(2, 500, CONFIG.dim, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        eager = attn(x)
        compiled = torch.compile(attn, fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager, atol=2e-2, rtol=2e-2)
