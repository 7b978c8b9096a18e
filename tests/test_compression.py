"""phi against loops, and the blocks it is given."""

from __future__ import annotations

import pytest
import torch
from helpers import document_lengths, offsets
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa.compression import Compression, blocks_of, packed_blocks_of

FP64 = torch.float64

strides = st.integers(1, 5)
# Blocks per stride: l = d is the case without overlap.
overlaps = st.integers(1, 4)


def blocks_by_slicing(x: Tensor, block: int, stride: int) -> list[Tensor]:
    return [x[:, start : start + block] for start in range(0, x.shape[1], stride) if start + block <= x.shape[1]]


@given(length=st.integers(1, 60), stride=strides, overlap=overlaps)
def test_blocks_are_the_slices_that_fit(length: int, stride: int, overlap: int) -> None:
    x = torch.randn(2, length, 3, 4)
    expected = blocks_by_slicing(x, stride * overlap, stride)
    got = blocks_of(x, stride * overlap, stride)
    assert got.shape == (2, len(expected), stride * overlap, 3, 4)
    assert all(torch.equal(got[:, i], block) for i, block in enumerate(expected))


def test_blocks_are_a_view() -> None:
    x = torch.randn(2, 40, 3, 4)
    assert blocks_of(x, 8, 4).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@given(lengths=document_lengths(60), stride=strides, overlap=overlaps)
def test_packed_blocks_are_each_documents_blocks_one_after_the_other(
    lengths: tuple[int, ...], stride: int, overlap: int
) -> None:
    block = stride * overlap
    x = torch.randn(1, sum(lengths), 2, 3)
    expected, starts = [], []
    for document in x.split(list(lengths), dim=1):
        if document.shape[1]:
            found = blocks_of(document, block, stride)
            expected += found[0]
            starts += [i * stride for i in range(found.shape[1])]
    got, position = packed_blocks_of(x, offsets(lengths), block, stride)
    assert got.shape[1] == position.numel() == sum(lengths) // stride
    assert got.shape[1] >= len(expected)
    assert position[: len(starts)].tolist() == starts
    assert all(torch.equal(got[0, i], block) for i, block in enumerate(expected))


@given(length=st.integers(1, 40), stride=strides, overlap=overlaps)
def test_mean_is_the_mean_of_each_block(length: int, stride: int, overlap: int) -> None:
    block = stride * overlap
    x = torch.randn(2, length, 3, 4, dtype=FP64)
    got = Compression(4, block, kind="mean")(blocks_of(x, block, stride))
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
    got = phi(blocks_of(x, block, stride))
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


def test_hidden_width_of_the_mlp_is_twice_the_width_unless_told() -> None:
    assert Compression(6, 8, kind="mlp").inner.out_features == 12
    assert Compression(6, 8, kind="mlp", hidden=5).inner.out_features == 5


def test_the_mlp_knows_where_in_the_block_a_token_is_and_the_mean_does_not() -> None:
    x = torch.randn(1, 8, 1, 4, dtype=FP64)
    mlp, mean = Compression(4, 8, kind="mlp").double(), Compression(4, 8, kind="mean")
    straight, turned = blocks_of(x, 8, 4), blocks_of(x.flip(1), 8, 4)
    torch.testing.assert_close(mean(straight), mean(turned))
    assert (mlp(straight) - mlp(turned)).abs().max() > 1e-3


def test_mean_has_no_parameters() -> None:
    assert list(Compression(4, 8, kind="mean").parameters()) == []


@pytest.mark.parametrize("lengths", [(5, 3), (12, 1, 9)])
def test_unused_packed_places_give_no_gradient_when_unread(lengths: tuple[int, ...]) -> None:
    """Every token's gradient is the number of whole blocks of its own document that hold it."""
    block, stride = 4, 2
    x = torch.randn(1, sum(lengths), 1, 1, requires_grad=True)
    blocks, _ = packed_blocks_of(x, offsets(lengths), block, stride)
    counts = [0 if n < block else (n - block) // stride + 1 for n in lengths]
    blocks[:, : sum(counts)].sum().backward()
    expected = []
    for n, count in zip(lengths, counts, strict=True):
        expected += [sum(i * stride <= t < i * stride + block for i in range(count)) for t in range(n)]
    assert x.grad.flatten().tolist() == expected


def test_reset_draws_every_parameter_of_the_mlp_anew() -> None:
    phi = Compression(4, 8, kind="mlp")
    before = {name: p.detach().clone() for name, p in phi.named_parameters()}
    phi.reset_parameters()
    for name, p in phi.named_parameters():
        assert p.isfinite().all()
        assert not torch.equal(p, before[name]), name
