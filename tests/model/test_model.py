"""The language model: its loss is right, it does not leak between documents, and it knows what it costs."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nsa import NSAConfig
from nsa.model import ATTENTION_KINDS as KINDS
from nsa.model import LM, PRESETS, BigBirdAttention, LMConfig, chunked_cross_entropy, load_model, save_model


def small_config(kind: str, **changes: object) -> LMConfig:
    attn = NSAConfig(dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=8)
    config = LMConfig(vocab_size=16, n_layers=2, hidden=64, seq_len=64, attn=attn)
    return replace(config, attention=kind, **{"window": 8, "n_global": 4, "block": 4, "n_random": 2, **changes})


def small_model(kind: str, **changes: object) -> LM:
    torch.manual_seed(0)
    return LM(small_config(kind, **changes)).eval()


def repeating(batch: int, length: int, period: int) -> tuple[Tensor, Tensor]:
    """Random tokens that repeat: what comes next is what stood there a period ago. The first period does not count."""
    rows = torch.randint(16, (batch, period)).repeat(1, length // period + 1)[:, : length + 1]
    targets = rows[:, 1:].clone()
    targets[:, : period - 1] = -100
    return rows[:, :-1], targets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_loss_is_the_cross_entropy_of_the_logits(kind: str, tied: bool) -> None:
    model = small_model(kind, tie_embeddings=tied).double()
    tokens, targets = repeating(2, 40, period=8)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)


@pytest.mark.parametrize("rows", [1, 3, 7, 64])
@pytest.mark.parametrize("vocabulary", [64, 50])
def test_chunked_loss_equals_cross_entropy_with_its_gradients(rows: int, vocabulary: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, 12, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(vocabulary, (2, 7))
    targets[0, :3] = -100
    expected = F.cross_entropy((x @ weight.T).flatten(0, 1), targets.flatten())
    actual = chunked_cross_entropy(x, weight, targets, rows=rows)
    torch.testing.assert_close(actual, expected)
    # A factor other than one: the backward must scale what the forward has kept.
    torch.testing.assert_close(
        torch.autograd.grad(actual * 3.0, (x, weight)), torch.autograd.grad(expected * 3.0, (x, weight))
    )
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(x, weight, targets, rows=rows), expected)


def test_chunked_loss_of_ignored_targets_is_zero() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    loss = chunked_cross_entropy(x, torch.randn(10, 8), torch.full((4,), -100))
    loss.backward()
    assert loss == 0
    assert x.grad is not None
    assert (x.grad == 0).all()


@pytest.mark.parametrize("target", [-1, -99, -101, 50, 63, 64, 2**40])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_target_outside_the_vocabulary_is_an_error(target: int, needs_grad: bool) -> None:
    x, weight = torch.randn(3, 12, requires_grad=needs_grad), torch.randn(50, 12)
    with pytest.raises(ValueError, match=rf"targets is \[{target}\].*-100.* 49"):
        chunked_cross_entropy(x, weight, torch.tensor([1, target, -100]))


@pytest.mark.parametrize("target", [-1, -101, 50, 63, 64, 2**40])
def test_unchecked_out_of_vocabulary_target_gives_nan_gradients(target: int) -> None:
    """Compiled code reads no values, as on a GPU."""
    x, weight = torch.randn(3, 12, requires_grad=True), torch.randn(50, 12, requires_grad=True)
    compiled = torch.compile(chunked_cross_entropy, backend="eager", fullgraph=True)
    loss = compiled(x, weight, torch.tensor([1, target, -100]))
    assert loss.isnan()
    assert all(grad.isnan().all() for grad in torch.autograd.grad(loss, (x, weight)))
    with torch.no_grad():
        assert compiled(x, weight, torch.tensor([1, target, -100])).isnan()


def test_targets_of_another_shape_are_an_error() -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=r"targets.shape is \(2, 6\); accepted: .*\(2, 7\)"):
        chunked_cross_entropy(torch.randn(2, 7, 12), torch.randn(50, 12), torch.zeros(2, 6, dtype=torch.long))


@pytest.mark.parametrize("first", ["x", "weight"])
@pytest.mark.parametrize("second", ["x", "weight"])
def test_second_derivatives_of_the_loss_are_an_error(first: str, second: str) -> None:
    inputs = {"x": torch.randn(3, 12, requires_grad=True), "weight": torch.randn(50, 12, requires_grad=True)}
    loss = chunked_cross_entropy(**inputs, targets=torch.tensor([1, 2, -100]))
    (grad,) = torch.autograd.grad(loss, inputs[first], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad.square().sum(), inputs[second])


def test_a_hessian_vector_product_of_a_dense_model_is_an_error() -> None:
    model = small_model("dense").double()
    tokens, targets = repeating(1, 16, period=8)
    parameters = list(model.parameters())
    # The one kernel of torch's that can be differentiated twice.
    with sdpa_kernel(SDPBackend.MATH):
        grads = torch.autograd.grad(model(tokens, targets), parameters, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(sum((grad * torch.ones_like(grad)).sum() for grad in grads), parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_keeps_the_residual_in_fp32_and_the_loss_close(kind: str) -> None:
    model = small_model(kind).train()
    tokens, targets = repeating(2, 40, period=8)
    expected = model(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(tokens, targets)
        assert model.hidden(tokens).dtype == torch.bfloat16
    actual.backward()
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=0.02, rtol=0.0)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_varlen_documents_equal_each_alone(kind: str) -> None:
    model = small_model(kind).double()
    lengths = [5, 1, 37, 21]
    tokens = torch.randint(16, (1, sum(lengths)))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    varlen = model(tokens, cu_seqlens=cu_seqlens)
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(varlen, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_crosses_a_document_border(kind: str) -> None:
    model = small_model(kind)
    embedded = torch.randn(1, 40, 32, requires_grad=True)
    layer = model.layers[0]
    layer(embedded, cu_seqlens=torch.tensor([0, 17, 40], dtype=torch.int32))[:, 17:].sum().backward()
    assert embedded.grad is not None
    assert (embedded.grad[:, :17] == 0).all()
    assert (embedded.grad[:, 17:] != 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_through_the_caches_equals_the_whole(kind: str) -> None:
    model = small_model(kind).double()
    tokens = torch.randint(16, (2, 45))
    caches = model.new_cache(2, 45)
    parts = [model(part, caches=caches) for part in tokens.split([20, 1, 9, 1, 14], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind: str) -> None:
    model = small_model(kind).double()
    tokens = torch.randint(16, (2, 30))
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, :11] = False
    padded = model(tokens, attention_mask=mask)
    torch.testing.assert_close(padded[:1, 11:], model(tokens[:1, 11:]))
    torch.testing.assert_close(padded[1:], model(tokens[1:]))


def padded(fill: float) -> tuple[Tensor, Tensor]:
    """`[2, 30, 32]` with padding on the left of one row and on the right of the other, and which tokens are real."""
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, :11] = False
    mask[1, 27:] = False
    x = torch.randn(2, 30, 32, generator=torch.Generator().manual_seed(1))
    return x.masked_fill(~mask[..., None], fill), mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_padding_reaches_no_output_or_gradient(kind: str, value: float) -> None:
    results = []
    for fill in (0.0, value):
        attention = small_model(kind).layers[0].attention
        x, mask = padded(fill)
        y = attention(x.requires_grad_(), attention_mask=mask)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in (x, *attention.parameters()) if leaf.grad is not None)])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_that_is_not_finite_leaves_nothing_in_a_cache(kind: str) -> None:
    attention = small_model(kind).layers[0].attention
    results = []
    for fill in (0.0, math.nan):
        x, mask = padded(fill)
        cache = attention.new_cache(2, 60)
        results.append([attention(x, attention_mask=mask, cache=cache) for _ in range(2)])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_padding_takes_no_room_in_a_cache(kind: str, data: st.DataObject) -> None:
    """Rows that grow by different numbers of tokens fill the cache to the last place, with padding on either side."""
    model = small_model(kind).double()
    batch = data.draw(st.integers(1, 3), label="batch")
    counts = data.draw(st.lists(st.tuples(*[st.integers(0, 7)] * batch), min_size=1, max_size=5), label="counts")
    lengths = [sum(step[row] for step in counts) for row in range(batch)]
    assume(max(lengths) > 0)
    tokens = torch.randint(16, (batch, max(lengths)), generator=torch.Generator().manual_seed(0))
    caches = model.new_cache(batch, max(lengths))
    got: list[list[Tensor]] = [[] for _ in range(batch)]
    done = [0] * batch
    for step in counts:
        width = max(1, max(step)) + data.draw(st.integers(0, 9), label="more padding")
        left = [data.draw(st.integers(0, width - count), label="padding on the left") for count in step]
        new, mask = torch.zeros(batch, width, dtype=torch.long), torch.zeros(batch, width, dtype=torch.bool)
        for row, (count, first) in enumerate(zip(step, left, strict=True)):
            new[row, first : first + count] = tokens[row, done[row] : done[row] + count]
            mask[row, first : first + count] = True
            done[row] += count
        logits = model(new, attention_mask=mask, caches=caches)
        for row in range(batch):
            got[row].append(logits[row, mask[row]])
    for row, length in enumerate(lengths):
        if length:
            torch.testing.assert_close(torch.cat(got[row]), model(tokens[row : row + 1, :length])[0])
    full = torch.zeros(batch, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=f"max_len = {max(lengths)}"):
        model(full, caches=caches)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_cache_is_an_error(kind: str) -> None:
    model = small_model(kind)
    caches = model.new_cache(1, 8)
    with pytest.raises(ValueError, match="max_len = 8"):
        model(torch.zeros(1, 9, dtype=torch.long), caches=caches)


def test_a_refused_call_leaves_the_caches_of_all_layers() -> None:
    """Of which the later ones are the reason."""
    models = {kind: small_model(kind) for kind in ("nsa", "dense")}
    token = torch.zeros(1, 2, dtype=torch.long)
    made = {kind: models[kind].new_cache(1, 32) for kind in models}
    short, pages = models["nsa"].new_cache(1, 3), models["nsa"].new_cache(1, 32, page_size=8)
    for cache, n in zip(pages, (16, *[8] * 9), strict=False):
        cache.allocate(n)
    refused = [
        ("nsa", made["nsa"][:-1], "caches is 'a list of 1'; accepted: .* 2 layers"),
        ("nsa", [*made["nsa"][:-1], short[-1]], "max_len = 3"),
        ("nsa", [*made["nsa"][:-1], made["dense"][-1]], "caches.1. is 'DenseCache'"),
        ("dense", [*made["dense"][:-1], made["nsa"][-1]], "caches.1. is 'NSACache'"),
        ("nsa", pages, "row 0 is 9"),
    ]
    with torch.no_grad():
        models["nsa"](token, caches=[made["nsa"][0], short[1]])
        models["nsa"](torch.zeros(1, 7, dtype=torch.long), caches=pages)
        before = [cache.lengths.tolist() for cache in (*made["nsa"], *made["dense"], *short, *pages)]
        for kind, caches, message in refused:
            with pytest.raises(ValueError, match=message):
                models[kind](token, caches=caches)
    assert [cache.lengths.tolist() for cache in (*made["nsa"], *made["dense"], *short, *pages)] == before


@pytest.mark.parametrize("kind", ["nsa", "dense"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_cache_that_its_layer_would_refuse_leaves_the_others(kind: str, autocast: bool) -> None:
    model, token = small_model(kind).eval(), torch.zeros(2, 1, dtype=torch.long)
    computed, other = (torch.bfloat16, torch.float32) if autocast else (torch.float32, torch.bfloat16)
    last = model.blocks[-1].attention
    wrong = {
        f"cache.dtype is {other}; accepted: what the layer computes, {computed}": last.new_cache(2, 9, dtype=other),
        "x.shape.0. is 2; accepted: the cache's 3 rows": last.new_cache(3, 9, dtype=computed),
        "cache.device is .*meta": last.new_cache(2, 9, dtype=computed, device="meta"),
    }
    last.config = replace(last.config, rope_theta=5.0)
    wrong["cache is NSAConfig.*new_cache"] = last.new_cache(2, 9, dtype=computed)
    last.config = model.config.attn
    caches = model.new_cache(2, 9, dtype=computed)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for message, cache in wrong.items():
            with pytest.raises(ValueError, match=message):
                model(token, caches=[*caches[:-1], cache])
        assert caches[0].lengths.tolist() == [0, 0]
        model(token, caches=caches)


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_a_hook_may_cast_a_layer_to_the_dtype_of_its_cache(kind: str) -> None:
    """As layers that are stored in half precision, or elsewhere, and cast or moved for each call."""
    model, token = small_model(kind).eval(), torch.zeros(2, 1, dtype=torch.long)
    caches = model.new_cache(2, 9)
    for layer in model.blocks:
        layer.bfloat16().register_forward_pre_hook(lambda layer, _: layer.float() and None)
    with torch.no_grad():
        model(token, caches=caches)
    assert caches[-1].lengths.tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_an_attention_may_be_wrapped_or_an_mlp_replaced(kind: str) -> None:
    """As `torch.compile(layer.attention)` wraps it: the class of the module says nothing of its cache."""

    class Wrapped(nn.Module):
        def __init__(self, wrapped: nn.Module) -> None:
            super().__init__()
            self.wrapped = wrapped

        def forward(self, *args: Any, **given: Any) -> Any:
            return self.wrapped(*args, **given)

    model, tokens = small_model(kind), torch.arange(9)[None]
    caches = model.new_cache(1, 16)
    layer = model.blocks[0]
    layer.attention = Wrapped(layer.attention)  # type: ignore[assignment]
    layer.mlp = nn.Identity()  # type: ignore[assignment]
    with torch.no_grad():
        found = torch.cat([model(part, caches=caches) for part in tokens.split(3, dim=1)], dim=1)
        torch.testing.assert_close(found, model(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["static", "max_rollback"])
def test_options_of_a_cache_are_checked(kind: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is None"):
        small_model(kind).new_cache(1, 8, **{name: None})


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_activations_gives_the_same_gradients(kind: str) -> None:
    tokens, targets = repeating(2, 24, period=8)
    gradients = []
    for recompute in (False, True):
        model = small_model(kind).train()
        model.recompute = recompute
        model(tokens, targets).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_parameter_counts_are_those_of_the_model(kind: str, tied: bool) -> None:
    model = small_model(kind, tie_embeddings=tied)
    counts = model.parameter_counts()
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert counts["embedding"] == 16 * 32
    assert counts["head"] == (0 if tied else 16 * 32)
    assert counts["mlp"] == 2 * 3 * 32 * 64
    assert counts["norm"] == 5 * 32


def test_flops_of_a_dense_model_are_its_products() -> None:
    model, length = small_model("dense"), 64
    per_layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64 + (length + 1) / 2 * 2 * (16 + 16)
    forward = 2 * (2 * per_layer + 16 * 32)
    assert model.flops_per_token(length, backward=False) == pytest.approx(forward)
    assert model.flops_per_token(length) == pytest.approx(3 * forward)


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_torch_counts_plus_visible_scores(kind: str) -> None:
    """Of 50 tokens: torch counts what is multiplied with a weight, but nothing inside our ops."""
    model, length = small_model(kind), 50
    # Torch counts inside its own attention; with `cu_seqlens` the scores of the dense layers are an op of ours too.
    varlen = torch.tensor([0, length], dtype=torch.int32) if kind == "dense" else None
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(16, (1, length)), cu_seqlens=varlen)
    seen = sum(len(keys_seen(model, kind, t)) for t in range(length))
    # Two layers, two heads, keys and values of 16, two operations each.
    expected = counter.get_total_flops() + 2 * 2 * seen * (16 + 16) * 2
    assert length * model.flops_per_token(length, backward=False) == pytest.approx(expected)


def keys_seen(model: LM, kind: str, t: int) -> list[object]:
    """Every key that query `t` is multiplied with, named one by one."""
    before = range(t + 1)
    if kind == "nsa":
        blocks = [("block", i) for i in range(t + 1) if i * 4 + 8 - 1 <= t]
        # Four blocks of eight tokens, or all there are; the query's own block ends at the query.
        own = t // 8
        selected = range(own + 1) if own < 4 else [0, 1, own - 1, own]
        attended = [("selected", i) for block in selected for i in range(block * 8, block * 8 + 8) if i <= t]
        return [*blocks, *attended, *(("window", i) for i in before if i > t - 8)]
    if kind == "dense":
        return list(before)
    near = [i for i in before if i > t - 8]
    if kind == "sliding":
        return list(near)
    if kind == "longformer":
        return [i for i in before if i < 4 or i in near]
    attention = model.blocks[0].attention
    assert isinstance(attention, BigBirdAttention)
    blocks = attention.blocks_seen(torch.tensor(t // 4)).tolist()
    return [i for i in before if i // 4 in blocks]


def test_flops_by_part_add_up_over_a_mixture() -> None:
    mixture = ("nsa", "sliding", "sliding", "dense")
    model = small_model(mixture, n_layers=4)
    parts = model.flops_by_part(50)
    assert list(parts) == ["nsa", "sliding", "dense", "mlp", "head"]
    assert sum(parts.values()) == model.flops_per_token(50)
    for kind, layers in {"nsa": 1, "sliding": 2, "dense": 1}.items():
        assert parts[kind] == pytest.approx(layers / 2 * small_model(kind).flops_by_part(50)[kind])


def test_sparse_attention_costs_less_than_dense_when_long() -> None:
    with torch.device("meta"):
        models = {kind: LM(replace(PRESETS["125m"], attention=kind)) for kind in KINDS}
    dense = models.pop("dense")
    for kind, model in models.items():
        assert model.flops_per_token(65536) < 0.5 * dense.flops_per_token(65536), kind
        read, all_read = (m.kv_bytes_read(65536, dtype=torch.bfloat16) for m in (model, dense))
        assert read < 0.1 * all_read, kind


@pytest.mark.parametrize("kind", KINDS)
def test_cache_bytes_are_those_of_a_real_cache(kind: str) -> None:
    model = small_model(kind)
    caches = model.new_cache(3, 50, dtype=torch.bfloat16)
    assert model.kv_bytes(50, batch_size=3, dtype=torch.bfloat16) == sum(cache.bytes_used() for cache in caches)
    # In two layers each token read is 16 + 16 numbers of one group, two bytes each.
    read = model.kv_bytes_read(50, batch_size=3, dtype=torch.bfloat16)
    assert read == 3 * 2 * len(keys_seen(model, kind, 49)) * 32 * 2


def test_a_further_token_adds_to_a_cache_what_is_kept_of_it() -> None:
    """In each of two layers 16 + 16 numbers of four bytes; NSA also keeps one compressed pair for four tokens."""
    a_token = 2 * 32 * 4
    expected = {"nsa": a_token * 1.25, "dense": a_token, "sliding": 0, "longformer": 0, "bigbird": a_token}
    assert {kind: small_model(kind).kv_bytes_per_token() for kind in KINDS} == expected


@pytest.mark.parametrize("attention", ["dense", ("nsa", "longformer")])
def test_config_survives_plain_types(attention: str | tuple[str, ...]) -> None:
    config = replace(PRESETS["tiny"], attention=attention, tie_embeddings=False, window=64)
    values = json.loads(json.dumps(config.to_dict()))
    assert values == config.to_dict()
    assert LMConfig.from_dict(values) == config


def test_a_config_from_before_the_alternatives_is_read() -> None:
    values = PRESETS["125m"].to_dict()
    for name in ("window", "n_global", "block", "n_random", "random_seed"):
        del values[name]
    assert LMConfig.from_dict(values) == PRESETS["125m"]


def test_a_config_that_lacks_something_is_named() -> None:
    values = PRESETS["tiny"].to_dict()
    del values["attn"]
    with pytest.raises(ValueError, match="attn"):
        LMConfig.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "linear"}, "attention is 'linear'"),
        ({"attention": ("nsa", "linear")}, "attention is .'nsa', 'linear'."),
        ({"attention": ("nsa",)}, "attention is .*n_layers = 2"),
        ({"attention": ["nsa", "dense"]}, "attention is"),
        ({"n_layers": 0}, "n_layers is 0"),
        ({"window": 0}, "window is 0"),
        ({"norm_eps": "abc"}, "norm_eps is 'abc'"),
        ({"norm_eps": -1.0}, "norm_eps is -1.0"),
        ({"tie_embeddings": "never"}, "tie_embeddings is 'never'"),
        ({"n_global": -1}, "n_global is -1"),
        ({"n_random": -1}, "n_random is -1"),
        ({"attention": "bigbird", "window": 100}, "window is 100.*block = 64"),
    ],
)
def test_wrong_config_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PRESETS["tiny"], **changes)


def test_parameters_have_the_names_that_checkpoints_hold() -> None:
    shared = ["q_proj", "k_proj", "v_proj", "o_proj"]
    for kind in KINDS:
        names = {name for name, _ in small_model(kind).blocks[0].attention.named_parameters()}
        assert {f"{name}.weight" for name in shared} <= names
        assert kind == "nsa" or len(names) == len(shared)


def test_dense_attention_refuses_a_backend_that_it_does_not_use() -> None:
    with pytest.raises(ValueError, match="backend is 'triton'"):
        replace(PRESETS["tiny"], attention="dense").with_backend("triton")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_comes_back(kind: str, tied: bool, tmp_path) -> None:
    model = small_model(kind, tie_embeddings=tied)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert load_model(tmp_path, backend="sdpa").config == model.config.with_backend("sdpa")
    tokens = torch.randint(16, (1, 20))
    torch.testing.assert_close(loaded(tokens), model(tokens), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_a_graph_break(kind: str) -> None:
    model = small_model(kind, n_layers=1).train()
    tokens, targets = repeating(2, 40, period=8)
    expected = model(tokens, targets)
    # Inductor is the GPU's business; what is checked here is that one graph holds the forward and one the backward.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    actual = compiled(tokens, targets)
    actual.backward()
    torch.testing.assert_close(actual, expected)


@pytest.mark.slow
def test_layers_compiled_for_training_share_one_graph() -> None:
    """Cached calls, and those without gradients, are not compiled."""
    model, graphs = small_model("nsa", n_layers=3).train(), []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    model.compile_layers(dynamic=False, backend=count)
    tokens = torch.randint(model.config.vocab_size, (1, 40))
    caches = model.new_cache(1, 64)
    for token in tokens[:, :3].split(1, dim=1):
        model(token, caches=caches)
    with torch.no_grad():
        expected = model(tokens, tokens)
    assert not graphs
    loss = model(tokens, tokens)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    # A layer and the loss.
    assert len(graphs) == 2


def test_a_model_with_compiled_layers_can_be_pickled() -> None:
    model = small_model("nsa")
    model.compile_layers(dynamic=False)
    copy = pickle.loads(pickle.dumps(model))
    assert copy.compiled is None
    assert model.compiled is not None
    tokens = torch.randint(model.config.vocab_size, (1, 20))
    assert torch.equal(copy(tokens), model.eval()(tokens))
