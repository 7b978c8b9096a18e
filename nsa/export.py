"""`nsa export`: a run as a folder that Transformers loads; needs no transformers itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from nsa.config import require
from nsa.data.tokenizer import (
    END_TOKENS,
    TOKENIZER_FILE,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    byte_level_json,
    check_vocabulary,
    load_tokenizer,
)
from nsa.dtypes import DTYPES
from nsa.files import make_folder, replace_text
from nsa.model import LM, load_model
from nsa.model.llama import llama_config, llama_tensors, write_folder


def run(args: argparse.Namespace) -> int:
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    model, tokenizer = load_model(args.run), load_tokenizer(args.run)
    export_run(model, tokenizer, args.to, dtype=dtype)
    kind = "NSALlamaForCausalLM" if model.config.kinds[0] == "nsa" else "LlamaForCausalLM"
    print(f"{args.to}: {kind}, {sum(p.numel() for p in model.parameters()):,} parameters, tokenizer {tokenizer.name}")
    if model.config.kinds[0] == "nsa":
        print("load it with: import nsa.hf; transformers.AutoModelForCausalLM.from_pretrained(folder)")
    return 0


def export_run(model: LM, tokenizer: Tokenizer, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a model and its tokenizer as Transformers reads them.

    Args:
        model: With NSA in every layer, or with dense attention in every layer, which becomes a `LlamaForCausalLM`.
        tokenizer: Of the model.
        folder: Created; must be empty.
        dtype: Of the parameters (default: as they are).

    Raises:
        ValueError: The folder holds files, the tokenizer has more tokens than the model, or there is no such model in
            Transformers.
    """
    require_empty(folder)
    check_vocabulary(tokenizer, model.config.vocab_size)
    fields = {**llama_config(model.config), "eos_token_id": tokenizer.end}
    tensors = {name: x if dtype is None else x.to(dtype) for name, x in llama_tensors(model).items()}
    write_folder(folder, fields, tensors)
    write_tokenizer(tokenizer, folder, model.config.seq_len)
    write_json(folder / "generation_config.json", {"eos_token_id": tokenizer.end, "pad_token_id": tokenizer.end})


def require_empty(folder: Path) -> None:
    """`ValueError` unless `folder` can be made, or is empty."""
    free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(free, "--to", str(folder), "a folder that does not exist yet, or is empty")


def write_json(path: Path, values: dict[str, Any]) -> None:
    replace_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_len: int) -> None:
    """`tokenizer.json` and `tokenizer_config.json`."""
    make_folder(folder)
    if isinstance(tokenizer, ByteTokenizer):
        write_json(folder / TOKENIZER_FILE, byte_level_json())
        end = END_TOKENS[0]
    else:
        assert isinstance(tokenizer, FileTokenizer)
        tokenizer.save(folder)
        end = tokenizer.inner.id_to_token(tokenizer.end)
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    write_json(folder / "tokenizer_config.json", {**values, "model_max_length": max_len})
