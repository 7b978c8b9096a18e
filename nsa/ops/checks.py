"""Arguments are checked here, once, for every backend: a wrong one is a `ValueError` that names it.

Shapes, dtypes and devices are always checked. Values (offsets, indices, finiteness) live on the device: they are looked
at where that costs nothing, on the CPU, and elsewhere only under `strict`, because a GPU would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.config import check_compression, check_heads, require, require_bool
from nsa.geometry import compressed_offsets, documents, n_compressed

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT_NAMES = "float16, bfloat16, float32 or float64"


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
    # A dimension of one element has no meaningful stride.
    require(
        x.shape[-1] == 1 or x.stride(-1) == 1,
        f"{name}.stride()",
        x.stride(),
        "a last dimension with stride 1 (call .contiguous())",
    )


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
    require(v.shape[3] >= 1, f"{v_name}.shape", tuple(v.shape), "a value width of at least 1")
    check_same(v_name, "shape[1]", v.shape[1], k_name, k.shape[1])
    check_same(v_name, "shape[2]", v.shape[2], k_name, k.shape[2])


def check_token_count(q: Tensor, k: Tensor, q_start: Tensor | None, name: str = "k") -> None:
    if q_start is None:
        check_same(name, "shape[1]", k.shape[1], "q", q.shape[1])
    elif k.shape[1] < q.shape[1]:
        require(False, f"{name}.shape[1]", k.shape[1], f"at least q's {q.shape[1]} tokens")


def check_compressed_count(
    q: Tensor, n_keys: int, block: int, stride: int, cu_seqlens: Tensor | None, q_start: Tensor | None
) -> None:
    if cu_seqlens is None and q_start is None:
        expected = n_compressed(q.shape[1], block, stride)
        if n_keys != expected:
            require(False, "k_cmp.shape[1]", n_keys, f"{expected} blocks for {q.shape[1]} tokens")


def check_compressible(x: Tensor, block: int, stride: int, cu_seqlens: Tensor | None) -> None:
    check_float("x", x, "B S G D")
    require(min(x.shape) >= 1, "x.shape", tuple(x.shape), "no empty dimension in [B S G D]")
    check_compression(block, stride)
    check_sequences(x, cu_seqlens, None, name="x")


def check_position(position: Tensor, x: Tensor, block: int) -> None:
    check_float("position", position, "block D")
    check_same("position", "dtype", position.dtype, "x", x.dtype)
    check_same("position", "device", position.device, "x", x.device)
    check_same("position", "shape", tuple(position.shape), "block and x", (block, x.shape[3]))


def check_sequences(
    q: Tensor, cu_seqlens: Tensor | None, q_start: Tensor | None, *, name: str = "q", start: str = "q_start"
) -> None:
    require(
        cu_seqlens is None or q_start is None,
        start,
        "given together with cu_seqlens",
        "one of the two: a cache holds one sequence a row",
    )
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens, "n+1", (torch.int32,), "int32")
        check_same("cu_seqlens", "device", cu_seqlens.device, name, q.device)
        require(cu_seqlens.numel() >= 2, "cu_seqlens.shape", tuple(cu_seqlens.shape), "[n+1] for n >= 1 documents")
        require(q.shape[0] == 1, f"{name}.shape[0]", q.shape[0], "1, a packed batch is a single row")
    if q_start is not None:
        check_tensor(start, q_start, "B", (torch.int32,), "int32")
        check_same(start, "device", q_start.device, "q", q.device)
        check_same(start, "shape[0]", q_start.shape[0], "q", q.shape[0])


def check_scale(scale: float | None) -> None:
    require(
        scale is None or (isinstance(scale, float) and 0 < scale < float("inf")),
        "scale",
        scale,
        "None or a positive finite float",
    )


def check_serving(backend: str, strict: bool) -> None:
    require(isinstance(backend, str), "backend", backend, "'auto' or a backend's name")
    require_bool("strict", strict)


def check_lse(q: Tensor, lse: Tensor, name: str = "lse") -> None:
    expected = torch.float64 if q.dtype == torch.float64 else torch.float32
    check_tensor(name, lse, "B S Hq", (expected,), f"{expected} for q of {q.dtype}")
    check_same(name, "shape", tuple(lse.shape), "q", tuple(q.shape[:3]))
    check_same(name, "device", lse.device, "q", q.device)


def check_indices(q: Tensor, k: Tensor, indices: Tensor) -> None:
    check_tensor("indices", indices, "B S G n", (torch.int32,), "int32")
    expected = (q.shape[0], q.shape[1], k.shape[2])
    check_same("indices", "shape[:3]", tuple(indices.shape[:3]), "q and k", expected)
    require(indices.shape[3] >= 1, "indices.shape", tuple(indices.shape), "at least one slot")
    check_same("indices", "device", indices.device, "q", q.device)


def check_branches(branches: Sequence[Sequence[Tensor]]) -> None:
    lists = (tuple, list)
    good = isinstance(branches, lists) and [len(pair) for pair in branches if isinstance(pair, lists)] == [2, 2, 2]
    require(good and len(branches) == 3, "branches", type(branches).__name__, "three pairs (o, lse)")


def check_combine(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor) -> None:
    check_float("o_cmp", o_cmp, "B S Hq Dv")
    for name, o in (("o_sel", o_sel), ("o_win", o_win)):
        check_float(name, o, "B S Hq Dv")
        check_same(name, "shape", tuple(o.shape), "o_cmp", tuple(o_cmp.shape))
    check_float("gates", gates, "B S Hq 3")
    check_same("gates", "shape", tuple(gates.shape), "o_cmp", (*o_cmp.shape[:3], 3))
    for name, x in (("o_sel", o_sel), ("o_win", o_win), ("gates", gates)):
        check_same(name, "dtype", x.dtype, "o_cmp", o_cmp.dtype)
        check_same(name, "device", x.device, "o_cmp", o_cmp.device)


def may_look(x: Tensor, strict: bool) -> bool:
    return strict or x.device.type == "cpu"


def check_cu_seqlens_values(cu_seqlens: Tensor | None, length: int, strict: bool) -> None:
    if cu_seqlens is None or not may_look(cu_seqlens, strict):
        return
    values = cu_seqlens.tolist()
    require(values[0] == 0, "cu_seqlens[0]", values[0], "0")
    require(values == sorted(values), "cu_seqlens", values, "non-decreasing offsets")
    require(values[-1] == length, "cu_seqlens[-1]", values[-1], f"the number of packed tokens, {length}")


def check_q_start_values(
    q_start: Tensor | None, length: int, capacity: int, name: str, strict: bool, start: str = "q_start"
) -> None:
    """`capacity`: how many tokens the keys called `name` can hold."""
    if q_start is None or not may_look(q_start, strict):
        return
    values = q_start.tolist()
    require(min(values) >= 0, start, values, "no negative position")
    require(
        max(values) + length <= capacity,
        start,
        values,
        f"at most {capacity - length}: {name} holds {capacity} tokens",
    )


def check_compressed_values(k_cmp: Tensor, block: int, stride: int, cu_seqlens: Tensor | None, strict: bool) -> None:
    if cu_seqlens is None or not may_look(cu_seqlens, strict):
        return
    needed = int(compressed_offsets(cu_seqlens, block, stride)[-1])
    require(k_cmp.shape[1] >= needed, "k_cmp.shape[1]", k_cmp.shape[1], f"at least the documents' {needed} blocks")


def check_indices_values(
    indices: Tensor, select_block: int, n_keys: int, cu_seqlens: Tensor | None, strict: bool
) -> None:
    """Ascending block numbers inside the sequence, distinct, then -1 to the end."""
    if not may_look(indices, strict):
        return
    if cu_seqlens is None:
        n_blocks = torch.full((1,), -(-n_keys // select_block), device=indices.device)
    else:
        packed = documents(cu_seqlens, indices.shape[1])
        n_blocks = -(-packed.lengths // select_block)[packed.index].view(1, -1, 1, 1)
    inside = (indices >= -1) & (indices < n_blocks)
    low, high = int(indices.min()), int(indices.max())
    require(bool(inside.all()), "indices", f"in [{low}, {high}]", f"-1, or a block below {int(n_blocks.max())}")
    before, after = indices[..., :-1], indices[..., 1:]
    ordered = (after == -1) | ((before != -1) & (after > before))
    require(bool(ordered.all()), "indices", "not in order", "ascending, distinct, padded with -1 at the end")


def check_gates_values(gates: Tensor, strict: bool) -> None:
    if may_look(gates, strict):
        least = float(gates.detach().min())
        require(not least < 0, "gates", f"as low as {least:g}", "none below 0 (`nsa.ops.combine` takes any)")


def check_finite(strict: bool, **tensors: Tensor) -> None:
    if strict:
        for name, x in tensors.items():
            require(bool(x.isfinite().all()), name, "not finite everywhere", "finite values (strict is on)")
