"""Text to tokens and back: bytes, or the `tokenizer.json` of the Hugging Face `tokenizers` package.

A tokenizer is saved as `tokenizer.json` next to what was made with it: a run, an export, shards.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol

import torch
from torch import Tensor

from nsa.config import require, require_int
from nsa.files import make_folder, parse_json, read_text, replace_text

log = logging.getLogger("nsa")

TOKENIZER_FILE = "tokenizer.json"
# Several times the largest in use.
MAX_TOKENIZER_BYTES = 2**28
MAX_VOCABULARY = 2**24
# Names of the token that ends a document, the most common first.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """The interface of a tokenizer that data, training and generation use."""

    name: str  # tokenizers with the same name give the same tokens
    vocab_size: int
    end: int  # the token that ends a document

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_documents(self, texts: Sequence[str]) -> list[Tensor]:
        """Per text an int32 tensor `[n]` on the CPU, with the end token."""
        ...

    def save(self, folder: Path) -> None: ...


class ByteTokenizer:
    """A token per byte of UTF-8. A document ends with byte 0, which is removed from its text."""

    name, vocab_size, end = "bytes", 256, 0
    warned = False

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Invalid UTF-8, and tokens that are no byte, become the replacement character."""
        return bytes(token if 0 <= token <= 0xFF else 0xFF for token in tokens).decode(errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> list[Tensor]:
        with_end = [text for text in texts if "\0" in text]
        if with_end and not self.warned:
            # Once: a source may have a million such texts.
            self.warned = True
            log.warning("byte 0 ends a document, and is removed from texts; one begins with %r", with_end[0][:60])
        buffers = [bytearray(text.replace("\0", "").encode() + b"\0") for text in texts]
        return [torch.frombuffer(buffer, dtype=torch.uint8).to(torch.int32) for buffer in buffers]

    def save(self, folder: Path) -> None:
        make_folder(folder)
        replace_text(folder / TOKENIZER_FILE, json.dumps({"type": self.name, "vocab_size": self.vocab_size}) + "\n")


class FileTokenizer:
    """A tokenizer of the `tokenizers` package, from the text of its `tokenizer.json`."""

    def __init__(self, text: str, origin: str) -> None:
        accepted = "'bytes' where the package `tokenizers` is not installed (pip install tokenizers)"
        require(find_spec("tokenizers") is not None, "tokenizer", origin, accepted)
        self.origin = origin
        with self.naming_errors("be read"):
            self.inner: Any = import_module("tokenizers").Tokenizer.from_str(text)
        # A special token that is spelled out in a text must not end the document.
        self.inner.encode_special_tokens = True
        # The loader takes care of lengths.
        self.inner.no_truncation()
        self.inner.no_padding()
        self.text = text
        vocabulary = self.inner.get_vocab(with_added_tokens=True)
        require(bool(vocabulary), "tokenizer", origin, "a tokenizer with a vocabulary")
        # Not the number of entries: there may be holes.
        largest = max(vocabulary.values())
        self.vocab_size = largest + 1
        require(largest < MAX_VOCABULARY, f"the largest token of {origin}", largest, f"below {MAX_VOCABULARY:,}")
        self.name = f"{self.inner.model.__class__.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        ends = [vocabulary[token] for token in END_TOKENS if token in vocabulary]
        require(bool(ends), "tokenizer", origin, f"one with a token that ends a document: {', '.join(END_TOKENS)}")
        self.end: int = ends[0]

    @contextmanager
    def naming_errors(self, what: str) -> Iterator[None]:
        """The package raises bare Exceptions, and panics that are no Exceptions at all."""
        try:
            yield
        except BaseException as error:
            # Anything else, such as a signal, does not come from the package.
            own = (TypeError, ValueError, OverflowError)
            if not (isinstance(error, own) or type(error) is Exception or type(error).__name__ == "PanicException"):
                raise
            accepted = f"one that can {what}: {shorten(str(error), 300)}"
            raise ValueError(f"tokenizer is {self.origin!r}; accepted: {accepted}") from error

    def encode(self, text: str) -> list[int]:
        with self.naming_errors("encode this text"):
            return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens beyond the vocabulary, which a model's may exceed, become the replacement character."""
        parts: list[str] = []
        run: list[int] = []
        for token in [*tokens, -1]:
            if 0 <= token < self.vocab_size:
                run.append(token)
                continue
            with self.naming_errors("decode its tokens"):
                parts += [self.inner.decode(run, skip_special_tokens=False), "\N{REPLACEMENT CHARACTER}"]
            run = []
        return "".join(parts[:-1])

    def encode_documents(self, texts: Sequence[str]) -> list[Tensor]:
        with self.naming_errors("encode these documents"):
            encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [torch.tensor([*encoding.ids, self.end], dtype=torch.int32) for encoding in encodings]

    def save(self, folder: Path) -> None:
        make_folder(folder)
        replace_text(folder / TOKENIZER_FILE, self.text)


def load_tokenizer(folder_or_name: str | Path) -> Tokenizer:
    """Load a tokenizer.

    Args:
        folder_or_name: "bytes", a `tokenizer.json`, or a folder with one.

    Returns:
        One of bytes where the file describes that, too.

    Raises:
        ValueError: there is no such file, or it is no tokenizer that can be used.
    """
    if folder_or_name == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(folder_or_name).expanduser()
    path = path / TOKENIZER_FILE if path.is_dir() else path
    accepted = f"'bytes', a {TOKENIZER_FILE}, or a folder that holds one"
    require(path.is_file(), "tokenizer", str(folder_or_name), accepted)
    text = read_text(path, MAX_TOKENIZER_BYTES)
    values = parse_json(text, f"tokenizer is {str(path)!r}; accepted: a file with JSON")
    if values.get("type") == ByteTokenizer.name:
        size = values.get("vocab_size", ByteTokenizer.vocab_size)
        require(size == ByteTokenizer.vocab_size, f"vocab_size in {path}", size, "256 for bytes")
        return ByteTokenizer()
    return ByteTokenizer() if values == byte_level_json() else FileTokenizer(text, str(path))


def byte_level_json() -> dict[str, Any]:
    """A `tokenizer.json` for Transformers with the tokens of `ByteTokenizer`: a BPE without merges, byte 0 the end."""
    end = END_TOKENS[0]
    # The byte-level alphabet shows printable bytes as themselves, and the others from U+0100 on.
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocabulary = {end: 0, **{letters[byte]: byte for byte in range(1, 256)}}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    off = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [{"id": 0, "content": end, **flags, "special": True}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", **unset, **off, "vocab": vocabulary, "merges": []},
    }


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, *, name: str = "model.vocab_size") -> None:
    """Check that a model has a row for every token.

    Args:
        tokenizer: gives the tokens.
        vocab_size: of the model.
        name: what the error calls it.

    Raises:
        ValueError: the tokenizer has more tokens than the model has rows.
    """
    accepted = f"at least {tokenizer.vocab_size}, the vocabulary of the tokenizer {tokenizer.name}"
    require(tokenizer.vocab_size <= vocab_size, name, vocab_size, accepted)


def check_bpe_vocabulary(name: str, vocab_size: int) -> None:
    """`ValueError` unless there is a token for every byte and for the end of a document."""
    require_int(name, vocab_size, at_least=257)
    require(vocab_size <= MAX_VOCABULARY, name, vocab_size, f"at most {MAX_VOCABULARY:,}")


def train_bpe(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """Train a byte-level BPE, which can encode any text.

    Args:
        texts: the corpus.
        vocab_size: tokens, those of the 256 bytes and the end of a document included.

    Returns:
        A tokenizer of at most `vocab_size` tokens.

    Raises:
        ValueError: `vocab_size` is out of range, or the package `tokenizers` is not installed.
    """
    check_bpe_vocabulary("vocab_size", vocab_size)
    require(find_spec("tokenizers") is not None, "tokenizer", "bpe", "'bytes' without `pip install tokenizers`")
    package = import_module("tokenizers")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    kept = {"special_tokens": [END_TOKENS[0]], "initial_alphabet": package.pre_tokenizers.ByteLevel.alphabet()}
    trainer = package.trainers.BpeTrainer(vocab_size=vocab_size, **kept, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return FileTokenizer(tokenizer.to_str(pretty=True), "the trained BPE")
