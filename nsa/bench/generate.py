"""Decode steps of a whole model over full caches, prefill through them, and generation: NSA beside its dense twin.

nsa bench generate --batch-size 32 --lengths 2048 32768 131072 --out benchmarks/results/h200/decode.csv
nsa bench generate --batch-size 1 --lengths 2048 --prefill 65536 --chunk 8192

A step takes one token per row to the most likely next one: model, head and argmax in a CUDA graph over a static cache.
Caches hold random keys and values; what a step costs does not depend on them. `bytes-limit` is the time in which a copy
moves NSA's keys and values and the parameters. Prefill is compared with the same forward pass without a cache.
`generate`, with `--batch-size 1`, is what `nsa generate` does after a prompt of that length: mean time per token, once
the step is captured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from nsa.bench import gate
from nsa.bench.attention import AttentionShape
from nsa.bench.decode import MAX_REPLAYS, copy_rate, replay_times
from nsa.bench.runner import CudaClock, Pass, Runner, Suite, Task, Timing
from nsa.bench.train import model_shape
from nsa.config import require
from nsa.generation.engine import Generation
from nsa.generation.options import Options
from nsa.model import LM, LMConfig
from nsa.model.config import AttentionKind

DTYPE = torch.bfloat16
# Tokens on which a cached step is compared with the reference: so few that every block is selected.
PROMPT_TOKENS = 255
# Generated after each prompt.
NEW_TOKENS = 512


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

    @torch.no_grad()
    def __call__(self) -> None:
        x = self.model.hidden(self.tokens, caches=self.caches)
        self.tokens.copy_(self.model.logits(x).argmax(dim=-1))


class Prefill:
    """A prompt through empty caches, `chunk` tokens at a time; they have room for one more token."""

    def __init__(self, model: LM, tokens: Tensor, chunk: int, *, static: bool = False) -> None:
        self.model, self.chunks = model, tokens.split(chunk, dim=1)
        self.caches = model.new_cache(tokens.shape[0], tokens.shape[1] + 1, static=static)

    @torch.no_grad()
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
    with torch.device("cuda"):
        return LM(config.with_backend("triton") if attention == "nsa" else config).to(DTYPE).eval()


def specification_of(model: LM) -> LM:
    """The same weights by the reference or, for dense attention, by plain torch."""
    weight = model.head_weight
    config = model.config.with_backend("reference" if set(model.config.kinds) == {"nsa"} else "sdpa")
    specification = LM(config).to(weight.device, weight.dtype).eval()
    specification.load_state_dict(model.state_dict())
    return specification


@torch.no_grad()
def cached_error(model: LM) -> float:
    """The error of a step's logits after a prompt, in units of the tolerance."""
    specification = specification_of(model)
    tokens = torch.randint(model.config.vocab_size, (1, PROMPT_TOKENS + 1), device=model.head_weight.device)
    caches = model.new_cache(1, PROMPT_TOKENS + 1)
    model.hidden(tokens[:, :-1], caches=caches)
    found, plain = model(tokens[:, -1:], caches=caches), specification(tokens)[:, -1:]
    return gate.worst_ratio([found], [plain], [specification.double()(tokens)[:, -1:]])


@torch.no_grad()
def step_error(model: LM, shape: AttentionShape) -> float:
    """The error of the timed step's logits in its first and its last row, in units of the tolerance: against caches
    that are not static and hold the same."""
    step, specification = ModelStep(model, shape.batch, shape.length), specification_of(model)
    rows = torch.tensor(sorted({0, shape.batch - 1}), device=model.head_weight.device)

    def expected() -> Tensor:
        caches = specification.new_cache(len(rows), shape.length, max_rollback=1)
        for cache, timed in zip(caches, step.caches, strict=True):
            for x, y in zip(cache.row_tensors(), timed.row_tensors(), strict=True):
                x.copy_(y[rows])
            cache.longest = shape.length - MAX_REPLAYS
        return specification(step.tokens[rows], caches=caches)

    plain = expected()
    specification.double()
    exact = expected()
    found = model(step.tokens, caches=step.caches)[rows]
    return gate.worst_ratio([found], [plain], [exact])


def time_per_token(model: LM, length: int) -> float:
    """Milliseconds per token that `nsa generate` takes after a prompt of `length`, once its step is captured."""
    prompt = torch.randint(model.config.vocab_size, (length,)).tolist()
    generation = Generation(model, [prompt], Options(max_new_tokens=NEW_TOKENS, temperature=0))
    list(generation)
    return 1e3 * generation.stats.decode_s / generation.stats.decoded_tokens


def step_passes(model: LM, shape: AttentionShape) -> Iterator[Pass]:
    yield Pass("decode-1", ModelStep(model, shape.batch, shape.length), tokens=shape.batch)
    if shape.batch == 1:
        yield Pass("generate", partial(time_per_token, model, shape.length), tokens=1)


def prefills(model: LM, length: int, chunk: int) -> Iterator[Pass]:
    """A forward pass over a prompt: without a cache, through one at once and in chunks, and through a static one."""
    tokens = torch.randint(model.config.vocab_size, (1, length), device=model.head_weight.device)
    calls: dict[str, Callable[[], object]] = {
        "fwd": torch.no_grad()(partial(model.hidden, tokens)),
        "prefill": Prefill(model, tokens, length),
        f"prefill-{chunk}": Prefill(model, tokens, chunk),
        f"prefill-static-{chunk}": Prefill(model, tokens, chunk, static=True),
    }
    yield from (Pass(mode, call, tokens=length) for mode, call in calls.items())


def largest(*errors: Callable[[], float]) -> float:
    return max(error() for error in errors)


def generate_clock(each: Pass) -> Timing:
    """Steps are replayed as CUDA graphs; prefill is called eagerly. Generation knows its own time."""
    if each.mode == "generate":
        took = each.call()
        assert isinstance(took, float)
        return [took], None
    timer = replay_times if each.mode == "decode-1" else CudaClock().times
    return timer(each.call), None


@torch.no_grad()
def tasks(args: argparse.Namespace, runner: Runner) -> Iterator[Task]:
    require(torch.cuda.is_available(), "nsa bench generate", "started without a GPU", "a machine with a CUDA GPU")
    # Imports Triton.
    from nsa.backends.triton.ahead import compile_ahead

    models = {"nsa-triton": new_model(args.preset, "nsa"), "dense-triton": new_model(args.preset, "dense")}
    nsa, rate = models["nsa-triton"], copy_rate()
    shapes = [model_shape(nsa.config, batch, length) for batch in args.batch_size for length in args.lengths]

    def everything() -> None:
        for shape in shapes:
            ModelStep(nsa, shape.batch, shape.length)()
        for length in args.prefill:
            for each in prefills(nsa, length, args.chunk):
                each.call()

    compile_ahead(everything)
    weights = sum(x.numel() for x in nsa.parameters()) * DTYPE.itemsize
    short_error = lru_cache(cached_error)
    for shape in shapes:
        for impl, model in models.items():
            passes = partial(step_passes, model, shape)
            error = partial(largest, partial(short_error, model), partial(step_error, model, shape))
            yield Task("generate", args.preset, f"{impl}-graphs", shape, passes, error)
        limit = Task("generate", args.preset, "bytes-limit", shape, lambda: iter(()), lambda: 0.0)
        reading = (weights + nsa.kv_bytes_read(shape.length, batch_size=shape.batch)) / rate
        runner.record(limit, Pass("decode-1", lambda: None, tokens=shape.batch), [reading], None)
    for length in args.prefill:
        passes, shape = partial(prefills, nsa, length, args.chunk), model_shape(nsa.config, 1, length)
        yield Task("generate", args.preset, "nsa-triton", shape, passes, partial(short_error, nsa))


run = Suite(tasks, lambda args, device: generate_clock).run
