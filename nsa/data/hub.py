"""Documents streamed from the Hugging Face hub, in the order of the data set.

A stream has no random access, so what is shuffled is the documents of each chunk, and then the windows of each pool.
`datasets` says where a chunk begins, and that goes into the checkpoint: resuming reads on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

from nsa.config import require
from nsa.data.documents import Chunk, OnBad, encodable, stop

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
FINEWEB_EDU_SUBSET = "sample-10BT"

# Documents in a chunk.
ROWS = 1000


class HubDocuments:
    few = False
    doing = "nothing yet"

    def __init__(self, dataset: str, subset: str | None, *, text_key: str, on_bad: OnBad = stop) -> None:
        require(
            find_spec("datasets") is not None,
            "data.source",
            f"hf:{dataset}",
            "another one, because the package `datasets` is not installed (pip install datasets)",
        )
        self.dataset, self.subset, self.text_key, self.on_bad = dataset, subset, text_key, on_bad
        self.name = f"hf:{dataset}" + (f" ({subset})" if subset else "")
        self.fingerprint = self.name

    def chunks(self, seed: int, epoch: int, first: int, bookmark: Any) -> Iterator[Chunk]:
        self.doing = f"opening {self.name}"
        load_dataset = import_module("datasets").load_dataset
        stream = load_dataset(self.dataset, self.subset, split="train", streaming=True)
        if bookmark is not None:
            stream.load_state_dict(bookmark)
        elif first:
            stream = stream.skip(first * ROWS)
        rows = iter(stream)
        while True:
            self.doing = f"reading documents {first * ROWS:,} to {(first + 1) * ROWS - 1:,} of {self.name}"
            texts = [self.text(row, number) for number, row in enumerate(islice(rows, ROWS), first * ROWS)]
            if not texts:
                return
            yield Chunk(texts, first * ROWS, bookmark)
            first, bookmark = first + 1, stream.state_dict()

    def text(self, row: dict[str, Any], number: int) -> str:
        require(self.text_key in row, "data.text_key", self.text_key, f"a column of {self.name}: {sorted(row)}")
        text = row[self.text_key]
        where = f"document {number:,} of {self.name}"
        if not (text is None or isinstance(text, str)):
            self.on_bad(where, f"has no text: {self.text_key!r} is a {type(text).__name__}", 1)
            return ""
        try:
            return encodable(text or "")
        except ValueError as error:
            self.on_bad(where, str(error), 1)
            return ""
