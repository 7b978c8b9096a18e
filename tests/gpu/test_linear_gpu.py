"""The linear kernel of a decode step's few rows, against fp64, in and out of a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.backends.triton.decode import Norm, Weights, linear_step

SIZES = [
    (768, (768, 384, 384, 192)),
    (192, (36,)),
    (2048, (768,)),
    (4096, (4096, 1024)),
    (100, (7, 1, 33)),
    (5000, (70,)),
]


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, device="cuda")).to(dtype)


def assert_near(found: Tensor, exact: Tensor) -> None:
    assert (found.double() - exact).norm() <= 6e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 16, 32])
@pytest.mark.parametrize(("n_in", "n_out"), SIZES)
def test_linears(n_in: int, n_out: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, norm = normal(rows, 1, n_in, dtype=dtype), Norm(1 + normal(n_in, dtype=dtype, scale=0.1), 1e-5)
    weights = [Weights(normal(n, n_in, dtype=dtype, scale=n_in**-0.5), normal(n, dtype=dtype), "silu") for n in n_out]
    normed = F.rms_norm(x.double(), (n_in,), norm.weight.double(), norm.eps)

    def exact(w: Weights) -> Tensor:
        assert w.bias is not None
        return F.silu(F.linear(normed, w.weight.double(), w.bias.double()))

    found = linear_step(x, *weights, norm=norm)
    for w, y in zip(weights, found, strict=True):
        assert_near(y, exact(w))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = linear_step(x, *weights, norm=norm)
    for y in replayed:
        y.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, replayed, strict=True))


@pytest.mark.parametrize("rows", [1, 2, 32])
def test_swiglu_and_residual(rows: int) -> None:
    torch.manual_seed(rows)
    x, residual = (normal(rows, 1, 768, dtype=torch.bfloat16) for _ in range(2))
    inner, outer = (
        normal(4096, 768, dtype=torch.bfloat16, scale=0.03),
        normal(768, 2048, dtype=torch.bfloat16, scale=0.03),
    )
    (hidden,) = linear_step(x, Weights(inner, None, "silu"), paired=True)
    gate, value = F.linear(x.double(), inner.double()).chunk(2, dim=-1)
    assert_near(hidden, F.silu(gate) * value)
    (y,) = linear_step(hidden, Weights(outer), residual=residual)
    assert_near(y, residual.double() + F.linear(hidden.double(), outer.double()))
