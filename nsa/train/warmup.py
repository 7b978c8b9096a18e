"""Compile the attention kernels of a run in parallel, before its first step needs them one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa.attention import NSAAttention
from nsa.backends.problem import Problem
from nsa.backends.routing import router
from nsa.data import Batch
from nsa.model.config import LMConfig

# Told after each kernel: its name, how many are done, how many there are.
Progress = Callable[[str, int, int], None]


def compile_kernels(
    config: LMConfig, batch: Batch, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> int:
    """Compile what one NSA layer launches, forward and backward, on batches shaped like `batch`.

    Returns:
        How many kernels; 0 where the backend that runs the layer compiles none.
    """
    if "nsa" not in config.kinds:
        return 0
    batch_size, length = batch.tokens.shape
    problem = Problem.of_config(
        config.attn, batch=batch_size, length=length, dtype=dtype, device=device.type, backward=True
    )
    chosen = router().route(problem.for_op("sliding"), config.attn.backend).chosen
    compile_ahead = getattr(router().backends.get(str(chosen)), "compile_ahead", None)
    if compile_ahead is None:
        return 0
    layer = NSAAttention(config.attn).to(device, dtype)
    x = torch.zeros(batch_size, length, config.attn.dim, device=device, dtype=dtype)
    count: int = compile_ahead(lambda: layer(x, cu_seqlens=batch.cu_seqlens).sum().backward(), progress)
    return count
