"""The Gluon kernel of a decode step, run on the CPU by `gluon_emulator.py` in the place of Triton's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

# First: it skips this file where kernels cannot run.
import test_gluon  # isort: skip
from test_decode import CASES, TOLERANCE, StepCase, StepInputs
from test_gluon import Emulator

from nsa.backends.gluon import decode, tiles
from nsa.backends.gluon.tiles import StepTile, pick_step
from nsa.backends.triton.decode import plan
from nsa.backends.triton.launch import Layout, layout, new_layout

emulator = test_gluon.emulator
KERNEL = "hopper_compressed_step_kernel"
LONG = {
    "several splits": StepCase(lengths=(190, 0, 131, 64), max_len=192),
    "64 rows": StepCase(lengths=(188, 77), tokens=4, heads=16, groups=1, max_len=192),
    "one tile per split": StepCase(lengths=(90, 37), tile=replace(CASES["one token"].tile, split=16)),
}


@pytest.fixture
def picked(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Picked for small problems too, on an H200 of one SM."""

    def pick(q: Layout, k: Layout, v: Layout, block_n: int) -> StepTile | None:
        rows = q.shape[1] * q.shape[2] // k.shape[2]
        return StepTile(block_n=block_n, num_stages=2) if k.shape[3] == v.shape[3] and rows <= 64 else None

    monkeypatch.setattr(tiles, "pick_step", pick)
    monkeypatch.setattr(decode, "sm_count", lambda device: 1)
    plan.plan_decode.cache_clear()
    yield emulator
    # No other test is to find these plans.
    plan.plan_decode.cache_clear()


@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_a_step_attends_as_the_reference_does(name: str, picked: Emulator) -> None:
    case = {**CASES, **LONG}[name]
    inputs = StepInputs(case)
    o, indices = inputs.run()
    expected, expected_indices = inputs.expected()
    assert torch.equal(indices, expected_indices)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(o.double(), expected, atol=tolerance, rtol=tolerance)
    ratio = case.select_block // case.stride
    taken = case.d_k == case.d_v and case.tokens * case.heads // case.groups <= 64 and ratio & (ratio - 1) == 0
    assert (KERNEL in picked.launched) == taken


@pytest.mark.parametrize("ctas", [1, 3])
def test_results_do_not_depend_on_the_grid(ctas: int, picked: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = StepInputs(LONG["several splits"])
    o, indices = inputs.run()
    monkeypatch.setattr(decode, "sm_count", lambda device: ctas)
    plan.plan_decode.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(inputs.run(), (o, indices), strict=True))


def test_equal_blocks_tie_across_splits(picked: Emulator) -> None:
    inputs = StepInputs(StepCase(lengths=(95, 61), select_block=8), n_distinct=4)
    inputs.q *= 7.3
    assert torch.equal(inputs.run()[1], inputs.expected()[1])
    assert KERNEL in picked.launched


def test_only_what_the_kernel_can_read_is_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "capability", lambda device: (9, 0))
    monkeypatch.setattr(tiles.gluon, "unavailable", lambda: None)
    device = torch.device("cpu")

    def pick(
        tokens: int = 4, dtype: torch.dtype = torch.bfloat16, d_k: int = 128, d_v: int = 128, block_n: int = 64
    ) -> StepTile | None:
        q, k, v = (new_layout((2, n, h, d), dtype, device) for n, h, d in ((tokens, 64, d_k), (9, 4, d_k), (9, 4, d_v)))
        return pick_step(q, k, v, block_n)

    # 16 rows per token and group: tiles of 64 rows are for more than 32.
    assert [pick(tokens) for tokens in range(1, 6)] == [None, None, StepTile(), StepTile(), None]
    assert pick(dtype=torch.float32) is None
    assert pick(d_v=64) is None
    assert pick(d_k=64, d_v=64) is None
    assert pick(block_n=128) is None
    q = new_layout((2, 4, 64, 128), torch.bfloat16, device)
    unaligned = layout(torch.empty(2 * 9 * 4 * 128 + 1, dtype=torch.bfloat16)[1:].view(2, 9, 4, 128))
    assert pick_step(q, unaligned, unaligned, 64) is None
    monkeypatch.setattr(tiles, "capability", lambda device: (8, 0))
    assert pick() is None
