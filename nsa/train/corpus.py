"""How much data a run has: passes over it, and how much of the model's vocabulary its tokenizer uses."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.data import DataConfig, Tokenizer
from nsa.data.documents import IndexedDocuments, TextFiles
from nsa.data.loader import open_pools
from nsa.data.pools import TextPools
from nsa.data.shards import ShardPools

# Chunks that are tokenized to estimate how many tokens a corpus has.
SAMPLED_CHUNKS = 16


@dataclass(frozen=True)
class Corpus:
    """`tokens`: of one pass, about; None for a stream or synthetic data, which have no end."""

    name: str
    tokenizer: str
    vocab_size: int
    tokens: float | None

    def passes(self, tokens: float) -> float | None:
        return tokens / self.tokens if self.tokens else None

    def describe(self, tokens: float, vocab_size: int) -> list[str]:
        """What a run of so many `tokens`, of a model with this `vocab_size`, should know of its data."""
        passes = self.passes(tokens)
        over = "" if passes is None else f", {passes:,.{0 if passes >= 10 else 2}f} passes over it"
        lines = [f"data: {self.name}{over}"]
        unused = vocab_size - self.vocab_size
        if unused > 0:
            lines.append(
                f"the tokenizer {self.tokenizer} uses {self.vocab_size:,} of the vocabulary's {vocab_size:,} rows: "
                f"{unused:,} are unused"
            )
        return lines


def find_corpus(config: DataConfig, *, seq_len: int) -> Corpus:
    """Opens the data as training would and reads a sample of it.

    Raises:
        ValueError, OSError: the data, or its tokenizer, is not on this machine.
    """
    pools = open_pools(config, split="train", seq_len=seq_len, seed=0)
    tokens = None
    if isinstance(pools, ShardPools):
        tokens = float(sum(shard.header.tokens for shard in pools.shards))
    elif isinstance(pools, TextPools) and isinstance(pools.documents, IndexedDocuments):
        tokens = count_tokens(pools.documents, pools.tokenizer)
    return Corpus(pools.name, pools.tokenizer.name, pools.tokenizer.vocab_size, tokens)


def count_tokens(documents: IndexedDocuments, tokenizer: Tokenizer) -> float:
    """Of all documents, from a sample of them; text files in proportion to their bytes, which vary widely."""
    if isinstance(documents, TextFiles) and tokenizer.name == "bytes":
        return documents.bytes
    every = -(-documents.n_chunks // SAMPLED_CHUNKS)
    texts = [text for index in range(0, documents.n_chunks, every) for text in documents.read(index).texts]
    tokens = sum(map(len, tokenizer.encode_documents(texts)))
    if isinstance(documents, TextFiles):
        return documents.bytes * tokens / max(1, sum(len(text.encode()) for text in texts))
    return documents.n_documents * tokens / max(1, len(texts))
