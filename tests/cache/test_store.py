"""Stores in fp8: how far a value may be from what was written, and that splits do not change results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caching import assert_equal, feed, layer, new_cache, splits, tokens
from hypothesis import given
from hypothesis import strategies as st

from nsa import NSACache, NSAConfig
from nsa.cache.store import Store

both_forms = pytest.mark.parametrize("options", [{}, {"page_size": 8}], ids=["contiguous", "paged"])


def fp8_store(slots: int = 4) -> Store:
    config = NSAConfig(dim=8, n_heads=2, n_kv_groups=2, d_k=16, d_v=8)
    return Store(config, (2, slots + 1), torch.float32, "cpu", fp8=True)


@given(exponent=st.integers(-30, 30), seed=st.integers(0, 1000))
def test_fp8_is_within_half_a_step_of_the_largest(exponent: int, seed: int) -> None:
    """e4m3 has 3 mantissa bits, and below 2**-6 of what 448 stands for a fixed step."""
    generator = torch.Generator().manual_seed(seed)
    new = tuple(torch.randn(2, 3, 2, d, generator=generator) * 2.0**exponent for d in (16, 8))
    store = fp8_store()
    index = torch.tensor([[0, 1, 2], [3, 0, 1]])
    store.write(index, new, torch.ones(2, 3, dtype=torch.bool))
    for x, y in zip(new, store.gather(index), strict=True):
        largest = x.abs().amax(dim=-1, keepdim=True)
        assert ((x - y).abs() <= x.abs() / 16 + largest * 2.0**-10 / 448 * 1.01).all()
        # Groups and tokens have scales of their own.
        assert ((y.abs().amax(dim=-1, keepdim=True) - largest).abs() <= largest * 1e-6).all()


def test_zeros_stay_zeros_and_nan_stays_nan() -> None:
    store = fp8_store()
    k, v = torch.zeros(2, 1, 2, 16), torch.full((2, 1, 2, 8), float("nan"))
    store.write(torch.zeros(2, 1, dtype=torch.long), (k, v), torch.ones(2, 1, dtype=torch.bool))
    got = store.gather(torch.zeros(2, 1, dtype=torch.long))
    assert (got[0] == 0).all()
    assert got[1].isnan().all()
    store.clear(torch.zeros(2, dtype=torch.int32), 1, torch.ones(2, dtype=torch.int32))
    assert (store.gather(torch.zeros(2, 1, dtype=torch.long))[1] == 0).all()


@given(sizes=splits(), static=st.booleans(), paged=st.booleans())
def test_in_fp8_any_split_gives_the_same_as_single_steps(sizes: list[int], static: bool, paged: bool) -> None:
    attn = layer()
    x = tokens(sum(sizes), batch=2)
    options: dict[str, Any] = {"quantize": "fp8", "static": static} | ({"page_size": 8} if paged else {})
    whole = feed(attn, new_cache(attn, 2, 60, quantize="fp8"), x, [1] * sum(sizes))
    assert_equal(feed(attn, new_cache(attn, 2, 60, **options), x, sizes), whole)


@both_forms
def test_fp8_outputs_are_near_those_of_the_layer(options: dict[str, Any]) -> None:
    # All blocks are selected: another selection is no rounding error.
    attn = layer(n_sel=16)
    x = tokens(60, batch=2)
    cache = new_cache(attn, 2, 60, quantize="fp8", **options)
    error = (feed(attn, cache, x, [40, *[1] * 20]) - attn(x)).abs().max()
    assert 0 < error < 2.0**-4 * attn(x).abs().max()


def test_fp8_takes_a_byte_per_value_and_four_per_scale() -> None:
    c = layer().config
    caches = [NSACache(c, 1, 100, dtype=torch.bfloat16, max_rollback=0, quantize=q) for q in (None, "fp8")]
    slots = (100 + 1) + (24 + 1) + (6 + 1)
    saved = slots * c.n_kv_groups * (c.d_k + c.d_v - 2 * 4)
    assert caches[0].bytes_used() - caches[1].bytes_used() == saved
    assert caches[1].bytes_read_per_step(50) * (c.d_k + c.d_v) * 2 == caches[0].bytes_read_per_step(50) * (
        c.d_k + c.d_v + 2 * 4
    )


def test_an_unknown_quantization_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="quantize is 'int4'"):
        layer().new_cache(1, 8, quantize="int4")
