"""A wrong argument is a `ValueError` that begins with its name and says what is accepted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import nsa_attention, ops
from nsa.config import BACKENDS, NSAConfig, RopeScaling
from nsa.settings import Settings

B, S, G, HEADS, DK, DV = 2, 24, 2, 6, 4, 3
BLOCK, STRIDE, N_CMP = 8, 4, 5
SELECTION = {"select_block": 8, "n_select": 3, "n_init": 1, "n_local": 1}


def good_arguments(op: str) -> dict[str, Any]:
    """A call that every op accepts; each case below spoils one thing in it."""
    q = torch.randn(B, S, HEADS, DK)
    keys = {"k": torch.randn(B, S, G, DK), "v": torch.randn(B, S, G, DV)}
    compressed = {"k_cmp": torch.randn(B, N_CMP, G, DK), "v_cmp": torch.randn(B, N_CMP, G, DV)}
    if op in ("compress_mean", "gather_blocks"):
        position = {"position": torch.randn(BLOCK, DK)} if op == "gather_blocks" else {}
        return {"x": keys["k"], **position, "block": BLOCK, "stride": STRIDE}
    if op == "compressed_attention":
        return {"q": q, **compressed, "block": BLOCK, "stride": STRIDE}
    if op == "select_blocks":
        lse = torch.full((B, S, HEADS), 3.0)
        return {"q": q, "k_cmp": compressed["k_cmp"], "lse": lse, "block": BLOCK, "stride": STRIDE, **SELECTION}
    if op == "selected_attention":
        indices = torch.tensor([0, 2, -1], dtype=torch.int32).expand(B, S, G, 3).contiguous()
        return {"q": q, **keys, "indices": indices, "select_block": 8}
    if op == "sliding_attention":
        return {"q": q, **keys, "window": 5}
    if op == "attention":
        own = {f"{name}_{branch}": x for branch in ("sel", "win") for name, x in keys.items()}
        hyperparameters = {"block": BLOCK, "stride": STRIDE, **SELECTION, "window": 5}
        return {"q": q, **compressed, **own, "gates": torch.rand(B, S, HEADS, 3), **hyperparameters}
    o = {name: torch.randn(B, S, HEADS, DV) for name in ("o_cmp", "o_sel", "o_win")}
    return {**o, "gates": torch.rand(B, S, HEADS, 3)}


def varlen_arguments(op: str) -> dict[str, Any]:
    """The same for one varlen row of two documents."""
    arguments = good_arguments(op)
    row = {name: x[:1] if isinstance(x, Tensor) and x.dim() > 2 else x for name, x in arguments.items()}
    if op == "selected_attention":
        row["indices"] = indices_of(0, -1)[:1]
    return {**row, "cu_seqlens": torch.tensor([0, 16, 24], dtype=torch.int32)}


VARLEN_OPS = (
    "compress_mean",
    "gather_blocks",
    "compressed_attention",
    "select_blocks",
    "selected_attention",
    "sliding_attention",
    "attention",
)
OPS = (*VARLEN_OPS, "combine")


def test_every_op_is_spoiled_below() -> None:
    assert set(OPS) == set(ops.__all__)
    assert {wrong.op for wrong in WRONG_CALLS} == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_the_call_that_is_spoiled_below_is_right(op: str) -> None:
    getattr(ops, op)(**good_arguments(op))


@pytest.mark.parametrize("op", VARLEN_OPS)
def test_the_varlen_call_that_is_spoiled_below_is_right(op: str) -> None:
    getattr(ops, op)(**varlen_arguments(op))


@dataclass(frozen=True)
class Wrong:
    """One spoiled call: what is changed, and the name that the message must begin with."""

    what: str
    op: str
    named: str
    change: Callable[[dict[str, Any]], dict[str, Any]]
    varlen: bool = False

    def __str__(self) -> str:
        return f"{self.op}: {self.what}"


def put(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Give an argument another value, or where a function is given what that makes of the right one."""

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: value(arguments[name]) if callable(value) else value for name, value in values.items()}

    return change


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[-1] = value
        return x

    return spoil


def strided(x: Tensor) -> Tensor:
    """The same values, not contiguous in the last dimension."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def on_meta(x: Tensor) -> Tensor:
    return x.to("meta")


def indices_of(*blocks: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(blocks, dtype=dtype).expand(B, S, G, len(blocks)).contiguous()


MEAN, GATHER = "compress_mean", "gather_blocks"
WINDOW, SELECTED, COMPRESSED, SELECT, COMBINE = (
    "sliding_attention",
    "selected_attention",
    "compressed_attention",
    "select_blocks",
    "combine",
)

WRONG_CALLS = [
    # The backend, and how strict it is.
    Wrong("backend is None", WINDOW, "backend", put(backend=None)),
    Wrong("strict is text", COMBINE, "strict", put(strict="a")),
    Wrong("a gate below 0", "attention", "gates", put(gates=lambda x: x - 0.5)),
    Wrong("a gate too few", "attention", "gates.shape", put(gates=lambda x: x[..., :2].contiguous())),
    Wrong("gates of another dtype", "attention", "gates.dtype", put(gates=Tensor.double)),
    Wrong("keys of another head_dim", "attention", "k_win.shape[3]", put(k_win=lambda x: x[..., :2].contiguous())),
    Wrong("values of another head_dim", "attention", "v_sel.shape[3]", put(v_sel=lambda x: x[..., :2].contiguous())),
    Wrong(
        "keys of fewer groups",
        "attention",
        "k_win.shape[2]",
        put(k_win=lambda x: x[:, :, :1].contiguous(), v_win=lambda x: x[:, :, :1].contiguous()),
    ),
    Wrong(
        "too few tokens to select from",
        "attention",
        "k_sel.shape[1]",
        put(k_sel=lambda x: x[:, :7], v_sel=lambda x: x[:, :7]),
    ),
    Wrong(
        "too few tokens in the window",
        "attention",
        "k_win.shape[1]",
        put(k_win=lambda x: x[:, :3], v_win=lambda x: x[:, :3]),
    ),
    Wrong(
        "too few compressed blocks",
        "attention",
        "k_cmp.shape[1]",
        put(k_cmp=lambda x: x[:, :2], v_cmp=lambda x: x[:, :2]),
    ),
    Wrong("window is 0", "attention", "window", put(window=0)),
    Wrong("more forced blocks than selected ones", "attention", "n_select", put(n_local=3)),
    Wrong("a stride that does not divide the block", "attention", "block", put(stride=3)),
    Wrong("a scale of 0", "attention", "scale", put(scale=0.0)),
    Wrong("an unknown backend", "attention", "backend", put(backend="cudnn")),
    Wrong("q_start past the compressed blocks", "attention", "q_start", put(q_start=ints(0, 4))),
    Wrong("q_start past the selected keys", "attention", "q_start", put(q_start=ints(0, 1))),
    Wrong("window_start past the sliding keys", "attention", "window_start", put(window_start=ints(0, 1))),
    Wrong("window_start is negative", "attention", "window_start", put(window_start=ints(-1, 0))),
    Wrong("window_start is int64", "attention", "window_start.dtype", put(window_start=ints(0, 0, dtype=torch.int64))),
    Wrong("cu_seqlens ends late", "attention", "cu_seqlens[-1]", put(cu_seqlens=ints(0, 16, 25)), varlen=True),
    Wrong("q_start past the documents", "attention", "q_start", put(q_start=ints(1)), varlen=True),
    Wrong("strict, a NaN in v_win", "attention", "v_win", put(v_win=with_value(math.nan), strict=True)),
    Wrong("window past 64 bits", WINDOW, "window", put(window=2**70)),
    # What a tensor is.
    Wrong("q is a list", WINDOW, "q", put(q=[[1.0]])),
    Wrong("k is None", WINDOW, "k", put(k=None)),
    Wrong("q has three dimensions", WINDOW, "q.shape", put(q=lambda x: x[0])),
    Wrong("k has five dimensions", SELECTED, "k.shape", put(k=lambda x: x[None])),
    Wrong("q is integer", WINDOW, "q.dtype", put(q=Tensor.int)),
    Wrong("q is complex", COMPRESSED, "q.dtype", put(q=lambda x: x.to(torch.complex64))),
    Wrong("k of another dtype", WINDOW, "k.dtype", put(k=Tensor.bfloat16)),
    Wrong("v of another dtype", SELECTED, "v.dtype", put(v=Tensor.half)),
    Wrong("v_cmp of another dtype", COMPRESSED, "v_cmp.dtype", put(v_cmp=Tensor.double)),
    Wrong("k on another device", WINDOW, "k.device", put(k=on_meta)),
    Wrong("v_cmp on another device", COMPRESSED, "v_cmp.device", put(v_cmp=on_meta)),
    Wrong("indices on another device", SELECTED, "indices.device", put(indices=on_meta)),
    Wrong("lse on another device", SELECT, "lse.device", put(lse=on_meta)),
    Wrong("gates on another device", COMBINE, "gates.device", put(gates=on_meta)),
    Wrong("q not contiguous in its head_dim", WINDOW, "q.stride()", put(q=strided)),
    Wrong("v not contiguous in its head_dim", SELECTED, "v.stride()", put(v=strided)),
    Wrong("gates not contiguous in their last dimension", COMBINE, "gates.stride()", put(gates=strided)),
    # Shapes that do not go together.
    Wrong("no query", WINDOW, "q.shape", put(q=lambda x: x[:, :0])),
    Wrong("no batch", WINDOW, "q.shape", put(q=lambda x: x[:0])),
    Wrong("k of another batch", WINDOW, "k.shape[0]", put(k=lambda x: x[:1])),
    Wrong("k shorter than q", WINDOW, "k.shape[1]", put(k=lambda x: x[:, 1:], v=lambda x: x[:, 1:])),
    Wrong("v shorter than k", WINDOW, "v.shape[1]", put(v=lambda x: x[:, 1:])),
    Wrong("v of fewer groups", SELECTED, "v.shape[2]", put(v=lambda x: x[:, :, :1])),
    Wrong("no group", WINDOW, "k.shape", put(k=lambda x: x[:, :, :0], v=lambda x: x[:, :, :0])),
    Wrong("heads not a multiple of groups", WINDOW, "q.shape[2]", put(q=lambda x: x[:, :, :5])),
    Wrong("k of another head_dim", WINDOW, "k.shape[3]", put(k=lambda x: x[..., :3])),
    Wrong("v without head_dim", WINDOW, "v.shape", put(v=lambda x: x[..., :0])),
    Wrong("k_cmp of another head_dim", SELECT, "k_cmp.shape[3]", put(k_cmp=lambda x: x[..., :3])),
    Wrong(
        "a compressed block too few",
        COMPRESSED,
        "k_cmp.shape[1]",
        put(k_cmp=lambda x: x[:, 1:], v_cmp=lambda x: x[:, 1:]),
    ),
    Wrong("a compressed block too few", SELECT, "k_cmp.shape[1]", put(k_cmp=lambda x: x[:, 1:])),
    Wrong("lse of another shape", SELECT, "lse.shape", put(lse=lambda x: x[:, 1:])),
    Wrong("lse in half precision", SELECT, "lse.dtype", put(lse=Tensor.half)),
    Wrong("lse in double precision for fp32 queries", SELECT, "lse.dtype", put(lse=Tensor.double)),
    Wrong("o_sel of another shape", COMBINE, "o_sel.shape", put(o_sel=lambda x: x[..., :2])),
    Wrong("o_win of another dtype", COMBINE, "o_win.dtype", put(o_win=Tensor.double)),
    Wrong("two gates", COMBINE, "gates.shape", put(gates=lambda x: x[..., :2])),
    Wrong("gates of fewer heads", COMBINE, "gates.shape", put(gates=lambda x: x[:, :, :1])),
    Wrong("gates of another dtype", COMBINE, "gates.dtype", put(gates=Tensor.double)),
    # Compression.
    Wrong("x is None", MEAN, "x", put(x=None)),
    Wrong("x has three dimensions", MEAN, "x.shape", put(x=lambda x: x[0])),
    Wrong("x without tokens", MEAN, "x.shape", put(x=lambda x: x[:, :0])),
    Wrong("x without groups", GATHER, "x.shape", put(x=lambda x: x[:, :, :0])),
    Wrong("x without head_dim", MEAN, "x.shape", put(x=lambda x: x[..., :0])),
    Wrong("x is integer", MEAN, "x.dtype", put(x=Tensor.int)),
    Wrong("x not contiguous in its head_dim", GATHER, "x.stride()", put(x=strided)),
    Wrong("position is a list", GATHER, "position", put(position=[[1.0]])),
    Wrong("position has three dimensions", GATHER, "position.shape", put(position=lambda x: x[None])),
    Wrong("position of another head_dim", GATHER, "position.shape", put(position=lambda x: x[:, :3])),
    Wrong("position of fewer places", GATHER, "position.shape", put(position=lambda x: x[1:])),
    Wrong("position of another dtype", GATHER, "position.dtype", put(position=Tensor.bfloat16)),
    Wrong("position on another device", GATHER, "position.device", put(position=on_meta)),
    Wrong("position not contiguous in its head_dim", GATHER, "position.stride()", put(position=strided)),
    Wrong("a stride of 0", MEAN, "stride", put(stride=0)),
    Wrong("a block of 0", GATHER, "block", put(block=0)),
    Wrong("a block of 8.0", MEAN, "block", put(block=8.0)),
    Wrong("a stride that does not divide the block", MEAN, "block", put(stride=3)),
    Wrong("a stride that does not divide the block", GATHER, "block", put(stride=3)),
    Wrong("an unknown backend", MEAN, "backend", put(backend="cudnn")),
    Wrong("an unknown backend", GATHER, "backend", put(backend="")),
    Wrong("strict is text", MEAN, "strict", put(strict="a")),
    Wrong("strict, a NaN in x", MEAN, "x", put(x=with_value(math.nan), strict=True)),
    Wrong("strict, an infinity in position", GATHER, "position", put(position=with_value(math.inf), strict=True)),
    Wrong("cu_seqlens is int64", MEAN, "cu_seqlens.dtype", put(cu_seqlens=Tensor.long), varlen=True),
    Wrong("cu_seqlens on another device", MEAN, "cu_seqlens.device", put(cu_seqlens=on_meta), varlen=True),
    Wrong("cu_seqlens falls", GATHER, "cu_seqlens", put(cu_seqlens=ints(0, 16, 8, 24)), varlen=True),
    Wrong("cu_seqlens ends late", MEAN, "cu_seqlens[-1]", put(cu_seqlens=ints(0, 16, 25)), varlen=True),
    Wrong("cu_seqlens with two rows", GATHER, "x.shape[0]", put(cu_seqlens=ints(0, 16, 24))),
    # Selected blocks.
    Wrong("indices are int64", SELECTED, "indices.dtype", put(indices=Tensor.long)),
    Wrong("indices are float", SELECTED, "indices.dtype", put(indices=Tensor.float)),
    Wrong("indices of fewer queries", SELECTED, "indices.shape[:3]", put(indices=lambda x: x[:, 1:])),
    Wrong("indices of one group", SELECTED, "indices.shape[:3]", put(indices=lambda x: x[:, :, :1])),
    Wrong("indices without a slot", SELECTED, "indices.shape", put(indices=lambda x: x[..., :0])),
    Wrong("a block past the end", SELECTED, "indices", put(indices=indices_of(0, 1, 3))),
    Wrong("a block below -1", SELECTED, "indices", put(indices=indices_of(-2, 0, 1))),
    Wrong("blocks in descending order", SELECTED, "indices", put(indices=indices_of(2, 1, -1))),
    Wrong("a block twice", SELECTED, "indices", put(indices=indices_of(1, 1, -1))),
    Wrong("padding before a block", SELECTED, "indices", put(indices=indices_of(0, -1, 2))),
    Wrong(
        "a block that only another document has",
        SELECTED,
        "indices",
        put(indices=indices_of(0, 1)[:1]),
        varlen=True,
    ),
    # Varlen sequences.
    Wrong("cu_seqlens is a list", WINDOW, "cu_seqlens", put(cu_seqlens=[0, 24]), varlen=True),
    Wrong("cu_seqlens is int64", WINDOW, "cu_seqlens.dtype", put(cu_seqlens=Tensor.long), varlen=True),
    Wrong("cu_seqlens has two dimensions", WINDOW, "cu_seqlens.shape", put(cu_seqlens=lambda x: x[None]), varlen=True),
    Wrong("cu_seqlens of no document", COMPRESSED, "cu_seqlens.shape", put(cu_seqlens=ints(0)), varlen=True),
    Wrong("cu_seqlens on another device", WINDOW, "cu_seqlens.device", put(cu_seqlens=on_meta), varlen=True),
    Wrong("cu_seqlens not from 0", WINDOW, "cu_seqlens[0]", put(cu_seqlens=ints(1, 16, 24)), varlen=True),
    Wrong("cu_seqlens falls", COMPRESSED, "cu_seqlens", put(cu_seqlens=ints(0, 16, 8, 24)), varlen=True),
    Wrong("cu_seqlens ends early", SELECT, "cu_seqlens[-1]", put(cu_seqlens=ints(0, 16, 23)), varlen=True),
    Wrong("cu_seqlens ends late", SELECTED, "cu_seqlens[-1]", put(cu_seqlens=ints(0, 16, 25)), varlen=True),
    Wrong("cu_seqlens with two rows", WINDOW, "q.shape[0]", put(cu_seqlens=ints(0, 16, 24))),
    Wrong(
        "fewer compressed blocks than the documents have",
        COMPRESSED,
        "k_cmp.shape[1]",
        put(k_cmp=lambda x: x[:, :2], v_cmp=lambda x: x[:, :2]),
        varlen=True,
    ),
    # Cached keys.
    Wrong("q_start is a number", WINDOW, "q_start", put(q_start=3)),
    Wrong("q_start is int64", WINDOW, "q_start.dtype", put(q_start=ints(0, 0, dtype=torch.int64))),
    Wrong("q_start for another batch", WINDOW, "q_start.shape[0]", put(q_start=ints(0))),
    Wrong("q_start on another device", SELECTED, "q_start.device", put(q_start=ints(0, 0).to("meta"))),
    Wrong("q_start is negative", WINDOW, "q_start", put(q_start=ints(0, -1))),
    Wrong("q_start past the keys", SELECTED, "q_start", put(q_start=ints(0, 1))),
    Wrong("q_start past the compressed blocks", COMPRESSED, "q_start", put(q_start=ints(0, 4))),
    Wrong("q_start past the compressed blocks", SELECT, "q_start", put(q_start=ints(4, 0))),
    Wrong("q_start past the documents", WINDOW, "q_start", put(q_start=ints(1)), varlen=True),
    Wrong(
        "fewer cached keys than queries",
        WINDOW,
        "k.shape[1]",
        put(k=lambda x: x[:, 1:], v=lambda x: x[:, 1:], q_start=ints(0, 0)),
    ),
    # Hyperparameters.
    Wrong("a window of 0", WINDOW, "window", put(window=0)),
    Wrong("a window of 2.5", WINDOW, "window", put(window=2.5)),
    Wrong("a window of True", WINDOW, "window", put(window=True)),
    Wrong("a stride of 0", COMPRESSED, "stride", put(stride=0)),
    Wrong("a negative block", COMPRESSED, "block", put(block=-8)),
    Wrong("a stride that does not divide the block", COMPRESSED, "block", put(stride=3)),
    Wrong("a stride that does not divide the block", SELECT, "block", put(stride=3)),
    Wrong("a stride that does not divide the selection block", SELECT, "select_block", put(select_block=10)),
    Wrong("a selection block of 0", SELECTED, "select_block", put(select_block=0)),
    Wrong("no selected block", SELECT, "n_select", put(n_select=0)),
    Wrong("more forced blocks than selected ones", SELECT, "n_select", put(n_local=3)),
    Wrong("a negative number of first blocks", SELECT, "n_init", put(n_init=-1)),
    Wrong("a negative number of local blocks", SELECT, "n_local", put(n_local=-1)),
    Wrong("a scale of 0", WINDOW, "scale", put(scale=0.0)),
    Wrong("a negative scale", SELECTED, "scale", put(scale=-1.0)),
    Wrong("a scale that is not a number", COMPRESSED, "scale", put(scale=math.nan)),
    Wrong("an infinite scale", SELECT, "scale", put(scale=math.inf)),
    Wrong("a scale in words", WINDOW, "scale", put(scale="large")),
    Wrong("an unknown backend", WINDOW, "backend", put(backend="cudnn")),
    Wrong("an unknown backend", SELECT, "backend", put(backend="SDPA")),
    Wrong("an unknown backend", COMBINE, "backend", put(backend="")),
    # Values that strict checks.
    Wrong("strict, a NaN in q", WINDOW, "q", put(q=with_value(math.nan), strict=True)),
    Wrong("strict, an infinity in k", SELECTED, "k", put(k=with_value(math.inf), strict=True)),
    Wrong("strict, a NaN in v", WINDOW, "v", put(v=with_value(math.nan), strict=True)),
    Wrong("strict, a NaN in v_cmp", COMPRESSED, "v_cmp", put(v_cmp=with_value(math.nan), strict=True)),
    Wrong("strict, an infinity in k_cmp", SELECT, "k_cmp", put(k_cmp=with_value(-math.inf), strict=True)),
    Wrong("strict, a NaN in gates", COMBINE, "gates", put(gates=with_value(math.nan), strict=True)),
    Wrong("strict, a NaN in o_win", COMBINE, "o_win", put(o_win=with_value(math.nan), strict=True)),
]


@pytest.mark.parametrize("wrong", WRONG_CALLS, ids=str)
def test_a_wrong_argument_of_an_op_is_named(wrong: Wrong) -> None:
    arguments = varlen_arguments(wrong.op) if wrong.varlen else good_arguments(wrong.op)
    spoiled = {**arguments, **wrong.change(arguments)}
    with pytest.raises(ValueError, match=rf"^{re.escape(wrong.named)} is ") as caught:
        getattr(ops, wrong.op)(**spoiled)
    assert "accepted: " in str(caught.value)


def test_without_strict_a_nan_is_computed_with() -> None:
    arguments = good_arguments(WINDOW)
    o, _ = ops.sliding_attention(**{**arguments, "q": with_value(math.nan)(arguments["q"])})
    assert o[-1, -1, -1].isnan().all()


GOOD_CONFIG = {"dim": 64, "n_heads": 6, "n_kv_groups": 2, "d_k": 8, "d_v": 4}

WRONG_CONFIGS = {
    "dim of 0": ("dim", {"dim": 0}),
    "dim as text": ("dim", {"dim": "64"}),
    "dim of True": ("dim", {"dim": True}),
    "no heads": ("n_heads", {"n_heads": 0}),
    "heads not a multiple of groups": ("n_heads", {"n_kv_groups": 4}),
    "no groups": ("n_kv_groups", {"n_kv_groups": 0}),
    "an odd key head_dim": ("d_k", {"d_k": 7}),
    "a negative value head_dim": ("d_v", {"d_v": -1}),
    "a compression block of 0": ("l", {"l": 0}),
    "a stride of 1.5": ("d", {"d": 1.5}),
    "a stride that does not divide l": ("l", {"d": 24}),
    "a stride that does not divide l_sel": ("l_sel", {"l_sel": 40}),
    "no selected block": ("n_sel", {"n_sel": 0}),
    "more forced than selected blocks": ("n_sel", {"n_sel": 2}),
    "a negative n_init": ("n_init", {"n_init": -1}),
    "a negative n_local": ("n_local", {"n_local": -1}),
    "a window of 0": ("w", {"w": 0}),
    "an unknown phi": ("phi", {"phi": "max"}),
    "an empty phi_hidden": ("phi_hidden", {"phi_hidden": 0}),
    "an empty gate_hidden": ("gate_hidden", {"gate_hidden": 0}),
    "an unknown gate": ("gate", {"gate": "relu"}),
    "an unknown branch": ("force_branch", {"force_branch": "window"}),
    "an unknown branch to drop": ("drop_branch", {"drop_branch": "window"}),
    "a forced branch and a dropped one": ("drop_branch", {"force_branch": "win", "drop_branch": "cmp"}),
    "a forced branch and norms of all": ("branch_norm", {"force_branch": "win", "branch_norm": True}),
    "a gate_bias that is not finite": ("gate_bias", {"gate_bias": float("inf")}),
    "an unknown compress_rope": ("compress_rope", {"compress_rope": "never"}),
    "a rope_theta of 0": ("rope_theta", {"rope_theta": 0.0}),
    "rope_scaling as a dict": ("rope_scaling", {"rope_scaling": {"factor": 8.0}}),
    "rope_theta infinite": ("rope_theta", {"rope_theta": float("inf")}),
    "rope_theta as text": ("rope_theta", {"rope_theta": "big"}),
    "a backend misspelt": ("backend", {"backend": "tritonn"}),
    "a backend in capitals": ("backend", {"backend": "SDPA"}),
    "backend missing": ("backend", {"backend": None}),
    "strict as text": ("strict", {"strict": "yes"}),
    "share_kv as text": ("share_kv", {"share_kv": "no"}),
    "w past 64 bits": ("w", {"w": 2**70}),
}


@pytest.mark.parametrize(("named", "changes"), WRONG_CONFIGS.values(), ids=WRONG_CONFIGS.keys())
def test_a_wrong_hyperparameter_of_a_config_is_named(named: str, changes: dict[str, Any]) -> None:
    NSAConfig(**GOOD_CONFIG)
    with pytest.raises(ValueError, match=rf"^{named} is .*accepted: "):
        NSAConfig(**{**GOOD_CONFIG, **changes})


def test_config_takes_every_backend_and_suggests_the_nearest() -> None:
    for name in BACKENDS:
        assert NSAConfig(**GOOD_CONFIG, backend=name).backend == name
    with pytest.raises(ValueError, match=r"backend is 'tritonn'; .*'triton'"):
        NSAConfig(**GOOD_CONFIG, backend="tritonn")


def test_a_missing_key_of_a_saved_config_is_named() -> None:
    with pytest.raises(ValueError, match="n_heads"):
        NSAConfig.from_dict({name: value for name, value in GOOD_CONFIG.items() if name != "n_heads"})


def test_keys_that_are_no_text_are_named() -> None:
    with pytest.raises(ValueError, match=r"keys of values is \[1, 'x'\]"):
        NSAConfig.from_dict({1: 2, "x": 3})


def test_an_unknown_key_of_a_saved_rope_scaling_is_named() -> None:
    with pytest.raises(ValueError, match=r"rope_scaling.*fector"):
        NSAConfig.from_dict({**GOOD_CONFIG, "rope_scaling": {"fector": 8.0}})


WHOLE = {
    "q": (1, 8, 6, 8),
    "k_cmp": (1, 2, 2, 8),
    "v_cmp": (1, 2, 2, 4),
    "k_sel": (1, 8, 2, 8),
    "v_sel": (1, 8, 2, 4),
    "k_win": (1, 8, 2, 8),
    "v_win": (1, 8, 2, 4),
    "gates": (1, 8, 6, 3),
}
SPOILED = {
    "twice the heads": lambda x: torch.cat([x, x], dim=2),
    "half the heads": lambda x: x[:, :, : x.shape[2] // 2].contiguous(),
    "another head_dim": lambda x: x[..., :-1].contiguous(),
    "another dtype": lambda x: x.double(),
    "a token less": lambda x: x[:, :-1].contiguous(),
    "nothing": lambda x: None,
    "a number": lambda x: 3,
}


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("wrong", WHOLE)
def test_a_wrong_tensor_of_the_whole_is_named(wrong: str, spoil: str) -> None:
    config = NSAConfig(**GOOD_CONFIG, l=4, d=4)
    tensors = {name: torch.zeros(shape) for name, shape in WHOLE.items()}
    nsa_attention(**tensors, config=config)
    # Of dtype and length it is the others that do not fit q.
    named = "(k_cmp|k_sel|gates)" if wrong == "q" and spoil in ("another dtype", "a token less") else wrong
    if spoil == "a token less" and wrong.startswith("k_"):
        named = wrong.replace("k", "v", 1)
    with pytest.raises(ValueError, match=rf"^{named}.*accepted"):
        nsa_attention(**{**tensors, wrong: SPOILED[spoil](tensors[wrong])}, config=config)


@pytest.mark.parametrize("wrong", WHOLE)
def test_strict_names_the_tensor_of_the_whole_that_is_not_finite(wrong: str) -> None:
    config = NSAConfig(**GOOD_CONFIG, l=4, d=4, strict=True)
    tensors = {name: torch.zeros(shape) for name, shape in WHOLE.items()}
    nsa_attention(**tensors, config=config)
    tensors[wrong][0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match=rf"^{wrong} is 'not finite everywhere'; accepted"):
        nsa_attention(**tensors, config=config)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_an_empty_tensor_may_have_any_stride(backend: str) -> None:
    """A sequence shorter than a block has no compressed keys, and an empty array comes with strides of 0."""

    def empty(head_dim: int) -> Tensor:
        return torch.empty(0).as_strided((1, 0, G, head_dim), (0, 0, 0, 0))

    q = torch.randn(1, BLOCK - 1, HEADS, DK)
    sizes = {"block": BLOCK, "stride": STRIDE, "backend": backend}
    o, lse = ops.compressed_attention(q, empty(DK), empty(DV), **sizes)
    assert not o.any()
    assert (lse == -math.inf).all()
    indices = ops.select_blocks(q, empty(DK), lse, **sizes, **SELECTION)
    assert (indices == torch.tensor([0, -1, -1], dtype=torch.int32)).all()


def test_the_whole_wants_a_config() -> None:
    with pytest.raises(ValueError, match=r"^config.*accepted"):
        nsa_attention(**{name: torch.zeros(shape) for name, shape in WHOLE.items()}, config=None)


def test_an_unknown_key_of_a_saved_config_is_named() -> None:
    with pytest.raises(ValueError, match="n_head"):
        NSAConfig.from_dict({**GOOD_CONFIG, "n_head": 3})


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("factor", {"factor": 0.5}),
        ("factor", {"factor": float("inf")}),
        ("factor", {"factor": "8"}),
        ("low_freq_factor", {"low_freq_factor": 0.0}),
        ("high_freq_factor", {"high_freq_factor": 1.0}),
        ("original_max_len", {"original_max_len": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_rope_scaling_is_named(named: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^rope_scaling\.{named} is .*accepted: "):
        RopeScaling(**{"factor": 8.0, **changes})


@pytest.mark.parametrize(
    ("variable", "text"),
    [("NSA_FORCE_PARITY", "maybe"), ("NSA_USE_FA2", "2"), ("NSA_SEQ_LEN", "long"), ("NSA_BATCH_SIZE", "0")],
)
def test_a_wrong_environment_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^{variable} is '?{text}'?; accepted: "):
        Settings.load(environ={variable: text})


def test_unknown_environment_variable_warning_names_the_nearest() -> None:
    with pytest.warns(UserWarning, match=r"NSA_FORCE_PARTY.*NSA_FORCE_PARITY"):
        Settings.load(environ={"NSA_FORCE_PARTY": "1"})
