"""What a FlashAttention library would not survive is never called: limits of sizes, and assertions on our own calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa.backends.flash.contracts import (
    MAX_GRADIENT_ELEMENTS,
    TORCH,
    Call,
    aligned,
    check_call,
    limits,
    lse_shape,
    rows_in_tiles,
    violations,
)

HOPPER = (9, 0)
# Tensors without storage: shapes, strides and dtypes are all that is read.
ON_META = replace(TORCH, device="meta")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def with_gradients(call: Call) -> Call:
    o = torch.empty_like(call.q)
    return replace(call, do=torch.empty_like(o), o=o, lse=empty(*lse_shape(o), dtype=torch.float32))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any legal call, fixed-length or varlen, forward or backward."""
    groups, heads, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 8)), 8 * draw(st.integers(1, 32))
    n_keys = draw(st.integers(2, 300))
    window = draw(st.none() | st.integers(1, 400))
    if draw(st.booleans()):
        offsets = empty(draw(st.integers(2, 6)), dtype=torch.int32)
        rows = {"q": (n_keys,), "k": (n_keys,), "v": (n_keys,)}
        rest = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_q": n_keys, "max_k": n_keys}
    else:
        batch = draw(st.integers(1, 3))
        rows = {"q": (batch, draw(st.integers(1, n_keys))), "k": (batch, n_keys), "v": (batch, n_keys)}
        rest = {}
    tensors = {name: empty(*x, groups * (heads if name == "q" else 1), head_dim) for name, x in rows.items()}
    call = Call(**tensors, scale=draw(st.floats(1e-3, 10)), window=window, **rest)
    return with_gradients(call) if draw(st.booleans()) else call


@given(calls())
def test_every_legal_call_passes(call: Call) -> None:
    assert violations(call, ON_META, HOPPER) == []


X = empty(2, 9, 4, 64)
FIXED = Call(q=X, k=X, v=X, scale=1.0, window=5)
OFFSETS = empty(3, dtype=torch.int32)
VARLEN = Call(q=X[0], k=X[0], v=X[0], scale=1.0, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS, max_q=9, max_k=9)
BACKWARD = with_gradients(FIXED)
# Calls that a branch must never build.
WRONG: dict[str, Callable[[], Call]] = {
    "mixed dtypes": lambda: replace(FIXED, k=X.half()),
    "another device": lambda: replace(FIXED, v=torch.empty(X.shape, dtype=X.dtype)),
    "no key": lambda: replace(FIXED, k=X[:, :0], v=X[:, :0]),
    "misaligned rows": lambda: replace(FIXED, q=empty(2, 9, 4, 65)[..., 1:]),
    "keys and values of other sizes": lambda: replace(FIXED, v=empty(2, 9, 4, 32)),
    "more key heads than query heads": lambda: replace(FIXED, q=X[:, :, :1]),
    "an empty window": lambda: replace(FIXED, window=0),
    "a window past 32 bits": lambda: replace(FIXED, window=2**32 + 5),
    "a window without a causal mask": lambda: replace(FIXED, causal=False),
    "queries before the first key": lambda: replace(FIXED, k=X[:, :5], v=X[:, :5]),
    "no lse": lambda: replace(BACKWARD, lse=None),
    "an lse with strides": lambda: replace(BACKWARD, lse=empty(2, 9, 4, dtype=torch.float32).mT),
    "offsets in int64": lambda: replace(VARLEN, cu_seqlens_q=OFFSETS.long()),
    "offsets of another count": lambda: replace(VARLEN, cu_seqlens_k=OFFSETS[1:]),
    "no longest sequence": lambda: replace(VARLEN, max_k=None),
    "one query at most, but not each": lambda: replace(VARLEN, max_q=1),
    "a gradient of a cache": lambda: with_gradients(replace(VARLEN, used_k=OFFSETS[1:])),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_call_that_we_must_not_build_is_asserted(wrong: Callable[[], Call]) -> None:
    for call in (FIXED, VARLEN, BACKWARD):
        check_call(call, ON_META)
    with pytest.raises(AssertionError):
        check_call(wrong(), ON_META)


@pytest.mark.parametrize("scale", [1e-60, 1e60, float("nan")])
def test_a_scale_that_fp32_does_not_hold_is_a_violation(scale: float) -> None:
    (sentence,) = violations(replace(FIXED, scale=scale), ON_META, HOPPER)
    assert f"scale is {scale}" in sentence


def reasons(capability: tuple[int, int] = HOPPER, **changes: object) -> str:
    sizes: dict = {"dtype": torch.bfloat16, "head_dim": 64, "n_heads": 8, "n_sequences": 1, "gradient_rows": None}
    return "; ".join(limits(TORCH, capability, **sizes | changes))


def test_limits_follow_the_gpu_and_the_sizes() -> None:
    assert reasons() == ""
    assert "capability is 7.5" in reasons((7, 5))
    assert "float32" in reasons(dtype=torch.float32)
    assert "head_dim is 264" in reasons(head_dim=264)
    for name, count in (("n_sequences", 65_536), ("n_heads", 65_536), ("n_sequences", 0)):
        assert str(count) in reasons(**{name: count})
    assert "shared memory" in reasons((8, 9), head_dim=224, gradient_rows=128)
    for capability, head_dim, rows in (((8, 9), 224, None), ((9, 0), 224, 128), ((8, 9), 256, 128)):
        assert reasons(capability, head_dim=head_dim, gradient_rows=rows) == ""


def test_a_gradient_that_overflows_32_bits_is_a_violation() -> None:
    # 400 * 4 * 10,496 * 128 is the first multiple of a tile past 2^31 (PriorLabs/TabPFN#1184); 2^31 itself passes.
    def found(batch: int, length: int, heads: int, head_dim: int) -> list[str]:
        x = empty(batch, length, heads, head_dim)
        return violations(with_gradients(Call(q=x, k=x, v=x, scale=1.0)), ON_META, HOPPER)

    assert "2^31" in str(found(400, 10_496, 4, 128))
    assert MAX_GRADIENT_ELEMENTS == 128 * 8192 * 16 * 128
    assert found(128, 8192, 16, 128) == []
    # Head dims count in steps of 32, above 192 as 256; short sequences as a tile of 128.
    for head_dim, counted in ((8, 32), (32, 32), (40, 64), (136, 160), (192, 192), (200, 256), (256, 256)):
        most = MAX_GRADIENT_ELEMENTS // (128 * 16 * counted)
        assert found(most, 1, 16, head_dim) == [], head_dim
        assert "2^31" in str(found(most + 1, 1, 16, head_dim)), head_dim
    assert rows_in_tiles(3, 130, varlen=False) == 3 * 256
    assert rows_in_tiles(3, 130, varlen=True) == 130 + 3 * 128


def test_a_window_is_counted_with_the_query_itself() -> None:
    for changes, expected in (
        ({"window": 512}, (511, 0)),
        ({"window": 1}, (0, 0)),
        ({"window": None}, (-1, 0)),
        ({"window": None, "causal": False}, (-1, -1)),
    ):
        assert replace(FIXED, **changes).window_size == expected


def test_a_row_that_starts_between_two_loads_is_not_aligned() -> None:
    buffer = torch.empty(1024, dtype=torch.bfloat16)
    assert aligned(buffer[:512].view(4, 2, 64))
    assert not aligned(buffer[1:513].view(4, 2, 64))
    assert not aligned(torch.empty(4, 2, 65, dtype=torch.bfloat16)[..., :64])
    # Along one element no stride is walked; an expanded dimension has stride 0.
    assert aligned(torch.empty(1, 1, 65, dtype=torch.bfloat16)[..., :64])
    assert aligned(torch.empty(1, 2, 64, dtype=torch.bfloat16).expand(7, -1, -1))


def test_a_call_describes_itself() -> None:
    text = str(BACKWARD)
    for part in ("q=(2, 9, 4, 64):bfloat16:strides(2304, 256, 64, 1)", "window=5", "scale=1", "do=", "lse="):
        assert part in text
