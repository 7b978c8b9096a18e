"""Windows of `seq_len + 1` tokens in shuffled pools, in an order that is the same on all ranks.

The shuffled documents of an epoch are concatenated; a pool is the next part of that, cut into windows. Consecutive
windows share a token: the last target of one is the first input of the next. Less than a window at the end of an epoch
is dropped. A pool has a mark from which it can be created again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nsa.config import require
from nsa.data.config import DataConfig, Split
from nsa.data.documents import VALID_EVERY, DocumentChunk, Documents
from nsa.data.shuffle import Permutation, mix
from nsa.data.tokenizer import Tokenizer

# Windows in a pool of synthetic data.
SYNTHETIC_WINDOWS = 256


class Window(NamedTuple):
    """A training sequence with its last target."""

    tokens: Tensor  # [seq_len + 1]
    starts: Tensor  # where documents begin in it, ascending; 0 may be missing


class Pool(NamedTuple):
    """Windows in a shuffled order."""

    mark: dict[str, Any]  # JSON types, from which the same pool is created again
    order: Permutation
    read: Callable[[int], Window]

    def window(self, index: int) -> Window:
        return self.read(self.order[index])


class Pools(Protocol):
    """An endless sequence of pools."""

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    mark_keys: tuple[str, ...]  # the keys of a pool's mark that are counts

    @property
    def doing(self) -> str: ...

    def pools(self, mark: dict[str, Any] | None) -> Iterator[Pool]:
        """The pools from `mark` on, or from the beginning. No pool is empty."""
        ...


def row_pool(tokens: Tensor, starts: Tensor, seq_len: int, mark: dict[str, Any], order: Permutation) -> Pool:
    """A pool of tokens in memory."""

    def read(number: int) -> Window:
        begin = number * seq_len
        end = begin + seq_len + 1
        first, last = torch.searchsorted(starts, torch.tensor([begin, end])).tolist()
        return Window(tokens[begin:end], starts[first:last] - begin)

    return Pool(mark, order, read)


class Mark(NamedTuple):
    """A position in the text: a token of a document of a chunk of an epoch."""

    epoch: int = 0
    chunk: int = 0
    document: int = 0
    token: int = 0
    bookmark: Any = None  # of the chunk, for a source that is a stream


class Encoded(NamedTuple):
    mark: Mark
    tokens: Tensor


class TextPools:
    """Pools of documents, which are tokenized on the fly.

    Every rank reads and tokenizes everything and uses its share of the windows, so all ranks agree on the position
    without communication. For many GPUs, `nsa data prepare` does this work once.
    """

    mark_keys: tuple[str, ...] = ("epoch", "chunk", "document", "token")

    def __init__(
        self, documents: Documents, tokenizer: Tokenizer, config: DataConfig, *, split: Split, seq_len: int, seed: int
    ) -> None:
        self.documents, self.tokenizer, self.split = documents, tokenizer, split
        self.seq_len, self.seed, self.doc_batch = seq_len, seed, config.doc_batch
        self.windows = max(1, config.shuffle_tokens // seq_len)
        self.name, self.fingerprint = documents.name, documents.fingerprint

    @property
    def doing(self) -> str:
        return self.documents.doing

    def pools(self, mark: dict[str, Any] | None) -> Iterator[Pool]:
        start = Mark(**mark) if mark else Mark()
        while True:
            tokens = windows = 0
            for row in self.rows(start):
                tokens += sum(len(document.tokens) for document in row)
                pool = self.pool(row)
                if pool is not None:
                    windows += len(pool.order)
                    yield pool
            accepted = f"at least seq_len + 1 = {self.seq_len + 1:,}"
            require(windows > 0, f"the {self.split} split of {self.name}", f"{tokens:,} tokens", accepted)
            start = Mark(epoch=start.epoch + 1)

    def rows(self, start: Mark) -> Iterator[list[Encoded]]:
        """The tokens of each pool of an epoch; the last token of one row is the first of the next."""
        full = self.windows * self.seq_len
        row: list[Encoded] = []
        length = 0
        for document in self.encoded(start):
            row.append(document)
            length += len(document.tokens)
            while length > full:
                mark, tokens = row.pop()
                # Tokens of the last document before the border; the one after it is the last target.
                before = full - (length - len(tokens))
                yield [*row, Encoded(mark, tokens[: before + 1])]
                row, length = [Encoded(mark._replace(token=mark.token + before), tokens[before:])], length - full
        yield row

    def pool(self, row: list[Encoded]) -> Pool | None:
        """The windows of a row; None if it is shorter than one."""
        lengths = [len(document.tokens) for document in row]
        count = (sum(lengths) - 1) // self.seq_len
        if count < 1:
            return None
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        mark = row[0].mark
        order = Permutation(count, self.seed, mark.epoch, mark.chunk, mark.document, mark.token)
        return row_pool(torch.cat([d.tokens for d in row]), starts, self.seq_len, mark._asdict(), order)

    def encoded(self, start: Mark) -> Iterator[Encoded]:
        """The documents of the rest of an epoch as tokens, `doc_batch` at a time."""
        texts = self.texts(start)
        while batch := list(islice(texts, self.doc_batch)):
            rows = self.tokenizer.encode_documents([text for _, text in batch])
            # A target beyond the vocabulary would fail only in the loss.
            top, vocab_size = max(int(tokens.max()) for tokens in rows), self.tokenizer.vocab_size
            require(top < vocab_size, f"a token of the tokenizer {self.tokenizer.name}", top, f"one below {vocab_size}")
            for (mark, _), tokens in zip(batch, rows, strict=True):
                yield Encoded(mark, tokens[mark.token :])

    def texts(self, start: Mark) -> Iterator[tuple[Mark, str]]:
        chunks = self.documents.chunks(self.seed, start.epoch, start.chunk, start.bookmark)
        for number, chunk in enumerate(chunks, start.chunk):
            texts = split_texts(chunk, self.split, few=self.documents.few)
            order = Permutation(len(texts), self.seed, start.epoch, number, 1)
            resumed = number == start.chunk
            for index in range(start.document if resumed else 0, len(texts)):
                token = start.token if resumed and index == start.document else 0
                yield Mark(start.epoch, number, index, token, chunk.bookmark), texts[order[index]]


def split_texts(chunk: DocumentChunk, split: Split, *, few: bool) -> list[str]:
    """One document in VALID_EVERY is for validation; with fewer documents, the end of each."""
    if few:
        cuts = [(text, len(text) - len(text) // VALID_EVERY) for text in chunk.texts]
        texts = [text[:cut] if split == "train" else text[cut:] for text, cut in cuts]
    else:
        numbered = enumerate(chunk.texts, chunk.first)
        texts = [text for number, text in numbered if (number % VALID_EVERY == 0) == (split == "valid")]
    return [text for text in texts if text]


class SyntheticPools:
    """Random phrases, each repeated once: the second half of a window can be learned, the first cannot."""

    doing = "making random tokens"
    mark_keys: tuple[str, ...] = ("number",)

    def __init__(self, tokenizer: Tokenizer, *, split: Split, seq_len: int, seed: int) -> None:
        self.tokenizer, self.seq_len = tokenizer, seq_len
        self.key = mix(seed, int(split == "valid"))
        self.name = f"synthetic ({tokenizer.vocab_size:,} tokens)"
        self.fingerprint = f"synthetic-{tokenizer.vocab_size}"

    def pools(self, mark: dict[str, Any] | None) -> Iterator[Pool]:
        return map(self.pool, count(mark["number"] if mark else 0))

    def pool(self, number: int) -> Pool:
        # torch takes seeds of 63 bits.
        generator = torch.Generator().manual_seed(mix(self.key, number) >> 1)
        shape = (SYNTHETIC_WINDOWS, (self.seq_len + 1) // 2)
        phrases = torch.randint(self.tokenizer.vocab_size, shape, generator=generator, dtype=torch.int32)
        row = torch.cat([phrases, phrases, phrases], 1)[:, : self.seq_len].flatten()
        starts = torch.arange(SYNTHETIC_WINDOWS) * self.seq_len
        # The last window needs one more token as its last target.
        row = torch.cat([row, phrases[-1:, 0]])
        return row_pool(row, starts, self.seq_len, {"number": number}, Permutation(SYNTHETIC_WINDOWS, number))
