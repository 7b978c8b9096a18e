"""Other implementations in the same run: torch's SDPA, FlexAttention with block masks, flash-linear-attention's NSA."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nsa.backends import triton
from nsa.bench.runner import Context
from nsa.config import NSAConfig
from nsa.model.alternatives import tile_lists

DENSE = {"dense-fa2": SDPBackend.FLASH_ATTENTION, "dense-cudnn": SDPBackend.CUDNN_ATTENTION}
# Queries and keys per block of a block mask.
MASK_BLOCK = 128

Forward = Callable[[], Tensor]
# A context in which a compiled backward pass may run again on one graph, as timing does.
keeps_buffers = partial(functorch_config.patch, donated_buffer=False)


def missing(impl: str, device: str, shape: Any) -> str | None:
    """Why an implementation cannot run here; None if it can."""
    if impl == "nsa-triton":
        return triton.available() if device == "cuda" else "needs a CUDA GPU"
    if (impl in DENSE or "flex" in impl) and device != "cuda":
        return "needs a CUDA GPU"
    if impl == "dense-sdpa" and device == "cuda":
        return "FA-2 and cuDNN, which torch selects from, are timed each by itself"
    if not impl.startswith("fla-"):
        return None
    if find_spec("fla") is None:
        return "the flash-linear-attention package is not installed"
    if impl == "fla-nsa" and find_spec("flash_attn") is None:
        return "its sliding branch needs the flash_attn package, which is not installed"
    size = shape.n_heads // shape.n_groups
    return None if size >= 16 and size & (size - 1) == 0 else f"{size} heads per group; it takes 16, 32, 64 ..."


def dense(impl: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Forward, Context]:
    """Causal attention of `[B, S, H, D]` tensors, and the context that it runs in; `dense-sdpa`: torch selects."""
    if impl == "dense-flex":
        return flex(q, k, v, causal_mask(q.shape[1], q.device)), keeps_buffers
    return partial(dense_attention, q, k, v), partial(sdpa_kernel, DENSE[impl]) if impl in DENSE else nullcontext


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch's SDPA, as the backends are enabled."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Forward:
    """FlexAttention of `[B, S, H, D]` tensors, compiled for these shapes and this mask."""
    # After a few masks torch.compile would give up, and time the eager function instead.
    torch.compiler.reset()
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)

    def forward() -> Tensor:
        o: Tensor = compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True)
        return o.transpose(1, 2)

    return forward


def causal_mask(length: int, device: torch.device) -> BlockMask:
    """All blocks before a query's own are full. Built from indices: a mask of all scores would not fit at 128k."""
    n_blocks = -(-length // MASK_BLOCK)
    own = torch.arange(n_blocks, dtype=torch.int32, device=device)
    order = own.expand(n_blocks, n_blocks)
    # One that the mask cuts through, then those that are full.
    lists = (torch.ones_like(own), (order + own[:, None]) % n_blocks, own, order)
    one, cut, count, full = (x.contiguous()[None, None] for x in lists)
    return BlockMask.from_kv_blocks(one, cut, count, full, MASK_BLOCK, lambda b, h, q, k: q >= k, (length, length))


def selected_mask(indices: Tensor, n_heads: int, select_block: int) -> BlockMask:
    """The blocks that any of 128 queries selected, masked to the query's own. `indices`: int `[B, S, G, n]`, -1 for
    none; `select_block` is a divisor of 128."""
    batch, length, n_groups, _ = indices.shape
    n_blocks = -(-length // MASK_BLOCK)
    n_selection = n_blocks * MASK_BLOCK // select_block
    # One column more for what is not selected.
    table = torch.zeros(batch, n_groups, length, n_selection + 1, dtype=torch.bool, device=indices.device)
    columns = indices.where(indices >= 0, n_selection).long().transpose(1, 2)
    table.scatter_(-1, columns, True)
    table = table[..., :-1].contiguous()
    rows = F.pad(table, (0, 0, 0, n_blocks * MASK_BLOCK - length)).unflatten(2, (n_blocks, MASK_BLOCK)).any(dim=3)
    blocks = rows.unflatten(-1, (n_blocks, -1)).any(dim=-1).repeat_interleave(n_heads // n_groups, dim=1)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return table[b, h // (n_heads // n_groups), q, k // select_block] & (q >= k)

    return BlockMask.from_kv_blocks(*tile_lists(blocks), None, None, MASK_BLOCK, sees, (length, length))


def fla_attention(config: NSAConfig, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    named = dict(zip(("g_cmp", "g_slc", "g_swa"), gates.unbind(dim=-1), strict=True))
    sizes = {"block_counts": config.n_sel, "block_size": config.l_sel, "window_size": config.w}
    o: Tensor = import_module("fla.ops.nsa").parallel_nsa(q, k, v, **named, **sizes)
    return o


def selected(impl: str, config: NSAConfig, indices: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """The selected branch by FlexAttention or flash-linear-attention."""
    if impl == "flex-selected":
        return flex(q, k, v, selected_mask(indices, q.shape[2], config.l_sel))
    sizes = {"block_indices": indices.long(), "block_counts": config.n_sel, "block_size": config.l_sel}
    return partial(import_module("fla.ops.nsa").parallel_nsa, q, k, v, **sizes)
