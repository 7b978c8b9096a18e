"""Many processes, one run: the ranks that torchrun started, and PyTorch's own engines around the model.

torchrun --nproc-per-node 8 -m nsa.cli train --config 125m                    # DDP
torchrun --nproc-per-node 8 -m nsa.cli train --config 1b --parallel fsdp      # FSDP2
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nsa.config import require
from nsa.generate import usable_device
from nsa.model import LM
from nsa.train.rank_log import named_log


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    device: torch.device
    rank: int = 0
    size: int = 1
    # The process that started this one; 0: not looked at.
    launcher: int = 0
    # The same ranks, for questions that not all of them may get to: a training step's own messages stay in order.
    aside: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """The one that speaks and writes."""
        return self.rank == 0

    @property
    def orphaned(self) -> bool:
        """Whether the launcher is gone, and with it whoever would ever end this process."""
        return self.launcher != 0 and os.getppid() != self.launcher

    def all_come(self, seconds: float) -> bool:
        """Whether every rank asks this within that time."""
        if self.aside is None:
            return True
        try:
            dist.monitored_barrier(self.aside, timeout=timedelta(seconds=seconds))
        except RuntimeError:
            # How torch says that one did not, or is gone.
            return False
        return True


@contextmanager
def ranks(device: str, parallel: str) -> Iterator[Ranks]:
    """The ranks of this run, which torchrun's environment names; one alone without it."""
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
        with named_log(dist.get_rank()):
            yield Ranks(own, dist.get_rank(), dist.get_world_size(), os.getppid(), dist.new_group(backend="gloo"))
        # No rank leaves while another still writes for all.
        dist.barrier()
    finally:
        # A sharded model is a cycle that holds on to the group, and a group that outlives Python aborts the process.
        gc.collect()
        dist.destroy_process_group()


def parallelize(
    model: LM, *, parallel: str, device: torch.device, dtype: torch.dtype, compile: bool, grad_compression: str
) -> nn.Module:
    """What a training step calls in place of `model`; its parameters are sharded in place with "fsdp".

    Only the blocks of a sharded model are compiled, here; everything else is compiled by who calls it.
    """
    if parallel == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        replicated = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        if grad_compression == "bf16":
            replicated.register_comm_hook(None, bf16_compress_hook)
        return replicated
    if parallel == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # Inputs stay as they are: the residual stream is fp32, and autocast rounds what enters a product.
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in model.blocks:
            if compile:
                block.compile(dynamic=False)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@contextmanager
def own_gradients(module: nn.Module) -> Iterator[None]:
    """Gradients of a forward and backward in here stay with this rank, to be exchanged with later ones."""
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
    """In place; what is not finite on one rank is not finite on any, so that all decide the same."""
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def from_first(value: str) -> str:
    """What the first rank has."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def from_all(values: list[str]) -> list[str]:
    """Every rank's, one after the other."""
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
            require(
                first == own, f"{name} on rank {rank}", own, f"{first!r}, as on rank 0: the ranks of a run train alike"
            )


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> bool:
    """Whether every element on every rank is finite; waits for all, and for the device."""
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    finite = torch.stack([part.isfinite().all() for part in parts]).all()
    return not any_rank(not finite.item(), device)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether it holds on one of them; waits for all."""
    if not dist.is_initialized():
        return flag
    x = torch.tensor(float(flag), device=device)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return bool(x.item())


class Vote:
    """Whether a rank asks to stop, found out while all go on: each call answers for the call before it, the same on
    every rank, and nobody waits for the device."""

    def __init__(self) -> None:
        self.cast: tuple[Tensor, dist.Work] | None = None

    def __call__(self, asks: bool) -> bool:
        if not dist.is_initialized():
            return asks
        agreed = False
        if self.cast is not None:
            votes, under_way = self.cast
            under_way.wait()
            agreed = bool(votes.item())
        # On the CPU, where the ranks' processes talk past their GPUs.
        votes = torch.tensor(float(asks))
        under_way = dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True)
        self.cast = (votes, under_way)
        return agreed


def whole(x: Tensor) -> Tensor:
    """A tensor of which each rank holds a part, on every rank."""
    return x.full_tensor() if isinstance(x, DTensor) else x
