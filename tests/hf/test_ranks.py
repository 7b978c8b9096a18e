"""Two ranks compute what one does: logits, every gradient, and what is generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Fork, rank_variables
from hf_models import SELECT, logits_of, prompt, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import __version__ as installed

FIRST = (5, 20)  # whose tensor parallelism runs on CPUs as below


def test_more_ranks_than_groups_are_refused_by_number() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        attention = tiny_model(num_attention_heads=8).model.layers[0].self_attn
        mesh = init_device_mesh("cpu", (4,))
        own = DTensor.from_local(attention.q_proj.weight[: 2 * 16].detach(), mesh, [Shard(0)])
        attention.q_proj.weight = torch.nn.Parameter(own)
        with pytest.raises(ValueError, match=r"tensor-parallel size is 4; accepted: .*num_key_value_heads = 2"):
            attention(torch.randn(1, 5, 32))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(tuple(map(int, installed.split(".")[:2])) < FIRST, reason="an earlier interface of transformers")
@pytest.mark.parametrize(("kind", "nsa"), [("tp", {}), ("tp", SELECT), ("fsdp", {})], ids=["tp", "tp-select", "fsdp"])
def test_two_ranks_compute_what_one_does(tmp_path: Path, kind: str, nsa: dict[str, Any]) -> None:
    model, tokens = tiny_model(nsa, tie_word_embeddings=False), prompt(40)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokens.json").write_text(json.dumps(tokens.tolist()))
    # Earlier interfaces have not what it imports.
    from two_ranks import main

    out = tmp_path / "out.json"
    ranks = [
        Fork(lambda: main(tmp_path, out, kind), tmp_path / f"printed-{i}", **given)
        for i, given in enumerate(rank_variables(2))
    ]
    for status, printed in [rank.wait() for rank in ranks]:
        assert status == 0, printed[-3000:]
    found = {name: torch.tensor(x) for name, x in json.loads(out.read_text()).items()}
    torch.testing.assert_close(found["logits"], logits_of(model, tokens), atol=1e-4, rtol=1e-4)
    if kind == "tp":
        expected = model.generate(tokens, max_new_tokens=8, do_sample=False).tolist()
        assert [found[cache].tolist() for cache in ("dynamic", "static")] == [expected] * 2
    model.train()(tokens, labels=tokens).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, atol=1e-4, rtol=1e-3, msg=name)
