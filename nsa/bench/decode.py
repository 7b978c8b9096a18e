"""One decode step, attention alone, over caches that fill the same bytes of K/V, beside dense attention.

nsa bench decode --heads 64/4/128 32/8/128 12/2/64 --out benchmarks/results/h200/decode.csv

A step is replayed as a CUDA graph, back to back: a replay reads several times what the L2 cache holds. Each shape is
compared with the reference in fp64 first, and is not timed unless it agrees. `bytes-limit` is the time in which a copy,
measured in the same run, moves the bytes that NSA must read; for several tokens the blocks that they share count once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa import reference
from nsa.bench import gate
from nsa.bench.attention import AttentionShape, parse_heads
from nsa.bench.runner import Pass, Runner, Suite, Task, captured, cuda_events, side_stream
from nsa.config import require
from nsa.functional import hyperparameter_kwargs, hyperparameters_of
from nsa.geometry import n_compressed
from nsa.results import quantiles
from nsa.sequences import COMPRESSED_NAMES, SELECTED_NAMES, SLIDING_NAMES

if TYPE_CHECKING:
    from nsa.backends.triton.decode import DecodeTile

# Of bf16 keys and values, both.
BYTES_PER_NUMBER = 4
COPY_BYTES = 1 << 30
REPLAYS, ROUNDS = 10, 20
# Once in `captured`, three times to warm up, then in rounds.
MAX_REPLAYS = 4 + REPLAYS * ROUNDS
ROUNDS_MS = 1000


@dataclass(frozen=True)
class DecodeShape(AttentionShape):
    """The sizes of one step; `length`: tokens in the cache, those of the step included."""

    n_tokens: int

    def __str__(self) -> str:
        return f"{super().__str__()} T={self.n_tokens}"


class CachedStep:
    """Random stores, all rows of full length, and the step's queries; `smooth` is how alike the tokens' queries are."""

    def __init__(self, shape: DecodeShape, smooth: float, tile: DecodeTile | None = None) -> None:
        # Imports Triton, which a machine without a GPU need not have.
        from nsa.backends.triton.decode import Hyperparameters, decode_attention

        self.shape, self.config, self.tile, self.attend = shape, shape.config("triton"), tile, decode_attention
        c, self.generator = self.config, torch.Generator("cuda").manual_seed(0)
        self.how = Hyperparameters._make((*hyperparameters_of(c), c.d_k**-0.5, shape.length, None))
        self.q = self.normal(shape.n_tokens, shape.n_heads)
        if smooth:
            self.q = (smooth**0.5 * self.q[:, :1] + (1 - smooth) ** 0.5 * self.q).contiguous()
        gates = torch.rand((*self.q.shape[:3], 3), generator=self.generator, device="cuda")
        self.gates = gates.bfloat16()
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
        return self.attend(self.q, *stores, self.gates, self.start, self.how, self.tile)

    def dense(self) -> Tensor:
        """Over the selected store, as dense attention caches it."""
        q, k, v = (x.transpose(1, 2) for x in (self.q, *(store[:, :-1] for store in self.selected)))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def bytes_read(self, indices: Tensor) -> int:
        """The bytes of keys and values that a step reads; a block that several of its tokens select counts once."""
        c, s = self.config, self.shape
        blocks = indices.transpose(1, 2).flatten(2).sort(dim=-1).values
        distinct = (blocks.diff(dim=-1) > 0).sum() + (blocks[..., 0] >= 0).sum()
        keys = int(distinct) * c.l_sel
        keys += s.batch * s.n_groups * (n_compressed(s.length, c.l, c.d) + c.w + s.n_tokens - 1)
        return keys * s.head_dim * BYTES_PER_NUMBER

    def error(self) -> float:
        """The error in the first and the last batch row, in units of the tolerance."""
        return max(self.row_error(row) for row in {0, self.shape.batch - 1})

    def row_error(self, row: int) -> float:
        """Compared with the reference in fp64; the selection is checked as well."""
        c, length, one = self.config, self.shape.length, slice(row, row + 1)
        o, indices = (x[one] for x in self.nsa())
        q_start = self.start[one]
        # The ring in the order of positions, from the first that the window of the first token reaches.
        ring = self.window[0].shape[1] - 1
        places = torch.arange(length - (c.w + self.shape.n_tokens - 1), length, device="cuda") % ring

        def expected(dtype: torch.dtype) -> Tensor:
            q, gates = self.q[one].to(dtype), self.gates[one].to(dtype)
            compressed, selected, window = (
                [x[one, :-1].to(dtype) for x in store] for store in (self.compressed, self.selected, self.window)
            )
            in_cmp, in_sel, in_win = (
                hyperparameter_kwargs(c, x) for x in (COMPRESSED_NAMES, SELECTED_NAMES, SLIDING_NAMES)
            )
            o_cmp, _ = reference.compressed_attention(q, *compressed, **in_cmp, q_start=q_start)
            k_sel, v_sel = selected
            o_sel, _ = reference.selected_attention(q, k_sel, v_sel, indices, **in_sel, q_start=q_start)
            in_order = (x[:, places] for x in window)
            window_start = torch.full_like(q_start, c.w - 1)
            o_win, _ = reference.sliding_attention(q, *in_order, **in_win, q_start=window_start)
            return reference.combine(o_cmp, o_sel, o_win, gates)

        return max(
            gate.importance_error(c, indices, q_start, self.q[one], *(x[one, :-1] for x in self.compressed)),
            gate.worst_ratio([o], [expected(o.dtype)], [expected(torch.float64)]),
        )

    def dense_error(self) -> float:
        """The error of dense attention in the first batch row, in units of the tolerance."""
        tensors = (self.q[:1], *(store[:1, :-1] for store in self.selected))
        # Every query is behind all keys, and the window reaches all of them.
        behind, window = torch.full_like(self.start[:1], self.shape.length), 2 * self.shape.length
        plain, exact = (
            reference.sliding_attention(*(x.to(dtype) for x in tensors), window=window, q_start=behind)[0]
            for dtype in (self.q.dtype, torch.float64)
        )
        return gate.worst_ratio([self.dense()[:1].transpose(1, 2)], [plain], [exact])


def replay_times(call: Callable[[], object]) -> list[float]:
    """Milliseconds per replay of `call`, captured in a CUDA graph: one figure per round of replays back to back. It
    runs at most `MAX_REPLAYS` times."""

    def replays(count: int) -> float:
        ((begin, end),) = cuda_events(1)
        begin.record()
        for _ in range(count):
            replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / count

    with side_stream(torch.cuda.Stream()):
        replay = captured(call)
        rough = replays(3)
        count = max(1, min(REPLAYS, round(ROUNDS_MS / ROUNDS / rough)))
        return [replays(count) for _ in range(ROUNDS)]


def copy_rate() -> float:
    """Bytes per millisecond that a large copy reads and writes. By a kernel: on an H200 the copy engine is slower."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / quantiles(replay_times(lambda: torch.bitwise_not(source, out=target)))[1]


def decode_tasks(shape: DecodeShape, smooth: float, rate: float, runner: Runner) -> Iterator[Task]:
    """One step by NSA and by dense attention, beside the time in which a copy moves NSA's bytes."""
    step = CachedStep(shape, smooth)
    suite = "decode" if not smooth else f"decode-smooth-{smooth:g}"

    def task(impl: str, call: Callable[[], object], error: Callable[[], float]) -> Task:
        each = Pass(f"decode-{shape.n_tokens}", call, tokens=shape.batch * shape.n_tokens)
        return Task(suite, "decode", impl, shape, lambda: iter([each]), error)

    yield task("nsa-triton-graphs", step.nsa, step.error)
    yield task("dense-cudnn-graphs", step.dense, step.dense_error)
    n_bytes = step.bytes_read(step.nsa()[1])
    print(f"{shape}: NSA reads {n_bytes / 2**20:.0f} MiB", flush=True)
    limit = task("bytes-limit", step.nsa, lambda: 0.0)
    runner.record(limit, next(limit.passes()), [n_bytes / rate], None)


def tasks(args: argparse.Namespace, runner: Runner) -> Iterator[Task]:
    require(torch.cuda.is_available(), "nsa bench decode", "started without a GPU", "a machine with a CUDA GPU")
    require(0 <= args.smooth < 1, "--smooth", args.smooth, "a number in [0, 1)")
    require(min(args.tokens) >= 1, "--tokens", args.tokens, "numbers of at least 1")
    with torch.no_grad():
        rate = copy_rate()
        print(f"a copy moves {rate / 1e9:.2f} TB/s", flush=True)
        for n_heads, n_groups, head_dim in map(parse_heads, args.heads):
            for length in args.lengths:
                # Rows whose keys and values of one branch fill so many GiB.
                batch = max(1, round(args.gib * 2**30 / (length * n_groups * head_dim * BYTES_PER_NUMBER)))
                for n_tokens in args.tokens:
                    shape = DecodeShape(batch, length, n_heads, n_groups, head_dim, n_tokens)
                    yield from decode_tasks(shape, args.smooth, rate, runner)


run = Suite(tasks, lambda args, device: lambda each: (replay_times(each.call), None)).run
