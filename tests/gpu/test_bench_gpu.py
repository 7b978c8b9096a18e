"""What a benchmark compares and counts on a GPU: finished inputs, and the memory of one call."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from nsa import cli
from nsa.bench.attention import AttentionShape
from nsa.bench.host import count_launches
from nsa.bench.runner import CudaClock, Pass, Runner, Task, forward_and_backward
from nsa.results import read_rows

SHAPE = AttentionShape(1, 64, 1, 1, 16)
CYCLES = 10**8
MIB = 1 << 20


def run(task: Iterator[Task], out: Path) -> int:
    runner = Runner(CudaClock(measure_ms=1.0), torch.float32, "cuda", argparse.Namespace(out=out, commit="abc"))
    return runner.run(task)


def test_a_task_starts_when_its_inputs_are_written(tmp_path: Path) -> None:
    def tasks() -> Iterator[Task]:
        x = torch.zeros(MIB, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        x.fill_(1.0)
        passes = partial(forward_and_backward, x.sum, ())
        yield Task("attention", "sum", "torch", SHAPE, passes, lambda: float(x.sum() != MIB) * 2)

    assert run(tasks(), tmp_path / "rows.csv") == 0


def test_the_peak_of_a_backward_pass_is_that_of_one_call(tmp_path: Path) -> None:
    def tasks() -> Iterator[Task]:
        x = torch.ones(64 * MIB, device="cuda", requires_grad=True)

        def passes() -> Iterator[Pass]:
            return forward_and_backward(lambda: x * 2.0, (x,))

        yield Task("attention", "double", "torch", SHAPE, passes, lambda: 0.0)

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() / 2**30
    run(tasks(), tmp_path / "rows.csv")
    peak = {row.mode: row.peak_gib for row in read_rows(tmp_path / "rows.csv")}
    # x, the output, and of the backward pass the upstream gradient and its own result.
    assert peak == pytest.approx({"fwd": before + 0.5, "bwd": before + 1.0}, abs=0.05)


def test_the_peak_of_a_task_is_the_same_after_others(tmp_path: Path) -> None:
    def tasks() -> Iterator[Task]:
        for _ in range(4):
            x = torch.ones(1024, 1024, device="cuda")
            passes = partial(forward_and_backward, lambda x=x: x @ x, ())
            yield Task("attention", "matmul", "torch", SHAPE, passes, lambda: 0.0)

    run(tasks(), tmp_path / "rows.csv")
    _, *peaks = [row.peak_gib for row in read_rows(tmp_path / "rows.csv")]
    assert peaks == pytest.approx([peaks[0]] * 3, abs=0.005)


def test_only_launches_are_counted() -> None:
    """Not the ranges of `record_function`, which a profile shows on the GPU too."""
    x = torch.ones(8, device="cuda")

    def call() -> None:
        with torch.profiler.record_function("nsa::range"):
            x.add_(1)
            x.mul_(2)

    assert count_launches(call) == 2


def test_every_kind_of_decode_step_gets_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    shape = "--heads 4/1/64 --lengths 2048 --gib 0.001 --tokens 1 4"
    assert cli.main(["bench", "decode", *shape.split(), "--out", str(out)]) == 0
    rows = read_rows(out)
    assert {row.mode for row in rows} >= {"decode-1", "decode-4"}
    assert all(row.p50_ms > 0 for row in rows)
