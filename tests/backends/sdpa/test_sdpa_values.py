"""What no backend may hide or leak: causality to the bit, determinism, values that are not finite or huge."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    BRANCHES,
    Case,
    assert_norms_close,
    assert_same_bits,
    attend,
    cases,
    mean_compress,
    random_inputs,
)
from hypothesis import given
from hypothesis import strategies as st
from test_sdpa import LOW_PRECISION, name_of, reference_results, sdpa_attend, sdpa_results, select, short_case
from torch import Tensor

from nsa import ops, reference


def shake(x: Tensor, first: int) -> Tensor:
    """Other values from row `first` on, large ones."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(x[:, first:].shape, generator=generator, dtype=torch.float64).to(x.dtype)
    return torch.cat([x[:, :first], 50 * noise], dim=1)


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_PRECISION], ids=name_of)
@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases(), data=st.data())
def test_later_tokens_do_not_change_an_output_by_one_bit(
    branch: str, dtype: torch.dtype, case: Case, data: st.DataObject
) -> None:
    t = data.draw(st.integers(0, case.length - 1), label="t")
    inputs = random_inputs(case, dtype)
    q, k, v = inputs.of(branch)
    first = case.count_compressed(t + 1) if branch == "compressed" else t + 1
    before = sdpa_attend(branch, inputs, case)
    after = sdpa_attend(branch, inputs, case, (shake(q, t + 1), shake(k, first), shake(v, first)))
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, : t + 1], y[:, : t + 1])


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_PRECISION], ids=name_of)
@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases(), data=st.data())
def test_earlier_outputs_give_later_tokens_no_gradient(
    branch: str, dtype: torch.dtype, case: Case, data: st.DataObject
) -> None:
    t = data.draw(st.integers(0, case.length - 1), label="t")
    inputs = random_inputs(case, dtype)
    leaves = [x.clone().requires_grad_() for x in inputs.of(branch)]
    first = case.count_compressed(t + 1) if branch == "compressed" else t + 1
    o, lse = sdpa_attend(branch, inputs, case, tuple(leaves))
    do, dlse = torch.zeros_like(o), torch.zeros_like(lse)
    do[:, : t + 1], dlse[:, : t + 1] = 1.0, 1.0
    dq, dk, dv = torch.autograd.grad((o, lse), leaves, (do, dlse))
    assert not dq[:, t + 1 :].any()
    assert not dk[:, first:].any()
    assert not dv[:, first:].any()


@given(case=cases(), data=st.data())
def test_later_tokens_do_not_change_a_selection(case: Case, data: st.DataObject) -> None:
    t = data.draw(st.integers(0, case.length - 1), label="t")
    inputs = random_inputs(case, torch.float32)
    shaken = inputs.but(q=shake(inputs.q, t + 1), k_cmp=shake(inputs.k_cmp, case.count_compressed(t + 1)))
    assert torch.equal(select(inputs, case)[:, : t + 1], select(shaken, case)[:, : t + 1])


def whole_attention(case: Case, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """All five ops on raw keys shared by the branches, compressed by their mean."""
    k_cmp, v_cmp = mean_compress(k, case), mean_compress(v, case)
    options = {"backend": "sdpa", "cu_seqlens": case.cu_seqlens}
    o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, **case.compression, **options)
    indices = ops.select_blocks(q, k_cmp, lse, **case.selection, **options)
    o_sel, _ = ops.selected_attention(q, k, v, indices, select_block=case.select_block, **options)
    o_win, _ = ops.sliding_attention(q, k, v, window=case.window, **options)
    return ops.combine(o_cmp, o_sel, o_win, gates, backend="sdpa")


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_PRECISION], ids=name_of)
@pytest.mark.parametrize("t", [1, 20, 64, 98])
def test_whole_attention_from_raw_tokens_is_causal_to_the_bit(t: int, dtype: torch.dtype) -> None:
    case = Case(length=100, groups=2, heads=3, n_select=4)
    inputs = random_inputs(case, dtype)
    q, k, v = inputs.of("sliding")
    before = whole_attention(case, q, k, v, inputs.gates)
    after = whole_attention(case, shake(q, t + 1), shake(k, t + 1), shake(v, t + 1), inputs.gates)
    assert torch.equal(before[:, : t + 1], after[:, : t + 1])
    assert not torch.equal(before[:, t + 1 :], after[:, t + 1 :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@given(case=short_case)
def test_two_runs_of_forward_and_backward_give_the_same_bits(dtype: torch.dtype, case: Case) -> None:
    inputs = random_inputs(case, dtype)
    for branch in BRANCHES:
        assert_same_bits(sdpa_results(branch, inputs, case), sdpa_results(branch, inputs, case))
    assert torch.equal(select(inputs, case), select(inputs, case))


@pytest.mark.parametrize("branch", BRANCHES)
def test_nan_key_reaches_exactly_the_rows_that_see_it(branch: str) -> None:
    case = Case(length=64, groups=2, heads=2)
    inputs = random_inputs(case, torch.float32)
    inputs.indices[:] = torch.tensor([0, 1, 2, -1])
    q, k, v = inputs.of(branch)
    k = k.clone()
    k[0, 3, 1, 2] = math.nan
    # Block 3 of 8 tokens at stride 4 is complete at 19; token 3 is in block 0, and 16 tokens are a window.
    sees = {"compressed": slice(19, 64), "selected": slice(3, 64), "sliding": slice(3, 19)}[branch]
    for x in sdpa_attend(branch, inputs, case, (q, k, v)):
        tainted = x.isnan()
        expected = torch.zeros_like(tainted)
        expected[:, sees, 2:] = True
        assert torch.equal(tainted, expected)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_nan_in_a_visible_value_reaches_every_row_that_sees_it(branch: str) -> None:
    case = Case(length=64, groups=2, heads=2)
    inputs = random_inputs(case, torch.float32)
    inputs.indices[:] = torch.tensor([0, 1, 2, -1])
    q, k, v = inputs.of(branch)
    v = v.clone()
    v[0, 3, 1, 2] = math.nan
    sees = {"compressed": slice(19, 64), "selected": slice(3, 64), "sliding": slice(3, 19)}[branch]
    o, _ = sdpa_attend(branch, inputs, case, (q, k, v))
    assert o[:, sees, 2:, 2].isnan().all()
    assert o[:, :, :2].isfinite().all(), "the other group does not read it"


@pytest.mark.parametrize("branch", BRANCHES)
def test_an_infinite_score_is_not_hidden(branch: str) -> None:
    case = Case(length=24, heads=2)
    inputs = random_inputs(case, torch.float32)
    inputs.indices[:] = torch.tensor([0, 1, 2, -1])
    q, k, v = inputs.of(branch)
    k, q = k.clone(), q.abs()
    k[0, 0] = math.inf
    o, _ = sdpa_attend(branch, inputs, case, (q, k, v))
    assert not o[:, 7:9].isfinite().any()


@pytest.mark.parametrize("branch", BRANCHES)
def test_huge_negative_scores_do_not_let_a_query_see_the_future(branch: str) -> None:
    """A finite score may be lower than any finite number that could mark a hidden key."""
    case = Case(length=24, heads=2)
    inputs = random_inputs(case, torch.float32)
    inputs.indices[:] = torch.tensor([0, 1, 2, -1])
    q, k, v = inputs.of(branch)
    q, k, t = torch.full_like(q, 1e16), torch.full_like(k, -1e16), 12
    first = case.count_compressed(t + 1) if branch == "compressed" else t + 1
    o, lse = sdpa_attend(branch, inputs, case, (q, k, v))
    shaken, _ = sdpa_attend(branch, inputs, case, (q, k, shake(v, first)))
    assert torch.equal(o[:, : t + 1], shaken[:, : t + 1])
    torch.testing.assert_close(lse, attend(reference, branch, inputs, case, (q, k, v))[1])


@pytest.mark.parametrize("score", [0.0, 1e2, 1e4, -1e4])
@pytest.mark.parametrize("branch", BRANCHES)
def test_output_is_an_average_of_values_for_any_score_size(branch: str, score: float) -> None:
    """Keys that are all alike share the weight evenly: of values that are all one, the average is one."""
    case = Case(length=40, heads=2, d_k=1, d_v=3)
    inputs = random_inputs(case, torch.float32)
    inputs.indices[:] = torch.tensor([0, 1, 2, 4])
    q, k, v = (torch.ones_like(x) for x in inputs.of(branch))
    o, lse = sdpa_attend(branch, inputs, case, (q * score, k, v))
    expected = (~lse.isinf()).float()[..., None].expand_as(o)
    torch.testing.assert_close(o, expected, atol=4 * torch.finfo(torch.float32).eps, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_PRECISION], ids=name_of)
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_row_that_sees_nothing_is_zero_and_has_zero_gradient(branch: str, dtype: torch.dtype) -> None:
    documents = (5, 24, 0, 1)
    case = Case(length=30, documents=documents, groups=2, heads=2)
    inputs = random_inputs(case, dtype)
    inputs.indices[:, 10:20] = -1
    # The first document has no whole block, the second its first at its eighth token.
    empty = {"compressed": [*range(12), 29], "selected": list(range(10, 20)), "sliding": []}[branch]
    got = sdpa_results(branch, inputs, case)
    assert not got["o"][:, empty].any()
    assert got["lse"][:, empty].eq(-math.inf).all()
    assert not got["dq"][:, empty].any()
    for name in ("o", "dq", "dk", "dv"):
        assert got[name].isfinite().all(), f"{name} has an infinity or a NaN"
    if branch != "selected":
        assert got["lse"].isinf().sum() == len(empty) * case.n_heads


def test_lse_of_a_sequence_without_blocks_is_differentiable() -> None:
    case = Case(length=5, block=8)
    inputs = random_inputs(case)
    _, lse = sdpa_attend("compressed", inputs.but(q=inputs.q.requires_grad_()), case)
    lse.backward(torch.ones_like(lse))
    assert inputs.q.grad is not None
    assert not inputs.q.grad.any()


def test_large_scores_do_not_overflow() -> None:
    case = Case(length=40, groups=2, heads=2)
    inputs = random_inputs(case, torch.float32)
    for branch in BRANCHES:
        q, k, v = inputs.of(branch)
        got = sdpa_attend(branch, inputs, case, (q * 1000, k, v))
        expected = attend(
            reference, branch, inputs.to(torch.float64), case, tuple(map(Tensor.double, (q * 1000, k, v)))
        )
        torch.testing.assert_close(got[0].double(), expected[0], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(got[1].double(), expected[1], atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("documents", [None, (120, 1, 79)], ids=["fixed", "varlen"])
@pytest.mark.parametrize("size", [30, 1e2, 1e3, 6e4])
@pytest.mark.parametrize("branch", BRANCHES)
def test_gradients_of_large_scores_are_as_exact_as_plain_torchs(
    branch: str, size: float, documents: tuple[int, ...] | None
) -> None:
    """A log-sum-exp of 500 is rounded by 3e-5: probabilities made from it alone would all be off by as much."""
    case = Case(length=200, documents=documents, groups=2, heads=3, d_k=16, d_v=16, n_select=6, window=64)
    inputs = random_inputs(case, torch.float32)
    inputs = inputs.but(q=inputs.q * size)
    computed = (
        sdpa_results(branch, inputs, case),
        reference_results(branch, inputs.to(torch.float64), case),
        reference_results(branch, inputs, case),
    )
    # Of many elements: a single one's error is that of its scores, which is a matter of luck.
    assert_norms_close(*({name: x[name] for name in ("o", "dq", "dk", "dv")} for x in computed))
