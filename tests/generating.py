"""A model small enough to generate with in a test, whose next token depends on the whole past."""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa import NSAConfig
from nsa.model import LM, LMConfig


def small_model(kind: str, vocab_size: int = 64) -> LM:
    torch.manual_seed(0)
    attn = NSAConfig(dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=8)
    config = LMConfig(vocab_size=vocab_size, n_layers=2, hidden=64, seq_len=64, attn=attn, attention=kind)
    model = LM(replace(config, tie_embeddings=False))
    # Fresh layers add little to the residual stream.
    for parameter in model.parameters():
        parameter.data.mul_(8)
    return model.double().eval()
