"""One optimizer step: forward, backward, clip, update; and the results of steps that are not logged yet.

Used by the trainer and by the benchmark, so that what is measured is what trains. A step never waits for the device:
losses and norms stay tensors until they are read, and whether a step is skipped is decided on the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa.attention import NSAAttention
from nsa.config import IGNORED
from nsa.data import Batch
from nsa.model import LM
from nsa.train.distributed import mean_over_ranks, no_gradient_sync, whole


class StepResult(NamedTuple):
    """Tensors on the device, the same on every rank."""

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor  # 1 where loss or gradients were not finite: nothing was updated


class TrainStep:
    """AdamW on fp32 parameters; matmuls in `dtype` by autocast.

    Args:
        model: the model; its parameters are updated in place.
        dtype: of matmuls; fp16 comes with a loss scale.
        compile: compile `module` with `torch.compile`.
        cuda_graphs: compile each layer and replay it as a CUDA graph; implies `compile`.
        weight_decay: of matrices; norms and biases are not decayed.
        gate_decay: of the matrices of NSA's gates too.
        grad_clip: largest norm of all gradients together.
        module: called in place of `model`; what `distributed.parallelize` returned for it.
    """

    def __init__(
        self,
        model: LM,
        *,
        dtype: torch.dtype,
        compile: bool,
        cuda_graphs: bool = False,
        weight_decay: float = 0.1,
        gate_decay: bool = True,
        grad_clip: float = 1.0,
        module: nn.Module | None = None,
    ) -> None:
        self.model, self.dtype, self.grad_clip, self.cuda_graphs = model, dtype, grad_clip, cuda_graphs
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.module = model if module is None else module
        self.forward: Any = self.module
        # A graph replays many launches as one, which takes the launch overhead off the host.
        mode = "reduce-overhead" if cuda_graphs else None
        # Layers of BigBird differ in what they draw: there is no one layer to compile for all.
        if cuda_graphs and "bigbird" not in model.config.kinds:
            model.compile_layers(dynamic=False, mode=mode)
        elif compile or cuda_graphs:
            self.forward = torch.compile(self.module, dynamic=False, mode=mode)
        # Norms and biases are not decayed: they set scales, they do not multiply.
        gates = [block.attention.gate for block in model.blocks if isinstance(block.attention, NSAAttention)]
        exempt = set() if gate_decay else {p for gate in gates for p in gate.parameters()}
        decayed = {p for p in self.parameters if p.dim() >= 2} - exempt
        groups = [
            {"params": [p for p in self.parameters if p in decayed], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters if p not in decayed], "weight_decay": 0.0},
        ]
        fused = self.device.type in ("cuda", "cpu")
        # Any: `found_inf`, which a fused optimizer reads, is no declared attribute.
        self.optimizer: Any = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)
        # fp16 has too few exponents for gradients; the others need no scale, and the scaler then does nothing.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        # Updates begun: an error between this and the end of a step leaves parameters that belong to neither step.
        self.begun = 0

    def __call__(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One update from the gradient of the mean loss over all tokens of `batches`.

        Args:
            batches: Of this rank, on the device.
            lr: The learning rate.

        Returns:
            The loss, the norm of the gradients before it is clipped, and whether the update was skipped.
        """
        # A graph's next replay overwrites its gradients: those of several batches are added up elsewhere.
        own_place = self.cuda_graphs and len(batches) > 1
        if own_place:
            for p in self.parameters:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        loss = torch.zeros((), device=self.device)
        for index, (batch, share) in enumerate(zip(batches, shares(batches), strict=True)):
            # Ranks exchange gradients once per step, with the last batch.
            with no_gradient_sync(self.module) if index + 1 < len(batches) else nullcontext():
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
    """The weight of each batch's mean loss, so that the weighted sums of all ranks average to the mean over all tokens:
    with packed documents, batches have unequal numbers of scored tokens."""
    counts = torch.stack([(batch.targets != IGNORED).sum() for batch in batches]).float()
    return counts / mean_over_ranks(counts.sum()).clamp_min(1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device without waiting, which needs pinned memory."""
    if device.type != "cuda":
        return batch
    return Batch._make(x if x is None else x.pin_memory().to(device, non_blocking=True) for x in batch)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Autocast to `dtype`; a null context for fp32, which parameters already are."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


class StepOutcome(NamedTuple):
    """The result of a step, read back from the device."""

    step: int  # counted from 0
    loss: float
    grad_norm: float
    saved: str | None  # for a skipped step, a message that says where its batches were saved


class PendingSteps:
    """Results of the steps since the last log step, and the batches of those that the device has not finished.

    A step's batches are needed only if it was skipped, so they are dropped, or passed to `save(step, batches)`, as soon
    as its result can be read without waiting: memory does not grow with the length of the log interval.
    """

    def __init__(self, device: torch.device, save: Callable[[int, Sequence[Batch]], str]) -> None:
        self.device, self.save = device, save
        self.running: deque[tuple[int, Tensor, torch.cuda.Event | None, Sequence[Batch]]] = deque()
        self.outcomes: list[StepOutcome] = []

    def __len__(self) -> int:
        return len(self.running) + len(self.outcomes)

    def add(self, step: int, result: StepResult, batches: Sequence[Batch]) -> None:
        values, arrived = torch.stack(result), None
        if self.device.type == "cuda":
            # A copy that does not wait needs pinned memory.
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(self.device))
        self.running.append((step, values, arrived, batches))
        self.poll()

    def poll(self) -> None:
        """Read back the steps that are finished; never waits."""
        while self.running and (self.running[0][2] is None or self.running[0][2].query()):
            step, values, _, batches = self.running.popleft()
            loss, grad_norm, skipped = values.tolist()
            self.outcomes.append(StepOutcome(step, loss, grad_norm, self.save(step, batches) if skipped else None))

    def wait(self) -> list[StepOutcome]:
        """The outcomes of all steps since the last call, in order; waits for the device."""
        wait_asleep(self.device)
        self.poll()
        outcomes, self.outcomes = self.outcomes, []
        return outcomes


def wait_asleep(device: torch.device) -> None:
    """Wait until the device is idle. Reading a value would wait too, but keep a core busy."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)
        done.record()
        done.synchronize()


def learning_rate(
    step: int, steps: int, *, peak: float, warmup: int, floor: float, schedule: str = "cosine", decay: int = 0
) -> float:
    """The schedule of the learning rate.

    Args:
        step: counted from 0.
        steps: of the whole run.
        peak: the rate after a linear warm-up over `warmup` steps.
        warmup: steps of the warm-up.
        floor: the rate of the last step as a fraction of `peak`.
        schedule: "cosine" falls along half a cosine; "wsd" stays at the peak and falls linearly in the last `decay`.
        decay: steps of that fall.

    Returns:
        The rate of `step`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "wsd":
        left = (steps - 1 - step) / decay if decay else 1.0
        return peak * (floor + (1 - floor) * min(1.0, left))
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
