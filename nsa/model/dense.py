"""Dense causal grouped-query attention: the baseline that NSA is compared with, with NSAAttention's interface.

The other baselines (`alternatives.py`) derive from it: projections, RoPE, padding and the cache are here; `attend`
decides what a query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa import ops, settings
from nsa.attention import real_tokens_first, restore_padding
from nsa.backends import triton
from nsa.cache import NewTokens, Pair, RowCache, Store
from nsa.cache.store import pair_of
from nsa.config import NSAConfig, require
from nsa.decoding import as_counts, is_plain_step, run_step
from nsa.dtypes import HALF_DTYPES
from nsa.geometry import query_positions
from nsa.rope import Angles, Rope

# Most new tokens of a step; more are a chunk of prefill, whose mask would be large.
MAX_STEP = 8
WITHOUT_FLASH = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# With a mask: flash takes none, and cuDNN's graph (torch 2.11) fails to run for some lengths of a cache.
MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Methods that the decode kernels replace; other attentions override some.
FUSED_METHODS = ("angles", "attend", "attend_past", "attend_step")


class DenseAttention(nn.Module):
    """Dense causal attention, `[B, S, dim]` to `[B, S, dim]`.

    Fixed-length sequences go to torch's SDPA. Steps of a few tokens run in the decode kernels, where those run, else in
    SDPA. Varlen batches and chunks over cached keys use the sliding branch with a window as long as the keys: one op,
    bounded memory, any backend.

    Args:
        config: `dim`, the heads, the head_dims, RoPE and the backend are used.
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
        **options: Any,
    ) -> DenseCache:
        """An empty cache, by default of this layer's dtype and on its device; arguments as for `NSACache`."""
        weight = self.k_proj.weight
        options["dtype"] = weight.dtype if dtype is None else dtype
        options["device"] = weight.device if device is None else device
        return self.make_cache(batch_size, max_len, {**options, "keys_seen": self.keys_seen})

    def make_cache(self, batch_size: int, max_len: int, options: dict[str, Any]) -> DenseCache:
        return DenseCache(self.config, batch_size, max_len, **options)

    def keys_seen(self, length: int) -> int:
        """How many keys the last of `length` tokens sees."""
        return length

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: DenseCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: `[B, S, dim]`.
            cu_seqlens: int32 `[n + 1]`, offsets of the documents of a varlen batch (`B = 1`).
            attention_mask: bool `[B, S]`; False marks padding, whose output is 0.
            cache: Keys and values of earlier tokens; `x` is appended to it.

        Returns:
            `[B, S, dim]`.

        Raises:
            ValueError: `cu_seqlens` is given with a cache or a mask, or the tokens do not fit into the cache.
        """
        require(cu_seqlens is None or cache is None, "cache", "given with cu_seqlens", "one of the two")
        require(None in (cu_seqlens, attention_mask), "attention_mask", "given with cu_seqlens", "one of the two")
        if cache is not None and torch.is_grad_enabled():
            # Keys in a cache carry no graph, and part of a gradient would be a wrong one.
            with torch.no_grad():
                return self.forward(x, cu_seqlens=cu_seqlens, attention_mask=attention_mask, cache=cache)
        if cache is not None:
            require(isinstance(cache, DenseCache), "cache", cache, "a cache made by this layer's new_cache")
            cache.check_layer(self.config, x.shape[0], x.device)
        x, order, counts = real_tokens_first(x, attention_mask)
        o = None if cache is None else self.fused_step(x, cache, counts)
        if o is None:
            q, k, v = self.project(x)
            q, k = self.rope.rotate_all(self.angles(x, cu_seqlens, cache), q, k)
            if cache is None:
                o = self.attend(q, k, v, cu_seqlens, None)
            else:
                past = cache.stage((k, v), counts)
                try:
                    o = self.attend_past(q, cache, past)
                except Exception:
                    cache.discard(past)
                    raise
                cache.commit(past)
        return restore_padding(self.o_proj(o.flatten(2)), attention_mask, order)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, S, Hq, Dk]`, keys `[B, S, G, Dk]` and values `[B, S, G, Dv]`; not rotated."""
        q, k = (proj(x).unflatten(-1, (-1, self.config.d_k)) for proj in (self.q_proj, self.k_proj))
        return q, k, self.v_proj(x).unflatten(-1, (-1, self.config.d_v))

    def fused_step(
        self,
        x: Tensor,
        cache: DenseCache,
        counts: Tensor | None,
        project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None,
    ) -> Tensor | None:
        """Append the tokens `x [B, T, dim]`, the first `counts [B]` of which are real, to `cache` and attend from them.

        Args:
            project: In place of the layer's own `project`.

        Returns:
            `o [B, T, Hq, Dv]`; None where the decode kernels do not run the step, and the cache is as it was.

        Raises:
            ValueError, BackendFailure: As of `nsa.decoding.fused_step`.
        """
        own = all(getattr(self, name).__module__ == __name__ for name in FUSED_METHODS)
        dense = own and type(cache) is DenseCache and cache.config == self.config
        if not is_plain_step(x, self.q_proj.weight.dtype, cache) or not dense or self.rope != cache.rope:
            return None
        counts = as_counts(counts)

        def launch() -> Tensor:
            q, k, v = (project or self.project)(x)
            decode, _ = triton.load("decode")
            store = decode.DenseStore(cache.kv.pair, cache.lengths, cache.high_water, cache.frequencies)
            o: Tensor = triton.dense_step(q, (k, v), store, self.config.d_k**-0.5, cache.max_len, counts=counts)
            return o

        return run_step("dense_step", launch, self.config, x, cache, counts)

    def angles(self, x: Tensor, cu_seqlens: Tensor | None, cache: DenseCache | None) -> Angles:
        length = x.shape[1]
        if cu_seqlens is None and cache is None:
            return self.rope.table(length, x.device, x.dtype)
        start, limit = (None, length) if cache is None else (cache.lengths, cache.max_len)
        positions = query_positions(length, cu_seqlens, start, x.device)
        # Only padding can be past the end of a cache.
        return self.rope.angles(positions.clamp_max(limit - 1), x.dtype, limit=limit)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, q_start: Tensor | None) -> Tensor:
        """`q [B,S,Hq,Dk]` over `k, v [B,N,G,D]`; with `q_start [B]` the queries start in the middle of the keys."""
        if cu_seqlens is None and q_start is None:
            return self.attend_causally(q, k, v)
        if q_start is not None and q.shape[1] <= MAX_STEP and self.config.backend == "auto":
            return self.attend_step(q, k, v, q_start)
        return self.attend_window(q, k, v, window=k.shape[1], cu_seqlens=cu_seqlens, q_start=q_start)[0]

    def attend_past(self, q: Tensor, cache: DenseCache, past: Past) -> Tensor:
        """`q [B,T,Hq,Dk]` over what `cache` has staged."""
        o = self.attend(past.tokens.rotate_queries(q), *past.pair, None, past.q_start)
        return past.tokens.restore_order(o, q.shape[1])

    def attend_causally(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # Only the flash kernel supports GQA; the others would fall back to full score matrices.
        grouped = q.device.type == "cuda" and q.dtype in HALF_DTYPES and not self.no_flash
        if not grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with sdpa_kernel(WITHOUT_FLASH) if self.no_flash else nullcontext():
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return o.transpose(1, 2)

    def attend_step(self, q: Tensor, k: Tensor, v: Tensor, q_start: Tensor) -> Tensor:
        """A few queries over a cache, by SDPA with a mask: reads the keys where they lie, where the sliding op copies
        them. The heads of a group are rows of queries, because few of torch's kernels take both a mask and GQA."""
        groups = k.shape[2]
        rows = q.unflatten(2, (groups, -1)).transpose(1, 2)  # [B, G, T, h, Dk]
        position = q_start[:, None] + torch.arange(q.shape[1], device=q.device)
        seen = torch.arange(k.shape[1], device=q.device) <= position.repeat_interleave(rows.shape[3], dim=1)[..., None]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel(MASKED):
            o = F.scaled_dot_product_attention(rows.flatten(2, 3), k, v, attn_mask=seen[:, None])
        return o.unflatten(2, rows.shape[2:4]).transpose(1, 2).flatten(2, 3)

    def attend_window(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """`(o, lse)` over the `window` tokens that end at each query."""
        return ops.sliding_attention(q, k, v, **options, **self.op_options)

    @property
    def op_options(self) -> dict[str, Any]:
        return {"backend": self.config.backend, "strict": self.config.strict}


class Past(NamedTuple):
    """The keys and values that a staged step attends to, its own tokens included, and what `commit` stores."""

    pair: Pair
    q_start: Tensor  # [B] place of the first query among the keys
    tokens: NewTokens
    new: Pair
    longest: int


class DenseCache(RowCache):
    """All keys and values of `batch_size` rows of up to `max_len` tokens, each row with its own length.

    Args:
        config, batch_size, max_len, options: As for `NSACache`, without `quantize`.
        keys_seen: `keys_seen(length)` is the number of keys that the last of `length` tokens sees.

    Raises:
        ValueError: An argument has a wrong type or value.
    """

    def __init__(
        self, config: NSAConfig, batch_size: int, max_len: int, *, keys_seen: Callable[[int], int], **options: Any
    ) -> None:
        super().__init__(config, batch_size, max_len, **options)
        self.keys_seen = keys_seen
        with torch.inference_mode(False):
            self.kv = self.new_kv()

    def new_kv(self) -> Store:
        return Store(self.config, (self.batch_size, self.slots_for(self.max_len)["kv"] + 1), self.dtype, self.device)

    def slots_for(self, max_len: int) -> dict[str, int]:
        return {"kv": max_len}

    def stores(self) -> dict[str, Store]:
        return {"kv": self.kv}

    @torch.no_grad()
    def stage(self, new: Pair, counts: Tensor | None) -> Past:
        """As `NSACache.stage`, of keys and values `[B, T, G, D]`, of which the first `counts [B]` are real and kept. A
        ValueError for another dtype, or where they do not fit."""
        self.check_dtype(new[0].dtype)
        _, _, tokens, crowded, longest = self.place_tokens(new[0].shape[1], counts)
        new = pair_of(x[:, : self.max_len] for x in new)
        return Past(*self.write(tokens, new, self.max_len if crowded else longest), tokens, new, longest)

    def write(self, tokens: NewTokens, new: Pair, n_keys: int) -> tuple[Pair, Tensor]:
        """Write new tokens past the end of every row. Returns the first `n_keys` keys and values, and where the queries
        start among them."""
        self.kv.extend(tokens.start, tokens.end, new)
        return self.kv.first(n_keys, tokens.end), tokens.q_start

    @torch.no_grad()
    def commit(self, past: Past) -> None:
        """Append the tokens of a staged step."""
        self.lengths.copy_(past.tokens.end)
        self.high_water.clamp_(min=past.tokens.end)
        self.longest = past.longest

    @torch.no_grad()
    def discard(self, past: Past) -> None:
        """Remove a staged step that failed."""
        self.clear(self.lengths, past.tokens.n_queries, past.tokens.end)

    def clear(self, start: Tensor, n: int, end: Tensor) -> None:
        self.kv.clear(start, n, end)

    def bytes_read_per_step(self, length: int | None = None) -> int:
        """Bytes of keys and values that one decoding step reads, all rows, each `length` long (default: as now)."""
        return sum(self.keys_seen(n) for n in self.check_length(length)) * self.kv.bytes_per_slot()
