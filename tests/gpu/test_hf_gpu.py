"""Models of Transformers on a GPU: caches, padding and compiled steps change nothing, and `select` is dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import LENGTHS, SELECT, dense_folder, logits_of, padded, prompt, text, tiny_model
from transformers import AutoModelForCausalLM, CompileConfig, Trainer, TrainingArguments

from nsa.backends.routing import counts_so_far
from nsa.hf import NSALlamaForCausalLM
from nsa.hf.convert import convert_folder

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
# Sizes that the kernels take; all branches are sparse at 400 tokens.
KERNEL: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
BLOCKS: dict[str, Any] = {"l": 32, "d": 16, "l_sel": 64, "n_sel": 4, "w": 128}
shapes = pytest.mark.parametrize("nsa", [{}, SELECT], ids=["gated", "select"])


def model_on_gpu(nsa: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> NSALlamaForCausalLM:
    # Calm: rounding must not grow to a different token.
    return tiny_model({**BLOCKS, **(nsa or {})}, **KERNEL, initializer_range=0.1).to("cuda", dtype)


@shapes
def test_every_greedy_mode_generates_the_same(nsa: dict[str, Any]) -> None:
    model, tokens = model_on_gpu(nsa), prompt(400).cuda()
    expected = model.generate(tokens, use_cache=False, **GREEDY)
    modes: dict[str, dict[str, Any]] = {
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
        "chunked prefill": {"prefill_chunk_size": 130},
        "prompt lookup": {"prompt_lookup_num_tokens": 6},
        "assistant": {"assistant_model": model},
    }
    for name, options in modes.items():
        assert model.generate(tokens, **GREEDY, **options).tolist() == expected.tolist(), name


def test_a_compiled_static_step_generates_the_same() -> None:
    """Also with padding. Transformers compiles the step with CUDA graphs."""
    model, lengths = model_on_gpu(), [400, 77]
    tokens, mask = (x.cuda() for x in padded(prompt(400, batch=2), lengths, "left"))
    compiled = {"cache_implementation": "static", "compile_config": CompileConfig(fullgraph=True)}
    for options in ({}, {"attention_mask": mask}):
        expected = model.generate(tokens, **GREEDY, **options)
        assert model.generate(tokens, **GREEDY, **options, **compiled).tolist() == expected.tolist()


@shapes
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_the_same_as_its_rows_alone(nsa: dict[str, Any], side: str) -> None:
    model, lengths = model_on_gpu(nsa), [400, 129, 1]
    tokens, mask = (x.cuda() for x in padded(prompt(400, batch=3), lengths, side))
    found = logits_of(model, tokens, attention_mask=mask)
    for row, real in zip(range(3), mask.bool(), strict=True):
        alone = logits_of(model, tokens[row, real][None])[0]
        torch.testing.assert_close(found[row, real], alone, atol=2e-4, rtol=1e-4)


@shapes
def test_cached_bf16_is_as_exact_as_without_a_cache(nsa: dict[str, Any]) -> None:
    """Token by token after a chunk, against fp32: at most twice the error of one pass over all of it."""
    tokens = prompt(420).cuda()
    expected = logits_of(model_on_gpu(nsa), tokens)[:, 380:]
    model = model_on_gpu(nsa, torch.bfloat16)
    usual = (logits_of(model, tokens)[:, 380:].float() - expected).abs()
    with torch.no_grad():
        cache = model(tokens[:, :380]).past_key_values
        steps = [model(tokens[:, at : at + 1], past_key_values=cache).logits for at in range(380, 420)]
    found = (torch.cat(steps, dim=1).float() - expected).abs()
    assert found.mean() <= 2 * usual.mean()
    assert found.max() <= 2 * usual.max()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_select_equals_dense_as_far_as_it_selects_all(tmp_path: Path, family: str) -> None:
    dense = dense_folder(tmp_path / "dense", family, KERNEL).cuda()
    convert_folder(tmp_path / "dense", tmp_path / "nsa", "select")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa", device_map="cuda")
    for length in (*LENGTHS, 1025):
        tokens = text(length).cuda()
        expected = logits_of(dense, tokens)
        differ = (logits_of(model, tokens) - expected)[0].abs().amax(dim=-1)
        assert differ[:1024].max() <= 2e-5 * expected.abs().max(), length
    assert differ[-1] > 1e-3 * expected.abs().max()


def test_select_generates_what_dense_generates(tmp_path: Path) -> None:
    dense = dense_folder(tmp_path / "dense", "llama", KERNEL).cuda()
    convert_folder(tmp_path / "dense", tmp_path / "nsa", "select")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa", device_map="cuda")
    options: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = text(960).cuda()
    assert model.generate(tokens, **options).tolist() == dense.generate(tokens, **options).tolist()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_trains_in_bf16_without_a_fallback(tmp_path: Path, checkpointing: bool) -> None:
    model = model_on_gpu().train()
    rows = [{"input_ids": row, "labels": row} for row in prompt(512, batch=4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        bf16=True,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=checkpointing,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert not counts_so_far().failures
    assert {backend for _, backend in counts_so_far().calls} >= {"triton"}
