"""Who serves an op: the first backend that supports the problem, with the reason for each that does not.

A named backend is used or raises. Under `auto` a backend that fails while it runs is logged once, counted, and the next
one serves; `strict` turns that into an error. What ran is never a guess: `explain` tells it beforehand, the counters
afterwards.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from nsa import settings
from nsa.backends.problem import OPS, Problem
from nsa.settings import Settings

log = logging.getLogger("nsa")

# In the order `auto` tries them. The reference comes last: it is for parity, and builds whole score matrices.
BACKEND_MODULES = {"sdpa": "nsa.backends.sdpa", "reference": "nsa.backends.reference"}


class Backend(Protocol):
    """A module, or anything else, with a name, an opinion on problems, and the functions of the ops it serves."""

    name: str

    def supports(self, problem: Problem) -> str | None:
        """None when the problem can be served, else why not."""


class BackendFailure(RuntimeError):
    """A backend said yes and then could not: a missing library, a launch out of resources, a non-finite probe."""


@dataclass(frozen=True)
class Route:
    """The decision for one problem."""

    problem: Problem
    chosen: str | None
    reasons: Mapping[str, str]  # why each backend that is not chosen is not

    def __str__(self) -> str:
        lines = [f"{self.problem.op:<11} {self.chosen or 'nothing serves this'}"]
        lines += [f"{'':<11} not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The routes of the five ops of one attention."""

    problem: Problem
    routes: Mapping[str, Route]

    def __str__(self) -> str:
        return "\n".join([f"routes for {self.problem}", *(str(route) for route in self.routes.values())])


@dataclass
class Counts:
    """What ran, and what should have: calls by op and backend, failures by op, backend and reason."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def clear(self) -> None:
        self.calls.clear()
        self.failures.clear()


@dataclass(frozen=True)
class Preference:
    """One measured line of the routing table: on this GPU, op and range of lengths, try these backends first."""

    gpu: str
    op: str
    order: tuple[str, ...]
    min_length: int = 0
    max_length: int | None = None
    head_widths: tuple[int, ...] | None = None

    def covers(self, problem: Problem, gpu: str) -> bool:
        return (
            self.gpu == gpu
            and self.op == problem.op
            and problem.n_queries >= self.min_length
            and (self.max_length is None or problem.n_queries <= self.max_length)
            and (self.head_widths is None or problem.d_k in self.head_widths)
        )


class Router:
    """Backends in order of preference, the measured exceptions to that order, and the counts of what ran."""

    def __init__(
        self, backends: Sequence[Backend], config: Settings, preferences: Iterable[Preference] = (), gpu: str = "cpu"
    ) -> None:
        self.backends = {backend.name: backend for backend in backends}
        self.config = config
        self.preferences = tuple(preferences)
        self.gpu = gpu
        self.counts = Counts()
        self.routes: dict[tuple[Problem, str], Route] = {}

    def order(self, problem: Problem) -> list[str]:
        names = list(self.backends)
        for preference in self.preferences:
            if preference.covers(problem, self.gpu):
                first = [name for name in preference.order if name in self.backends]
                return first + [name for name in names if name not in first]
        return names

    def route(self, problem: Problem, backend: str = "auto") -> Route:
        """Which backend serves the problem, without running anything."""
        found = self.routes.get((problem, backend))
        if found is None:
            found = self.routes[problem, backend] = self.decide(problem, backend)
        return found

    def decide(self, problem: Problem, backend: str) -> Route:
        if backend != "auto" and backend not in self.backends:
            raise ValueError(f"backend is {backend!r}; accepted: 'auto' or one of {sorted(self.backends)}")
        if self.config.force_parity:
            reasons = {name: "NSA_FORCE_PARITY is set" for name in self.backends if name != "reference"}
            return Route(problem, "reference", reasons)
        if backend != "auto":
            reason = self.backends[backend].supports(problem)
            return Route(problem, None if reason else backend, {backend: reason} if reason else {})
        reasons, chosen = {}, None
        for name in self.order(problem):
            if chosen is not None:
                reasons[name] = f"{chosen} comes first"
                continue
            reason = self.backends[name].supports(problem)
            if reason is None:
                chosen = name
            else:
                reasons[name] = reason
        return Route(problem, chosen, reasons)

    def run(
        self, problem: Problem, function: str, *args: Any, backend: str = "auto", strict: bool = False, **kwargs: Any
    ) -> Any:
        """Call `function` of the backend that serves the problem; under `auto`, of the next one if that fails."""
        route = self.route(problem, backend)
        if route.chosen is None:
            raise ValueError(f"no backend serves {problem}: {dict(route.reasons)}")
        if backend != "auto" or self.config.force_parity:
            return self.call(route.chosen, problem, function, "asked for by name", args, kwargs)
        order = self.order(problem)
        for name in order[order.index(route.chosen) :]:
            if self.backends[name].supports(problem) is not None:
                continue
            try:
                return self.call(name, problem, function, "first that supports it", args, kwargs)
            except BackendFailure as failure:
                self.note_failure(name, problem, failure)
                if strict:
                    raise
        raise BackendFailure(f"every backend failed on {problem}; the log has each reason")

    def note_failure(self, name: str, problem: Problem, failure: BackendFailure) -> None:
        key = (problem.op, name, str(failure))
        if self.counts.failures[key] == 0:
            log.warning("nsa: %s failed on %s: %s; the next backend serves", name, problem, failure)
        self.counts.failures[key] += 1

    def call(
        self, name: str, problem: Problem, function: str, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        compute: Callable[..., Any] = getattr(self.backends[name], function)
        if not (self.config.debug_timing or self.config.sdpa_audit):
            result = compute(*args, **kwargs)
        else:
            result = self.timed_call(compute, name, problem, function, why, args, kwargs)
        self.counts.calls[problem.op, name] += 1
        return result

    def timed_call(
        self,
        compute: Callable[..., Any],
        name: str,
        problem: Problem,
        function: str,
        why: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        wait = torch.cuda.synchronize if self.config.debug_timing and problem.device == "cuda" else (lambda: None)
        wait()
        begin = time.perf_counter()
        result = compute(*args, **kwargs)
        wait()
        elapsed = f"{(time.perf_counter() - begin) * 1e3:.3f} ms" if self.config.debug_timing else "not timed"
        tensors = [f"{tuple(x.shape)}:{x.dtype}:{x.stride()}" for x in args if isinstance(x, torch.Tensor)]
        log.info("nsa: %s %s on %s, %s, %s; inputs %s", function, problem, name, elapsed, why, " ".join(tensors))
        return result

    def explain(self, problem: Problem, backend: str = "auto") -> Explanation:
        return Explanation(problem, {op: self.route(problem.for_op(op), backend) for op in OPS})


def load_preferences(path: Path) -> tuple[Preference, ...]:
    """Read the measured routing table: `{"preferences": [{"gpu": ..., "op": ..., "order": [...]}, ...]}`."""
    if not path.is_file():
        return ()
    rows = json.loads(path.read_text())["preferences"]
    return tuple(
        Preference(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
        for row in rows
    )


def preferences_path() -> Path:
    """`configs/routes.json`: beside the package in a checkout, inside it when installed from a wheel."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs" / "routes.json"
    return inside if inside.is_file() else package.parent / "configs" / "routes.json"


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@cache
def router() -> Router:
    """The router of this process."""
    backends: list[Any] = [import_module(module) for module in BACKEND_MODULES.values()]
    return Router(backends, settings.current(), load_preferences(preferences_path()), gpu_name())


def explain(problem: Problem, backend: str = "auto") -> Explanation:
    """Which backend serves each branch of the attention `problem` describes, and why not the others."""
    return router().explain(problem, backend)
