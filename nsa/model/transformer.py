"""A Llama-style language model whose attention is one word of its configuration.

Shapes: B rows, S tokens, D = dim, V = vocabulary. The residual stream stays in the parameters' dtype (fp32 master
weights under autocast); what enters a product is cast once, by the norm before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa.attention import NSAAttention
from nsa.cache import NSACache
from nsa.config import NSAConfig, require, require_positive_int
from nsa.geometry import n_compressed
from nsa.model.dense import DenseAttention, DenseCache
from nsa.model.loss import chunked_cross_entropy

AttentionKind = Literal["nsa", "dense"]
Cache = NSACache | DenseCache


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """The model. `attn` holds the width, the heads and NSA's knobs; dense attention reads what it shares with it."""

    vocab_size: int
    n_layers: int
    hidden: int  # inner width of the MLP
    seq_len: int  # what it is trained at; RoPE sets no limit
    attn: NSAConfig
    attention: AttentionKind = "nsa"
    tie_embeddings: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layers", "hidden", "seq_len"):
            require_positive_int(name, getattr(self, name))
        require(self.attention in get_args(AttentionKind), "attention", self.attention, f"{get_args(AttentionKind)}")
        require(
            self.attention == "nsa" or self.attn.backend in ("auto", "sdpa"),
            "backend",
            self.attn.backend,
            "'auto' or 'sdpa' for dense attention, which torch's SDPA computes",
        )

    @classmethod
    def preset(cls, name: str) -> LMConfig:
        require(name in PRESETS, "preset", name, f"one of {sorted(PRESETS)}")
        return PRESETS[name]

    def with_backend(self, backend: str) -> LMConfig:
        return replace(self, attn=replace(self.attn, backend=backend))

    def to_dict(self) -> dict[str, Any]:
        """Plain types only: what a checkpoint holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LMConfig:
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        require(not unknown, "values", unknown, f"keys among {sorted(known)}")
        return cls(**{**values, "attn": NSAConfig.from_dict(values["attn"])})


PRESETS = {
    # Learns the look of Python on two CPU cores in a minute or so. The paper's blocks, but fewer of them and a shorter
    # window: at 512 tokens every branch still has something to leave out.
    "tiny": LMConfig(
        vocab_size=256,
        n_layers=2,
        hidden=256,
        seq_len=512,
        attn=NSAConfig(dim=128, n_heads=4, n_kv_groups=1, d_k=32, d_v=32, n_sel=4, w=128, phi_hidden=32),
    ),
    "125m": LMConfig(
        vocab_size=50257,
        n_layers=12,
        hidden=2048,
        seq_len=2048,
        attn=NSAConfig(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64),
    ),
}


class LM(nn.Module):
    """Tokens `[B, S]` to logits `[B, S, V]`, or with targets to their mean loss.

    model = LM(LMConfig.preset("tiny"))
    loss = model(tokens, targets)              # model(tokens, targets, cu_seqlens=cu) for packed documents, B = 1
    caches = model.new_cache(batch_size, max_len)
    logits = model(new_tokens, caches=caches)  # prefill, a chunk, or one token
    """

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.attn.dim
        self.embedding = nn.Embedding(config.vocab_size, dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(dim, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(dim, config.vocab_size, bias=False)
        # Activation checkpointing: keep only each layer's input and compute the rest again in the backward.
        self.recompute = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's: N(0, 0.02), and what is added to the residual stream divided by the root of how often that happens.
        The gate and phi keep their own."""
        std = 0.02
        nn.init.normal_(self.embedding.weight, std=std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=std)
        for layer in self.blocks:
            attn, mlp = layer.attention, layer.mlp
            for linear in (attn.q_proj, attn.k_proj, attn.v_proj, mlp.inner):
                nn.init.normal_(linear.weight, std=std)
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
        x = self.hidden(tokens, cu_seqlens=cu_seqlens, attention_mask=attention_mask, caches=caches)
        if targets is None:
            return self.logits(x)
        return chunked_cross_entropy(x, self.head_weight, targets)

    def hidden(
        self,
        tokens: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        caches: list[Cache] | None = None,
    ) -> Tensor:
        """What the head reads: `[B, S, D]`."""
        x = self.embedding(tokens)
        given = {"cu_seqlens": cu_seqlens, "attention_mask": attention_mask}
        for index, layer in enumerate(self.layers):
            if self.recompute and self.training and caches is None:
                x = checkpoint(partial(layer, **given), x, use_reentrant=False)
            else:
                x = layer(x, cache=None if caches is None else caches[index], **given)
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head_weight)

    @property
    def blocks(self) -> Sequence[Layer]:
        """`layers` with their type, which a ModuleList forgets."""
        return cast(Sequence[Layer], self.layers)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def new_cache(
        self,
        batch_size: int,
        max_len: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> list[Cache]:
        """One cache a layer. Under autocast name autocast's dtype."""
        return [layer.attention.new_cache(batch_size, max_len, dtype=dtype, device=device) for layer in self.blocks]

    # What the model costs.

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by part; a tied head has none of its own."""
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
        """What a token of a sequence of `length` costs on average: a multiply-add is two, a backward two forwards.

        Only what the mathematics asks for: masked scores and recomputation do not count.
        """
        c = self.config.attn
        if self.config.attention == "nsa":
            keys = sum(c.reads_per_step(t) for t in range(1, length + 1)) / length
            # phi runs once a block and group, everything else once a token.
            blocks = c.n_kv_groups * n_compressed(length, c.l, c.d) / length
        else:
            keys, blocks = (length + 1) / 2, 0.0
        scores = keys * c.n_heads * (c.d_k + c.d_v)
        weights = self.config.n_layers * scores + self.head_weight.numel()
        for name, module in self.layers.named_modules():
            if isinstance(module, nn.Linear):
                weights += module.weight.numel() * (blocks if ".phi_" in name else 1)
        return 2 * weights * (3 if backward else 1)

    def kv_bytes(self, batch_size: int, max_len: int, dtype: torch.dtype) -> int:
        """Memory that the caches hold."""
        return sum(cache.bytes_used() for cache in self.new_cache(batch_size, max_len, dtype=dtype, device="meta"))

    def kv_bytes_read(self, batch_size: int, length: int, dtype: torch.dtype) -> int:
        """Keys and values that one decoding step reads when every row is `length` long."""
        caches = self.new_cache(batch_size, length, dtype=dtype, device="meta")
        return sum(cache.bytes_read_per_step(length) for cache in caches)


class Layer(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        dim = config.attn.dim
        self.attention_norm = RMSNorm(dim, config.norm_eps)
        self.attention = NSAAttention(config.attn) if config.attention == "nsa" else DenseAttention(config.attn)
        self.mlp_norm = RMSNorm(dim, config.norm_eps)
        self.mlp = SwiGLU(dim, config.hidden)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x = x + self.attention(
            self.attention_norm(x), cu_seqlens=cu_seqlens, attention_mask=attention_mask, cache=cache
        )
        return x + self.mlp(self.mlp_norm(x))


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, handed on in the dtype that the next product takes: one cast instead of one a product."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(product_dtype(x))


class SwiGLU(nn.Module):
    """`outer(silu(a) * b)` with `a, b = inner(x)`: the gate and what it gates in one product."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, 2 * hidden, bias=False)
        self.outer = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.inner(x).chunk(2, dim=-1)
        return self.outer(F.silu(gate) * value)


def product_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else the tensor's own."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
