"""Block means and gathered blocks with their gradients, in Triton's interpreter, against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE  # isort: skip

from nsa import reference
from nsa.backends.triton import compress
from nsa.sequences import Pooling, Sequences
from nsa.testing import max_error, tolerance

SMALL = compress.CompressTile(elements=128, num_warps=4)
DOCUMENTS: list[list[int] | None] = [None, [1, 20, 3, 0, 9], [5, 4, 6], [2, 3]]
LAYOUTS = [(*sizes, lengths, torch.float32) for sizes in ((4, 2), (4, 4), (6, 2)) for lengths in DOCUMENTS]
LAYOUTS += [(6, 2, lengths, torch.float16) for lengths in DOCUMENTS[:2]]
every_layout = pytest.mark.parametrize(("block", "stride", "lengths", "dtype"), LAYOUTS, ids=str)


def blocks_of(x: Tensor, block: int, stride: int, lengths: list[int] | None) -> tuple[Tensor, Tensor]:
    """`[B,N,G,l,D]` blocks and `[N]` which slots hold one; straight from the definition."""
    varlen = lengths is not None
    batch, length, groups, dim = x.shape
    starts, start = [], 0
    for n in lengths or [length]:
        starts += [start + i * stride for i in range(0 if n < block else (n - block) // stride + 1)]
        start += n
    n_slots = length // stride if varlen else len(starts)
    used = torch.tensor([True] * len(starts) + [False] * (n_slots - len(starts)), device=x.device)
    # Zeros that autograd can follow back to `x`, for a varlen batch in which no document has a block.
    empty = torch.zeros(batch, block, groups, dim, dtype=x.dtype, device=x.device) + 0 * x.sum()
    slots = [x[:, s : s + block] for s in starts] + [empty] * (n_slots - len(starts))
    if not slots:
        return x.new_zeros(batch, 0, groups, block, dim), used.bool()
    return torch.stack(slots, dim=1).transpose(2, 3), used


def plain_mean(x: Tensor, block: int, stride: int, lengths: list[int] | None) -> Tensor:
    return blocks_of(x, block, stride, lengths)[0].mean(dim=3)


def plain_gather(x: Tensor, pos: Tensor, block: int, stride: int, lengths: list[int] | None) -> Tensor:
    blocks, used = blocks_of(x, block, stride, lengths)
    return (blocks + pos * used[:, None, None, None]).flatten(3)


def offsets(lengths: list[int] | None) -> Tensor | None:
    return None if lengths is None else torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def pool(length: int, block: int, stride: int, cu_seqlens: Tensor | None = None, batch: int = 1) -> Pooling:
    return Pooling(Sequences(batch, length, torch.device(DEVICE), cu_seqlens), block, stride)


def close(got: Tensor, exact: Tensor, plain: Tensor) -> None:
    assert max_error(got, exact) <= tolerance(plain, exact, rounding=1e-6)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


@every_layout
def test_mean(block: int, stride: int, lengths: list[int] | None, dtype: torch.dtype) -> None:
    length = 33 if lengths is None else sum(lengths)
    x = torch.randn(1 if lengths else 2, length, 3, 20, device=DEVICE).to(dtype)
    pooling = pool(length, block, stride, offsets(lengths), len(x))
    got = compress.compress_mean_forward(x, pooling, tile=SMALL)
    dout = torch.randn_like(got)
    dx = compress.compress_mean_backward(dout, pooling, tile=SMALL)
    results = []
    for kind in (torch.float64, dtype):
        leaf = x.to(kind).requires_grad_()
        out = plain_mean(leaf, block, stride, lengths)
        results.append((out, *torch.autograd.grad(out, leaf, dout.to(kind))))
    for value, exact, plain in zip((got, dx), *results, strict=True):
        close(value, exact, plain)


@every_layout
def test_gather(block: int, stride: int, lengths: list[int] | None, dtype: torch.dtype) -> None:
    length = 33 if lengths is None else sum(lengths)
    x = torch.randn(1 if lengths else 2, length, 3, 20, device=DEVICE).to(dtype)
    pos = torch.randn(block, 20, device=DEVICE).to(dtype)
    pooling = pool(length, block, stride, offsets(lengths), len(x))
    got = compress.gather_blocks_forward(x, pos, pooling, tile=SMALL)
    assert got.is_contiguous()
    dout = torch.randn_like(got)
    dx, dpos = compress.gather_blocks_backward(dout, pooling, tile=SMALL)
    assert dpos.dtype == dtype
    results = []
    for kind in (torch.float64, dtype):
        leaves = [x.to(kind).requires_grad_(), pos.to(kind).requires_grad_()]
        out = plain_gather(*leaves, block, stride, lengths)
        results.append((out, *torch.autograd.grad(out, leaves, dout.to(kind))))
    for value, exact, plain in zip((got, dx, dpos), *results, strict=True):
        close(value, exact, plain)


def test_any_strides_and_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "POSITION_RUNS", 3)
    x = torch.randn(2, 19, 2, 16, device=DEVICE)
    pos = torch.randn(4, 16, device=DEVICE)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    pooling = pool(19, 4, 2, batch=2)
    got = compress.gather_blocks_forward(strided, torch.cat([pos, pos], -1)[:, :16], pooling)
    assert torch.equal(got, compress.gather_blocks_forward(x, pos, pooling))
    assert torch.equal(compress.compress_mean_forward(strided, pooling), compress.compress_mean_forward(x, pooling))
    dout = torch.randn_like(got)
    spread = torch.cat([dout, dout], -1)[..., : dout.shape[-1]]
    strided_gradients, gradients = (compress.gather_blocks_backward(grad, pooling) for grad in (spread, dout))
    assert all(torch.equal(a, b) for a, b in zip(strided_gradients, gradients, strict=True))
    torch.testing.assert_close(gradients[1], dout.sum((0, 1, 2)).view(4, 16), rtol=1e-5, atol=1e-5)


def test_shorter_than_a_block() -> None:
    x = torch.randn(1, 3, 2, 16, device=DEVICE)
    pooling = pool(3, 4, 2)
    assert compress.compress_mean_forward(x, pooling).shape == (1, 0, 2, 16)
    out = compress.gather_blocks_forward(x, torch.zeros(4, 16, device=DEVICE), pooling)
    dx, dpos = compress.gather_blocks_backward(out, pooling)
    assert dx.shape == x.shape
    assert (dx == 0).all()
    assert (dpos == 0).all()


@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
def test_slots_are_those_of_the_specification(lengths: list[int] | None) -> None:
    x = torch.randn(1, 33 if lengths is None else sum(lengths), 2, 16, device=DEVICE)
    pos = torch.randn(4, 16, device=DEVICE)
    where = {"block": 4, "stride": 2, "cu_seqlens": offsets(lengths)}
    pooling = pool(x.shape[1], **where)
    assert torch.equal(compress.gather_blocks_forward(x, pos, pooling), reference.gather_blocks(x, pos, **where))
    torch.testing.assert_close(compress.compress_mean_forward(x, pooling), reference.compress_mean(x, **where))


@pytest.mark.parametrize("cu", [[0, 500], [0, 2, 4], [0, 90, 33]], ids=str)
def test_unchecked_wrong_cu_seqlens_read_nothing_out_of_bounds(cu: list[int]) -> None:
    """On a GPU offsets are not looked at; what lies before and after the tensors here is NaN."""
    pooling = pool(33, 4, 2, torch.tensor(cu, dtype=torch.int32, device=DEVICE))

    def fenced(*shape: int) -> Tensor:
        return torch.full((3, *shape), float("nan"), device=DEVICE).index_fill_(0, torch.tensor(1, device=DEVICE), 1.0)

    x, dmean, dblocks = fenced(1, 33, 2, 16), fenced(1, 16, 2, 16), fenced(1, 16, 2, 64)
    results = [
        compress.compress_mean_forward(x[1], pooling),
        compress.gather_blocks_forward(x[1], torch.zeros(4, 16, device=DEVICE), pooling),
        compress.compress_mean_backward(dmean[1], pooling),
        *compress.gather_blocks_backward(dblocks[1], pooling),
    ]
    assert all(result.isfinite().all() for result in results)
