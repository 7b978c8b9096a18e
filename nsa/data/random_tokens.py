"""Tokens without a meaning, for benchmarks, where only shapes matter."""

from __future__ import annotations

import torch
from torch import Tensor


def synthetic(
    batch_size: int, length: int, vocab_size: int, *, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Uniformly random `(tokens, targets)`, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    window = torch.randint(vocab_size, (batch_size, length + 1), generator=generator, device=device)
    return window[:, :-1], window[:, 1:]
