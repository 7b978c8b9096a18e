"""A Llama-style language model whose attention is selected by its config, for all layers or per layer.

Shapes: B batch, S tokens, D = dim, V = vocabulary. The residual stream stays in the parameters' dtype (fp32 master
weights under autocast); matmul inputs are cast once, by the norm before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa.attention import NSAAttention
from nsa.cache import NSACache, RowCache
from nsa.checks import FLOATS
from nsa.config import require, require_positive_int
from nsa.dtypes import matmul_dtype
from nsa.eager import is_plain_linear
from nsa.geometry import n_compressed
from nsa.model.alternatives import BigBirdAttention, LongformerAttention, SlidingAttention
from nsa.model.config import AttentionKind, LMConfig
from nsa.model.dense import DenseAttention, DenseCache
from nsa.model.loss import chunked_cross_entropy
from nsa.model.step import fused_head, fused_layer

Cache = NSACache | DenseCache


class LM(nn.Module):
    """Tokens `[B, S]` to logits `[B, S, V]`, or with targets to their mean loss.

    model = LM(LMConfig.preset("tiny"))
    loss = model(tokens, targets)              # model(tokens, targets, cu_seqlens=cu) for a varlen batch, B = 1
    caches = model.new_cache(batch_size, max_len)
    logits = model(new_tokens, caches=caches)  # prefill, a chunk, or one token

    Args:
        config: Sizes and attention.
    """

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.attn.dim
        self.embedding = nn.Embedding(config.vocab_size, dim)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.n_layers))
        # All layers share one set of RoPE tables.
        for layer in self.blocks:
            layer.attention.rope = self.blocks[0].attention.rope
        self.norm = RMSNorm(dim, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(dim, config.vocab_size, bias=False)
        # Activation checkpointing: keep only each layer's input and recompute the rest in the backward.
        self.recompute = False
        self.compiled: tuple[Callable[..., Tensor], Callable[..., Tensor]] | None = None
        self.reset_parameters()

    def compile_layers(self, **options: Any) -> None:
        """Let `torch.compile(**options)` compile the training of one layer, which all layers share, and of the loss.

        A whole model takes several times as long to compile, and replayed as CUDA graphs it is not faster.

        Args:
            options: Of `torch.compile`.
        """
        self.compiled = torch.compile(apply_layer, **options), torch.compile(chunked_cross_entropy, **options)

    def __getstate__(self) -> dict[str, Any]:
        # What a compiler made belongs to this process.
        return {**self.__dict__, "compiled": None}

    def reset_parameters(self) -> None:
        """Initialize as GPT-2: N(0, 0.02), output projections divided by sqrt(2 * n_layers). The gate and phi keep
        their own initialization."""
        std = 0.02
        nn.init.normal_(self.embedding.weight, std=std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=std)
        for layer in self.blocks:
            attn, mlp = layer.attention, layer.mlp
            for linear in (attn.q_proj, attn.k_proj, attn.v_proj, mlp.inner):
                nn.init.normal_(linear.weight, std=std)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            for linear in (attn.o_proj, mlp.outer):
                nn.init.normal_(linear.weight, std=std / math.sqrt(2 * len(self.layers)))

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        caches: list[Cache] | None = None,
    ) -> Tensor:
        """Compute logits or the loss.

        Args:
            tokens: int `[B, S]`.
            targets: int64 `[B, S]`, -100 where ignored.
            cu_seqlens: int32 `[n + 1]`, offsets of the documents of a varlen batch (`B = 1`).
            attention_mask: bool `[B, S]`; False marks padding.
            caches: One per layer, from `new_cache`; `tokens` are appended.

        Returns:
            Logits `[B, S, V]`, or with `targets` their mean loss, a scalar.

        Raises:
            ValueError: An argument has a wrong shape or value, or does not go with another.
        """
        x = self.hidden(tokens, cu_seqlens=cu_seqlens, attention_mask=attention_mask, caches=caches)
        if targets is None:
            return self.logits(x)
        _, loss = self.parts(cached=caches is not None)
        return loss(x, self.head_weight, targets, strict=self.config.attn.strict)

    def parts(self, *, cached: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """The functions that run a layer and the loss; compiled only for training, as other calls have many shapes."""
        if self.compiled is None or cached or not (self.training and torch.is_grad_enabled()):
            return apply_layer, chunked_cross_entropy
        return self.compiled

    def hidden(self, tokens: Tensor, *, caches: list[Cache] | None = None, **given: Tensor | None) -> Tensor:
        """Compute the input of the head.

        Args:
            tokens: int `[B, S]`.
            caches: As in `forward`.
            given: `cu_seqlens` and `attention_mask`, as in `forward`; or for a step of caches `counts`, int `[B]`, how
                many of each row's tokens are real, the first ones.

        Returns:
            `[B, S, D]`, after the last norm.

        Raises:
            ValueError: An argument has a wrong shape or value, or does not go with another.
        """
        if caches is not None:
            self.check_caches(caches, tokens, **given)
        x = self.embedding(tokens)
        run, _ = self.parts(cached=caches is not None)
        for index, layer in enumerate(self.blocks):
            if caches is None:
                x = run(layer, x, self.recompute and self.training, **given)
            else:
                # Nothing but a hook could write a layer's weights after the layer before it.
                hooked = layer._forward_pre_hooks or self.blocks[index - 1]._forward_hooks
                x = layer(x, cache=caches[index], first=index == 0 or bool(hooked), **given)
        return self.norm(x)

    def check_caches(
        self,
        caches: list[Cache],
        tokens: Tensor,
        *,
        counts: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **given: Tensor | None,
    ) -> None:
        """A ValueError where a layer would refuse its cache once others have appended to theirs."""
        accepted = f"a list of one for each of the {len(self.layers)} layers"
        require(len(caches) == len(self.layers), "caches", f"a list of {len(caches)}", accepted)
        if attention_mask is not None and attention_mask.shape == tokens.shape:
            counts = attention_mask.sum(dim=1)
        for index, (layer, cache) in enumerate(zip(self.blocks, caches, strict=True)):
            attention = layer.attention
            # Of a module that wraps one of ours, the class says nothing.
            kind: type = NSACache if isinstance(attention, NSAAttention) else RowCache
            kind = DenseCache if isinstance(attention, DenseAttention) else kind
            require(
                isinstance(cache, kind),
                f"caches[{index}]",
                type(cache).__name__,
                f"what new_cache makes, {kind.__name__}",
            )
            if kind is not RowCache:
                device, dtype = computed_in(layer) or (cache.device, cache.dtype)
                cache.check_layer(attention.config, tokens.shape[0], device)
                cache.check_dtype(dtype)
            cache.longest_after(tokens.shape[-1], counts)

    def logits(self, x: Tensor) -> Tensor:
        """Apply the head.

        Args:
            x: `[..., D]`, from `hidden`.

        Returns:
            `[..., V]`.
        """
        logits = fused_head(self, x)
        return F.linear(x, self.head_weight) if logits is None else logits

    @property
    def blocks(self) -> Sequence[Layer]:
        """`layers`, typed."""
        return cast(Sequence[Layer], self.layers)

    @property
    def head_weight(self) -> Tensor:
        """`[V, D]`; the embedding's if tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def new_cache(self, batch_size: int, max_len: int, **options: Any) -> list[Cache]:
        """One empty cache per layer; under autocast pass its dtype.

        Args:
            batch_size, max_len: Rows, and most tokens per row.
            options: More arguments of the layers' `new_cache`: `dtype`, `device`, `max_rollback` and `static`; for NSA
                alone `quantize`, `page_size` and `n_pages`.

        Returns:
            The caches, in the order of the layers.

        Raises:
            ValueError: An argument has a wrong type or value, or a layer has no such form of a cache.
        """
        special = [name for name in ("quantize", "page_size", "n_pages") if name in options]
        if special:
            require(set(self.config.kinds) == {"nsa"}, special[0], options[special[0]], "only with NSA in every layer")
        return [layer.attention.new_cache(batch_size, max_len, **options) for layer in self.blocks]

    def parameter_counts(self) -> dict[str, int]:
        """Count the parameters.

        Returns:
            The number of each part: `embedding`, `attention`, `mlp`, `norm`, `head`. A tied head has none.
        """
        norms = [norm for layer in self.blocks for norm in (layer.attention_norm, layer.mlp_norm)]
        parts: dict[str, list[nn.Module]] = {
            "embedding": [self.embedding],
            "attention": [layer.attention for layer in self.blocks],
            "mlp": [layer.mlp for layer in self.blocks],
            "norm": [*norms, self.norm],
            "head": [] if self.head is None else [self.head],
        }
        return {name: sum(p.numel() for m in modules for p in m.parameters()) for name, modules in parts.items()}

    def flops_per_token(self, length: int, *, backward: bool = True) -> float:
        """Mean FLOPs per token in a sequence of `length`.

        A multiply-add counts as two, a backward as two forwards; masked scores and recomputation do not count.

        Args:
            length: Tokens.
            backward: Count a training step; else the forward pass alone.

        Returns:
            The FLOPs.

        Raises:
            ValueError: `length` is not a positive integer.
        """
        return sum(self.flops_by_part(length, backward=backward).values())

    def flops_by_part(self, length: int, *, backward: bool = True) -> dict[str, float]:
        """`flops_per_token` by part.

        Args:
            length, backward: As for `flops_per_token`.

        Returns:
            The FLOPs of each kind of attention (projections and scores) by its name, of `mlp` and of `head`.

        Raises:
            ValueError: `length` is not a positive integer.
        """
        require_positive_int("length", length)
        c = self.config.attn
        parts = dict.fromkeys((*self.config.kinds, "mlp", "head"), 0.0)
        parts["head"] += self.head_weight.numel()
        # The same in all layers of a kind.
        keys = {kind: self.mean_keys(kind, length) for kind in set(self.config.kinds)}
        # phi runs once per block and group, everything else once per token.
        blocks = c.n_kv_groups * n_compressed(length, c.l, c.d) / length
        for kind, layer in zip(self.config.kinds, self.blocks, strict=True):
            parts["mlp"] += linear_weights(layer.mlp)
            parts[kind] += linear_weights(layer.attention) + keys[kind] * c.n_heads * (c.d_k + c.d_v)
            if isinstance(layer.attention, NSAAttention):
                phis = (layer.attention.phi_k, layer.attention.phi_v)
                parts[kind] += (blocks - 1) * sum(map(linear_weights, phis))
        return {part: 2 * weights * (3 if backward else 1) for part, weights in parts.items()}

    def mean_keys(self, kind: AttentionKind, length: int) -> float:
        """Mean number of keys that a query sees in a layer.

        Args:
            kind: The attention of the layer.
            length: Tokens of the sequence, at least 1.

        Returns:
            The mean over the queries.

        Raises:
            ValueError: No layer is of this kind.
        """
        attention = self.blocks[self.config.kinds.index(kind)].attention
        seen = attention.config.reads_per_step if isinstance(attention, NSAAttention) else attention.keys_seen
        return sum(seen(t) for t in range(1, length + 1)) / length

    def kv_bytes(self, length: int, *, batch_size: int = 1, dtype: torch.dtype | None = None) -> int:
        """Memory that the caches of all layers take.

        Args:
            length: Tokens per row.
            batch_size: Rows.
            dtype: As in `new_cache`.

        Returns:
            Bytes.

        Raises:
            ValueError: An argument has a wrong type or value.
        """
        return sum(cache.bytes_used() for cache in self.new_cache(batch_size, length, dtype=dtype, device="meta"))

    def kv_bytes_per_token(self, *, dtype: torch.dtype | None = None) -> float:
        """Memory that the caches of all layers take per additional token of a long sequence.

        Args:
            dtype: As in `new_cache`.

        Returns:
            Bytes; 0 for a layer that keeps only a window.

        Raises:
            ValueError: `dtype` is none that a cache can have.
        """
        long = 1 << 20
        return (self.kv_bytes(2 * long, dtype=dtype) - self.kv_bytes(long, dtype=dtype)) / long

    def kv_bytes_read(self, length: int, *, batch_size: int = 1, **options: Any) -> int:
        """K/V that one decoding step reads in all layers.

        Args:
            length: Tokens of each row.
            batch_size: Rows.
            options: As in `new_cache`, except `device`.

        Returns:
            Bytes.

        Raises:
            ValueError: An argument has a wrong type or value.
        """
        caches = self.new_cache(batch_size, length, device="meta", **options)
        return sum(cache.bytes_read_per_step(length) for cache in caches)


def apply_layer(layer: Layer, x: Tensor, recompute: bool, **given: Tensor | None) -> Tensor:
    if recompute:
        return cast(Tensor, checkpoint(partial(layer, **given), x, use_reentrant=False))
    return cast(Tensor, layer(x, **given))


class Layer(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: LMConfig, index: int) -> None:
        super().__init__()
        dim = config.attn.dim
        self.attention_norm = RMSNorm(dim, config.norm_eps)
        self.attention = new_attention(config, index)
        self.mlp_norm = RMSNorm(dim, config.norm_eps)
        self.mlp = SwiGLU(dim, config.hidden)

    def forward(
        self,
        x: Tensor,
        *,
        cache: Cache | None = None,
        counts: Tensor | None = None,
        first: bool = True,
        **given: Tensor | None,
    ) -> Tensor:
        """`counts [B]`: how many of a cached step's tokens `x [B, S, dim]` are real, the first ones; `first`: the
        launches before may have written the weights; `given`: what else the attention takes."""
        if cache is not None and given.get("attention_mask") is None:
            stepped = fused_layer(self, x, cache, counts, first)
            if stepped is not None:
                return stepped
            if counts is not None:
                given["attention_mask"] = torch.arange(x.shape[1], device=x.device) < counts[:, None]
        x = x + self.attention(self.attention_norm(x), cache=cache, **given)
        return x + self.mlp(self.mlp_norm(x))


def computed_in(layer: Layer) -> tuple[torch.device, torch.dtype] | None:
    """The device and dtype of the keys that `layer` computes; None where its weights do not say: quantized, offloaded,
    or with hooks that may move or cast them."""
    attention = layer.attention
    linear = attention.k_proj
    if layer._forward_pre_hooks or attention._forward_pre_hooks or not is_plain_linear(linear):
        return None
    weight = linear.weight
    if weight.is_meta or weight.dtype not in FLOATS:
        return None
    # Autocast leaves fp64 alone.
    return weight.device, weight.dtype if weight.dtype == torch.float64 else matmul_dtype(weight)


def new_attention(config: LMConfig, layer: int) -> NSAAttention | DenseAttention:
    c, kind = config, config.kinds[layer]
    if kind == "nsa":
        return NSAAttention(c.attn)
    if kind == "dense":
        return DenseAttention(c.attn)
    if kind == "sliding":
        return SlidingAttention(c.attn, window=c.window)
    tokens = {"window": c.window, "n_global": c.n_global}
    if kind == "longformer":
        return LongformerAttention(c.attn, **tokens)
    return BigBirdAttention(c.attn, **tokens, block=c.block, n_random=c.n_random, seed=c.random_seed, layer=layer)


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, cast once to the dtype of the matmuls that follow."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(matmul_dtype(x))


class SwiGLU(nn.Module):
    """`outer(silu(a) * b)` with `a, b = inner(x)`, one matmul for both."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, 2 * hidden, bias=False)
        self.outer = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.inner(x).chunk(2, dim=-1)
        return self.outer(F.silu(gate) * value)


def linear_weights(module: nn.Module) -> int:
    """Number of weights in the Linear layers of `module`: its multiply-adds per token."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
