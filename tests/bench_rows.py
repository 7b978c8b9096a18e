"""A row as `nsa bench train` writes it; tests replace what they check."""

from __future__ import annotations

from nsa.results import Row

ROW = Row(
    suite="train",
    op="train",
    impl="nsa-sdpa",
    mode="train",
    B=8,
    S=2048,
    Hq=12,
    G=2,
    Dk=64,
    Dv=64,
    dtype="bfloat16",
    p20_ms=81.5,
    p50_ms=82.25,
    p80_ms=83.125,
    peak_gib=12.5,
    tokens_per_s=199_201.8,
    gpu="NVIDIA H200",
    torch="2.11.0",
    triton="3.6.0",
    commit="abc1234",
    date="2026-11-15",
)
