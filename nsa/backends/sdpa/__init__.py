"""The backend that always works: torch only, any device, forward and backward, memory linear in the sequence length.

Queries are processed in chunks whose scores fit a fixed budget. The compressed and the sliding branch are one
computation, because in both every query sees one contiguous range of keys (`ranged.py`). In the selected branch each
block gathers the queries that selected it (`selected.py`). Nothing here reads a value back to the host.
"""

from nsa.backends.problem import Problem
from nsa.backends.sdpa.combine import combine_backward, combine_forward, prepare_backward
from nsa.backends.sdpa.compress import (
    compress_mean_backward,
    compress_mean_forward,
    gather_blocks_backward,
    gather_blocks_forward,
)
from nsa.backends.sdpa.ranged import compressed_backward, compressed_forward, sliding_backward, sliding_forward
from nsa.backends.sdpa.selected import selected_backward, selected_forward
from nsa.backends.sdpa.selection import select_blocks

name = "sdpa"


def supports(problem: Problem) -> str | None:
    """Return None: every problem is supported."""
    return None
