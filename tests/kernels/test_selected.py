"""The selected branch's kernels, in Triton's interpreter or on a GPU, against the reference in fp64.

Tiles, segments and scratch are made tiny, so that small problems have several of each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE, INTERPRETED, head_major  # isort: skip

from helpers import Case, Inputs, assert_same_bits, assert_within_derived_tolerance, random_inputs, results

from nsa import reference
from nsa.backends.triton import selected, selected_index
from nsa.backends.triton.selected_attend import ForwardTile
from nsa.backends.triton.selected_gradient import BackwardTile
from nsa.backends.triton.selected_index import WORD, Blocks, build_index, launches

FORWARD = {
    "query": ForwardTile("query", common_m=0),
    "query-pairs": ForwardTile("query", blocks=2, common_m=16),
    "block": ForwardTile("block", block_m=16, segment=64, common_m=16),
    "block-chunked": ForwardTile("block", block_m=32, segment=48, scratch=1, common_m=32),
}
BACKWARD = {
    "whole": BackwardTile(block_m=16, segment=64),
    "chunked": BackwardTile(block_m=32, segment=48, scratch=1),
}
BASE = Case(length=45, groups=2, heads=3, d_k=16, d_v=16, select_block=16, n_select=3)


def on_device(inputs: Inputs) -> Inputs:
    return inputs.map(lambda x: x.to(DEVICE))


def options(case: Case) -> dict:
    cu = case.cu_seqlens
    return {
        "select_block": case.select_block,
        "scale": case.d_k**-0.5,
        "cu_seqlens": None if cu is None else cu.to(DEVICE),
        "q_start": None,
    }


def upstream(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients that `helpers.results` draws."""
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator).bfloat16().to(o.dtype)
    dlse = torch.randn(lse.shape, generator=generator).bfloat16().to(lse.dtype)
    return do.to(DEVICE), dlse.to(DEVICE)


def kernel(inputs: Inputs, case: Case, forward: ForwardTile, backward: BackwardTile | None) -> dict[str, Tensor]:
    given = on_device(inputs)
    q, k, v = given.of("selected")
    o, lse = selected.selected_forward(q, k, v, given.indices, **options(case), tile=forward)
    out = {"o": o, "lse": lse}
    if backward is not None:
        gradients = selected.selected_backward(
            *upstream(o, lse), q, k, v, given.indices, o, lse, **options(case), tile=backward
        )
        out.update(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {name: x.cpu() for name, x in out.items()}


@cache
def by_reference(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The reference's results in fp64 and in `dtype`, which all tiles of a case are held to."""
    inputs = random_inputs(case, dtype)
    return results(reference, "selected", inputs.to(torch.float64), case), results(reference, "selected", inputs, case)


def check(case: Case, forward: ForwardTile, backward: BackwardTile | None, dtype: torch.dtype = torch.float32) -> None:
    inputs = random_inputs(case, dtype)
    exact, plain = by_reference(case, dtype)
    names = ("o", "lse") if backward is None else ("o", "lse", "dq", "dk", "dv")
    assert_within_derived_tolerance(
        kernel(inputs, case, forward, backward), {n: exact[n] for n in names}, {n: plain[n] for n in names}
    )


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated and not written stays NaN, and shows."""

    def empty(*shape, **kwargs):
        return fill(torch.zeros(*shape, **kwargs))

    def fill(x: Tensor) -> Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else -(2**30))

    plain_new_empty = Tensor.new_empty
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *a, **k: fill(plain_new_empty(self, *a, **k)))


@pytest.mark.parametrize("heads", [1, 3, 6, 16])
@pytest.mark.parametrize("tile", FORWARD)
def test_forward_at_every_group_size(tile: str, heads: int) -> None:
    check(BASE.but(heads=heads, groups=1, seed=heads), FORWARD[tile], None)


@pytest.mark.parametrize("heads", [1, 3, 6, 16])
@pytest.mark.parametrize("tile", BACKWARD)
def test_gradients_at_every_group_size(tile: str, heads: int) -> None:
    check(BASE.but(heads=heads, groups=1, seed=heads), FORWARD["block"], BACKWARD[tile])


@pytest.mark.parametrize("tile", ["query", "block-chunked"])
def test_half_precision(tile: str) -> None:
    check(BASE.but(heads=4), FORWARD[tile], BACKWARD["whole"], torch.float16)


@pytest.mark.parametrize("tile", ["query-pairs", "block-chunked"])
@pytest.mark.parametrize("documents", [(1, 33, 1, 30), (7, 0, 40), (16, 32, 1)], ids=lambda d: "-".join(map(str, d)))
def test_documents_do_not_see_each_other(documents: tuple[int, ...], tile: str) -> None:
    case = BASE.but(documents=documents, length=sum(documents), groups=1)
    check(case, FORWARD[tile], BACKWARD["chunked"])


@pytest.mark.parametrize(
    "case",
    [
        BASE.but(d_k=32, d_v=16),
        BASE.but(d_k=12, d_v=20),
        BASE.but(length=5),
        BASE.but(length=1, groups=1),
        BASE.but(batch=2, length=35),
        BASE.but(select_block=12),
        BASE.but(n_select=1),
    ],
    ids=["wide-keys", "odd-widths", "shorter-than-a-block", "one-token", "batch", "odd-block", "one-slot"],
)
@pytest.mark.parametrize("tile", ["query-pairs", "block"])
def test_odd_shapes(case: Case, tile: str) -> None:
    check(case, FORWARD[tile], BACKWARD["whole"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("heads", [1, 3, 6, 16])
def test_every_block_read_and_masked(heads: int, dtype: torch.dtype) -> None:
    """The method for short sequences: blocks that nobody chose, a query's own block, a last block cut short."""
    case = BASE.but(length=200, batch=2, groups=1, heads=heads, select_block=64, n_select=2, seed=heads)
    inputs = random_inputs(case, dtype)
    given = on_device(inputs)
    o, lse = selected.selected_forward(*given.of("selected"), given.indices, **options(case), method="dense")
    exact = results(reference, "selected", inputs.to(torch.float64), case)
    plain = results(reference, "selected", inputs, case)
    names = ("o", "lse")
    assert_within_derived_tolerance(
        {"o": o.cpu(), "lse": lse.cpu()}, {n: exact[n] for n in names}, {n: plain[n] for n in names}
    )


def test_a_short_sequence_reads_every_block_and_a_long_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("dense_forward", "block_forward"):
        intact = getattr(selected, name)
        monkeypatch.setattr(selected, name, lambda *args, f=intact, n=name: (taken.append(n), f(*args)))
    case = BASE.but(select_block=64, n_select=1, n_local=0)
    for length in (256, 257):
        given = on_device(random_inputs(case.but(length=length), torch.float32))
        selected.selected_forward(*given.of("selected"), given.indices, **options(case))
    assert taken == ["dense_forward", "block_forward"]


@pytest.mark.parametrize("documents", [None, (7, 0, 38)], ids=["plain", "packed"])
def test_long_blocks_of_wide_heads_are_read_in_halves(
    documents: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected, "LARGEST_BLOCK", 1)
    check(BASE.but(documents=documents), replace(FORWARD["block"], whole=4), replace(BACKWARD["whole"], whole=4))


def test_several_launches_give_the_same_as_one() -> None:
    case = BASE.but(length=100, heads=1)
    inputs = random_inputs(case, torch.float32)
    one = kernel(inputs, case, FORWARD["block"], None)
    many = kernel(inputs, case, replace(FORWARD["block"], scratch=1), None)
    assert_same_bits(many, one)


def test_an_index_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected_index, "MAX_WORDS", 1)
    check(BASE.but(length=70), FORWARD["block"], BACKWARD["whole"])


def test_strided_inputs() -> None:
    case = BASE.but(groups=1)
    inputs = random_inputs(case, torch.float32)
    strided = inputs.map(lambda x: torch.stack([x, x], dim=2)[:, :, 0] if x.is_floating_point() else x)
    expected = kernel(inputs, case, FORWARD["query"], BACKWARD["whole"])
    assert_same_bits(kernel(strided, case, FORWARD["query"], BACKWARD["whole"]), expected)


@pytest.mark.parametrize("tile", ["query", "block"])
def test_heads_that_lie_farther_apart_than_32_bits_count(tile: str) -> None:
    case = BASE.but(groups=1)
    inputs = random_inputs(case, torch.float16)
    expected = kernel(inputs, case, FORWARD[tile], BACKWARD["whole"])
    apart = inputs.but(q=head_major(inputs.q.to(DEVICE)))
    assert_same_bits(kernel(apart, case, FORWARD[tile], BACKWARD["whole"]), expected)


@pytest.mark.parametrize("tile", ["query", "block"])
def test_no_scale_is_so_small_that_the_future_counts(tile: str) -> None:
    case = BASE.but(groups=1, select_block=64)
    given = on_device(random_inputs(case, torch.float32))
    q, k, v = given.of("selected")
    # Every other query chose nothing: no run has a block in common.
    indices = given.indices.clone()
    indices[:, 1::2] = -1
    knobs = {**options(case), "scale": 1e-30, "tile": FORWARD[tile]}
    o, _ = selected.selected_forward(q, k, v, indices, **knobs)
    v[:, 30:] += 100.0
    later, _ = selected.selected_forward(q, k, v, indices, **knobs)
    assert torch.equal(o[:, :30], later[:, :30])


@pytest.mark.parametrize("n_select", [48, 129])
def test_many_chosen_blocks(n_select: int) -> None:
    """More than a run of queries can compare with one another, and more than two can."""
    case = BASE.but(length=2 * n_select + 5, groups=1, heads=1, select_block=2, n_select=n_select)
    tile = replace(FORWARD["block"], common_m=32)
    check(case, tile, BACKWARD["whole"])


def test_a_query_that_chose_nothing_gets_nothing() -> None:
    case = BASE.but(groups=1)
    inputs = random_inputs(case, torch.float32)
    inputs = inputs.but(indices=torch.full_like(inputs.indices, -1))
    for tile in ("query", "block"):
        out = kernel(inputs, case, FORWARD[tile], BACKWARD["whole"])
        assert (out.pop("lse") == float("-inf")).all()
        assert all((x == 0).all() for x in out.values())


@pytest.mark.parametrize("documents", [None, (3, 40, 0, 57)], ids=["plain", "packed"])
def test_index_lists_every_pair_once_in_order(
    documents: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = BASE.but(length=100, documents=documents)
    given = on_device(random_inputs(case))
    cu = options(case)["cu_seqlens"]
    blocks = Blocks.of(case.length, case.select_block, cu)
    index = build_index(given.indices, blocks, 0, case.length)

    start = [0] * case.length if documents is None else [s for s, n in enclosing(documents) for _ in range(n)]
    lists: dict[tuple[int, int], list[int]] = {}
    for t in range(case.length):
        first_block = 0 if blocks.offset is None else int(blocks.offset[t])
        for group in range(case.groups):
            for slot, block in enumerate(given.indices[0, t, group].tolist()):
                if 0 <= block * case.select_block <= t - start[t]:
                    lists.setdefault((group, first_block + block), []).append(t * case.n_select + slot)
    expected = [pair for key in sorted(lists) for pair in lists[key]]
    assert index.pair[: len(expected)].tolist() == expected
    assert int(index.total.flatten()[-1]) == len(expected)

    # Launches and segments hold every pair once, whatever they are cut into.
    found = []
    monkeypatch.setattr(selected_index, "SORT_FROM_QUERIES", 0)
    for launch in launches(given.indices, blocks, bytes_per_query=1, budget=1, segment=5, in_order=True):
        assert sorted(launch.order.tolist()) == list(range(launch.n_segments))
        firsts = []
        for i in launch.order.tolist():
            item = int(launch.item[i])
            if item == launch.n_items:
                firsts.append(case.length)
                continue
            low, high = int(launch.low[item]), int(launch.high[item])
            low += (i - int(launch.last_segment[item]) + -(-(high - low) // 5)) * 5
            pairs = index.pair[low : min(high, low + 5)].tolist()
            assert all(launch.query_0 <= pair // case.n_select < launch.query_1 for pair in pairs)
            firsts.append(pairs[0] // case.n_select)
            found += [(launch.row_0 + item // blocks.count, item % blocks.count, pair) for pair in pairs]
        assert firsts == sorted(firsts)
    assert sorted(found) == [(*key, pair) for key in sorted(lists) for pair in lists[key]]


def test_no_launch_is_left_with_a_rest() -> None:
    indices = torch.zeros(1, 5 * WORD, 1, 1, dtype=torch.int32, device=DEVICE)
    blocks = Blocks.of(5 * WORD, 16, None)
    cuts = launches(indices, blocks, bytes_per_query=1, budget=4 * WORD, segment=8)
    assert [launch.n_queries for launch in cuts] == [3 * WORD, 2 * WORD]


def enclosing(documents: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sum(documents[:i]), n) for i, n in enumerate(documents)]


@pytest.mark.skipif(INTERPRETED, reason="tiles differ in how they are compiled: a GPU's business")
@pytest.mark.parametrize("tile", selected.candidates(), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_candidate_tile(tile: ForwardTile | BackwardTile, dtype: torch.dtype) -> None:
    case = Case(length=1000, groups=2, heads=16, d_k=128, d_v=128, select_block=64, n_select=8)
    if isinstance(tile, ForwardTile):
        check(case, tile, None, dtype)
    else:
        check(case, ForwardTile("block"), tile, dtype)
