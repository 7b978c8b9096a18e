"""What the tests share: strategies for problems, random inputs for them, and assertions.

Block counts and legal selections are computed a second time, not taken from `nsa`. Tolerances come from `nsa.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from nsa.sequences import Compressed, Pooling, Selected, Selection, Sequences, Sliding
from nsa.testing import TOLERANCE_FACTOR, finite, max_error, tolerance

# The three branches that attend; each is one function of `nsa.ops` and one of `nsa.reference`.
BRANCHES = ("compressed", "selected", "sliding")

# The two functions that phi is made of, again one of each module.
COMPRESSIONS = ("compress_mean", "gather_blocks")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem: shapes, hyperparameters, and for a varlen batch the lengths of its documents."""

    length: int
    batch: int = 1
    groups: int = 1
    heads: int = 1  # per group
    d_k: int = 4
    d_v: int = 4
    block: int = 8
    stride: int = 4
    select_block: int = 8
    n_select: int = 4
    n_init: int = 1
    n_local: int = 2
    window: int = 16
    documents: tuple[int, ...] | None = None
    seed: int = 0

    @property
    def n_heads(self) -> int:
        return self.groups * self.heads

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.documents is None else offsets(self.documents)

    def count_compressed(self, length: int) -> int:
        """Whole blocks in `length` tokens, by trying every start."""
        return sum(start + self.block <= length for start in range(0, length, self.stride))

    @property
    def n_compressed(self) -> int:
        return sum(self.count_compressed(n) for n in self.documents or (self.length,))

    @property
    def compression(self) -> dict[str, int]:
        return {"block": self.block, "stride": self.stride}

    @property
    def selection(self) -> dict[str, int]:
        return {
            **self.compression,
            "select_block": self.select_block,
            "n_select": self.n_select,
            "n_init": self.n_init,
            "n_local": self.n_local,
        }

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


class Branches(NamedTuple):
    """What is passed below the op boundary for one case, over the same sequences."""

    compressed: Compressed
    selection: Selection
    selected: Selected
    sliding: Sliding
    pooling: Pooling


def branches(
    case: Case,
    device: torch.device | str = "cpu",
    scale: float | None = None,
    *,
    q_start: Tensor | None = None,
    batch: int | None = None,
    length: int | None = None,
) -> Branches:
    """The branches of a case, its tensors on `device`; `batch` and `length` of the queries, if not the case's."""
    cu_seqlens = None if case.cu_seqlens is None else case.cu_seqlens.to(device)
    rows = (case.batch if batch is None else batch, case.length if length is None else length)
    sequences = Sequences(*rows, torch.device(device), cu_seqlens, q_start)
    scale = case.d_k**-0.5 if scale is None else scale
    return Branches(
        Compressed(sequences, **case.compression, scale=scale),
        Selection(sequences, **case.selection, scale=scale),
        Selected(sequences, select_block=case.select_block, scale=scale),
        Sliding(sequences, window=case.window, scale=scale),
        Pooling(sequences, **case.compression),
    )


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors for one case. Every branch has keys and values of its own."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    indices: Tensor

    def of(self, branch: str) -> tuple[Tensor, Tensor, Tensor]:
        """`q, k, v` of a branch."""
        suffix = {"compressed": "cmp", "selected": "sel", "sliding": "win"}[branch]
        return self.q, getattr(self, f"k_{suffix}"), getattr(self, f"v_{suffix}")

    def to(self, dtype: torch.dtype) -> Inputs:
        return self.map(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        return replace(self, **{field.name: change(getattr(self, field.name)) for field in fields(self)})

    def but(self, **changes: Tensor) -> Inputs:
        return replace(self, **changes)

    @property
    def for_attention(self) -> tuple[Tensor, ...]:
        """The arguments of `nsa_attention`, in order."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "indices")


def offsets(lengths: tuple[int, ...] | list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def random_inputs(case: Case, dtype: torch.dtype = torch.float64) -> Inputs:
    """Normal inputs, gates in (0, 1), and any legal selection, drawn from the case's own seed."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(length: int, n_heads: int, head_dim: int) -> Tensor:
        return torch.randn(case.batch, length, n_heads, head_dim, dtype=torch.float64, generator=generator).to(dtype)

    return Inputs(
        q=normal(case.length, case.n_heads, case.d_k),
        k_cmp=normal(case.n_compressed, case.groups, case.d_k),
        v_cmp=normal(case.n_compressed, case.groups, case.d_v),
        k_sel=normal(case.length, case.groups, case.d_k),
        v_sel=normal(case.length, case.groups, case.d_v),
        k_win=normal(case.length, case.groups, case.d_k),
        v_win=normal(case.length, case.groups, case.d_v),
        gates=normal(case.length, case.n_heads, 3).sigmoid(),
        indices=random_indices(case, generator),
    )


def random_indices(case: Case, generator: torch.Generator) -> Tensor:
    """For every query and group some of its document's blocks: from none to `n_select`, seen or not yet."""
    shape = (case.batch, case.length, case.groups)
    lengths = torch.tensor([n for n in case.documents or (case.length,) for _ in range(n)])
    n_blocks = (-(-lengths // case.select_block)).view(-1, 1, 1)
    most = n_blocks.clamp_max(case.n_select)[..., 0].expand(shape)
    count = (torch.rand(shape, generator=generator) * (most + 1)).long()
    # The blocks in random order, those past the document's end last; the first `count` of them are selected.
    none = max(case.n_select, int(n_blocks.max()))
    order = torch.rand(*shape, none, generator=generator).masked_fill(torch.arange(none) >= n_blocks, 2.0).argsort()
    order = order[..., : case.n_select]
    selected = order.masked_fill(torch.arange(case.n_select) >= count[..., None], none).sort(dim=-1).values
    return selected.masked_fill(selected == none, -1).int()


@st.composite
def cases(draw: st.DrawFn, *, max_length: int = 150, varlen: bool = False) -> Case:
    """Any legal problem. Sizes are small and mostly odd: borders of blocks, chunks and documents are what breaks."""
    stride = draw(st.integers(1, 6))
    n_init, n_local = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    documents = draw(document_lengths(max_length)) if varlen else None
    return Case(
        length=sum(documents) if documents else draw(st.integers(1, max_length)),
        documents=documents,
        batch=1 if varlen else draw(st.integers(1, 2)),
        groups=draw(st.integers(1, 3)),
        heads=draw(st.sampled_from([1, 2, 3, 5, 6])),
        d_k=draw(st.integers(1, 9)),
        d_v=draw(st.integers(1, 9)),
        stride=stride,
        block=stride * draw(st.integers(1, 4)),
        select_block=stride * draw(st.integers(1, 6)),
        n_init=n_init,
        n_local=n_local,
        n_select=max(1, n_init + n_local + draw(st.integers(0, 4))),
        window=draw(st.integers(1, max_length + 10)),
        seed=draw(st.integers(0, 2**16)),
    )


def document_lengths(total: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Up to six documents, empty and one-token ones among them, at least one token in all."""
    one = st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, total // 3))
    fits = st.lists(one, min_size=1, max_size=6).filter(lambda lengths: 1 <= sum(lengths) <= total)
    return fits.map(tuple)


def attend(
    module: ModuleType, branch: str, inputs: Inputs, case: Case, qkv: tuple[Tensor, ...] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """`(o, lse)` of one branch, computed by `nsa.reference` or by `nsa.ops` with `backend=...`."""
    q, k, v = inputs.of(branch) if qkv is None else qkv
    options.setdefault("cu_seqlens", case.cu_seqlens)
    if branch == "compressed":
        return module.compressed_attention(q, k, v, **case.compression, **options)
    if branch == "selected":
        return module.selected_attention(q, k, v, inputs.indices, select_block=case.select_block, **options)
    return module.sliding_attention(q, k, v, window=case.window, **options)


def output_gradients(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Random `do, dlse`, drawn in half precision so that every dtype is given the same numbers."""
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=generator).bfloat16().to(x.dtype) for x in (o, lse))
    return do, dlse


def results(module: ModuleType, branch: str, inputs: Inputs, case: Case, **options: Any) -> dict[str, Tensor]:
    """Forward and backward of one branch: `o`, `lse`, `dq`, `dk`, `dv`, for fixed random gradients of `o` and `lse`."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs.of(branch))
    o, lse = attend(module, branch, inputs, case, leaves, **options)
    # The reference's LSE over no key is a constant.
    pairs = [pair for pair in zip((o, lse), output_gradients(o, lse), strict=True) if pair[0].requires_grad]
    dq, dk, dv = torch.autograd.grad([x for x, _ in pairs], leaves, [grad for _, grad in pairs])
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def compression_inputs(op: str, case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """`x`, and for `gather_blocks` the position embedding, as large as what it is added to."""
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(case.batch, case.length, case.groups, case.d_k), (case.block, case.d_k)]
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    return tuple(tensors[: 1 if op == "compress_mean" else 2])


def compression_results(
    module: ModuleType, op: str, tensors: tuple[Tensor, ...], case: Case, **options: Any
) -> dict[str, Tensor]:
    """Forward and backward for a fixed random gradient: `out`, `dx`, and for `gather_blocks` `dposition`."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in tensors)
    options.setdefault("cu_seqlens", case.cu_seqlens)
    out = getattr(module, op)(*leaves, **case.compression, **options)
    # Drawn in half precision, so that every dtype is given the same numbers.
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), **dict(zip(("dx", "dposition"), grads, strict=False))}


def term_sizes(module: ModuleType, branch: str, inputs: Inputs, case: Case) -> dict[str, float]:
    """How large the sums behind each of `results` get when every term counts with its absolute value.

    A sum may cancel: a row with a single key has `dp = delta` and so `ds = p * (dp - delta) = 0`, of two numbers that
    were rounded. What a sum of rounded terms may be off by goes with this size, not with what is left of it.
    """
    q, k, v = (x.double() for x in inputs.of(branch))
    n_keys, groups = k.shape[1:3]
    # Attention over the rows of the identity hands out its probabilities.
    identity = torch.eye(n_keys, dtype=torch.float64)[None, :, None].expand(case.batch, -1, groups, -1).contiguous()
    p, lse = attend(module, branch, inputs, case, (q, k, identity))
    do, dlse = output_gradients(p.new_empty(*p.shape[:3], v.shape[3]), lse)

    p, q, do, dlse = (x.abs().unflatten(2, (groups, -1)) for x in (p, q, do, dlse))
    k, v = k.abs(), v.abs()
    o = torch.einsum("bsghn,bngd->bsghd", p, v)
    dp = torch.einsum("bsghd,bngd->bsghn", do, v)
    delta = (do * o).sum(dim=-1) + dlse
    ds = p * (dp + delta[..., None]) * case.d_k**-0.5
    scores = torch.einsum("bsghd,bngd->bsghn", q, k) * (p > 0) * case.d_k**-0.5
    sums = {
        "o": o,
        "lse": scores.sum(dim=-1)
        if n_keys == 0
        else scores.amax(dim=-1) + finite(lse).abs().unflatten(2, (groups, -1)),
        "dq": torch.einsum("bsghn,bngd->bsghd", ds, k),
        "dk": torch.einsum("bsghn,bsghd->bngd", ds, q),
        "dv": torch.einsum("bsghn,bsghd->bngd", p, do),
    }
    return {name: float(x.max()) if x.numel() else 0.0 for name, x in sums.items()}


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Every tensor within `tolerance`, absolute and relative; infinities and shapes must agree."""
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), f"{name} differs"


def assert_within_derived_tolerance(
    actual: Mapping[str, Tensor],
    reference_fp64: Mapping[str, Tensor],
    same_computation_low_precision: Mapping[str, Tensor],
    sizes: Mapping[str, float] | None = None,
) -> None:
    """The error against fp64 is at most twice that of plain torch in the same dtype, plus a few roundings.

    Each argument maps a name (`o`, `lse`, `dq`, ...) to its tensor, so forward and gradients are judged alike. `sizes`
    says how large the rounded sums are (`term_sizes`); without it, as large as the results.
    """
    assert actual.keys() == reference_fp64.keys() == same_computation_low_precision.keys()
    for name in reference_fp64:
        given = (actual, reference_fp64, same_computation_low_precision)
        got, reference, plain = (tensors[name].detach() for tensors in given)
        assert got.dtype == plain.dtype, f"{name} is {got.dtype}, plain torch gives {plain.dtype}"
        assert got.shape == reference.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(reference.shape)}"
        assert torch.equal(got.isinf(), reference.isinf()), f"{name} is infinite in other places than the reference"
        error = max_error(got, reference)
        allowed = tolerance(plain, reference, size=None if sizes is None else sizes[name])
        assert error <= allowed, f"{name} is off by {error:.3e}; plain torch in {got.dtype} allows {allowed:.3e}"


def assert_norms_close(
    actual: Mapping[str, Tensor],
    reference_fp64: Mapping[str, Tensor],
    same_computation_low_precision: Mapping[str, Tensor],
) -> None:
    """The same rule for all elements together: small ones, which a largest error leaves unseen, count as well."""
    assert actual.keys() == reference_fp64.keys() == same_computation_low_precision.keys()
    for name, reference in reference_fp64.items():
        got, plain = (tensors[name].detach() for tensors in (actual, same_computation_low_precision))
        assert got.dtype == plain.dtype, f"{name} is {got.dtype}, plain torch gives {plain.dtype}"
        size = reference.norm()
        # What is stored is rounded, at most by half of eps.
        allowed = TOLERANCE_FACTOR * (plain.double() - reference).norm() + torch.finfo(got.dtype).eps / 2 * size
        error = (got.double() - reference).norm()
        assert error <= allowed, f"{name} is off by {error / size:.2e} of its norm, allowed {allowed / size:.2e}"


def mean_compress(x: Tensor, case: Case) -> Tensor:
    """`phi = mean` written as loops over documents and blocks: `[B, S, G, D]` to `[B, N, G, D]`."""
    blocks, first = [], 0
    for length in case.documents or (case.length,):
        starts = range(first, first + length, case.stride)
        blocks += [x[:, s : s + case.block].mean(dim=1) for s in starts if s + case.block <= first + length]
        first += length
    return torch.stack(blocks, dim=1) if blocks else x[:, :0]
