"""Tiny models of Transformers. Importing this skips a test file where the package is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nsa.data.tokenizer import ByteTokenizer
from nsa.export import write_tokenizer
from nsa.hf import NSALlamaConfig, NSALlamaForCausalLM

# All branches are sparse at 40 tokens.
SMALL: dict[str, Any] = {"l": 8, "d": 4, "l_sel": 8, "n_sel": 4, "w": 16}
SELECT: dict[str, Any] = {"share_kv": True, "phi": "mean", "compress_rope": "before", "force_branch": "sel"}

# Of dense models.
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-4,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
# GQA and MHA, head_dim of its own, tied and not.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama-mha": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}
# Up to which `select` equals a dense model, and its neighbors.
LENGTHS = (1, 63, 64, 65, 511, 512, 513, 1023, 1024)


def dense_folder(folder: Path, family: str = "llama", sizes: dict[str, Any] | None = None, **options: Any) -> Any:
    """Writes a random model with a tokenizer, and returns it."""
    torch.manual_seed(0)
    model_class, config_class, own = FAMILIES[family]
    model = model_class(config_class(**{**SIZES, **own, **(sizes or {})})).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                # Biases are made as zeros and norms as ones.
                p.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(folder, **options)
    write_tokenizer(ByteTokenizer(), folder, 4096)
    return model


def text(length: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 256, (1, length), generator=torch.Generator().manual_seed(seed))


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


def padded(tokens: Tensor, lengths: list[int], side: str) -> tuple[Tensor, Tensor]:
    """Rows of `tokens [B, T]` cut to `lengths`, with zeros on one side; and the mask."""
    place = torch.arange(tokens.shape[1])
    count = torch.tensor(lengths)[:, None]
    mask = place < count if side == "right" else place >= tokens.shape[1] - count
    return tokens.masked_fill(~mask, 0), mask.long()


def logits_of(model: Any, tokens: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens, **kwargs).logits
