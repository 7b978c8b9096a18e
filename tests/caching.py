"""Small layers and their caches of every form, and tokens to feed them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from nsa import NSAAttention, NSAConfig, RopeScaling
from nsa.cache import PagedNSACache, RowCache
from nsa.model import BigBirdAttention, DenseAttention, LongformerAttention, SlidingAttention

FP64 = torch.float64
# A window of 6 wraps its ring several times in 40 tokens.
SMALL = {
    "dim": 10,
    "n_heads": 4,
    "n_kv_groups": 2,
    "d_k": 4,
    "d_v": 6,
    "l": 8,
    "d": 4,
    "l_sel": 8,
    "n_sel": 3,
    "n_init": 1,
    "n_local": 1,
    "w": 6,
}
# Every kind of cache: the attention it belongs to, and how it is made.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "nsa": ("nsa", {}),
    "nsa_static": ("nsa", {"static": True}),
    "paged": ("nsa", {"page_size": 8}),
    "paged_static": ("nsa", {"page_size": 4, "static": True}),
    "dense": ("dense", {}),
    "dense_static": ("dense", {"static": True}),
    "sliding": ("sliding", {}),
    "longformer_static": ("longformer", {"static": True}),
    "bigbird": ("bigbird", {}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "share_kv": {"share_kv": True},
    "phi_mean": {"phi": "mean"},
    "rope_before": {"compress_rope": "before"},
    "rope_scaled": {"rope_scaling": RopeScaling(factor=4.0, original_max_len=32)},
    "gate_softmax": {"gate": "softmax"},
    "biases_and_norms": {"qkv_bias": True, "qk_norm": True},
    "branch_norm": {"branch_norm": True},
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
NSA_FORMS = {name: options for name, (kind, options) in FORMS.items() if kind == "nsa"}


def layer(**changes: Any) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(NSAConfig(**{**SMALL, **changes})).double()


def attention_of(kind: str) -> nn.Module:
    """A layer of any attention kind."""
    if kind == "nsa":
        return layer()
    torch.manual_seed(0)
    config = NSAConfig(**SMALL)
    makers = {
        "dense": lambda: DenseAttention(config),
        "sliding": lambda: SlidingAttention(config, window=6),
        "longformer": lambda: LongformerAttention(config, window=6, n_global=3),
        "bigbird": lambda: BigBirdAttention(config, window=8, n_global=4, n_random=1, block=4, seed=0, layer=0),
    }
    return makers[kind]().double()


def new_cache(attn: Any, batch_size: int, max_len: int, **options: Any) -> Any:
    """An empty cache; a paged one has pages for every row up to `max_len`, handed out from the last to the first."""
    cache = attn.new_cache(batch_size, max_len, **options)
    if isinstance(cache, PagedNSACache):
        scatter_pages(cache)
    return cache


def scatter_pages(cache: PagedNSACache) -> None:
    """Give every row all its pages, neighbors in a row far from each other in memory."""
    columns = -(-cache.max_len // cache.page_size)
    pages = torch.arange(cache.batch_size * columns, dtype=torch.int32).flip(0)
    cache.set_page_table(pages.view(columns, cache.batch_size).t().contiguous())


def tokens(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, SMALL["dim"], dtype=FP64, generator=generator)


def assert_equal(got: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def feed(attn: Any, cache: RowCache, x: Tensor, sizes: list[int]) -> Tensor:
    assert sum(sizes) == x.shape[1]
    return torch.cat([attn(part, cache=cache) for part in x.split(sizes, dim=1)], dim=1)


@st.composite
def splits(draw: st.DrawFn, max_length: int = 60) -> list[int]:
    """A prefill, then chunks and single steps."""
    sizes = draw(st.lists(st.one_of(st.just(1), st.integers(1, 25)), min_size=1, max_size=15))
    total = 0
    kept = []
    for size in sizes:
        if total + size > max_length:
            break
        kept.append(size)
        total += size
    return kept or [1]
