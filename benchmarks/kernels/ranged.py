"""Times every candidate tile of the compressed and the sliding kernels on the GPU at hand, after checking it.

    python benchmarks/kernels/ranged.py                       # 64 heads / 4 groups / 128 at 64k, all kernels
    python benchmarks/kernels/ranged.py --shape 12/2/64 --length 16384 --branch sliding --kernel dq dkv

Each line is one tile: its median in milliseconds, the TFLOP/s that counts only scores a query really sees, and the
largest difference from the first tile's result relative to its largest value (the first one is compared with the sdpa
backend on a shorter row). A tile that does not run is reported and skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.testing import do_bench

from nsa.backends import sdpa
from nsa.backends.triton import compressed, sliding
from nsa.backends.triton.ranged_backward import key_gradients, prepare, query_gradient
from nsa.backends.triton.ranged_forward import ranged_forward
from nsa.backends.triton.tiles import (
    BackwardTile,
    candidates,
    compressed_ranges,
    pick_backward,
    sliding_ranges,
    tile_width,
)

BLOCK, STRIDE, WINDOW = 32, 16, 512
# Multiplications of a score matrix: two in the forward; the two backward kernels both make scores and dp again.
PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4}


def inputs(branch: str, batch: int, length: int, heads: int, groups: int, dim: int) -> tuple[Tensor, ...]:
    n_keys = length if branch == "sliding" else (length - BLOCK) // STRIDE + 1
    shapes = [(length, heads), (n_keys, groups), (n_keys, groups), (length, heads)]
    q, k, v, do = (torch.randn(batch, n, h, dim, device="cuda", dtype=torch.bfloat16) for n, h in shapes)
    return q, k, v, do, torch.randn(batch, length, heads, device="cuda")


def seen_scores(branch: str, length: int) -> int:
    """Pairs of query and key in one row and head."""
    t = torch.arange(length)
    if branch == "sliding":
        return int((t + 1).clamp_max(WINDOW).sum())
    return int(((t + 1 - BLOCK).div(STRIDE, rounding_mode="floor") + 1).clamp_min(0).sum())


def off_by(actual: Any, expected: Any) -> float:
    actual, expected = ((x,) if isinstance(x, Tensor) else x for x in (actual, expected))
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        a, e = a.float().nan_to_num(nan=1e30, neginf=0.0), e.float().nan_to_num(neginf=0.0)
        worst = max(worst, float((a - e).abs().max() / e.abs().max()))
    return worst


def check_against_sdpa(branch: str, batch: int, length: int, heads: int, groups: int, dim: int) -> None:
    """What is picked, against torch in fp32."""
    q, k, v, do, dlse = inputs(branch, batch, min(length, 3001), heads, groups, dim)
    ours = compressed if branch == "compressed" else sliding
    knobs: dict[str, Any] = {"window": WINDOW} if branch == "sliding" else {"block": BLOCK, "stride": STRIDE}
    knobs |= {"scale": dim**-0.5, "cu_seqlens": None, "q_start": None}
    o, lse = getattr(ours, f"{branch}_forward")(q, k, v, **knobs)
    gradients = getattr(ours, f"{branch}_backward")(do, dlse, q, k, v, o, lse, **knobs)
    q, k, v, do = (x.float() for x in (q, k, v, do))
    exact = getattr(sdpa, f"{branch}_forward")(q, k, v, **knobs)
    exact_gradients = getattr(sdpa, f"{branch}_backward")(do, dlse, q, k, v, *exact, **knobs)
    for name, a, e in zip(
        ("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients), (*exact, *exact_gradients), strict=True
    ):
        print(f"  {name} off by {off_by(a, e):.1e} of its largest value", flush=True)


def measure(branch: str, kernels: list[str], batch: int, length: int, heads: int, groups: int, dim: int) -> None:
    q, k, v, do, dlse = inputs(branch, batch, length, heads, groups, dim)
    scale = dim**-0.5
    ranges = sliding_ranges(length, WINDOW, None)
    if branch == "compressed":
        ranges = compressed_ranges(length, k.shape[1], BLOCK, STRIDE, None)
    o, lse = ranged_forward(q, k, v, ranges, scale)
    lse2, delta = prepare(do, dlse, o, lse, groups)
    print(f"  prepare {do_bench(lambda: prepare(do, dlse, o, lse, groups), rep=50, return_mode='median'):.3f} ms")
    picked = pick_backward(q, v, ranges.sliding)
    runs: dict[str, Callable[[Any], Callable[[], Any]]] = {
        "forward": lambda tile: lambda: ranged_forward(q, k, v, ranges, scale, tile),
        "dq": lambda tile: lambda: query_gradient(do, q, k, v, lse2, delta, ranges, scale, tile),
        "dkv": lambda tile: lambda: key_gradients(do, q, k, v, lse2, delta, ranges, scale, tile),
    }
    work = seen_scores(branch, length) * batch * heads * 2 * dim
    for kernel in kernels:
        tiles: list[Any] = list(candidates(kernel, tile_width(dim, dim)))
        if kernel == "dkv":
            tiles = [replace(picked, dkv=tile) for tile in tiles]
            tiles += [replace(tiles[0], waves=waves) for waves in (4, 16)]
        first = None
        for tile in tiles:
            run = runs[kernel](tile)
            shown = (tile.dkv, tile.waves) if isinstance(tile, BackwardTile) else tile
            try:
                result = run()
                first = result if first is None else first
                difference = off_by(result, first)
                ms = do_bench(run, warmup=20, rep=80, return_mode="median")
            except (RuntimeError, TritonError) as error:
                print(f"  {kernel} {shown}: {type(error).__name__}: {str(error)[:120]}", flush=True)
                continue
            rate = work * PRODUCTS[kernel] / ms * 1e-9
            print(f"  {kernel} {ms:8.3f} ms {rate:4.0f} TFLOP/s off {difference:.1e} {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["64/4/128"], help="heads/groups/dim")
    parser.add_argument("--length", type=int, nargs="+", default=[65536])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--branch", nargs="+", default=["compressed", "sliding"])
    parser.add_argument("--kernel", nargs="+", default=["forward", "dq", "dkv"])
    arguments = parser.parse_args()
    for shape in arguments.shape:
        heads, groups, dim = map(int, shape.split("/"))
        for length in arguments.length:
            for branch in arguments.branch:
                print(f"{branch} {shape} B={arguments.batch} S={length}", flush=True)
                check_against_sdpa(branch, arguments.batch, length, heads, groups, dim)
                measure(branch, arguments.kernel, arguments.batch, length, heads, groups, dim)


if __name__ == "__main__":
    main()
