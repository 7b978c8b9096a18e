"""Saving and loading, the Trainer, LoRA, and the plans for several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SELECT, logits_of, prompt, tiny_config, tiny_model
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from nsa.hf import NSALlamaConfig, NSALlamaForCausalLM


@pytest.mark.parametrize("nsa", [{}, SELECT], ids=["gated", "select"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_the_same_when_loaded(tmp_path: Path, nsa: dict[str, Any], tied: bool) -> None:
    model, tokens = tiny_model(nsa, tie_word_embeddings=tied), prompt(40)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    for options in ({}, {"device_map": "cpu"}):
        found, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(logits_of(found, tokens), logits_of(model, tokens), atol=0, rtol=0)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    out = half.generate(tokens, max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 44)
    assert half.generate(tokens, max_new_tokens=4, do_sample=False, cache_implementation="static").shape == (1, 44)


@pytest.mark.parametrize("nsa", [{"qk_norm": True, "qkv_bias": True}, SELECT], ids=["gated", "select"])
def test_layers_can_be_offloaded(tmp_path: Path, nsa: dict[str, Any]) -> None:
    """A weight on disk is loaded by a hook of its module when that is called."""
    model, tokens = tiny_model(nsa), prompt(40)
    model.save_pretrained(tmp_path)
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "lm_head"), "cpu")
    places |= dict.fromkeys(("model.layers.1", "model.norm"), "disk")
    found = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offloaded")
    assert found.model.layers[1].self_attn.q_proj.weight.is_meta
    torch.testing.assert_close(logits_of(found, tokens), logits_of(model, tokens))
    expected = model.generate(tokens, max_new_tokens=9, do_sample=False).tolist()
    assert found.generate(tokens, max_new_tokens=9, do_sample=False).tolist() == expected


def test_what_a_checkpoint_lacks_is_initialized(tmp_path: Path) -> None:
    """From a folder without gates: theirs are Xavier's, not transformers' N(0, initializer_range)."""
    tiny_model({"force_branch": "cmp"}).save_pretrained(tmp_path)
    model = NSALlamaForCausalLM.from_pretrained(tmp_path, config=tiny_config(initializer_range=1e-6))
    gate = model.model.layers[1].self_attn.gate
    bound = (6 / (gate.outer.in_features + gate.outer.out_features)) ** 0.5
    assert 0.9 * bound < gate.outer.weight.abs().max() <= bound


def trained(
    tmp_path: Path, collator: Any, resume: str | None = None, **options: Any
) -> tuple[list[float], NSALlamaForCausalLM]:
    model = tiny_model(num_hidden_layers=1).train()
    rows = 3 * [{"input_ids": prompt(n, seed=n)[0].tolist()} for n in (40, 25)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        **{"save_strategy": "no", **options},
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.train(resume_from_checkpoint=resume)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], model


class Padding:
    """Pads rows of tokens on the right."""

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
        mask = tokens != 0
        return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.where(mask, -100)}


def test_the_trainer_learns_with_and_without_checkpointing(tmp_path: Path) -> None:
    losses, model = trained(tmp_path, Padding())
    again, other = trained(tmp_path, Padding(), gradient_checkpointing=True)
    assert losses == pytest.approx(again, rel=1e-5)
    assert losses[-1] < losses[0]
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-4, msg=name)


def test_the_trainer_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    losses, model = trained(tmp_path, Padding(), save_strategy="steps", save_steps=2)
    again, other = trained(tmp_path, Padding(), str(tmp_path / "out" / "checkpoint-2"))
    assert again == pytest.approx(losses)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


def test_the_trainer_packs_what_it_would_pad(tmp_path: Path) -> None:
    losses, _ = trained(tmp_path, Padding())
    packed, _ = trained(tmp_path, DataCollatorWithFlattening())
    assert losses == pytest.approx(packed, rel=1e-3)


def test_the_trainer_runs_under_autocast(tmp_path: Path) -> None:
    losses, model = trained(tmp_path, Padding(), bf16=True)
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.eval()
    tokens = prompt(30)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 33)


def test_lora_trains_the_adapters_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, tokens = tiny_model(), prompt(40)
    expected = logits_of(model, tokens)
    targets = ["q_proj", "k_proj", "k_cmp_proj", "v_proj", "o_proj", "gate.inner", "gate.outer", "gate_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    torch.testing.assert_close(logits_of(adapted, tokens), expected)
    adapted(tokens, labels=tokens).loss.backward()
    grads = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(grads) == 2 * 2 * len(targets)
    assert all("lora" in name and grad is not None for name, grad in grads.items())
    assert all(grad.abs().sum() > 0 for name, grad in grads.items() if "lora_B" in name)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    changed = logits_of(adapted, tokens)
    assert not torch.allclose(changed, expected)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_model(), tmp_path)
    torch.testing.assert_close(logits_of(loaded, tokens), changed)
    torch.testing.assert_close(logits_of(loaded.merge_and_unload(), tokens), changed, atol=1e-4, rtol=1e-4)


def test_every_plan_names_modules_that_exist() -> None:
    model = tiny_model({"qk_norm": True})
    names = {name for name, _ in model.model.named_modules()}
    for plan in (NSALlamaConfig.base_model_tp_plan, NSALlamaConfig.base_model_pp_plan):
        for pattern in plan:
            assert pattern.replace("*", "1") in names, pattern
    linears = {name for name, module in model.model.named_modules() if isinstance(module, torch.nn.Linear)}
    planned = {pattern.replace("*", "1") for pattern in NSALlamaConfig.base_model_tp_plan}
    # Its output is the same on every rank, and so is the gradient that comes back from the next layer.
    assert {name for name in linears - planned if name.startswith("layers.1.")} == {"layers.1.self_attn.gate.inner"}
