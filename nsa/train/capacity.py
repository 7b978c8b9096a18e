"""Whether a run fits this machine's memory, from arithmetic alone: asked before anything of its size is built."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nsa.train.config import TrainConfig
from nsa.train.plan import GIB, estimate_memory

# The estimate is above the peak, if by less than this: what is refused would not have run.
MARGIN = 1.25

# Bytes of a token in a batch: itself and its target; and of a generated one: its place in the list and in the result.
TOKEN_BYTES = 16

# Attention whose cache stops growing with the text.
BOUNDED = ("sliding", "longformer")

# Where a container's limit is, with cgroups of version 2 and 1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_capacity(config: TrainConfig, ranks: int = 1) -> None:
    """Refuse a run that cannot fit.

    Args:
        config: the run; its device is there.
        ranks: among which fsdp shards the parameters.

    Raises:
        ValueError: with what is needed, what there is and the keys to lower.
    """
    c = config.model
    # What the host holds: the batches of a step, those that are kept ready, those of the validation.
    held = config.accum + config.data.queue + config.eval_batches
    batches = held * config.tokens_per_batch * TOKEN_BYTES
    compare(
        batches,
        ram(),
        "this machine",
        f"batch_size = {config.batch_size}, model.seq_len = {c.seq_len}, accum = {config.accum}, "
        f"eval_batches = {config.eval_batches} or data.queue = {config.data.queue}",
    )
    memory = estimate_memory(config, ranks)
    state = memory.parameters + memory.gradients + memory.optimizer
    there, who = gpu_memory(config.device) if config.device.startswith("cuda") else (ram(), "this machine")
    if state > there:
        # No batch is small enough.
        lower = f"model.hidden = {c.hidden}, model.attn.dim = {c.attn.dim} or model.vocab_size = {c.vocab_size}"
    else:
        lower = f"batch_size = {config.batch_size} or model.seq_len = {c.seq_len}, or set gc=true"
    compare(memory.total, there, who, f"model.n_layers = {c.n_layers}, {lower}")
    compare(state + sample_bytes(config), there, who, f"sample_tokens = {config.sample_tokens}")


def sample_bytes(config: TrainConfig) -> int:
    """What the sample holds when it is complete: its tokens and, in fp32, the keys and values of every layer."""
    a = config.model.attn
    layers = sum(kind not in BOUNDED for kind in config.model.kinds)
    return config.sample_tokens * (TOKEN_BYTES + layers * a.n_kv_groups * (a.d_k + a.d_v) * 4)


def compare(needed: float, there: int, who: str, lower: str) -> None:
    if needed > MARGIN * there:
        gib = f"{needed / GIB:,.1f} GiB, and {who} has {there / GIB:,.1f}"
        raise ValueError(f"this run needs about {gib}; lower {lower}")


def gpu_memory(device: str) -> tuple[int, str]:
    properties = torch.cuda.get_device_properties(torch.device(device))
    return properties.total_memory, properties.name


def ram() -> int:
    """Bytes of this machine, or of the container that this process is in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [text for path in LIMITS if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([physical, *map(int, limits)])
