"""A cached step of a whole layer in few launches: what surrounds the attention joins its matmuls.

    norm, projections | the attention's kernels | output, residual | norm, SwiGLU | down projection, residual

The head is one more. Where a part is no plain one (hooks, adapters, another class, quantized or offloaded weights), or
there are too many rows, the layer's modules run as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from nsa.attention import NSAAttention
from nsa.backends import triton
from nsa.backends.problem import Problem
from nsa.backends.routing import BackendFailure, router
from nsa.cache import NSACache, RowCache
from nsa.config import NSAConfig
from nsa.decoding import as_counts, few_rows, fused_step, kernels_run, norm_of, step_problem
from nsa.eager import METHODS, is_plain_call, is_plain_linear
from nsa.model.dense import DenseAttention, DenseCache

if TYPE_CHECKING:
    from nsa.model.transformer import LM, Layer


def fused_layer(layer: Layer, x: Tensor, cache: RowCache, counts: Tensor | None, first: bool = True) -> Tensor | None:
    """`layer(x [B,T,dim], cache=cache)`, of whose tokens the first `counts [B]` are real; None where its modules must
    run, and the cache is as it was. The launches before a layer that is not `first` have not written its weights.

    Raises:
        ValueError: The tokens do not fit into the cache.
        BackendFailure: The kernels cannot be launched, and were requested by name, or `strict` forbids another way.
            After the attention, the cache holds the tokens: go back by `cache.crop`.
    """
    if torch.compiler.is_compiling() or (cache.batch_size, cache.device) != (x.shape[0], x.device):
        return None
    if not is_plain_layer(layer):
        return None
    outputs = (layer.attention.o_proj, layer.mlp.inner, layer.mlp.outer)
    if not takes(x, *outputs) or not few_rows(x, layer.attention_norm.weight, layer.mlp_norm.weight):
        return None
    c = layer.attention.config
    falls_back = c.backend == "auto" and not c.strict
    if falls_back and router().failed and (step_problem(c, x, cache.max_len), "linear_step") in router().failed:
        return None
    # Now: the cast is a launch, and those of the step do not wait for it.
    counts = as_counts(counts)
    o = attention_step(layer, x, cache, counts, first)
    if o is None:
        return None
    o = o.flatten(2)
    after = unless_it_fails(partial(after_attention, layer, x, o), c, step_problem(c, x, cache.max_len))
    if after is not None:
        return after
    # The tokens are in the cache by now.
    x = x + layer.attention.o_proj(o)
    return x + layer.mlp(layer.mlp_norm(x))


def fused_head(model: LM, x: Tensor) -> Tensor | None:
    """`model.logits(x)` in one launch, for a few rows `[B,T,dim]` or `[B,dim]`; None where torch multiplies them."""
    c, weight = model.config.attn, model.head_weight
    if not is_plain_call(x, weight) or torch.is_autocast_enabled(x.device.type) or x.dim() not in (2, 3):
        return None
    rows = x if x.dim() == 3 else x[:, None]
    if not few_rows(rows, weight):
        return None
    problem = step_problem(c, rows, 1)
    falls_back = c.backend == "auto" and not c.strict
    if not kernels_run(problem, c.backend) or (falls_back and (problem, "linear_step") in router().failed):
        return None

    def launch() -> Tensor:
        decode, _ = triton.load("decode")
        logits: Tensor = triton.linear_step(rows, decode.Weights(weight), first=True)[0]
        return logits

    logits = unless_it_fails(launch, c, problem)
    return None if logits is None else logits.view(*x.shape[:-1], -1)


def unless_it_fails(launch: Callable[[], Tensor], config: NSAConfig, problem: Problem) -> Tensor | None:
    """What linear kernels return; None where they fail and torch may take their place, from now on."""
    falls_back = config.backend == "auto" and not config.strict
    try:
        return launch()
    except BackendFailure as failure:
        router().note_failure("triton", problem, "linear_step", str(failure), "torch" if falls_back else None)
        if not falls_back:
            raise
        router().failed[problem, "linear_step"] = str(failure)
        return None


def after_attention(layer: Layer, x: Tensor, o: Tensor) -> Tensor:
    """What the layer makes of `x` and its attention's output `o [B,T,Hq*Dv]`, in three launches."""
    decode, _ = triton.load("decode")
    o_proj, inner, outer = (linear.weight for linear in (layer.attention.o_proj, layer.mlp.inner, layer.mlp.outer))
    (x,) = triton.linear_step(o, decode.Weights(o_proj), residual=x)
    norm = norm_of(decode, layer.mlp_norm)
    (hidden,) = triton.linear_step(x, decode.Weights(inner, None, "silu"), norm=norm, paired=True)
    (x,) = triton.linear_step(hidden, decode.Weights(outer), residual=x)
    return x


def attention_step(layer: Layer, x: Tensor, cache: RowCache, counts: Tensor | None, first: bool) -> Tensor | None:
    """The attention's output before its last projection, of `x` before the norm."""
    attention, norm = layer.attention, layer.attention_norm
    if type(attention) is NSAAttention and isinstance(cache, NSACache):
        attention.check(x, None, None, cache, 0)
        stepped = fused_step(attention, x, cache, counts, 0, norm=norm, plain=True, first=first)
        return None if stepped is None else stepped[0]
    if type(attention) is DenseAttention and isinstance(cache, DenseCache):
        c, linears = attention.config, (attention.q_proj, attention.k_proj, attention.v_proj)
        if not takes(x, *linears):
            return None

        def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            decode, _ = triton.load("decode")
            weights = [decode.Weights(linear.weight) for linear in linears]
            q, k, v = triton.linear_step(x, *weights, norm=norm_of(decode, norm), first=first)
            return q.unflatten(-1, (-1, c.d_k)), k.unflatten(-1, (-1, c.d_k)), v.unflatten(-1, (-1, c.d_v))

        return attention.fused_step(x, cache, counts, project)
    return None


def takes(x: Tensor, *linears: torch.nn.Linear) -> bool:
    """Whether the linear kernel takes the place of these modules, by their weights alone."""
    plain = all(is_plain_linear(linear) and linear.bias is None for linear in linears)
    return plain and few_rows(x, *(linear.weight for linear in linears))


def is_plain_layer(layer: Layer) -> bool:
    """Whether the layer's modules are of the classes that it makes them of, and no hooks see, or something replaces,
    their calls."""
    from nsa.model.transformer import RMSNorm, SwiGLU

    modules = (layer.attention, layer.attention_norm, layer.mlp_norm, layer.mlp)
    attentions = type(layer.attention) in (NSAAttention, DenseAttention)
    if not attentions or tuple(map(type, modules[1:])) != (RMSNorm, RMSNorm, SwiGLU):
        return False
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in modules) or _has_any_global_hook()
    return not hooked and not any("forward" in vars(m) or METHODS & vars(m).keys() for m in modules)
