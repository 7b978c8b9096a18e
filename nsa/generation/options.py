"""The options of generation, checked when they are built."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nsa.config import check_fields, require
from nsa.files import is_natural

# Logits divided by less than it, or multiplied by more than its inverse, may overflow in fp32.
MIN_SCALE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the tokens after a prompt are generated.

    Args:
        max_new_tokens: Most tokens per row.
        temperature: 0 takes the most likely token (greedy), and then no filter may be given.
        top_k: Sample from the `top_k` most likely tokens; ties go to the lower token id.
        top_p: Sample from the most likely tokens whose probabilities first sum to `top_p`, after `top_k`.
        min_p: Sample from tokens at least `min_p` times as likely as the most likely one.
        repetition_penalty: Divides positive logits of tokens that the prompt or the new text holds, and multiplies
            negative ones. 1: none.
        seed: Row `b` draws from its own stream, seeded with `seed + b`, so that it does not depend on other rows.
        end: Token that ends a row; it is not part of the output. None: no token does.
        prompt_lookup: Speculative decoding: most tokens that are copied from after an earlier occurrence of the last
            n-gram and verified in one step. 0: off. Up to 7 run in the decode kernels, more in those of prefill.
        lookup_ngram: Length of that n-gram, in tokens.
        max_len: Most tokens per row, prompt included; a row that reaches it ends. None: what the longest prompt needs.
        prefill_chunk: Most prompt tokens per row and prefill step.
        cuda_graph: On a GPU, capture the decode step in a CUDA graph. `strict` models always run eagerly.
        quantize: `"fp8"` stores the caches in fp8. Needs NSA in every layer.
        page_size: Tokens per page of paged caches, in which each row takes only the memory that it may need. Needs NSA
            in every layer.
        save_cache: File to save the caches of the prompts to.
        load_cache: File with caches of the beginning of each prompt, which is then not computed again.

    Raises:
        ValueError: An argument has a wrong type or value, or excludes another one.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0
    end: int | None = None
    prompt_lookup: int = 0
    lookup_ngram: int = 3
    max_len: int | None = None
    prefill_chunk: int = 8192
    cuda_graph: bool = True
    quantize: Literal["fp8"] | None = None
    page_size: int | None = None
    save_cache: Path | str | None = None
    load_cache: Path | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, {"seed": 0, "end": 0, "prompt_lookup": 0, "max_len": 2, "temperature": 0, "min_p": 0})
        for name in ("save_cache", "load_cache"):
            path = getattr(self, name)
            require(path is None or isinstance(path, Path | str), name, path, "a path")
        accepted = f"0 for the most likely token, or a finite number of at least {MIN_SCALE}"
        require(self.temperature == 0 or self.temperature >= MIN_SCALE, "temperature", self.temperature, accepted)
        inside = MIN_SCALE <= self.repetition_penalty <= 1 / MIN_SCALE
        accepted = f"a number from {MIN_SCALE} to {1 / MIN_SCALE}"
        require(inside, "repetition_penalty", self.repetition_penalty, accepted)
        require(self.top_p is None or self.top_p <= 1, "top_p", self.top_p, "a number above 0, at most 1")
        require(self.min_p is None or self.min_p <= 1, "min_p", self.min_p, "a number from 0 to 1")
        for name in ("top_k", "top_p", "min_p"):
            value = getattr(self, name)
            accepted = "None with temperature = 0, which takes the most likely token"
            require(value is None or self.temperature != 0, name, value, accepted)

    def check(self, prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
        """Check what depends on the prompts and the model.

        Args:
            prompts: The token ids of each row.
            vocab_size: The model's.

        Raises:
            ValueError: A prompt is empty, too long or has an impossible token id, or an option is impossible.
        """
        require(self.top_k is None or self.top_k <= vocab_size, "top_k", self.top_k, f"1 to {vocab_size}, the tokens")
        if self.save_cache is not None:
            path = Path(self.save_cache).absolute()
            fits = not path.is_dir() and path.parent.is_dir() and os.access(path.parent, os.W_OK)
            require(fits, "save_cache", self.save_cache, "a file in a folder that exists and can be written")
        ids = f"from 0 to {vocab_size - 1}"
        require(self.end is None or self.end < vocab_size, "end", self.end, f"None or a token id {ids}")
        require(isinstance(prompts, Sequence) and len(prompts) > 0, "prompts", prompts, "a list of at least one prompt")
        for row, prompt in enumerate(prompts):
            found = isinstance(prompt, Sequence) and len(prompt) > 0
            valid = found and all(is_natural(token) and token < vocab_size for token in prompt)
            require(valid, f"prompts[{row}]", prompt, f"at least one token id, each an integer {ids}")
            fits = self.max_len is None or len(prompt) < self.max_len
            accepted = f"less than max_len = {self.max_len}, so that a new token fits"
            require(fits, f"the length of prompts[{row}]", len(prompt), accepted)
