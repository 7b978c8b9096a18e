"""Queries that start at `q_start` of longer keys: the Triton kernels against the reference in fp64, and themselves.

Whatever is allocated and not written stays NaN. Tiles are small, so that tiny problems have several of each.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE  # isort: skip

from helpers import (
    BRANCHES,
    Case,
    Inputs,
    assert_same_bits,
    assert_within_derived_tolerance,
    branches,
    output_gradients,
    random_inputs,
    results,
)

from nsa import NSAAttention, NSAConfig, reference
from nsa.backends.triton import ranged, selected, selection
from nsa.backends.triton.selected import SelectedForwardTile
from nsa.backends.triton.selected.backward import SelectedBackwardTile
from nsa.backends.triton.tiles import BackwardTile, SplitTile, Tile
from nsa.sequences import Saved, Upstream

RANGED = (Tile(32, 16, 4, 2), BackwardTile(Tile(32, 16, 4, 2), SplitTile(32, 16, 4, 2, min_row_tiles=1)))
ONE_LOOP = (
    Tile(16, 32, 4, 2, desc_rows=False, desc_keys=False),
    BackwardTile(
        Tile(16, 32, 4, 2, desc_rows=False, desc_keys=False), SplitTile(16, 32, 4, 2, single_loop=True, waves=0)
    ),
)
SELECTED = {
    "query": SelectedForwardTile("query", blocks=2, common_m=0),
    "query-common": SelectedForwardTile("query", common_m=16),
    "block": SelectedForwardTile("block", block_m=16, segment=64, common_m=16),
    "block-chunked": SelectedForwardTile("block", block_m=32, segment=48, scratch=1, common_m=32),
}
SCORES = selection.SelectionTile(block_m=32, block_n=16, num_warps=4, num_stages=2, rows=8)
BASE = Case(length=41, heads=3, d_k=16, d_v=16, block=8, stride=4, select_block=8, n_select=3, n_local=1, window=11)
# The problem with all of its keys, how many queries a row has, and where those of each row start.
OFFSETS: dict[str, tuple[Case, int, tuple[int, ...]]] = {
    "a start per row": (BASE.but(batch=3), 7, (0, 19, 34)),
    "one query, on borders": (BASE.but(batch=3, heads=6), 1, (7, 8, 40)),
    "nothing complete yet": (BASE.but(batch=2, groups=2, heads=1, length=12), 5, (0, 2)),
    "crossing a window": (BASE.but(d_k=24, d_v=40), 14, (9,)),
    "all": (BASE.but(length=21), 21, (0,)),
    "documents": (BASE.but(documents=(5, 0, 15, 1, 20)), 14, (17,)),
    "one document of many": (BASE.but(groups=2, heads=1, documents=(11, 3, 21, 6)), 6, (22,)),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_empty = torch.empty

    def empty(*shape: Any, **kwargs: Any) -> Tensor:
        x = plain_empty(*shape, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", empty)


def part(inputs: Inputs, starts: tuple[int, ...], n: int) -> Inputs:
    """The same keys, and of row `b` the `n` queries from `starts[b]` on."""

    def rows(x: Tensor) -> Tensor:
        return torch.stack([row[start : start + n] for row, start in zip(x, starts, strict=True)])

    return inputs.but(q=rows(inputs.q), indices=rows(inputs.indices), gates=rows(inputs.gates))


def int32(values: tuple[int, ...], device: str = DEVICE) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def by_kernel(
    branch: str, inputs: Inputs, case: Case, q_start: Tensor | None, tiles: tuple[Any, Any], **gradients: Tensor
) -> dict[str, Tensor]:
    """`o, lse, dq, dk, dv` of a branch; `gradients`: `do` and `dlse`, if not those of `helpers.results`."""
    given = inputs.map(lambda x: x.to(DEVICE))
    q, k, v = given.of(branch)
    over = getattr(branches(case, DEVICE, q_start=q_start, batch=q.shape[0], length=q.shape[1]), branch)
    module = selected if branch == "selected" else ranged
    indices = (given.indices,) if branch == "selected" else ()
    o, lse = getattr(module, f"{branch}_forward")(q, k, v, *indices, over, tile=tiles[0])
    do, dlse = (gradients["do"], gradients["dlse"]) if gradients else output_gradients(o.cpu(), lse.cpu())
    saved, upstream = Saved(q, k, v, o, lse, *indices), Upstream(do.to(DEVICE), dlse.to(DEVICE))
    dq, dk, dv = getattr(module, f"{branch}_backward")(upstream, saved, over, tile=tiles[1])
    return {name: x.cpu() for name, x in {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items()}


def check(branch: str, name: str, tiles: tuple[Any, Any], dtype: torch.dtype = torch.float32) -> None:
    case, n, starts = OFFSETS[name]
    inputs = part(random_inputs(case, dtype), starts, n)
    actual = by_kernel(branch, inputs, case, int32(starts), tiles)
    where = {"q_start": int32(starts, "cpu")}
    exact = results(reference, branch, inputs.to(torch.float64), case, **where)
    assert_within_derived_tolerance(actual, exact, results(reference, branch, inputs, case, **where))


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("branch", ["compressed", "sliding"])
def test_ranges_and_their_gradients(branch: str, name: str) -> None:
    check(branch, name, RANGED)


@pytest.mark.parametrize("branch", ["compressed", "sliding"])
def test_one_loop_over_pointers_in_half_precision(branch: str) -> None:
    check(branch, "a start per row", ONE_LOOP, torch.float16)


@pytest.mark.parametrize("name", OFFSETS)
def test_selected_blocks_and_their_gradients(name: str) -> None:
    check("selected", name, (SELECTED["block"], SelectedBackwardTile(block_m=16, segment=64)))


@pytest.mark.parametrize("name", ["a start per row", "documents"])
@pytest.mark.parametrize("tile", ["query", "query-common", "block-chunked"])
def test_every_method_of_the_selected_branch(tile: str, name: str) -> None:
    check("selected", name, (SELECTED[tile], SelectedBackwardTile(block_m=32, segment=48, scratch=1)))


def test_every_block_read_and_masked() -> None:
    case = BASE.but(batch=2, heads=1, length=140, select_block=64, n_select=2)
    starts, n = (0, 61), 20
    inputs = part(random_inputs(case, torch.float32), starts, n)
    given, where = inputs.map(lambda x: x.to(DEVICE)), int32(starts)
    over = branches(case, DEVICE, q_start=where, length=n).selected
    o, lse = selected.selected_forward(*given.of("selected"), given.indices, over, method="dense")
    exact, plain = (
        results(reference, "selected", x, case, q_start=where.cpu()) for x in (inputs.to(torch.float64), inputs)
    )
    names = ("o", "lse")
    assert_within_derived_tolerance(
        {"o": o.cpu(), "lse": lse.cpu()}, {x: exact[x] for x in names}, {x: plain[x] for x in names}
    )


@pytest.mark.parametrize("name", OFFSETS)
def test_selection(name: str) -> None:
    case, n, starts = OFFSETS[name]
    inputs = part(random_inputs(case), starts, n)
    where = {"q_start": int32(starts, "cpu"), "cu_seqlens": case.cu_seqlens}
    q, k, v = inputs.of("compressed")
    _, lse = reference.compressed_attention(q, k, v, **case.compression, **where)
    expected = reference.select_blocks(q, k, lse, **case.selection, **where)
    over = branches(case, DEVICE, q_start=int32(starts), length=n).selection
    on_device = [x.float().to(DEVICE) for x in (q, k, lse)]
    assert torch.equal(selection.select_blocks(*on_device, over, tile=SCORES).cpu(), expected)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_start_of_zero_changes_no_bit(branch: str) -> None:
    case = BASE.but(batch=2, length=13)
    inputs = random_inputs(case, torch.float32)
    tiles = RANGED if branch != "selected" else (SELECTED["block"], SelectedBackwardTile(block_m=16, segment=64))
    plain = by_kernel(branch, inputs, case, None, tiles)
    # Not contiguous: what lies between the rows' starts is none of theirs.
    zeros = int32((0, 5, 0, 5))[::2]
    assert_same_bits(by_kernel(branch, inputs, case, zeros, tiles), plain)


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed-length", "varlen"])
@pytest.mark.parametrize("branch", BRANCHES)
@settings(max_examples=2)
@given(cuts=st.sets(st.integers(1, 24), min_size=1, max_size=2))
def test_parts_of_a_sequence_add_up_to_the_whole(branch: str, varlen: bool, cuts: set[int]) -> None:
    """What every part gives its own queries, and the sum of what all of them give the keys."""
    case = BASE.but(length=25, heads=1, documents=(9, 2, 14) if varlen else None)
    inputs = random_inputs(case, torch.float32)
    tiles = RANGED if branch != "selected" else (SELECTED["block"], SelectedBackwardTile(block_m=16, segment=64))
    whole = by_kernel(branch, inputs, case, None, tiles)
    do, dlse = output_gradients(whole["o"], whole["lse"])
    parts = []
    for start, end in pairwise([0, *sorted(cuts), case.length]):
        own = part(inputs, (start,), end - start)
        gradients = {"do": do[:, start:end], "dlse": dlse[:, start:end]}
        parts.append(by_kernel(branch, own, case, int32((start,)), tiles, **gradients))
    joined = {name: torch.cat([x[name] for x in parts], dim=1) for name in ("o", "lse", "dq")}
    summed = {name: torch.stack([x[name] for x in parts]).sum(dim=0) for name in ("dk", "dv")}
    for name, x in {**joined, **summed}.items():
        torch.testing.assert_close(x, whole[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("start", [-7, 10**9])
@pytest.mark.parametrize("documents", [None, (12, 29)], ids=["fixed-length", "varlen"])
def test_a_wrong_start_reads_no_key_that_is_not_there(documents: tuple[int, ...] | None, start: int) -> None:
    """On a GPU no value is looked at before: what comes out means nothing, but nothing else may be touched."""
    case, n = BASE.but(heads=1, window=60, documents=documents), 5
    inputs = part(random_inputs(case, torch.float32), (30,), n)

    def surrounded(x: Tensor) -> Tensor:
        apart = x.new_full((1, x.shape[1] + 128, *x.shape[2:]), float("nan"))
        apart[:, 64:-64] = x
        return apart[:, 64:-64]

    keys = {f"{x}_{kind}": surrounded(getattr(inputs, f"{x}_{kind}")) for x in "kv" for kind in ("cmp", "sel", "win")}
    inputs = inputs.but(**keys)
    for tile in (SELECTED["query-common"], SELECTED["block"]):
        out = by_kernel("selected", inputs, case, int32((start,)), (tile, SelectedBackwardTile(block_m=16)))
        assert not any(x.isnan().any() for x in out.values())
    for branch in ("compressed", "sliding"):
        out = by_kernel(branch, inputs, case, int32((start,)), ONE_LOOP)
        assert not any(x.isnan().any() for x in out.values())
    given = [x.to(DEVICE) for x in (inputs.q, inputs.k_cmp, torch.zeros(inputs.q.shape[:3]))]
    over = branches(case, DEVICE, q_start=int32((start,)), length=n).selection
    indices = selection.select_blocks(*given, over, tile=SCORES)
    # All are written, and lie in the scratch memory that has a column for each.
    assert -1 <= int(indices.min()) <= int(indices.max()) < selection.columns(case.length, case.select_block)


def layer(**changes: Any) -> NSAAttention:
    config = {"dim": 16, "n_heads": 2, "n_kv_groups": 1, "d_k": 16, "d_v": 16, "l": 8, "d": 4, "l_sel": 8, "n_sel": 3}
    config |= {"n_local": 1, "w": 10, "phi": "mean", "backend": "triton", **changes}
    return NSAAttention(NSAConfig(**config)).to(DEVICE)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_a_cache_filled_in_chunks_gives_the_whole_forward(static: bool) -> None:
    attention = layer()
    x = torch.randn(2, 23, 16, device=DEVICE)
    with torch.no_grad():
        whole = attention(x)
        cache = attention.new_cache(2, 26, static=static)
        chunks = [attention(x[:, a:b], cache=cache) for a, b in pairwise([0, 13, 14, 23])]
    torch.testing.assert_close(torch.cat(chunks, dim=1), whole, atol=1e-5, rtol=1e-5)
