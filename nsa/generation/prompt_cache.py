"""Prompts that were processed before: caches saved with their tokens, so that a long prompt is paid for once.

A prompt is always given whole. What a saved row holds of its beginning is not computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.attention import NSAAttention
from nsa.cache import read_saved
from nsa.config import require
from nsa.model import LM
from nsa.model.transformer import Cache

# Values of each parameter that identify a model.
SAMPLE = 1024
# `seq_len` changes no cache, and each cache compares `attn` itself.
UNHASHED_FIELDS = ("seq_len", "attn")


def model_fingerprint(model: LM) -> str:
    """A hash of the config, as the same weights may be those of another attention, and of some values of every
    parameter: training changes nearly all of them."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in UNHASHED_FIELDS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, x in model.state_dict().items():
        flat = x.detach().flatten()
        some = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].double().cpu()
        digest.update(f"{name} {tuple(x.shape)} {some.tolist()}".encode())
    return digest.hexdigest()


def load_prompt_cache(
    path: Path, model: LM, prompts: Sequence[Sequence[int]], max_len: int, **options: Any
) -> tuple[list[Cache], list[int]]:
    """Caches with the beginning of each prompt, from the row of the file that holds most of it, and how many tokens of
    each prompt they hold; `options` are more arguments of `LM.new_cache`.

    At least the last token of a prompt is left to be processed, because its logits are needed. A saved row may go on
    after the beginning it shares with the prompt for at most as many tokens as it can roll back: tokenizers may merge
    its last characters with those that follow. A ValueError if the file is damaged, or of another model or form, or a
    prompt starts with no row that was saved.
    """
    saved = read_saved(path)
    # Rounded weights would be those of another model, too.
    dtype = model.head_weight.dtype
    require(saved.dtype == dtype, f"the dtype of {path}", saved.dtype, f"the model's, {dtype}")
    same = saved.model == model_fingerprint(model)
    require(same, f"the model of {path}", saved.model, "this one, with the same config and weights")
    quantize = options.get("quantize")
    found = saved.forms[0].get("quantize")
    require(found == quantize, f"quantize of {path}", found, f"the option's, {quantize}")
    rows = saved.tokens() or []
    max_rollback = saved.forms[0]["max_rollback"]
    matches = [longest_match(path, i, prompt, rows, max_rollback) for i, prompt in enumerate(prompts)]
    sources, counts = zip(*matches, strict=True)
    caches = model.new_cache(len(prompts), max_len, **options)
    for layer, (block, cache) in enumerate(zip(model.blocks, caches, strict=True)):
        kind = "nsa" if isinstance(block.attention, NSAAttention) else "dense"
        saved.form(layer, block.attention.config, kind=kind, n_layers=len(caches))
        saved.restore(cache, layer, rows=sources, lengths=counts)
    return caches, list(counts)


def longest_match(
    path: Path, index: int, prompt: Sequence[int], rows: Sequence[Sequence[int]], max_rollback: int
) -> tuple[int, int]:
    """The saved row that holds most of the beginning of a prompt, and how many tokens that is, without the last. Rows
    that can always be cropped to what they share with the prompt come first."""
    matches = [common_prefix(prompt, row) for row in rows]
    removed = [len(row) - min(match, len(prompt) - 1) for row, match in zip(rows, matches, strict=True)]
    best = max(range(len(rows)), key=lambda row: (removed[row] <= max_rollback, matches[row]), default=None)
    require(best is not None, f"tokens in {path}", None, "the tokens of each row")
    assert best is not None
    accepted = f"a prompt that starts with the {len(rows[best])} tokens of row {best} of {path}, its nearest"
    require(matches[best] > 0, f"prompts[{index}]", list(prompt), accepted)
    return best, min(matches[best], len(prompt) - 1)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))
