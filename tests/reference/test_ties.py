"""Ties in importance go to the lower index, on every backend and for any split of a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Case, cases
from hypothesis import given
from hypothesis import strategies as st
from ties import assert_lower_of_equals, lowest_free_blocks, tied_cases, tied_inputs
from torch import Tensor

from nsa import ops, reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["reference", "sdpa"]
in_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)


def select(case: Case, q: Tensor, k: Tensor, **options: Any) -> Tensor:
    options.setdefault("cu_seqlens", case.cu_seqlens)
    _, lse = ops.compressed_attention(q, k, k, **case.compression, **options)
    return ops.select_blocks(q, k, lse, **case.selection, **options)


def select_in_steps(case: Case, q: Tensor, k: Tensor, ends: list[int], backend: str) -> Tensor:
    """As with a cache: queries up to each end, with the keys there are by then."""
    selected, start = [], 0
    for end in ends:
        q_start = torch.full((case.batch,), start, dtype=torch.int32)
        seen = k[:, : case.count_compressed(end)]
        selected.append(select(case, q[:, start:end], seen, q_start=q_start, backend=backend))
        start = end
    return torch.cat(selected, dim=1)


def splits(draw: st.DataObject, length: int) -> list[int]:
    """Prefill, chunks and single steps."""
    ends = draw.draw(st.sets(st.integers(1, length), max_size=6), label="ends")
    single = draw.draw(st.integers(0, min(length, 20)), label="single steps at the end")
    return sorted({*ends, *range(length - single, length + 1)} - {0})


def expected_of_equal_keys(case: Case) -> Tensor:
    lengths = case.documents or (case.length,)
    rows = [lowest_free_blocks(case, position) for length in lengths for position in range(length)]
    return torch.tensor(rows, dtype=torch.int32)[None, :, None].expand(case.batch, -1, case.groups, -1)


@on_every_backend
@in_every_dtype
@given(case=st.one_of(tied_cases(), tied_cases(varlen=True)))
def test_of_equal_keys_the_first_blocks_are_selected(backend: str, dtype: torch.dtype, case: Case) -> None:
    q, k, _ = tied_inputs(case, dtype, n_distinct=1)
    assert torch.equal(select(case, q, k, backend=backend), expected_of_equal_keys(case))


@on_every_backend
@in_every_dtype
@given(case=tied_cases(), draw=st.data())
def test_equal_keys_select_the_first_blocks_in_any_split(
    backend: str, dtype: torch.dtype, case: Case, draw: st.DataObject
) -> None:
    q, k, _ = tied_inputs(case, dtype, n_distinct=1)
    ends = splits(draw, case.length)
    assert torch.equal(select_in_steps(case, q, k, ends, backend), expected_of_equal_keys(case))


@on_every_backend
@in_every_dtype
@given(case=cases(max_length=100), n_distinct=st.integers(1, 3), draw=st.data())
def test_of_blocks_that_look_the_same_the_lower_is_selected(
    backend: str, dtype: torch.dtype, case: Case, n_distinct: int, draw: st.DataObject
) -> None:
    q, k, labels = tied_inputs(case, dtype, n_distinct)
    for selected in (
        select(case, q, k, backend=backend),
        select_in_steps(case, q, k, splits(draw, case.length), backend),
    ):
        for row in selected.transpose(1, 2).flatten(0, 1):
            for position in range(case.length):
                assert_lower_of_equals(case, row[position], labels, position)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_no_row_of_a_long_uniform_sequence_differs_by_one_bit(dtype: torch.dtype) -> None:
    """The paper's sizes and q = 0: within a row, all blocks but the first and the last ones have one importance."""
    case = Case(length=8192, heads=3, block=32, stride=16, select_block=64)
    q, k, _ = tied_inputs(case, dtype, n_distinct=1)
    q = torch.zeros_like(q)
    _, lse = reference.compressed_attention(q, k, k, **case.compression)
    importance = reference.selection_importance(q, k, lse, **case.compression, select_block=64)[0, :, 0]
    position = torch.arange(case.length)[:, None]
    j = torch.arange(importance.shape[1])
    # Block j is complete when the last compressed block that starts in it is.
    alike = (j > 0) & (64 * j + 48 + 32 - 1 <= position)
    highest = importance.where(alike, float("-inf")).amax(dim=1)
    lowest = importance.where(alike, float("inf")).amin(dim=1)
    assert torch.equal(highest[alike.any(dim=1)], lowest[alike.any(dim=1)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@given(case=cases(max_length=80))
def test_half_precision_importance_uses_an_fp32_softmax(dtype: torch.dtype, case: Case) -> None:
    case = case.but(n_select=case.n_select + 2)
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(case.batch, case.length, case.n_heads, case.d_k), (case.batch, case.n_compressed, case.groups, case.d_k)]
    # Scores of ten and more, which bf16 rounds by a twentieth.
    q, k = (4 * torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    _, lse = reference.compressed_attention(q, k, k, **case.compression)
    importance = reference.selection_importance(q, k, lse, **case.compression, select_block=case.select_block)
    # Every head hands out a mass of one, counted once for each stride of a block.
    sees = (lse[:, :, 0] > float("-inf")).float()[..., None].expand(importance.shape[:3])
    total = sees * case.heads * (case.block // case.stride)
    torch.testing.assert_close(importance.sum(dim=-1), total, atol=1e-4, rtol=1e-4)
    assert torch.equal(select(case, q, k, backend="reference"), select(case, q.float(), k.float(), backend="reference"))
    torch.testing.assert_close(
        lse, reference.compressed_attention(q.float(), k.float(), k.float(), **case.compression)[1]
    )
