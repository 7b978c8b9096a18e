"""One optimizer step: forward, backward, clip, update.

Used by the trainer and by the benchmark, so that what is measured is what trains. It never waits for the device: losses
and norms stay tensors until someone reads them, and whether a step counts is decided where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa.data import Batch
from nsa.data.config import IGNORED
from nsa.model import LM
from nsa.train.distributed import mean_over_ranks, own_gradients, whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class StepResult(NamedTuple):
    """Tensors on the device, the same on every rank."""

    loss: Tensor
    grad_norm: Tensor
    # 1 where loss or gradients were not finite: nothing was updated.
    skipped: Tensor


class TrainStep:
    """AdamW on fp32 parameters; products in `dtype` by autocast.

    `module` is what is called in place of `model`: what `distributed.parallelize` made of it.
    """

    def __init__(
        self,
        model: LM,
        *,
        dtype: torch.dtype,
        compile: bool,
        cuda_graphs: bool = False,
        weight_decay: float = 0.1,
        grad_clip: float = 1.0,
        module: nn.Module | None = None,
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.grad_clip = grad_clip
        self.cuda_graphs = cuda_graphs
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.module = model if module is None else module
        self.forward: Any = self.module
        if cuda_graphs:
            # A graph replays a layer in one launch: what the host needs for thousands no longer counts.
            model.compile_layers(dynamic=False, mode="reduce-overhead")
        elif compile:
            self.forward = torch.compile(self.module, dynamic=False)
        # Norms and biases are not decayed: they set scales, they do not multiply.
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = self.device.type in ("cuda", "cpu")
        # Any: `found_inf`, which a fused optimizer reads, is no declared attribute.
        self.optimizer: Any = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)
        # fp16 has too few exponents for gradients; the others need no scale, and the scaler then does nothing.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        # Updates begun: an error between this and the end of a step leaves parameters that belong to neither step.
        self.begun = 0

    def __call__(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One update from the gradient of the mean loss over all tokens of `batches`, which lie on the device."""
        # A graph's gradients lie where its next replay writes: a second batch must be added to a place of its own.
        own_place = self.cuda_graphs and len(batches) > 1
        if own_place:
            for p in self.parameters:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        loss = torch.zeros((), device=self.device)
        for index, (batch, share) in enumerate(zip(batches, shares(batches), strict=True)):
            # Ranks exchange gradients once a step, with the last batch.
            with own_gradients(self.module) if index + 1 < len(batches) else nullcontext():
                if self.cuda_graphs:
                    # Nothing that the graphs of an earlier batch wrote is read again.
                    torch.compiler.cudagraph_mark_step_begin()
                with autocast(self.device, self.dtype):
                    part = self.forward(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens) * share
                # In this thread: Python in autograd's device thread costs the host 1.6 times as long.
                with torch.autograd.set_multithreading_enabled(False):
                    self.scaler.scale(part).backward()
            loss += part.detach()
        result = self.apply(mean_over_ranks(loss), lr)
        self.optimizer.zero_grad(set_to_none=not own_place)
        return result

    def apply(self, loss: Tensor, lr: float) -> StepResult:
        """Clip and update, unless something is not finite."""
        self.scaler.unscale_(self.optimizer)
        grad_norm = whole(nn.utils.clip_grad_norm_(self.parameters, self.grad_clip))
        skipped = (~torch.isfinite(loss + grad_norm)).float()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # The fused update reads this flag on the device and then leaves everything as it is, step count included. The
        # scaler's own `step` would look at the gradients alone.
        self.optimizer.found_inf = skipped
        self.begun += 1
        self.optimizer.step()
        self.scaler.update()
        return StepResult(loss, grad_norm, skipped)


def shares(batches: Sequence[Batch]) -> Tensor:
    """What the mean loss of each batch counts for in the mean over all tokens of all ranks: packed documents leave
    unequal numbers of tokens to score. The mean over the ranks of what each sums up with these is that mean."""
    counts = torch.stack([(batch.targets != IGNORED).sum() for batch in batches]).float()
    return counts / mean_over_ranks(counts.sum()).clamp_min(1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    # Only from pinned memory can a copy go on behind the host's back.
    def move(x: Tensor) -> Tensor:
        return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x

    return Batch(move(batch.tokens), move(batch.targets), None if batch.cu_seqlens is None else move(batch.cu_seqlens))


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """fp32 is what parameters already are: nothing to cast."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def learning_rate(
    step: int, steps: int, *, peak: float, warmup: int, floor: float, schedule: str = "cosine", decay: int = 0
) -> float:
    """Linear to `peak` over `warmup` steps, in the end `floor * peak`.

    In between half a cosine, or with "wsd" the peak until `decay` steps are left, and then straight down.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "wsd":
        left = (steps - 1 - step) / decay if decay else 1.0
        return peak * (floor + (1 - floor) * min(1.0, left))
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
