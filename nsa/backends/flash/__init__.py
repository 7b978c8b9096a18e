"""The FlashAttention family for the compressed and the sliding branch: forward, backward and decode shapes.

`libraries.py` finds and calls what is installed, `fold.py` turns the compressed branch into plain causal attention,
`branches.py` makes the calls, `cases.py` says what a probe tries and `trial.py` runs it in a process of its own, before
this one trusts a library. Limits are in `nsa.backends.contracts`, the policy of who uses this under `auto` in
`nsa.backends.policy`.

dQ is summed in no fixed order, and repeats to the bit only under `torch.use_deterministic_algorithms(True)`.
"""

from nsa.backends.flash.backend import FlashBackend, configure

__all__ = ["FlashBackend", "configure"]
