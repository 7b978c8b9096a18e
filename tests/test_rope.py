"""RoPE against complex rotation in fp64 and angles in decimal arithmetic, Llama-3's scaling as published."""

from __future__ import annotations

import cmath
import copy
import math
import pickle
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSAAttention, NSAConfig, RopeScaling
from nsa.model import LM, LMConfig
from nsa.rope import Rope

FP64 = torch.float64

head_dims = st.integers(1, 8).map(lambda pairs: 2 * pairs)
thetas = st.sampled_from([100.0, 10_000.0, 500_000.0])
positions_far_and_near = st.lists(st.integers(0, 200_000), min_size=1, max_size=6)
scalings = st.none() | st.builds(
    RopeScaling,
    factor=st.floats(1.0, 32.0),
    low_freq_factor=st.floats(0.5, 2.0),
    high_freq_factor=st.floats(2.5, 8.0),
    original_max_len=st.sampled_from([64, 1000, 8192]),
)


def llama3_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """As published with Llama 3.1: wavelengths below the high limit are kept, above the low limit divided."""
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
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


@given(head_dim=head_dims, theta=thetas, scaling=scalings, positions=positions_far_and_near)
def test_rotation_is_multiplication_by_a_unit_complex_number(
    head_dim: int, theta: float, scaling: RopeScaling | None, positions: list[int]
) -> None:
    x = torch.randn(len(positions), 3, head_dim, dtype=FP64)
    expected = complex_rotation(x, positions, llama3_frequencies(head_dim, theta, scaling))
    # An angle of 2e5 is known to a few 1e-11 in fp64.
    torch.testing.assert_close(rotated(Rope(head_dim, theta, scaling), x, positions), expected, atol=1e-9, rtol=1e-9)


@given(head_dim=head_dims, theta=thetas, scaling=scalings.filter(bool))
def test_scaled_frequencies_are_those_llama3_publishes(head_dim: int, theta: float, scaling: RopeScaling) -> None:
    expected = torch.tensor(llama3_frequencies(head_dim, theta, scaling), dtype=FP64)
    got = Rope(head_dim, theta, scaling).frequencies(torch.device("cpu"))
    torch.testing.assert_close(got, expected, atol=0.0, rtol=1e-12)


def test_llama3_scaling_keeps_high_and_divides_low_frequencies() -> None:
    rope = Rope(128, 500_000.0)
    plain = rope.frequencies(torch.device("cpu"))
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)
    slowdown = plain / Rope(128, 500_000.0, scaling).frequencies(torch.device("cpu"))
    assert slowdown[0] == 1.0
    torch.testing.assert_close(slowdown[-1], torch.tensor(8.0, dtype=FP64))
    between = (slowdown > 1.0 + 1e-9) & (slowdown < 8.0 - 1e-9)
    assert between.any()
    assert torch.equal(slowdown, slowdown.cummax(0).values)


@given(head_dim=head_dims, theta=thetas, scaling=scalings, positions=positions_far_and_near)
def test_rotation_preserves_norms(
    head_dim: int, theta: float, scaling: RopeScaling | None, positions: list[int]
) -> None:
    x = torch.randn(len(positions), 2, head_dim, dtype=FP64)
    got = rotated(Rope(head_dim, theta, scaling), x, positions)
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=1e-12)


@given(
    head_dim=head_dims,
    theta=thetas,
    scaling=scalings,
    near=st.integers(0, 5000),
    far=st.integers(0, 5000),
    shift=st.integers(0, 100_000),
)
def test_a_score_depends_on_the_distance_alone(
    head_dim: int, theta: float, scaling: RopeScaling | None, near: int, far: int, shift: int
) -> None:
    rope = Rope(head_dim, theta, scaling)
    q, k = torch.randn(2, 1, 1, head_dim, dtype=FP64)
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
def test_low_precision_vectors_rotate_in_fp32_and_keep_dtype(dtype: torch.dtype) -> None:
    rope = Rope(16)
    x = torch.randn(5, 2, 16).to(dtype)
    positions = torch.tensor([0, 3, 99, 1000, 4000])
    got = rotated(rope, x, positions)
    assert got.dtype == dtype
    assert rope.angles(positions, dtype)[0].dtype == torch.float32
    # Two products and a sum in fp32, then one rounding to the vector's own dtype.
    exact = rotated(rope, x.double(), positions)
    limit = 4 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
    assert ((got.double() - exact).abs() <= limit * exact.norm(dim=-1, keepdim=True)).all()


PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
FAR = [0, 1, 4095, 65_536, 1_000_000, 2**20 - 1, 2**24 + 1]
# Half a unit in the last place of fp32 below 1, and what fp64 makes of an angle of 2^24 radians.
FP32_ROUNDING = 2.0**-25 + 1e-8


def exact_angles(head_dim: int, theta: float, position: int) -> tuple[list[float], list[float]]:
    """Cosines and sines at 60 decimal places; only the angle within one turn is rounded, to fp64."""
    with localcontext() as context:
        context.prec = 60
        frequencies = [(-2 * i * Decimal(theta).ln() / head_dim).exp() for i in range(head_dim // 2)]
        within_turn = [float((position * f) % (2 * PI)) for f in frequencies]
    return [math.cos(angle) for angle in within_turn], [math.sin(angle) for angle in within_turn]


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP64])
def test_angles_are_exact_to_rounding_at_far_positions(theta: float, dtype: torch.dtype) -> None:
    expected = torch.tensor([exact_angles(64, theta, position) for position in FAR], dtype=FP64)
    cos, sin = Rope(64, theta).angles(torch.tensor(FAR), dtype)
    got = torch.stack([cos, sin], dim=1).squeeze(2)
    assert got.dtype == (FP64 if dtype == FP64 else torch.float32)
    assert float((got.double() - expected).abs().max()) <= FP32_ROUNDING


def test_a_model_cast_to_bf16_has_exact_angles() -> None:
    config = NSAConfig(dim=16, n_heads=2, n_kv_groups=1, d_k=64, d_v=8)
    attention = NSAAttention(config)
    attention.rope.table(16, torch.device("cpu"), torch.float32)
    cos, _ = attention.to(torch.bfloat16).rope.angles(torch.tensor([1_000_000]), torch.bfloat16)
    expected = torch.tensor(exact_angles(64, 10_000.0, 1_000_000)[0], dtype=FP64)
    assert float((cos.double() - expected).abs().max()) <= FP32_ROUNDING


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=4), scaling=scalings)
def test_table_has_the_right_angles_however_it_grew(lengths: list[int], scaling: RopeScaling | None) -> None:
    rope = Rope(8, scaling=scaling)
    for length in lengths:
        positions = torch.arange(length)
        expected = Rope(8, scaling=scaling).angles(positions, torch.float32)
        assert all(map(torch.equal, rope.table(length, positions.device, torch.bfloat16), expected))
        mixed = positions.flip(0)[None]
        looked_up = rope.angles(mixed, torch.float32, limit=length)
        assert all(map(torch.equal, looked_up, Rope(8, scaling=scaling).angles(mixed, torch.float32)))
    # Lengths are views of one table, which is computed anew only when it must be longer, by powers of two.
    storages = {cos.untyped_storage().data_ptr() for cos, _ in rope.tables.values()}
    assert len(storages) <= len({(length - 1).bit_length() for length in lengths})


def test_a_table_is_computed_once_and_kept_for_each_dtype() -> None:
    rope, cpu = Rope(8), torch.device("cpu")
    cos, _ = rope.table(100, cpu, torch.float32)
    # A second table for fp64, and a longer view of the first, with room to grow.
    assert rope.table(100, cpu, FP64)[0].dtype == FP64
    assert rope.table(120, cpu, torch.float16)[0].data_ptr() == cos.data_ptr()


def test_a_table_made_in_inference_mode_serves_training() -> None:
    rope, x = Rope(8), torch.randn(5, 1, 8, requires_grad=True)
    with torch.inference_mode():
        rope.table(5, x.device, x.dtype)
    rope.rotate(x, rope.table(5, x.device, x.dtype)).sum().backward()
    assert x.grad is not None


def test_copies_leave_the_tables_behind() -> None:
    rope = Rope(8, 500.0, RopeScaling(factor=2.0))
    rope.table(64, torch.device("cpu"), torch.float32)
    for other in (copy.copy(rope), copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert other == rope
        assert hash(other) == hash(rope)
        assert not other.tables


def test_a_compiled_graph_computes_angles_and_keeps_none() -> None:
    rope = Rope(8)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        whole = rope.rotate(x, rope.table(x.shape[0], x.device, x.dtype))
        return whole + rope.rotate(x, rope.angles(torch.arange(x.shape[0]), x.dtype, limit=x.shape[0]))

    x = torch.randn(6, 2, 8)
    torch.testing.assert_close(compiled(x), 2 * rotated(Rope(8), x, torch.arange(6)), atol=0, rtol=0)
    assert not rope.tables


def test_the_angles_pass_opcheck() -> None:
    angle = torch.rand(4, 5, dtype=torch.float64).T[:, None]
    for dtype in (torch.float32, torch.float64):
        torch.library.opcheck(torch.ops.nsa.cosines.default, (angle, dtype))


def test_the_layers_of_a_model_share_their_tables() -> None:
    model = LM(LMConfig.preset("tiny"))
    assert len({id(layer.attention.rope) for layer in model.blocks}) == 1
