"""NSALlamaConfig: what it accepts, and what it becomes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hf_models import SMALL, tiny_config
from transformers import AutoConfig

from nsa.config import RopeScaling
from nsa.hf import NSALlamaConfig


def test_a_config_has_defaults_and_survives_saving(tmp_path: Path) -> None:
    for config in (NSALlamaConfig(), tiny_config({"share_kv": True}, rope_parameters={"rope_theta": 5e5})):
        config.save_pretrained(tmp_path)
        found = AutoConfig.from_pretrained(tmp_path)
        assert type(found) is NSALlamaConfig
        assert found.attention_config() == config.attention_config()


def test_the_hyperparameters_reach_the_layer() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    found = tiny_config({"force_branch": "win"}, rope_parameters=rope).attention_config()
    assert (found.dim, found.n_heads, found.n_kv_groups, found.d_k) == (32, 4, 2, 16)
    assert (found.w, found.force_branch, found.rope_theta) == (SMALL["w"], "win", 5e5)
    assert found.rope_scaling == RopeScaling(factor=8.0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"nsa": {"n_selected": 4}}, "n_selected"),
        ({"nsa": {"w": 0}}, "w"),
        ({"nsa": {"dim": 64}}, "dim"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"num_key_value_heads": 3}, "n_kv_groups"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(Exception, match=named):
        tiny_config(**fields)  # type: ignore[arg-type]


def test_a_missing_or_old_transformers_is_named_with_a_remedy() -> None:
    code = """
import sys, types
import nsa, nsa.cli, nsa.model.transformer
old = types.ModuleType("transformers")
old.__spec__, old.__version__ = types.SimpleNamespace(), "5.13.1"
for found in (old, None):
    sys.modules["transformers"] = found
    try:
        import nsa.hf
    except ImportError as error:
        print(error)
print(nsa.cli.main(["convert", "--from", ".", "--to", "nowhere"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    old, missing, status = done.stdout.splitlines()
    assert "5.13.1" in old
    assert "transformers" in missing
    assert status == "2"
    for message in (old, missing, done.stderr):
        assert "pip install 'nsa[hf]'" in message
