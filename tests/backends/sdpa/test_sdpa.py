"""The path that runs everywhere, `backend="sdpa"`, against the specification."""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType
from unittest import mock

import pytest
import torch
from helpers import (
    BRANCHES,
    Case,
    Inputs,
    assert_close,
    assert_within_derived_tolerance,
    attend,
    cases,
    random_inputs,
    results,
    term_sizes,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa import ops, reference
from nsa.backends.sdpa import layout
from nsa.testing import tolerance

TIGHT = 1e-10
LOW_PRECISION = [torch.float32, torch.bfloat16, torch.float16]
any_case = st.one_of(cases(), cases(varlen=True))
short_case = st.one_of(cases(max_length=70), cases(max_length=70, varlen=True))

sdpa_results = partial(results, ops, backend="sdpa")
sdpa_attend = partial(attend, ops, backend="sdpa")
reference_results = partial(results, reference)


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


# Equal to the reference.


@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases())
def test_a_branch_is_the_reference_in_fp64(branch: str, case: Case) -> None:
    inputs = random_inputs(case)
    assert_close(sdpa_results(branch, inputs, case), reference_results(branch, inputs, case), TIGHT)


@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases(varlen=True))
def test_a_varlen_branch_is_the_reference_in_fp64(branch: str, case: Case) -> None:
    inputs = random_inputs(case)
    assert_close(sdpa_results(branch, inputs, case), reference_results(branch, inputs, case), TIGHT)


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=name_of)
@pytest.mark.parametrize("branch", BRANCHES)
@given(case=any_case)
def test_a_branch_is_as_exact_as_plain_torch_in_its_dtype(branch: str, dtype: torch.dtype, case: Case) -> None:
    inputs = random_inputs(case, dtype)
    assert_within_derived_tolerance(
        sdpa_results(branch, inputs, case),
        reference_results(branch, inputs.to(torch.float64), case),
        reference_results(branch, inputs, case),
        term_sizes(reference, branch, inputs, case),
    )


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("branch", BRANCHES)
def test_any_number_of_heads_per_group_runs(branch: str, heads: int) -> None:
    case = Case(length=67, batch=2, groups=2, heads=heads, d_k=6, d_v=3)
    inputs = random_inputs(case)
    assert_close(sdpa_results(branch, inputs, case), reference_results(branch, inputs, case), TIGHT)


@pytest.mark.parametrize("length", [1, 2, 31])
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_sequence_shorter_than_every_block_runs(branch: str, length: int) -> None:
    case = Case(length=length, groups=2, heads=3, d_k=4, d_v=3, block=32, stride=16, select_block=64, window=512)
    inputs = random_inputs(case)
    assert_close(sdpa_results(branch, inputs, case), reference_results(branch, inputs, case), TIGHT)


@pytest.mark.parametrize("documents", [None, (17, 1, 0, 12)])
def test_a_selection_block_costs_no_more_than_the_keys_there_are(documents: tuple[int, ...] | None) -> None:
    """No machine has room for a block of this width."""
    case = Case(length=30, documents=documents, groups=2, heads=2, select_block=32)
    inputs = random_inputs(case)
    got = sdpa_results("selected", inputs, case.but(select_block=1 << 50))
    assert_close(got, reference_results("selected", inputs, case), TIGHT)


@pytest.mark.parametrize("documents", [None, (17, 1, 0, 12)])
def test_selection_block_larger_than_sequence_costs_no_more(documents: tuple[int, ...] | None) -> None:
    case = Case(length=30, documents=documents, groups=2, heads=2, select_block=32)
    inputs = random_inputs(case)
    q, k_cmp, _ = inputs.of("compressed")
    _, lse = reference.compressed_attention(*inputs.of("compressed"), **case.compression, cu_seqlens=case.cu_seqlens)
    options = {**case.compression, "n_select": 3, "n_init": 1, "n_local": 2, "cu_seqlens": case.cu_seqlens}
    selected = [
        reference.select_blocks(q, k_cmp, lse, select_block=32, **options),
        ops.select_blocks(q, k_cmp, lse, select_block=1 << 50, backend="sdpa", **options),
    ]
    assert torch.equal(*selected)


def test_the_papers_hyperparameters_and_head_dims_run() -> None:
    case = Case(length=700, groups=1, heads=2, d_k=24, d_v=16, block=32, stride=16, select_block=64, n_select=8)
    case = case.but(window=512)
    inputs = random_inputs(case)
    for branch in BRANCHES:
        assert_close(sdpa_results(branch, inputs, case), reference_results(branch, inputs, case), TIGHT)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_given_scale_is_used(branch: str) -> None:
    case = Case(length=40, groups=2, heads=2)
    inputs = random_inputs(case)
    got = sdpa_results(branch, inputs, case, scale=0.11)
    assert_close(got, reference_results(branch, inputs, case, scale=0.11), TIGHT)


@pytest.mark.parametrize("branch", BRANCHES)
def test_inputs_may_be_strided_in_all_but_the_last_dimension(branch: str) -> None:
    case = Case(length=40, batch=2, groups=2, heads=2)
    inputs = random_inputs(case)
    head_major = inputs.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    assert not head_major.q.is_contiguous()
    # `results` clones its leaves, which keeps their strides.
    assert_close(sdpa_results(branch, head_major, case), reference_results(branch, inputs, case), TIGHT)


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_PRECISION], ids=name_of)
@given(case=cases(max_length=40))
def test_combine_is_as_exact_as_plain_torch_in_its_dtype(dtype: torch.dtype, case: Case) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.length, case.n_heads)
    tensors = [torch.randn(*shape, case.d_v, generator=generator).to(dtype) for _ in range(3)]
    tensors.append(torch.randn(*shape, 3, generator=generator).to(dtype))
    do = torch.randn(*shape, case.d_v, generator=generator).to(dtype)

    def mixed(module: ModuleType, tensors: list[Tensor], do: Tensor, **options: str) -> dict[str, Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        o = module.combine(*leaves, **options)
        grads = torch.autograd.grad(o, leaves, do)
        return {"o": o, **dict(zip(("d_cmp", "d_sel", "d_win", "d_gates"), grads, strict=True))}

    wide, wide_do = [x.double() for x in tensors], do.double()
    # Of absolute values every sum is as large as its terms.
    sizes = {name: float(x.max()) for name, x in mixed(reference, [x.abs() for x in wide], wide_do.abs()).items()}
    actual, plain = mixed(ops, tensors, do, backend="sdpa"), mixed(reference, tensors, do)
    assert_within_derived_tolerance(actual, mixed(reference, wide, wide_do), plain, sizes)


# Block selection.


def compressed_lse(inputs: Inputs, case: Case, **options: Tensor) -> Tensor:
    return attend(reference, "compressed", inputs, case, **options)[1]


def importance_of(inputs: Inputs, case: Case) -> Tensor:
    options = {**case.compression, "select_block": case.select_block, "cu_seqlens": case.cu_seqlens}
    return reference.selection_importance(inputs.q, inputs.k_cmp, compressed_lse(inputs, case), **options)


def select(inputs: Inputs, case: Case, **options: object) -> Tensor:
    options.setdefault("cu_seqlens", case.cu_seqlens)
    lse = compressed_lse(inputs, case, **{k: v for k, v in options.items() if isinstance(v, Tensor)})
    return ops.select_blocks(inputs.q, inputs.k_cmp, lse, **case.selection, backend="sdpa", **options)


def reference_selection(inputs: Inputs, case: Case) -> Tensor:
    lse = compressed_lse(inputs, case)
    return reference.select_blocks(inputs.q, inputs.k_cmp, lse, **case.selection, cu_seqlens=case.cu_seqlens)


def query_positions(case: Case) -> Tensor:
    return torch.tensor([t for length in case.documents or (case.length,) for t in range(length)])


def importance_at_the_cut(importance: Tensor, selected: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """`[B,S,G]` each: the least importance that was taken for its own sake, and the greatest that was left out."""
    j = torch.arange(importance.shape[-1])
    own = (query_positions(case) // case.select_block)[:, None, None]
    candidate = (j <= own).expand_as(importance)
    forced = candidate & ((j < case.n_init) | (j > own - case.n_local))
    taken = (selected.long()[..., None] == j).any(dim=-2)
    least = importance.masked_fill(~taken | forced, math.inf).amin(dim=-1)
    greatest = importance.masked_fill(taken | ~candidate, -math.inf).amax(dim=-1)
    return least, greatest


@given(case=any_case)
def test_selection_equals_the_reference_where_importances_differ(case: Case) -> None:
    inputs = random_inputs(case)
    selected, expected = select(inputs, case), reference_selection(inputs, case)
    importance = importance_of(inputs, case)
    least, greatest = importance_at_the_cut(importance, expected, case)
    apart = least - greatest > TIGHT
    assert torch.equal(selected[apart], expected[apart])
    # Elsewhere two orders of summation may see different ties; what is taken is worth the same.
    least, greatest = importance_at_the_cut(importance, selected, case)
    assert (least >= greatest - TIGHT).all()


@given(case=any_case)
def test_selection_is_ascending_padded_and_has_forced_blocks(case: Case) -> None:
    selected = select(random_inputs(case), case)
    own = (query_positions(case) // case.select_block)[:, None].expand(selected.shape[:3])
    used = selected >= 0
    assert selected.dtype == torch.int32
    assert torch.equal(used.sum(dim=-1), (own + 1).clamp_max(case.n_select))
    assert (selected <= own[..., None]).all()
    follows = (selected[..., 1:] > selected[..., :-1]) | ~used[..., 1:]
    assert follows.all()
    assert (used[..., :-1] | ~used[..., 1:]).all(), "-1 only at the end"
    for j in range(case.n_init):
        assert ((selected == j).any(dim=-1) | (own < j)).all()
    for back in range(case.n_local):
        assert ((selected == (own - back)[..., None]).any(dim=-1) | (own < back)).all()


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=name_of)
@given(case=any_case)
def test_low_precision_selection_is_as_accurate_as_plain_torch(dtype: torch.dtype, case: Case) -> None:
    inputs = random_inputs(case, dtype)
    exact = importance_of(inputs.to(torch.float64), case)
    # Scores and LSE come from the same op, as in the attention.
    _, lse = sdpa_attend("compressed", inputs, case)
    selected = ops.select_blocks(
        inputs.q, inputs.k_cmp, lse, **case.selection, backend="sdpa", cu_seqlens=case.cu_seqlens
    )
    error = tolerance(importance_of(inputs, case), exact)
    least, greatest = importance_at_the_cut(exact, selected, case)
    # Two blocks may change places when both are off by the error, toward each other.
    assert (least >= greatest - 2 * error).all()


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_PRECISION], ids=name_of)
@pytest.mark.parametrize("documents", [None, (33, 0, 1, 62)], ids=["fixed", "varlen"])
def test_equal_importance_goes_to_the_lower_index(dtype: torch.dtype, documents: tuple[int, ...] | None) -> None:
    case = Case(length=96, documents=documents, groups=2, heads=3, block=4, stride=4, select_block=4)
    case = case.but(n_select=4, n_init=0, n_local=1)
    inputs = random_inputs(case, dtype)
    inputs = inputs.but(q=torch.zeros_like(inputs.q))
    selected = select(inputs, case)
    assert torch.equal(selected, reference_selection(inputs, case))
    assert selected[0, -1].tolist() == [[0, 1, 2, 23 if documents is None else 15]] * 2


@given(case=any_case)
def test_equal_scores_select_blocks_of_equal_importance(case: Case) -> None:
    inputs = random_inputs(case)
    inputs = inputs.but(q=torch.zeros_like(inputs.q))
    importance = importance_of(inputs, case)
    least, greatest = importance_at_the_cut(importance, select(inputs, case), case)
    assert (least >= greatest - TIGHT).all()


# Queries that continue a cached sequence.


@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases(), data=st.data())
def test_cached_queries_get_what_the_whole_forward_gives(branch: str, case: Case, data: st.DataObject) -> None:
    """Every row has a start of its own; all rows have the same number of new tokens."""
    n_new = data.draw(st.integers(1, case.length), label="new tokens")
    starts = data.draw(
        st.lists(st.integers(0, case.length - n_new), min_size=case.batch, max_size=case.batch), label="starts"
    )
    inputs = random_inputs(case)
    q, k, v = inputs.of(branch)
    o, lse = attend(reference, branch, inputs, case)

    def new_rows(x: Tensor) -> Tensor:
        return torch.stack([row[start : start + n_new] for row, start in zip(x, starts, strict=True)])

    tail = inputs.but(indices=new_rows(inputs.indices))
    got = sdpa_attend(branch, tail, case, (new_rows(q), k, v), q_start=torch.tensor(starts, dtype=torch.int32))
    torch.testing.assert_close(got[0], new_rows(o), atol=TIGHT, rtol=TIGHT)
    torch.testing.assert_close(got[1], new_rows(lse), atol=TIGHT, rtol=TIGHT)


@given(case=cases(), data=st.data())
def test_cached_queries_select_what_the_whole_forward_selects(case: Case, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, case.length - 1), label="start")
    inputs = random_inputs(case)
    q_start = torch.full((case.batch,), start, dtype=torch.int32)
    selected = select(inputs.but(q=inputs.q[:, start:]), case, q_start=q_start)
    expected = select(inputs, case)[:, start:]
    least, greatest = importance_at_the_cut(importance_of(inputs, case), select(inputs, case), case)
    apart = (least - greatest > TIGHT)[:, start:]
    assert torch.equal(selected[apart], expected[apart])


@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases(max_length=60), data=st.data())
def test_gradients_of_cached_queries_are_the_references(branch: str, case: Case, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, case.length - 1), label="start")
    inputs = random_inputs(case)
    tail = inputs.but(q=inputs.q[:, start:], indices=inputs.indices[:, start:])
    q_start = torch.full((case.batch,), start, dtype=torch.int32)
    got = sdpa_results(branch, tail, case, q_start=q_start)
    assert_close(got, reference_results(branch, tail, case, q_start=q_start), TIGHT)


@pytest.mark.parametrize("branch", ["selected", "sliding"])
def test_what_lies_after_the_last_query_in_a_cache_is_not_read(branch: str) -> None:
    case = Case(length=30, groups=2, heads=2)
    inputs = random_inputs(case)
    q, k, v = inputs.of(branch)
    space = torch.full((1, 13, 2, 4), 1e9, dtype=torch.float64)
    q_start = torch.tensor([20], dtype=torch.int32)
    tail = inputs.but(indices=inputs.indices[:, 20:])
    exact = sdpa_attend(branch, tail, case, (q[:, 20:], k, v), q_start=q_start)
    keys = torch.cat([k, space], dim=1), torch.cat([v, space], dim=1)
    spacious = sdpa_attend(branch, tail, case, (q[:, 20:], *keys), q_start=q_start)
    for x, y in zip(exact, spacious, strict=True):
        torch.testing.assert_close(x, y, atol=TIGHT, rtol=TIGHT)


def test_unused_space_after_varlen_compressed_blocks_is_not_read() -> None:
    case = Case(length=60, documents=(17, 1, 0, 42), groups=2, heads=2)
    inputs = random_inputs(case)
    n = case.n_compressed
    space = torch.full((1, 60 // case.stride - n, 2, 4), 1e9, dtype=torch.float64)
    roomy = inputs.but(k_cmp=torch.cat([inputs.k_cmp, space], 1), v_cmp=torch.cat([inputs.v_cmp, space], 1))
    exact, spacious = (sdpa_results("compressed", x, case) for x in (inputs, roomy))
    for name in ("dk", "dv"):
        assert not spacious[name][:, n:].any()
        spacious[name] = spacious[name][:, :n]
    assert_close(spacious, exact, TIGHT)
    assert torch.equal(select(roomy, case), select(inputs, case))


# Chunks.


@pytest.mark.parametrize("branch", BRANCHES)
@given(case=short_case, budget=st.sampled_from([1, 97, 1000, 20_000]))
def test_a_small_score_budget_changes_nothing(branch: str, case: Case, budget: int) -> None:
    inputs = random_inputs(case)
    with mock.patch.dict(layout.MAX_SCORES, cpu=budget):
        got = sdpa_results(branch, inputs, case)
    assert_close(got, reference_results(branch, inputs, case), TIGHT)


@pytest.mark.slow
@given(
    documents=st.lists(st.integers(0, 3), min_size=30, max_size=60).filter(any),
    select_block=st.sampled_from([4, 8]),
    budget=st.sampled_from([1, 1000, 8000]),
)
def test_chunks_of_many_short_documents_read_their_own_blocks(
    documents: list[int], select_block: int, budget: int
) -> None:
    """Around a chunk there are many more documents than in it; first a long one, whose blocks many chunks reach."""
    documents = [40, *documents]
    case = Case(length=sum(documents), documents=tuple(documents), groups=2, heads=2, select_block=select_block)
    inputs = random_inputs(case)
    with mock.patch.dict(layout.MAX_SCORES, cpu=budget):
        got = sdpa_results("selected", inputs, case)
    assert_close(got, reference_results("selected", inputs, case), TIGHT)


@given(case=short_case, budget=st.sampled_from([1, 97, 1000, 20_000]))
def test_a_small_score_budget_does_not_change_the_selection(case: Case, budget: int) -> None:
    inputs = random_inputs(case)
    expected = reference_selection(inputs, case)
    least, greatest = importance_at_the_cut(importance_of(inputs, case), expected, case)
    apart = least - greatest > TIGHT
    with mock.patch.dict(layout.MAX_SCORES, cpu=budget):
        assert torch.equal(select(inputs, case)[apart], expected[apart])


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_budget_of_one_still_runs_a_cache(branch: str) -> None:
    case = Case(length=90, batch=2, groups=2, heads=2)
    inputs = random_inputs(case)
    tail = inputs.but(q=inputs.q[:, 40:], indices=inputs.indices[:, 40:])
    options = {"q_start": torch.tensor([40, 40], dtype=torch.int32)}
    with mock.patch.dict(layout.MAX_SCORES, cpu=1):
        got = sdpa_results(branch, tail, case, **options)
    assert_close(got, reference_results(branch, tail, case, **options), TIGHT)
