"""The three branches and their mixture: one masked softmax attention, three masks, one gated sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.reference.selection import select_blocks
from nsa.reference.visibility import sees_compressed, sees_selected, sees_window


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Softmax attention of `q [B,S,Hq,Dk]` over the visible keys of its group; `visible [B,S,1 or G,N]`.

    Returns `o [B,S,Hq,Dv]` and the natural-log normaliser `lse [B,S,Hq]`. A query that sees nothing gets `o = 0` and
    `lse = -inf`, and no gradient.
    """
    n_groups = k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q = q.unflatten(2, (n_groups, -1))
    visible = visible[:, :, :, None]
    empty = ~visible.any(dim=-1, keepdim=True)

    # Half precision is widened here, once: from the scores to the probabilities everything is fp32.
    wide = lse_dtype(q)
    scores = torch.einsum("bsghd,bngd->bsghn", q.to(wide), k.to(wide)) * scale
    # An all-masked row would give NaN gradients: let it be a row of zeros and discard what comes of it.
    scores = scores.masked_fill(~visible, float("-inf")).masked_fill(empty, 0.0)
    if k.shape[1] == 0:
        # The sum over nothing, which is still part of the graph.
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
    """The compressed branch: every block that is complete at the query's position, seen as one key and one value."""
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
    """The selected branch: the tokens of the chosen blocks, in full; `indices [B,S,G,n]`, -1 for none."""
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
    """The sliding branch: the last `window` tokens, the query's own included."""
    visible = sees_window(q, k.shape[1], window, cu_seqlens, q_start)
    return masked_attention(q, k, v, visible[:, :, None], scale)


def combine(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor) -> Tensor:
    """The mixture: `gates [B,S,Hq,3]` weigh the compressed, selected and sliding outputs of each head."""
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
    """The whole: compressed keys choose the blocks, three branches attend, the gate mixes them."""
    packed: dict[str, Any] = {"cu_seqlens": cu_seqlens}
    compression: dict[str, Any] = {"block": config.l, "stride": config.d}
    o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, **compression, **packed)
    indices = select_blocks(
        q,
        k_cmp,
        lse,
        **compression,
        select_block=config.l_sel,
        n_select=config.n_sel,
        n_init=config.n_init,
        n_local=config.n_local,
        **packed,
    )
    o_sel, _ = selected_attention(q, k_sel, v_sel, indices, select_block=config.l_sel, **packed)
    o_win, _ = sliding_attention(q, k_win, v_win, window=config.w, **packed)
    return combine(o_cmp, o_sel, o_win, gates)
