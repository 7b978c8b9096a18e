"""Memory, time and cost of a run before it starts: `nsa plan`.

Memory and FLOPs are computed from the model. The speed is "measured" only where `benchmarks/results` has a row for this
model, length, batch, backend and mode on this GPU. Everything else is marked as an estimate: the nearest row scaled by
FLOPs, the fraction of the peak that was reached on another GPU, or FLOPs alone; each plus the time to launch the
kernels. Communication between ranks is not included.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from nsa import settings
from nsa.backends.gpu import GPUS, gpu_kind
from nsa.config import require, require_positive_int, require_positive_number
from nsa.data import DataConfig, Tokenizer
from nsa.data.documents import IndexedDocuments, TextFiles
from nsa.data.loader import open_pools
from nsa.data.pools import TextPools
from nsa.data.shards import ShardPools
from nsa.dtypes import DTYPES
from nsa.model import LM, PRESETS, AttentionKind, LMConfig
from nsa.model.loss import CHUNK_ROWS
from nsa.progress import aligned_columns
from nsa.results import Row, read_rows
from nsa.settings import nearest
from nsa.train.config import TrainConfig, load_config, parse_set

GIB = 2**30
# The fraction of the peak where nothing similar was measured; the 125M model reaches 0.25 on the H200.
ASSUMED_FRACTION = 0.2
# The reference builds whole score matrices in fp32; its training speed has not been measured.
REFERENCE_FRACTION = 0.005
# Kernels of a layer, forward and backward, and the seconds that each takes at the least: they bound short batches.
LAYER_KERNELS, KERNEL_S = 60, 5e-6
# A rate is scaled to a model with up to this many times the FLOPs of the measured one, or as many times fewer.
NEAR = 4.0
# Suffixes of a measurement's name: each mode includes the one before it; activation checkpointing comes before them.
MODES, GC = ("", "-compiled", "-graphs"), "-gc"
# A run that needs this many times a GPU's memory is a mistake.
ABSURD = 1000
# The CUDA context, the libraries and fragmentation.
RESERVED_GIB = 2.0
# Chunks that are tokenized to estimate how many tokens a corpus has.
SAMPLED_CHUNKS = 16
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

Basis = Literal["measured", "scaled", "assumed", "estimated"]


@dataclass(frozen=True)
class RunMemory:
    """Peak bytes on one GPU, part by part; their sum is a little above the peak of all."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    loss: float

    @property
    def total(self) -> float:
        return sum(astuple(self))


class Rate(NamedTuple):
    """FLOP/s of the model on one GPU, and where that number comes from."""

    flops: float
    source: str
    basis: Basis
    gc: bool = False  # whether the recomputation of activation checkpointing is part of it


@dataclass(frozen=True)
class RunPlan:
    """A run on one kind of GPU. Times are in seconds, `cost` in the price's currency.

    `basis`: "measured" for a row of this run; "scaled" by FLOPs from another row of this GPU; "assumed" from a row of
    another GPU; "estimated" from FLOPs alone.
    """

    gpu: str
    gpus: int
    memory: RunMemory
    memory_gib: float
    fits: bool
    tokens_per_step: int
    tokens_per_s: float
    step_s: float
    total_s: float
    cost: float | None
    basis: Basis
    source: str


def plan_run(
    config: TrainConfig, gpu: str, *, gpus: int = 1, price: float | None = None, rows: Iterable[Row] = ()
) -> RunPlan:
    """Plan a run on so many GPUs of a kind in `GPUS`, from measured `rows`; a `price` is of one GPU per hour.

    An unknown GPU, a run in fp32 and an absurd amount of memory are a ValueError.
    """
    require_positive_int("gpus", gpus)
    if price is not None:
        require_positive_number("price", price)
    name = next((known for known in GPUS if known.lower() == gpu.lower()), None)
    if name is None:
        raise ValueError(f"gpu is {gpu!r}; accepted: one of {sorted(GPUS)}; the nearest is {nearest(gpu, GPUS)}")
    require(config.dtype != "float32", "dtype", config.dtype, "'bfloat16' or 'float16', whose peaks are known")
    # Before the whole model is built for its FLOPs: it may have a billion layers.
    memory = estimate_memory(config, gpus)
    gib, here = memory.total / GIB, GPUS[name].memory_gib
    require(gib <= ABSURD * here, "the memory of this run", f"{gib:,.0f} GiB", f"at most {ABSURD} times a GPU's")
    # Several ranks turn graphs off.
    mode = 2 if config.cuda_graphs and gpus == 1 else int(config.compile)
    rate = rate_of(name, config, rows, mode)
    # A recomputed forward is no part of the model's FLOPs.
    recomputed = config.gc and not rate.gc
    work = flops_of(config.model, config.model.seq_len) * (4 / 3 if recomputed else 1)
    batch = config.tokens_per_batch * work / rate.flops
    source = f"{rate.basis}: {rate.source}"
    if rate.basis != "measured":
        batch += launch_s(config.model)
        source = f"estimate: {rate.source}, plus {launch_s(config.model) * 1e3:.2g} ms of launches"
    source = f"{source}; a third more FLOPs for gc" if recomputed else source
    step = config.accum * batch
    tokens = gpus * config.accum * config.tokens_per_batch
    total = step * config.steps
    cost = None if price is None else total / 3600 * price * gpus
    fits, times = gib + RESERVED_GIB <= here, (tokens / step, step, total, cost)
    return RunPlan(name, gpus, memory, here, fits, tokens, *times, rate.basis, source)


def launch_s(config: LMConfig) -> float:
    """Seconds that the kernels of one forward and backward take at the least."""
    return config.n_layers * LAYER_KERNELS * KERNEL_S


def estimate_memory(config: TrainConfig, gpus: int) -> RunMemory:
    """fp32 parameters and gradients, AdamW's two fp32 moments, and the activations saved for the backward."""
    c, tokens, width = config.model, config.tokens_per_batch, DTYPES[config.dtype].itemsize
    held = parameter_count(c) / (gpus if config.parallel == "fsdp" else 1)
    layers = {kind: activation_bytes(c, kind, width) for kind in layers_by_kind(c)}
    saved = sum(n * layers[kind] for kind, n in layers_by_kind(c).items())
    if config.gc:
        # Every layer's input, and all of the layer that is being recomputed.
        saved = 4.0 * c.attn.dim * c.n_layers + max(layers.values())
    # Rows of logits in fp32 and cast; the embedding table cast, and its gradient in fp32.
    rows = min(CHUNK_ROWS, tokens) * c.vocab_size * (4 + width)
    table = c.vocab_size * c.attn.dim * (4 + width)
    loss = float(rows + table + tokens * c.attn.dim * width)
    # Autocast caches a cast copy of every matrix during a forward.
    return RunMemory(held * (4 + width), held * 4, held * 8, tokens * saved, loss)


def layers_by_kind(c: LMConfig) -> dict[AttentionKind, int]:
    return {c.attention: c.n_layers} if isinstance(c.attention, str) else Counter(c.attention)


def parameter_count(c: LMConfig) -> int:
    """The number of parameters, from models of one layer, because there may be a billion; a ValueError where 64 bits
    cannot count a tensor."""
    of_layer: dict[str, int] = {}
    for kind in layers_by_kind(c):
        try:
            with torch.device("meta"):
                model = LM(replace(c.with_backend("auto"), n_layers=1, attention=kind))
        except (RuntimeError, TypeError, OverflowError) as error:
            sizes = f"vocab_size = {c.vocab_size}, hidden = {c.hidden}, attn.dim = {c.attn.dim}"
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the sizes of the model are too large for a tensor ({sizes}): {reason}") from None
        of_layer[kind] = sum(p.numel() for p in model.blocks[0].parameters())
        rest = sum(p.numel() for p in model.parameters()) - of_layer[kind]
    return rest + sum(n * of_layer[kind] for kind, n in layers_by_kind(c).items())


def activation_bytes(config: LMConfig, kind: str, width: int) -> float:
    """Bytes that one token saves in one layer for the backward; `width`: bytes of a matmul's element.

    The residual stream is fp32; every matmul saves its input, an attention its queries, keys, values, outputs and LSE.
    """
    c = config.attn
    q, o = c.n_heads * c.d_k, c.n_heads * c.d_v
    kv = c.n_kv_groups * (c.d_k + c.d_v)
    # Two norms: the input, and the output cast.
    total = 2.0 * c.dim * (4 + width)
    # The MLP: both halves of `inner`, silu of one, the product.
    total += 4 * config.hidden * width
    # Queries before and after their rotation, and what `o_proj` reads.
    total += (2 * q + o) * width
    if kind == "nsa":
        gate = c.gate_hidden or max(1, c.dim // 4)
        # Three branches' keys, values, outputs and LSE; rotated keys twice; the gate; the indices.
        total += (3 * kv + 2 * c.n_kv_groups * c.d_k + 3 * o + 2 * gate + 3 * c.n_heads) * width
        total += 3 * 4 * c.n_heads + 4 * c.n_kv_groups * c.n_sel
        # Each token is in l / d blocks that phi reads.
        total += c.l / c.d * kv * width
    else:
        total += (kv + c.n_kv_groups * c.d_k) * width + 4 * c.n_heads
    return total


class Measured(NamedTuple):
    """A row of training, with its name (`nsa-triton-gc-graphs`) taken apart."""

    row: Row
    model: LMConfig
    backend: str
    gc: bool
    mode: int  # index into MODES
    tokens_per_s: float
    peak_flops: float

    @classmethod
    def of(cls, row: Row, kind: str) -> Measured | None:
        """The measurement in a row; None unless it is of training with attention of this `kind`. Rows name no model,
        but those of `nsa bench train` are of the presets, which their heads identify."""
        gpu = gpu_kind(row.gpu)
        if row.op != "train" or row.tokens_per_s is None or gpu is None or row.dtype == "float32":
            return None
        heads = {"n_heads": row.Hq, "n_kv_groups": row.G, "d_k": row.Dk, "d_v": row.Dv}
        preset = next((p for p in PRESETS.values() if heads.items() <= vars(p.attn).items()), None)
        if preset is None or not row.impl.startswith(f"{kind}-"):
            return None
        mode = max(index for index, name in enumerate(MODES) if row.impl.endswith(name))
        backend = row.impl.removeprefix(f"{kind}-").removesuffix(MODES[mode])
        model = LMConfig.from_dict({**preset.to_dict(), "attention": kind, "seq_len": row.S})
        gc = backend.endswith(GC)
        return cls(row, model, backend.removesuffix(GC), gc, mode, row.tokens_per_s, GPUS[gpu].flops)

    @property
    def flops(self) -> float:
        return flops_of(self.model, self.row.S) * self.tokens_per_s

    def distance(self, config: TrainConfig, mode: int) -> tuple[bool, float, int, float]:
        """The distance from a run: in recomputation, in length and in tokens of a batch, in mode; then the fastest."""
        length, tokens = self.row.S / config.model.seq_len, self.row.B * self.row.S / config.tokens_per_batch
        apart = abs(math.log(length)) + abs(math.log(tokens))
        return self.gc != config.gc, apart, mode - self.mode, -self.tokens_per_s

    def is_of_run(self, config: TrainConfig, mode: int) -> bool:
        sizes = (config.model.seq_len, config.batch_size, config.dtype, mode, config.gc, config.data.pack)
        same = (self.row.S, self.row.B, self.row.dtype, self.mode, self.gc, False) == sizes
        return same and model_without_length(self.model) == model_without_length(config.model)

    def __str__(self) -> str:
        row = self.row
        peak = "" if row.peak_gib is None else f", peak {row.peak_gib:.1f} GiB"
        rate = f"{self.tokens_per_s:,.0f} tokens/s on {row.gpu}, commit {row.commit}"
        return f"{row.impl}, B {row.B}, S {row.S}, {rate}{peak}"


def rate_of(gpu: str, config: TrainConfig, rows: Iterable[Row], mode: int) -> Rate:
    """The speed by the rows of this GPU, else by the fraction of the peak reached on another one, else by an assumed
    fraction."""
    model = config.model
    kinds = sorted(set(model.kinds))
    # Dense attention is torch's own, whatever the backend.
    wanted = "auto" if kinds == ["dense"] else "reference" if settings.current().force_parity else model.attn.backend
    fraction = REFERENCE_FRACTION if wanted == "reference" else ASSUMED_FRACTION

    def estimate(why: str) -> Rate:
        source = f"from FLOPs alone, at most {fraction:.2g} of the peak; {why}"
        source += "; the reference needs more memory than shown" if wanted == "reference" else ""
        return Rate(fraction * GPUS[gpu].flops, source, "estimated")

    if len(kinds) > 1:
        return estimate(f"no mixture of {' and '.join(kinds)} was measured")
    found = [m for row in rows if (m := Measured.of(row, kinds[0])) is not None]
    if not found:
        return estimate(f"nothing measured with {kinds[0]} attention")
    size = flops_of(model, model.seq_len)
    near = [m for m in found if 1 / NEAR <= size / flops_of(m.model, model.seq_len) <= NEAR]
    if not near:
        return estimate(f"no model of similar size was measured, up to {NEAR:g} times the FLOPs or as many times fewer")
    here = [m for m in near if gpu in m.row.gpu]
    backend = wanted
    if wanted == "auto":
        # What it selects at the nearest measured length.
        backend = min(here or near, key=lambda m: (abs(math.log(m.row.S / model.seq_len)), -m.tokens_per_s)).backend
    usable = [m for m in here or near if m.backend == backend and m.mode <= mode and m.gc <= config.gc]
    best = min(usable, key=lambda m: m.distance(config, mode), default=None)
    if best is None:
        how = ("uncompiled", "without CUDA graphs", "at all")[mode]
        return estimate(f"no model of similar size was measured with backend {wanted} {how}")
    if not here:
        reached = best.flops / best.peak_flops
        return Rate(reached * GPUS[gpu].flops, f"{reached:.1%} of the peak, as {best}", "assumed", best.gc)
    if best.is_of_run(config, mode):
        return Rate(best.flops, str(best), "measured", best.gc)
    return Rate(best.flops, f"scaled by FLOPs from {best}", "scaled", best.gc)


@cache
def flops_of(config: LMConfig, length: int) -> float:
    with torch.device("meta"):
        return LM(config).flops_per_token(length)


def model_without_length(config: LMConfig) -> dict[str, Any]:
    values = config.to_dict()
    values.pop("seq_len")
    values["attn"] = {name: value for name, value in values["attn"].items() if name not in ("backend", "rope_theta")}
    return values


def measurements(folder: Path) -> list[Row]:
    """Every row of training under a folder of results; empty where there is no such folder."""
    return [row for path in sorted(folder.glob("*/train.csv")) for row in read_rows(path)]


def expected_plan(config: TrainConfig, *, ranks: int = 1) -> RunPlan | None:
    """The plan for the GPU of this machine; None on a CPU, for a GPU whose peak is not known, or in fp32."""
    if not config.device.startswith("cuda") or config.dtype == "float32":
        return None
    gpu = gpu_kind(torch.cuda.get_device_name(config.device))
    if gpu is None:
        return None
    return plan_run(config, gpu, gpus=ranks, rows=measurements(RESULTS))


class Corpus(NamedTuple):
    name: str
    tokenizer: Tokenizer
    tokens: float | None  # of one pass, approximately; None for a stream or synthetic data, which have no end

    def passes(self, tokens: float) -> float | None:
        return tokens / self.tokens if self.tokens else None


def find_corpus(config: DataConfig, *, seq_len: int) -> Corpus:
    """Opens the data as training would, and reads a sample of it; raises ValueError or OSError where it is not here."""
    pools = open_pools(config, split="train", seq_len=seq_len, seed=0)
    tokens = None
    if isinstance(pools, ShardPools):
        tokens = float(sum(shard.header.tokens for shard in pools.shards))
    elif isinstance(pools, TextPools) and isinstance(pools.documents, IndexedDocuments):
        tokens = count_tokens(pools.documents, pools.tokenizer)
    return Corpus(pools.name, pools.tokenizer, tokens)


def count_tokens(documents: IndexedDocuments, tokenizer: Tokenizer) -> float:
    """Tokens of all documents, estimated from a sample; text files count by their bytes, which vary widely."""
    if isinstance(documents, TextFiles) and tokenizer.name == "bytes":
        return documents.bytes
    every = -(-documents.n_chunks // SAMPLED_CHUNKS)
    texts = [text for index in range(0, documents.n_chunks, every) for text in documents.read(index).texts]
    tokens = sum(map(len, tokenizer.encode_documents(texts)))
    if isinstance(documents, TextFiles):
        return documents.bytes * tokens / max(1, sum(len(text.encode()) for text in texts))
    return documents.n_documents * tokens / max(1, len(texts))


def in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def render(config: TrainConfig, plans: list[RunPlan], data: Iterable[str] = ()) -> str:
    """The plans as a table; `data`: lines about the data."""
    first, tokens = plans[0], plans[0].tokens_per_step
    gpus, gc = f"{first.gpus} GPU{'s' if first.gpus > 1 else ''}", "on" if config.gc else "off"
    batch = f"S {config.model.seq_len}, B {config.batch_size} x {config.accum} on each of {gpus}"
    count = f"{parameter_count(config.model) / 1e6:.1f}M parameters"
    lines = [f"{count}, {batch}, parallel {config.parallel}, gc {gc}, {config.dtype}"]
    lines += [f"{config.steps:,} steps of {tokens:,} tokens: {config.steps * tokens / 1e9:.3g}G tokens"]
    lines += [*data, "", "GiB per GPU"]
    lines += [f"  {name:<11}  {value / GIB:8.2f}" for name, value in asdict(first.memory).items()]
    lines += [f"  {'total':<11}  {first.memory.total / GIB:8.2f}  and about {RESERVED_GIB:g} for the context", ""]
    rows = [("GPU", "memory", "fits", "tokens/s", "step", "total", "cost")]
    for plan in plans:
        gpu, fits = f"{plan.gpus} x {plan.gpu}" if plan.gpus > 1 else plan.gpu, "yes" if plan.fits else "no"
        times = (f"{plan.tokens_per_s:,.0f}", in_ms(plan.step_s), f"{plan.total_s / 3600:,.1f} h")
        rows.append((gpu, f"{plan.memory_gib:g} GiB", fits, *times, "-" if plan.cost is None else f"{plan.cost:,.2f}"))
    lines += [aligned_columns(rows, left=1), "", *(f"{plan.gpu}: {plan.source}" for plan in plans)]
    if not all(plan.fits for plan in plans):
        hint = "a smaller batch_size with more accum, gc=true, or parallel=fsdp on more GPUs"
        lines.append(f"where it does not fit: {hint}")
    if first.gpus > 1:
        lines.append("communication between GPUs is not included in these times")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    # As it would resolve on a machine with that many GPUs.
    assumed = {"device": "cuda", "parallel": "none" if args.gpus == 1 else "ddp"}
    config = load_config(args.config, assumed | parse_set(args.set))
    rows = measurements(args.results or RESULTS)
    plans = [plan_run(config, gpu, gpus=args.gpus, price=args.price, rows=rows) for gpu in args.gpu]
    passes = unused = None
    try:
        corpus = find_corpus(config.data, seq_len=config.model.seq_len)
    except (ValueError, OSError) as error:
        # This need not be the machine that trains.
        data = [f"data: not on this machine, so its passes are not known: {error}"]
    else:
        passes = corpus.passes(config.steps * plans[0].tokens_per_step)
        over = "" if passes is None else f", {passes:,.{0 if passes >= 10 else 2}f} passes over it"
        data = [f"data: {corpus.name}{over}"]
        used, size = corpus.tokenizer.vocab_size, config.model.vocab_size
        unused = size - used
        if unused > 0:
            rest = f"{used:,} of the vocabulary's {size:,} rows: {unused:,} are unused"
            data.append(f"the tokenizer {corpus.tokenizer.name} uses {rest}")
    print(render(config, plans, data))
    print(json.dumps([asdict(plan) | {"passes": passes, "unused_vocabulary": unused} for plan in plans]))
    return 0
