"""The three branches and their gated sum: one masked softmax attention with three masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.config import BRANCH_NORM_EPS, NSAConfig
from nsa.reference.selection import select_blocks
from nsa.reference.visibility import sees_compressed, sees_selected, sees_window


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Softmax attention over the visible keys.

    Args:
        q: `[B,S,Hq,Dk]`.
        k: `[B,N,G,Dk]`.
        v: `[B,N,G,Dv]`.
        visible: bool `[B,S,1 or G,N]`.
        scale: Default: `Dk ** -0.5`.

    Returns:
        `o [B,S,Hq,Dv]` and the natural-log LSE `lse [B,S,Hq]`, fp32 or fp64. A query without visible keys has `o = 0`,
        `lse = -inf` and no gradient.
    """
    n_groups = k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = q.unflatten(2, (n_groups, -1))
    visible = visible[:, :, :, None]
    empty = ~visible.any(dim=-1, keepdim=True)

    # Half precision is cast to fp32 here: scores, LSE and probabilities.
    wide = lse_dtype(q)
    scores = torch.einsum("bsghd,bngd->bsghn", q.to(wide), k.to(wide)) * scale
    # A fully masked row would give NaN gradients: use zeros and discard the result.
    scores = scores.masked_fill(~visible, float("-inf")).masked_fill(empty, 0.0)
    if k.shape[1] == 0:
        # An empty sum, which is still part of the graph.
        lse = scores.sum(dim=-1).masked_fill(empty[..., 0], float("-inf"))
    else:
        lse = scores.logsumexp(dim=-1).masked_fill(empty[..., 0], float("-inf"))
    p = scores.softmax(dim=-1).masked_fill(empty, 0.0).to(v.dtype)
    o = torch.einsum("bsghn,bngd->bsghd", p, v)
    return o.flatten(2, 3), lse.flatten(2, 3)


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    block: int,
    stride: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The compressed branch: every block that is complete at the query's position is one key and one value.

    Args:
        q: `[B,S,Hq,Dk]`.
        k_cmp: `[B,N,G,Dk]`, one key per block.
        v_cmp: `[B,N,G,Dv]`.
        block: Tokens per block.
        stride: Tokens between the starts of two blocks.

    Returns:
        `o [B,S,Hq,Dv]` and `lse [B,S,Hq]`, as `masked_attention`.
    """
    visible = sees_compressed(q, k_cmp.shape[1], block, stride, cu_seqlens, q_start)
    return masked_attention(q, k_cmp, v_cmp, visible[:, :, None], scale)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    select_block: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The selected branch: the tokens of the selected blocks up to the query.

    Args:
        q: `[B,S,Hq,Dk]`.
        k: `[B,N,G,Dk]`.
        v: `[B,N,G,Dv]`.
        indices: int `[B,S,G,n]`, the blocks of each query and group, -1 for none.
        select_block: Tokens per block.

    Returns:
        `o [B,S,Hq,Dv]` and `lse [B,S,Hq]`, as `masked_attention`.
    """
    visible = sees_selected(q, k.shape[1], indices, select_block, cu_seqlens, q_start)
    return masked_attention(q, k, v, visible, scale)


def sliding_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The sliding branch: the last `window` tokens, the query's own included.

    Args:
        q: `[B,S,Hq,Dk]`.
        k: `[B,N,G,Dk]`.
        v: `[B,N,G,Dv]`.
        window: Number of tokens.

    Returns:
        `o [B,S,Hq,Dv]` and `lse [B,S,Hq]`, as `masked_attention`.
    """
    visible = sees_window(q, k.shape[1], window, cu_seqlens, q_start)
    return masked_attention(q, k, v, visible[:, :, None], scale)


def combine(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor) -> Tensor:
    """The gated sum of the branches.

    Args:
        o_cmp, o_sel, o_win: `[B,S,Hq,Dv]`.
        gates: `[B,S,Hq,3]` in the order cmp, sel, win.

    Returns:
        `[B,S,Hq,Dv]`.
    """
    g_cmp, g_sel, g_win = gates.unsqueeze(-2).unbind(dim=-1)
    return g_cmp * o_cmp + g_sel * o_sel + g_win * o_win


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The whole attention: block selection, three branches, their gated sum.

    Args:
        q: `[B,S,Hq,Dk]`.
        k_cmp: `[B,N,G,Dk]`, compressed keys.
        v_cmp: `[B,N,G,Dv]`, compressed values.
        k_sel: `[B,S,G,Dk]`; likewise `k_win`.
        v_sel: `[B,S,G,Dv]`; likewise `v_win`.
        k_win: Of the sliding branch.
        v_win: Of the sliding branch.
        gates: `[B,S,Hq,3]` in the order cmp, sel, win.
        config: The hyperparameters.

    Returns:
        `o [B,S,Hq,Dv]`.
    """
    c = config
    varlen: dict[str, Any] = {"cu_seqlens": cu_seqlens}
    compression: dict[str, Any] = {"block": c.l, "stride": c.d, **varlen}
    counts: dict[str, Any] = {"n_select": c.n_sel, "n_init": c.n_init, "n_local": c.n_local}
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, **compression)
    indices = select_blocks(q, k_cmp, lse, select_block=c.l_sel, **counts, **compression)
    o_sel, _ = selected_attention(q, k_sel, v_sel, indices, select_block=c.l_sel, **varlen)
    o_win, _ = sliding_attention(q, k_win, v_win, window=c.w, **varlen)
    if c.branch_norm:
        o_cmp, o_sel, o_win = (normalize(o) for o in (o_cmp, o_sel, o_win))
    return combine(o_cmp, o_sel, o_win, gates)


def normalize(o: Tensor) -> Tensor:
    """`o / rms(o)` over the last dimension; 0 stays 0."""
    return o / (o.square().mean(dim=-1, keepdim=True) + BRANCH_NORM_EPS).sqrt()
