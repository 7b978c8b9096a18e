"""RoPE against complex rotation in fp64, and Llama-3's scaling against its published definition."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSAAttention, NSAConfig, RopeScaling
from nsa.rope import Rope

FP64 = torch.float64

widths = st.integers(1, 8).map(lambda pairs: 2 * pairs)
thetas = st.sampled_from([100.0, 10_000.0, 500_000.0])
positions_far_and_near = st.lists(st.integers(0, 200_000), min_size=1, max_size=6)
scalings = st.none() | st.builds(
    RopeScaling,
    factor=st.floats(1.0, 32.0),
    low_freq_factor=st.floats(0.5, 2.0),
    high_freq_factor=st.floats(2.5, 8.0),
    original_max_len=st.sampled_from([64, 1000, 8192]),
)


def llama3_frequencies(width: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """As published with Llama 3.1: wavelengths below the high limit are kept, above the low limit divided."""
    frequencies = [theta ** (-2 * i / width) for i in range(width // 2)]
    if scaling is None:
        return frequencies
    low_freq_wavelen = scaling.original_max_len / scaling.low_freq_factor
    high_freq_wavelen = scaling.original_max_len / scaling.high_freq_factor
    scaled = []
    for frequency in frequencies:
        wavelen = 2 * math.pi / frequency
        if wavelen < high_freq_wavelen:
            scaled.append(frequency)
        elif wavelen > low_freq_wavelen:
            scaled.append(frequency / scaling.factor)
        else:
            smooth = (scaling.original_max_len / wavelen - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            scaled.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    return scaled


def complex_rotation(x: Tensor, positions: list[int], frequencies: list[float]) -> Tensor:
    """`x [S, H, D]`: coordinate `i` and `i + D/2` are the two parts of a complex number."""
    half = x.shape[-1] // 2
    turns = [[cmath.exp(1j * position * f) for f in frequencies] for position in positions]
    turn = torch.tensor(turns, dtype=torch.complex128)[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def rotated(rope: Rope, x: Tensor, positions: list[int] | Tensor) -> Tensor:
    return rope.rotate(x, rope.angles(torch.as_tensor(positions), x.dtype))


@given(width=widths, theta=thetas, scaling=scalings, positions=positions_far_and_near)
def test_rotation_is_multiplication_by_a_unit_complex_number(
    width: int, theta: float, scaling: RopeScaling | None, positions: list[int]
) -> None:
    x = torch.randn(len(positions), 3, width, dtype=FP64)
    expected = complex_rotation(x, positions, llama3_frequencies(width, theta, scaling))
    # An angle of 2e5 is known to a few 1e-11 in fp64.
    torch.testing.assert_close(rotated(Rope(width, theta, scaling), x, positions), expected, atol=1e-9, rtol=1e-9)


@given(width=widths, theta=thetas, scaling=scalings.filter(bool))
def test_scaled_frequencies_are_those_llama3_publishes(width: int, theta: float, scaling: RopeScaling) -> None:
    expected = torch.tensor(llama3_frequencies(width, theta, scaling), dtype=FP64)
    got = Rope(width, theta, scaling).frequencies(torch.device("cpu"), FP64)
    torch.testing.assert_close(got, expected, atol=0.0, rtol=1e-12)


def test_llama3_scaling_keeps_the_fastest_divides_the_slowest_and_blends_between() -> None:
    rope = Rope(128, 500_000.0)
    plain = rope.frequencies(torch.device("cpu"), FP64)
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)
    slowdown = plain / Rope(128, 500_000.0, scaling).frequencies(torch.device("cpu"), FP64)
    assert slowdown[0] == 1.0
    torch.testing.assert_close(slowdown[-1], torch.tensor(8.0, dtype=FP64))
    between = (slowdown > 1.0 + 1e-9) & (slowdown < 8.0 - 1e-9)
    assert between.any()
    assert torch.equal(slowdown, slowdown.cummax(0).values)


@given(width=widths, theta=thetas, scaling=scalings, positions=positions_far_and_near)
def test_rotation_preserves_norms(width: int, theta: float, scaling: RopeScaling | None, positions: list[int]) -> None:
    x = torch.randn(len(positions), 2, width, dtype=FP64)
    got = rotated(Rope(width, theta, scaling), x, positions)
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=1e-12)


@given(
    width=widths,
    theta=thetas,
    scaling=scalings,
    near=st.integers(0, 5000),
    far=st.integers(0, 5000),
    shift=st.integers(0, 100_000),
)
def test_a_score_depends_on_the_distance_alone(
    width: int, theta: float, scaling: RopeScaling | None, near: int, far: int, shift: int
) -> None:
    rope = Rope(width, theta, scaling)
    q, k = torch.randn(2, 1, 1, width, dtype=FP64)
    here = (rotated(rope, q, [near]) * rotated(rope, k, [far])).sum()
    there = (rotated(rope, q, [near + shift]) * rotated(rope, k, [far + shift])).sum()
    torch.testing.assert_close(here, there, atol=1e-8, rtol=1e-8)


def test_position_zero_is_left_alone() -> None:
    x = torch.randn(1, 2, 8)
    assert torch.equal(rotated(Rope(8), x, [0]), x)


def test_each_row_has_positions_of_its_own() -> None:
    rope = Rope(6)
    x = torch.randn(2, 3, 2, 6, dtype=FP64)
    positions = torch.tensor([[0, 1, 2], [7, 8, 9]])
    expected = torch.stack([rotated(rope, row, at) for row, at in zip(x, positions, strict=True)])
    assert torch.equal(rotated(rope, x, positions), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_vectors_are_rotated_in_fp32_and_keep_their_dtype(dtype: torch.dtype) -> None:
    rope = Rope(16)
    x = torch.randn(5, 2, 16).to(dtype)
    positions = torch.tensor([0, 3, 99, 1000, 4000])
    got = rotated(rope, x, positions)
    assert got.dtype == dtype
    assert rope.angles(positions, dtype)[0].dtype == torch.float32
    # fp32 knows an angle of 4000 to about 5e-4; then one rounding to the vector's own dtype.
    exact = rotated(rope, x.double(), positions)
    limit = 1e-3 + torch.finfo(dtype).eps
    assert ((got.double() - exact).abs() <= limit * exact.norm(dim=-1, keepdim=True)).all()


def test_a_model_cast_to_bf16_still_knows_position_100k() -> None:
    config = NSAConfig(dim=16, n_heads=2, n_kv_groups=1, d_k=64, d_v=8)
    rope = NSAAttention(config).to(torch.bfloat16).rope
    positions = torch.tensor([100_000, 99_999, 65_537])
    cos, sin = rope.angles(positions, torch.bfloat16)
    frequencies = torch.tensor(llama3_frequencies(64, 10_000.0, None), dtype=FP64)
    angle = (positions[:, None].double() * frequencies)[:, None]
    # fp32: 1e5 radians times a few roundings of 6e-8. Frequencies kept in bf16 would be off by hundreds of radians.
    torch.testing.assert_close(cos.double(), angle.cos(), atol=0.03, rtol=0.0)
    torch.testing.assert_close(sin.double(), angle.sin(), atol=0.03, rtol=0.0)
