"""The alternatives to NSA on a GPU against themselves on the CPU in fp64, where they are held against a mask; bigbird
by FlexAttention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nsa import NSAConfig
from nsa.model import BigBirdAttention, DenseAttention, LongformerAttention, SlidingAttention
from nsa.settings import Settings
from nsa.train import Trainer, load_config

CONFIG = NSAConfig(dim=384, n_heads=6, n_kv_groups=2, d_k=64, d_v=64)
# Of the largest value: sums of bf16 products in another order, and a rounded probability.
ROUNDINGS = 8


def attentions() -> dict[str, DenseAttention]:
    return {
        "sliding": SlidingAttention(CONFIG, window=100),
        "longformer": LongformerAttention(CONFIG, window=100, n_global=5),
        "bigbird": BigBirdAttention(CONFIG, window=128, n_global=64, n_random=2, block=64, seed=1, layer=2),
    }


@pytest.mark.parametrize("length", [129, 700, 1024])
@pytest.mark.parametrize("kind", ["sliding", "longformer", "bigbird"])
def test_an_alternative_matches_fp64(kind: str, length: int) -> None:
    torch.manual_seed(0)
    attention = attentions()[kind]
    sizes = [(2, length, heads, 64) for heads in (6, 2, 2)]
    wide = [torch.randn(size).bfloat16().double().requires_grad_() for size in sizes]
    narrow = [x.detach().bfloat16().cuda().requires_grad_() for x in wide]
    if isinstance(attention, BigBirdAttention):
        assert attention.can_use_flex(narrow[0])
    grad = torch.randn(2, length, 6, 64).bfloat16()
    expected, actual = (attention.attend(*x, None, None) for x in (wide, narrow))
    results = [actual, *torch.autograd.grad(actual, narrow, grad.cuda())]
    for found, right in zip(results, [expected, *torch.autograd.grad(expected, wide, grad.double())], strict=True):
        allowed = ROUNDINGS * torch.finfo(torch.bfloat16).eps * right.abs().max().item()
        torch.testing.assert_close(found.cpu().double(), right, atol=allowed, rtol=0)


@pytest.mark.parametrize("kind", ["longformer", "bigbird"])
def test_a_compiled_model_of_it_trains(kind: str, tmp_path: Path) -> None:
    changes = {"model.attention": kind, "model.seq_len": 512, "data.source": "synthetic", "device": "cuda"}
    config = load_config("tiny", {**changes, "out": str(tmp_path), "steps": 12, "sample_tokens": 8}, env=Settings())
    summary = Trainer(config).train()
    assert summary is not None
    assert summary.loss_end < summary.loss_start
    assert not summary.fallbacks
