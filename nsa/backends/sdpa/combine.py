"""The gated sum of the three branches, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.backends.gated import gated_upstreams
from nsa.dtypes import sum_dtype
from nsa.sequences import Upstream


def combine_forward(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor) -> Tensor:
    total = sum_dtype(o_cmp)
    g_cmp, g_sel, g_win = gates.to(total).unsqueeze(-2).unbind(dim=-1)
    o = torch.addcmul(torch.addcmul(g_cmp * o_cmp.to(total), g_sel, o_sel.to(total)), g_win, o_win.to(total))
    return o.to(o_cmp.dtype)


def combine_backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = sum_dtype(do)
    g_cmp, g_sel, g_win = gates.to(total).unsqueeze(-2).unbind(dim=-1)
    d_cmp, d_sel, d_win = ((do.to(total) * g).to(do.dtype) for g in (g_cmp, g_sel, g_win))
    return d_cmp, d_sel, d_win, gate_products(do, (o_cmp, o_sel, o_win)).to(gates.dtype)


def gate_products(do: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """`sum(do * o)` of each branch, `[B,S,Hq,3]`: the gradient of the gates, before it is rounded."""
    total = sum_dtype(do)
    return torch.stack([(do.to(total) * o.to(total)).sum(dim=-1) for o in outputs], dim=-1)


def prepare_backward(
    do: Tensor, outputs: Sequence[Tensor], lses: Sequence[Tensor], gates: Tensor, n_groups: int
) -> tuple[Tensor, tuple[Upstream, ...]]:
    products = gate_products(do, outputs)
    return products.to(gates.dtype), gated_upstreams(do, gates, products)
