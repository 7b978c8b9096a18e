"""Backends for `nsa doctor` and its self-test: the sdpa backend with functions replaced."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from nsa.backends import sdpa
from nsa.backends.problem import Problem

SHAPE = Problem(batch=1, n_queries=64, n_keys=64, n_heads=2, n_groups=1, d_k=8, d_v=4, dtype=torch.float32)


def patient(**changed: Any) -> Any:
    """The sdpa backend under another name, with some of its functions replaced."""
    functions = {name: x for name, x in vars(sdpa).items() if callable(x) and not isinstance(x, type)}
    return SimpleNamespace(**{**functions, "name": "triton", **changed})


def off_by(function: Callable[..., Any], which: int, by: float) -> Callable[..., Any]:
    """`function`, with one element of its `which`-th result off."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        results = [x.clone() for x in function(*args, **kwargs)]
        results[which].view(-1)[-1] += by
        return tuple(results)

    return wrong
