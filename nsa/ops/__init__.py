"""NSA as functions: the whole attention and each of its stages, checked here and computed by a backend.

Tensors are contiguous in their last dimension. Arguments that the functions have in common:
    q: `[B,S,Hq,Dk]`. Keys and values are `[B,S,G,Dk]` and `[B,S,G,Dv]`, longer than `S` with `q_start`; those of
        compressed blocks, `k_cmp` and `v_cmp`, `[B,N,G,Dk]` and `[B,N,G,Dv]`.
    block, stride: tokens per compressed block, and between the starts of two.
    cu_seqlens: int32 `[n+1]`, offsets of the documents of a varlen batch, which is `B = 1`.
    q_start: int32 `[B]`, for queries that are part of longer rows of keys (a cache, a shard of a sequence): query `i`
        of row `b` is token `q_start[b] + i` of its keys. With `cu_seqlens`, that is what describes the keys.
    scale: of the scores; by default `Dk ** -0.5`.
    backend: "auto" or a backend's name; a named one never falls back.
    strict: turn every fallback into an error, and check values on the GPU too.

Raises:
    ValueError: names a wrong argument, or why no backend supports the call.
    BackendFailure: every backend that supports it has failed.
A value that is not finite is not hidden, and may show in rows that do not see it: what is masked is multiplied by zero.
"""

from __future__ import annotations

from torch import Tensor

from nsa import checks
from nsa.attention_replay import replay_attention
from nsa.deprecated import mixture as mixture
from nsa.ops.branches import COMBINE, COMPRESSED, SELECT_BLOCKS, SELECTED, SLIDING
from nsa.ops.compress import COMPRESS_MEAN, GATHER_BLOCKS
from nsa.ops.fused import ATTENTION, run_backward, run_forward

__all__ = ["attention", "combine", "compress_mean", "compressed_attention", "gather_blocks", "select_blocks"]
__all__ += ["selected_attention", "sliding_attention"]


def attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    *,
    block: int,
    stride: int,
    select_block: int,
    n_select: int,
    n_init: int,
    n_local: int,
    window: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    window_start: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> tuple[Tensor, Tensor]:
    """The whole attention: block selection, the three branches and their gated sum, in one op.

    Args:
        gates: `[B,S,Hq,3]` in the order compressed, selected, sliding; none negative.
        select_block, n_select, n_init, n_local, window: as in `select_blocks` and `sliding_attention`.
        q_start, window_start: where the queries start in the compressed and selected keys, and in the sliding keys.

    Returns:
        `o [B,S,Hq,Dv]`, and the indices `[B,S,G,n_select]` of the selected blocks.
    """
    tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, cu_seqlens, q_start, window_start)
    integers = (block, stride, select_block, n_select, n_init, n_local, window)
    checks.check_attention(*tensors, *integers, scale, backend, strict)
    run, rest = ATTENTION.entry(q), (*integers, scale or q.shape[-1] ** -0.5, backend, strict)
    # A compiler cannot trace a replay.
    if run is not ATTENTION.overload and cu_seqlens is q_start is window_start is None:
        replayed = replay_attention((run_forward, run_backward), tensors[:8], rest)
        if replayed is not None:
            return replayed
    o, indices, *_ = run(*tensors, *rest)
    return o, indices


def compress_mean(
    x: Tensor, *, block: int, stride: int, cu_seqlens: Tensor | None = None, backend: str = "auto", strict: bool = False
) -> Tensor:
    """The mean of each block of keys or values.

    Args:
        x: `[B,S,G,D]`.

    Returns:
        `[B,N,G,D]`, where `N` is the number of complete blocks. Of a varlen batch it is `S // stride`, which always
        suffices: the documents' blocks lie one after the other, and the slots after them are zero.
    """
    checks.check_compress_mean(x, cu_seqlens, block, stride, backend, strict)
    return COMPRESS_MEAN.forward(x, cu_seqlens, block, stride, backend, strict)


def gather_blocks(
    x: Tensor,
    position: Tensor,
    *,
    block: int,
    stride: int,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> Tensor:
    """The tokens of each block, flattened for a Linear.

    Args:
        x: `[B,S,G,D]`.
        position: `[block,D]`, added to the tokens of every block.

    Returns:
        `[B,N,G,block*D]`, with `N` and unused slots as in `compress_mean`.
    """
    checks.check_gather_blocks(x, position, cu_seqlens, block, stride, backend, strict)
    return GATHER_BLOCKS.forward(x, position, cu_seqlens, block, stride, backend, strict)


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    block: int,
    stride: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over the compressed blocks that are complete at each query.

    Args:
        k_cmp, v_cmp: of a varlen batch, the documents' blocks one after the other, and maybe unused slots after them.

    Returns:
        `o [B,S,Hq,Dv]` and the natural log-sum-exp `lse [B,S,Hq]`, fp32 or fp64.
    """
    checks.check_compressed_attention(q, k_cmp, v_cmp, cu_seqlens, q_start, block, stride, scale, backend, strict)
    scale = scale or q.shape[-1] ** -0.5
    return COMPRESSED.forward(q, k_cmp, v_cmp, cu_seqlens, q_start, block, stride, scale, backend, strict)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    *,
    block: int,
    stride: int,
    select_block: int,
    n_select: int,
    n_init: int,
    n_local: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> Tensor:
    """The blocks that each group of each query reads in full. No gradient flows through the selection.

    Args:
        lse: `[B,S,Hq]`, what `compressed_attention` returned for `q` and `k_cmp`.
        select_block: tokens per selection block, a multiple of `stride`.
        n_select: blocks to select, forced ones included.
        n_init, n_local: how many of the first blocks, and of those that end at the query's own, are forced.

    Returns:
        int32 `[B,S,G,n_select]`, ascending, -1 at the end.
    """
    integers = (block, stride, select_block, n_select, n_init, n_local)
    checks.check_select_blocks(q, k_cmp, lse, cu_seqlens, q_start, *integers, scale, backend, strict)
    tensors = (q.detach(), k_cmp.detach(), lse.detach(), cu_seqlens, q_start)
    return SELECT_BLOCKS(*tensors, *integers, scale or q.shape[-1] ** -0.5, backend, strict)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    select_block: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over the tokens of the selected blocks up to each query.

    Args:
        indices: int32 `[B,S,G,n]`, ascending and distinct, -1 at the end.
        select_block: tokens per block.

    Returns:
        `o [B,S,Hq,Dv]` and `lse [B,S,Hq]`, as `compressed_attention`.
    """
    checks.check_selected_attention(q, k, v, indices, cu_seqlens, q_start, select_block, scale, backend, strict)
    scale = scale or q.shape[-1] ** -0.5
    return SELECTED.forward(q, k, v, indices, cu_seqlens, q_start, select_block, scale, backend, strict)


def sliding_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over the `window` tokens that end at each query.

    Args:
        window: tokens, the query's own included.

    Returns:
        `o [B,S,Hq,Dv]` and `lse [B,S,Hq]`, as `compressed_attention`.
    """
    checks.check_sliding_attention(q, k, v, cu_seqlens, q_start, window, scale, backend, strict)
    return SLIDING.forward(q, k, v, cu_seqlens, q_start, window, scale or q.shape[-1] ** -0.5, backend, strict)


def combine(
    o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, *, backend: str = "auto", strict: bool = False
) -> Tensor:
    """The gated sum of the branches.

    Args:
        o_cmp, o_sel, o_win, gates: `[B,S,Hq,Dv]`, and `[B,S,Hq,3]` in that order.

    Returns:
        `[B,S,Hq,Dv]`.
    """
    checks.check_combine(o_cmp, o_sel, o_win, gates, backend, strict)
    return COMBINE(o_cmp, o_sel, o_win, gates, backend, strict)
