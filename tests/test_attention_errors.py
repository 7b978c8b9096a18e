"""Wrong arguments of an NSAAttention: an error that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import offsets
from layers import FP64, layer, tokens
from torch import Tensor

from nsa import NSAAttention


def whole_mask(batch: int, length: int) -> Tensor:
    return torch.ones(batch, length, dtype=torch.bool)


WRONG = {
    "x_two_dimensions": (r"x\.shape", lambda a, x: a(x[0])),
    "x_empty": (r"x\.shape", lambda a, x: a(x[:, :0])),
    "x_other_dim": (r"x\.shape\[2\]", lambda a, x: a(x[..., :-1])),
    "mask_dtype": (r"attention_mask\.dtype", lambda a, x: a(x, attention_mask=torch.ones(2, 9))),
    "mask_shape": (r"attention_mask\.shape", lambda a, x: a(x, attention_mask=whole_mask(2, 8))),
    "mask_of_one_row": (r"attention_mask\.shape", lambda a, x: a(x, attention_mask=whole_mask(1, 9))),
    "mask_and_documents": (
        "attention_mask",
        lambda a, x: a(x[:1], attention_mask=whole_mask(1, 9), cu_seqlens=offsets((9,))),
    ),
    "documents_in_two_rows": (r"x\.shape\[0\]", lambda a, x: a(x, cu_seqlens=offsets((9,)))),
    "documents_dtype": (r"cu_seqlens\.dtype", lambda a, x: a(x[:1], cu_seqlens=offsets((9,)).long())),
    "documents_total": (r"cu_seqlens\[-1\]", lambda a, x: a(x[:1], cu_seqlens=offsets((4, 4)))),
    "documents_order": ("cu_seqlens", lambda a, x: a(x[:1], cu_seqlens=torch.tensor([0, 5, 3, 9]).int())),
    "documents_start": (r"cu_seqlens\[0\]", lambda a, x: a(x[:1], cu_seqlens=torch.tensor([1, 9]).int())),
    "cache_of_another_config": ("cache", lambda a, x: a(x, cache=layer(w=7).new_cache(2, 20))),
    "cache_of_other_rows": (r"x\.shape\[0\]", lambda a, x: a(x, cache=a.new_cache(3, 20))),
    "cache_and_documents": ("cache", lambda a, x: a(x[:1], cache=a.new_cache(1, 20), cu_seqlens=offsets((9,)))),
    "cache_dtype": ("dtype", lambda a, x: a(x, cache=a.new_cache(2, 20, dtype=torch.float32))),
    "offset_of_other_rows": ("position_offset", lambda a, x: a(x, position_offset=torch.arange(3))),
}


@pytest.mark.parametrize(("name", "call"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_a_value_error_that_names_it(name: str, call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=f"{name}.*accepted"):
        call(layer(), tokens(9, batch=2))


def test_under_autocast_a_cache_must_have_the_autocast_dtype() -> None:
    attn = layer(torch.float32)
    x = tokens(20, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"cache\.dtype is torch\.float32.*accepted.*bfloat16"):
            attn(x, cache=attn.new_cache(1, 20))
        cache = attn.new_cache(1, 20, dtype=torch.bfloat16)
        got = torch.cat([attn(x[:, :9], cache=cache), attn(x[:, 9:], cache=cache)], dim=1)
        whole = attn(x)
    torch.testing.assert_close(got, whole, atol=2e-2, rtol=2e-2)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="backend is 'fast'"):
        layer(backend="fast")


def test_strict_refuses_what_is_not_finite() -> None:
    x = tokens(9)
    x[0, 3, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        layer(strict=True)(x)


WRONG_INPUT = {
    "x-none": ("x", lambda a: a(None)),
    "x-wider-dtype": ("x.dtype", lambda a: a(tokens(9).float())),
    "x-integer": ("x.dtype", lambda a: a(torch.ones(1, 9, a.config.dim, dtype=torch.long))),
    "x-device": ("x.device", lambda a: a(tokens(9).to("meta"))),
    "mask-list": ("attention_mask", lambda a: a(tokens(9), attention_mask=[[1]])),
    "cache-text": ("cache", lambda a: a(tokens(9), cache="c")),
    "offset-float": ("position_offset", lambda a: a(tokens(9), position_offset=1.5)),
    "offset-bool": ("position_offset", lambda a: a(tokens(9), position_offset=True)),
    "offset-text": ("position_offset", lambda a: a(tokens(9), position_offset="3")),
    "offset-float-tensor": ("position_offset", lambda a: a(tokens(9), position_offset=torch.tensor([1.5]))),
    "offset-negative": ("position_offset", lambda a: a(tokens(9, 2), position_offset=torch.tensor([-5, 3]))),
    "offset-device": ("position_offset", lambda a: a(tokens(9), position_offset=torch.ones(1).int().to("meta"))),
    "config-dict": ("config", lambda a: NSAAttention({"dim": 3})),
}


@pytest.mark.parametrize(("name", "call"), WRONG_INPUT.values(), ids=WRONG_INPUT.keys())
def test_wrong_layer_input_is_a_value_error_that_names_it(name: str, call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=f"{name}.*accepted"):
        call(layer())


@pytest.mark.parametrize(
    ("named", "layer_dtype", "dtype"),
    [("x.dtype", torch.float32, FP64), ("the layer's dtype", FP64, torch.float32)],
    ids=["x", "layer"],
)
def test_fp64_under_autocast_is_refused_by_name(named: str, layer_dtype: torch.dtype, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=f"{named} is torch.float64; accepted"):
        layer().to(layer_dtype)(tokens(9).to(dtype))
