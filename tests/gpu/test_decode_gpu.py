"""Decode steps on a GPU: as exact as plain torch in bf16, the same in a CUDA graph, without waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa import NSAAttention, NSAConfig
from nsa.backends import routing
from nsa.cuda_graph import capture_graph
from nsa.model import DenseAttention

SHAPES = {
    "64/4/128": {"n_heads": 64, "n_kv_groups": 4, "d_k": 128, "d_v": 128},
    "32/8/128": {"n_heads": 32, "n_kv_groups": 8, "d_k": 128, "d_v": 128},
    "12/2/64": {"n_heads": 12, "n_kv_groups": 2, "d_k": 64, "d_v": 64},
    "6/6/96 to 80": {"n_heads": 6, "n_kv_groups": 6, "d_k": 96, "d_v": 80},
}
LENGTHS = (3000, 0, 31, 1024, 1087, 2500)
MAX_LEN = 4096


def filled(shape: str, **changed: Any) -> tuple[list[NSAAttention], list[Any]]:
    """Layers with the same weights (kernels in bf16, plain torch in bf16 and fp64), and caches that hold the same."""
    hyperparameters = {"dim": 256, **SHAPES[shape], **changed}
    made = [("triton", torch.bfloat16), ("sdpa", torch.bfloat16), ("sdpa", torch.float64)]
    layers = [NSAAttention(NSAConfig(**hyperparameters, backend=backend)).cuda().to(dtype) for backend, dtype in made]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    caches = [layer.new_cache(len(LENGTHS), MAX_LEN, static=True) for layer in layers]
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(len(LENGTHS), max(LENGTHS), 256, generator=generator, device="cuda").bfloat16()
    mask = torch.arange(max(LENGTHS), device="cuda") < torch.tensor(LENGTHS, device="cuda")[:, None]
    with torch.no_grad():
        layers[1](x, attention_mask=mask, cache=caches[1])
    for cache in (caches[0], caches[2]):
        for mine, other in zip(cache.buffers(), caches[1].buffers(), strict=True):
            mine.copy_(other)
    return layers, caches


def tokens(n: int, count: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(count, len(LENGTHS), n, 256, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize("n_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_as_exact_as_plain_torch(shape: str, n_tokens: int) -> None:
    (fused, plain, exact), (mine, other, wide) = filled(shape, phi="mean" if n_tokens == 2 else "mlp")
    worst = allowed = 0.0
    routing.router().counts.clear()
    with torch.no_grad():
        for x in tokens(n_tokens, 24):
            expected = exact(x.double(), cache=wide)
            worst = max(worst, float((fused(x, cache=mine).double() - expected).norm() / expected.norm()))
            allowed = max(allowed, float((plain(x, cache=other).double() - expected).norm() / expected.norm()))
    assert routing.router().counts.calls["decode", "triton"] == 24
    assert worst <= 2 * allowed + torch.finfo(torch.bfloat16).eps
    assert torch.equal(mine.lengths, other.lengths)


@pytest.mark.parametrize("n_tokens", [1, 4])
def test_a_replayed_step_equals_an_eager_one_bit_for_bit(n_tokens: int) -> None:
    (fused, *_), (mine, *_) = filled("64/4/128")
    steps = tokens(n_tokens, 12)
    before = [x.clone() for x in mine.buffers()]
    with torch.no_grad():
        eager = [fused(x, cache=mine) for x in steps]
        after = [x.clone() for x in mine.buffers()]
        x, graph = steps[0].clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x, cache=mine)
        for now, then in zip(mine.buffers(), before, strict=True):
            now.copy_(then)
        for step, expected in zip(steps, eager, strict=True):
            x.copy_(step)
            graph.replay()
            assert torch.equal(y, expected)
    for now, then in zip(mine.buffers(), after, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("n_tokens", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_steps_in_a_graph_equal_the_whole_pass(shape: str, n_tokens: int) -> None:
    torch.manual_seed(0)
    layer, exact = (DenseAttention(NSAConfig(dim=256, **SHAPES[shape])).cuda() for _ in range(2))
    layer = layer.bfloat16()
    exact.double().load_state_dict(layer.state_dict())
    x = torch.randn(2, 1000 + 12 * n_tokens, 256, device="cuda").bfloat16()
    cache = layer.new_cache(2, MAX_LEN, static=True)
    with torch.no_grad():
        expected = exact(x.double())[:, 1000:]
        layer(x[:, :1000], cache=cache)
        before = [buffer.clone() for buffer in cache.buffers()]
        new = x[:, 1000 : 1000 + n_tokens].clone()
        routing.router().counts.clear()
        layer(new, cache=cache)
        assert routing.router().counts.calls["decode", "triton"] == 1
        replayed = []
        graph = capture_graph(lambda: replayed.append(layer(new, cache=cache)))
        for now, then in zip(cache.buffers(), before, strict=True):
            now.copy_(then)
        for step, y in zip(x[:, 1000:].split(n_tokens, dim=1), expected.split(n_tokens, dim=1), strict=True):
            new.copy_(step)
            graph.replay()
            assert float((replayed[0].double() - y).norm() / y.norm()) <= 4 * torch.finfo(torch.bfloat16).eps
    assert cache.lengths.tolist() == cache.high_water.tolist() == [x.shape[1]] * 2


def test_a_step_does_not_wait() -> None:
    (fused, *_), (mine, *_) = filled("12/2/64")
    x = tokens(1, 1)[0]
    routing.router().counts.clear()
    with torch.no_grad():
        fused(x, cache=mine)
        torch.cuda.set_sync_debug_mode("error")
        try:
            fused(x, cache=mine)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert routing.router().counts.calls["decode", "triton"] == 2


def test_a_row_does_not_depend_on_the_batch() -> None:
    (fused, *_), (mine, *_) = filled("32/8/128")
    x = tokens(2, 1)[0]
    alone = fused.new_cache(1, MAX_LEN, static=True)
    for b in range(len(LENGTHS)):
        if b == 1:
            continue
        for one, all_rows in zip(alone.buffers(), mine.buffers(), strict=True):
            one.copy_(all_rows[b : b + 1])
        kept = [store.clone() for store in mine.buffers()]
        o, indices = attention_of(fused, x, mine)
        o_alone, indices_alone = attention_of(fused, x[b : b + 1], alone)
        for store, then in zip(mine.buffers(), kept, strict=True):
            store.copy_(then)
        assert torch.equal(o[b], o_alone[0])
        assert torch.equal(indices[b], indices_alone[0])


def attention_of(layer: NSAAttention, x: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The decode kernels on projections that do not depend on the batch either: cuBLAS's may."""
    from nsa.backends.triton.decode import Hyperparameters, decode_attention

    c = layer.config
    how = Hyperparameters(c.l, c.d, c.l_sel, c.n_sel, c.n_init, c.n_local, c.w, c.d_k**-0.5, cache.max_len)
    q = x.repeat(1, 1, c.n_heads * c.d_k // x.shape[2]).unflatten(-1, (c.n_heads, c.d_k)).contiguous()
    gates = torch.full((*q.shape[:3], 3), 0.5, dtype=q.dtype, device=q.device)
    start = (cache.lengths - 2).clamp_min(0)
    return decode_attention(q, *cache.buffer_pairs()[1:], gates, start, how)
