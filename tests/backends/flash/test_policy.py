"""The effective FlashAttention flags: what they let `auto` pick, what `nsa doctor` shows, and that off means off."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_standin import FloatingPointException, StandIn
from probing import no_probe, sliding

import nsa
from nsa import cli, doctor
from nsa.backends import sdpa
from nsa.backends.flash import FlashBackend, configure, policy
from nsa.backends.flash.cases import cases_of
from nsa.backends.flash.probe import Outcome
from nsa.backends.measured_routes import MeasuredRoute
from nsa.backends.problem import Problem
from nsa.backends.routing import Router
from nsa.model import DenseAttention
from nsa.settings import Settings

ROOT = Path(nsa.__file__).parent.parent


@pytest.mark.parametrize(
    ("variables", "compressed", "sliding"),
    [
        ({}, "default", "default"),
        ({"NSA_USE_FA2": "0"}, "off", "off"),
        ({"NSA_USE_FA2": "1"}, "on", "on"),
        ({"NSA_USE_FA2_WIN": "0"}, "default", "off"),
        ({"NSA_USE_FA2_CMP": "1"}, "on", "default"),
        ({"NSA_USE_FA2": "0", "NSA_USE_FA2_CMP": "1"}, "off", "off"),
        ({"NSA_FA2_MIN_LEN_CMP": "512"}, "on", "default"),
        ({"NSA_FA2_MIN_LEN_WIN": "-1", "NSA_USE_FA2": "1"}, "on", "explicit_only"),
        ({"NSA_FA2_MIN_LEN_WIN": "0", "NSA_USE_FA2_WIN": "0"}, "default", "off"),
    ],
)
def test_the_effective_flags(variables: dict[str, str], compressed: str, sliding: str) -> None:
    flags = policy.flags(Settings.load(environ=variables))
    assert (flags["compressed"].state, flags["sliding"].state) == (compressed, sliding)
    for flag in flags.values():
        if flag.state != "default":
            assert "(environment)" in flag.why, "the setting that decided"


PROBLEM = Problem(
    op="sliding", batch=1, n_queries=64, n_keys=64, n_heads=4, n_groups=2, d_k=16, d_v=16, dtype=torch.float32
)
CACHED = replace(PROBLEM, cached=True, n_queries=1)


def router_of(variables: dict[str, str], *before: Any, routes: Any = ()) -> Router:
    """FlashAttention after `before` and before SDPA, as configured by the environment."""
    config = Settings.load(environ=variables)
    flash = FlashBackend(config, (StandIn(),), folder=None, prober=no_probe)
    return Router([*before, flash, sdpa], config, routes)


@pytest.mark.parametrize(
    ("op", "variables", "expected"),
    [
        ("sliding", {}, "flash"),
        ("sliding", {"NSA_USE_FA2": "0"}, "sdpa"),
        ("sliding", {"NSA_USE_FA2_WIN": "0", "NSA_USE_FA2": "1"}, "sdpa"),
        ("sliding", {"NSA_USE_FA2_CMP": "0", "NSA_USE_FA2": "1"}, "flash"),
        ("compressed", {"NSA_USE_FA2_CMP": "0", "NSA_USE_FA2": "1"}, "sdpa"),
        ("compressed", {"NSA_USE_FA2_WIN": "0", "NSA_USE_FA2": "1"}, "flash"),
        ("sliding", {"NSA_FA2_MIN_LEN_WIN": "64"}, "flash"),
        ("sliding", {"NSA_FA2_MIN_LEN_WIN": "65", "NSA_USE_FA2": "1"}, "sdpa"),
        ("sliding", {"NSA_FA2_MIN_LEN_WIN": "-1", "NSA_USE_FA2": "1"}, "sdpa"),
        ("compressed", {"NSA_FA2_MIN_LEN_CMP": "-1", "NSA_USE_FA2": "1"}, "sdpa"),
        ("compressed", {"NSA_FA2_MIN_LEN_WIN": "-1", "NSA_USE_FA2": "1"}, "flash"),
    ],
)
def test_what_auto_picks(op: str, variables: dict[str, str], expected: str) -> None:
    route = router_of(variables).route(PROBLEM.for_op(op))
    assert route.backend == expected
    if expected == "sdpa":
        assert next(iter(variables)) in route.reasons["flash"]


@pytest.mark.parametrize("variables", [{"NSA_USE_FA2": "1"}, {"NSA_FA2_MIN_LEN_WIN": "64"}], ids=str)
def test_a_branch_that_is_on_goes_first(variables: dict[str, str]) -> None:
    other = SimpleNamespace(name="triton", supports=lambda _: None)
    assert router_of({}, other).route(PROBLEM).backend == "triton", "not by default"
    router = router_of(variables, other)
    assert router.route(PROBLEM).backend == "flash"
    assert next(iter(variables)) in router.route(PROBLEM).why
    assert router.route(replace(PROBLEM, op="selected")).backend == "triton"
    # Where it cannot run, the others come in the measured order.
    measured = [MeasuredRoute(gpu="cpu", op="sliding", order=("sdpa", "triton"))]
    route = router_of(variables, other, routes=measured).route(replace(PROBLEM, dtype=torch.float64))
    assert route.backend == "sdpa"
    assert re.match(r"measured .*cpu$", route.why)


def test_a_setting_overrides_a_measured_route() -> None:
    first = [MeasuredRoute(gpu="cpu", op="sliding", order=("flash", "sdpa"))]
    for variables in ({"NSA_USE_FA2": "0"}, {"NSA_FA2_MIN_LEN_WIN": "-1"}, {"NSA_FA2_MIN_LEN_WIN": "65"}):
        assert router_of(variables, routes=first).route(PROBLEM).backend == "sdpa"


def test_off_holds_for_a_named_backend_a_minimum_length_does_not() -> None:
    off = router_of({"NSA_USE_FA2": "0"}).route(PROBLEM, "flash")
    assert "NSA_USE_FA2 is off (environment)" in off.reasons["flash"]
    assert router_of({"NSA_FA2_MIN_LEN_WIN": "9999"}).route(PROBLEM, "flash").backend == "flash"


@pytest.mark.parametrize(
    ("variables", "problem", "reason"),
    [
        ({}, CACHED, "never measured"),
        ({"NSA_USE_FA2": "1"}, CACHED, None),
        ({"NSA_USE_FA2": "1"}, replace(CACHED, d_v=8), "d_k is 16 and d_v 8"),
        ({"NSA_USE_FA2": "1"}, replace(CACHED, d_k=20, d_v=20), "d_k is 20 and d_v 20"),
        ({"NSA_USE_FA2": "1", "NSA_FA2_PREF_FP16": "1"}, CACHED, "NSA_FA2_PREF_FP16 is on"),
        ({"NSA_USE_FA2": "1", "NSA_FA2_PREF_FP16": "1"}, replace(CACHED, dtype=torch.bfloat16), None),
        ({"NSA_USE_FA2": "1"}, replace(PROBLEM, d_v=8), None),
    ],
)
def test_auto_leaves_a_cache_alone_unless_forced_and_viewable(
    variables: dict[str, str], problem: Problem, reason: str | None
) -> None:
    router = router_of(variables)
    route = router.route(problem)
    assert route.backend == ("flash" if reason is None else "sdpa")
    if reason is not None:
        assert reason in route.reasons["flash"]
        assert (router.route(problem, "flash").backend == "flash") is (not variables)


def run_doctor(*words: str, backend: FlashBackend) -> int:
    shape = ["--seq-len", "64", "--heads", "2", "--groups", "1", "--d-k", "8", "--d-v", "8", "--device", "cpu"]

    def make_router(config: Settings) -> Router:
        return Router([replace(backend, config=config), sdpa], config)

    return doctor.run(cli.parser_of("doctor").parse_args([*shape, *words]), make_router=make_router)


def crash(library: Any, problem: Any, head_dim: int, dtype: torch.dtype) -> list[Outcome]:
    """A probe in which the library did not survive one call."""
    case = cases_of(problem, head_dim, dtype)[0]
    right = Outcome(case=case["name"], layout=case["layout"])
    if case["layout"] != "fixed":
        return [right]
    return [right, replace(right, case="tiles", problem="killed by SIGFPE", call="q=(1)", request=case)]


def test_the_doctor_shows_the_flags_and_each_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = FlashBackend(Settings(), (StandIn(),), {"flash_attn": "no such package"}, tmp_path, crash)
    assert run_doctor("--setting", "use_fa2_win=off", backend=backend) == 0
    text = capsys.readouterr().out
    for part in (
        "compressed  default: ",
        "sliding     off: NSA_USE_FA2_WIN is off (command line)",
        "flash_attn  no such package",
        "stand-in    0, not tried",
    ):
        assert part in text


@pytest.mark.parametrize("variable", ["use_fa2_win", "use_fa2_cmp"])
def test_the_self_test_does_not_call_a_branch_that_is_off(
    variable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = StandIn()
    backend = FlashBackend(Settings(), (library,), {}, tmp_path, no_probe)
    assert run_doctor("--setting", f"{variable}=off", backend=backend) == 0
    branches = {"sliding" if call.window is not None else "compressed" for call in library.calls}
    off = "sliding" if variable == "use_fa2_win" else "compressed"
    assert branches == {"compressed", "sliding"} - {off}
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if f"NSA_{variable.upper()} is off" in line]
    assert ["flash", off] in [row[:2] for row in rows], "the self-test reports why"


def test_the_doctor_probes_and_writes_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = FlashBackend(Settings(), (FloatingPointException(),), {}, tmp_path / "verdicts", crash)
    script = tmp_path / "crash.py"
    assert run_doctor("--probe", "--repro", str(script), "--json", backend=backend) == 1, "it failed"
    text = capsys.readouterr().out
    assert text.startswith("probe\n  stand-in 0 on gpu cpu")
    assert "1 of 4 cases failed" in text
    assert "  tiles: killed by SIGFPE" in text
    assert str(script) in text
    assert "stand-in    0, 3 of 4 cases right: tiles: killed by SIGFPE" in text
    assert re.search(r"declines: stand-in: .*'tiles' killed by SIGFPE", text)
    assert "from flash_standin import FloatingPointException" in script.read_text()
    found = json.loads(text.splitlines()[-1])
    assert not found["healthy"]
    (said,) = found["probe_failures"]
    assert re.match(r"stand-in 0 .*\bfixed\b.*\(tiles: killed by SIGFPE\)", said)
    assert said in "\n".join(text.splitlines()[:-1])


def test_a_transient_failure_of_the_probe_is_not_the_doctor_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = [Outcome(case="documents", layout="varlen", problem="no memory", transient=True)]
    backend = FlashBackend(Settings(), (StandIn(),), {}, tmp_path, lambda *_: full)
    assert run_doctor("--probe", backend=backend) == 0
    text = capsys.readouterr().out
    assert "documents: no memory" in text


def test_a_script_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    backend = FlashBackend(Settings(), (StandIn(),), {}, tmp_path, lambda *_: pytest.fail("it was probed"))
    for path in (tmp_path / "no" / "crash.py", tmp_path):
        with pytest.raises(ValueError, match=f"--repro is '{path}'"):
            run_doctor("--probe", "--repro", str(path), backend=backend)


def test_there_may_be_nothing_to_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = FlashBackend(Settings(), (StandIn(),), {}, tmp_path, no_probe)
    assert run_doctor("--repro", str(tmp_path / "none.py"), backend=right) == 0
    assert "no script" in capsys.readouterr().out
    assert not (tmp_path / "none.py").exists()
    absent = Router([sdpa], Settings(), absent={"flash": "not here"})
    said, failures = doctor.probe(absent, None, None, None)
    assert said.endswith(": not here")
    assert failures == ()


# A package of that name and version whose import leaves a file, and fails.
TRAP = """
from pathlib import Path
Path(r"{marker}").touch()
raise ImportError("flash_attn was imported")
"""
# A training step with the package's kernels claimed to run on a CPU, and without the probe.
USE = """
from dataclasses import replace
import torch, nsa
from nsa.backends.flash import FlashBackend, libraries
from nsa.backends.routing import router
contract = replace(libraries.FLASH_ATTN_2, device="cpu", dtypes=(torch.float32,))
libraries.find_flash_attn = lambda: libraries.FlashAttn2Library("2.8.3", contract)
FlashBackend.verdict = lambda *_: None
assert [library.contract.library for library in libraries.find_libraries()[0]] == ["torch", "flash_attn"]
config = nsa.NSAConfig(dim=64, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=16)
nsa.NSAAttention(config)(torch.randn(1, 64, 64)).sum().backward()
print(router().absent.get("flash"))
print(router().counts.as_dict())
"""


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    (tmp_path / "flash_attn").mkdir()
    marker = tmp_path / "imported"
    (tmp_path / "flash_attn" / "__init__.py").write_text(TRAP.format(marker=marker))
    metadata = tmp_path / "flash_attn-2.8.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn\nVersion: 2.8.3\n")
    return marker


def run_beside(trap: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    environment = {**clean, "PYTHONPATH": f"{ROOT}{os.pathsep}{trap.parent}", **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("switched", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_library_that_is_off_is_not_imported(trap: Path, switched: str) -> None:
    done = run_beside(trap, USE, NSA_USE_FA2=switched)
    assert done.returncode == 0, done.stderr
    absent, counts = done.stdout.strip().splitlines()
    assert absent == ("NSA_USE_FA2 is off (environment)" if switched == "0" else "None")
    assert trap.exists() is (switched == "1"), "whether flash_attn was imported"
    # The import fails, which costs nothing but speed.
    assert ("flash_attn 2.8.3" in counts) is (switched == "1")
    assert "'sliding/sdpa': 2" in counts


def test_off_for_both_branches_is_off() -> None:
    config = Settings.load(environ={"NSA_USE_FA2_WIN": "0", "NSA_USE_FA2_CMP": "0"})
    assert "NSA_USE_FA2_CMP is off" in str(configure(config).available())
    one = Settings.load(environ={"NSA_USE_FA2_WIN": "0"})
    assert "is off" not in str(configure(one).available())


@pytest.mark.parametrize("switched", ["0", "1"])
def test_sdpa_may_be_kept_from_its_flash_kernel(
    switched: str, environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(NSA_SDPA_NO_FLASH=switched)
    config = nsa.NSAConfig(dim=16, n_heads=2, n_kv_groups=1, d_k=8, d_v=8)
    attention = DenseAttention(config)
    allowed = []
    compute = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.flash_sdp_enabled())
        return compute(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    attention(torch.randn(1, 9, 16)).sum().backward()
    assert allowed == [switched == "0"]


@pytest.mark.parametrize("logged_by", ["NSA_DEBUG_TIMING", "NSA_SDPA_AUDIT"])
def test_the_log_line_of_a_call(logged_by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Settings.load(environ={logged_by: "1", "NSA_USE_FA2": "1"})
    router = Router([FlashBackend(config, (StandIn(),), folder=tmp_path, prober=no_probe), sdpa], config)
    x = torch.randn(1, 9, 2, 8)
    problem = replace(PROBLEM, n_queries=9, n_keys=9, n_heads=2, d_k=8, d_v=8)
    with caplog.at_level(logging.INFO, logger="nsa"):
        router.run(problem, "sliding_forward", x, x, x, sliding(x, 4))
    for part in (
        "branch=sliding",
        "path=flash.sliding_forward",
        "(1, 9, 2, 8):float32:(144, 16, 8, 1)",
        "reason='NSA_USE_FA2 is on (environment)'",
    ):
        assert part in caplog.text
    assert re.search(r"ms=\d+\.\d+", caplog.text)
