"""Decode kernels over pages and fp8: what the general code gives, which gathers and decodes first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from test_decode import LAYER
from torch import Tensor

from nsa import NSAAttention, NSAConfig
from nsa.backends import routing
from nsa.backends.triton.decode.common import from_fp8, to_fp8
from nsa.cache import NSACache, PagedNSACache
from nsa.cache.store import FP8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS: dict[str, dict[str, Any]] = {
    "paged": {"page_size": 8},
    "fp8": {"quantize": "fp8"},
    "paged_fp8": {"page_size": 12, "quantize": "fp8"},
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def filled(lengths: list[int], max_len: int, changed: dict[str, Any], **options: Any) -> tuple[list[Any], list[Any]]:
    """A layer of each backend, kernels and plain torch, and caches of one form that hold the same."""
    config = NSAConfig(**{**LAYER, **changed}, backend="triton")
    fused = NSAAttention(config).to(DEVICE)
    plain = NSAAttention(replace(config, backend="sdpa")).to(DEVICE)
    plain.load_state_dict(fused.state_dict())
    caches: list[NSACache] = [layer.new_cache(len(lengths), max_len, **options) for layer in (fused, plain)]
    for cache in caches:
        if isinstance(cache, PagedNSACache):
            columns = -(-max_len // cache.page_size)
            pages = torch.randperm(len(lengths) * columns, generator=torch.Generator().manual_seed(0))
            cache.set_page_table(pages.int().view(len(lengths), columns))
    x = torch.randn(len(lengths), max(lengths), config.dim, device=DEVICE)
    mask = torch.arange(max(lengths), device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    plain(x, attention_mask=mask, cache=caches[1])
    for mine, other in zip(caches[0].buffers(), caches[1].buffers(), strict=True):
        mine.copy_(other)
    caches[0].longest = caches[1].longest
    return [fused, plain], caches


def assert_alike(mine: NSACache, other: NSACache) -> None:
    """The same rows in both caches, to a rounding of fp8."""
    assert torch.equal(mine.lengths, other.lengths)
    assert torch.equal(mine.high_water, other.high_water)
    for name, store in mine.stores().items():
        n = store.slots if name in ("window", "tail") else int(other.slots_of(name, other.lengths).min())
        index = torch.arange(n, device=DEVICE).expand(mine.batch_size, -1)
        for a, b in zip(store.gather(index), other.stores()[name].gather(index), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0.13 if store.scales is not None else 1e-5)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize(
    "changed", [pytest.param({}, id="mlp", marks=pytest.mark.slow), pytest.param({"phi": "mean", "d_v": 32}, id="mean")]
)
def test_steps_over_a_form_equal_the_general_code(form: dict[str, Any], changed: dict[str, Any]) -> None:
    """Over borders of pages and blocks, with padding, rows of different lengths."""
    (fused, plain), (mine, other) = filled([30, 6], 48, changed, **form)
    routing.router().counts.clear()
    for mask in ([[1, 1, 1], [1, 1, 0]], [[1], [1]]):
        kept = torch.tensor(mask, dtype=torch.bool, device=DEVICE)
        x = torch.randn(*kept.shape, fused.config.dim, device=DEVICE)
        y, expected = (layer(x, attention_mask=kept, cache=c) for layer, c in ((fused, mine), (plain, other)))
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    assert routing.router().counts.calls["decode", "triton"] == 2
    assert_alike(mine, other)


@pytest.mark.parametrize("branch", [None, "cmp", "sel"])
@pytest.mark.parametrize("form", [FORMS["paged"], FORMS["paged_fp8"]], ids=["paged", "paged_fp8"])
def test_padding_reads_nothing_that_pages_held_before(form: dict[str, Any], branch: str | None) -> None:
    """A page of a row that was not finite comes to another row, whose step has padding."""
    layers, caches = filled([3, 3], 48, {"force_branch": branch}, **form)
    for cache in caches:
        for store in (cache.selected, cache.compressed):
            for x in store.tensors():
                x.view(torch.uint8).fill_(0xFF)
        cache.reset()
    x = torch.randn(2, 20, layers[0].config.dim, device=DEVICE)
    step, real = x[:, :6], torch.tensor([[True] + 5 * [False], 6 * [True]], device=DEVICE)
    outputs = []
    for layer, cache in zip(layers, caches, strict=True):
        layer(x, cache=cache)
        outputs.append(layer(step, attention_mask=real, cache=cache))
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-3 if "quantize" in form else 1e-5, rtol=0)


def test_a_row_without_pages_drops_its_token() -> None:
    """The page after its last one is another row's."""
    (fused, plain), (mine, other) = filled([12, 11], 40, {"phi": "mean"}, page_size=8, static=True)
    for cache in (mine, other):
        cache.reset()
        cache.set_page_table(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32))
    x = torch.randn(2, 16, fused.config.dim, device=DEVICE)
    mask = torch.arange(16, device=DEVICE) < torch.tensor([[16], [11]], device=DEVICE)
    plain(x, attention_mask=mask, cache=other)
    for a, b in zip(mine.buffers(), other.buffers(), strict=True):
        a.copy_(b)
    new = torch.randn(2, 1, fused.config.dim, device=DEVICE)
    routing.router().counts.clear()
    y, expected = fused(new, cache=mine), plain(new, cache=other)
    assert routing.router().counts.calls["decode", "triton"] == 1
    assert mine.lengths.tolist() == [16, 12]
    torch.testing.assert_close(y[1], expected[1], atol=1e-5, rtol=1e-5)
    assert y.isfinite().all()
    assert_alike(mine, other)


@triton.jit
def fp8_kernel(x, scale, encoded, decoded, N: tl.constexpr):
    o_n = tl.arange(0, N)
    b_scale = tl.load(scale)
    b_bytes = to_fp8(tl.load(x + o_n), b_scale)
    tl.store(encoded + o_n, b_bytes)
    tl.store(decoded + o_n, from_fp8(b_bytes, b_scale, tl.float32))


@pytest.mark.parametrize("scale", [1.0, 0.37, 0.0])
def test_kernels_round_to_fp8_as_torch_does(scale: float) -> None:
    """Every e4m3 number, what lies just beside the middle of two, the middles themselves, and random ones."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [middles.nextafter(torch.tensor(to)) for to in (0.0, 1e9)]
    x = torch.cat([numbers, middles, *beside, torch.randn(1024 - 127 - 3 * 126) * 100])
    x = (torch.cat([x, -x]) * (scale or 1.0)).to(DEVICE)
    given = torch.tensor([scale], device=DEVICE)
    encoded, decoded = torch.empty(len(x), dtype=torch.uint8, device=DEVICE), torch.empty_like(x)
    fp8_kernel[(1,)](x, given, encoded, decoded, N=len(x))
    expected: Tensor = (x / (scale or 1.0)).to(FP8)
    assert torch.equal(encoded, expected.view(torch.uint8))
    torch.testing.assert_close(decoded, expected.float() * scale, atol=0, rtol=0)
