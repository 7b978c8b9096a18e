"""The compression `phi` around its matmuls: block means, and blocks gathered for a Linear, with gradients.

Slot `n` holds the block of tokens `[first[n], first[n] + l)`. Fixed-length, `first[n] = n*d`. Varlen, the blocks of the
documents lie one after the other in `S//d` slots, and slots that no document needs are zero and pass no gradient.

    mean:    out[n] = sum_r x[first[n] + r] / l                     dx[t] = sum_n dout[n] / l
    gather:  out[n, r] = x[first[n] + r] + pos[r]                   dx[t] = sum_n dout[n, t - first[n]]
                                                                    dpos[r] = sum_{b, n, g} dout[n, r]

A token is in the at most `ceil(l/d)` blocks `n = base + p//d - c`, `p` its position in its document and `base` its
document's first slot: gradients are gathered by the token, never added by the blocks, and so need no atomics. `dpos` is
summed in two steps: each CTA one run of rows, then the runs in their order. Sums are fp32.

Grids: (tiles of slots or tokens, G, B); one CTA owns its tile and writes it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout, new_layout, strides
from nsa.backends.triton.partials import sum_partials
from nsa.sequences import Pooling

# Runs into which the sum for the position embedding is cut: enough CTAs for a large GPU.
POSITION_RUNS = 128


@dataclass(frozen=True)
class CompressTile:
    """`elements`: of the tokens that one CTA reads at once."""

    elements: int
    num_warps: int


DEFAULT_TILE = CompressTile(elements=4096, num_warps=4)


@triton.jit
def slot_tokens(first, o_n, n_slots, STRIDE: tl.constexpr, VARLEN: tl.constexpr):
    """First token of each slot, and which slots hold a block."""
    m_n = o_n < n_slots
    if VARLEN:
        o_first = tl.load(first + o_n, mask=m_n, other=-1)
        return tl.maximum(o_first, 0), m_n & (o_first >= 0)
    else:  # noqa: RET505  only one of the two is compiled
        return o_n * STRIDE, m_n


@triton.jit
def token_place(position, base, count, o_t, length, n_slots, VARLEN: tl.constexpr):
    """Each token's position, its document's first slot and number of slots, and whether the token is there."""
    m_t = o_t < length
    if VARLEN:
        o_pos = tl.load(position + o_t, mask=m_t, other=0)
        return o_pos, tl.load(base + o_t, mask=m_t, other=0), tl.load(count + o_t, mask=m_t, other=0), m_t
    else:  # noqa: RET505  only one of the two is compiled
        return o_t, o_t * 0, o_t * 0 + n_slots, m_t


@triton.jit
def block_tokens(
    x, first, i_g, i_b, n_slots, stride_xb, stride_xt, stride_xg,
    STRIDE: tl.constexpr, VARLEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Slots of a tile, which of them hold a block, and `[BLOCK_N, BLOCK_R, BLOCK_D]` pointers to those blocks' first
    tokens. So many loads are in flight at once: one token after the other would be as many waits for memory."""
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_first, m_used = slot_tokens(first, o_n, n_slots, STRIDE, VARLEN)
    o_t = o_first.to(tl.int64)[:, None] + tl.arange(0, BLOCK_R)[None, :]
    p_x = x + i_b * stride_xb + i_g * stride_xg + (o_t * stride_xt)[:, :, None] + tl.arange(0, BLOCK_D)[None, None, :]
    return o_n, m_used, p_x


@triton.jit
def mean_forward_kernel(
    x, out, first, n_slots, stride_xb, stride_xt, stride_xg, stride_ob, stride_on, stride_og,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_n, m_used, p_x = block_tokens(
        x, first, i_g, i_b, n_slots, stride_xb, stride_xt, stride_xg, STRIDE, VARLEN, BLOCK_N, BLOCK_R, BLOCK_D
    )
    o_r = tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_sum = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for r in range(0, BLOCK, BLOCK_R):
        m_x = (m_used[:, None] & (r + o_r < BLOCK)[None, :])[:, :, None] & m_d[None, None, :]
        b_sum += tl.sum(tl.load(p_x + tl.cast(r, tl.int64) * stride_xt, mask=m_x, other=0.0).to(tl.float32), 1)
    p_out = out + i_b * stride_ob + i_g * stride_og + o_n.to(tl.int64)[:, None] * stride_on + o_d[None, :]
    tl.store(p_out, (b_sum / BLOCK).to(out.dtype.element_ty), mask=(o_n < n_slots)[:, None] & m_d[None, :])


@triton.jit
def gather_forward_kernel(
    x, pos, out, first, n_slots, stride_xb, stride_xt, stride_xg, stride_pr, stride_ob, stride_on, stride_og,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_n, m_used, p_x = block_tokens(
        x, first, i_g, i_b, n_slots, stride_xb, stride_xt, stride_xg, STRIDE, VARLEN, BLOCK_N, BLOCK_R, BLOCK_D
    )
    o_d = tl.arange(0, BLOCK_D)
    p_out = out + i_b * stride_ob + i_g * stride_og + (o_n.to(tl.int64) * stride_on)[:, None, None] + o_d[None, None, :]
    for r in range(0, BLOCK, BLOCK_R):
        o_r = r + tl.arange(0, BLOCK_R)
        m_pos = (o_r < BLOCK)[:, None] & (o_d < D)[None, :]
        b_pos = tl.load(pos + (o_r * stride_pr)[:, None] + o_d[None, :], mask=m_pos, other=0.0).to(tl.float32)
        m_x = m_used[:, None, None] & m_pos[None, :, :]
        b_x = tl.load(p_x + tl.cast(r, tl.int64) * stride_xt, mask=m_x, other=0.0).to(tl.float32) + b_pos[None, :, :]
        m_out = (o_n < n_slots)[:, None, None] & m_pos[None, :, :]
        tl.store(p_out + (o_r * D)[None, :, None], tl.where(m_x, b_x, 0.0).to(out.dtype.element_ty), mask=m_out)


@triton.jit
def token_backward_kernel(
    dout, dx, position, base, count, length, n_slots,
    stride_ob, stride_on, stride_og, stride_xb, stride_xt, stride_xg,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, VARLEN: tl.constexpr, MEAN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`dx` of a tile of tokens: the sum over the blocks that hold each of them."""
    i_g = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)
    o_pos, o_base, o_count, m_t = token_place(position, base, count, o_t, length, n_slots, VARLEN)
    m_d = o_d < D
    # [BLOCK_T, BLOCK_D]
    b_sum = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    p_do = dout + i_b * stride_ob + i_g * stride_og + o_d[None, :]
    for c in tl.static_range((BLOCK + STRIDE - 1) // STRIDE):
        o_i = o_pos // STRIDE - c
        o_r = o_pos - o_i * STRIDE
        m_i = m_t & (o_i >= 0) & (o_i < o_count) & (o_r < BLOCK)
        o_do = (o_base + tl.maximum(o_i, 0)).to(tl.int64) * stride_on
        if not MEAN:
            o_do += o_r * D
        b_sum += tl.load(p_do + o_do[:, None], mask=m_i[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    if MEAN:
        b_sum = b_sum / BLOCK
    p_dx = dx + i_b * stride_xb + i_g * stride_xg + o_t.to(tl.int64)[:, None] * stride_xt + o_d[None, :]
    tl.store(p_dx, b_sum.to(dx.dtype.element_ty), mask=m_t[:, None] & m_d[None, :])


@triton.jit
def position_partial_kernel(
    dout, partial, first, n_rows, n_slots, run, block_dim, stride_ob, stride_on, stride_og,
    G: tl.constexpr, VARLEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum of the rows (batch, slot, group) of one run, for `BLOCK_C` of the `l*D` columns. Grid (columns, runs)."""
    i_run = tl.program_id(1)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < block_dim
    b_sum = tl.zeros([BLOCK_C], dtype=tl.float32)
    for i in range(0, run, BLOCK_R):
        o_row = i_run * run + i + tl.arange(0, BLOCK_R)
        m_row = (o_row < n_rows) & (i + tl.arange(0, BLOCK_R) < run)
        o_g = o_row % G
        o_n = (o_row // G) % n_slots
        o_b = o_row // G // n_slots
        if VARLEN:
            m_row = m_row & (tl.load(first + o_n, mask=m_row, other=-1) >= 0)
        o_do = o_b.to(tl.int64) * stride_ob + o_n.to(tl.int64) * stride_on + o_g.to(tl.int64) * stride_og
        b_do = tl.load(dout + o_do[:, None] + o_c[None, :], mask=m_row[:, None] & m_c[None, :], other=0.0)
        b_sum += tl.sum(b_do.to(tl.float32), 0)
    tl.store(partial + i_run.to(tl.int64) * block_dim + o_c, b_sum, mask=m_c)


def slot_table(pooling: Pooling) -> Tensor | None:
    """`[N]` first token of each slot of a varlen row, -1 where a slot is not used."""
    if pooling.sequences.cu_seqlens is None:
        return None
    first, _, used = pooling.starts
    return torch.where(used, first, -1).int()


@lru_cache(maxsize=MAX_PLANS)
def plan_forward(
    x: Layout, position: Layout | None, n_slots: int, block: int, stride: int, varlen: bool, tile: CompressTile
) -> tuple[Launch, tuple[int, int, int, int]]:
    """The launch and the shape of the result: blocks with a position embedding added, else their means."""
    batch, _, groups, dim = x.shape
    shape = (batch, n_slots, groups, dim if position is None else block * dim)
    block_d = triton.next_power_of_2(dim)
    block_r = min(triton.next_power_of_2(block), max(1, tile.elements // block_d))
    block_n = max(1, tile.elements // (block_r * block_d))
    launch = Launch(
        mean_forward_kernel if position is None else gather_forward_kernel,
        (triton.cdiv(n_slots, block_n), groups, batch), n_slots=n_slots,
        **strides(x_btg=x, o_bng=new_layout(shape, x.dtype, x.device)),
        **({} if position is None else strides(p_r=position)), BLOCK=block, STRIDE=stride, D=dim, VARLEN=varlen,
        BLOCK_N=block_n, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=tile.num_warps,
    )  # fmt: skip
    return launch, shape


def compress_forward(x: Tensor, *position_pooling: Any, tile: CompressTile = DEFAULT_TILE) -> Tensor:
    """Compress `x [B,S,G,D]` by a `Pooling` to `[B,N,G,D]`, the mean of each block. With a `position [l,D]` before the
    `Pooling`: `[B,N,G,l*D]`, contiguous: the tokens of each block, position added."""
    pooling: Pooling = position_pooling[-1]
    position: Tensor | None = position_pooling[0] if len(position_pooling) > 1 else None
    first = slot_table(pooling)
    launch, shape = plan_forward(
        layout(x), None if position is None else layout(position), pooling.count, pooling.block, pooling.stride,
        first is not None, tile,
    )  # fmt: skip
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if shape[1] == 0:
        return out
    given: dict[str, Any] = {"x": x, "out": out, "first": first}
    if position is not None:
        given["pos"] = position
    launch(**given)
    return out


compress_mean_forward = gather_blocks_forward = compress_forward


@lru_cache(maxsize=MAX_PLANS)
def plan_tokens(
    dout: Layout, length: int, block: int, stride: int, varlen: bool, mean: bool, tile: CompressTile
) -> tuple[Launch, tuple[int, int, int, int]]:
    """The launch of `token_backward_kernel` and the shape of `dx`."""
    batch, n_slots, groups, dim = dout.shape
    dim = dim if mean else dim // block
    shape = (batch, length, groups, dim)
    block_d = triton.next_power_of_2(dim)
    block_t = max(1, tile.elements // block_d)
    launch = Launch(
        token_backward_kernel, (triton.cdiv(length, block_t), groups, batch), length=length, n_slots=n_slots,
        **strides(o_bng=dout, x_btg=new_layout(shape, dout.dtype, dout.device)), BLOCK=block, STRIDE=stride, D=dim,
        VARLEN=varlen, MEAN=mean, BLOCK_T=block_t, BLOCK_D=block_d, num_warps=tile.num_warps,
    )  # fmt: skip
    return launch, shape


def token_backward(dout: Tensor, pooling: Pooling, tile: CompressTile, *, mean: bool) -> Tensor:
    varlen = pooling.sequences.cu_seqlens is not None
    length = pooling.sequences.length
    launch, shape = plan_tokens(layout(dout), length, pooling.block, pooling.stride, varlen, mean, tile)
    if dout.shape[1] == 0:
        return torch.zeros(shape, dtype=dout.dtype, device=dout.device)
    dx = torch.empty(shape, dtype=dout.dtype, device=dout.device)
    position, base, count = (table.int() for table in pooling.tokens) if varlen else (None, None, None)
    launch(dout=dout, dx=dx, position=position, base=base, count=count)
    return dx


def compress_mean_backward(dout: Tensor, pooling: Pooling, tile: CompressTile = DEFAULT_TILE) -> Tensor:
    """`dout [B,N,G,D]` to the gradient `[B,S,G,D]` of the tokens."""
    return token_backward(dout, pooling, tile, mean=True)


@lru_cache(maxsize=MAX_PLANS)
def plan_position(dout: Layout, varlen: bool, max_runs: int) -> tuple[Launch, tuple[int, int], Launch]:
    """The launch of `position_partial_kernel`, the shape of its partial sums, and the launch that adds them."""
    batch, n_slots, groups, block_dim = dout.shape
    n_rows = batch * n_slots * groups
    run = triton.cdiv(n_rows, max_runs)
    n_runs = triton.cdiv(n_rows, run)
    block_c = min(256, triton.next_power_of_2(block_dim))
    launch = Launch(
        position_partial_kernel, (triton.cdiv(block_dim, block_c), n_runs), n_rows=n_rows, n_slots=n_slots, run=run,
        block_dim=block_dim, **strides(o_bng=dout), G=groups, VARLEN=varlen, BLOCK_R=16, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return launch, (n_runs, block_dim), sum_partials(n_runs, block_dim, at_once=32, block=64)


def gather_blocks_backward(dout: Tensor, pooling: Pooling, tile: CompressTile = DEFAULT_TILE) -> tuple[Tensor, Tensor]:
    """`dout [B,N,G,l*D]` to the gradients `dx [B,S,G,D]` and `dposition [l,D]`."""
    n_slots, block_dim = dout.shape[1], dout.shape[3]
    block = pooling.block
    dx = token_backward(dout, pooling, tile, mean=False)
    if n_slots == 0:
        return dx, torch.zeros(block, block_dim // block, dtype=dout.dtype, device=dout.device)
    first = slot_table(pooling)
    launch, shape, add = plan_position(layout(dout), first is not None, POSITION_RUNS)
    partial = torch.empty(shape, dtype=torch.float32, device=dout.device)
    launch(dout=dout, partial=partial, first=first)
    dposition = torch.empty((block, block_dim // block), dtype=dout.dtype, device=dout.device)
    add(p_part=partial, p_out=dposition, p_part_1=partial, p_out_1=dposition)
    return dx, dposition
