"""NSACache: any way of feeding a sequence through it gives what the whole forward gives, and it stays where it is."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from caching import FP64, SMALL, assert_equal, both_kinds, every_variant, feed, layer, splits, tokens, variants
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSAAttention, NSACache
from nsa.rope import Rope

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


@every_variant
def test_token_by_token_equals_the_whole_forward(variant: dict[str, Any]) -> None:
    attn = layer(**variant)
    x = tokens(41, batch=2)
    cache = attn.new_cache(2, 41, max_rollback=0)
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
def test_reference_backend_agrees_through_the_cache(variant: dict[str, Any]) -> None:
    attn = layer(**variant)
    slow = NSAAttention(dataclasses.replace(attn.config, backend="reference")).double()
    slow.load_state_dict(attn.state_dict())
    x = tokens(37, batch=2)
    sizes = [13, 1, 1, 9, *[1] * 13]
    got = feed(attn, attn.new_cache(2, 40, static=True), x, sizes)
    assert_equal(got, feed(slow, slow.new_cache(2, 40, static=True), x, sizes))


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


@pytest.mark.parametrize("compress_rope", ["after", "before"])
def test_a_rope_that_was_replaced_rotates_cached_tokens_too(compress_rope: str) -> None:
    attn, x = layer(compress_rope=compress_rope), tokens(37, batch=2)
    attn.rope = Rope(attn.config.d_k, 123.0)
    assert_equal(feed(attn, attn.new_cache(2, 40), x, [20, 1, 16]), attn(x))


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
    held |= {x.data_ptr() for x in (cache.lengths, cache.high_water, cache.crop_floor)}
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
    # One spare place per store; three int32 per row.
    places = (max_len + 1) + (blocks + 1) + (window + 1) + (tail + 1)
    a_place = c.n_kv_groups * (c.d_k + c.d_v) * dtype.itemsize
    assert cache.bytes_used() == batch * (places * a_place + 12)


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
