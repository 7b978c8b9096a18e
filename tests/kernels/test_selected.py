"""The selected branch's kernels, in Triton's interpreter or on a GPU, against the reference in fp64.

Tiles, segments and scratch are made tiny, so that small problems have several of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE, INTERPRETED, head_major  # isort: skip

from helpers import Case, Inputs, assert_same_bits, assert_within_derived_tolerance, branches, random_inputs, results

from nsa import reference
from nsa.backends.triton import launch, selected
from nsa.backends.triton.launch import layout
from nsa.backends.triton.selected import SelectedBackwardTile, SelectedForwardTile, index
from nsa.backends.triton.selected.dense import DenseForward
from nsa.backends.triton.selected.forward import BlockForward
from nsa.backends.triton.selected.index import WORD, Chunk, Segments, Shapes, block_tables, index_plans
from nsa.sequences import Saved, Selected, Upstream

FORWARD = {
    "query": SelectedForwardTile("query", common_m=0),
    "query-pairs": SelectedForwardTile("query", blocks=2, common_m=16),
    "block": SelectedForwardTile("block", block_m=16, segment=64, common_m=16),
    "block-chunked": SelectedForwardTile("block", block_m=32, segment=48, scratch=1, common_m=32),
}
BACKWARD = {
    "whole": SelectedBackwardTile(block_m=16, segment=64),
    "chunked": SelectedBackwardTile(block_m=32, segment=48, scratch=1),
}
BASE = Case(length=45, groups=2, heads=3, d_k=16, d_v=16, select_block=16, n_select=3)


def on_device(inputs: Inputs) -> Inputs:
    return inputs.map(lambda x: x.to(DEVICE))


def branch_of(case: Case, scale: float | None = None) -> Selected:
    return branches(case, DEVICE, scale).selected


def upstream(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients that `helpers.results` draws."""
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator).bfloat16().to(o.dtype)
    dlse = torch.randn(lse.shape, generator=generator).bfloat16().to(lse.dtype)
    return do.to(DEVICE), dlse.to(DEVICE)


def kernel(
    inputs: Inputs, case: Case, forward: SelectedForwardTile, backward: SelectedBackwardTile | None
) -> dict[str, Tensor]:
    given = on_device(inputs)
    q, k, v = given.of("selected")
    branch = branch_of(case)
    o, lse = selected.selected_forward(q, k, v, given.indices, branch, tile=forward)
    out = {"o": o, "lse": lse}
    if backward is not None:
        saved = Saved(q, k, v, o, lse, given.indices)
        gradients = selected.selected_backward(Upstream(*upstream(o, lse)), saved, branch, tile=backward)
        out.update(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {name: x.cpu() for name, x in out.items()}


@cache
def by_reference(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The reference's results in fp64 and in `dtype`, which all tiles of a case are held to."""
    inputs = random_inputs(case, dtype)
    return results(reference, "selected", inputs.to(torch.float64), case), results(reference, "selected", inputs, case)


def check(
    case: Case, forward: SelectedForwardTile, backward: SelectedBackwardTile | None, dtype: torch.dtype = torch.float32
) -> None:
    inputs = random_inputs(case, dtype)
    exact, plain = by_reference(case, dtype)
    names = ("o", "lse") if backward is None else ("o", "lse", "dq", "dk", "dv")
    assert_within_derived_tolerance(
        kernel(inputs, case, forward, backward), {n: exact[n] for n in names}, {n: plain[n] for n in names}
    )


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """Some tests change constants that plans are made with."""
    yield
    selected.plan_forward.cache_clear()
    selected.plan_backward.cache_clear()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated and not written stays NaN, and shows."""

    plain_empty = torch.empty

    def empty(*shape, **kwargs):
        return fill(plain_empty(*shape, **kwargs))

    def fill(x: Tensor) -> Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else -(2**30))

    plain_new_empty = Tensor.new_empty
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *a, **k: fill(plain_new_empty(self, *a, **k)))


@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("tile", ["query", "query-pairs", "block-chunked"])
def test_forward_at_every_group_size(tile: str, heads: int) -> None:
    check(BASE.but(heads=heads, groups=1, seed=heads), FORWARD[tile], None)


@pytest.mark.parametrize("heads", [1, 3, 16])
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
    check(case, FORWARD[tile], BACKWARD["chunked"] if tile == "block-chunked" else None)


@pytest.mark.parametrize(
    "case",
    [
        BASE.but(groups=1, d_k=32, d_v=16),
        BASE.but(groups=1, d_k=12, d_v=20),
        BASE.but(length=5),
        BASE.but(groups=1, length=1),
        BASE.but(batch=2, length=35, heads=1),
        BASE.but(groups=1, select_block=12),
        BASE.but(groups=1, n_select=1),
    ],
    ids=["wide-keys", "odd-head_dims", "shorter-than-a-block", "one-token", "batch", "odd-block", "one-slot"],
)
@pytest.mark.parametrize("tile", ["query-pairs", "block"])
def test_odd_shapes(case: Case, tile: str) -> None:
    check(case, FORWARD[tile], BACKWARD["whole"] if tile == "block" else None)


@pytest.mark.parametrize(
    ("heads", "dtype"), [(1, torch.float32), (3, torch.float16), (6, torch.float32), (16, torch.float16)], ids=str
)
def test_every_block_read_and_masked(heads: int, dtype: torch.dtype) -> None:
    """The method for short sequences: blocks that no query selected, a query's own block, a last block cut short."""
    case = BASE.but(length=140, batch=2, groups=1, heads=heads, select_block=64, n_select=2, seed=heads)
    inputs = random_inputs(case, dtype)
    given = on_device(inputs)
    o, lse = selected.selected_forward(*given.of("selected"), given.indices, branch_of(case), method="dense")
    exact = results(reference, "selected", inputs.to(torch.float64), case)
    plain = results(reference, "selected", inputs, case)
    names = ("o", "lse")
    assert_within_derived_tolerance(
        {"o": o.cpu(), "lse": lse.cpu()}, {n: exact[n] for n in names}, {n: plain[n] for n in names}
    )


@pytest.mark.parametrize(("length", "expected"), [(256, DenseForward), (257, BlockForward)])
def test_only_a_short_sequence_reads_every_block(length: int, expected: type) -> None:
    case = BASE.but(select_block=64, n_select=1, n_local=0, length=length)
    given = random_inputs(case, torch.float32)
    layouts = (layout(x) for x in (*given.of("selected"), given.indices))
    assert type(selected.plan_forward(*layouts, case.select_block, None, False, 1.0, None, None).run) is expected


@pytest.mark.parametrize("documents", [None, (7, 0, 38)], ids=["fixed", "varlen"])
def test_long_blocks_of_wide_heads_are_read_in_halves(
    documents: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected, "LARGEST_BLOCK", 1)
    forward, backward = (replace(tile, max_block_keys=4) for tile in (FORWARD["block"], BACKWARD["whole"]))
    check(BASE.but(documents=documents, groups=1), forward, backward)


def test_several_launches_give_the_same_as_one() -> None:
    case = BASE.but(length=100, heads=1)
    inputs = random_inputs(case, torch.float32)
    one = kernel(inputs, case, FORWARD["block"], None)
    many = kernel(inputs, case, replace(FORWARD["block"], scratch=1), None)
    assert_same_bits(many, one)


def test_an_index_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_WORDS", 1)
    check(BASE.but(length=70, groups=1), FORWARD["block"], BACKWARD["whole"])


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
    # Every other query selected nothing: no run has a block in common.
    indices = given.indices.clone()
    indices[:, 1::2] = -1
    branch = branch_of(case, scale=1e-30)
    o, _ = selected.selected_forward(q, k, v, indices, branch, tile=FORWARD[tile])
    v[:, 30:] += 100.0
    later, _ = selected.selected_forward(q, k, v, indices, branch, tile=FORWARD[tile])
    assert torch.equal(o[:, :30], later[:, :30])


@pytest.mark.slow
@pytest.mark.parametrize("n_select", [48, 129])
def test_many_selected_blocks(n_select: int) -> None:
    """More than a run of queries can compare with one another, and more than two can."""
    case = BASE.but(length=2 * n_select + 5, groups=1, heads=1, select_block=2, n_select=n_select)
    tile = replace(FORWARD["block"], common_m=32)
    check(case, tile, BACKWARD["whole"])


def test_a_query_that_selected_nothing_gets_nothing() -> None:
    case = BASE.but(groups=1)
    inputs = random_inputs(case, torch.float32)
    inputs = inputs.but(indices=torch.full_like(inputs.indices, -1))
    for tile in ("query", "block"):
        out = kernel(inputs, case, FORWARD[tile], BACKWARD["whole"])
        assert (out.pop("lse") == float("-inf")).all()
        assert all((x == 0).all() for x in out.values())


def built(case: Case, indices: Tensor, segment: int, *, fit: int = 2**31) -> list[tuple[Chunk, Segments]]:
    """The chunks of a case's index; at most `fit` (row, query) in each, if there can be so few."""
    heads = torch.empty(case.batch, case.length, case.n_heads, case.d_k, device=DEVICE)
    keys = torch.empty(case.batch, case.length, case.groups, case.d_k, device=DEVICE)
    n_documents = None if case.documents is None else len(case.documents)
    shapes = Shapes(layout(heads), layout(keys), layout(keys), layout(indices), case.select_block, n_documents)
    tables = block_tables(branch_of(case).sequences, case.length, case.select_block)
    plans = index_plans(shapes, bytes_per_query=1, budget=fit, segment=segment, in_order=True)
    found = []
    for plan in plans:
        steps, segments = plan.steps(indices, tables)
        for step in steps:
            step()
        found += zip(plan.chunks, segments, strict=True)
    return found


def pairs_by_block(case: Case, indices: Tensor) -> dict[tuple[int, int], list[int]]:
    """For every (row, block) the pairs `t * n + slot` that read it, ascending; the slow way."""
    documents = case.documents or (case.length,)
    start, first_block, n_blocks = [], [], 0
    for begin, n in enclosing(documents):
        start += [begin] * n
        first_block += [n_blocks] * n
        n_blocks += -(-n // case.select_block)
    lists: dict[tuple[int, int], list[int]] = {}
    for row in range(case.batch * case.groups):
        for t, slots in enumerate(indices[row // case.groups, :, row % case.groups].tolist()):
            for slot, block in enumerate(slots):
                if 0 <= block * case.select_block <= t - start[t]:
                    lists.setdefault((row, first_block[t] + block), []).append(t * case.n_select + slot)
    return lists


INDEXED = {
    "fixed-length": (BASE.but(length=100), 5, 1),
    "one chunk": (BASE.but(length=100), 3, 2**31),
    "varlen": (BASE.but(length=100, documents=(3, 40, 0, 57)), 5, 64),
    "batch": (BASE.but(length=75, batch=2, groups=3, select_block=6, n_select=4), 1, 160),
    "many blocks": (BASE.but(length=150, select_block=1, groups=1), 7, 64),
    "one token": (BASE.but(length=1, groups=1), 4, 1),
}


@pytest.mark.parametrize("sort", ["rank", "argsort", "none"])
@pytest.mark.parametrize("name", INDEXED)
def test_segments_hold_every_pair_once_in_order(name: str, sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, segment, fit = INDEXED[name]
    monkeypatch.setattr(index, "SORT_FROM_QUERIES", 2**31 if sort == "none" else 0)
    monkeypatch.setattr(index, "MAX_RANKED", 0 if sort == "argsort" else 2**31)
    # Fewer than there are items, and than there are segments.
    monkeypatch.setattr(index, "ITEMS_PER_STEP", 16)
    monkeypatch.setattr(index, "COMPARED_PER_STEP", 16)
    indices = random_inputs(case).indices.to(DEVICE)
    n_blocks = case.length // case.select_block + len(case.documents) if case.documents else None
    n_blocks = n_blocks or -(-case.length // case.select_block)
    found: dict[tuple[int, int], list[int]] = {}
    for chunk, segments in built(case, indices, segment, fit=fit):
        pair, low, high, last, item = (x.tolist() for x in segments[:5])
        numbers = range(chunk.n_segments)
        order = list(numbers) if segments.order is None else segments.order.tolist()[: chunk.n_segments]
        assert (segments.order is None) == (sort == "none")
        firsts = {}
        for i in numbers:
            if item[i] == chunk.n_items:
                firsts[i] = case.length
                continue
            begin = low[item[i]] + (i - last[item[i]] + -(-(high[item[i]] - low[item[i]]) // segment)) * segment
            pairs = pair[begin : min(high[item[i]], begin + segment)]
            assert pairs
            queries = [p // case.n_select for p in pairs]
            assert all(chunk.query_0 <= t < chunk.query_0 + chunk.n_queries for t in queries)
            firsts[i] = queries[0]
            found.setdefault((chunk.row_0 + item[i] // n_blocks, item[i] % n_blocks), []).extend(pairs)
        # Exactly what a stable sort gives.
        assert order == (list(numbers) if sort == "none" else sorted(numbers, key=lambda i: firsts[i]))
    assert found == pairs_by_block(case, indices)


def test_chunks_are_even() -> None:
    case = BASE.but(length=5 * WORD, groups=1, n_select=1)
    chunks = built(case, torch.zeros(1, case.length, 1, 1, dtype=torch.int32, device=DEVICE), 8, fit=4 * WORD)
    assert [chunk.n_queries for chunk, _ in chunks] == [3 * WORD, 2 * WORD]


@pytest.mark.parametrize("documents", [None, (3, 42)], ids=["fixed-length", "varlen"])
def test_launches_per_pass(documents: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index: mark, count, place, cut, and order in the forward pass, besides clearing and a running sum."""
    monkeypatch.setattr(index, "SORT_FROM_QUERIES", 0)
    launched = []
    run = launch.Launch.__call__
    monkeypatch.setattr(
        launch.Launch, "__call__", lambda self, **free: (launched.append(self.kernel.fn.__name__), run(self, **free))
    )
    kernel(random_inputs(BASE, torch.float32), BASE.but(documents=documents), FORWARD["block"], BACKWARD["whole"])
    indexed = ["mark_kernel", "count_kernel", "place_kernel", "cut_kernel"]
    forward = ["split_kernel", *indexed, "order_kernel", "block_kernel", "common_kernel"]
    sums = ["sum_slots_kernel", "sum_segments_kernel"]
    assert launched == [*forward, "row_statistics_kernel", *indexed, "block_backward_kernel", *sums]


def test_a_plan_serves_all_sequences_of_its_shapes() -> None:
    case = BASE.but(documents=(7, 38), groups=1, heads=1)
    for documents in ((7, 38), (30, 15)):
        check(case.but(documents=documents), FORWARD["block"], BACKWARD["whole"])
    assert selected.plan_forward.cache_info().misses == selected.plan_backward.cache_info().misses == 1


def enclosing(documents: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sum(documents[:i]), n) for i, n in enumerate(documents)]


@pytest.mark.skipif(INTERPRETED, reason="tiles differ in how they are compiled: a GPU's business")
@pytest.mark.parametrize("tile", selected.candidates(), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_candidate_tile(tile: SelectedForwardTile | SelectedBackwardTile, dtype: torch.dtype) -> None:
    case = Case(length=1000, groups=2, heads=16, d_k=128, d_v=128, select_block=64, n_select=8)
    if isinstance(tile, SelectedForwardTile):
        check(case, tile, None, dtype)
    else:
        check(case, SelectedForwardTile("block"), tile, dtype)
