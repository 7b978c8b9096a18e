"""What was measured of backends: in which order to try them, by family of GPUs, op, direction, kind of row and length.

`configs/routes.json` holds the lines, `nsa bench flash` writes them, the router takes the first that covers a problem.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from nsa.backends.problem import OPS, Problem
from nsa.config import BACKENDS
from nsa.origin import configs_folder


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A measured line of the routing table: on this GPU, op and range of lengths, try these backends in this order."""

    gpu: str  # a family, as `gpu_family` names it, or "cpu"
    op: str
    order: tuple[str, ...]
    min_length: int = 0
    max_length: int | None = None
    head_widths: tuple[int, ...] | None = None
    mode: Literal["fwd", "bwd"] | None = None  # None: both
    packed: bool | None = None  # rows of several documents; None: both kinds

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, str) or gpu_family(self.gpu) != self.gpu:
            raise ValueError(f"gpu is {self.gpu!r}; accepted: a family's name, as 'NVIDIA A100' or 'cpu'")
        if self.op not in OPS:
            raise ValueError(f"op is {self.op!r}; accepted: one of {OPS}")
        if self.mode not in (None, "fwd", "bwd"):
            raise ValueError(f"mode is {self.mode!r}; accepted: 'fwd', 'bwd' or nothing for both")
        if self.packed is not None and not isinstance(self.packed, bool):
            raise ValueError(f"packed is {self.packed!r}; accepted: true, false or nothing for both")
        lengths = (self.min_length,) if self.max_length is None else (self.min_length, self.max_length)
        if not all(is_count(n) for n in lengths) or min(lengths) < 0 or lengths[-1] < lengths[0]:
            raise ValueError(f"min_length, max_length are {lengths}; accepted: whole numbers, the second not below")
        widths = (1,) if self.head_widths is None else self.head_widths
        if not isinstance(widths, tuple) or not widths or not all(is_count(n) for n in widths):
            raise ValueError(f"head_widths is {self.head_widths!r}; accepted: a list of whole numbers, or nothing")
        if not isinstance(self.order, tuple) or not self.order or len(set(self.order)) < len(self.order):
            raise ValueError(f"order is {self.order!r}; accepted: a list of backends, each once")
        for name in self.order:
            if name == "auto" or name not in BACKENDS:
                raise ValueError(f"order names {name!r}; accepted: {[known for known in BACKENDS if known != 'auto']}")

    def covers(self, problem: Problem, gpu: str) -> bool:
        return (
            self.gpu == gpu
            and self.op == problem.op
            and problem.n_queries >= self.min_length
            and (self.max_length is None or problem.n_queries <= self.max_length)
            # What is measured is whole sequences of equal widths in half precision; for the rest nothing is known.
            and not problem.cached
            and (problem.device != "cuda" or problem.dtype.itemsize == 2)
            and (self.head_widths is None or (problem.d_k == problem.d_v and problem.d_k in self.head_widths))
            and self.mode in (None, "bwd" if problem.backward else "fwd")
            and self.packed in (None, problem.packed)
        )


def load_preferences(path: Path) -> tuple[Preference, ...]:
    """Read the measured routing table: `{"preferences": [{"gpu": ..., "op": ..., "order": [...]}, ...]}`."""
    if not path.is_file():
        return ()
    try:
        rows = json.loads(path.read_text())["preferences"]
        return tuple(read_preference(row) for row in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a routing table: {type(error).__name__}: {error}") from error


def read_preference(row: Mapping[str, Any]) -> Preference:
    unknown = sorted(set(row) - {f.name for f in fields(Preference)})
    if unknown:
        raise ValueError(f"a preference has {unknown[0]!r}; accepted: {[f.name for f in fields(Preference)]}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Preference(**values)


def preferences_path() -> Path:
    return configs_folder() / "routes.json"


def gpu_family(name: str) -> str:
    """The GPU without its memory and its slot: of "NVIDIA A100-SXM4-80GB" the "NVIDIA A100"."""
    return re.split(r"[ -](?:SXM|PCI|NVL|HBM|\d+ ?GB)", name, maxsplit=1)[0]


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
