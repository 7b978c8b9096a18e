"""What a probe tries: calls whose kind has broken libraries before, and the shape of the problem itself.

A verdict counts for a class of shapes: one branch and layout, one row or several, lengths up to a power of two. The
class is tried at the problem's own shape and at its longest, so a longer or a batched problem is tried before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.backends.contracts import MOST_GRID, Call
from nsa.backends.problem import Problem

# The paper's window, and its stride: so many queries the compressed branch puts side by side as heads.
USUAL = {"sliding": 512, "compressed": 16}
# A probe shares the GPU with the run that waits for it: longer or wider problems are tried at these sizes.
MOST_TOKENS = 32_768
MOST_ELEMENTS = 2**27
# Classes below these would hold few lengths each; trying the keys of a cache costs little.
SHORTEST = 256
SHORTEST_CACHE = 4096
FEWEST_QUERIES = 64
# What a verdict rests on: the cases, how they are called and judged, and what is not called at all.
FOLDER = Path(__file__).parent
SOURCES = (*(FOLDER / name for name in ("cases.py", "libraries.py", "trial.py")), FOLDER.parent / "contracts.py")


def digest(sources: Sequence[Path]) -> str:
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]


# Verdicts of another version of this code are not read.
CODE = digest(SOURCES)


@dataclass(frozen=True, kw_only=True)
class Posed(Problem):
    """A problem with what only its call tells. `knob`: the sliding branch's window, the compressed one's stride."""

    knob: int

    @property
    def feature(self) -> str:
        return "cached" if self.cached else "packed" if self.packed else "dense"

    @property
    def folded(self) -> bool:
        return self.op == "compressed" and not self.cached

    @property
    def heads_called(self) -> int:
        return self.n_heads * self.knob if self.folded else self.n_heads

    @property
    def length_called(self) -> int:
        """Queries of each row, as the library sees them: where the branch folds, as many as there are keys."""
        return self.n_keys if self.folded else self.n_queries


@dataclass(frozen=True)
class Shape:
    batch: int
    queries: int
    keys: int


def posed(problem: Problem, knob: int | None = None) -> Posed:
    """Before there is a call the usual knob stands in."""
    if isinstance(problem, Posed):
        return problem
    return Posed(**vars(problem), knob=USUAL[problem.op] if knob is None else knob)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def shapes_of(problem: Posed, width: int) -> tuple[Shape, Shape]:
    """The problem's own shape and the longest of its class, both cut to what a probe can afford."""
    rows = 2 if problem.batch > 1 else 1
    tokens = min(MOST_TOKENS, MOST_ELEMENTS // (problem.heads_called * width))

    def cut(queries: int, keys: int) -> Shape:
        queries = max(1, min(queries, tokens // rows))
        keys = max(queries, min(keys, MOST_TOKENS // rows)) if problem.cached else queries
        return Shape(max(rows, min(problem.batch, tokens // keys)), queries, keys)

    n_queries = max(problem.length_called, 1)
    if not problem.cached:
        return cut(n_queries, n_queries), cut(max(power_of_two(n_queries), SHORTEST), 0)
    n_keys = max(problem.n_keys, 1)
    most_queries = 1 if n_queries == 1 else max(power_of_two(n_queries), FEWEST_QUERIES)
    return cut(n_queries, n_keys), cut(most_queries, max(power_of_two(n_keys), SHORTEST_CACHE))


def kind_of(problem: Problem, width: int, dtype: torch.dtype) -> str:
    """Problems of one kind share a verdict."""
    problem = posed(problem)
    _, longest = shapes_of(problem, width)
    sizes = f"{str(dtype).removeprefix('torch.')}-d{width}-h{problem.n_heads}/{problem.n_groups}"
    rows = "rows" if problem.batch > 1 else "row"
    return f"{sizes}-{problem.op}{problem.knob}-{problem.feature}-{rows}-q{longest.queries}-k{longest.keys}"


def cases_of(problem: Problem, width: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Lengths on both sides of tiles, one token, a window longer than the sequence, documents without a token; then
    the problem's own."""
    problem = posed(problem)
    shared = {"width": width, "groups": problem.n_groups, "dtype": str(dtype).removeprefix("torch.")}
    few = {**shared, "heads": problem.n_heads}
    # As many queries side by side as a grid has room for.
    many = {**shared, "heads": problem.n_heads * max(1, min(USUAL["compressed"], MOST_GRID // problem.n_heads))}

    def case(name: str, feature: str, sizes: Mapping[str, Any], lengths: Sequence[int], **rest: Any) -> dict[str, Any]:
        given = {"name": name, "feature": feature, "backward": feature != "cached", "batch": 1, "window": None, **rest}
        return {**given, **sizes, "lengths": list(lengths)}

    # Of a few keys one more or less is far outside of what rounding explains; of a hundred it is not.
    fixed = [
        case("one token", "dense", few, [1], window=4),
        case("a window across tiles", "dense", few, [257], window=4),
        case("a window longer than the sequence", "dense", few, [129], window=512),
        case("folded heads", "dense", many, [65]),
        case("documents", "packed", few, [1, 130, 37], window=100),
        case("empty documents", "packed", few, [0, 5, 0, 64, 0], window=4),
        case("folded documents", "packed", many, [3, 0, 40]),
        case("one query on a cache", "cached", few, [7, 300], queries=1),
        case("one query and a window on a cache", "cached", few, [5, 7, 31, 300], queries=1, window=4),
        case("a few queries on a cache", "cached", few, [7, 300], queries=5, window=4),
        case("a cache without a key yet", "cached", few, [0, 33], queries=1),
    ]
    if problem.heads_called > MOST_GRID:
        # No such call is made: the contract forbids it.
        return fixed
    sizes = {**shared, "heads": problem.heads_called}
    own, longest = shapes_of(problem, width)
    tried = [("the problem's own shape", own, False)]
    # A pack's own shape is one document, its class's longest several: both are tried where the lengths are equal.
    if longest != own or problem.packed:
        tried.append(("the longest of its class", longest, problem.packed))
    for name, shape, split in tried:
        # As the branches do: no window is longer than the keys.
        window = min(problem.knob, shape.keys) if problem.op == "sliding" else None
        rest: dict[str, Any] = {"window": window, "batch": shape.batch}
        n = shape.queries
        lengths = [n]
        if problem.cached:
            rest["queries"] = n
            lengths = [max(n, shape.keys - row) for row in range(shape.batch)]
        elif split:
            lengths = [n // 2, 1, n - n // 2 - 1]
        fixed.append(case(name, problem.feature, sizes, lengths, **rest))
    return fixed


def make_call(case: Mapping[str, Any], device: str) -> Call:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case["dtype"])

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    heads, groups, width, lengths = (case[name] for name in ("heads", "groups", "width", "lengths"))
    shared: dict[str, Any] = {"scale": width**-0.5, "window": case["window"]}
    if case["feature"] == "dense":
        rows = (case["batch"], lengths[0])
        q, k, v = draw(*rows, heads, width), draw(*rows, groups, width), draw(*rows, groups, width)
        return Call(q=q, k=k, v=v, **shared)
    if case["feature"] == "packed":
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        total = sum(lengths)
        q, k, v = draw(total, heads, width), draw(total, groups, width), draw(total, groups, width)
        # As the branches do: the whole row bounds the longest document.
        limits = {"max_q": max(total, 2), "max_k": max(total, 2)}
        return Call(q=q, k=k, v=v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **limits, **shared)
    # As the branches do: the longest row is as long as a slice of the cache, which has room after each but the last.
    queries, longest = case["queries"], max(lengths)
    room, rows = longest + 11, (len(lengths) - 1) * (longest + 11) + longest
    starts = torch.arange(len(lengths) + 1).int().to(device)
    q = draw(len(lengths) * queries, heads, width)
    k, v = draw(rows, groups, width), draw(rows, groups, width)
    return Call(
        q=q,
        k=k,
        v=v,
        causal=case["window"] is not None,
        cu_seqlens_q=starts * queries,
        cu_seqlens_k=(starts * room).clamp_max(rows),
        used_k=torch.tensor(lengths).int().to(device),
        max_q=queries,
        max_k=longest,
        **shared,
    )
