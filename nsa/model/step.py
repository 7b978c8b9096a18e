"""A cached step of a whole layer in few launches: what surrounds the attention joins its matmuls.

    norm, projections | gate | the attention's kernels | output, residual | norm, SwiGLU | down projection, residual

Where a part is no plain one (hooks, adapters, quantized or offloaded weights), or there are too many rows, the layer's
modules run as usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from nsa.attention import NSAAttention
from nsa.backends import triton
from nsa.cache import NSACache, RowCache
from nsa.decoding import few_rows, fused_step, norm_of
from nsa.eager import is_plain_linear

if TYPE_CHECKING:
    from nsa.model.transformer import Layer


def fused_layer(layer: Layer, x: Tensor, cache: RowCache, counts: Tensor | None) -> Tensor | None:
    """`layer(x [B,T,dim], cache=cache)`, of whose tokens the first `counts [B]` are real; None where its modules must
    run, and the cache is as it was.

    Raises:
        ValueError: The tokens do not fit into the cache.
        BackendFailure: The kernels cannot be launched, and were requested by name, or `strict` forbids another way.
    """
    attention, mlp = layer.attention, layer.mlp
    if type(attention) is not NSAAttention or torch.compiler.is_compiling() or not is_plain(layer):
        return None
    if not few_rows(x, attention.o_proj.weight, mlp.inner.weight, mlp.outer.weight):
        return None
    assert isinstance(cache, NSACache)
    attention.check(x, None, None, cache, 0)
    stepped = fused_step(attention, x, cache, counts, 0, norm=layer.attention_norm, plain=True)
    if stepped is None:
        return None
    decode, _ = triton.load("decode")
    (x,) = triton.linear(stepped[0].flatten(2), decode.Weights(attention.o_proj.weight), residual=x)
    inner = decode.Weights(mlp.inner.weight, None, "silu")
    (hidden,) = triton.linear(x, inner, norm=norm_of(decode, layer.mlp_norm), paired=True)
    (x,) = triton.linear(hidden, decode.Weights(mlp.outer.weight), residual=x)
    return x


def is_plain(layer: Layer) -> bool:
    """Whether the layer's parameters say all that it does."""
    modules = (layer.attention, layer.attention_norm, layer.mlp_norm, layer.mlp)
    hooked = any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules)
    linears = (layer.attention.o_proj, layer.mlp.inner, layer.mlp.outer)
    return not hooked and not _has_any_global_hook() and all(map(is_plain_linear, linears))
