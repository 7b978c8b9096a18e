"""The specification against the paper: what `nsa.reference` must hold, worked out here a second time by other means."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BRANCHES,
    Case,
    Inputs,
    assert_close,
    assert_same_bits,
    attend,
    cases,
    mean_compress,
    random_inputs,
    results,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa import reference
from nsa.config import NSAConfig

EXACT = 1e-12  # two orders of summation of the same fp64 numbers


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention by torch's own function, heads sharing their group's keys."""
    heads = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(heads, dim=1), v.repeat_interleave(heads, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def select(inputs: Inputs, case: Case, **options: Tensor) -> Tensor:
    """The reference's own selection."""
    options.setdefault("cu_seqlens", case.cu_seqlens)
    _, lse = reference.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, **case.compression, **options)
    return reference.select_blocks(inputs.q, inputs.k_cmp, lse, **case.selection, **options)


def importance_of(inputs: Inputs, case: Case) -> Tensor:
    varlen = {"cu_seqlens": case.cu_seqlens}
    _, lse = reference.compressed_attention(inputs.q, inputs.k_cmp, inputs.v_cmp, **case.compression, **varlen)
    return reference.selection_importance(
        inputs.q, inputs.k_cmp, lse, **case.compression, select_block=case.select_block, **varlen
    )


def config_of(case: Case) -> NSAConfig:
    return NSAConfig(
        dim=8,
        n_heads=case.n_heads,
        n_kv_groups=case.groups,
        d_k=case.d_k,
        d_v=case.d_v,
        l=case.block,
        d=case.stride,
        l_sel=case.select_block,
        n_sel=case.n_select,
        n_init=case.n_init,
        n_local=case.n_local,
        w=case.window,
    )


def one_hot_gates(inputs: Inputs, branch: str) -> Tensor:
    gates = torch.zeros_like(inputs.gates)
    gates[..., BRANCHES.index(branch)] = 1.0
    return gates


# Equal to dense attention where nothing is left out.


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("branch", ["selected", "sliding"])
def test_a_branch_that_leaves_nothing_out_is_dense_attention(branch: str, heads: int) -> None:
    case = Case(length=37, batch=2, groups=2, heads=heads, d_k=6, d_v=3, n_select=5, select_block=8, window=37)
    inputs = random_inputs(case)
    inputs = inputs.but(indices=select(inputs, case))
    leaves = [x.requires_grad_() for x in inputs.of(branch)]
    o, lse = attend(reference, branch, inputs, case)
    dense = dense_attention(*leaves)
    torch.testing.assert_close(o, dense, atol=EXACT, rtol=EXACT)
    do = torch.randn_like(o)
    for grad, expected in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(dense, leaves, do), strict=True):
        torch.testing.assert_close(grad, expected, atol=EXACT, rtol=EXACT)
    # The LSE turns scores into probabilities that sum to one.
    q, k, _ = (x.detach() for x in leaves)
    scores = torch.einsum("bshd,bnhd->bshn", q, k.repeat_interleave(heads, dim=2)) / math.sqrt(case.d_k)
    p = (scores - lse.detach()[..., None]).exp() * torch.ones(37, 37).tril()[:, None]
    torch.testing.assert_close(p.sum(dim=-1), torch.ones_like(lse), atol=EXACT, rtol=EXACT)


def test_compressed_branch_with_one_token_blocks_is_dense() -> None:
    case = Case(length=21, groups=2, heads=3, d_k=4, d_v=5, block=1, stride=1)
    inputs = random_inputs(case)
    o, _ = attend(reference, "compressed", inputs, case)
    torch.testing.assert_close(o, dense_attention(*inputs.of("compressed")), atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("branch", ["selected", "sliding"])
def test_gate_on_one_full_branch_gives_dense_attention(branch: str) -> None:
    case = Case(length=40, groups=2, heads=3, d_k=4, d_v=6, n_select=5, window=64)
    inputs = random_inputs(case)
    inputs = inputs.but(gates=one_hot_gates(inputs, branch))
    o = reference.nsa_attention(*inputs.for_attention, config=config_of(case))
    torch.testing.assert_close(o, dense_attention(*inputs.of(branch)), atol=EXACT, rtol=EXACT)


# Which keys a query reads, one query at a time.


def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query `[h, Dk]` over keys `[n, Dk]`, all of them seen; no key, no output."""
    if len(k) == 0:
        return q.new_zeros(len(q), v.shape[-1])
    return (q @ k.T / math.sqrt(q.shape[-1])).softmax(dim=-1) @ v


def tokens_read(branch: str, t: int, case: Case, indices: Tensor) -> list[int]:
    """Rows of the branch's keys that query `t` of a fixed-length sequence reads, from the definition."""
    if branch == "compressed":
        return [i for i in range(case.n_compressed) if i * case.stride + case.block - 1 <= t]
    if branch == "sliding":
        return [n for n in range(case.length) if t - case.window < n <= t]
    return [n for n in range(t + 1) if n // case.select_block in indices.tolist()]


@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases(max_length=40))
def test_every_query_reads_exactly_the_keys_of_its_definition(branch: str, case: Case) -> None:
    inputs = random_inputs(case)
    q, k, v = inputs.of(branch)
    o, _ = attend(reference, branch, inputs, case)
    b, g = case.batch - 1, case.groups - 1
    heads = slice(g * case.heads, (g + 1) * case.heads)
    for t in range(case.length):
        rows = tokens_read(branch, t, case, inputs.indices[b, t, g])
        expected = attend_one(q[b, t, heads], k[b, rows, g], v[b, rows, g])
        torch.testing.assert_close(o[b, t, heads], expected, atol=EXACT, rtol=EXACT)


def test_scale_defaults_to_one_over_the_root_of_d_k() -> None:
    case = Case(length=12, d_k=9)
    inputs = random_inputs(case)
    for branch in BRANCHES:
        default = attend(reference, branch, inputs, case)
        stated = attend(reference, branch, inputs, case, scale=1 / 3)
        for x, y in zip(default, stated, strict=True):
            torch.testing.assert_close(x, y, atol=EXACT, rtol=EXACT)


# Causality.


def shake(x: Tensor, first: int) -> Tensor:
    """Other values from row `first` on, large ones."""
    return torch.cat([x[:, :first], 50 * torch.randn_like(x[:, first:])], dim=1)


def complete_at(t: int, case: Case) -> int:
    """How many compressed blocks hold no token after `t`."""
    return case.count_compressed(t + 1)


@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases(max_length=60), data=st.data())
def test_later_tokens_do_not_change_an_output_by_one_bit(branch: str, case: Case, data: st.DataObject) -> None:
    t = data.draw(st.integers(0, case.length - 1), label="t")
    inputs = random_inputs(case)
    q, k, v = inputs.of(branch)
    first = complete_at(t, case) if branch == "compressed" else t + 1
    before = attend(reference, branch, inputs, case, (q, k, v))
    after = attend(reference, branch, inputs, case, (shake(q, t + 1), shake(k, first), shake(v, first)))
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, : t + 1], y[:, : t + 1])


@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases(max_length=60), data=st.data())
def test_earlier_outputs_give_later_tokens_no_gradient(branch: str, case: Case, data: st.DataObject) -> None:
    t = data.draw(st.integers(0, case.length - 1), label="t")
    inputs = random_inputs(case)
    q, k, v = (x.requires_grad_() for x in inputs.of(branch))
    first = complete_at(t, case) if branch == "compressed" else t + 1
    o, lse = attend(reference, branch, inputs, case, (q, k, v))
    loss = o[:, : t + 1].square().sum() + lse[:, : t + 1].masked_fill(lse[:, : t + 1].isinf(), 0.0).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    assert not dq[:, t + 1 :].any()
    assert not dk[:, first:].any()
    assert not dv[:, first:].any()


@given(case=cases(max_length=60), data=st.data())
def test_later_tokens_do_not_change_a_selection(case: Case, data: st.DataObject) -> None:
    t = data.draw(st.integers(0, case.length - 1), label="t")
    inputs = random_inputs(case)
    shaken = inputs.but(q=shake(inputs.q, t + 1), k_cmp=shake(inputs.k_cmp, complete_at(t, case)))
    assert torch.equal(select(inputs, case)[:, : t + 1], select(shaken, case)[:, : t + 1])


@pytest.mark.parametrize("t", [1, 7, 20, 38])
def test_whole_attention_is_causal_in_forward_and_backward(t: int) -> None:
    case = Case(length=40, groups=2, heads=2, n_select=3)
    inputs = random_inputs(case)
    raw_k, raw_v = inputs.k_win, inputs.v_win

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        compressed = mean_compress(k, case), mean_compress(v, case)
        return reference.nsa_attention(q, *compressed, k, v, k, v, inputs.gates, config=config_of(case))

    before = whole(inputs.q, raw_k, raw_v)
    after = whole(shake(inputs.q, t + 1), shake(raw_k, t + 1), shake(raw_v, t + 1))
    assert torch.equal(before[:, : t + 1], after[:, : t + 1])
    assert not torch.equal(before[:, t + 1 :], after[:, t + 1 :])

    leaves = [x.clone().requires_grad_() for x in (inputs.q, raw_k, raw_v)]
    for grad in torch.autograd.grad(whole(*leaves)[:, : t + 1].square().sum(), leaves):
        assert not grad[:, t + 1 :].any()
        assert grad[:, : t + 1].any()


# Groups.


@pytest.mark.parametrize("branch", BRANCHES)
def test_every_group_is_an_attention_of_its_own(branch: str) -> None:
    case = Case(length=30, batch=2, groups=3, heads=2, d_k=5, d_v=4)
    inputs = random_inputs(case)
    q, k, v = inputs.of(branch)
    o, lse = attend(reference, branch, inputs, case)
    for g in range(case.groups):
        heads, own = slice(2 * g, 2 * g + 2), slice(g, g + 1)
        alone = inputs.but(indices=inputs.indices[:, :, own])
        o_g, lse_g = attend(reference, branch, alone, case.but(groups=1), (q[:, :, heads], k[:, :, own], v[:, :, own]))
        torch.testing.assert_close(o[:, :, heads], o_g, atol=EXACT, rtol=EXACT)
        torch.testing.assert_close(lse[:, :, heads], lse_g, atol=EXACT, rtol=EXACT)


def test_importance_of_a_group_is_the_sum_over_its_heads() -> None:
    case = Case(length=50, groups=2, heads=3)
    inputs = random_inputs(case)
    whole = importance_of(inputs, case)
    for g in range(case.groups):
        alone = [
            importance_of(
                inputs.but(q=inputs.q[:, :, [head]], k_cmp=inputs.k_cmp[:, :, [g]], v_cmp=inputs.v_cmp[:, :, [g]]),
                case.but(groups=1, heads=1),
            )[:, :, 0]
            for head in range(3 * g, 3 * g + 3)
        ]
        torch.testing.assert_close(whole[:, :, g], sum(alone), atol=EXACT, rtol=EXACT)


def test_selection_ignores_the_order_of_heads_in_a_group() -> None:
    case = Case(length=60, groups=2, heads=3, select_block=4, n_select=5)
    inputs = random_inputs(case)
    reordered = inputs.but(q=inputs.q[:, :, [2, 0, 1, 4, 5, 3]])
    assert torch.equal(select(inputs, case), select(reordered, case))


# Eq. 9: overlaps.


def test_default_overlap_weights_are_one_two_two_two_one() -> None:
    weights = reference.overlap_weights(n_compressed=19, n_blocks=5, block=32, stride=16, select_block=64)
    for j in range(1, 4):
        expected = torch.zeros(19, dtype=torch.long)
        expected[4 * j - 1 : 4 * j + 4] = torch.tensor([1, 2, 2, 2, 1])
        assert torch.equal(weights[:, j], expected)
    assert weights[:5, 0].tolist() == [2, 2, 2, 1, 0], "the first block has no neighbor before it"


@given(stride=st.integers(1, 8), strides=st.integers(1, 6), select_strides=st.integers(1, 6), n=st.integers(0, 20))
def test_overlap_weights_count_shared_tokens(stride: int, strides: int, select_strides: int, n: int) -> None:
    block, select_block, n_blocks = stride * strides, stride * select_strides, 7
    weights = reference.overlap_weights(n, n_blocks, block, stride, select_block)
    assert weights.shape == (n, n_blocks)
    for i in range(n):
        for j in range(n_blocks):
            compressed = set(range(i * stride, i * stride + block))
            selected = set(range(j * select_block, (j + 1) * select_block))
            assert weights[i, j] * stride == len(compressed & selected)


@given(case=cases(max_length=40))
def test_importance_is_the_probability_mass_weighted_by_overlap(case: Case) -> None:
    inputs = random_inputs(case)
    importance = importance_of(inputs, case)
    b, g = case.batch - 1, case.groups - 1
    for t in range(case.length):
        seen = [i for i in range(case.n_compressed) if i * case.stride + case.block - 1 <= t]
        expected = [0.0] * importance.shape[-1]
        for head in range(g * case.heads, (g + 1) * case.heads):
            scores = (inputs.k_cmp[b, seen, g] @ inputs.q[b, t, head] / math.sqrt(case.d_k)).softmax(dim=0)
            for i, p in zip(seen, scores.tolist(), strict=True):
                for token in range(i * case.stride, i * case.stride + case.block):
                    expected[token // case.select_block] += p / case.stride
        expected_row = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(importance[b, t, g], expected_row, atol=EXACT, rtol=EXACT)


# Block selection.


@given(case=st.one_of(cases(), cases(varlen=True)))
def test_a_selection_is_ascending_padded_forced_and_the_best(case: Case) -> None:
    inputs = random_inputs(case)
    selected = select(inputs, case)
    importance = importance_of(inputs, case)
    assert selected.dtype == torch.int32
    assert selected.shape == (case.batch, case.length, case.groups, case.n_select)
    positions = [t for length in case.documents or (case.length,) for t in range(length)]
    for t, position in enumerate(positions):
        own = position // case.select_block
        forced = {j for j in range(own + 1) if j < case.n_init or j > own - case.n_local}
        for g in range(case.groups):
            blocks = [j for j in selected[0, t, g].tolist() if j >= 0]
            assert len(blocks) == min(case.n_select, own + 1), "as many as there are, up to n_select"
            assert selected[0, t, g].tolist() == sorted(blocks) + [-1] * (case.n_select - len(blocks))
            assert len(set(blocks)) == len(blocks)
            assert set(blocks) <= set(range(own + 1)), "no block starts after the query"
            assert forced <= set(blocks)
            values = importance[0, t, g].tolist()
            # By importance, and among equals by index: nothing left out may come before what was taken.
            taken = [(-values[j], j) for j in set(blocks) - forced]
            left = [(-values[j], j) for j in set(range(own + 1)) - set(blocks)]
            assert not taken or not left or max(taken) < min(left)


def test_equal_importance_goes_to_the_lower_index() -> None:
    case = Case(length=32, heads=2, groups=2, block=4, stride=4, select_block=4, n_select=3, n_init=0, n_local=0)
    inputs = random_inputs(case)
    selected = select(inputs.but(q=torch.zeros_like(inputs.q)), case)
    # At the end of a block every block so far has the same mass.
    assert selected[0, 31].tolist() == [[0, 1, 2], [0, 1, 2]]
    # In the middle of block 2 that block has none yet: it comes after the two complete ones, and before nothing.
    assert selected[0, 9].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert selected[0, 13].tolist() == [[0, 1, 2], [0, 1, 2]]
    forced = select(inputs.but(q=torch.zeros_like(inputs.q)), case.but(n_local=1))
    assert forced[0, 31].tolist() == [[0, 1, 7], [0, 1, 7]], "the forced block first, then the lowest"


def test_no_gradient_flows_through_the_selection() -> None:
    case = Case(length=40)
    inputs = random_inputs(case)
    assert not select(inputs.but(q=inputs.q.requires_grad_(), k_cmp=inputs.k_cmp.requires_grad_()), case).requires_grad


# Short sequences and rows that see nothing.


@pytest.mark.parametrize("length", [1, 2, 7])
def test_short_sequence_leaves_only_the_compressed_branch_empty(length: int) -> None:
    case = Case(length=length, groups=2, heads=3, d_k=4, d_v=3, block=32, stride=16, select_block=64, n_select=16)
    inputs = random_inputs(case)
    assert inputs.k_cmp.shape[1] == 0
    selected = select(inputs, case)
    assert selected[..., 0].eq(0).all()
    assert selected[..., 1:].eq(-1).all()
    compressed = results(reference, "compressed", inputs, case)
    assert not compressed["o"].any()
    assert compressed["lse"].eq(-math.inf).all()
    assert not compressed["dq"].any()
    for branch in ("selected", "sliding"):
        full = inputs.but(indices=selected)
        o, _ = attend(reference, branch, full, case.but(window=512))
        torch.testing.assert_close(o, dense_attention(*full.of(branch)), atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_row_that_sees_nothing_is_zero_and_has_zero_gradient(branch: str, dtype: torch.dtype) -> None:
    case = Case(length=24, groups=2, heads=2, block=8)
    inputs = random_inputs(case, dtype)
    inputs.indices[:, 3:20] = -1
    empty = {"compressed": slice(0, 7), "selected": slice(3, 20), "sliding": slice(0, 0)}[branch]
    got = results(reference, branch, inputs, case)
    assert not got["o"][:, empty].any()
    assert got["lse"][:, empty].eq(-math.inf).all()
    assert not got["dq"][:, empty].any()
    for name in ("o", "dq", "dk", "dv"):
        assert got[name].isfinite().all(), f"{name} has an infinity or a NaN"
    seen = torch.ones(24, dtype=torch.bool)
    seen[empty] = False
    if branch != "selected":
        assert got["lse"][:, seen].isfinite().all()


def test_lse_of_a_sequence_without_blocks_is_differentiable() -> None:
    case = Case(length=5, block=8)
    inputs = random_inputs(case)
    _, lse = attend(reference, "compressed", inputs.but(q=inputs.q.requires_grad_()), case)
    lse.backward(torch.ones_like(lse))
    assert inputs.q.grad is not None
    assert not inputs.q.grad.any()


def test_keys_nobody_reads_get_zero_gradient() -> None:
    case = Case(length=24, groups=2, heads=2)
    inputs = random_inputs(case)
    inputs.indices[:] = -1
    inputs.indices[..., 0] = 0
    got = results(reference, "selected", inputs, case)
    for name in ("dk", "dv"):
        assert got[name][:, :8].any()
        assert not got[name][:, 8:].any()


# Varlen documents.


def document_slices(case: Case) -> list[tuple[Case, slice, slice]]:
    """For each document that has tokens: its own case, where its tokens lie, where its compressed blocks do."""
    assert case.documents is not None
    found, token, block = [], 0, 0
    for length in case.documents:
        n_blocks = case.count_compressed(length)
        if length:
            alone = case.but(length=length, documents=None)
            found.append((alone, slice(token, token + length), slice(block, block + n_blocks)))
        token, block = token + length, block + n_blocks
    return found


def document_inputs(inputs: Inputs, tokens: slice, blocks: slice) -> Inputs:
    cut = {name: getattr(inputs, name)[:, tokens] for name in ("q", "k_sel", "v_sel", "k_win", "v_win", "gates")}
    cut |= {name: getattr(inputs, name)[:, blocks] for name in ("k_cmp", "v_cmp")}
    return Inputs(**cut, indices=inputs.indices[:, tokens])


@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases(varlen=True, max_length=90))
def test_a_varlen_batch_is_its_documents_one_by_one(branch: str, case: Case) -> None:
    inputs = random_inputs(case)
    _, k, v = inputs.of(branch)

    def loss(o: Tensor, lse: Tensor) -> Tensor:
        return o.sin().sum() + lse.masked_fill(lse.isinf(), 0.0).cos().sum()

    leaves = [x.requires_grad_() for x in (inputs.q, k, v)]
    o, lse = attend(reference, branch, inputs, case)
    varlen = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(loss(o, lse), leaves), strict=True))
    varlen |= {"o": o, "lse": lse}
    parts: dict[str, list[Tensor]] = {name: [] for name in varlen}
    for alone, tokens, blocks in document_slices(case):
        own = document_inputs(inputs, tokens, blocks).map(lambda x: x.detach())
        leaves = [x.requires_grad_() for x in own.of(branch)]
        o, lse = attend(reference, branch, own, alone)
        grads = torch.autograd.grad(loss(o, lse), leaves)
        for name, part in zip(parts, (*grads, o, lse), strict=True):
            parts[name].append(part)
    assert_close(varlen, {name: torch.cat(found, dim=1) for name, found in parts.items()}, EXACT)


@given(case=cases(varlen=True, max_length=90))
def test_documents_select_their_blocks_as_if_alone(case: Case) -> None:
    inputs = random_inputs(case)
    alone = [select(document_inputs(inputs, tokens, blocks), own) for own, tokens, blocks in document_slices(case)]
    assert torch.equal(select(inputs, case), torch.cat(alone, dim=1))


@pytest.mark.parametrize("documents", [(5, 0, 1, 20, 3), (0, 0, 9), (1,), (1, 1, 1), (30, 0)], ids=str)
def test_whole_varlen_attention_is_the_documents_one_by_one(documents: tuple[int, ...]) -> None:
    case = Case(length=sum(documents), documents=documents, groups=2, heads=3, d_k=4, d_v=6, n_select=3, window=6)
    inputs = random_inputs(case)
    varlen = reference.nsa_attention(*inputs.for_attention, config=config_of(case), cu_seqlens=case.cu_seqlens)
    alone = [
        reference.nsa_attention(*document_inputs(inputs, tokens, blocks).for_attention, config=config_of(own))
        for own, tokens, blocks in document_slices(case)
    ]
    torch.testing.assert_close(varlen, torch.cat(alone, dim=1), atol=EXACT, rtol=EXACT)


def test_unused_space_after_the_varlen_blocks_is_not_read() -> None:
    case = Case(length=40, documents=(17, 1, 22), groups=2, heads=2)
    inputs = random_inputs(case)
    space = 1e6 * torch.randn(1, 4, 2, 4, dtype=torch.float64)
    roomy = inputs.but(k_cmp=torch.cat([inputs.k_cmp, space], 1), v_cmp=torch.cat([inputs.v_cmp, space], 1))
    exact, spacious = (results(reference, "compressed", x, case) for x in (inputs, roomy))
    n = case.n_compressed
    assert not spacious["dk"][:, n:].any()
    assert not spacious["dv"][:, n:].any()
    spacious |= {name: spacious[name][:, :n] for name in ("dk", "dv")}
    assert_close(spacious, exact, EXACT)
    assert torch.equal(select(inputs, case), select(roomy, case))


# Queries that continue a cached sequence.


@pytest.mark.parametrize("branch", BRANCHES)
@given(case=cases(max_length=60), data=st.data())
def test_cached_queries_get_what_the_whole_forward_gives(branch: str, case: Case, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, case.length - 1), label="start")
    inputs = random_inputs(case)
    q, k, v = inputs.of(branch)
    whole = attend(reference, branch, inputs, case)
    tail = inputs.but(indices=inputs.indices[:, start:])
    q_start = torch.full((case.batch,), start, dtype=torch.int32)
    cached = attend(reference, branch, tail, case, (q[:, start:], k, v), q_start=q_start)
    for x, y in zip(whole, cached, strict=True):
        torch.testing.assert_close(x[:, start:], y, atol=EXACT, rtol=EXACT)


@given(case=cases(max_length=60), data=st.data())
def test_cached_queries_select_the_same_blocks(case: Case, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, case.length - 1), label="start")
    inputs = random_inputs(case)
    tail = inputs.but(q=inputs.q[:, start:])
    q_start = torch.full((case.batch,), start, dtype=torch.int32)
    assert torch.equal(select(tail, case, q_start=q_start), select(inputs, case)[:, start:])


# Gradients.

SMALL = Case(length=7, groups=2, heads=2, d_k=2, d_v=3, block=2, stride=1, select_block=2, n_select=2, window=3)
SMALL = SMALL.but(n_init=0, n_local=1)


@pytest.mark.parametrize("documents", [None, (3, 0, 1, 3)], ids=["fixed", "varlen"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_gradients_of_a_branch_are_the_slopes_of_its_outputs(branch: str, documents: tuple[int, ...] | None) -> None:
    case = SMALL.but(documents=documents)
    inputs = random_inputs(case)

    def outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = attend(reference, branch, inputs, case, (q, k, v))
        return o, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in inputs.of(branch)])


def test_gradients_of_combine_are_its_slopes() -> None:
    o = [torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    gates = torch.rand(1, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(reference.combine, (*o, gates))


@pytest.mark.slow
@pytest.mark.parametrize("documents", [None, (3, 0, 1, 3)], ids=["fixed", "varlen"])
def test_gradients_of_the_whole_attention_are_its_slopes(documents: tuple[int, ...] | None) -> None:
    case = SMALL.but(documents=documents)
    inputs = random_inputs(case)

    def whole(*tensors: Tensor) -> Tensor:
        return reference.nsa_attention(*tensors, config=config_of(case), cu_seqlens=case.cu_seqlens)

    assert torch.autograd.gradcheck(whole, [x.requires_grad_() for x in inputs.for_attention])


# The gated sum.


def test_gates_are_ordered_compressed_selected_sliding() -> None:
    o = [torch.full((1, 2, 3, 4), value) for value in (1.0, 10.0, 100.0)]
    gates = torch.zeros(1, 2, 3, 3)
    gates[0, 1, 2] = torch.tensor([2.0, 3.0, 4.0])
    mixed = reference.combine(*o, gates)
    assert mixed[0, 1, 2].eq(432.0).all()
    assert mixed.sum() == 4 * 432.0, "every head has gates of its own"


def test_two_runs_give_the_same_bits() -> None:
    case = Case(length=50, groups=2, heads=3)
    inputs = random_inputs(case, torch.float32)
    for branch in BRANCHES:
        assert_same_bits(results(reference, branch, inputs, case), results(reference, branch, inputs, case))
