"""A branch's gradient with a gate, added to a dq that is there already, is the plain gradient of `gate * do`, added."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, random_inputs
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from interpreted import DEVICE

from nsa.backends.triton import combine, compressed, scores, selected, sliding

CASES = {
    "h3": Case(length=45, heads=3, groups=2, d_k=32, d_v=16),
    "packed": Case(length=50, heads=2, groups=1, d_k=16, d_v=16, documents=(1, 20, 0, 29)),
    "shorter than a block": Case(length=5, heads=2, groups=2, d_k=16, d_v=16),
}


def forward_and_backward(
    branch: str, case: Case, x: dict[str, Tensor], do: Tensor, **gated: Tensor
) -> tuple[Tensor, ...]:
    cu = None if case.cu_seqlens is None else case.cu_seqlens.to(DEVICE)
    whole = {"scale": case.d_k**-0.5, "cu_seqlens": cu, "q_start": None}
    cut = {"block": case.block, "stride": case.stride}
    q, k, v, k_cmp, v_cmp = (x[name] for name in ("q", "k", "v", "k_cmp", "v_cmp"))
    if branch == "sliding":
        o, lse = sliding.sliding_forward(q, k, v, window=case.window, **whole)
        return sliding.sliding_backward(do, None, q, k, v, o, lse, window=case.window, **whole, **gated)
    o, lse = compressed.compressed_forward(q, k_cmp, v_cmp, **cut, **whole)
    if branch == "compressed":
        return compressed.compressed_backward(do, None, q, k_cmp, v_cmp, o, lse, **cut, **whole, **gated)
    indices = scores.select_blocks(q, k_cmp, lse, **case.selection, **whole)
    o, lse = selected.selected_forward(q, k, v, indices, select_block=case.select_block, **whole)
    return selected.selected_backward(
        do, None, q, k, v, indices, o, lse, select_block=case.select_block, **whole, **gated
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
def test_a_gate_and_a_sum(branch: str, name: str) -> None:
    case = CASES[name]
    inputs = random_inputs(case, torch.float32).map(lambda x: x.to(DEVICE))
    _, k_cmp, v_cmp = inputs.of("compressed")
    q, k, v = inputs.of("selected")
    x = {"q": q, "k": k, "v": v, "k_cmp": k_cmp, "v_cmp": v_cmp}
    gates = torch.rand(*q.shape[:3], 3, device=DEVICE)
    # Some are closed.
    gates[:, ::3] = 0.0
    gate = gates[..., 1]
    do = torch.randn(*q.shape[:3], case.d_v, device=DEVICE)
    before = torch.randn_like(q)
    dq, dk, dv = forward_and_backward(branch, case, x, do * gate[..., None])
    into = before.clone()
    got = forward_and_backward(branch, case, x, do, gate=gate, into=into)
    assert got[0] is into
    for actual, expected in zip(got, (before + dq, dk, dv), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_gates_alone() -> None:
    o_cmp, o_sel, o_win, do = (torch.randn(2, 5, 3, 24, device=DEVICE) for _ in range(4))
    gates = torch.rand(2, 5, 3, 3, device=DEVICE)
    whole = combine.combine_backward(do, o_cmp, o_sel, o_win, gates)
    assert torch.equal(combine.gates_backward(do, o_cmp, o_sel, o_win, gates), whole[3])
