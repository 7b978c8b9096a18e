"""What an inspection records is what the layers do, held against the specification."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from generating import small_model

from nsa import NSAConfig, reference
from nsa.attention import NSAAttention
from nsa.data.tokenizer import ByteTokenizer
from nsa.inspection import figure, inspect_model
from nsa.inspection.record import most_attended
from nsa.model import LM
from nsa.reference.visibility import sees_compressed

TEXT = "".join(f"line {index} of a text: näïve ✓\n" for index in range(6))


def small(**changes: object) -> LM:
    model = small_model("nsa", 256)
    if not changes:
        return model
    torch.manual_seed(0)
    return LM(replace(model.config, **changes)).double().eval()  # type: ignore[arg-type]


def test_the_compressed_attention_is_the_reference_s() -> None:
    config = NSAConfig(dim=32, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=4, w=8)
    layer = NSAAttention(config).double()
    x = torch.randn(1, 50, 32, dtype=torch.float64)
    with torch.no_grad():
        q, raw, _, _ = layer.project(x, layer.angles(x, None, None, 0))
        k_cmp, _ = layer.compress_all(raw, None, 0)
        # Values that name their block: what comes out is the attention itself.
        n = k_cmp.shape[1]
        values = torch.eye(n, dtype=torch.float64)[None, :, None].expand(1, n, 2, n)
        weights, _ = reference.compressed_attention(q, k_cmp, values, block=8, stride=4)
        expected = weights[0].unflatten(1, (2, 2)).mean(dim=2)
        blocks, found = most_attended(layer, x, n)
    visible = sees_compressed(q, n, 8, 4, None, None)[0].sum(dim=1)
    assert ((blocks >= 0).sum(dim=2) == visible[:, None]).all()
    whole = torch.zeros(50, 2, n + 1).scatter_(2, blocks.long().where(blocks >= 0, n), found)[..., :n]
    torch.testing.assert_close(whole, expected.float(), atol=1e-5, rtol=1e-4)
    assert (found[..., 1:] <= found[..., :-1]).all()
    few_blocks, few = most_attended(layer, x, 2)
    assert (few_blocks == blocks[..., :2]).all()
    torch.testing.assert_close(few, found[..., :2])


def test_gates_and_selections_are_those_of_the_layers() -> None:
    model = small()
    inspection = inspect_model(model, ByteTokenizer(), TEXT)
    tokens = torch.tensor([list(TEXT.encode())])
    x = model.embedding(tokens)
    with torch.no_grad():
        for index, layer in enumerate(model.blocks):
            _, stats = layer.attention(layer.attention_norm(x), return_stats=True)
            record = inspection.layers[index]
            torch.testing.assert_close(record.gates, stats.gates[0].float())
            assert (record.selected == stats.indices[0]).all()
            x = layer(x)
    assert not any(block.attention._forward_hooks for block in model.blocks)


def test_words_windows_and_blocks_agree_with_the_text() -> None:
    inspection = inspect_model(small(), ByteTokenizer(), TEXT)
    c, token = inspection.config, 70
    assert "".join(inspection.pieces) == TEXT
    blocks = inspection.selected_blocks(token, 1, 0)
    assert blocks[0] == 0
    assert blocks[-1] == token // c.l_sel
    expected = [inspection.text(j * c.l_sel, min((j + 1) * c.l_sel, token + 1)) for j in blocks]
    assert inspection.selected_words(token, 1, 0) == expected
    assert inspection.window(token) == range(token - c.w + 1, token + 1)
    assert inspection.window(2) == range(3)
    for tokens, weight in inspection.compressed(token, 0, 0):
        assert tokens.stop <= token + 1
        assert 0 < weight <= 1
    assert inspection.compressed(3, 0, 0) == []
    assert set(inspection.gates(token, 0, 0)) == {"cmp", "sel", "win"}


def test_reads_are_those_that_the_config_counts() -> None:
    inspection = inspect_model(small(), ByteTokenizer(), TEXT)
    expected = [inspection.config.reads_per_step(t + 1) for t in range(len(inspection.tokens))]
    assert inspection.reads.tolist() == pytest.approx(expected)


def test_a_mixed_model_shows_its_nsa_layers() -> None:
    model = small(attention=("dense", "nsa"))
    assert list(inspect_model(model, ByteTokenizer(), TEXT).layers) == [1]


def test_a_model_without_nsa_is_refused() -> None:
    with pytest.raises(ValueError, match="attention is 'dense'"):
        inspect_model(small_model("dense", 256), ByteTokenizer(), TEXT)


def test_the_text_is_cut_and_an_empty_one_refused() -> None:
    assert len(inspect_model(small(), ByteTokenizer(), TEXT, max_tokens=5).tokens) == 5
    with pytest.raises(ValueError, match=r"tokens .*is 0; accepted: "):
        inspect_model(small(), ByteTokenizer(), "")
    for wrong in (0, -5):
        with pytest.raises(ValueError, match=f"max_tokens is {wrong}"):
            inspect_model(small(), ByteTokenizer(), TEXT, max_tokens=wrong)


def test_the_json_holds_everything() -> None:
    inspection = inspect_model(small(), ByteTokenizer(), TEXT)
    values = json.loads(json.dumps(inspection.to_dict()))
    assert values["tokens"] == inspection.tokens
    assert values["layers"]["1"]["selected"] == inspection.layers[1].selected.tolist()
    assert sum(values["distances"]) == sum(int((r.selected >= 0).sum()) for r in inspection.layers.values())


def test_a_notebook_gets_a_figure() -> None:
    pytest.importorskip("matplotlib")
    titles = [axis.get_title() for axis in figure(inspect_model(small(), ByteTokenizer(), TEXT), layer=0).axes]
    assert any("layer 0, group 0" in title for title in titles)
