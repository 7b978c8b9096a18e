"""The compressed and the sliding kernels against the reference in fp64: outputs, LSE and every gradient.

Rule: an error is at most twice that of the reference run in the kernel's dtype, in the largest norm, with a floor of
1e-6. In Triton's interpreter the tiles are small and the sequences a few of them long; on a GPU the same cases run with
the picked tiles, and every candidate tile is checked at the head_dims it is meant for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE, INTERPRETED, head_major  # isort: skip

from nsa import reference
from nsa.backends.triton import ranged
from nsa.backends.triton.tiles import BackwardTile, SplitTile, Tile, candidates
from nsa.sequences import Compressed, Saved, Sequences, Sliding, Upstream


def split(tile: Tile, **how: Any) -> SplitTile:
    return SplitTile(**asdict(tile), **how)


SMALL = Tile(32, 16, 4, 2)
POINTERS = Tile(16, 32, 4, 2, desc_rows=False, desc_keys=False)
# `waves=0` gives every tile of keys to one CTA, `min_row_tiles=1` splits its rows as far as they go.
TILES = {
    "descriptors": (SMALL, BackwardTile(SMALL, split(SMALL, min_row_tiles=2))),
    "pointers": (POINTERS, BackwardTile(POINTERS, split(POINTERS, min_row_tiles=1))),
    "one-loop": (SMALL, BackwardTile(SMALL, split(SMALL, single_loop=True, waves=0))),
}


@dataclass(frozen=True)
class Case:
    batch: int = 1
    length: int = 37
    groups: int = 1
    heads: int = 4
    d_k: int = 16
    d_v: int = 16
    dtype: torch.dtype = torch.float32
    documents: tuple[int, ...] = ()
    window: int = 13
    block: int = 8
    stride: int = 4

    @property
    def cu_seqlens(self) -> Tensor | None:
        if not self.documents:
            return None
        return torch.tensor([0, *self.documents], device=DEVICE).cumsum(0).int()

    def hyperparameters(self, branch: str) -> dict[str, int]:
        return {"window": self.window} if branch == "sliding" else {"block": self.block, "stride": self.stride}

    def branch(self, branch: str) -> Compressed | Sliding:
        sequences = Sequences(self.batch, self.length, torch.device(DEVICE), self.cu_seqlens)
        kind = Sliding if branch == "sliding" else Compressed
        return kind(sequences, **self.hyperparameters(branch), scale=self.d_k**-0.5)

    def n_keys(self, branch: str) -> int:
        if branch == "sliding":
            return self.length
        # Of varlen sequences more slots than the documents' blocks fill.
        return self.length // self.stride if self.documents else max(0, (self.length - self.block) // self.stride + 1)


CASES = {
    "h1": Case(heads=1, batch=2),
    "h3, Dk != Dv": Case(heads=3, groups=2, d_k=32, d_v=16),
    "h6, padded head_dim": Case(heads=6, d_k=24, d_v=40),
    "h16": Case(heads=16, length=19),
    "fp16": Case(dtype=torch.float16, batch=2, groups=2),
    "one token": Case(length=1),
    "shorter than a block": Case(length=7),
    "one block": Case(length=8),
    "window of all there could be": Case(window=2**31 - 1),
    "varlen, window of all there could be": Case(length=50, documents=(1, 33, 16), window=2**31 - 1),
    "window of one": Case(window=1, stride=8),
    "varlen": Case(length=50, documents=(1, 5, 20, 8, 16)),
    "varlen, h3": Case(length=41, heads=3, groups=2, documents=(33, 1, 7)),
}
FUNCTIONS: dict[str, tuple[Callable, Callable, Callable]] = {
    "compressed": (ranged.compressed_forward, ranged.compressed_backward, reference.compressed_attention),
    "sliding": (ranged.sliding_forward, ranged.sliding_backward, reference.sliding_attention),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN."""
    empty = torch.empty

    def poisoned(*size: int, **options: object) -> Tensor:
        x = empty(*size, **options)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)


def inputs(case: Case, branch: str) -> dict[str, Tensor]:
    n_keys, n_heads = case.n_keys(branch), case.groups * case.heads
    shapes = {
        "q": (case.batch, case.length, n_heads, case.d_k),
        "k": (case.batch, n_keys, case.groups, case.d_k),
        "v": (case.batch, n_keys, case.groups, case.d_v),
        "do": (case.batch, case.length, n_heads, case.d_v),
    }
    tensors = {name: torch.randn(shape, device=DEVICE).to(case.dtype) for name, shape in shapes.items()}
    return tensors | {"dlse": torch.randn(case.batch, case.length, n_heads, device=DEVICE)}


def by_kernel(
    case: Case, branch: str, x: dict[str, Tensor], forward_tile: Tile | None, backward_tile: BackwardTile | None
) -> dict[str, Tensor]:
    forward, backward, _ = FUNCTIONS[branch]
    q, k, v, over = x["q"], x["k"], x["v"], case.branch(branch)
    o, lse = forward(q, k, v, over, tile=forward_tile)
    dq, dk, dv = backward(Upstream(x["do"], x["dlse"]), Saved(q, k, v, o, lse), over, tile=backward_tile)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def by_reference(case: Case, branch: str, x: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    # A copy even where the dtype is the same: x itself must not come to need a gradient, it is used again.
    q, k, v = (x[name].to(dtype, copy=True).requires_grad_() for name in ("q", "k", "v"))
    o, lse = FUNCTIONS[branch][2](q, k, v, cu_seqlens=case.cu_seqlens, **case.hyperparameters(branch))
    seen = lse.masked_fill(lse == float("-inf"), 0.0)
    ((o * x["do"].to(dtype)).sum() + (seen * x["dlse"].to(seen.dtype)).sum()).backward()
    return {"o": o.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def check(case: Case, branch: str, actual: dict[str, Tensor], x: dict[str, Tensor]) -> None:
    exact, plain = by_reference(case, branch, x, torch.float64), by_reference(case, branch, x, case.dtype)
    for name, expected in exact.items():
        got = actual[name]
        assert got.shape == expected.shape
        assert got.dtype == plain[name].dtype, name
        hidden = expected == float("-inf")
        assert torch.equal(got == float("-inf"), hidden), f"{name}: other rows see nothing"
        if expected.numel() == 0:
            continue
        got, low, expected = (t.double().masked_fill(hidden, 0.0) for t in (got, plain[name], expected))
        size = float(expected.abs().max().clamp_min(1e-30))
        error, allowed = float((got - expected).abs().max()) / size, 2 * float((low - expected).abs().max()) / size
        assert error <= allowed + 1e-6, f"{name} is off by {error:.2e}, {allowed:.2e} is allowed"


@pytest.mark.parametrize("branch", FUNCTIONS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name: str, branch: str) -> None:
    case = CASES[name]
    x = inputs(case, branch)
    tiles = TILES["descriptors"] if INTERPRETED else (None, None)
    check(case, branch, by_kernel(case, branch, x, *tiles), x)


@pytest.mark.parametrize("branch", FUNCTIONS)
@pytest.mark.parametrize("name", ["pointers", "one-loop"])
@pytest.mark.parametrize("case", [Case(heads=3, batch=2), CASES["varlen"]], ids=["fixed", "varlen"])
def test_every_way_to_cut_the_work(case: Case, name: str, branch: str) -> None:
    x = inputs(case, branch)
    check(case, branch, by_kernel(case, branch, x, *TILES[name]), x)


@pytest.mark.parametrize("branch", FUNCTIONS)
def test_strided_inputs_give_the_same_bits(branch: str) -> None:
    case = Case(groups=2, batch=2, length=21)
    x = inputs(case, branch)
    expected = by_kernel(case, branch, x, *TILES["descriptors"])
    # A view of a wider tensor, a view whose strides no descriptor takes, and a gradient that is not contiguous at all.
    views = dict(x)
    views["q"] = torch.cat([x["q"], x["q"]], dim=2)[:, :, : x["q"].shape[2]]
    views["k"] = torch.nn.functional.pad(x["k"], (0, 1))[..., :-1]
    views["v"] = x["v"].transpose(0, 2).contiguous().transpose(0, 2)
    views["do"] = x["do"].transpose(2, 3).contiguous().transpose(2, 3)
    views["dlse"] = x["dlse"].transpose(1, 2).contiguous().transpose(1, 2)
    actual = by_kernel(case, branch, views, *TILES["descriptors"])
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("branch", FUNCTIONS)
def test_heads_that_lie_farther_apart_than_32_bits_count(branch: str) -> None:
    case = Case(heads=3, length=21, dtype=torch.float16)
    x = inputs(case, branch)
    expected = by_kernel(case, branch, x, *TILES["pointers"])
    x |= {name: head_major(x[name]) for name in ("q", "do")}
    actual = by_kernel(case, branch, x, *TILES["pointers"])
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("branch", FUNCTIONS)
def test_gradient_of_an_expanded_scalar(branch: str) -> None:
    # Long enough that rows see two blocks: a row that sees one has a gradient of zero, and nothing to be compared with.
    case = Case(length=21, heads=2)
    x = inputs(case, branch)
    x["do"] = torch.ones((), device=DEVICE).expand_as(x["do"])
    x["dlse"] = torch.zeros((), device=DEVICE).expand_as(x["dlse"])
    check(case, branch, by_kernel(case, branch, x, *TILES["descriptors"]), x)


def test_rows_without_keys_have_no_gradient_for_any_cotangent() -> None:
    case = Case(length=20)
    x = inputs(case, "compressed")
    x["dlse"][:, : case.block - 1] = float("inf")
    actual = by_kernel(case, "compressed", x, *TILES["descriptors"])
    assert torch.equal(actual["o"][:, : case.block - 1], torch.zeros_like(actual["o"][:, : case.block - 1]))
    assert torch.equal(actual["dq"][:, : case.block - 1], torch.zeros_like(actual["dq"][:, : case.block - 1]))
    assert all(actual[name].isfinite().all() for name in ("dq", "dk", "dv"))


@pytest.mark.skipif(INTERPRETED, reason="what the compiler makes of a tile only shows on a GPU")
@pytest.mark.parametrize("branch", FUNCTIONS)
@pytest.mark.parametrize("heads", [4, 6, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_every_candidate_on_the_gpu(kernel: str, head_dim: int, heads: int, branch: str) -> None:
    hyperparameters = {
        "block": 32,
        "stride": 16,
        "window": 200,
        "dtype": torch.bfloat16,
        "d_k": head_dim,
        "d_v": head_dim,
    }
    plain = Case(batch=2, length=1111, groups=2, heads=heads, **hyperparameters)
    varlen = Case(length=1111, heads=heads, documents=(1, 30, 500, 400, 180), **hyperparameters)
    for case in (plain, varlen):
        x = inputs(case, branch)
        for tile in candidates(kernel, head_dim):
            tiles: tuple[Tile | None, BackwardTile | None] = (tile, None)
            if kernel != "forward":
                both: dict[str, Any] = {other: candidates(other, head_dim)[0] for other in ("dq", "dkv")} | {
                    kernel: tile
                }
                tiles = (None, BackwardTile(**both))
            first = by_kernel(case, branch, x, *tiles)
            check(case, branch, first, x)
            again = by_kernel(case, branch, x, *tiles)
            assert all(torch.equal(first[name], again[name]) for name in first), f"{tile} is not deterministic"
