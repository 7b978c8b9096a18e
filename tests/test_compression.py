"""phi against loops, and the two ops it is made of against the specification."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    COMPRESSIONS,
    Case,
    assert_close,
    assert_same_bits,
    assert_within_derived_tolerance,
    cases,
    compression_inputs,
    compression_results,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa import ops, reference
from nsa.compression import Compression, compress_jointly, joinable

FP64 = torch.float64
BACKENDS = ("sdpa", "reference")
LOW_PRECISION = [torch.float32, torch.bfloat16, torch.float16]

strides = st.integers(1, 5)
# Blocks per stride: l = d is the case without overlap.
overlaps = st.integers(1, 4)
any_case = st.one_of(cases(max_length=60), cases(max_length=60, varlen=True))
every_op = pytest.mark.parametrize("op", COMPRESSIONS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)

FIXED = Case(length=23, batch=2, groups=2, d_k=3, block=6, stride=2)
VARLEN = FIXED.but(batch=1, documents=(1, 10, 0, 5, 7))
# No document has a block, and yet there are slots; and a sequence that has none.
NO_BLOCKS = FIXED.but(batch=1, length=9, documents=(5, 4))
SHORT = FIXED.but(length=5)
NAMED = {"fixed": FIXED, "varlen": VARLEN, "no blocks": NO_BLOCKS, "short": SHORT}
every_kind = pytest.mark.parametrize("case", NAMED.values(), ids=NAMED.keys())


def blocks_by_slicing(x: Tensor, block: int, stride: int) -> list[Tensor]:
    return [x[:, start : start + block] for start in range(0, x.shape[1], stride) if start + block <= x.shape[1]]


def blocks_of_case(x: Tensor, case: Case) -> list[Tensor]:
    """Every `[B, l, G, D]` block of the documents, in their order."""
    parts = x.split(list(case.documents or (case.length,)), dim=1)
    return [block for part in parts for block in blocks_by_slicing(part, case.block, case.stride)]


# The specification.


@given(case=any_case)
def test_the_mean_of_a_block_is_the_mean_of_its_tokens(case: Case) -> None:
    (x,) = compression_inputs("compress_mean", case)
    got = reference.compress_mean(x, **case.compression, cu_seqlens=case.cu_seqlens)
    blocks = blocks_of_case(x, case)
    n_slots = case.length // case.stride if case.documents else len(blocks)
    assert got.shape == (case.batch, n_slots, case.groups, case.d_k)
    for i, block in enumerate(blocks):
        torch.testing.assert_close(got[:, i], sum(block.unbind(1)) / case.block, atol=1e-14, rtol=1e-14)
    assert (got[:, len(blocks) :] == 0).all()


@given(case=any_case)
def test_gathered_block_concatenates_tokens_plus_positions(case: Case) -> None:
    x, position = compression_inputs("gather_blocks", case)
    got = reference.gather_blocks(x, position, **case.compression, cu_seqlens=case.cu_seqlens)
    blocks = blocks_of_case(x, case)
    n_slots = case.length // case.stride if case.documents else len(blocks)
    assert got.shape == (case.batch, n_slots, case.groups, case.block * case.d_k)
    for i, block in enumerate(blocks):
        row = [token + place for token, place in zip(block.unbind(1), position, strict=True)]
        assert torch.equal(got[:, i], torch.cat(row, dim=-1))
    assert (got[:, len(blocks) :] == 0).all()


# Backends.


@every_op
@given(case=any_case)
def test_sdpa_is_the_reference_in_fp64(op: str, case: Case) -> None:
    tensors = compression_inputs(op, case)
    ours = compression_results(ops, op, tensors, case, backend="sdpa")
    assert_close(ours, compression_results(reference, op, tensors, case), 1e-12)


@every_op
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@given(case=any_case)
def test_sdpa_is_as_exact_as_plain_torch_in_its_dtype(op: str, dtype: torch.dtype, case: Case) -> None:
    tensors = compression_inputs(op, case, dtype)
    assert_within_derived_tolerance(
        compression_results(ops, op, tensors, case, backend="sdpa"),
        compression_results(reference, op, tuple(x.to(FP64) for x in tensors), case),
        compression_results(reference, op, tensors, case),
    )


@every_op
@every_kind
@pytest.mark.parametrize("dtype", [FP64, *LOW_PRECISION], ids=str)
def test_the_reference_as_a_backend_is_the_reference(op: str, case: Case, dtype: torch.dtype) -> None:
    tensors = compression_inputs(op, case, dtype)
    ours = compression_results(ops, op, tensors, case, backend="reference")
    assert_same_bits(ours, compression_results(reference, op, tensors, case))


@every_op
@every_kind
def test_gradients_are_the_slopes_of_the_output(op: str, case: Case) -> None:
    def run(*tensors: Tensor) -> Tensor:
        return getattr(ops, op)(*tensors, **case.compression, cu_seqlens=case.cu_seqlens, backend="sdpa")

    leaves = tuple(x.requires_grad_() for x in compression_inputs(op, case))
    if run(*leaves).numel():
        assert torch.autograd.gradcheck(run, leaves)


@every_op
@every_backend
def test_sequence_shorter_than_a_block_has_no_blocks_or_gradient(op: str, backend: str) -> None:
    found = compression_results(ops, op, compression_inputs(op, SHORT), SHORT, backend=backend)
    assert found["out"].shape[1] == 0
    assert all((x == 0).all() for x in found.values())


@every_op
@every_backend
def test_what_a_slot_without_a_block_is_given_reaches_nothing(op: str, backend: str) -> None:
    tensors = tuple(x.requires_grad_() for x in compression_inputs(op, VARLEN))
    out = getattr(ops, op)(*tensors, **VARLEN.compression, cu_seqlens=VARLEN.cu_seqlens, backend=backend)
    unused = torch.arange(VARLEN.n_compressed, out.shape[1])
    assert unused.numel()
    dout = torch.randn_like(out)
    spoiled = dout.index_fill(1, unused, float("nan"))
    expected = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    for got, wanted in zip(torch.autograd.grad(out, tensors, spoiled), expected, strict=True):
        assert torch.equal(got, wanted)


@every_op
@every_backend
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_two_runs_give_the_same_bits(op: str, backend: str, dtype: torch.dtype) -> None:
    for case in (FIXED, VARLEN):
        tensors = compression_inputs(op, case, dtype)
        first, second = (compression_results(ops, op, tensors, case, backend=backend) for _ in range(2))
        assert_same_bits(first, second)


@every_op
@every_backend
def test_inputs_may_be_strided_in_all_but_the_last_dimension(op: str, backend: str) -> None:
    for case in (FIXED, VARLEN):
        x, *rest = compression_inputs(op, case)
        spread = torch.cat([x, x], dim=-1)[..., : case.d_k].transpose(1, 2).contiguous().transpose(1, 2)
        expected = compression_results(ops, op, (x, *rest), case, backend=backend)
        assert_same_bits(compression_results(ops, op, (spread, *rest), case, backend=backend), expected)


# phi.


@given(length=st.integers(1, 40), stride=strides, overlap=overlaps)
def test_mean_is_the_mean_of_each_block(length: int, stride: int, overlap: int) -> None:
    block = stride * overlap
    x = torch.randn(2, length, 3, 4, dtype=FP64)
    got = Compression(4, block, kind="mean")(x, stride=stride)
    expected = [sum(part.unbind(1)) / block for part in blocks_by_slicing(x, block, stride)]
    assert got.shape == (2, len(expected), 3, 4)
    for i, mean in enumerate(expected):
        torch.testing.assert_close(got[:, i], mean, atol=1e-14, rtol=1e-14)


@given(length=st.integers(1, 40), stride=strides, overlap=overlaps, hidden=st.none() | st.integers(1, 9))
def test_mlp_is_two_layers_on_each_groups_flattened_block(
    length: int, stride: int, overlap: int, hidden: int | None
) -> None:
    block = stride * overlap
    x = torch.randn(2, length, 3, 4, dtype=FP64)
    phi = Compression(4, block, kind="mlp", hidden=hidden).double()
    with torch.no_grad():
        # As large as what it is added to, so that a missing one is seen.
        phi.position.normal_()
    got = phi(x, stride=stride)
    parts = blocks_by_slicing(x, block, stride)
    assert got.shape == (2, len(parts), 3, 4)
    for i, part in enumerate(parts):
        for group in range(3):
            rows = []
            for tokens in part[:, :, group]:
                flat = torch.cat([token + place for token, place in zip(tokens, phi.position, strict=True)])
                inner = phi.inner.weight @ flat + phi.inner.bias
                rows.append(phi.outer.weight @ (inner * inner.sigmoid()) + phi.outer.bias)
            torch.testing.assert_close(got[:, i, group], torch.stack(rows), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ["mlp", "mean"])
@given(case=any_case)
def test_blocks_at_hand_are_compressed_like_those_of_a_sequence(kind: str, case: Case) -> None:
    """A cache hands over blocks, a forward sequences or varlen documents."""
    (x,) = compression_inputs("compress_mean", case)
    phi = Compression(case.d_k, case.block, kind=kind).double()
    whole = phi(x, stride=case.stride, cu_seqlens=case.cu_seqlens)
    blocks = blocks_of_case(x, case)
    if blocks:
        by_hand = phi.of_blocks(torch.stack(blocks, dim=1))
        torch.testing.assert_close(whole[:, : len(blocks)], by_hand, atol=1e-12, rtol=1e-12)


def test_hidden_size_of_the_mlp_is_twice_the_head_dim_by_default() -> None:
    assert Compression(6, 8, kind="mlp").inner.out_features == 12
    assert Compression(6, 8, kind="mlp", hidden=5).inner.out_features == 5


def test_mlp_depends_on_token_order_in_a_block_but_mean_does_not() -> None:
    x = torch.randn(1, 8, 1, 4, dtype=FP64)
    mlp, mean = Compression(4, 8, kind="mlp").double(), Compression(4, 8, kind="mean")
    torch.testing.assert_close(mean(x, stride=4), mean(x.flip(1), stride=4))
    assert (mlp(x, stride=4) - mlp(x.flip(1), stride=4)).abs().max() > 1e-3


def test_parameters_have_the_names_that_checkpoints_hold() -> None:
    names = ["position", "inner.weight", "inner.bias", "outer.weight", "outer.bias"]
    assert list(Compression(4, 8, kind="mlp").state_dict()) == names
    assert list(Compression(4, 8, kind="mean").state_dict()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given_dtype", [torch.float32, "autocast"], ids=str)
def test_autocast_sets_the_dtype_of_the_mlp_but_not_of_the_mean(
    dtype: torch.dtype, given_dtype: torch.dtype | str
) -> None:
    x = torch.randn(1, 16, 2, 4).to(dtype if given_dtype == "autocast" else torch.float32)
    with torch.autocast("cpu", dtype):
        assert Compression(4, 8, kind="mlp")(x, stride=4).dtype == dtype
        assert Compression(4, 8, kind="mean")(x, stride=4).dtype == x.dtype


@pytest.mark.parametrize("lengths", [(5, 3), (12, 1, 9)])
def test_every_token_counts_in_as_many_blocks_as_hold_it(lengths: tuple[int, ...]) -> None:
    case = Case(length=sum(lengths), documents=lengths, block=4, stride=2)
    x = torch.randn(1, case.length, 1, 1, requires_grad=True)
    ops.compress_mean(x, **case.compression, cu_seqlens=case.cu_seqlens).sum().backward()
    expected = []
    for n in lengths:
        count = case.count_compressed(n)
        expected += [sum(i * 2 <= t < i * 2 + 4 for i in range(count)) / 4 for t in range(n)]
    assert x.grad.flatten().tolist() == expected


def test_reset_draws_every_parameter_of_the_mlp_anew() -> None:
    phi = Compression(4, 8, kind="mlp")
    before = {name: p.detach().clone() for name, p in phi.named_parameters()}
    phi.reset_parameters()
    for name, p in phi.named_parameters():
        assert p.isfinite().all()
        assert not torch.equal(p, before[name]), name


@given(
    batch=st.integers(1, 2),
    length=st.integers(1, 40),
    groups=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    stride=strides,
    overlap=overlaps,
    seed=st.integers(0, 99),
)
def test_keys_and_values_together_are_each_by_itself(
    batch: int, length: int, groups: int, head_dim: int, stride: int, overlap: int, seed: int
) -> None:
    """Outputs and all gradients; a sequence shorter than a block is left to the modules."""
    torch.manual_seed(seed)
    phis = [Compression(head_dim, stride * overlap, kind="mlp", hidden=3).double() for _ in range(2)]
    raw = [torch.randn(batch, length, groups, head_dim, dtype=FP64, requires_grad=True) for _ in range(2)]
    assert joinable(phis, raw, stride) == (length >= stride * overlap)
    if not joinable(phis, raw, stride):
        return
    apart = [phi(x, stride=stride) for phi, x in zip(phis, raw, strict=True)]
    together = compress_jointly(phis, raw, stride)
    leaves = [*raw, *(p for phi in phis for p in phi.parameters())]
    gradients = [torch.autograd.grad(sum(y.square().sum() for y in found), leaves) for found in (together, apart)]
    torch.testing.assert_close([*together, *gradients[0]], [*apart, *gradients[1]], rtol=1e-9, atol=1e-11)
