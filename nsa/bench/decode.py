"""One decode step, attention alone, over caches that fill the same bytes of K/V, beside dense attention.

nsa bench decode --heads 64/4/128 32/8/128 12/2/64 --out benchmarks/results/h200/decode.csv

A step is replayed as a CUDA graph, back to back: a replay reads several times what the L2 cache holds. Each shape is
compared with the reference in fp64 first, and is not timed unless it agrees. `bytes-limit` is the time in which a copy,
measured in the same run, moves the bytes that NSA must read; for several tokens the blocks that they share count once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa import reference
from nsa.backends.triton.decode import DecodeTile, Hyperparameters, decode_attention
from nsa.bench.attention import AttentionShape, captured, parse_heads
from nsa.config import require
from nsa.geometry import n_compressed
from nsa.results import Row, append, make_row, quantiles

# Of bf16 keys and values, both.
BYTES_PER_NUMBER = 4
COPY_BYTES = 1 << 30
REPLAYS, ROUNDS = 10, 20
# Once in `captured`, three times to warm up, then in rounds.
MAX_REPLAYS = 4 + REPLAYS * ROUNDS
MEASURE_MS = 1000
# A block whose importance differs from another's by less than bf16 inputs resolve may be selected in its place.
IMPORTANCE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class DecodeShape(AttentionShape):
    """The sizes of one step; `length`: tokens in the cache, those of the step included."""

    n_tokens: int

    def __str__(self) -> str:
        return f"{super().__str__()} T={self.n_tokens}"


def batch_of(length: int, n_groups: int, head_dim: int, gib: float) -> int:
    """Rows whose keys and values of one branch fill `gib`."""
    return max(1, round(gib * 2**30 / (length * n_groups * head_dim * BYTES_PER_NUMBER)))


class CachedStep:
    """Random stores, all rows of full length, and the step's queries; `smooth` is how alike the tokens' queries are."""

    def __init__(self, shape: DecodeShape, smooth: float, tile: DecodeTile | None = None) -> None:
        self.shape, self.config, self.tile = shape, shape.config("triton"), tile
        c, self.generator = self.config, torch.Generator("cuda").manual_seed(0)
        self.how = Hyperparameters(c.l, c.d, c.l_sel, c.n_sel, c.n_init, c.n_local, c.w, c.d_k**-0.5, shape.length)
        self.q = self.normal(shape.n_tokens, shape.n_heads)
        if smooth:
            self.q = (smooth**0.5 * self.q[:, :1] + (1 - smooth) ** 0.5 * self.q).contiguous()
        self.gates = torch.rand(
            (shape.batch, shape.n_tokens, shape.n_heads, 3), generator=self.generator, device="cuda"
        ).bfloat16()
        self.compressed = self.store(n_compressed(shape.length, c.l, c.d))
        self.selected = self.store(shape.length)
        self.window = self.store(c.w + 32)
        self.start = torch.full((shape.batch,), shape.length - shape.n_tokens, dtype=torch.int32, device="cuda")

    def normal(self, places: int, heads: int) -> Tensor:
        size = (self.shape.batch, places, heads, self.shape.head_dim)
        x = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        return x.normal_(generator=self.generator)

    def store(self, places: int) -> tuple[Tensor, Tensor]:
        return self.normal(places + 1, self.shape.n_groups), self.normal(places + 1, self.shape.n_groups)

    def nsa(self) -> tuple[Tensor, Tensor]:
        stores = self.compressed, self.selected, self.window
        return decode_attention(self.q, *stores, self.gates, self.start, self.how, self.tile)

    def dense(self) -> Tensor:
        """Over the selected store, as dense attention caches it."""
        q, k, v = (x.transpose(1, 2) for x in (self.q, *(store[:, :-1] for store in self.selected)))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def bytes_read(self, indices: Tensor) -> int:
        """Of keys and values, each once: a block that several tokens of a step select counts once."""
        c, s = self.config, self.shape
        blocks = indices.transpose(1, 2).flatten(2).sort(dim=-1).values
        distinct = (blocks.diff(dim=-1) > 0).sum() + (blocks[..., 0] >= 0).sum()
        keys = int(distinct) * c.l_sel
        keys += s.batch * s.n_groups * (n_compressed(s.length, c.l, c.d) + c.w + s.n_tokens - 1)
        return keys * s.head_dim * BYTES_PER_NUMBER

    def error(self, row: int) -> float:
        """Largest difference from the reference in fp64 in one batch row, whose selection is checked as well."""
        c, length = self.config, self.shape.length
        o, indices = (x[row : row + 1] for x in self.nsa())

        def wide(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            k, v = (x[row : row + 1, :-1].double() for x in pair)
            return k, v

        q, gates, q_start = (
            self.q[row : row + 1].double(),
            self.gates[row : row + 1].double(),
            self.start[row : row + 1],
        )
        (k_cmp, v_cmp), (k_win, v_win) = wide(self.compressed), wide(self.window)
        blocks: dict[str, Any] = {"block": c.l, "stride": c.d, "q_start": q_start}
        o_cmp, lse = reference.compressed_attention(q, k_cmp, v_cmp, **blocks)
        importance = reference.selection_importance(q, k_cmp, lse, select_block=c.l_sel, **blocks)
        self.check_selection(indices, importance)
        o_sel, _ = reference.selected_attention(q, *wide(self.selected), indices, select_block=c.l_sel, q_start=q_start)
        # The ring in the order of positions, from the first that the window of the first token reaches.
        reach = c.w + self.shape.n_tokens - 1
        places = torch.arange(length - reach, length, device="cuda") % k_win.shape[1]
        window_start = torch.full_like(q_start, c.w - 1)
        o_win, _ = reference.sliding_attention(q, k_win[:, places], v_win[:, places], window=c.w, q_start=window_start)
        expected = gates[..., :1] * o_cmp + gates[..., 1:2] * o_sel + gates[..., 2:] * o_win
        allowed = 2 * torch.finfo(o.dtype).eps * float(expected.abs().max())
        off = float((o.double() - expected).abs().max())
        require(off <= allowed, f"the error of {self.shape}", off, f"at most {allowed:.2e}")
        return off

    def check_selection(self, indices: Tensor, importance: Tensor) -> None:
        """No selected block is less important than one left out, but for what rounding may exchange."""
        c = self.config
        own = (self.shape.length - 1) // c.l_sel
        require(bool((indices[..., 1:] > indices[..., :-1]).all()), "indices", indices.tolist(), "ascending blocks")
        free = importance[..., c.n_init : own + 1 - c.n_local].clone()
        n_free = c.n_sel - c.n_init - c.n_local
        least = free.topk(n_free, dim=-1).values[..., -1:]
        taken = importance.gather(-1, indices[..., c.n_init : -c.n_local].long())
        worst = float((taken / least).min())
        require(worst >= 1 - IMPORTANCE_TOLERANCE, "importance of a selected block", worst, "that of the best blocks")


def replay_times(call: Callable[[], object]) -> list[float]:
    """Milliseconds per replay of `call` captured in a CUDA graph, one figure per round of replays back to back; `call`
    runs at most `MAX_REPLAYS` times."""

    def replays(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / count

    with torch.cuda.stream(torch.cuda.Stream()):
        replay = captured(call)
        rough = replays(3)
        count = max(1, min(REPLAYS, round(MEASURE_MS / ROUNDS / rough)))
        return [replays(count) for _ in range(ROUNDS)]


def copy_rate() -> float:
    """Bytes per millisecond that a large copy reads and writes. By a kernel: on an H200 the copy engine is slower."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / quantiles(replay_times(lambda: torch.bitwise_not(source, out=target)))[1]


def measure_decode(shape: DecodeShape, args: argparse.Namespace, rate: float) -> Iterator[Row]:
    step = CachedStep(shape, args.smooth)
    error = max(step.error(row) for row in {0, shape.batch - 1})
    _, indices = step.nsa()
    limit = step.bytes_read(indices) / rate
    print(f"{shape}: largest error {error:.1e}, {step.bytes_read(indices) / 2**20:.0f} MiB", flush=True)

    def row(impl: str, times: list[float]) -> Row:
        suite = "decode" if not args.smooth else f"decode-smooth-{args.smooth:g}"
        columns = {"suite": suite, "op": "decode", "impl": impl, "mode": f"decode-{shape.n_tokens}", **shape.columns}
        made = make_row(times, columns, dtype=torch.bfloat16, device="cuda", commit=args.commit)
        return replace(made, tokens_per_s=round(shape.batch * shape.n_tokens / made.p50_ms * 1e3, 1))

    yield row("nsa-triton-graphs", replay_times(step.nsa))
    yield row("dense-cudnn-graphs", replay_times(step.dense))
    yield row("bytes-limit", [limit])


def run(args: argparse.Namespace) -> int:
    require(torch.cuda.is_available(), "nsa bench decode", "started without a GPU", "a machine with a CUDA GPU")
    require(0 <= args.smooth < 1, "--smooth", args.smooth, "a number in [0, 1)")
    require(min(args.tokens) >= 1, "--tokens", args.tokens, "numbers of at least 1")
    with torch.no_grad():
        rate = copy_rate()
        print(f"a copy moves {rate / 1e9:.2f} TB/s", flush=True)
        for n_heads, n_groups, head_dim in map(parse_heads, args.heads):
            for length in args.lengths:
                batch = batch_of(length, n_groups, head_dim, args.gib)
                for n_tokens in args.tokens:
                    shape = DecodeShape(batch, length, n_heads, n_groups, head_dim, n_tokens)
                    for row in measure_decode(shape, args, rate):
                        print(f"{shape!s:<36} {row.impl:<20} {row.p50_ms:9.4f} ms", flush=True)
                        if args.out is not None:
                            append(args.out, row)
    print(json.dumps({"copy_bytes_per_ms": round(rate)}))
    return 0
