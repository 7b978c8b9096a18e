"""What `nsa bench generate` times: a step over full caches, and a prompt through empty ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa.bench.decode import MAX_REPLAYS
from nsa.bench.generate import ModelStep, Prefill, cached_error, generate_clock, prefills, step_error, step_passes
from nsa.bench.train import model_shape
from nsa.model import LM, LMConfig
from nsa.model.config import AttentionKind


def model_of(attention: AttentionKind) -> LM:
    torch.manual_seed(0)
    return LM(replace(LMConfig.preset("tiny"), attention=attention)).eval()


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_step_advances_full_caches(attention: AttentionKind) -> None:
    step = ModelStep(model_of(attention), 2, MAX_REPLAYS + 8)
    with torch.no_grad():
        for n in range(3):
            assert all(cache.lengths.tolist() == [8 + n] * 2 for cache in step.caches)
            step()
    assert step.tokens.shape == (2, 1)


def test_prefill_can_be_repeated_and_chunked() -> None:
    model = model_of("nsa")
    tokens = torch.randint(256, (1, 96))
    following = torch.tensor([[7]])
    with torch.no_grad():
        expected = model(torch.cat([tokens, following], dim=1))[:, -1:]
        for chunk, static in ((96, False), (40, False), (40, True)):
            prefill = Prefill(model, tokens, chunk, static=static)
            prefill()
            prefill()
            assert all(cache.lengths.tolist() == [96] for cache in prefill.caches)
            torch.testing.assert_close(model(following, caches=prefill.caches), expected, atol=1e-4, rtol=1e-4)


def test_passes_count_the_tokens_of_a_step_or_a_prompt() -> None:
    model = model_of("nsa")
    (step,) = step_passes(model, model_shape(model.config, 4, MAX_REPLAYS + 8))
    assert (step.mode, step.tokens) == ("decode-1", 4)
    assert [(each.mode, each.tokens) for each in prefills(model, 96, 64)] == [
        ("fwd", 96),
        ("prefill", 96),
        ("prefill-64", 96),
        ("prefill-static-64", 96),
    ]


def test_one_row_is_generated_with_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.bench.generate.NEW_TOKENS", 4)
    model = model_of("nsa")
    *_, generated = step_passes(model, model_shape(model.config, 1, MAX_REPLAYS + 8))
    assert (generated.mode, generated.tokens) == ("generate", 1)
    (took,), peak = generate_clock(generated)
    assert took > 0
    assert peak is None


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_wrong_step_does_not_pass_its_gate(attention: AttentionKind, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(attention)
    assert cached_error(model) <= 1
    monkeypatch.setattr("nsa.bench.generate.PROMPT_TOKENS", 40)
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda x: logits(x) + 0.01)
    assert cached_error(model) > 1


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_step_that_is_wrong_at_its_length_is_not_timed(
    attention: AttentionKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a row of the batch, and over static caches alone."""
    model = model_of(attention)
    shape = model_shape(model.config, 3, MAX_REPLAYS + 300)
    assert step_error(model, shape) <= 1
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda x: logits(x) + 0.01 * (torch.arange(len(x)) == 2)[:, None, None])
    assert step_error(model, shape) > 1
