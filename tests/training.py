"""A run that takes a second, and what it wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsa import NSAConfig
from nsa.data import DataConfig
from nsa.model import LMConfig
from nsa.train import TrainConfig
from nsa.train.config import write_yaml

ATTN = NSAConfig(dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=8)


def small_run(out: Path, kind: str = "dense", **changes: Any) -> TrainConfig:
    """Six steps of a constant learning rate: what a step computes does not depend on how many follow."""
    model = LMConfig(vocab_size=256, n_layers=1, hidden=64, seq_len=32, attn=ATTN, attention=kind)
    config = TrainConfig(
        model=model,
        data=DataConfig(source="synthetic", prefetch=False),
        steps=6,
        batch_size=2,
        lr=1e-2,
        lr_floor=1.0,
        out=out,
        log_every=4,
        eval_batches=2,
        sample_tokens=8,
    )
    return replace(config, **changes)


def config_file(folder: Path, config: TrainConfig) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.yaml"
    write_yaml(path, config)
    return str(path)


def lines_of(out: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record.pop("kind") == kind]


def losses(out: Path) -> dict[int, float]:
    """By step. A step that was done again after a kill must have come out the same."""
    found: dict[int, float] = {}
    for record in lines_of(out, "step"):
        assert found.setdefault(record["step"], record["loss"]) == record["loss"], record
    return found
