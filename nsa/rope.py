"""Rotary position embedding, with Llama-3's scaling for long contexts.

Angles are computed in fp64 and only their cosines and sines are rounded to fp32: an fp32 angle is off by 3e-4 at
position 65,536 and by 2e-3 at a million.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nsa.config import RopeScaling
from nsa.ops.registry import LIBRARY

Angles = tuple[Tensor, Tensor]

# Lengths whose tables are kept: sequence lengths may never repeat, and memory must not grow with them.
MAX_TABLES = 64


@dataclass(frozen=True)
class Rope:
    """Rotates the halves of a vector against each other, pair `i` by `position * theta ** (-2i / head_dim)`.

    Nothing is kept in a buffer: casting a model to bf16 would round the frequencies, and far positions with them. The
    tables are a cache of a pure function: copies, pickles and comparisons leave them out.
    """

    head_dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    # By device, dtype, length and stride.
    tables: dict[tuple[Any, ...], Angles] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rope, (self.head_dim, self.theta, self.scaling)

    def frequencies(self, device: torch.device) -> Tensor:
        """`[head_dim / 2]` in fp64: radians per position."""
        exponent = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float64) / self.head_dim
        frequency = torch.exp(exponent * -math.log(self.theta))
        return frequency if self.scaling is None else self.slow_down(frequency, self.scaling)

    @staticmethod
    def slow_down(frequency: Tensor, scaling: RopeScaling) -> Tensor:
        """Keep what turns often within the original context, slow what turns less than once, blend between."""
        turns = scaling.original_max_len * frequency / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return frequency * (keep + (1.0 - keep) / scaling.factor)

    def angles(self, positions: Tensor, dtype: torch.dtype, *, limit: int | None = None) -> Angles:
        """Cosine and sine for integer `positions [...]`, each `[..., 1, head_dim / 2]`; fp64 for fp64, else fp32.

        `limit`: an upper bound known to the host that every position lies below, so that rows of `table(limit)` can be
        looked up instead.
        """
        if limit is not None and can_cache(positions.device):
            cos, sin = self.table(limit, positions.device, dtype)
            return cos[positions], sin[positions]
        compute = torch.ops.nsa.cosines if torch.compiler.is_compiling() else cosines
        angle = positions[..., None, None].double() * self.frequencies(positions.device)
        return compute(angle, angle_dtype(dtype))

    def table(self, length: int, device: torch.device, dtype: torch.dtype, *, stride: int = 1) -> Angles:
        """`angles` of every `stride`-th position below `length`, each `[n, 1, head_dim / 2]`: kept as views."""
        if not can_cache(device):
            return self.angles(torch.arange(0, length, stride, device=device), dtype)
        key = (device, angle_dtype(dtype), length, stride)
        found = self.tables.get(key)
        if found is None:
            cos, sin = self.longest(length, device, dtype)
            found = cos[:length:stride], sin[:length:stride]
            # A fake tensor must not outlive its mode.
            if type(cos) is Tensor:
                if len(self.tables) >= MAX_TABLES:
                    self.tables.clear()
                self.tables[key] = found
        return found

    def longest(self, length: int, device: torch.device, dtype: torch.dtype) -> Angles:
        """The table that the others are views of: at least so long, and grown by powers of two."""
        key = (device, angle_dtype(dtype), 0, 0)
        kept = self.tables.get(key)
        if kept is None or kept[0].shape[0] < length:
            # Autograd could not save a tensor made in inference mode.
            with torch.inference_mode(False):
                kept = self.angles(torch.arange(1 << (length - 1).bit_length(), device=device), dtype)
            if type(kept[0]) is Tensor:
                self.tables[key] = kept
        return kept

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """`x [..., H, head_dim]` rotated by its position's angles, in its own dtype."""
        return self.rotate_all(angles, x)[0]

    def rotate_all(self, angles: Angles, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`rotate` of several tensors that share their angles."""
        if tensors[0].dim() == 4 and fused(tensors[0]):
            from nsa.backends.triton.rope import Rotate, rotate_one

            if not torch.is_grad_enabled():
                return tuple(rotate_one(x, *angles, False) for x in tensors)
            rotated: tuple[Tensor, ...] = Rotate.apply(*angles, *tensors)
            return rotated
        return tuple(rotate(x, angles) for x in tensors)

    def rotate_back(self, x: Tensor, angles: Angles) -> Tensor:
        """The inverse of `rotate`, which is also its gradient; not differentiable itself."""
        cos, sin = angles
        if x.dim() == 4 and fused(x):
            from nsa.backends.triton.rope import rotate_one

            return rotate_one(x, cos, sin, True)
        return rotate(x, (cos, -sin))


def cosines(angle: Tensor, dtype: torch.dtype) -> Angles:
    """Cosine and sine of an fp64 `angle`, rounded to `dtype` once."""
    cos, sin = empty_cosines(angle, dtype)
    return torch.cos(angle, out=cos), torch.sin(angle, out=sin)


def empty_cosines(angle: Tensor, dtype: torch.dtype) -> Angles:
    return torch.empty_like(angle, dtype=dtype), torch.empty_like(angle, dtype=dtype)


# A compiler that saw the fp64 arithmetic would repeat it for every head that it is fused into, forward and backward.
LIBRARY.define("cosines(Tensor angle, ScalarType dtype) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("cosines", cosines, "CompositeExplicitAutograd")
torch.library.register_fake("nsa::cosines", empty_cosines, lib=LIBRARY)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    cos, sin = angles
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def fused(x: Tensor) -> bool:
    """Whether one kernel rotates instead of nine; a compiler fuses the nine with what is around them."""
    if not x.is_cuda or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return False
    return triton_is_usable()


@cache
def triton_is_usable() -> bool:
    from nsa.backends import triton

    return triton.available() is None and torch.cuda.get_device_capability() >= triton.OLDEST_CAPABILITY


def angle_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def can_cache(device: torch.device) -> bool:
    """Whether tables may be cached: not while tracing, whose tensors hold no values, nor while capturing, whose CUDA
    graph would go on reading a table that has since been replaced by a longer one."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
