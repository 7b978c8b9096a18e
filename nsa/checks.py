"""Arguments are checked here, once, for every backend: a wrong one is a `ValueError` that names it.

Shapes, dtypes and devices are always checked, once for each combination of them (`once_per_layout`). Values (offsets,
indices, finiteness) live on the device: they are read where that costs nothing, on the CPU, and elsewhere only under
`strict`, because the host would have to wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from nsa.config import AT_LEAST, check_compression, check_heads, check_selection, require, require_bool, require_int
from nsa.dtypes import sum_dtype
from nsa.geometry import compressed_offsets, documents, n_compressed
from nsa.sequences import ATTENTION_NAMES, COMPRESSED_NAMES, SELECTED_NAMES, SELECTION_NAMES, SLIDING_NAMES

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT_NAMES = "float16, bfloat16, float32 or float64"

# Layouts remembered at once: sequence lengths may never repeat, and memory must not grow with them.
MAX_LAYOUTS = 4096


def once_per_layout(check: Callable[..., None]) -> Callable[..., None]:
    """Skip a check that has passed for arguments of the same layout: in an eager loop it costs more than the op."""
    passed: set[Any] = set()

    @wraps(check)
    def run(*args: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return check(*args)
        # All that a check of shapes, dtypes and devices may depend on.
        key = tuple((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in args)
        try:
            known = key in passed
        except TypeError:
            # What cannot be hashed is no valid argument: the check names it.
            return check(*args)
        if not known:
            check(*args)
            if len(passed) >= MAX_LAYOUTS:
                passed.clear()
            passed.add(key)
        return None

    return run


def check_tensor(name: str, x: object, layout: str, dtypes: Sequence[torch.dtype], accepted: str) -> None:
    """`layout` names the dimensions, as in `"B S Hq Dk"`."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; accepted: a tensor [{layout}]")
    dims = len(layout.split())
    require(x.dim() == dims, f"{name}.shape", tuple(x.shape), f"{dims} dimensions [{layout}]")
    require(x.dtype in dtypes, f"{name}.dtype", x.dtype, accepted)


def check_float(name: str, x: object, layout: str) -> None:
    check_tensor(name, x, layout, FLOATS, FLOAT_NAMES)
    assert isinstance(x, Tensor)
    # A dimension of one element, or a tensor without elements, has no meaningful stride.
    dense = x.shape[-1] == 1 or x.numel() == 0 or x.stride(-1) == 1
    require(dense, f"{name}.stride()", x.stride(), "a last dimension with stride 1 (call .contiguous())")


def check_same(name: str, what: str, value: object, other: str, expected: object) -> None:
    # Written out only when it is needed: a traced length that becomes text becomes a constant.
    if value != expected:
        require(False, f"{name}.{what}", value, f"{other}'s, {expected!r}")


def check_queries(q: Tensor) -> None:
    check_float("q", q, "B S Hq Dk")
    require(min(q.shape) >= 1, "q.shape", tuple(q.shape), "no empty dimension in [B S Hq Dk]")


def check_key(name: str, k: Tensor, q: Tensor, layout: str) -> None:
    check_float(name, k, layout)
    check_same(name, "dtype", k.dtype, "q", q.dtype)
    check_same(name, "device", k.device, "q", q.device)
    check_same(name, "shape[0]", k.shape[0], "q", q.shape[0])
    require(k.shape[2] >= 1, f"{name}.shape", tuple(k.shape), "at least one group")
    check_heads(q.shape[2], k.shape[2], heads_name="q.shape[2]", groups_name=f"{name}.shape[2]")


def check_keys_values(q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str) -> None:
    check_queries(q)
    check_key(k_name, k, q, "B N G Dk")
    check_same(k_name, "shape[3]", k.shape[3], "q", q.shape[3])
    check_key(v_name, v, q, "B N G Dv")
    require(v.shape[3] >= 1, f"{v_name}.shape", tuple(v.shape), "a head_dim of at least 1")
    check_same(v_name, "shape[1]", v.shape[1], k_name, k.shape[1])
    check_same(v_name, "shape[2]", v.shape[2], k_name, k.shape[2])


def check_token_count(q: Tensor, k: Tensor, q_start: Tensor | None, name: str = "k") -> None:
    if q_start is None:
        check_same(name, "shape[1]", k.shape[1], "q", q.shape[1])
    elif k.shape[1] < q.shape[1]:
        require(False, f"{name}.shape[1]", k.shape[1], f"at least q's {q.shape[1]} tokens")


def check_attention_args(q: Tensor, k_cmp: Tensor | None, names: Sequence[str], args: Sequence[Any]) -> None:
    """Check the arguments that the ops with queries take after their tensors."""
    cu_seqlens, q_start, *values, scale, backend, strict = args
    named = check_hyperparameters(names, values)
    check_sequences(q, cu_seqlens, q_start)
    if k_cmp is not None and cu_seqlens is None and q_start is None:
        expected = n_compressed(q.shape[1], named["block"], named["stride"])
        if k_cmp.shape[1] != expected:
            require(False, "k_cmp.shape[1]", k_cmp.shape[1], f"{expected} blocks for {q.shape[1]} tokens")
    check_routing(backend, strict, scale)


def check_compressible(x: Tensor, block: int, stride: int, cu_seqlens: Tensor | None) -> None:
    check_float("x", x, "B S G D")
    require(min(x.shape) >= 1, "x.shape", tuple(x.shape), "no empty dimension in [B S G D]")
    check_compression(block, stride)
    check_sequences(x, cu_seqlens, None, name="x")


def check_sequences(
    q: Tensor, cu_seqlens: Tensor | None, q_start: Tensor | None, *, name: str = "q", start: str = "q_start"
) -> None:
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens, "n+1", (torch.int32,), "int32")
        check_same("cu_seqlens", "device", cu_seqlens.device, name, q.device)
        require(cu_seqlens.numel() >= 2, "cu_seqlens.shape", tuple(cu_seqlens.shape), "[n+1] for n >= 1 documents")
        require(q.shape[0] == 1, f"{name}.shape[0]", q.shape[0], "1: a varlen batch is one row")
    if q_start is not None:
        check_tensor(start, q_start, "B", (torch.int32,), "int32")
        check_same(start, "device", q_start.device, "q", q.device)
        check_same(start, "shape[0]", q_start.shape[0], "q", q.shape[0])


def check_hyperparameters(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """The `values` by name, all of them checked."""
    named = dict(zip(names, values, strict=True))
    if "block" in named:
        check_compression(named["block"], named["stride"])
    if "n_select" in named:
        check_selection(*(named[x] for x in ("stride", "select_block", "n_select", "n_init", "n_local")))
    for name, value in named.items():
        require_int(name, value, at_least=AT_LEAST.get(name, 1))
    return named


def check_routing(backend: str, strict: bool, scale: float | None = None) -> None:
    valid = scale is None or (isinstance(scale, float) and 0 < scale < float("inf"))
    require(valid, "scale", scale, "None or a positive finite float")
    require(isinstance(backend, str), "backend", backend, "'auto' or a backend's name")
    require_bool("strict", strict)


# The arguments of each op, positional, in the order of its schema (`nsa.ops`).


@once_per_layout
def check_compress_mean(x: Tensor, *args: Any) -> None:
    cu_seqlens, block, stride, backend, strict = args
    check_compressible(x, block, stride, cu_seqlens)
    check_routing(backend, strict)


@once_per_layout
def check_gather_blocks(x: Tensor, position: Tensor, *args: Any) -> None:
    cu_seqlens, block, stride, backend, strict = args
    check_compressible(x, block, stride, cu_seqlens)
    check_float("position", position, "block D")
    check_same("position", "dtype", position.dtype, "x", x.dtype)
    check_same("position", "device", position.device, "x", x.device)
    check_same("position", "shape", tuple(position.shape), "block and x", (block, x.shape[3]))
    check_routing(backend, strict)


@once_per_layout
def check_compressed_attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *args: Any) -> None:
    check_keys_values(q, k_cmp, v_cmp, "k_cmp", "v_cmp")
    check_attention_args(q, k_cmp, COMPRESSED_NAMES, args)


@once_per_layout
def check_select_blocks(q: Tensor, k_cmp: Tensor, lse: Tensor, *args: Any) -> None:
    check_queries(q)
    check_key("k_cmp", k_cmp, q, "B N G Dk")
    check_same("k_cmp", "shape[3]", k_cmp.shape[3], "q", q.shape[3])
    expected = sum_dtype(q)
    check_tensor("lse", lse, "B S Hq", (expected,), f"{expected} for q of {q.dtype}")
    check_same("lse", "shape", tuple(lse.shape), "q", tuple(q.shape[:3]))
    check_same("lse", "device", lse.device, "q", q.device)
    check_attention_args(q, k_cmp, SELECTION_NAMES, args)


@once_per_layout
def check_selected_attention(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *args: Any) -> None:
    check_keys_values(q, k, v, "k", "v")
    check_token_count(q, k, args[1])
    check_tensor("indices", indices, "B S G n", (torch.int32,), "int32")
    expected = (q.shape[0], q.shape[1], k.shape[2])
    check_same("indices", "shape[:3]", tuple(indices.shape[:3]), "q and k", expected)
    require(indices.shape[3] >= 1, "indices.shape", tuple(indices.shape), "at least one slot")
    check_same("indices", "device", indices.device, "q", q.device)
    check_attention_args(q, None, SELECTED_NAMES, args)


@once_per_layout
def check_sliding_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> None:
    check_keys_values(q, k, v, "k", "v")
    check_token_count(q, k, args[1])
    check_attention_args(q, None, SLIDING_NAMES, args)


@once_per_layout
def check_combine(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, backend: str, strict: bool) -> None:
    check_float("o_cmp", o_cmp, "B S Hq Dv")
    for name, o in (("o_sel", o_sel), ("o_win", o_win)):
        check_float(name, o, "B S Hq Dv")
        check_same(name, "shape", tuple(o.shape), "o_cmp", tuple(o_cmp.shape))
        check_same(name, "dtype", o.dtype, "o_cmp", o_cmp.dtype)
        check_same(name, "device", o.device, "o_cmp", o_cmp.device)
    check_gates(gates, o_cmp, "o_cmp")
    check_routing(backend, strict)


def check_gates(gates: Tensor, like: Tensor, name: str) -> None:
    """`gates [B,S,Hq,3]` for a tensor `[B,S,Hq,...]` called `name`."""
    check_float("gates", gates, "B S Hq 3")
    check_same("gates", "shape", tuple(gates.shape), name, (*like.shape[:3], 3))
    check_same("gates", "dtype", gates.dtype, name, like.dtype)
    check_same("gates", "device", gates.device, name, like.device)


@once_per_layout
def check_attention(*args: Any) -> None:
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, cu_seqlens, q_start, window_start, *rest = args
    for branch, k, v in (("cmp", k_cmp, v_cmp), ("sel", k_sel, v_sel), ("win", k_win, v_win)):
        check_keys_values(q, k, v, f"k_{branch}", f"v_{branch}")
        check_same(f"k_{branch}", "shape[2]", k.shape[2], "k_cmp", k_cmp.shape[2])
        check_same(f"v_{branch}", "shape[3]", v.shape[3], "v_cmp", v_cmp.shape[3])
    check_gates(gates, q, "q")
    check_attention_args(q, k_cmp, ATTENTION_NAMES, (cu_seqlens, q_start, *rest))
    check_sequences(q, None, window_start, start="window_start")
    check_token_count(q, k_sel, q_start, "k_sel")
    check_token_count(q, k_win, window_start, "k_win")


def can_read_values(x: Tensor, strict: bool) -> bool:
    return strict or x.device.type == "cpu"


def check_cu_seqlens_values(cu_seqlens: Tensor | None, length: int, strict: bool) -> None:
    if cu_seqlens is None or not can_read_values(cu_seqlens, strict):
        return
    values = cu_seqlens.tolist()
    require(values[0] == 0, "cu_seqlens[0]", values[0], "0")
    require(values == sorted(values), "cu_seqlens", values, "non-decreasing offsets")
    require(values[-1] == length, "cu_seqlens[-1]", values[-1], f"the number of tokens, {length}")


def check_branch_values(
    branch: Any, k: Tensor, name: str, indices: Sequence[Tensor], strict: bool, *, start: str = "q_start"
) -> None:
    """The values of what a branch (`nsa.sequences`) is given: offsets, positions in the keys called `name`, indices."""
    if not can_read_values(k, strict):
        return
    sequences, over_blocks = branch.sequences, hasattr(branch, "stride")
    cu_seqlens, q_start = sequences.cu_seqlens, sequences.q_start
    n_tokens, capacity = sequences.length, branch.capacity(k.shape[1])
    if cu_seqlens is not None and q_start is not None:
        # The documents are those of the keys, of which compressed ones do not tell how many tokens there are.
        n_tokens = capacity = int(cu_seqlens[-1]) if over_blocks else k.shape[1]
    check_cu_seqlens_values(cu_seqlens, n_tokens, strict)
    if over_blocks and cu_seqlens is not None:
        needed = int(compressed_offsets(cu_seqlens, branch.block, branch.stride)[-1])
        require(k.shape[1] >= needed, f"{name}.shape[1]", k.shape[1], f"at least the documents' {needed} blocks")
    if q_start is not None:
        values, length = q_start.tolist(), sequences.length
        require(min(values) >= 0, start, values, "no negative position")
        fits = max(values) + length <= capacity
        require(fits, start, values, f"at most {capacity - length}: {name} holds {capacity} tokens")
    for x in indices:
        check_indices_values(x, branch.select_block, k.shape[1], cu_seqlens, q_start)


def check_attention_values(inputs: Sequence[Tensor], branches: Any, strict: bool) -> None:
    """The values of what the whole attention is given; `branches` of `nsa.sequences.attention_branches`."""
    _, k_cmp, _, k_sel, _, k_win, _, gates = inputs
    check_branch_values(branches.compressed, k_cmp, "k_cmp", [], strict)
    check_branch_values(branches.selected, k_sel, "k_sel", [], strict)
    check_branch_values(branches.sliding, k_win, "k_win", [], strict, start="window_start")
    q_start, window_start = branches.selected.sequences.q_start, branches.sliding.sequences.q_start
    if branches.selected.sequences.cu_seqlens is not None and q_start is not None and window_start is not None:
        accepted = f"q_start, {q_start.tolist()}: cu_seqlens describes the sliding keys too"
        require(torch.equal(q_start, window_start), "window_start", window_start.tolist(), accepted)
    if can_read_values(gates, strict):
        least = float(gates.detach().min())
        require(not least < 0, "gates", f"as low as {least:g}", "none below 0 (`nsa.ops.combine` takes any)")
    names = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
    check_finite(strict, **dict(zip(names, inputs, strict=True)))


def check_indices_values(
    indices: Tensor, select_block: int, n_keys: int, cu_seqlens: Tensor | None, q_start: Tensor | None
) -> None:
    """Ascending block numbers inside the sequence, distinct, then -1 to the end."""
    if cu_seqlens is None:
        n_blocks = torch.full((1,), -(-n_keys // select_block), device=indices.device)
    else:
        docs = documents(cu_seqlens, indices.shape[1], q_start)
        n_blocks = -(-docs.lengths // select_block)[docs.index].view(1, -1, 1, 1)
    inside = (indices >= -1) & (indices < n_blocks)
    low, high = int(indices.min()), int(indices.max())
    require(bool(inside.all()), "indices", f"in [{low}, {high}]", f"-1, or a block below {int(n_blocks.max())}")
    before, after = indices[..., :-1], indices[..., 1:]
    ordered = (after == -1) | ((before != -1) & (after > before))
    require(bool(ordered.all()), "indices", "not in order", "ascending, distinct, padded with -1 at the end")


def check_finite(strict: bool, **tensors: Tensor) -> None:
    if strict:
        for name, x in tensors.items():
            require(bool(x.isfinite().all()), name, "not finite everywhere", "finite values (strict is on)")
