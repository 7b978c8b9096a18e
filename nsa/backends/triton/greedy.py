"""The most likely token of each row of logits, of which one CTA of torch's own `argmax` would read a whole row.

    token[row] = the first of the greatest logits; -1 where one is not finite

`greedy_chunk_kernel`, grid (rows, chunks), finds the greatest of a chunk; `greedy_row_kernel`, grid (rows), that of
the chunks.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.backends.triton.launch import MAX_PLANS, Launch, Layout, layout

COLUMNS_PER_CTA = 1024


@triton.jit
def greedy_chunk_kernel(logits, top, first, n_columns, n_chunks, CHUNK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    i_chunk = tl.program_id(1)
    o_x = i_chunk * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(logits + i_row * n_columns + o_x, mask=o_x < n_columns, other=float("-inf")).to(tl.float32)
    m_bad = (o_x < n_columns) & ((tl.abs(b_x) < float("inf")) == False)  # noqa: E712  a tensor
    b_top = tl.max(b_x, 0)
    b_first = tl.min(tl.where(b_x == b_top, o_x, n_columns), 0)
    o_chunk = i_row * n_chunks + i_chunk
    tl.store(top + o_chunk, b_top)
    tl.store(first + o_chunk, tl.where(tl.max(m_bad.to(tl.int32), 0) > 0, -1, b_first))


@triton.jit
def greedy_row_kernel(top, first, token, n_columns, n_chunks, CHUNKS_PAD: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, CHUNKS_PAD)
    b_top = tl.load(top + i_row * n_chunks + o_c, mask=o_c < n_chunks, other=float("-inf"))
    b_first = tl.load(first + i_row * n_chunks + o_c, mask=o_c < n_chunks, other=n_columns)
    b_token = tl.min(tl.where(b_top == tl.max(b_top, 0), b_first, n_columns), 0)
    tl.store(token + i_row, tl.where(tl.min(b_first, 0) < 0, -1, b_token).to(tl.int64))


@lru_cache(maxsize=MAX_PLANS)
def plan(logits: Layout) -> tuple[int, Launch, Launch]:
    """How many chunks a row has, and the two launches."""
    n_rows, n_columns = logits.shape
    n_chunks = triton.cdiv(n_columns, COLUMNS_PER_CTA)
    counts = {"n_columns": n_columns, "n_chunks": n_chunks}
    by_chunk = Launch(greedy_chunk_kernel, (n_rows, n_chunks), **counts, CHUNK=COLUMNS_PER_CTA, num_warps=4)
    by_row = Launch(greedy_row_kernel, (n_rows,), **counts, CHUNKS_PAD=triton.next_power_of_2(n_chunks), num_warps=1)
    return n_chunks, by_chunk, by_row


def most_likely(logits: Tensor) -> Tensor:
    """Int64 `[...]`, of `logits [..., V]`."""
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    n_chunks, by_chunk, by_row = plan(layout(rows))
    top = torch.empty(rows.shape[0], n_chunks, dtype=torch.float32, device=rows.device)
    first = torch.empty_like(top, dtype=torch.int32)
    token = torch.empty(rows.shape[0], dtype=torch.int64, device=rows.device)
    by_chunk(logits=rows, top=top, first=first)
    by_row(top=top, first=first, token=token)
    return token.view(logits.shape[:-1])
