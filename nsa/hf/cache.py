"""Transformers' cache layers for NSA: a dynamic one that grows and a static one for compiled steps.

Transformers builds them from the config's `layer_types`, without the layer's hyperparameters. The `NSACache` inside is
therefore made by the attention layer that first asks for it.

Transformers counts columns, padding included; an `NSACache` counts the tokens of each row. Both counts are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from nsa.attention import NSAAttention
from nsa.cache import NSACache
from nsa.config import require
from nsa.dtypes import matmul_dtype
from nsa.hf.configuration import LAYER_TYPE

# The capacity of a dynamic layer is a power of two from here on.
MIN_CAPACITY = 256
# How many tokens can be removed, and how many once transformers has announced that it will (speculative decoding).
MAX_ROLLBACK, MAX_DRAFT = 32, 1024


class NSALayer:
    """The methods that transformers calls on a layer, shared by both kinds of cache layer."""

    inner: NSACache | None = None
    is_sliding = False
    is_croppable = True
    # Made by the attention layer, which knows the sizes.
    supports_early_init = False
    max_rollback = MAX_ROLLBACK

    def state(self, attention: NSAAttention, x: Tensor) -> NSACache:
        """The `NSACache` of `attention` with space for the new tokens `x [B, T, dim]`, which count from now on."""
        raise NotImplementedError

    def make(self, attention: NSAAttention, x: Tensor, max_len: int, *, static: bool) -> NSACache:
        form: dict[str, Any] = {"dtype": matmul_dtype(x), "device": x.device, "static": static}
        self.inner = attention.new_cache(x.shape[0], max_len, max_rollback=self.max_rollback, **form)
        self.is_initialized = True
        self.dtype, self.device, self.batch_size = self.inner.dtype, self.inner.device, x.shape[0]
        return self.inner

    def add_columns(self, n: int) -> None:
        raise NotImplementedError

    def get_seq_length(self) -> Any:
        raise NotImplementedError

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `state` initializes."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this cache layer holds the state of an NSA layer, which asks for it by `state`")

    def reset(self) -> None:
        if self.inner is not None:
            self.inner.reset()
            self.add_columns(-int(self.get_seq_length()))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.inner is not None:
            self.inner.reorder(beam_idx.to(self.inner.device))

    def crop(self, tokens_to_remove: int) -> None:
        """A negative number of tokens to remove, or as in early versions of Transformers the columns to keep."""
        columns = int(self.get_seq_length())
        # Early versions count in tensors.
        n = int(tokens_to_remove)
        n = n if n <= 0 else min(0, n - columns)
        if self.inner is not None and n < 0:
            self.inner.crop(n)
            self.add_columns(n)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.inner is not None:
            rows = torch.arange(self.inner.batch_size, device=self.inner.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.inner is not None:
            self.inner.select(indices.to(self.inner.device))
            self.batch_size = self.inner.batch_size

    def offload(self) -> None:
        raise NotImplementedError("a cache of NSA layers cannot be offloaded; accepted: a dynamic or a static cache")

    def prefetch(self) -> None:
        self.offload()


class NSADynamicLayer(NSALayer, CacheLayerMixin):
    """Grows by doubling."""

    _layer_type = LAYER_TYPE

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.columns = 0

    def state(self, attention: NSAAttention, x: Tensor) -> NSACache:
        self.columns += x.shape[1]
        capacity = max(MIN_CAPACITY, 1 << (self.columns - 1).bit_length())
        if self.inner is None:
            return self.make(attention, x, capacity, static=False)
        if self.columns > self.inner.max_len:
            self.inner.grow(capacity)
        return self.inner

    def add_columns(self, n: int) -> None:
        self.columns += n

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """Called before speculative decoding, whose drafts may be longer than what a cache can usually remove. One that
        is in use keeps its `MAX_ROLLBACK`, and refuses to remove more."""
        self.max_rollback = MAX_DRAFT


class NSAStaticLayer(NSALayer, StaticLayer):
    """Has fixed shapes and addresses. A row drops tokens beyond `max_cache_len`; `generate` asks for enough."""

    _layer_type = LAYER_TYPE
    is_compileable = True
    max_cache_len: int
    cumulative_length: Tensor

    def state(self, attention: NSAAttention, x: Tensor) -> NSACache:
        inner = self.inner
        if inner is None:
            fits = x.shape[1] <= self.max_cache_len
            require(fits, "max_cache_len", self.max_cache_len, f"at least {x.shape[1]} tokens")
            inner = self.make(attention, x, self.max_cache_len, static=True)
            self.cumulative_length = self.cumulative_length.to(self.device)
            if not torch.compiler.is_compiling():
                # Else a CUDA graph is skipped, because its inputs are written to.
                for buffer in (*inner.buffers(), self.cumulative_length):
                    torch._dynamo.mark_static_address(buffer)
        self.add_columns(x.shape[1])
        return inner

    def add_columns(self, n: int) -> None:
        # In place: the address is fixed.
        self.cumulative_length.add_(n)

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.is_initialized else 0
