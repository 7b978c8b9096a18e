"""On a GPU: every tile of scores, combine and compress checked against the torch path, then timed. Not a test.

python benchmarks/kernels/select.py                       # 64k, 64/4/128 and 32/8/128; 16k, 12/2/64
python benchmarks/kernels/select.py --quick               # default tiles alone
"""

from __future__ import annotations

import sys

import torch
from triton.errors import TritonError
from triton.testing import do_bench

from nsa.backends import sdpa
from nsa.backends.triton import combine, compress, scores
from nsa.geometry import n_compressed

KNOBS = {"block": 32, "stride": 16, "select_block": 64, "n_select": 16, "n_init": 1, "n_local": 2}


def selection(length: int, heads: int, groups: int, dim: int, quick: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, length, heads, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, n_compressed(length, 32, 16), groups, dim, device="cuda", dtype=torch.bfloat16)
    more = {"scale": dim**-0.5, "cu_seqlens": None, "q_start": None}
    _, lse = sdpa.compressed_forward(q, k, k, block=32, stride=16, **more)
    want = sdpa.select_blocks(q, k, lse, **KNOBS, **more)
    for tile in [None] if quick else [None, *scores.candidates()]:
        try:
            got = scores.select_blocks(q, k, lse, **KNOBS, **more, tile=tile)
            differ = (got != want).any(-1).float().mean().item()
            ms = do_bench(lambda tile=tile: scores.select_blocks(q, k, lse, **KNOBS, **more, tile=tile))
            print(
                f"select {length} {heads}/{groups}/{dim} {tile}: {ms:.3f} ms, rows that differ {differ:.2e}", flush=True
            )
        except (RuntimeError, TritonError) as error:
            print(f"select {length} {heads}/{groups}/{dim} {tile}: {type(error).__name__} {error}", flush=True)
    profile(lambda: scores.select_blocks(q, k, lse, **KNOBS, **more))


def profile(call) -> None:
    """Time of each kernel of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        call()
        torch.cuda.synchronize()
    for event in run.key_averages():
        if event.device_time_total > 20:
            print(f"    {event.key[:60]}: {event.device_time_total / 1e3:.3f} ms in {event.count}")


def mixture(length: int, heads: int, dim: int, quick: bool) -> None:
    branches = [torch.randn(1, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    gates = torch.rand(1, length, heads, 3, device="cuda", dtype=torch.bfloat16)
    do = torch.randn_like(branches[0])
    want = [sdpa.combine_forward(*branches, gates), *sdpa.combine_backward(do, *branches, gates)]
    got = [combine.combine_forward(*branches, gates), *combine.combine_backward(do, *branches, gates)]
    print(
        "combine, largest difference",
        [(a.float() - b.float()).abs().max().item() for a, b in zip(got, want, strict=True)],
    )
    del want, got
    size = branches[0].numel() * 2
    for tile in [None] if quick else [None, *combine.candidates()]:
        forward = do_bench(lambda tile=tile: combine.combine_forward(*branches, gates, tile=tile))
        backward = do_bench(lambda tile=tile: combine.combine_backward(do, *branches, gates, tile=tile))
        rates = f"{4 * size / forward / 1e9:.2f}, {7 * size / backward / 1e9:.2f} TB/s"
        print(f"combine {length} {heads} {dim} {tile}: {forward:.3f}, {backward:.3f} ms, {rates}", flush=True)


def compression(length: int, groups: int, dim: int, quick: bool) -> None:
    x = torch.randn(1, length, groups, dim, device="cuda", dtype=torch.bfloat16)
    pos = torch.randn(32, dim, device="cuda", dtype=torch.bfloat16)
    knobs = {"block": 32, "stride": 16}
    mean, blocks = compress.compress_mean_forward(x, **knobs), compress.gather_blocks_forward(x, pos, **knobs)
    unfolded = x.unfold(1, 32, 16)
    print("mean, largest difference", (mean.float() - unfolded.float().mean(-1)).abs().max().item())
    plain = unfolded.movedim(-1, 3) + pos
    print("gather, largest difference", (blocks.float() - plain.flatten(3).float()).abs().max().item())
    for tile in [compress.DEFAULT_TILE] if quick else compress.candidates():
        calls = {
            "mean": lambda tile=tile: compress.compress_mean_forward(x, **knobs, tile=tile),
            "mean'": lambda tile=tile: compress.compress_mean_backward(mean, length=length, **knobs, tile=tile),
            "gather": lambda tile=tile: compress.gather_blocks_forward(x, pos, **knobs, tile=tile),
            "gather'": lambda tile=tile: compress.gather_blocks_backward(
                blocks, length=length, pos_dtype=pos.dtype, **knobs, tile=tile
            ),
        }
        print(
            f"compress {length} {groups} {dim} {tile}:",
            {n: round(do_bench(c), 4) for n, c in calls.items()},
            flush=True,
        )


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    selection(65536, 64, 4, 128, quick)
    selection(65536, 32, 8, 128, quick)
    selection(16384, 12, 2, 64, quick)
    mixture(65536, 64, 128, quick)
    compression(65536, 4, 128, quick)
