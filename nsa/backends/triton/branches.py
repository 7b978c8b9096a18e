"""Branches that run together where that is faster: the forward passes of the selected and the sliding one in the same
kernel, the backward passes of all side by side.

The gradients of keys and values of the compressed and the sliding branch need nothing of the selected branch, which
starts with small kernels, builds an index and ends with sums bound by memory. On a second stream they fill the SMs that
it leaves idle. `dq` is added up in the same order as on one stream, so the results are the same to the bit.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import record_function

from nsa.backends.gluon import tiles as gluon_tiles
from nsa.backends.stages import profiling
from nsa.backends.triton.launch import MAX_PLANS, Layout, layout, new_layout
from nsa.backends.triton.ranged_backward import start_backward
from nsa.backends.triton.selected import SelectedForwardTile, is_short, pick_forward, pick_hopper, selected_backward
from nsa.backends.triton.selected.common import run_length
from nsa.backends.triton.selected.index import Shapes, block_tables
from nsa.backends.triton.streams import forked, launching_on
from nsa.backends.triton.tiles import capability, row_contiguous
from nsa.sequences import AttentionBranches, Saved, Upstream

if TYPE_CHECKING:
    from nsa.backends.gluon.selected_sliding import SelectedSlidingForward

# Elements of `q`. In larger problems each kernel fills the GPU by itself.
MAX_SIDE_BY_SIDE = 1 << 26

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def branches_backward(
    upstreams: tuple[Upstream, Upstream, Upstream], saved: tuple[Saved, Saved, Saved], branches: AttentionBranches
) -> Gradients | None:
    """`dq`, then `dk` and `dv` of the compressed, the selected and the sliding branch; None: one after the other."""
    q = saved[0].q
    # In fp16 the gate is multiplied into the gradient before a branch sees it.
    if not q.is_cuda or q.dtype == torch.float16 or not 0 < q.numel() <= MAX_SIDE_BY_SIDE:
        return None
    return side_by_side(upstreams, saved, branches)


def side_by_side(
    upstreams: tuple[Upstream, Upstream, Upstream], saved: tuple[Saved, Saved, Saved], branches: AttentionBranches
) -> Gradients:
    window = start_backward(upstreams[2], saved[2], branches.sliding, None, accumulate=True)
    compressed = start_backward(upstreams[0], saved[0], branches.compressed, None, accumulate=True)
    started = (window, compressed)
    with forked(saved[0].q.device) as (here, other):
        written = []
        with launching_on(other):
            for one in started:
                one.key_gradients()
                written.append(None if other is None else other.record_event())
        dq, dk_sel, dv_sel = selected_backward(upstreams[1], saved[1], branches.selected)
        for one, event in zip(started, written, strict=True):
            if one.reads_keys and here is not None and event is not None:
                here.wait_event(event)
            one.query_gradient(dq)
    return dq, compressed.dk, compressed.dv, dk_sel, dv_sel, window.dk, window.dv


def pick_together(
    shapes: Shapes, k_win: Layout, v_win: Layout
) -> tuple[SelectedForwardTile, gluon_tiles.FusedTile] | None:
    """The tiles of the selected and the sliding forward pass in one kernel; None where each branch runs by itself."""
    q, k, v = shapes.q, shapes.k, shapes.v
    blocks = pick_forward(shapes.heads, shapes.d_k, shapes.d_v, q.dtype, gpu=capability(q.device))
    if blocks.method != "block" or is_short(shapes):
        return None
    blocks = replace(blocks, common_m=gluon_tiles.FusedTile().block_m)
    run = run_length(shapes.heads, blocks.common_m, shapes.select_block, shapes.n_select)
    tile = gluon_tiles.pick_fused(q, k, v, k_win, v_win, run, shapes.select_block)
    return None if tile is None else (pick_hopper(blocks, shapes), tile)


@lru_cache(maxsize=MAX_PLANS)
def runs_together(
    q_shape: tuple[int, ...], n_groups: int, d_v: int, n_select: int, select_block: int, dtype: torch.dtype,
    device: torch.device,
) -> bool:  # fmt: skip
    """Whether `selected_sliding_forward` runs an attention of fixed-length sequences whose inputs are contiguous."""
    batch, length, n_heads, d_k = q_shape
    q, k, v = (
        new_layout((batch, length, *x), dtype, device) for x in ((n_heads, d_k), (n_groups, d_k), (n_groups, d_v))
    )
    indices = new_layout((batch, length, n_groups, n_select), torch.int32, device)
    return pick_together(Shapes(q, k, v, indices, select_block, None, False), k, v) is not None


@lru_cache(maxsize=MAX_PLANS)
def plan_forward(
    q: Layout, k: Layout, v: Layout, indices: Layout, k_win: Layout, v_win: Layout, select_block: int, window: int,
    scale: float,
) -> SelectedSlidingForward | None:  # fmt: skip
    """Plan the branches' shared launch; None where each branch runs by itself."""
    shapes = Shapes(q, k, v, indices, select_block, None, False)
    tiles = pick_together(shapes, k_win, v_win)
    if tiles is None:
        return None
    from nsa.backends.gluon.selected_sliding import SelectedSlidingForward

    return SelectedSlidingForward(shapes, k_win, v_win, window, scale, *tiles)


def selected_sliding_forward(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, k_win: Tensor, v_win: Tensor, branches: AttentionBranches
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """`o` and natural `lse` of the selected branch, over `k`, `v`, then of the sliding; None: one after the other."""
    selected, sliding = branches.selected, branches.sliding
    places = (selected.sequences.cu_seqlens, selected.sequences.q_start, sliding.sequences.q_start)
    same_length = q.shape[1] == k.shape[1] == k_win.shape[1]
    if any(x is not None for x in places) or not same_length or selected.scale != sliding.scale:
        return None
    # First, because layouts take the host longer.
    sizes = (q.shape, k.shape[2], v.shape[3], indices.shape[3], selected.select_block)
    if not runs_together(*sizes, q.dtype, q.device):
        return None
    q, k, v, indices = row_contiguous(q), row_contiguous(k), row_contiguous(v), row_contiguous(indices)
    plan = plan_forward(
        layout(q), layout(k), layout(v), layout(indices), layout(k_win), layout(v_win), selected.select_block,
        sliding.view(k_win.shape[1])[1], selected.scale,
    )  # fmt: skip
    if plan is None:
        return None
    o, o_win = (torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    lse, lse_win = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    tables = block_tables(selected.sequences, k.shape[1], selected.select_block)
    with record_function("nsa::selected_sliding_forward") if profiling() else nullcontext():
        plan(q, k, v, indices, tables, o, lse, k_win, v_win, o_win, lse_win)
    return o, lse, o_win, lse_win
