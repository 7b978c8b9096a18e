"""NSAAttention: the layer, in the order of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa import eager, ops
from nsa.cache import NSACache, PagedNSACache, Pair
from nsa.captures import Captures
from nsa.checks import (
    FLOAT_NAMES,
    FLOATS,
    can_read_values,
    check_cu_seqlens_values,
    check_finite,
    check_same,
    check_sequences,
    check_tensor,
)
from nsa.compression import Compression, compress_jointly, joinable
from nsa.config import BRANCHES, NSAConfig, require, require_bool, require_int
from nsa.decoding import fused_step
from nsa.functional import attend_normed, attention_kwargs
from nsa.geometry import compressed_starts, n_compressed, n_compressed_of, query_positions
from nsa.rope import Angles, Rope
from nsa.sequences import COMPRESSED_NAMES, SELECTED_NAMES, SELECTION_NAMES, SLIDING_NAMES

# The narrowest values that every backend takes.
LSE_FEATURES = 16


class NSAAttention(nn.Module):
    """Native sparse attention: `[B, S, dim]` to `[B, S, dim]`.

    Each query sees a compressed view of everything before it, a few blocks in full, and a sliding window; a learned
    gate combines the three per head.

        attn = NSAAttention(NSAConfig(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64))
        y = attn(x)                                # or attn(x, cu_seqlens=cu) for varlen, B = 1
        cache = attn.new_cache(batch_size, max_len)
        y = attn(x_new, cache=cache)               # prefill, a chunk, or one token

    Args:
        config: The hyperparameters.

    Raises:
        ValueError: `config` is not an NSAConfig.
    """

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        require(isinstance(config, NSAConfig), "config", config, "an NSAConfig")
        self.config = c = config
        # One K/V for each branch, side by side in one matmul; a single one when they share it.
        n_kv = 1 if c.share_kv else len(BRANCHES)
        self.q_proj = nn.Linear(c.dim, c.n_heads * c.d_k, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.dim, n_kv * c.n_kv_groups * c.d_k, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.dim, n_kv * c.n_kv_groups * c.d_v, bias=c.qkv_bias)
        self.phi_k = Compression(c.d_k, c.l, kind=c.phi, hidden=c.phi_hidden)
        self.phi_v = Compression(c.d_v, c.l, kind=c.phi, hidden=c.phi_hidden)
        self.gate = Gate(config)
        self.o_proj = nn.Linear(c.n_heads * c.d_v, c.dim, bias=False)
        if c.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(c.d_k, eps=c.qk_norm_eps) for _ in range(2))
        self.rope = Rope(c.d_k, c.rope_theta, c.rope_scaling)
        self.captures: Captures[eager.LayerReplay] = Captures()
        # What a pinned gate leaves unused: an optimizer or DDP would wait for gradients that do not come.
        for unused in (self.phi_k, self.phi_v) if c.force_branch in ("sel", "win") else ():
            unused.requires_grad_(False)

    def _apply(self, *args: Any, **options: Any) -> NSAAttention:
        # Of parameters that are about to move, or to change their dtype.
        self.captures = Captures()
        return super()._apply(*args, **options)

    def new_cache(
        self,
        batch_size: int,
        max_len: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> NSACache:
        """An empty cache, by default of this layer's dtype and on its device. Under autocast name autocast's dtype.

        Args:
            batch_size, max_len, dtype, device: As for `NSACache`.
            options: More arguments of `NSACache`; with `page_size` or `n_pages`, of `PagedNSACache`, which it
                then is.

        Returns:
            The cache, with `batch_size` rows of no tokens.

        Raises:
            ValueError: An argument has a wrong type or value.
        """
        weight = self.k_proj.weight
        kind = PagedNSACache if {"page_size", "n_pages"} & options.keys() else NSACache
        options["dtype"] = weight.dtype if dtype is None else dtype
        options["device"] = weight.device if device is None else device
        return kind(self.config, batch_size, max_len, **options)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: NSACache | None = None,
        position_offset: int | Tensor = 0,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, NSAStats]:
        """Attend.

        Args:
            x: `[B, S, dim]`.
            cu_seqlens: int32 `[n + 1]`, offsets of the documents of a varlen batch (`B = 1`).
            attention_mask: bool `[B, S]`; False marks padding, whose output is 0.
            cache: Keys and values of earlier tokens, from `new_cache`; `x` is appended, and no gradient is computed.
            position_offset: Added to RoPE's positions: one number, or int `[B]`. A cache counts its own positions.
            return_stats: Return an `NSAStats` too.

        Returns:
            `[B, S, dim]`, or a tuple of it and the statistics.

        Raises:
            ValueError: An argument has a wrong type, shape or value, or excludes another, or the tokens do not fit into
                the cache.
        """
        if cache is not None and torch.is_grad_enabled():
            # Keys in a cache carry no graph, and part of a gradient would be a wrong one.
            given: dict[str, Any] = {"cu_seqlens": cu_seqlens, "attention_mask": attention_mask, "cache": cache}
            with torch.no_grad():
                return self.forward(x, **given, position_offset=position_offset, return_stats=return_stats)
        self.check(x, cu_seqlens, attention_mask, cache, position_offset)
        require_bool("return_stats", return_stats)
        x, order, counts = real_tokens_first(x, attention_mask)
        if isinstance(position_offset, Tensor):
            position_offset = position_offset.view(-1, 1)
        start = None if cache is None else cache.lengths
        if return_stats and start is not None:
            # The cache moves on.
            start = start.clone()
        # A subclass may have replaced what the node computes itself.
        plain = cache is None and type(self) is NSAAttention
        parameters = eager.parameters_of(self, x) if plain else None
        if parameters is None:
            y, indices, gates = self.run_modules(x, cu_seqlens, position_offset, cache, counts, return_stats)
        else:
            if not return_stats and cu_seqlens is None and isinstance(position_offset, int) and position_offset == 0:
                replayed = eager.replay_layer(self, x, parameters)
                if replayed is not None:
                    return restore_padding(replayed, attention_mask, order)
            node = eager.arguments(self, cu_seqlens, position_offset, x, parameters)
            if torch.is_grad_enabled():
                y, indices, gates = eager.LayerNode.apply(*node)
            else:
                y, indices, gates = eager.LayerNode.forward(None, *node)
        y = restore_padding(y, attention_mask, order)
        return (y, NSAStats(self.config, gates.detach(), indices, cu_seqlens, start, counts)) if return_stats else y

    def run_modules(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        position_offset: int | Tensor,
        cache: NSACache | None,
        counts: Tensor | None,
        every_branch: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `eager.LayerNode` returns, by calling the layer's modules, and from a cache if there is one."""
        if cache is not None:
            plain = type(self) is NSAAttention
            stepped = fused_step(self, x, cache, counts, position_offset, every_branch, plain=plain)
            if stepped is not None:
                o, indices, gates = stepped
                assert gates is not None
                return self.o_proj(o.flatten(2)), indices, gates
        q, raw, selected, window = self.project(x, self.angles(x, cu_seqlens, cache, position_offset))
        gates = self.gate(x).to(q.dtype)
        if cache is None:
            pinned = None if every_branch else self.config.force_branch
            # The window alone needs no compressed keys, and the selected blocks no compressed values.
            places = (cu_seqlens, position_offset)
            compressed = raw if pinned == "win" else self.compress_all(raw, *places, keys_only=pinned == "sel")
            o, indices = self.attend(q, compressed, selected, window, gates, every_branch, cu_seqlens=cu_seqlens)
        else:
            past = cache.stage(
                raw=raw,
                selected=selected,
                window=window,
                compress=lambda k, v: self.compress_blocks(k, v, cache, position_offset),
                counts=counts,
            )
            try:
                o, indices = self.attend(
                    past.tokens.rotate_queries(q),
                    past.compressed,
                    past.selected,
                    past.window,
                    past.tokens.rotate_queries(gates),
                    every_branch,
                    q_start=past.q_start,
                    window_start=past.window_start,
                )
            except Exception:
                cache.discard(past)
                raise
            o, indices = (past.tokens.restore_order(result, x.shape[1]) for result in (o, indices))
            cache.commit(past)
        return self.o_proj(o.flatten(2)), indices, gates

    def attend(
        self,
        q: Tensor,
        compressed: Pair,
        selected: Pair,
        window: Pair,
        gates: Tensor,
        every_branch: bool,
        *,
        cu_seqlens: Tensor | None = None,
        q_start: Tensor | None = None,
        window_start: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The gated sum of the branches, and the selected blocks. Of a branch that the gate is pinned to, only what it
        needs is computed, unless `every_branch` is; what was not selected is -1."""
        c = self.config
        places: dict[str, Any] = {"cu_seqlens": cu_seqlens, "q_start": q_start}
        if c.force_branch is None or every_branch:
            places["window_start"] = window_start
            if c.branch_norm:
                return attend_normed(q, *compressed, *selected, *window, gates, config=c, **places)
            return ops.attention(q, *compressed, *selected, *window, gates, **(places | attention_kwargs(c)))
        nothing = q.new_full((*q.shape[:2], c.n_kv_groups, c.n_sel), -1, dtype=torch.int32)
        if c.force_branch == "win":
            places["q_start"] = window_start
            return ops.sliding_attention(q, *window, **(places | attention_kwargs(c, SLIDING_NAMES)))[0], nothing
        k_cmp, v_cmp = compressed
        if c.force_branch == "cmp":
            o, _ = ops.compressed_attention(q, k_cmp, v_cmp, **(places | attention_kwargs(c, COMPRESSED_NAMES)))
            return o, nothing
        with torch.no_grad():
            # For its LSE: a few features of the values will do.
            few = v_cmp[..., :LSE_FEATURES]
            _, lse = ops.compressed_attention(q, k_cmp, few, **(places | attention_kwargs(c, COMPRESSED_NAMES)))
            indices = ops.select_blocks(q, k_cmp, lse, **(places | attention_kwargs(c, SELECTION_NAMES)))
        o, _ = ops.selected_attention(q, *selected, indices, **(places | attention_kwargs(c, SELECTED_NAMES)))
        return o, indices

    def check(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        attention_mask: Tensor | None,
        cache: NSACache | None,
        position_offset: int | Tensor,
    ) -> None:
        check_tensor("x", x, "B S dim", FLOATS, FLOAT_NAMES)
        require(x.shape[2] == self.config.dim, "x.shape[2]", x.shape[2], f"dim = {self.config.dim}")
        require(min(x.shape) >= 1, "x.shape", tuple(x.shape), "no empty dimension")
        weight = self.q_proj.weight
        if not weight.is_meta:
            # Else it is offloaded, and a hook of its module brings it to x.
            check_same("x", "device", x.device, "the layer", weight.device)
        if torch.is_autocast_enabled(x.device.type):
            for name, dtype in (("x.dtype", x.dtype), ("the layer's dtype", weight.dtype)):
                require(dtype != torch.float64, name, dtype, "fp32 or half precision: autocast leaves fp64 alone")
        elif weight.dtype in FLOATS:
            # A quantized weight has a dtype of its own.
            check_same("x", "dtype", x.dtype, "the layer", weight.dtype)
        # A traced call has no values to check; the ops check them when they run.
        traced = torch.compiler.is_compiling()
        check_finite(self.config.strict and not traced, x=x)
        check_position_offset(position_offset, x, self.config.strict)
        if cu_seqlens is not None:
            require(x.shape[0] == 1, "x.shape[0]", x.shape[0], "1: a varlen batch is one row")
            check_sequences(x, cu_seqlens, None)
            if not traced:
                check_cu_seqlens_values(cu_seqlens, x.shape[1], self.config.strict)
            require(attention_mask is None, "attention_mask", "given with cu_seqlens", "one of the two")
            require(cache is None, "cache", "given with cu_seqlens", "one of the two: a cache row is one sequence")
        if attention_mask is not None:
            check_tensor("attention_mask", attention_mask, "B S", (torch.bool,), "torch.bool")
            shape = tuple(attention_mask.shape)
            require(shape == tuple(x.shape[:2]), "attention_mask.shape", shape, f"x's, {tuple(x.shape[:2])}")
            require(attention_mask.device == x.device, "attention_mask.device", attention_mask.device, f"{x.device}")
        if cache is not None:
            require(isinstance(cache, NSACache), "cache", cache, "an NSACache")
            cache.check_layer(self.config, x.shape[0], x.device)

    def angles(
        self, x: Tensor, cu_seqlens: Tensor | None, cache: NSACache | None, position_offset: int | Tensor
    ) -> Angles:
        """RoPE's for the positions of `x [B, S, dim]`, which follow those in a cache."""
        if cache is not None:
            return cache.angles(self.rope, x.shape[1], offset=position_offset)
        if cu_seqlens is None and isinstance(position_offset, int) and position_offset == 0:
            return self.rope.table(x.shape[1], x.device, x.dtype)
        positions = query_positions(x.shape[1], cu_seqlens, None, x.device)
        return self.rope.angles(positions + position_offset, x.dtype)

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Pair, Pair, Pair]:
        """Queries, and keys and values of the compressed, selected and sliding branch; all but raw keys are rotated."""
        q, k, v = self.heads(x)
        raw, selected, window = zip(self.split_keys(k, angles), self.split_values(v), strict=True)
        return self.rope.rotate(q, angles), raw, selected, window

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, S, Hq, Dk]`, keys `[B, S, 3 * G, Dk]` of the compressed, selected and sliding branch (or
        `[B, S, G, Dk]` that they share), and values `[B, S, 3 * G, Dv]`; not rotated."""
        c, parts = self.config, self.projections()
        linears = [linear for part in parts for linear in part]
        if torch.compiler.is_compiling() and all(eager.is_plain_linear(linear) for linear in linears):
            # One matmul: compiled code casts each weight, and adds up each gradient of x, in a kernel of its own.
            bias = torch.cat([linear.bias for linear in linears]) if c.qkv_bias else None
            joint = F.linear(x, torch.cat([linear.weight for linear in linears]), bias)
            projected = joint.split([sum(linear.out_features for linear in part) for part in parts], dim=-1)
        else:
            found = [[linear(x) for linear in part] for part in parts]
            projected = tuple(part[0] if len(part) == 1 else torch.cat(part, dim=-1) for part in found)
        q, k, v = (y.unflatten(-1, (-1, size)) for y, size in zip(projected, (c.d_k, c.d_k, c.d_v), strict=True))
        return (self.q_norm(q).to(q.dtype), self.k_norm(k).to(k.dtype), v) if c.qk_norm else (q, k, v)

    def projections(self) -> tuple[Sequence[nn.Linear], ...]:
        """Those of queries, of keys and of values; several are side by side."""
        return [self.q_proj], [self.k_proj], [self.v_proj]

    def split_keys(self, k: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """The branches' keys `[B, S, G, Dk]`, of `k [B, S, 3 * G, Dk]`, or `[B, S, G, Dk]` that they share."""
        c = self.config
        if c.share_kv:
            rotated = self.rope.rotate(k, angles)
            return (rotated if c.compress_rope == "before" else k), rotated, rotated
        # Those of the compressed branch come first.
        n_raw = 0 if c.compress_rope == "before" else c.n_kv_groups
        rotated = self.rope.rotate(k[:, :, n_raw:], angles).split(c.n_kv_groups, dim=2)
        return (k[:, :, :n_raw], *rotated) if n_raw else rotated

    def split_keys_backward(self, dk_raw: Tensor, dk_sel: Tensor, dk_win: Tensor, angles: Angles) -> Tensor:
        before, back = self.config.compress_rope == "before", self.rope.rotate_back
        if self.config.share_kv:
            return back(dk_raw + dk_sel + dk_win, angles) if before else dk_raw + back(dk_sel + dk_win, angles)
        if before:
            return back(torch.cat([dk_raw, dk_sel, dk_win], dim=2), angles)
        return torch.cat([dk_raw, back(dk_sel, angles), back(dk_win, angles)], dim=2)

    def split_values(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (v, v, v) if self.config.share_kv else v.split(self.config.n_kv_groups, dim=2)

    def split_values_backward(self, dv_raw: Tensor, dv_sel: Tensor, dv_win: Tensor) -> Tensor:
        return dv_raw + dv_sel + dv_win if self.config.share_kv else torch.cat([dv_raw, dv_sel, dv_win], dim=2)

    def compress_all(
        self, raw: Pair, cu_seqlens: Tensor | None, position_offset: int | Tensor, *, keys_only: bool = False
    ) -> Pair:
        """Compress every complete block of the sequences; with `keys_only`, the values are the keys again."""
        c = self.config
        k, v = raw
        where: dict[str, Any] = {"stride": c.d, "cu_seqlens": cu_seqlens, "backend": c.backend, "strict": c.strict}
        phis = self.phi_k, self.phi_v
        # A backend that is named runs its own op, or raises.
        jointly = torch.compiler.is_compiling() and c.backend == "auto" and cu_seqlens is None and not keys_only
        if jointly and joinable(phis, raw, c.d):
            k_cmp, v_cmp = compress_jointly(phis, raw, c.d)
        else:
            k_cmp = self.phi_k(k, **where)
            v_cmp = k_cmp if keys_only else self.phi_v(v, **where)
        if c.compress_rope == "after":
            k_cmp = self.rope.rotate(k_cmp, self.block_angles(k, cu_seqlens, position_offset))
        return k_cmp.to(k.dtype), v_cmp.to(v.dtype)

    def block_angles(self, x: Tensor, cu_seqlens: Tensor | None, position_offset: int | Tensor) -> Angles:
        """Of the compressed keys of `x [B, S, ...]`: each takes the position its block starts at."""
        c = self.config
        if cu_seqlens is not None:
            _, start, _ = compressed_starts(cu_seqlens, x.shape[1], c.l, c.d)
            return self.rope.angles(start[None] + position_offset, x.dtype)
        count = n_compressed(x.shape[1], c.l, c.d)
        if isinstance(position_offset, int) and position_offset == 0:
            return self.rope.table(count * c.d, x.device, x.dtype, stride=c.d)
        return self.rope.angles((torch.arange(count, device=x.device) * c.d)[None] + position_offset, x.dtype)

    def compress_blocks(
        self, k_blocks: Tensor, v_blocks: Tensor, cache: NSACache, position_offset: int | Tensor
    ) -> Pair:
        """The blocks `[B, N, l, G, D]` that a cache has just completed, which follow those that it has."""
        k_cmp, v_cmp = self.phi_k(k_blocks), self.phi_v(v_blocks)
        if self.config.compress_rope == "after":
            angles = cache.angles(self.rope, k_cmp.shape[1], offset=position_offset, blocks=True)
            k_cmp = self.rope.rotate(k_cmp, angles)
        return k_cmp.to(k_blocks.dtype), v_cmp.to(v_blocks.dtype)


def restore_padding(y: Tensor, attention_mask: Tensor | None, order: Tensor | None) -> Tensor:
    """`y [B, S, dim]`, whose real tokens come first, in the order of `attention_mask`: zeros where that is False."""
    if attention_mask is None or order is None:
        return y
    y = torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y)
    return y.masked_fill(~attention_mask[..., None], 0.0)


def check_position_offset(position_offset: int | Tensor, x: Tensor, strict: bool) -> None:
    if not isinstance(position_offset, Tensor):
        require_int("position_offset", position_offset, at_least=0)
        return
    accepted = f"one integer, or one per row of x, on {x.device}"
    integer = position_offset.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    require(integer, "position_offset.dtype", position_offset.dtype, accepted)
    fits = position_offset.dim() == 0 or (position_offset.dim() == 1 and position_offset.shape[0] in (1, x.shape[0]))
    require(fits, "position_offset.shape", tuple(position_offset.shape), accepted)
    require(position_offset.device == x.device, "position_offset.device", position_offset.device, accepted)
    if can_read_values(position_offset, strict) and not torch.compiler.is_compiling():
        values = position_offset.tolist()
        require(bool((position_offset >= 0).all()), "position_offset", values, "none below 0")


class Gate(nn.Module):
    """`g = sigmoid(MLP(x))` for each head and branch, or a softmax over the branches: `[B, S, Hq, 3]`."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.gate_hidden or max(1, config.dim // 4)
        self.inner = nn.Linear(config.dim, hidden)
        self.outer = nn.Linear(hidden, config.n_heads * len(BRANCHES))
        self.reset_parameters()
        # A pinned gate is never asked: an optimizer or DDP would wait for gradients that do not come.
        self.requires_grad_(config.force_branch is None)

    def reset_parameters(self) -> None:
        self.inner.reset_parameters()
        # Never zeros: a gate that starts constant has no gradient into its first layer.
        nn.init.xavier_uniform_(self.outer.weight)
        nn.init.constant_(self.outer.bias, self.config.gate_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.force_branch is not None:
            pinned = x.new_zeros(*x.shape[:2], self.config.n_heads, len(BRANCHES))
            pinned[..., BRANCHES.index(self.config.force_branch)] = 1.0
            return pinned
        return self.activate(self.outer(F.silu(self.inner(x))).unflatten(-1, (-1, len(BRANCHES))))

    def activate(self, logits: Tensor) -> Tensor:
        if self.config.drop_branch is not None:
            # Exactly 0 by either activation, and so is its gradient.
            logits = logits.clone()
            logits[..., BRANCHES.index(self.config.drop_branch)] = float("-inf")
        return logits.sigmoid() if self.config.gate == "sigmoid" else logits.softmax(dim=-1)

    def activate_backward(self, d_gates: Tensor, gates: Tensor) -> Tensor:
        if self.config.gate == "sigmoid":
            return torch.ops.aten.sigmoid_backward(d_gates, gates)
        return torch.ops.aten._softmax_backward_data(d_gates, gates, -1, gates.dtype)


@dataclass(frozen=True)
class NSAStats:
    """What the layer did in one forward. Holds references; each figure is computed when it is read.

    Args:
        config: The layer's.
        gates: `[B, S, Hq, 3]`, in the order compressed, selected, sliding.
        indices: int32 `[B, S, G, n_sel]` selected blocks, -1 for none.
        cu_seqlens: int32 `[n + 1]`, of a varlen batch.
        start: int32 `[B]`, position of each row's first query in a cache.
        counts: int64 `[B]` real tokens, the first ones of each row. None: all.
    """

    config: NSAConfig
    gates: Tensor
    indices: Tensor
    cu_seqlens: Tensor | None = None
    start: Tensor | None = None
    counts: Tensor | None = None

    @cached_property
    def positions(self) -> Tensor:
        """`[B or 1, S]`: each query's position in its sequence."""
        return query_positions(self.gates.shape[1], self.cu_seqlens, self.start, self.gates.device)

    @cached_property
    def real(self) -> Tensor:
        """`[B, S]`: which queries are no padding."""
        place = torch.arange(self.gates.shape[1], device=self.gates.device).expand(self.gates.shape[:2])
        return place >= 0 if self.counts is None else place < self.counts[:, None]

    @cached_property
    def gate_mean(self) -> dict[str, float]:
        """How open each branch's gate is, on average."""
        return mean_per_branch(self.gates[self.real].float())

    @cached_property
    def gate_entropy(self) -> dict[str, float]:
        """Mean binary entropy of each gate in bits: 1 is undecided, 0 is always fully open or shut."""
        g = self.gates[self.real].float().clamp(1e-7, 1 - 1e-7)
        return mean_per_branch(-(g * g.log2() + (1 - g) * (1 - g).log2()))

    @cached_property
    def selected_distance(self) -> Tensor:
        """`[max + 1]` counts: how many blocks back the selected blocks lie; 0 is the query's own."""
        own = torch.div(self.positions, self.config.l_sel, rounding_mode="floor")[..., None, None]
        distance = (own - self.indices)[(self.indices >= 0) & self.real[..., None, None]]
        return distance.flatten().bincount()

    @cached_property
    def reads_per_step(self) -> float:
        """Keys that a query reads in the three branches together: the mean over queries, and over groups."""
        c = self.config
        lengths = self.positions.expand(self.real.shape)[self.real] + 1
        blocks = self.indices[self.real].long()  # [n, G, n_sel]
        selected = (lengths[:, None, None] - blocks * c.l_sel).clamp(0, c.l_sel)[blocks >= 0]
        shared = n_compressed_of(lengths, c.l, c.d) + lengths.clamp_max(c.w)
        reads = shared.sum().item() + selected.sum().item() / c.n_kv_groups
        return reads / max(1, lengths.numel())


def mean_per_branch(x: Tensor) -> dict[str, float]:
    """Of `x [n, Hq, 3]`; 0 where there is nothing to average."""
    mean = x.sum(dim=(0, 1)) / max(1, x.shape[0] * x.shape[1])
    return dict(zip(BRANCHES, mean.tolist(), strict=True))


def real_tokens_first(x: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`x [B, S, dim]` with each row's real tokens first and zeros for padding, their order `[B, S]`, and how many there
    are `[B]`; without a mask `x`, None and None.

    So ordered, a row's positions and blocks are those of its tokens alone, and padding lies after them, where causality
    keeps it from being seen. Left and right padding are the same thing.
    """
    if attention_mask is None:
        return x, None, None
    order = attention_mask.int().argsort(dim=1, descending=True, stable=True)
    # Zeros in place of padding: what it held may overflow, and 0 * inf is NaN in the gradients.
    x = x.masked_fill(~attention_mask[..., None], 0.0).gather(1, order[..., None].expand_as(x))
    return x, order, attention_mask.sum(dim=1)
