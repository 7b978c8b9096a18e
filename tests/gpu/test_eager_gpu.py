"""The eager layer's written-out gradients are those of autograd, and it launches what its plans say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa import NSAAttention, NSAConfig, eager

CONFIGS = {
    "mlp": {},
    "mean": {"phi": "mean"},
    "softmax": {"gate": "softmax"},
    "wide": {"d_k": 128, "d_v": 64},
}


def results(layer: NSAAttention, x: Tensor, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x, cu_seqlens=cu_seqlens)
    named = {"x": x, **dict(layer.named_parameters())}
    do = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(y)
    grads = torch.autograd.grad(y, tuple(named.values()), do)
    return {"y": y, **{f"d{name}": grad for name, grad in zip(named, grads, strict=True)}}


@pytest.mark.parametrize("packed", [False, True], ids=["fixed-length", "varlen"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_are_autograds(kind: str, dtype: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = NSAConfig(**{"dim": 96, "n_heads": 6, "n_kv_groups": 2, "d_k": 64, "d_v": 64, **CONFIGS[kind]})
    layer = NSAAttention(config).to("cuda", dtype)
    x = torch.randn(1 if packed else 2, 300, 96, device="cuda", dtype=dtype)
    cu_seqlens = torch.tensor([0, 100, 101, 300], dtype=torch.int32, device="cuda") if packed else None
    assert eager.applies(x, layer.q_proj)
    found = results(layer, x, cu_seqlens)
    monkeypatch.setattr(eager, "applies", lambda *_: False)
    expected = results(layer, x, cu_seqlens)
    layer.double()
    exact = results(layer, x.double(), cu_seqlens)
    for name, want in expected.items():
        # Sums of several products are rounded in another order: no further from fp64 than autograd is.
        error = (found[name].double() - exact[name]).norm()
        allowed = 1.5 * (want.double() - exact[name]).norm() + 1e-6 * exact[name].norm()
        assert error <= allowed, f"{name}: {error:.3e} > {allowed:.3e}"


def test_adapters_hooks_and_autocast_take_the_plain_path() -> None:
    layer = NSAAttention(NSAConfig(dim=64, n_heads=2, n_kv_groups=1, d_k=32, d_v=32)).to("cuda", torch.bfloat16)
    x = torch.randn(1, 70, 64, device="cuda", dtype=torch.bfloat16)
    assert eager.applies(x, layer.q_proj)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert not eager.applies(x, layer.q_proj)
    seen = []
    layer.q_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert not eager.applies(x, layer.q_proj)
    layer(x)
    assert seen == [(1, 70, 64)]


def test_frozen_weights_get_no_gradient_and_inputs_still_do() -> None:
    layer = NSAAttention(NSAConfig(dim=64, n_heads=2, n_kv_groups=1, d_k=32, d_v=32)).to("cuda", torch.bfloat16)
    x = torch.randn(1, 200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).float().square().sum().backward()
    expected = x.grad.clone()
    x.grad = None
    layer.requires_grad_(False)
    layer(x).float().square().sum().backward()
    assert torch.equal(x.grad, expected)
