"""Where kernel tests run: Triton's interpreter on the CPU (`TRITON_INTERPRET=1`), or a GPU; else they skip."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("kernel tests need TRITON_INTERPRET=1 or a GPU", allow_module_level=True)

if INTERPRETED:
    from triton.runtime import interpreter

    # numpy 2.4 no longer turns an array of one element into an int, which loops over kernel arguments rely on (triton
    # issue 9171): mended here until every Triton that is tested has the fix.
    patch_tensor = interpreter._patch_lang_tensor

    # `scope`, from Triton 3.6 on, takes back what `patch_tensor` sets, which `__index__` is among.
    def patch_tensor_index(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_index
    # Checking every integer operation for overflow takes most of the time, and the shapes here are tiny.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


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
