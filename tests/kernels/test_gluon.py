"""The Gluon kernels, run on the CPU by `gluon_emulator.py`, against the reference in fp64: the cases of Triton's.

The launchers are the real ones: their launches reach the emulator, and Triton's own kernels (row statistics, dq, sums
of partials) its interpreter. Tiles are small, so that short sequences have several.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gluon_emulator
import pytest
import torch
import triton

# First: it skips this file where kernels cannot run.
from interpreted import INTERPRETED  # isort: skip
import test_offset
from test_ranged import CASES, FUNCTIONS, SMALL, Case, by_kernel, check, inputs, poison, split

from nsa.backends import gluon
from nsa.backends import triton as backend
from nsa.backends.gluon import decode, forward, query_gradient
from nsa.backends.gluon.query_gradient import KeptPlan
from nsa.backends.gluon.tiles import (
    ForwardTile,
    KeyTile,
    QueryTile,
    pick_dkv,
    pick_dq,
    pick_forward,
    unsupported,
)
from nsa.backends.problem import Problem
from nsa.backends.routing import FailureReason, Router
from nsa.backends.triton import branches, selected
from nsa.backends.triton.decode.plan import plan_decode
from nsa.backends.triton.launch import COLLECTING, Launch, Layout, layout, new_layout
from nsa.backends.triton.tiles import BackwardTile, Visibility
from nsa.settings import Settings

if not INTERPRETED:
    pytest.skip("the emulator runs beside Triton's interpreter", allow_module_level=True)
if gluon.import_failure() is not None:
    pytest.skip(gluon.import_failure(), allow_module_level=True)

__all__ = ["poison"]

FORWARD = ForwardTile(block_n=16, num_stages=2)
# As many rows as the heads of a group, at least.
KEYS = KeyTile(block_m=16, num_stages=2, waves=0)
KEPT = QueryTile(block_m=4 * KEYS.block_m, num_stages=2)
LONG = {
    "h1": Case(heads=1, length=200, window=70),
    "h2, batch": Case(heads=2, length=100, groups=2, batch=2, window=40),
    "h16, fp16": Case(heads=16, length=60, dtype=torch.float16),
    "h3": Case(heads=3, length=100, window=50),
    "all keys seen": Case(heads=4, length=120, window=512, block=2, stride=1),
    "varlen": Case(heads=2, length=180, documents=(1, 31, 90, 0, 40, 18), window=40),
    "varlen, h8": Case(heads=8, length=90, groups=2, documents=(34, 56), window=50),
}


class Emulator:
    """Takes every launch: Gluon's kernels to the emulator, Triton's to their interpreter."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def submit(self, launch: Launch, free: dict[str, Any]) -> None:
        self.launched.append(launch.kernel.__name__)
        if launch.kernel.__name__.startswith("hopper"):
            options = {"num_warps", "maxnreg"}
            bound = {name: x for name, x in launch.bound.items() if name not in options}
            gluon_emulator.run(launch.kernel, launch.grid, {name: emulated(x) for name, x in free.items()} | bound)
        else:
            launch.kernel[launch.grid](**free, **launch.bound)


def emulated(x: Any) -> Any:
    if not hasattr(x, "block_shape"):
        return x
    values = torch.as_strided(x.base, x.shape, x.strides)
    return gluon_emulator.Descriptor(values, tuple(x.block_shape))


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    found = Emulator()
    # So few that a persistent CTA takes several tiles, and its barriers go on where the last tile left them.
    for module in (forward, query_gradient):
        monkeypatch.setattr(module, "sm_count", lambda device: 2)
    token = COLLECTING.set(found)
    yield found
    COLLECTING.reset(token)


def tiles(case: Case, **how: Any) -> tuple[ForwardTile, BackwardTile]:
    whole = case.heads & (case.heads - 1) == 0
    return FORWARD, BackwardTile(SMALL, dataclasses.replace(KEYS, **how) if whole else split(SMALL))


@pytest.mark.parametrize("branch", FUNCTIONS)
@pytest.mark.parametrize("name", [*CASES, *(f"long {name}" for name in LONG)])
def test_outputs_and_gradients(name: str, branch: str, emulator: Emulator) -> None:
    case = LONG[name.removeprefix("long ")] if name.startswith("long ") else CASES[name]
    if case.d_k != case.d_v:
        pytest.skip("the kernels take one head_dim")
    if case.n_keys(branch) == 0:
        pytest.skip("no descriptor has no keys")
    x = inputs(case, branch)
    check(case, branch, by_kernel(case, branch, x, *tiles(case)), x)
    assert "hopper_forward_kernel" in emulator.launched


@pytest.mark.parametrize("branch", FUNCTIONS)
@pytest.mark.parametrize("name", [*test_offset.OFFSETS, "several tiles"])
def test_queries_that_start_later_than_their_keys(
    name: str, branch: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = test_offset.BASE.but(batch=2, groups=2, heads=2, length=200, window=70), 90, (0, 103)
    monkeypatch.setitem(test_offset.OFFSETS, "several tiles", long)
    case, _, _ = test_offset.OFFSETS[name]
    if case.d_k != case.d_v:
        pytest.skip("the kernels take one head_dim")
    test_offset.check(branch, name, tiles(case))
    assert "hopper_forward_kernel" in emulator.launched


@pytest.mark.parametrize("branch", FUNCTIONS)
def test_rows_split_into_parts(branch: str, emulator: Emulator) -> None:
    case = Case(heads=4, length=160, window=60, groups=2)
    x = inputs(case, branch)
    check(case, branch, by_kernel(case, branch, x, *tiles(case, waves=8, min_row_tiles=3)), x)
    assert "sum_partials_kernel" in emulator.launched


@pytest.mark.parametrize("branch", FUNCTIONS)
def test_more_stages_and_wider_tiles_change_nothing_but_rounding(branch: str, emulator: Emulator) -> None:
    case = Case(heads=2, length=200, window=90)
    x = inputs(case, branch)
    wide = ForwardTile(block_n=32, num_stages=3), BackwardTile(SMALL, KeyTile(block_m=32, num_stages=3, waves=0))
    check(case, branch, by_kernel(case, branch, x, *wide), x)


@pytest.mark.parametrize("branch", FUNCTIONS)
@pytest.mark.parametrize(
    ("name", "scratch"),
    [
        *((name, 1 << 30) for name in CASES),
        *((f"long {name}", 1 << 15) for name in LONG),
        *(pytest.param(f"long {name}", 1 << 30, marks=pytest.mark.slow) for name in LONG),
    ],
)
def test_dq_from_kept_ds(name: str, scratch: int, branch: str, emulator: Emulator) -> None:
    """At once, and in runs."""
    case = LONG[name.removeprefix("long ")] if name.startswith("long ") else CASES[name]
    if case.d_k != case.d_v or case.heads & (case.heads - 1) or case.n_keys(branch) == 0:
        pytest.skip("the kernels take one head_dim, whole queries and keys")
    x = inputs(case, branch)
    dkv = dataclasses.replace(KEYS, waves=8, min_row_tiles=4)
    tile = BackwardTile(dataclasses.replace(KEPT, scratch=scratch), dkv)
    check(case, branch, by_kernel(case, branch, x, FORWARD, tile), x)
    assert "hopper_dq_kernel" in emulator.launched


def hazard(function: Any) -> None:
    """Runs a kernel of one load, one buffer and one partition of products."""
    memory = gluon_emulator.Shared(torch.ones(16, 16))
    full, free = gluon_emulator.Barrier(), gluon_emulator.Barrier()
    gluon_emulator.mbarrier.init(full, 1)
    gluon_emulator.mbarrier.init(free, 1)
    source = gluon_emulator.Descriptor(torch.ones(16, 16), (16, 16))
    function(memory, full, free, source)


def test_the_emulator_finds_a_missing_wait() -> None:
    def kernel(memory: Any, full: Any, free: Any, source: Any) -> None:
        def consume() -> None:
            product = gluon_emulator.warpgroup_mma(memory, memory, None, use_acc=False, is_async=True)
            gluon_emulator.warpgroup_mma_wait(0, deps=[product])

        gluon_emulator.mbarrier.expect(full, source.block_type.nbytes)
        gluon_emulator.tma.async_copy_global_to_shared(source, [0, 0], full, memory)
        gluon_emulator.warp_specialize([(consume, ())], [], [])

    with pytest.raises(AssertionError, match="not loaded"):
        hazard(kernel)


def test_the_emulator_finds_a_buffer_freed_under_a_product() -> None:
    def kernel(memory: Any, full: Any, free: Any, source: Any) -> None:
        def produce() -> None:
            gluon_emulator.mbarrier.wait(free, 0)
            gluon_emulator.tma.async_copy_global_to_shared(source, [0, 0], full, memory)

        def consume() -> None:
            product = gluon_emulator.warpgroup_mma(memory, memory, None, use_acc=False, is_async=True)
            gluon_emulator.mbarrier.arrive(free)
            # As long as the products of a real kernel may take.
            while not memory.values.isnan().any():
                pass
            gluon_emulator.warpgroup_mma_wait(0, deps=[product])

        gluon_emulator.warp_specialize([(consume, ()), (produce, ())], [], [])

    with pytest.raises(AssertionError, match="under a product"):
        hazard(kernel)


def test_the_emulator_finds_a_wrong_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_emulator, "PATIENCE_S", 0.1)
    with pytest.raises(AssertionError, match="deadlock"):
        hazard(lambda memory, full, free, source: gluon_emulator.mbarrier.wait(free, 0))


# What a partition may do with a buffer, and the error if one of its fences, barriers and waits is left out.
ORDERED = [
    "store", "fence", "barrier", "send", "wait", "barrier", "store", "fence", "barrier", "multiply", "barrier",
    "store", "barrier", "load", "barrier", "request",
]  # fmt: skip
LEFT_OUT = {
    1: "without a fence", 2: "stored yet: no barrier", 4: "no wait", 5: "read: no barrier",
    7: "without a fence", 8: "stored yet: no barrier", 10: "read: no barrier",
    12: "stored yet: no barrier", 14: "read: no barrier",
}  # fmt: skip


def access(steps: list[str]) -> None:
    """Runs a partition that does this with one buffer."""

    def kernel(memory: Any, full: Any, free: Any, source: Any) -> None:
        def multiply() -> None:
            product = gluon_emulator.warpgroup_mma(torch.ones(16, 16), memory, None, use_acc=False, is_async=True)
            gluon_emulator.warpgroup_mma_wait(0, deps=[product])

        tma = gluon_emulator.tma
        do = {
            "store": lambda: memory.store(torch.ones(16, 16)),
            "load": memory.load,
            "fence": gluon_emulator.fence_async_shared,
            "barrier": gluon_emulator.barrier,
            "send": lambda: tma.async_copy_shared_to_global(source, [0, 0], memory),
            "wait": lambda: tma.store_wait(0),
            "multiply": multiply,
            "request": lambda: tma.async_copy_global_to_shared(source, [0, 0], full, memory),
        }
        gluon_emulator.warp_specialize([(lambda: [do[step]() for step in steps], ())], [], [])

    hazard(kernel)


def test_the_emulator_takes_ordered_accesses() -> None:
    access(ORDERED)
    assert list(LEFT_OUT) == [i for i, step in enumerate(ORDERED) if step in ("fence", "barrier", "wait")]


@pytest.mark.parametrize("i", LEFT_OUT)
def test_the_emulator_finds_a_missing_fence_barrier_or_wait(i: int) -> None:
    with pytest.raises(AssertionError, match=LEFT_OUT[i]):
        access(ORDERED[:i] + ORDERED[i + 1 :])


def test_the_emulator_finds_a_fence_after_the_barrier() -> None:
    with pytest.raises(AssertionError, match="no barrier"):
        access(["store", "barrier", "fence", "send"])


COMPRESSED = Visibility(sliding=False, span=32, stride=16, varlen=False, offset=False)


def picked(q: torch.Tensor, k: torch.Tensor) -> tuple[Any, Any]:
    x, keys = layout(q), layout(k)
    return pick_forward(x, keys, keys, COMPRESSED), pick_dkv(x, x, keys, keys, COMPRESSED)


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process without TRITON_INTERPRET."""
    monkeypatch.setattr(gluon, "unavailable", lambda: None)


@pytest.mark.usefixtures("usable")
def test_tiles_are_picked_where_the_kernels_apply() -> None:
    q, k = torch.empty(1, 4096, 64, 128, dtype=torch.bfloat16), torch.empty(1, 255, 4, 128, dtype=torch.bfloat16)
    forward, dkv = picked(q, k)
    assert isinstance(forward, ForwardTile)
    assert isinstance(dkv, KeyTile)
    assert picked(q.float(), k.float()) == (None, None)
    # One query, and a tile of rows that is not full.
    assert picked(q[:, :1], k)[0] is None
    # Heads of a group that no box holds: by pointer in the forward pass.
    assert picked(q[:, :, :48], k) == (forward, None)
    # Keys that no descriptor takes, and none at all.
    assert picked(q, torch.empty(1, 255, 4, 132, dtype=torch.bfloat16)[..., :128]) == (None, None)
    assert picked(q, torch.empty(1, 255, 4, 256, dtype=torch.bfloat16)[..., ::2]) == (None, None)
    assert picked(q, k[:, :0]) == (None, None)


@pytest.mark.usefixtures("usable")
def test_head_dim_64_has_only_a_forward_kernel_of_whole_queries() -> None:
    q, k = torch.empty(1, 4096, 16, 64, dtype=torch.float16), torch.empty(1, 255, 2, 64, dtype=torch.float16)
    forward, dkv = picked(q, k)
    assert isinstance(forward, ForwardTile)
    assert dkv is None
    assert picked(q[:, :, :12], k) == (None, None)


def key_layout(n: int, heads: int = 4) -> Layout:
    return new_layout((1, n, heads, 128), torch.bfloat16, torch.device("cpu"))


def test_dq_comes_from_kept_ds_where_runs_are_long() -> None:
    sliding, keys = COMPRESSED._replace(sliding=True), key_layout(4095)
    assert isinstance(pick_dq(keys, COMPRESSED), QueryTile)
    assert isinstance(pick_dq(keys, sliding), QueryTile)
    assert isinstance(pick_dq(keys, sliding._replace(varlen=True)), QueryTile)
    assert pick_dq(keys, COMPRESSED._replace(varlen=True)) is None
    assert pick_dq(keys, sliding._replace(offset=True)) is None
    assert pick_dq(key_layout(65535), COMPRESSED) is None


@pytest.mark.parametrize("length", [8192, 65536, 131072])
@pytest.mark.parametrize("heads", [16, 64], ids=lambda heads: f"{heads} heads per group")
@pytest.mark.parametrize("window", [None, 512, 8192, 1 << 20], ids=["compressed", "w512", "w8192", "all keys"])
def test_kept_ds_stays_within_its_scratch(window: int | None, heads: int, length: int) -> None:
    visibility = COMPRESSED if window is None else Visibility(True, min(window, length), 1, False, False)
    q, k = key_layout(length, 4 * heads), key_layout(length // 16 - 1 if window is None else length)
    tile = pick_dq(k, visibility)
    assert (tile is None) == (window == 1 << 20 and length > 8192)
    if tile is None:
        return
    plan = KeptPlan(q, q, k, k, visibility, 0.1, KeyTile(), tile, 1, length * heads // 24 // 256 * 256, True)
    assert plan.size * 2 * tile.streams <= tile.scratch
    assert len(plan.runs) <= 4 * length // 512
    assert plan.n_slots <= 26


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize("length", [2048, 8192, 65536])
def test_rows_are_split_into_as_many_parts_whatever_the_length(length: int) -> None:
    q, k = key_layout(length, 64), key_layout(length // 16 - 1)
    n_row_tiles = length * 16 // KeyTile().block_m
    dkv = pick_dkv(q, q, k, k, COMPRESSED)
    assert 20 <= n_row_tiles // dkv.min_row_tiles <= 30


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(
    ("gpu", "dtype", "d_k", "d_v", "named"),
    [
        ((8, 0), torch.bfloat16, 128, 128, "sm_80"),
        ((10, 0), torch.bfloat16, 128, 128, "sm_100"),
        ((9, 0), torch.float32, 128, 128, "float32"),
        ((9, 0), torch.bfloat16, 192, 128, "192"),
        ((9, 0), torch.bfloat16, 96, 96, "96"),
    ],
)
def test_what_is_not_supported_is_named(gpu: Any, dtype: torch.dtype, d_k: int, d_v: int, named: str) -> None:
    assert named in str(unsupported(gpu, dtype, d_k, d_v))


TOGETHER = "selected and sliding forward in one kernel"


@pytest.fixture
def on_gpu(usable: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Problem]:
    """An attention whose selected and sliding forward pass run at once, and a GPU for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(backend, "supports", lambda problem: None)
    monkeypatch.setattr(decode, "sm_count", lambda device: 132)
    yield Problem(
        batch=1, n_queries=8192, n_keys=8192, n_heads=64, n_groups=4, d_k=128, d_v=128, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    branches.runs_together.cache_clear()
    selected.plan_forward.cache_clear()
    plan_decode.cache_clear()


def test_explain_reports_which_set_runs(on_gpu: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Router([backend], Settings()).explain(on_gpu)
    assert found.kernels["triton"].startswith("Gluon")
    assert TOGETHER in str(found)
    assert "float32" in backend.kernel_set(dataclasses.replace(on_gpu, dtype=torch.float32))
    assert "sm_90" in backend.kernel_set(dataclasses.replace(on_gpu, device="cpu"))
    monkeypatch.setattr(gluon, "unavailable", lambda: "another Triton")
    assert backend.kernel_set(on_gpu) == "Triton; another Triton"


@pytest.mark.parametrize(
    ("other", "compressed", "sliding"),
    [
        ({}, "forward, dk and dv, dq", "forward, dk and dv, dq"),
        ({"varlen": True}, "forward, dk and dv", "forward, dk and dv, dq"),
        ({"cached": True}, "forward, dk and dv", "forward, dk and dv"),
        ({"n_queries": 1 << 20, "n_keys": 1 << 20}, "forward, dk and dv", "forward, dk and dv, dq"),
        ({"n_heads": 24}, "forward", "forward"),
        ({"d_k": 64, "d_v": 64}, "forward", "forward"),
    ],
    ids=str,
)  # fmt: skip
def test_explain_reports_the_passes_in_gluon(
    other: dict[str, Any], compressed: str, sliding: str, on_gpu: Problem
) -> None:
    found = backend.kernel_set(dataclasses.replace(on_gpu, **other))
    assert f"compressed {compressed}; sliding {sliding};" in found


@pytest.mark.parametrize("window", [8192, 8193])
def test_explain_reports_dq_as_the_window_has_it(window: int, on_gpu: Problem) -> None:
    long = dataclasses.replace(on_gpu, n_queries=32768, n_keys=32768, backward=True)
    found = Router([backend], Settings()).explain(long, window=window).kernels["triton"]
    everything = "sliding forward, dk and dv, dq"
    assert (everything in found) == (window == 8192)


@pytest.mark.parametrize(
    ("other", "select_block", "in_gluon"),
    [
        ({}, 64, True),
        ({"varlen": True}, 64, True),
        ({"cached": True}, 64, True),
        ({"n_queries": 4096, "n_keys": 4096}, 64, True),
        ({}, 32, False),
        # Four heads per group.
        ({"n_heads": 16}, 64, False),
        ({"n_heads": 24}, 64, False),
        ({"n_queries": 4, "cached": True}, 64, False),
    ],
    ids=str,
)
def test_explain_reports_the_selected_backward_pass(
    other: dict[str, Any], select_block: int, in_gluon: bool, on_gpu: Problem
) -> None:
    router = Router([backend], Settings())
    trained = dataclasses.replace(on_gpu, **{"backward": True, **other})
    assert ("selected backward" in str(router.explain(trained, select_block=select_block))) == in_gluon
    assert "selected backward" not in str(router.explain(on_gpu))


@pytest.mark.parametrize(
    ("other", "select_block", "in_gluon"),
    [
        ({}, 64, True),
        ({"varlen": True}, 64, True),
        ({"cached": True, "n_queries": 2048}, 64, True),
        # Just longer than what is read densely: a cache may hold a token more.
        ({"cached": True, "n_queries": 2048, "n_keys": 4096}, 64, True),
        # Read densely.
        ({"n_queries": 4096, "n_keys": 4096}, 64, False),
        ({}, 32, False),
        # Four heads per group, and so many that a pass goes by query.
        ({"n_heads": 16}, 64, False),
        ({"n_heads": 128}, 64, False),
        ({"n_queries": 4, "cached": True}, 64, False),
    ],
    ids=str,
)
def test_explain_reports_the_selected_forward_pass(
    other: dict[str, Any], select_block: int, in_gluon: bool, on_gpu: Problem
) -> None:
    problem = dataclasses.replace(on_gpu, **other)
    found = str(Router([backend], Settings()).explain(problem, select_block=select_block))
    assert (re.search(r"selected forward\b", found) is not None) == in_gluon


def test_explain_reports_triton_where_no_pass_is_in_gluon(on_gpu: Problem) -> None:
    of_125m = dataclasses.replace(on_gpu, n_heads=12, n_groups=2, d_k=64, d_v=64)
    assert backend.kernel_set(of_125m).startswith("Triton")
    step = dataclasses.replace(on_gpu, n_queries=1, cached=True)
    assert backend.kernel_set(step).startswith("Triton")


@pytest.mark.parametrize(
    ("other", "sizes", "in_gluon"),
    [
        ({}, {}, True),
        ({"varlen": True}, {}, False),
        # The rows fit into a tile, but so many tokens are a chunk of prefill.
        ({"n_queries": 40, "n_heads": 4}, {}, False),
        ({"n_queries": 64, "n_heads": 4}, {}, False),
        ({}, {"select_block": 48}, False),
        ({}, {"select_block": 8}, False),
        # More selection blocks than a step has room for.
        ({"n_keys": 1 << 22}, {}, False),
        ({"n_queries": 0}, {}, False),
    ],
    ids=str,
)
def test_explain_reports_the_decode_step_by_its_plan(
    other: dict[str, Any], sizes: dict[str, int], in_gluon: bool, on_gpu: Problem
) -> None:
    step = dataclasses.replace(on_gpu, **{"n_queries": 4, "cached": True, **other})
    found = Router([backend], Settings()).explain(step, **sizes).kernels["triton"]
    assert ("decode step" in found) == in_gluon


@pytest.mark.parametrize(
    "other",
    [
        {"varlen": True}, {"cached": True}, {"n_queries": 4096, "n_keys": 4096}, {"n_queries": 4096},
        {"d_k": 64, "d_v": 64}, {"n_heads": 24}, {"n_heads": 128},
    ],
    ids=str,
)  # fmt: skip
def test_explain_reports_branches_apart_by_shape(other: dict[str, Any], on_gpu: Problem) -> None:
    found = Router([backend], Settings()).explain(dataclasses.replace(on_gpu, **other))
    assert found.kernels["triton"].startswith("Gluon")
    assert TOGETHER not in str(found)


def test_explain_reports_branches_apart_by_route(on_gpu: Problem) -> None:
    def explained(*others: Any, **settings: Any) -> str:
        return str(Router([*others, backend], Settings(**settings)).explain(on_gpu))

    sliding = SimpleNamespace(name="flash", supports=lambda problem: None if problem.op == "sliding" else "no")
    broken = SimpleNamespace(name="flash", supports=lambda problem: FailureReason("broken"))
    assert TOGETHER in explained()
    assert TOGETHER not in explained(sliding)
    # Calls then go through the router, branch by branch.
    assert TOGETHER not in explained(broken)
    assert TOGETHER not in explained(debug_timing=True)


@pytest.mark.parametrize("logged", [False, True])
def test_explain_reports_only_the_passes_routed_to_triton(logged: bool, on_gpu: Problem) -> None:
    def explained(op: str, backward: bool) -> str:
        def supports(problem: Problem) -> str | None:
            return None if (problem.op, problem.backward) == (op, backward) else "another pass"

        flash = SimpleNamespace(name="flash", supports=supports)
        router = Router([flash, backend], Settings(debug_timing=logged))
        return router.explain(dataclasses.replace(on_gpu, backward=True)).kernels["triton"]

    gradients = "dk and dv, dq"
    everything = f"forward, {gradients}"
    assert f"compressed {everything}; sliding {gradients};" in explained("sliding", False)
    assert f"compressed {everything}; sliding forward;" in explained("sliding", True)
    assert f"compressed {gradients}; sliding {everything};" in explained("compressed", False)
    forward = Router([backend], Settings(debug_timing=logged)).explain(on_gpu)
    assert "compressed forward; sliding forward;" in str(forward)


def test_explain_reports_branches_apart_by_selection(on_gpu: Problem) -> None:
    router = Router([backend], Settings())
    assert TOGETHER in str(router.explain(on_gpu, n_select=8))
    assert TOGETHER not in str(router.explain(on_gpu, select_block=32))
    # So many that all blocks before a query are read.
    assert TOGETHER not in str(router.explain(on_gpu, n_select=128))


def test_explain_reports_branches_apart_after_a_failure(on_gpu: Problem) -> None:
    router = Router([backend], Settings())
    router.failed[on_gpu.for_op("selected"), "selected_sliding_forward"] = "out of shared memory"
    assert TOGETHER not in str(router.explain(on_gpu))


@pytest.fixture
def imported_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "nsa.backends.gluon.api", raising=False)
    gluon.import_failure.cache_clear()
    yield
    gluon.import_failure.cache_clear()


@pytest.mark.usefixtures("imported_anew")
def test_a_triton_without_gluon_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    assert "triton.experimental.gluon" in str(gluon.import_failure())


@pytest.mark.usefixtures("imported_anew")
def test_another_api_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia.hopper", SimpleNamespace())
    assert "fence_async_shared" in str(gluon.import_failure())


@pytest.mark.usefixtures("imported_anew")
def test_a_version_that_was_never_compiled_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    assert "3.99.0" in str(gluon.import_failure())


@pytest.mark.usefixtures("imported_anew")
@pytest.mark.parametrize("version", ["3.7", "3.7.1", "3.6.0.post1", "3.7.0+cu130", "3.7.0.dev20260101"])
def test_a_release_of_a_version_that_was_compiled_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert gluon.import_failure() is None


def test_rocm_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA" in str(unsupported((9, 0), torch.bfloat16, 128, 128))
