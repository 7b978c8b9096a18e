"""FlashAttention-2 for the compressed and the sliding branch: forward, backward and decode.

`libraries.py` finds and calls what is installed, within the limits of `contracts.py`; `fold.py` turns the compressed
branch into plain causal attention; `branches.py` builds the calls; `policy.py` says what the settings allow. Before a
library is first used, `probe.py` runs the calls of `cases.py` in a child process (`probe_child.py`).

dQ is summed in no fixed order; it is bitwise deterministic only under `torch.use_deterministic_algorithms(True)`.
"""

from nsa.backends.flash.backend import FlashBackend, configure

__all__ = ["FlashBackend", "configure"]
