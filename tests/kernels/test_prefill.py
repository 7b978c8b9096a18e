"""The kernels of a cached chunk against the same in plain torch: not a bit differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE  # isort: skip

from nsa import NSAAttention, NSACache, NSAConfig, PagedNSACache, rope
from nsa.backends.triton.launch import COLLECTING, Launch
from nsa.backends.triton.prefill import cached_angles
from nsa.cache.store import Ring, Store
from nsa.rope import Rope
from nsa.sequences import Pair

# Two groups are kernels' rows too; values are as wide as no power of two.
CONFIG = NSAConfig(
    dim=32, n_heads=4, n_kv_groups=2, d_k=16, d_v=48, l=8, d=4, l_sel=8, n_sel=3, n_init=1, n_local=1, w=6,
    backend="triton",
)  # fmt: skip
PLAIN = replace(CONFIG, backend="reference")
BATCH, SLOTS = 3, 24
FORMS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "fp8": {"quantize": "fp8"},
    "paged": {"page_size": 8},
    "paged_fp8": {"page_size": 4, "quantize": "fp8"},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def new_pair(n: int, seed: int = 1, *, strided: bool = False) -> Pair:
    """Of `n` tokens; `strided`: as parts of one projection."""
    k, v = (some(BATCH, n, CONFIG.n_kv_groups * (3 if strided else 1), d, seed=seed) for d in (16, 48))
    return (k[:, :, 2:4], v[:, :, 4:6]) if strided else (k, v)


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def both(make: Callable[[NSAConfig], Store]) -> tuple[Store, Store]:
    """The same store, random inside, for the kernels and for torch."""
    stores = make(CONFIG), make(PLAIN)
    for i, tensors in enumerate(zip(*(store.tensors() for store in stores), strict=True)):
        values = some(*tensors[0].shape, seed=10 + i).to(tensors[0].dtype)
        for x in tensors:
            x.copy_(values)
    assert [store.kernels() is None for store in stores] == [False, True]
    return stores


def make_ring(config: NSAConfig, slots: int, reach: int, fp8: bool) -> Ring:
    return Ring(config, (BATCH, slots + 1), torch.float32, DEVICE, reach=reach, fp8=fp8)


def kept(store: Store) -> list[Tensor]:
    """All but the spare places, as bytes."""
    return [x[:, : store.slots].contiguous().view(torch.uint8) for x in store.tensors()]


def same(got: Any, expected: Any) -> bool:
    return all(map(torch.equal, got, expected))


ragged = st.lists(st.integers(0, 40), min_size=BATCH, max_size=BATCH)
counts = st.lists(st.integers(0, 19), min_size=BATCH, max_size=BATCH)


@settings(max_examples=25)
@given(starts=ragged, added=counts, n_new=st.integers(1, 19), slots=st.sampled_from([1, 7, 16]), fp8=st.booleans())
def test_a_ring_keeps_the_last_tokens(
    starts: list[int], added: list[int], n_new: int, slots: int, fp8: bool
) -> None:  # fmt: skip
    start = lengths(*starts)
    end = start + lengths(*added).clamp_max(n_new)
    kernels, plain = both(lambda config: make_ring(config, slots, 5, fp8))
    for store in (kernels, plain):
        store.extend(start, end, new_pair(n_new, strided=True))
    assert same(kept(kernels), kept(plain))


@settings(max_examples=25)
@given(
    starts=ragged,
    earlier=st.integers(0, 9),
    n_new=st.integers(1, 19),
    slots=st.sampled_from([1, 7, 16]),
    fp8=st.booleans(),
)
def test_recent_tokens_are_those_of_the_ring_and_the_new(
    starts: list[int], earlier: int, n_new: int, slots: int, fp8: bool
) -> None:  # fmt: skip
    start = lengths(*starts)
    q_start = (start - earlier).clamp_min(0) if earlier else None
    kernels, plain = both(lambda config: make_ring(config, slots, 5, fp8))
    assert isinstance(kernels, Ring)
    assert isinstance(plain, Ring)
    new = new_pair(n_new, strided=True)
    assert same(kernels.recent(start, new, q_start=q_start), plain.recent(start, new, q_start=q_start))


@settings(max_examples=25)
@given(starts=ragged, n_new=st.integers(1, 19), sizes=st.sampled_from([(8, 4), (4, 4), (6, 2), (1, 1)]))
def test_blocks_are_the_tokens_that_plain_torch_gathers(
    starts: list[int], n_new: int, sizes: tuple[int, int]
) -> None:  # fmt: skip
    block, stride = sizes
    start = lengths(*starts)
    kernels, plain = both(lambda config: make_ring(config, block + 3, block - 1, False))
    assert isinstance(kernels, Ring)
    assert isinstance(plain, Ring)
    new = new_pair(n_new)
    got, expected = (ring.blocks(start, new, block, stride) for ring in (kernels, plain))
    assert [x.shape for x in got] == [x.shape for x in expected]
    done = lengths(*[max(0, (n + n_new - block) // stride + 1) - max(0, (n - block) // stride + 1) for n in starts])
    complete = torch.arange(got[0].shape[1], device=DEVICE) < done[:, None]
    assert same([x[complete] for x in got], [x[complete] for x in expected])


@settings(max_examples=25)
@given(starts=st.lists(st.integers(0, SLOTS), min_size=BATCH, max_size=BATCH), added=counts, n_new=st.integers(1, 19))
@pytest.mark.parametrize("compressed", [False, True])
@every_form
def test_a_store_takes_what_fits(
    form: dict[str, Any], compressed: bool, starts: list[int], added: list[int], n_new: int
) -> None:
    start = lengths(*starts)
    end = (start + lengths(*added).clamp_max(n_new)).clamp_max(SLOTS)
    caches = []
    for config in (CONFIG, PLAIN):
        kind = PagedNSACache if "page_size" in form else NSACache
        cache = kind(config, BATCH, SLOTS, dtype=torch.float32, device=DEVICE, **form)
        if isinstance(cache, PagedNSACache):
            cache.set_page_table(
                torch.arange(cache.n_pages, dtype=torch.int32).flip(0).view(-1, BATCH).t().contiguous()
            )
        caches.append(cache)
    stores = [cache.compressed if compressed else cache.selected for cache in caches]
    assert [store.kernels() is None for store in stores] == [False, True]
    sizes = {"block": CONFIG.l, "stride": CONFIG.d} if compressed else {}
    for store in stores:
        store.extend(start, end, new_pair(-(-n_new // CONFIG.d) if compressed else n_new), **sizes)
    if "page_size" in form:
        assert same(*([x.view(torch.uint8)[:-1] for x in store.tensors()] for store in stores))
    else:
        assert same(*map(kept, stores))
    n_read = 3 if compressed else 17
    assert same(*([x[:, :n_read] for x in store.first(n_read, end, **sizes)] for store in stores))


@pytest.mark.parametrize(("block", "stride"), [(1, 1), (32, 16)])
@pytest.mark.parametrize("offset", [0, 12345])
def test_angles_have_the_bits_of_plain_torch(block: int, stride: int, offset: int) -> None:
    rope = Rope(20)
    start = lengths(0, 31, 1_000_003)
    frequencies = rope.frequencies(start.device)
    got = cached_angles(start, frequencies, 37, offset=offset, block=block, stride=stride)
    first = torch.tensor([0, 0 if block > 1 else 31, 62499 if block > 1 else 1_000_003], device=DEVICE)
    positions = (first[:, None] + torch.arange(37, device=DEVICE)) * stride + offset
    assert same(got, rope.angles(positions, torch.float32))


@pytest.mark.parametrize(
    "form",
    [
        {},
        pytest.param({"static": True}, marks=pytest.mark.slow),
        pytest.param({"quantize": "fp8"}, marks=pytest.mark.slow),
        pytest.param({"page_size": 8, "static": True}, marks=pytest.mark.slow),
        {"page_size": 4, "quantize": "fp8"},
    ],
    ids=str,
)
def test_chunks_give_what_plain_torch_s_cache_gives(form: dict[str, Any]) -> None:
    """With padding, past the end of a static cache, and after a rollback."""
    torch.manual_seed(0)
    layers = [NSAAttention(config).to(DEVICE) for config in (CONFIG, PLAIN)]
    layers[1].load_state_dict(layers[0].state_dict())
    caches = [attn.new_cache(BATCH, 28, max_rollback=2, **form) for attn in layers]
    for cache in caches:
        if isinstance(cache, PagedNSACache):
            cache.allocate(28)
    x = some(BATCH, 33, CONFIG.dim)
    real = torch.ones(BATCH, 33, dtype=torch.bool, device=DEVICE)
    real[0, 2:7] = False
    real[2, 4:] = False
    real[:2, 24:] = bool(form.get("static"))
    for first, last in ((0, 9), (9, 33)):
        steps = zip(layers, caches, strict=True)
        mask = real[:, first:last]
        got, expected = (attn(x[:, first:last], cache=cache, attention_mask=mask) for attn, cache in steps)
        if not cache.static or last < 28:
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(*(cache.lengths for cache in caches))
        assert torch.equal(*(cache.high_water for cache in caches))
    for cache in caches:
        cache.crop(-2)
    steps = zip(layers, caches, strict=True)
    got, expected = (attn(x[:, :2], cache=cache) for attn, cache in steps)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


class Launches:
    """Takes every launch of our kernels, which then does not run."""

    def __init__(self) -> None:
        self.count = 0

    def submit(self, launch: Launch, free: dict[str, Any]) -> None:
        self.count += 1


class Operations(TorchDispatchMode):
    """Counts torch's operations that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        launches = not (func.is_view or func.namespace == "nsa" or "empty" in func.name() or "view" in func.name())
        self.count += launches
        return func(*args, **(kwargs or {}))


def launches_of(attn: NSAAttention, x: Tensor, **options: Any) -> int:
    """What the second of two calls launches: the first one makes tables."""
    taken = Launches()
    token = COLLECTING.set(taken)
    try:
        attn(x, **options)
        taken.count = 0
        with Operations() as operations:
            attn(x, **options)
    finally:
        COLLECTING.reset(token)
    return taken.count + operations.count


@torch.no_grad()
@pytest.mark.parametrize(("form", "more"), [({}, 14), ({"page_size": 64}, 16), ({"quantize": "fp8"}, 94)], ids=str)
def test_a_cached_chunk_launches_little_more_than_a_forward(
    form: dict[str, Any], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host launches the kernels of a chunk one by one: each costs it more than most cost the GPU."""
    monkeypatch.setattr(rope, "fused", lambda x: True)
    attn = NSAAttention(NSAConfig(dim=128, n_heads=12, n_kv_groups=2, d_k=64, d_v=64, backend="triton")).to(DEVICE)
    x = some(1, 256, 128)
    cache = attn.new_cache(1, 1024, **form)
    if isinstance(cache, PagedNSACache):
        cache.allocate(1024)
    assert launches_of(attn, x, cache=cache) <= launches_of(attn, x) + more
