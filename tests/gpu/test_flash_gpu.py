"""FlashAttention's real kernels on a GPU: they match the reference, never synchronize, copy no keys, do not crash.

Torch's own kernels are always tested; the flash_attn package where it is installed and `NSA_TEST_FA2=1`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from against_fp64 import assert_close_to_fp64, whole_results
from flash_shapes import backend_of, by_backend, check, run, seen_by
from helpers import Case, random_inputs
from torch import Tensor

from nsa import NSAAttention, NSAConfig, ops, settings
from nsa.backends import routing, stages
from nsa.backends.flash.libraries import find_libraries
from nsa.backends.gpu import gpu_family, gpu_name
from nsa.backends.measured_routes import MeasuredRoute
from nsa.backends.problem import Problem
from nsa.sequences import Saved, Upstream

LIBRARIES = [x for x in find_libraries()[0] if x.contract.library == "torch" or settings.current().test_fa2]
PAPER = {"block": 32, "stride": 16, "window": 512}
PAPER_SELECTION = {"select_block": 64, "n_select": 16, "n_init": 1, "n_local": 2}
CASES = {
    "fixed": Case(length=1500, groups=2, heads=6, d_k=64, d_v=64, **PAPER),
    "varlen": Case(length=1500, groups=2, heads=6, d_k=64, d_v=64, documents=(1, 0, 700, 31, 768), **PAPER),
    "batch": Case(length=333, batch=3, groups=1, heads=3, d_k=48, d_v=32, **PAPER),
    "paper-head-dims": Case(length=257, groups=1, heads=16, d_k=192, d_v=128, **PAPER),
    "widest": Case(length=200, groups=2, heads=2, d_k=256, d_v=256, **PAPER),
    "unaligned-head-dim": Case(length=150, batch=2, groups=2, heads=1, d_k=20, d_v=12, **PAPER),
    "one-token": Case(length=1, batch=2, groups=2, heads=4, d_k=64, d_v=64, **PAPER),
    "no-block": Case(length=31, groups=2, heads=4, d_k=64, d_v=64, **PAPER),
    "first-block": Case(length=32, groups=2, heads=4, d_k=64, d_v=64, **PAPER),
    "tile-border": Case(length=16 * 128 + 31, groups=1, heads=4, d_k=64, d_v=64, **PAPER),
    "past-a-tile-border": Case(length=16 * 128 + 47, groups=1, heads=4, d_k=64, d_v=64, **PAPER),
    "window-longer-than-the-sequence": Case(length=129, groups=2, heads=2, d_k=128, d_v=128, **PAPER),
    "window-of-one": Case(length=129, groups=2, heads=2, d_k=128, d_v=128, **{**PAPER, "window": 1}),
    "empty-documents": Case(length=40, groups=2, heads=2, d_k=64, d_v=64, documents=(0, 0, 1, 39, 0), **PAPER),
    "one-varlen-token": Case(length=1, groups=2, heads=2, d_k=64, d_v=64, documents=(0, 1, 0), **PAPER),
}
library = pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.contract.library)
branches = pytest.mark.parametrize("branch", ["compressed", "sliding"])


@library
@branches
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["o", "o-and-lse"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_branch_matches_the_fp64_reference(
    library, branch: str, dtype: torch.dtype, with_lse: bool, case: Case
) -> None:
    assert check(backend_of(library), branch, case, dtype, None, with_lse) == []


@library
@branches
@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("length", [33, 300, 2049])
def test_decode_matches_the_fp64_reference(library, branch: str, queries: int, length: int) -> None:
    if branch == "compressed" and queries > 1:
        pytest.skip("declined: several queries of a cache start in the middle of a compressed block")
    case = Case(length=length, batch=3, groups=2, heads=8, d_k=128, d_v=128, **PAPER)
    assert check(backend_of(library), branch, case, torch.bfloat16, queries, with_lse=False) == []


@library
def test_random_legal_shapes_do_not_crash_and_match(library) -> None:
    """A tenth of what `flash_shapes.py --count 1000` runs."""
    assert run(library, 100)["failed"] == 0


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@library
@branches
@pytest.mark.parametrize("name", ["fixed", "varlen"])
def test_no_call_waits_for_the_device(library, branch: str, name: str) -> None:
    case, backend = CASES[name], backend_of(library)
    qkv = random_inputs(case, torch.bfloat16).map(Tensor.cuda).of(branch)
    # One for each call: what the first one computes of the documents is kept.
    first, seen = (seen_by(branch, case, qkv[0]) for _ in "12")
    o, lse = getattr(backend, f"{branch}_forward")(*qkv, first)
    with waiting_is_an_error():
        getattr(backend, f"{branch}_forward")(*qkv, seen)
        getattr(backend, f"{branch}_backward")(Upstream(o), Saved(*qkv, o, lse), seen)


@library
@branches
def test_gradients_are_bitwise_deterministic_on_request(library, branch: str) -> None:
    case = CASES["fixed"]
    qkv = random_inputs(case, torch.bfloat16).map(Tensor.cuda).of(branch)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (by_backend(backend_of(library), branch, qkv, case, with_lse=False) for _ in "12")
    finally:
        torch.use_deterministic_algorithms(False)
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@library
def test_the_compressed_branch_allocates_a_few_times_the_queries(library) -> None:
    case = Case(length=32_768, groups=2, heads=8, d_k=64, d_v=64, **PAPER)
    generator = torch.Generator("cuda").manual_seed(0)
    n = case.n_compressed
    q = torch.randn(1, case.length, 16, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    k, v = (torch.randn(1, n, 2, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2))
    backend, seen = backend_of(library), seen_by("compressed", case, q)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, lse = backend.compressed_forward(q, k, v, seen)
    forward = torch.cuda.max_memory_allocated() - before
    backend.compressed_backward(Upstream(o), Saved(q, k, v, o, lse), seen)
    backward = torch.cuda.max_memory_allocated() - before
    in_queries = q.numel() * q.element_size()
    # Folded q and o, and o itself. Keys and values expanded to the folded heads would be one more each.
    assert forward <= 4 * in_queries
    assert backward <= 14 * in_queries


def test_a_named_backend_runs_after_a_probe_in_a_child() -> None:
    attention = NSAAttention(NSAConfig(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64)).cuda().bfloat16()
    x = torch.randn(1, 700, 768, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 700, 12, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 700, 2, 64, device="cuda", dtype=torch.bfloat16)
    ours, _ = ops.sliding_attention(q, k, k, window=512, backend="flash")
    theirs, _ = ops.sliding_attention(q, k, k, window=512, backend="sdpa")
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    flash = routing.router().backends["flash"]
    assert flash.tried
    for outcomes in flash.tried.values():
        assert [outcome.problem for outcome in outcomes if outcome.problem] == []
    assert attention(x).isfinite().all()


def test_auto_prefers_our_kernels_unless_it_is_forced_on() -> None:
    problem = Problem(
        op="sliding", batch=1, n_queries=64, n_keys=64, n_heads=4, n_groups=2, d_k=64, d_v=64, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    for environ, picks in (({}, False), ({"NSA_USE_FA2": "1"}, True)):
        config = settings.Settings.load(environ=environ)
        router = routing.Router(routing.find_backends(config)[0], config)
        assert (router.route(problem).backend == "flash") is picks


@pytest.mark.parametrize("documents", [None, (1, 0, 700, 31, 768)], ids=["fixed", "varlen"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_gradients_by_flash_after_a_forward_pass_by_triton(
    head_dim: int, documents: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measured route holds for one direction."""
    case = Case(
        length=1500, groups=2, heads=4, d_k=head_dim, d_v=head_dim, documents=documents, **PAPER, **PAPER_SELECTION
    )
    config = settings.Settings()
    routes = [
        MeasuredRoute(gpu=gpu_family(gpu_name()), op=op, order=("flash", "triton"), mode="bwd")
        for op in ("compressed", "sliding")
    ]
    router = routing.Router(routing.find_backends(config)[0], config, routes)
    monkeypatch.setattr(stages, "router", lambda: router)
    gates = torch.rand(1, case.length, case.n_heads, 3, device="cuda")
    gates[:, ::5] = 0.0
    got, _, exact, plain = whole_results(case, torch.bfloat16, "auto", gates)
    assert {op for op, name in router.counts.calls if name == "flash"} == {"compressed", "sliding"}
    assert {op for op, name in router.counts.calls if name == "triton"} >= {"compressed", "sliding"}
    assert_close_to_fp64(got, exact, plain, case)


@pytest.mark.slow
def test_a_sample_of_shapes_is_clean_under_compute_sanitizer() -> None:
    script = Path(__file__).with_name("flash_shapes.py")
    tests = script.parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    words = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    words += [sys.executable, str(script), "--count", "10"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=400, env=environment)
    except FileNotFoundError:
        pytest.skip("compute-sanitizer is not installed")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
