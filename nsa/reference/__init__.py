"""NSA as the paper defines it, in plain torch: the specification that every other path is compared with.

Each stage is one function over whole tensors, in the dtype it is given (half precision has its scores, log-sum-exp and
probabilities in fp32), differentiable by autograd, with nothing shared with the fast paths. It builds whole score
matrices, so it is for reading and for tests, not for long sequences. Nor does it check what it is given, which would
hide the definitions: `nsa.ops` with `backend="reference"` does.
"""

from nsa.reference.attention import (
    combine,
    compressed_attention,
    nsa_attention,
    selected_attention,
    sliding_attention,
)
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
