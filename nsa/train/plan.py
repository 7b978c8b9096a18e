"""What a run would need, before it is started: `nsa plan`.

nsa plan --config 125m --gpu H200 --price 2.0
nsa plan --config 1b --gpu H200 H100 A100 --gpus 8 --set parallel=fsdp

Memory and arithmetic come from the model itself. The speed is what this repository has measured on that GPU with that
backend, carried over by FLOPs where it was another length or a model of a like size; on a GPU without measurements, the
part of its peak that was reached on another one. Where nothing near was measured it is an estimate from FLOPs alone.
Which of them it was is said in the answer. What ranks say to each other is not in it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.bench.results import Row, read
from nsa.config import require, require_positive_int, require_positive_number
from nsa.model import LM, PRESETS, LMConfig
from nsa.model.loss import ROWS
from nsa.settings import nearest
from nsa.train.config import TrainConfig, load_config, parse_set
from nsa.train.sight import PEAK_FLOPS
from nsa.train.step import DTYPES

GIB = 2**30

# What the makers state. The peaks are the trainer's own.
MEMORY_GIB = {"B200": 180, "H200": 141, "H100": 80, "A100": 80, "L40S": 48, "RTX 4090": 24}

# Where nothing near was measured: a part of the peak somewhat below the 0.25 that the 125M model reaches on the H200.
ASSUMED_FRACTION = 0.2

# And no faster than kernels can follow each other: those of a layer, forward and backward, and the seconds from one to
# the next. Without it a tiny model would look as busy as a large one.
LAYER_KERNELS = 60
KERNEL_S = 5e-6

# A rate is carried over to a model with up to so many times the arithmetic of the measured one, or so many times less.
NEAR = 4.0

# What a run can do to go faster, as the names of measurements end, each on top of the one before.
MODES = ("", "-compiled", "-graphs")

# The context, the libraries and what the allocator cannot use.
RESERVED_GIB = 2.0

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, each part at its most: a little above the peak, because they are not all that at once."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    loss: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.loss


@dataclass(frozen=True)
class Rate:
    """Model arithmetic in FLOPs a second on one GPU, and where that number comes from."""

    flops: float
    source: str
    # Whether something was measured for it, if elsewhere.
    measured: bool = True


@dataclass(frozen=True)
class Plan:
    """One GPU's answer. Times are in seconds, `cost` in the price's currency."""

    gpu: str
    gpus: int
    memory: Memory
    memory_gib: float
    fits: bool
    tokens_per_step: int
    tokens_per_s: float
    step_s: float
    total_s: float
    cost: float | None
    source: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(config: TrainConfig, gpu: str, *, gpus: int = 1, price: float | None = None, rows: Iterable[Row] = ()) -> Plan:
    """`price`: of one GPU for an hour. `rows`: measurements of training steps."""
    require_positive_int("gpus", gpus)
    if price is not None:
        require_positive_number("price", price)
    name = known_gpu(gpu)
    require(
        config.dtype != "float32", "dtype", config.dtype, "'bfloat16' or 'float16': whose peaks and rates are known"
    )
    with torch.device("meta"):
        model = LM(config.model)
    memory = memory_of(model, config, gpus)
    # Several ranks turn graphs off, whatever the config says for one.
    mode = 2 if config.cuda_graphs and gpus == 1 else int(config.compile)
    rate = rate_of(name, config.model, list(rows), mode)
    # A forward that is done again is work that does not count as the model's.
    work = model.flops_per_token(config.model.seq_len) * (4 / 3 if config.gc else 1)
    tokens = gpus * config.accum * config.tokens_per_batch
    step = tokens * work / (gpus * rate.flops)
    if not rate.measured:
        step = max(step, config.accum * config.model.n_layers * LAYER_KERNELS * KERNEL_S)
    total = step * config.steps
    return Plan(
        gpu=name,
        gpus=gpus,
        memory=memory,
        memory_gib=MEMORY_GIB[name],
        fits=memory.total / GIB + RESERVED_GIB <= MEMORY_GIB[name],
        tokens_per_step=tokens,
        tokens_per_s=tokens / step,
        step_s=step,
        total_s=total,
        cost=None if price is None else total / 3600 * price * gpus,
        source=f"{rate.source}; times 3/4, which is arithmetic, for gc" if config.gc else rate.source,
    )


def known_gpu(name: str) -> str:
    found = next((gpu for gpu in MEMORY_GIB if gpu.lower() == name.lower()), None)
    if found is None:
        near = nearest(name, MEMORY_GIB)
        raise ValueError(f"gpu is {name!r}; accepted: one of {sorted(MEMORY_GIB)}; the nearest is {near}")
    return found


# Memory.


def memory_of(model: LM, config: TrainConfig, gpus: int) -> Memory:
    """fp32 parameters and gradients, AdamW's two fp32 moments, and what the backward needs of the forward."""
    count = sum(model.parameter_counts().values())
    held = count / gpus if config.parallel == "fsdp" else float(count)
    width = DTYPES[config.dtype].itemsize
    tokens = config.tokens_per_batch
    c = config.model
    layers = [activation_bytes(c, kind, width) for kind in c.kinds]
    # With checkpointing every layer's input, and all of the one that is being done again.
    saved = 4.0 * c.attn.dim * len(layers) + max(layers) if config.gc else sum(layers)
    # Rows of logits in fp32 and rounded; the table once rounded, its gradient in fp32.
    rows = min(ROWS, tokens) * c.vocab_size * (4 + width)
    table = c.vocab_size * c.attn.dim * (4 + width)
    return Memory(
        # Autocast keeps a rounded copy of every matrix while a forward lasts.
        parameters=held * (4 + width),
        gradients=held * 4,
        optimizer=held * 8,
        activations=tokens * saved,
        loss=float(rows + table + tokens * c.attn.dim * width),
    )


def activation_bytes(config: LMConfig, kind: str, width: int) -> float:
    """What one token leaves behind in one layer for its backward; `width`: bytes of a number in a product.

    Read off the forward: the residual stream is fp32, every product keeps its input, an attention its queries, keys,
    values, outputs and log-sums.
    """
    c = config.attn
    q, o = c.n_heads * c.d_k, c.n_heads * c.d_v
    kv = c.n_kv_groups * (c.d_k + c.d_v)
    # Two norms: what goes in, and what comes out rounded.
    total = 2.0 * c.dim * (4 + width)
    # The MLP: both halves of `inner`, silu of one, the product.
    total += 4 * config.hidden * width
    # Queries before and after their rotation, and what `o_proj` reads.
    total += (2 * q + o) * width
    if kind == "nsa":
        gate = c.gate_hidden or max(1, c.dim // 4)
        # Three branches' keys, values, outputs and log-sums; rotated keys twice; the gate; the indices.
        total += (3 * kv + 2 * c.n_kv_groups * c.d_k + 3 * o + 2 * gate + 3 * c.n_heads) * width
        total += 3 * 4 * c.n_heads + 4 * c.n_kv_groups * c.n_sel
        # Each token is in l / d blocks that phi reads.
        total += c.l / c.d * kv * width
    else:
        total += (kv + c.n_kv_groups * c.d_k) * width + 4 * c.n_heads
    return total


# Speed.


def rate_of(gpu: str, config: LMConfig, rows: list[Row], mode: int) -> Rate:
    """From the rows of this GPU, else from the best known part of the peak elsewhere, else from an assumed part.

    `mode`: the one of MODES that the run has.
    """
    kind = "nsa" if "nsa" in config.kinds else "dense"
    usable = [(row, model) for row in rows if (model := measured_model(row, kind)) is not None]
    usable = [(row, model) for row, model in usable if peak_of(row) is not None]
    if not usable:
        return estimate(gpu, "nothing measured")
    size = flops_of(config, config.seq_len)
    near = [(row, m) for row, m in usable if 1 / NEAR <= size / flops_of(m, config.seq_len) <= NEAR]
    if not near:
        return estimate(
            gpu, f"no model of a like size was measured, up to {NEAR:g} times the arithmetic or as much less"
        )
    wanted = config.attn.backend
    # Dense attention is torch's own, whatever serves NSA.
    if kind == "nsa" and wanted != "auto":
        near = [(row, m) for row, m in near if backend_and_mode(row)[0] == wanted]
    here = [(row, m) for row, m in near if gpu in row.gpu]
    best = nearest_row(here or near, config.seq_len)
    if best is not None:
        # `auto` takes what is fastest, with graphs or without.
        served = backend_and_mode(best[0])[0]
        like = [(row, m) for row, m in here or near if backend_and_mode(row)[0] == served]
        best = nearest_row([(row, m) for row, m in like if backend_and_mode(row)[1] <= mode], config.seq_len)
    if best is None:
        how = ("uncompiled", "without CUDA graphs", "at all")[mode]
        return estimate(gpu, f"no model of a like size was measured with backend {wanted} {how}")
    row, model = best
    assert row.tokens_per_s is not None
    flops = flops_of(model, row.S) * row.tokens_per_s
    said = f"{row.impl}, B {row.B}, S {row.S}, {row.tokens_per_s:,.0f} tokens/s on {row.gpu}, commit {row.commit}"
    said += "" if row.peak_gib is None else f", peak {row.peak_gib:.1f} GiB"
    same = model_without_length(model) == model_without_length(config) and config.seq_len == row.S
    if here:
        return Rate(flops, f"measured: {said}" if same else f"carried over by FLOPs from: {said}")
    peak = peak_of(row)
    assert peak is not None
    part = flops / peak
    return Rate(part * PEAK_FLOPS[gpu], f"assumed: {part:.1%} of the peak, as {said}")


def estimate(gpu: str, why: str) -> Rate:
    source = f"estimated from FLOPs alone: at most {ASSUMED_FRACTION:.0%} of the peak; {why}"
    return Rate(ASSUMED_FRACTION * PEAK_FLOPS[gpu], source, measured=False)


def peak_of(row: Row) -> float | None:
    return next((peak for name, peak in PEAK_FLOPS.items() if name in row.gpu), None)


def backend_and_mode(row: Row) -> tuple[str, int]:
    """`nsa-triton-graphs`: triton, and the place of "-graphs" in MODES."""
    mode = max(place for place, name in enumerate(MODES) if row.impl.endswith(name))
    return row.impl.removesuffix(MODES[mode]).partition("-")[2], mode


def measured_model(row: Row, kind: str) -> LMConfig | None:
    """The model of a row. Rows name none, but those of `nsa bench train` are of the presets, told by their heads."""
    if row.op != "train" or row.tokens_per_s is None or not row.impl.startswith(f"{kind}-") or row.dtype == "float32":
        return None
    heads = (row.Hq, row.G, row.Dk, row.Dv)
    for preset in PRESETS.values():
        c = preset.attn
        if (c.n_heads, c.n_kv_groups, c.d_k, c.d_v) == heads:
            return LMConfig.from_dict({**preset.to_dict(), "attention": kind, "seq_len": row.S})
    return None


def nearest_row(found: list[tuple[Row, LMConfig]], length: int) -> tuple[Row, LMConfig] | None:
    """The nearest length, and of its rows the fastest: what `auto`, compilation and graphs come to."""

    def rank(entry: tuple[Row, LMConfig]) -> tuple[float, float]:
        row = entry[0]
        return abs(math.log(row.S / length)), -(row.tokens_per_s or 0.0)

    return min(found, key=rank, default=None)


def flops_of(config: LMConfig, length: int) -> float:
    with torch.device("meta"):
        return LM(config).flops_per_token(length)


def model_without_length(config: LMConfig) -> dict[str, Any]:
    values = config.to_dict()
    values.pop("seq_len")
    values["attn"] = {name: value for name, value in values["attn"].items() if name not in ("backend", "rope_theta")}
    return values


def measurements(folder: Path) -> list[Row]:
    """Every row of training under a folder of results; none where there is no such folder."""
    return [row for path in sorted(folder.glob("*/train.csv")) for row in read(path)]


# The table.


def render(config: TrainConfig, plans: list[Plan]) -> str:
    with torch.device("meta"):
        count = sum(LM(config.model).parameter_counts().values())
    first = plans[0]
    gc = "on" if config.gc else "off"
    lines = [
        f"{count / 1e6:.1f}M parameters, S {config.model.seq_len}, B {config.batch_size} x {config.accum} on each of "
        f"{first.gpus} GPU{'s' if first.gpus > 1 else ''}, parallel {config.parallel}, gc {gc}, {config.dtype}",
        f"{config.steps:,} steps of {first.tokens_per_step:,} tokens: "
        f"{config.steps * first.tokens_per_step / 1e9:.3g}G tokens",
        "",
        "GiB on a GPU",
    ]
    parts = asdict(first.memory)
    width = max(map(len, parts))
    lines += [f"  {name:<{width}}  {value / GIB:8.2f}" for name, value in parts.items()]
    lines += [f"  {'total':<{width}}  {first.memory.total / GIB:8.2f}  and about {RESERVED_GIB:g} for the context", ""]
    head = ("GPU", "memory", "fits", "tokens/s", "step", "total", "cost")
    rows = [
        (
            f"{plan.gpus} x {plan.gpu}" if plan.gpus > 1 else plan.gpu,
            f"{plan.memory_gib:g} GiB",
            "yes" if plan.fits else "no",
            f"{plan.tokens_per_s:,.0f}",
            f"{plan.step_s * 1e3:,.3g} ms" if plan.step_s < 0.1 else f"{plan.step_s * 1e3:,.0f} ms",
            f"{plan.total_s / 3600:,.1f} h",
            "-" if plan.cost is None else f"{plan.cost:,.2f}",
        )
        for plan in plans
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        lines.append(
            "  ".join(
                f"{text:<{w}}" if i == 0 else f"{text:>{w}}"
                for i, (text, w) in enumerate(zip(row, widths, strict=True))
            )
        )
    lines += ["", *(f"{plan.gpu}: {plan.source}" for plan in plans)]
    if not all(plan.fits for plan in plans):
        lines.append(
            "where it does not fit: a smaller batch_size with more accum, gc=true, or parallel=fsdp on more GPUs"
        )
    if first.gpus > 1:
        lines.append("the exchange of gradients and parameters between GPUs is not in these times")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    # As it would resolve on a machine with a GPU, and with the engine that so many of them need.
    assumed = {"device": "cuda", "parallel": "none" if args.gpus == 1 else "ddp"}
    config = load_config(args.config, assumed | parse_set(args.set))
    rows = measurements(args.results or RESULTS)
    plans = [plan(config, gpu, gpus=args.gpus, price=args.price, rows=rows) for gpu in args.gpu]
    print(render(config, plans))
    print(json.dumps([plan.to_dict() for plan in plans]))
    return 0
