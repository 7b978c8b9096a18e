"""Generation on a GPU: CUDA graphs change no token, and a replayed step waits for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from generating import small_model

from nsa.generate import generate
from nsa.generation import decoder
from nsa.generation.decoder import WARMUP
from nsa.generation.engine import Generation
from nsa.generation.options import Options
from nsa.model import LM, LMConfig

PROMPTS = [[1, 2, 3] * 40, [9], [5, 6] * 30]
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 4}


def model_on_gpu(dtype: torch.dtype = torch.float32) -> LM:
    """Calmer than on the CPU, where it runs in fp64: a rounding error of fp32 must not grow to a different token."""
    model = small_model("nsa").to("cuda", dtype)
    for parameter in model.parameters():
        parameter.data.mul_(0.25)
    return model


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("n_draft", [0, 4])
def test_graphs_change_no_token(n_draft: int, how: dict[str, Any]) -> None:
    model = model_on_gpu()
    how = {**how, "prompt_lookup": n_draft, "lookup_ngram": 1}
    eager = generate(model, PROMPTS, 80, cuda_graph=False, **how)
    assert torch.equal(generate(model, PROMPTS, 80, cuda_graph=True, **how), eager)
    assert torch.equal(generate(model, PROMPTS, 80, cuda_graph=True, prefill_chunk=50, **how), eager)


@pytest.mark.parametrize("n_draft", [0, 4])
def test_a_step_is_captured_once_and_replayed(n_draft: int) -> None:
    options = Options(max_new_tokens=80, cuda_graph=True, prompt_lookup=n_draft, lookup_ngram=1, **GREEDY)
    generation = Generation(model_on_gpu(), PROMPTS, options)
    graphs = set()
    for _ in generation:
        graphs |= {replay.graph for replay in generation.decoder.steps.values()} - {None}
    assert 1 <= len(graphs) <= len(generation.decoder.steps)
    assert generation.stats.steps > WARMUP
    assert all(len(row.tokens) == 80 for row in generation.rows)


def test_rows_of_unequal_limits_change_no_token() -> None:
    model = model_on_gpu()
    how = {"max_len": 130, **GREEDY}
    assert torch.equal(
        generate(model, PROMPTS, 80, cuda_graph=True, **how), generate(model, PROMPTS, 80, cuda_graph=False, **how)
    )


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_replayed_step_waits_for_the_device(how: dict[str, Any]) -> None:
    generation = Generation(model_on_gpu(torch.bfloat16), PROMPTS, Options(max_new_tokens=40, cuda_graph=True, **how))
    steps = iter(generation)
    for _ in range(2 + WARMUP):
        next(steps)
    assert generation.decoder.steps[1].graph is not None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            generation.decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("n_draft", [0, 4])
def test_a_graph_repeats_the_eager_step_bitwise(
    n_draft: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 125M model in bf16, past several blocks and the window, from prompts of different lengths."""
    torch.manual_seed(0)
    model = LM(LMConfig.preset("125m")).to("cuda", torch.bfloat16).eval()
    prompts = [torch.randint(model.config.vocab_size, (length,)).tolist() for length in (700, 33, 1500)]
    how = {**how, "prompt_lookup": n_draft, "lookup_ngram": 1}
    graph = generate(model, prompts, 200, cuda_graph=True, **how)
    # Static caches, never captured.
    monkeypatch.setattr(decoder, "WARMUP", 10**9)
    assert torch.equal(graph, generate(model, prompts, 200, cuda_graph=True, **how))


@pytest.mark.parametrize("kind", ["dense", "sliding", "longformer", "bigbird"])
@pytest.mark.parametrize("n_draft", [0, 4])
def test_graphs_change_no_token_of_other_attentions(kind: str, n_draft: int) -> None:
    model = small_model(kind).to("cuda", torch.float32)
    how = {"prompt_lookup": n_draft, "lookup_ngram": 1, **GREEDY}
    options = Options(max_new_tokens=40, cuda_graph=True, **how)
    generation = Generation(model, PROMPTS, options)
    list(generation)
    assert any(replay.graph is not None for replay in generation.decoder.steps.values())
    eager = generate(model, PROMPTS, 40, cuda_graph=False, **how)
    assert [row.tokens for row in generation.rows] == eager.tolist()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("n_draft", [0, 4])
def test_pages_change_no_token(graph: bool, n_draft: int) -> None:
    model = model_on_gpu()
    how = {"prompt_lookup": n_draft, "lookup_ngram": 1, **GREEDY}
    contiguous = generate(model, PROMPTS, 80, **how)
    assert torch.equal(generate(model, PROMPTS, 80, cuda_graph=graph, page_size=64, **how), contiguous)


def test_fp8_in_a_graph_is_fp8_without_one() -> None:
    model = model_on_gpu(torch.bfloat16)
    how = {"quantize": "fp8", "page_size": 64, **GREEDY}
    eager = generate(model, PROMPTS, 80, **how)
    assert torch.equal(generate(model, PROMPTS, 80, cuda_graph=True, **how), eager)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_saved_prompt_goes_on_as_before(graph: bool, tmp_path: Path) -> None:
    model = model_on_gpu()
    first = generate(model, PROMPTS, 40, cuda_graph=graph, save_cache=tmp_path / "prompts", **GREEDY)
    again = generate(model, PROMPTS, 40, cuda_graph=graph, load_cache=tmp_path / "prompts", **GREEDY)
    assert torch.equal(first, again)
