"""The short way of a cached step: a few new tokens per row, from the projections to the attention's output in one call.

With `backend="triton"` the decode kernels take the place of `NSACache.stage`, the ops and `NSACache.commit`, in dense
attention of `DenseCache.append` and SDPA, and where the layer's Linears are plain ones and the rows few, of these too.
Everything else (longer steps, other backends, `torch.compile`, autocast) goes the long way in the layer's `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from nsa import eager, settings
from nsa.backends import triton
from nsa.backends.problem import Problem
from nsa.backends.routing import BackendFailure, CallUnsupported, router
from nsa.cache import NSACache, PagedNSACache, RowCache
from nsa.cache.store import bits
from nsa.config import NSAConfig
from nsa.functional import hyperparameters_of

if TYPE_CHECKING:
    from nsa.attention import NSAAttention
    from nsa.compression import Compression

# With more rows cuBLAS is the better matmul, and with fewer of large weights.
MAX_LINEAR_ROWS, ANY_SIZE_ROWS = 32, 2
MAX_LINEAR_BYTES = 1 << 24
# Methods that the kernels replace; a subclass may override them.
STEP_METHODS = ("project", "angles", "split_keys", "attend", "compress_blocks")

T = TypeVar("T")


class RowNorm(Protocol):
    """An RMSNorm, which the linear kernel can compute itself."""

    eps: float

    @property
    def weight(self) -> Tensor: ...

    def __call__(self, x: Tensor) -> Tensor: ...


def fused_step(
    layer: NSAAttention,
    x: Tensor,
    cache: NSACache,
    counts: Tensor | None,
    position_offset: int | Tensor,
    every_branch: bool = False,
    *,
    norm: RowNorm | None = None,
    plain: bool = False,
    first: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Append the tokens `norm(x [B,T,dim])`, the first `counts [B]` of which are real, to `cache` and attend from them,
    by the branch that the gate is pinned to or, with `every_branch`, by all. A `plain` layer is no subclass; the
    launches before one that is not `first` have written no weights.

    Returns:
        `o [B,T,Hq,Dv]`, the selected blocks `[B,T,G,n_sel]` and without a `norm` the gates `[B,T,Hq,3]`; None where the
        decode kernels do not run the step, and the cache's lengths are as they were.

    Raises:
        ValueError: the tokens do not fit into the cache.
        BackendFailure: the kernels cannot be launched, and were requested by name, or `strict` forbids another way. The
            cache's lengths are as they were.
    """
    if not isinstance(position_offset, int) or not fits(layer, x, cache):
        return None
    c, counts = layer.config, as_counts(counts)

    def launch() -> tuple[Tensor, Tensor, Tensor | None]:
        decode, _ = triton.load("decode")
        q, keys, values, gates = project(layer, x, norm, plain, first)
        ks = (keys,) * 3 if c.share_kv else keys.split(c.n_kv_groups, dim=2)
        new = decode.Projected(q, *zip(ks, layer.split_values(values), strict=True))
        phi = None if c.phi == "mean" else (weights_of(decode, layer.phi_k), weights_of(decode, layer.phi_v))
        branch = None if every_branch else c.force_branch
        how = decode.Hyperparameters(*hyperparameters_of(c), c.d_k**-0.5, cache.max_len, branch)
        o, indices = triton.decode_step(
            new,
            stores_of(decode, cache),
            gates,
            how,
            phi=phi,
            rotate_raw=c.compress_rope == "before",
            position_offset=position_offset,
            counts=counts,
        )
        return o, indices, gates if norm is None else None

    return run_step("decode_step", launch, c, x, cache, counts)


def as_counts(counts: Tensor | None) -> Tensor | None:
    """`counts [B]` as the kernels take them, contiguous int64: a plan is not keyed by their layout."""
    return None if counts is None else counts.long().contiguous()


def run_step(
    name: str, launch: Callable[[], T], config: NSAConfig, x: Tensor, cache: RowCache, counts: Tensor | None
) -> T | None:
    """What `launch()` returns, the step `name` of a layer, after which the cache is longer; else as of `fused_step`."""
    problem = step_problem(config, x, cache.max_len)
    falls_back = config.backend == "auto" and not config.strict
    if not kernels_run(problem, config.backend) or (falls_back and (problem, name) in router().failed):
        return None
    longest = cache.longest_after(x.shape[1], counts)
    try:
        result = launch()
    except BackendFailure as failure:
        if router().has_recovered(failure, "triton", problem, name, config.strict):
            return run_step(name, launch, config, x, cache, counts)
        router().note_failure("triton", problem, name, str(failure), "the ops" if falls_back else None)
        if not falls_back:
            raise
        if not isinstance(failure, CallUnsupported):
            router().failed[problem, name] = str(failure)
        return None
    cache.longest = longest
    router().counts.add_call("decode", "triton")
    return result


def fits(layer: NSAAttention, x: Tensor, cache: NSACache) -> bool:
    """Whether this is a step for the decode kernels, as far as the layer and the cache go."""
    # A ring that holds fewer tokens would lose some that the step's first token still sees.
    rollback = x.shape[1] - 1 <= cache.max_rollback or min(cache.window.slots, cache.tail.slots) == cache.max_len
    fitting = is_plain_step(x, layer.q_proj.weight.dtype, cache) and rollback and not layer.config.branch_norm
    # The kernels read the cache's frequencies.
    fitting = fitting and layer.rope == cache.rope
    fitting = fitting and all(getattr(layer, name).__module__ == "nsa.attention" for name in STEP_METHODS)
    # They compress as the config says, and a phi may have been replaced.
    phis, expected = (layer.phi_k, layer.phi_v), (layer.config.phi, layer.config.l)
    return fitting and all(readable(phi, x.device) and (phi.kind, phi.block) == expected for phi in phis)


def readable(phi: Compression, device: torch.device) -> bool:
    """Whether the kernels can take the place of `phi`: there are no hooks and no adapters, nothing is offloaded or
    transposed."""
    weights: list[Tensor] = []
    plain = eager.collect("phi", phi, weights)
    return plain and all(w.is_contiguous() and w.device == device for w in weights)


def project(
    layer: NSAAttention, x: Tensor, norm: RowNorm | None, plain: bool, first: bool
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Queries, keys and values as by `layer.heads`, and the gates, of `norm(x)`; one launch, and one more for the last
    layer of the gates, where the layer is a `plain` one, whose parameters say all that it does. With a `norm` that last
    layer may be left to the step."""
    c, gate = layer.config, layer.gate
    parameters = eager.parameters_of(layer, x) if plain else None
    if parameters is None or not few_rows(x, *parameters):
        x = x if norm is None else norm(x)
        return *layer.heads(x), gate(x)
    p = eager.Parameters.split(parameters)
    decode, _ = triton.load("decode")
    inner, inner_bias, outer, outer_bias = p.gate
    weights = [*map(decode.Weights, (p.q, p.k, p.v)), decode.Weights(inner, inner_bias, "silu")]
    *projected, hidden = triton.linear_step(x, *weights, norm=norm_of(decode, norm), first=first)
    q, k, v = (y.unflatten(-1, (-1, size)) for y, size in zip(projected, (c.d_k, c.d_k, c.d_v), strict=True))
    sigmoid = gate.config.gate == "sigmoid" and gate.config.drop_branch is None
    if sigmoid and norm is not None:
        return q, k, v, decode.GateLayer(hidden, outer, outer_bias)
    (gates,) = triton.linear_step(hidden, decode.Weights(outer, outer_bias, "sigmoid" if sigmoid else None))
    gates = gates.unflatten(-1, (c.n_heads, -1))
    return q, k, v, gates if sigmoid else gate.activate(gates)


def few_rows(x: Tensor, *weights: Tensor) -> bool:
    """Whether the linear kernel takes `x [B,T,K]` and these weights."""
    n_rows = x.shape[0] * x.shape[1]
    if n_rows > MAX_LINEAR_ROWS or not x.is_contiguous() or torch.is_grad_enabled():
        return False
    fitting = (w.is_contiguous() and (n_rows <= ANY_SIZE_ROWS or w.nbytes <= MAX_LINEAR_BYTES) for w in weights)
    return all(fitting) and all((w.dtype, w.device) == (x.dtype, x.device) for w in weights)


def norm_of(decode: Any, norm: RowNorm | None) -> Any:
    return None if norm is None else decode.Norm(norm.weight, norm.eps)


def is_plain_step(x: Tensor, dtype: torch.dtype, cache: RowCache) -> bool:
    """Whether `x [B,T,dim]` are a few tokens, of the `dtype` of the layer's weights and of the cache, and neither
    compiled nor under autocast."""
    plain = not torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type)
    return plain and x.shape[1] <= min(triton.MAX_STEP_TOKENS, cache.max_len) and x.dtype == dtype == cache.dtype


def step_problem(config: NSAConfig, x: Tensor, max_len: int) -> Problem:
    """Of the tokens `x [B,T,dim]` over a cache of `max_len`."""
    c = config
    return Problem(
        batch=x.shape[0],
        n_queries=x.shape[1],
        n_keys=max_len,
        n_heads=c.n_heads,
        n_groups=c.n_kv_groups,
        d_k=c.d_k,
        d_v=c.d_v,
        dtype=x.dtype,
        device=x.device.type,
    )


def kernels_run(problem: Problem, backend: str) -> bool:
    """Triton's interpreter runs them by name alone: it is slow."""
    named = backend == "triton" or (backend == "auto" and problem.device == "cuda")
    return named and not settings.current().force_parity and triton.supports(problem) is None


def stores_of(decode: Any, cache: NSACache) -> Any:
    """The cache's tensors as the kernels take them; fp8 as bytes."""
    pages = decode.Pages(cache.table, cache.row_capacity, cache.page_size) if isinstance(cache, PagedNSACache) else None
    pairs = (tuple(map(bits, pair)) for pair in cache.buffer_pairs())
    scales = None
    if cache.quantize is not None:
        scales = tuple(store.scales for store in (cache.compressed, cache.selected, cache.window))
    return decode.Stores(*pairs, cache.lengths, cache.high_water, cache.frequencies, pages, scales)


def weights_of(decode: Any, phi: Compression) -> Any:
    return decode.Mlp(phi.position, phi.inner.weight, phi.inner.bias, phi.outer.weight, phi.outer.bias)
