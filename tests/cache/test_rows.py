"""What every cache does with its rows, of NSA and of the attentions it is compared with: no row loses its sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from caching import FORMS, NSA_FORMS, SMALL, assert_equal, attention_of, feed, layer, new_cache, scatter_pages, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import NSAAttention, NSACache, NSAConfig
from nsa.cache import NewTokens, PagedNSACache, RowCache

every_form = pytest.mark.parametrize(("kind", "options"), FORMS.values(), ids=FORMS.keys())
LENGTHS = [23, 5, 31]


def filled(attn: Any, options: dict[str, Any], max_len: int = 48) -> tuple[Any, list[Tensor]]:
    """A cache of three rows of different lengths, and the tokens of each."""
    cache = new_cache(attn, 3, max_len, max_rollback=8, **options)
    x = tokens(31, batch=3)
    attn(x, cache=cache, attention_mask=torch.arange(31) < torch.tensor(LENGTHS)[:, None])
    return cache, [x[row, :n] for row, n in enumerate(LENGTHS)]


def assert_continues(attn: Any, cache: RowCache, held: list[Tensor], size: int = 11, seed: int = 7) -> None:
    """New tokens get what the whole forward of each row's own tokens gives them."""
    assert cache.lengths.tolist() == [len(row) for row in held]
    new = tokens(size, batch=len(held), seed=seed)
    y = feed(attn, cache, new, [1, 1, size - 2])
    for row, old in enumerate(held):
        assert_equal(y[row], attn(torch.cat([old, new[row]])[None])[0, -size:])


@every_form
@pytest.mark.parametrize("rows", [[2], [1, 0], [0, 0, 2, 2, 1], [2, 1, 0], [1, 1, 1]], ids=str)
def test_selected_rows_continue_their_sources(kind: str, options: dict[str, Any], rows: list[int]) -> None:
    attn = attention_of(kind)
    # Pages for the copies, too.
    more = {"n_pages": 100} if "page_size" in options else {}
    cache, held = filled(attn, options | more)
    cache.select(torch.tensor(rows))
    assert cache.batch_size == len(rows)
    if isinstance(cache, PagedNSACache):
        cache.allocate(48)
    assert_continues(attn, cache, [held[row] for row in rows])


@every_form
def test_a_mask_selects_the_rows_to_keep(kind: str, options: dict[str, Any]) -> None:
    attn = attention_of(kind)
    cache, held = filled(attn, options)
    cache.select(torch.tensor([True, False, True]))
    assert_continues(attn, cache, [held[0], held[2]])


@every_form
def test_a_grown_cache_continues_past_its_old_end(kind: str, options: dict[str, Any]) -> None:
    attn = attention_of(kind)
    more = {"n_pages": 100} if "page_size" in options else {}
    cache, held = filled(attn, options | more, max_len=31)
    cache.grow(70)
    if isinstance(cache, PagedNSACache):
        cache.allocate(70)
    assert cache.max_len == 70
    assert_continues(attn, cache, held, size=39)


@pytest.mark.parametrize("options", NSA_FORMS.values(), ids=NSA_FORMS.keys())
def test_growing_rings_that_never_wrapped_keeps_their_places(options: dict[str, Any]) -> None:
    """The window and the tail of a short cache have as many slots as it has tokens, and more once it is longer."""
    attn = layer(w=20, l=16)
    more = {"n_pages": 40} if "page_size" in options else {}
    cache = new_cache(attn, 1, 7, max_rollback=3, **options, **more)
    x = tokens(60)
    attn(x[:, :7], cache=cache)
    cache.grow(60)
    cache.make_room([60])
    assert (cache.window.slots, cache.tail.slots) == (23, 19)
    assert_equal(feed(attn, cache, x[:, 7:], [1, 30, 22]), attn(x)[:, 7:])


@every_form
def test_a_moved_cache_keeps_its_content(kind: str, options: dict[str, Any]) -> None:
    attn = attention_of(kind)
    cache, held = filled(attn, options)
    assert cache.to("cpu") is cache
    assert_continues(attn, cache, held)
    moved = cache.to("meta")
    assert {buffer.device.type for buffer in (*moved.buffers(), moved.frequencies)} == {"meta"}


class OutOfMemory(TorchDispatchMode):
    """The operation that allocates after `left` others fails, and those that follow."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.returns and func._schema.returns[0].alias_info is None:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


CHANGES: dict[str, Callable[[RowCache], object]] = {
    "same_rows": lambda cache: cache.select(torch.tensor([2, 0, 2])),
    "fewer_rows": lambda cache: cache.select(torch.tensor([2, 1])),
    "more_rows": lambda cache: cache.select(torch.tensor([1, 1, 0, 2])),
    "grow": lambda cache: cache.grow(300),
    "move": lambda cache: cache.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize(
    ("kind", "options"), [*FORMS.values(), ("nsa", {"quantize": "fp8"}), ("nsa", {"page_size": 8, "quantize": "fp8"})]
)
def test_a_change_that_runs_out_of_memory_leaves_the_cache(
    kind: str, options: dict[str, Any], change: Callable[[RowCache], object]
) -> None:
    more = {"n_pages": 40} if "page_size" in options else {}
    cache, _ = filled(attention_of(kind), options | more, max_len=32)
    before = copy.deepcopy(cache)
    for left in range(100):
        try:
            with OutOfMemory(left):
                change(cache)
            break
        except (torch.OutOfMemoryError, ValueError):
            assert (cache.batch_size, cache.max_len, cache.device.type) == (3, 32, "cpu")
            for x, y in zip(cache.buffers(), before.buffers(), strict=True):
                assert x.dtype == y.dtype
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
            if isinstance(cache, PagedNSACache):
                assert (cache.pages, cache.selected.table is cache.table) == (before.pages, True)
    assert left < 99


@every_form
def test_rows_are_cropped_and_reset_alike(kind: str, options: dict[str, Any]) -> None:
    attn = attention_of(kind)
    cache, held = filled(attn, options)
    cache.crop(torch.tensor([20, 5, 26]))
    held = [held[0][:20], held[1], held[2][:26]]
    cache.reset(torch.tensor([1]))
    assert_continues(attn, cache, [held[0], held[1][:0], held[2]])


@every_form
def test_what_was_not_finite_is_gone_after_a_truncation(kind: str, options: dict[str, Any]) -> None:
    attn = attention_of(kind)
    cache, held = filled(attn, options)
    attn(torch.full((3, 4, SMALL["dim"]), float("nan"), dtype=torch.float64), cache=cache)
    cache.truncate(torch.tensor(LENGTHS, dtype=torch.int32), removed=4, longest=31)
    assert_continues(attn, cache, held)


@every_form
def test_static_caches_drop_what_does_not_fit(kind: str, options: dict[str, Any]) -> None:
    attn = attention_of(kind)
    cache = new_cache(attn, 2, 20, **(options | {"static": True}))
    x = tokens(20, batch=2)
    attn(x, cache=cache)
    attn(tokens(3, batch=2, seed=3), cache=cache)
    assert cache.lengths.tolist() == [20, 20]
    cache.crop(-3)
    assert_equal(attn(x[:, -3:], cache=cache), attn(x)[:, -3:])


@every_form
def test_a_full_cache_refuses_tokens_and_keeps_its_own(kind: str, options: dict[str, Any]) -> None:
    attn = attention_of(kind)
    cache = new_cache(attn, 2, 20, **(options | {"static": False}))
    x = tokens(20, batch=2)
    attn(x[:, :18], cache=cache)
    with pytest.raises(ValueError, match=r"21.*max_len = 20"):
        attn(tokens(3, batch=2, seed=3), cache=cache)
    assert_equal(attn(x[:, 18:], cache=cache), attn(x)[:, 18:])


@every_form
def test_another_dtype_or_batch_is_refused_by_name(kind: str, options: dict[str, Any]) -> None:
    attn = attention_of(kind)
    cache = new_cache(attn, 2, 20, dtype=torch.float32, **options)
    with pytest.raises(ValueError, match=r"cache\.dtype is torch.float32"):
        attn(tokens(3, batch=2), cache=cache)
    with pytest.raises(ValueError, match=r"3.*2"):
        attn(tokens(3, batch=3), cache=new_cache(attn, 2, 20, **options))
    assert cache.lengths.tolist() == [0, 0]


@every_form
def test_a_cache_on_another_device_is_refused_by_name(kind: str, options: dict[str, Any]) -> None:
    attn = attention_of(kind)
    cache = new_cache(attn, 2, 20, **options).to("meta")
    with pytest.raises(ValueError, match=r"cache\.device is .*meta"):
        attn(tokens(3, batch=2), cache=cache)


WRONG: dict[str, tuple[str, Callable[[RowCache], Any]]] = {
    "grow-shorter": ("max_len is 7", lambda cache: cache.grow(7)),
    "grow-text": ("max_len", lambda cache: cache.grow("9")),  # type: ignore[arg-type]
    "select-nothing": ("rows", lambda cache: cache.select(torch.zeros(0, dtype=torch.long))),
    "select-out-of-range": ("rows", lambda cache: cache.select(torch.tensor([2]))),
    "select-negative": ("rows", lambda cache: cache.select(torch.tensor([-1]))),
    "select-float": ("rows", lambda cache: cache.select(torch.tensor([1.0]))),
    "select-elsewhere": ("rows.device", lambda cache: cache.select(torch.tensor([0], device="meta"))),
    "to-nowhere": ("device", lambda cache: cache.to("nope")),
}


@every_form
@pytest.mark.parametrize(("name", "call"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_names_its_argument_and_changes_nothing(
    kind: str, options: dict[str, Any], name: str, call: Callable[[RowCache], Any]
) -> None:
    attn = attention_of(kind)
    cache = new_cache(attn, 2, 8, **options)
    attn(tokens(5, batch=2), cache=cache)
    before = [buffer.clone() for buffer in cache.buffers()]
    with pytest.raises(ValueError, match=f"{name}.*accepted"):
        call(cache)
    for buffer, old in zip(cache.buffers(), before, strict=True):
        assert torch.equal(buffer, old)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), form=st.sampled_from(list(FORMS.values())))
def test_any_calls_in_any_order_keep_every_row(
    data: st.DataObject, form: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Rows are followed as plain lists of tokens; after every append each must see exactly its own list."""
    kind, options = form
    attn = attention_of(kind)
    max_rollback = 6
    paged = {"n_pages": 400} if "page_size" in options else {}
    cache = attn.new_cache(3, 30, max_rollback=max_rollback, **options, **paged)
    held = [tokens(0)[0] for _ in range(3)]
    highest = [0] * 3
    calls = ["append", "append", "append", "step", "crop", "reset", "select", "grow"]
    if kind == "nsa":
        calls.append("reload")
    for step in range(data.draw(st.integers(1, 8))):
        what = data.draw(st.sampled_from(calls))
        if isinstance(cache, PagedNSACache):
            cache.allocate(cache.max_len)
        if what in ("append", "step"):
            room = cache.max_len - max(len(row) for row in held)
            size = min(room, 1 if what == "step" else data.draw(st.integers(1, 25)))
            if size == 0:
                continue
            new = tokens(size, len(held), seed=step)
            counts = data.draw(st.lists(st.integers(0, size), min_size=len(held), max_size=len(held)))
            y = attn(new, cache=cache, attention_mask=torch.arange(size) < torch.tensor(counts)[:, None])
            for row, count in enumerate(counts):
                held[row] = torch.cat([held[row], new[row, :count]])
                highest[row] = max(highest[row], len(held[row]))
                if count:
                    assert_equal(y[row, :count], attn(held[row][None])[0, -count:])
        elif what == "crop":
            kept = []
            for row, high in zip(held, highest, strict=True):
                least = min(max(0, high - max_rollback), len(row))
                kept.append(data.draw(st.one_of(st.integers(least, len(row)), st.just(0))))
            cache.crop(torch.tensor(kept))
            held = [row[:n] for row, n in zip(held, kept, strict=True)]
            highest = [0 if n == 0 else high for n, high in zip(kept, highest, strict=True)]
        elif what == "reset":
            rows = data.draw(st.lists(st.integers(0, len(held) - 1), unique=True))
            cache.reset(torch.tensor(rows, dtype=torch.long))
            for row in rows:
                held[row], highest[row] = held[row][:0], 0
        elif what == "select":
            rows = data.draw(st.lists(st.integers(0, len(held) - 1), min_size=1, max_size=4))
            cache.select(torch.tensor(rows))
            held, highest = [held[row] for row in rows], [highest[row] for row in rows]
        elif what == "grow":
            cache.grow(min(90, cache.max_len + data.draw(st.integers(0, 25))))
        else:
            cache.save(tmp_path / "cache")
            more = {"static": cache.static, **options, **paged}
            cache = type(cache).load(tmp_path / "cache", attn.config, max_len=cache.max_len, **more)
        assert cache.lengths.tolist() == [len(row) for row in held]


def long_run(n_steps: int, options: dict[str, Any], tolerance: float) -> None:
    """Two rows of different lengths, chunks and single tokens in turn, and crops, past many borders, in fp32."""
    torch.manual_seed(0)
    sizes = {"l": 16, "d": 8, "l_sel": 32, "n_sel": 4, "w": 40}
    attn = NSAAttention(NSAConfig(**{**SMALL, **sizes, "d_k": 8, "d_v": 8}))
    total = n_steps + 100
    x = tokens(total, batch=2).float()
    cache: NSACache = attn.new_cache(2, total, max_rollback=8, **options)
    if isinstance(cache, PagedNSACache):
        scatter_pages(cache)
    prompt = torch.arange(90) < torch.tensor([[90], [57]])
    got = [[y[row, : [90, 57][row]]] for row, y in enumerate([attn(x[:, :90], cache=cache, attention_mask=prompt)] * 2)]
    starts = [90, 57]
    while starts[0] < total - 8:
        size = 5 if starts[0] % 7 == 0 else 1
        new = torch.stack([x[row, n : n + size] for row, n in enumerate(starts)])
        y = attn(new, cache=cache)
        if starts[0] % 31 == 0:
            # A step that was taken back and taken again.
            cache.crop(-size)
            y = attn(new, cache=cache)
        for row in range(2):
            got[row].append(y[row])
            starts[row] += size
    for row, n in enumerate(starts):
        assert_equal(torch.cat(got[row]), attn(x[row : row + 1, :n])[0], tolerance)


@pytest.mark.parametrize("options", [{}, {"page_size": 32}], ids=["contiguous", "paged"])
def test_150_steps_of_uneven_rows_equal_the_whole_forward(options: dict[str, Any]) -> None:
    long_run(150, options, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"static": True}, {"page_size": 64}], ids=["contiguous", "static", "paged"])
def test_2000_steps_of_uneven_rows_equal_the_whole_forward(options: dict[str, Any]) -> None:
    long_run(2000, options, 1e-5)


others = pytest.mark.parametrize("kind", ["dense", "sliding", "longformer", "bigbird"])


@others
def test_a_step_that_fails_leaves_the_cache_as_it_was(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attn, x = attention_of(kind), tokens(30)
    cache = attn.new_cache(1, 40)
    attn(x[:, :20], cache=cache)
    before, longest = [buffer.clone() for buffer in cache.buffers()], cache.longest

    def fail(*args: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(NewTokens, "restore_order", fail)
        with pytest.raises(MemoryError):
            attn(x[:, 20:], cache=cache)
    for buffer, old in zip(cache.buffers(), before, strict=True):
        # All but the spare last place.
        assert torch.equal(buffer[:, :-1], old[:, :-1]) if buffer.dim() > 1 else torch.equal(buffer, old)
    assert cache.longest == longest
    assert_equal(attn(x[:, 20:], cache=cache), attn(x)[:, 20:])


@others
def test_a_cache_of_another_layer_is_refused_by_name(kind: str) -> None:
    attn, x = attention_of(kind), tokens(3)
    other = attention_of(kind)
    other.config = replace(other.config, d_k=6)
    for cache in (layer().new_cache(1, 40), other.new_cache(1, 40)):
        with pytest.raises(ValueError, match=r"cache is .*new_cache"):
            attn(x, cache=cache)
        assert cache.lengths.tolist() == [0]
