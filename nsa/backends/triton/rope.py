"""Rotary position embedding of several tensors in one launch each, for eager training and inference.

    out[:half] = x[:half] * cos - x[half:] * sin          out[half:] = x[half:] * cos + x[:half] * sin

In eager mode the same in plain torch is nine launches per tensor and as many again in its backward pass, which is the
same rotation by the opposite angle. A compiler fuses the plain form: it is not called there.

Grid: one CTA per (tile of (query, head) rows, batch row); each element is read and written once. Products are not
fused into sums, so that the bits are those of plain torch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.launch import Launch, Layout, layout
from nsa.once import differentiable_once

ELEMENTS_PER_CTA = 4096


@triton.jit
def rotate_kernel(
    p_x, p_cos, p_sin, p_out, n_rows, stride_xb, stride_xt, stride_xh, stride_ob, stride_cb, stride_ct,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(1).to(tl.int64)
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_t = (o_r // HEADS).to(tl.int64)
    o_h = (o_r % HEADS).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_x = (o_r < n_rows)[:, None] & (o_d < HALF)[None, :]
    p_x += i_b * stride_xb + (o_t * stride_xt + o_h * stride_xh)[:, None] + o_d[None, :]
    o_angle = i_b * stride_cb + (o_t * stride_ct)[:, None] + o_d[None, :]
    # [BLOCK_R, BLOCK_D]
    b_cos = tl.load(p_cos + o_angle, mask=m_x, other=0.0)
    b_sin = tl.load(p_sin + o_angle, mask=m_x, other=0.0)
    if INVERSE:
        b_sin = -b_sin
    b_first = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_second = tl.load(p_x + HALF, mask=m_x, other=0.0).to(tl.float32)
    p_out += i_b * stride_ob + (o_r.to(tl.int64) * (2 * HALF))[:, None] + o_d[None, :]
    tl.store(p_out, (b_first * b_cos - b_second * b_sin).to(p_out.dtype.element_ty), mask=m_x)
    tl.store(p_out + HALF, (b_second * b_cos + b_first * b_sin).to(p_out.dtype.element_ty), mask=m_x)


@lru_cache(maxsize=256)
def plan(x: Layout, cos: Layout, inverse: bool) -> Launch:
    (batch, length, heads, head_dim), stride = x[:2]
    half = head_dim // 2
    block_d = triton.next_power_of_2(half)
    block_r = max(1, ELEMENTS_PER_CTA // (2 * block_d))
    # Angles `[S, 1, D/2]` are those of every row; `[B or 1, S, 1, D/2]` have a row each, or one for all.
    shape, strides = cos[:2]
    stride_cb = strides[0] if len(shape) == 4 and shape[0] > 1 else 0
    return Launch(
        rotate_kernel, (triton.cdiv(length * heads, block_r), batch), n_rows=length * heads, stride_xb=stride[0],
        stride_xt=stride[1], stride_xh=stride[2], stride_ob=length * heads * head_dim, stride_cb=stride_cb,
        stride_ct=strides[-3], HEADS=heads, HALF=half, BLOCK_R=block_r, BLOCK_D=block_d, INVERSE=inverse, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


def rotate_one(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """`x [B,S,H,D]`, contiguous in `D`, to a contiguous tensor of its shape and dtype."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        plan(layout(x), layout(cos), inverse)(p_x=x, p_cos=cos, p_sin=sin, p_out=out)
    return out


class Rotate(torch.autograd.Function):
    """`Rotate.apply(cos, sin, *tensors)`: every tensor rotated, differentiable in the tensors."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        return tuple(rotate_one(x, cos, sin, False) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        with torch.no_grad():
            rotated = [None if g is None else rotate_one(g, cos, sin, True) for g in grads]
        return (None, None, *differentiable_once("RoPE's kernel is differentiable once", rotated, grads))
