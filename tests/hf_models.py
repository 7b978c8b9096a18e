"""Tiny models of Transformers. Importing this skips a test file where the package is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from nsa.hf import NSALlamaConfig, NSALlamaForCausalLM

# All branches are sparse at 40 tokens.
SMALL: dict[str, Any] = {"l": 8, "d": 4, "l_sel": 8, "n_sel": 4, "w": 16}
SELECT: dict[str, Any] = {"share_kv": True, "phi": "mean", "compress_rope": "before", "force_branch": "sel"}


def tiny_config(nsa: dict[str, Any] | None = None, **fields: Any) -> NSALlamaConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        # Large enough that the logits of two tokens are never close.
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    return NSALlamaConfig(**{**sizes, **fields}, nsa={**SMALL, **(nsa or {})})


def tiny_model(nsa: dict[str, Any] | None = None, *, seed: int = 0, **fields: Any) -> NSALlamaForCausalLM:
    torch.manual_seed(seed)
    return NSALlamaForCausalLM(tiny_config(nsa, **fields)).eval()


def prompt(length: int, *, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, tokens: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens, **kwargs).logits
