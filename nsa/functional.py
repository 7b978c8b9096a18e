"""The whole attention of one `NSAConfig`, from ready keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa import ops
from nsa.checks import check_queries, once_per_layout
from nsa.config import BRANCH_NORM_EPS, PAPER_NAMES, NSAConfig, require
from nsa.sequences import ATTENTION_NAMES, COMPRESSED_NAMES, SELECTED_NAMES, SELECTION_NAMES, SLIDING_NAMES

# The values of all hyperparameters, in the order of the arguments of `nsa::attention`.
hyperparameters_of: Callable[[NSAConfig], tuple[int, ...]] = attrgetter(
    *(PAPER_NAMES.get(x, x) for x in ATTENTION_NAMES)
)


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
    """NSA of `q` over already compressed, selected and sliding keys.

    Args:
        q: `[B,S,Hq,Dk]`.
        k_cmp, v_cmp: compressed keys and values `[B,N,G,D]`; the others `[B,S,G,D]`.
        gates: `[B,S,Hq,3]`, none negative: a sigmoid's or a softmax's.
        config: heads and head dims must be the tensors'.
        cu_seqlens: int32 `[n+1]`, offsets of the documents of a varlen batch; `B = 1`.

    Returns:
        `o [B,S,Hq,Dv]`.

    Raises:
        ValueError: an argument is wrong; the message names it.
    """
    check_config(config, q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)
    tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    if config.branch_norm:
        return attend_normed(*tensors, config=config, cu_seqlens=cu_seqlens)[0]
    o, _ = ops.attention(*tensors, cu_seqlens=cu_seqlens, **attention_kwargs(config))
    return o


def hyperparameter_kwargs(config: NSAConfig, names: Sequence[str] = ATTENTION_NAMES) -> dict[str, Any]:
    """The values of the hyperparameters `names`, by name."""
    return {name: getattr(config, PAPER_NAMES.get(name, name)) for name in names}


def attend_normed(
    q: Tensor,
    *others: Tensor,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    window_start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`nsa.ops.attention` where `config.branch_norm` is set: `o [B,S,Hq,Dv]` and the selected blocks. Each branch runs
    by its own op: no kernel that combines them normalizes. `others`: keys, values and gates in the order of the op."""
    c, (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates) = config, others
    places: dict[str, Any] = {"cu_seqlens": cu_seqlens, "q_start": q_start}
    o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, **places, **attention_kwargs(c, COMPRESSED_NAMES))
    indices = ops.select_blocks(q, k_cmp, lse, **places, **attention_kwargs(c, SELECTION_NAMES))
    o_sel, _ = ops.selected_attention(q, k_sel, v_sel, indices, **places, **attention_kwargs(c, SELECTED_NAMES))
    places["q_start"] = window_start
    o_win, _ = ops.sliding_attention(q, k_win, v_win, **places, **attention_kwargs(c, SLIDING_NAMES))
    branches = torch.stack([o_cmp, o_sel, o_win], dim=-2)
    normed = F.rms_norm(branches, branches.shape[-1:], eps=BRANCH_NORM_EPS).to(q.dtype)
    return (gates[..., None] * normed).sum(dim=-2), indices


def attention_kwargs(config: NSAConfig, names: Sequence[str] = ATTENTION_NAMES) -> dict[str, Any]:
    """The values in `config` of the arguments of `nsa.ops.attention`, or of the op of one stage with hyperparameters
    `names`."""
    return {**hyperparameter_kwargs(config, names), "backend": config.backend, "strict": config.strict}


@once_per_layout
def check_config(config: NSAConfig, q: Tensor, *keys_values: Tensor) -> None:
    """The tensors have the heads and head dims of this configuration."""
    require(isinstance(config, NSAConfig), "config", config, "an NSAConfig")
    check_queries(q)
    names = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
    expected = {"q": (q, config.n_heads, config.d_k)}
    for name, x in zip(names, keys_values, strict=True):
        expected[name] = (x, config.n_kv_groups, config.d_k if name.startswith("k") else config.d_v)
    for name, (x, heads, head_dim) in expected.items():
        shape = tuple(x.shape[2:]) if isinstance(x, Tensor) else x
        require(shape == (heads, head_dim), f"{name}.shape[2:]", shape, f"({heads}, {head_dim}), as config says")
