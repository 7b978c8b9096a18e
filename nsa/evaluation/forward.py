"""A run's model as evaluations use it: its tokenizer, its dtype, and a forward pass in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nsa.data.tokenizer import Tokenizer, check_vocabulary
from nsa.dtypes import DTYPES
from nsa.model import LM
from nsa.train.run_folder import run_names
from nsa.train.run_model import load_run
from nsa.train.step import autocast


@dataclass(frozen=True)
class EvalModel:
    """A model under evaluation."""

    name: str
    run: Path
    model: LM
    tokenizer: Tokenizer
    dtype: torch.dtype  # of matmuls, by autocast as in training
    chunk: int  # most tokens of a forward pass; longer rows go through caches in chunks of this length

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device


def open_models(
    runs: Sequence[Path], *, device: torch.device, dtype: str | None = None, chunk: int = 8192
) -> list[EvalModel]:
    """The models of folders that `nsa train` wrote; `dtype` of matmuls by default bfloat16 on a GPU, else float32. A
    ValueError if a folder has no model, or the model no row for some token of its tokenizer."""
    matmul_dtype = DTYPES[dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    subjects = []
    for run, name in zip(runs, run_names(runs), strict=True):
        model, tokenizer = load_run(run, device)
        check_vocabulary(tokenizer, model.config.vocab_size, name=f"vocab_size of the model in {run}")
        subjects.append(EvalModel(name, run, model, tokenizer, matmul_dtype, chunk))
    return subjects


def hidden_chunks(subject: EvalModel, tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The input of the head for `tokens [B, S]`, in order: `(start, x [B, T, D])`, each at most `chunk` columns."""
    length = tokens.shape[1]
    if length <= subject.chunk:
        with autocast(subject.device, subject.dtype):
            yield 0, subject.model.hidden(tokens)
        return
    # Without autocast, keys have the dtype of the parameters.
    dtype = None if subject.dtype == torch.float32 else subject.dtype
    caches = subject.model.new_cache(tokens.shape[0], length, dtype=dtype)
    for start in range(0, length, subject.chunk):
        with autocast(subject.device, subject.dtype):
            yield start, subject.model.hidden(tokens[:, start : start + subject.chunk], caches=caches)
