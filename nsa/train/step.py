"""One optimizer step: forward, backward, clip, update.

Used by the trainer and by the benchmark, so that what is measured is what trains. It never waits for the device: losses
and norms stay tensors until someone reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa.data.corpus import Batch
from nsa.model import LM


class StepResult(NamedTuple):
    """Tensors on the device."""

    loss: Tensor
    grad_norm: Tensor


class TrainStep:
    """AdamW on fp32 parameters; products in `dtype` by autocast."""

    def __init__(
        self,
        model: LM,
        *,
        dtype: torch.dtype,
        compile: bool,
        cuda_graphs: bool = False,
        weight_decay: float = 0.1,
        grad_clip: float = 1.0,
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.grad_clip = grad_clip
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        # A graph replays a whole forward or backward in one launch: what the host needs for thousands no longer counts.
        mode = "reduce-overhead" if cuda_graphs else None
        self.forward = torch.compile(model, dynamic=False, mode=mode) if compile or cuda_graphs else model
        # Norms and biases are not decayed: they set scales, they do not multiply.
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = self.device.type in ("cuda", "cpu")
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)

    def __call__(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One update from the mean gradient of `batches`, which lie on the device."""
        loss = torch.zeros((), device=self.device)
        for tokens, targets in batches:
            with autocast(self.device, self.dtype):
                part = self.forward(tokens, targets) / len(batches)
            part.backward()
            loss += part.detach()
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, grad_norm)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """fp32 is what parameters already are: nothing to cast."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def learning_rate(step: int, steps: int, *, peak: float, warmup: int, floor: float) -> float:
    """Linear to `peak` over `warmup` steps, then half a cosine down to `floor * peak` at the last of `steps`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
