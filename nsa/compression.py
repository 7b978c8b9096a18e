"""phi: a block of `l` keys (or values) becomes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa import ops
from nsa.eager import is_observed, is_plain_linear


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


def joinable(phis: Sequence[Compression], raw: Sequence[Tensor], stride: int) -> bool:
    """Whether `compress_jointly` computes what calls of `phis` would; to be called by compiled code."""
    plain = all(type(phi) is Compression and phi.kind == "mlp" and not is_observed(phi) for phi in phis)
    if not plain or any("mlp" in phi.__dict__ for phi in phis):
        return False
    linears = [(phi.inner, phi.outer) for phi in phis]
    if not all(is_plain_linear(linear) and linear.bias is not None for pair in linears for linear in pair):
        return False
    first, *others = [[linear.weight.shape for linear in pair] for pair in linears]
    alike = all(shapes == first for shapes in others) and all(x.shape == raw[0].shape for x in raw)
    return alike and phis[0].block % stride == 0 and raw[0].shape[1] >= phis[0].block


def compress_jointly(phis: Sequence[Compression], raw: Sequence[Tensor], stride: int) -> Sequence[Tensor]:
    """Every block of each of `raw [B, S, G, D]` by its own MLP, in batched matmuls: `[B, N, G, D]` each.

    A block is a run of chunks of `stride` tokens. Each chunk is multiplied once, by the weights of all its places in a
    block, so nothing is gathered, and a compiler fuses the rest into a few kernels.
    """
    block = phis[0].block
    n_parts, n_chunks = block // stride, raw[0].shape[1] // stride
    n_blocks = n_chunks - n_parts + 1
    chunks = torch.stack([x[:, : n_chunks * stride].unflatten(1, (n_chunks, stride)) for x in raw]).transpose(3, 4)
    # [2, hidden, block * D]
    weight = torch.stack([phi.inner.weight for phi in phis])
    position = torch.stack([phi.position.flatten() for phi in phis])
    by_part = weight.unflatten(2, (n_parts, -1)).transpose(1, 2).flatten(1, 2)
    products = torch.bmm(chunks.flatten(4).flatten(1, 3), by_part.mT)
    # [2, B, n_chunks, G, n_parts, hidden]
    products = products.unflatten(1, chunks.shape[1:4]).unflatten(-1, (n_parts, -1))
    # In the parameters' dtype: what the positions add does not depend on the tokens.
    inner = torch.stack([phi.inner.bias for phi in phis]) + (weight * position[:, None]).sum(-1)
    inner = inner[:, None, None, None] + sum(products[:, :, p : p + n_blocks, :, p] for p in range(n_parts))
    rows = F.silu(inner.to(products.dtype))
    bias, weight = (torch.stack([getattr(phi.outer, name) for phi in phis]) for name in ("bias", "weight"))
    outer = torch.baddbmm(bias[:, None], rows.flatten(1, 3), weight.mT)
    return outer.unflatten(1, rows.shape[1:4]).unbind()
