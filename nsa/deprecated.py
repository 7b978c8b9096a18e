"""Deprecated functions, which are removed in the version after 0.1.0."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa.lazy import warn_renamed


def mixture(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    *,
    branches: object,
    indices: Tensor,
    block: int,
    stride: int,
    select_block: int,
    window: int,
    window_start: Tensor | None = None,
    q_start: Tensor | None = None,
    backend: str = "auto",
    strict: bool = False,
    **options: Any,
) -> Tensor:
    """Deprecated, for one version: `attention` selects blocks and runs the branches, whose results were `branches`."""
    from nsa import ops

    warn_renamed("nsa.ops.mixture", "attention, which runs the branches too")
    options |= {"backend": backend, "strict": strict}
    starts = options | {"q_start": q_start}
    o_cmp, _ = ops.compressed_attention(q, k_cmp, v_cmp, block=block, stride=stride, **starts)
    o_sel, _ = ops.selected_attention(q, k_sel, v_sel, indices, select_block=select_block, **starts)
    o_win, _ = ops.sliding_attention(q, k_win, v_win, window=window, q_start=window_start, **options)
    return ops.combine(o_cmp, o_sel, o_win, gates, backend=backend, strict=strict)
