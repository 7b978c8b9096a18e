"""Small NSA layers and their inputs, and the layer put together by hand from its weights and `nsa.reference`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from nsa import NSAAttention, NSAConfig, RopeScaling, reference
from nsa.config import BRANCHES

FP64 = torch.float64

SMALL = {
    "dim": 20,
    "n_heads": 6,
    "n_kv_groups": 2,
    "d_k": 8,
    "d_v": 6,
    "l": 8,
    "d": 4,
    "l_sel": 8,
    "n_sel": 4,
    "n_init": 1,
    "n_local": 1,
    "w": 6,
}

SCALING = RopeScaling(factor=4.0, original_max_len=32)

VARIANTS = {
    "paper": {},
    "share_kv": {"share_kv": True},
    "phi_mean": {"phi": "mean"},
    "rope_before": {"compress_rope": "before"},
    "rope_before_shared": {"compress_rope": "before", "share_kv": True},
    "rope_scaled": {"rope_scaling": SCALING},
    "gate_softmax": {"gate": "softmax"},
    "biases_and_norms": {"qkv_bias": True, "qk_norm": True},
    "branch_norm": {"branch_norm": True, "gate": "softmax"},
    "odd_sizes": {"d_k": 2, "d_v": 3, "gate_hidden": 3, "phi_hidden": 5},
}

every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


def small_config(**changes: Any) -> NSAConfig:
    return NSAConfig(**{**SMALL, **changes})


def layer(dtype: torch.dtype = FP64, **changes: Any) -> NSAAttention:
    return NSAAttention(small_config(**changes)).to(dtype)


def tokens(length: int, batch: int = 1, dtype: torch.dtype = FP64) -> Tensor:
    return torch.randn(batch, length, SMALL["dim"], dtype=FP64).to(dtype)


@st.composite
def configs(draw: st.DrawFn) -> NSAConfig:
    stride = draw(st.integers(1, 4))
    groups = draw(st.integers(1, 2))
    n_init, n_local = draw(st.integers(0, 1)), draw(st.integers(0, 2))
    force_branch = draw(st.sampled_from([None, *BRANCHES]))
    return NSAConfig(
        dim=draw(st.integers(1, 12)),
        n_heads=groups * draw(st.integers(1, 3)),
        n_kv_groups=groups,
        d_k=2 * draw(st.integers(1, 4)),
        d_v=draw(st.integers(1, 7)),
        d=stride,
        l=stride * draw(st.integers(1, 3)),
        l_sel=stride * draw(st.integers(1, 4)),
        n_init=n_init,
        n_local=n_local,
        n_sel=max(1, n_init + n_local + draw(st.integers(0, 2))),
        w=draw(st.integers(1, 20)),
        phi=draw(st.sampled_from(["mlp", "mean"])),
        compress_rope=draw(st.sampled_from(["after", "before"])),
        share_kv=draw(st.booleans()),
        gate=draw(st.sampled_from(["sigmoid", "softmax"])),
        gate_bias=draw(st.sampled_from([0.0, 1.0])),
        force_branch=force_branch,
        drop_branch=None if force_branch else draw(st.sampled_from([None, *BRANCHES])),
        rope_scaling=draw(st.sampled_from([None, SCALING])),
    )


# The layer once more, from its weights and nsa.reference alone.


def turned(x: Tensor, positions: Tensor, config: NSAConfig) -> Tensor:
    """RoPE of `x [B, S, H, D]` as complex rotation."""
    half = config.d_k // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=FP64) * 2 / config.d_k)
    if config.rope_scaling is not None:
        s = config.rope_scaling
        wavelength = 2 * math.pi / frequency
        smooth = (s.original_max_len / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        blended = (1 - smooth) * frequency / s.factor + smooth * frequency
        kept = torch.where(wavelength < s.original_max_len / s.high_freq_factor, frequency, blended)
        frequency = torch.where(wavelength > s.original_max_len / s.low_freq_factor, frequency / s.factor, kept)
    angle = positions.double()[:, None, None] * frequency
    spun = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([spun.real, spun.imag], dim=-1)


def compressed_by_loops(x: Tensor, phi: nn.Module, config: NSAConfig) -> Tensor:
    """`[B, S, G, D]` to `[B, N, G, D]`."""
    out = []
    for start in range(0, x.shape[1] - config.l + 1, config.d):
        block = x[:, start : start + config.l]
        if config.phi == "mean":
            out.append(block.sum(dim=1) / config.l)
            continue
        groups = []
        for g in range(config.n_kv_groups):
            flat = (block[:, :, g] + phi.position).reshape(x.shape[0], -1)
            inner = flat @ phi.inner.weight.T + phi.inner.bias
            groups.append((inner * inner.sigmoid()) @ phi.outer.weight.T + phi.outer.bias)
        out.append(torch.stack(groups, dim=1))
    return torch.stack(out, dim=1) if out else x[:, :0]


def gates_by_hand(attn: NSAAttention, x: Tensor) -> Tensor:
    c = attn.config
    shape = (*x.shape[:2], c.n_heads, 3)
    if c.force_branch is not None:
        return torch.eye(3, dtype=x.dtype)[["cmp", "sel", "win"].index(c.force_branch)].expand(shape)
    inner = x @ attn.gate.inner.weight.T + attn.gate.inner.bias
    logits = ((inner * inner.sigmoid()) @ attn.gate.outer.weight.T + attn.gate.outer.bias).view(shape)
    kept = torch.tensor([branch != c.drop_branch for branch in BRANCHES]).to(x.dtype)
    if c.gate == "sigmoid":
        return kept / (1 + (-logits).exp())
    return kept * logits.exp() / (kept * logits.exp()).sum(dim=-1, keepdim=True)


def heads_by_hand(attn: NSAAttention, x: Tensor, name: str) -> Tensor:
    c, linear, norm = attn.config, getattr(attn, f"{name}_proj"), getattr(attn, f"{name}_norm", None)
    y = x @ linear.weight.T + (linear.bias if c.qkv_bias else 0)
    y = y.view(*x.shape[:2], -1, c.d_v if name == "v" else c.d_k)
    return y if norm is None else y / (y.square().mean(dim=-1, keepdim=True) + c.qk_norm_eps).sqrt() * norm.weight


def keys_by_hand(attn: NSAAttention, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Unrotated keys and values of the three branches."""
    c = attn.config
    shape = (*x.shape[:2], -1, c.n_kv_groups)
    ks = heads_by_hand(attn, x, "k").view(*shape, c.d_k).unbind(dim=2)
    vs = heads_by_hand(attn, x, "v").view(*shape, c.d_v).unbind(dim=2)
    return (list(ks) * 3, list(vs) * 3) if c.share_kv else (list(ks), list(vs))


def layer_by_hand(attn: NSAAttention, x: Tensor) -> Tensor:
    c = attn.config
    position = torch.arange(x.shape[1])
    q = turned(heads_by_hand(attn, x, "q"), position, c)
    ks, vs = keys_by_hand(attn, x)
    if c.compress_rope == "before":
        k_cmp = compressed_by_loops(turned(ks[0], position, c), attn.phi_k, c)
    else:
        k_cmp = compressed_by_loops(ks[0], attn.phi_k, c)
        k_cmp = turned(k_cmp, torch.arange(k_cmp.shape[1]) * c.d, c)
    v_cmp = compressed_by_loops(vs[0], attn.phi_v, c)
    o = reference.nsa_attention(
        q,
        k_cmp,
        v_cmp,
        turned(ks[1], position, c),
        vs[1],
        turned(ks[2], position, c),
        vs[2],
        gates_by_hand(attn, x),
        config=c,
    )
    return o.flatten(2) @ attn.o_proj.weight.T


def with_gradients(attn: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, seed: int = 1) -> dict[str, Tensor]:
    """Output, and the gradients of `x` and of every trained parameter for a fixed random gradient of the output."""
    x = x.detach().clone().requires_grad_()
    names, parameters = zip(*((name, p) for name, p in attn.named_parameters() if p.requires_grad), strict=True)
    y = forward(x)
    dy = torch.randn(y.shape, dtype=FP64, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
    grads = torch.autograd.grad(y, (x, *parameters), dy, allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(("x", *names), grads, strict=True))}
