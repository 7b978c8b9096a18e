"""Cached steps of dense attention in the decode kernels: what plain torch gives for the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import DEVICE, INTERPRETED
from test_decode import assert_steps_equal_the_whole, step_both
from torch import Tensor

from nsa import NSAConfig, decoding
from nsa.backends import routing
from nsa.backends import triton as triton_backend
from nsa.backends.routing import BackendFailure
from nsa.backends.triton.decode import DecodeTile, dense
from nsa.backends.triton.decode.plan import DecodePlan, Form, Hyperparameters
from nsa.backends.triton.launch import Launch, new_layout
from nsa.config import RopeScaling
from nsa.model import DenseAttention, LMConfig
from nsa.model.transformer import new_attention
from nsa.rope import Rope

HEADS = {"dim": 24, "n_heads": 4, "n_kv_groups": 2, "d_k": 16, "d_v": 16}


@pytest.fixture
def small_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short caches have several splits, and those several tiles."""
    monkeypatch.setattr(dense, "step_tile", lambda max_len: DecodeTile(tile_bytes=1024, split=32))


def layers(dtype: torch.dtype = torch.float32, **changed: Any) -> tuple[DenseAttention, DenseAttention]:
    """A layer that steps through the kernels, and the reference in fp64 with the same weights."""
    fused = DenseAttention(NSAConfig(**{**HEADS, **changed}, backend="triton")).to(DEVICE, dtype)
    plain = DenseAttention(NSAConfig(**{**HEADS, **changed}, backend="reference")).double()
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def kernel_steps() -> int:
    return routing.router().counts.calls["decode", "triton"]


ONE_GROUP = {"n_heads": 2, "n_kv_groups": 1}
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=16)


@pytest.mark.usefixtures("small_tile")
@pytest.mark.parametrize(
    ("changed", "steps", "static"),
    [
        pytest.param({}, [8, 7, 6, 5, 4, 3, 2, 1], False, id="every length of a step"),
        pytest.param({"dtype": torch.float16, **ONE_GROUP}, [8, 8, 8, 8, 3, 1], True, id="fp16"),
        pytest.param({**ONE_GROUP, "n_heads": 3, "d_v": 48}, [8, 8, 8, 8, 5], True, id="three heads, wide values"),
        pytest.param({**ONE_GROUP, "d_k": 64, "rope_scaling": SCALING}, [7, 8, 8, 8, 4], False, id="RoPE scaling"),
        pytest.param({**ONE_GROUP, "n_heads": 13}, [8, 8, 8, 8, 5], False, id="two row tiles", marks=pytest.mark.slow),
    ],
)
def test_steps_equal_the_whole_sequence(changed: dict[str, Any], steps: list[int], static: bool) -> None:
    assert_steps_equal_the_whole(*layers(**changed), steps, max_len=40, static=static)


@pytest.mark.slow
@pytest.mark.usefixtures("small_tile")
def test_many_steps_equal_the_whole_sequence() -> None:
    """Over several splits; single tokens where there is a GPU to take them."""
    assert_steps_equal_the_whole(*layers(**ONE_GROUP), [8] * 20 if INTERPRETED else [1] * 500)


@pytest.mark.usefixtures("small_tile")
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_ragged_rows_with_padding_step_like_plain_torch(static: bool) -> None:
    fused, plain = layers()
    mine, other = step_both(fused, plain, [3, 45, 32], 48, static=static)
    routing.router().counts.clear()
    for mask in ([[1, 1], [1, 0], [0, 1]], [[0, 0], [1, 1], [1, 0]]):
        kept = torch.tensor(mask, dtype=torch.bool)
        x = torch.randn(3, 2, fused.config.dim)
        y = fused(x.to(DEVICE), attention_mask=kept.to(DEVICE), cache=mine).cpu()
        torch.testing.assert_close(y.double(), plain(x.double(), attention_mask=kept, cache=other), atol=1e-5, rtol=0)
        for a, b in zip(mine.buffers(), other.buffers(), strict=True):
            a, b = (x[:, :-1] if x.dim() > 1 else x for x in (a, b))
            torch.testing.assert_close(a.cpu().double(), b.double(), atol=1e-5, rtol=0)
    assert kernel_steps() == 2
    assert mine.lengths.tolist() == [5, 48, 34]


def test_a_full_static_cache_drops_what_does_not_fit() -> None:
    fused, plain = layers()
    mine, other = step_both(fused, plain, [14, 5], 16, static=True)
    x = torch.randn(2, 4, fused.config.dim)
    routing.router().counts.clear()
    y, expected = fused(x.to(DEVICE), cache=mine).cpu(), plain(x.double(), cache=other)
    assert kernel_steps() == 1
    assert mine.lengths.tolist() == mine.high_water.tolist() == [16, 9]
    torch.testing.assert_close(y[0, :2].double(), expected[0, :2], atol=1e-5, rtol=0)
    torch.testing.assert_close(y[1].double(), expected[1], atol=1e-5, rtol=0)
    assert y.isfinite().all()


def test_a_full_cache_refuses_and_is_unchanged() -> None:
    fused, plain = layers()
    mine, _ = step_both(fused, plain, [14, 5], 16)
    before = [x.clone() for x in mine.buffers()]
    with pytest.raises(ValueError, match=r"17; .*max_len = 16"):
        fused(torch.randn(2, 3, fused.config.dim, device=DEVICE), cache=mine)
    assert all(torch.equal(a, b) for a, b in zip(before, mine.buffers(), strict=True))


@pytest.mark.usefixtures("small_tile")
def test_a_cropped_or_longer_cache_goes_on() -> None:
    fused, plain = layers()
    mine, other = step_both(fused, plain, [40, 17], 44)
    routing.router().counts.clear()
    for change in (lambda cache: cache.crop(-5), lambda cache: cache.grow(70)):
        x = torch.randn(2, 3, fused.config.dim)
        for cache in (mine, other):
            change(cache)
        y = fused(x.to(DEVICE), cache=mine).cpu()
        torch.testing.assert_close(y.double(), plain(x.double(), cache=other), atol=1e-5, rtol=0)
        assert torch.equal(mine.lengths.cpu(), other.lengths)
        assert torch.equal(mine.high_water.cpu(), other.high_water)
    assert kernel_steps() == 2


def test_a_row_does_not_depend_on_the_others() -> None:
    """With the tiles of a GPU, three splits."""
    fused, plain = layers()
    mine, _ = step_both(fused, plain, [650, 0, 300], 700)
    x = torch.randn(3, 2, fused.config.dim, device=DEVICE)
    alone = [fused.new_cache(1, 700) for _ in range(3)]
    for b, cache in enumerate(alone):
        for one, several in zip(cache.buffers(), mine.buffers(), strict=True):
            one.copy_(several[b : b + 1])
    together = fused.fused_step(x, mine, None)
    assert together is not None
    q, k, v = fused.project(x)
    for b, cache in enumerate(alone):
        row = slice(b, b + 1)
        o = fused.fused_step(x[row], cache, None, lambda _, row=row: (q[row], k[row], v[row]))
        assert torch.equal(o[0], together[b])


def test_a_step_is_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, launched, call = layers()[0], [], Launch.__call__

    def spy(self: Launch, **given: Any) -> None:
        launched.append(self.kernel.__name__)
        call(self, **given)

    monkeypatch.setattr(Launch, "__call__", spy)
    y = layer(torch.randn(2, 2, layer.config.dim, device=DEVICE), cache=layer.new_cache(2, 48))
    assert launched == ["append_kernel", "compressed_split_kernel", "merge_kernel"]
    # As in NSA: keys in a cache carry no graph.
    assert not y.requires_grad


@pytest.mark.parametrize("kind", ["sliding", "longformer", "bigbird"])
def test_other_attentions_are_not_for_the_kernels(kind: str) -> None:
    attn, sizes = NSAConfig(**HEADS, backend="triton"), {"window": 8, "n_global": 4, "block": 4}
    config = LMConfig(vocab_size=8, n_layers=1, hidden=8, seq_len=40, attn=attn, attention=kind, **sizes)
    x = torch.randn(1, 1, attn.dim, device=DEVICE)
    layer, dense = new_attention(config, 0).to(DEVICE), DenseAttention(attn).to(DEVICE)
    assert layer.fused_step(x, layer.new_cache(1, 40), None) is None
    assert dense.fused_step(x, dense.new_cache(1, 40), None) is not None


def test_another_rope_is_not_for_the_kernels() -> None:
    layer = DenseAttention(NSAConfig(**HEADS, backend="triton")).to(DEVICE)
    layer.rope = Rope(layer.config.d_k, 123.0)
    x = torch.randn(1, 1, layer.config.dim, device=DEVICE)
    assert layer.fused_step(x, layer.new_cache(1, 40), None) is None


def test_a_method_of_its_own_is_not_for_the_kernels() -> None:
    class Unrotated(DenseAttention):
        def angles(self, *args: Any) -> Any:
            return tuple(torch.full_like(x, value) for x, value in zip(super().angles(*args), (1.0, 0.0), strict=True))

    layer = Unrotated(NSAConfig(**HEADS, backend="triton")).to(DEVICE)
    x, cache = torch.randn(1, 7, layer.config.dim, device=DEVICE), layer.new_cache(1, 40)
    torch.testing.assert_close(layer(x, cache=cache), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("n_tokens", "backend"), [(9, "triton"), (1, "sdpa"), (1, "auto")])
def test_longer_steps_and_other_backends_go_the_long_way(n_tokens: int, backend: str) -> None:
    layer = DenseAttention(NSAConfig(**HEADS, backend=backend))
    cache = layer.new_cache(1, 40)
    assert layer.fused_step(torch.randn(1, n_tokens, layer.config.dim), cache, None) is None
    assert cache.lengths.tolist() == [0]


def test_auto_goes_on_where_a_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def failing(*args: Any, **options: Any) -> Tensor:
        asked.append(1)
        raise BackendFailure("out of shared memory")

    monkeypatch.setattr(routing.router(), "failed", {})
    monkeypatch.setattr(decoding, "kernels_run", lambda problem, backend: True)
    monkeypatch.setattr(triton_backend, "dense_step", failing)
    config = NSAConfig(**HEADS, backend="auto")
    layer, x = DenseAttention(config).to(DEVICE), torch.randn(2, 10, HEADS["dim"], device=DEVICE)
    cache = layer.new_cache(2, 12)
    y = torch.cat([layer(part, cache=cache) for part in x.split([7, 1, 1, 1], dim=1)], dim=1)
    torch.testing.assert_close(y, layer(x), atol=1e-5, rtol=1e-5)
    # A launch that failed is not tried again.
    assert len(asked) == 2
    for other in (replace(config, strict=True), replace(config, backend="triton")):
        layer = DenseAttention(other).to(DEVICE)
        cache = layer.new_cache(2, 12)
        with pytest.raises(BackendFailure):
            layer(x[:, :1], cache=cache)
        assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("max_len", [1, 2048, 32768, 131072, 1_000_000])
@pytest.mark.parametrize(("tokens", "heads", "groups", "head_dim"), [(1, 12, 2, 64), (8, 64, 4, 128), (8, 32, 8, 128)])
def test_scratch_is_small_beside_the_cache(max_len: int, tokens: int, heads: int, groups: int, head_dim: int) -> None:
    cpu, batch = torch.device("cpu"), 32
    q = new_layout((batch, tokens, heads, head_dim), torch.bfloat16, cpu)
    store = new_layout((batch, max_len + 1, groups, head_dim), torch.bfloat16, cpu)
    kv, how = (store, store), Hyperparameters(1, 1, 1, 0, 0, 0, 0, 1.0, max_len, "cmp")
    plan = DecodePlan(q, kv, kv, kv, None, how, dense.step_tile(max_len), Form(), True, False, 0)
    assert not plan.pooled
    _, splits, rows, d_v = plan.partials["partial_o"]
    assert splits <= dense.MAX_SPLITS
    scratch = batch * groups * splits * rows * d_v * 4
    assert scratch <= max(2**26, 2 * 2 * batch * max_len * groups * head_dim // 8)
