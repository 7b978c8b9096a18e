"""Saved prompts, paged and fp8 caches in generation: the same tokens, whatever the caches look like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generating import small_model

from nsa import generate as generating
from nsa.generate import generate
from nsa.generation.engine import Generation
from nsa.generation.options import Options
from nsa.model import LM


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: LM, rows: list[list[int]], n: int = 20, **options: Any) -> list[list[int]]:
    return generate(model, rows, n, temperature=0, **options).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 7},
        {"page_size": 8},
        {"page_size": 64, "prefill_chunk": 11},
        {"page_size": 4, "prompt_lookup": 3},
    ],
    ids=str,
)
def test_greedy_tokens_are_the_same_in_chunks_and_in_pages(options: dict[str, Any]) -> None:
    model, rows = small_model("nsa"), prompts(41, 9, 30)
    assert greedy(model, rows, **options) == greedy(model, rows)


@pytest.mark.parametrize("kind", ["dense", "sliding", "longformer", "bigbird"])
def test_prompt_lookup_changes_no_token_of_other_attentions(kind: str) -> None:
    model = small_model(kind)
    rows = [prompts(9)[0] * 4, prompts(13, seed=1)[0]]
    assert greedy(model, rows, 40, prompt_lookup=4, lookup_ngram=2) == greedy(model, rows, 40)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("nsa", {}),
        ("nsa", {"prefill_chunk": 5}),
        ("nsa", {"prompt_lookup": 3}),
        ("dense", {}),
        ("sliding", {"prompt_lookup": 3}),
        ("longformer", {"prefill_chunk": 5}),
        ("bigbird", {}),
    ],
    ids=str,
)
def test_a_saved_prompt_is_continued_as_if_computed_anew(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, (a, b) = small_model(kind), prompts(45, 22)
    path = tmp_path / "prompts"
    first = greedy(model, [a, b], save_cache=path)
    assert greedy(model, [a, b], load_cache=path, **options) == first
    # One saved row for two prompts, in another order, and cut a little.
    rows = [[*b, 5, 6, 7], [*a, 1], [*a[:40], 9, 9, 9]]
    assert greedy(model, rows, load_cache=path, **options) == greedy(model, rows)


@pytest.mark.parametrize(
    "options", [{"page_size": 8}, {"quantize": "fp8"}, {"page_size": 8, "quantize": "fp8"}], ids=str
)
def test_saved_prompts_go_to_pages_and_stay_in_fp8(options: dict[str, Any], tmp_path: Path) -> None:
    model, rows = small_model("nsa"), prompts(45, 22)
    path = tmp_path / "prompts"
    quantize = {name: value for name, value in options.items() if name == "quantize"}
    expected = greedy(model, rows, save_cache=path, **quantize)
    assert greedy(model, rows, load_cache=path, **options) == expected


def test_fp8_is_counted_in_the_bytes_read() -> None:
    model = small_model("nsa")
    read = []
    for quantize in (None, "fp8"):
        generation = Generation(model, prompts(30), Options(max_new_tokens=2, temperature=0, quantize=quantize))
        list(generation)
        read.append(generation.kv_bytes_read()[0])
    # 16 numbers of 8 bytes against 16 of one and a scale.
    assert read[0] * (16 + 4) == read[1] * 16 * 8


def test_only_what_was_not_saved_is_computed(tmp_path: Path) -> None:
    model, (prompt,) = small_model("nsa"), prompts(50)
    path = tmp_path / "prompt"
    greedy(model, [prompt], 1, save_cache=path)
    options = Options(max_new_tokens=4, temperature=0, load_cache=path)
    generation = Generation(model, [[*prompt, 1, 2]], options)
    assert (generation.stats.prompt_tokens, generation.stats.cached_tokens) == (52, 50)
    assert generation.decoder.prompts.tolist() == [[1, 2]]
    list(generation)
    assert "2 tokens in" in generating.summary(generation)
    assert "50 more " in generating.summary(generation)


def test_a_row_that_can_be_cropped_goes_before_a_longer_match(tmp_path: Path) -> None:
    """The first saved row shares more with the prompt, but has too much after it to be rolled back."""
    model, (prompt, rest) = small_model("nsa"), prompts(60, 50)
    path = tmp_path / "prompts"
    greedy(model, [prompt[:58] + rest, prompt[:50]], 1, save_cache=path)
    assert greedy(model, [prompt], load_cache=path) == greedy(model, [prompt])


def test_the_penalty_counts_the_saved_tokens_too(tmp_path: Path) -> None:
    model, rows = small_model("nsa"), prompts(30, 12)
    path = tmp_path / "prompts"
    greedy(model, rows, 1, save_cache=path)
    options = {"repetition_penalty": 1.5}
    assert greedy(model, rows, load_cache=path, **options) == greedy(model, rows, **options)


def saved(tmp_path: Path) -> tuple[LM, list[list[int]], Path]:
    model, rows = small_model("nsa"), prompts(80, 70)
    greedy(model, rows, 1, save_cache=tmp_path / "prompts")
    return model, rows, tmp_path / "prompts"


def test_a_prompt_that_was_not_saved_is_refused_by_its_row(tmp_path: Path) -> None:
    model, rows, path = saved(tmp_path)
    other = [(rows[0][0] + 1) % 64, (rows[1][0] + 1) % 64]
    unknown = next(token for token in range(64) if token not in (rows[0][0], rows[1][0], *other))
    with pytest.raises(ValueError, match=r"prompts\[1\].*starts with"):
        greedy(model, [rows[0], [unknown, 2, 3]], load_cache=path)


def test_a_prompt_that_leaves_a_saved_row_early_is_refused(tmp_path: Path) -> None:
    model, rows, path = saved(tmp_path)
    with pytest.raises(ValueError, match=r"lengths .*max_rollback = 32"):
        greedy(model, [rows[0][:20]], load_cache=path)


def test_saved_prompts_of_another_model_are_refused(tmp_path: Path) -> None:
    model, rows, path = saved(tmp_path)
    with torch.no_grad():
        model.blocks[1].mlp.outer.weight.add_(1e-3)
    with pytest.raises(ValueError, match="model of"):
        greedy(model, rows, load_cache=path)


def test_saved_prompts_of_another_dtype_are_refused_by_it(tmp_path: Path) -> None:
    model, rows, path = saved(tmp_path)
    with pytest.raises(ValueError, match=r"dtype of .*float64; accepted: the model's, torch.bfloat16"):
        greedy(model.bfloat16(), rows, load_cache=path)


@pytest.mark.parametrize("changes", [{"attention": "dense"}, {"window": 16}, {"norm_eps": 0.1}], ids=str)
def test_saved_prompts_of_another_config_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """The weights may be the same."""
    model, rows, path = small_model("sliding"), prompts(45), tmp_path / "prompts"
    greedy(model, rows, 1, save_cache=path)
    other = LM(replace(model.config, **changes)).double().eval()
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="model of"):
        greedy(other, rows, load_cache=path)


def test_saved_prompts_go_to_a_model_of_another_training_length(tmp_path: Path) -> None:
    model, rows, path = saved(tmp_path)
    other = LM(replace(model.config, seq_len=128)).double().eval()
    other.load_state_dict(model.state_dict())
    assert greedy(other, rows, load_cache=path) == greedy(model, rows)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"quantize": "fp8"}, "quantize"), ({"load_cache": 3}, "load_cache"), ({"page_size": 0}, "page_size")],
)
def test_an_option_that_does_not_fit_is_refused_by_name(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    model, rows, path = saved(tmp_path)
    with pytest.raises(ValueError, match=name):
        greedy(model, rows, **{"load_cache": path, **options})


@pytest.mark.parametrize("options", [{"page_size": 8}, {"quantize": "fp8"}], ids=str)
def test_other_attentions_have_no_pages_and_no_fp8(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*accepted: .*NSA"):
        greedy(small_model("dense"), prompts(5), **options)
