"""What the study trains: its scales, and the arms with what each changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nsa.model import LM, LMConfig
from nsa.train.config import TrainConfig, load_config


@dataclass(frozen=True)
class Scale:
    """The sizes of a study."""

    name: str
    config: str
    seq_len: int
    batch_size: int
    steps: int
    lr: float
    other_lr: float
    # Of the extensions.
    extend_lr: float
    # Of the BPE; 0: bytes.
    vocab: int
    # Characters of the corpora: for the arms, for each extension.
    chars: int
    long_chars: int
    # Of recall in corpora of either kind, and of dense documents in that.
    recall_share: tuple[float, float]
    dense_share: tuple[float, float]
    # Sequence length and steps of each extension; each starts from the one before.
    extend: dict[int, int]
    # Of needle and recall prompts after the extension, and of needle prompts before it.
    lengths: tuple[int, ...]
    short_lengths: tuple[int, ...]
    samples: int
    depths: int
    keys: tuple[int, ...]
    hops: tuple[int, ...]
    # Multiple of the MLP's hidden size.
    round_to: int
    # Most tokens of an evaluation's forward pass.
    chunk: int
    # Commands at once; and the seconds that the processes that measure may take to compile.
    slots: int = 1
    warm_s: float = 0.0
    sets: dict[str, Any] = field(default_factory=dict)


FULL = Scale(
    name="125m",
    config="125m",
    seq_len=8192,
    batch_size=4,
    steps=900,
    lr=1e-3,
    other_lr=2e-3,
    extend_lr=1e-4,
    vocab=16384,
    chars=120_000_000,
    long_chars=16_000_000,
    recall_share=(0.6, 0.8),
    dense_share=(0.5, 0.25),
    extend={32768: 120, 65536: 60},
    lengths=(4096, 8192, 16384, 32768, 65536),
    short_lengths=(1024, 2048, 4096, 8192),
    samples=4,
    depths=11,
    keys=(1, 4, 16, 64),
    hops=(1, 2, 3, 4),
    round_to=64,
    chunk=131072,
    # Room for longer contexts than the arms are trained on.
    sets={"model.attn.rope_theta": 500_000.0, "eval_batches": 8},
)

SCALES = {
    "125m": FULL,
    "26m": replace(
        FULL,
        name="26m",
        seq_len=2048,
        batch_size=4,
        steps=2500,
        lr=1e-3,
        other_lr=2e-3,
        extend_lr=8e-4,
        vocab=8192,
        chars=60_000_000,
        extend={8192: 600, 32768: 200, 65536: 80},
        short_lengths=(512, 1024, 2048),
        round_to=32,
        slots=4,
        warm_s=90.0,
        sets={
            "model.n_layers": 6,
            "model.hidden": 1408,
            "model.attn.dim": 512,
            "model.attn.n_heads": 8,
            "model.attn.rope_theta": 500_000.0,
            "eval_batches": 16,
            "sample_tokens": 1,
        },
    ),
    "tiny": Scale(
        name="tiny",
        config="tiny",
        seq_len=128,
        batch_size=2,
        steps=4,
        lr=3e-3,
        other_lr=6e-3,
        extend_lr=3e-4,
        vocab=0,
        chars=200_000,
        long_chars=100_000,
        recall_share=(0.6, 0.8),
        dense_share=(0.5, 0.25),
        extend={256: 2, 512: 2},
        lengths=(256, 384),
        short_lengths=(128,),
        samples=1,
        depths=2,
        keys=(1, 2),
        hops=(2,),
        round_to=8,
        chunk=256,
        slots=2,
        warm_s=60.0,
        sets={"eval_batches": 1, "sample_tokens": 1, "model.n_layers": 1, "model.attn.w": 32, "model.attn.n_sel": 3},
    ),
}


@dataclass(frozen=True)
class Arm:
    """One training run: what it changes, in dotted keys."""

    name: str
    sets: dict[str, Any]
    steps: int
    seq_len: int
    batch_size: int
    data: str = "base"
    # The arm whose parameters it starts from.
    start: str | None = None


def make_arms(scale: Scale) -> list[Arm]:
    """The arms in the order of their importance."""
    base = load_config(scale.config, {"device": "cpu", "compile": False, **model_sets(scale)}).model
    twin = with_parameters_of(base, replace(base, attention="dense"), scale.round_to)
    equal_parameters = {"model.hidden": twin.hidden}
    dense = {"model.attention": "dense", **equal_parameters}
    # Selection then scores means of the keys (before RoPE) that it reads.
    one_kv = replace(base, attn=replace(base.attn, share_kv=True, phi="mean"))
    hidden = with_parameters_of(base, one_kv, scale.round_to).hidden
    shared = {"model.attn.share_kv": True, "model.attn.phi": "mean", "model.hidden": hidden}
    open_gates = {"model.attn.gate_bias": 2.0}
    changes: dict[str, dict[str, Any]] = {
        "nsa": {},
        "dense": dense,
        "dense-flops": dense,
        "sliding": {"model.attention": "sliding", "model.window": base.attn.w, **equal_parameters},
        **{f"nsa-no-{branch}": {"model.attn.drop_branch": branch} for branch in ("cmp", "sel", "win")},
        "nsa-gate-bias": open_gates,
        "nsa-branch-norm": {"model.attn.branch_norm": True},
        "nsa-gate-softmax": {"model.attn.gate": "softmax"},
        "nsa-gate-no-decay": {"gate_decay": False},
        "nsa-shared": shared,
        "nsa-shared-no-cmp": {**shared, "model.attn.drop_branch": "cmp"},
        "nsa-shared-gate-bias": {**shared, **open_gates},
        "nsa-lr": {"lr": scale.other_lr},
        "dense-lr": {"lr": scale.other_lr, **dense},
        "nsa-seed": {"seed": 1},
        "dense-seed": {"seed": 1, **dense},
        "nsa-gate-bias-seed": {"seed": 1, **open_gates},
        "nsa-gate-bias-seed-2": {"seed": 2, **open_gates},
        "nsa-double": {},
        "dense-double": dense,
    }
    steps = {
        "dense-flops": round(scale.steps * flops_per_token(base) / flops_per_token(twin)),
        "nsa-double": 2 * scale.steps,
        "dense-double": 2 * scale.steps,
    }
    return [
        Arm(name, sets, steps.get(name, scale.steps), scale.seq_len, scale.batch_size) for name, sets in changes.items()
    ]


def model_sets(scale: Scale) -> dict[str, Any]:
    vocab = {"model.vocab_size": scale.vocab or 256, "model.seq_len": scale.seq_len}
    return {**vocab, **{key: value for key, value in scale.sets.items() if key.startswith("model.")}}


def with_parameters_of(model: LMConfig, other: LMConfig, round_to: int) -> LMConfig:
    """`other` with as many parameters as `model`, by the MLP's hidden size."""
    per_unit = (parameters(replace(other, hidden=other.hidden + round_to)) - parameters(other)) / round_to
    hidden = other.hidden + (parameters(model) - parameters(other)) / per_unit
    return replace(other, hidden=max(round_to, round(hidden / round_to) * round_to))


def parameters(config: LMConfig) -> int:
    with torch.device("meta"):
        return sum(LM(config).parameter_counts().values())


def flops_per_token(config: LMConfig) -> float:
    """Mean FLOPs per token of training at the config's length."""
    with torch.device("meta"):
        return LM(config).flops_per_token(config.seq_len)


def extensions(scale: Scale, arm: Arm) -> list[Arm]:
    """Runs that continue an arm at longer and longer contexts, with a batch of one."""
    made, start = [], arm.name
    for seq_len, steps in scale.extend.items():
        name = extended_name(arm.name, seq_len)
        data = extended_name("long", seq_len)
        made.append(Arm(name, {**arm.sets, "lr": scale.extend_lr}, steps, seq_len, 1, data=data, start=start))
        start = name
    return made


def train_values(scale: Scale, arm: Arm) -> dict[str, Any]:
    """The config of an arm, in dotted keys."""
    every = max(1, arm.steps // (10 if arm.start is None else 4))
    # There is less text for the validation of long sequences.
    start = (
        {} if arm.start is None else {"init": f"runs/{arm.start}", "eval_batches": min(4, scale.sets["eval_batches"])}
    )
    # The GPU may be shared.
    speed = {"min_tokens_per_s": 0} if scale.slots > 1 else {}
    return {
        **model_sets(scale),
        "model.seq_len": arm.seq_len,
        # The default was changed after these arms, because of them.
        "model.attn.gate_bias": 0.0,
        **scale.sets,
        "eval_every": every,
        "stats_every": max(1, arm.steps // 5),
        "log_every": max(1, min(20, every)),
        "sample_every": 0,
        "save_every": 0,
        "warmup": max(1, arm.steps // 20),
        "lr": scale.lr,
        **speed,
        **arm.sets,
        **start,
    }


def arm_config(scale: Scale, arm: Arm) -> TrainConfig:
    """The config of an arm's training step, on this machine."""
    sizes = {"steps": arm.steps, "batch_size": arm.batch_size}
    return load_config(scale.config, {**train_values(scale, arm), **sizes})


def shape_of(arm: Arm) -> tuple[Any, ...]:
    """Arms of the same shape take the same time per step."""
    model = {
        key: value for key, value in arm.sets.items() if key.startswith("model.") and key != "model.attn.gate_bias"
    }
    return (*sorted(model.items(), key=str), arm.seq_len, arm.batch_size)


def extended_name(arm: str, seq_len: int) -> str:
    return f"{arm}-{seq_len // 1024}k" if seq_len >= 1024 else f"{arm}-{seq_len}"
