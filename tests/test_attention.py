"""NSAAttention: against the reference put together by hand, against dense attention, and what a layer promises."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_bits, document_lengths, offsets
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nsa.attention
from nsa import NSAAttention, NSAConfig, NSAStats, RopeScaling, ops, reference
from nsa.backends.routing import router
from nsa.config import BRANCHES
from nsa.geometry import n_compressed

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
    "odd_widths": {"d_k": 2, "d_v": 3, "gate_hidden": 3, "phi_hidden": 5},
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


# What it computes.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, FP64], ids=str)
@pytest.mark.parametrize("length", [1, 7, 8, 33])
def test_output_has_the_shape_and_dtype_of_the_input(dtype: torch.dtype, length: int) -> None:
    x = tokens(length, batch=2, dtype=dtype)
    y = layer(dtype)(x)
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert y.isfinite().all()


@given(config=configs(), length=st.integers(1, 50), batch=st.integers(1, 2), seed=st.integers(0, 1000))
def test_layer_is_the_reference_put_together_by_hand(config: NSAConfig, length: int, batch: int, seed: int) -> None:
    """Forward and every gradient, whatever the knobs."""
    torch.manual_seed(seed)
    attn = NSAAttention(config).double()
    x = torch.randn(batch, length, config.dim, dtype=FP64)
    got = with_gradients(attn, attn, x)
    assert_close(got, with_gradients(attn, lambda x: layer_by_hand(attn, x), x), 1e-10)


@every_variant
def test_the_reference_backend_gives_the_same_layer(variant: dict[str, Any]) -> None:
    attn = layer(**variant)
    same = NSAAttention(dataclasses.replace(attn.config, backend="reference")).double()
    same.load_state_dict(attn.state_dict())
    x = tokens(37, batch=2)
    assert_close(with_gradients(attn, attn, x), with_gradients(same, same, x), 1e-10)


@pytest.mark.parametrize("phi", ["mlp", "mean"])
@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_of_the_layer_are_an_error(phi: str, power: int) -> None:
    """The gate and the projections can be differentiated twice: without the ops' part the result would be wrong."""
    attn = layer(phi=phi)
    x = tokens(37).requires_grad_()
    (grad,) = torch.autograd.grad((attn(x) ** power).sum(), x, create_graph=True)
    for wanted in (x, attn.q_proj.weight):
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(grad.square().sum(), wanted, retain_graph=True, allow_unused=True)


@given(length=st.integers(1, 70), extra=st.integers(0, 9), shared=st.booleans(), seed=st.integers(0, 99))
def test_window_that_covers_everything_is_dense_causal_attention(
    length: int, extra: int, shared: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    attn = layer(force_branch="win", w=length + extra, share_kv=shared)
    x = tokens(length, batch=2)
    assert_close(with_gradients(attn, attn, x), with_gradients(attn, lambda x: dense(attn, x, "win"), x), 1e-11)


@given(length=st.integers(1, 70), extra=st.integers(0, 2), shared=st.booleans(), seed=st.integers(0, 99))
def test_selection_of_every_block_is_dense_causal_attention(length: int, extra: int, shared: bool, seed: int) -> None:
    torch.manual_seed(seed)
    attn = layer(force_branch="sel", n_sel=max(2, -(-length // SMALL["l_sel"]) + extra), share_kv=shared)
    x = tokens(length, batch=2)
    assert_close(with_gradients(attn, attn, x), with_gradients(attn, lambda x: dense(attn, x, "sel"), x), 1e-11)


def dense(attn: NSAAttention, x: Tensor, branch: str) -> Tensor:
    """Torch's dense causal attention on the layer's own projections of one branch."""
    c = attn.config
    angles = attn.rope.angles(torch.arange(x.shape[1])[None], x.dtype)
    q = attn.rope.rotate(attn.q_proj(x).unflatten(-1, (c.n_heads, c.d_k)), angles)
    ks, vs = keys_by_hand(attn, x)
    k, v = attn.rope.rotate(ks[BRANCHES.index(branch)], angles), vs[BRANCHES.index(branch)]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attn.o_proj(o.transpose(1, 2).flatten(2))


def test_window_one_token_too_short_is_not_dense() -> None:
    """The two facts above can fail."""
    attn = layer(force_branch="win", w=19)
    x = tokens(20)
    difference = (attn(x) - dense(attn, x, "win")).abs().amax(dim=(0, 2))
    assert difference[:19].max() < 1e-11
    assert difference[19] > 1e-6


def test_compressed_branch_is_zero_before_the_first_full_block() -> None:
    attn = layer(force_branch="cmp")
    x = tokens(20).requires_grad_()
    y = attn(x)
    assert (y[:, : SMALL["l"] - 1] == 0).all()
    assert (y[:, SMALL["l"] - 1 :] != 0).any(dim=-1).all()
    assert (torch.autograd.grad(y[:, : SMALL["l"] - 1].sum(), x)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP64], ids=str)
@pytest.mark.parametrize("branch", [None, *BRANCHES])
@pytest.mark.parametrize("t", [0, 7, 8, 23, 24, 38])
def test_no_output_changes_with_a_later_token(branch: str | None, dtype: torch.dtype, t: int) -> None:
    attn = layer(dtype, force_branch=branch)
    x = tokens(40, dtype=dtype)
    other = x.clone()
    other[:, t + 1 :] = 3 * tokens(39 - t, dtype=dtype)
    before, after = attn(x), attn(other)
    assert torch.equal(before[:, : t + 1], after[:, : t + 1])
    assert not torch.equal(before[:, t + 1 :], after[:, t + 1 :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP64], ids=str)
@pytest.mark.parametrize("branch", [None, *BRANCHES])
@pytest.mark.parametrize("t", [7, 8, 23, 24, 38])
def test_no_gradient_reaches_a_later_token(branch: str | None, dtype: torch.dtype, t: int) -> None:
    attn = layer(dtype, force_branch=branch)
    x = tokens(40, dtype=dtype).requires_grad_()
    y = attn(x)
    (grad,) = torch.autograd.grad(y[:, : t + 1], x, torch.randn_like(y[:, : t + 1]))
    assert (grad[:, t + 1 :] == 0).all()
    assert (grad[:, : t + 1] != 0).any()


@pytest.mark.parametrize(
    ("branch", "ops"),
    [
        ("cmp", {"compress", "compressed"}),
        ("sel", {"compress", "compressed", "scores", "selected"}),
        ("win", {"sliding"}),
    ],
)
def test_a_pinned_gate_runs_what_its_branch_needs(branch: str, ops: set[str]) -> None:
    attn, x = layer(force_branch=branch), tokens(40)
    y, _ = attn(x, return_stats=True)
    router().counts.clear()
    z = attn(x)
    assert {op for op, _ in router().counts.calls} == ops
    assert torch.equal(z, y)
    z.sum().backward()
    trained = [p for p in attn.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    assert all(p.requires_grad == (branch == "cmp") for p in attn.phi_k.parameters())


def test_two_runs_give_the_same_bits() -> None:
    attn = layer(torch.float32)
    x = tokens(50, batch=2, dtype=torch.float32)
    assert_same_bits(with_gradients(attn, attn, x), with_gradients(attn, attn, x))


def test_a_nan_token_is_not_hidden() -> None:
    x = tokens(30)
    x[0, 12, 3] = float("nan")
    assert layer()(x)[0, 12:18].isnan().all()


# Packed and padded batches.


@given(lengths=document_lengths(70), config=configs(), seed=st.integers(0, 1000))
def test_packed_documents_are_the_documents_one_by_one(lengths: tuple[int, ...], config: NSAConfig, seed: int) -> None:
    """Outputs and all gradients; empty documents, single tokens and ones shorter than a block among them."""
    torch.manual_seed(seed)
    attn = NSAAttention(config).double()
    x = torch.randn(1, sum(lengths), config.dim, dtype=FP64)

    def separately(x: Tensor) -> Tensor:
        return torch.cat([attn(part) for part in x.split(list(lengths), dim=1) if part.shape[1]], dim=1)

    cu = offsets(lengths)
    got = with_gradients(attn, lambda x: attn(x, cu_seqlens=cu), x)
    assert_close(got, with_gradients(attn, separately, x), 1e-10)


def masks(batch: int, length: int) -> st.SearchStrategy[list[list[bool]]]:
    left = st.integers(0, length).map(lambda n: [False] * n + [True] * (length - n))
    right = st.integers(0, length).map(lambda n: [True] * n + [False] * (length - n))
    anywhere = st.lists(st.booleans(), min_size=length, max_size=length)
    return st.lists(st.one_of(left, right, anywhere), min_size=batch, max_size=batch)


@given(data=st.data(), length=st.integers(1, 40), variant=st.sampled_from(list(VARIANTS.values())))
def test_padded_rows_are_their_tokens_alone(data: st.DataObject, length: int, variant: dict[str, Any]) -> None:
    """Left, right or anywhere; outputs and all gradients. A pad's output is exactly 0, and so is its gradient."""
    mask = torch.tensor(data.draw(masks(2, length)))
    attn = layer(**variant)

    def separately(x: Tensor) -> Tensor:
        rows = []
        for row, real in zip(x, mask, strict=True):
            # Zeros that belong to the graph, for a row that is all padding.
            y = row * 0.0
            rows.append(y.index_put((real.nonzero()[:, 0],), attn(row[real][None])[0]) if real.any() else y)
        return torch.stack(rows)

    x = tokens(length, batch=2)
    got = with_gradients(attn, lambda x: attn(x, attention_mask=mask), x)
    assert (got["y"][~mask] == 0).all()
    assert (got["x"][~mask] == 0).all()
    assert_close(got, with_gradients(attn, separately, x), 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("content", [1.0, -1e4, 1e15, 1e30])
def test_what_padding_holds_changes_no_bit(content: float, dtype: torch.dtype) -> None:
    """Outputs, and the gradients of every parameter; 1e30 overflows the scores of any query that meets it."""
    attn = layer(dtype)
    x = tokens(30, batch=2, dtype=dtype)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, :11] = False
    mask[1, 21:] = False
    filled = x.masked_fill(~mask[..., None], content)
    clean = x.masked_fill(~mask[..., None], 0.0)
    got = with_gradients(attn, lambda x: attn(x, attention_mask=mask), filled)
    assert (got["y"][~mask] == 0).all()
    assert_same_bits(got, with_gradients(attn, lambda x: attn(x, attention_mask=mask), clean))


def test_a_mask_of_real_tokens_only_is_no_mask() -> None:
    attn = layer()
    x = tokens(30, batch=2)
    mask = torch.ones(2, 30, dtype=torch.bool)
    assert_same_bits(with_gradients(attn, lambda x: attn(x, attention_mask=mask), x), with_gradients(attn, attn, x))


# Positions.


# With "before" the MLP mixes rotated keys, and only a linear phi keeps a common rotation out of the scores.
RELATIVE = [v for v in VARIANTS.values() if v.get("compress_rope") != "before"]
RELATIVE.append({"compress_rope": "before", "phi": "mean"})


@given(offset=st.integers(0, 5000), variant=st.sampled_from(RELATIVE))
def test_a_shift_of_all_positions_changes_nothing(offset: int, variant: dict[str, Any]) -> None:
    """RoPE is relative: what is left is the rounding of larger angles."""
    attn = layer(**variant)
    x = tokens(30)
    torch.testing.assert_close(attn(x, position_offset=offset), attn(x), atol=1e-9, rtol=1e-9)


def test_position_offset_reaches_rope() -> None:
    """In fp32 a shift is visible as other roundings: the test above does not compare a thing with itself."""
    attn = layer(torch.float32)
    x = tokens(30, dtype=torch.float32)
    assert not torch.equal(attn(x, position_offset=777), attn(x))


@every_variant
def test_position_offset_may_differ_by_row(variant: dict[str, Any]) -> None:
    attn = layer(torch.float32, **variant)
    x = tokens(30, batch=3, dtype=torch.float32)
    shifts = torch.tensor([0, 5, 700])
    got = attn(x, position_offset=shifts)
    rows = [attn(row[None], position_offset=int(shift)) for row, shift in zip(x, shifts, strict=True)]
    torch.testing.assert_close(got, torch.cat(rows), atol=1e-6, rtol=1e-6)


def test_packed_documents_take_a_position_offset() -> None:
    attn = layer(torch.float32)
    x, cu = tokens(30, dtype=torch.float32), offsets((11, 19))
    got = attn(x, cu_seqlens=cu, position_offset=300)
    rows = [attn(part, position_offset=300) for part in x.split([11, 19], dim=1)]
    torch.testing.assert_close(got, torch.cat(rows, dim=1), atol=1e-6, rtol=1e-6)


def test_a_bf16_layer_far_out_is_as_good_as_at_the_start() -> None:
    attn = layer(torch.bfloat16)
    exact = copy.deepcopy(attn).double()
    x = tokens(30, dtype=torch.bfloat16)
    near, far = ((attn(x, position_offset=p).double() - exact(x.double())).abs().max() for p in (0, 100_000))
    assert far <= 4 * near


# The gate.


@every_variant
def test_gates_are_those_of_the_mlp(variant: dict[str, Any]) -> None:
    attn = layer(**variant)
    x = tokens(12, batch=2)
    _, stats = attn(x, return_stats=True)
    torch.testing.assert_close(stats.gates, gates_by_hand(attn, x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, FP64], ids=str)
def test_softmax_gates_sum_to_one_over_the_branches(dtype: torch.dtype) -> None:
    _, stats = layer(dtype, gate="softmax")(tokens(12, dtype=dtype), return_stats=True)
    torch.testing.assert_close(stats.gates.sum(dim=-1), torch.ones(1, 12, SMALL["n_heads"], dtype=dtype))


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_forced_branch_is_the_only_one_open(branch: str) -> None:
    _, stats = layer(force_branch=branch)(tokens(12), return_stats=True)
    assert stats.gate_mean == {name: float(name == branch) for name in BRANCHES}


def test_the_gates_last_layer_is_xavier_uniform_and_never_zeros() -> None:
    gate = layer(dim=64).gate
    for _ in range(2):
        weight = gate.outer.weight
        bound = math.sqrt(6 / sum(weight.shape))
        assert weight.abs().max() <= bound
        # A uniform draw of 288 numbers: each half of the range is well filled, and hardly anything lies at zero.
        assert (weight.abs() > bound / 2).double().mean() > 0.35
        assert (weight == 0).sum() == 0
        gate.reset_parameters()


# Training.


@every_variant
def test_each_parameter_row_gets_a_finite_nonzero_gradient(variant: dict[str, Any]) -> None:
    attn = layer(**variant)
    grads = with_gradients(attn, attn, tokens(60, batch=2))
    for name, grad in grads.items():
        assert grad.isfinite().all(), name
        assert (grad.flatten(1) != 0).any(dim=1).all() if grad.dim() > 1 else (grad != 0).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_as_close_to_fp32_as_a_layer_in_that_dtype(dtype: torch.dtype) -> None:
    """Every block is selected, so that no near tie can be decided differently."""
    attn = layer(torch.float32, n_sel=8)
    x = tokens(60, batch=2, dtype=torch.float32)
    exact = with_gradients(attn, attn, x)
    cast = copy.deepcopy(attn).to(dtype)
    plain = with_gradients(cast, cast, x.to(dtype))

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return attn(x)

    got = with_gradients(attn, autocast, x)
    assert got["y"].dtype == dtype
    for name, reference_value in exact.items():
        assert got[name].dtype == (dtype if name == "y" else torch.float32)
        allowed = 2 * (plain[name].float() - reference_value).abs().max()
        allowed += 4 * torch.finfo(dtype).eps * reference_value.abs().max()
        assert (got[name].float() - reference_value).abs().max() <= allowed, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_backward_under_autocast_is_backward_outside_it(dtype: torch.dtype) -> None:
    attn = layer(torch.float32)
    x = tokens(40, dtype=torch.float32)

    def run(backward_inside: bool) -> dict[str, Tensor]:
        attn.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = attn(x).float().square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return {name: p.grad.clone() for name, p in attn.named_parameters()}

    assert_close(run(backward_inside=True), run(backward_inside=False), 1e-2)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_autocast_does_not_reach_inside_the_ops(backend: str) -> None:
    """They say themselves what they accumulate in: the same inputs give the same bits."""
    q, k, v = torch.randn(1, 40, 4, 8), torch.randn(1, 40, 2, 8), torch.randn(1, 40, 2, 8)
    k_cmp, v_cmp = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    gates = torch.rand(1, 40, 4, 3)
    knobs = {"block": 8, "stride": 4, "backend": backend}

    def run() -> dict[str, Tensor]:
        o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, **knobs)
        indices = ops.select_blocks(q, k_cmp, lse, select_block=8, n_select=3, n_init=1, n_local=1, **knobs)
        o_sel, _ = ops.selected_attention(q, k, v, indices, select_block=8, backend=backend)
        o_win, _ = ops.sliding_attention(q, k, v, window=6, backend=backend)
        o = ops.combine(o_cmp, o_sel, o_win, gates, backend=backend)
        return {"o_cmp": o_cmp, "lse": lse, "indices": indices, "o_sel": o_sel, "o_win": o_win, "o": o}

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(run(), plain)


def test_activation_checkpointing_changes_no_bit() -> None:
    attn = layer(torch.float32)
    x = tokens(40, batch=2, dtype=torch.float32)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 30:] = False
    plain = with_gradients(attn, lambda x: attn(x, attention_mask=mask), x)
    again = with_gradients(attn, lambda x: checkpoint(attn, x, attention_mask=mask, use_reentrant=False), x)
    assert_same_bits(again, plain)


def test_state_dict_round_trip_restores_the_layer() -> None:
    attn = layer()
    file = io.BytesIO()
    torch.save(attn.state_dict(), file)
    file.seek(0)
    other = layer()
    x = tokens(30)
    assert not torch.equal(other(x), attn(x))
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(other(x), attn(x))


def test_state_dict_holds_parameters_only() -> None:
    """No frequencies, no cache: nothing that a cast to bf16 could round."""
    attn = layer()
    assert attn.state_dict().keys() == dict(attn.named_parameters()).keys()
    assert list(attn.buffers()) == []


def test_a_deep_copy_shares_nothing() -> None:
    attn = layer()
    x = tokens(30)
    expected = attn(x).detach()
    twin = copy.deepcopy(attn)
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    assert torch.equal(attn(x), expected)
    assert not torch.equal(twin(x), expected)


# torch.compile.


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(attn: NSAAttention, backend: str = "aot_eager") -> Callable[..., Tensor]:
    return torch.compile(attn, fullgraph=True, backend=backend)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("batch", ["plain", "packed", "padded"])
def test_compiled_layer_equals_eager(batch: str) -> None:
    """In one graph; outputs and all gradients."""
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, :9] = False
    kwargs = {"plain": {}, "packed": {"cu_seqlens": offsets((20, 1, 16))}, "padded": {"attention_mask": mask}}[batch]
    attn = layer()
    x = tokens(37, batch=1 if batch == "packed" else 2)
    run = compiled(attn)
    got = with_gradients(attn, lambda x: run(x, **kwargs), x)
    assert_close(got, with_gradients(attn, lambda x: attn(x, **kwargs), x), 1e-11)


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


# Statistics.


def test_gate_figures_are_plain_averages() -> None:
    _, stats = layer()(tokens(12, batch=2), return_stats=True)
    for branch, name in enumerate(BRANCHES):
        values = stats.gates[..., branch].flatten().tolist()
        assert stats.gate_mean[name] == pytest.approx(sum(values) / len(values), abs=1e-6)
        bits = [-g * math.log2(g) - (1 - g) * math.log2(1 - g) for g in values]
        assert stats.gate_entropy[name] == pytest.approx(sum(bits) / len(bits), abs=1e-5)


def test_a_forced_gate_has_no_entropy() -> None:
    _, stats = layer(force_branch="sel")(tokens(12), return_stats=True)
    assert stats.gate_entropy == pytest.approx(dict.fromkeys(BRANCHES, 0.0), abs=1e-4)


@pytest.mark.parametrize("lengths", [None, (20, 1, 29)], ids=["plain", "packed"])
def test_selection_and_reads_are_counted_query_by_query(lengths: tuple[int, ...] | None) -> None:
    attn = layer(torch.float32)
    c = attn.config
    x = tokens(50, batch=1 if lengths else 2, dtype=torch.float32)
    _, stats = attn(x, cu_seqlens=None if lengths is None else offsets(lengths), return_stats=True)
    position = [t for n in lengths or (50,) for t in range(n)]
    distances: Counter[int] = Counter()
    for row in stats.indices.tolist():
        for t, groups in zip(position, row, strict=True):
            distances.update(t // c.l_sel - block for group in groups for block in group if block >= 0)
    counted = stats.selected_distance.tolist()
    assert counted == [distances[i] for i in range(len(counted))]
    assert sum(counted) == distances.total()
    reads = [
        read
        for row in stats.indices.tolist()
        for t, groups in zip(position, row, strict=True)
        for read in keys_read(c, t, groups)
    ]
    assert stats.reads_per_step == pytest.approx(sum(reads) / len(reads))


def keys_read(c: NSAConfig, t: int, groups: list[list[int]]) -> list[int]:
    """How many keys query `t` reads in each group, counted one by one from the indices of the selected blocks."""
    compressed = [i for i in range(t + 1) if i * c.d + c.l - 1 <= t]
    window = [i for i in range(t + 1) if i > t - c.w]
    selected = [
        {i for block in blocks if block >= 0 for i in range(block * c.l_sel, (block + 1) * c.l_sel) if i <= t}
        for blocks in groups
    ]
    return [len(compressed) + len(tokens) + len(window) for tokens in selected]


@given(st.data())
def test_reads_per_step_is_what_the_last_query_reads(data: st.DataObject) -> None:
    d = data.draw(st.integers(1, 3))
    n_init, n_local = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    knobs = {
        "d": d,
        "l": d * data.draw(st.integers(1, 3)),
        "l_sel": d * data.draw(st.integers(1, 4)),
        "n_sel": max(1, n_init + n_local) + data.draw(st.integers(0, 2)),
        "w": data.draw(st.integers(1, 20)),
    }
    c = NSAConfig(dim=16, n_heads=4, n_kv_groups=2, d_k=4, d_v=4, n_init=n_init, n_local=n_local, **knobs)
    length = data.draw(st.integers(1, 40))
    _, stats = NSAAttention(c)(torch.randn(1, length, 16), return_stats=True)
    read = max(keys_read(c, length - 1, stats.indices[0, -1].tolist()))
    said = c.reads_per_step(length)
    formula = n_compressed(length, c.l, c.d) + c.n_sel * c.l_sel + min(c.w, length)
    assert read <= said <= formula
    # Without local blocks the scores decide whether the query's own, partial block is one of the selected.
    own_is_certain = n_local > 0 or c.n_sel * c.l_sel >= length
    assert read == said or not own_is_certain


def test_statistics_of_a_padded_batch_are_those_of_its_tokens() -> None:
    attn = layer()
    x = tokens(30)
    mask = torch.ones(1, 30, dtype=torch.bool)
    mask[:, :13] = False
    _, padded = attn(x, attention_mask=mask, return_stats=True)
    _, alone = attn(x[:, 13:], return_stats=True)
    assert padded.gate_mean == pytest.approx(alone.gate_mean)
    assert padded.gate_entropy == pytest.approx(alone.gate_entropy)
    assert padded.selected_distance.tolist() == alone.selected_distance.tolist()
    assert padded.reads_per_step == pytest.approx(alone.reads_per_step)


class Recorder(TorchDispatchMode):
    """Every torch op that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_statistic_is_computed_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = layer()
    x = tokens(30)
    # The first call makes RoPE's table.
    attn(x)
    with Recorder() as off:
        y = attn(x)
    with Recorder() as on:
        same, stats = attn(x, return_stats=True)
    assert torch.equal(y, same)
    assert [name for name in on.names if "detach" not in name] == [name for name in off.names if "detach" not in name]
    with Recorder() as read:
        assert stats.gate_mean
    assert read.names

    def refuse(*args: Any) -> NSAStats:
        raise AssertionError("statistics made though not asked for")

    monkeypatch.setattr(nsa.attention, "NSAStats", refuse)
    assert torch.equal(attn(x), y)
    with pytest.raises(AssertionError, match="not asked for"):
        attn(x, return_stats=True)


def test_statistics_keep_no_graph() -> None:
    _, stats = layer()(tokens(12), return_stats=True)
    assert not stats.gates.requires_grad
    assert not stats.indices.requires_grad


# Wrong arguments.


def whole_mask(batch: int, length: int) -> Tensor:
    return torch.ones(batch, length, dtype=torch.bool)


WRONG = {
    "x_two_dimensions": (r"x\.shape", lambda a, x: a(x[0])),
    "x_empty": (r"x\.shape", lambda a, x: a(x[:, :0])),
    "x_other_dim": (r"x\.shape\[2\]", lambda a, x: a(x[..., :-1])),
    "mask_dtype": (r"attention_mask\.dtype", lambda a, x: a(x, attention_mask=torch.ones(2, 9))),
    "mask_shape": (r"attention_mask\.shape", lambda a, x: a(x, attention_mask=whole_mask(2, 8))),
    "mask_of_one_row": (r"attention_mask\.shape", lambda a, x: a(x, attention_mask=whole_mask(1, 9))),
    "mask_and_documents": (
        "attention_mask",
        lambda a, x: a(x[:1], attention_mask=whole_mask(1, 9), cu_seqlens=offsets((9,))),
    ),
    "documents_in_two_rows": (r"x\.shape\[0\]", lambda a, x: a(x, cu_seqlens=offsets((9,)))),
    "documents_dtype": (r"cu_seqlens\.dtype", lambda a, x: a(x[:1], cu_seqlens=offsets((9,)).long())),
    "documents_total": (r"cu_seqlens\[-1\]", lambda a, x: a(x[:1], cu_seqlens=offsets((4, 4)))),
    "documents_order": ("cu_seqlens", lambda a, x: a(x[:1], cu_seqlens=torch.tensor([0, 5, 3, 9]).int())),
    "documents_start": (r"cu_seqlens\[0\]", lambda a, x: a(x[:1], cu_seqlens=torch.tensor([1, 9]).int())),
    "cache_of_another_config": ("cache", lambda a, x: a(x, cache=layer(w=7).new_cache(2, 20))),
    "cache_of_other_rows": (r"x\.shape\[0\]", lambda a, x: a(x, cache=a.new_cache(3, 20))),
    "cache_and_documents": ("cache", lambda a, x: a(x[:1], cache=a.new_cache(1, 20), cu_seqlens=offsets((9,)))),
    "cache_dtype": ("dtype", lambda a, x: a(x, cache=a.new_cache(2, 20, dtype=torch.float32))),
    "offset_of_other_rows": ("position_offset", lambda a, x: a(x, position_offset=torch.arange(3))),
}


@pytest.mark.parametrize(("name", "call"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_a_value_error_that_names_it(name: str, call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=f"{name}.*accepted"):
        call(layer(), tokens(9, batch=2))


def test_under_autocast_a_cache_must_have_the_autocast_dtype() -> None:
    attn = layer(torch.float32)
    x = tokens(20, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"cache.dtype is torch.float32.*accepted.*bfloat16"):
            attn(x, cache=attn.new_cache(1, 20))
        cache = attn.new_cache(1, 20, dtype=torch.bfloat16)
        got = torch.cat([attn(x[:, :9], cache=cache), attn(x[:, 9:], cache=cache)], dim=1)
        whole = attn(x)
    torch.testing.assert_close(got, whole, atol=2e-2, rtol=2e-2)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="backend is 'fast'"):
        layer(backend="fast")


def test_strict_refuses_what_is_not_finite() -> None:
    x = tokens(9)
    x[0, 3, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        layer(strict=True)(x)


WRONG_INPUT = {
    "x-none": ("x", lambda a: a(None)),
    "x-wider-dtype": ("x.dtype", lambda a: a(tokens(9).float())),
    "x-integer": ("x.dtype", lambda a: a(torch.ones(1, 9, a.config.dim, dtype=torch.long))),
    "x-device": ("x.device", lambda a: a(tokens(9).to("meta"))),
    "mask-list": ("attention_mask", lambda a: a(tokens(9), attention_mask=[[1]])),
    "cache-text": ("cache", lambda a: a(tokens(9), cache="c")),
    "offset-float": ("position_offset", lambda a: a(tokens(9), position_offset=1.5)),
    "offset-bool": ("position_offset", lambda a: a(tokens(9), position_offset=True)),
    "offset-text": ("position_offset", lambda a: a(tokens(9), position_offset="3")),
    "offset-float-tensor": ("position_offset", lambda a: a(tokens(9), position_offset=torch.tensor([1.5]))),
    "offset-negative": ("position_offset", lambda a: a(tokens(9, 2), position_offset=torch.tensor([-5, 3]))),
    "offset-device": ("position_offset", lambda a: a(tokens(9), position_offset=torch.ones(1).int().to("meta"))),
    "config-dict": ("config", lambda a: NSAAttention({"dim": 3})),
}


@pytest.mark.parametrize(("name", "call"), WRONG_INPUT.values(), ids=WRONG_INPUT.keys())
def test_wrong_layer_input_is_a_value_error_that_names_it(name: str, call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=f"{name}.*accepted"):
        call(layer())


@pytest.mark.parametrize(
    ("named", "layer_dtype", "dtype"),
    [("x.dtype", torch.float32, FP64), ("the layer's dtype", FP64, torch.float32)],
    ids=["x", "layer"],
)
def test_fp64_under_autocast_is_refused_by_name(named: str, layer_dtype: torch.dtype, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=f"{named} is torch.float64; accepted"):
        layer().to(layer_dtype)(tokens(9).to(dtype))


def test_statistics_of_a_batch_that_is_all_padding_are_zero() -> None:
    mask = torch.zeros(1, 9, dtype=torch.bool)
    _, stats = layer()(tokens(9), attention_mask=mask, return_stats=True)
    nothing = dict.fromkeys(("cmp", "sel", "win"), 0.0)
    assert stats.gate_mean == nothing
    assert stats.gate_entropy == nothing
    assert stats.selected_distance.sum() == 0
    assert stats.reads_per_step == 0


@pytest.mark.usefixtures("_fresh_compiler")
def test_the_reference_compiles_with_one_head_a_group() -> None:
    attn = layer(n_heads=2, n_kv_groups=2, backend="reference")
    x = tokens(40)
    run = compiled(attn)
    assert_close(with_gradients(attn, run, x), with_gradients(attn, attn, x), 1e-11)


@pytest.mark.usefixtures("_fresh_compiler")
def test_offsets_a_row_do_not_compile_anew_for_every_batch() -> None:
    attn = layer()
    frames = CompileCounter()
    run = torch.compile(attn, fullgraph=True, backend=frames)
    for batch in (2, 3, 5, 4, 7):
        x, offset = tokens(20, batch=batch), torch.arange(batch)
        torch.testing.assert_close(run(x, position_offset=offset), attn(x, position_offset=offset))
    assert frames.frame_count <= 2


def test_strict_layers_compile_too() -> None:
    config = NSAConfig(dim=32, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, strict=True)
    attn = NSAAttention(config)
    x = torch.randn(1, 70, 32)
    torch.testing.assert_close(torch.compile(attn, fullgraph=True, backend="eager")(x), attn(x))


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_dropped_branch_changes_nothing(branch: str, gate: str) -> None:
    """Its values get no gradient, and its gate is 0."""
    attn = layer(drop_branch=branch, gate=gate)
    y, stats = attn(tokens(40), return_stats=True)
    y.square().sum().backward()
    index = BRANCHES.index(branch)
    assert (stats.gates[..., index] == 0).all()
    assert (stats.gates[..., [i for i in range(3) if i != index]] > 0).all()
    per_branch = attn.v_proj.weight.grad.unflatten(0, (3, -1))
    assert [bool((part != 0).any()) for part in per_branch] == [i != index for i in range(3)]
    assert all(p.grad.isfinite().all() for p in attn.parameters())


def test_a_gate_bias_opens_the_gates_at_the_start() -> None:
    open_, closed = (layer(gate_bias=bias)(tokens(40), return_stats=True)[1].gate_mean for bias in (3.0, -3.0))
    assert min(open_.values()) > 0.8
    assert max(closed.values()) < 0.2
