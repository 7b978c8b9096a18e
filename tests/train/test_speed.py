"""How fast a run should be here: what a step is compared with, and the floor below which a run stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_rows import ROW
from torch.utils._python_dispatch import TorchDispatchMode
from training import small_run

from nsa.results import Row
from nsa.train import TrainConfig, plan, preflight
from nsa.train.config import load_config
from nsa.train.loop import Trainer
from nsa.train.plan import plan_run

GRAPHS = replace(ROW, impl="nsa-triton-graphs", tokens_per_s=200_000.0)


def config(**overrides: object) -> TrainConfig:
    given = {"device": "cuda", "parallel": "none"} | {name.replace("__", "."): x for name, x in overrides.items()}
    return load_config("125m", given)


def on_gpu(monkeypatch: pytest.MonkeyPatch, name: str, *rows: Row) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(plan, "measurements", lambda folder: list(rows))


def test_the_floor_is_a_tenth_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, "NVIDIA H200", GRAPHS)
    assert preflight.min_tokens_per_s(config()) == pytest.approx(20_000)
    # A plan that is scaled, or assumed from another GPU, rests on a measurement too.
    scaled = plan_run(config(batch_size=1), "H200", rows=[GRAPHS])
    assert preflight.min_tokens_per_s(config(batch_size=1)) == pytest.approx(scaled.tokens_per_s / 10)
    on_gpu(monkeypatch, "NVIDIA A100-SXM4-80GB", GRAPHS)
    assumed = plan_run(config(), "A100", rows=[GRAPHS])
    assert preflight.min_tokens_per_s(config()) == pytest.approx(assumed.tokens_per_s / 10)


@pytest.mark.parametrize("least", [0.0, 123.0])
def test_a_floor_that_is_given_is_taken(least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, "NVIDIA H200", GRAPHS)
    assert preflight.min_tokens_per_s(config(min_tokens_per_s=least)) == least


def test_without_a_measurement_there_is_no_floor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_gpu(monkeypatch, "NVIDIA H200", GRAPHS)
    assert preflight.min_tokens_per_s(small_run(tmp_path)) == 0, "a CPU"
    assert preflight.min_tokens_per_s(config(dtype="float32")) == 0
    assert preflight.min_tokens_per_s(config(model__attention="bigbird")) == 0
    on_gpu(monkeypatch, "NVIDIA GeForce GT 710", GRAPHS)
    assert preflight.min_tokens_per_s(config()) == 0


def test_parity_has_no_floor_of_the_kernels(monkeypatch: pytest.MonkeyPatch, environment: object) -> None:
    on_gpu(monkeypatch, "NVIDIA H200", GRAPHS)
    assert callable(environment)
    environment(NSA_FORCE_PARITY="1")
    assert preflight.min_tokens_per_s(config()) == 0


def test_committed_results_give_the_125m_model_a_minimum_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert 10_000 < preflight.min_tokens_per_s(config()) < 100_000


def test_the_trainer_holds_a_run_to_the_floor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("nsa.train.components.min_tokens_per_s", lambda config, ranks: 1e9)
    with pytest.raises(RuntimeError, match=r"1,000,000,000.*--min-tokens-per-s 0"):
        Trainer(small_run(tmp_path, kind="nsa")).train()


def test_a_step_is_compared_with_the_plan() -> None:
    found = plan_run(config(accum=4), "H200", rows=[GRAPHS])
    batch = found.step_s / 4
    note, problem = preflight.compare_step(config(accum=4), found, 3 * batch)
    assert problem is None
    assert f"{batch * 1e3:.3g} ms" in note
    _, problem = preflight.compare_step(config(accum=4), found, 11 * batch)
    assert problem is not None
    assert "11 times" in problem
    # An estimate that rests on no measurement blames nothing, and neither does no plan.
    guess = plan_run(config(), "H200")
    assert preflight.compare_step(config(), guess, 100 * guess.step_s)[1] is None
    assert preflight.compare_step(config(), None, 100.0)[1] is None


class SeenThreads(TorchDispatchMode):
    """The number of threads at each matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


def test_the_cpu_is_timed_on_all_threads(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with SeenThreads() as found:
            preflight.cpu_step_s(small_run(tmp_path))
    finally:
        torch.set_num_threads(threads)
    assert found.seen == {3}


def test_twice_the_tokens_take_twice_the_time_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "matmul_times", lambda _: [0.5, 0.25])
    one, two = (preflight.cpu_step_s(small_run(tmp_path, batch_size=n)) for n in (2, 4))
    assert two == pytest.approx(2 * one)
    assert one > 0
