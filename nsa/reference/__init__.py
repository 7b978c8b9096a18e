"""NSA as the paper defines it, in plain torch: the specification that every backend is compared with.

Each stage is one function on whole tensors, in the dtype of its inputs (half precision has its scores, LSE and
probabilities in fp32), differentiable by autograd, and shares no code with the fast backends. It builds full score
matrices, so it is for reading and testing, not for long sequences. It does not check its arguments, which would hide
the definitions: `nsa.ops` with `backend="reference"` does.

Shapes: `B` batch, `S` queries, `N` keys, `Hq` query heads, `G` KV groups, `Dk` and `Dv` head_dims. All functions take

    cu_seqlens  int32 `[n + 1]`: offsets of the documents of a varlen batch (`B = 1`); positions restart in each
    q_start     int `[B]`: position of each row's first query among longer keys (a cache)
    scale       of the scores; default `Dk ** -0.5`
"""

from nsa.reference.attention import combine, compressed_attention, nsa_attention, selected_attention, sliding_attention
from nsa.reference.compression import compress_mean, gather_blocks
from nsa.reference.selection import overlap_weights, select_blocks, selection_importance

__all__ = [
    "combine",
    "compress_mean",
    "compressed_attention",
    "gather_blocks",
    "nsa_attention",
    "overlap_weights",
    "select_blocks",
    "selected_attention",
    "selection_importance",
    "sliding_attention",
]
