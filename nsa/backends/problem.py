"""A problem, which a backend may support: sizes, dtype and device, enough to decide before any tensor is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from nsa.checks import FLOATS
from nsa.config import NSAConfig, check_heads, require, require_bool, require_int
from nsa.lazy import renamed_field

# The ops of an attention, which are routed one by one, in the order they run.
OPS = ("compress", "compressed", "scores", "selected", "sliding", "combine")
# The fields of a problem that are sizes, in the order in which shapes are passed.
SIZES = ("batch", "n_queries", "n_keys", "n_heads", "n_groups", "d_k", "d_v")
ACCEPTED_OPS = f"'attention' or one of {OPS}"


@cache
def is_device_type(name: str) -> bool:
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


@renamed_field("packed", "varlen")
@dataclass(frozen=True, kw_only=True)
class Problem:
    """One op, or with `op="attention"` all of them, on one shape. Hashable: routes are cached by it.

    Args:
        op: "attention", or one of `compress`, `compressed`, `scores`, `selected`, `sliding` and `combine`.
        batch: Rows.
        n_queries: Queries per row.
        n_keys: Keys per row of the op itself: compressed ones for `compressed` and `scores`, tokens for the others.
        n_heads, n_groups: Query heads, and the K/V heads that they share.
        d_k, d_v: head_dim of queries and keys, and of values.
        dtype: Of the tensors.
        device: "cpu" or "cuda".
        backward: The backward pass.
        varlen: A varlen batch, with `cu_seqlens`.
        cached: Queries from some position on of longer keys.

    Raises:
        ValueError: A field has a wrong type or value.
    """

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
    varlen: bool = False
    cached: bool = False

    def __post_init__(self) -> None:
        # Built by every op: no message is formatted unless something is wrong.
        require(self.op == "attention" or self.op in OPS, "op", self.op, ACCEPTED_OPS)
        for name in ("batch", "n_queries", "n_keys"):
            require_int(name, getattr(self, name), at_least=0)
        for name in ("n_heads", "n_groups", "d_k", "d_v"):
            require_int(name, getattr(self, name), at_least=1)
        if self.n_heads % self.n_groups:
            check_heads(self.n_heads, self.n_groups, heads_name="n_heads", groups_name="n_groups")
        require(self.dtype in FLOATS, "dtype", self.dtype, "torch.float16, bfloat16, float32 or float64")
        # Backends compare with "cuda", which "cuda:0" is not.
        plain = isinstance(self.device, str) and is_device_type(self.device)
        require(plain, "device", self.device, "a type of device without an index: 'cpu' or 'cuda'")
        for name in ("backward", "varlen", "cached"):
            require_bool(name, getattr(self, name))

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
        """The whole attention of a layer.

        Args:
            config: The layer's.
            batch, length: Sequences, and tokens of each.
            dtype: Of the tensors.
            device: "cpu" or "cuda".
            backward: The backward pass.

        Returns:
            The problem, with `op="attention"`.

        Raises:
            ValueError: An argument has a wrong type or value.
        """
        require(isinstance(config, NSAConfig), "config", config, "an NSAConfig")
        heads = (config.n_heads, config.n_kv_groups, config.d_k, config.d_v)
        sizes: dict[str, Any] = dict(zip(SIZES, (batch, length, length, *heads), strict=True))
        return cls(**sizes, dtype=dtype, device=device, backward=backward)

    def __str__(self) -> str:
        flags = [flag for flag in ("backward", "varlen", "cached") if getattr(self, flag)]
        shape = f"B={self.batch} S={self.n_queries} N={self.n_keys} heads={self.n_heads}/{self.n_groups}"
        kind = f"D={self.d_k}/{self.d_v} {str(self.dtype).removeprefix('torch.')} {self.device}"
        return " ".join([self.op, shape, kind, *flags])
