"""The backward passes of all branches side by side, in Triton's interpreter or on a GPU: as one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE  # isort: skip

from nsa.backends.triton import branches, prepare, ranged, selected, selection
from nsa.backends.triton.launch import Launch
from nsa.backends.triton.ranged_backward import StartedPass
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


@pytest.mark.slow
def test_side_by_side_is_the_same_to_the_bit() -> None:
    arguments = problem()
    expected = one_after_the_other(*arguments)
    for got, wanted in zip(branches.side_by_side(*arguments), expected, strict=True):
        assert torch.equal(got, wanted)


class LateStream:
    """A second stream that runs what was launched on it no sooner than something waits for it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.current = False

    @contextmanager
    def fork(self, _: torch.device) -> Iterator[tuple[LateStream, LateStream]]:
        yield self, self
        self.wait_event(len(self.waiting))

    @contextmanager
    def launching(self, _: LateStream) -> Iterator[None]:
        self.current = True
        yield
        self.current = False

    def record_event(self) -> int:
        return len(self.waiting)

    def wait_event(self, event: int) -> None:
        """The other stream waits for the launches before `event`."""
        for i, launch in enumerate(self.waiting[:event]):
            launch()
            self.waiting[i] = lambda: None


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    stream = LateStream()
    monkeypatch.setattr(branches, "forked", stream.fork)
    monkeypatch.setattr(branches, "launching_on", stream.launching)
    return stream


@pytest.mark.slow
def test_a_second_stream_that_runs_late_changes_no_bit(late: LateStream, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch.__call__

    def defer(self: Launch, **free: Any) -> None:
        if late.current:
            late.waiting.append(partial(launch, self, **free))
        else:
            launch(self, **free)

    arguments = problem()
    expected = one_after_the_other(*arguments)
    monkeypatch.setattr(Launch, "__call__", defer)
    for got, wanted in zip(branches.side_by_side(*arguments), expected, strict=True):
        assert torch.equal(got, wanted)
    assert len(late.waiting) >= 2


@pytest.mark.parametrize("reads_keys", [False, True])
def test_dq_waits_for_what_it_reads(reads_keys: bool, late: LateStream, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    upstreams, saved, over = problem()

    def start(upstream: Upstream, saved: Saved, branch: Any, tile: None, *, accumulate: bool) -> StartedPass:
        name = type(branch).__name__
        done.append(f"start {name}")

        def key_gradients() -> None:
            late.waiting.append(lambda: done.append(f"dk, dv {name}"))

        def query_gradient(into: Tensor | None) -> Tensor:
            assert into is saved.q
            assert accumulate
            assert not late.current
            done.append(f"dq {name}")
            return into

        return StartedPass(saved.k, saved.v, key_gradients, query_gradient, reads_keys)

    def run_selected(*_: Any) -> tuple[Tensor, Tensor, Tensor]:
        done.append("selected")
        return saved[0].q, saved[1].k, saved[1].v

    monkeypatch.setattr(branches, "start_backward", start)
    monkeypatch.setattr(branches, "selected_backward", run_selected)
    branches.side_by_side(upstreams, saved, over)
    # Memory first; then dq in the order of one stream, whose sums depend on it.
    assert done[:3] == ["start Sliding", "start Compressed", "selected"]
    rest = ["dk, dv Sliding", "dq Sliding", "dk, dv Compressed", "dq Compressed"]
    assert done[3:] == (rest if reads_keys else [*rest[1::2], *rest[::2]])


@pytest.mark.parametrize(
    ("device", "dtype", "size", "expected"),
    [
        ("cuda", torch.bfloat16, (1, 8192, 64, 128), True),
        ("cuda", torch.float32, (8, 2048, 12, 64), True),
        ("cuda", torch.bfloat16, (1, 8193, 64, 128), False),
        ("cuda", torch.bfloat16, (0, 8192, 64, 128), False),
        ("cuda", torch.float16, (8, 2048, 12, 64), False),
        ("cpu", torch.float32, (8, 2048, 12, 64), False),
    ],
    ids=str,
)
def test_short_problems_but_in_fp16_run_side_by_side(
    device: str, dtype: torch.dtype, size: tuple[int, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "side_by_side", lambda *_: "both")
    with FakeTensorMode():
        q = torch.empty(size, dtype=dtype, device=device)
        saved: Any = (Saved(q, q, q, q, q),) * 3
        none: Any = None
        assert branches.branches_backward(none, saved, none) == ("both" if expected else None)
