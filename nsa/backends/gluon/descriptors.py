"""Tensor descriptors (TMA) with the shared-memory layout that a Gluon kernel needs to know."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.backends.gluon.api import TensorDescriptor, gl
from nsa.backends.triton.launch import Layout
from nsa.backends.triton.tiles import describable

ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


class Descriptor:
    """As `triton.launch.Descriptor`: what descriptors of one layout and box have in common is checked once."""

    __slots__ = ("fields",)

    def __init__(self, x: Layout, box: tuple[int, ...]) -> None:
        shared = gl.NVMMASharedLayout.get_default_for(list(box), ELEMENTS[x.dtype])
        base = torch.empty(0, dtype=x.dtype, device="meta")
        self.fields = vars(TensorDescriptor(base, list(x.shape), list(x.strides), list(box), shared))

    def __call__(self, x: Tensor) -> TensorDescriptor:
        made = TensorDescriptor.__new__(TensorDescriptor)
        made.__dict__ = {**self.fields, "base": x}
        return made


def describe_rows(x: Layout, heads: int, n_rows: int) -> Descriptor | None:
    """Of `x [B, S, Hq, D]` in boxes of whole queries, `n_rows` rows each, where `heads` and its strides allow it."""
    whole = heads & (heads - 1) == 0 and n_rows % heads == 0
    return Descriptor(x, (1, n_rows // heads, heads, x.shape[-1])) if whole and describable(x) else None


def describe_keys(x: Layout, block_n: int) -> Descriptor:
    """Of `x [B, N, G, D]`, by tiles of keys of one group."""
    return Descriptor(x, (1, block_n, 1, x.shape[-1]))


def describe_statistics(x: Layout, n_rows: int) -> Descriptor:
    """Of a row buffer `[B * G, rows]`."""
    return Descriptor(x, (1, n_rows))
