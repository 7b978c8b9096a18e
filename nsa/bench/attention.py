"""Attention without the layer, from q, k, v and gates to o, next to dense attention and other implementations of NSA.

nsa bench attention --heads 64/4/128 12/2/64 --lengths 8192 65536 --out benchmarks/results/h200/attention.csv
nsa bench branches --heads 64/4/128 --lengths 65536 --cuda-graphs   # its stages, each by itself
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa import ops, reference
from nsa.bench import gate, peers
from nsa.bench.runner import Context, CudaClock, Pass, PassClock, Runner, Suite, Task, cpu_clock, forward_and_backward
from nsa.commands.bench import IMPLEMENTATIONS, SELECTED_IMPLEMENTATIONS
from nsa.config import NSAConfig, require, require_positive_int
from nsa.functional import attention_kwargs, hyperparameter_kwargs, nsa_attention
from nsa.sequences import BRANCH_KINDS, Pooling, hyperparameters

POOLING_NAMES = hyperparameters(Pooling)
# The passes to time, given a forward pass and its leaves.
MakePasses = Callable[[Callable[[], Tensor], tuple[Tensor, ...]], Iterator[Pass]]
# Heads and lengths where none are given.
DEFAULTS = {"cuda": (["64/4/128"], [8192, 32768]), "cpu": (["8/2/32"], [512, 2048])}


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one attention call; keys and values have the same head_dim."""

    batch: int
    length: int
    n_heads: int
    n_groups: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.n_heads}/{self.n_groups}/{self.head_dim} B={self.batch} S={self.length}"

    @property
    def columns(self) -> dict[str, int]:
        sizes = (self.batch, self.length, self.n_heads, self.n_groups, self.head_dim, self.head_dim)
        return dict(zip(("B", "S", "Hq", "G", "Dk", "Dv"), sizes, strict=True))

    def config(self, backend: str) -> NSAConfig:
        """The paper's hyperparameters at these sizes, with mean compression."""
        d = self.head_dim
        heads: dict[str, Any] = {"n_heads": self.n_heads, "n_kv_groups": self.n_groups, "d_k": d, "d_v": d}
        return NSAConfig(dim=self.n_heads * d, **heads, phi="mean", backend=backend)


class Inputs(NamedTuple):
    """Leaves of one attention call, with gradients."""

    q: Tensor  # [B, S, Hq, D]
    k: Tensor  # [B, S, G, D]
    v: Tensor  # [B, S, G, D]
    gates: Tensor  # [B, S, Hq, 3]

    @classmethod
    def of(cls, shape: AttentionShape, dtype: torch.dtype, device: str, smooth: float) -> Inputs:
        """Random tensors. `smooth` in [0, 1): correlation of neighboring queries, which a trained model has too."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, head_dim: int) -> Tensor:
            size = (shape.batch, shape.length, heads, head_dim)
            return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

        q = normal(shape.n_heads, shape.head_dim)
        q = smoothed(q, smooth) if smooth else q
        k, v = (normal(shape.n_groups, shape.head_dim) for _ in range(2))
        gates = normal(shape.n_heads, 3).sigmoid()
        return cls(*(x.to(dtype).requires_grad_() for x in (q, k, v, gates)))


def smoothed(q: Tensor, share: float) -> Tensor:
    """A moving average along the sequence: each query keeps `share` of the one before it, at unit variance."""
    reach = max(2, round(4 / (1 - share)))
    weights = share ** torch.arange(reach, device=q.device, dtype=q.dtype)
    weights = weights / weights.norm()
    padded = F.pad(q, (0, 0, 0, 0, reach - 1, 0))
    total = torch.zeros_like(q)
    for back, weight in enumerate(weights.tolist()):
        total += weight * padded[:, reach - 1 - back : reach - 1 - back + q.shape[1]]
    return total


def nsa_forward(inputs: Inputs, config: NSAConfig) -> Tensor:
    """NSA with mean compression and one K/V for the three branches."""
    means = attention_kwargs(config, POOLING_NAMES)
    k_cmp, v_cmp = (ops.compress_mean(x, **means) for x in (inputs.k, inputs.v))
    return nsa_attention(inputs.q, k_cmp, v_cmp, inputs.k, inputs.v, inputs.k, inputs.v, inputs.gates, config=config)


def nsa_error(forward: Callable[[], Tensor], inputs: Inputs, config: NSAConfig) -> float:
    """The error of the whole attention. `config`: its hyperparameters, and the backend that selects the same blocks."""
    means = hyperparameter_kwargs(config, POOLING_NAMES)
    q, k, v = (x.detach() for x in inputs[:3])
    folded = (q, *(ops.compress_mean(x, **means, backend=config.backend) for x in (k, v)))
    indices = gate.selected_indices(config, *folded)

    def expected(leaves: gate.Leaves, rows: slice) -> Tensor:
        q, k, v, gates = leaves
        compressed = (reference.compress_mean(x, **means) for x in (k, v))
        return gate.expect_nsa(config, indices, (q, *compressed, k, v, k, v, gates), rows)

    return max(gate.selection_error(config, indices, *folded), gate.sampled_error(forward, inputs, expected))


def attention_task(
    suite: str, impl: str, inputs: Inputs, shape: AttentionShape, passes: MakePasses = forward_and_backward
) -> Task:
    leaves: tuple[Tensor, ...] = inputs
    within: Context = nullcontext
    if impl.startswith("dense-"):
        leaves = leaves[:3]
        forward, within = peers.dense(impl, *leaves)
        error = partial(gate.sampled_error, forward, leaves, partial(gate.expect_sliding, shape.length))
    else:
        fla = impl == "fla-nsa"
        config = shape.config("sdpa" if fla else impl.removeprefix("nsa-"))
        if fla:
            # Fixed in flash-linear-attention: it compresses and selects the same blocks.
            config = replace(config, l=config.l_sel, d=config.l_sel, n_init=1, n_local=2)
        forward = partial(peers.fla_attention, config, *leaves) if fla else partial(nsa_forward, inputs, config)
        error = partial(nsa_error, forward, inputs, config)
    return Task(suite, "attention", impl, shape, partial(passes, forward, leaves), error, within)


def branch_tasks(suite: str, impl: str, inputs: Inputs, shape: AttentionShape) -> Iterator[Task]:
    """Each stage alone, on the outputs of the stages before it."""
    c = shape.config(impl.removeprefix("nsa-"))
    pooling, compression, selection, selected, sliding, backend = (
        attention_kwargs(c, names) for names in (POOLING_NAMES, *map(hyperparameters, BRANCH_KINDS), ())
    )
    means, whole = hyperparameter_kwargs(c, POOLING_NAMES), inputs[:3]
    with torch.no_grad():
        folded = (inputs.q, *(ops.compress_mean(x, **pooling).requires_grad_() for x in whole[1:]))
        o_cmp, lse = ops.compressed_attention(*folded, **compression)
        q, k_cmp, _ = folded
        indices = ops.select_blocks(q, k_cmp, lse, **selection)
    sums = (*(torch.randn_like(o_cmp).requires_grad_() for _ in range(3)), inputs.gates)
    leaves = {"compress": whole[1:2], "compressed": folded, "scores": (), "combine": sums}
    forwards: dict[str, Callable[[], Tensor]] = {
        "compress": lambda: ops.compress_mean(inputs.k, **pooling),
        "compressed": lambda: ops.compressed_attention(*folded, **compression)[0],
        "scores": lambda: ops.select_blocks(q, k_cmp, lse, **selection),
        "selected": lambda: ops.selected_attention(*whole, indices, **selected)[0],
        "sliding": lambda: ops.sliding_attention(*whole, **sliding)[0],
        "combine": lambda: ops.combine(*sums, **backend),
    }
    expected: dict[str, gate.Expected] = {
        "compress": lambda leaves, rows: reference.compress_mean(*leaves, **means)[:, rows],
        "compressed": partial(gate.expect_compressed, c),
        "selected": partial(gate.expect_selected, c, indices),
        "sliding": partial(gate.expect_sliding, c.w),
        "combine": lambda leaves, rows: reference.combine(*(x[:, rows] for x in leaves)),
    }

    def error(op: str) -> float:
        if op == "scores":
            return gate.selection_error(c, forwards[op](), *(x.detach() for x in folded))
        return gate.sampled_error(forwards[op], leaves.get(op, whole), expected[op])

    for op, forward in forwards.items():
        passes = partial(forward_and_backward, forward, leaves.get(op, whole))
        yield Task(suite, op, impl, shape, passes, partial(error, op))


def selected_peer(suite: str, impl: str, inputs: Inputs, shape: AttentionShape) -> Task:
    """Another implementation of the selected branch, on the blocks that NSA selects."""
    c, whole = shape.config("auto"), inputs[:3]
    q, *keys_values = (x.detach() for x in whole)
    means = (ops.compress_mean(x, **hyperparameter_kwargs(c, POOLING_NAMES)) for x in keys_values)
    indices = gate.selected_indices(c, q, *means)
    forward = peers.selected(impl, c, indices, *whole)
    error = partial(gate.sampled_error, forward, whole, partial(gate.expect_selected, c, indices))
    passes = partial(forward_and_backward, forward, whole)
    return Task(suite, "selected", impl, shape, passes, error, peers.keeps_buffers)


def parse_heads(text: str) -> tuple[int, int, int]:
    """`"64/4/128"` to 64 query heads, 4 groups and head_dim 128; a ValueError for anything else."""
    parts = text.split("/")
    accepted = "heads/groups/head_dim, as in 64/4/128"
    require(len(parts) == 3 and all(p.isdigit() for p in parts), "--heads", text, accepted)
    n_heads, n_groups, head_dim = map(int, parts)
    require(min(n_heads, n_groups, head_dim) > 0, "--heads", text, "numbers of at least 1")
    require(n_heads % n_groups == 0, "--heads", text, "a multiple of the groups as heads")
    return n_heads, n_groups, head_dim


def clock(args: argparse.Namespace, device: str) -> PassClock:
    """The clock of eager calls, or of CUDA graphs with `--cuda-graphs`."""
    if device == "cpu":
        require(not args.cuda_graphs, "--cuda-graphs", "given without a GPU", "a machine with a CUDA GPU")
        return cpu_clock
    return CudaClock(args.cuda_graphs, suffix="-graphs" if args.cuda_graphs else "")


def tasks(args: argparse.Namespace, runner: Runner) -> Iterator[Task]:
    """The tasks of `nsa bench attention` and `nsa bench branches`."""
    require(0 <= args.smooth < 1, "--smooth", args.smooth, "a number in [0, 1)")
    suite = "attention" if not args.smooth else f"attention-smooth-{args.smooth:g}"
    heads, lengths = DEFAULTS[runner.device]
    for sizes in map(parse_heads, args.heads or heads):
        for length in args.lengths or lengths:
            require_positive_int("--lengths", length)
            shape = AttentionShape(args.batch_size, length, *sizes)
            where = Inputs.of(shape, runner.dtype, runner.device, args.smooth), shape
            impls = list(usable(args.impl, shape, runner))
            if args.suite != "branches":
                yield from (
                    attention_task(suite, impl, *where) for impl in impls if impl not in SELECTED_IMPLEMENTATIONS
                )
            if args.suite == "branches" or args.branches:
                # Lazily: the branches' inputs must not count in the peak memory of the whole.
                for impl in impls:
                    if impl.startswith("nsa-"):
                        yield from branch_tasks(suite, impl, *where)
                    elif impl in SELECTED_IMPLEMENTATIONS:
                        yield selected_peer(suite, impl, *where)


def usable(named: list[str] | None, shape: AttentionShape, runner: Runner) -> Iterator[str]:
    """The implementations that can run, and a line for each that cannot; a ValueError for one that was named."""
    branches = runner.args.suite == "branches" or runner.args.branches
    for impl in named or (*IMPLEMENTATIONS, *(SELECTED_IMPLEMENTATIONS if branches else ())):
        reason = peers.missing(impl, runner.device, shape)
        if reason is None:
            yield impl
        elif named is not None:
            raise ValueError(f"--impl is {impl!r}, which cannot run at {shape}: {reason}")
        else:
            runner.leave_out(impl, reason)


run = Suite(tasks, clock).run
