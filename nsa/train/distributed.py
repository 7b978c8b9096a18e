"""Several ranks, one run: the processes that torchrun started, and DDP or FSDP2 around the model."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nsa.config import require
from nsa.dtypes import DTYPES
from nsa.machine import usable_device
from nsa.model import LM
from nsa.progress import log_with_rank
from nsa.train.config import TrainConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    device: torch.device
    rank: int = 0
    size: int = 1
    launcher: int = 0  # the process that started this one; 0: it may end without this one noticing
    # A second group of the same ranks, for a barrier that some of them may not reach.
    aside: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    @property
    def orphaned(self) -> bool:
        """Whether the launcher is gone: nothing else would end this process."""
        return self.launcher != 0 and os.getppid() != self.launcher

    def all_come(self, seconds: float) -> bool:
        """Whether every rank calls this within that time."""
        if self.aside is None:
            return True
        try:
            dist.monitored_barrier(self.aside, timeout=timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True


@contextmanager
def ranks(device: str, parallel: str) -> Iterator[Ranks]:
    """The ranks of this run, which torchrun set up, each with the GPU of its local rank; one without torchrun.

    A ValueError if `parallel` does not fit how this process was started, or there is no such device.
    """
    launched = dist.is_torchelastic_launched()
    if parallel == "none":
        require(not launched, "parallel", parallel, "'ddp' or 'fsdp' under torchrun, whose processes are one run")
        yield Ranks(usable_device(device))
        return
    require(launched, "parallel", parallel, "'none', because torchrun did not start this process")
    on_gpu = torch.device(device).type == "cuda"
    own = usable_device(f"cuda:{dist.get_node_local_rank()}" if on_gpu else device)
    if on_gpu:
        torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        with log_with_rank(dist.get_rank()):
            yield Ranks(own, dist.get_rank(), dist.get_world_size(), os.getppid(), dist.new_group(backend="gloo"))
        # No rank leaves while another still writes.
        dist.barrier()
    finally:
        # A sharded model is a cycle that holds on to the group, and a group that outlives Python aborts the process.
        gc.collect()
        dist.destroy_process_group()


def parallelize(model: LM, config: TrainConfig, device: torch.device) -> nn.Module:
    """The module that a training step calls in place of `model`; "fsdp" shards the parameters of `model` in place, and
    compiles its blocks. Otherwise the caller compiles what is returned."""
    if config.parallel == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        replicated = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        if config.grad_compression == "bf16":
            replicated.register_comm_hook(None, bf16_compress_hook)
        return replicated
    if config.parallel == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # Inputs stay as they are: the residual stream is fp32, and autocast casts the inputs of matmuls.
        dtype = None if config.dtype == "float32" else DTYPES[config.dtype]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            if config.compile:
                block.compile(dynamic=False)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@contextmanager
def no_gradient_sync(module: nn.Module) -> Iterator[None]:
    """Gradients of a backward in this block are not all-reduced yet."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)
    else:
        yield


def mean_over_ranks(x: Tensor) -> Tensor:
    """All-reduce in place. A value that is not finite on one rank is not finite on any, so all decide the same."""
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def from_first(value: T, group: dist.ProcessGroup | None = None) -> T:
    """The value of rank 0."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def from_all(values: list[str]) -> list[str]:
    """The values of all ranks, concatenated in rank order."""
    found = [values]
    if dist.is_initialized():
        found = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, values)
    return [value for part in found for value in part]


def require_same(values: dict[str, Any]) -> None:
    """`ValueError` on every rank unless all ranks call this with the same values, plain JSON by name."""
    found = [json.loads(text) for text in from_all([json.dumps(values)])]
    for rank, other in enumerate(found):
        for name in (*found[0], *other):
            first, own = found[0].get(name), other.get(name)
            require(first == own, f"{name} on rank {rank}", own, f"{first!r}, as on rank 0")


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """Whether every element on every rank is finite; waits for all, and for the device."""
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    finite = torch.stack([part.isfinite().all() for part in parts]).all()
    return not any_rank(not finite.item(), device)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is true on any rank; waits for all."""
    if not dist.is_initialized():
        return flag
    x = torch.tensor(float(flag), device=device)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return bool(x.item())


class Vote:
    """Whether any rank wants to stop, without waiting: each call starts an all-reduce on the CPU and returns the result
    of the one before it, the same on every rank."""

    def __init__(self) -> None:
        self.cast: tuple[Tensor, dist.Work] | None = None

    def __call__(self, stop: bool) -> bool:
        if not dist.is_initialized():
            return stop
        agreed = False
        if self.cast is not None:
            votes, under_way = self.cast
            under_way.wait()
            agreed = bool(votes.item())
        votes = torch.tensor(float(stop))
        self.cast = (votes, dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True))
        return agreed


def whole(x: Tensor) -> Tensor:
    """The full tensor of one that is sharded over the ranks."""
    return x.full_tensor() if isinstance(x, DTensor) else x
