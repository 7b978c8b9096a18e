"""The whole attention at sizes that only a benchmark reaches, tensor by tensor, at rows the reference can compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, ops, reference
from nsa.bench import gate
from nsa.bench.attention import AttentionShape, Inputs, nsa_forward
from nsa.testing import max_error, tolerance

SHAPES = {
    "64/4/128, 32k": AttentionShape(1, 32768, 64, 4, 128),
    "64/4/128, 64k": AttentionShape(1, 65536, 64, 4, 128),
    "32/8/128, 128k": AttentionShape(1, 131072, 32, 8, 128),
}


@pytest.fixture(autouse=True)
def large_gpu() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 100 << 30:
        pytest.skip("needs 100 GiB of free GPU memory")


@pytest.mark.parametrize("name", SHAPES)
def test_large_problems_agree_with_the_reference(name: str) -> None:
    shape = SHAPES[name]
    heads = {"n_heads": shape.n_heads, "n_kv_groups": shape.n_groups, "d_k": shape.head_dim, "d_v": shape.head_dim}
    config = NSAConfig(dim=64, backend="triton", **heads)
    means: dict[str, Any] = {"block": config.l, "stride": config.d}
    inputs = Inputs.of(shape, torch.bfloat16, "cuda", 0.0)
    leaves = (inputs.q, inputs.k, inputs.v, inputs.gates)
    q, k, v = (x.detach() for x in leaves[:3])
    folded = (q, *(ops.compress_mean(x, **means, backend="triton") for x in (k, v)))
    indices = gate.selected_indices(config, *folded)
    assert gate.selection_error(config, indices, *folded) <= 1

    o = nsa_forward(inputs, config)
    rows = gate.sampled_rows(shape.length)
    sampled = torch.cat([o[:, each] for each in rows], dim=1)
    upstream = torch.randn_like(sampled)
    found = (sampled.detach(), *torch.autograd.grad(sampled, leaves, upstream))
    del o, sampled

    def by_reference(dtype: torch.dtype) -> tuple[Tensor, ...]:
        own = tuple(x.detach().to(dtype).requires_grad_() for x in leaves)
        q, k, v, gates = own
        compressed = [reference.compress_mean(x, **means) for x in (k, v)]
        given = (q, *compressed, k, v, k, v, gates)
        out = torch.cat([gate.expect_nsa(config, indices, given, each) for each in rows], dim=1)
        return out.detach(), *torch.autograd.grad(out, own, upstream.to(dtype))

    names, off = ("o", "dq", "dk", "dv", "dgates"), {}
    for tensor, x, plain, exact in zip(names, found, by_reference(q.dtype), by_reference(torch.float64), strict=True):
        allowed = tolerance(plain, exact)
        if max_error(x, exact) > allowed:
            worst = (x.double() - exact).abs().nan_to_num(nan=torch.inf).flatten().argmax().item()
            where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), x.shape))
            wrong = int(((x.double() - exact).abs() > allowed).sum() + x.isnan().sum())
            off[tensor] = (
                f"{max_error(x, exact) / allowed:.1f} times the tolerance at {where}; {wrong} elements beyond it"
            )
    assert not off
