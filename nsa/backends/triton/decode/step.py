"""A whole decode step between the projections: 6 launches, or 7 where an MLP compresses.

Append (RoPE, the cache's writes), emission of finished compressed blocks, the four launches of the attention, the last
of which takes the new tokens in for good. Whatever fails before it leaves the cache's lengths as they were.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nsa.backends.triton.decode.append import append_kernel
from nsa.backends.triton.decode.emit import inner_kernel, mean_kernel, outer_kernel
from nsa.backends.triton.decode.plan import (
    DecodeTile,
    Form,
    GateLayer,
    Hyperparameters,
    Pages,
    Scales,
    dependent_launch,
    plan_decode,
)
from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout, strides
from nsa.backends.triton.tiles import block_width, row_contiguous
from nsa.geometry import n_compressed
from nsa.sequences import Pair

Layouts = tuple[Layout, Layout]

# What `append_kernel` is not given where the cache is one store.
RINGS = ("k_raw", "v_raw", "k_win", "v_win", "tail_k", "tail_v", "window_k", "window_v")
APPEND_SCALES = ("selected_k_scale", "selected_v_scale", "window_k_scale", "window_v_scale")
EMIT_SCALES = ("compressed_k_scale", "compressed_v_scale")
HEAD_TILE = 16
CANDIDATES = 16
HIDDEN_TILE = 32


class Projected(NamedTuple):
    """Queries `[B,T,Hq,Dk]`, and keys and values `[B,T,G,D]` of the three branches, none of them rotated."""

    q: Tensor
    raw: Pair
    selected: Pair
    window: Pair


class Stores(NamedTuple):
    """A cache's tensors: four pairs `[B,places+1,G,D]`, and `[B]` int32 lengths and high-water marks. `frequencies`:
    RoPE's, fp64 `[Dk/2]`. With `pages`, compressed and selected are `[pages,places,G,D]`. With `scales`, all but the
    tail hold the bytes of e4m3."""

    tail: Pair
    compressed: Pair
    selected: Pair
    window: Pair
    lengths: Tensor
    high_water: Tensor
    frequencies: Tensor
    pages: Pages | None = None
    scales: Scales | None = None


class Mlp(NamedTuple):
    """The MLP that compresses keys or values: `position [l,D]`, `inner [H,l*D]`, `[H]`, `outer [D,H]`, `[D]`."""

    position: Tensor
    inner: Tensor
    inner_bias: Tensor
    outer: Tensor
    outer_bias: Tensor


def step_arguments(q: Layout, kv: Layouts, max_len: int, counted: bool, form: Form) -> dict[str, Any]:
    """What the launches before the attention have in common; `kv`: a store of the cache."""
    k, v = kv
    sizes = {"G": k.shape[2], "T": q.shape[1], "DK": q.shape[3], "DV": v.shape[3], "max_len": max_len}
    absent = ({} if counted else {"counts": None}) | ({} if form.page else {"limits": None})
    return {**sizes, **absent, **dependent_launch(q.device)}


def page_arguments(form: Form, scales: tuple[str, ...]) -> dict[str, Any]:
    """Of launches that write a store of this form."""
    absent = ({} if form.page else {"table": None}) | ({} if form.fp8 else dict.fromkeys(scales))
    return {"columns": form.columns, **absent}


@lru_cache(maxsize=MAX_PLANS)
def plan_append(
    q: Layout,
    new: Layouts,
    selected: Layouts,
    max_len: int,
    counted: bool,
    form: Form,
    rings: tuple[Layouts, Layouts] | None = None,
    rotate_raw: bool = False,
) -> Launch:
    """RoPE of the queries and the writes to the store `selected`, which holds all tokens, and to those of the window
    and the raw tail, `rings`, which dense attention does not have."""
    _, n_tokens, n_heads, d_k = q.shape
    window, tail = rings or ((None, None), (None, None))
    groups, d_v = selected[0].shape[2], selected[1].shape[3]
    for k, v in (selected, *(rings or ())):
        assert (k.strides[2], v.strides[2]) == (d_k, d_v), "stores are contiguous"
    n_head_tiles = triton.cdiv(n_heads, HEAD_TILE)
    return Launch(
        append_kernel,
        (q.shape[0] * n_tokens, n_head_tiles + (1 if rings is None else 3)),
        **strides(q_bth=q, k_btg=new[0], v_btg=new[1], sk_bn=selected[0], sv_bn=selected[1]),
        **strides(wk_bn=window[0], wv_bn=window[1], tk_bn=tail[0], tv_bn=tail[1]),
        **step_arguments(q, selected, max_len, counted, form),
        **page_arguments(form, APPEND_SCALES),
        **(dict.fromkeys(RINGS) if rings is None else {}),
        PAGE=max(1, form.page),
        tail_places=0 if tail[0] is None else tail[0].shape[1] - 1,
        window_places=0 if window[0] is None else window[0].shape[1] - 1,
        HEADS=n_heads,
        G_PAD=triton.next_power_of_2(groups),
        BLOCK_HALF=triton.next_power_of_2(d_k // 2),
        BLOCK_HALF_V=triton.next_power_of_2(d_v // 2),
        HEAD_TILE=HEAD_TILE,
        N_HEAD_TILES=n_head_tiles,
        ROTATE_RAW=rotate_raw,
        num_warps=4,
        enable_fp_fusion=False,
    )


class StepPlan:
    """The launches before the attention."""

    def __init__(
        self,
        q: Layout,
        new: tuple[Layouts, Layouts, Layouts],
        tail: Layouts,
        compressed: Layouts,
        selected: Layouts,
        window: Layouts,
        how: Hyperparameters,
        hidden: tuple[int, int] | None,
        rotate_raw: bool,
        counted: bool,
        form: Form,
    ) -> None:
        batch, n_tokens, n_heads, d_k = q.shape
        groups, d_v = tail[0].shape[2], tail[1].shape[3]
        assert len({(k.strides, v.strides) for k, v in new}) == 1, "one projection makes the keys of all branches"
        assert [x.strides[2] for x in compressed] == [d_k, d_v], "stores are contiguous"
        self.q_shape = (batch, n_tokens, n_heads, d_k)
        rings = (window, tail)
        self.append = plan_append(q, new[0], selected, how.max_len, counted, form, rings, rotate_raw)
        # Blocks that a step may complete in a row; none where one is longer than the cache.
        per_row = triton.cdiv(n_tokens, how.stride) if n_compressed(how.max_len, how.block, how.stride) else 0
        self.candidates = batch * per_row * groups
        self.hidden = None if hidden is None else tuple((self.candidates, size) for size in hidden)
        if not self.candidates:
            return
        common = step_arguments(q, tail, how.max_len, counted, form)
        common |= {"n_candidates": self.candidates, "E": per_row, "BLOCK": how.block, "STRIDE": how.stride}
        from_tail = strides(tk_bn=tail[0], tv_bn=tail[1]) | {"places": tail[0].shape[1] - 1}
        into = strides(ck_bn=compressed[0], cv_bn=compressed[1]) | {"ROTATE": not rotate_raw}
        into |= {"BLOCK_HALF_K": halves(d_k), "BLOCK_HALF_V": halves(d_v), "PAGE": max(1, form.page // how.stride)}
        into |= page_arguments(form, EMIT_SCALES)
        if hidden is None:
            self.mean = Launch(mean_kernel, (self.candidates, 2), **common, **from_tail, **into, num_warps=1)
            return
        n_tiles = triton.cdiv(self.candidates, CANDIDATES)
        layers = {"C": CANDIDATES, "HIDDEN_K": hidden[0], "HIDDEN_V": hidden[1], "BLOCK_H": HIDDEN_TILE}
        self.inner = Launch(
            inner_kernel,
            (n_tiles, triton.cdiv(max(hidden), HIDDEN_TILE), 2),
            **common,
            **from_tail,
            **layers,
            BLOCK_DK=block_width(d_k),
            BLOCK_DV=block_width(d_v),
            STAGES=4,
            num_warps=4,
        )
        self.outer = Launch(outer_kernel, (n_tiles, 2), **common, **into, **layers, num_warps=4)


def halves(head_dim: int) -> int:
    """Features of half a head as a tile has them: two of these are a dimension of a matmul, which is at least 16."""
    return max(8, triton.next_power_of_2(head_dim // 2))


plan_step = lru_cache(maxsize=MAX_PLANS)(StepPlan)


def decode_step(
    new: Projected,
    stores: Stores,
    gates: Tensor | GateLayer,
    how: Hyperparameters,
    *,
    phi: tuple[Mlp, Mlp] | None,
    rotate_raw: bool = False,
    position_offset: int = 0,
    counts: Tensor | None = None,
    tile: DecodeTile | None = None,
) -> tuple[Tensor, Tensor]:
    """Append `T` new tokens per row to a cache, and attend from them.

    The launch before must write neither the cache's lengths nor `counts` (`common.py`).

    Args:
        new: the projections of the new tokens; keys and values of the three branches with the same strides.
        stores: the cache, written in place; its lengths last.
        gates: `[B,T,Hq,3]`, or the layer that computes them.
        how: the hyperparameters and `max_len`. A token at or past `max_len` is dropped.
        phi: the MLPs that compress keys and values; None: the mean.
        rotate_raw: raw keys are rotated before they are compressed, not after.
        position_offset: added to RoPE's positions.
        counts: int64 `[B]`, contiguous, how many of the `T` tokens are real, the first ones.

    Returns:
        `o [B,T,Hq,Dv]` and the selected blocks `[B,T,G,n_select]`, as of `decode_attention`.
    """
    q = row_contiguous(new.q)
    pairs = (stores.tail, stores.compressed, stores.selected, stores.window)
    keys = [(layout(k), layout(v)) for k, v in (new.raw, new.selected, new.window)]
    laid = [(layout(k), layout(v)) for k, v in pairs]
    counted = counts is not None
    hidden = None if phi is None else (phi[0].inner.shape[0], phi[1].inner.shape[0])
    form = Form.of(stores.pages, stores.scales)
    plan = plan_step(layout(q), tuple(keys), *laid, how, hidden, rotate_raw, counted, form)
    given = {} if counts is None else {"counts": counts}
    table = {}
    if stores.pages is not None:
        given["limits"] = stores.pages.limits
        table["table"] = stores.pages.table
    cmp_scales, sel_scales, win_scales = stores.scales or ((), (), ())
    start = {"start": stores.lengths, **given}
    tail = {"tail_k": stores.tail[0], "tail_v": stores.tail[1]}
    angles = {"frequencies": stores.frequencies, "position_offset": position_offset}
    rotated = torch.empty(plan.q_shape, dtype=q.dtype, device=q.device)
    gated, width = (None, gates.hidden.shape[2]) if isinstance(gates, GateLayer) else (layout(gates), 0)
    attention = plan_decode(
        layout(rotated), *laid[1:], gated, how, tile or DecodeTile(), form, commits=True, counted=counted,
        gate_width=width,
    )  # fmt: skip
    shape, dtype, device = attention.arrivals
    arrivals = torch.empty(shape, dtype=dtype, device=device)
    plan.append(
        q=q,
        k_raw=new.raw[0],
        v_raw=new.raw[1],
        k_sel=new.selected[0],
        v_sel=new.selected[1],
        k_win=new.window[0],
        v_win=new.window[1],
        q_out=rotated,
        arrivals=arrivals,
        selected_k=stores.selected[0],
        selected_v=stores.selected[1],
        window_k=stores.window[0],
        window_v=stores.window[1],
        **dict(zip(APPEND_SCALES, (*sel_scales, *win_scales), strict=False)),
        **table,
        **tail,
        **start,
        **angles,
    )
    if plan.candidates:
        into = {"compressed_k": stores.compressed[0], "compressed_v": stores.compressed[1], **start, **angles, **table}
        into |= dict(zip(EMIT_SCALES, cmp_scales, strict=False))
        if phi is None:
            plan.mean(**tail, **into)
        else:
            k, v = phi
            hidden_k, hidden_v = (torch.empty(shape, dtype=q.dtype, device=q.device) for shape in plan.hidden or ())
            between = {"hidden_k": hidden_k, "hidden_v": hidden_v}
            plan.inner(
                position_k=k.position,
                position_v=v.position,
                weight_k=k.inner,
                weight_v=v.inner,
                bias_k=k.inner_bias,
                bias_v=v.inner_bias,
                **between,
                **tail,
                **start,
            )
            plan.outer(
                weight_k=k.outer,
                weight_v=v.outer,
                bias_k=k.outer_bias,
                bias_v=v.outer_bias,
                **between,
                **into,
            )
    committed: dict[str, Any] = {"lengths": stores.lengths, "high_water": stores.high_water, **given}
    read = stores.compressed, stores.selected, stores.window
    return attention.run(rotated, *read, gates, stores.lengths, arrivals, stores.pages, stores.scales, **committed)
