"""What a branch is described by: its fields, from which ops, checks and layers take their hyperparameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from op_arguments import op_of

from nsa import NSAAttention, NSAConfig, attention, geometry, ops, reference, sequences
from nsa.functional import attention_kwargs, hyperparameters_of
from nsa.sequences import ATTENTION_NAMES, Compressed, Pooling, Selected, Selection, Sliding, hyperparameters

STAGES = {
    "compress_mean": Pooling,
    "gather_blocks": Pooling,
    "compressed_attention": Compressed,
    "select_blocks": Selection,
    "selected_attention": Selected,
    "sliding_attention": Sliding,
}
CONFIG = NSAConfig(
    dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=8, l=8, d=4, l_sel=16, n_sel=5, n_init=1, n_local=3, w=7
)


def integers_of(function: Any) -> list[str]:
    """The names of a function's integers."""
    return [name for name, x in inspect.signature(function).parameters.items() if x.annotation == "int"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_its_branchs_hyperparameters_everywhere(stage: str) -> None:
    names = list(hyperparameters(STAGES[stage]))
    assert [x.name for x in op_of(stage)._schema.arguments if str(x.type) == "int"] == names
    assert integers_of(getattr(ops, stage)) == names
    assert sorted(integers_of(getattr(reference, stage))) == sorted(names)


def test_the_attention_has_every_branchs_hyperparameters() -> None:
    names = list(ATTENTION_NAMES)
    assert set(names) == {name for kind in STAGES.values() for name in hyperparameters(kind)}
    for op in ("attention", "attention_backward"):
        assert [x.name for x in op_of(op)._schema.arguments if str(x.type) == "int"] == names
    assert integers_of(ops.attention) == names


def test_a_decode_step_takes_every_hyperparameter() -> None:
    pytest.importorskip("triton")
    from nsa.backends.triton.decode import Hyperparameters

    assert Hyperparameters._fields == (*ATTENTION_NAMES, "scale", "max_len", "branch")


def test_a_config_holds_every_hyperparameter() -> None:
    expected = {"block": 8, "stride": 4, "select_block": 16, "n_select": 5, "n_init": 1, "n_local": 3, "window": 7}
    routing = {"backend": "auto", "strict": False}
    assert attention_kwargs(CONFIG) == expected | routing
    assert dict(zip(ATTENTION_NAMES, hyperparameters_of(CONFIG), strict=True)) == expected
    assert attention_kwargs(CONFIG, hyperparameters(Sliding)) == {"window": 7} | routing


def test_a_varlen_layer_locates_its_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, values and their angles share it, in each pass."""
    calls: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(geometry, name)

        def call(*given: Any) -> Any:
            calls.append(name)
            return function(*given)

        return call

    for name in ("compressed_starts", "compressed_of_tokens"):
        monkeypatch.setattr(sequences, name, counted(name))
    monkeypatch.setattr(attention, "compressed_starts", counted("compressed_starts"))
    x, cu_seqlens = torch.randn(1, 37, 32, requires_grad=True), torch.tensor([0, 5, 37], dtype=torch.int32)
    y = NSAAttention(CONFIG)(x, cu_seqlens=cu_seqlens)
    assert calls == ["compressed_starts"]
    y.sum().backward()
    assert sorted(calls[1:]) == ["compressed_of_tokens", "compressed_starts"]
