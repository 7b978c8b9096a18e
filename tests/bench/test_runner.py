"""The runner times what is right: a wrong result, too little memory or a missing package leaves one out."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, bench, cli, functional, ops, reference
from nsa.bench import attention, gate, peers
from nsa.bench.attention import AttentionShape, Inputs
from nsa.bench.runner import CudaClock, Pass, Runner, Task, Timing
from nsa.reference.visibility import sees_selected
from nsa.results import read_rows
from nsa.sequences import Compressed, Pooling, Selected, Selection, Sliding, hyperparameters

SHAPE = AttentionShape(1, 300, 4, 2, 8)


def parse(*words: str) -> argparse.Namespace:
    return cli.parser_of("bench").parse_args(list(words))


def one_call(each: Pass) -> Timing:
    """Calls a pass once."""
    each.call()
    return [1.0, 2.0, 3.0], 2**30


def task(impl: str, error: Callable[[], float], call: Callable[[], object] = lambda: None) -> Task:
    def passes() -> Iterator[Pass]:
        yield Pass("fwd", call, tokens=4)

    return Task("attention", "attention", impl, SHAPE, passes, error)


def out_of_memory() -> float:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.\nSee the manual")


def test_only_what_is_right_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []
    out = tmp_path / "rows.csv"
    runner = Runner(one_call, torch.float32, "cpu", argparse.Namespace(out=out, commit="abc"))
    tasks = [
        task("right", lambda: 1.0, lambda: called.append("right")),
        task("wrong", lambda: 1.5, lambda: called.append("wrong")),
        task("not-a-number", lambda: float("nan"), lambda: called.append("nan")),
        task("large", out_of_memory, lambda: called.append("large")),
    ]
    assert runner.run(tasks) == 1
    assert called == ["right"]
    (row,) = read_rows(out)
    assert (row.impl, row.p50_ms, row.peak_gib, row.tokens_per_s, row.commit) == ("right", 2, 1, 2000, "abc")
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    notes = {what.split(",")[0]: why for what, why in summary["left_out"].items()}
    assert "1.5 times" in notes["wrong"]
    assert "nan times" in notes["not-a-number"]
    assert "7.00 GiB." in notes["large"]


def test_too_little_memory_is_no_error() -> None:
    runner = Runner(one_call, torch.float32, "cpu", argparse.Namespace(out=None, commit=None))
    assert runner.run([task("large", out_of_memory)]) == 0


def test_rows_of_replayed_graphs_are_named_so() -> None:
    clock = attention.clock(argparse.Namespace(cuda_graphs=True), "cuda")
    assert isinstance(clock, CudaClock)
    assert clock.graphs
    runner = Runner(clock, torch.float32, "cpu", argparse.Namespace(out=None, commit="abc"))
    runner.record(task("nsa-triton", lambda: 0.0), Pass("fwd", lambda: None), [1.0], None)
    assert [row.impl for row in runner.rows] == ["nsa-triton-graphs"]


# The gate.

STAGES = {
    "compress_mean": Pooling,
    "compressed_attention": Compressed,
    "select_blocks": Selection,
    "selected_attention": Selected,
    "sliding_attention": Sliding,
}
SMALL = {"l": 16, "d": 8, "l_sel": 32, "n_sel": 4, "n_init": 1, "n_local": 1, "w": 32}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> NSAConfig:
    """Hyperparameters with which 300 tokens have more blocks than a query selects."""
    heads: dict[str, Any] = {"dim": 32, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8, "phi": "mean"}
    monkeypatch.setattr(AttentionShape, "config", lambda self, backend: NSAConfig(**heads, **SMALL, backend=backend))
    return SHAPE.config("sdpa")


def all_tasks() -> list[Task]:
    inputs = Inputs.of(SHAPE, torch.float32, "cpu", 0.0)
    whole = [attention.attention_task("attention", impl, inputs, SHAPE) for impl in ("nsa-sdpa", "dense-sdpa")]
    return [*whole, *attention.branch_tasks("attention", "nsa-sdpa", inputs, SHAPE)]


@pytest.mark.usefixtures("small")
def test_our_own_results_pass_their_gates() -> None:
    errors = {(task.op, task.impl): task.error() for task in all_tasks()}
    assert len(errors) == 8
    assert all(error <= 1 for error in errors.values()), errors


@pytest.mark.usefixtures("small")
def test_stages_take_the_hyperparameters_of_their_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the branch's fields: here their values are those of other fields of the config."""
    fields = {"block": "w", "stride": "n_sel", "select_block": "l", "n_select": "d", "window": "n_sel"}
    monkeypatch.setattr(functional, "PAPER_NAMES", fields)
    given: dict[str, dict[str, Any]] = {}

    def record(name: str, function: Callable[..., Any]) -> None:
        def recorded(*args: Any, backend: str, strict: bool = False, **values: Any) -> Any:
            given[name] = values
            return function(*args, **values, backend=backend, strict=strict)

        monkeypatch.setattr(ops, name, recorded)

    for name in STAGES:
        record(name, getattr(ops, name))
    for each in attention.branch_tasks("attention", "nsa-sdpa", Inputs.of(SHAPE, torch.float32, "cpu", 0.0), SHAPE):
        next(iter(each.passes())).call()
    assert given == {name: {x: SMALL[fields.get(x, x)] for x in hyperparameters(kind)} for name, kind in STAGES.items()}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("op", ["compress_mean", "compressed_attention", "selected_attention", "sliding_attention"])
def test_a_wrong_gradient_does_not_pass(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is right: only what flows back is doubled."""
    right = getattr(ops, op)

    def doubled(x: Tensor, *rest: Tensor, **options: Any) -> Any:
        return right(2 * x - x.detach(), *rest, **options)

    monkeypatch.setattr(ops, op, doubled)
    name = op.removesuffix("_attention").removesuffix("_mean")
    (found,) = [task for task in all_tasks() if task.op == name]
    assert found.error() > 1


def test_a_selection_may_only_exchange_what_rounding_may(small: NSAConfig) -> None:
    inputs = Inputs.of(SHAPE, torch.float32, "cpu", 0.0)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    folded = (q, *(ops.compress_mean(x, block=small.l, stride=small.d) for x in (k, v)))
    right = gate.selected_indices(small, *folded)
    assert gate.selection_error(small, right, *folded) <= 1
    last = right[0, -1, 0].tolist()
    # Another block than the best, a forced block missing, one block twice, one too few.
    unused = next(block for block in range(1, 8) if block not in last)
    best = next(block for block in last if block not in (0, 9))
    for wrong in (
        sorted({*last, unused} - {best}),
        sorted({*last, unused} - {0}),
        sorted([*last[:-1], last[0]]),
        [*last[:-1], -1],
    ):
        changed = right.clone()
        changed[0, -1, 0] = torch.tensor(wrong)
        assert gate.selection_error(small, changed, *folded) > 1


# Other implementations.


@pytest.mark.parametrize("length", [100, 128, 300])
def test_block_masks_hold_what_queries_see(length: int, small: NSAConfig) -> None:
    causal = peers.causal_mask(length, torch.device("cpu")).to_dense()[0, 0].bool()
    assert torch.equal(causal, torch.ones_like(causal).tril())
    shape = AttentionShape(2, length, 4, 2, 8)
    inputs = Inputs.of(shape, torch.float32, "cpu", 0.0)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    folded = (q, *(ops.compress_mean(x, block=small.l, stride=small.d) for x in (k, v)))
    indices = gate.selected_indices(small, *folded)
    mask = peers.selected_mask(indices, 4, small.l_sel)
    visible = sees_selected(q, length, indices, small.l_sel, None, None).transpose(1, 2)
    n = mask.to_dense().shape[-1]
    blocks = torch.zeros(2, 2, n * 128, n * 128, dtype=torch.bool)
    blocks[..., :length, :length] = visible
    blocks = blocks.unflatten(2, (n, 128)).unflatten(-1, (n, 128)).any(dim=-1).any(dim=3)
    assert torch.equal(mask.to_dense().bool(), blocks.repeat_interleave(2, dim=1))
    # Eager FlexAttention applies the mask alone.
    o = peers.flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True).transpose(1, 2)
    expected = gate.expect_selected(small, indices, (q, k, v), slice(0, length))
    torch.testing.assert_close(o, expected)


def stand_in(monkeypatch: pytest.MonkeyPatch, parallel_nsa: Callable[..., Tensor]) -> None:
    """A package `fla` whose NSA is this function."""
    for name in ("fla", "fla.ops", "fla.ops.nsa", "flash_attn"):
        module = ModuleType(name)
        module.__spec__ = object()  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["fla.ops.nsa"].parallel_nsa = parallel_nsa  # type: ignore[attr-defined]


def by_reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """flash-linear-attention's interface: gates of its own, blocks that are compressed and selected alike."""
    size, everything = options["block_size"], slice(0, q.shape[1])
    heads: dict[str, Any] = {"dim": 512, "n_heads": q.shape[2], "n_kv_groups": k.shape[2], "d_k": 8, "d_v": 8}
    config = NSAConfig(
        **heads, l=size, d=size, l_sel=size, n_sel=options["block_counts"], w=options.get("window_size", 1)
    )
    if "block_indices" in options:
        return gate.expect_selected(config, options["block_indices"].int(), (q, k, v), everything)
    folded = [reference.compress_mean(x, block=size, stride=size) for x in (k, v)]
    indices = gate.selected_indices(config, q.detach(), *(x.detach() for x in folded))
    gates = torch.stack([options[name] for name in ("g_cmp", "g_slc", "g_swa")], dim=-1)
    return gate.expect_nsa(config, indices, (q, *folded, k, v, k, v, gates), everything)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_another_nsa_is_timed_if_it_is_right(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, lambda *args, **options: by_reference(*args, **options) * (1.01 if wrong else 1))
    shape = AttentionShape(1, 1300, 16, 1, 8)
    assert peers.missing("fla-nsa", "cpu", shape) is None
    inputs = Inputs.of(shape, torch.float32, "cpu", 0.0)
    for found in (
        attention.attention_task("attention", "fla-nsa", inputs, shape),
        attention.selected_peer("attention", "fla-selected", inputs, shape),
    ):
        assert (found.error() > 1) == wrong


def test_what_is_missing_is_said_and_the_rest_is_done(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    out = tmp_path / "rows.csv"
    words = ["attention", "--heads", "2/1/8", "--lengths", "40", "--out", str(out)]
    assert bench.run(parse(*words)) == 0
    output = capsys.readouterr().out
    for name in ("nsa-triton", "dense-fa2", "dense-cudnn", "dense-flex"):
        assert f"left out: {name}: needs a CUDA GPU" in output
    assert re.search(r"left out: fla-nsa: .*\bflash-linear-attention\b", output)
    rows = read_rows(out)
    assert {(row.impl, row.mode) for row in rows} == {
        (i, m) for i in ("nsa-sdpa", "dense-sdpa") for m in ("fwd", "bwd")
    }
    with pytest.raises(ValueError, match=r"--impl is 'dense-cudnn'.*CUDA GPU"):
        bench.run(parse(*words, "--impl", "dense-cudnn"))


def test_heads_per_group_decide_whether_fla_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, by_reference)
    reasons = [peers.missing("fla-selected", "cpu", AttentionShape(1, 8, h, 1, 8)) for h in (8, 16, 24, 32)]
    assert [reason is None for reason in reasons] == [False, True, False, True]


def test_the_cpu_suite_runs_the_suites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nsa.bench import cpu

    short = (
        "branches --heads 2/1/8 --lengths 40",
        "train --preset tiny --seq-len 32 --batch-size 1 --steps 1 --warmup 1",
    )
    monkeypatch.setattr(cpu, "CPU_COMMANDS", short)
    out = tmp_path / "cpu.csv"
    assert bench.run(parse("cpu", "--out", str(out), "--commit", "abc")) == 0
    rows = read_rows(out)
    assert {row.op for row in rows} == {"compress", "compressed", "scores", "selected", "sliding", "combine", "train"}
    assert {(row.gpu, row.commit) for row in rows} == {("cpu", "abc")}


def test_the_words_of_the_cpu_suite_are_known() -> None:
    from nsa.bench import cpu

    for command in cpu.CPU_COMMANDS:
        parse(*command.split(), "--device", "cpu")


WITHOUT = """
import sys
from importlib.machinery import PathFinder


class Without:
    def find_spec(self, name, path=None, target=None):
        gone = name.split(".")[0] in ("triton", "matplotlib", "flash_attn", "fla")
        return None if gone else PathFinder.find_spec(name, path, target)


sys.meta_path[:] = [Without() if finder is PathFinder else finder for finder in sys.meta_path]
from nsa.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("branches --heads 2/1/8 --lengths 40 --device cpu", 0, "left out: nsa-triton"),
        ("flash --rows ROWS --plot plot.png", 0, "left out: plot.png: matplotlib"),
        ("plot --rows ROWS --out plot.png", 2, "nsa bench report"),
        ("report ROWS -o bench.html", 0, "wrote bench.html"),
        ("decode --heads 2/1/16", 2, " GPU"),
        ("tune", 2, "triton package"),
    ],
)
def test_without_optional_packages_the_rest_is_done(words: str, status: int, message: str, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    root = Path(__file__).resolve().parents[2]
    rows = str(root / "benchmarks" / "results" / "h200" / "flash.csv")
    command = [sys.executable, "-c", WITHOUT, "bench", *words.replace("ROWS", rows).split()]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == status, done.stderr
    assert message in done.stdout + done.stderr
