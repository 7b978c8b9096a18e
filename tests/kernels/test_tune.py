"""The tuner's bench, in Triton's interpreter or on a GPU: every kernel runs on it, by a tile that it is given."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

# First: it skips this file where kernels cannot run.
from interpreted import DEVICE  # isort: skip

from nsa.backends.triton import combine, tuning
from nsa.backends.triton.tuning import KERNELS, Key
from nsa.bench.attention import AttentionShape
from nsa.bench.kernels import Workbench, is_used, tile_in_use
from nsa.bench.tune import Candidates, Tuner, error_ratio
from nsa.progress import Lines

GPU = (9, 0)
SHAPE = AttentionShape(batch=1, length=40, n_heads=6, n_groups=2, head_dim=16)


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return Workbench(SHAPE, 0.0, DEVICE, torch.float16)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if is_used(kernel, SHAPE)])
def test_every_kernel_runs_by_the_tile_in_use(kernel: str, bench: Workbench) -> None:
    tile = tile_in_use(kernel, SHAPE, GPU, tuning.read_tuned(tuning.PACKAGED))
    results = bench.run(kernel, tile)
    assert error_ratio(results, results) == 0


def test_a_kernel_is_tuned_into_a_file(bench: Workbench, tmp_path: Path) -> None:
    kernel, path = "combine-forward", tmp_path / "tiles.json"
    trial = Candidates(kernel, SHAPE, (combine.CombineTile(256, 4), combine.CombineTile(64, 4)))
    tuner = Tuner(path, GPU, {}, Lines(2), lambda call: [float(call.args[-1].elements)] * 5)
    outcomes = tuner.measure(trial, partial(bench.run, kernel))
    assert [outcome.ms for outcome in outcomes] == [256.0, 64.0]
    assert tuning.read_tuned(path).tiles[Key(GPU, kernel, "half", 64)].tile == {"elements": 64, "num_warps": 4}


def test_an_unknown_kernel_is_an_error(bench: Workbench) -> None:
    with pytest.raises(ValueError, match="kernel is 'score'; accepted: compressed-forward"):
        bench.run("score", None)
