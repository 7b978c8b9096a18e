"""`q_start` with `cu_seqlens`: queries that are part of a varlen row of keys get what the whole row's get."""

from __future__ import annotations

import pytest
import torch
from helpers import BRANCHES, Case, Inputs, assert_close, attend, cases, random_inputs, results
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa import ops, reference

TIGHT = 1e-10


@st.composite
def parts(draw: st.DrawFn) -> tuple[Case, int, int]:
    """A varlen row, and the queries `[start, end)` of it."""
    case = draw(cases(max_length=60, varlen=True))
    start = draw(st.integers(0, case.length - 1))
    return case, start, draw(st.integers(start + 1, case.length))


def part(inputs: Inputs, start: int, end: int) -> Inputs:
    queries = {name: getattr(inputs, name)[:, start:end] for name in ("q", "indices", "gates")}
    return inputs.but(**queries)


def int32(start: int) -> Tensor:
    return torch.tensor([start], dtype=torch.int32)


@pytest.mark.parametrize("branch", BRANCHES)
@given(problem=parts())
def test_the_reference_gives_a_part_what_it_gives_the_whole(branch: str, problem: tuple[Case, int, int]) -> None:
    case, start, end = problem
    inputs = random_inputs(case)
    o, lse = attend(reference, branch, inputs, case)
    got = attend(reference, branch, part(inputs, start, end), case, q_start=int32(start))
    assert_close(dict(zip("ol", got, strict=True)), {"o": o[:, start:end], "l": lse[:, start:end]}, TIGHT)


@given(problem=parts())
def test_reference_selects_the_same_for_a_part_as_for_the_whole(problem: tuple[Case, int, int]) -> None:
    case, start, end = problem
    inputs = random_inputs(case)
    where = {"cu_seqlens": case.cu_seqlens}
    q, k, v = inputs.of("compressed")
    _, lse = reference.compressed_attention(q, k, v, **case.compression, **where)
    whole = reference.select_blocks(q, k, lse, **case.selection, **where)
    own = (q[:, start:end], k, lse[:, start:end])
    assert torch.equal(
        reference.select_blocks(*own, **case.selection, **where, q_start=int32(start)), whole[:, start:end]
    )


@pytest.mark.parametrize("branch", BRANCHES)
@given(problem=parts())
def test_sdpa_gives_the_reference_s_outputs_and_gradients(branch: str, problem: tuple[Case, int, int]) -> None:
    case, start, end = problem
    own = part(random_inputs(case), start, end)
    where = {"q_start": int32(start)}
    expected = results(reference, branch, own, case, **where)
    assert_close(results(ops, branch, own, case, backend="sdpa", **where), expected, TIGHT)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@settings(max_examples=20)
@given(problem=parts())
def test_the_whole_attention_of_a_part(backend: str, problem: tuple[Case, int, int]) -> None:
    case, start, end = problem
    inputs = random_inputs(case)
    given = {**case.selection, "window": case.window, "cu_seqlens": case.cu_seqlens, "backend": backend}
    whole, _ = ops.attention(*inputs.for_attention, **given)
    where = {"q_start": int32(start), "window_start": int32(start)}
    got, _ = ops.attention(*part(inputs, start, end).for_attention, **given, **where)
    torch.testing.assert_close(got, whole[:, start:end], atol=TIGHT, rtol=TIGHT)


def test_the_sliding_keys_are_the_row_that_cu_seqlens_describes() -> None:
    case = Case(length=30, documents=(10, 20))
    given = part(random_inputs(case), 12, 20).for_attention
    with pytest.raises(ValueError, match=r"window_start is \[11\].*\[12\]"):
        ops.attention(
            *given, **case.selection, window=5, cu_seqlens=case.cu_seqlens, q_start=int32(12), window_start=int32(11)
        )


def test_documents_must_be_those_of_the_keys() -> None:
    case = Case(length=30, documents=(10, 20))
    q, k, v = part(random_inputs(case), 12, 20).of("sliding")
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\] is 30.*29"):
        ops.sliding_attention(q, k[:, :29], v[:, :29], window=5, cu_seqlens=case.cu_seqlens, q_start=int32(12))
