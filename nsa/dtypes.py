"""Facts about torch dtypes: which are half precision, the dtype of sums, and names."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_DTYPES = (torch.float16, torch.bfloat16)
# Those that models are trained and loaded in, by the names that flags and configs have for them.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which sums over `x` are accumulated: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype if it is enabled, else the tensor's own."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`"bfloat16"` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
