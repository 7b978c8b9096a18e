"""The selection of blocks, in Triton's interpreter, against the reference in fp64.

Rounding may swap two blocks of nearly the same importance, so a selection is checked in two ways: what must hold
exactly (forced blocks, order, padding, no block twice), and that nothing left out was clearly better than what was
taken.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ties import lowest_free_blocks, tied_cases, tied_inputs
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE, INTERPRETED, worth_trying  # isort: skip

import triton
import triton.language as tl

from nsa import reference
from nsa.backends.routing import BackendFailure
from nsa.backends.triton import selection
from nsa.backends.triton.launch import layout
from nsa.sequences import Selection, Sequences

SMALL = selection.SelectionTile(block_m=32, block_n=16, num_warps=4, num_stages=2, rows=8)
# Every query costs the interpreter milliseconds: blocks are small so that few queries have to leave a block out.
DEFAULTS = {"block": 4, "stride": 2, "select_block": 8, "n_select": 5, "n_init": 1, "n_local": 2}


def inputs(
    length: int, heads: int, groups: int, dim: int, hyperparameters: dict, dtype: torch.dtype, batch: int = 1, cu=None
):
    n_blocks = (
        max(0, (length - hyperparameters["block"]) // hyperparameters["stride"] + 1)
        if cu is None
        else length // hyperparameters["stride"]
    )
    q = torch.randn(batch, length, groups * heads, dim, device=DEVICE).to(dtype)
    k = torch.randn(batch, n_blocks, groups, dim, device=DEVICE).to(dtype)
    _, lse = reference.compressed_attention(
        q.double(),
        k.double(),
        k.double(),
        block=hyperparameters["block"],
        stride=hyperparameters["stride"],
        cu_seqlens=cu,
    )
    return q, k, lse.float()


def kernel(q: Tensor, k: Tensor, lse: Tensor, hyperparameters: dict, cu=None, tile=SMALL, scale=None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sequences = Sequences(q.shape[0], q.shape[1], q.device, cu)
    return selection.select_blocks(q, k, lse, Selection(sequences, **hyperparameters, scale=scale), tile=tile)


def check(found: Tensor, q: Tensor, k: Tensor, lse: Tensor, hyperparameters: dict, cu=None) -> None:
    exact = {name: hyperparameters[name] for name in ("block", "stride", "select_block")}
    importance = reference.selection_importance(q.double(), k.double(), lse.double(), **exact, cu_seqlens=cu)
    want = reference.select_blocks(q.double(), k.double(), lse.double(), **hyperparameters, cu_seqlens=cu)
    assert found.dtype == torch.int32
    assert found.shape == want.shape
    # Padding and forced blocks do not depend on importance.
    assert torch.equal(found < 0, want < 0)
    followed = found[..., 1:]
    assert ((followed < 0) | (followed > found[..., :-1])).all()
    position = (
        torch.arange(q.shape[1]) if cu is None else torch.cat([torch.arange(n) for n in cu.cpu().diff().tolist()])
    )
    own = (position.to(q.device) // hyperparameters["select_block"])[None, :, None]
    assert (found <= own[..., None]).all()
    for back in range(hyperparameters["n_local"]):
        assert ((found == (own - back)[..., None]).any(-1) | (own - back < 0)).all()
    for first in range(hyperparameters["n_init"]):
        assert ((found == first).any(-1) | (own < first)).all()

    n = importance.shape[-1]
    taken = torch.zeros(*found.shape[:3], n + 1, dtype=torch.bool, device=q.device)
    taken = taken.scatter(-1, found.long().where(found >= 0, n), True)[..., :n]
    j = torch.arange(n, device=q.device)
    free = (j <= own[..., None]) & (j >= hyperparameters["n_init"]) & (j <= own[..., None] - hyperparameters["n_local"])
    worst = importance.where(taken & free, float("inf")).amin(-1)
    best_left = importance.where(~taken & free, float("-inf")).amax(-1)
    # The scores of a half-precision product and its exponential carry roundings of fp32 only.
    assert (best_left <= worst * (1 + 1e-5) + 1e-12).all()
    # Swaps are for near ties alone.
    assert (found != want).any(-1).float().mean() < 0.02


@pytest.mark.parametrize(("heads", "length"), [(1, 61), (3, 90), (16, 61)])
def test_chooses_what_the_reference_chooses(heads: int, length: int) -> None:
    q, k, lse = inputs(length, heads, 2, 32, DEFAULTS, torch.float16)
    check(kernel(q, k, lse, DEFAULTS), q, k, lse, DEFAULTS)


@pytest.mark.parametrize(("heads", "parts"), [(6, (4, 2)), (5, (4, 1)), (12, (8, 4)), (7, (8, 0))])
def test_heads_are_multiplied_in_two_parts(heads: int, parts: tuple[int, int]) -> None:
    tile = replace(SMALL, block_m=128)
    q, k, lse = inputs(75, heads, 2, 32, DEFAULTS, torch.float16)
    check(kernel(q, k, lse, DEFAULTS, tile=tile), q, k, lse, DEFAULTS)
    laid = [layout(x) for x in (q, k, lse)]
    how = {**DEFAULTS, "scale": 1.0, "tile": tile, "varlen": False, "offset": False}
    (score, _), *_ = selection.SelectionPlan(*laid, **how).chunks
    assert (score.bound["H_LOW"], score.bound["H_REST"]) == parts


@pytest.mark.parametrize("dim", [80, 192])
def test_every_head_dim(dim: int) -> None:
    q, k, lse = inputs(60, 4, 1, dim, DEFAULTS, torch.float16)
    check(kernel(q, k, lse, DEFAULTS), q, k, lse, DEFAULTS)


# The order of rows depends on the dtype.
@pytest.mark.parametrize(
    ("block", "stride", "select_block", "dtype"),
    [
        (4, 4, 8, torch.float16),
        (4, 4, 8, torch.float32),
        (4, 2, 16, torch.float16),
        (6, 2, 4, torch.float32),
        (4, 2, 6, torch.float16),
        (16, 2, 4, torch.float32),
    ],
    ids=str,
)
def test_every_ratio_of_block_stride_and_selection_block(
    block: int, stride: int, select_block: int, dtype: torch.dtype
) -> None:
    hyperparameters = {**DEFAULTS, "block": block, "stride": stride, "select_block": select_block}
    q, k, lse = inputs(7 * select_block + 3, 2, 1, 16, hyperparameters, dtype)
    check(kernel(q, k, lse, hyperparameters), q, k, lse, hyperparameters)


@pytest.mark.parametrize(
    ("n_select", "n_init", "n_local"),
    [(3, 1, 2), (4, 0, 0), (1, 0, 1), (8, 2, 3), (7, 0, 2), (16, 1, 2)],
)
def test_every_number_of_forced_and_free_blocks(n_select: int, n_init: int, n_local: int) -> None:
    hyperparameters = {**DEFAULTS, "n_select": n_select, "n_init": n_init, "n_local": n_local}
    q, k, lse = inputs(70, 2, 1, 16, hyperparameters, torch.float32)
    check(kernel(q, k, lse, hyperparameters), q, k, lse, hyperparameters)


@pytest.mark.parametrize("lengths", [[1, 3, 40, 5, 0, 31], [3, 4, 5, 6]], ids=str)
def test_varlen_documents(lengths: list[int]) -> None:
    cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    q, k, lse = inputs(sum(lengths), 3, 2, 16, DEFAULTS, torch.float32, cu=cu)
    # What lies behind the last document's blocks must never count.
    k[:, sum(max(0, (n - 4) // 2 + 1) for n in lengths) :] = float("nan")
    safe = torch.nan_to_num(k)
    check(kernel(q, k, lse, DEFAULTS, cu=cu), q, safe, lse, DEFAULTS, cu=cu)


@pytest.mark.parametrize("length", [1, 3, 4, 8, 9])
def test_short_sequences(length: int) -> None:
    q, k, lse = inputs(length, 3, 1, 16, DEFAULTS, torch.float32, batch=2)
    check(kernel(q, k, lse, DEFAULTS), q, k, lse, DEFAULTS)


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_equal_importance_goes_to_the_lower_index(fill: float) -> None:
    q, k, _ = inputs(50, 4, 1, 16, DEFAULTS, torch.float32)
    q, k = torch.full_like(q, fill), torch.ones_like(k)
    _, lse = reference.compressed_attention(q, k, k, block=4, stride=2)
    want = reference.select_blocks(q, k, lse, **DEFAULTS)
    assert torch.equal(kernel(q, k, lse, DEFAULTS), want)


@pytest.mark.parametrize(("varlen", "dtype"), [(False, torch.float16), (True, torch.float32)], ids=["fixed", "varlen"])
@settings(max_examples=3)
@given(data=st.data())
def test_of_equal_keys_the_first_blocks_are_selected(varlen: bool, dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(tied_cases(max_length=50, varlen=varlen))
    # Small blocks and few taken: most of these queries have to leave a block out.
    blocks = {"stride": 1, "block": case.block // case.stride, "select_block": case.select_block // case.stride}
    case = case.but(**blocks, batch=1, groups=1, d_k=16, n_select=case.n_init + case.n_local + 1)
    q, k, _ = tied_inputs(case, dtype, n_distinct=1)
    cu = case.cu_seqlens
    _, lse = reference.compressed_attention(q, k, k, **case.compression, cu_seqlens=cu)
    on_device = [x.to(DEVICE) for x in (q, k, lse)]
    found = kernel(*on_device, case.selection, cu=None if cu is None else cu.to(DEVICE)).cpu()
    for t, position in enumerate([t for length in case.documents or (case.length,) for t in range(length)]):
        assert (found[:, t] == torch.tensor(lowest_free_blocks(case, position))).all()


def test_vanishing_importance_goes_to_the_lower_index() -> None:
    q, k, _ = inputs(80, 2, 1, 16, DEFAULTS, torch.float32)
    q, k = torch.ones_like(q), torch.zeros_like(k)
    # One block takes everything; the rest underflow to an exact zero.
    k[:, 20] = 100.0
    _, lse = reference.compressed_attention(q, k, k, block=4, stride=2)
    want = reference.select_blocks(q, k, lse, **DEFAULTS)
    assert torch.equal(kernel(q, k, lse, DEFAULTS), want)


def test_strides_and_batch() -> None:
    q, k, lse = inputs(50, 3, 2, 16, DEFAULTS, torch.float32, batch=2)
    want = kernel(q, k, lse, DEFAULTS)
    check(want, q, k, lse, DEFAULTS)
    strided = kernel(
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([k, k], dim=-1)[..., :16],
        lse.transpose(1, 2).contiguous().transpose(1, 2),
        DEFAULTS,
    )
    assert torch.equal(strided, want)


@pytest.mark.slow
def test_a_bounded_chunk_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, lse = inputs(80, 3, 2, 16, DEFAULTS, torch.float32)
    want = kernel(q, k, lse, DEFAULTS)
    monkeypatch.setattr(selection, "SCORE_BUDGET", 1024)
    selection.plan.cache_clear()
    assert len(selection.query_chunks(80, 4, lambda hi: selection.columns(hi, 8), 8)) > 3
    assert torch.equal(kernel(q, k, lse, DEFAULTS), want)
    small = selection.SelectionTile(block_m=32, block_n=16, num_warps=4, num_stages=2, rows=3)
    assert torch.equal(kernel(q, k, lse, DEFAULTS, tile=small), want)
    selection.plan.cache_clear()


@pytest.mark.slow
# Half precision has its rows in tensor cores' order; how the results of either lie, only a GPU knows.
@pytest.mark.parametrize("dtype", [torch.float16, *([] if INTERPRETED else [torch.bfloat16, torch.float32])], ids=str)
@pytest.mark.parametrize("tile", worth_trying(selection.candidates()), ids=str)
def test_every_candidate(tile: selection.SelectionTile, dtype: torch.dtype) -> None:
    q, k, lse = inputs(150 if INTERPRETED else 300, 4, 1, 16, DEFAULTS, dtype)
    check(kernel(q, k, lse, DEFAULTS, tile=tile), q, k, lse, DEFAULTS)


def test_unwritten_scores_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, lse = inputs(70, 2, 1, 16, DEFAULTS, torch.float32)
    want = kernel(q, k, lse, DEFAULTS)
    empty = torch.empty

    def poisoned(*args, dtype: torch.dtype, **kwargs) -> Tensor:
        return empty(*args, dtype=dtype, **kwargs).fill_(float("nan") if dtype.is_floating_point else -7)

    monkeypatch.setattr(torch, "empty", poisoned)
    assert torch.equal(kernel(q, k, lse, DEFAULTS), want)


def test_a_future_key_changes_no_earlier_choice() -> None:
    q, k, lse = inputs(80, 2, 1, 16, DEFAULTS, torch.float32)
    want = kernel(q, k, lse, DEFAULTS)
    k[:, 20:] = float("nan")
    assert torch.equal(kernel(q, k, lse, DEFAULTS)[:, : 20 * 2 + 3], want[:, : 20 * 2 + 3])


@pytest.mark.parametrize(
    ("length", "hyperparameters"),
    [(2**20, {"block": 32, "stride": 16, "select_block": 16}), (600, {"block": 2, "stride": 1, "select_block": 512})],
    ids=["too-many-blocks", "blocks-too-long"],
)
def test_what_no_program_can_hold_is_left_to_the_next_backend(length: int, hyperparameters: dict[str, int]) -> None:
    q = torch.zeros(1, 1, 1, 16, device=DEVICE).expand(1, length, 1, 16)
    k = torch.zeros(1, 1, 1, 16, device=DEVICE).expand(1, length // hyperparameters["stride"], 1, 16)
    with pytest.raises(BackendFailure, match="at most"):
        kernel(q, k, q[..., 0], DEFAULTS | hyperparameters, tile=None)


@triton.jit
def last_taken_kernel(p_key, p_found, N_FREE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_J: tl.constexpr):
    lo, exact = selection.last_taken(tl.load(p_key + tl.arange(0, BLOCK_J)), N_FREE, SEGMENTS, BLOCK_J)
    tl.store(p_found, lo)
    tl.store(p_found + 1, exact.to(tl.int32))


@pytest.mark.parametrize("segments", [4, 16])
@pytest.mark.parametrize("kind", ["spread", "ties", "crowded", "few", "falling"])
def test_the_last_one_taken_divides_the_keys(kind: str, segments: int) -> None:
    """Wherever the greatest lie: one in each segment, all in one, equal, or with hardly any others."""
    n, n_free = 64, 5
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        key = torch.randint(0, 2**30, (n,), generator=generator)
        if kind == "ties":
            key = key % 3
        elif kind == "crowded":
            key[:16] += 2**30
        elif kind == "few":
            key[n_free + 1 :] = -1
        elif kind == "falling":
            key = torch.arange(n, 0, -1) * 2**20
        key, found = key.int().to(DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
        last_taken_kernel[(1,)](key, found, n_free, segments, n)
        lo, exact = found.tolist()
        at_least, above = int((key >= lo).sum()), int((key > lo).sum())
        assert at_least == n_free if exact else at_least >= n_free > above
