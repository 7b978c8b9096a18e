"""fp32 gradients of the kernels at large scores stay within the bound that the docs state."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from helpers import Case, attend, branches, random_inputs
from interpreted import DEVICE

from nsa import reference
from nsa.backends import triton as backend
from nsa.sequences import Saved, Upstream


@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_the_error_of_a_probability_is_bounded_by_its_score(size: float) -> None:
    case = Case(length=60, heads=2, groups=1, d_k=16, d_v=16, window=40)
    inputs = random_inputs(case, torch.float32)
    q, k, v = (x.to(DEVICE) for x in inputs.of("sliding"))
    q = q * size
    seen = branches(case, DEVICE).sliding
    o, lse = backend.sliding_forward(q, k, v, seen)
    do = torch.randn_like(o)
    _, _, dv = backend.sliding_backward(Upstream(do), Saved(q, k, v, o, lse), seen)

    leaves = tuple(x.double().cpu().requires_grad_() for x in (q, k, v))
    exact, _ = attend(reference, "sliding", inputs, case, leaves)
    (expected,) = torch.autograd.grad(exact, leaves[2:], do.double().cpu())
    scores = float((q.norm(dim=-1).max() * k.norm(dim=-1).max()) * case.d_k**-0.5)
    # Every term of dv is a probability times do; each is off by at most eps * (|s| + |lse|), relatively.
    bound = 2 * torch.finfo(torch.float32).eps * 2 * scores * float(do.abs().sum(dim=1).max())
    assert float((dv.double().cpu() - expected).abs().max()) <= bound
