"""Kernels for Hopper (sm_90) in Gluon, the low-level language inside Triton: the forward and the backward pass of the
compressed, the sliding and the selected branch, the selected and the sliding forward pass at once, and the compressed
branch of a decode step of several tokens.

They are no backend of their own. The launch plans of `backends/triton` take them where `tiles.py` has a tile for the
problem, and Triton's kernels otherwise; results, layouts and tests are the same. Gluon's API changes with Triton, so
nothing here imports it until a kernel is wanted.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from nsa import settings
from nsa.backends.routing import BackendFailure


class KernelFailure(BackendFailure):
    """A kernel in Gluon cannot be compiled or launched here."""


@cache
def import_failure() -> str | None:
    """Why the Triton that is installed cannot compile the kernels; None where it can."""
    try:
        import_module("nsa.backends.gluon.api")
    except (ImportError, AttributeError) as error:
        return f"Gluon cannot be used: {error}"
    return None


@cache
def failures() -> list[str]:
    """How kernels failed in this process. After the first failure none is picked any more."""
    return []


def unavailable() -> str | None:
    """Why the kernels cannot run in this process; None where they can."""
    if settings.triton_interpreted():
        return "Triton's interpreter does not run Gluon (TRITON_INTERPRET is set)"
    return failures()[0] if failures() else import_failure()
