"""The stages of NSA as functions: checked here, computed by whichever backend serves them.

Shapes: `q [B,S,Hq,Dk]`, keys and values `[B,N,G,D]` contiguous in `D`, `lse` the natural-log normaliser `[B,S,Hq]`.
Packed documents are `B = 1` with `cu_seqlens` (int32, `[n+1]`). With `q_start` (int32, `[B]`) keys come from a cache:
row `b`'s first query sits at position `q_start[b]` of keys that start at position 0.

`backend` is "auto" or a backend's name; a named one never falls back. `strict` turns every fallback into an error and
looks at values on the GPU too.

A value that is not finite is not hidden, and may show in rows that do not see it: what is masked is multiplied by zero.
"""

from __future__ import annotations

from torch import Tensor

from nsa.config import check_compression, check_selection, require_positive_int
from nsa.ops import checks, library, whole

__all__ = [
    "combine",
    "compress_mean",
    "compressed_attention",
    "gather_blocks",
    "mixture",
    "select_blocks",
    "selected_attention",
    "sliding_attention",
]


def compress_mean(
    x: Tensor,
    *,
    block: int,
    stride: int,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> Tensor:
    """The mean of each block of keys or values: `x [B,S,G,D]` to `[B,N,G,D]`.

    `N` is the number of whole blocks. In a pack it is `S // stride`, which always suffices: the documents' blocks lie
    one after the other, and the slots after them are zero.
    """
    checks.check_compressible(x, block, stride, cu_seqlens)
    checks.check_serving(backend, strict)
    return library.compress_mean(x, cu_seqlens, block, stride, backend, strict)


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
    """Each block's tokens in a row, with `position [block,D]` added: `x [B,S,G,D]` to `[B,N,G,block*D]`, for a Linear.

    `N` is as in `compress_mean`; slots of a pack that hold no block are zero here too.
    """
    checks.check_compressible(x, block, stride, cu_seqlens)
    checks.check_position(position, x, block)
    checks.check_serving(backend, strict)
    return library.gather_blocks(x, position, cu_seqlens, block, stride, backend, strict)


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
    """Attention over the compressed blocks that are complete at each query: `(o, lse)`.

    In a pack, `k_cmp` and `v_cmp` hold the documents' blocks one after the other, and may have unused space after them.
    """
    checks.check_keys_values(q, k_cmp, v_cmp, "k_cmp", "v_cmp")
    check_compression(block, stride)
    checks.check_sequences(q, cu_seqlens, q_start)
    checks.check_compressed_count(q, k_cmp.shape[1], block, stride, cu_seqlens, q_start)
    checks.check_scale(scale)
    checks.check_serving(backend, strict)
    return library.compressed_attention(
        q, k_cmp, v_cmp, cu_seqlens, q_start, block, stride, scale or q.shape[-1] ** -0.5, backend, strict
    )


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
    """The blocks each group of each query reads in full: int32 `[B,S,G,n_select]`, ascending, -1 at the end.

    `lse` is what `compressed_attention` returned for the same `q` and `k_cmp`. No gradient flows through the choice.
    """
    checks.check_queries(q)
    checks.check_key("k_cmp", k_cmp, q, "B N G Dk")
    checks.check_same("k_cmp", "shape[3]", k_cmp.shape[3], "q", q.shape[3])
    checks.check_lse(q, lse)
    check_compression(block, stride)
    check_selection(stride, select_block, n_select, n_init, n_local)
    checks.check_sequences(q, cu_seqlens, q_start)
    checks.check_compressed_count(q, k_cmp.shape[1], block, stride, cu_seqlens, q_start)
    checks.check_scale(scale)
    checks.check_serving(backend, strict)
    return library.select_blocks(
        q.detach(),
        k_cmp.detach(),
        lse.detach(),
        cu_seqlens,
        q_start,
        block,
        stride,
        select_block,
        n_select,
        n_init,
        n_local,
        scale or q.shape[-1] ** -0.5,
        backend,
        strict,
    )


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
    """Attention over the tokens of the chosen blocks up to each query: `(o, lse)`."""
    checks.check_keys_values(q, k, v, "k", "v")
    checks.check_token_count(q, k, q_start)
    checks.check_indices(q, k, indices)
    require_positive_int("select_block", select_block)
    checks.check_sequences(q, cu_seqlens, q_start)
    checks.check_scale(scale)
    checks.check_serving(backend, strict)
    return library.selected_attention(
        q, k, v, indices, cu_seqlens, q_start, select_block, scale or q.shape[-1] ** -0.5, backend, strict
    )


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
    """Attention over the `window` tokens that end at each query: `(o, lse)`."""
    checks.check_keys_values(q, k, v, "k", "v")
    checks.check_token_count(q, k, q_start)
    require_positive_int("window", window)
    checks.check_sequences(q, cu_seqlens, q_start)
    checks.check_scale(scale)
    checks.check_serving(backend, strict)
    return library.sliding_attention(
        q, k, v, cu_seqlens, q_start, window, scale or q.shape[-1] ** -0.5, backend, strict
    )


def combine(
    o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, *, backend: str = "auto", strict: bool = False
) -> Tensor:
    """The gated sum of the three branches; `gates [B,S,Hq,3]` in the order compressed, selected, sliding."""
    checks.check_combine(o_cmp, o_sel, o_win, gates)
    checks.check_serving(backend, strict)
    return library.combine(o_cmp, o_sel, o_win, gates, backend, strict)


def mixture(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    *,
    branches: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    indices: Tensor,
    block: int,
    stride: int,
    select_block: int,
    window: int,
    cu_seqlens: Tensor | None = None,
    q_start: Tensor | None = None,
    window_start: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    strict: bool = False,
) -> Tensor:
    """`combine` of the `(o, lse)` that the three attentions gave for these inputs, differentiable in the inputs.

    The branches come without autograd: their gradients are taken here, all at once, which spares the three copies of
    the output's gradient and the three gradients of `q` that autograd would hold. Gates are not negative. `q_start` is
    for the compressed and selected keys, `window_start` for the sliding ones.
    """
    checks.check_branches(branches)
    (o_cmp, lse_cmp), (o_sel, lse_sel), (o_win, lse_win) = branches
    checks.check_keys_values(q, k_cmp, v_cmp, "k_cmp", "v_cmp")
    checks.check_keys_values(q, k_sel, v_sel, "k_sel", "v_sel")
    checks.check_keys_values(q, k_win, v_win, "k_win", "v_win")
    checks.check_combine(o_cmp, o_sel, o_win, gates)
    for name, lse in (("lse_cmp", lse_cmp), ("lse_sel", lse_sel), ("lse_win", lse_win)):
        checks.check_lse(q, lse, name)
    checks.check_indices(q, k_sel, indices)
    check_compression(block, stride)
    require_positive_int("select_block", select_block)
    require_positive_int("window", window)
    checks.check_sequences(q, cu_seqlens, q_start)
    checks.check_sequences(q, cu_seqlens, window_start, start="window_start")
    checks.check_compressed_count(q, k_cmp.shape[1], block, stride, cu_seqlens, q_start)
    checks.check_token_count(q, k_sel, q_start, "k_sel")
    checks.check_token_count(q, k_win, window_start, "k_win")
    checks.check_scale(scale)
    checks.check_serving(backend, strict)
    return whole.mixture(
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates,
        o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win, indices, cu_seqlens, q_start, window_start,
        block, stride, select_block, window, scale or q.shape[-1] ** -0.5, backend, strict,
    )  # fmt: skip
