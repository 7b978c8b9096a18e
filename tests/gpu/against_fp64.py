"""What a GPU computes, held against the reference in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from helpers import BRANCHES, Case, random_inputs
from torch import Tensor

from nsa import NSAConfig, ops, reference
from nsa.functional import attention_kwargs
from nsa.testing import TOLERANCE_ROUNDINGS, max_error, tolerance


def assert_close_to_fp64(
    ours: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor], case: Case
) -> None:
    """The derived tolerance, plus the rounding of what cancels: `ds = p * (dp - delta)` is what two sums of the size
    `|do| |v|`, both kept in fp32, leave of each other; in a row with one key that is nothing but their rounding."""
    # Normal inputs stay below 4 deviations: |dp| below 4 sqrt(Dv), |k| and |q| below 4.
    cancelled = TOLERANCE_ROUNDINGS * torch.finfo(torch.float32).eps * 4 * case.d_v**0.5 * 4 * case.d_k**-0.5
    # `dk` and `dv` are sums over every row of a group, kept in fp32 in the kernel's order; cuBLAS splits them further.
    summed = torch.finfo(torch.float32).eps * (case.length * case.heads) ** 0.5
    for name, reference_value in exact.items():
        assert ours[name].dtype == plain[name].dtype
        if reference_value.numel() == 0:
            continue
        allowed = tolerance(plain[name], reference_value)
        allowed += cancelled if name.startswith(("dq", "dk")) else 0.0
        allowed += summed * float(reference_value.abs().max()) if name.startswith(("dk", "dv")) else 0.0
        error = max_error(ours[name], reference_value)
        assert error <= allowed, f"{name} is off by {error:.3e}, allowed {allowed:.3e}"


def whole_results(
    case: Case, dtype: torch.dtype, backend: str, gates: Tensor, size: float = 1.0
) -> Iterator[dict[str, Tensor]]:
    """The whole with every gradient: by `backend`, again, by the reference in fp64, and in `dtype`; `size`: of `do`."""
    config = NSAConfig(
        dim=64, n_heads=case.n_heads, n_kv_groups=case.groups, d_k=case.d_k, d_v=case.d_v, l=case.block, d=case.stride,
        l_sel=case.select_block, n_sel=case.n_select, n_init=case.n_init, n_local=case.n_local, w=case.window,
        backend=backend,
    )  # fmt: skip
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.cuda()
    inputs = random_inputs(case, dtype).map(Tensor.cuda)
    tensors = (inputs.q, *(x for branch in BRANCHES for x in inputs.of(branch)[1:]), gates.to(dtype))
    names = ("dq", "dk_cmp", "dv_cmp", "dk_sel", "dv_sel", "dk_win", "dv_win", "d_gates")

    def gradients(o: Tensor, leaves: list[Tensor]) -> dict[str, Tensor]:
        do = size * torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(o)
        return {"o": o.detach(), **dict(zip(names, torch.autograd.grad(o, leaves, do), strict=True))}

    def ours() -> tuple[dict[str, Tensor], Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        o, indices = ops.attention(*leaves, cu_seqlens=cu_seqlens, **attention_kwargs(config))
        return gradients(o, leaves), indices

    def expected(indices: Tensor, to: torch.dtype) -> dict[str, Tensor]:
        """By the reference, over the blocks that were selected: which ones is another test's matter."""
        leaves = [x.detach().to(to).requires_grad_() for x in tensors]
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, g = leaves
        where = {"cu_seqlens": cu_seqlens}
        o_cmp, _ = reference.compressed_attention(q, k_cmp, v_cmp, **case.compression, **where)
        o_sel, _ = reference.selected_attention(q, k_sel, v_sel, indices, select_block=case.select_block, **where)
        o_win, _ = reference.sliding_attention(q, k_win, v_win, window=case.window, **where)
        return gradients(reference.combine(o_cmp, o_sel, o_win, g), leaves)

    got, indices = ours()
    yield from (got, ours()[0], expected(indices, torch.float64), expected(indices, dtype))
