"""Linear layers of a few rows, with what surrounds them: an RMSNorm before, an activation or a residual after.

    y = activation(norm(x) @ weight.T + bias)        y = residual + norm(x) @ weight.T
    y = silu(gate) * value, where `weight` holds the rows of `gate`, then those of `value` (`paired`)

One launch serves up to four weights of the same input. Each CTA reads its `BLOCK_N` rows of one weight once, which is
what bounds it; the rows of `x` are few and come from the L2 cache. The launches of a step write no weights, so a CTA
loads its first tile of them before it waits for the launch before; only the `first` launch of a step waits first, for
whatever wrote weights before the step. Each step is rounded as by torch's separate kernels.

Up to `FEWEST_ROWS` rows are multiplied without tensor cores, which would have a dozen rows of zeros to multiply, by
tiles of weights that are small and long: they are bound by the latency of a load.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa.backends.gpu import SMALL_SHARED_MEMORY
from nsa.backends.triton.decode.common import wait_then_trigger
from nsa.backends.triton.decode.plan import dependent_launch
from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout
from nsa.backends.triton.tiles import capability

MAX_WEIGHTS = 4
BLOCK_N = 16
TILE_ROW_BYTES = 512
# Rows of `x` up to which no tensor cores are used; elements of a tile of weights then, and of one of its rows.
FEWEST_ROWS, LONG_TILE, LONG_TILE_ROW = 4, 4096, 2048
LINEAR, SILU, SIGMOID = (tl.constexpr(i) for i in range(3))
ACTIVATIONS = {None: LINEAR.value, "silu": SILU.value, "sigmoid": SIGMOID.value}


class Weights(NamedTuple):
    """The weights `[N, K]` of a linear layer, its bias `[N]`, and the activation of its output, `silu` or `sigmoid`."""

    weight: Tensor
    bias: Tensor | None = None
    activation: str | None = None


class Norm(NamedTuple):
    """The weight `[K]` and epsilon of an RMSNorm."""

    weight: Tensor
    eps: float


@triton.jit
def load_matrix(p, o_row, o_k, n_rows, K: tl.constexpr):
    """`[rows, columns]` of a contiguous matrix with `K` columns; zeros outside."""
    m_x = (o_row < n_rows)[:, None] & (o_k < K)[None, :]
    return tl.load(p + (o_row.to(tl.int64) * K)[:, None] + o_k[None, :], mask=m_x, other=0.0)


@triton.jit
def load_norm(norm, o_k, K: tl.constexpr):
    return tl.load(norm + o_k, mask=o_k < K, other=0.0).to(tl.float32)


@triton.jit
def scale_by_norm(b_x, b_scale, b_norm):
    return (b_x.to(tl.float32) * b_scale[:, None] * b_norm[None, :]).to(b_x.dtype)


@triton.jit
def multiply(b_w, b_x, b_y):
    """`b_y + b_w @ b_x.T`, row by row if they are fewer than a matmul has."""
    if b_x.shape[0] < 16:
        o_m = tl.arange(0, b_x.shape[0])
        for i in tl.static_range(b_x.shape[0]):
            b_row = tl.sum(tl.where((o_m == i)[:, None], b_x.to(tl.float32), 0.0), 0)
            b_sum = tl.sum(b_w.to(tl.float32) * b_row[None, :], 1)
            b_y += tl.where((o_m == i)[None, :], b_sum[:, None], 0.0)
    else:
        b_y = tl.dot(b_w, tl.trans(b_x), b_y, input_precision="ieee")
    return b_y


@triton.jit(do_not_specialize=["n_rows", "eps"])
def linear_kernel(
    x, norm, residual, weight_0, weight_1, weight_2, weight_3, bias_0, bias_1, bias_2, bias_3,
    out_0, out_1, out_2, out_3, n_rows, eps,
    N_0: tl.constexpr, N_1: tl.constexpr, N_2: tl.constexpr, N_3: tl.constexpr,
    ACTIVATION_0: tl.constexpr, ACTIVATION_1: tl.constexpr, ACTIVATION_2: tl.constexpr, ACTIVATION_3: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    BIASED: tl.constexpr, PAIRED: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of output features of one weight, for all rows.

    What is not there is another tensor of which nothing is read: a weight with `N` 0, and the bias of a weight whose
    bit in `BIASED` is 0.
    """
    if FIRST:
        wait_then_trigger(PDL)
    elif PDL:
        # The next launch may load its own weights meanwhile; it waits for all of this one.
        gdc_launch_dependents()
    dtype = x.dtype.element_ty
    END_0: tl.constexpr = tl.cdiv(N_0, BLOCK_N)
    END_1: tl.constexpr = END_0 + tl.cdiv(N_1, BLOCK_N)
    END_2: tl.constexpr = END_1 + tl.cdiv(N_2, BLOCK_N)
    tile = tl.program_id(0)
    i_weight, first_tile, n_out, activation = 0, 0, N_0, ACTIVATION_0
    weight, bias, out = weight_0, bias_0, out_0
    if tile >= END_0:
        i_weight, first_tile, n_out, activation = 1, END_0, N_1, ACTIVATION_1
        weight, bias, out = weight_1, bias_1, out_1
    if tile >= END_1:
        i_weight, first_tile, n_out, activation = 2, END_1, N_2, ACTIVATION_2
        weight, bias, out = weight_2, bias_2, out_2
    if tile >= END_2:
        i_weight, first_tile, n_out, activation = 3, END_2, N_3, ACTIVATION_3
        weight, bias, out = weight_3, bias_3, out_3
    o_n = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    b_w = load_matrix(weight, o_n, o_k, n_out, K)
    if PAIRED:
        b_w_value = load_matrix(weight + N_0 * K, o_n, o_k, n_out, K)
    if norm is not None:
        b_norm = load_norm(norm, o_k, K)
    if BIASED > 0:
        m_bias = (o_n < n_out) & ((BIASED >> i_weight) % 2 > 0)
        b_bias = tl.load(bias + o_n, mask=m_bias, other=0.0).to(tl.float32)
    o_y = (o_m * n_out)[None, :] + o_n[:, None]
    m_y = (o_m < n_rows)[None, :] & (o_n < n_out)[:, None]
    if PDL and not FIRST:
        gdc_wait()
    b_x = load_matrix(x, o_m, o_k, n_rows, K)
    if residual is not None:
        b_residual = tl.load(residual + o_y, mask=m_y, other=0.0).to(tl.float32)
    if norm is not None:
        b_squares = b_x.to(tl.float32) * b_x.to(tl.float32)
        for first in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
            b_next = load_matrix(x, o_m, first + o_k, n_rows, K).to(tl.float32)
            b_squares += b_next * b_next
        b_scale = tl.rsqrt(tl.sum(b_squares, 1) / K + eps)
        b_x = scale_by_norm(b_x, b_scale, b_norm)
    b_y = multiply(b_w, b_x, tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
    if PAIRED:
        b_value = multiply(b_w_value, b_x, tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
    for first in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        o_k = first + tl.arange(0, BLOCK_K)
        b_x = load_matrix(x, o_m, o_k, n_rows, K)
        if norm is not None:
            b_x = scale_by_norm(b_x, b_scale, load_norm(norm, o_k, K))
        b_y = multiply(load_matrix(weight, o_n, o_k, n_out, K), b_x, b_y)
        if PAIRED:
            b_value = multiply(load_matrix(weight + N_0 * K, o_n, o_k, n_out, K), b_x, b_value)
    if BIASED > 0:
        b_y += b_bias[:, None]
    b_y = b_y.to(dtype).to(tl.float32)
    b_y *= tl.where(activation == SILU, tl.sigmoid(b_y), 1.0)
    b_y = tl.where(activation == SIGMOID, tl.sigmoid(b_y), b_y).to(dtype).to(tl.float32)
    if PAIRED:
        b_y *= b_value.to(dtype).to(tl.float32)
    if residual is not None:
        b_y += b_residual
    tl.store(out + o_y, b_y.to(dtype), mask=m_y)


class LinearPlan:
    """The launch for one layout, and the sizes of its outputs."""

    def __init__(
        self,
        x: Layout,
        weights: tuple[Layout, ...],
        biased: tuple[bool, ...],
        activations: tuple[str | None, ...],
        eps: float | None,
        residual: bool,
        paired: bool,
        first: bool,
    ) -> None:
        *rows, n_inputs = x.shape
        n_rows = rows[0] * rows[1]
        features = [w.shape[0] // (1 + paired) for w in weights]
        assert all(w.shape[1] == n_inputs and w.strides == (n_inputs, 1) for w in weights)
        absent = range(len(weights), MAX_WEIGHTS)
        few = n_rows <= FEWEST_ROWS
        tile_row = LONG_TILE_ROW if few else TILE_ROW_BYTES // x.dtype.itemsize
        block_k = max(16, min(tile_row, triton.next_power_of_2(n_inputs)))
        block_n = LONG_TILE // block_k if few else BLOCK_N
        # Four stages of two tiles of weights and 32 rows take 114 KiB.
        crowded = paired and n_rows > 16 and capability(x.device) in SMALL_SHARED_MEMORY
        bound: dict[str, object] = {f"N_{i}": n for i, n in enumerate([*features, *(0 for _ in absent)])}
        codes = [*(ACTIVATIONS[name] for name in activations), *(ACTIVATIONS[None] for _ in absent)]
        bound |= {f"ACTIVATION_{i}": code for i, code in enumerate(codes)}
        bound |= ({} if eps is not None else {"norm": None}) | ({} if residual else {"residual": None})
        self.outputs = [((*rows, n), x.dtype, x.device) for n in features]
        self.launch = Launch(
            linear_kernel,
            (sum(triton.cdiv(n, block_n) for n in features),),
            **bound,
            **dependent_launch(x.device),
            n_rows=n_rows,
            eps=eps or 0.0,
            K=n_inputs,
            BLOCK_M=triton.next_power_of_2(n_rows) if few else max(16, triton.next_power_of_2(n_rows)),
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            STAGES=1 if few else 3 if crowded else 4,
            BIASED=sum(has << i for i, has in enumerate(biased)),
            PAIRED=paired,
            FIRST=first,
            # In a matmul each warp reads the whole tile of weights: fewer rows are multiplied by fewer warps.
            num_warps=2 if FEWEST_ROWS < n_rows <= 16 else 4,
        )


plan_linear = lru_cache(maxsize=MAX_PLANS)(LinearPlan)


def linear_step(
    x: Tensor,
    *weights: Weights,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    paired: bool = False,
    first: bool = False,
) -> tuple[Tensor, ...]:
    """Apply linear layers to the same few rows.

    Args:
        x: `[B, T, K]`, contiguous.
        weights: One to four, contiguous, in the dtype of `x`.
        norm: Of the rows of `x`, before.
        residual: `[B, T, N]`, added to the output of the only weight.
        paired: The only weight is that of a SwiGLU, `[2 * N, K]`: gates, then values. Its activation is `silu`.
        first: The launch before it may have written the weights.

    Returns:
        The output of each, `[B, T, N]`.
    """
    laid = tuple(layout(w.weight) for w in weights)
    biased, activations = tuple(w.bias is not None for w in weights), tuple(w.activation for w in weights)
    eps = None if norm is None else norm.eps
    plan = plan_linear(layout(x), laid, biased, activations, eps, residual is not None, paired, first)
    outputs = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in plan.outputs)
    given: dict[str, Tensor] = {}
    for i in range(MAX_WEIGHTS):
        w, out = (weights[i], outputs[i]) if i < len(weights) else (weights[0], outputs[0])
        given |= {f"weight_{i}": w.weight, f"bias_{i}": w.weight if w.bias is None else w.bias, f"out_{i}": out}
    if norm is not None:
        given["norm"] = norm.weight
    if residual is not None:
        given["residual"] = residual
    plan.launch(x=x, **given)
    return outputs
