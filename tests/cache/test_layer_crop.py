"""NSACache: rows that are reset, reordered and cropped continue as if the rest had never come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caching import FP64, assert_equal, both_kinds, feed, layer, tokens, variants
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor


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


@pytest.mark.parametrize("lengths", [2**31 + 5, 2**32, torch.tensor([2**32, 2**33])])
def test_cropping_to_more_than_there_is_changes_nothing(lengths: int | Tensor) -> None:
    attn = layer()
    cache = attn.new_cache(2, 20)
    with torch.no_grad():
        attn(torch.randn(2, 9, attn.config.dim, dtype=FP64), cache=cache)
    cache.crop(lengths)
    assert cache.lengths.tolist() == [9, 9]
