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
    check_vocabulary,
    load_tokenizer,
)
from nsa.files import make_folder, replace_text
from nsa.model import LM, load_model
from nsa.model.llama import llama_config, llama_tensors, write_folder

# What the exported byte tokenizer calls the end of a document, byte 0.
END_OF_DOCUMENT = END_TOKENS[0]


def run(args: argparse.Namespace) -> int:
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
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
        end = END_OF_DOCUMENT
    else:
        assert isinstance(tokenizer, FileTokenizer)
        tokenizer.save(folder)
        end = tokenizer.inner.id_to_token(tokenizer.end)
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    write_json(folder / "tokenizer_config.json", {**values, "model_max_length": max_len})


def byte_level_json() -> dict[str, Any]:
    """A `tokenizer.json` whose tokens are those of `ByteTokenizer`: a BPE without merges."""
    # The byte-level alphabet shows printable bytes as themselves, and the others from U+0100 on.
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocabulary = {END_OF_DOCUMENT: 0, **{letters[byte]: byte for byte in range(1, 256)}}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": END_OF_DOCUMENT, **flags, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
