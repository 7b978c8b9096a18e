"""Routing: which backend runs, which is tried next, what is an error, and that what ran is counted and logged."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa import NSAAttention, NSAConfig, ops
from nsa.backends import reference, routing, sdpa, stages
from nsa.backends.measured_routes import MeasuredRoute
from nsa.backends.problem import OPS, Problem
from nsa.backends.routing import BackendFailure, CallUnsupported, FailureReason, ImportFailed, Route, Router
from nsa.settings import Settings

PROBLEM = Problem(
    op="sliding", batch=1, n_queries=64, n_keys=64, n_heads=4, n_groups=2, d_k=16, d_v=16, dtype=torch.float32
)


class Fake:
    """A backend that answers with its own name, or as `declines` and `raises` say."""

    def __init__(self, name: str, *, declines: str | None = None, raises: Exception | None = None) -> None:
        self.name = name
        self.declines = declines
        self.raises = raises
        self.asked = 0

    def supports(self, problem: Problem) -> str | None:
        self.asked += 1
        return self.declines

    def sliding_forward(self, *args: Any) -> str:
        if self.raises is not None:
            raise self.raises
        return self.name


def router_of(*backends: Fake | ImportFailed, config: Settings | None = None, **rest: Any) -> Router:
    return Router(backends, config or Settings(), **rest)


def run(router: Router, problem: Problem = PROBLEM, *more: torch.Tensor, **options: Any) -> Any:
    return router.run(problem, "sliding_forward", torch.zeros(2, 3), *more, **options)


@pytest.mark.parametrize(("old", "new"), [("chosen", "backend"), ("told", "describe"), ("refusal", "error_message")])
def test_an_old_name_of_a_route_warns(old: str, new: str) -> None:
    route = Route(PROBLEM, "sdpa", "why", {})
    with pytest.warns(DeprecationWarning, match=rf"Route\.{old} .*{new}") as warned:
        assert getattr(route, old) == getattr(route, new)
    assert warned[0].filename == __file__


def test_the_old_name_of_a_field_of_a_problem_warns() -> None:
    expected = replace(PROBLEM, varlen=True)
    with pytest.warns(DeprecationWarning, match=r"Problem\(packed=.*varlen") as warned:
        found = Problem(**{name: value for name, value in vars(expected).items() if name != "varlen"}, packed=True)
    assert warned[0].filename == __file__
    assert found == expected
    with pytest.warns(DeprecationWarning, match=r"Problem\.packed .*varlen"):
        assert found.packed  # type: ignore[attr-defined]


def test_the_old_name_of_measured_routes_warns() -> None:
    measured = MeasuredRoute(gpu="cpu", op="sliding", order=("sdpa",))
    with pytest.warns(DeprecationWarning, match="preferences.*measured_routes") as warned:
        router = Router([], Settings(), preferences=[measured])
    assert warned[0].filename == __file__
    assert router.measured_routes == (measured,)


def test_auto_takes_the_first_that_supports_the_problem() -> None:
    router = router_of(Fake("triton", declines="no GPU"), Fake("sdpa"), Fake("reference"))
    assert run(router) == "sdpa"
    route = router.route(PROBLEM)
    assert route.reasons["triton"] == "no GPU"
    assert route.reasons["reference"].startswith("sdpa ")
    assert len(route.reasons) == 2
    assert dict(router.counts.calls) == {("sliding", "sdpa"): 1}


def test_a_decision_is_taken_once() -> None:
    first, second = Fake("triton", declines="no GPU"), Fake("sdpa")
    router = router_of(first, second)
    for _ in range(5):
        run(router)
    assert (first.asked, second.asked) == (1, 1)


def test_remembered_decisions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_ROUTES", 8)
    router = router_of(Fake("sdpa"))
    for length in range(1, 100):
        run(router, replace(PROBLEM, n_queries=length))
    assert len(router.routes) <= 8


def test_auto_falls_back_after_a_failure_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    router = router_of(
        Fake("triton", raises=BackendFailure("out of shared memory")),
        Fake("flash", declines="head_dim 16"),
        Fake("sdpa"),
        Fake("reference"),
    )
    with caplog.at_level(logging.WARNING, logger="nsa"):
        assert [run(router) for _ in range(3)] == ["sdpa"] * 3
    assert dict(router.counts.calls) == {("sliding", "sdpa"): 3}
    assert dict(router.counts.failures) == {("sliding", "triton", "out of shared memory"): 3}
    (record,) = caplog.records
    for part in ("triton", "sliding_forward", "S=64", "float32", "out of shared memory", " to sdpa"):
        assert part in record.message


def test_what_failed_on_a_problem_is_not_tried_again() -> None:
    broken = Fake("triton", raises=BackendFailure("does not compile"))
    router = router_of(broken, Fake("sdpa"))
    assert run(router) == "sdpa"
    broken.raises = AssertionError("tried again")
    assert run(router) == "sdpa"
    assert router.counts.failures.total() == 2
    assert router.route(PROBLEM).backend == "sdpa"
    assert router.route(PROBLEM).reasons["triton"] == "failed before: does not compile"
    with pytest.raises(BackendFailure, match=r"triton failed before .*does not compile; strict"):
        run(router, strict=True)
    # Another problem is another kernel.
    broken.raises = None
    assert run(router, replace(PROBLEM, n_queries=65)) == "triton"


def test_an_unsupported_call_does_not_rule_out_the_next() -> None:
    particular = Fake("triton", raises=CallUnsupported("this window"))
    router = router_of(particular, Fake("sdpa"))
    assert [run(router) for _ in range(2)] == ["sdpa", "sdpa"]
    assert router.counts.failures.total() == 2
    with pytest.raises(BackendFailure, match=r"this window; strict"):
        run(router, strict=True)
    particular.raises = None
    assert run(router, strict=True) == "triton"


def test_when_everything_failed_before_it_is_an_error() -> None:
    router = router_of(Fake("triton", raises=BackendFailure("one")))
    for match in (r"sliding_forward on .*: one; ", "failed before: one"):
        with pytest.raises(BackendFailure, match=match):
            run(router)


def test_a_failure_is_logged_once_per_kind_of_call(caplog: pytest.LogCaptureFixture) -> None:
    router = router_of(Fake("triton", raises=BackendFailure("no")), Fake("sdpa"))
    with caplog.at_level(logging.WARNING, logger="nsa"):
        for problem in (PROBLEM, replace(PROBLEM, n_queries=7), replace(PROBLEM, dtype=torch.bfloat16)):
            run(router, problem)
    assert len(caplog.records) == 2


def test_a_named_backend_that_fails_says_where(caplog: pytest.LogCaptureFixture) -> None:
    router = router_of(Fake("triton", raises=BackendFailure("boom")), Fake("sdpa"))
    with pytest.raises(BackendFailure, match=r"triton .*sliding_forward on sliding .*boom; backend='triton'"):
        run(router, backend="triton")
    assert router.counts.failures.total() == 1


class Configured(Fake):
    """A backend with settings of its own: where they force it on, and where they decline."""

    def __init__(self, name: str, *, forced: str | None = None, off: str | None = None, **rest: Any) -> None:
        super().__init__(name, **rest)
        self.forced, self.off = forced, off

    def forced_on(self, problem: Problem) -> str | None:
        return self.forced

    def declined(self, problem: Problem, *, named: bool) -> str | None:
        return None if named and self.off == "by auto" else self.off


def test_a_backend_that_a_setting_forces_on_goes_first() -> None:
    measured = [MeasuredRoute(gpu="cpu", op="sliding", order=("sdpa", "triton"))]
    forced = Configured("flash", forced="a setting")
    router = router_of(Fake("triton"), forced, Fake("sdpa"), measured_routes=measured)
    assert run(router) == "flash"
    assert router.route(PROBLEM).why == "a setting"
    # Where it cannot run, the others come in the measured order.
    for changes in ({"declines": "float64"}, {"raises": BackendFailure("no kernel image")}, {"off": "too short"}):
        cannot = Configured("flash", forced="a setting", **changes)
        router = router_of(Fake("triton"), cannot, Fake("sdpa"), measured_routes=measured)
        assert [run(router) for _ in range(2)] == ["sdpa", "sdpa"]
        assert re.match(r"measured .*cpu$", router.route(PROBLEM).why)


def test_a_backend_that_settings_decline_is_not_asked() -> None:
    for off in ("by auto", "switched off"):
        backend = Configured("flash", off=off)
        router = router_of(backend, Fake("sdpa"))
        assert router.route(PROBLEM).backend == "sdpa"
        assert router.route(PROBLEM).reasons["flash"] == off
        assert backend.asked == 0, "asking may start a probe"
        assert (router.route(PROBLEM, "flash").backend == "flash") is (off == "by auto")


def test_strict_turns_a_fallback_into_an_error() -> None:
    router = router_of(Fake("triton", raises=BackendFailure("out of shared memory")), Fake("sdpa"))
    with pytest.raises(BackendFailure, match=r"triton .*sliding_forward on sliding .*out of shared memory; strict"):
        run(router, strict=True)
    assert not router.counts.calls
    assert router.counts.failures.total() == 1


def test_when_every_backend_fails_the_last_reason_is_raised() -> None:
    router = router_of(Fake("triton", raises=BackendFailure("one")), Fake("sdpa", raises=BackendFailure("two")))
    with pytest.raises(BackendFailure, match=r"sdpa failed .* two; "):
        run(router)
    assert router.counts.failures.total() == 2


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("a bug"), torch.OutOfMemoryError("a bug")])
def test_any_other_error_is_a_bug_and_propagates(error: Exception) -> None:
    router = router_of(Fake("triton", raises=error), Fake("sdpa"))
    with pytest.raises(type(error), match="a bug"):
        run(router)
    assert not router.counts.calls
    assert not router.counts.failures


def test_a_named_backend_runs_whatever_comes_before_it() -> None:
    assert run(router_of(Fake("triton"), Fake("sdpa")), backend="sdpa") == "sdpa"


def test_a_named_backend_never_falls_back() -> None:
    router = router_of(Fake("triton", declines="no GPU"), Fake("sdpa"))
    with pytest.raises(ValueError, match=r"supports sliding .*backend='triton'.*triton: no GPU"):
        run(router, backend="triton")
    failing = router_of(Fake("triton", raises=BackendFailure("out of shared memory")), Fake("sdpa"))
    with pytest.raises(BackendFailure, match="out of shared memory"):
        run(failing, backend="triton")
    assert not failing.counts.calls


def test_an_absent_backend_is_an_error_with_the_reason() -> None:
    router = router_of(Fake("sdpa"), absent={"flash": "left out"})
    with pytest.raises(ValueError, match="flash: left out"):
        run(router, backend="flash")
    assert router.route(PROBLEM).reasons["flash"] == "left out"
    with pytest.raises(ValueError, match=r"backend is 'cudnn'; accepted: 'auto' .*\['sdpa', 'flash'\]"):
        run(router, backend="cudnn")


BROKEN = ImportFailed("triton", "broken: undefined symbol")


def test_a_broken_backend_fails_where_it_would_have_run(caplog: pytest.LogCaptureFixture) -> None:
    router = router_of(BROKEN, Fake("sdpa"))
    assert router.route(PROBLEM).backend == "sdpa"
    assert dict(router.route(PROBLEM).reasons) == {"triton": BROKEN.reason}
    with caplog.at_level(logging.WARNING, logger="nsa"):
        assert [run(router) for _ in range(3)] == ["sdpa"] * 3
        with pytest.raises(BackendFailure, match=r"triton failed .* sliding .*undefined symbol; strict"):
            run(router, strict=True)
    assert dict(router.counts.failures) == {("sliding", "triton", BROKEN.reason): 4}
    (record,) = caplog.records
    for part in ("triton", "sliding_forward", "S=64", "float32", BROKEN.reason, " to sdpa"):
        assert part in record.message
    with pytest.raises(BackendFailure, match=r"supports sliding .*backend='triton'.*undefined symbol"):
        run(router, backend="triton")
    assert router.counts.failures.total() == 5


def test_a_broken_backend_behind_another_is_no_failure() -> None:
    router = router_of(Fake("sdpa"), BROKEN)
    assert run(router, strict=True) == "sdpa"
    assert not router.counts.failures


def test_a_failure_reason_counts_like_a_broken_backend(caplog: pytest.LogCaptureFixture) -> None:
    faulty = Fake("triton", declines=FailureReason("the probe crashed"))
    router = router_of(faulty, Fake("sdpa"))
    with caplog.at_level(logging.WARNING, logger="nsa"):
        assert [run(router) for _ in range(2)] == ["sdpa"] * 2
    assert dict(router.counts.failures) == {("sliding", "triton", "the probe crashed"): 2}
    (record,) = caplog.records
    assert re.search(r"the probe crashed; .* to sdpa", record.message)
    with pytest.raises(BackendFailure, match=r"triton failed .*the probe crashed; strict"):
        run(router, strict=True)
    with pytest.raises(BackendFailure, match=r"backend='triton'.*the probe crashed"):
        run(router, backend="triton")
    assert run(router_of(Fake("sdpa"), faulty), strict=True) == "sdpa", "not where another one comes first"


def test_when_all_that_is_left_is_broken_that_is_a_failure() -> None:
    router = router_of(BROKEN, Fake("sdpa", declines="no torch"))
    with pytest.raises(BackendFailure, match=f"triton: {BROKEN.reason}; sdpa: no torch"):
        run(router)


def test_no_backend_is_an_error_with_every_reason() -> None:
    with pytest.raises(ValueError, match="triton: no GPU; sdpa: no torch"):
        run(router_of(Fake("triton", declines="no GPU"), Fake("sdpa", declines="no torch")))


def test_force_parity_runs_the_reference_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config = Settings.load(environ={"NSA_FORCE_PARITY": "1"})
    router = router_of(Fake("triton"), Fake("reference"), config=config)
    with caplog.at_level(logging.WARNING, logger="nsa"):
        assert run(router) == "reference"
        assert not caplog.records
        assert [run(router, replace(PROBLEM, batch=n), backend="triton") for n in (1, 2)] == ["reference"] * 2
    (record,) = caplog.records
    assert "NSA_FORCE_PARITY is on (environment)" in record.message
    assert "backend='triton'" in record.message
    assert router.route(PROBLEM).reasons == {"triton": "NSA_FORCE_PARITY is on (environment)"}


def test_explain_lists_each_op_with_its_reasons() -> None:
    router = router_of(Fake("triton", declines="no GPU"), Fake("sdpa"), absent={"flash": "left out"})
    text = str(router.explain(PROBLEM.for_op("attention")))
    assert text.startswith("routes for attention B=1 S=64")
    for op in OPS:
        assert f"{op:<11} sdpa: first" in text
    assert text.count("not triton: no GPU") == text.count("not flash: left out") == len(OPS)


def test_explain_separates_compressions_of_different_head_dims() -> None:
    problem = replace(PROBLEM.for_op("attention"), d_v=8)
    lines = str(router_of(Fake("sdpa")).explain(problem)).splitlines()
    named = [line.partition("sdpa: ")[0].rstrip() for line in lines if line.startswith("compress")]
    assert named == ["compress", "compress (values)", "compressed"]
    assert len({line.index("sdpa: ") for line in lines[1:]}) == 1


def test_explain_of_a_backward_pass_shows_another_forward_route() -> None:
    measured = MeasuredRoute(gpu="cpu", op="sliding", order=("sdpa", "triton"), mode="bwd")
    router = router_of(Fake("triton"), Fake("sdpa"), measured_routes=[measured])
    problem = replace(PROBLEM.for_op("attention"), backward=True)
    routes = router.explain(problem).routes
    assert (routes["sliding"].backend, routes["sliding (forward)"].backend) == ("sdpa", "triton")
    assert [op for op in routes if op.endswith("(forward)")] == ["sliding (forward)"]
    assert not [op for op in router.explain(replace(problem, backward=False)).routes if op.endswith("(forward)")]


def test_explain_takes_other_settings() -> None:
    problem = PROBLEM.for_op("attention")
    parity = Settings.load(environ={}, command_line={"force_parity": True})
    assert {route.backend for route in routing.explain(problem, config=parity).routes.values()} == {"reference"}
    default = routing.explain(problem, config=Settings()).routes.values()
    assert {route.backend for route in default} == {"sdpa"}


@pytest.mark.parametrize("varlen", [False, True])
def test_explain_routes_exactly_what_the_ops_route(varlen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router([sdpa], Settings())
    monkeypatch.setattr(stages, "router", lambda: router)
    leaf: Callable[..., torch.Tensor] = lambda *size: torch.randn(*size, requires_grad=True)  # noqa: E731
    # A varlen row has a slot for every stride, a fixed-length one exactly its blocks.
    length, n_cmp = 100, 6 if varlen else 5
    q, k, v = leaf(1, length, 4, 16), leaf(1, length, 2, 16), leaf(1, length, 2, 8)
    k_cmp, v_cmp, gates = leaf(1, n_cmp, 2, 16), leaf(1, n_cmp, 2, 8), leaf(1, length, 4, 3)
    documents: dict[str, Any] = {"cu_seqlens": torch.tensor([0, length], dtype=torch.int32) if varlen else None}
    for x in (k, v):
        ops.compress_mean(x, block=32, stride=16, **documents).sum().backward()
    o_cmp, lse = ops.compressed_attention(q, k_cmp, v_cmp, block=32, stride=16, **documents)
    counts: dict[str, Any] = {"block": 32, "stride": 16, "select_block": 32, "n_select": 3, "n_init": 1, "n_local": 1}
    indices = ops.select_blocks(q, k_cmp, lse, **counts, **documents)
    o_sel, _ = ops.selected_attention(q, k, v, indices, select_block=32, **documents)
    o_win, _ = ops.sliding_attention(q, k, v, window=16, **documents)
    ops.combine(o_cmp, o_sel, o_win, gates).sum().backward()

    routed = {problem for problem, _ in router.routes}
    whole = replace(PROBLEM.for_op("attention"), n_queries=length, n_keys=length, d_v=8, varlen=varlen)
    explained = {
        route.problem
        for backward in (False, True)
        for route in router.explain(replace(whole, backward=backward)).routes.values()
    }
    assert routed == explained


def test_explain_has_no_compression_for_a_cache() -> None:
    cached = replace(PROBLEM.for_op("attention"), n_queries=1, cached=True)
    assert set(OPS) - Router([sdpa], Settings()).explain(cached).routes.keys() == {"compress"}


def test_explain_routes_a_cached_step_as_the_layer_does() -> None:
    config = NSAConfig(dim=32, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, w=24)
    attn = NSAAttention(config)
    cache = attn.new_cache(1, 300, static=True)
    router = routing.router()
    with torch.no_grad():
        attn(torch.randn(1, 100, 32), cache=cache)
        router.routes.clear()
        attn(torch.randn(1, 1, 32), cache=cache)
    whole = replace(PROBLEM.for_op("attention"), n_queries=1, n_keys=300, cached=True)
    explained = router.explain(whole, block=config.l, stride=config.d, window=config.w).routes
    routed = {problem.op: problem for problem, _ in router.routes}
    assert {op: route.problem for op, route in explained.items()} == routed


def test_explain_has_the_compression_of_values() -> None:
    routes = router_of(Fake("sdpa")).explain(replace(PROBLEM.for_op("attention"), d_v=8)).routes
    assert (routes["compress"].problem.d_k, routes["compress (values)"].problem.d_k) == (16, 8)


def test_counts_show_what_ran_and_can_be_cleared() -> None:
    router = router_of(Fake("triton", raises=BackendFailure("no")), Fake("sdpa"))
    run(router)
    assert router.counts.as_dict() == {"calls": {"sliding/sdpa": 1}, "failures": {"sliding/triton: no": 1}}
    assert str(router.counts) == "calls: sliding/sdpa 1\nfailed 1x: sliding/triton: no"
    router.counts.clear()
    assert str(router.counts) == "calls: none"
    assert router.counts.as_dict() == {"calls": {}, "failures": {}}


def test_no_call_is_lost_when_threads_count_at_once() -> None:
    router = router_of(Fake("sdpa"))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [run(router) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert router.counts.calls["sliding", "sdpa"] == 2000


@pytest.fixture
def quiet_logger() -> Any:
    """The `nsa` logger as an application without any logging set-up has it."""
    before = routing.log.level, routing.log.handlers[:]
    routing.log.setLevel(logging.NOTSET)
    yield routing.log
    routing.log.setLevel(before[0])
    routing.log.handlers[:] = before[1]


def test_an_audit_logs_each_path_once(quiet_logger: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    router = router_of(Fake("triton", declines="no"), Fake("sdpa"), config=Settings(sdpa_audit=True))
    for batch in (1, 1, 2, 1):
        run(router, replace(PROBLEM, batch=batch))
    assert len(caplog.messages) == 2
    for part in ("branch=sliding", "path=sdpa.sliding_forward", "(2, 3):float32:(3, 1)"):
        assert part in caplog.messages[0]
    assert float(caplog.messages[0].split("ms=")[1].split()[0]) >= 0
    assert "reason='first " in caplog.messages[0]


def test_timing_logs_every_call_with_its_milliseconds(
    quiet_logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    backends = Fake("triton", raises=BackendFailure("no")), Fake("sdpa")
    router = router_of(*backends, config=Settings(debug_timing=True))
    run(router, PROBLEM, torch.tensor([0, 2], dtype=torch.int32))
    run(router, backend="sdpa")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(lines) == 2
    assert "(2,):int32:(1,)" in lines[0]
    assert "reason='triton failed: no'" in lines[0]
    assert "backend='sdpa'" in lines[1]
    assert float(lines[0].split("ms=")[1].split()[0]) >= 0


def test_the_log_is_shown_even_where_logging_was_never_set_up(quiet_logger: logging.Logger) -> None:
    alone = logging.getLogger("nsa-test-alone")
    alone.propagate = False
    routing.make_visible(alone)
    assert alone.isEnabledFor(logging.INFO)
    assert alone.handlers


def test_backends_are_found_or_absent() -> None:
    found, absent = routing.find_backends(Settings())
    names = {backend.name for backend in found}
    assert {"sdpa", "reference"} <= names
    assert names | set(absent) == set(routing.BACKEND_MODULES)
    assert [b.name for b in found] == [name for name in routing.BACKEND_MODULES if name in names]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import no_such_library", r"needs .*\bno_such_library\b.*"),
        ("raise ImportError('undefined symbol: x')", r".*: undefined symbol: x"),
        ("name = 'x'", r".*supports\(\)"),
        (None, r"[^:]*\bnsa"),
        ("supports = lambda problem: None\navailable = lambda: 'no GPU'", "no GPU"),
    ],
)
def test_a_backend_that_cannot_be_imported_says_why(
    source: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"backend_{abs(hash(source))}"
    if source is not None:
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = routing.find_backend("fake", name)
    assert isinstance(found, ImportFailed) == ("symbol" in expected)
    assert re.fullmatch(expected, found if isinstance(found, str) else found.reason)


def test_a_backend_that_breaks_when_imported_counts_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: Callable[..., None]
) -> None:
    (tmp_path / "backend_broken.py").write_text("raise ImportError('undefined symbol: x')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(routing.BACKEND_MODULES, "triton", "backend_broken")
    q = torch.randn(1, 8, 2, 4)
    ops.sliding_attention(q, q, q, window=4)
    assert routing.router().counts.as_dict() == {
        "calls": {"sliding/sdpa": 1},
        "failures": {f"sliding/triton: {routing.router().broken['triton']}": 1},
    }
    with pytest.raises(BackendFailure, match=r"triton failed .*undefined symbol: x; strict"):
        ops.sliding_attention(q, q, q, window=4, strict=True)


@pytest.mark.parametrize("rest", ["", "available = lambda: None"])
def test_a_backend_is_available_unless_it_says_otherwise(
    rest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"backend_available_{len(rest)}"
    (tmp_path / f"{name}.py").write_text(f"supports = lambda problem: None\n{rest}")
    monkeypatch.syspath_prepend(tmp_path)
    assert routing.find_backend("fake", name).__name__ == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "attend"}, "op is 'attend'"),
        ({"dtype": torch.int32}, r"dtype is torch\.int32; accepted"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"n_heads": 3}, "n_heads is 3; accepted: .*n_groups = 2"),
        ({"n_groups": 0}, "n_groups is 0"),
        ({"d_k": 0}, "d_k is 0"),
        ({"n_keys": -1}, "n_keys is -1"),
        ({"batch": 1.5}, r"batch is 1\.5"),
        ({"device": torch.device("cpu")}, "device is device"),
        ({"device": "cuda:0"}, "device is 'cuda:0'"),
        ({"device": "banana"}, "device is 'banana'"),
        ({"device": "CPU"}, "device is 'CPU'"),
        ({"varlen": 1}, "varlen is 1"),
    ],
)
def test_a_wrong_problem_is_an_error_that_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PROBLEM, **changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"problem": "attention"}, "problem is 'attention'"),
        ({"problem": PROBLEM}, r"problem\.op is 'sliding'"),
        ({"stride": 0}, "stride is 0"),
        ({"block": 24}, "block is 24; accepted: .*stride = 16"),
        ({"backend": ["sdpa"]}, r"backend is \['sdpa'\]"),
    ],
)
def test_explain_names_a_wrong_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        routing.explain(**{"problem": PROBLEM.for_op("attention"), **arguments})


def test_a_mistake_in_our_own_imports_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "backend_own.py").write_text("from nsa.backends.problem import NoSuchThing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="NoSuchThing"):
        routing.find_backend("fake", "backend_own")


def test_the_process_router_takes_the_settings_of_the_process(environment: Callable[..., None]) -> None:
    environment(NSA_FORCE_PARITY="1")
    assert not routing.counts_so_far().calls
    q = torch.randn(1, 8, 2, 4)
    ops.sliding_attention(q, q, q, window=4)
    assert dict(routing.counts_so_far().calls) == {("sliding", reference.name): 1}
