"""The masks of the three branches, straight from their definitions.

Every token has a document and a position in it. A fixed-length row is one document. Queries are the tokens of their row
of keys from `q_start` on, or all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def locate_queries(q: Tensor, cu_seqlens: Tensor | None, q_start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Document and position of each query, each `[B, S]`."""
    token = torch.arange(q.shape[1], device=q.device).expand(q.shape[:2])
    if q_start is not None:
        token = token + q_start.long()[:, None]
    if cu_seqlens is None:
        return torch.zeros_like(token), token
    document, position = locate_tokens(int(cu_seqlens[-1]), cu_seqlens, q.device)
    return document[token], position[token]


def locate_tokens(length: int, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Document and position of each of `length` concatenated tokens, each `[length]`."""
    if cu_seqlens is None:
        return torch.zeros(length, dtype=torch.long, device=device), torch.arange(length, device=device)
    lengths = cu_seqlens.diff().tolist()
    document = [index for index, n in enumerate(lengths) for _ in range(n)]
    position = [offset for n in lengths for offset in range(n)]
    return torch.tensor(document, device=device).long(), torch.tensor(position, device=device).long()


def locate_compressed(
    n_blocks: int, block: int, stride: int, cu_seqlens: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Document and in-document index of each compressed block, each `[n_blocks]`; -1 for unused slots at the end."""
    if cu_seqlens is None:
        return torch.zeros(n_blocks, dtype=torch.long, device=device), torch.arange(n_blocks, device=device)
    counts = [0 if n < block else (n - block) // stride + 1 for n in cu_seqlens.diff().tolist()]
    unused = [-1] * (n_blocks - sum(counts))
    document = [index for index, n in enumerate(counts) for _ in range(n)] + unused
    inner = [offset for n in counts for offset in range(n)] + unused
    return torch.tensor(document, device=device).long(), torch.tensor(inner, device=device).long()


def sees_compressed(
    q: Tensor, n_blocks: int, block: int, stride: int, cu_seqlens: Tensor | None, q_start: Tensor | None
) -> Tensor:
    """`[B, S, N]`: a query sees a compressed block whose last token is not after it."""
    q_document, t = locate_queries(q, cu_seqlens, q_start)
    k_document, i = locate_compressed(n_blocks, block, stride, cu_seqlens, q.device)
    complete = i * stride + block - 1 <= t[..., None]
    return complete & (k_document == q_document[..., None])


def sees_window(q: Tensor, n_keys: int, window: int, cu_seqlens: Tensor | None, q_start: Tensor | None) -> Tensor:
    """`[B, S, N]`: the `window` positions that end at the query's own."""
    q_document, t = locate_queries(q, cu_seqlens, q_start)
    k_document, position = locate_tokens(n_keys, cu_seqlens, q.device)
    inside = (position > t[..., None] - window) & (position <= t[..., None])
    return inside & (k_document == q_document[..., None])


def sees_selected(
    q: Tensor, n_keys: int, indices: Tensor, select_block: int, cu_seqlens: Tensor | None, q_start: Tensor | None
) -> Tensor:
    """`[B, S, G, N]`: the tokens of the selected blocks up to the query's position."""
    q_document, t = locate_queries(q, cu_seqlens, q_start)
    k_document, position = locate_tokens(n_keys, cu_seqlens, q.device)
    block_of_key = position // select_block
    selected = (indices.long()[..., None] == block_of_key).any(dim=-2)
    causal = (position <= t[..., None]) & (k_document == q_document[..., None])
    return selected & causal[:, :, None]
