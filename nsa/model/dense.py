"""Dense causal attention with grouped heads: the other side of every A/B, with the interface of NSAAttention.

Everything that attends to raw keys and values of its own tokens is built on it (`alternatives.py`): projections, RoPE,
padding and the walk through a cache are here, once; what a query sees is `attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa import ops, settings
from nsa.attention import real_tokens_first
from nsa.cache import Pair, pair_of, take, write
from nsa.config import NSAConfig, require
from nsa.geometry import query_positions
from nsa.rope import Angles, Rope

WITHOUT_FLASH = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class DenseAttention(nn.Module):
    """`[B, S, dim]` to `[B, S, dim]`; of `config` it reads the widths, the heads, RoPE and the backend.

    Whole sequences go to torch's SDPA. Packed documents and cached keys are the sliding branch with a window that
    holds everything: one op, bounded memory, whichever backend serves it.
    """

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = c = config
        self.q_proj = nn.Linear(c.dim, c.n_heads * c.d_k, bias=False)
        self.k_proj = nn.Linear(c.dim, c.n_kv_groups * c.d_k, bias=False)
        self.v_proj = nn.Linear(c.dim, c.n_kv_groups * c.d_v, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.d_v, c.dim, bias=False)
        self.rope = Rope(c.d_k, c.rope_theta, c.rope_scaling)
        self.no_flash = settings.current().sdpa_no_flash

    def new_cache(
        self,
        batch_size: int,
        max_len: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> DenseCache:
        return DenseCache(self.config, batch_size, max_len, **self.cache_options(dtype, device))

    def cache_options(self, dtype: torch.dtype | None, device: torch.device | str | None) -> dict[str, Any]:
        weight = self.k_proj.weight
        return {"dtype": dtype or weight.dtype, "device": device or weight.device, "keys_seen": self.keys_seen}

    def keys_seen(self, length: int) -> int:
        """How many keys the last of `length` tokens attends to."""
        return length

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: DenseCache | None = None,
    ) -> Tensor:
        """`cu_seqlens`: packed documents. `attention_mask [B, S]` bool: False marks padding, whose output is 0."""
        require(cu_seqlens is None or cache is None, "cache", "given with cu_seqlens", "one of the two")
        require(
            cu_seqlens is None or attention_mask is None, "attention_mask", "given with cu_seqlens", "one of the two"
        )
        order, counts = None, None
        if attention_mask is not None:
            order, counts = real_tokens_first(attention_mask)
            # Zeros in place of padding: what it held may not be finite, and 0 * NaN is NaN.
            x = x.masked_fill(~attention_mask[..., None], 0.0).gather(1, order[..., None].expand_as(x))

        angles = self.angles(x, cu_seqlens, cache)
        projected = (proj(x).unflatten(-1, (-1, self.config.d_k)) for proj in (self.q_proj, self.k_proj))
        q, k = self.rope.rotate_all(angles, *projected)
        v = self.v_proj(x).unflatten(-1, (-1, self.config.d_v))
        if cache is None:
            o = self.attend(q, k, v, cu_seqlens=cu_seqlens)
        else:
            o = self.attend_cached(q, (k, v), cache, counts)

        y = self.o_proj(o.flatten(2))
        if attention_mask is not None and order is not None:
            y = torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y)
            y = y.masked_fill(~attention_mask[..., None], 0.0)
        return y

    def angles(self, x: Tensor, cu_seqlens: Tensor | None, cache: DenseCache | None) -> Angles:
        """RoPE's for the positions of `x [B, S, dim]`."""
        batch, length, _ = x.shape
        if cu_seqlens is None and cache is None:
            return self.rope.table(length, x.device, x.dtype)
        start, limit = (None, length) if cache is None else (cache.lengths, cache.max_len)
        positions = query_positions(batch, length, cu_seqlens, start, x.device)
        # Only padding can lie past the end of a cache.
        return self.rope.angles(positions.clamp_max(limit - 1), x.dtype, limit=limit)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, q_start: Tensor | None = None
    ) -> Tensor:
        """`q [B,S,Hq,Dk]` over `k, v [B,N,G,D]`; with `q_start [B]` the queries start in the middle of the keys."""
        if cu_seqlens is None and q_start is None:
            return self.attend_causally(q, k, v)
        return self.attend_window(q, k, v, window=k.shape[1], cu_seqlens=cu_seqlens, q_start=q_start)[0]

    def attend_cached(self, q: Tensor, new: Pair, cache: DenseCache, counts: Tensor | None) -> Tensor:
        past = cache.append(new, counts)
        o = self.attend(past.rotate_queries(q), past.keys, past.values, q_start=past.q_start)
        return past.restore_order(o, q.shape[1])

    def attend_causally(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # Only the flash kernel reads a group's keys once; the others would fall back to whole score matrices.
        grouped = q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and not self.no_flash
        if not grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        kernels: AbstractContextManager[None] = sdpa_kernel(WITHOUT_FLASH) if self.no_flash else nullcontext()
        with kernels:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return o.transpose(1, 2)

    def attend_window(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: int, cu_seqlens: Tensor | None, q_start: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`(o, lse)` over the `window` tokens that end at each query."""
        return ops.sliding_attention(
            q,
            k,
            v,
            window=window,
            cu_seqlens=cu_seqlens,
            q_start=q_start,
            backend=self.config.backend,
            strict=self.config.strict,
        )


class Past(NamedTuple):
    """What a step attends to, its own tokens included.

    Every query must lie among the keys, also one of padding. Where a row's padding would run past the end of the cache,
    its queries start `shift` places earlier, rotated so that those of real tokens stay at their positions.
    """

    keys: Tensor
    values: Tensor
    q_start: Tensor  # [B] where the first query lies in them
    n_queries: int
    shift: Tensor | None  # [B]; None: no row's queries are rotated

    def rotate_queries(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` in the order of the tokens to `[B, n_queries, ...]` in that of the queries."""
        if self.shift is None:
            return x
        return take(x, (torch.arange(self.n_queries, device=x.device) - self.shift[:, None]) % self.n_queries)

    def restore_order(self, x: Tensor, n_new: int) -> Tensor:
        """`[B, n_queries, ...]` back to the order of the `n_new` tokens."""
        if self.shift is None:
            return x
        return take(x, (torch.arange(n_new, device=x.device) + self.shift[:, None]) % self.n_queries)


class DenseCache:
    """Every key and value of `batch_size` rows of up to `max_len` tokens, each row with a length of its own."""

    def __init__(
        self,
        config: NSAConfig,
        batch_size: int,
        max_len: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        keys_seen: Callable[[int], int],
        places: int | None = None,
    ) -> None:
        """`keys_seen(length)`: what the last of that many tokens attends to. `places`: tokens kept (default: all)."""
        self.config = config
        self.max_len = max_len
        self.keys_seen = keys_seen
        self.pair = new_store(config, batch_size, places or max_len, dtype, device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        # No row is longer than this; known without asking the device.
        self.longest = 0

    @torch.no_grad()
    def append(self, new: Pair, counts: Tensor | None) -> Past:
        """Take in `T` tokens a row, the first `counts [B]` of them real; the rest is padding and is not kept."""
        start, q_start, position, keep = self.advance(new, counts)
        n_queries = position.shape[1]
        write(self.pair, position, pair_of(x[:, :n_queries] for x in new), keep)
        if q_start is start:
            keys, values = (x[:, : self.longest] for x in self.pair)
            return Past(keys, values, start, n_queries, None)
        keys, values = (x[:, : self.max_len] for x in self.pair)
        return Past(keys, values, q_start, n_queries, start - q_start)

    def advance(self, new: Pair, counts: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Make every row longer by its new tokens: `[B]` how long it was and where its queries start, `[B, T]` where
        the tokens go and which to keep; of more tokens than `max_len` the first ones, because the rest is padding."""
        n_new = new[0].shape[1]
        require(
            new[0].dtype == self.pair[0].dtype, "the keys' dtype", new[0].dtype, f"{self.pair[0].dtype}, the cache's"
        )
        longest = self.longest + n_new
        crowded = longest > self.max_len
        if crowded:
            # The host's bound counts padding: ask the device before giving up.
            longest = int((self.lengths + (n_new if counts is None else counts)).max())
            require(longest <= self.max_len, "the cache's length", longest, f"at most max_len = {self.max_len}")
        start = self.lengths.clone()
        end = start + n_new if counts is None else start + counts.int()
        n_queries = min(n_new, self.max_len)
        position = start[:, None] + torch.arange(n_queries, device=start.device)
        self.lengths.copy_(end)
        self.longest = longest
        q_start = start.clamp_max(self.max_len - n_queries) if crowded else start
        return start, q_start, position, position < end[:, None]

    def reset(self) -> None:
        self.lengths.zero_()
        self.longest = 0

    def stores(self) -> tuple[Tensor, ...]:
        return self.pair

    def bytes_used(self) -> int:
        """Memory held, all rows."""
        return sum(x.nbytes for x in (*self.stores(), self.lengths))

    def bytes_read_per_step(self, length: int | None = None) -> int:
        """What one decoding step must read of the keys and values of all rows, each `length` long (default: as now)."""
        lengths = self.lengths.tolist() if length is None else [length] * self.lengths.numel()
        a_token = sum(x[0, 0].nbytes for x in self.pair)
        return sum(self.keys_seen(n) for n in lengths) * a_token


def new_store(config: NSAConfig, batch_size: int, places: int, dtype: torch.dtype, device: torch.device | str) -> Pair:
    """Keys and values of `places` tokens, and one place more: padding is written there, and nothing reads it."""
    shape = (batch_size, places + 1, config.n_kv_groups)
    return (
        torch.zeros(*shape, config.d_k, dtype=dtype, device=device),
        torch.zeros(*shape, config.d_v, dtype=dtype, device=device),
    )
