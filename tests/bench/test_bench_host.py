"""`nsa bench host`: a row for attention and layer, NSA and dense, forward and both."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nsa import cli
from nsa.bench import host, runner
from nsa.results import read_rows


def test_rows_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU by the clock of the CPU, which stops after a few calls."""
    monkeypatch.setattr(runner, "MEASURE_MS", 0.0)
    monkeypatch.setattr(host, "host_clock", lambda *args: pytest.fail("210 calls of each pass"))
    out = tmp_path / "host.csv"
    flags = ["--heads", "4/2/16", "--lengths", "40", "--out", str(out), "--commit", "abc"]
    assert cli.main(["bench", "host", *flags]) == 0
    rows = read_rows(out)
    kinds = {(row.suite, row.op, row.impl, row.mode) for row in rows}
    implementations = ("nsa-auto", "dense-sdpa")
    assert kinds == {
        ("host", op, impl, mode)
        for op in ("attention", "layer")
        for impl in implementations
        for mode in ("fwd", "fwd+bwd")
    }
    assert all(row.p50_ms > 0 and row.S == 40 and row.Hq == 4 for row in rows)


def test_a_length_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "host", "--lengths", "0"]) == 2
    assert "--lengths" in capsys.readouterr().err


def test_without_a_gpu_the_default_shape_is_small() -> None:
    args = argparse.Namespace(heads=None, lengths=None, batch_size=1, backend="auto")
    given = SimpleNamespace(device="cpu", dtype=torch.float32)
    task = next(host.tasks(args, given))  # type: ignore[arg-type]
    assert (task.shape.length, task.shape.n_heads) == (512, 4)
