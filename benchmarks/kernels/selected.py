"""Correctness and time of the selected branch on a GPU: `python benchmarks/kernels/selected.py [--quick]`.

Prints, for each shape, every candidate tile's error against fp64 (as a multiple of plain torch's in bf16), its time on
random and on neighbourly choices, and where the time of the chosen tiles goes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.testing import do_bench

from nsa import reference
from nsa.backends.triton import selected
from nsa.backends.triton.selected_attend import ForwardTile
from nsa.backends.triton.selected_gradient import BackwardTile

SHAPES = [(64, 4, 128), (32, 8, 128), (12, 2, 64)]
N_SELECT, N_INIT, N_LOCAL, L_SEL = 16, 1, 2, 64


def choose(batch: int, length: int, groups: int, share: int = 1) -> Tensor:
    """Forced blocks and random others; `share` neighbouring queries choose alike."""
    out = torch.full((batch, length, groups, N_SELECT), -1, dtype=torch.int32, device="cuda")
    n_blocks = -(-length // L_SEL)
    j = torch.arange(n_blocks, device="cuda")
    for c0 in range(0, length, 4096):
        t = torch.arange(c0, min(c0 + 4096, length), device="cuda")
        own = (t // L_SEL)[:, None]
        for b in range(batch):
            for g in range(groups):
                score = torch.rand(-(-len(t) // share), n_blocks, device="cuda").repeat_interleave(share, 0)[: len(t)]
                score = score.masked_fill((j < N_INIT) | (own - j < N_LOCAL), 2.0).masked_fill(j > own, -1.0)
                value, index = score.topk(min(N_SELECT, n_blocks), dim=1)
                index = index.masked_fill(value < 0, n_blocks).sort(dim=1).values
                out[b, c0 : c0 + len(t), g, : index.shape[1]] = index.masked_fill(index == n_blocks, -1).int()
    return out


def problem(batch: int, length: int, heads: int, groups: int, width: int) -> tuple[Tensor, ...]:
    q, do = (torch.randn(batch, length, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, length, groups, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dlse = torch.randn(batch, length, heads, device="cuda")
    return q, k, v, do, dlse


def options(width: int) -> dict:
    return {"select_block": L_SEL, "scale": width**-0.5, "cu_seqlens": None, "q_start": None}


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor, index: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    o, lse = reference.selected_attention(*leaves, index, select_block=L_SEL)
    grads = torch.autograd.grad([o, lse], leaves, [do.to(o.dtype), dlse.to(lse.dtype)])
    return [o.detach(), lse.detach(), *grads]


def error(x: Tensor, want: Tensor) -> float:
    return float((x.double() - want).abs().max())


def check(heads: int, groups: int, width: int, tiles: list[ForwardTile | BackwardTile]) -> bool:
    q, k, v, do, dlse = problem(1, 1500, heads, groups, width)
    index = choose(1, 1500, groups)
    want = exact(q, k, v, do, dlse, index, torch.float64)
    plain = [error(x, y) for x, y in zip(exact(q, k, v, do, dlse, index, torch.bfloat16), want, strict=True)]
    good = True
    for tile in tiles:
        o, lse = selected.selected_forward(
            q, k, v, index, **options(width), tile=tile if isinstance(tile, ForwardTile) else None
        )
        got, names = [o, lse], ["o", "lse"]
        if isinstance(tile, BackwardTile):
            run = [
                selected.selected_backward(do, dlse, q, k, v, index, o, lse, **options(width), tile=tile)
                for _ in range(2)
            ]
            if not all(torch.equal(a, b) for a, b in zip(*run, strict=True)):
                print("  NOT DETERMINISTIC", tile)
                good = False
            got, names = [*got, *run[0]], [*names, "dq", "dk", "dv"]
        ratio = {n: error(x, y) / (p + 1e-6) for n, x, y, p in zip(names, got, want, plain, strict=False)}
        bad = any(not r <= 2.5 for r in ratio.values())
        good &= not bad
        print("  WRONG" if bad else "  ok", {n: round(r, 2) for n, r in ratio.items()}, tile, flush=True)
    return good


def time_all(
    batch: int, length: int, heads: int, groups: int, width: int, tiles: list[ForwardTile | BackwardTile]
) -> None:
    q, k, v, do, dlse = problem(batch, length, heads, groups, width)
    for name, share in (("random", 1), ("neighbours", 32)):
        index = choose(batch, length, groups, share)
        o, lse = selected.selected_forward(q, k, v, index, **options(width))
        for tile in tiles:
            forward = isinstance(tile, ForwardTile)

            def run(tile=tile, forward=forward, index=index, o=o, lse=lse) -> None:
                if forward:
                    selected.selected_forward(q, k, v, index, **options(width), tile=tile)
                else:
                    selected.selected_backward(do, dlse, q, k, v, index, o, lse, **options(width), tile=tile)

            try:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                ms = do_bench(run, warmup=20, rep=100)
                peak = (torch.cuda.max_memory_allocated() - before) / 2**30
                print(f"  {name:10s} {ms:8.3f} ms  +{peak:.2f} GiB  {tile}", flush=True)
            except (RuntimeError, TritonError) as problem_text:
                print(
                    f"  {name:10s} failed {type(problem_text).__name__}: {str(problem_text)[:80]}  {tile}", flush=True
                )
        if name == "random":
            profile(q, k, v, do, dlse, index, o, lse, width)


def profile(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor, index: Tensor, o: Tensor, lse: Tensor, width: int
) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for method in ("query", "block", "backward"):
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            if method == "backward":
                selected.selected_backward(do, dlse, q, k, v, index, o, lse, **options(width))
            else:
                selected.selected_forward(q, k, v, index, **options(width), method=method)
            torch.cuda.synchronize()
        rows = sorted(recorded.key_averages(), key=lambda e: -e.device_time_total)[:9]
        print("  ", method, {e.key[:34]: f"{e.device_time_total / 1e3:.2f}ms x{e.count}" for e in rows}, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="only the picked tiles")
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    good = True
    for heads, groups, width in SHAPES:
        h = heads // groups
        picked: list[ForwardTile | BackwardTile] = [
            selected.pick_forward(h, width, width, torch.bfloat16, "query"),
            selected.pick_forward(h, width, width, torch.bfloat16, "block"),
            selected.pick_backward(h, width, width, torch.bfloat16),
        ]
        tiles = picked if arguments.quick else list(dict.fromkeys([*picked, *selected.candidates()]))
        print(f"{heads}/{groups}/{width}, correctness at 1500", flush=True)
        # Scratch for a few tiles only, so that several launches are checked too.
        good &= check(heads, groups, width, [*tiles, *(replace(tile, scratch=1 << 22) for tile in picked)])
        print(f"{heads}/{groups}/{width}, time at B={arguments.batch} S={arguments.length}", flush=True)
        time_all(arguments.batch, arguments.length, heads, groups, width, tiles)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
