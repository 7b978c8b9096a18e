"""One rank of a model that is divided by tensor parallelism or FSDP; run by tests/hf/test_ranks.py in two processes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import nsa.hf  # noqa: F401


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def main(folder: Path, out: Path, kind: str) -> int:
    config = DistributedConfig(tp_size=2) if kind == "tp" else DistributedConfig(fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    tokens = torch.tensor(json.loads((folder / "tokens.json").read_text()))
    results = {}
    with torch.no_grad():
        results["logits"] = whole(model(tokens).logits)
    if kind == "tp":
        for cache in ("dynamic", "static"):
            options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
            results[cache] = model.generate(tokens, **options)
    model.train()
    model(tokens, labels=tokens).loss.backward()
    results |= {name: whole(p.grad) for name, p in model.named_parameters()}
    if torch.distributed.get_rank() == 0:
        # No pickle.
        out.write_text(json.dumps({name: x.tolist() for name, x in results.items()}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0
