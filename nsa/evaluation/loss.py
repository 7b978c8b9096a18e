"""The validation loss, and how it falls with the position in the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import torch
from torch import Tensor

from nsa.config import require_positive_int
from nsa.data import DataConfig, open_loader
from nsa.evaluation.forward import EvalModel, hidden_chunks
from nsa.model.loss import CHUNK_ROWS, log_softmax_chunks, padded_table, row_losses

# Bins of positions for each doubling of the position.
BINS_PER_DOUBLING = 2


@dataclass(frozen=True)
class PositionLoss:
    """The mean loss of the tokens at positions `begin` to `end - 1`."""

    begin: int
    end: int
    loss: float
    tokens: int


@torch.inference_mode()
def token_losses(subject: EvalModel, tokens: Tensor, targets: Tensor) -> Tensor:
    """fp32 `[B, S]` on the CPU: the loss of each of `tokens [B, S]`, 0 where the target is -100."""
    weight, losses = subject.model.head_weight, []
    for start, x in hidden_chunks(subject, tokens):
        own = targets[:, start : start + x.shape[1]].reshape(-1)
        rows = x.reshape(-1, x.shape[-1])
        chunks = log_softmax_chunks(rows, padded_table(weight, x.dtype), weight.shape[0], own, CHUNK_ROWS)
        losses.append(torch.cat([row_losses(logp, t) for _, t, logp in chunks]).view(x.shape[:2]).float().cpu())
    return torch.cat(losses, dim=1)


def evaluate_loss(
    subject: EvalModel,
    data: DataConfig,
    *,
    seq_len: int,
    windows: int,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[float, list[PositionLoss]]:
    """The loss on windows of the validation split.

    Args:
        subject: The model.
        data: Where the text comes from; its tokenizer must be the run's.
        seq_len: Tokens in a window; longer ones than the model was trained on show how far it extrapolates.
        windows: How many.
        progress: Called with the number of windows done.

    Returns:
        The mean over all tokens, and the means over bins of positions.

    Raises:
        ValueError: A number is less than 1, the data cannot be read, or it has no window of that length.
    """
    require_positive_int("windows", windows)
    require_positive_int("seq_len", seq_len)
    # Documents of a window see each other here, as in a run that does not pack: positions are those of the window.
    config = replace(data, pack=False, prefetch=False)
    total, counts = torch.zeros(seq_len), torch.zeros(seq_len)
    vocab_size = subject.model.config.vocab_size
    with open_loader(config, split="valid", batch_size=1, seq_len=seq_len, seed=0, vocab_size=vocab_size) as loader:
        for done, batch in enumerate(islice(loader, windows), 1):
            targets = batch.targets.to(subject.device)
            losses = token_losses(subject, batch.tokens.to(subject.device), targets)
            total += losses.sum(0)
            counts += (batch.targets >= 0).sum(0)
            progress(done)

    def mean(a: int, b: int) -> PositionLoss:
        count = counts[a:b].sum()
        return PositionLoss(a, b, (total[a:b].sum() / count.clamp_min(1)).item(), int(count))

    return mean(0, seq_len).loss, [mean(a, b) for a, b in pairwise(bin_edges(seq_len))]


def bin_edges(length: int) -> list[int]:
    """The edges of bins from 0 to `length`, each bin a fixed factor further out than the last."""
    edges, k = {0, length}, 0
    while (edge := round(2 ** (k / BINS_PER_DOUBLING))) < length:
        edges.add(edge)
        k += 1
    return sorted(edges)
