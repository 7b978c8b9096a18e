"""Models as folders of Transformers, without transformers: a round trip, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from junk import spoiled_tree
from training import ATTN

from nsa.config import RopeScaling
from nsa.model import LM, LMConfig
from nsa.model.llama import (
    attention_config,
    llama_config,
    llama_tensors,
    lm_config,
    load_llama_tensors,
    read_fields,
    read_weights,
    write_folder,
)

SELECT: dict[str, Any] = {"share_kv": True, "phi": "mean", "compress_rope": "before", "force_branch": "sel"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("nsa", {}),
    "select": ("nsa", SELECT),
    "qwen": ("nsa", {"qkv_bias": True, "qk_norm": True, "qk_norm_eps": 1e-5}),
    "other head_dim of values": ("nsa", {"d_v": 8}),
    "llama3": ("nsa", {"rope_scaling": RopeScaling(factor=8.0), "rope_theta": 5e5}),
    "dense": ("dense", {}),
}


def small_lm(kind: str = "nsa", changes: dict[str, Any] | None = None, **fields: Any) -> LM:
    torch.manual_seed(3)
    attn = replace(ATTN, **(changes or {}))
    sizes: dict[str, Any] = {"vocab_size": 256, "n_layers": 2, "hidden": 48, "seq_len": 64}
    return LM(LMConfig(**{**sizes, **fields}, attn=attn, attention=kind)).eval()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_survives_the_round_trip(tmp_path: Path, variant: str, tied: bool) -> None:
    kind, changes = VARIANTS[variant]
    model = small_lm(kind, changes, tie_embeddings=tied)
    write_folder(tmp_path, llama_config(model.config), llama_tensors(model))
    config = lm_config(read_fields(tmp_path), seq_len=64)
    assert config.kinds == model.config.kinds
    found = LM(replace(config, attn=replace(config.attn, qk_norm_eps=model.config.attn.qk_norm_eps)))
    # Dense attention has no hyperparameters of NSA.
    assert kind == "dense" or found.config == model.config
    load_llama_tensors(found, read_weights(tmp_path), tmp_path)
    tokens = torch.randint(256, (1, 50))
    with torch.no_grad():
        torch.testing.assert_close(found(tokens), model(tokens), atol=0, rtol=0)


def test_models_that_transformers_does_not_have_are_refused() -> None:
    for kind in ("sliding", ("nsa", "dense")):
        with pytest.raises(ValueError, match="attention"):
            llama_config(small_lm(kind).config)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="d_v"):
        llama_config(small_lm("dense", {"d_v": 8}).config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = small_lm()
    write_folder(tmp_path, llama_config(model.config), llama_tensors(model))
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("named", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("attention_bias", True),
        ("quantization_config", {"bits": 4}),
        ("auto_map", {"AutoModel": "code.Model"}),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
        ("vocab_size", None),
        ("head_dim", None),
        ("nsa", {"n_selected": 3}),
        ("nsa", {"dim": 3}),
    ],
)
def test_a_foreign_config_is_refused_by_name(folder: Path, named: str, value: Any) -> None:
    change(folder, **{named: value})
    word = "rope_type|low_freq" if named == "rope_parameters" else "nsa|n_selected" if named == "nsa" else named
    with pytest.raises(ValueError, match=word):
        lm_config(read_fields(folder), seq_len=64)


def test_rope_of_early_versions_is_read(folder: Path) -> None:
    """Before Transformers 5, `rope_theta` and `rope_scaling` were fields of their own."""
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    change(folder, rope_parameters=None, rope_theta=5e5, rope_scaling=None)
    assert attention_config(read_fields(folder)).rope_theta == 5e5
    change(folder, rope_scaling=scaling)
    found = attention_config(read_fields(folder))
    assert (found.rope_theta, found.rope_scaling) == (5e5, RopeScaling(factor=8.0))
    change(folder, rope_scaling=None, partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        attention_config(read_fields(folder))


def test_a_config_with_anything_in_it_is_read_or_refused(folder: Path) -> None:
    good = json.loads((folder / "config.json").read_text())
    for seed in range(500):
        (folder / "config.json").write_text(json.dumps(spoiled_tree(good, Random(seed))))
        # Any other exception is an error of the test.
        with suppress(ValueError):
            lm_config(read_fields(folder), seq_len=64)


def test_damaged_and_foreign_weights_are_refused_by_name(folder: Path) -> None:
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_weights(folder)
    weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        read_weights(folder)
    index = folder / "model.safetensors.index.json"
    for content in ("[]", "{}", '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": "b.bin"}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match=r"index\.json"):
            read_weights(folder)
    (folder / "part.safetensors").write_bytes(good)
    index.write_text(json.dumps({"weight_map": {"nothing": "part.safetensors"}}))
    with pytest.raises(ValueError, match="nothing"):
        read_weights(folder)


def test_weights_of_another_model_are_refused_by_name(folder: Path) -> None:
    tensors = read_weights(folder)
    for wrong, named in (
        ({**tensors, "score.weight": torch.zeros(1)}, r"score\.weight is left"),
        ({name: x for name, x in tensors.items() if name != "model.norm.weight"}, r"model\.norm\.weight is missing"),
        ({**tensors, "model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight has shape \[3\]"),
    ):
        with pytest.raises(ValueError, match=named):
            load_llama_tensors(small_lm(), wrong, folder)


def test_a_missing_config_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        read_fields(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        read_fields(tmp_path)
    with pytest.raises(ValueError, match="nsa"):
        attention_config({"nsa": [1]})
