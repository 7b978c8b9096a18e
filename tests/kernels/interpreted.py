"""Where kernel tests run: Triton's interpreter on the CPU (`TRITON_INTERPRET=1`), or a GPU; else they skip."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

from nsa import settings

pytest.importorskip("triton", reason="the kernels need Triton")

INTERPRETED = settings.triton_interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("kernel tests need TRITON_INTERPRET=1 or a GPU", allow_module_level=True)

if INTERPRETED:
    from triton import language as tl
    from triton.runtime import interpreter

    # Checking every integer operation for overflow takes most of the time, and the shapes here are tiny.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    # Every call of a function in a kernel searches the language for what to replace: a quarter of the time. Nothing is
    # replaced yet, so that these are all; in a kernel they have been.
    BUILTINS = {
        place: [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]
        for place in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    }

    def patch_builtin(place: Any, *rest: Any) -> None:
        names = BUILTINS[place]
        if tl.core.is_builtin(getattr(place, names[0])):
            for name in names:
                member = getattr(place, name)
                if tl.core.is_builtin(member):
                    interpreter._patch_attr(place, name, member, *rest)

    interpreter._patch_builtin = patch_builtin


def head_major(x: torch.Tensor) -> torch.Tensor:
    """`x [1,S,H,D]` with its heads 2^30 elements apart. What lies between them is never touched, and so takes no memory
    on a CPU."""
    apart = torch.empty_strided(x.shape, (x.numel(), x.shape[3], 2**30, 1), dtype=x.dtype, device=x.device)
    return apart.copy_(x)


def worth_trying(tiles: Sequence[Any]) -> list[Any]:
    """On a GPU all of them. The interpreter knows no warps and no stages: one of those that differ in nothing else."""
    if not INTERPRETED:
        return list(tiles)
    compiled_only = ("num_warps", "num_stages")
    return list({str({k: v for k, v in asdict(t).items() if k not in compiled_only}): t for t in tiles}.values())
