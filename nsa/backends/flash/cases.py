"""The calls that a probe tries: those of kinds that have broken libraries before, and the problem's own shape.

A verdict holds for a class of shapes: one branch and layout, one row or several, lengths up to a power of two. The
class is tried at the problem's own shape and at its longest, so a longer or a batched problem is tried before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from nsa.backends.flash.contracts import MAX_GRID, Call
from nsa.backends.problem import Problem

# The paper's window, and its stride: the compressed branch folds so many queries into heads.
USUAL = {"sliding": 512, "compressed": 16}
# A probe shares the GPU with the run that waits for it: larger problems are tried at these sizes.
MAX_PROBED_TOKENS = 32_768
MAX_PROBED_ELEMENTS = 2**27
# Shorter classes would hold few lengths each; trying the keys of a cache costs little.
SHORTEST = 256
SHORTEST_CACHE = 4096
FEWEST_QUERIES = 64
# The code that a verdict depends on: the cases, how they are called and compared, and what is never called.
CASE_SOURCES = tuple(
    Path(__file__).parent / name for name in ("cases.py", "contracts.py", "libraries.py", "probe_child.py")
)


def digest(sources: Sequence[Path]) -> str:
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]


# Verdicts of another version of this code are not read.
CODE = digest(CASE_SOURCES)


@dataclass(frozen=True, kw_only=True)
class FlashProblem(Problem):
    """A problem with what only its call knows: the sliding branch's window, or the compressed branch's stride."""

    window_or_stride: int

    @property
    def layout(self) -> str:
        return "cached" if self.cached else "varlen" if self.varlen else "fixed"

    @property
    def folded(self) -> bool:
        return self.op == "compressed" and not self.cached

    @property
    def heads_called(self) -> int:
        """Query heads as the library sees them."""
        return self.n_heads * self.window_or_stride if self.folded else self.n_heads

    @property
    def length_called(self) -> int:
        """Queries per row as the library sees them: as many as there are keys where the branch folds."""
        return self.n_keys if self.folded else self.n_queries


# Batch, queries, keys.
Shape = tuple[int, int, int]


def flash_problem(problem: Problem, window_or_stride: int | None = None) -> FlashProblem:
    """`problem` with its window or stride; the usual one before a call is known."""
    if isinstance(problem, FlashProblem):
        return problem
    return FlashProblem(**vars(problem), window_or_stride=window_or_stride or USUAL[problem.op])


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def shapes_of(problem: FlashProblem, head_dim: int) -> tuple[Shape, Shape]:
    """The problem's own shape and the longest of its class, both cut to what a probe can afford."""
    rows = 2 if problem.batch > 1 else 1
    tokens = min(MAX_PROBED_TOKENS, MAX_PROBED_ELEMENTS // (problem.heads_called * head_dim))

    def cut(queries: int, keys: int) -> Shape:
        queries = max(1, min(queries, tokens // rows))
        keys = max(queries, min(keys, MAX_PROBED_TOKENS // rows)) if problem.cached else queries
        return max(rows, min(problem.batch, tokens // keys)), queries, keys

    n_queries = max(problem.length_called, 1)
    if not problem.cached:
        return cut(n_queries, n_queries), cut(max(power_of_two(n_queries), SHORTEST), 0)
    n_keys = max(problem.n_keys, 1)
    most_queries = 1 if n_queries == 1 else max(power_of_two(n_queries), FEWEST_QUERIES)
    return cut(n_queries, n_keys), cut(most_queries, max(power_of_two(n_keys), SHORTEST_CACHE))


def kind_of(problem: Problem, head_dim: int, dtype: torch.dtype) -> str:
    """The name of the class of problems that share a verdict."""
    problem = flash_problem(problem)
    _, (_, n_queries, n_keys) = shapes_of(problem, head_dim)
    sizes = f"{str(dtype).removeprefix('torch.')}-d{head_dim}-h{problem.n_heads}/{problem.n_groups}"
    rows = "rows" if problem.batch > 1 else "row"
    call = f"{problem.op}{problem.window_or_stride}-{problem.layout}-{rows}"
    return f"{sizes}-{call}-q{n_queries}-k{n_keys}"


def cases_of(problem: Problem, head_dim: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The cases of the problem's layout, as JSON objects: lengths on both sides of a tile, one token, a window longer
    than the sequence, empty documents; then the problem's own."""
    problem = flash_problem(problem)
    shared = {"layout": problem.layout, "backward": not problem.cached, "batch": 1, "window": None}
    shared |= {"head_dim": head_dim, "groups": problem.n_groups, "dtype": str(dtype).removeprefix("torch.")}
    # As many heads as folding makes of them, and as a grid has room for.
    folded = problem.n_heads * max(1, min(USUAL["compressed"], MAX_GRID // problem.n_heads))

    def case(name: str, lengths: Sequence[int], heads: int = problem.n_heads, **rest: Any) -> dict[str, Any]:
        return {"name": name, **shared, "heads": heads, "lengths": list(lengths), **rest}

    # One key more or less of four is far outside of what rounding explains; of a hundred it is not.
    if problem.layout == "fixed":
        found = [case("one token", [1], window=4), case("a window across tiles", [257], window=4)]
        found += [case("a window longer than the sequence", [129], window=512), case("folded heads", [65], folded)]
    elif problem.layout == "varlen":
        found = [case("documents", [1, 130, 37], window=100), case("empty documents", [0, 5, 0, 64, 0], window=4)]
        found += [case("folded documents", [3, 0, 40], folded)]
    else:
        found = [case("one query on a cache", [7, 300], queries=1)]
        found += [case("one query and a window on a cache", [5, 7, 31, 300], queries=1, window=4)]
        found += [case("a few queries on a cache", [7, 300], queries=5, window=4)]
        found += [case("a cache without a key yet", [0, 33], queries=1)]
    if problem.heads_called > MAX_GRID:
        # The contract forbids the problem's own call.
        return found
    own, longest = shapes_of(problem, head_dim)
    tried = [("the problem's own shape", own, False)]
    # A varlen problem is tried as one document and, at the longest of its class, as several.
    if longest != own or problem.varlen:
        tried.append(("the longest of its class", longest, problem.varlen))
    for name, (batch, n, n_keys), split in tried:
        lengths = [n // 2, 1, n - n // 2 - 1] if split else [n]
        if problem.cached:
            lengths = [max(n, n_keys - row) for row in range(batch)]
        # As in the branches: no window is longer than the keys.
        window = min(problem.window_or_stride, n_keys) if problem.op == "sliding" else None
        queries = {"queries": n} if problem.cached else {}
        found.append(case(name, lengths, problem.heads_called, window=window, batch=batch, **queries))
    return found


def make_call(case: Mapping[str, Any], device: str) -> Call:
    """The case with random tensors, laid out as the branches do."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    heads, groups, head_dim, lengths = (case[name] for name in ("heads", "groups", "head_dim", "lengths"))

    def draw(n_queries: tuple[int, ...], n_keys: tuple[int, ...]) -> dict[str, Any]:
        shapes = {"q": (*n_queries, heads), "k": (*n_keys, groups), "v": (*n_keys, groups)}
        drawn = {name: torch.randn(*shape, head_dim, generator=generator) for name, shape in shapes.items()}
        return {name: x.to(device, dtype) for name, x in drawn.items()}

    shared: dict[str, Any] = {"scale": head_dim**-0.5, "window": case["window"]}
    if case["layout"] == "fixed":
        rows = (case["batch"], lengths[0])
        return Call(**draw(rows, rows), **shared)
    if case["layout"] == "varlen":
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        total = sum(lengths)
        # The whole row bounds the longest document.
        longest = {"max_q": max(total, 2), "max_k": max(total, 2)}
        return Call(**draw((total,), (total,)), cu_seqlens_q=offsets, cu_seqlens_k=offsets, **longest, **shared)
    # The longest row is as long as a slice of the cache, which has free slots after each row but the last.
    queries, capacity = case["queries"], max(lengths) + 11
    slots = (len(lengths) - 1) * capacity + max(lengths)
    starts = torch.arange(len(lengths) + 1).int().to(device)
    places = {"cu_seqlens_q": starts * queries, "cu_seqlens_k": (starts * capacity).clamp_max(slots)}
    used: dict[str, Any] = {"used_k": torch.tensor(lengths).int().to(device), "max_q": queries, "max_k": max(lengths)}
    drawn = draw((len(lengths) * queries,), (slots,))
    return Call(**drawn, causal=case["window"] is not None, **places, **used, **shared)
