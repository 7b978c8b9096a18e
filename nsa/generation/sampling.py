"""The next token from logits, on the device and without reading anything back."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.generation.options import Options
from nsa.rope import fused

# The largest number drawn: times a sum of probabilities it stays below that sum.
MAX_DRAW = 1 - 2**-50


def draws(options: Options, batch_size: int, n_tokens: int, device: torch.device) -> Tensor:
    """Uniform random numbers in `[0, 1)`, fp64 `[B, n_tokens]`, or `[B, 1]` zeros for greedy decoding. Those of a row
    depend on its seed alone: not on the device, the batch or `n_tokens`."""
    if options.temperature == 0:
        return torch.zeros(batch_size, 1, dtype=torch.float64, device=device)
    streams = [torch.Generator().manual_seed(options.seed + row) for row in range(batch_size)]
    rows = [torch.rand(n_tokens, dtype=torch.float64, generator=stream) for stream in streams]
    return torch.stack(rows).clamp_max(MAX_DRAW).to(device)


def pick(logits: Tensor, draw: Tensor | None, options: Options, seen: Tensor | None = None) -> Tensor:
    """The next token at every position, int64 `[...]`, -1 where `logits [..., V]` are not finite.

    Args:
        logits: `[..., V]`.
        draw: `[...]` uniform random numbers in `[0, 1)`; None for greedy decoding.
        options: Temperature, filters and penalty.
        seen: bool, broadcast to `[..., V]`: the tokens that `repetition_penalty` applies to. None: no penalty.
    """
    if options.temperature == 0 and seen is None and fused(logits):
        from nsa.backends.triton.greedy import most_likely

        return most_likely(logits)
    finite = logits.isfinite().all(dim=-1)
    # A CUDA assert on NaN would end the process.
    logits = logits.where(finite[..., None], 0.0).float()
    if seen is not None:
        logits = penalize(logits, seen, options.repetition_penalty)
    if options.temperature == 0:
        return logits.argmax(dim=-1).where(finite, -1)
    assert draw is not None
    probabilities = (logits / options.temperature).softmax(dim=-1)
    if options.top_k is None and options.top_p is None and options.min_p is None:
        return inverse_cdf(probabilities, draw).where(finite, -1)
    probabilities, tokens = filtered(probabilities, options)
    return tokens.gather(-1, inverse_cdf(probabilities, draw)[..., None]).squeeze(-1).where(finite, -1)


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Lower the logits of tokens that were `seen`, for a penalty above 1."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered(probabilities: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """What top-k, then top-p, and min-p leave of `probabilities [..., V]`: in descending order, 0 for tokens left out
    and not normalized, and the token ids, `[..., top_k]` each."""
    kept, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    if options.top_k is not None:
        kept = kept[..., : options.top_k]
        tokens = tokens[..., : options.top_k]
    top = kept[..., :1]
    if options.top_p is not None:
        # A token stays where those before it do not reach top_p yet: the first one always does.
        total = kept.cumsum(dim=-1, dtype=torch.float64)
        kept = kept.masked_fill(total - kept >= options.top_p * total[..., -1:], 0.0)
    if options.min_p is not None:
        kept = kept.masked_fill(kept < options.min_p * top, 0.0)
    return kept, tokens


def inverse_cdf(probabilities: Tensor, draw: Tensor) -> Tensor:
    """The first index where the sum of `probabilities [..., N]` exceeds `draw [...]` times its total."""
    total = probabilities.cumsum(dim=-1, dtype=torch.float64)
    return (total <= draw[..., None] * total[..., -1:]).sum(dim=-1)
