"""Decode steps of a whole model over full caches, and prefill through them: NSA beside its dense twin.

nsa bench generate --batch-size 32 --lengths 2048 32768 131072 --out benchmarks/results/h200/decode.csv
nsa bench generate --batch-size 1 --lengths 2048 --prefill 65536 --chunk 8192

A step takes one token per row to the most likely next one: model, head and argmax in a CUDA graph over a static cache.
Caches hold random keys and values; what a step costs does not depend on them. `bytes-limit` is the time in which a copy
moves NSA's keys and values and the parameters. Prefill is compared with the same forward pass without a cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.backends.triton.ahead import compile_ahead
from nsa.bench.decode import MAX_REPLAYS, copy_rate, replay_times
from nsa.bench.runner import CudaClock
from nsa.config import require
from nsa.model import LM, LMConfig
from nsa.model.config import AttentionKind
from nsa.results import Row, append, make_row

DEVICE, DTYPE = "cuda", torch.bfloat16
# Implementation, mode and milliseconds.
Times = Iterator[tuple[str, str, list[float]]]


class ModelStep:
    """A model with static caches of `batch` rows, which grow to `length` tokens while the step is timed."""

    def __init__(self, model: LM, batch: int, length: int) -> None:
        require(length > MAX_REPLAYS, "--lengths", length, f"more than the {MAX_REPLAYS} timed steps")
        self.model, self.caches = model, model.new_cache(batch, length, static=True, max_rollback=1)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=model.head_weight.device)
        for cache in self.caches:
            for x in cache.row_tensors():
                if x.is_floating_point():
                    x.normal_()
                else:
                    x.fill_(length - MAX_REPLAYS)

    def __call__(self) -> None:
        x = self.model.hidden(self.tokens, caches=self.caches)
        self.tokens.copy_(self.model.logits(x).argmax(dim=-1))


class Prefill:
    """A prompt through empty caches, `chunk` tokens at a time; they have room for one more token."""

    def __init__(self, model: LM, tokens: Tensor, chunk: int) -> None:
        self.model, self.chunks = model, tokens.split(chunk, dim=1)
        self.caches = model.new_cache(tokens.shape[0], tokens.shape[1] + 1)

    def __call__(self) -> None:
        for cache in self.caches:
            cache.lengths.zero_()
            cache.longest = 0
        for chunk in self.chunks:
            self.model.hidden(chunk, caches=self.caches)


def new_model(preset: str, attention: AttentionKind) -> LM:
    """The preset in bf16; NSA by the Triton backend, which never falls back."""
    config = replace(LMConfig.preset(preset), attention=attention)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return LM(config.with_backend("triton") if attention == "nsa" else config).to(DTYPE).eval()


def measure_steps(models: dict[str, LM], batch: int, length: int, rate: float) -> Times:
    """A step of every model, and reading what NSA's must read."""
    for impl, model in models.items():
        yield f"{impl}-graphs", "decode-1", replay_times(ModelStep(model, batch, length))
    nsa = models["nsa-triton"]
    weights = sum(x.numel() for x in nsa.parameters()) * DTYPE.itemsize
    yield "bytes-limit", "decode-1", [(weights + nsa.kv_bytes_read(length, batch_size=batch)) / rate]


def prefills(model: LM, length: int, chunk: int) -> dict[str, Callable[[], object]]:
    """A forward pass over a prompt by mode: without a cache, through one at once and in chunks."""
    tokens = torch.randint(model.config.vocab_size, (1, length), device=DEVICE)
    whole, chunked = (Prefill(model, tokens, n) for n in (length, chunk))
    return {"fwd": lambda: model.hidden(tokens), "prefill": whole, f"prefill-{chunk}": chunked}


def measure_prefill(model: LM, length: int, chunk: int) -> Times:
    for mode, call in prefills(model, length, chunk).items():
        yield "nsa-triton", mode, CudaClock().times(call)


def rows_of(config: LMConfig, args: argparse.Namespace, batch: int, length: int, found: Times) -> Iterator[Row]:
    c = config.attn
    shape: dict[str, Any] = {"B": batch, "S": length, "Hq": c.n_heads, "G": c.n_kv_groups, "Dk": c.d_k, "Dv": c.d_v}
    for impl, mode, times in found:
        columns = {"suite": "generate", "op": args.preset, "impl": impl, "mode": mode, **shape}
        made = make_row(times, columns, dtype=DTYPE, device=DEVICE, commit=args.commit)
        n_tokens = batch * (1 if mode == "decode-1" else length)
        yield replace(made, tokens_per_s=round(n_tokens / made.p50_ms * 1e3, 1))


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    """`nsa bench generate`: returns the exit status."""
    require(torch.cuda.is_available(), "nsa bench generate", "started without a GPU", "a machine with a CUDA GPU")
    models = {"nsa-triton": new_model(args.preset, "nsa"), "dense-sdpa": new_model(args.preset, "dense")}
    config, rate = models["nsa-triton"].config, copy_rate()
    shapes = [(batch, length) for batch in args.batch_size for length in args.lengths]

    nsa = models["nsa-triton"]

    def everything() -> None:
        for shape in shapes:
            ModelStep(nsa, *shape)()
        for length in args.prefill:
            for call in prefills(nsa, length, args.chunk).values():
                call()

    compile_ahead(everything)
    measured = [(*shape, measure_steps(models, *shape, rate)) for shape in shapes]
    measured += [(1, length, measure_prefill(nsa, length, args.chunk)) for length in args.prefill]
    for batch, length, found in measured:
        for row in rows_of(config, args, batch, length, found):
            rates = f"{row.p50_ms:9.3f} ms {row.tokens_per_s:12,.0f} tokens/s"
            print(f"B={batch} S={length:<7} {row.mode:<12} {row.impl:<18} {rates}", flush=True)
            if args.out is not None:
                append(args.out, row)
    print(json.dumps({"copy_bytes_per_ms": round(rate)}))
    return 0
