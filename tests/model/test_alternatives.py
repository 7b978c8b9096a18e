"""Sliding, longformer and bigbird attention: what they see, against a mask written out; and that everyone recalls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import offsets
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import nsa
from nsa import NSAConfig
from nsa.backends import sdpa
from nsa.generate import generate
from nsa.model import (
    ATTENTION_KINDS,
    LM,
    BigBirdAttention,
    DenseAttention,
    LMConfig,
    LongformerAttention,
    SlidingAttention,
    alternatives,
)
from nsa.sequences import Saved, Upstream

KINDS = ("sliding", "longformer", "bigbird")


@dataclass(frozen=True)
class Pattern:
    """One attention on sequences of these lengths: one of them, or several in a varlen batch."""

    kind: str
    lengths: tuple[int, ...]
    window: int
    n_global: int = 1
    block: int = 4
    n_random: int = 0

    def __str__(self) -> str:
        documents = "+".join(map(str, self.lengths))
        return f"{self.kind} S={documents} w={self.window} g={self.n_global} b={self.block} r={self.n_random}"

    def attention(self) -> DenseAttention:
        config = NSAConfig(dim=24, n_heads=6, n_kv_groups=2, d_k=4, d_v=6)
        if self.kind == "sliding":
            return SlidingAttention(config, window=self.window)
        if self.kind == "longformer":
            return LongformerAttention(config, window=self.window, n_global=self.n_global)
        options = {"n_global": self.n_global, "n_random": self.n_random, "block": self.block}
        return BigBirdAttention(config, window=self.window, **options, seed=1, layer=2)

    def sees(self, query: int, key: int, drawn: list[set[int]]) -> bool:
        """Of positions in one document, word by word from the definitions; `drawn` holds bigbird's random blocks."""
        if key > query:
            return False
        if self.kind != "bigbird":
            is_global = self.kind == "longformer" and (key < self.n_global or query < self.n_global)
            return key > query - self.window or is_global
        own, other = query // self.block, key // self.block
        is_global = min(own, other) * self.block < self.n_global
        return other > own - self.window // self.block or is_global or other in drawn[own]

    def visible(self) -> Tensor:
        """`[S, S]`, nothing across documents."""
        attention = self.attention()
        drawn = drawn_blocks(attention, max(self.lengths)) if isinstance(attention, BigBirdAttention) else []
        parts = []
        for length in self.lengths:
            rows = [[self.sees(t, i, drawn) for i in range(length)] for t in range(length)]
            parts.append(torch.tensor(rows, dtype=torch.bool).view(length, length))
        return torch.block_diag(*parts).bool()


def drawn_blocks(attention: BigBirdAttention, n_blocks: int) -> list[set[int]]:
    """The random blocks of each of the first blocks of queries."""
    own = torch.arange(n_blocks)
    drawn = attention.draw_blocks(own, attention.n_first, own - attention.n_window + 1)
    return [{block for block in row if block >= 0} for row in drawn.tolist()]


WHOLE = [
    Pattern("sliding", (37,), window=5),
    Pattern("sliding", (20,), window=1),
    Pattern("sliding", (7,), window=30),
    Pattern("longformer", (37,), window=5, n_global=3),
    Pattern("longformer", (37,), window=1, n_global=1),
    Pattern("longformer", (37,), window=4, n_global=20),
    Pattern("longformer", (37,), window=30, n_global=40),
    Pattern("longformer", (9,), window=9, n_global=2),
    Pattern("bigbird", (37,), window=8, n_global=4, n_random=2),
    Pattern("bigbird", (61,), window=4, n_global=0, n_random=3),
    Pattern("bigbird", (45,), window=12, n_global=9, n_random=0),
    Pattern("bigbird", (50,), window=3, n_global=5, block=3, n_random=1),
    Pattern("bigbird", (20,), window=40, n_global=4, n_random=2),
]
VARLEN = [
    Pattern("sliding", (5, 1, 23, 0, 9), window=6),
    Pattern("longformer", (5, 1, 23, 0, 9), window=6, n_global=2),
    Pattern("longformer", (17, 3, 20), window=2, n_global=7),
    Pattern("bigbird", (5, 1, 33, 0, 18), window=4, n_global=3, n_random=2),
]


def masked_softmax(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention with its whole score matrix: `q [B,S,Hq,D]`, `k, v [B,S,G,D]`, `visible [S,S]`."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bshd,bnhd->bhsn", q, k) / q.shape[-1] ** 0.5
    p = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhsn,bnhd->bshd", p, v)


def leaves(batch: int, length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.randn(batch, length, heads, width, dtype=dtype, requires_grad=True)
        for heads, width in ((6, 4), (2, 4), (2, 6))
    )
    return q, k, v


def assert_same_attention(attend: Callable[..., Tensor], pattern: Pattern, batch: int) -> None:
    inputs = leaves(batch, sum(pattern.lengths))
    actual = attend(*inputs)
    expected = masked_softmax(*inputs, pattern.visible())
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(actual)
    torch.testing.assert_close(torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad))


@pytest.mark.parametrize("pattern", WHOLE, ids=str)
def test_whole_sequences_are_a_masked_softmax_with_its_gradients(pattern: Pattern) -> None:
    attention = pattern.attention()
    assert_same_attention(lambda q, k, v: attention.attend(q, k, v, None, None), pattern, batch=2)


@pytest.mark.parametrize("pattern", VARLEN, ids=str)
def test_varlen_equals_masked_softmax_with_gradients(pattern: Pattern) -> None:
    cu_seqlens = offsets(pattern.lengths)
    attention = pattern.attention()
    assert_same_attention(lambda q, k, v: attention.attend(q, k, v, cu_seqlens, None), pattern, batch=1)


@pytest.mark.parametrize("pattern", WHOLE, ids=str)
def test_any_split_through_a_cache_equals_the_whole(pattern: Pattern) -> None:
    attention = pattern.attention().double()
    length = pattern.lengths[0]
    x = torch.randn(2, length, 24, dtype=torch.float64)
    for sizes in ([1] * length, [length], [2, 1, 1, *[3] * length]):
        cache = attention.new_cache(2, length)
        parts = [attention(part, cache=cache) for part in x.split(cut(sizes, length), dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), attention(x))


def cut(sizes: list[int], length: int) -> list[int]:
    """As many of `sizes` as `length` holds."""
    ends = [min(sum(sizes[: index + 1]), length) for index in range(len(sizes))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False) if end > begin]


@pytest.mark.parametrize("pattern", WHOLE, ids=str)
def test_keys_seen_are_those_of_the_mask(pattern: Pattern) -> None:
    attention = pattern.attention()
    counts = pattern.visible().sum(dim=1).tolist()
    assert [attention.keys_seen(t + 1) for t in range(len(counts))] == counts
    assert attention.keys_seen(0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", WHOLE[3:6] + WHOLE[8:10], ids=str)
def test_narrow_dtypes_stay_what_they_are(pattern: Pattern, dtype: torch.dtype) -> None:
    attention = pattern.attention()
    inputs = leaves(1, pattern.lengths[0], dtype)
    actual = attention.attend(*inputs, None, None)
    expected = masked_softmax(*(x.double() for x in inputs), pattern.visible())
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=20 * torch.finfo(dtype).eps, rtol=0)
    layer = attention.to(dtype)
    x = torch.randn(1, pattern.lengths[0], 24, dtype=dtype)
    cache = layer.new_cache(1, pattern.lengths[0])
    stepped = torch.cat([layer(part, cache=cache) for part in x.split(5, dim=1)], dim=1)
    assert stepped.dtype == dtype
    torch.testing.assert_close(stepped, layer(x), atol=20 * torch.finfo(dtype).eps, rtol=0)


# BigBird's draw.


def test_random_blocks_are_distinct_and_all_taken_if_few() -> None:
    attention = Pattern("bigbird", (0,), window=8, n_global=4, n_random=3).attention()
    assert isinstance(attention, BigBirdAttention)
    for own, drawn in enumerate(drawn_blocks(attention, 200)):
        candidates = set(range(1, own - 1))
        assert drawn <= candidates
        assert len(drawn) == min(3, len(candidates))


def test_every_subset_is_drawn_about_as_often() -> None:
    """Three of five: ten subsets, 6,000 draws by as many blocks of queries."""
    attention = Pattern("bigbird", (0,), window=4, n_random=3).attention()
    assert isinstance(attention, BigBirdAttention)
    own = torch.arange(6000)
    drawn = attention.draw_blocks(own, 0, torch.full_like(own, 5))
    counts = Counter(tuple(row) for row in drawn.sort(dim=-1).values.tolist())
    assert len(counts) == 10
    # The standard deviation of each count is 23.
    assert all(500 <= count <= 700 for count in counts.values())


def test_the_draw_depends_on_seed_and_layer_and_on_nothing_else() -> None:
    config = LMConfig(
        vocab_size=8,
        n_layers=3,
        hidden=8,
        seq_len=8,
        attn=NSAConfig(dim=8, n_heads=1, n_kv_groups=1, d_k=4, d_v=4),
        attention="bigbird",
        window=4,
        n_global=4,
        block=4,
    )

    def drawn(config: LMConfig) -> list[Tensor]:
        return [layer.attention.blocks_seen(torch.arange(100)) for layer in LM(config).layers]

    first, again, other = drawn(config), drawn(config), drawn(replace(config, random_seed=1))
    for index in range(3):
        assert torch.equal(first[index], again[index])
        assert not torch.equal(first[index], other[index])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])


# FlexAttention. Its kernels need a GPU; the mask is the same everywhere.


@pytest.mark.parametrize("block", [64, 32, 128])
@pytest.mark.parametrize("length", [128, 300])
def test_flex_attention_gets_what_the_ops_get(block: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = Pattern("bigbird", (length,), window=block, n_global=1, block=block, n_random=1)
    attention = pattern.attention()
    assert isinstance(attention, BigBirdAttention)
    # It has no backward on a CPU.
    inputs = tuple(x.detach() for x in leaves(2, length))
    expected = attention.attend(*inputs, None, None)
    monkeypatch.setattr(alternatives, "compiled_flex_attention", lambda: flex_attention)
    monkeypatch.setattr(BigBirdAttention, "can_use_flex", lambda *_: True)
    torch.testing.assert_close(attention.attend(*inputs, None, None), expected)


@pytest.mark.parametrize("block", [64, 32, 128])
def test_the_tiles_of_flex_attention_hold_the_mask(block: int) -> None:
    """What the kernels skip is seen by nobody, what they do not ask about is seen by all."""
    length = 1000
    pattern = Pattern("bigbird", (length,), window=256, n_global=1, block=block, n_random=1)
    attention = pattern.attention()
    assert isinstance(attention, BigBirdAttention)
    seen = attention.blocks_seen(torch.arange(-(-length // block)))
    mask = alternatives.flex_mask(seen, block, length)
    tile = alternatives.FLEX_TILE
    n_tiles = -(-length // tile)
    blocks = torch.zeros(seen.shape[0], seen.shape[0] + 1, dtype=torch.bool)
    blocks = blocks.scatter(1, torch.where(seen < 0, seen.shape[0], seen).long(), True)[:, :-1]
    visible = torch.zeros(n_tiles * tile, n_tiles * tile, dtype=torch.bool)
    t = torch.arange(length)
    visible[:length, :length] = blocks[t[:, None] // block, t // block] & (t <= t[:, None])
    tiles = visible.view(n_tiles, tile, n_tiles, tile).transpose(1, 2)
    asked = table(mask.kv_num_blocks, mask.kv_indices)
    full = table(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (asked & full).any()
    assert torch.equal(asked | full, tiles.flatten(2).any(dim=-1))
    # Queries past the last one see nothing, and nobody asks what they got.
    past = (torch.arange(n_tiles * tile) >= length).view(n_tiles, 1, tile, 1)
    assert ((tiles | past).flatten(2).all(dim=-1) | ~full).all()
    assert full.any()
    assert (~(asked | full)).tril().any()


def table(counts: Tensor, numbers: Tensor) -> Tensor:
    """The tiles that a list of FlexAttention names, as `[Q, K]` bool."""
    used = torch.arange(numbers.shape[-1]) < counts[0, 0, :, None]
    return torch.zeros_like(used).scatter(1, numbers[0, 0].long(), used)


def test_flex_attention_does_not_break_a_compiled_model_s_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Pattern("bigbird", (256,), window=64, block=64, n_random=1).attention()
    x = torch.randn(1, 256, 24)
    with torch.no_grad():
        expected = attention(x)
        monkeypatch.setattr(BigBirdAttention, "can_use_flex", lambda *_: True)
        actual = torch.compile(attention, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(actual, expected)


def test_auto_uses_flex_attention_for_long_sequences_on_a_gpu() -> None:
    def uses_flex(length: int, block: int = 64, backend: str = "auto", device: str = "cuda") -> bool:
        config = NSAConfig(dim=24, n_heads=6, n_kv_groups=2, d_k=4, d_v=6, backend=backend)
        options = {"window": block, "n_global": 1, "n_random": 1, "seed": 0, "layer": 0}
        attention = BigBirdAttention(config, block=block, **options)
        attention.flex_compiles = True
        return attention.can_use_flex(
            SimpleNamespace(is_cuda=device == "cuda", shape=(1, length), dtype=torch.bfloat16)
        )

    assert uses_flex(1024)
    assert not uses_flex(1024, device="cpu")
    assert not uses_flex(1024, backend="triton")
    assert not uses_flex(1024, block=48)
    assert not uses_flex(100)


# Through the model.


def small_config(attention: str | tuple[str, ...], **changes: object) -> LMConfig:
    attn = NSAConfig(dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=8)
    layers = len(attention) if isinstance(attention, tuple) else 2
    config = LMConfig(vocab_size=16, n_layers=layers, hidden=64, seq_len=64, attn=attn)
    return replace(config, attention=attention, window=8, n_global=4, block=4, n_random=2, **changes)


def small_model(attention: str | tuple[str, ...], **changes: object) -> LM:
    torch.manual_seed(0)
    model = LM(small_config(attention, **changes)).eval()
    # Fresh layers add little to the residual stream: with larger weights every token depends on what it sees.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model.double()


def label(attention: str | tuple[str, ...]) -> str:
    return attention if isinstance(attention, str) else "mixture"


EVERY_KIND = ("bigbird", "nsa", "sliding", "dense", "longformer")


@pytest.mark.parametrize("attention", [*ATTENTION_KINDS, EVERY_KIND], ids=label)
def test_no_token_depends_on_a_later_one(attention: str | tuple[str, ...]) -> None:
    model = small_model(attention)
    tokens = torch.randint(16, (1, 48))
    changed = tokens.clone()
    changed[:, 30:] = (changed[:, 30:] + 1) % 16
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :30], before[:, :30], rtol=0, atol=0)
    assert not torch.allclose(after[:, 30:], before[:, 30:])
    embedded = torch.randn(1, 48, 32, dtype=torch.float64, requires_grad=True)
    model.layers[0](embedded)[:, :30].sum().backward()
    assert embedded.grad is not None
    assert (embedded.grad[:, 30:] == 0).all()


def test_a_mixture_runs_each_layer_s_own_attention() -> None:
    model = small_model(EVERY_KIND)
    names = [type(layer.attention).__name__ for layer in model.layers]
    kinds = ["BigBird", "NSA", "Sliding", "Dense", "Longformer"]
    assert names == [f"{kind}Attention" for kind in kinds]
    assert model.config.kinds == EVERY_KIND
    tokens = torch.randint(16, (2, 45))
    caches = model.new_cache(2, 45)
    parts = [model(part, caches=caches) for part in tokens.split([20, 1, 9, 1, 14], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


def test_layer_of_a_mixed_model_equals_that_of_a_uniform_model() -> None:
    mixed, one = small_model(("dense", "sliding")), small_model("sliding")
    one.load_state_dict(mixed.state_dict())
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    torch.testing.assert_close(mixed.layers[1](x), one.layers[1](x), rtol=0, atol=0)
    assert not torch.allclose(mixed.layers[0](x), one.layers[0](x))


@pytest.mark.parametrize("attention", [*KINDS, EVERY_KIND], ids=label)
def test_prompts_of_different_lengths_generate_as_each_alone(attention: str | tuple[str, ...]) -> None:
    model = small_model(attention)
    prompts = [torch.randint(16, (length,)).tolist() for length in (3, 17, 1, 30)]
    together = generate(model, prompts, 12, temperature=0)
    for row, prompt in zip(together, prompts, strict=True):
        tokens = torch.tensor([prompt])
        for _ in range(12):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(dim=-1)], dim=1)
        assert torch.equal(row, tokens[0, -12:])


def test_a_window_s_cache_does_not_grow_with_the_sequence() -> None:
    """Two layers of one group, 16 + 16 numbers per token, four bytes each; one slot of each store is spare, 32 of a
    ring are for rollback, and each row has three int32."""
    places = {"sliding": 8 + 32 + 1 + 1, "longformer": 8 + 32 + 1 + 4 + 1, "dense": 1000 + 1, "bigbird": 1000 + 1}
    for kind, kept in places.items():
        model = small_model(kind).float()
        assert model.kv_bytes(1000) == 2 * (kept * 32 * 4 + 12), kind
        assert model.kv_bytes_per_token() == (0 if kind in ("sliding", "longformer") else 2 * 32 * 4)


# Memory: in a process of its own, because a peak never goes down again.

MEASURE = """
import resource, sys
import torch
from nsa import NSAConfig
from nsa.model import BigBirdAttention, LongformerAttention, SlidingAttention

torch.set_num_threads(1)
config = NSAConfig(dim=16, n_heads=1, n_kv_groups=1, d_k=16, d_v=16)
layers = {
    "sliding": SlidingAttention(config, window=128),
    "longformer": LongformerAttention(config, window=128, n_global=64),
    "bigbird": BigBirdAttention(config, window=128, n_global=64, n_random=2, block=64, seed=0, layer=0),
}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


for length in (256, int(sys.argv[1])):
    baseline = peak()
    for name, layer in layers.items():
        x = torch.randn(1, length, 16, requires_grad=True)
        layer(x).square().sum().backward()
        cache = layer.new_cache(1, length)
        with torch.no_grad():
            layer(x, cache=cache)
print(peak() - baseline)
"""


@pytest.mark.slow
def test_no_matrix_of_queries_by_keys_is_ever_held() -> None:
    length = 16_384
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(length)],
        env={**environment, "PYTHONPATH": str(Path(nsa.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # One byte for each pair would be 256 MiB.
    assert int(done.stdout) < 0.75 * length**2


# Recall: pairs of a key and a value, then keys to be answered with their values.

N_KEYS = 4
N_VALUES = 4
FILLER = N_KEYS * N_VALUES + N_KEYS
FILLERS = 4
QUESTIONS = 8
RECALL_LENGTH = N_KEYS + FILLERS + QUESTIONS


def recall(batch: int) -> tuple[Tensor, Tensor]:
    """`(tokens, targets) [B, S]`: every key once, each with a random value, as one token a pair; fillers, so that no
    short window reaches back; then questions, keys alone, whose target is that key's value. Only they are scored."""
    keys = torch.rand(batch, N_KEYS).argsort(dim=1)
    values = torch.randint(N_VALUES, keys.shape)
    asked = torch.randint(N_KEYS, (batch, QUESTIONS))
    fillers = torch.full((batch, FILLERS), FILLER)
    questions = N_KEYS * N_VALUES + keys.gather(1, asked)
    tokens = torch.cat([keys * N_VALUES + values, fillers, questions], dim=1)
    targets = torch.full_like(tokens, -100)
    targets[:, -QUESTIONS:] = values.gather(1, asked)
    return tokens, targets


def recall_config(kind: str, nsa: dict[str, int] | None = None, **changes: Any) -> LMConfig:
    """By default no window reaches from a question to the pairs, and NSA's blocks do not hold everything. The MLP is
    too narrow to tell the pairs apart in a plain sum of all of them, which needs no gradient through the attention."""
    reach = {"l": 4, "d": 2, "l_sel": 4, "n_sel": 3, "n_init": 1, "n_local": 1, "w": 4, **(nsa or {})}
    attn = NSAConfig(dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, **reach)
    config = LMConfig(
        vocab_size=FILLER + 1, n_layers=1, hidden=8, seq_len=RECALL_LENGTH, attn=attn, tie_embeddings=False
    )
    return replace(config, attention=kind, **{"window": 4, "n_global": 4, "block": 4, "n_random": 1, **changes})


def learns_to_recall(config: LMConfig, steps: int = 120) -> bool:
    """Guessing costs ln 4 = 1.39; it is learned when a batch costs less than 0.3."""
    torch.manual_seed(0)
    model = LM(config).train()
    # Larger weights than a deep model starts with: the plateau before anything is matched is then short.
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    for _ in range(steps):
        loss = model(*recall(16))
        if loss < 0.3:
            return True
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return False


# NSA with one branch that reaches the pairs, and two that do not.
ONLY_BRANCH = {
    "cmp": {"l": 1, "d": 1, "n_sel": 1, "n_init": 0},
    "sel": {"l": 32, "d": 4, "n_sel": 4},
    "win": {"l": 32, "d": 4, "n_sel": 1, "n_init": 0, "w": RECALL_LENGTH},
}
BRANCH_GRADIENT = {
    "cmp": "compressed_backward",
    "sel": "selected_backward",
    "win": "sliding_backward",
}


def test_the_task_scores_questions_alone_and_has_one_answer() -> None:
    tokens, targets = recall(8)
    for row, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        value_of = {token // N_VALUES: token % N_VALUES for token in row[:N_KEYS]}
        assert sorted(value_of) == list(range(N_KEYS))
        assert answers[:-QUESTIONS] == [-100] * (RECALL_LENGTH - QUESTIONS)
        questions = [token - N_KEYS * N_VALUES for token in row[-QUESTIONS:]]
        assert answers[-QUESTIONS:] == [value_of[key] for key in questions]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        recall_config("dense"),
        recall_config("nsa"),
        recall_config("sliding", window=RECALL_LENGTH),
        recall_config("longformer"),
        recall_config("bigbird"),
    ],
    ids=lambda config: config.attention,
)
def test_learns_to_recall_what_it_reaches(config: LMConfig) -> None:
    assert learns_to_recall(config)


def test_a_window_that_does_not_reach_the_pairs_recalls_nothing() -> None:
    assert not learns_to_recall(recall_config("sliding"))


@pytest.mark.parametrize("branch", ONLY_BRANCH)
def test_nsa_learns_through_each_branch(branch: str) -> None:
    assert learns_to_recall(recall_config("nsa", ONLY_BRANCH[branch]))


@pytest.mark.slow
@pytest.mark.parametrize("branch", ONLY_BRANCH)
def test_a_branch_without_its_gradient_does_not_learn(
    branch: str, monkeypatch: pytest.MonkeyPatch, environment: Callable[..., None]
) -> None:
    intact = getattr(sdpa, BRANCH_GRADIENT[branch])

    def without(upstream: Upstream, saved: Saved, seen: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(x) for x in intact(upstream._replace(dq=None), saved, seen))
        return (dq if upstream.dq is None else upstream.dq), dk, dv

    monkeypatch.setattr(sdpa, BRANCH_GRADIENT[branch], without)
    # Backends are looked up anew.
    environment()
    assert not learns_to_recall(recall_config("nsa", ONLY_BRANCH[branch]))
