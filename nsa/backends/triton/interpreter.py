"""A fix for Triton's interpreter, which runs our kernels on CPU tensors; only for processes with TRITON_INTERPRET=1."""

from __future__ import annotations

from functools import cache
from typing import Any

from triton.runtime import interpreter


@cache
def mend() -> None:
    """Restores loops over kernel arguments: numpy 2.4 no longer turns an array of one element into an int (triton
    issue 9171). Harmless where Triton has the fix."""
    patch_tensor = interpreter._patch_lang_tensor

    # `scope`, from Triton 3.6 on, takes back what `patch_tensor` sets, which `__index__` is among.
    def patch_tensor_index(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_index
