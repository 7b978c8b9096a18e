"""The statistics of an NSAAttention: counted one by one, and not computed before they are read."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import offsets
from hypothesis import given
from hypothesis import strategies as st
from layers import layer, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import nsa.attention
from nsa import NSAAttention, NSAConfig, NSAStats
from nsa.config import BRANCHES
from nsa.geometry import n_compressed


def test_gate_figures_are_plain_averages() -> None:
    _, stats = layer()(tokens(12, batch=2), return_stats=True)
    for branch, name in enumerate(BRANCHES):
        values = stats.gates[..., branch].flatten().tolist()
        assert stats.gate_mean[name] == pytest.approx(sum(values) / len(values), abs=1e-6)
        bits = [-g * math.log2(g) - (1 - g) * math.log2(1 - g) for g in values]
        assert stats.gate_entropy[name] == pytest.approx(sum(bits) / len(bits), abs=1e-5)


def test_a_forced_gate_has_no_entropy() -> None:
    _, stats = layer(force_branch="sel")(tokens(12), return_stats=True)
    assert stats.gate_entropy == pytest.approx(dict.fromkeys(BRANCHES, 0.0), abs=1e-4)


@pytest.mark.parametrize("lengths", [None, (20, 1, 29)], ids=["fixed", "varlen"])
def test_selection_and_reads_are_counted_query_by_query(lengths: tuple[int, ...] | None) -> None:
    attn = layer(torch.float32)
    c = attn.config
    x = tokens(50, batch=1 if lengths else 2, dtype=torch.float32)
    _, stats = attn(x, cu_seqlens=None if lengths is None else offsets(lengths), return_stats=True)
    position = [t for n in lengths or (50,) for t in range(n)]
    distances: Counter[int] = Counter()
    for row in stats.indices.tolist():
        for t, groups in zip(position, row, strict=True):
            distances.update(t // c.l_sel - block for group in groups for block in group if block >= 0)
    counted = stats.selected_distance.tolist()
    assert counted == [distances[i] for i in range(len(counted))]
    assert sum(counted) == distances.total()
    reads = [
        read
        for row in stats.indices.tolist()
        for t, groups in zip(position, row, strict=True)
        for read in keys_read(c, t, groups)
    ]
    assert stats.reads_per_step == pytest.approx(sum(reads) / len(reads))


def keys_read(c: NSAConfig, t: int, groups: list[list[int]]) -> list[int]:
    """How many keys query `t` reads in each group, counted one by one from the indices of the selected blocks."""
    compressed = [i for i in range(t + 1) if i * c.d + c.l - 1 <= t]
    window = [i for i in range(t + 1) if i > t - c.w]
    selected = [
        {i for block in blocks if block >= 0 for i in range(block * c.l_sel, (block + 1) * c.l_sel) if i <= t}
        for blocks in groups
    ]
    return [len(compressed) + len(tokens) + len(window) for tokens in selected]


@given(st.data())
def test_reads_per_step_is_what_the_last_query_reads(data: st.DataObject) -> None:
    d = data.draw(st.integers(1, 3))
    n_init, n_local = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    hyperparameters = {
        "d": d,
        "l": d * data.draw(st.integers(1, 3)),
        "l_sel": d * data.draw(st.integers(1, 4)),
        "n_sel": max(1, n_init + n_local) + data.draw(st.integers(0, 2)),
        "w": data.draw(st.integers(1, 20)),
    }
    c = NSAConfig(dim=16, n_heads=4, n_kv_groups=2, d_k=4, d_v=4, n_init=n_init, n_local=n_local, **hyperparameters)
    length = data.draw(st.integers(1, 40))
    _, stats = NSAAttention(c)(torch.randn(1, length, 16), return_stats=True)
    read = max(keys_read(c, length - 1, stats.indices[0, -1].tolist()))
    said = c.reads_per_step(length)
    formula = n_compressed(length, c.l, c.d) + c.n_sel * c.l_sel + min(c.w, length)
    assert read <= said <= formula
    # Without local blocks the scores decide whether the query's own, partial block is one of the selected.
    own_is_certain = n_local > 0 or c.n_sel * c.l_sel >= length
    assert read == said or not own_is_certain


def test_statistics_of_a_padded_batch_are_those_of_its_tokens() -> None:
    attn = layer()
    x = tokens(30)
    mask = torch.ones(1, 30, dtype=torch.bool)
    mask[:, :13] = False
    _, padded = attn(x, attention_mask=mask, return_stats=True)
    _, alone = attn(x[:, 13:], return_stats=True)
    assert padded.gate_mean == pytest.approx(alone.gate_mean)
    assert padded.gate_entropy == pytest.approx(alone.gate_entropy)
    assert padded.selected_distance.tolist() == alone.selected_distance.tolist()
    assert padded.reads_per_step == pytest.approx(alone.reads_per_step)


class Recorder(TorchDispatchMode):
    """Every torch op that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_statistic_is_computed_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = layer()
    x = tokens(30)
    # The first call makes RoPE's table.
    attn(x)
    with Recorder() as off:
        y = attn(x)
    with Recorder() as on:
        same, stats = attn(x, return_stats=True)
    assert torch.equal(y, same)
    assert [name for name in on.names if "detach" not in name] == [name for name in off.names if "detach" not in name]
    with Recorder() as read:
        assert stats.gate_mean
    assert read.names

    def refuse(*args: Any) -> NSAStats:
        raise AssertionError("statistics made though not asked for")

    monkeypatch.setattr(nsa.attention, "NSAStats", refuse)
    assert torch.equal(attn(x), y)
    with pytest.raises(AssertionError, match="not asked for"):
        attn(x, return_stats=True)


def test_statistics_keep_no_graph() -> None:
    _, stats = layer()(tokens(12), return_stats=True)
    assert not stats.gates.requires_grad
    assert not stats.indices.requires_grad


def test_statistics_of_a_batch_that_is_all_padding_are_zero() -> None:
    mask = torch.zeros(1, 9, dtype=torch.bool)
    _, stats = layer()(tokens(9), attention_mask=mask, return_stats=True)
    nothing = dict.fromkeys(("cmp", "sel", "win"), 0.0)
    assert stats.gate_mean == nothing
    assert stats.gate_entropy == nothing
    assert stats.selected_distance.sum() == 0
    assert stats.reads_per_step == 0
