"""Compile kernels in parallel before the first step, with progress messages."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from nsa.attention import NSAAttention
from nsa.backends.problem import Problem
from nsa.backends.routing import router
from nsa.data import Batch
from nsa.model.config import LMConfig
from nsa.train.config import TrainConfig
from nsa.train.step import to_device

# Kernels between two lines of progress.
REPORT_EVERY = 12


def compile_kernels(
    config: LMConfig, batch: Batch, device: torch.device, dtype: torch.dtype, progress: Callable[[str, int, int], None]
) -> None:
    """Compile the kernels of one NSA layer, both passes, for batches shaped like `batch`; after each, call `progress`
    with its name, how many are done and how many there are."""
    if "nsa" not in config.kinds:
        return
    rows, length = batch.tokens.shape
    problem = Problem.of_config(config.attn, batch=rows, length=length, dtype=dtype, device=device.type, backward=True)
    backend = router().route(problem.for_op("sliding"), config.attn.backend).backend
    compile_ahead = getattr(router().backends.get(str(backend)), "compile_ahead", None)
    if compile_ahead is not None:
        layer = NSAAttention(config.attn).to(device, dtype)
        x = torch.zeros(rows, length, config.attn.dim, device=device, dtype=dtype)
        compile_ahead(lambda: layer(x, cu_seqlens=batch.cu_seqlens).sum().backward(), progress)


def warm_up(
    config: TrainConfig, batch: Batch, device: torch.device, dtype: torch.dtype, log: Callable[[str], None]
) -> None:
    """Compile the kernels of a run on batches like `batch`, and announce what torch compiles after them."""
    if device.type != "cuda":
        return
    begin = time.perf_counter()

    def report(kernel: str, done: int, total: int) -> None:
        if done == total or done % REPORT_EVERY == 0:
            log(f"[compile] {done} of {total} attention kernels, {time.perf_counter() - begin:.1f} s: {kernel}")

    compile_kernels(config.model, to_device(batch, device), device, dtype, report)
    if config.compile or config.cuda_graphs:
        log("[compile] torch.compile of the training step: about half a minute on a new machine, before the first step")
