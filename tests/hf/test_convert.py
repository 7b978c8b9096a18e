"""`nsa convert`: equal to dense where it must be, different where it may, and everything foreign refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FAMILIES, LENGTHS, dense_folder, logits_of, text
from transformers import AutoModelForCausalLM

from nsa.cli import main, parser_of
from nsa.hf.convert import convert_back, convert_folder, phi_as_mean
from nsa.model.llama import read_weights


@pytest.mark.parametrize("family", FAMILIES)
def test_select_equals_dense_as_far_as_it_selects_all(tmp_path: Path, family: str) -> None:
    """Each length is a call of its own, padded to nothing; at 1,025 a block is left out for the first time."""
    dense = dense_folder(tmp_path / "dense", family)
    convert_folder(tmp_path / "dense", tmp_path / "nsa", "select")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "NSALlamaForCausalLM"
    for length in LENGTHS:
        tokens = text(length)
        expected = logits_of(dense, tokens)
        assert (logits_of(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max(), length
    tokens = text(1025)
    expected = logits_of(dense, tokens)
    differ = (logits_of(model, tokens) - expected)[0].abs().amax(dim=-1)
    assert differ[:-1].max() <= 2e-5 * expected.abs().max()
    assert differ[-1] > 1e-3 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_select_generates_what_dense_generates(tmp_path: Path, family: str) -> None:
    """Up to the last token that it sees everything for."""
    dense = dense_folder(tmp_path / "dense", family)
    convert_folder(tmp_path / "dense", tmp_path / "nsa", "select", {"n_sel": 4})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa")
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = dense.generate(text(236), **options)
    assert expected.shape[1] == 4 * 64
    for cache in ("dynamic", "static"):
        assert model.generate(text(236), cache_implementation=cache, **options).tolist() == expected.tolist()


@pytest.mark.slow
def test_select_generates_up_to_1024_tokens(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense")
    convert_folder(tmp_path / "dense", tmp_path / "nsa", "select")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa")
    options: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(text(960), **options).tolist() == dense.generate(text(960), **options).tolist()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_round_trip_is_bit_identical(tmp_path: Path, family: str, sharded: bool) -> None:
    dense_folder(tmp_path / "dense", family, max_shard_size="20KB" if sharded else "1GB")
    convert_folder(tmp_path / "dense", tmp_path / "nsa", "select")
    convert_back(tmp_path / "nsa", tmp_path / "back")
    files = sorted(path.name for path in (tmp_path / "dense").iterdir())
    assert sum(name.endswith(".safetensors") for name in files) > (1 if sharded else 0)
    assert files == sorted(path.name for path in (tmp_path / "back").iterdir())
    for name in files:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "dense" / name).read_bytes(), name


@pytest.mark.parametrize("recipe", ["gated", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_learned_recipe_starts_close_to_dense(tmp_path: Path, family: str, recipe: str) -> None:
    """Closest where the window and the selection see all; every new parameter learns, if not at the first step."""
    dense = dense_folder(tmp_path / "dense", family, max_shard_size="20KB" if family == "llama" else "1GB")
    convert_folder(tmp_path / "dense", tmp_path / "nsa", recipe)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = text(1024)
    expected = logits_of(dense, tokens)
    differ = (logits_of(model, tokens) - expected)[0].abs().amax(dim=-1) / expected.abs().max()
    assert differ[:512].max() < 0.01
    assert 0 < differ.max() < 0.1
    model.train()(tokens[:, :200], labels=tokens[:, :200]).loss.backward()
    still = [name for name, p in model.named_parameters() if not p.grad.abs().sum() > 0]
    assert still == []


def test_phi_starts_as_the_mean() -> None:
    from nsa.compression import Compression

    phi = Compression(6, 8, kind="mlp").double()
    phi.load_state_dict({name.removeprefix("phi."): x for name, x in phi_as_mean("phi", 6, 8).items()})
    blocks = torch.randn(2, 3, 8, 2, 6, dtype=torch.float64)
    torch.testing.assert_close(phi.of_blocks(blocks), blocks.mean(dim=2))


def test_hyperparameters_and_half_precision_are_kept(tmp_path: Path) -> None:
    model = dense_folder(tmp_path / "dense").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    found = convert_folder(tmp_path / "dense", tmp_path / "nsa", "gated", {"n_sel": 32, "w": 128})
    assert (found.n_sel, found.w, found.rope_scaling.factor) == (32, 128, 8.0)  # type: ignore[union-attr]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa")
    assert loaded.config.attention_config() == found
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert {x.dtype for x in read_weights(tmp_path / "nsa").values()} == {torch.bfloat16}


# The command.


def test_the_command_prints_distances_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense_folder(tmp_path / "dense")
    words = ["convert", "--from", str(tmp_path / "dense"), "--to", str(tmp_path / "nsa"), "--set", "n_sel=4"]
    assert main([*words, "--lengths", "128", "256", "512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.strip().replace(",", "")[:3] in ("128", "256", "512")]
    assert [row[0] for row in rows] == ["128", "256", "512"]
    assert float(rows[1][2]) < 2e-5
    assert float(rows[2][2]) > 1e-3
    command = next(line.strip() for line in lines if line.strip().startswith(f"nsa train --init {tmp_path / 'nsa'}"))
    assert parser_of("train").parse_args(command.split()[2:]).seq_len == 8192
    back = ["convert", "--from", str(tmp_path / "nsa"), "--to", str(tmp_path / "back"), "--recipe", "dense"]
    assert main(back) == 0
    assert (tmp_path / "back" / "model.safetensors").is_file()


def test_a_text_that_is_too_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense_folder(tmp_path / "dense")
    (tmp_path / "text").write_text("x" * 100)
    words = ["convert", "--from", str(tmp_path / "dense"), "--to", str(tmp_path / "nsa"), "--lengths", "64", "128"]
    assert main([*words, "--text", str(tmp_path / "text")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("100 tokens" in line and "--lengths" in line for line in lines)


@pytest.mark.parametrize(("family", "recipe"), [("qwen3", "gated"), ("qwen2", "select"), ("mistral", "select")])
def test_a_converted_model_is_trained_further(tmp_path: Path, family: str, recipe: str) -> None:
    """And goes back to dense from there, where it has no other parameters; a Mistral is then a Llama."""
    dense_folder(tmp_path / "dense", family)
    convert_folder(tmp_path / "dense", tmp_path / "nsa", recipe, {"n_sel": 4})
    words = ["train", "--config", "tiny", "--init", str(tmp_path / "nsa"), "--steps", "2", "--batch-size", "1"]
    words += ["--seq-len", "300", "--device", "cpu", "--dataset", "synthetic", "--set", "sample_tokens=4"]
    assert main([*words, "--eval-batches", "1", "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.nsa["qk_norm"] == (family == "qwen3")
    if recipe == "select":
        convert_back(tmp_path / "out", tmp_path / "back")
        dense = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
        assert type(dense).__name__ == {"qwen2": "Qwen2ForCausalLM", "mistral": "LlamaForCausalLM"}[family]
        expected = logits_of(dense, text(256))
        assert (logits_of(model, text(256)) - expected).abs().max() <= 2e-5 * expected.abs().max()


# What is refused.


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    dense_folder(folder)
    return folder


def copied(source: Path, tmp_path: Path, **fields: Any) -> Path:
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


REFUSED: list[tuple[str, Any]] = [
    ("model_type", "gpt2"),
    ("model_type", "mixtral"),
    ("model_type", None),
    ("num_local_experts", 8),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}),
    ("num_attention_heads", 0),
    ("head_dim", 0),
    ("num_hidden_layers", 10**9),
    ("partial_rotary_factor", 0.5),
    ("hidden_act", "gelu"),
    ("mlp_bias", True),
    ("attention_bias", True),
    ("sliding_window", 512),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [1.0]}),
    ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ("auto_map", {"AutoModelForCausalLM": "modeling.Model"}),
    ("vocab_size", 100),
    ("hidden_size", 64),
    ("hidden_size", "large"),
]


@pytest.mark.parametrize(("named", "value"), REFUSED, ids=[f"{name}={value}"[:40] for name, value in REFUSED])
def test_a_foreign_model_is_refused_by_name(source: Path, tmp_path: Path, named: str, value: Any) -> None:
    fields = {named: value} | ({"rope_parameters": None} if named == "rope_scaling" else {})
    fields |= {"model_type": "mistral"} if named == "sliding_window" else {}
    folder = copied(source, tmp_path, **fields)
    word = {
        "rope_parameters": "rope_type is|full_attention",
        "rope_scaling": "rope_type",
        "hidden_size": "hidden_size|weight",
    }
    with pytest.raises(ValueError, match=word.get(named, named)):
        convert_folder(folder, tmp_path / "to", "select")
    assert not (tmp_path / "to").exists()


def test_damaged_and_unsafe_folders_are_refused(source: Path, tmp_path: Path) -> None:
    folder = copied(source, tmp_path)
    weights = folder / "model.safetensors"
    good, to = weights.read_bytes(), tmp_path / "to"

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            convert_folder(folder, to, "select")
        assert not to.exists()

    weights.write_bytes(good[: len(good) // 2])
    refused(r"model\.safetensors")
    weights.unlink()
    refused(r"model\.safetensors")
    torch.save({"model.norm.weight": torch.ones(1)}, folder / "pytorch_model.bin")
    refused(r"pytorch_model\.bin")
    weights.write_bytes(good)
    (folder / "config.json").write_text('{"model_type": "llama"')
    refused(r"config\.json")
    (folder / "config.json").unlink()
    refused(r"config\.json")


def test_a_missing_or_larger_tokenizer_is_refused(source: Path, tmp_path: Path) -> None:
    folder = copied(source, tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["more"] = 256
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"vocab_size is 256; accepted: .*257"):
        convert_folder(folder, tmp_path / "to", "select")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        convert_folder(folder, tmp_path / "to", "select")


def test_wrong_arguments_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", "--from", str(source), "--to"]
    for words, named in (
        ([str(tmp_path / "a"), "--set", "n_selected=3"], "n_selected"),
        ([str(tmp_path / "a"), "--set", "share_kv=false"], "share_kv"),
        ([str(tmp_path / "a"), "--set", "n_sel=1"], "n_sel"),
        ([str(source)], "--to"),
        ([str(tmp_path / "a"), "--recipe", "dense"], "select"),
        ([str(tmp_path / "a"), "--recipe", "dense", "--set", "w=3"], "--set"),
        ([str(tmp_path / "a"), "--lengths", "0"], "--lengths"),
        ([str(tmp_path / "a"), "--text", str(tmp_path / "missing")], "missing"),
        ([str(tmp_path / "a"), "--device", "tpu"], "tpu"),
    ):
        assert main([*command, *words]) == 2, words
        assert named in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_no_code_of_a_folder_is_copied(source: Path, tmp_path: Path) -> None:
    folder = copied(source, tmp_path)
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    convert_folder(folder, tmp_path / "to", "select")
    assert not list((tmp_path / "to").glob("*.py"))
