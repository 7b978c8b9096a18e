"""The validation loss, and what identifies the data that it is of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from nsa.data import Batch
from nsa.model import LM
from nsa.train.distributed import from_all, mean_over_ranks
from nsa.train.step import autocast, shares, to_device


@torch.no_grad()
def mean_loss(model: LM, batches: Iterable[Batch], dtype: torch.dtype) -> Tensor:
    """The mean loss over the tokens of all ranks' `batches`; every rank calls it."""
    device = model.head_weight.device
    moved, losses = [], []
    for batch in batches:
        moved.append(to_device(batch, device))
        with autocast(device, dtype):
            losses.append(model(moved[-1].tokens, moved[-1].targets, cu_seqlens=moved[-1].cu_seqlens))
    return mean_over_ranks((torch.stack(losses) * shares(moved)).sum())


def fingerprint(batches: list[Batch], seq_len: int) -> str:
    """Of all ranks' batches together: the same where the same sequences are scored, whoever has which."""

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()

    rows = [torch.stack([batch.tokens, batch.targets], dim=-1).view(-1, seq_len, 2) for batch in batches]
    own = [digest(sequence.tolist()) for row in rows for sequence in row]
    return digest(sorted(from_all(own)))[:16]
