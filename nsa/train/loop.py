"""Train a language model, from its first line of output to a sample of what it learned.

nsa train                                            # a minute or two on two CPU cores
nsa train --attention dense                          # the same with dense attention: the A/B is one flag
nsa train --preset 125m --batch-size 8 --steps 2000  # on a GPU: bf16, compiled
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa import settings
from nsa.backends.problem import Problem
from nsa.backends.routing import explain, router
from nsa.config import require, require_int, require_positive_int
from nsa.data.corpus import Batch, Corpus, decode, encode, standard_library
from nsa.generate import RUNS, generate, usable_device
from nsa.model import LM, PRESETS, LMConfig, load_model, save_model
from nsa.train.progress import progress
from nsa.train.step import StepResult, TrainStep, autocast, learning_rate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# How long and how fast each preset trains when nobody says otherwise.
DEFAULTS: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 180, "batch_size": 4, "lr": 3e-3, "warmup": 20},
    "125m": {"steps": 1000, "batch_size": 8, "lr": 6e-4, "warmup": 100},
}

SAMPLE_PROMPT = "def "
SAMPLE_LENGTH = 200


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. The length of a sequence is the model's."""

    model: LMConfig
    steps: int
    batch_size: int
    lr: float
    out: Path
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False
    # Batches whose gradients make one step.
    accum: int = 1
    # Activation checkpointing: less memory, a third more work.
    gc: bool = False
    warmup: int = 0
    # The learning rate at the end, as a part of `lr`.
    lr_floor: float = 0.1
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    seed: int = 0
    log_every: int = 20
    eval_batches: int = 4

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accum", "log_every", "eval_batches"):
            require_positive_int(name, getattr(self, name))
        for name in ("warmup", "seed"):
            require_int(name, getattr(self, name), at_least=0)
        require(self.lr > 0, "lr", self.lr, "a positive number")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {sorted(DTYPES)}")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "out": str(self.out)}


class Trainer:
    """`train()` runs it all; `step()` is one update."""

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        self.config = config
        self.corpus = corpus
        require(
            corpus.vocab_size <= config.model.vocab_size,
            "vocab_size",
            config.model.vocab_size,
            f"at least the corpus's {corpus.vocab_size}",
        )
        self.device = torch.device(config.device)
        self.dtype = DTYPES[config.dtype]
        torch.manual_seed(config.seed)
        self.model = LM(config.model).to(self.device)
        self.model.recompute = config.gc
        self.update = TrainStep(
            self.model,
            dtype=self.dtype,
            compile=config.compile,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
        )
        self.metrics = Metrics(config.out / "metrics.jsonl")

    def train(self) -> Summary:
        c = self.config
        print(boot_line(c, self.model, self.corpus), flush=True)
        (c.out / "train.json").write_text(json.dumps(c.to_dict(), indent=2) + "\n")
        loss_start = self.evaluate(0)
        waiting: list[tuple[int, StepResult]] = []
        shown = progress(c.steps)
        began = time.perf_counter()
        try:
            for step in range(c.steps):
                waiting.append((step, self.step(step)))
                if step == 0:
                    # The first step compiles and warms up: the clock starts after it.
                    self.metrics.write_steps(waiting, self.lr)
                    began = time.perf_counter()
                elif (step + 1) % c.log_every == 0 or step + 1 == c.steps:
                    loss = self.metrics.write_steps(waiting, self.lr)
                    rate = step * self.tokens_per_step / (time.perf_counter() - began)
                    shown.show(step + 1, f"loss {loss:.3f}  lr {self.lr(step):.2e}  {rate:,.0f} tokens/s")
        finally:
            shown.close()
        timed = c.steps - 1
        tokens_per_s = timed * self.tokens_per_step / (time.perf_counter() - began) if timed else None
        loss_end = self.evaluate(c.steps)
        checkpoint = save_model(self.model, c.out)
        summary = Summary(loss_start, loss_end, tokens_per_s, fallbacks(), self.sample(), checkpoint)
        self.metrics.write("end", **summary.to_dict())
        return summary

    def step(self, step: int) -> StepResult:
        return self.update(
            [self.batch("train", step * self.config.accum + i) for i in range(self.config.accum)], self.lr(step)
        )

    def lr(self, step: int) -> float:
        c = self.config
        return learning_rate(step, c.steps, peak=c.lr, warmup=c.warmup, floor=c.lr_floor)

    @property
    def tokens_per_step(self) -> int:
        return self.config.accum * self.config.batch_size * self.config.model.seq_len

    def batch(self, split: str, index: int) -> Batch:
        c = self.config
        tokens, targets = self.corpus.batch(split, c.batch_size, c.model.seq_len, seed=c.seed, step=index)
        return self.to_device(tokens), self.to_device(targets)

    def to_device(self, x: Tensor) -> Tensor:
        # Only from pinned memory can a copy go on behind the host's back.
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    @torch.no_grad()
    def evaluate(self, step: int) -> float:
        """The mean loss over the same few validation batches every time."""
        self.model.eval()
        with autocast(self.device, self.dtype):
            losses = [self.model(*self.batch("valid", index)) for index in range(self.config.eval_batches)]
        self.model.train()
        loss = torch.stack(losses).mean().item()
        self.metrics.write("eval", step=step, loss=loss)
        return loss

    def sample(self) -> str:
        """A few lines from the model that was saved: what speaks is what others will load."""
        model = load_model(self.config.out, self.device)
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        new = generate(model, [encode(SAMPLE_PROMPT)], SAMPLE_LENGTH, temperature=0.8, generator=generator)
        return SAMPLE_PROMPT + decode(new[0].tolist())


@dataclass(frozen=True)
class Summary:
    """What a run comes to."""

    loss_start: float
    loss_end: float
    # None for a run of one step, which is not timed.
    tokens_per_s: float | None
    fallbacks: dict[str, int]
    sample: str
    checkpoint: Path

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "checkpoint": str(self.checkpoint)}

    def __str__(self) -> str:
        failures = ", ".join(f"{reason} ({times} times)" for reason, times in self.fallbacks.items())
        rate = self.tokens_per_s
        return "\n".join(
            [
                f"validation loss {self.loss_start:.3f} -> {self.loss_end:.3f}",
                "speed not measured: the first step is not timed" if rate is None else f"{rate:,.0f} tokens/s",
                f"fallbacks: {failures or 'none'}",
                f"saved {self.checkpoint}",
                f"sample:\n{self.sample}",
            ]
        )


class Metrics:
    """A file with one JSON object a line: `kind` is step, eval or end."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w")

    def write(self, kind: str, **values: Any) -> None:
        self.file.write(json.dumps({"kind": kind, **values}) + "\n")
        self.file.flush()

    def write_steps(self, waiting: list[tuple[int, StepResult]], lr: Callable[[int], float]) -> float:
        """Read back the steps that wait, the only time the device is waited for; returns the last loss."""
        values = torch.stack([torch.stack([result.loss, result.grad_norm]) for _, result in waiting]).tolist()
        for (step, _), (loss, grad_norm) in zip(waiting, values, strict=True):
            self.write("step", step=step + 1, loss=loss, grad_norm=grad_norm, lr=lr(step))
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss of step {step + 1} is {loss}; a lower --lr may help")
        waiting.clear()
        return values[-1][0]


def boot_line(config: TrainConfig, model: LM, corpus: Corpus) -> str:
    """Everything that decides what runs, in one line that a log can be searched for."""
    switch = {True: "on", False: "off"}
    parts = {
        "S": config.model.seq_len,
        "B": config.batch_size,
        "accum": config.accum,
        "gc": switch[config.gc],
        "attention": config.model.attention,
        "params": f"{sum(model.parameter_counts().values()):,}",
        "steps": config.steps,
        "lr": config.lr,
        "seed": config.seed,
        "device": config.device,
        "dtype": config.dtype,
        "compile": switch[config.compile],
        **backends(config),
        "data": corpus.source,
    }
    return "[boot] effective config: " + " ".join(f"{name}={value}" for name, value in parts.items())


def backends(config: TrainConfig) -> dict[str, str]:
    """Which backend serves each branch; where the backward has another one, both."""
    if config.model.attention == "dense":
        return {"backend": "torch-sdpa"}
    attn = config.model.attn
    served = []
    for backward in (False, True):
        problem = Problem.of_config(
            attn,
            batch=config.batch_size,
            length=config.model.seq_len,
            dtype=DTYPES[config.dtype],
            device=torch.device(config.device).type,
            backward=backward,
        )
        routes = explain(problem, attn.backend).routes
        served.append({op: route.chosen or "none" for op, route in routes.items()})
    forward, backward_ = served
    return {op: name if backward_[op] == name else f"{name}/{backward_[op]}" for op, name in forward.items()}


def fallbacks() -> dict[str, int]:
    """Backends that said yes and failed while they ran, and how often."""
    failures = router().counts.failures
    return {f"{op} on {backend}: {reason}": times for (op, backend, reason), times in failures.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a language model on the source code of Python's standard library, one byte a token."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  nsa train                       a minute or two on two CPU cores\n"
        "  nsa train --attention dense     the same with dense attention\n"
        "  nsa train --preset 125m --steps 2000 --batch-size 8\n\n"
        "NSA_SEQ_LEN, NSA_BATCH_SIZE, NSA_ACCUM and NSA_NO_GC are used where the flag is not given."
    )
    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    model.add_argument("--attention", choices=("nsa", "dense"), default="nsa")
    model.add_argument("--seq-len", type=int, help="tokens in a sequence (default: the preset's)")
    model.add_argument("--backend", default="auto", help="who computes NSA's branches; a named one never falls back")
    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, help="optimizer steps (default: the preset's)")
    run.add_argument("--batch-size", type=int, help="sequences in a batch (default: the preset's)")
    run.add_argument("--accum", type=int, help="batches in a step (default: 1)")
    run.add_argument("--lr", type=float, help="peak learning rate (default: the preset's)")
    run.add_argument("--warmup", type=int, help="steps up to the peak (default: the preset's)")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--log-every", type=int, default=20, help="steps between two looks at the loss")
    run.add_argument("--eval-batches", type=int, default=4, help="validation batches (default: %(default)s)")
    run.add_argument("--out", type=Path, help="the run's folder (default: a new one under runs/)")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    machine.add_argument(
        "--dtype", choices=sorted(DTYPES), help="of products (default: bfloat16 on a GPU, else float32)"
    )
    machine.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="torch.compile the model (default: on a GPU)"
    )
    machine.add_argument("--gc", action=argparse.BooleanOptionalAction, help="activation checkpointing (default: off)")


def run(args: argparse.Namespace) -> int:
    usable_device(args.device)
    config = config_from(args, settings.current())
    summary = Trainer(config, standard_library()).train()
    print(summary)
    print(f'go on with: nsa generate --run {config.out} --prompt "import "')
    return 0


def config_from(args: argparse.Namespace, env: settings.Settings) -> TrainConfig:
    """The command line, else the environment, else the preset."""
    preset = LMConfig.preset(args.preset)
    model = replace(preset, attention=args.attention, seq_len=first(args.seq_len, env.seq_len, preset.seq_len))
    default = DEFAULTS[args.preset]
    on_gpu = torch.device(args.device).type == "cuda"
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return TrainConfig(
        model=model.with_backend(args.backend),
        steps=first(args.steps, default["steps"]),
        batch_size=first(args.batch_size, env.batch_size, default["batch_size"]),
        lr=first(args.lr, default["lr"]),
        out=first(args.out, RUNS / f"{args.preset}-{args.attention}-{stamp}"),
        device=args.device,
        dtype=first(args.dtype, "bfloat16" if on_gpu else "float32"),
        compile=first(args.compile, on_gpu),
        accum=first(args.accum, env.accum_batches, 1),
        gc=first(args.gc, False if env.no_gc else None, False),
        warmup=first(args.warmup, default["warmup"]),
        seed=args.seed,
        log_every=args.log_every,
        eval_batches=args.eval_batches,
    )


def first(*values: Any) -> Any:
    """The first that was given."""
    return next(value for value in values if value is not None)
