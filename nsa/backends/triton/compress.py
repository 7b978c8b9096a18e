"""The compression `phi` around its matrix products: block means, and blocks gathered for a Linear, with gradients.

Slot `n` holds the block of tokens `[first[n], first[n] + l)`. Unpacked, `first[n] = n*d`. Packed, the documents' blocks
lie one after the other in `S//d` slots, and slots that no document needs are zero and pass no gradient.

    mean:    out[n] = sum_r x[first[n] + r] / l                     dx[t] = sum_n dout[n] / l
    gather:  out[n, r] = x[first[n] + r] + pos[r]                   dx[t] = sum_n dout[n, t - first[n]]
                                                                    dpos[r] = sum_{b, n, g} dout[n, r]

A token is in the at most `ceil(l/d)` blocks `n = base + p//d - c`, `p` its position in its document and `base` its
document's first slot: gradients are gathered by the token, never added by the blocks, and so need no atomics. `dpos` is
summed in two steps: each program one run of rows, then the runs in their order. Sums are fp32.

Grids: (tiles of slots or tokens, G, B); one program owns its tile and writes it once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.geometry import compressed_of_tokens, compressed_starts, n_compressed

# Runs into which the sum for the position embedding is cut: enough programs for a large GPU.
POSITION_RUNS = 128


@dataclass(frozen=True)
class Tile:
    """`elements`: of the output that one program holds at a time."""

    elements: int
    num_warps: int


DEFAULT_TILE = Tile(elements=4096, num_warps=4)


@triton.jit
def slot_tokens(first, o_n, n_slots, STRIDE: tl.constexpr, PACKED: tl.constexpr):
    """First token of each slot, and which slots hold a block."""
    m_n = o_n < n_slots
    if PACKED:
        o_first = tl.load(first + o_n, mask=m_n, other=-1)
        return tl.maximum(o_first, 0), m_n & (o_first >= 0)
    else:  # noqa: RET505  only one of the two is compiled
        return o_n * STRIDE, m_n


@triton.jit
def token_place(position, base, count, o_t, length, n_slots, PACKED: tl.constexpr):
    """Of each token: its position, its document's first slot and number of slots, and whether it is there."""
    m_t = o_t < length
    if PACKED:
        o_pos = tl.load(position + o_t, mask=m_t, other=0)
        return o_pos, tl.load(base + o_t, mask=m_t, other=0), tl.load(count + o_t, mask=m_t, other=0), m_t
    else:  # noqa: RET505  only one of the two is compiled
        return o_t, o_t * 0, o_t * 0 + n_slots, m_t


@triton.jit
def mean_forward_kernel(
    x, out, first, n_slots, stride_xb, stride_xt, stride_xg, stride_ob, stride_on, stride_og,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_first, m_used = slot_tokens(first, o_n, n_slots, STRIDE, PACKED)
    p_x = x + i_b * stride_xb + i_g * stride_xg + o_first.to(tl.int64)[:, None] * stride_xt + o_d[None, :]
    m_x = m_used[:, None] & (o_d < D)[None, :]
    # [BLOCK_N, BLOCK_D]
    b_sum = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for _ in range(BLOCK):
        b_sum += tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
        p_x += stride_xt
    p_out = out + i_b * stride_ob + i_g * stride_og + o_n.to(tl.int64)[:, None] * stride_on + o_d[None, :]
    m_out = (o_n < n_slots)[:, None] & (o_d < D)[None, :]
    tl.store(p_out, (b_sum / BLOCK).to(out.dtype.element_ty), mask=m_out)


@triton.jit
def gather_forward_kernel(
    x, pos, out, first, n_slots, stride_xb, stride_xt, stride_xg, stride_pr, stride_ob, stride_on, stride_og,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_g = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_first, m_used = slot_tokens(first, o_n, n_slots, STRIDE, PACKED)
    p_x = x + i_b * stride_xb + i_g * stride_xg + o_first.to(tl.int64)[:, None] * stride_xt + o_d[None, :]
    p_out = out + i_b * stride_ob + i_g * stride_og + o_n.to(tl.int64)[:, None] * stride_on + o_d[None, :]
    m_d = o_d < D
    m_x = m_used[:, None] & m_d[None, :]
    m_out = (o_n < n_slots)[:, None] & m_d[None, :]
    for r in range(BLOCK):
        b_pos = tl.load(pos + r * stride_pr + o_d, mask=m_d, other=0.0).to(tl.float32)
        # [BLOCK_N, BLOCK_D]
        b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32) + b_pos[None, :]
        tl.store(p_out, tl.where(m_x, b_x, 0.0).to(out.dtype.element_ty), mask=m_out)
        p_x += stride_xt
        p_out += D


@triton.jit
def token_backward_kernel(
    dout, dx, position, base, count, length, n_slots,
    stride_ob, stride_on, stride_og, stride_xb, stride_xt, stride_xg,
    BLOCK: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr, MEAN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`dx` of a tile of tokens: the sum over the blocks that hold each of them."""
    i_g = tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = tl.arange(0, BLOCK_D)
    o_pos, o_base, o_count, m_t = token_place(position, base, count, o_t, length, n_slots, PACKED)
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
    dout, partial, first, n_rows, n_slots, run, width, stride_ob, stride_on, stride_og,
    G: tl.constexpr, PACKED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum of the rows (batch, slot, group) of one run, for `BLOCK_C` of the `l*D` columns. Grid (columns, runs)."""
    i_run = tl.program_id(1)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < width
    b_sum = tl.zeros([BLOCK_C], dtype=tl.float32)
    for i in range(0, run, BLOCK_R):
        o_row = i_run * run + i + tl.arange(0, BLOCK_R)
        m_row = (o_row < n_rows) & (i + tl.arange(0, BLOCK_R) < run)
        o_g = o_row % G
        o_n = (o_row // G) % n_slots
        o_b = o_row // G // n_slots
        if PACKED:
            m_row = m_row & (tl.load(first + o_n, mask=m_row, other=-1) >= 0)
        o_do = o_b.to(tl.int64) * stride_ob + o_n.to(tl.int64) * stride_on + o_g.to(tl.int64) * stride_og
        b_do = tl.load(dout + o_do[:, None] + o_c[None, :], mask=m_row[:, None] & m_c[None, :], other=0.0)
        b_sum += tl.sum(b_do.to(tl.float32), 0)
    tl.store(partial + i_run.to(tl.int64) * width + o_c, b_sum, mask=m_c)


@dataclass(frozen=True)
class Slots:
    """Where blocks lie. The tables are there for packed documents alone."""

    count: int
    packed: bool
    first: Tensor | None = None  # [N] first token, -1 where a slot is not used

    @staticmethod
    def of(length: int, block: int, stride: int, cu_seqlens: Tensor | None) -> Slots:
        if cu_seqlens is None:
            return Slots(n_compressed(length, block, stride), packed=False)
        first, _, used = compressed_starts(cu_seqlens, length, block, stride)
        return Slots(length // stride, packed=True, first=torch.where(used, first, -1).int())


def token_tables(
    length: int, block: int, stride: int, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Per token of a packed row: position, first slot of its document, number of its slots."""
    if cu_seqlens is None:
        return None, None, None
    position, base, count = compressed_of_tokens(cu_seqlens, length, block, stride)
    return position.int(), base.int(), count.int()


def strides(x: Tensor, name: str, dims: str) -> dict[str, int]:
    """`stride_<name><dim>` of the first three dimensions; the last must be contiguous."""
    assert x.stride(-1) == 1 or x.shape[-1] == 1, f"last dimension has stride {x.stride(-1)}"
    return {f"stride_{name}{dim}": x.stride(i) for i, dim in enumerate(dims)}


def compress_mean_forward(
    x: Tensor, *, block: int, stride: int, cu_seqlens: Tensor | None = None, tile: Tile = DEFAULT_TILE
) -> Tensor:
    """`x [B,S,G,D]` to `[B,N,G,D]`: the mean of each block."""
    batch, length, groups, dim = x.shape
    slots = Slots.of(length, block, stride, cu_seqlens)
    out = torch.empty(batch, slots.count, groups, dim, dtype=x.dtype, device=x.device)
    if slots.count == 0:
        return out
    block_d = triton.next_power_of_2(dim)
    block_n = max(1, tile.elements // block_d)
    mean_forward_kernel[(triton.cdiv(slots.count, block_n), groups, batch)](
        x=x, out=out, first=slots.first, n_slots=slots.count, **strides(x, "x", "btg"), **strides(out, "o", "bng"),
        BLOCK=block, STRIDE=stride, D=dim, PACKED=slots.packed, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def compress_mean_backward(
    dout: Tensor,
    *,
    length: int,
    block: int,
    stride: int,
    cu_seqlens: Tensor | None = None,
    tile: Tile = DEFAULT_TILE,
) -> Tensor:
    """`dout [B,N,G,D]` to the gradient `[B,length,G,D]` of the tokens."""
    return token_backward(dout, dout.shape[-1], length, block, stride, cu_seqlens, tile, mean=True)


def gather_blocks_forward(
    x: Tensor, pos: Tensor, *, block: int, stride: int, cu_seqlens: Tensor | None = None, tile: Tile = DEFAULT_TILE
) -> Tensor:
    """`x [B,S,G,D]` and `pos [l,D]` to `[B,N,G,l*D]`, contiguous: each block's tokens with their places added."""
    batch, length, groups, dim = x.shape
    slots = Slots.of(length, block, stride, cu_seqlens)
    out = torch.empty(batch, slots.count, groups, block * dim, dtype=x.dtype, device=x.device)
    if slots.count == 0:
        return out
    assert pos.stride(-1) == 1 or dim == 1, f"pos: last dimension has stride {pos.stride(-1)}"
    block_d = triton.next_power_of_2(dim)
    block_n = max(1, tile.elements // block_d)
    gather_forward_kernel[(triton.cdiv(slots.count, block_n), groups, batch)](
        x=x, pos=pos, out=out, first=slots.first, n_slots=slots.count, stride_pr=pos.stride(0),
        **strides(x, "x", "btg"), **strides(out, "o", "bng"),
        BLOCK=block, STRIDE=stride, D=dim, PACKED=slots.packed, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def gather_blocks_backward(
    dout: Tensor,
    *,
    length: int,
    block: int,
    stride: int,
    cu_seqlens: Tensor | None = None,
    tile: Tile = DEFAULT_TILE,
) -> tuple[Tensor, Tensor]:
    """`dout [B,N,G,l*D]` to the gradients `dx [B,length,G,D]` and `dpos [l,D]`."""
    batch, n_slots, groups, width = dout.shape
    dim = width // block
    dx = token_backward(dout, dim, length, block, stride, cu_seqlens, tile, mean=False)
    if n_slots == 0:
        return dx, torch.zeros(block, dim, dtype=dout.dtype, device=dout.device)
    slots = Slots.of(length, block, stride, cu_seqlens)
    n_rows = batch * n_slots * groups
    run = triton.cdiv(n_rows, POSITION_RUNS)
    n_runs = triton.cdiv(n_rows, run)
    partial = torch.empty(n_runs, width, dtype=torch.float32, device=dout.device)
    block_c = min(256, triton.next_power_of_2(width))
    position_partial_kernel[(triton.cdiv(width, block_c), n_runs)](
        dout=dout, partial=partial, first=slots.first, n_rows=n_rows, n_slots=n_slots, run=run, width=width,
        **strides(dout, "o", "bng"), G=groups, PACKED=slots.packed, BLOCK_R=16, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return dx, partial.sum(dim=0).view(block, dim).to(dout.dtype)


def token_backward(
    dout: Tensor,
    dim: int,
    length: int,
    block: int,
    stride: int,
    cu_seqlens: Tensor | None,
    tile: Tile,
    *,
    mean: bool,
) -> Tensor:
    batch, n_slots, groups = dout.shape[:3]
    if n_slots == 0:
        return torch.zeros(batch, length, groups, dim, dtype=dout.dtype, device=dout.device)
    dx = torch.empty(batch, length, groups, dim, dtype=dout.dtype, device=dout.device)
    position, base, count = token_tables(length, block, stride, cu_seqlens)
    block_d = triton.next_power_of_2(dim)
    block_t = max(1, tile.elements // block_d)
    token_backward_kernel[(triton.cdiv(length, block_t), groups, batch)](
        dout=dout, dx=dx, position=position, base=base, count=count, length=length, n_slots=n_slots,
        **strides(dout, "o", "bng"), **strides(dx, "x", "btg"),
        BLOCK=block, STRIDE=stride, D=dim, PACKED=cu_seqlens is not None, MEAN=mean, BLOCK_T=block_t, BLOCK_D=block_d,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return dx
