"""The gated sum and its gradients, in Triton's interpreter, against the reference in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE, worth_trying  # isort: skip

from nsa import reference
from nsa.backends.triton import combine
from nsa.testing import max_error, tolerance

SMALL = combine.CombineTile(elements=256, num_warps=4)


def inputs(batch: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    branches = [torch.randn(batch, length, heads, dim, device=DEVICE).to(dtype) for _ in range(3)]
    return [*branches, torch.rand(batch, length, heads, 3, device=DEVICE).to(dtype)]


def reference_run(args: list[Tensor], do: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in args]
    o = reference.combine(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))]


def assert_close(got: list[Tensor], args: list[Tensor], do: Tensor) -> None:
    exact = reference_run(args, do, torch.float64)
    plain = reference_run(args, do, args[0].dtype)
    for x, e, p in zip(got, exact, plain, strict=True):
        assert x.dtype == args[0].dtype
        assert x.is_contiguous()
        assert max_error(x, e) <= tolerance(p, e, rounding=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("batch", "length", "heads", "dim"), [(2, 7, 6, 80), (1, 1, 1, 16), (1, 3, 16, 128), (1, 4, 2, 192)]
)
def test_output_and_gradients(batch: int, length: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    args = inputs(batch, length, heads, dim, dtype)
    do = torch.randn_like(args[0])
    for tile in (None, SMALL):
        got = [combine.combine_forward(*args, tile=tile), *combine.combine_backward(do, *args, tile=tile)]
        assert_close(got, args, do)


@pytest.mark.parametrize("tile", worth_trying(combine.candidates()), ids=str)
def test_every_candidate(tile: combine.CombineTile) -> None:
    args = inputs(1, 37, 3, 80, torch.float16)
    do = torch.randn_like(args[0])
    got = [combine.combine_forward(*args, tile=tile), *combine.combine_backward(do, *args, tile=tile)]
    assert_close(got, args, do)


def test_any_strides() -> None:
    args = inputs(2, 5, 3, 32, torch.float32)
    do = torch.randn_like(args[0])
    strided = [
        args[0].transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([args[1], args[1]], dim=-1)[..., :32],
        args[2].transpose(0, 1).contiguous().transpose(0, 1),
        args[3].movedim(-1, 0).contiguous().movedim(0, -1),
    ]
    expanded = do[:, :1].expand_as(do)
    got = [
        combine.combine_forward(*strided, tile=SMALL),
        *combine.combine_backward(expanded, *strided, tile=SMALL),
    ]
    assert_close(got, args, expanded.contiguous())


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs(2, 5, 3, 48, torch.float32)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    got = [combine.combine_forward(*args), *combine.combine_backward(args[0], *args)]
    assert all(x.isfinite().all() for x in got)
