"""`nsa doctor` and the command line around it: every section is there, and a backend that is off is caught."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa import cli, doctor, machine, selftest, settings
from nsa.backends import reference, sdpa
from nsa.backends.measured_routes import MeasuredRoute
from nsa.backends.problem import OPS, Problem
from nsa.backends.routing import BackendFailure, ImportFailed, Router
from nsa.selftest import Check
from nsa.sequences import Saved, Upstream
from nsa.settings import SETTINGS, Settings

# Small heads: these tests are about the report.
SMALL = ["--heads", "2", "--groups", "1", "--d-k", "8", "--d-v", "4", "--device", "cpu"]
SHAPE = Problem(batch=1, n_queries=64, n_keys=64, n_heads=2, n_groups=1, d_k=8, d_v=4, dtype=torch.float32)


# The ways in which the gradient of a branch is taken.
GATED = ("gated", "gated and added")
LABELS = ("", " with dlse", *(f" {label}" for label in GATED))


def patient(**changed: Any) -> Any:
    """The sdpa backend under another name, with some of its functions replaced."""
    functions = {name: getattr(sdpa, name) for name in sdpa.__all__ if name != "name"}
    return SimpleNamespace(**{**functions, "name": "triton", **changed})


def off_by(function: Callable[..., Any], which: int, by: float) -> Callable[..., Any]:
    """`function`, with one element of its `which`-th result off."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        results = [x.clone() for x in function(*args, **kwargs)]
        results[which].view(-1)[-1] += by
        return tuple(results)

    return wrong


def examine(*backends: Any) -> list[Check]:
    return selftest.self_test(backends, SHAPE)


def run_doctor(*flags: str, backends: tuple[Any, ...] = (sdpa, reference)) -> int:
    return doctor.run(
        cli.parser_of("doctor").parse_args([*SMALL, *flags]), make_router=lambda config: Router(backends, config)
    )


def failing(checks: list[Check]) -> set[tuple[str, str, str]]:
    return {(check.backend, check.op, check.quantity) for check in checks if not check.agrees}


def test_a_healthy_machine_has_every_section_and_status_0(
    capsys: pytest.CaptureFixture[str], environment: Callable[..., None]
) -> None:
    assert run_doctor() == 0
    text = capsys.readouterr().out
    for section in ("versions", "backends", "settings", "what ran in this process", "route", "self-test", "verdict"):
        assert f"\n{section}\n" in f"\n{text}"
    for setting in SETTINGS:
        assert setting.env in text
        assert setting.meaning in text
    rows = [line.split()[:2] for line in text.splitlines()]
    for op in OPS:
        assert ["sdpa", op] in rows
    assert ["flash", "no:"] in rows
    assert ["sdpa", "yes"] in rows


def test_every_op_and_gradient_is_checked_in_every_layout() -> None:
    checks = examine(sdpa)
    looked_at = {(check.op, check.quantity, check.case) for check in checks}
    attention = {
        op: ["o", "lse", *(f"d{x}{label}" for x in leaves for label in LABELS)]
        for op, leaves in (("compressed", ("q", "k_cmp", "v_cmp")), ("selected", "qkv"), ("sliding", "qkv"))
    }
    quantities = {
        **attention,
        "compress": ["mean", "dk", "blocks", "dv", "dposition"],
        "scores": ["missed"],
        "combine": ["o", "do_cmp", "do_sel", "do_win", "dgates", "dgates alone"],
    }
    whole = {(op, q, case) for op in OPS for q in quantities[op] for case in ("fixed-length", "varlen")}
    forward = {(op, q, "cached") for op in attention for q in ("o", "lse")} | {("scores", "missed", "cached")}
    assert looked_at == whole | forward
    assert not failing(checks)
    assert all(0 < check.allowed < 1e-3 for check in checks)


@pytest.mark.parametrize(
    ("function", "which", "op", "quantity"),
    [
        ("compressed_forward", 0, "compressed", "o"),
        ("compressed_backward", 1, "compressed", "dk_cmp"),
        ("selected_forward", 1, "selected", "lse"),
        ("selected_backward", 2, "selected", "dv"),
        ("sliding_backward", 0, "sliding", "dq"),
        ("combine_backward", 3, "combine", "dgates"),
        ("gather_blocks_backward", 1, "compress", "dposition"),
    ],
)
@pytest.mark.parametrize("by", [1e-3, float("nan")])
def test_one_wrong_element_is_caught(function: str, which: int, op: str, quantity: str, by: float) -> None:
    wrong = patient(**{function: off_by(getattr(sdpa, function), which, by)})
    found = failing(examine(wrong, sdpa))
    assert ("triton", op, quantity) in found
    assert {(backend, op) for backend, op, _ in found} == {("triton", op)}


@pytest.mark.parametrize(
    ("function", "quantity"),
    [("compress_mean_forward", "mean"), ("compress_mean_backward", "dk"), ("gather_blocks_forward", "blocks")],
)
def test_a_wrong_compression_is_caught(function: str, quantity: str) -> None:
    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        return getattr(sdpa, function)(*args, **kwargs).roll(1, dims=1)

    assert failing(examine(patient(**{function: wrong}), sdpa)) == {("triton", "compress", quantity)}


def test_a_path_of_its_own_for_training_is_looked_at_too() -> None:
    """Nobody asks for the gradient of `lse` in training, and a backend may then compute the others differently."""

    def backward(upstream: Upstream, *args: Any) -> Any:
        off = upstream._replace(do=upstream.do * 1.001)
        return sdpa.sliding_backward(off if upstream.dlse is None else upstream, *args)

    found = failing(examine(patient(sliding_backward=backward)))
    expected = {f"d{x}{label}" for x in "qkv" for label in LABELS if label != " with dlse"}
    assert found == {("triton", "sliding", quantity) for quantity in expected}


@pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
@pytest.mark.parametrize(
    ("wrong", "labels"),
    [
        (lambda given, dk: dk * 0 + 7 if given.gate is not None else dk, (" gated", " gated and added")),
        (lambda given, dk: dk * 0 + 7 if given.dq is not None else dk, (" gated and added",)),
    ],
    ids=["always", "where it is added to"],
)
def test_a_layer_s_own_gradient_is_looked_at(
    branch: str, wrong: Callable[[Upstream, torch.Tensor], torch.Tensor], labels: tuple[str, ...]
) -> None:
    """A layer never runs the backward of a branch without a gate."""
    right = getattr(sdpa, f"{branch}_backward")

    def backward(upstream: Upstream, *args: Any) -> Any:
        dq, dk, dv = right(upstream, *args)
        return dq, wrong(upstream, dk), dv

    found = failing(examine(patient(**{f"{branch}_backward": backward})))
    name = "dk_cmp" if branch == "compressed" else "dk"
    assert found == {("triton", branch, f"{name}{label}") for label in labels}


@pytest.mark.parametrize(
    ("changed", "quantities"),
    [
        ({"gate": lambda x: x.contiguous().sqrt()}, {f"d{x} {label}" for x in "qkv" for label in GATED}),
        ({"product": lambda x: x + 1}, {f"d{x} {label}" for x in "qk" for label in GATED}),
        ({"dq": lambda x: None}, {"dq gated and added"}),
    ],
    ids=["gate", "product", "dq"],
)
def test_a_gate_a_product_or_a_sum_that_is_misread_is_caught(changed: dict[str, Any], quantities: set[str]) -> None:
    ((name, misread),) = changed.items()

    def backward(upstream: Upstream, saved: Saved, branch: Any) -> Any:
        """As a kernel has it: `delta` is made of the product."""
        if upstream.gate is None:
            return sdpa.sliding_backward(upstream, saved, branch)
        do, _, gate, product, before, _ = upstream._replace(**{name: misread(getattr(upstream, name))})
        # The gradient of `lse` moves `delta`.
        delta = gate * ((do * saved.o).sum(dim=-1) - product)
        dq, dk, dv = sdpa.sliding_backward(Upstream(do * gate[..., None], delta), saved, branch)
        return dq if before is None else before + dq, dk, dv

    found = failing(examine(patient(sliding_backward=backward)))
    assert found == {("triton", "sliding", quantity) for quantity in quantities}


def test_wrong_gradients_of_the_gates_alone_are_caught() -> None:
    def prepare(*args: Any) -> Any:
        d_gates, upstreams = sdpa.prepare_backward(*args)
        return d_gates.roll(1, dims=-1), upstreams

    assert failing(examine(patient(prepare_backward=prepare))) == {("triton", "combine", "dgates alone")}


def test_a_branch_that_is_prepared_wrongly_is_caught() -> None:
    def prepare(*args: Any) -> Any:
        d_gates, (cmp, sel, win) = sdpa.prepare_backward(*args)
        return d_gates, (cmp, sel, win._replace(gate=win.gate * 1.01))

    found = failing(examine(patient(prepare_backward=prepare)))
    assert found == {("triton", "sliding", f"d{x} {label}") for x in "qkv" for label in GATED}


def changed_selection(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: change(sdpa.select_blocks(*args, **kwargs))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x.flip(-1), id="not ascending"),
        pytest.param(lambda x: x.long(), id="another dtype"),
        pytest.param(lambda x: x[..., :-1], id="too few"),
        pytest.param(lambda x: x.where(x != 0, -1), id="without the first block"),
        pytest.param(lambda x: x.where(x < 0, x + 1), id="blocks that have not begun"),
    ],
)
def test_a_wrong_selection_is_caught(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert failing(examine(patient(select_blocks=changed_selection(change)))) == {("triton", "scores", "missed")}


def test_a_worse_selection_is_caught() -> None:
    def by_the_opposite(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return sdpa.select_blocks(-q, *args, **kwargs)

    checks = examine(patient(select_blocks=by_the_opposite))
    assert failing(checks) == {("triton", "scores", "missed")}
    assert all(check.error < 100 for check in checks)


def test_a_wrong_backend_is_named_with_its_error_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = patient(sliding_backward=off_by(sdpa.sliding_backward, 0, 0.25))
    assert run_doctor("--json", backends=(wrong, sdpa, reference)) == 1
    text = capsys.readouterr().out
    assert re.search(r"triton .*sliding .*dq, fixed-length, float32.* 2\.50e-01", text)
    assert 'backend="sdpa"' in text
    assert "WRONG" in text
    report = json.loads(text.splitlines()[-1])
    assert report["healthy"] is False
    assert {c["backend"] for c in report["checks"] if not c["agrees"]} == {"triton"}


@pytest.mark.parametrize("error", [BackendFailure("out of shared memory"), RuntimeError("x"), ValueError("x")])
def test_a_backend_that_raises_is_a_finding_not_a_crash(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise error

    assert run_doctor("--json", backends=(patient(selected_forward=raises, select_blocks=raises), sdpa)) == 1
    text = capsys.readouterr().out
    for op in ("selected", "scores"):
        assert re.search(rf"triton .*{op} .*fixed-length, float32.*{type(error).__name__}: {error}", text)
    assert [c["error"] for c in json.loads(text.splitlines()[-1])["checks"] if not c["agrees"]] == [None] * 6


def test_an_error_that_no_input_explains_is_not_a_finding() -> None:
    def has_a_bug(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("a bug")

    for function in ("sliding_forward", "select_blocks"):
        with pytest.raises(TypeError, match="a bug"):
            examine(patient(**{function: has_a_bug}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_requested_dtype_is_tested_besides_fp32(dtype: torch.dtype) -> None:
    checks = selftest.self_test([sdpa], replace(SHAPE, dtype=dtype))
    assert {check.dtype for check in checks} == {"float32", str(dtype).removeprefix("torch.")}
    assert not failing(checks)


def test_compiled_kernels_are_tested_in_the_requested_dtype_only() -> None:
    checks = selftest.self_test([patient(compiles=True), sdpa], replace(SHAPE, dtype=torch.bfloat16))
    found = {(check.backend, check.dtype) for check in checks}
    assert found == {("triton", "bfloat16"), ("sdpa", "bfloat16"), ("sdpa", "float32")}


def test_backends_are_asked_while_kernels_compile() -> None:
    """A backend that starts a process to answer does not make the compiler wait."""
    compiling = threading.Event()
    functions = {name: getattr(sdpa, name) for name in dir(sdpa) if not name.startswith("_")}
    slow = SimpleNamespace(**{**functions, "name": "slow"})
    slow.supports = lambda problem: None if compiling.wait(10) else "not asked while kernels compile"
    slow.compile_ahead = lambda run, progress: compiling.set()
    checks = selftest.self_test([slow], SHAPE)
    assert checks
    assert not failing(checks)
    assert not any(check.note for check in checks)


def test_an_error_in_the_requested_dtype_only_is_caught() -> None:
    def forward(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        o, lse = sdpa.sliding_forward(q, *args, **kwargs)
        return (o * 1.1, lse) if q.dtype == torch.bfloat16 else (o, lse)

    wrong = patient(sliding_forward=forward)
    assert not failing(examine(wrong))
    assert ("triton", "sliding", "o") in failing(selftest.self_test([wrong], replace(SHAPE, dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("function", "op"),
    [("compressed_forward", "compressed"), ("select_blocks", "scores"), ("sliding_forward", "sliding")],
)
def test_a_backend_that_misplaces_cached_queries_is_caught(function: str, op: str) -> None:
    def misplaced(*args: Any) -> Any:
        *tensors, branch = args
        if branch.sequences.q_start is not None:
            branch = replace(branch, sequences=replace(branch.sequences, q_start=branch.sequences.q_start - 20))
        return getattr(sdpa, function)(*tensors, branch)

    wrong = [check for check in examine(patient(**{function: misplaced})) if not check.agrees]
    assert {(check.op, check.case) for check in wrong} == {(op, "cached")}


def test_a_backend_without_a_cache_is_looked_at_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    def supports(problem: Problem) -> str | None:
        return "whole sequences only" if problem.cached else None

    assert run_doctor(backends=(patient(supports=supports), sdpa)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [words for words in lines if words[:2] == ["triton", "sliding"]]
    assert [row[-1] for row in rows] == ["ok", "only"]
    assert rows[1][3] == "cached"


def test_a_backend_that_declines_is_not_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(backends=(patient(supports=lambda problem: "no GPU"), sdpa)) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"triton\b.*: no GPU", text)) == len(OPS) + 1, "one per op, and the route"


def test_when_sdpa_is_wrong_the_reference_is_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = patient(name="sdpa", combine_backward=off_by(sdpa.combine_backward, 0, 1.0))
    assert run_doctor(backends=(wrong, reference)) == 1
    assert 'backend="reference"' in capsys.readouterr().out


def test_a_route_that_differs_by_op_and_direction_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    def supports(problem: Problem) -> str | None:
        if problem.op == "sliding" and problem.backward:
            return "no backward"
        return "only sliding" if problem.op != "sliding" else None

    assert run_doctor(backends=(patient(supports=supports), sdpa)) == 0
    text = capsys.readouterr().out
    assert ["sliding", "triton", "sdpa"] in [line.split()[:3] for line in text.splitlines()]
    assert "triton for compress, compress (values), compressed, scores, selected, combine: only sliding" in text
    assert "triton for sliding backward: no backward" in text


def test_settings_show_value_source_and_effect(
    capsys: pytest.CaptureFixture[str], environment: Callable[..., None], tmp_path: Path
) -> None:
    environment(NSA_FORCE_PARITY="0", NSA_SEQ_LEN="512", NSA_SEQ_LENS="1")
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"seq_len": 1, "batch_size": 4}))
    assert run_doctor("--settings-file", str(file), "--setting", "force_parity=on", "--json") == 0
    text = capsys.readouterr().out
    states = {state["name"]: state for state in json.loads(text.splitlines()[-1])["settings"]}
    expected = {
        "force_parity": (True, "command line"),
        "seq_len": (512, "environment"),
        "batch_size": (4, "file"),
        "no_gc": (False, "default"),
    }
    assert {name: (states[name]["value"], states[name]["source"]) for name in expected} == expected
    assert re.search(r"NSA_SEQ_LENS .*NSA_SEQ_LEN\b", text)
    assert re.search(r"sdpa: NSA_FORCE_PARITY .*command line", text)
    # No flash backend in this router, so its settings say that they do nothing.
    assert states["use_fa2"]["missing"] == "the flash backend"
    assert states["sdpa_audit"]["missing"] is None


def test_the_file_of_the_tiles_is_named(
    capsys: pytest.CaptureFixture[str], environment: Callable[..., None], tmp_path: Path
) -> None:
    file = tmp_path / "tiles.json"
    environment(NSA_TUNED_TILES=str(file))
    for content, reported in (
        (None, f"({file} is no file)"),
        ("{}", f"{file} (0 tiles) over"),
        ("[]", "WRONG: tiles file"),
    ):
        if content is not None:
            file.write_text(content)
        assert run_doctor("--json") == (1 if "WRONG" in reported else 0)
        text = capsys.readouterr().out
        assert f"{reported}" in next(line for line in text.splitlines() if "tiles of the kernels: " in line)
        assert reported in json.loads(text.splitlines()[-1])["tiles"]


@pytest.mark.parametrize("by_file", [False, True], ids=["--setting", "--settings-file"])
def test_tiles_are_those_of_the_settings_that_are_asked_about(
    by_file: bool, capsys: pytest.CaptureFixture[str], environment: Callable[..., None], tmp_path: Path
) -> None:
    tiles, file = tmp_path / "tiles.json", tmp_path / "settings.json"
    file.write_text(json.dumps({"tuned_tiles": str(tiles)}))
    flags = ["--settings-file", str(file)] if by_file else ["--setting", f"tuned_tiles={tiles}"]
    tiles.write_text("{}")
    assert run_doctor(*flags) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "tiles of the kernels" in line)
    assert f"{tiles} (0 tiles)" in line
    assert "self-test" in line, "which read other tiles"
    tiles.write_text("{bad")
    assert run_doctor(*flags) == 1
    assert capsys.readouterr().out.count(f"WRONG: tiles file {tiles} is not JSON") == 2


def test_a_misspelt_variable_is_in_the_report_only(
    capsys: pytest.CaptureFixture[str], environment: Callable[..., None], recwarn: pytest.WarningsRecorder
) -> None:
    environment(NSA_SEQ_LENS="1")
    assert run_doctor() == 0
    assert "NSA_SEQ_LENS" in capsys.readouterr().out
    # On a GPU the kernels read this process's settings too.
    settings.current()
    assert not [warning for warning in recwarn if "NSA_SEQ_LENS" in str(warning.message)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--setting", "use_fa=1"], "'use_fa' .*use_fa2"),
        (["--setting", "seq_len=x"], "seq_len .*'x'"),
        (["--settings-file", "/nowhere.json"], "/nowhere.json"),
        (["--heads", "3", "--groups", "2"], "n_heads is 3"),
        (["--seq-len", "0"], "seq_len is 0"),
    ],
)
def test_a_wrong_argument_is_status_2_and_a_sentence(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *SMALL, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("nsa doctor: error: ")
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err)
    assert not captured.out


@pytest.mark.parametrize(("error", "status"), [(ValueError("x is 1"), 2), (FileNotFoundError("no y"), 2)])
def test_any_command_turns_a_wrong_value_into_a_line(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("nsa.bench.run", run)
    assert cli.main(["bench", "train"]) == status
    assert capsys.readouterr().err == f"nsa bench: error: {error}\n"


def test_a_bug_in_a_command_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("nsa.bench.run", run)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["bench", "train"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_a_wrong_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cuda"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_unavailable_backend_is_shown_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsa.backends.triton.available", lambda: "the triton package is not installed")
    assert cli.main(["doctor", *SMALL]) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"triton\b.*the triton package is not installed", text)) >= 2, "backends and route"
    assert ["triton", "compressed"] not in [line.split()[:2] for line in text.splitlines()]


def test_a_backend_that_is_broken_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor("--json", backends=(ImportFailed("triton", "cannot be imported: undefined symbol"), sdpa)) == 1
    text = capsys.readouterr().out
    assert text.count("undefined symbol") >= 3, "backends, verdict and JSON"
    states = {state["name"]: state for state in json.loads(text.splitlines()[-1])["backends"]}
    assert [name for name, state in states.items() if state["broken"]] == ["triton"]


def test_key_and_value_compressions_are_routed_separately(capsys: pytest.CaptureFixture[str]) -> None:
    def supports(problem: Problem) -> str | None:
        return "8 wide" if problem.op == "compress" and problem.d_k == 8 else None

    assert run_doctor(backends=(patient(supports=supports), sdpa)) == 0
    rows = [line.split("  ")[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("  compress")]
    backends = {cells[0]: [cell.strip() for cell in cells[1:] if cell][:2] for cells in rows}
    assert backends["compress"] == ["sdpa", "sdpa"]
    assert backends["compress (values)"] == ["triton", "triton"]


@pytest.mark.parametrize(
    ("version", "known"),
    [("3.3.1", 0), ("3.4.0", 2), ("3.6.0+git1234", 3), ("3.7.0", 3), ("3.7.1", 2), ("4.0.0", 0),
     ("of unknown version", 0), (None, 0)],
)  # fmt: skip
def test_the_triton_versions_that_miscompile_are_known(version: str | None, known: int) -> None:
    assert len(machine.triton_notes(version)) == known


def test_an_affected_triton_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "triton_version", lambda: "3.6.0")
    assert "transposed accumulator" in (machine.find_versions().triton_note or "")
    assert "ptxas 12.8" in (machine.find_versions().triton_note or "")
    monkeypatch.setattr(machine, "triton_version", lambda: None)
    assert machine.find_versions().triton_note is None


def test_the_driver_is_read_from_the_kernel_module(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert machine.nvidia_driver(path) == "unknown"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: 12"
    )
    assert machine.nvidia_driver(path) == "570.133.20"


def test_a_gpu_is_named_with_capability_and_driver(capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor.diagnose(SHAPE, Router([sdpa, reference], Settings()), environ={})
    report = replace(report, gpus=(machine.Gpu("NVIDIA H200", "9.0", 139.8, "570.1"),), checks=())
    assert "gpu        NVIDIA H200, capability 9.0, 139.8 GiB, driver 570.1" in doctor.render_report(report)


def test_counters_of_this_process_are_shown(environment: Callable[..., None]) -> None:
    from nsa import ops

    q = torch.randn(1, 8, 2, 4)
    ops.sliding_attention(q, q, q, window=4)
    report = doctor.diagnose(SHAPE, Router([sdpa], Settings()), environ={})
    assert report.counts["calls"] == {"sliding/sdpa": 1}
    assert "calls  sliding/sdpa  1" in doctor.render_report(report)


def test_the_command_line_shows_commands_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, expected in ((["--version"], "nsa 0."), (["--help"], "examples:")):
        assert cli.main(flags) == 0
        assert expected in capsys.readouterr().out
    for flags in ([], ["docter"]):
        assert cli.main(flags) == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: nsa {name}")
    assert f"  nsa {name}" in text or f"example: nsa {name}" in text


@pytest.mark.slow
def test_the_installed_command_reads_the_environment() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    root = Path(cli.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "nsa.cli", "doctor", *SMALL, "--json"],
        env=clean | {"NSA_FORCE_PARITY": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.strip().startswith("force_parity")]
    assert line.split()[:4] == ["force_parity", "NSA_FORCE_PARITY", "on", "environment"]
    report = json.loads(done.stdout.splitlines()[-1])
    assert {route["backend"] for route in report["routes"]["forward"].values()} == {"reference"}
    assert report["healthy"] is True


@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 2, 64), (2, 1, 128)], ids=str)
def test_few_heads_are_no_false_alarm(shape: tuple[int, int, int]) -> None:
    """Where a row has few keys, `dq` is what two sums leave of each other: rounding, and nothing else."""
    heads, groups, width = shape
    problem = replace(SHAPE, n_heads=heads, n_groups=groups, d_k=width, d_v=width)
    assert not failing(selftest.self_test([sdpa], problem))


def test_a_huge_shape_is_reduced_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor("--heads", "4096", "--groups", "1", "--d-k", "256", "--d-v", "256") == 0
    assert "3 heads in 1 groups, head_dim 16/16" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(192, 128), (17, 16), (128, 512), (512, 384), (64, 64), (4, 8)])
def test_widths_that_differ_still_do_where_they_are_cut(
    widths: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    shape = replace(SHAPE, d_k=widths[0], d_v=widths[1], device=device)
    small = selftest.reduced_shape(shape, dtype)
    assert (small.d_k > small.d_v) == (widths[0] > widths[1])
    assert (small.d_k < small.d_v) == (widths[0] < widths[1])
    assert small.d_k <= shape.d_k
    assert small.d_v <= shape.d_v


def test_widths_that_a_gpu_takes_are_left_alone() -> None:
    small = selftest.reduced_shape(replace(SHAPE, d_k=256, d_v=192, device="cuda"), torch.bfloat16)
    assert (small.d_k, small.d_v) == (256, 192)


def test_the_doctor_says_which_measurements_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    routes = [MeasuredRoute(gpu=gpu, op="sliding", order=("triton", "sdpa")) for gpu in ("NVIDIA H200", "NVIDIA A100")]
    path = tmp_path / "routes.json"
    path.write_text("{}")
    monkeypatch.setattr(doctor, "routes_path", lambda: path)
    router = Router([sdpa], Settings(), routes, gpu="NVIDIA H200 NVL")
    assert f"1 of 2 in {path} are for NVIDIA H200" in doctor.routes_origin(router)
    path.unlink()
    assert f"{path} is missing" in doctor.routes_origin(router)
