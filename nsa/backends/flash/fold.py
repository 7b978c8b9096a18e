"""The compressed branch as plain causal attention: `stride` queries at a time become heads.

A query that has seen `t'` tokens, itself included, sees `t' // stride - block // stride + 1` blocks. So the `stride`
queries that share `t' // stride` see the same blocks, and the next `stride` of them one more: counted in such chunks
the mask is causal, with as many chunks as blocks. A chunk's queries are put beside the heads of their group,
`[B, S, G*h, D]` to `[B, N, G*stride*h, D]`: square causal attention of `N` chunks over `N` blocks, with `stride * h`
heads per group.

Keys and values are passed as they are. `q`, `o`, `do` and `dq` are copied once. Queries before the first block see
nothing and stay outside; a last chunk that the sequence does not fill is padded with zeros, whose gradients are zero.
Varlen documents are folded one by one, so the offsets of their chunks are the offsets of their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nsa.geometry import compressed_offsets, documents


@dataclass(frozen=True)
class FixedFold:
    """Every row of the batch is one sequence of `length` tokens with `n_chunks` blocks."""

    length: int
    n_chunks: int
    n_groups: int
    block: int
    stride: int

    @property
    def first(self) -> int:
        """The first query that sees a block."""
        return self.block - 1

    @property
    def n_full(self) -> int:
        """Chunks that the sequence fills."""
        return (self.length - self.first) // self.stride

    def chunks(self, x: Tensor) -> Tensor:
        """A folded tensor `[B, N, G*stride*h, ...]` with its chunks' queries in front: `[B, N, stride, G, h, ...]`."""
        return x.unflatten(2, (self.n_groups, self.stride, -1)).transpose(2, 3)

    def fold(self, x: Tensor) -> Tensor:
        """`[B, S, G*h, ...]` to `[B, N, G*stride*h, ...]`, zero where there is no query."""
        folded = x.new_empty(x.shape[0], self.n_chunks, self.stride * x.shape[2], *x.shape[3:])
        if self.n_full < self.n_chunks:
            folded[:, self.n_full :].zero_()
        self.copy(x.unflatten(2, (self.n_groups, -1)), self.chunks(folded), into_chunks=True)
        return folded

    def unfold(self, x: Tensor, fill: float) -> Tensor:
        """The inverse of `fold`; `fill` for queries that see nothing."""
        plain = x.new_empty(x.shape[0], self.length, x.shape[2] // self.stride, *x.shape[3:])
        plain[:, : self.first].fill_(fill)
        self.copy(plain.unflatten(2, (self.n_groups, -1)), self.chunks(x), into_chunks=False)
        return plain

    def copy(self, plain: Tensor, chunks: Tensor, *, into_chunks: bool) -> None:
        end = self.first + self.n_full * self.stride
        pairs = [(plain[:, self.first : end].unflatten(1, (self.n_full, self.stride)), chunks[:, : self.n_full])]
        if end < self.length:
            pairs.append((plain[:, end:], chunks[:, self.n_full, : self.length - end]))
        for a, b in pairs:
            target, source = (b, a) if into_chunks else (a, b)
            target.copy_(source)


@dataclass(frozen=True)
class VarlenFold:
    """Varlen documents; a chunk for every slot of their blocks, those past the last block unused."""

    length: int
    n_chunks: int
    n_groups: int
    block: int
    stride: int
    cu_seqlens: Tensor

    @cached_property
    def offsets(self) -> Tensor:
        """`[n + 1]` offsets of the chunks, and blocks, of each document, inside the keys there are."""
        return compressed_offsets(self.cu_seqlens, self.block, self.stride).clamp_max(self.n_chunks).int()

    @cached_property
    def tokens(self) -> Tensor:
        """`[N, stride]`: the query at each place of each chunk; -1 where there is none."""
        device = self.cu_seqlens.device
        slot = torch.arange(self.n_chunks, device=device)
        document = torch.searchsorted(self.offsets[1:].long(), slot, right=True)
        used = document < self.cu_seqlens.numel() - 1
        document = document.clamp_max(self.cu_seqlens.numel() - 2)
        chunk = slot - self.offsets[document] + self.block // self.stride
        seen = chunk[:, None] * self.stride + torch.arange(self.stride, device=device)
        token = self.cu_seqlens.long()[document][:, None] + seen - 1
        inside = used[:, None] & (token < self.cu_seqlens[document + 1][:, None])
        return token.masked_fill(~inside, -1)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """`[S]` each: the chunk of every query, its place in it, and whether it sees anything."""
        docs = documents(self.cu_seqlens, self.length)
        seen = docs.position + 1
        chunk = torch.div(seen, self.stride, rounding_mode="floor") - self.block // self.stride
        slot = self.offsets[docs.index] + chunk
        sees = (chunk >= 0) & (slot < self.n_chunks)
        return slot.clamp(0, self.n_chunks - 1), seen % self.stride, sees

    def fold(self, x: Tensor) -> Tensor:
        """`[1, S, G*h, ...]` to `[1, N, G*stride*h, ...]`, zero where there is no query."""
        found = x[0].index_select(0, self.tokens.clamp_min(0).flatten())
        nobody = (self.tokens < 0).flatten().view(-1, *[1] * (found.dim() - 1))
        found = found.masked_fill_(nobody, 0).unflatten(0, self.tokens.shape).unflatten(2, (self.n_groups, -1))
        return found.transpose(1, 2).flatten(1, 3)[None]

    def unfold(self, x: Tensor, fill: float) -> Tensor:
        slot, place, sees = self.places
        plain = x[0].unflatten(1, (self.n_groups, self.stride, -1))[slot, :, place].flatten(1, 2)
        return plain.masked_fill_(~sees.view(-1, *[1] * (plain.dim() - 1)), fill)[None]

    def unused(self) -> Tensor:
        """`[N]`: keys past the last block, whose gradient no call writes."""
        return torch.arange(self.n_chunks, device=self.cu_seqlens.device) >= self.offsets[-1]
