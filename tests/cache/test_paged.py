"""PagedNSACache: rows take the pages they need, and a wrong page table is refused before anything changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from caching import FP64, assert_equal, feed, layer, splits, tokens
from hypothesis import given
from hypothesis import strategies as st

from nsa import NSACache
from nsa.cache import PagedNSACache


def paged(batch_size: int = 2, max_len: int = 40, **options: Any) -> PagedNSACache:
    cache = layer().new_cache(batch_size, max_len, **{"page_size": 8, **options})
    assert isinstance(cache, PagedNSACache)
    return cache


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@given(sizes=splits(), page_size=st.sampled_from([4, 8, 12, 64]), static=st.booleans(), fp8=st.booleans())
def test_any_split_in_pages_equals_the_contiguous_cache(
    sizes: list[int], page_size: int, static: bool, fp8: bool
) -> None:
    """Page by page, as the row grows."""
    attn = layer()
    x = tokens(sum(sizes), batch=2)
    quantize = "fp8" if fp8 else None
    cache = attn.new_cache(2, 60, page_size=page_size, static=static, quantize=quantize)
    expected = feed(attn, attn.new_cache(2, 60, quantize=quantize), x, sizes)
    done = 0
    for part, size in zip(x.split(sizes, dim=1), sizes, strict=True):
        cache.allocate(done + size)
        assert_equal(attn(part, cache=cache), expected[:, done : done + size])
        done += size
    assert cache.free_pages == cache.n_pages - 2 * -(-done // page_size)


def test_a_row_takes_only_the_pages_it_needs() -> None:
    attn, cache = layer(), paged(n_pages=6)
    cache.allocate([30, 9])
    assert cache.page_table.tolist() == [[0, 1, 2, 3, -1], [4, 5, -1, -1, -1]]
    assert cache.free_pages == 0
    x = tokens(30, batch=2)
    mask = torch.arange(30) < torch.tensor([[30], [9]])
    y = attn(x, cache=cache, attention_mask=mask)
    assert_equal(y[:1], attn(x[:1]))
    assert_equal(y[1:, :9], attn(x[1:, :9]))
    assert cache.bytes_used() < attn.new_cache(2, 40).bytes_used()


def test_a_row_freed_gives_its_pages_to_another() -> None:
    """What the pages held is never seen again, not even where it was not finite."""
    attn, cache = layer(), paged(n_pages=6)
    cache.allocate([32, 16])
    attn(torch.full_like(tokens(16, batch=2), float("nan")), cache=cache)
    cache.reset(torch.tensor([1]))
    cache.free(torch.tensor([0]))
    assert (cache.lengths.tolist(), cache.free_pages) == ([0, 0], 4)
    cache.allocate([0, 40])
    x = tokens(40, batch=2)
    # Padding makes a step read places that the row has not filled.
    for first, last in ((0, 3), (3, 20), (20, 21), (21, 40)):
        mask = torch.arange(first, 40) < torch.tensor([[0], [last]])
        y = attn(x[:, first:], cache=cache, attention_mask=mask)
        assert_equal(y[1, : last - first], attn(x[1:])[0, first:last])


def test_an_engine_s_own_table_says_where_a_row_lies() -> None:
    """Two rows trade places by their tables; lengths and rings are the cache's."""
    attn, cache = layer(), paged()
    x = tokens(20, batch=2)
    cache.set_page_table(table([9, 3, 7], [0, 8, 1]))
    attn(x, cache=cache)
    cache.set_page_table(table([9, 3, 7, 2], [0, 8, 1, 4]))
    more = tokens(10, batch=2, seed=1)
    whole = attn(torch.cat([x, more], dim=1))
    assert_equal(attn(more, cache=cache), whole[:, 20:])
    assert cache.page_table[:, :4].tolist() == [[9, 3, 7, 2], [0, 8, 1, 4]]


WRONG_TABLES = {
    "out_of_range": (table([0, 1, 10], [2, 3, 4]), r"table\[0\] is 10"),
    "negative": (table([0, 1, 2], [3, 4, -2]), r"table\[1\] is -2"),
    "shared_by_rows": (table([0, 1, 2], [3, 2, 4]), r"table\[1\].*rows 0 and 1 hold page 2"),
    "twice_in_a_row": (table([0, 1, 1], [2, 3, 4]), r"table\[0\].*page 1"),
    "hole": (table([0, -1, 1], [2, 3, 4]), r"table\[0\].*after -1"),
    "too_few": (table([0, 1, 2], [3, 4, -1]), r"table\[1\].*20 tokens"),
    "too_many_columns": (table(list(range(6)), [-1] * 6), r"table\.shape is \(2, 6\)"),
    "rows": (table([0, 1, 2]), r"table\.shape is \(1, 3\)"),
    "dtype": (table([0, 1, 2], [3, 4, 5]).long(), r"table\.dtype"),
    "dims": (table([0, 1, 2])[0], r"table\.shape"),
    "list": ([[0, 1, 2], [3, 4, 5]], "table is a list"),
}


@pytest.mark.parametrize(("wrong", "name"), WRONG_TABLES.values(), ids=WRONG_TABLES.keys())
def test_a_wrong_page_table_is_named_and_changes_nothing(wrong: Any, name: str) -> None:
    attn, cache = layer(), paged(n_pages=10)
    x = tokens(24, batch=2)
    cache.allocate(24)
    attn(x[:, :20], cache=cache)
    before, pages = copy.deepcopy(cache), cache.page_table
    with pytest.raises(ValueError, match=name):
        cache.set_page_table(wrong)
    assert torch.equal(cache.page_table, pages)
    for one, other in zip(cache.buffers(), before.buffers(), strict=True):
        assert torch.equal(one, other)
    assert_equal(attn(x[:, 20:], cache=cache), attn(x)[:, 20:])


@given(data=st.data())
def test_tables_are_accepted_when_each_page_has_one_owner(data: st.DataObject) -> None:
    cache = paged(batch_size=3, max_len=32, n_pages=6)
    rows = data.draw(st.lists(st.lists(st.integers(-2, 7), max_size=4), min_size=3, max_size=3))
    padded = table(*([*row, *[-1] * (4 - len(row))] for row in rows))
    used = [page for row in padded.tolist() for page in row if page != -1]
    holes = any(-1 in row and any(page != -1 for page in row[row.index(-1) :]) for row in padded.tolist())
    good = all(0 <= page < 6 for page in used) and len(set(used)) == len(used) and not holes
    if good:
        cache.set_page_table(padded)
        assert torch.equal(cache.page_table, padded)
        assert cache.free_pages == 6 - len(used)
    else:
        with pytest.raises(ValueError, match=r"table\[\d\].*accepted"):
            cache.set_page_table(padded)
        assert cache.free_pages == 6


def test_tokens_without_pages_are_refused_by_row() -> None:
    attn, cache = layer(), paged()
    cache.allocate([40, 8])
    x = tokens(10, batch=2)
    with pytest.raises(ValueError, match=r"row 1 is 10.*8 that its 1 pages"):
        attn(x, cache=cache)
    assert cache.lengths.tolist() == [0, 0]
    # Padding needs no pages.
    y = attn(x, cache=cache, attention_mask=torch.arange(10) < torch.tensor([[10], [8]]))
    assert_equal(y[1:, :8], attn(x[1:, :8]))


def test_a_static_row_drops_what_its_pages_do_not_hold() -> None:
    attn, cache = layer(), paged(static=True)
    cache.allocate([40, 8])
    x = tokens(20, batch=2)
    y = attn(x, cache=cache)
    assert cache.lengths.tolist() == [20, 8]
    assert_equal(y[:1], attn(x[:1]))
    assert_equal(y[1:, :8], attn(x[1:, :8]))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda c: c.allocate(41), r"lengths\[0\] is 41"),
        (lambda c: c.allocate(2.5), r"lengths\[0\] is 2.5"),
        (lambda c: c.allocate([8]), "lengths is"),
        (lambda c: c.allocate([8, -1]), r"lengths\[1\] is -1"),
        (lambda c: c.allocate([40, 8]), "allocate is 3.*1 free"),
        (lambda c: c.select(torch.tensor([0, 0, 0])), "copy .*is 4.*3 free"),
        (lambda c: c.free(torch.tensor([2])), "rows"),
    ],
    ids=["too_long", "no_integer", "rows", "negative", "exhausted", "no_pages_for_copies", "free_out_of_range"],
)
def test_what_the_pages_cannot_give_is_refused_unchanged(call: Any, name: str) -> None:
    cache = paged(n_pages=5)
    cache.allocate([16, 16])
    before = cache.page_table
    with pytest.raises(ValueError, match=name):
        call(cache)
    assert torch.equal(cache.page_table, before)


def test_a_table_is_written_where_it_lies() -> None:
    """Only calls that change shapes replace the table: a captured step reads it at its address."""
    cache = paged()
    address = cache.table.data_ptr()
    cache.allocate(20)
    cache.set_page_table(table([5, 4, 3], [2, 1, 0]))
    cache.select(torch.tensor([1, 0]))
    cache.free(torch.tensor([0]))
    assert cache.table.data_ptr() == address
    assert cache.page_table[:, :3].tolist() == [[-1, -1, -1], [5, 4, 3]]


@pytest.mark.parametrize(
    ("options", "name"),
    [({"page_size": 6}, "page_size is 6.*d = 4"), ({"page_size": 0}, "page_size"), ({"n_pages": 0}, "n_pages is 0")],
)
def test_an_impossible_page_is_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        paged(**options)


def test_new_cache_is_paged_where_pages_are_asked_for() -> None:
    attn = layer()
    assert type(attn.new_cache(1, 8)) is NSACache
    assert type(attn.new_cache(1, 8, n_pages=3)) is PagedNSACache
    assert attn.new_cache(1, 8, page_size=4).selected.pair[0].shape == (3, 4, 2, 4)
    assert attn.new_cache(1, 8, page_size=4).compressed.pair[0].shape == (3, 1, 2, 4)
    assert attn.new_cache(1, 8, page_size=4, dtype=FP64).dtype == FP64
