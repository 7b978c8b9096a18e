"""NSALlamaForCausalLM: initialization, generation in every mode, padding, packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import SELECT, logits_of, padded, prompt, tiny_model
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CompileConfig,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
)

from nsa.hf import NSALlamaForCausalLM, NSALlamaModel
from nsa.hf.modeling import packed_offsets
from nsa.reference import nsa_attention

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
shapes = pytest.mark.parametrize("nsa", [{}, SELECT], ids=["gated", "select"])


def test_the_auto_classes_know_the_model() -> None:
    config = tiny_model().config
    assert type(AutoModelForCausalLM.from_config(config)) is NSALlamaForCausalLM
    assert type(AutoModel.from_config(config)) is NSALlamaModel


def test_weights_are_initialized_as_nsa_asks() -> None:
    """Transformers skips modules without parameters of their own, and would leave its own N(0, 0.02)."""
    torch.manual_seed(0)
    attention = tiny_model({"gate_bias": 1.5}, hidden_size=256, initializer_range=0.02).model.layers[0].self_attn
    gate, phi = attention.gate, attention.phi_k
    xavier = (6 / (gate.outer.in_features + gate.outer.out_features)) ** 0.5
    bounds = {gate.outer.weight: xavier, gate.inner.weight: 256**-0.5, phi.inner.weight: (8 * 16) ** -0.5}
    for weight, bound in bounds.items():
        assert 0.9 * bound < weight.abs().max() <= bound
    assert (gate.outer.bias == 1.5).all()
    assert phi.inner.bias.abs().max() > 0
    assert 0.01 < phi.position.std() < 0.03
    assert attention.k_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_pinned_gate_has_no_parameters() -> None:
    """What is left are the parameters of a Llama."""
    config = tiny_model(SELECT).config
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    llama = LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in sizes}, intermediate_size=48))
    shapes = [{name: p.shape for name, p in m.state_dict().items()} for m in (tiny_model(SELECT), llama)]
    assert shapes[0] == shapes[1]


def test_a_layer_computes_what_the_reference_computes() -> None:
    attention = tiny_model().double().model.layers[0].self_attn
    x = torch.randn(2, 50, 32, dtype=torch.float64)
    q, raw, selected, window = attention.project(x, attention.angles(x, None, None, 0))
    compressed = attention.compress_all(raw, None, 0)
    o = nsa_attention(q, *compressed, *selected, *window, attention.gate(x), config=attention.config)
    torch.testing.assert_close(attention(x), attention.o_proj(o.flatten(2)))


def modes(model: NSALlamaForCausalLM) -> dict[str, dict[str, Any]]:
    return {
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "chunked prefill": {"prefill_chunk_size": 13},
        "static, chunked prefill": {"prefill_chunk_size": 13, "cache_implementation": "static"},
        "prompt lookup": {"prompt_lookup_num_tokens": 6},
        "assistant": {"assistant_model": tiny_model(model.config.nsa, seed=3)},
        "itself as the assistant": {"assistant_model": model},
        "its first layer as the assistant": {"assistant_early_exit": 1},
    }


@shapes
def test_every_greedy_mode_generates_the_same(nsa: dict[str, Any]) -> None:
    model, tokens = tiny_model(nsa), prompt(50)
    expected = model.generate(tokens, use_cache=False, **GREEDY)
    for name, options in modes(model).items():
        assert model.generate(tokens, **GREEDY, **options).tolist() == expected.tolist(), name


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beams_and_samples_do_not_depend_on_the_cache(cache: str) -> None:
    model, tokens = tiny_model(), prompt(50)
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        found = []
        for how in ({"use_cache": False}, {"cache_implementation": cache}):
            torch.manual_seed(7)
            found.append(model.generate(tokens, **{**GREEDY, **options}, **how).tolist())
        assert found[0] == found[1], options


@pytest.mark.slow
def test_a_static_step_compiles_once_without_a_break() -> None:
    """Also with padding, whose mask grows with every step."""
    graphs = []

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, tokens = tiny_model(), prompt(40, batch=2)
    mask = torch.ones_like(tokens)
    mask[0, :17] = 0
    config = CompileConfig(fullgraph=True, backend=backend)
    config._compile_all_devices = True
    for options in ({}, {"attention_mask": mask}):
        expected = model.generate(tokens, **GREEDY, **options)
        torch._dynamo.reset()
        graphs.clear()
        compiled = {"cache_implementation": "static", "compile_config": config}
        found = model.generate(tokens, **GREEDY, **options, **compiled)
        assert found.tolist() == expected.tolist()
        assert len(graphs) == 1


def test_generation_goes_on_from_a_returned_cache() -> None:
    model, tokens = tiny_model(), prompt(50)
    expected = model.generate(tokens, **{**GREEDY, "max_new_tokens": 40})
    first = model.generate(tokens, return_dict_in_generate=True, **{**GREEDY, "max_new_tokens": 15})
    found = model.generate(first.sequences, past_key_values=first.past_key_values, **{**GREEDY, "max_new_tokens": 25})
    assert found.tolist() == expected.tolist()


@shapes
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_the_same_as_its_rows_alone(nsa: dict[str, Any], side: str) -> None:
    model, lengths = tiny_model(nsa).train(), [70, 33, 1]
    tokens, mask = padded(prompt(70, batch=3), lengths, side)
    found = model(tokens, attention_mask=mask).logits
    for row, real in zip(range(3), mask.bool(), strict=True):
        alone = model(tokens[row, real][None]).logits[0]
        torch.testing.assert_close(found[row, real], alone, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padded_rows_generate_what_they_do_alone(cache: str) -> None:
    model, lengths = tiny_model(), [61, 30, 3]
    tokens, mask = padded(prompt(61, batch=3), lengths, "left")
    found = model.generate(tokens, attention_mask=mask, cache_implementation=cache, **GREEDY)
    for row, length in enumerate(lengths):
        alone = model.generate(tokens[row : row + 1, -length:], **GREEDY)
        assert found[row, -12:].tolist() == alone[0, -12:].tolist()


def test_a_cache_goes_on_after_right_padding() -> None:
    model, lengths = tiny_model(), [50, 21]
    tokens, mask = padded(prompt(50, batch=2), lengths, "right")
    with torch.no_grad():
        cache = model(tokens, attention_mask=mask).past_key_values
    after = prompt(7, batch=2, seed=4)
    found = logits_of(model, after, past_key_values=cache, attention_mask=torch.cat([mask, torch.ones(2, 7)], dim=1))
    for row, length in enumerate(lengths):
        alone = logits_of(model, torch.cat([tokens[row, :length], after[row]])[None])
        torch.testing.assert_close(found[row], alone[0, -7:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("offsets", [True, False], ids=["cu_seq_lens", "position_ids"])
def test_packed_sequences_are_the_same_as_apart(offsets: bool) -> None:
    model = tiny_model().train()
    features = [{"input_ids": prompt(n, seed=n)[0].tolist()} for n in (45, 1, 30)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=offsets, return_tensors="pt")(features)
    apart = [model(torch.tensor([row["input_ids"]])).logits[0] for row in features]
    for recorded in (True, False):
        # Where no gradients are recorded a cache would be made, which holds no packed sequences.
        with torch.set_grad_enabled(recorded):
            packed = model(**batch)
        torch.testing.assert_close(packed.logits[0], torch.cat(apart), atol=2e-4, rtol=1e-4)
        assert packed.loss.isfinite()


def test_packed_positions_are_refused_in_compiled_code() -> None:
    """They would be taken for one sequence."""
    offsets = torch.compile(packed_offsets, backend="eager", fullgraph=True)
    assert offsets(torch.arange(20)[None], 1) is None
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
        offsets(torch.arange(20)[None] % 7, 1)


def test_logits_to_keep_and_hidden_states() -> None:
    model, tokens = tiny_model(), prompt(30)
    out = model(tokens, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert out.past_key_values is None
    for kept in (1, 4, torch.tensor([3, 7])):
        index = slice(-kept, None) if isinstance(kept, int) else kept
        torch.testing.assert_close(model(tokens, logits_to_keep=kept).logits, out.logits[:, index])
    embedded = model(inputs_embeds=model.get_input_embeddings()(tokens)).logits
    torch.testing.assert_close(embedded, out.logits)


def test_arguments_that_cannot_be_right_are_refused() -> None:
    model, tokens = tiny_model(), prompt(30)
    for mask in (torch.ones(1, 1, 30, 30), torch.ones(2, 30), torch.ones(1, 29)):
        with pytest.raises(ValueError, match="attention_mask"):
            model(tokens, attention_mask=mask)
    with pytest.raises(ValueError, match="input_ids"):
        model()


@pytest.mark.parametrize("training", [True, False])
def test_no_cache_is_made_where_gradients_are_recorded(training: bool) -> None:
    """Gradients through a cache would be incomplete."""
    model, tokens = tiny_model().train(training), prompt(60)
    out = model(tokens, labels=tokens)
    assert out.past_key_values is None
    out.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_modules_may_be_replaced_and_hooked() -> None:
    """As quantizers and adapters do: the layer calls its modules."""
    model, tokens = tiny_model(), prompt(40)
    expected = logits_of(model, tokens)
    attention = model.model.layers[0].self_attn

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner
            # A quantized weight is of no floating dtype.
            self.weight = torch.zeros(1, dtype=torch.uint8)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    attention.q_proj, attention.k_win_proj = Wrapped(attention.q_proj), Wrapped(attention.k_win_proj)
    assert not torch.allclose(logits_of(model, tokens), expected)
