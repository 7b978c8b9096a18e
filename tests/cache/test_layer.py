"""NSACache: any way of feeding a sequence through it gives what the whole forward gives, and it stays where it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from caching import FP64, SMALL, assert_equal, feed, layer, splits, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSAAttention, NSACache, RopeScaling

VARIANTS = {
    "paper": {},
    "share_kv": {"share_kv": True},
    "phi_mean": {"phi": "mean"},
    "rope_before": {"compress_rope": "before"},
    "rope_scaled": {"rope_scaling": RopeScaling(factor=4.0, original_max_len=32)},
    "gate_softmax": {"gate": "softmax"},
    "biases_and_norms": {"qkv_bias": True, "qk_norm": True},
    "window_of_one": {"w": 1},
    "wide_window": {"w": 64},
    "longer_than_the_cache": {"w": 1000, "l": 128},
    "blocks_do_not_overlap": {"l": 4},
    "stride_of_one": {"l": 3, "d": 1, "l_sel": 5},
    "long_blocks": {"l": 12, "d": 4, "l_sel": 4},
    "only_selected": {"force_branch": "sel"},
    "only_compressed": {"force_branch": "cmp"},
    "only_window": {"force_branch": "win"},
    "no_window": {"drop_branch": "win"},
}
variants = st.sampled_from(list(VARIANTS.values()))
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
both_kinds = pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


# The cached layer is the layer.


@given(
    sizes=splits(),
    variant=variants,
    static=st.booleans(),
    spare=st.integers(0, 20),
    max_rollback=st.integers(0, 9),
    batch=st.integers(1, 2),
)
def test_any_split_equals_the_whole_forward(
    sizes: list[int], variant: dict[str, Any], static: bool, spare: int, max_rollback: int, batch: int
) -> None:
    attn = layer(**variant)
    x = tokens(sum(sizes), batch)
    cache = attn.new_cache(batch, sum(sizes) + spare, static=static, max_rollback=max_rollback)
    assert_equal(feed(attn, cache, x, sizes), attn(x))
    assert cache.lengths.tolist() == [sum(sizes)] * batch


@both_kinds
@every_variant
def test_token_by_token_equals_the_whole_forward(variant: dict[str, Any], static: bool) -> None:
    attn = layer(**variant)
    x = tokens(41, batch=2)
    cache = attn.new_cache(2, 41, static=static, max_rollback=0)
    assert_equal(feed(attn, cache, x, [1] * 41), attn(x))


@both_kinds
def test_the_papers_geometry_decodes_like_the_whole_forward(static: bool) -> None:
    attn = layer(l=32, d=16, l_sel=64, n_sel=4, n_local=2, w=48)
    x = tokens(300)
    cache = attn.new_cache(1, 300, static=static)
    assert_equal(feed(attn, cache, x, [201, 1, 1, 60, *[1] * 37]), attn(x))


@given(data=st.data(), variant=variants, static=st.booleans())
def test_rows_of_different_lengths_equal_their_own_full_forward(
    data: st.DataObject, variant: dict[str, Any], static: bool
) -> None:
    """Every call brings each row some real tokens, possibly none, and padding on the left, right or between."""
    attn = layer(**variant)
    batch = 3
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    cache = attn.new_cache(batch, sum(sizes), static=static, max_rollback=2)
    x = tokens(sum(sizes), batch)
    got: list[list[Tensor]] = [[] for _ in range(batch)]
    real: list[list[Tensor]] = [[] for _ in range(batch)]
    for part in x.split(sizes, dim=1):
        flags = st.lists(st.booleans(), min_size=part.shape[1], max_size=part.shape[1])
        mask = torch.tensor(data.draw(st.lists(flags, min_size=batch, max_size=batch)))
        y = attn(part, cache=cache, attention_mask=mask)
        assert (y[~mask] == 0).all()
        for row in range(batch):
            got[row].append(y[row, mask[row]])
            real[row].append(part[row, mask[row]])
    for row in range(batch):
        alone = torch.cat(real[row])[None]
        assert cache.lengths[row] == alone.shape[1]
        if alone.shape[1]:
            assert_equal(torch.cat(got[row])[None], attn(alone))


@both_kinds
def test_a_padded_prefill_then_steps_continues_each_row(static: bool) -> None:
    attn = layer()
    x = tokens(40, batch=2)
    lengths = [20, 3]
    mask = torch.zeros(2, 20, dtype=torch.bool)
    prompt = torch.full((2, 20, SMALL["dim"]), 7.0, dtype=FP64)
    for row, n in enumerate(lengths):
        mask[row, 20 - n :] = True
        prompt[row, 20 - n :] = x[row, :n]
    cache = attn.new_cache(2, 40, static=static)
    attn(prompt, cache=cache, attention_mask=mask)
    for step in range(15):
        new = torch.stack([x[row, n + step] for row, n in enumerate(lengths)])[:, None]
        y = attn(new, cache=cache)
        for row, n in enumerate(lengths):
            assert_equal(y[row, 0], attn(x[row : row + 1, : n + step + 1])[0, -1])


@every_variant
@both_kinds
def test_reference_backend_agrees_through_the_cache(variant: dict[str, Any], static: bool) -> None:
    attn = layer(**variant)
    slow = NSAAttention(dataclasses.replace(attn.config, backend="reference")).double()
    slow.load_state_dict(attn.state_dict())
    x = tokens(37, batch=2)
    sizes = [13, 1, 1, 9, *[1] * 13]
    got = feed(attn, attn.new_cache(2, 40, static=static), x, sizes)
    assert_equal(got, feed(slow, slow.new_cache(2, 40, static=static), x, sizes))


@pytest.mark.parametrize("compress_rope", ["after", "before"])
@pytest.mark.parametrize("offset", [17, torch.tensor([0, 300])], ids=["one", "per_row"])
def test_a_position_offset_goes_with_a_cache(offset: int | Tensor, compress_rope: str) -> None:
    attn = layer(compress_rope=compress_rope)
    x = tokens(30, batch=2)
    cache = attn.new_cache(2, 30)
    parts = [attn(part, cache=cache, position_offset=offset) for part in x.split([12, 1, 1, 16], dim=1)]
    assert_equal(torch.cat(parts, dim=1), attn(x, position_offset=offset))
    if compress_rope == "before":
        # An MLP over rotated keys is not relative: here an offset lost everywhere would show too.
        assert (attn(x, position_offset=offset) - attn(x)).abs().max() > 1e-6


def test_low_precision_caches_decode_close_to_fp64() -> None:
    exact = layer(n_sel=8)
    x = tokens(40)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        attn = copy.deepcopy(exact).to(dtype)
        cache = attn.new_cache(1, 40)
        assert cache.dtype == dtype
        got = feed(attn, cache, x.to(dtype), [20, *[1] * 20])
        whole_error = (attn(x.to(dtype)).double() - exact(x)).abs().max()
        assert (got.double() - exact(x)).abs().max() <= 2 * whole_error + 4 * torch.finfo(dtype).eps


def test_a_cached_output_has_the_whole_gradient_or_none() -> None:
    """Keys in the cache carry no graph: part of a gradient would be a wrong one."""
    attn = layer()
    x = tokens(20)
    with torch.enable_grad():
        y = attn(x, cache=attn.new_cache(1, 20))
        if y.requires_grad:
            weights = list(attn.parameters())
            got = torch.autograd.grad(y.sum(), weights, allow_unused=True, materialize_grads=True)
            for grad, expected in zip(got, torch.autograd.grad(attn(x).sum(), weights), strict=True):
                assert_equal(grad, expected)


# Reset, reorder, crop.


@both_kinds
def test_a_cache_that_was_reset_is_as_good_as_new(static: bool) -> None:
    attn = layer()
    cache = attn.new_cache(2, 40, static=static)
    feed(attn, cache, tokens(40, batch=2, seed=1), [30, 10])
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    x = tokens(40, batch=2)
    assert_equal(feed(attn, cache, x, [7, 1, 32]), attn(x))


@both_kinds
@pytest.mark.parametrize("rows", [torch.tensor([1]), torch.tensor([False, True, False])], ids=["indices", "mask"])
def test_resetting_some_rows_leaves_the_others(rows: Tensor, static: bool) -> None:
    attn = layer()
    cache = attn.new_cache(3, 60, static=static)
    old, new = tokens(25, batch=3, seed=1), tokens(30, batch=3)
    attn(old, cache=cache)
    cache.reset(rows)
    assert cache.lengths.tolist() == [25, 0, 25]
    y = feed(attn, cache, new, [1, 9, 20])
    assert_equal(y[1:2], attn(new[1:2]))
    for row in (0, 2):
        whole = attn(torch.cat([old, new], dim=1)[row : row + 1])
        assert_equal(y[row : row + 1], whole[:, 25:])


@both_kinds
@pytest.mark.parametrize("rows", [[0, 0, 0], [2, 0, 1], [1, 1, 2]])
def test_a_reordered_row_continues_what_its_source_held(rows: list[int], static: bool) -> None:
    attn = layer()
    cache = attn.new_cache(3, 50, static=static)
    x = tokens(23, batch=3)
    mask = torch.ones(3, 23, dtype=torch.bool)
    mask[0, 5:] = False
    mask[2, 17:] = False
    attn(x, cache=cache, attention_mask=mask)
    cache.reorder(torch.tensor(rows))
    held = [x[row, mask[row]] for row in range(3)]
    new = tokens(11, batch=3, seed=2)
    y = feed(attn, cache, new, [1, 1, 9])
    for beam, source in enumerate(rows):
        whole = attn(torch.cat([held[source], new[beam]])[None])
        assert_equal(y[beam : beam + 1], whole[:, -11:])


@both_kinds
@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        (35, [35, 35]),
        (-5, [35, 35]),
        (40, [40, 40]),
        (99, [40, 40]),
        (0, [0, 0]),
        (torch.tensor([33, 38]), [33, 38]),
        (torch.tensor([-1, -7]), [39, 33]),
        (torch.tensor([0, 36]), [0, 36]),
        (torch.tensor([40, -8]), [40, 32]),
    ],
    ids=str,
)
def test_a_cropped_cache_continues_as_if_the_rest_had_never_come(
    lengths: int | Tensor, kept: list[int], static: bool
) -> None:
    """After 40 tokens both rings have wrapped; 8 can be taken back."""
    attn = layer()
    cache = attn.new_cache(2, 64, static=static, max_rollback=8)
    x, new = tokens(40, batch=2), tokens(15, batch=2, seed=1)
    feed(attn, cache, x, [9, 1, 30])
    cache.crop(lengths)
    assert cache.lengths.tolist() == kept
    y = feed(attn, cache, new, [1, 1, 13])
    for row, n in enumerate(kept):
        whole = attn(torch.cat([x[row, :n], new[row]])[None])
        assert_equal(y[row : row + 1], whole[:, n:])


@pytest.mark.parametrize("max_rollback", [1, 5])
def test_crop_can_remove_max_rollback_tokens_at_any_length(max_rollback: int) -> None:
    attn = layer()
    x, new = tokens(50), tokens(50, seed=1)
    for length in range(max_rollback, 40, 3):
        cache = attn.new_cache(1, 50, max_rollback=max_rollback)
        feed(attn, cache, x[:, :length], [max_rollback, length - max_rollback] if length > max_rollback else [length])
        cache.crop(-max_rollback)
        n = length - max_rollback
        whole = attn(torch.cat([x[:, :n], new[:, :10]], dim=1))
        assert_equal(feed(attn, cache, new[:, :10], [1, 9]), whole[:, n:])


@pytest.mark.parametrize("lengths", [20, -20, torch.tensor([40, 20])], ids=["to", "back", "per_row"])
def test_crop_beyond_max_rollback_is_rejected_without_changes(lengths: int | Tensor) -> None:
    attn = layer()
    cache = attn.new_cache(2, 64, max_rollback=4)
    x = tokens(50, batch=2)
    attn(x[:, :40], cache=cache)
    with pytest.raises(ValueError, match=r"lengths.*max_rollback = 4"):
        cache.crop(lengths)
    assert cache.lengths.tolist() == [40, 40]
    assert_equal(attn(x[:, 40:], cache=cache), attn(x)[:, 40:])


def test_what_a_ring_has_overwritten_stays_lost_after_a_crop() -> None:
    attn = layer()
    cache = attn.new_cache(1, 64, max_rollback=4)
    x = tokens(40)
    attn(x, cache=cache)
    cache.crop(-4)
    attn(x[:, 36:37], cache=cache)
    with pytest.raises(ValueError, match=r"lengths.*max_rollback = 4"):
        cache.crop(-4)
    assert_equal(attn(x[:, 37:], cache=cache), attn(x)[:, 37:])


def test_taking_back_more_than_there_is_is_refused() -> None:
    attn = layer()
    cache = attn.new_cache(1, 20)
    attn(tokens(5), cache=cache)
    with pytest.raises(ValueError, match=r"lengths is -6"):
        cache.crop(-6)
    assert cache.lengths.tolist() == [5]


@pytest.mark.parametrize("lengths", [2.7, torch.tensor([1.5, 2.5]), torch.tensor([1, 2, 3])], ids=str)
def test_a_crop_that_is_no_length_per_row_is_refused_by_name(lengths: Any) -> None:
    attn = layer()
    cache = attn.new_cache(2, 20)
    attn(tokens(5, batch=2), cache=cache)
    with pytest.raises(ValueError, match="lengths"):
        cache.crop(lengths)
    assert cache.lengths.tolist() == [5, 5]


def test_a_short_sequence_can_be_cropped_at_will() -> None:
    """As long as nothing has been overwritten, max_rollback is no limit."""
    attn = layer(w=30)
    cache = attn.new_cache(1, 20, max_rollback=12)
    x = tokens(20)
    attn(x, cache=cache)
    cache.crop(3)
    assert_equal(attn(x[:, 3:], cache=cache), attn(x)[:, 3:])


@settings(max_examples=30)
@given(data=st.data(), variant=variants, static=st.booleans())
def test_any_sequence_of_cache_calls_equals_the_full_forward(
    data: st.DataObject, variant: dict[str, Any], static: bool
) -> None:
    """Three rows are followed as plain lists of tokens; after every append each must see exactly its own list."""
    attn = layer(**variant)
    batch, max_len, max_rollback = 3, 60, 6
    cache = attn.new_cache(batch, max_len, static=static, max_rollback=max_rollback)
    addresses = [buffer.data_ptr() for buffer in cache.buffers()]
    held = [tokens(0)[0] for _ in range(batch)]
    highest = [0] * batch
    for step in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(["append", "append", "append", "step", "crop", "reset", "reorder"]))
        if what in ("append", "step"):
            room = max_len - max(len(row) for row in held)
            size = min(room, 1 if what == "step" else data.draw(st.integers(1, 25)))
            if size == 0:
                continue
            new = tokens(size, batch, seed=step)
            counts = data.draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))
            mask = torch.arange(size) < torch.tensor(counts)[:, None]
            y = attn(new, cache=cache, attention_mask=mask)
            for row, count in enumerate(counts):
                held[row] = torch.cat([held[row], new[row, :count]])
                highest[row] = max(highest[row], len(held[row]))
                if count:
                    assert_equal(y[row, :count], attn(held[row][None])[0, -count:])
        elif what == "crop":
            kept = []
            for row in range(batch):
                # What is left of max_rollback after earlier crops, or everything.
                least = max(0, highest[row] - max_rollback)
                some = st.integers(min(least, len(held[row])), len(held[row]))
                kept.append(data.draw(st.one_of(some, st.just(0))))
            cache.crop(torch.tensor(kept))
            held = [row[:n] for row, n in zip(held, kept, strict=True)]
            highest = [0 if n == 0 else high for n, high in zip(kept, highest, strict=True)]
        elif what == "reset":
            rows = data.draw(st.lists(st.integers(0, batch - 1), unique=True))
            cache.reset(torch.tensor(rows, dtype=torch.long))
            for row in rows:
                held[row], highest[row] = held[row][:0], 0
        else:
            rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
            cache.reorder(torch.tensor(rows))
            held, highest = [held[row] for row in rows], [highest[row] for row in rows]
        assert cache.lengths.tolist() == [len(row) for row in held]
    assert [buffer.data_ptr() for buffer in cache.buffers()] == addresses


# Memory.


@both_kinds
def test_nothing_ever_moves(static: bool) -> None:
    """A CUDA graph replays addresses."""
    attn = layer()
    cache = attn.new_cache(2, 50, static=static)

    def where() -> list[tuple[int, tuple[int, ...]]]:
        return [(buffer.data_ptr(), tuple(buffer.shape)) for buffer in cache.buffers()]

    before = where()
    # Every tensor the cache holds is among its buffers.
    held = {x.data_ptr() for x in (*cache.selected.pair, *cache.compressed.pair, *cache.window.pair, *cache.tail.pair)}
    held |= {cache.lengths.data_ptr(), cache.high_water.data_ptr()}
    assert held == {address for address, _ in before}
    feed(attn, cache, tokens(30, batch=2), [20, 1, 9])
    cache.reorder(torch.tensor([1, 1]))
    cache.crop(-3)
    cache.crop(torch.tensor([25, 26]))
    attn(tokens(4, batch=2), cache=cache)
    cache.reset(torch.tensor([0]))
    cache.reset()
    attn(tokens(4, batch=2), cache=cache)
    assert where() == before


@given(
    batch=st.integers(1, 3),
    max_len=st.integers(1, 60),
    max_rollback=st.integers(0, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, FP64]),
    variant=variants,
)
def test_bytes_used_is_what_the_four_stores_need(
    batch: int, max_len: int, max_rollback: int, dtype: torch.dtype, variant: dict[str, Any]
) -> None:
    c = layer(**variant).config
    cache = NSACache(c, batch, max_len, dtype=dtype, max_rollback=max_rollback)
    blocks = sum(start + c.l <= max_len for start in range(0, max_len, c.d))
    window, tail = (min(reach + max_rollback, max_len) for reach in (c.w, c.l))
    # One spare place a store; two int32 a row.
    places = (max_len + 1) + (blocks + 1) + (window + 1) + (tail + 1)
    a_place = c.n_kv_groups * (c.d_k + c.d_v) * dtype.itemsize
    assert cache.bytes_used() == batch * (places * a_place + 8)


@pytest.mark.parametrize("length", [24, 25, 40, 100])
def test_a_step_reads_the_compressed_the_selected_and_the_window(length: int) -> None:
    attn = layer()
    c = attn.config
    cache = attn.new_cache(2, 100)
    n_cmp = (length - c.l) // c.d + 1
    # The query's own block ends at the query.
    selected = c.n_sel * c.l_sel - (-length % c.l_sel)
    expected = (n_cmp + selected + min(c.w, length)) * c.n_kv_groups * (c.d_k + c.d_v) * 8
    assert cache.bytes_read_per_step(length) == 2 * expected
    attn(tokens(length, batch=2), cache=cache)
    assert cache.bytes_read_per_step() == 2 * expected


@pytest.mark.parametrize(("length", "keys"), [(0, 0), (1, 2), (5, 10), (7, 13), (8, 15), (23, 33)])
def test_a_short_sequence_is_read_once_by_each_branch(length: int, keys: int) -> None:
    c = layer().config
    cache = NSACache(c, 1, 100, dtype=FP64)
    assert cache.bytes_read_per_step(length) == keys * c.n_kv_groups * (c.d_k + c.d_v) * 8


def test_rows_of_different_lengths_read_each_what_they_need() -> None:
    attn = layer()
    cache = attn.new_cache(2, 40)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[1, 4:] = False
    attn(tokens(30, batch=2), cache=cache, attention_mask=mask)
    assert cache.bytes_read_per_step() == (cache.bytes_read_per_step(30) + cache.bytes_read_per_step(4)) // 2


# What does not fit, and what is not in use.


@pytest.mark.parametrize("sizes", [[21], [20, 1], [15, 6], [*[1] * 20, 1]], ids=str)
def test_overflow_error_names_max_len_and_changes_nothing(sizes: list[int]) -> None:
    attn = layer()
    cache = attn.new_cache(1, 20)
    x = tokens(sum(sizes))
    *fits, last = x.split(sizes, dim=1)
    for part in fits:
        attn(part, cache=cache)
    before = [buffer.clone() for buffer in cache.buffers()]
    with pytest.raises(ValueError, match=r"max_len = 20"):
        attn(last, cache=cache)
    for buffer, old in zip(cache.buffers(), before, strict=True):
        assert torch.equal(buffer, old)


def test_room_given_back_can_be_used_again() -> None:
    """The host's count of the longest row is only a bound: padding, crops and resets must not exhaust the cache."""
    attn = layer()
    cache = attn.new_cache(2, 20)
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[:, :2] = True
    x = tokens(10, batch=2)
    for _ in range(3):
        attn(x, cache=cache, attention_mask=mask)
    assert cache.lengths.tolist() == [6, 6]
    attn(tokens(14, batch=2), cache=cache)
    cache.reset(torch.tensor([0, 1]))
    attn(tokens(20, batch=2), cache=cache)
    assert cache.lengths.tolist() == [20, 20]


@both_kinds
def test_padding_needs_no_room(static: bool) -> None:
    attn = layer()
    x = tokens(20, batch=2)
    cache = attn.new_cache(2, 12, static=static)
    # On the left, and more columns than the cache has places.
    prompt = torch.zeros(2, 15, SMALL["dim"], dtype=FP64)
    prompt[0, 5:], prompt[1, 13:] = x[0, :10], x[1, :2]
    attn(prompt, cache=cache, attention_mask=torch.arange(15) >= torch.tensor([[5], [13]]))
    new = torch.stack([x[0, 10:16], x[1, 2:8]])
    y = attn(new, cache=cache, attention_mask=torch.arange(6) < torch.tensor([[2], [6]]))
    assert cache.lengths.tolist() == [12, 8]
    assert_equal(y[0, :2], attn(x[:1, :12])[0, 10:])
    assert_equal(y[1], attn(x[1:, :8])[0, 2:])


def test_real_tokens_that_do_not_fit_are_refused_by_their_number() -> None:
    attn = layer()
    cache = attn.new_cache(2, 12)
    mask = torch.arange(15) < torch.tensor([[13], [2]])
    with pytest.raises(ValueError, match=r"13.*max_len = 12"):
        attn(tokens(15, batch=2), cache=cache, attention_mask=mask)
    attn(tokens(10, batch=2), cache=cache)
    with pytest.raises(ValueError, match=r"13.*max_len = 12"):
        attn(tokens(15, batch=2), cache=cache, attention_mask=torch.arange(15) < torch.tensor([[0], [3]]))
    assert cache.lengths.tolist() == [10, 10]


@given(data=st.data(), variant=variants, static=st.booleans(), max_len=st.integers(1, 30))
def test_every_token_that_fits_gets_its_output_in_any_step(
    data: st.DataObject, variant: dict[str, Any], static: bool, max_len: int
) -> None:
    """Padding may be as long as it likes. A static cache may be brought more than fits, a growing one may not."""
    attn = layer(**variant)
    cache = attn.new_cache(2, max_len, static=static, max_rollback=2)
    held = [tokens(0)[0] for _ in range(2)]
    for step in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.integers(1, max_len + 5))
        rooms = [max_len - len(row) for row in held]
        counts = [data.draw(st.integers(0, size if static else min(size, room))) for room in rooms]
        new = tokens(size, batch=2, seed=step)
        y = attn(new, cache=cache, attention_mask=torch.arange(size) < torch.tensor(counts)[:, None])
        for row, (count, room) in enumerate(zip(counts, rooms, strict=True)):
            fit = min(count, room)
            held[row] = torch.cat([held[row], new[row, :fit]])
            if fit:
                assert_equal(y[row, :fit], attn(held[row][None])[0, -fit:])
            assert (y[row, count:] == 0).all()
        assert cache.lengths.tolist() == [len(row) for row in held]


@pytest.mark.parametrize("n_new", [1, 3])
def test_a_step_lays_out_no_more_keys_than_the_cache_can_hold(n_new: int) -> None:
    config = layer(w=4096, l=4096, phi="mean").config
    cache = NSACache(config, 1, 8, dtype=FP64)
    pair = (torch.ones(1, n_new, 2, config.d_k, dtype=FP64), torch.ones(1, n_new, 2, config.d_v, dtype=FP64))

    def compress(k: Tensor, v: Tensor, at: Tensor) -> Any:
        raise AssertionError("a cache shorter than a block never completes one")

    step = cache.stage(raw=pair, selected=pair, window=pair, compress=compress)
    assert step.window[0].shape[1] == 7 + n_new
    assert cache.tail.recent(cache.lengths, pair)[0].shape[1] == 7 + n_new


# Lengths at which the last compressed block ends at max_len, just before it, and as far before it as can be.
@pytest.mark.parametrize("max_len", [5, 20, 21, 22, 23])
@pytest.mark.parametrize("sizes", [[1], [1, 1, 1, 1, 1, 1, 1], [3]], ids=str)
def test_full_static_cache_drops_new_tokens_and_keeps_the_old(max_len: int, sizes: list[int]) -> None:
    attn = layer()
    cache = attn.new_cache(2, max_len, static=True, max_rollback=3)
    x = tokens(max_len, batch=2)
    attn(x, cache=cache)
    for size in sizes:
        attn(tokens(size, batch=2, seed=3), cache=cache)
    assert cache.lengths.tolist() == [max_len, max_len]
    cache.crop(-3)
    assert_equal(attn(x[:, -3:], cache=cache), attn(x)[:, -3:])


@pytest.mark.parametrize("sizes", [[8, 8], [10, 1]], ids=str)
def test_a_strict_static_cache_asks_the_device_and_refuses(sizes: list[int]) -> None:
    attn = layer(strict=True)
    cache = attn.new_cache(2, 10, static=True)
    x = tokens(sum(sizes), batch=2)
    attn(x[:, : sizes[0]], cache=cache)
    with pytest.raises(ValueError, match=rf"{sum(sizes)}.*max_len = 10"):
        attn(x[:, sizes[0] :], cache=cache)
    assert cache.lengths.tolist() == [sizes[0]] * 2


@pytest.mark.parametrize("sizes", [[14, 18], [19, 2], [3, 20]], ids=str)
def test_static_chunk_that_fits_in_part_gets_that_part_right(sizes: list[int]) -> None:
    attn = layer()
    x = tokens(32)[:, : sum(sizes)]
    cache = attn.new_cache(1, 20, static=True)
    assert_equal(feed(attn, cache, x, sizes)[:, :20], attn(x)[:, :20])
    assert cache.lengths.tolist() == [20]
    cache.crop(-4)
    assert_equal(attn(x[:, 16:20], cache=cache), attn(x)[:, 16:20])


def test_full_static_row_does_not_affect_other_rows() -> None:
    attn = layer()
    cache = attn.new_cache(2, 20, static=True)
    x = tokens(30, batch=2)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 8:] = False
    attn(x[:, :20], cache=cache, attention_mask=mask)
    y = torch.cat([attn(x[:, 20 + t : 21 + t], cache=cache) for t in range(10)], dim=1)
    whole = attn(torch.cat([x[1:, :8], x[1:, 20:]], dim=1))
    assert_equal(y[1:], whole[:, 8:])
    assert cache.lengths.tolist() == [20, 18]


def test_static_cache_keeps_the_part_of_a_chunk_that_fits() -> None:
    """What a later crop and step find in the rings is the last tokens that fit, not the last that came."""
    config = layer().config
    max_len, max_rollback = 20, 2
    keys = torch.arange(1.0, 31.0, dtype=FP64).view(1, 30, 1, 1).expand(1, 30, 2, 1)
    new = (keys.expand(1, 30, 2, config.d_k), keys.expand(1, 30, 2, config.d_v))

    def some(start: int, stop: int) -> dict[str, Any]:
        pair = tuple(x[:, start:stop] for x in new)
        return {"raw": pair, "selected": pair, "window": pair, "compress": lambda k, v, at: (k[:, :, 0], v[:, :, 0])}

    cache = NSACache(config, 1, max_len, dtype=FP64, max_rollback=max_rollback, static=True)
    cache.commit(cache.stage(**some(0, 4)))
    cache.commit(cache.stage(**some(4, 24)))
    assert cache.lengths.tolist() == [max_len]
    assert cache.selected.pair[0][0, :max_len, 0, 0].tolist() == [float(t + 1) for t in range(max_len)]
    cache.crop(-max_rollback)
    past = cache.stage(**some(18, 19))
    k_win, _ = past.window
    # Before position 18 lie its w - 1 predecessors, holding position + 1.
    assert k_win[0, :, 0, 0].tolist() == [float(t + 1) for t in range(18 - (config.w - 1), 19)]


@both_kinds
@pytest.mark.parametrize("content", [1e30, -1e30])
def test_places_not_in_use_are_never_seen(content: float, static: bool) -> None:
    """Not a bit changes when everything past a row's length, and what the rings have let go, is overwritten."""
    attn = layer()
    c = attn.config
    lengths = [29, 3]
    mask = torch.arange(29) < torch.tensor(lengths)[:, None]
    clean, dirty = (attn.new_cache(2, 50, static=static, max_rollback=5) for _ in range(2))
    for cache in (clean, dirty):
        attn(tokens(29, batch=2), cache=cache, attention_mask=mask)
    for row, n in enumerate(lengths):
        blocks = max(0, (n - c.l) // c.d + 1)
        for store in dirty.selected.pair:
            store[row, n:] = content
        for store in dirty.compressed.pair:
            store[row, blocks:] = content
        for ring, reach in ((dirty.window, c.w - 1), (dirty.tail, c.l - 1)):
            places = ring.pair[0].shape[1] - 1
            in_use = {t % places for t in range(max(0, n - reach), n)}
            for store in ring.pair:
                for place in set(range(places + 1)) - in_use:
                    store[row, place] = content
    for step in range(20):
        x = tokens(1, batch=2, seed=step + 1)
        assert torch.equal(attn(x, cache=dirty), attn(x, cache=clean))


def test_padding_leaves_no_trace_in_the_cache() -> None:
    attn = layer()
    mask = torch.arange(20) < torch.tensor([13, 20])[:, None]
    x = tokens(20, batch=2)
    caches = []
    for content in (0.0, 1e6):
        cache = attn.new_cache(2, 40)
        attn(x.masked_fill(~mask[..., None], content), cache=cache, attention_mask=mask)
        caches.append(cache)
    for one, other in zip(*(cache.buffers() for cache in caches), strict=True):
        # All but the spare last place.
        assert torch.equal(one[:, :-1], other[:, :-1]) if one.dim() > 1 else torch.equal(one, other)


# Making one.


def test_new_cache_has_the_layer_dtype_and_device_by_default() -> None:
    attn = layer()
    assert attn.new_cache(1, 8).dtype == FP64
    assert attn.new_cache(1, 8, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert attn.new_cache(1, 8).device == attn.k_proj.weight.device
    assert attn.new_cache(1, 8, device="meta").device == torch.device("meta")


@both_kinds
def test_a_cache_made_in_inference_mode_can_be_used_outside(static: bool) -> None:
    attn = layer()
    x = tokens(20)
    with torch.inference_mode():
        cache = attn.new_cache(1, 20, static=static)
        first = attn(x[:, :9], cache=cache)
    assert_equal(torch.cat([first, attn(x[:, 9:], cache=cache)], dim=1), attn(x))
    cache.crop(-2)
    cache.reset()


def test_two_caches_share_nothing() -> None:
    attn = layer()
    x = tokens(20, batch=2)
    one, other = attn.new_cache(1, 20), attn.new_cache(1, 20)
    for t in range(20):
        attn(x[:1, t : t + 1], cache=one)
        attn(x[1:, t : t + 1], cache=other)
    one.crop(-1)
    other.crop(-1)
    assert_equal(attn(x[:1, -1:], cache=one), attn(x[:1])[:, -1:])
    assert_equal(attn(x[1:, -1:], cache=other), attn(x[1:])[:, -1:])


def test_a_deep_copy_forks_the_sequence() -> None:
    attn = layer()
    x, new = tokens(20), tokens(10, seed=1)
    cache = attn.new_cache(1, 40)
    attn(x, cache=cache)
    fork = copy.deepcopy(cache)
    attn(tokens(10, seed=2), cache=cache)
    assert_equal(attn(new, cache=fork), attn(torch.cat([x, new], dim=1))[:, 20:])


WRONG: dict[str, tuple[str, Callable[[NSAAttention], Any]]] = {
    "batch_size": ("batch_size is 0", lambda a: a.new_cache(0, 8)),
    "max_len": ("max_len is 0", lambda a: a.new_cache(1, 0)),
    "max_len_fraction": (r"max_len is 8\.5", lambda a: a.new_cache(1, 8.5)),
    "max_rollback": ("max_rollback is -1", lambda a: a.new_cache(1, 8, max_rollback=-1)),
    "reorder_rows": (r"rows\.shape is \(3,\)", lambda a: a.new_cache(2, 8).reorder(torch.tensor([0, 1, 0]))),
    "dtype": ("cache.dtype is torch.float32", lambda a: a(tokens(3), cache=a.new_cache(1, 8, dtype=torch.float32))),
}


@pytest.mark.parametrize(("name", "call"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_a_value_error_that_names_it(name: str, call: Callable[[NSAAttention], Any]) -> None:
    with pytest.raises(ValueError, match=f"{name}.*accepted"):
        call(layer())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_was_not_finite_is_gone_after_a_crop_or_a_reset(bad: float) -> None:
    attn = layer()
    x = tokens(30, batch=2)
    whole = attn(x)
    cache = attn.new_cache(2, 64)
    attn(x[:, :20], cache=cache)
    attn(torch.full_like(x[:, :9], bad), cache=cache)
    cache.crop(20)
    assert_equal(attn(x[:, 20:], cache=cache), whole[:, 20:])

    attn(torch.full_like(x[:, :9], bad), cache=cache)
    cache.reset()
    assert_equal(attn(x, cache=cache), whole)

    attn(torch.full_like(x[:, :9], bad), cache=cache)
    cache.reset(torch.tensor([0, 1]))
    assert_equal(attn(x, cache=cache), whole)


def test_cropped_nan_stays_unseen_when_padding_passes_the_end() -> None:
    """The queries are then asked from further back, where the ring still holds what was taken back."""
    attn = layer()
    x = tokens(20)
    cache = attn.new_cache(1, 20, max_rollback=8)
    attn(x[:, :12], cache=cache)
    attn(torch.full_like(x[:, :4], float("nan")), cache=cache)
    cache.crop(12)
    padded = torch.cat([x[:, 12:], torch.zeros_like(x[:, :6])], dim=1)
    y = attn(padded, cache=cache, attention_mask=torch.arange(14)[None] < 8)
    assert_equal(y[:, :8], attn(x)[:, 12:])


def test_a_refused_step_leaves_the_cache_as_it_was() -> None:
    attn, on_gpu = layer(), layer(backend="triton")
    on_gpu.load_state_dict(attn.state_dict())
    x = tokens(30)
    cache = on_gpu.new_cache(1, 30)
    with pytest.raises(ValueError, match="triton"):
        on_gpu(x[:, :20], cache=cache)
    assert cache.lengths.tolist() == [0]
    cache.config = attn.config
    assert_equal(attn(x, cache=cache), attn(x))


def test_a_step_that_overflows_and_is_refused_is_forgotten() -> None:
    """What it laid behind the end is no number, and hidden keys are still multiplied, by zero."""
    attn = layer(strict=True).half()
    x = tokens(30).half()
    cache = attn.new_cache(1, 30)
    attn(x[:, :10], cache=cache)
    with pytest.raises(ValueError, match="not finite"):
        attn(torch.full_like(x[:, :6], 6e4), cache=cache)
    assert cache.lengths.tolist() == [10]
    whole = attn(x[:, :12])[:, 10:]
    torch.testing.assert_close(attn(x[:, 10:12], cache=cache), whole, atol=2e-2, rtol=2e-2)


WRONG_CALLS = {
    "crop-of-65-bits": ("lengths", lambda cache: cache.crop(2**64)),
    "crop-elsewhere": ("lengths.device", lambda cache: cache.crop(torch.tensor(3, device="meta"))),
    "reorder-out-of-range": ("rows", lambda cache: cache.reorder(torch.tensor([0, 7]))),
    "reorder-negative": ("rows", lambda cache: cache.reorder(torch.tensor([0, -1]))),
    "reorder-float": ("rows", lambda cache: cache.reorder(torch.tensor([0.0, 1.0]))),
    "reorder-list": ("rows", lambda cache: cache.reorder([0, 1])),
    "reorder-shape": ("rows", lambda cache: cache.reorder(torch.tensor([0]))),
    "reset-out-of-range": ("rows", lambda cache: cache.reset(torch.tensor([9]))),
    "reset-text": ("rows", lambda cache: cache.reset("a")),
    "crop-text": ("lengths", lambda cache: cache.crop("3")),
    "crop-none": ("lengths", lambda cache: cache.crop(None)),
    "crop-bool": ("lengths", lambda cache: cache.crop(True)),
    "crop-float": ("lengths", lambda cache: cache.crop(2.7)),
    "bytes-negative": ("length", lambda cache: cache.bytes_read_per_step(-5)),
    "bytes-too-long": ("length", lambda cache: cache.bytes_read_per_step(9)),
    "bytes-float": ("length", lambda cache: cache.bytes_read_per_step(1.5)),
    "new-dtype": ("dtype", lambda cache: layer().new_cache(1, 8, dtype=torch.int32)),
    "new-device": ("device", lambda cache: layer().new_cache(1, 8, device="nope")),
    "new-device-empty": ("device", lambda cache: layer().new_cache(1, 8, device="")),
    "new-static": ("static", lambda cache: layer().new_cache(1, 8, static="yes")),
}


@pytest.mark.parametrize(("name", "call"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_wrong_cache_call_is_a_value_error_naming_the_argument(name: str, call: Callable[[NSACache], Any]) -> None:
    with pytest.raises(ValueError, match=f"{name}.*accepted"):
        call(layer().new_cache(2, 8))


@pytest.mark.parametrize("lengths", [2**31 + 5, 2**32, torch.tensor([2**32, 2**33])])
def test_cropping_to_more_than_there_is_changes_nothing(lengths: int | Tensor) -> None:
    attn = layer()
    cache = attn.new_cache(2, 20)
    with torch.no_grad():
        attn(torch.randn(2, 9, attn.config.dim, dtype=FP64), cache=cache)
    cache.crop(lengths)
    assert cache.lengths.tolist() == [9, 9]


@pytest.mark.parametrize("static", [False, True])
def test_more_tokens_than_max_len_are_rejected_with_their_count(static: bool) -> None:
    attn = layer()
    cache = attn.new_cache(2, 20, static=static)
    with torch.no_grad(), pytest.raises(ValueError, match=r"30.*max_len = 20"):
        attn(torch.randn(2, 30, attn.config.dim, dtype=FP64), cache=cache)
