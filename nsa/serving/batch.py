"""A batch whose rows come and go: each request decodes in a slot of the same caches, at its own length.

A prompt is processed in caches of one row, which are then copied to a free slot. The decode step runs over all slots at
fixed addresses, so that on a GPU one CUDA graph is captured once and replayed for whatever requests there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nsa.config import require_positive_int
from nsa.generation.decoder import Replay, can_capture
from nsa.generation.options import Options
from nsa.model import LM


class SlotBatch:
    """Caches for `n_slots` requests that decode together, of up to `max_len` tokens each, allocated once."""

    @torch.inference_mode()
    def __init__(self, model: LM, n_slots: int, max_len: int, *, cuda_graph: bool = True) -> None:
        require_positive_int("n_slots", n_slots)
        self.model, self.n_slots, self.max_len = model, n_slots, max_len
        self.device = device = model.head_weight.device
        captured = can_capture(model, Options(max_new_tokens=1, cuda_graph=cuda_graph))
        self.caches = model.new_cache(n_slots, max_len, static=captured, max_rollback=1)
        self.prompt_caches = model.new_cache(1, max_len, max_rollback=1)
        # What the step feeds: each slot's last token, or nothing where the slot is not in use.
        self.tokens = torch.zeros(n_slots, 1, dtype=torch.long, device=device)
        self.counts = torch.zeros(n_slots, dtype=torch.long, device=device)
        self.logits = torch.zeros(n_slots, model.config.vocab_size, dtype=model.head_weight.dtype, device=device)
        self.replay = Replay(self.run, capture=captured)

    def bytes_used(self) -> int:
        return sum(cache.bytes_used() for cache in (*self.caches, *self.prompt_caches))

    @torch.inference_mode()
    def begin_prompt(self) -> None:
        for cache in self.prompt_caches:
            cache.reset()

    @torch.inference_mode()
    def extend_prompt(self, tokens: Sequence[int]) -> Tensor:
        """Process the next tokens of a prompt; returns the logits `[1, V]` after the last of them."""
        x = self.model.hidden(torch.tensor([tokens], device=self.device), caches=self.prompt_caches)
        return self.model.logits(x[:, -1])

    @torch.inference_mode()
    def occupy(self, slot: int) -> None:
        for cache, prompt in zip(self.caches, self.prompt_caches, strict=True):
            for buffer, row in zip(cache.buffers(), prompt.buffers(), strict=True):
                buffer[slot].copy_(row[0])
            cache.longest = max(cache.longest, prompt.longest)
        self.counts[slot] = 1

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Empty a slot, so that steps read nothing for it."""
        self.counts[slot] = 0
        row = torch.tensor([slot], device=self.device)
        for cache in self.caches:
            cache.reset(row)

    @torch.inference_mode()
    def step(self, tokens: Mapping[int, int]) -> Tensor:
        """Feed one token to each used slot, by slot; returns the logits `[n_slots, V]`, of which those count."""
        fed = [tokens.get(slot, 0) for slot in range(self.n_slots)]
        self.tokens.copy_(torch.tensor(fed)[:, None])
        self.replay()
        return self.logits

    def run(self) -> None:
        x = self.model.hidden(self.tokens, counts=self.counts, caches=self.caches)
        self.logits.copy_(self.model.logits(x[:, -1]))
