"""Tensor descriptors (TMA) with the shared-memory layout that a Gluon kernel needs to know."""

from __future__ import annotations

import torch

from nsa.backends.gluon.api import TensorDescriptor, gl
from nsa.backends.triton.launch import BoxDescriptor, Layout
from nsa.backends.triton.tiles import describable

ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def descriptor(x: Layout, box: tuple[int, ...]) -> BoxDescriptor:
    """Makes descriptors of one layout and box, with their layout in shared memory."""
    shared = gl.NVMMASharedLayout.get_default_for(list(box), ELEMENTS[x.dtype])
    return BoxDescriptor(x, box, shared, kind=TensorDescriptor)


def describe_rows(x: Layout, heads: int, n_rows: int) -> BoxDescriptor | None:
    """Of `x [B, S, Hq, D]` in boxes of whole queries, `n_rows` rows each, where `heads` and its strides allow it."""
    whole = heads & (heads - 1) == 0 and n_rows % heads == 0
    return descriptor(x, (1, n_rows // heads, heads, x.shape[-1])) if whole and describable(x) else None


def describe_keys(x: Layout, block_n: int) -> BoxDescriptor:
    """Of `x [B, N, G, D]`, by tiles of keys of one group."""
    return descriptor(x, (1, block_n, 1, x.shape[-1]))


def describe_statistics(x: Layout, n_rows: int) -> BoxDescriptor:
    """Of a row buffer `[B * G, rows]`."""
    return descriptor(x, (1, n_rows))
