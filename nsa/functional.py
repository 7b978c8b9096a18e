"""The whole attention from ready keys: compressed keys choose the blocks, three branches attend, the gate mixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nsa import ops
from nsa.config import NSAConfig, require
from nsa.ops.checks import check_finite, check_keys_values, check_queries, check_token_count


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
    """NSA of `q [B,S,Hq,Dk]` over already compressed, selected and sliding keys; returns `o`.

    `gates [B,S,Hq,3]`, none negative: a sigmoid's or a softmax's.
    """
    check_tensors(q, {"cmp": (k_cmp, v_cmp), "sel": (k_sel, v_sel), "win": (k_win, v_win)}, config)
    o, _ = attend(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, config=config, cu_seqlens=cu_seqlens)
    return o


def attend(
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
    q_start: Tensor | None = None,
    window_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(o, indices)`. With a cache `q_start` is where the queries start in `k_sel`, `window_start` where in `k_win`."""
    served: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": config.backend, "strict": config.strict}
    compression: dict[str, Any] = {"block": config.l, "stride": config.d}
    # The branches are computed without autograd, and differentiated together with the gate that mixes them.
    leaves = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)
    q0, k_cmp0, v_cmp0, k_sel0, v_sel0, k_win0, v_win0 = (x.detach() for x in leaves)
    o_cmp, lse_cmp = ops.compressed_attention(q0, k_cmp0, v_cmp0, q_start=q_start, **compression, **served)
    indices = ops.select_blocks(
        q0,
        k_cmp0,
        lse_cmp,
        select_block=config.l_sel,
        n_select=config.n_sel,
        n_init=config.n_init,
        n_local=config.n_local,
        q_start=q_start,
        **compression,
        **served,
    )
    chosen: dict[str, Any] = {"select_block": config.l_sel, "q_start": q_start}
    o_sel, lse_sel = ops.selected_attention(q0, k_sel0, v_sel0, indices, **chosen, **served)
    o_win, lse_win = ops.sliding_attention(q0, k_win0, v_win0, window=config.w, q_start=window_start, **served)
    o = ops.mixture(
        q,
        k_cmp,
        v_cmp,
        k_sel,
        v_sel,
        k_win,
        v_win,
        gates,
        branches=((o_cmp, lse_cmp), (o_sel, lse_sel), (o_win, lse_win)),
        indices=indices,
        window=config.w,
        window_start=window_start,
        **chosen,
        **compression,
        **served,
    )
    return o, indices


def check_tensors(q: Tensor, branches: Mapping[str, tuple[Tensor, Tensor]], config: NSAConfig) -> None:
    """The tensors are those of this configuration, under the names they have here: the ops say `k` and `v`."""
    require(isinstance(config, NSAConfig), "config", config, "an NSAConfig")
    check_queries(q)
    expected = {"q": (q, config.n_heads, config.d_k)}
    for branch, (k, v) in branches.items():
        expected[f"k_{branch}"] = (k, config.n_kv_groups, config.d_k)
        expected[f"v_{branch}"] = (v, config.n_kv_groups, config.d_v)
    for name, (x, heads, width) in expected.items():
        shape = tuple(x.shape[2:]) if isinstance(x, Tensor) else x
        require(shape == (heads, width), f"{name}.shape[2:]", shape, f"({heads}, {width}), as config says")
    for branch, (k, v) in branches.items():
        check_keys_values(q, k, v, f"k_{branch}", f"v_{branch}")
    for branch in ("sel", "win"):
        check_token_count(q, branches[branch][0], None, f"k_{branch}")
    if not torch.compiler.is_compiling():
        check_finite(config.strict, **{name: x for name, (x, _, _) in expected.items()})
