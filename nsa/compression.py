"""phi: a block of `l` keys (or values) becomes one."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa import ops


class Compression(nn.Module):
    """`mean`, or `mlp`: a learned embedding of the place in the block is added, the block flattened, two layers follow.

    All groups share the weights.
    """

    def __init__(self, head_dim: int, block: int, *, kind: Literal["mlp", "mean"], hidden: int | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.block = block
        if kind == "mlp":
            hidden = hidden or 2 * head_dim
            self.position = nn.Parameter(torch.empty(block, head_dim))
            self.inner = nn.Linear(block * head_dim, hidden)
            self.outer = nn.Linear(hidden, head_dim)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.kind == "mlp":
            nn.init.normal_(self.position, std=0.02)
            self.inner.reset_parameters()
            self.outer.reset_parameters()

    def forward(
        self, x: Tensor, *, stride: int | None = None, cu_seqlens: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Every block of `x [B, S, G, D]`: `[B, N, G, D]`. Varlen, `N` is `S // stride`, as `nsa.ops` lays them out.

        `options`: `backend` and `strict` of the ops. Without a `stride`, `x` are blocks as `of_blocks` takes them.
        """
        if stride is None:
            return self.of_blocks(x)
        where: dict[str, Any] = {"block": self.block, "stride": stride, "cu_seqlens": cu_seqlens}
        if self.kind == "mean":
            return ops.compress_mean(x, **where, **options)
        return self.mlp(ops.gather_blocks(x, self.position.to(x.dtype), **where, **options))

    def of_blocks(self, blocks: Tensor) -> Tensor:
        """The same for blocks that a cache has gathered: `[B, N, l, G, D]` to `[B, N, G, D]`."""
        if self.kind == "mean":
            return blocks.mean(dim=2)
        placed = blocks + self.position[:, None].to(blocks.dtype)
        return self.mlp(placed.transpose(2, 3).flatten(3))

    def mlp(self, rows: Tensor) -> Tensor:
        return self.outer(F.silu(self.inner(rows)))
