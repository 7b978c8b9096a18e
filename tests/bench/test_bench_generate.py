"""What `nsa bench generate` times: a step over full caches, and a prompt through empty ones."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from nsa.bench.decode import MAX_REPLAYS
from nsa.bench.generate import ModelStep, Prefill, rows_of
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
        for chunk in (96, 40):
            prefill = Prefill(model, tokens, chunk)
            prefill()
            prefill()
            assert all(cache.lengths.tolist() == [96] for cache in prefill.caches)
            torch.testing.assert_close(model(following, caches=prefill.caches), expected, atol=1e-4, rtol=1e-4)


def test_rows_count_the_tokens_of_a_step_or_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.bench.generate.DEVICE", "cpu")
    args = argparse.Namespace(preset="tiny", commit="abc1234")
    found = iter([("nsa-triton-graphs", "decode-1", [2.0]), ("nsa-triton", "prefill-64", [2.0])])
    step, prompt = rows_of(LMConfig.preset("tiny"), args, 4, 512, found)
    assert (step.suite, step.op, step.B, step.S, step.tokens_per_s) == ("generate", "tiny", 4, 512, 2000.0)
    assert prompt.tokens_per_s == 4 * 512 * 500
