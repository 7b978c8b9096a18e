"""Routing of ops to backends: the first that supports the problem, with the reason for each that does not.

A named backend runs or raises. Under `auto`, a backend that fails at run time is logged once and counted, and the next
one runs; `strict` turns that into an error. `explain` reports the routes beforehand, the counters what ran. Only
`NSA_FORCE_PARITY` overrides a name: the reference runs everywhere, with a warning.

A route is decided once per problem and cached. Backends are known by what they answer (see `Backend`), never by name.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from nsa import settings
from nsa.backends.counts import Counts
from nsa.backends.gpu import gpu_family, gpu_name
from nsa.backends.measured_routes import MeasuredRoute, load_routes, routes_path
from nsa.backends.problem import OPS, Problem
from nsa.captures import Captures
from nsa.config import BACKENDS, NSAConfig, check_compression, require, require_positive_int
from nsa.geometry import n_compressed
from nsa.lazy import renamed_attributes, renamed_property, warn_renamed
from nsa.settings import Settings

log = logging.getLogger("nsa")

# In the order in which `auto` tries them.
BACKEND_MODULES = {name: f"nsa.backends.{name}" for name in BACKENDS if name != "auto"}

# What NSA_FORCE_PARITY runs.
PARITY_BACKEND = "reference"
# Routes cached at once: sequence lengths may never repeat, and memory must not grow with them.
MAX_ROUTES = 4096
__getattr__ = renamed_attributes(
    __name__, {"Broken": "ImportFailed", "CallRefused": "CallUnsupported", "Fault": "FailureReason"}
)


class Backend(Protocol):
    """A module, or any object, with a name and the functions of the ops it implements.

    Optional members:
        available() -> str | None: Why it can run nothing on this machine; None if it can.
        declined(problem, *, named) -> str | None: Why the user's settings keep it from a problem, called before
            `supports`; `named` if it was requested by name.
        forced_on(problem) -> str | None: The setting that puts it before all other backends.
        explicit_only(problem) -> str | None: Why `auto` must not pick it for a problem that it supports.
        kernel_set(problem, forward, backward, direct, select_block, n_select, block, stride, window) -> str: Which
            of its kernels run an attention, for `explain`. The forward passes of the ops `forward` and the backward
            passes of `backward` are routed to it; `direct`: those of `forward` that are called without the router, as a
            kernel of two branches has to be.
        recover_from(failure) -> str | None: What it runs from now on in place of kernels of its own that failed; None
            if it has no others.
        configure(settings): Of a module: returns the backend to use in its place.

    A function may have `resolve()`, which returns the function to call in its place and the exceptions, besides
    `BackendFailure`, that mean that the backend cannot run.
    """

    name: str

    def supports(self, problem: Problem) -> str | None:
        """Return None if it can run the problem, else why not; a `FailureReason` if it should have been able to."""


@dataclass(frozen=True)
class ImportFailed:
    """Stands for a backend that is installed but cannot be imported: it fails wherever it would have been tried."""

    name: str
    reason: str


class FailureReason(str):
    """A reason that is a failure, not a limit: the backend would run the problem if it worked."""

    __slots__ = ()


class BackendFailure(RuntimeError):
    """A backend should have run and could not: a broken library, a kernel that cannot be launched."""


class CallUnsupported(BackendFailure):
    """One call cannot run because of its window or its cache's strides; other calls of the same problem may."""


@dataclass(frozen=True)
class Route:
    """The decision for one problem."""

    problem: Problem
    backend: str | None  # None: no backend runs it
    why: str  # why this one, or which backend was requested
    reasons: Mapping[str, str]  # why each of the others was not
    may_fall_back: bool = False
    # Backends that should have run and failed, earlier on this problem, in a probe or on import, and why.
    failed: Mapping[str, str] = field(default_factory=dict)

    chosen = renamed_property("Route.chosen", "backend")
    told = renamed_property("Route.told", "describe")
    refusal = renamed_property("Route.refusal", "error_message")

    def describe(self, part: str, width: int) -> str:
        """The route in words after the name of what it is for, padded to `width`."""
        lines = [f"{part:<{width}} {f'{self.backend}: {self.why}' if self.backend else 'no backend runs this'}"]
        lines += [f"{'':<{width}} not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)

    def error_message(self) -> str:
        """Why nothing runs the problem."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"no backend supports {self.problem} ({self.why}): {reasons}"


@dataclass(frozen=True)
class Explanation:
    """The routes of the ops of one attention, by op; an op that runs on two problems has two entries."""

    problem: Problem
    routes: Mapping[str, Route]
    kernels: Mapping[str, str] = field(default_factory=dict)  # by backend, of those that run an op

    def __str__(self) -> str:
        width = max(map(len, (*OPS, *self.routes))) + 1
        routes = [route.describe(part, width) for part, route in self.routes.items()]
        kernels = [f"kernels of {name}: {which}" for name, which in self.kernels.items()]
        return "\n".join([f"routes for {self.problem}", *routes, *kernels])


class Router:
    """Picks a backend for each problem, runs it, and counts what ran.

    Args:
        backends: In the default order.
        config: The settings to route with.
        measured_routes: Measured exceptions to the default order; the first that covers a problem applies.
        gpu: The GPU whose measurements hold for CUDA tensors; by default this process's.
        absent: Known backends that are not available, and why.
        preferences: Deprecated name of `measured_routes`, for one version.
    """

    def __init__(
        self,
        backends: Sequence[Backend | ImportFailed],
        config: Settings,
        measured_routes: Iterable[MeasuredRoute] = (),
        gpu: str | None = None,
        absent: Mapping[str, str] | None = None,
        *,
        preferences: Iterable[MeasuredRoute] | None = None,
    ) -> None:
        if preferences is not None:
            warn_renamed("Router(preferences=...)", "measured_routes")
            measured_routes = preferences
        self.names = [backend.name for backend in backends]
        self.backends = {backend.name: backend for backend in backends if not isinstance(backend, ImportFailed)}
        self.broken = {backend.name: backend.reason for backend in backends if isinstance(backend, ImportFailed)}
        self.config = config
        self.measured_routes = tuple(measured_routes)
        self.gpu = gpu
        self.absent = {**(absent or {}), **self.broken}
        self.counts = Counts()
        self.routes: dict[tuple[Problem, str], Route] = {}
        # Looked up by the ops, by what they know of a call: single stages, and plans of whole calls.
        self.stages: dict[tuple[Any, ...], Any] = {}
        self.plans: dict[tuple[Any, ...], Any] = {}
        # Whole calls of small problems, as CUDA graphs.
        self.captures: Captures[Any] = Captures()
        # A kernel that cannot be compiled for a problem is not tried again at every step.
        self.failed: dict[tuple[Problem, str], str] = {}
        self.logged: set[object] = set()
        self.logs_calls = config.debug_timing or config.sdpa_audit
        if self.logs_calls:
            make_visible(log)

    def measured_route(self, problem: Problem) -> MeasuredRoute | None:
        """The measured route that covers the problem, if any."""
        if not self.measured_routes:
            return None
        device = gpu_family(self.gpu or gpu_name()) if problem.device == "cuda" else problem.device
        return next((route for route in self.measured_routes if route.covers(problem, device)), None)

    def ask(self, name: str, question: str, *args: Any, **kwargs: Any) -> str | None:
        """The answer of an optional member of a backend; None where it has none."""
        member = getattr(self.backends.get(name), question, None)
        return None if member is None else member(*args, **kwargs)

    def order(self, problem: Problem) -> tuple[list[str], dict[str, str]]:
        """The backends in the order to try them, and why each would be the first that runs."""
        names, why = list(self.names), "first that supports it"
        measured = self.measured_route(problem)
        if measured is not None:
            # A backend that the route does not list keeps its place.
            listed = iter([name for name in measured.order if name in names])
            names = [next(listed) if name in measured.order else name for name in names]
            why = f"measured order on {measured.gpu}"
        forced = {name: setting for name in names if (setting := self.ask(name, "forced_on", problem)) is not None}
        names = [*forced, *(name for name in names if name not in forced)]
        return names, dict.fromkeys(names, why) | forced

    def route(self, problem: Problem, backend: str = "auto") -> Route:
        """Decide which backend runs the problem, without running anything."""
        found = self.routes.get((problem, backend))
        if found is None:
            if len(self.routes) >= MAX_ROUTES:
                self.routes.clear()
                self.failed.clear()
                self.logged.clear()
            found = self.routes[problem, backend] = self.decide(problem, backend)
        return found

    @staticmethod
    def remember(memory: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
        """Cache what an op looked up; bounded, as routes are."""
        if len(memory) >= MAX_ROUTES:
            memory.clear()
        memory[key] = value

    def decide(self, problem: Problem, backend: str) -> Route:
        """The route, not cached."""
        if backend != "auto" and backend not in self.backends and backend not in self.absent:
            known = [*self.backends, *self.absent]
            raise ValueError(f"backend is {backend!r}; accepted: 'auto' or one of {known}")
        if self.config.force_parity:
            why = self.config.describe("force_parity")
            if backend not in ("auto", PARITY_BACKEND):
                message = f"nsa: {why}: {PARITY_BACKEND} runs although backend={backend!r} was requested"
                if message not in self.logged:
                    self.logged.add(message)
                    log.warning("%s", message)
            return Route(problem, PARITY_BACKEND, why, {name: why for name in self.backends if name != PARITY_BACKEND})
        if backend != "auto":
            reason = self.reason_against(backend, problem, named=True)
            why = f"backend={backend!r} was requested"
            if reason is None:
                return Route(problem, backend, why, {})
            failed = {backend: reason} if backend in self.broken or isinstance(reason, FailureReason) else {}
            return Route(problem, None, why, {backend: reason}, failed=failed)

        order, why_first = self.order(problem)
        reasons, found, failed = dict(self.absent), None, {}
        for name in order:
            if name in self.broken:
                if found is None:
                    failed[name] = self.broken[name]
                continue
            reason = f"{found} comes before it" if found else self.reason_against(name, problem)
            if isinstance(reason, FailureReason):
                failed[name] = reason
            if reason is None and (problem, name) in self.failed:
                failed[name] = self.failed[problem, name]
                reason = f"failed before: {failed[name]}"
            if reason is None:
                found = name
            else:
                reasons[name] = reason
        why = why_first[found] if found else "backend='auto'"
        return Route(problem, found, why, reasons, may_fall_back=True, failed=failed)

    def reason_against(self, name: str, problem: Problem, *, named: bool = False) -> str | None:
        """Why the backend does not run the problem; None if it does. `named`: it was requested by name."""
        if name in self.absent:
            return self.absent[name]
        reason = self.ask(name, "declined", problem, named=named) or self.backends[name].supports(problem)
        return reason if reason is not None or named else self.ask(name, "explicit_only", problem)

    def run(self, problem: Problem, function: str, *args: Any, backend: str = "auto", strict: bool = False) -> Any:
        """Call `function` of the backend that runs the problem; under `auto`, of the next one if that fails."""
        route = self.route(problem, backend)
        name, why = route.backend, route.why
        for broken, reason in route.failed.items():
            self.note_failure(broken, problem, function, reason, None if strict else name)
        if name is None:
            raise BackendFailure(route.error_message()) if route.failed else ValueError(route.error_message())
        if strict and route.failed:
            broken, reason = next(iter(route.failed.items()))
            why = f"{reason}; strict forbids another backend"
            raise BackendFailure(f"{broken} failed before {function} on {problem}: {why}")
        try:
            return self.call(name, problem, function, why, args)
        except BackendFailure as failure:
            return self.after_failure(failure, name, problem, function, backend, strict, args)

    def after_failure(
        self,
        failure: Exception,
        name: str,
        problem: Problem,
        function: str,
        backend: str,
        strict: bool,
        args: tuple[Any, ...],
    ) -> Any:
        """Run a call in which `name` failed again if it has recovered, else on the backends after it; raise if it was
        requested by name."""
        route = self.route(problem, backend)
        if self.has_recovered(failure, name, problem, function, strict):
            try:
                return self.call(name, problem, function, route.why, args)
            except BackendFailure as another:
                failure = another
        if not route.may_fall_back:
            self.counts.add_failure(problem.op, name, str(failure))
            raise BackendFailure(f"{name} failed in {function} on {problem}: {failure}; {route.why}") from failure
        while True:
            # A call without `strict` may recover from the same failure.
            if not (strict or isinstance(failure, CallUnsupported)):
                self.failed[problem, name] = str(failure)
                self.routes.pop((problem, backend), None)
            following = None if strict else self.next_after(name, problem)
            self.note_failure(name, problem, function, str(failure), following)
            if following is None:
                end = "strict forbids another backend" if strict else "no other backend is left"
                raise BackendFailure(f"{name} failed in {function} on {problem}: {failure}; {end}") from failure
            name, why = following, f"{name} failed: {failure}"
            try:
                return self.call(name, problem, function, why, args)
            except BackendFailure as another:
                failure = another

    def has_recovered(self, failure: Exception, name: str, problem: Problem, function: str, strict: bool) -> bool:
        """Whether the backend has other kernels in place of those that failed; `strict` forbids them."""
        others = None if strict else self.ask(name, "recover_from", failure)
        if others is not None:
            self.note_failure(name, problem, function, str(failure), others)
        return others is not None

    def next_after(self, name: str, problem: Problem) -> str | None:
        order, _ = self.order(problem)
        later = order[order.index(name) + 1 :]
        return next((other for other in later if self.reason_against(other, problem) is None), None)

    def note_failure(self, name: str, problem: Problem, function: str, reason: str, following: str | None) -> None:
        self.counts.add_failure(problem.op, name, reason)
        # Lengths may never repeat: logged once per kind of call, with the first of its shapes.
        kind = (name, function, problem.dtype, problem.d_k, problem.d_v, problem.varlen, reason)
        if kind not in self.logged:
            self.logged.add(kind)
            after = f"falling back to {following}" if following else "no fallback"
            log.warning("nsa: %s failed in %s on %s: %s; %s", name, function, problem, reason, after)

    def call(self, name: str, problem: Problem, function: str, why: str, args: tuple[Any, ...]) -> Any:
        # An audit logs each path once, timing every call.
        path = (function, problem, name)
        logged = self.logs_calls and (self.config.debug_timing or path not in self.logged)
        compute = without_autocast(partial(getattr(self.backends[name], function), *args), problem.device)
        result = self.logged_call(compute, path, why, args) if logged else compute()
        self.counts.add_call(problem.op, name)
        return result

    def logged_call(
        self, compute: Callable[[], Any], path: tuple[str, Problem, str], why: str, args: tuple[Any, ...]
    ) -> Any:
        self.logged.add(path)
        function, problem, name = path
        # Saved tensors and gradients come in tuples.
        flat = [x for arg in args for x in (arg if isinstance(arg, tuple) else (arg,))]
        inputs = [x for x in flat if isinstance(x, torch.Tensor)]
        on_gpu = problem.device == "cuda"
        # Synchronizing would break the capture of a CUDA graph, in which nothing runs yet.
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        waits = on_gpu and not capturing
        if waits:
            torch.cuda.synchronize(inputs[0].device)
        begin = time.perf_counter()
        result = compute()
        if waits:
            torch.cuda.synchronize(inputs[0].device)
        elapsed = "being captured" if capturing else f"{(time.perf_counter() - begin) * 1e3:.3f}"
        shapes = " ".join(f"{tuple(x.shape)}:{str(x.dtype).removeprefix('torch.')}:{x.stride()}" for x in inputs)
        line = f"nsa: branch={problem.op} path={name}.{function} ms={elapsed} reason={why!r} inputs={shapes}"
        log.info("%s", line)
        return result

    def is_direct(self, route: Route) -> bool:
        """Whether ops call the backend of this route themselves: nothing has failed, and no call is logged."""
        return not (route.backend is None or route.failed or self.logs_calls)

    def explain(
        self,
        problem: Problem,
        backend: str = "auto",
        *,
        block: int = 32,
        stride: int = 16,
        window: int = 512,
        select_block: int = NSAConfig.l_sel,
        n_select: int = NSAConfig.n_sel,
    ) -> Explanation:
        """The routes of every op of the attention `problem`; see the function `explain`.

        A `backward` problem has the routes of the backward passes, and those of the forward passes that another backend
        runs. For a static cache, `n_keys` is its capacity, `max_len`.
        """
        require(isinstance(problem, Problem), "problem", problem, "a Problem")
        require(problem.op == "attention", "problem.op", problem.op, "'attention', whose ops are explained one by one")
        require(isinstance(backend, str), "backend", backend, "'auto' or a backend's name")
        check_compression(block, stride)
        for name, value in {"window": window, "select_block": select_block, "n_select": n_select}.items():
            require_positive_int(name, value)
        # A cache compresses the few blocks that a step completes itself.
        ops = [op for op in OPS if op != "compress" or not problem.cached]
        problems = {}
        for op in ops:
            problems[op] = problem_for_op(problem, op, block, stride, window)
            if op == "compress" and problem.d_v != problem.d_k:
                values = replace(problem, d_k=problem.d_v)
                problems["compress (values)"] = problem_for_op(values, op, block, stride, window)
        routes, failed = {}, {one for one, _ in [*self.failed]}
        own: defaultdict[tuple[str | None, str], list[str]] = defaultdict(list)
        for op, one in problems.items():
            routes[op] = self.route(one, backend)
            one = replace(one, backward=False)
            before = self.route(one, backend)
            if before.backend != routes[op].backend:
                routes[f"{op} (forward)"] = before
            own[before.backend, "forward"].append(op)
            if routes[op].problem.backward:
                own[routes[op].backend, "backward"].append(op)
            if self.is_direct(before) and one not in failed:
                own[before.backend, "direct"].append(op)
        kernels = {}
        for name in dict.fromkeys(str(route.backend) for route in routes.values()):
            passes = (own[name, kind] for kind in ("forward", "backward", "direct"))
            which = self.ask(name, "kernel_set", problem, *passes, select_block, n_select, block, stride, window)
            if which is not None:
                kernels[name] = which
        return Explanation(problem, routes, kernels)


def without_autocast(compute: Callable[..., Any], device: str) -> Callable[..., Any]:
    """`compute` with the caller's autocast off, which would round the fp32 sums of a backend written in torch."""
    return torch.autocast(device, enabled=False)(compute) if torch.is_autocast_enabled(device) else compute


def problem_for_op(problem: Problem, op: str, block: int, stride: int, window: int | None = None) -> Problem:
    """The problem of one op of the whole attention `problem`, exactly as `nsa.ops` routes it."""
    if op == "compress":
        # No queries. Keys and values are compressed one after the other: these are the keys.
        problem = replace(problem, n_queries=problem.n_keys, n_heads=problem.n_groups, d_v=problem.d_k)
    if op == "selected" and problem.cached:
        # The cache's buffer has one spare slot and is passed whole.
        problem = replace(problem, n_keys=problem.n_keys + 1)
    if op == "sliding" and problem.cached and window is not None:
        # A cache passes only the keys that the new queries see.
        problem = replace(problem, n_keys=min(window, problem.n_keys) - 1 + problem.n_queries)
    if op in ("compressed", "scores"):
        # Documents end anywhere: a varlen row has a slot for every stride, as `compressed_starts` lays them out.
        n_keys = problem.n_keys // stride if problem.varlen else n_compressed(problem.n_keys, block, stride)
        problem = replace(problem, n_keys=n_keys)
    if op == "scores":
        problem = replace(problem, d_v=problem.d_k, backward=False)
    if op == "combine":
        # The gated sum has no keys: every head is its own group, with one row per query.
        sizes: Any = {"n_keys": problem.n_queries, "n_groups": problem.n_heads, "d_k": problem.d_v}
        problem = replace(problem, **sizes, varlen=False, cached=False)
    return problem.for_op(op)


def make_visible(logger: logging.Logger) -> None:
    """Show INFO messages, for `NSA_SDPA_AUDIT` and `NSA_DEBUG_TIMING`, also where logging is not configured."""
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def find_backends(config: Settings) -> tuple[list[Any], dict[str, str]]:
    """The backends available here, broken ones included, and why the others are not."""
    found, absent = [], {}
    for name, module in BACKEND_MODULES.items():
        backend = find_backend(name, module, config)
        if isinstance(backend, str):
            absent[name] = backend
        else:
            found.append(backend)
    return found, absent


def find_backend(name: str, module: str, config: Settings | None = None) -> Any:
    """The backend, or why it is not available; `ImportFailed` if its library is installed but broken."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return "not in this version of nsa"
    try:
        backend = import_module(module)
    except ImportError as error:
        if (error.name or "").split(".")[0] == "nsa":
            raise
        if isinstance(error, ModuleNotFoundError):
            return f"needs the package {error.name}, which is not installed"
        return ImportFailed(name, f"cannot be imported: {error}")
    if hasattr(backend, "configure"):
        backend = backend.configure(config or settings.current())
    if not hasattr(backend, "supports"):
        return "not in this version of nsa: it has no supports()"
    missing = backend.available() if hasattr(backend, "available") else None
    return backend if missing is None else missing


def build_router(config: Settings) -> Router:
    """A new router for `config`, with the backends of this machine and the measured routes."""
    backends, absent = find_backends(config)
    return Router(backends, config, load_routes(routes_path()), absent=absent)


@cache
def router() -> Router:
    """The router of this process."""
    return build_router(settings.current())


def counts_so_far() -> Counts:
    """The counts of this process's router; empty before the first op."""
    return router().counts if router.cache_info().currsize else Counts()


def explain(
    problem: Problem,
    backend: str = "auto",
    *,
    config: Settings | None = None,
    block: int = 32,
    stride: int = 16,
    window: int = 512,
    select_block: int = NSAConfig.l_sel,
    n_select: int = NSAConfig.n_sel,
) -> Explanation:
    """Reports which backend would run each op of an attention, and why the others would not.

    Args:
        problem: The attention, with `op="attention"`.
        backend: As passed to `nsa.ops`: "auto" or a backend's name.
        config: Settings to route with; by default this process's.
        block, stride, window: The layer's hyperparameters `l`, `d` and `w`, which give each branch's number of keys.
        select_block, n_select: Its `l_sel` and `n_sel`, on which kernels depend.

    Returns:
        The routes by op, and which kernels a backend with several sets of them takes; `str()` of it is readable.

    Raises:
        ValueError: An argument is wrong, or `backend` is unknown.
    """
    require(config is None or isinstance(config, Settings), "config", config, "a Settings, or None for this process's")
    own = router() if config is None else build_router(config)
    sizes = {"block": block, "stride": stride, "window": window, "select_block": select_block, "n_select": n_select}
    return own.explain(problem, backend, **sizes)
