"""The data passed below the op boundary: the sequences of a call, each branch's view of them, saved tensors, gradients.

A branch is one object that holds its hyperparameters and the sequences they apply to, and answers what its queries see.
Its fields say what hyperparameters there are: the ops' schemas and checks, and what a layer passes, follow from them.
What follows from `cu_seqlens` is computed on first use and kept, so the branches of a call share it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.geometry import (
    TokenDocuments,
    compressed_of_tokens,
    compressed_offsets,
    compressed_starts,
    documents,
    exclusive_offsets,
    n_compressed,
    n_compressed_of,
    query_positions,
)

# Keys and values.
Pair = tuple[Tensor, Tensor]


@dataclass(eq=False)
class Sequences:
    """The rows of queries of one call: fixed-length, or varlen, one row of documents that `cu_seqlens` delimits.

    With `q_start [B]` they are part of longer rows of keys (a cache, a shard of a sequence): query `i` of row `b` is
    token `q_start[b] + i` of the keys, which `cu_seqlens` then describes.
    """

    batch: int
    length: int
    device: torch.device
    cu_seqlens: Tensor | None = None
    q_start: Tensor | None = None

    @cached_property
    def documents(self) -> TokenDocuments:
        assert self.cu_seqlens is not None, "only varlen sequences have documents"
        return documents(self.cu_seqlens, self.length, self.q_start)

    @property
    def positions(self) -> Tensor:
        """`[B or 1, S]` position of every query in its document or in its row of keys.

        Not kept: plans keep fixed-length sequences, thousands of them, and what is computed while a CUDA graph is
        captured has no values until the graph runs.
        """
        if self.cu_seqlens is not None:
            return self.documents.position[None]
        return query_positions(self.length, None, self.q_start, self.device)


@dataclass(eq=False)
class Ranges:
    """Query `t` sees keys `[lo[t], hi[t])`; key `n` is seen by queries `[first[n], end[n])`.

    None of the four decreases along a row. `sliding`: the last `span` tokens; else the complete compression blocks of
    `span` tokens, one every `stride`. Kernels compute the bounds of fixed-length sequences themselves.
    """

    sequences: Sequences
    n_keys: int
    sliding: bool
    span: int
    stride: int

    @cached_property
    def lo(self) -> Tensor:
        """`[B or 1, S]`"""
        seq = self.sequences
        if not self.sliding:
            if seq.cu_seqlens is None:
                return torch.zeros_like(seq.positions)
            return compressed_offsets(seq.cu_seqlens, self.span, self.stride)[seq.documents.index][None]
        lo = (self.hi - self.span).clamp_min(0)
        return lo if seq.cu_seqlens is None else torch.maximum(lo, seq.documents.start[None])

    @cached_property
    def hi(self) -> Tensor:
        """`[B or 1, S]`"""
        seq = self.sequences
        if not self.sliding:
            complete = n_compressed_of(seq.positions + 1, self.span, self.stride)
            return (self.lo + complete).clamp_max(self.n_keys)
        # Keys of a varlen row are counted over the row, not within a document.
        hi = query_positions(seq.length, None, seq.q_start, seq.device) + 1
        # An unchecked wrong `q_start` must not read out of bounds where kernels take this as it is.
        return hi if seq.q_start is None or seq.cu_seqlens is None else hi.clamp_max(self.n_keys)

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor]:
        """`first, end`, each `[N]`, of varlen keys. Slots that no document uses are seen by no query."""
        docs, length, q_start = self.sequences.documents, self.sequences.length, self.sequences.q_start
        key = torch.arange(self.n_keys, device=docs.index.device)
        if self.sliding:
            index = docs.index if q_start is None else documents(docs.cu_seqlens, self.n_keys).index
            return self.as_queries(key), self.as_queries(torch.minimum(docs.cu_seqlens[index + 1], key + self.span))
        offsets = compressed_offsets(docs.cu_seqlens, self.span, self.stride)
        index = torch.searchsorted(offsets[1:].contiguous(), key, right=True)
        used = index < docs.count
        index = index.clamp_max(docs.count - 1)
        first = self.as_queries(docs.cu_seqlens[index] + (key - offsets[index]) * self.stride + self.span - 1)
        end = self.as_queries(docs.cu_seqlens[index + 1])
        return torch.where(used, first, length), torch.where(used, end, length)

    def as_queries(self, token: Tensor) -> Tensor:
        """Tokens of a varlen row of keys as numbers of queries; the first or one past the last where none is that."""
        q_start = self.sequences.q_start
        return token if q_start is None else (token - q_start).clamp(0, self.sequences.length)


@dataclass(eq=False)
class Blocks:
    """The selection blocks of one row of keys, numbered one after the other over its documents.

    Of fixed-length sequences block `j` starts at token `j * size`, and the tensors are not needed.
    """

    sequences: Sequences
    n_keys: int
    size: int

    @property
    def count(self) -> int:
        """An upper bound where documents end anywhere; numbers past the last block own no token."""
        if self.sequences.cu_seqlens is None:
            return -(-self.n_keys // self.size)
        return self.n_keys // self.size + self.sequences.documents.count

    @cached_property
    def offsets(self) -> Tensor:
        """`[n + 1]` number of each document's first block."""
        lengths = self.sequences.documents.lengths
        return exclusive_offsets(torch.div(lengths + self.size - 1, self.size, rounding_mode="floor"))

    @cached_property
    def offset(self) -> Tensor:
        """`[S]` number of the first block of each query's document."""
        return self.offsets[self.sequences.documents.index]

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """`[J]` each: first token in the row, the same within its document, end of that document in the row."""
        docs = self.sequences.documents
        number = torch.arange(self.count, device=docs.index.device)
        document = torch.searchsorted(self.offsets[1:].contiguous(), number, right=True)
        unused = document >= docs.count
        document = document.clamp_max(docs.count - 1)
        position = (number - self.offsets[document]) * self.size
        first = torch.where(unused, self.n_keys, docs.cu_seqlens[document] + position)
        end = torch.where(unused, self.n_keys, docs.cu_seqlens[document + 1].clamp_max(self.n_keys))
        return first, position, end


@dataclass(eq=False)
class OverBlocks:
    """A branch over the compressed blocks that are complete at each query."""

    sequences: Sequences
    block: int
    stride: int

    def view(self, n_keys: int) -> tuple[bool, int, int]:
        """`sliding, span, stride` of its `Ranges`."""
        return False, self.block, self.stride

    def capacity(self, n_keys: int) -> int:
        """Tokens of which `n_keys` blocks are all."""
        return n_keys * self.stride + self.block - 1


@dataclass(eq=False)
class Compressed(OverBlocks):
    """Every query sees the compressed blocks of its document that are complete."""

    scale: float


@dataclass(eq=False)
class Sliding:
    """Every query sees its own token and the `window - 1` before it in its document."""

    sequences: Sequences
    window: int
    scale: float

    def view(self, n_keys: int) -> tuple[bool, int, int]:
        """`sliding, span, stride` of its `Ranges`."""
        # A longer window sees no more keys, and could not be added to a position in 32 bits.
        return True, min(self.window, max(1, n_keys)), 1

    def capacity(self, n_keys: int) -> int:
        return n_keys


def ranges_of(branch: OverBlocks | Sliding, n_keys: int) -> Ranges:
    return Ranges(branch.sequences, n_keys, *branch.view(n_keys))


@dataclass(eq=False)
class Selected:
    """Every query sees the tokens of its selected blocks up to its own."""

    sequences: Sequences
    select_block: int
    scale: float

    def blocks(self, n_keys: int) -> Blocks:
        return Blocks(self.sequences, n_keys, self.select_block)

    def capacity(self, n_keys: int) -> int:
        return n_keys


@dataclass(eq=False)
class Selection(OverBlocks):
    """Selection of blocks for every query, by the probabilities of the compressed branch."""

    select_block: int
    n_select: int
    n_init: int
    n_local: int
    scale: float


@dataclass(eq=False)
class Pooling:
    """Pooling of tokens into compressed blocks."""

    sequences: Sequences
    block: int
    stride: int

    @property
    def count(self) -> int:
        """Slots for blocks. A varlen row has one for every stride: no fewer always suffice."""
        length = self.sequences.length
        fixed = self.sequences.cu_seqlens is None
        return n_compressed(length, self.block, self.stride) if fixed else length // self.stride

    @cached_property
    def starts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each slot's first token, that token's position in its document, and whether the slot holds a block, in a
        varlen row."""
        assert self.sequences.cu_seqlens is not None
        return compressed_starts(self.sequences.cu_seqlens, self.sequences.length, self.block, self.stride)

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each token's position, first slot of its document, and number of slots of that, in a varlen row."""
        assert self.sequences.cu_seqlens is not None
        return compressed_of_tokens(self.sequences.cu_seqlens, self.sequences.length, self.block, self.stride)


@lru_cache(maxsize=1024)
def fixed_length(kind: type, batch: int, length: int, device: torch.device, *hyperparameters: float) -> Any:
    return kind(Sequences(batch, length, device), *hyperparameters)


def branch_of(
    kind: type, like: Tensor, length: int, cu_seqlens: Tensor | None, q_start: Tensor | None, *hyperparameters: float
) -> Any:
    """A `kind` of branch, or a `Pooling`, of sequences of `length` with the batch and device of `like`. Of fixed-length
    ones it holds no tensor, and is made once for all calls. Sizes are integers, no symbols of a compiler."""
    if cu_seqlens is None and q_start is None:
        return fixed_length(kind, like.shape[0], length, like.device, *hyperparameters)
    return kind(Sequences(like.shape[0], length, like.device, cu_seqlens, q_start), *hyperparameters)


class AttentionBranches(NamedTuple):
    """Every branch of one attention, and the selection of blocks between them."""

    compressed: Compressed
    selection: Selection
    selected: Selected
    sliding: Sliding


def hyperparameters(kind: type) -> tuple[str, ...]:
    """The names of those of a `kind` of branch: integers, in the order of its op's arguments."""
    return tuple(field.name for field in fields(kind) if field.name not in ("sequences", "scale"))


BRANCH_KINDS = (Compressed, Selection, Selected, Sliding)
COMPRESSED_NAMES, SELECTION_NAMES, SELECTED_NAMES, SLIDING_NAMES = map(hyperparameters, BRANCH_KINDS)
# Of the whole attention, each once; and of their values and the scale, those of each branch.
ATTENTION_NAMES = tuple(dict.fromkeys((*COMPRESSED_NAMES, *SELECTION_NAMES, *SELECTED_NAMES, *SLIDING_NAMES)))
OWN = [itemgetter(*map(ATTENTION_NAMES.index, hyperparameters(kind)), -1) for kind in BRANCH_KINDS]


def attention_branches(
    q: Tensor, cu_seqlens: Tensor | None, q_start: Tensor | None, window_start: Tensor | None, *values: float
) -> AttentionBranches:
    """The branches for queries `q [B,S,Hq,Dk]`; `values` of the `ATTENTION_NAMES` and of the scale."""
    sequences = in_window = Sequences(q.shape[0], q.shape[1], q.device, cu_seqlens, q_start)
    if window_start is not q_start:
        # A cache hands out fewer sliding keys than it has selected ones: the queries start elsewhere in them.
        in_window = Sequences(q.shape[0], q.shape[1], q.device, cu_seqlens, window_start)
    seen = (sequences, sequences, sequences, in_window)
    return AttentionBranches._make(kind(x, *own(values)) for kind, x, own in zip(BRANCH_KINDS, seen, OWN, strict=True))


class Saved(NamedTuple):
    """Tensors that a branch's forward pass saves for its backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    indices: Tensor | None = None


class Upstream(NamedTuple):
    """The gradients a branch's backward pass starts from.

    With a `gate [B,S,Hq]` they are those of `gate * o`; `product` is then `sum(do * o)`, fp32 `[B,S,Hq]`, where it is
    known already. `dq`, contiguous: a gradient to add to, in place and only once everything else has been computed.
    `statistics`: whatever else of these a backend has computed for its own branches, in its own form.
    """

    do: Tensor
    dlse: Tensor | None = None
    gate: Tensor | None = None
    product: Tensor | None = None
    dq: Tensor | None = None
    statistics: Any = None
