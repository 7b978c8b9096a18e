"""Measured exceptions to the default order of backends, by GPU family, op, direction, head_dim and length.

`nsa bench flash` writes them to `configs/routes.json`; the router applies the first one that covers a problem. Where
none does, on a GPU that was never measured for instance, the default order holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from nsa.backends.gpu import gpu_family
from nsa.backends.problem import OPS, Problem
from nsa.config import BACKENDS, check_fields, require
from nsa.origin import configs_folder

# Keys of files written by earlier versions.
OLD_KEYS = {"head_widths": "head_dims", "packed": "varlen"}


@dataclass(frozen=True, kw_only=True)
class MeasuredRoute:
    """A measured order of backends for one GPU family, op and range of lengths."""

    gpu: str  # a family, as `gpu_family` names it, or "cpu"
    op: str
    order: tuple[str, ...]  # a backend that is not listed keeps its place in the default order
    min_length: int = 0
    max_length: int | None = None
    head_dims: tuple[int, ...] | None = None
    mode: Literal["fwd", "bwd"] | None = None  # None: both
    varlen: bool | None = None  # None: varlen and fixed-length

    def __post_init__(self) -> None:
        family = isinstance(self.gpu, str) and gpu_family(self.gpu) == self.gpu
        require(family, "gpu", self.gpu, "a GPU family, as 'NVIDIA A100', or 'cpu'")
        require(self.op in OPS, "op", self.op, f"one of {OPS}")
        check_fields(self, {"min_length": 0, "max_length": 0})
        longest = self.max_length is None or self.max_length >= self.min_length
        require(longest, "max_length", self.max_length, f"an integer >= min_length, {self.min_length}, or nothing")
        dims = self.head_dims is None or (isinstance(self.head_dims, tuple) and bool(self.head_dims))
        dims = dims and all(map(is_count, self.head_dims or ()))
        require(dims, "head_dims", self.head_dims, "a list of integers, or nothing for all")
        known = [name for name in BACKENDS if name != "auto"]
        order = isinstance(self.order, tuple) and bool(self.order) and len(set(self.order)) == len(self.order)
        require(order and set(self.order) <= set(known), "order", self.order, f"a list of {known}, each at most once")

    def covers(self, problem: Problem, gpu: str) -> bool:
        """Whether the measurement holds for `problem` on the family `gpu`."""
        return (
            self.gpu == gpu
            and self.op == problem.op
            and problem.n_queries >= self.min_length
            and (self.max_length is None or problem.n_queries <= self.max_length)
            # Measured: whole sequences in half precision, d_k == d_v.
            and not problem.cached
            and (problem.device != "cuda" or problem.dtype.itemsize == 2)
            and (self.head_dims is None or (problem.d_k == problem.d_v and problem.d_k in self.head_dims))
            and self.mode in (None, "bwd" if problem.backward else "fwd")
            and self.varlen in (None, problem.varlen)
        )


def load_routes(path: Path) -> tuple[MeasuredRoute, ...]:
    """Read `{"routes": [{"gpu": ..., "op": ..., "order": [...]}, ...]}`; empty when there is no such file. A ValueError
    names the file and the entry's key."""
    if not path.is_file():
        return ()
    try:
        content = json.loads(path.read_text())
        # Earlier versions wrote "preferences".
        return tuple(map(read_route, content["preferences"] if "preferences" in content else content["routes"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a table of routes: {type(error).__name__}: {error}") from error


def read_route(row: Mapping[str, Any]) -> MeasuredRoute:
    values: dict[str, Any] = {OLD_KEYS.get(key, key): tuple(x) if isinstance(x, list) else x for key, x in row.items()}
    known = [field.name for field in fields(MeasuredRoute)]
    for key in values:
        require(key in known, "key", key, f"one of {known}")
    return MeasuredRoute(**values)


def routes_path() -> Path:
    return configs_folder() / "routes.json"


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
