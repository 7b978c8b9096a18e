"""Rotary position embedding, with Llama-3's scaling for long contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import RopeScaling


@dataclass(frozen=True)
class Rope:
    """Rotates the halves of a vector against each other, pair `i` by `position * theta ** (-2i / width)`.

    Nothing is kept in a buffer: casting a model to bf16 would round the frequencies, and far positions with them.
    """

    width: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def frequencies(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        exponent = torch.arange(0, self.width, 2, device=device, dtype=dtype) / self.width
        frequency = torch.exp(exponent * -math.log(self.theta))
        return frequency if self.scaling is None else self.slow_down(frequency, self.scaling)

    @staticmethod
    def slow_down(frequency: Tensor, scaling: RopeScaling) -> Tensor:
        """Keep what turns often within the original context, slow what turns less than once, blend between."""
        turns = scaling.original_max_len * frequency / (2 * math.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return frequency * (keep + (1.0 - keep) / scaling.factor)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for `positions [...]`, each `[..., 1, width / 2]`; at least fp32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angle = positions[..., None].to(wide) * self.frequencies(positions.device, wide)
        return angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)

    def rotate(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """`x [..., H, width]`, in its own dtype."""
        cos, sin = angles
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
