"""The cache layers: every method that transformers calls, and NSACache.resized below them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_models import SELECT, logits_of, prompt, tiny_model
from torch import Tensor
from transformers import DynamicCache, StaticCache

from nsa.hf import NSADynamicLayer, NSAStaticLayer
from nsa.hf.cache import MAX_DRAFT, MIN_CAPACITY

KINDS = {"dynamic": lambda config: DynamicCache(config=config), "static": lambda c: StaticCache(c, max_cache_len=700)}
both = pytest.mark.parametrize("kind", KINDS)


def filled(model: Any, kind: str, tokens: Tensor, *, chunk: int = 37) -> Any:
    cache = KINDS[kind](model.config)
    for first in range(0, tokens.shape[1], chunk):
        logits_of(model, tokens[:, first : first + chunk], past_key_values=cache)
    return cache


@both
def test_transformers_builds_our_layers(kind: str) -> None:
    cache = KINDS[kind](tiny_model().config)
    layer = {"dynamic": NSADynamicLayer, "static": NSAStaticLayer}[kind]
    assert [type(x) for x in cache.layers] == [layer] * 2
    assert cache.get_seq_length() == 0
    assert cache.is_compileable == (kind == "static")
    assert cache.get_max_length() == (-1 if kind == "dynamic" else 700)


@both
@pytest.mark.parametrize("nsa", [{}, SELECT], ids=["gated", "select"])
def test_a_cache_grows_and_gives_what_the_whole_gives(kind: str, nsa: dict[str, Any]) -> None:
    """Past the first capacity of a dynamic layer, and past the point where the rings wrap."""
    model, tokens = tiny_model(nsa), prompt(2 * MIN_CAPACITY + 5, batch=2)
    cache = filled(model, kind, tokens[:, :-1])
    assert int(cache.get_seq_length()) == tokens.shape[1] - 1
    step = logits_of(model, tokens[:, -1:], past_key_values=cache)
    torch.testing.assert_close(step[:, 0], logits_of(model, tokens)[:, -1], atol=2e-4, rtol=1e-4)


@both
def test_rows_can_be_reordered_repeated_and_selected(kind: str) -> None:
    model, tokens, after = tiny_model(), prompt(80, batch=3), prompt(9, batch=4, seed=5)
    cache = filled(model, kind, tokens)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 3, 5]))
    assert cache.batch_size == 4
    rows = tokens[[2, 0, 0, 0]]
    expected = logits_of(model, torch.cat([rows, after], dim=1))[:, 80:]
    torch.testing.assert_close(logits_of(model, after, past_key_values=cache), expected, atol=2e-4, rtol=1e-4)


@both
@pytest.mark.parametrize("absolute", [False, True])
def test_crop_removes_the_last_columns(kind: str, absolute: bool) -> None:
    model, tokens, other = tiny_model(), prompt(100), prompt(30, seed=6)
    cache = filled(model, kind, tokens)
    cache.crop(0)
    cache.crop(80 if absolute else -20)
    assert int(cache.get_seq_length()) == 80
    expected = logits_of(model, torch.cat([tokens[:, :80], other], dim=1))[:, 80:]
    torch.testing.assert_close(logits_of(model, other, past_key_values=cache), expected, atol=2e-4, rtol=1e-4)


def test_a_long_draft_can_be_removed_once_it_is_announced() -> None:
    model, tokens, other = tiny_model(), prompt(300), prompt(3, seed=6)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    logits_of(model, tokens, past_key_values=cache)
    assert cache.layers[0].inner.max_rollback == MAX_DRAFT
    cache.crop(-250)
    expected = logits_of(model, torch.cat([tokens[:, :50], other], dim=1))[:, 50:]
    torch.testing.assert_close(logits_of(model, other, past_key_values=cache), expected, atol=2e-4, rtol=1e-4)


def test_a_cache_in_use_refuses_to_remove_what_it_lost() -> None:
    model = tiny_model()
    cache = filled(model, "dynamic", prompt(300))
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="max_rollback"):
        cache.crop(-200)
    assert cache.get_seq_length() == 300


@both
def test_a_reset_cache_is_empty_and_copies_are_apart(kind: str) -> None:
    model, tokens = tiny_model(), prompt(60)
    cache = filled(model, kind, tokens)
    kept = copy.deepcopy(cache)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    expected = logits_of(model, tokens)
    torch.testing.assert_close(logits_of(model, tokens, past_key_values=cache), expected, atol=2e-4, rtol=1e-4)
    assert int(kept.get_seq_length()) == 60


def test_caches_that_cannot_work_are_refused() -> None:
    model, tokens = tiny_model(), prompt(20)
    with pytest.raises(ValueError, match="past_key_values"):
        logits_of(model, tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="max_cache_len"):
        logits_of(model, tokens, past_key_values=StaticCache(model.config, max_cache_len=10))
    with pytest.raises(ValueError, match="past_key_values"):
        model.train()(tokens, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(RuntimeError, match="state"):
        DynamicCache(config=model.config).update(torch.zeros(1), torch.zeros(1), 0)


def test_an_offloaded_cache_is_refused() -> None:
    model = tiny_model()
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    with pytest.raises(ValueError, match="offloaded"):
        logits_of(model, prompt(20), past_key_values=cache)
    with pytest.raises(NotImplementedError):
        cache.layers[0].offload()
