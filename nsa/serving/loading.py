"""The model of a Transformers folder in our own form, and its tokenizer and chat template from Transformers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import AutoTokenizer

import nsa.hf  # noqa: F401  registers the model type, by which a tokenizer is looked up
from nsa.config import require
from nsa.data.tokenizer import check_vocabulary, load_tokenizer
from nsa.files import read_json
from nsa.model import LM
from nsa.model.llama import CONFIG_FILE, MAX_JSON_BYTES, lm_config, load_llama_tensors, read_fields, read_weights
from nsa.serving.errors import bad_request

GENERATION_FILE = "generation_config.json"


def load_folder(folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> LM:
    """A model of `nsa export` or `nsa convert`, by default in the dtype it was saved in; a ValueError if the folder is
    not one of those, or damaged."""
    accepted = f"a folder with {CONFIG_FILE}; `nsa export {folder} --to DIR` makes one of a run"
    require((folder / CONFIG_FILE).is_file(), "DIR", str(folder), accepted)
    fields = read_fields(folder)
    config = lm_config(fields, fields.get("max_position_embeddings") or 2048)
    tensors = read_weights(folder)
    saved = next(iter(tensors.values())).dtype
    with torch.device("meta"):
        model = LM(config)
    model = model.to(saved if dtype is None else dtype).to_empty(device=device)
    load_llama_tensors(model, tensors, folder)
    return model.requires_grad_(False).eval()


class PromptEncoder:
    """Text and chats to tokens as Transformers does, and tokens to text as they arrive, with the tokenizer of a folder,
    of which no code is run. A ValueError if it is missing or damaged, or has more tokens than the model."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.decoder = load_tokenizer(folder)
        check_vocabulary(self.decoder, vocab_size)
        self.vocab_size = vocab_size
        self.inner: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # A tokenizer of Transformers must not be called by two threads at once.
        self.lock = threading.Lock()
        self.ends = self.end_tokens(folder)
        self.hidden = set(self.inner.all_special_ids)

    def end_tokens(self, folder: Path) -> set[int]:
        """The tokens that end an answer: those of the generation config, else the tokenizer's."""
        path = folder / GENERATION_FILE
        found = None
        if path.is_file():
            found = read_json(path, MAX_JSON_BYTES).get("eos_token_id")
        found = self.inner.eos_token_id if found is None else found
        return set(found) if isinstance(found, list) else {self.decoder.end if found is None else found}

    def encode_text(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a prompt; token ids stay as they are. A ServingError 400 for none, or an unknown one."""
        if isinstance(prompt, str):
            with self.lock:
                return self.checked(self.inner(prompt)["input_ids"])
        return self.checked(list(prompt))

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of a chat up to its answer; a ServingError 400 if there is no chat template, or it raises."""
        if not self.inner.chat_template:
            raise bad_request("the model has no chat template; accepted: /v1/completions", "no_chat_template")
        try:
            with self.lock:
                text = self.inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
                return self.checked(self.inner(text, add_special_tokens=False)["input_ids"])
        except TemplateError as error:
            raise bad_request(f"messages: {error}") from None

    def checked(self, tokens: list[int]) -> list[int]:
        if not tokens or min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise bad_request(
                f"the prompt has {len(tokens)} tokens; accepted: 1 or more, from 0 to {self.vocab_size - 1}"
            )
        return tokens
