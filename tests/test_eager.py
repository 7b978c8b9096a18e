"""The layer as one autograd node: the same results and gradients as its modules, and where the modules are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from nsa import NSAAttention, NSAConfig, eager
from nsa.attention import Gate
from nsa.compression import Compression

SIZES: dict[str, Any] = {"dim": 24, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 6, "l": 8, "d": 4, "l_sel": 8}
SIZES |= {"n_sel": 3, "w": 9}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "mean": {"phi": "mean"},
    "before": {"compress_rope": "before"},
    "shared": {"share_kv": True},
    "shared-before-mean": {"share_kv": True, "compress_rope": "before", "phi": "mean"},
    "softmax": {"gate": "softmax"},
    "no-sel": {"drop_branch": "sel"},
    "no-cmp-softmax": {"drop_branch": "cmp", "gate": "softmax"},
}


def new_layer(dtype: torch.dtype = torch.float64, **changes: Any) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(NSAConfig(**{**SIZES, **changes})).to(dtype)


@contextmanager
def modules_called(layer: NSAAttention) -> Iterator[None]:
    """A hook that does nothing, but has to be called."""
    handle = layer.o_proj.register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


def results(layer: NSAAttention, x: Tensor, **given: Any) -> dict[str, Tensor]:
    """The output and all gradients."""
    x = x.detach().requires_grad_()
    y = layer(x, **given)
    leaves = {"x": x, **{name: p for name, p in layer.named_parameters() if p.requires_grad}}
    torch.manual_seed(1)
    grads = torch.autograd.grad(y, list(leaves.values()), torch.randn_like(y))
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        scale = float(x.abs().max()) or 1.0
        assert float((found[name] - x).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("few_tokens", [0, 4096], ids=["separate", "joined"])
@pytest.mark.parametrize("batch", ["fixed", "varlen", "shorter-than-a-block"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_modules(variant: str, batch: str, few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "FEW_TOKENS", few_tokens)
    layer = new_layer(**VARIANTS[variant])
    given: dict[str, Any] = {}
    x = torch.randn(2, 5 if batch == "shorter-than-a-block" else 37, 24, dtype=torch.float64)
    if batch == "varlen":
        x, given = x[:1], {"cu_seqlens": torch.tensor([0, 5, 5, 20, 37], dtype=torch.int32)}
    assert eager.parameters_of(layer, x.detach().requires_grad_()) is not None
    found = results(layer, x, **given)
    with torch.no_grad():
        assert torch.equal(layer(x, **given), found["y"])
    with modules_called(layer):
        assert eager.parameters_of(layer, x) is None
        assert_same(found, results(layer, x, **given))


def test_equals_the_modules_under_autocast() -> None:
    layer, x = new_layer(torch.float32), torch.randn(2, 37, 24)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(layer, x)
        with modules_called(layer):
            expected = results(layer, x)
    assert found["y"].dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for name, g in found.items() if name != "y")
    assert_same(found, expected, tolerance=4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("few_tokens", [0, 4096], ids=["separate", "joined"])
def test_autocast_of_the_backward_pass_alone(few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "FEW_TOKENS", few_tokens)
    layer, x = new_layer(torch.float32), torch.randn(2, 37, 24)

    def gradients() -> dict[str, Tensor]:
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        with torch.autocast("cpu", torch.bfloat16):
            grads = torch.autograd.grad(y.sum(), [leaf, *layer.parameters()])
        return dict(zip(["x", *dict(layer.named_parameters())], grads, strict=True))

    found = gradients()
    with modules_called(layer):
        assert_same(found, gradients(), tolerance=4 * torch.finfo(torch.bfloat16).eps)


def test_a_softmax_in_fp32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA's autocast has it."""
    monkeypatch.setattr(Gate, "activate", lambda self, logits: logits.softmax(dim=-1, dtype=torch.float32))
    layer, x = new_layer(torch.float32, gate="softmax"), torch.randn(2, 37, 24)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(layer, x)
        with modules_called(layer):
            expected = results(layer, x)
    assert_same(found, expected, tolerance=4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("trained", ["q_proj.weight", "gate.inner.weight", "phi_v.position", "o_proj.weight", "x"])
def test_frozen_parameters_get_no_gradient(trained: str) -> None:
    layer, x = new_layer(), torch.randn(1, 20, 24, dtype=torch.float64)
    expected = results(layer, x)
    layer.requires_grad_(False)
    x.requires_grad_(trained == "x")
    wanted = x if trained == "x" else layer.get_parameter(trained).requires_grad_()
    y = layer(x)
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    assert wanted.grad is not None
    assert_same({trained: wanted.grad}, {trained: expected[trained]})
    assert all(p.grad is None for p in layer.parameters() if p is not wanted)


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    layer, x = new_layer(), torch.randn(1, 20, 24, dtype=torch.float64)
    expected = results(layer, x)
    kept = layer.forward
    layer.forward = lambda x: checkpoint(kept, x, use_reentrant=False)  # type: ignore[method-assign]
    assert_same(results(layer, x), expected, tolerance=0.0)


@pytest.mark.parametrize("wanted", ["x", "all"])
def test_a_second_derivative_raises(wanted: str) -> None:
    layer, x = new_layer(), torch.randn(1, 20, 24, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    penalty = y.sum() + dx.pow(2).sum()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(penalty, x) if wanted == "x" else penalty.backward()


@pytest.mark.parametrize("name", [name for name, _ in new_layer().named_parameters()])
def test_a_second_derivative_by_one_parameter_raises(name: str) -> None:
    """And is not what the rest of the loss gives, whether or not the node saves the parameter."""
    layer, x = new_layer(), torch.randn(1, 20, 24, dtype=torch.float64, requires_grad=True)
    p = layer.get_parameter(name)
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(dx.pow(2).sum() + p.sum(), p)


def test_the_output_can_be_modified_in_place() -> None:
    layer, x = new_layer(), torch.randn(1, 20, 24, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y += x
    y.sum().backward()
    (expected,) = torch.autograd.grad((layer(x) + x).sum(), x)
    assert torch.equal(x.grad, expected)


def test_a_bias_may_change_before_the_backward_pass() -> None:
    layer, x = new_layer(), torch.randn(1, 20, 24, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    with torch.no_grad():
        layer.gate.outer.bias.add_(1)
        layer.phi_k.position.add_(1)
    y.sum().backward()


@pytest.mark.parametrize("change", ["config", "gate"])
def test_a_config_may_be_replaced_before_the_backward_pass(change: str) -> None:
    layer, x = new_layer(), torch.randn(1, 37, 24, dtype=torch.float64, requires_grad=True)
    wanted = (x, *layer.parameters())
    expected = torch.autograd.grad(layer(x).sum(), wanted)
    y = layer(x)
    if change == "config":
        layer.config = replace(layer.config, w=3)
    else:
        layer.gate.config = replace(layer.config, gate="softmax")
    changed = layer.config, layer.gate.config
    found = torch.autograd.grad(y.sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (layer.config, layer.gate.config) == changed


def test_a_frozen_layer_saves_no_more_than_its_modules() -> None:
    layer, x = new_layer(), torch.randn(1, 20, 24, dtype=torch.float64)
    layer.requires_grad_(False)
    layer.o_proj.requires_grad_(True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        layer(x)
    assert len(saved) <= 2


class Halved(NSAAttention):
    def project(self, x: Tensor, angles: Any) -> Any:
        q, *others = super().project(x, angles)
        return q / 2, *others


def test_a_subclass_is_not_ignored() -> None:
    plain, halved = new_layer(), Halved(NSAConfig(**SIZES)).double()
    halved.load_state_dict(plain.state_dict())
    x = torch.randn(1, 20, 24, dtype=torch.float64)
    with torch.no_grad():
        assert not torch.equal(plain(x), halved(x))


class Subclass(nn.Linear):
    pass


@pytest.mark.parametrize(
    "change",
    [
        "biased",
        "unbiased",
        "reordered",
        "buffer",
        "more-in-phi",
        "more-in-gate",
        "removed",
        "method",
        "replaced",
        "hooked",
        "backward-hooked",
        "patched",
        "parametrized",
        "mlp-method",
        "phi-of-other-kind",
        "phi-of-other-kinds",
        "pinned-gate",
        "watched",
    ],
)
def test_modules_that_are_replaced_or_watched_are_called(change: str) -> None:
    layer, x = new_layer(), torch.randn(1, 20, 24, dtype=torch.float64, requires_grad=True)
    child = layer.phi_k.inner
    calls: list[str] = []
    if change == "biased":
        layer.q_proj = nn.Linear(24, 32).double()
    elif change == "unbiased":
        layer.gate.outer = nn.Linear(layer.gate.outer.in_features, 12, bias=False).double()
    elif change == "reordered":
        # As removing a parametrization leaves it: the bias comes first.
        weight = child.weight
        del child.weight
        child.weight = weight
    elif change == "buffer":
        position = layer.phi_k.position
        del layer.phi_k.position
        layer.phi_k.register_buffer("position", position.detach())
    elif change == "more-in-phi":
        layer.phi_k.more = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    elif change == "more-in-gate":
        layer.gate.more = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    elif change == "removed":
        layer.o_proj = nn.Identity()
    elif change == "method":
        activate = layer.gate.activate
        layer.gate.activate = lambda logits: calls.append("method") or activate(logits)  # type: ignore[method-assign]
    elif change == "replaced":
        layer.q_proj = Subclass(24, 32, bias=False).double()
    elif change == "hooked":
        child.register_forward_pre_hook(lambda *_: calls.append("hook"))
    elif change == "backward-hooked":
        child.register_full_backward_hook(lambda *_: calls.append("hook"))
    elif change == "patched":
        forward = child.forward
        child.forward = lambda x: calls.append("patch") or forward(x)  # type: ignore[method-assign]
    elif change == "parametrized":
        nn.utils.parametrizations.weight_norm(child)
    elif change == "mlp-method":
        mlp = layer.phi_v.mlp
        layer.phi_v.mlp = lambda rows: calls.append("method") or mlp(rows)  # type: ignore[method-assign]
    elif change == "phi-of-other-kind":
        layer.phi_v = Compression(6, 8, kind="mean")
    elif change == "phi-of-other-kinds":
        layer.phi_k, layer.phi_v = Compression(8, 8, kind="mean"), Compression(6, 8, kind="mean")
    elif change == "pinned-gate":
        layer.gate.config = replace(layer.config, force_branch="win")
    if change == "watched":
        assert eager.parameters_of(layer, x) is not None
        with FlopCounterMode(display=False) as counter:
            assert eager.parameters_of(layer, x) is None
            layer(x)
        assert counter.get_total_flops() > 0
        return
    assert eager.parameters_of(layer, x) is None
    layer(x).sum().backward()
    if change in ("hooked", "backward-hooked", "patched", "method", "mlp-method"):
        assert calls


@pytest.mark.parametrize("name", ["angles", "block_angles", "split_keys", "split_values"])
def test_a_layer_with_a_method_of_its_own_is_not_ignored(name: str) -> None:
    """The node would call it, but a replay only did when it was captured."""
    layer, x = new_layer(), torch.randn(1, 20, 24, dtype=torch.float64)
    before, method = results(layer, x), getattr(layer, name)
    setattr(layer, name, lambda *given: tuple(2 * part for part in method(*given)))
    assert eager.parameters_of(layer, x.detach().requires_grad_()) is None
    assert not torch.equal(results(layer, x)["y"], before["y"])


@pytest.mark.parametrize("other", ["phi_k", "gate", "o_proj"])
def test_parameters_of_another_dtype_are_not_cast(other: str) -> None:
    layer, x = new_layer(torch.bfloat16), torch.randn(1, 20, 24, dtype=torch.bfloat16)
    getattr(layer, other).float()
    for requires_grad in (False, True):
        with pytest.raises(RuntimeError, match="dtype"):
            layer(x.requires_grad_(requires_grad))


def test_phi_of_another_block_is_not_ignored() -> None:
    layer, x = new_layer(phi="mean", compress_rope="before"), torch.randn(1, 20, 24, dtype=torch.float64)
    layer.phi_k, layer.phi_v = Compression(8, 4, kind="mean"), Compression(6, 4, kind="mean")
    with pytest.raises(ValueError, match=r"k_cmp\.shape\[1\] is 5"):
        layer(x.requires_grad_())


@pytest.mark.parametrize("dim", [8, 40])
def test_the_output_may_have_another_dim(dim: int) -> None:
    layer, x = new_layer(), torch.randn(2, 37, 24, dtype=torch.float64, requires_grad=True)
    layer.o_proj = nn.Linear(4 * 6, dim, bias=False).double()
    assert eager.parameters_of(layer, x) is not None
    found = results(layer, x)
    assert found["y"].shape == (2, 37, dim)
    with modules_called(layer):
        assert_same(found, results(layer, x))


@pytest.mark.parametrize("variant", [{"qkv_bias": True}, {"qk_norm": True}], ids=["biases", "norms"])
def test_what_the_node_does_not_compute_is_left_to_the_modules(variant: dict[str, Any]) -> None:
    assert eager.parameters_of(new_layer(**variant), torch.randn(1, 9, 24, dtype=torch.float64)) is None


def doubled(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda _, __, output: 2 * output)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("change", [lambda module: module, doubled, nn.Sequential], ids=["plain", "hook", "wrapped"])
def test_compiled_products_are_those_of_the_modules(change: Callable[[nn.Module], nn.Module], biased: bool) -> None:
    layer = new_layer(qkv_bias=biased)
    layer.v_proj = change(layer.v_proj)  # type: ignore[assignment]
    x = torch.randn(2, 70, 24, dtype=torch.float64, requires_grad=True)
    # By default torch takes the hooks of one layer for those of the next.
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    expected, found = (torch.autograd.grad(f(x).square().sum(), [x, *layer.parameters()]) for f in (layer, compiled))
    for name, a, b in zip(["x", *dict(layer.named_parameters())], expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9, msg=name)
