"""NSACache: what does not fit is refused or dropped, and what is not in use is never seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caching import FP64, SMALL, assert_equal, both_kinds, feed, layer, tokens, variants
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSACache
from nsa.cache import Step


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

    def compress(k: Tensor, v: Tensor) -> Any:
        raise AssertionError("a cache shorter than a block never completes one")

    def stage(n: int) -> Step:
        pair = (torch.ones(1, n, 2, config.d_k, dtype=FP64), torch.ones(1, n, 2, config.d_v, dtype=FP64))
        return cache.stage(raw=pair, selected=pair, window=pair, compress=compress)

    cache.commit(stage(1))
    step = stage(n_new)
    assert step.window[0].shape[1] == 7 + n_new
    assert cache.tail.recent(cache.lengths, step.new_raw)[0].shape[1] == 7 + n_new


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
        return {"raw": pair, "selected": pair, "window": pair, "compress": lambda k, v: (k[:, :, 0], v[:, :, 0])}

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


@pytest.mark.parametrize("static", [False, True])
def test_more_tokens_than_max_len_are_rejected_with_their_count(static: bool) -> None:
    attn = layer()
    cache = attn.new_cache(2, 20, static=static)
    with torch.no_grad(), pytest.raises(ValueError, match=r"30.*max_len = 20"):
        attn(torch.randn(2, 30, attn.config.dim, dtype=FP64), cache=cache)
