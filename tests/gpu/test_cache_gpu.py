"""Caches on a GPU: pages and fp8 in CUDA graphs, growing, moving between devices, and no waiting where none is due."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAAttention, NSACache, NSAConfig
from nsa.cache import PagedNSACache
from nsa.model import DenseAttention

LENGTHS = (700, 5, 64, 333)
MAX_LEN = 1024
CONFIG = {"dim": 128, "n_heads": 12, "n_kv_groups": 2, "d_k": 64, "d_v": 64}
BACKENDS = pytest.mark.parametrize("backend", ["auto", "triton"])
FORMS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "fp8": {"quantize": "fp8"},
    "paged": {"page_size": 64},
    "paged_128": {"page_size": 128},
    "paged_fp8": {"page_size": 64, "quantize": "fp8"},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def attention(backend: str = "auto", dtype: torch.dtype = torch.bfloat16) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(NSAConfig(**CONFIG, backend=backend)).cuda().to(dtype)


def inputs(n: int, count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, len(LENGTHS), n, CONFIG["dim"], generator=generator, device="cuda").to(dtype)


def filled(attn: Any, **options: Any) -> Any:
    """A cache with four rows of different lengths; a paged one has its pages scattered."""
    cache = attn.new_cache(len(LENGTHS), MAX_LEN, **options)
    if isinstance(cache, PagedNSACache):
        columns = MAX_LEN // cache.page_size
        pages = torch.arange(len(LENGTHS) * columns, dtype=torch.int32).flip(0)
        cache.set_page_table(pages.view(columns, len(LENGTHS)).t().contiguous())
    x = inputs(max(LENGTHS), 1, cache.dtype, seed=0)[0]
    mask = torch.arange(max(LENGTHS), device="cuda") < torch.tensor(LENGTHS, device="cuda")[:, None]
    attn(x, cache=cache, attention_mask=mask)
    return cache


def captured(attn: Any, cache: Any, x: Tensor) -> Callable[[Tensor], Tensor]:
    """A step as a CUDA graph, captured after a step that is taken back."""
    fed = x.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            attn(fed, cache=cache)
            cache.truncate(cache.lengths - x.shape[1], removed=x.shape[1], longest=MAX_LEN)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attn(fed, cache=cache)

    def step(new: Tensor) -> Tensor:
        fed.copy_(new)
        graph.replay()
        return y.clone()

    return step


@BACKENDS
@every_form
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_a_replayed_step_is_the_eager_step(backend: str, form: dict[str, Any], n_tokens: int) -> None:
    attn = attention(backend)
    steps = inputs(n_tokens, 30)
    eager = filled(attn, static=True, **form)
    expected = [attn(x, cache=eager) for x in steps]
    cache = filled(attn, static=True, **form)
    replay = captured(attn, cache, steps[0])
    for x, y in zip(steps, expected, strict=True):
        assert torch.equal(replay(x), y)
    assert torch.equal(cache.lengths, eager.lengths)


@BACKENDS
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_pages_give_what_the_contiguous_cache_gives(backend: str, page_size: int, n_tokens: int) -> None:
    attn = attention(backend, torch.float32)
    contiguous = filled(attn, static=True)
    paged = filled(attn, static=True, page_size=page_size)
    for x in inputs(n_tokens, 40, torch.float32):
        torch.testing.assert_close(attn(x, cache=paged), attn(x, cache=contiguous), atol=1e-5, rtol=1e-5)


@BACKENDS
def test_a_captured_step_reads_pages_allocated_later(backend: str) -> None:
    """Page by page: the table is written in place."""
    attn = attention(backend)
    contiguous = filled(attn, static=True)
    cache = attn.new_cache(len(LENGTHS), MAX_LEN, static=True, page_size=64, n_pages=64)
    cache.allocate([n + 1 for n in LENGTHS])
    x = inputs(max(LENGTHS), 1, seed=0)[0]
    mask = torch.arange(max(LENGTHS), device="cuda") < torch.tensor(LENGTHS, device="cuda")[:, None]
    attn(x, cache=cache, attention_mask=mask)
    steps = inputs(1, 100)
    replay = captured(attn, cache, steps[0])
    for i, x in enumerate(steps):
        cache.allocate([n + i + 1 for n in LENGTHS])
        torch.testing.assert_close(replay(x), attn(x, cache=contiguous), atol=2e-2, rtol=2e-2)
    assert torch.equal(cache.lengths, contiguous.lengths)


@BACKENDS
@every_form
def test_a_row_without_room_drops_its_tokens_in_a_graph(backend: str, form: dict[str, Any]) -> None:
    attn = attention(backend)
    cache = attn.new_cache(2, 128, static=True, **form)
    if isinstance(cache, PagedNSACache):
        cache.allocate(128)
    steps = inputs(1, 140)[:, :2]
    replay = captured(attn, cache, steps[0])
    outputs = [replay(x) for x in steps]
    assert cache.lengths.tolist() == [128, 128]
    assert all(bool(y.isfinite().all()) for y in outputs)


@BACKENDS
@every_form
def test_a_grown_cache_is_captured_anew(backend: str, form: dict[str, Any]) -> None:
    attn = attention(backend)
    steps = inputs(1, 20)
    long = filled(attn, static=True, **form)
    expected = [attn(x, cache=long) for x in steps]
    cache = filled(attn, static=True, **form)
    replay = captured(attn, cache, steps[0])
    for x in steps[:10]:
        replay(x)
    cache.grow(2 * MAX_LEN)
    replay = captured(attn, cache, steps[0])
    for x, y in zip(steps[10:], expected[10:], strict=True):
        torch.testing.assert_close(replay(x), y, atol=2e-2, rtol=2e-2)


@BACKENDS
@every_form
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_prefill_in_any_chunks_is_the_forward_pass(backend: str, form: dict[str, Any], static: bool) -> None:
    attn = attention(backend, torch.float32)
    x = inputs(max(LENGTHS), 1, torch.float32)[0]
    mask = torch.arange(max(LENGTHS), device="cuda") < torch.tensor(LENGTHS, device="cuda")[:, None]
    whole = attn(x, attention_mask=mask)
    found = []
    for sizes in ([700], [256, 256, 188], [9, 1, 333, 20, 337]):
        cache = attn.new_cache(len(LENGTHS), MAX_LEN, static=static, **form)
        if isinstance(cache, PagedNSACache):
            cache.allocate(MAX_LEN)
        parts = zip(x.split(sizes, dim=1), mask.split(sizes, dim=1), strict=True)
        found.append(torch.cat([attn(part, cache=cache, attention_mask=real) for part, real in parts], dim=1))
        assert cache.lengths.tolist() == [*LENGTHS]
    # In fp8 a key may be rounded to either of two neighbors.
    fp8 = "quantize" in form
    for y in found:
        torch.testing.assert_close(y, found[0], atol=2e-2 if fp8 else 1e-4, rtol=0.0)
        assert (y - whole).abs().max() <= (2.0**-4 * whole.abs().max() if fp8 else 1e-4)


@pytest.mark.parametrize("offset", [0, 12345])
def test_angles_of_a_cache_have_the_bits_of_rope(offset: int) -> None:
    attn = attention()
    cache = attn.new_cache(2, MAX_LEN)
    cache.lengths.copy_(torch.tensor([0, 1_000_003]))
    positions = cache.lengths.long()[:, None] + torch.arange(300, device="cuda") + offset
    got = cache.angles(attn.rope, 300, offset=offset)
    assert all(map(torch.equal, got, attn.rope.angles(positions, torch.bfloat16)))


@every_form
def test_a_cache_moves_to_the_cpu_and_back(form: dict[str, Any]) -> None:
    attn = attention()
    x = inputs(1, 1)[0]
    expected = attn(x, cache=filled(attn, **form))
    cache = filled(attn, **form).to("cpu")
    assert {buffer.device.type for buffer in cache.buffers()} == {"cpu"}
    with pytest.raises(ValueError, match=r"cache\.device is .*cpu"):
        attn(x, cache=cache)
    assert torch.equal(attn(x, cache=cache.to("cuda")), expected)


@every_form
def test_a_cache_saved_on_the_gpu_goes_on_anywhere(form: dict[str, Any], tmp_path: Path) -> None:
    attn = attention(dtype=torch.float32)
    cache = filled(attn, **form)
    cache.save(tmp_path / "cache")
    x = inputs(1, 1, torch.float32)[0]
    expected = attn(x, cache=cache)
    loaded = NSACache.load(tmp_path / "cache", attn.config, device="cuda")
    torch.testing.assert_close(attn(x, cache=loaded), expected, atol=1e-5, rtol=1e-5)
    on_cpu = NSACache.load(tmp_path / "cache", attn.config)
    torch.testing.assert_close(attn.cpu()(x.cpu(), cache=on_cpu), expected.cpu(), atol=1e-4, rtol=1e-4)


@BACKENDS
@every_form
def test_steps_and_truncations_wait_for_nothing(backend: str, form: dict[str, Any]) -> None:
    attn = attention(backend)
    cache = filled(attn, static=True, **form)
    x = inputs(4, 1)[0]
    lengths = cache.lengths + 2
    attn(x, cache=cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.truncate(lengths, removed=2, longest=MAX_LEN)
        attn(x, cache=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(cache.lengths, lengths + 4)


def test_dense_attention_replays_its_step() -> None:
    torch.manual_seed(0)
    attn = DenseAttention(NSAConfig(**CONFIG)).cuda().bfloat16()
    steps = inputs(1, 20)
    eager = filled(attn, static=True)
    expected = [attn(x, cache=eager) for x in steps]
    cache = filled(attn, static=True)
    replay = captured(attn, cache, steps[0])
    for x, y in zip(steps, expected, strict=True):
        assert torch.equal(replay(x), y)


@pytest.mark.parametrize(("batch", "max_len"), [(1, 2048), (1, 2049), (3, 65537), (32, 32768)])
def test_dense_steps_run_over_caches_of_any_length(batch: int, max_len: int) -> None:
    attn = DenseAttention(NSAConfig(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64)).cuda().bfloat16()
    cache = attn.new_cache(batch, max_len, static=True)
    x = torch.randn(batch, 3, 768, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found = torch.cat([attn(x[:, i : i + 1], cache=cache) for i in range(3)], dim=1)
        torch.testing.assert_close(found, attn(x), atol=2e-2, rtol=2e-2)


@every_form
@pytest.mark.parametrize("rows", [[3, 0], [1, 1, 2, 0, 0]], ids=str)
def test_selected_rows_go_on_as_their_sources(form: dict[str, Any], rows: list[int]) -> None:
    attn = attention(dtype=torch.float32)
    more = {"n_pages": 200} if "page_size" in form else {}
    cache = filled(attn, **form, **more)
    x = inputs(1, 1, torch.float32)[0]
    expected = attn(x, cache=filled(attn, **form))
    cache.select(torch.tensor(rows, device="cuda"))
    torch.testing.assert_close(attn(x[rows], cache=cache), expected[rows], atol=1e-5, rtol=1e-5)
