"""Generation from caches equals generation without them, for one prompt and for many of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generating import small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSACache
from nsa.cache import layer as cache_layer
from nsa.generate import generate, summary
from nsa.generation import decoder, engine
from nsa.generation.engine import Generation
from nsa.generation.options import Options
from nsa.generation.sampling import penalize
from nsa.model import LM

KINDS = ("nsa", "dense")


def greedy_without_cache(model: LM, tokens: Tensor, n_new: int) -> Tensor:
    for _ in range(n_new):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(dim=-1)], dim=1)
    return tokens[:, -n_new:]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_from_caches_equals_greedy_without(kind: str) -> None:
    model = small_model(kind)
    prompt = torch.randint(64, (2, 19))
    expected = greedy_without_cache(model, prompt, 20)
    assert torch.equal(generate(model, prompt, 20, temperature=0), expected)
    assert len(expected.unique()) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_different_lengths_do_not_disturb_each_other(kind: str) -> None:
    model = small_model(kind)
    prompts = [torch.randint(64, (length,)).tolist() for length in (3, 17, 1, 30)]
    together = generate(model, prompts, 12, temperature=0)
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row[None], greedy_without_cache(model, torch.tensor([prompt]), 12))


@pytest.mark.parametrize("length", [1, 5, 12])
def test_generation_can_be_stopped_after_any_token(length: int) -> None:
    model = small_model("nsa")
    prompt = torch.randint(64, (2, 5))
    calls: list[bool] = []

    def stop() -> bool:
        calls.append(True)
        return len(calls) == length

    whole = generate(model, prompt, 12, temperature=0)
    assert torch.equal(generate(model, prompt, 12, temperature=0, stop=stop), whole[:, :length])


def test_sampling_repeats_with_its_seed() -> None:
    model = small_model("dense")
    prompt = torch.randint(64, (2, 5))

    def sample(seed: int, n_new: int = 16) -> Tensor:
        return generate(model, prompt, n_new, temperature=2.0, seed=seed)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    assert torch.equal(sample(1, 9), sample(1)[:, :9])
    same_prompt = generate(model, prompt[:1].expand(2, -1), 16, temperature=2.0)
    assert not torch.equal(same_prompt[0], same_prompt[1])


TOKENS = st.lists(st.integers(0, 63), min_size=1, max_size=40)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalized": {"temperature": 0, "repetition_penalty": 1.3},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    "all": {"temperature": 2.0, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 9},
}


@cache
def fp32_model(kind: str) -> LM:
    return small_model(kind).float()


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.sampled_from(KINDS),
    st.lists(TOKENS, min_size=2, max_size=4),
    st.sampled_from(list(SAMPLING)),
    st.integers(1, 48),
)
def test_a_row_does_not_depend_on_its_neighbors_nor_on_chunks(
    kind: str, prompts: list[list[int]], sampling: str, chunk: int
) -> None:
    model, how = fp32_model(kind), {"seed": 0, **SAMPLING[sampling]}
    together = generate(model, prompts, 12, prefill_chunk=chunk, **how)
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], 12, **{**how, "seed": how["seed"] + row})
        assert torch.equal(together[row], alone[0])


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.lists(TOKENS.map(lambda tokens: tokens[:8] * 3), min_size=1, max_size=3),
    st.sampled_from(list(SAMPLING)),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_prompt_lookup_changes_no_token(prompts: list[list[int]], sampling: str, n_draft: int, ngram: int) -> None:
    model, how = fp32_model("nsa"), SAMPLING[sampling]
    plain = generate(model, prompts, 20, **how)
    assert torch.equal(generate(model, prompts, 20, prompt_lookup=n_draft, lookup_ngram=ngram, **how), plain)


@pytest.mark.parametrize("n_draft", [0, 4])
def test_the_penalty_is_for_the_prompt_and_the_new_text(n_draft: int) -> None:
    model, prompts = small_model("nsa"), [[1, 2, 3] * 5, [7]]
    how = {"temperature": 0, "repetition_penalty": 1.5, "prompt_lookup": n_draft, "lookup_ngram": 1}
    found = generate(model, prompts, 20, **how)
    for row, prompt in zip(found.tolist(), prompts, strict=True):
        tokens = torch.tensor([prompt])
        for token in row:
            logits = model(tokens)[:, -1]
            seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, tokens, True)
            assert token == int(penalize(logits, seen, 1.5).argmax())
            tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)
    assert not torch.equal(found, generate(model, prompts, 20, temperature=0))


@pytest.mark.slow
def test_prompt_lookup_takes_fewer_steps_where_the_text_repeats() -> None:
    model = small_model("nsa")
    # A token decides the next one, and so on in a circle: what was generated once is found again.
    for layer in model.blocks:
        layer.attention.o_proj.weight.data.zero_()
    generations = [
        Generation(model, [[1, 2, 3], [4]], Options(max_new_tokens=200, temperature=0, prompt_lookup=n)) for n in (0, 8)
    ]
    for generation in generations:
        assert sum(len(new[0]) for new in generation) == 200
    plain, lookup = (generation.stats for generation in generations)
    assert generations[0].rows[0].tokens == generations[1].rows[0].tokens
    assert plain.steps == 199
    assert lookup.steps < 100
    assert lookup.drafted >= lookup.accepted > 200
    assert plain.new_tokens == lookup.new_tokens == 400
    assert plain.decoded_tokens == lookup.decoded_tokens == 398


@pytest.mark.parametrize("n_draft", [0, 4])
@pytest.mark.parametrize("sampling", ["greedy", "all"])
def test_static_caches_change_no_token(n_draft: int, sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs in a graph, run eagerly."""
    model, prompts = small_model("nsa"), [[1, 2, 3] * 7, [9], [5, 6] * 3]
    how = {**SAMPLING[sampling], "prompt_lookup": n_draft, "lookup_ngram": 1, "prefill_chunk": 8}
    expected = generate(model, prompts, 25, **how)
    real = decoder.Replay
    monkeypatch.setattr(decoder, "can_capture", lambda model, options: True)
    monkeypatch.setattr(decoder, "Replay", lambda run, capture: real(run, capture=False))
    assert torch.equal(generate(model, prompts, 25, **how), expected)


def test_a_prompt_reads_no_further_than_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of a captured step are static, which read everything, but not before the prompt is in them."""
    monkeypatch.setattr(decoder, "can_capture", lambda model, options: True)
    monkeypatch.setattr(cache_layer, "KEYS_STEP", 8)
    read: list[tuple[bool, int]] = []
    stage = NSACache.stage

    def staged(cache: NSACache, **new: Any) -> Any:
        step = stage(cache, **new)
        read.append((cache.static, step.compressed[0].shape[1]))
        return step

    monkeypatch.setattr(NSACache, "stage", staged)
    generation = Generation(small_model("nsa"), [[1] * 24, [2] * 7], Options(max_new_tokens=40, prefill_chunk=16))
    steps = iter(generation)
    next(steps)
    next(steps)
    # One per layer of two chunks and of a step: blocks of 8 tokens every 4, of 16, 24 and 64 tokens.
    assert read == [(False, 3)] * 2 + [(False, 5)] * 2 + [(True, 15)] * 2


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_removes_the_drafts_that_it_rejects(kind: str, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host need not ask for it, and a row that is fed nothing stays as it is."""
    real = decoder.Replay
    monkeypatch.setattr(decoder, "can_capture", lambda model, options: static)
    monkeypatch.setattr(decoder, "Replay", lambda run, capture: real(run, capture=False))
    model, prompts = small_model(kind), [[1, 2, 3] * 4, [5, 6], [7]]
    whole = generate(model, prompts, 4, temperature=0).tolist()
    with torch.inference_mode():
        decoding = decoder.Decoder(model, prompts, [9] * 3, Options(max_new_tokens=9, temperature=0, prompt_lookup=3))
        decoding.prefill()
        right, wrong = [whole[0][1], whole[0][2], (whole[0][3] + 1) % 64], [(whole[1][1] + 1) % 64] * 3
        decoding.step(decoding.feed([right, wrong, None]))
    assert decoding.kept.tolist() == [3, 1, 0]
    assert [cache.lengths.tolist() for cache in decoding.caches] == [[15, 3, 1]] * 2


def test_every_call_of_a_replay_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA graphs, which runs nothing while it captures."""
    done: list[str] = []

    class Graph:
        def replay(self) -> None:
            done.append("replayed")

    monkeypatch.setattr(decoder, "capture_graph", lambda run: Graph())
    step = decoder.Replay(lambda: done.append("eager"), capture=True)
    for n in range(1, 7):
        step()
        assert len(done) == n
    assert done == ["eager"] * decoder.WARMUP + ["replayed"] * (6 - decoder.WARMUP)


@pytest.mark.parametrize("n_draft", [0, 4])
def test_warm_up_is_no_part_of_the_decode_speed(n_draft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a capture advances by 100 s, and a replay and a chunk of the prompt by 1 s."""
    clock = [0.0]

    def advance(*_: int) -> None:
        clock[0] += 1

    def capture(run: Callable[[], None]) -> SimpleNamespace:
        clock[0] += 100
        return SimpleNamespace(replay=lambda: (run(), advance()))

    monkeypatch.setattr(decoder, "can_capture", lambda model, options: True)
    monkeypatch.setattr(decoder, "capture_graph", capture)
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    options = Options(max_new_tokens=30, temperature=0, prompt_lookup=n_draft, lookup_ngram=1)
    generation = Generation(small_model("nsa"), [[1, 2, 3] * 4], options, progress=advance)
    list(generation)
    stats = generation.stats
    n_captured = sum(replay.graph is not None for replay in generation.decoder.steps.values())
    assert n_captured >= 1
    assert stats.warmup_s == 101 * n_captured
    assert stats.decode_s == clock[0] - 1 - stats.warmup_s > 0
    assert stats.warmup_tokens + stats.decoded_tokens == 29
    assert stats.warmup_tokens == decoder.WARMUP + 1 or n_draft
    assert f"warm-up: {stats.warmup_tokens} tokens in " in summary(generation)
    assert f"decode: {stats.decoded_tokens} tokens in " in summary(generation)


@pytest.mark.parametrize("n_draft", [0, 4])
def test_a_row_ends_at_its_end_token_and_the_others_go_on(n_draft: int) -> None:
    model, prompts = small_model("nsa"), [[1, 2, 3] * 4, [7, 8]]
    whole = generate(model, prompts, 30, temperature=0).tolist()
    # One that row 0 generates, but row 1 does not.
    end = next(token for token in whole[0][5:] if token not in whole[1])
    ended = generate(model, prompts, 30, temperature=0, end=end, prompt_lookup=n_draft, lookup_ngram=1).tolist()
    first = whole[0].index(end)
    assert ended[0] == whole[0][:first] + [-1] * (30 - first)
    assert ended[1] == whole[1]


@pytest.mark.parametrize("n_draft", [0, 4])
def test_a_row_ends_at_max_len(n_draft: int) -> None:
    model, prompts = small_model("nsa"), [[1, 2, 3] * 4, [7, 8]]
    whole = generate(model, prompts, 30, temperature=0)
    cut = generate(model, prompts, 30, temperature=0, max_len=16, prompt_lookup=n_draft)
    assert cut.shape == (2, 14)
    assert torch.equal(cut[1], whole[1, :14])
    assert cut[0].tolist() == [*whole[0, :4].tolist(), *[-1] * 10]


def test_no_number_is_drawn_for_a_token_that_does_not_fit() -> None:
    """10^15 of them would need more memory than there is."""
    model = small_model("nsa")
    assert torch.equal(generate(model, [[1, 2]], 10**15, max_len=10), generate(model, [[1, 2]], 8))


def test_progress_counts_the_prompt_in_chunks() -> None:
    seen: list[tuple[int, int]] = []
    options = Options(max_new_tokens=1, prefill_chunk=8)
    for _ in Generation(small_model("nsa"), [[1] * 20, [2] * 3], options, progress=lambda *at: seen.append(at)):
        assert seen == [(8, 20), (16, 20), (20, 20)]


def test_bytes_read_are_of_the_last_step_and_a_dense_model() -> None:
    read = {}
    for kind in KINDS:
        generation = Generation(fp32_model(kind), [[1] * 20, [2] * 3], Options(max_new_tokens=8))
        list(generation)
        read[kind] = generation.kv_bytes_read()
        assert read[kind][0] == sum(fp32_model(kind).kv_bytes_read(length) for length in (27, 10))
    assert read["dense"][0] == read["dense"][1] == read["nsa"][1]


def test_a_stopped_row_gets_no_more_tokens() -> None:
    generation = Generation(small_model("dense"), [[1, 2], [3]], Options(max_new_tokens=6, temperature=0))
    for _ in generation:
        if generation.stats.new_tokens >= 6:
            generation.stop(0)
    assert [len(row.tokens) for row in generation.rows] == [3, 6]
    assert [row.finish for row in generation.rows] == ["stop", "length"]


def test_a_row_that_is_not_finite_leaves_the_others_as_they_are() -> None:
    model = small_model("dense")
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = generate(model, prompts, 6, temperature=0)
    row = int(torch.tensor([t for t in range(64) if t not in {*prompts[0].tolist(), *expected[0].tolist()}])[0])
    prompts[1, 0] = row
    model.embedding.weight.data[row] = float("nan")
    new = generate(model, prompts, 6, temperature=0)
    assert torch.equal(new[0], expected[0])
    assert (new[1] == -1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0; accepted: 0 or"),
        ({"temperature": 1e-320}, "temperature is 1e-320"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"top_k": 65}, "top_k is 65"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1; accepted: 0 or"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"seed": -1}, "seed is -1"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300"),
        ({"repetition_penalty": 1e300}, "repetition_penalty is 1e\\+300"),
        ({"end": 64}, "end is 64"),
        ({"end": "."}, "end is '.'"),
        ({"end": 2.0}, "end is 2.0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"save_cache": "no/such/folder/x"}, "save_cache is 'no/such/folder/x'"),
        ({"save_cache": "."}, "save_cache is '.'"),
        ({"save_cache": ""}, "save_cache is ''"),
        ({"quantize": "fp8"}, "quantize is 'fp8'.*NSA"),
        ({"page_size": 64}, "page_size is 64.*NSA"),
        ({"prompt_lookup": -1}, "prompt_lookup is -1"),
        ({"lookup_ngram": 0}, "lookup_ngram is 0"),
        ({"temperature": 0, "top_k": 5}, "top_k is 5.*temperature"),
        ({"temperature": 0, "top_p": 0.5}, "top_p is 0.5.*temperature"),
        ({"max_len": 1}, "max_len is 1"),
        ({"prompts": [[1], [1, 2, 3]], "max_len": 3}, r"prompts\[1\] is 3.*max_len = 3"),
        ({"prompts": [[1], []]}, r"prompts\[1\] is"),
        ({"prompts": []}, "prompts is"),
        ({"prompts": [[1], [64]]}, r"prompts\[1\] is \[64\]"),
        ({"prompts": [[1], [2.0]]}, r"prompts\[1\] is \[2.0\]"),
        ({"prompts": [1, 2]}, r"prompts\[0\] is 1"),
        ({"prompts": "ab"}, r"prompts\[0\] is 'a'"),
        ({"prompts": None}, "prompts is None"),
        ({"prompts": torch.ones(1, 3)}, r"prompts\[0\] is \[1.0, 1.0, 1.0\]"),
        ({"prompts": torch.ones(3, dtype=torch.long)}, r"prompts.shape is \(3,\)"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, object], message: str) -> None:
    arguments = {"prompts": [[1, 2]], "max_new_tokens": 2, **changes}
    with pytest.raises(ValueError, match=message):
        generate(small_model("dense"), **arguments)


def test_prompts_of_numpy_are_taken(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    model, save = small_model("nsa"), {"temperature": 0, "save_cache": tmp_path / "cache"}
    expected = generate(model, [[1, 2]], 3, **save)
    for prompts in (
        numpy.array([[1, 2]]),
        [numpy.array([1, 2])],
        [list(numpy.array([1, 2]))],
        [tuple(torch.tensor([1, 2]))],
    ):
        assert torch.equal(generate(model, prompts, 3, **save), expected)
