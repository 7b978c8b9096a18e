"""Small corpora on disk, and a loader that opens them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from nsa import cli
from nsa.data import DataConfig, Loader, open_loader, prepare

needs_tokenizers = pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs tokenizers")

TEXTS = [f"document {index:02}: " + "abcdefgh"[index % 8] * (5 + index) for index in range(45)]


def command(*words: str) -> int:
    """`nsa data WORDS`."""
    return prepare.run(cli.parser_of("data").parse_args(words))


def opened(config: DataConfig, split: str = "train", **values: Any) -> Loader:
    return open_loader(config, **{"split": split, "batch_size": 1, "seq_len": 16, "seed": 0, **values})


def text_files(folder: Path, texts: list[str] = TEXTS) -> Path:
    for index, text in enumerate(texts):
        path = folder / f"part_{index % 3}" / f"{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def jsonl_file(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path
