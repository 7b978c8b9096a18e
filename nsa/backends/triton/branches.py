"""The backward passes of all branches, side by side where that is faster.

The gradients of keys and values of the compressed and the sliding branch need nothing of the selected branch, which
starts with small kernels, builds an index and ends with sums bound by memory. On a second stream they fill the SMs that
it leaves idle. `dq` is added up in the same order as on one stream, so the results are the same to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.backends.triton.ranged_backward import start_backward
from nsa.backends.triton.selected import selected_backward
from nsa.backends.triton.streams import forked, launching_on
from nsa.sequences import AttentionBranches, Saved, Upstream

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
