"""Corpora and a tokenizer for tests of the loader: every token is a number that occurs once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nsa.data.config import DataConfig
from nsa.data.documents import DocumentChunk, IndexedDocuments
from nsa.data.loader import Loader, Share
from nsa.data.pools import TextPools


class Numbers:
    """The text "3 4" is the tokens 3 and 4. A document's end is negative, so that it can be distinguished."""

    name, vocab_size, end = "numbers", 10**6, -1

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def encode_documents(self, texts: Sequence[str]) -> list[Tensor]:
        rows = [self.encode(text) for text in texts]
        # The end of a document is as much one of a kind as its tokens are.
        return [torch.tensor([*row, -row[-1]], dtype=torch.int32) for row in rows]

    def save(self, folder: Path) -> None:
        raise NotImplementedError


class Memory(IndexedDocuments):
    """Documents of the given lengths, `per_chunk` of them in a chunk."""

    name, fingerprint = "memory", "memory"

    def __init__(self, lengths: Sequence[int], per_chunk: int = 3) -> None:
        self.texts: list[str] = []
        self.per_chunk = per_chunk
        first = 1
        for length in lengths:
            self.texts.append(" ".join(str(first + i) for i in range(length)))
            first += length

    @property
    def n_chunks(self) -> int:
        return -(-len(self.texts) // self.per_chunk)

    @property
    def n_documents(self) -> int:
        return len(self.texts)

    @property
    def few(self) -> bool:
        return False

    def where(self, index: int) -> str:
        return f"chunk {index} of memory"

    def read(self, index: int) -> DocumentChunk:
        first = index * self.per_chunk
        return DocumentChunk(self.texts[first : first + self.per_chunk], first)

    def training_tokens(self) -> set[int]:
        """With the ends of the documents; a document in twenty is for validation."""
        rows = [[int(word) for word in text.split()] for i, text in enumerate(self.texts) if i % 20]
        return {token for row in rows for token in [*row, -row[-1]]}


def memory_loader(
    documents: Memory,
    *,
    seq_len: int = 4,
    batch_size: int = 1,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    **changes: object,
) -> Loader:
    values: dict[str, object] = {"prefetch": False, "shuffle_tokens": 16, "doc_batch": 2, **changes}
    config = DataConfig(**values)  # type: ignore[arg-type]
    pools = TextPools(documents, Numbers(), config, split="train", seq_len=seq_len, seed=seed)
    share = Share(batch_size, rank, world_size, config.pack)
    return Loader(pools, config, share, {"seq_len": seq_len, "seed": seed})
