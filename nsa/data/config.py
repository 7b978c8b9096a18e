"""The config of the data, and what a batch is. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from nsa.config import check_fields, require

if TYPE_CHECKING:
    from torch import Tensor

OnStall = Literal["synthetic", "retry", "abort"]
Split = Literal["train", "valid"]
SPLITS: tuple[Split, ...] = get_args(Split)

# By name: what the source reads, and whether it needs `path`.
SOURCES = {
    "stdlib": ("the source code of Python's standard library, on every machine", False),
    "synthetic": ("random phrases, each repeated once: the repetition can be learned", False),
    "text": ("text files: a file, a folder (*.txt, *.md, *.rst), or a pattern such as 'src/**/*.py'", True),
    "jsonl": ("files with one JSON object per line: a file, a folder or a pattern", True),
    "parquet": ("parquet files (needs pyarrow): a file, a folder or a pattern", True),
    "shards": ("a folder of tokens that `nsa data prepare` wrote", True),
    "fineweb_edu": ("HuggingFaceFW/fineweb-edu, streamed (needs datasets)", False),
}
HUB = "hf:"


class Batch(NamedTuple):
    """CPU tensors; packed documents are varlen, in one row."""

    tokens: Tensor  # [B, S] int64
    targets: Tensor  # [B, S] int64; -100: not scored
    cu_seqlens: Tensor | None  # [n + 1] int32, for packed documents: B is 1 and S is batch_size * seq_len


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The config of the data: where tokens come from and how they are batched.

    Raises:
        ValueError: A field has a wrong type or value, or two do not fit each other.
    """

    source: str = "stdlib"  # one of SOURCES, or "hf:NAME" for a data set of the Hugging Face hub
    path: str | None = None  # a file, a folder or a pattern, for the sources that read files
    name: str | None = None  # the configuration of a hub data set ("sample-10BT")
    # "bytes", a tokenizer.json, or a folder with one: a run's, or prepared data. None: the shards' own, or bytes.
    # Shards accept no other than their own.
    tokenizer: str | None = None
    text_key: str = "text"  # the field of a JSON object, or the column, that holds the text
    pack: bool = False  # documents do not attend to each other: they are packed into one row with cu_seqlens
    on_stall: OnStall = "abort"  # what to do when no batch comes for `stall_timeout_s` seconds
    stall_timeout_s: float = 300.0
    doc_batch: int = 64  # documents tokenized at once
    prefetch: bool = True  # in a thread; without it no stall is noticed
    queue: int = 4  # batches that are prefetched
    shuffle_tokens: int = 2**20  # documents are shuffled, and then the windows of every so many tokens

    def __post_init__(self) -> None:
        known = self.source in SOURCES or (self.source.startswith(HUB) and self.source != HUB)
        require(known, "data.source", self.source, f"one of {sorted(SOURCES)}, or '{HUB}NAME'")
        if self.source in SOURCES and SOURCES[self.source][1]:
            require(bool(self.path), "data.path", self.path, f"for {self.source}: {SOURCES[self.source][0]}")
        else:
            require(self.path is None, "data.path", self.path, f"None, because {self.source} reads no file of yours")
        on_hub = self.source == "fineweb_edu" or self.source.startswith(HUB)
        require(self.name is None or on_hub, "data.name", self.name, "None, except for a data set of the hub")
        check_fields(self, prefix="data.")
        for name in ("tokenizer", "text_key"):
            value = getattr(self, name)
            unset = name == "tokenizer" and value is None
            require(unset or (isinstance(value, str) and value != ""), f"data.{name}", value, "a name")
