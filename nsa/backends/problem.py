"""What a backend is asked to compute: enough to say yes, or no with a reason, before any tensor is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nsa.config import NSAConfig

# The parts of the attention that are routed one by one, in the order they run.
OPS = ("compressed", "scores", "selected", "sliding", "combine")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One op, or with `op="attention"` the whole, on one shape. Hashable: a route is looked up by it."""

    op: str = "attention"
    batch: int
    n_queries: int
    n_keys: int
    n_heads: int
    n_groups: int
    d_k: int
    d_v: int
    dtype: torch.dtype
    device: str = "cpu"
    backward: bool = False
    packed: bool = False
    cached: bool = False

    @property
    def heads_per_group(self) -> int:
        return self.n_heads // self.n_groups

    def for_op(self, op: str) -> Problem:
        return replace(self, op=op)

    @classmethod
    def of_config(
        cls,
        config: NSAConfig,
        *,
        batch: int,
        length: int,
        dtype: torch.dtype,
        device: str = "cpu",
        backward: bool = False,
    ) -> Problem:
        """The whole attention of `config` on `batch` sequences of `length` tokens."""
        return cls(
            batch=batch,
            n_queries=length,
            n_keys=length,
            n_heads=config.n_heads,
            n_groups=config.n_kv_groups,
            d_k=config.d_k,
            d_v=config.d_v,
            dtype=dtype,
            device=device,
            backward=backward,
        )

    def __str__(self) -> str:
        flags = [flag for flag in ("backward", "packed", "cached") if getattr(self, flag)]
        shape = f"B={self.batch} S={self.n_queries} N={self.n_keys} heads={self.n_heads}/{self.n_groups}"
        kind = f"D={self.d_k}/{self.d_v} {str(self.dtype).removeprefix('torch.')} {self.device}"
        return " ".join([self.op, shape, kind, *flags])
