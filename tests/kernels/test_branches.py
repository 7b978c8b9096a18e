"""The backward passes of all branches side by side, in Triton's interpreter or on a GPU: as one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE  # isort: skip

from nsa.backends.triton import branches, prepare, ranged, selected, selection
from nsa.sequences import AttentionBranches, Saved, Upstream, attention_branches

Arguments = tuple[tuple[Upstream, Upstream, Upstream], tuple[Saved, Saved, Saved], AttentionBranches]


def problem(dtype: torch.dtype = torch.float32) -> Arguments:
    """What the backward passes of a short attention are given."""
    torch.manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=DEVICE).to(dtype)

    q, do, gates = normal(1, 70, 4, 16), normal(1, 70, 4, 16), normal(1, 70, 4, 3).sigmoid()
    (k_cmp, v_cmp), *others = ((normal(1, n, 2, 16), normal(1, n, 2, 16)) for n in (17, 70, 70))
    found = attention_branches(q, None, None, None, 4, 4, 8, 4, 1, 1, 16, 0.25)
    o_cmp, lse_cmp = ranged.compressed_forward(q, k_cmp, v_cmp, found.compressed)
    indices = selection.select_blocks(q, k_cmp, lse_cmp, found.selection)
    o_sel, lse_sel = selected.selected_forward(q, *others[0], indices, found.selected)
    o_win, lse_win = ranged.sliding_forward(q, *others[1], found.sliding)
    _, upstreams = prepare.prepare_backward(do, (o_cmp, o_sel, o_win), (lse_cmp, lse_sel, lse_win), gates, 2)
    saved = (
        Saved(q, k_cmp, v_cmp, o_cmp, lse_cmp),
        Saved(q, *others[0], o_sel, lse_sel, indices),
        Saved(q, *others[1], o_win, lse_win),
    )
    return upstreams, saved, found


def one_after_the_other(
    upstreams: tuple[Upstream, ...], saved: tuple[Saved, ...], over: AttentionBranches
) -> list[Tensor]:
    dq, *sel = selected.selected_backward(upstreams[1], saved[1], over.selected)
    dq, *win = ranged.sliding_backward(upstreams[2]._replace(dq=dq), saved[2], over.sliding)
    dq, *cmp = ranged.compressed_backward(upstreams[0]._replace(dq=dq), saved[0], over.compressed)
    return [dq, *cmp, *sel, *win]


def test_side_by_side_is_the_same_to_the_bit() -> None:
    arguments = problem()
    expected = one_after_the_other(*arguments)
    for got, wanted in zip(branches.side_by_side(*arguments), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_declines_where_nothing_is_gained(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MAX_SIDE_BY_SIDE", 64 if dtype == torch.float32 else 1 << 30)
    assert branches.branches_backward(*problem(dtype)) is None
