"""The trainer on a GPU: graphs change no result, no step waits for the device, packed documents train."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.model import chunked_cross_entropy
from nsa.settings import Settings
from nsa.train import Trainer, load_config
from nsa.train.step import wait_asleep


def trainer(out: Path, **changes: Any) -> Trainer:
    settings = {"data.source": "synthetic", "device": "cuda", "out": str(out), "sample_tokens": 8, **changes}
    return Trainer(load_config("tiny", settings, env=Settings()))


def losses(run: Trainer, steps: int) -> list[float]:
    results = [run.step(step, run.fetch()) for step in range(steps)]
    run.loader.close()
    return torch.stack([result.loss for result in results]).tolist()


@pytest.mark.parametrize("accum", [1, 3])
def test_graphs_change_no_result(accum: int, tmp_path: Path) -> None:
    """More than one batch a step is where a replay would overwrite the gradients of the batch before."""
    plain = losses(trainer(tmp_path / "plain", accum=accum, compile=False), 8)
    graphs = trainer(tmp_path / "graphs", accum=accum)
    assert graphs.config.cuda_graphs
    assert losses(graphs, 8) == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("changes", [{"compile": False}, {}, {"accum": 2}, {"data.pack": True}])
def test_no_step_waits_for_the_device(changes: dict[str, Any], tmp_path: Path) -> None:
    run = trainer(tmp_path, **changes)
    for _ in range(4):
        run.advance(run.fetch())
    batches = run.fetch()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.advance(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    run.pending.poll()
    assert not run.pending.running, "batches of finished steps are held"
    assert [outcome.step for outcome in run.pending.wait()] == [0, 1, 2, 3, 4]
    run.loader.close()


@pytest.mark.parametrize("target", [-1, 50, 63, 2**40])
def test_a_target_outside_the_vocabulary_is_loud_without_a_wait(target: int) -> None:
    x, weight = (torch.randn(n, 16, device="cuda", requires_grad=True) for n in (3, 50))
    targets = torch.tensor([1, target, -100], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = chunked_cross_entropy(x, weight, targets)
        grads = torch.autograd.grad(loss, (x, weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isnan()
    assert all(grad.isnan().all() for grad in grads)
    with pytest.raises(ValueError, match=rf"targets is \[{target}\]"):
        chunked_cross_entropy(x, weight, targets, strict=True)


def test_waiting_for_the_gpu_uses_little_cpu_time() -> None:
    x = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(40):
        x @ x
    began, used = time.perf_counter(), time.process_time()
    wait_asleep(x.device)
    seconds = time.perf_counter() - began
    assert seconds > 0.2
    assert time.process_time() - used < 0.3 * seconds


def test_a_whole_run_with_everything_on(tmp_path: Path) -> None:
    every = {f"{name}_every": 4 for name in ("log", "eval", "sample", "stats", "save")}
    summary = trainer(tmp_path, steps=12, **every).train()
    assert summary is not None
    assert summary.fallbacks == {}
    assert summary.skipped == 0
    again = trainer(tmp_path, steps=16, **every).train()
    assert again is not None
    assert again.loss_start == summary.loss_start


def test_a_step_that_is_not_finite_changes_nothing_in_graphs(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    for step in range(4):
        run.step(step, run.fetch())
    before = [p.detach().clone() for p in run.model.parameters()]
    with torch.no_grad():
        run.model.norm.weight.mul_(float("nan"))
    assert run.step(4, run.fetch()).skipped.item() == 1
    for old, (name, new) in zip(before, run.model.named_parameters(), strict=True):
        assert name == "norm.weight" or torch.equal(old, new), name
    run.loader.close()
