"""Sums of fp32 partials, rounded once to the dtype of the result: one or two tensors in a launch.

Partials lie `[n_partials, n]`. A CTA owns BLOCK of the `n` elements and adds BLOCK_P partials at a time, in order:
the result is bitwise deterministic. Torch's `sum` adds more than two of them in another order, so the last place may
differ from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.backends.triton.launch import Launch
from nsa.backends.triton.primitives import COUNTS


@triton.jit(do_not_specialize=COUNTS)
def sum_partials_kernel(
    p_part, p_out, p_part_1, p_out_1, n, n_1, n_partials, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: (tiles of elements, tensors)."""
    if tl.program_id(1) == 1:
        p_part = p_part_1
        p_out = p_out_1
        n = n_1
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < n
    b_x = tl.zeros([BLOCK], tl.float32)
    for i in range(0, n_partials, BLOCK_P):
        o_part = i + tl.arange(0, BLOCK_P)
        p_x = p_part + (o_part.to(tl.int64) * n)[:, None] + o_x[None, :]
        b_x += tl.sum(tl.load(p_x, mask=(o_part < n_partials)[:, None] & m_x[None, :], other=0.0), 0)
    tl.store(p_out + o_x, b_x.to(p_out.dtype.element_ty), mask=m_x)


def sum_partials(n_partials: int, *sizes: int, at_once: int = 1, block: int = 1024) -> Launch:
    """The launch for one tensor of `sizes` elements, or for two; of one, its arguments are given twice."""
    grid = (triton.cdiv(max(sizes), block), len(sizes))
    return Launch(
        sum_partials_kernel,
        grid,
        n=sizes[0],
        n_1=sizes[-1],
        n_partials=n_partials,
        BLOCK_P=at_once,
        BLOCK=block,
        num_warps=4,
    )
