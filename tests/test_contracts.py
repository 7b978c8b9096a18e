"""Every input that a FlashAttention library would not survive is refused with a sentence before it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from nsa.backends.contracts import (
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    MOST_ELEMENTS,
    TORCH,
    Call,
    aligned,
    limits,
    rows_in_tiles,
    value_violations,
    violations,
)

HOPPER = (9, 0)
# Tensors without storage: shapes, strides and dtypes are all that the cheap checks read.
ON_META = replace(TORCH, device="meta")
ON_CPU = replace(TORCH, device="cpu")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=device)


@st.composite
def dense_calls(draw: st.DrawFn, *, backward: bool | None = None) -> Call:
    """Any legal dense call."""
    batch, groups, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    n_keys = draw(st.integers(1, 300))
    causal = draw(st.booleans())
    n_queries = draw(st.integers(1, n_keys if causal else 300))
    width, dtype = 8 * draw(st.integers(1, 32)), draw(st.sampled_from([torch.float16, torch.bfloat16]))
    q = empty(batch, n_queries, groups * heads, width, dtype=dtype)
    k, v = (empty(batch, n_keys, groups, width, dtype=dtype) for _ in range(2))
    call = Call(
        q=q,
        k=k,
        v=v,
        scale=draw(st.floats(1e-3, 10)),
        causal=causal,
        window=draw(st.none() | st.integers(1, 400)) if causal else None,
    )
    return with_gradients(call) if (draw(st.booleans()) if backward is None else backward) else call


@st.composite
def varlen_calls(
    draw: st.DrawFn, *, backward: bool | None = None, device: str = "meta", room: bool | None = None
) -> Call:
    """Any legal call with offsets, empty sequences and rows after the last one among them."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any))
    groups, heads, width = draw(st.integers(1, 4)), draw(st.integers(1, 8)), 8 * draw(st.integers(1, 32))
    room_after = draw(st.booleans()) if room is None else room
    total = sum(lengths) + (draw(st.integers(0, 3)) if room_after else 0)
    q = empty(total, groups * heads, width, device=device)
    k, v = (empty(total, groups, width, device=device) for _ in range(2))
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    longest = max(*lengths, 2) + draw(st.integers(0, 50))
    call = Call(
        q=q,
        k=k,
        v=v,
        scale=1.0,
        window=draw(st.none() | st.integers(1, 60)),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_q=longest,
        max_k=longest,
        room_after=room_after,
    )
    return with_gradients(call) if (draw(st.booleans()) if backward is None else backward) else call


@st.composite
def cached_calls(draw: st.DrawFn) -> Call:
    """Any legal step: a few queries a row, on the first keys of a row with room for more."""
    queries, causal = draw(st.integers(1, 5)), draw(st.booleans())
    used = draw(st.lists(st.integers(queries if causal else 0, 30), min_size=1, max_size=4))
    rows, room = len(used), max(*used, 1) + draw(st.integers(0, 5))
    groups, width = draw(st.integers(1, 4)), 8 * draw(st.integers(1, 8))
    starts = torch.arange(rows + 1).int()
    k, v = (empty(rows * room, groups, width, device="cpu") for _ in range(2))
    return Call(
        q=empty(rows * queries, 2 * groups, width, device="cpu"),
        k=k,
        v=v,
        scale=1.0,
        causal=causal,
        window=draw(st.none() | st.integers(1, 60)) if causal else None,
        cu_seqlens_q=starts * queries,
        cu_seqlens_k=starts * room,
        used_k=torch.tensor(used).int(),
        max_q=queries,
        max_k=draw(st.integers(max(*used, 1), room)),
    )


def forward_only(call: Call) -> Call:
    return replace(call, do=None, o=None, lse=None)


def with_gradients(call: Call) -> Call:
    q, v = call.q, call.v
    o = q.new_empty(*q.shape[:-1], v.shape[-1])
    rows = (q.shape[1], q.shape[0]) if call.varlen else (q.shape[0], q.shape[2], q.shape[1])
    return replace(call, do=torch.empty_like(o), o=o, lse=q.new_empty(rows, dtype=torch.float32))


@given(st.one_of(dense_calls(), varlen_calls()))
def test_every_legal_call_passes(call: Call) -> None:
    assert violations(call, ON_META, HOPPER) == []


@given(st.one_of(varlen_calls(device="cpu", backward=False), cached_calls()))
def test_legal_offsets_pass_by_value_too(call: Call) -> None:
    assert violations(call, ON_CPU, HOPPER) == []
    assert value_violations(call, ON_CPU) == []


def misaligned(x: Tensor) -> Tensor:
    """The same shape, rows an odd number of elements apart."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., :-1]


def strided(x: Tensor) -> Tensor:
    """The same shape, the last dimension not contiguous."""
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]


# What may be wrong with any call, and a word of the sentence that says so.
WRONG: dict[str, tuple[Callable[[Call], Call], str]] = {
    "fp32": (lambda c: all_to(c, torch.float32), "fp16 and bf16"),
    "mixed dtypes": (
        lambda c: replace(c, k=c.k.half() if c.k.dtype == torch.bfloat16 else c.k.bfloat16()),
        "one dtype",
    ),
    "width not a multiple of 8": (lambda c: widened(c, 7), "multiples of 8"),
    "width above 256": (lambda c: widened(c, 264), "at most 256"),
    "values of another width": (lambda c: revalued(c, 264 - c.v.shape[-1]), "equal widths|at most"),
    "keys of another width than queries": (lambda c: replace(c, k=repeated_width(c.k)), "equal widths"),
    "values of another count": (lambda c: replace(c, v=c.v.new_empty(c.v.shape[0] + 1, *c.v.shape[1:])), "equal"),
    "one more head": (lambda c: regrouped(c), "multiple of the second"),
    "rows apart by an odd number": (lambda c: forward_only(replace(c, q=misaligned(wide_enough(c.q)))), "clone"),
    "last dimension strided": (lambda c: replace(c, v=strided(c.v)), "clone"),
    "another device": (lambda c: replace(c, k=torch.empty(c.k.shape, dtype=c.k.dtype)), "move it"),
    "no window at all": (lambda c: replace(c, causal=True, window=0), "at least 1"),
    "half a key in a window": (lambda c: replace(c, causal=True, window=2.5), "an integer"),
    "a window past 32 bits": (lambda c: replace(c, causal=True, window=2**32 + 5), "at most 2147483647"),
    "a forward pass with results": (lambda c: replace(with_gradients(c), do=None), "without do"),
    "a window that looks ahead": (lambda c: replace(c, causal=False, window=5), "look ahead"),
    "no scale": (lambda c: replace(c, scale=float("nan")), "scale"),
    "a scale past fp32": (lambda c: replace(c, scale=10**400), "scale is 1000"),
    "a scale that fp32 rounds to zero": (lambda c: replace(c, scale=1e-60), "scale is 1e-60"),
    "a scale that is a yes": (lambda c: replace(c, scale=True), "scale is True"),
    "a nested tensor": (
        lambda c: replace(c, v=torch.nested.nested_tensor([torch.empty(2)], layout=torch.jagged)),
        "v is a nested tensor",
    ),
    "a list": (lambda c: replace(c, k=[1.0]), "k is a list"),
    "a scale of no number": (lambda c: replace(c, scale=None), "scale is None"),
    "a sparse tensor": (lambda c: replace(c, v=torch.empty(c.v.shape, dtype=c.v.dtype).to_sparse()), "to_dense"),
    "no token": (lambda c: replace(c, k=c.k[..., :0, :, :], v=c.v[..., :0, :, :]), "do not call"),
    "dimensions lost": (lambda c: replace(c, q=c.q[0]), "dimensions"),
}


# What may be wrong with the normaliser that a backward pass gets: the kernels walk it as it must be.
WRONG_LSE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "on another device": (lambda lse: torch.empty(lse.shape), "lse is on cpu"),
    "in another order": (lambda lse: lse.mT.contiguous().mT, "lse has strides"),
    "one number for all": (lambda lse: lse.new_empty(1).expand(lse.shape), "lse has strides"),
    "rounded": (lambda lse: lse.bfloat16(), "in fp32"),
    "of another shape": (lambda lse: lse[..., None], "as the forward pass returned it"),
}


@pytest.mark.parametrize(("change", "words"), WRONG_LSE.values(), ids=WRONG_LSE.keys())
@given(call=st.one_of(dense_calls(backward=True), varlen_calls(backward=True)))
def test_every_wrong_normaliser_is_caught(change: Callable[[Tensor], Tensor], words: str, call: Call) -> None:
    assert call.lse is not None
    assume(min(call.lse.shape[-2:]) > 1)  # a single row or column is contiguous in every order
    assert any(words in sentence for sentence in violations(replace(call, lse=change(call.lse)), ON_META, HOPPER))


# What a call without offsets takes and never looks at.
UNREAD: dict[str, Callable[[Call], Call]] = {
    "used_k": lambda c: replace(c, used_k=empty(c.q.shape[0], dtype=torch.int32)),
    "used_k is": lambda c: replace(c, used_k=torch.zeros(99)),
    "max_q": lambda c: replace(c, max_q=c.q.shape[1]),
    "max_k": lambda c: replace(c, max_k=-7),
    "room_after": lambda c: replace(c, room_after=True),
}


@pytest.mark.parametrize(("name", "change"), UNREAD.items(), ids=UNREAD.keys())
@given(call=dense_calls())
def test_what_a_dense_call_would_not_read_is_caught(name: str, change: Callable[[Call], Call], call: Call) -> None:
    assert any(sentence.startswith(name) for sentence in violations(change(call), ON_META, HOPPER))


def all_to(call: Call, dtype: torch.dtype) -> Call:
    return replace(call, **{name: x.to(dtype) for name, x in call.tensors.items()})


def widened(call: Call, width: int) -> Call:
    return replace(call, **{name: x.new_empty(*x.shape[:-1], width) for name, x in call.tensors.items()})


def revalued(call: Call, width: int) -> Call:
    changed = {name: x for name, x in call.tensors.items() if name in ("v", "do", "o")}
    return replace(call, **{name: x.new_empty(*x.shape[:-1], width) for name, x in changed.items()})


def repeated_width(k: Tensor) -> Tensor:
    return k.new_empty(*k.shape[:-1], k.shape[-1] + 8)


def regrouped(call: Call) -> Call:
    heads = call.q.shape[-2] + 1
    k, v = (x.new_empty(*x.shape[:-2], heads, x.shape[-1]) for x in (call.k, call.v))
    return replace(call, k=k, v=v)


def wide_enough(x: Tensor) -> Tensor:
    """At least two heads or tokens: a stride along one element is never walked."""
    return x if max(x.shape[:-1]) > 1 else x.new_empty(*x.shape[:-2], 2, x.shape[-1])


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG.keys())
@given(call=st.one_of(dense_calls(), varlen_calls()))
def test_every_violation_is_a_sentence_with_the_fix(change: Callable[[Call], Call], words: str, call: Call) -> None:
    found = violations(change(call), ON_META, HOPPER)
    assert found
    assert any(word in sentence for sentence in found for word in words.split("|")), found
    assert all(": " in sentence or ";" in sentence for sentence in found), "what is wrong, then what to do"


WRONG_OFFSETS: dict[str, tuple[Callable[[Call], Call], str]] = {
    "int64": (lambda c: replace(c, cu_seqlens_q=c.cu_seqlens_q.long()), "int32"),
    "on another device": (lambda c: replace(c, cu_seqlens_k=torch.zeros(c.n_sequences + 1).int()), "q's device"),
    "of another count": (lambda c: replace(c, cu_seqlens_k=c.cu_seqlens_k[1:]), "shape"),
    "strided": (lambda c: replace(c, cu_seqlens_q=empty(2 * c.n_sequences + 2, dtype=torch.int32)[::2]), "contiguous"),
    "only one": (lambda c: replace(c, cu_seqlens_k=None), "both"),
    "a list": (lambda c: replace(c, cu_seqlens_q=[0, 5]), "cu_seqlens_q is a list: pass a tensor"),
    "nested": (
        lambda c: replace(c, cu_seqlens_k=torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)),
        "a nested tensor",
    ),
    "used keys in a list": (lambda c: used(c, [5]), "used_k is a list"),
    "no longest": (lambda c: replace(c, max_q=None), "upper bound"),
    "longest of zero": (lambda c: replace(c, max_k=0), "upper bound"),
    "longest past 32 bits": (lambda c: replace(c, max_q=2**40), "up to 2147483647"),
    "longest in fractions": (lambda c: replace(c, max_k=64.0), "upper bound"),
    "used keys in int64": (lambda c: used(c, empty(c.n_sequences, dtype=torch.int64)), "used_k is torch.int64"),
    "used keys of another count": (lambda c: used(c, empty(c.n_sequences + 1, dtype=torch.int32)), "used_k has shape"),
    "used keys elsewhere": (lambda c: used(c, torch.zeros(c.n_sequences).int()), "used_k is on cpu"),
    "keys of a cache in training": (
        lambda c: with_gradients(replace(c, used_k=empty(c.n_sequences, dtype=torch.int32))),
        "no gradient",
    ),
    "one query at most, but not each": (
        lambda c: forward_only(replace(c, max_q=1, q=c.q.new_empty(c.n_sequences + 1, *c.q.shape[1:]))),
        "max_q=2",
    ),
}


@pytest.mark.parametrize(("change", "words"), WRONG_OFFSETS.values(), ids=WRONG_OFFSETS.keys())
@given(call=varlen_calls())
def test_every_wrong_offset_tensor_is_caught_without_reading_it(
    change: Callable[[Call], Call], words: str, call: Call
) -> None:
    assert any(words in sentence for sentence in violations(change(call), ON_META, HOPPER))


@given(call=cached_calls())
def test_what_is_wrong_with_offsets_is_told_in_their_own_order(call: Call) -> None:
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    assert call.used_k is not None
    long = replace(
        call,
        cu_seqlens_q=call.cu_seqlens_q.long(),
        cu_seqlens_k=call.cu_seqlens_k.long(),
        used_k=call.used_k.long(),
    )
    told = [f"{name} is torch.int64: pass int32" for name in ("cu_seqlens_q", "cu_seqlens_k", "used_k")]
    assert violations(long, ON_CPU, HOPPER) == told


@given(call=cached_calls())
def test_the_keys_in_use_and_not_their_room_are_held_against_the_longest(call: Call) -> None:
    assert call.used_k is not None
    longest = max(call.used_k.tolist())
    assume(longest > 0)
    (sentence,) = value_violations(replace(call, max_k=longest - 1), ON_CPU)
    assert sentence == f"a sequence of used_k is {longest} long, above max {longest - 1}: pass its length"


def used(call: Call, used_k: Tensor) -> Call:
    """A cache's keys, in a forward pass."""
    return forward_only(replace(call, used_k=used_k))


def moved(call: Call, name: str, index: int, by: int) -> Call:
    offsets = getattr(call, name).clone()
    offsets[index] += by
    return replace(call, **{name: offsets})


WRONG_VALUES: dict[str, tuple[Callable[[Call], Call], str]] = {
    "start": (lambda c: moved(c, "cu_seqlens_q", 0, -1), "start at 0"),
    "backwards": (lambda c: moved(c, "cu_seqlens_k", 0, 1000), "non-decreasing"),
    "past the end": (lambda c: moved(c, "cu_seqlens_k", -1, 1000), "past the"),
    "rows of nobody": (lambda c: replace(c, q=c.q.new_empty(c.q.shape[0] + 1, *c.q.shape[1:])), "room_after"),
    "keys of nobody": (lambda c: replace(c, k=c.k.new_empty(c.k.shape[0] + 1, *c.k.shape[1:])), "room_after"),
    "no sequence": (lambda c: replace(c, cu_seqlens_q=c.cu_seqlens_q[:1]), "one number more"),
    "nothing": (lambda c: replace(c, cu_seqlens_k=c.cu_seqlens_k[:0]), "one number more"),
    "a list": (lambda c: replace(c, cu_seqlens_k=c.cu_seqlens_k.tolist()), "cu_seqlens_k is a list"),
    "queries before the first key": (lambda c: fewer_keys(c), "see none"),
    "queries before the first key in use": (lambda c: replace(c, used_k=c.cu_seqlens_k.diff().int() - 1), "see none"),
    "longer than said": (lambda c: replace(c, max_k=max(c.cu_seqlens_k.diff().tolist()) - 1), "above max"),
    "more than there is room for": (
        lambda c: replace(c, used_k=c.cu_seqlens_k.diff().int() + 1),
        "in a sequence of",
    ),
}


@pytest.mark.parametrize(("change", "words"), WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
@given(call=varlen_calls(device="cpu", backward=False, room=False))
def test_every_wrong_offset_value_is_caught(change: Callable[[Call], Call], words: str, call: Call) -> None:
    assert any(words in sentence for sentence in value_violations(change(call), ON_CPU))


def fewer_keys(call: Call) -> Call:
    """The last sequence that has a query loses a key."""
    assert call.cu_seqlens_q is not None
    offsets = call.cu_seqlens_q.clone()
    offsets[offsets == offsets[-1]] -= 1
    return replace(call, k=call.k[1:], v=call.v[1:], cu_seqlens_k=offsets)


@pytest.mark.parametrize("contract", [FLASH_ATTN_3, FLASH_ATTN_4], ids=lambda contract: contract.library)
def test_an_empty_sequence_is_caught_where_a_library_does_not_survive_it(contract) -> None:
    offsets = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
    x = empty(9, 2, 64, device="cpu")
    call = Call(q=x, k=x, v=x, scale=1.0, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_q=5, max_k=5)
    assert any("empty sequence" in sentence for sentence in value_violations(call, contract))
    assert value_violations(call, TORCH) == []


@given(dense_calls(backward=True))
def test_every_missing_gradient_input_is_caught(call: Call) -> None:
    assert call.do is not None
    assert any("lse is missing" in x for x in violations(replace(call, lse=None), ON_META, HOPPER))
    assert any("o is None" in x for x in violations(replace(call, o=None), ON_META, HOPPER))
    short = replace(call, do=call.do.new_empty(call.do.shape[0] + 1, *call.do.shape[1:]))
    assert any("one row for every query" in x for x in violations(short, ON_META, HOPPER))


def test_the_gradient_that_overflows_32_bits_is_caught_and_the_largest_that_does_not_passes() -> None:
    # 400 * 4 * 10,496 * 128 is the first multiple of a tile past 2^31 (PriorLabs/TabPFN#1184); 2^31 itself passes.
    def dense(batch: int, length: int, heads: int, width: int) -> Call:
        x = empty(batch, length, heads, width)
        return with_gradients(Call(q=x, k=x, v=x, scale=1.0))

    assert any("2^31" in x for x in violations(dense(400, 10_496, 4, 128), ON_META, HOPPER))
    assert violations(dense(128, 8192, 16, 128), ON_META, HOPPER) == []
    assert MOST_ELEMENTS == 128 * 8192 * 16 * 128
    # Narrow heads are counted as 32 wide, short sequences as a tile of 128.
    assert any("2^31" in x for x in violations(dense(4096, 1, 512 + 1, 8), ON_META, HOPPER))
    # Wider ones are counted in steps of 32, and above 192 as 256.
    for width, counted in ((8, 32), (32, 32), (40, 64), (136, 160), (192, 192), (200, 256), (256, 256)):
        most = MOST_ELEMENTS // (128 * 16 * counted)
        assert violations(dense(most, 128, 16, width), ON_META, HOPPER) == [], width
        assert any("2^31" in x for x in violations(dense(most + 1, 128, 16, width), ON_META, HOPPER)), width
    assert rows_in_tiles(3, 130, varlen=False) == 3 * 256
    assert rows_in_tiles(3, 130, varlen=True) == 130 + 3 * 128


def test_a_causal_call_with_more_queries_than_keys_is_refused_and_one_with_fewer_is_not() -> None:
    short, long = empty(1, 5, 2, 64), empty(1, 9, 2, 64)
    assert any("first 4 queries see none" in x for x in violations(call_of(long, short), ON_META, HOPPER))
    assert violations(call_of(short, long), ON_META, HOPPER) == []
    assert violations(replace(call_of(long, short), causal=False), ON_META, HOPPER) == []


def call_of(q: Tensor, k: Tensor) -> Call:
    return Call(q=q, k=k, v=k, scale=1.0)


def test_a_window_is_counted_with_the_query_itself() -> None:
    x = empty(1, 5, 2, 64)
    assert Call(q=x, k=x, v=x, scale=1.0, window=512).window_size == (511, 0)
    assert Call(q=x, k=x, v=x, scale=1.0, window=1).window_size == (0, 0)
    assert Call(q=x, k=x, v=x, scale=1.0).window_size == (-1, 0)
    assert Call(q=x, k=x, v=x, scale=1.0, causal=False).window_size == (-1, -1)


CONTRACTS = {contract.library: contract for contract in (TORCH, FLASH_ATTN_3)}


def reasons(library: str, capability: tuple[int, int], **changes: object) -> list[str]:
    sizes: dict = {"dtype": torch.bfloat16, "d_k": 64, "d_v": 64, "n_heads": 8, "n_groups": 2, "n_sequences": 1}
    sizes |= {"tile_rows": 128, "backward": False} | changes
    return list(limits(CONTRACTS[library], capability, **sizes))


def test_limits_follow_the_gpu() -> None:
    assert any("capability is 7.5" in x for x in reasons("torch", (7, 5)))
    assert reasons("torch", (8, 9), d_k=224, d_v=224) == []
    assert any("shared memory" in x for x in reasons("torch", (8, 9), d_k=224, d_v=224, backward=True))
    assert reasons("torch", (9, 0), d_k=224, d_v=224, backward=True) == []
    assert reasons("torch", (8, 9), d_k=256, d_v=256, backward=True) == []
    assert any("runs on 9.x" in x for x in reasons("flash_attn_3", (8, 0)))


def test_unequal_widths_follow_the_library() -> None:
    assert any("equal widths" in x for x in reasons("torch", HOPPER, d_k=192, d_v=128))
    assert reasons("flash_attn_3", HOPPER, d_k=192, d_v=128) == []
    assert any("equal widths" in x for x in reasons("flash_attn_3", HOPPER, d_k=192, d_v=128, backward=True))


def test_a_launch_grid_has_an_end() -> None:
    assert any("launch grid" in x for x in reasons("torch", HOPPER, n_sequences=65_536))
    assert any("launch grid" in x for x in reasons("torch", HOPPER, n_heads=65_536))


def test_a_row_that_starts_between_two_loads_is_not_aligned() -> None:
    buffer = torch.empty(1024, dtype=torch.bfloat16)
    assert aligned(buffer[:512].view(4, 2, 64))
    assert not aligned(buffer[1:513].view(4, 2, 64))
    assert not aligned(torch.empty(4, 2, 65, dtype=torch.bfloat16)[..., :64])
    # Along one element no stride is walked; an expanded dimension has stride 0.
    assert aligned(torch.empty(1, 1, 65, dtype=torch.bfloat16)[..., :64])
    assert aligned(torch.empty(1, 2, 64, dtype=torch.bfloat16).expand(7, -1, -1))


def test_a_call_describes_itself() -> None:
    x = empty(1, 5, 2, 64)
    text = str(with_gradients(Call(q=x, k=x, v=x, scale=0.125, window=3)))
    for part in ("q=(1, 5, 2, 64):bfloat16:strides(640, 128, 64, 1)", "window=3", "scale=0.125", "do=", "lse="):
        assert part in text
