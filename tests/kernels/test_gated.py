"""A branch's gradient with a gate, added to a dq that is there already, is the plain gradient of `gate * do`, added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Case, assert_norms_close, branches, random_inputs
from helpers import attend as attend_by
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

from interpreted import DEVICE

from nsa import reference
from nsa.backends import sdpa
from nsa.backends import triton as backend
from nsa.backends.triton.row_statistics import row_statistics
from nsa.sequences import Saved, Upstream

CASES = {
    "h3": Case(length=33, heads=3, groups=2, d_k=32, d_v=16),
    "varlen": Case(length=50, heads=2, groups=1, d_k=16, d_v=16, documents=(1, 20, 0, 29)),
    "shorter than a block": Case(length=5, heads=2, groups=2, d_k=16, d_v=16),
}


def attend(branch: str, case: Case, x: dict[str, Tensor]) -> tuple[Tensor, Callable[..., tuple[Tensor, ...]]]:
    """The branch's output, and its gradients as a function of what `Upstream` holds."""
    over = branches(case, DEVICE)
    q, k, v, k_cmp, v_cmp = (x[name] for name in ("q", "k", "v", "k_cmp", "v_cmp"))

    def gradients(backward: Callable[..., tuple[Tensor, ...]], how: Any, *saved: Tensor) -> Callable[..., Any]:
        return lambda do, **gated: backward(Upstream(do, **gated), Saved(*saved), how)

    if branch == "sliding":
        o, lse = backend.sliding_forward(q, k, v, over.sliding)
        return o, gradients(backend.sliding_backward, over.sliding, q, k, v, o, lse)
    o, lse = backend.compressed_forward(q, k_cmp, v_cmp, over.compressed)
    if branch == "compressed":
        return o, gradients(backend.compressed_backward, over.compressed, q, k_cmp, v_cmp, o, lse)
    indices = x["indices"] if "indices" in x else backend.select_blocks(q, k_cmp, lse, over.selection)
    o, lse = backend.selected_forward(q, k, v, indices, over.selected)
    return o, gradients(backend.selected_backward, over.selected, q, k, v, o, lse, indices)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
def test_a_gate_and_a_sum(branch: str, name: str) -> None:
    case = CASES[name]
    inputs = random_inputs(case, torch.float32).map(lambda x: x.to(DEVICE))
    _, k_cmp, v_cmp = inputs.of("compressed")
    q, k, v = inputs.of("selected")
    gates = torch.rand(*q.shape[:3], 3, device=DEVICE)
    # Some are closed.
    gates[:, ::3] = 0.0
    gate = gates[..., 1]
    do = torch.randn(*q.shape[:3], case.d_v, device=DEVICE)
    before = torch.randn_like(q)
    o, backward = attend(branch, case, {"q": q, "k": k, "v": v, "k_cmp": k_cmp, "v_cmp": v_cmp})
    dq, dk, dv = backward(do * gate[..., None])
    products = torch.stack([(do * o).sum(dim=-1)] * 3, dim=-1)
    for known in ({}, {"product": products[..., 2]}):
        into = before.clone()
        got = backward(do, gate=gate, dq=into, **known)
        assert got[0] is into
        for actual, expected in zip(got, (before + dq, dk, dv), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate", [1e-3, 1e-5])
@pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
def test_a_small_gate_costs_no_digits_in_fp16(branch: str, gate: float) -> None:
    """With a loss scale, as fp16 is trained with: the gradients are well within fp16's range, `gate * p` is not."""
    case = Case(length=150, d_k=16, d_v=16, select_block=16, n_select=8, window=100)
    inputs = random_inputs(case, torch.float16).map(lambda x: x.to(DEVICE))
    q, k, v = inputs.of(branch)
    given = {"q": q, "k": k, "v": v, "k_cmp": inputs.k_cmp, "v_cmp": inputs.v_cmp, "indices": inputs.indices}
    gates = torch.full(q.shape[:3], gate, dtype=torch.float16, device=DEVICE)
    do = 1024 * torch.randn(*q.shape[:3], case.d_v, device=DEVICE).half()

    def by_reference(dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = tuple(x.to(dtype, copy=True).requires_grad_() for x in (q, k, v))
        o, _ = attend_by(reference, branch, inputs, case, leaves)
        return named(torch.autograd.grad(o, leaves, do.to(dtype) * gates.to(dtype)[..., None]))

    def named(gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    o, backward = attend(branch, case, given)
    exact, plain = by_reference(torch.float64), by_reference(torch.float16)
    product = (do.float() * o.float()).sum(dim=-1)
    for known in (None, product):
        assert_norms_close(named(backward(do, gate=gates, product=known)), exact, plain)


@pytest.mark.parametrize(("batch", "length", "heads", "groups"), [(2, 45, 3, 2), (1, 70, 6, 1), (1, 32, 4, 1)])
def test_one_launch_prepares_all_branches(batch: int, length: int, heads: int, groups: int) -> None:
    """To the bit what the gates' gradients and each branch's own row statistics are, padding included."""
    rows = (batch, length, heads * groups)
    outputs = [torch.randn(*rows, 24, device=DEVICE) for _ in range(3)]
    lses = [torch.randn(*rows, device=DEVICE) for _ in range(3)]
    # Queries that see nothing, and gates that are closed.
    lses[0][:, :7] = float("-inf")
    gates = torch.rand(*rows, 3, device=DEVICE)
    gates[:, ::3] = 0.0
    do = torch.randn_like(outputs[0])
    d_gates, upstreams = backend.prepare_backward(do, outputs, lses, gates, groups)
    *_, products = backend.combine_backward(do, *outputs, gates)
    assert torch.equal(d_gates, products)
    for i, (o, lse, upstream) in enumerate(zip(outputs, lses, upstreams, strict=True)):
        alone = Upstream(do, None, gates[..., i], products[..., i])
        expected = row_statistics(alone, Saved(o, o, o, o, lse), groups)
        assert torch.equal(upstream.gate, gates[..., i])
        for actual, wanted in zip(upstream.statistics, expected, strict=True):
            assert torch.equal(actual, wanted)


def test_what_triton_prepares_is_good_for_another_backend() -> None:
    """A branch may run elsewhere: because of its route, or because a kernel failed."""
    case = CASES["h3"]
    inputs = random_inputs(case, torch.float32)
    q, k, v = inputs.of("sliding")
    branch = branches(case, torch.device("cpu")).sliding
    o, lse = sdpa.sliding_forward(q, k, v, branch)
    gates, do = torch.rand(*q.shape[:3], 3), torch.randn_like(o)
    _, upstreams = backend.prepare_backward(*(to(DEVICE, x) for x in (do, (o,) * 3, (lse,) * 3, gates)), case.groups)
    upstream = Upstream(*(x.cpu() if isinstance(x, Tensor) else x for x in upstreams[2]))
    got = sdpa.sliding_backward(upstream, Saved(q, k, v, o, lse), branch)
    expected = sdpa.sliding_backward(Upstream(do * gates[..., 2:]), Saved(q, k, v, o, lse), branch)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def to(device: Any, x: Any) -> Any:
    return tuple(y.to(device) for y in x) if isinstance(x, tuple) else x.to(device)
