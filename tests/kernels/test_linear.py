"""Linear layers of a few rows, and whole layers of a cached step: as torch computes them, launch by launch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import DEVICE
from torch import Tensor, nn

from nsa import NSAConfig, decoding
from nsa.attention import Gate
from nsa.backends import routing
from nsa.backends import triton as triton_backend
from nsa.backends.triton.decode import Norm, Weights, linear, linear_step, plan
from nsa.backends.triton.decode.linear import FEWEST_ROWS
from nsa.backends.triton.launch import Launch
from nsa.compression import Compression
from nsa.model import LM, DenseAttention, step, transformer
from nsa.model.config import LMConfig
from nsa.model.transformer import Layer, SwiGLU

ACTIVATIONS: dict[str | None, Any] = {None: lambda y: y, "silu": F.silu, "sigmoid": torch.sigmoid}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
ATTENTION: dict[str, Any] = {
    **{
        "dim": 24,
        "n_heads": 4,
        "n_kv_groups": 2,
        "d_k": 16,
        "d_v": 16,
        "l": 8,
        "d": 4,
        "l_sel": 16,
        "n_sel": 4,
        "w": 12,
    },
    "backend": "triton",
}


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).to(dtype).to(DEVICE)


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_linears_are_those_of_torch(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    batch, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    n_in = data.draw(st.sampled_from([1, 16, 72, 300]))
    x = normal(batch, tokens, n_in, dtype=dtype)
    norm = Norm(1 + normal(n_in, dtype=dtype, scale=0.1), 1e-5) if data.draw(st.booleans()) else None
    normed = x if norm is None else F.rms_norm(x, (n_in,), norm.weight, norm.eps)
    weights = []
    for _ in range(data.draw(st.integers(1, 4))):
        n_out = data.draw(st.sampled_from([1, 15, 16, 33]))
        bias = normal(n_out, dtype=dtype) if data.draw(st.booleans()) else None
        weight = normal(n_out, n_in, dtype=dtype, scale=n_in**-0.5)
        weights.append(Weights(weight, bias, data.draw(st.sampled_from(list(ACTIVATIONS)))))
    for w, found in zip(weights, linear_step(x, *weights, norm=norm), strict=True):
        assert_near(found, ACTIVATIONS[w.activation](F.linear(normed, w.weight, w.bias)))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_residual_is_added_and_a_swiglu_is_one_launch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # More than one tile of inputs.
    n_in = 300
    x, norm = normal(3, 2, n_in, dtype=dtype), Norm(1 + normal(n_in, dtype=dtype, scale=0.1), 1e-5)
    weight, residual = normal(40, n_in, dtype=dtype, scale=n_in**-0.5), normal(3, 2, 40, dtype=dtype)
    (found,) = linear_step(x, Weights(weight), residual=residual)
    assert_near(found, residual + F.linear(x, weight))
    (found,) = linear_step(x, Weights(weight, None, "silu"), norm=norm, paired=True)
    gate, value = F.linear(F.rms_norm(x, (n_in,), norm.weight, norm.eps), weight).chunk(2, dim=-1)
    assert_near(found, F.silu(gate) * value)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(0)
    x, norm = normal(9, 1, 300, dtype=torch.float16), Norm(normal(300, dtype=torch.float16), 1e-5)
    weight = Weights(normal(33, 300, dtype=torch.float16))
    (together,) = linear_step(x, weight, norm=norm)
    # Fewer are multiplied in another way.
    n = FEWEST_ROWS + 1
    for first in range(9 - n + 1):
        (apart,) = linear_step(x[first : first + n].contiguous(), weight, norm=norm)
        assert torch.equal(together[first : first + n], apart)


@pytest.mark.parametrize("rows", range(1, FEWEST_ROWS + 1))
def test_few_rows_of_several_tiles(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LONG_TILE_ROW", 64)
    monkeypatch.setattr(linear, "LONG_TILE", 256)
    linear.plan_linear.cache_clear()
    torch.manual_seed(rows)
    n_in = 150
    x, norm = normal(rows, 1, n_in, dtype=torch.float32), Norm(1 + normal(n_in, dtype=torch.float32), 1e-5)
    weight, residual = normal(42, n_in, dtype=torch.float32, scale=0.1), normal(rows, 1, 42, dtype=torch.float32)
    (found,) = linear_step(x, Weights(weight, residual[0, 0], "sigmoid"), residual=residual)
    assert_near(found, residual + F.linear(x, weight, residual[0, 0]).sigmoid())
    (found,) = linear_step(x, Weights(weight, None, "silu"), norm=norm, paired=True)
    gate, value = F.linear(F.rms_norm(x, (n_in,), norm.weight, norm.eps), weight).chunk(2, dim=-1)
    assert_near(found, F.silu(gate) * value)
    linear.plan_linear.cache_clear()


def new_layer(**changes: Any) -> Layer:
    torch.manual_seed(0)
    config = LMConfig(vocab_size=8, seq_len=32, n_layers=1, hidden=40, attn=NSAConfig(**{**ATTENTION, **changes}))
    layer = Layer(config, 0).to(DEVICE).eval()
    nn.init.normal_(layer.attention_norm.weight, 1.0, 0.2)
    return layer


def steps(layer: Layer, x: Tensor, counts: Tensor | None = None) -> Tensor:
    """`x [B, S, dim]` in steps of 5 tokens."""
    cache = layer.attention.new_cache(x.shape[0], 20)
    with torch.no_grad():
        parts = [layer(part.contiguous(), cache=cache, counts=counts) for part in x.split(5, dim=1)]
    return torch.cat(parts, dim=1)


def by_modules(layer: Layer, x: Tensor, counts: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(transformer, "fused_layer", lambda *args: None)
        return steps(layer, x, counts)


VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "softmax, shared keys": {"gate": "softmax", "share_kv": True},
    "dropped branch": {"drop_branch": "sel"},
    "pinned branch, norms": {"force_branch": "cmp", "qk_norm": True, "qkv_bias": True},
}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step of a layer ran in the kernels."""
    run, ran = transformer.fused_layer, []

    def note(*args: Any) -> Tensor | None:
        stepped = run(*args)
        ran.append(stepped is not None)
        return stepped

    monkeypatch.setattr(transformer, "fused_layer", note)
    return ran


@pytest.mark.parametrize(
    "variant",
    [
        "paper",
        pytest.param("softmax, shared keys", marks=pytest.mark.slow),
        pytest.param("dropped branch", marks=pytest.mark.slow),
        "pinned branch, norms",
    ],
)
def test_a_step_of_a_layer_is_that_of_its_modules(
    variant: str, fused: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = new_layer(**VARIANTS[variant])
    x = torch.randn(2, 10, 24, device=DEVICE)
    assert_near(steps(layer, x), by_modules(layer, x, None, monkeypatch))
    assert fused == [True, True]


def test_tokens_that_are_not_real_are_not_kept(fused: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = new_layer(), torch.randn(2, 10, 24, device=DEVICE)
    counts = torch.tensor([5, 2], device=DEVICE)
    found, expected = steps(layer, x, counts), by_modules(layer, x, counts, monkeypatch)
    assert_near(found[0], expected[0])
    real = torch.arange(10) % 5 < 2
    assert_near(found[1, real], expected[1, real])
    assert fused == [True, True]


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_counts_of_any_layout_are_taken_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch is compiled once for all counts, which it reads by their address."""
    layer, x, seen = new_layer(), torch.randn(2, 10, 24, device=DEVICE), set()
    if kind == "dense":
        layer.attention = DenseAttention(NSAConfig(**ATTENTION)).to(DEVICE)
    expected = steps(layer, x, torch.tensor([5, 2], device=DEVICE))
    run = Launch.__call__

    def note(self: Launch, **free: Any) -> None:
        seen.update((x.dtype, x.stride()) for name, x in free.items() if name == "counts")
        run(self, **free)

    monkeypatch.setattr(Launch, "__call__", note)
    assert torch.equal(steps(layer, x, torch.tensor([5, 4, 2, 4], device=DEVICE).int()[::2]), expected)
    assert seen == {(torch.int64, (1,))}


def test_a_step_of_a_layer_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, launched = new_layer(), []
    run = Launch.__call__

    def count(self: Launch, **free: Any) -> None:
        launched.append(self.kernel.__name__)
        run(self, **free)

    monkeypatch.setattr(Launch, "__call__", count)
    steps(layer, torch.randn(1, 1, 24, device=DEVICE))
    # Projections, output, SwiGLU and down projection, around the attention's seven.
    assert launched.count("linear_kernel") == 4
    assert len(launched) == 11


def test_a_gate_with_a_wide_hidden_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "GATE_UNITS", 16)
    plan.plan_decode.cache_clear()
    layer, x = new_layer(gate_hidden=41), torch.randn(2, 10, 24, device=DEVICE)
    assert_near(steps(layer, x), by_modules(layer, x, None, monkeypatch))
    plan.plan_decode.cache_clear()


def doubled(module: nn.Module) -> None:
    module.forward = lambda x, forward=module.forward: 2 * forward(x)  # type: ignore[method-assign]


class GeGLU(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.inner(x).chunk(2, dim=-1)
        return self.outer(F.gelu(gate) * value)


def every_second(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.repeat_interleave(2)[::2])


def replace_gate(layer: Layer, **changes: Any) -> None:
    gate = Gate(replace(layer.attention.config, **changes)).to(DEVICE)
    gate.load_state_dict(layer.attention.gate.state_dict())
    layer.attention.gate = gate


def double_method(module: nn.Module, name: str) -> None:
    """In place of a method that returns a tuple."""
    method = getattr(module, name)
    setattr(module, name, lambda *args, **given: tuple(2 * y for y in method(*args, **given)))


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "a hook": lambda layer: layer.mlp.register_forward_hook(lambda module, args, y: 2 * y),
    "a hook of phi": lambda layer: layer.attention.phi_v.register_forward_hook(lambda module, args, y: 2 * y),
    "an adapter": lambda layer: setattr(layer.mlp, "outer", nn.Sequential(deepcopy(layer.mlp.outer), nn.Tanh())),
    "a bias": lambda layer: setattr(layer.attention, "o_proj", nn.Linear(64, 24, device=DEVICE)),
    "a forward of its own": lambda layer: doubled(layer.mlp.outer),
    "a forward of its own in phi": lambda layer: doubled(layer.attention.phi_v.inner),
    "a method of its own": lambda layer: double_method(layer.attention, "run_modules"),
    "another gate": lambda layer: replace_gate(layer, gate="softmax"),
    "a gate that drops a branch": lambda layer: replace_gate(layer, drop_branch="win"),
    "another phi": lambda layer: setattr(layer.attention, "phi_v", Compression(16, 8, kind="mean")),
    "another activation": lambda layer: setattr(layer, "mlp", GeGLU(24, 40).to(DEVICE)),
    "another MLP": lambda layer: setattr(layer, "mlp", nn.Linear(24, 24, device=DEVICE)),
    "another norm": lambda layer: setattr(layer, "mlp_norm", nn.LayerNorm(24, device=DEVICE)),
    "a strided norm": lambda layer: setattr(layer.mlp_norm, "weight", every_second(layer.attention_norm.weight)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_plain_layer_runs_by_its_modules(change: str) -> None:
    layer, x = new_layer(), torch.randn(1, 10, 24, device=DEVICE)
    CHANGES[change](layer)
    with torch.no_grad():
        assert_near(steps(layer, x), layer(x))


def test_a_transposed_weight_runs_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = new_layer(), torch.randn(1, 5, 24, device=DEVICE)
    layer.attention.o_proj.weight.data = layer.attention.o_proj.weight.data.t().contiguous().t()
    assert torch.equal(steps(layer, x), by_modules(layer, x, None, monkeypatch))


def test_transposed_weights_of_phi_are_read_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = new_layer(), torch.randn(1, 15, 24, device=DEVICE)
    expected = steps(layer, x)
    inner = layer.attention.phi_k.inner
    inner.weight.data = inner.weight.data.t().contiguous().t()
    assert_near(steps(layer, x), expected)


def test_a_failure_of_the_linear_kernel_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = new_layer()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise triton_backend.BackendFailure("no room")

    monkeypatch.setattr(triton_backend, "linear_step", fail)
    with pytest.raises(triton_backend.BackendFailure):
        steps(layer, torch.randn(1, 5, 24, device=DEVICE))


def test_a_failure_after_the_attention_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's tokens are in the cache by then: it can be neither run again nor given up."""
    layer, x = new_layer(), torch.randn(1, 10, 24, device=DEVICE)
    expected, run, failed = steps(layer, x), triton_backend.linear_step, []

    def fail(*args: Any, paired: bool = False, **kwargs: Any) -> Any:
        if paired:
            failed.append(True)
            raise triton_backend.BackendFailure("no room")
        return run(*args, **kwargs)

    monkeypatch.setattr(triton_backend, "linear_step", fail)
    with pytest.raises(triton_backend.BackendFailure):
        steps(layer, x)
    # Else the interpreter runs them by name alone.
    monkeypatch.setattr(decoding, "kernels_run", lambda problem, backend: True)
    monkeypatch.setattr(routing.router(), "failed", {})
    automatic = new_layer(backend="auto")
    automatic.load_state_dict(layer.state_dict())
    failed.clear()
    assert_near(steps(automatic, x), expected)
    # The second step knows.
    assert len(failed) == 1


def new_model(**changes: Any) -> LM:
    torch.manual_seed(0)
    attention = NSAConfig(**{**ATTENTION, **changes})
    return LM(LMConfig(vocab_size=37, seq_len=32, n_layers=3, hidden=40, attn=attention)).to(DEVICE).eval()


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch of a linear kernel."""
    run, launched = Launch.__call__, []

    def note(self: Launch, **free: Any) -> None:
        if self.kernel.__name__ == "linear_kernel":
            launched.append(self)
        run(self, **free)

    monkeypatch.setattr(Launch, "__call__", note)
    return launched


def test_the_head_of_a_few_rows_is_one_launch(linears: list[Launch]) -> None:
    model = new_model()
    x = torch.randn(2, 3, 24, device=DEVICE)
    with torch.no_grad():
        assert_near(model.logits(x), F.linear(x, model.head_weight))
        assert len(linears) == 1
        # More rows, and gradients, are torch's.
        many = torch.randn(3, 11, 24, device=DEVICE)
        assert torch.equal(model.logits(many), F.linear(many, model.head_weight))
    assert model.logits(x).requires_grad
    assert len(linears) == 1


class Doubled(Tensor):
    """Multiplies by twice what it holds, as a quantized weight may."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * y.as_subclass(Tensor) if func is F.linear else y


def test_a_head_of_a_class_of_its_own_is_asked(linears: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = new_model(), torch.randn(1, 1, 24, device=DEVICE)
    weight = model.head_weight.detach()
    monkeypatch.setattr(LM, "head_weight", property(lambda self: weight.as_subclass(Doubled)))
    with torch.no_grad():
        assert torch.equal(model.logits(x), 2 * F.linear(x, weight))
    assert not linears


def test_a_failure_of_the_head_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = new_model(), torch.randn(1, 1, 24, device=DEVICE)
    expected = F.linear(x, model.head_weight)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise triton_backend.BackendFailure("no room")

    monkeypatch.setattr(triton_backend, "linear_step", fail)
    monkeypatch.setattr(step, "kernels_run", lambda problem, backend: True)
    monkeypatch.setattr(routing.router(), "failed", {})
    automatic = new_model(backend="auto")
    with torch.no_grad():
        assert torch.equal(automatic.logits(x), expected)
        # What another model has found out is no excuse.
        for strict in (model, new_model(backend="auto", strict=True)):
            with pytest.raises(triton_backend.BackendFailure):
                strict.logits(x)


def test_a_layer_whose_hooks_may_write_weights_waits(linears: list[Launch]) -> None:
    """FSDP gathers a layer's weights in such a hook."""
    model = new_model()
    model.layers[1].register_forward_pre_hook(lambda module, args: None)
    with torch.no_grad():
        model.hidden(torch.zeros(1, 1, dtype=torch.long, device=DEVICE), caches=model.new_cache(1, 4))
    assert [launch.bound["FIRST"] for launch in linears[::4]] == [True, True, False]


def test_only_the_first_layer_waits_before_it_loads_weights(linears: list[Launch]) -> None:
    """Something else may have written them before the step, but not between its layers."""
    model = new_model()
    with torch.no_grad():
        model.hidden(torch.zeros(1, 1, dtype=torch.long, device=DEVICE), caches=model.new_cache(1, 4))
    waits = [launch.bound["FIRST"] for launch in linears]
    assert len(waits) == 4 * len(model.layers)
    assert waits == [True] + [False] * (len(waits) - 1)
