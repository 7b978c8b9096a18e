"""phi: a block of `l` keys (or values) becomes one."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.geometry import compressed_starts, n_compressed


class Compression(nn.Module):
    """`mean`, or `mlp`: a learned embedding of the place in the block is added, the block flattened, two layers follow.

    All groups share the weights.
    """

    def __init__(self, width: int, block: int, *, kind: Literal["mlp", "mean"], hidden: int | None = None) -> None:
        super().__init__()
        self.kind = kind
        if kind == "mlp":
            hidden = hidden or 2 * width
            self.position = nn.Parameter(torch.empty(block, width))
            self.inner = nn.Linear(block * width, hidden)
            self.outer = nn.Linear(hidden, width)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.kind == "mlp":
            nn.init.normal_(self.position, std=0.02)
            self.inner.reset_parameters()
            self.outer.reset_parameters()

    def forward(self, blocks: Tensor) -> Tensor:
        """`[B, N, l, G, D]` to `[B, N, G, D]`."""
        if self.kind == "mean":
            return blocks.mean(dim=2)
        placed = blocks + self.position[:, None].to(blocks.dtype)
        hidden = F.silu(self.inner(placed.transpose(2, 3).flatten(3)))
        return self.outer(hidden)


def blocks_of(x: Tensor, block: int, stride: int) -> Tensor:
    """The overlapping blocks of `x [B, S, G, D]`: `[B, N, l, G, D]`, a view."""
    if n_compressed(x.shape[1], block, stride) == 0:
        return x.new_empty(x.shape[0], 0, block, *x.shape[2:])
    return x.unfold(1, block, stride).permute(0, 1, 4, 2, 3)


def packed_blocks_of(x: Tensor, cu_seqlens: Tensor, block: int, stride: int) -> tuple[Tensor, Tensor]:
    """The blocks of packed documents one after the other, `[1, S // d, l, G, D]`, and the position each starts at."""
    length = x.shape[1]
    start, position = compressed_starts(cu_seqlens, length, block, stride)
    token = (start[:, None] + torch.arange(block, device=x.device)).clamp_max(length - 1)
    blocks = x.index_select(1, token.flatten()).unflatten(1, token.shape)
    return blocks, position
