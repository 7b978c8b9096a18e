"""NSAAttention under `torch.compile`: in one graph, the same as eager, and compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import assert_close, offsets
from layers import layer, tokens, with_gradients
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func

from nsa import NSAAttention, NSAConfig


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(attn: NSAAttention, backend: str = "aot_eager") -> Callable[..., Tensor]:
    return torch.compile(attn, fullgraph=True, backend=backend)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("branch_norm", [False, True], ids=["fused", "branch norms"])
@pytest.mark.parametrize("batch", ["fixed", "varlen", "padded"])
def test_compiled_layer_equals_eager(batch: str, branch_norm: bool) -> None:
    """In one graph; outputs and all gradients."""
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, :9] = False
    kwargs = {"fixed": {}, "varlen": {"cu_seqlens": offsets((20, 1, 16))}, "padded": {"attention_mask": mask}}[batch]
    attn = layer(branch_norm=branch_norm)
    x = tokens(37, batch=1 if batch == "varlen" else 2)
    run = compiled(attn)
    got = with_gradients(attn, lambda x: run(x, **kwargs), x)
    assert_close(got, with_gradients(attn, lambda x: attn(x, **kwargs), x), 1e-11)


def doubled(inner: nn.Linear) -> nn.Module:
    inner.register_forward_hook(lambda _, __, output: 2 * output)
    return inner


def doubled_back(inner: nn.Linear) -> nn.Module:
    inner.register_full_backward_hook(lambda _, gradients, __: tuple(2 * x for x in gradients))
    return inner


def unbiased(inner: nn.Linear) -> nn.Module:
    inner.bias = None
    return inner


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("change", "gathers"),
    [(nn.Identity(), False), (doubled, True), (doubled_back, True), (unbiased, True), (nn.Sequential, True)],
    ids=["plain", "hook", "backward hook", "no bias", "wrapped"],
)
def test_compiled_compression_is_that_of_the_modules(change: Callable[[nn.Linear], nn.Module], gathers: bool) -> None:
    """Without gathering where the modules are plain; keys and values are of one size here."""
    attn, ops = layer(d_v=8), set()
    attn.phi_k.inner = change(attn.phi_k.inner)  # type: ignore[assignment]
    x = tokens(37, batch=2)

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        ops.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    # Torch compiles around a module with backward hooks.
    run = torch.compile(attn, backend=aot_autograd(fw_compiler=keep))
    assert_close(with_gradients(attn, run, x), with_gradients(attn, attn, x), 1e-11)
    assert ("nsa.gather_blocks.default" in ops) == gathers


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@torch.no_grad()
def test_compiled_static_steps_equal_eager_and_compile_once() -> None:
    attn = layer()
    x = tokens(24, batch=2)
    eager, fast = (attn.new_cache(2, 24, static=True) for _ in range(2))
    step = compiled(attn)
    for cache in (eager, fast):
        attn(x[:, :5], cache=cache)
    torch.testing.assert_close(step(x[:, 5:6], cache=fast), attn(x[:, 5:6], cache=eager), atol=1e-12, rtol=1e-12)
    with torch.compiler.set_stance("fail_on_recompile"):
        for t in range(6, 24):
            expected = attn(x[:, t : t + 1], cache=eager)
            torch.testing.assert_close(step(x[:, t : t + 1], cache=fast), expected, atol=1e-12, rtol=1e-12)
    assert fast.lengths.tolist() == [24, 24]


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_inductor_equals_eager() -> None:
    """The variant with the fewest kernels to build: what is ours in the graph is the same in all."""
    attn = layer(torch.float32, phi="mean", share_kv=True)
    x = tokens(37, batch=2, dtype=torch.float32)
    run = compiled(attn, backend="inductor")
    assert_close(with_gradients(attn, run, x), with_gradients(attn, attn, x), 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_the_reference_compiles_with_one_head_a_group() -> None:
    attn = layer(n_heads=2, n_kv_groups=2, backend="reference")
    x = tokens(40)
    run = compiled(attn)
    assert_close(with_gradients(attn, run, x), with_gradients(attn, attn, x), 1e-11)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_offsets_a_row_do_not_compile_anew_for_every_batch() -> None:
    attn = layer()
    frames = CompileCounter()
    run = torch.compile(attn, fullgraph=True, backend=frames)
    for batch in (2, 3, 5, 4, 7):
        x, offset = tokens(20, batch=batch), torch.arange(batch)
        torch.testing.assert_close(run(x, position_offset=offset), attn(x, position_offset=offset))
    assert frames.frame_count <= 2


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
@pytest.mark.parametrize("phi", ["mean", "mlp"])
def test_a_training_step_compiles_once_for_all_lengths(phi: str, varlen: bool) -> None:
    attn = layer(phi=phi)
    frames = CompileCounterWithBackend("aot_eager")
    run = torch.compile(attn, fullgraph=True, backend=frames)
    for length in (37, 41, 64, 90):
        x = tokens(length, batch=1 if varlen else 2)
        torch._dynamo.mark_dynamic(x, 1)
        kwargs = {"cu_seqlens": offsets((7, length - 7))} if varlen else {}
        run(x.requires_grad_(), **kwargs).sum().backward()
    assert frames.frame_count == 1


def test_strict_layers_compile_too() -> None:
    config = NSAConfig(dim=32, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, strict=True)
    attn = NSAAttention(config)
    x = torch.randn(1, 70, 32)
    torch.testing.assert_close(torch.compile(attn, fullgraph=True, backend="eager")(x), attn(x))
