"""NSAAttention: against the reference put together by hand, against dense attention, and what a layer promises."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_bits, document_lengths, offsets
from hypothesis import given
from hypothesis import strategies as st
from layers import (
    FP64,
    SMALL,
    VARIANTS,
    configs,
    every_variant,
    gates_by_hand,
    keys_by_hand,
    layer,
    layer_by_hand,
    tokens,
    with_gradients,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa import NSAAttention, NSAConfig, ops
from nsa.backends.routing import router
from nsa.config import BRANCHES

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
    """Forward and every gradient, whatever the hyperparameters."""
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
    ("branch", "calls"),
    [
        ("cmp", {"compress": 2, "compressed": 1}),
        # No values are compressed: of the compressed branch, only the LSE is needed.
        ("sel", {"compress": 1, "compressed": 1, "scores": 1, "selected": 1}),
        ("win", {"sliding": 1}),
    ],
)
def test_a_pinned_gate_runs_what_its_branch_needs(branch: str, calls: dict[str, int]) -> None:
    attn, x = layer(force_branch=branch), tokens(40)
    y, _ = attn(x, return_stats=True)
    router().counts.clear()
    z = attn(x)
    assert {op: n for (op, _), n in router().counts.calls.items()} == calls
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


# Varlen and padded batches.


@given(lengths=document_lengths(70), config=configs(), seed=st.integers(0, 1000))
def test_varlen_documents_are_the_documents_one_by_one(lengths: tuple[int, ...], config: NSAConfig, seed: int) -> None:
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


def test_varlen_documents_take_a_position_offset() -> None:
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
    if attn.config.compress_rope == "before":
        # Added to every compressed key alike, which no softmax sees.
        assert grads.pop("phi_k.outer.bias").abs().max() < 1e-12
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
    hyperparameters = {"block": 8, "stride": 4, "backend": backend}

    def run() -> dict[str, Tensor]:
        o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, **hyperparameters)
        indices = ops.select_blocks(q, k_cmp, lse, select_block=8, n_select=3, n_init=1, n_local=1, **hyperparameters)
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("phi", ["mean", "mlp"])
def test_a_traced_layer_computes_what_the_layer_does(phi: str) -> None:
    attn = layer(phi=phi)
    traced = torch.jit.trace(attn, tokens(37), check_trace=False)
    x = tokens(37)
    # A size is a tensor there, and the scale that follows from it in fp32.
    torch.testing.assert_close(traced(x), attn(x), atol=1e-7, rtol=1e-7)


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
