"""Who serves an op: the first backend that supports the problem, with the reason for each that does not.

A named backend is used or raises. Under `auto` a backend that fails while it runs is logged once, counted, and the next
one serves; `strict` turns that into an error. What ran is never a guess: `explain` tells it beforehand, the counters
afterwards. Only `NSA_FORCE_PARITY` overrules a name: the reference everywhere, and a warning that says so.

A decision is taken once per problem and remembered; a call then costs a look-up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from nsa import settings
from nsa.backends import policy
from nsa.backends.preferences import Preference, gpu_family, gpu_name, load_preferences, preferences_path
from nsa.backends.problem import OPS, Problem
from nsa.config import check_compression, require, require_positive_int
from nsa.geometry import n_compressed
from nsa.settings import Settings

log = logging.getLogger("nsa")

# Every backend there is, in the order `auto` tries them; a version may lack some. The reference builds whole score
# matrices: last.
BACKEND_MODULES = {
    "triton": "nsa.backends.triton",
    "flash": "nsa.backends.flash",
    "sdpa": "nsa.backends.sdpa",
    "reference": "nsa.backends.reference",
}

# Decisions remembered at once: sequence lengths may never repeat, and memory must not grow with them.
MAX_ROUTES = 4096


class Backend(Protocol):
    """A module, or anything else, with a name, an opinion on problems, and the functions of the ops it serves.

    It may also have `available() -> str | None`: None, or why it can serve nothing at all on this machine; and
    `explicit_only(problem) -> str | None`: why `auto` must not pick it for a problem that it supports. A module with
    `configure(settings)` is not the backend itself: what that returns is. A function may have `resolve()`, for what to
    call in its place, and what that raises, besides a `BackendFailure`, where the backend cannot run.
    """

    name: str

    def supports(self, problem: Problem) -> str | None:
        """None when the problem can be served, else why not; a `Fault` where it should have been."""


@dataclass(frozen=True)
class Broken:
    """Stands for a backend that is installed and cannot be imported: it fails wherever it would have been tried."""

    name: str
    reason: str


class Fault(str):
    """A reason that is a failure, not a limit: the backend would serve the problem if it were sound."""

    __slots__ = ()


class BackendFailure(RuntimeError):
    """A backend should have served and could not: a library that is broken, a kernel that cannot be launched."""


class CallRefused(BackendFailure):
    """Of one call and what only it tells, as a window or how a cache lies in memory: others of its problem may pass."""


@dataclass(frozen=True)
class Route:
    """The decision for one problem."""

    problem: Problem
    chosen: str | None
    why: str  # why the chosen one is; where nothing is chosen, who was asked for
    reasons: Mapping[str, str]  # why each backend that is not chosen is not
    may_fall_back: bool = False
    # Backends that should have served and failed, on this problem before, in a probe or when imported, and why.
    failed: Mapping[str, str] = field(default_factory=dict)

    def told(self, part: str, width: int) -> str:
        """The decision in words, beside what it is for."""
        lines = [f"{part:<{width}} {f'{self.chosen}: {self.why}' if self.chosen else 'nothing serves this'}"]
        lines += [f"{'':<{width}} not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)

    def refusal(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"no backend serves {self.problem} ({self.why}): {reasons}"


@dataclass(frozen=True)
class Explanation:
    """The routes of the ops of one attention; an op that is posed twice has a name for each."""

    problem: Problem
    routes: Mapping[str, Route]

    def __str__(self) -> str:
        width = max(map(len, (*OPS, *self.routes))) + 1
        return "\n".join([f"routes for {self.problem}", *(r.told(part, width) for part, r in self.routes.items())])


@dataclass
class Counts:
    """What ran, and what should have: calls by op and backend, failures by op, backend and reason.

    Autograd runs backward passes on threads of its own, so additions take a lock.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add_call(self, op: str, backend: str) -> None:
        with self.lock:
            self.calls[op, backend] += 1

    def add_failure(self, op: str, backend: str, reason: str) -> int:
        """How often this has now happened."""
        with self.lock:
            self.failures[op, backend, reason] += 1
            return self.failures[op, backend, reason]

    def as_dict(self) -> dict[str, dict[str, int]]:
        """For logs: `{"calls": {"sliding/sdpa": 12}, "failures": {"sliding/triton: out of shared memory": 1}}`."""
        with self.lock:
            return {
                "calls": {f"{op}/{name}": n for (op, name), n in sorted(self.calls.items())},
                "failures": {f"{op}/{name}: {why}": n for (op, name, why), n in sorted(self.failures.items())},
            }

    def clear(self) -> None:
        with self.lock:
            self.calls.clear()
            self.failures.clear()


class Router:
    """Backends in order of preference, the measured exceptions to that order, and the counts of what ran.

    `absent`: the known backends that cannot be had, and why; broken ones are among them. `gpu`: whose measurements hold
    for CUDA tensors; by default the GPU of this process.
    """

    def __init__(
        self,
        backends: Sequence[Backend | Broken],
        config: Settings,
        preferences: Iterable[Preference] = (),
        gpu: str | None = None,
        absent: Mapping[str, str] | None = None,
    ) -> None:
        self.names = [backend.name for backend in backends]
        self.backends = {backend.name: backend for backend in backends if not isinstance(backend, Broken)}
        self.broken = {backend.name: backend.reason for backend in backends if isinstance(backend, Broken)}
        self.config = config
        self.preferences = tuple(preferences)
        self.gpu = gpu
        self.absent = {**(absent or {}), **self.broken}
        self.counts = Counts()
        self.routes: dict[tuple[Problem, str], Route] = {}
        # What the ops have looked up, by whatever they know of a call: single stages, and the plans of whole calls.
        self.stages: dict[tuple[Any, ...], Any] = {}
        self.plans: dict[tuple[Any, ...], Any] = {}
        # A kernel that cannot be compiled for a problem is not tried again at every step.
        self.failed: dict[tuple[Problem, str], str] = {}
        self.said: set[object] = set()
        self.logs_calls = config.debug_timing or config.sdpa_audit
        if self.logs_calls:
            make_visible(log)

    def preference(self, problem: Problem) -> Preference | None:
        """The measurement that holds for the problem, if there is one."""
        if not self.preferences:
            return None
        device = gpu_family(self.gpu or gpu_name()) if problem.device == "cuda" else problem.device
        return next((preference for preference in self.preferences if preference.covers(problem, device)), None)

    def order(self, problem: Problem) -> tuple[list[str], str]:
        """The backends in the order to try them, and whose order that is, flash aside where a setting puts it first."""
        names, why = list(self.names), "first that supports it"
        preference = self.preference(problem)
        if preference is not None:
            # Nothing is said of a backend that the line does not list: it keeps its place.
            listed = iter([name for name in preference.order if name in names])
            names = [next(listed) if name in preference.order else name for name in names]
            why = f"measured order on {preference.gpu}"
        if "flash" in names and policy.insists(self.config, problem.op):
            names = ["flash", *(name for name in names if name != "flash")]
        return names, why

    def route(self, problem: Problem, backend: str = "auto") -> Route:
        """Which backend serves the problem, without running anything."""
        found = self.routes.get((problem, backend))
        if found is None:
            if len(self.routes) >= MAX_ROUTES:
                self.routes.clear()
                self.failed.clear()
                self.said.clear()
            found = self.routes[problem, backend] = self.decide(problem, backend)
        return found

    @staticmethod
    def remember(memory: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
        """Keep what an op looked up; bounded, as routes are."""
        if len(memory) >= MAX_ROUTES:
            memory.clear()
        memory[key] = value

    def decide(self, problem: Problem, backend: str) -> Route:
        if backend != "auto" and backend not in self.backends and backend not in self.absent:
            known = [*self.backends, *self.absent]
            raise ValueError(f"backend is {backend!r}; accepted: 'auto' or one of {known}")
        if self.config.force_parity:
            why = self.config.describe("force_parity")
            if backend not in ("auto", "reference"):
                self.say_once(f"nsa: {why}: the reference serves where backend={backend!r} was asked for")
            return Route(problem, "reference", why, {name: why for name in self.backends if name != "reference"})
        if backend != "auto":
            reason = self.reason_against(backend, problem, named=True)
            why = f"backend={backend!r} was asked for"
            if reason is None:
                return Route(problem, backend, why, {})
            failed = {backend: reason} if backend in self.broken or isinstance(reason, Fault) else {}
            return Route(problem, None, why, {backend: reason}, failed=failed)

        order, why = self.order(problem)
        reasons, chosen, failed = dict(self.absent), None, {}
        for name in order:
            if name in self.broken:
                if chosen is None and self.switched_off(name, problem) is None:
                    failed[name] = self.broken[name]
                continue
            reason = f"{chosen} comes before it" if chosen else self.reason_against(name, problem)
            if isinstance(reason, Fault):
                failed[name] = reason
            if reason is None and (problem, name) in self.failed:
                failed[name] = self.failed[problem, name]
                reason = f"failed before: {failed[name]}"
            if reason is None:
                chosen = name
            else:
                reasons[name] = reason
        if chosen == "flash" and policy.insists(self.config, problem.op):
            why = policy.flag(self.config, problem.op).why
        return Route(problem, chosen, why, reasons, may_fall_back=True, failed=failed)

    def reason_against(self, name: str, problem: Problem, *, named: bool = False) -> str | None:
        """None when the backend can serve; settings are asked first. A named backend is not bound by a threshold."""
        if name in self.absent:
            return self.absent[name]
        backend = self.backends[name]
        reason = self.switched_off(name, problem, named=named) or backend.supports(problem)
        if reason is None and not named and hasattr(backend, "explicit_only"):
            return backend.explicit_only(problem)
        return reason

    def switched_off(self, name: str, problem: Problem, *, named: bool = False) -> str | None:
        """Why settings and measurements keep the backend from the problem, whatever it says itself."""
        if name != "flash":
            return None
        preference = self.preference(problem)
        measured = preference is not None and name in preference.order
        return policy.reason_against(self.config, problem, named=named, measured=measured)

    def run(
        self, problem: Problem, function: str, *args: Any, backend: str = "auto", strict: bool = False, **kwargs: Any
    ) -> Any:
        """Call `function` of the backend that serves the problem; under `auto`, of the next one if that fails."""
        route = self.route(problem, backend)
        name, why = route.chosen, route.why
        for broken, reason in route.failed.items():
            self.note_failure(broken, problem, function, reason, None if strict else name)
        if name is None:
            raise BackendFailure(route.refusal()) if route.failed else ValueError(route.refusal())
        if strict and route.failed:
            broken, reason = next(iter(route.failed.items()))
            raise BackendFailure(
                f"{broken} failed before {function} on {problem}: {reason}; strict forbids another backend"
            )
        try:
            return self.call(name, problem, function, why, args, kwargs)
        except BackendFailure as failure:
            return self.after_failure(failure, name, problem, function, backend, strict, args, kwargs)

    def after_failure(
        self,
        failure: Exception,
        name: str,
        problem: Problem,
        function: str,
        backend: str,
        strict: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What the backends after `name` make of a call in which it failed; nothing, if it was to run by name."""
        route = self.route(problem, backend)
        if not route.may_fall_back:
            self.counts.add_failure(problem.op, name, str(failure))
            raise BackendFailure(f"{name} failed in {function} on {problem}: {failure}; {route.why}") from failure
        while True:
            if not isinstance(failure, CallRefused):
                self.failed[problem, name] = str(failure)
                self.routes.pop((problem, backend), None)
            following = None if strict else self.next_after(name, problem)
            self.note_failure(name, problem, function, str(failure), following)
            if following is None:
                end = "strict forbids another backend" if strict else "no other backend is left"
                raise BackendFailure(f"{name} failed in {function} on {problem}: {failure}; {end}") from failure
            name, why = following, f"{name} failed: {failure}"
            try:
                return self.call(name, problem, function, why, args, kwargs)
            except BackendFailure as another:
                failure = another

    def next_after(self, name: str, problem: Problem) -> str | None:
        order, _ = self.order(problem)
        later = order[order.index(name) + 1 :]
        return next((other for other in later if self.reason_against(other, problem) is None), None)

    def note_failure(self, name: str, problem: Problem, function: str, reason: str, following: str | None) -> None:
        self.counts.add_failure(problem.op, name, reason)
        # Lengths may never repeat: once for each kind of call, with the first of its shapes.
        kind = (name, function, problem.dtype, problem.d_k, problem.d_v, problem.packed, reason)
        if kind not in self.said:
            self.said.add(kind)
            served = f"{following} serves" if following else "nothing else serves"
            log.warning("nsa: %s failed in %s on %s: %s; %s", name, function, problem, reason, served)

    def call(
        self, name: str, problem: Problem, function: str, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        compute = getattr(self.backends[name], function)
        # An op's body still runs under the caller's autocast, which would round the fp32 sums in it.
        with torch.autocast(problem.device, enabled=False):
            if self.logs_calls:
                result = self.logged_call(compute, name, problem, function, why, args, kwargs)
            else:
                result = compute(*args, **kwargs)
        self.counts.add_call(problem.op, name)
        return result

    def logged_call(
        self,
        compute: Callable[..., Any],
        name: str,
        problem: Problem,
        function: str,
        why: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # An audit wants each path once; timings are wanted call by call.
        if not self.config.debug_timing and (function, problem, name) in self.said:
            return compute(*args, **kwargs)
        self.said.add((function, problem, name))
        # Saved tensors and gradients come in tuples.
        flat = [x for arg in (*args, *kwargs.values()) for x in (arg if isinstance(arg, tuple) else (arg,))]
        inputs = [x for x in flat if isinstance(x, torch.Tensor)]
        on_gpu = problem.device == "cuda"
        # Waiting would break the capture of a graph, in which nothing runs yet anyway.
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        waits = on_gpu and not capturing
        if waits:
            torch.cuda.synchronize(inputs[0].device)
        begin = time.perf_counter()
        result = compute(*args, **kwargs)
        if waits:
            torch.cuda.synchronize(inputs[0].device)
        elapsed = "being captured" if capturing else f"{(time.perf_counter() - begin) * 1e3:.3f}"
        shapes = " ".join(f"{tuple(x.shape)}:{str(x.dtype).removeprefix('torch.')}:{x.stride()}" for x in inputs)
        line = f"nsa: branch={problem.op} path={name}.{function} ms={elapsed} reason={why!r} inputs={shapes}"
        log.info("%s", line)
        return result

    def say_once(self, message: str) -> None:
        if message not in self.said:
            self.said.add(message)
            log.warning("%s", message)

    def explain(
        self, problem: Problem, backend: str = "auto", *, block: int = 32, stride: int = 16, window: int = 512
    ) -> Explanation:
        """The routes of the whole attention `problem`; the knobs tell how many keys each branch has.

        Of a `backward` problem they are the gradients' routes; where another backend serves the forward pass before
        them, that one is told too. A static cache poses its capacity: `n_keys` is then its `max_len`.
        """
        require(isinstance(problem, Problem), "problem", problem, "a Problem")
        require(problem.op == "attention", "problem.op", problem.op, "'attention', whose ops are explained one by one")
        require(isinstance(backend, str), "backend", backend, "'auto' or a backend's name")
        check_compression(block, stride)
        require_positive_int("window", window)
        # A cache compresses the few blocks that a step completes by itself.
        ops = [op for op in OPS if op != "compress" or not problem.cached]
        posed = {}
        for op in ops:
            posed[op] = as_posed(problem, op, block, stride, window)
            if op == "compress" and problem.d_v != problem.d_k:
                values = replace(problem, d_k=problem.d_v)
                posed["compress (values)"] = as_posed(values, op, block, stride, window)
        routes = {}
        for op, one in posed.items():
            routes[op] = self.route(one, backend)
            before = self.route(replace(one, backward=False), backend)
            if before.chosen != routes[op].chosen:
                routes[f"{op} (forward)"] = before
        return Explanation(problem, routes)


def as_posed(problem: Problem, op: str, block: int, stride: int, window: int | None = None) -> Problem:
    """One op of the whole `problem`, exactly as `nsa.ops` poses it to the router."""
    if op == "compress":
        # Tokens without queries. Keys and values are compressed one after the other: these are the keys.
        problem = replace(problem, n_queries=problem.n_keys, n_heads=problem.n_groups, d_v=problem.d_k)
    if op == "selected" and problem.cached:
        # The store of a cache has a place more than it needs, and is handed out whole.
        problem = replace(problem, n_keys=problem.n_keys + 1)
    if op == "sliding" and problem.cached and window is not None:
        # A cache hands out the keys that the new queries can see, and no others.
        problem = replace(problem, n_keys=min(window, problem.n_keys) - 1 + problem.n_queries)
    if op in ("compressed", "scores"):
        # Documents end anywhere: a packed row has a slot for every stride, as `compressed_starts` lays them out.
        n_keys = problem.n_keys // stride if problem.packed else n_compressed(problem.n_keys, block, stride)
        problem = replace(problem, n_keys=n_keys)
    if op == "scores":
        problem = replace(problem, d_v=problem.d_k, backward=False)
    if op == "combine":
        # The mixture has no keys: every head is a group of its own, one row wide per query.
        problem = replace(
            problem,
            n_keys=problem.n_queries,
            n_groups=problem.n_heads,
            d_k=problem.d_v,
            packed=False,
            cached=False,
        )
    return problem.for_op(op)


def make_visible(logger: logging.Logger) -> None:
    """Who sets `NSA_SDPA_AUDIT` or `NSA_DEBUG_TIMING` wants to see the lines, also without a logging set-up."""
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def find_backends(config: Settings) -> tuple[list[Any], dict[str, str]]:
    """The backends of this version that this machine can run, or should, and why not the others."""
    found, absent = [], {}
    for name, module in BACKEND_MODULES.items():
        backend = find_backend(name, module, config)
        if isinstance(backend, str):
            absent[name] = backend
        else:
            found.append(backend)
    return found, absent


def find_backend(name: str, module: str, config: Settings | None = None) -> Any:
    """The backend, or why it cannot be had. A library that is missing is a fact; one that is broken is a failure."""
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
        return Broken(name, f"cannot be imported: {error}")
    if hasattr(backend, "configure"):
        backend = backend.configure(config or settings.current())
    if not hasattr(backend, "supports"):
        return "not in this version of nsa: it has no supports()"
    missing = backend.available() if hasattr(backend, "available") else None
    return backend if missing is None else missing


def build_router(config: Settings) -> Router:
    """A router of its own for `config`, with the backends and measurements of this machine."""
    backends, absent = find_backends(config)
    return Router(backends, config, load_preferences(preferences_path()), absent=absent)


@cache
def router() -> Router:
    """The router of this process."""
    return build_router(settings.current())


def counts_so_far() -> Counts:
    """What the router of this process has run; nothing where no op has been called yet."""
    return router().counts if router.cache_info().currsize else Counts()


def explain(
    problem: Problem,
    backend: str = "auto",
    *,
    config: Settings | None = None,
    block: int = 32,
    stride: int = 16,
    window: int = 512,
) -> Explanation:
    """Which backend serves each branch of the attention `problem` describes, and why not the others.

    `config`: settings to explain with instead of this process's own.
    """
    require(config is None or isinstance(config, Settings), "config", config, "a Settings, or None for this process's")
    chosen = router() if config is None else build_router(config)
    return chosen.explain(problem, backend, block=block, stride=stride, window=window)
