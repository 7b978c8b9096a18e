"""Models and tokenizers of Transformers folders, for serving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from live_server import TEMPLATE, tiny_folder, transformers

from nsa.data.tokenizer import load_tokenizer
from nsa.export import write_tokenizer
from nsa.hf.convert import convert_folder
from nsa.serving.errors import ServingError
from nsa.serving.loading import PromptEncoder, load_folder

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "tiny")


@pytest.mark.parametrize("kind", ["nsa", "dense"])
@torch.no_grad()
def test_a_folder_is_the_model_that_transformers_loads(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path / kind, kind)
    tokens = torch.randint(1, 256, (1, 50))
    exact = load_folder(folder, CPU, torch.float64)(tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    # Up to here every block is selected, so that no near tie can be decided differently in fp32.
    short = tokens[:, :32]
    theirs, ours = (
        (found - exact[:, :32]).abs().max() for found in (model(short).logits, load_folder(folder, CPU)(short))
    )
    assert ours <= 2 * theirs < 1e-3 * exact.abs().max()
    torch.testing.assert_close(model.double()(tokens).logits, exact, rtol=0, atol=1e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("recipe", ["select", "gated", "full"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@torch.no_grad()
def test_converted_models_are_what_transformers_loads(tmp_path: Path, family: str, recipe: str) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, sliding_window=None, eos_token_id=0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path / "dense")
    write_tokenizer(load_tokenizer("bytes"), tmp_path / "dense", 2048)
    convert_folder(tmp_path / "dense", tmp_path / "nsa", recipe)
    tokens = torch.randint(1, 256, (1, 300))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "nsa")(tokens).logits
    found = load_folder(tmp_path / "nsa", CPU)(tokens)
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_parameters_can_have_another_dtype(folder: Path) -> None:
    assert load_folder(folder, CPU).head_weight.dtype == torch.float32
    assert {p.dtype for p in load_folder(folder, CPU, torch.bfloat16).parameters()} == {torch.bfloat16}


def test_other_families_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"gpt2.*nsa_llama"):
        load_folder(folder, CPU)


def test_text_and_chats_become_tokens(folder: Path) -> None:
    encoder = PromptEncoder(folder, 256)
    assert encoder.encode_text("def é") == list("def é".encode())
    assert encoder.encode_text([1, 2]) == [1, 2]
    assert encoder.encode_chat([{"role": "user", "content": "hi"}]) == list(b"user: hi\nassistant:")


@pytest.mark.parametrize("prompt", ["", [], [256], [-1]])
def test_prompts_without_known_tokens_are_refused(folder: Path, prompt: str | list[int]) -> None:
    with pytest.raises(ServingError, match="255"):
        PromptEncoder(folder, 256).encode_text(prompt)


@pytest.mark.parametrize(("given", "ends"), [(7, {7}), ([7, 9], {7, 9}), (None, {0})])
def test_ends_come_from_the_generation_config(folder: Path, given: object, ends: set[int]) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert PromptEncoder(folder, 256).ends == ends
    (folder / "generation_config.json").unlink()
    assert PromptEncoder(folder, 256).ends == {0}


def test_a_vocabulary_larger_than_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="256"):
        PromptEncoder(folder, 255)


def test_templates_cannot_run_code(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}" + TEMPLATE)
    with pytest.raises(ServingError, match="unsafe"):
        PromptEncoder(folder, 256).encode_chat([{"role": "user", "content": "hi"}])
