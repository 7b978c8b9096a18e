"""What `tests/gpu/sanitize.py` has the sanitizer watch: every kernel there is. Launches are listed, none runs."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from nsa import rope, settings
from nsa.backends import gluon, triton
from nsa.backends.triton.launch import COLLECTING, Launch

if settings.triton_interpreted():
    pytest.skip("Triton's interpreter has no Gluon", allow_module_level=True)
if gluon.import_failure() is not None:
    pytest.skip(str(gluon.import_failure()), allow_module_level=True)

ROOT = Path(__file__).parents[1]


class Launches:
    """Takes every launch in the place of the GPU: the arguments of each kernel."""

    def __init__(self) -> None:
        self.arguments: dict[str, list[dict[str, Any]]] = {}

    def submit(self, launch: Launch, free: dict[str, Any]) -> None:
        self.arguments.setdefault(launch.kernel.__name__, []).append({**launch.bound, **free})

    def values(self, kernel: str, argument: str) -> set[Any]:
        return {given.get(argument) for given in self.arguments[kernel]}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, environment: Callable[..., None]) -> Iterator[Launches]:
    monkeypatch.setattr(triton, "available", lambda: None)
    monkeypatch.setattr(triton, "supports", lambda problem: None)
    monkeypatch.setattr(rope, "fused", lambda x: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = Launches()
    token = COLLECTING.set(found)
    yield found
    COLLECTING.reset(token)


def test_every_kernel_is_sanitized(launches: Launches) -> None:
    script = runpy.run_path(str(ROOT / "tests" / "gpu" / "every_kernel.py"))
    script["run"].__globals__["DEVICE"] = "cpu"
    for name, case in script["CASES"].items():
        script["run"](case, torch.bfloat16, script["STARTS"].get(name))
    for step in script["STEPS"].values():
        script["decode"](*step)
    sources = (path.read_text() for path in (ROOT / "nsa").rglob("*.py"))
    kernels = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}
    assert launches.arguments.keys() == kernels
    # The forms of the Gluon kernels: rows by descriptor and by pointer, dS kept, its runs added up.
    assert launches.values("hopper_forward_kernel", "D") == {64, 128}
    for argument in ("SLIDING", "VARLEN", "DESC_Q"):
        assert launches.values("hopper_forward_kernel", argument) == {False, True}
    for argument in ("SLIDING", "VARLEN", "KEEP"):
        assert launches.values("hopper_dkv_kernel", argument) == {False, True}
    assert max(launches.values("hopper_dkv_kernel", "n_written")) > 0
    for argument in ("SLIDING", "VARLEN", "ACCUMULATE"):
        assert launches.values("hopper_dq_kernel", argument) == {False, True}
    by_block = ("hopper_block_kernel", "hopper_block_backward_kernel")
    for kernel in by_block:
        assert launches.values(kernel, "VARLEN") == {False, True}
    # Linear layers of few rows, and of more.
    assert min(launches.values("linear_kernel", "BLOCK_M")) < 16 <= max(launches.values("linear_kernel", "BLOCK_M"))
    # Queries that start at a position of their own.
    for kernel in ("hopper_forward_kernel", "hopper_dkv_kernel", *by_block):
        assert {start is None for start in launches.values(kernel, "p_start")} == {False, True}


def test_what_is_stored_by_tma_may_start_from_zeros(launches: Launches) -> None:
    """Only where Gluon stores it: of other kernels initcheck shall see what they leave unwritten."""
    script = runpy.run_path(str(ROOT / "tests" / "gpu" / "every_kernel.py"))
    script["run"].__globals__["DEVICE"] = "cpu"
    found = {}
    for name, case in script["CASES"].items():
        launches.arguments.clear()
        script["run"](case, torch.bfloat16, script["STARTS"].get(name))
        forward = launches.arguments.get("hopper_forward_kernel", [])
        found[name] = any(given["DESC_Q"] for given in forward)
    assert {name for name, stores in found.items() if stores} == script["STORED_BY_TMA"] - set(script["STEPS"])
    empty_or_zeros = script["empty_or_zeros"]
    assert empty_or_zeros(2, 3, dtype=torch.bfloat16, empty=torch.ones).eq(0).all()
    assert empty_or_zeros(2, 3, dtype=torch.float32, empty=torch.ones).eq(1).all()


def numbered(file: Path, start: str) -> int:
    return next(i for i, line in enumerate(file.read_text().splitlines(), 1) if line.startswith(start))


def test_only_races_on_the_state_of_warp_specialization_pass() -> None:
    judge = runpy.run_path(str(ROOT / "tests" / "gpu" / "sanitize.py"))["judge"]
    forward = ROOT / "nsa" / "backends" / "gluon" / "forward.py"
    kernel, call = numbered(forward, "def hopper_forward_kernel("), numbered(forward, "    gl.warp_specialize(")
    ours = numbered(forward, "        b_s = warpgroup_mma(")

    def output(line: int, *, end: str = "the end\n", hazards: int = 1, name: str = "hopper_forward_kernel") -> str:
        race = f"Error: Race reported between Read access at {name}+0x110 in forward.py:{kernel}"
        write = f"=========     and Write access at {name}+0x7750 in forward.py:{line} [38 hazards]"
        summary = f"========= RACECHECK SUMMARY: {hazards} hazards displayed ({hazards} errors, 0 warnings)"
        return f"========= {race}\n{write}\n========= \n{end}{summary}\n"

    assert judge("racecheck", output(call), 9)[0]
    assert not judge("racecheck", output(ours), 9)[0]
    assert not judge("racecheck", output(call, end=""), 9)[0]
    assert not judge("racecheck", output(call, hazards=2), 9)[0]
    assert not judge("racecheck", output(call), 1)[0]
    assert judge("racecheck", "the end\n========= RACECHECK SUMMARY: 0 hazards displayed\n", 0)[0]
    # Something other than a hazard was found.
    assert not judge("racecheck", "the end\n========= RACECHECK SUMMARY: 0 hazards displayed\n", 9)[0]
    # A kernel of a file of the same name in another folder.
    assert not judge("racecheck", output(call, name="block_kernel"), 9)[0]
    assert not judge("racecheck", output(call).replace("forward.py", "selection.py"), 9)[0]


def test_initcheck_ignores_only_reports_of_other_kernels() -> None:
    judge = runpy.run_path(str(ROOT / "tests" / "gpu" / "sanitize.py"))["judge"]

    def output(function: str, errors: int = 1) -> str:
        return f"=========     at {function}+0x5f0\nthe end\n========= ERROR SUMMARY: {errors} errors\n"

    torch_kernel = "void at::native::vectorized_elementwise_kernel<4>(int)"
    assert judge("initcheck", output(torch_kernel), 9)[0]
    assert not judge("initcheck", output("rotate_kernel"), 9)[0]
    # The reports beyond the limit may be of anything.
    assert not judge("initcheck", output(torch_kernel, errors=2), 9)[0]
    assert not judge("initcheck", "========= Internal Sanitizer Error\nthe end\n", 9)[0]
    assert not judge("memcheck", output(torch_kernel), 9)[0]
    assert judge("memcheck", "the end\n========= ERROR SUMMARY: 0 errors\n", 0)[0]
