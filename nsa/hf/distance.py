"""How far a converted model is from the dense one it comes from."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from nsa.config import require
from nsa.data.tokenizer import load_tokenizer
from nsa.files import read_text

# Positions whose logits are computed at a time.
LOGIT_ROWS = 512
MAX_TEXT_BYTES = 2**30


@dataclass(frozen=True)
class Distance:
    """Over the first `length` tokens of a text."""

    length: int
    difference: float  # largest difference of two logits
    largest: float  # largest logit of the dense model
    dense_perplexity: float
    perplexity: float

    def __str__(self) -> str:
        share = self.difference / self.largest
        return (
            f"{self.length:>8,}{self.difference:>14.2e}{share:>12.1e}"
            f"{self.dense_perplexity:>14.4f}{self.perplexity:>14.4f}"
        )


DISTANCE_HEADER = f"{'tokens':>8}{'logits differ':>14}{'relative':>12}{'ppl, dense':>14}{'ppl, nsa':>14}"


def text_tokens(folder: Path, length: int, file: Path | None) -> Tensor:
    """`[1, n]`, up to `length` tokens of a text file, or of Python's standard library; a ValueError if only one."""
    tokenizer = load_tokenizer(folder)
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokens: list[int] = []
    for path in library if file is None else [file]:
        tokens += tokenizer.encode(read_text(path, MAX_TEXT_BYTES))
        if len(tokens) >= length:
            break
    require(len(tokens) >= 2, "--text", str(file), "a text of at least two tokens")
    return torch.tensor([tokens[:length]])


@torch.no_grad()
def logit_distances(
    dense: Path, converted: Path, tokens: Tensor, lengths: list[int], *, device: str = "cpu", dtype: str | None = None
) -> list[Distance]:
    """Compare two folders on `tokens [1, n]`, by one pass, at every length up to `n`: attention is causal."""
    options: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False, "dtype": dtype or "auto"}
    hidden, heads = [], []
    for folder in (dense, converted):
        model = AutoModelForCausalLM.from_pretrained(folder, **options).to(device).eval()
        hidden.append(model.model(input_ids=tokens.to(device), use_cache=False).last_hidden_state[0])
        heads.append(model.lm_head)
    rows = []
    for first in range(0, tokens.shape[1], LOGIT_ROWS):
        chunk = slice(first, first + LOGIT_ROWS)
        ours, other = (head(x[chunk]).float() for head, x in zip(reversed(heads), reversed(hidden), strict=True))
        # The last token has no target; its loss is not used.
        targets = tokens[0].roll(-1)[chunk].to(device)
        losses = [F.cross_entropy(x, targets, reduction="none") for x in (other, ours)]
        rows.append(torch.stack([(ours - other).abs().amax(dim=1), other.abs().amax(dim=1), *losses]))
    differ, largest, dense_loss, loss = torch.cat(rows, dim=1).double().cpu()
    found = []
    for n in sorted({n for n in lengths if n <= tokens.shape[1]}):
        perplexities = [x[: max(1, n - 1)].mean().exp().item() for x in (dense_loss, loss)]
        found.append(Distance(n, differ[:n].max().item(), largest[:n].max().item(), *perplexities))
    return found
