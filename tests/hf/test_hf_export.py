"""What `nsa export` wrote is what transformers loads: the same logits, the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SELECT, logits_of
from training import ATTN
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nsa.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from nsa.export import export_run
from nsa.model import LM, LMConfig


def exported(folder: Path, kind: str, changes: dict[str, Any], tokenizer: Tokenizer) -> LM:
    torch.manual_seed(1)
    attn = type(ATTN)(**{**ATTN.to_dict(), **changes})
    config = LMConfig(vocab_size=300, n_layers=2, hidden=48, seq_len=64, attn=attn, attention=kind)  # type: ignore[arg-type]
    model = LM(config).eval()
    export_run(model, tokenizer, folder)
    return model


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("nsa", {}), ("nsa", SELECT), ("nsa", {"qkv_bias": True, "qk_norm": True, "qk_norm_eps": 1e-5}), ("dense", {})],
    ids=["paper", "select", "qwen", "dense"],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    model = exported(tmp_path, kind, changes, ByteTokenizer())
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(1, 256, (2, 60))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(found, tokens), model(tokens), atol=1e-5, rtol=1e-4)
    assert type(found).__name__ == ("LlamaForCausalLM" if kind == "dense" else "NSALlamaForCausalLM")
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 0


def test_transformers_reads_the_tokenizers(tmp_path: Path) -> None:
    text = "def f(x):\n    return x  # é 🙂"
    for name, tokenizer in {"bytes": ByteTokenizer(), "bpe": train_bpe([text] * 3, 280)}.items():
        exported(tmp_path / name, "nsa", {}, tokenizer)
        found = AutoTokenizer.from_pretrained(tmp_path / name)
        assert found(text)["input_ids"] == tokenizer.encode(text)
        assert found.decode(tokenizer.encode(text)) == text
        assert found.eos_token_id == tokenizer.end
