"""Reads a kernel as Triton laid it out for what Triton before 3.8 does wrong: it sums over warps that it mistakes.

A reduction over warps puts each warp's part into shared memory, at a place that is taken from the warp's number as if
its bits belonged to one dimension after the other. After a reshape they need not: of `[2, 0, 0], [0, 1, 0], [4, 0, 0]`
the middle bit is the second dimension's, between two of the first. Then parts of different rows are written to the same
place, and which of them is read is chance. The same goes for the bits of a lane, by which one of several is chosen to
write. Reductions within a warp are not concerned.
"""

from __future__ import annotations

import re

Bases = list[tuple[int, ...]]

NAMED = re.compile(r"^(#\w+) = (#ttg\.\w+<.*>)\s*$", re.MULTILINE)
REDUCTION = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32.*?\}\) : \(tensor<[\dx]+x\w+, (.*?)>[,)]', re.DOTALL
)
SLICE = re.compile(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$")


def mistaken(ttgir: str) -> list[str]:
    """Reductions whose result is chance, as text."""
    named = dict(NAMED.findall(ttgir))
    reductions = REDUCTION.findall(ttgir)
    assert len(reductions) == ttgir.count('"tt.reduce"('), "Triton writes its reductions otherwise than is read here"
    found = []
    for axis, layout in reductions:
        lanes, warps = bases(layout, named, "lane"), bases(layout, named, "warp")
        if any(basis[int(axis)] for basis in warps) and (mixed(warps) or mixed(lanes)):
            found.append(f"a reduction of dimension {axis} over warps {warps}, lanes {lanes}")
    return found


def bases(layout: str, named: dict[str, str], kind: str) -> Bases:
    """Where each bit of a warp's or lane's number goes; none for layouts that have their dimensions one by one."""
    layout = named.get(layout, layout)
    inner = SLICE.match(layout)
    if inner:
        dim = int(inner[1])
        return [basis[:dim] + basis[dim + 1 :] for basis in bases(inner[2], named, kind)]
    found = re.search(kind + r" = \[((?:\[[\d, ]*\](?:, )?)*)\]", layout)
    if not layout.startswith("#ttg.linear") or not found:
        return []
    return [tuple(int(x) for x in basis.split(",")) for basis in re.findall(r"\[([\d, ]+)\]", found[1])]


def mixed(bits: Bases) -> bool:
    """Whether a dimension's bits have another's between them, or a bit is of two."""
    runs: list[int] = []
    for basis in bits:
        dims = [dim for dim, step in enumerate(basis) if step]
        if len(dims) > 1:
            return True
        if dims and runs[-1:] != dims:
            runs += dims
    return len(runs) > len(set(runs))
