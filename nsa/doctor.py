"""`nsa doctor`: versions, settings, which backend runs a shape, and whether each backend is right on this machine.

    nsa doctor
    nsa doctor --seq-len 65536 --heads 64 --groups 4 --d-k 192 --d-v 128 --dtype bfloat16 --device cuda
    NSA_FORCE_PARITY=1 nsa doctor --setting use_fa2=off --json
    nsa doctor --probe --repro crash.py
    nsa doctor --config 125m --set batch_size=16

`diagnose` collects a `Report`, `render_report` formats it, `run` prints it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any

import torch

import nsa
from nsa import selftest, settings
from nsa.backends import triton
from nsa.backends.flash import policy
from nsa.backends.flash.probe import report as probe_report
from nsa.backends.flash.repro import repro_script
from nsa.backends.gpu import gpu_family, gpu_name
from nsa.backends.measured_routes import routes_path
from nsa.backends.problem import Problem
from nsa.backends.routing import BACKEND_MODULES, Explanation, Router, build_router, counts_so_far
from nsa.backends.triton import tuning
from nsa.commands.doctor import SHAPE
from nsa.dtypes import DTYPES
from nsa.machine import Gpu, Versions, debug_modes, find_gpus, find_versions, runtime, usable_device
from nsa.progress import aligned_columns, is_terminal, lossy, say
from nsa.selftest import Check, self_test
from nsa.settings import SETTINGS, Settings, Source
from nsa.train import preflight, run_info
from nsa.train.config import TrainConfig, find_config, load_config, parse_set
from nsa.train.yaml_file import read_yaml

INDENT = "  "


@dataclass(frozen=True)
class BackendState:
    """Whether a backend can run here, and why not."""

    name: str
    available: bool
    note: str
    broken: bool = False  # installed, but its import fails


@dataclass(frozen=True)
class SettingState:
    """A setting with its effective value and where that came from."""

    name: str
    env: str
    value: bool | int | str | None
    source: Source
    meaning: str
    missing: str | None  # the part of nsa that the setting needs and that is missing here


@dataclass(frozen=True)
class Report:
    """Everything that `nsa doctor` found."""

    versions: Versions
    gpus: tuple[Gpu, ...]
    runtime: Mapping[str, Any]  # driver, libraries and flags of torch, from `machine.runtime`
    backends: tuple[BackendState, ...]
    tiles: str  # the file that the Triton kernels read their tiles from, or the error in it
    kernel_set: str  # which kernels of the Triton backend run the branches of the problem, and why
    flash: Mapping[str, str]  # which branches may use FlashAttention and why, and its libraries
    settings: tuple[SettingState, ...]
    unknown_names: Mapping[str, str]
    retired_names: Mapping[str, str]  # variables of earlier runbooks that have no effect any more, and why
    debug_modes: tuple[str, ...]  # debug modes that slow a run down
    counts: Mapping[str, Mapping[str, int]]
    forward: Explanation
    backward: Explanation
    checks: tuple[Check, ...]
    probe_failures: tuple[str, ...] = ()  # libraries that failed in the probe, if one was requested

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.agrees]

    @property
    def obstacles(self) -> list[str]:
        """The problems that keep backends from running that should run here."""
        broken = [f"{backend.name} {backend.note}" for backend in self.backends if backend.broken]
        tiles = [f"tiles of the kernels: {self.tiles}"] if self.tiles.startswith("WRONG") else []
        return [*broken, *self.probe_failures, *tiles]

    @property
    def healthy(self) -> bool:
        """Whether every backend runs and agrees with the reference."""
        return not self.failures and not self.obstacles

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types; an infinite error is null."""
        found = {"healthy": self.healthy, **asdict(self), "problem": str(self.forward.problem)}
        found["routes"] = {}
        for mode, explanation in (("forward", self.forward), ("backward", self.backward)):
            del found[mode]
            found["routes"][mode] = {
                op: {"backend": route.backend, "why": route.why, "not": dict(route.reasons)}
                for op, route in explanation.routes.items()
            }
        found["checks"] = [
            asdict(check) | {"agrees": check.agrees, "error": check.error if math.isfinite(check.error) else None}
            for check in self.checks
        ]
        return found


def diagnose(
    problem: Problem,
    router: Router,
    environ: Mapping[str, str] | None = None,
    *,
    attn: nsa.NSAConfig | None = None,
    probe_failures: Sequence[str] = (),
) -> Report:
    """Collect the report: the route of `problem`, and a self-test with its heads, dtype and device. `environ` is
    searched for unknown names, by default this process's. `attn`: of a run, its layers' backend and hyperparameters;
    `probe_failures`: a sentence per library that failed."""
    # Before the routes: to find them, a library may be probed.
    flash = flash_states(router)
    of_run = {} if attn is None else {name: getattr(attn, field) for name, field in nsa.config.PAPER_NAMES.items()}
    backend = "auto" if attn is None else attn.backend
    # A backend that a setting disables is not called.
    ask = partial(router.reason_against, named=True)
    checks = tuple(self_test(list(router.backends.values()), problem, ask, show_compilation))
    # After the checks, in which kernels may turn out to fail.
    forward, backward = (router.explain(replace(problem, backward=x), backend, **of_run) for x in (False, True))
    return Report(
        versions=find_versions(),
        gpus=find_gpus(),
        runtime=runtime(),
        backends=backend_states(router),
        tiles=tiles_origin(router.config),
        kernel_set=backward.kernels.get(triton.name, "none of Triton's: no op is routed to it"),
        flash=flash,
        settings=setting_states(router),
        unknown_names=settings.unknown_names(environ),
        retired_names=settings.retired_names(environ),
        debug_modes=tuple(debug_modes(router.config)),
        counts=counts_so_far().as_dict(),
        forward=forward,
        backward=backward,
        checks=checks,
        probe_failures=tuple(probe_failures),
    )


def show_compilation(kernel: str, done: int, total: int) -> None:
    """A progress line on a terminal; elsewhere one line at the end."""
    watched = is_terminal(sys.stderr)
    if watched or done == total:
        end = "\n" if done == total or not watched else "\r"
        with lossy(sys.stderr):
            print(f"compiled {done} of {total} kernels: {kernel:<32}", file=sys.stderr, end=end, flush=True)


def backend_states(router: Router) -> tuple[BackendState, ...]:
    names = [*BACKEND_MODULES, *(name for name in router.backends if name not in BACKEND_MODULES)]
    return tuple(
        BackendState(name, True, "")
        if name in router.backends
        else BackendState(name, False, router.absent.get(name, "not in this version of nsa"), name in router.broken)
        for name in names
    )


def tiles_origin(config: Settings) -> str:
    """The tiles file that kernels read with these settings, or the error in it."""
    file = tuning.user_file(config)
    try:
        found = tuning.origin(file)
        if file is not None and tuning.is_file(file) and triton.installed():
            # A kernel reads only its own tiles, at its first call.
            from nsa.backends.triton.tile_types import check_file

            check_file(file)
    except ValueError as error:
        return f"WRONG: {error}"
    # Kernels read their tiles once per process, from the file that the environment names.
    return found if file == tuning.user_file() else f"{found}; the self-test did not run with these"


def flash_states(router: Router) -> dict[str, str]:
    """The effective flag of each branch, the measured routes, and each library if the backend is available."""
    flags = {op: str(flag) for op, flag in policy.flags(router.config).items()}
    describe = getattr(router.backends.get("flash"), "describe", dict)
    return flags | {"routes": routes_origin(router)} | describe()


def routes_origin(router: Router) -> str:
    """The file of measured routes, and how many of them hold here."""
    path = routes_path()
    if not path.is_file():
        return f"{path} is missing: the default order holds"
    family = gpu_family(router.gpu or gpu_name())
    here = sum(route.gpu == family for route in router.measured_routes)
    return f"{here} of {len(router.measured_routes)} in {path} are for {family}; the default order holds elsewhere"


def probe(
    router: Router, problem: Problem, attn: nsa.NSAConfig | None, repro: Path | None
) -> tuple[str, tuple[str, ...]]:
    """Probe the FlashAttention libraries again, in child processes; write the first failure as a script. Returns what
    to print, and a sentence for each library that failed."""
    backend: Any = router.backends.get("flash")
    if backend is None:
        return f"nothing to probe: {router.absent.get('flash', 'no flash backend')}", ()
    lines, failures, failed = [], [], None
    hyperparameters = {} if attn is None else {"block": attn.l, "stride": attn.d, "window": attn.w}
    for library, subject, outcomes in backend.probe_all(problem, **hyperparameters):
        lines.append(probe_report(subject, outcomes))
        # A transient failure says nothing about the library.
        faults = [outcome for outcome in outcomes if outcome.problem and not outcome.transient]
        if faults:
            kinds = ", ".join(dict.fromkeys(outcome.layout for outcome in faults))
            what = f"{faults[0].case}: {faults[0].problem}"
            failures.append(f"{subject.library} {subject.version} failed in the probe on {kinds} calls ({what})")
        wrong = next((outcome for outcome in outcomes if outcome.problem), None)
        if wrong is not None and failed is None:
            failed = repro_script(library, subject, wrong)
    if repro is not None and failed is not None:
        repro.write_text(failed)
        lines.append(f"the first failure is in {repro}")
    elif repro is not None:
        lines.append("nothing failed: no script to write")
    return "\n".join(lines) or f"nothing to probe: no library takes {problem}", tuple(failures)


def setting_states(router: Router) -> tuple[SettingState, ...]:
    config = router.config

    def missing(module: str) -> str | None:
        if module == settings.FLASH:
            return None if "flash" in router.backends else "the flash backend"
        spec = find_spec(module)
        return None if spec is not None and spec.origin is not None else module

    return tuple(
        SettingState(s.name, s.env, getattr(config, s.name), config.source(s.name), s.meaning, missing(s.needs))
        for s in SETTINGS
    )


def render_report(report: Report) -> str:
    sections = {
        "versions": render_versions(report),
        "backends": render_backends(report),
        "flash attention": format_table(report.flash.items()),
        "settings": render_settings(report),
        "what ran in this process": render_counts(report.counts),
        "route": render_routes(report),
        "self-test": f"{selftest.describe_shapes(report.forward.problem)}\n{render_checks(report.checks)}",
        "verdict": render_verdict(report),
    }
    return "\n\n".join(f"{title}\n{indent(body, INDENT)}" for title, body in sections.items())


def render_versions(report: Report) -> str:
    versions, libraries = report.versions, report.runtime
    rows = [("nsa", versions.nsa), ("python", versions.python), ("torch", versions.torch)]
    rows.append(("triton", versions.triton or "none"))
    if not report.gpus:
        rows.append(("gpu", "none"))
    for gpu in report.gpus:
        facts = f"capability {gpu.capability}, {gpu.memory_gib} GiB, driver {gpu.driver}"
        rows.append(("gpu", f"{gpu.name}, {facts}"))
    tf32 = ", ".join(f"{where} {settings.show_value(on)}" for where, on in libraries["tf32"].items())
    variables = ", ".join(f"{name}={value}" for name, value in libraries["variables"].items())
    rows += [
        *((name, str(libraries[name] or "none")) for name in ("driver", "cuda", "cudnn")),
        ("nvml", "yes" if libraries["nvml"] else "no: the training log has no gpu_util (pip install nvidia-ml-py)"),
        ("tf32", tf32),
        ("variables", variables or "none of torch's is set"),
    ]
    return "\n".join([format_table(rows), *([versions.triton_note] if versions.triton_note else [])])


def render_backends(report: Report) -> str:
    rows = [(b.name, "yes" if b.available else f"{'BROKEN' if b.broken else 'no'}: {b.note}") for b in report.backends]
    kernels = f"kernels of the branches: {report.kernel_set}"
    return "\n".join([format_table(rows), f"tiles of the kernels: {report.tiles}", kernels])


def render_settings(report: Report) -> str:
    rows = [("setting", "environment", "value", "source", "meaning")]
    for state in report.settings:
        note = f" [no effect here without {state.missing}]" if state.missing else ""
        rows.append((state.name, state.env, settings.show_value(state.value), state.source, state.meaning + note))
    unknown = [f"{name} is not a setting; the nearest is {near}" for name, near in report.unknown_names.items()]
    retired = [f"{name} is no longer needed: {why}" for name, why in report.retired_names.items()]
    return "\n".join([format_table(rows), *unknown, *retired, *(f"slow: {mode}" for mode in report.debug_modes)])


def render_counts(counts: Mapping[str, Mapping[str, int]]) -> str:
    rows = [(kind, what, str(n)) for kind, counted in counts.items() for what, n in counted.items()]
    return format_table(rows) if rows else "nothing yet; the self-test below does not count"


def render_routes(report: Report) -> str:
    """One row per op, then each reason against a backend once, with the ops that it holds for."""
    rows = [("op", "forward", "backward", "why")]
    against: dict[tuple[str, str], list[str]] = {}
    for op, forward in report.forward.routes.items():
        backward = report.backward.routes[op]
        backward_name = "-" if op == "scores" else str(backward.backend)
        rows.append((op, str(forward.backend), backward_name, forward.why))
        for route, mode in ((forward, ""), (backward, " backward")):
            for name, reason in route.reasons.items():
                against.setdefault((name, reason), []).append(op + mode)
    reasons = []
    for (name, reason), where in against.items():
        # A backward pass is named only where its forward differs.
        ops = ", ".join(op for op in where if not op.endswith(" backward") or op.removesuffix(" backward") not in where)
        everywhere = len(where) == 2 * len(report.forward.routes)
        reasons.append(f"not {name}{'' if everywhere else f' for {ops}'}: {reason}")
    shape = str(report.forward.problem).removeprefix("attention ")
    return "\n".join([shape, format_table(rows), *reasons])


def render_checks(checks: Sequence[Check]) -> str:
    """One row per backend, op and dtype: the quantity with the largest error relative to its tolerance.

    What a backend declines or raises has its own row, with the cases that it holds for.
    """
    rows = [("backend", "op", "dtype", "worst", "error", "allowed", "")]
    grouped: dict[tuple[str, str, str, str], list[Check]] = {}
    for check in checks:
        grouped.setdefault((check.backend, check.op, check.dtype, check.note), []).append(check)
    for (backend, op, dtype, note), found in grouped.items():
        worst = max(found, key=lambda check: check.badness)
        if note:
            cases = ", ".join(check.case for check in found)
            rows.append((backend, op, dtype, cases, "-", "-", note if worst.agrees else f"WRONG: {note}"))
            continue
        verdict = "ok" if worst.agrees else "WRONG"
        place = f"{worst.quantity}, {worst.case}"
        rows.append((backend, op, dtype, place, f"{worst.error:.2e}", f"{worst.allowed:.2e}", verdict))
    return format_table(rows)


def render_verdict(report: Report) -> str:
    if report.healthy:
        return "every backend here agrees with the reference"
    if not report.failures:
        return f"every backend that runs here agrees with the reference, but {'; '.join(report.obstacles)}"
    wrong = {check.backend for check in report.failures}
    right = [b.name for b in reversed(report.backends) if b.available and b.name not in wrong]
    # sdpa rather than the reference, which builds full score matrices.
    instead = "sdpa" if "sdpa" in right else next(iter(right), None)
    lines = [*map(sentence, report.failures), *report.obstacles]
    if instead:
        advice = f'Until this is fixed, pass backend="{instead}" to NSAConfig, or to each function of nsa.ops'
    else:
        advice = "No backend is right: suspect torch or the hardware before this library"
    return "\n".join([*lines, f"{advice}. Please report it with the output of `nsa doctor --json`."])


def sentence(check: Check) -> str:
    where = f"{check.backend} is wrong in {check.op} ({check.quantity}, {check.case}, {check.dtype})"
    return f"{where}: {check.note or f'error {check.error:.2e}, allowed {check.allowed:.2e}'}"


def format_table(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    return aligned_columns(rows, left=len(rows[0]))


def load_settings(args: argparse.Namespace) -> Settings:
    file = settings.read_file(args.settings_file) if args.settings_file else None
    with warnings.catch_warnings():
        # The report lists unknown variables itself; reading this process's settings later does not warn again.
        warnings.simplefilter("ignore")
        settings.current()
        return Settings.load(file=file, command_line=settings.parse_overrides(args.setting))


def requested_problem(args: argparse.Namespace) -> Problem:
    device = usable_device(args.device).type
    given = {name: default if getattr(args, name) is None else getattr(args, name) for name, default in SHAPE.items()}
    heads, groups, d_k, d_v = (given[name] for name in ("heads", "groups", "d_k", "d_v"))
    config = nsa.NSAConfig(dim=heads * d_k, n_heads=heads, n_kv_groups=groups, d_k=d_k, d_v=d_v)
    for name in ("batch", "seq_len"):
        nsa.config.require_positive_int(name, given[name])
    dtype = DTYPES[args.dtype] if args.dtype else torch.bfloat16 if device == "cuda" else torch.float32
    return Problem.of_config(config, batch=given["batch"], length=given["seq_len"], dtype=dtype, device=device)


def requested_run(args: argparse.Namespace, config: Settings) -> TrainConfig:
    """The planned run: `--config` with the flags that change it."""
    for name in SHAPE:
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
        nsa.config.require(value is None, flag, value, "nothing with --config; --set changes it")
    given = {name: getattr(args, name) for name in ("device", "dtype") if getattr(args, name) is not None}
    return load_config(args.config, given | parse_set(args.set), env=config)


def check_run(
    config: TrainConfig, report: Report, router: Router, args: argparse.Namespace
) -> tuple[list[str], list[str]]:
    """Problems that prevent a planned run from starting, and notes about it."""
    # By the command line or the config; otherwise the best device here is used.
    named = (args.device, parse_set(args.set).get("device"), read_yaml(find_config(args.config)).get("device"))
    given = any(device not in (None, "auto") for device in named)
    notes: list[str] = []
    found = preflight.problems(config, router, notes=notes, device_given=given)
    return [*report.debug_modes, *found, *map(sentence, report.failures), *report.obstacles], notes


def list_problems(problems: list[str]) -> str:
    return "\n".join([f"[WRONG] {len(problems)} problems to fix before this run:", *(f"- {line}" for line in problems)])


def run(args: argparse.Namespace, *, make_router: Callable[[Settings], Router] = build_router) -> int:
    """Run `nsa doctor`: 0 if every backend agrees with the reference, no probe failed and a planned run can start; else
    1. A ValueError for a flag with a wrong value, or without the one it needs."""
    loaded = load_settings(args)
    nsa.config.require(bool(args.config) or not args.set, "--set", args.set, "nothing without --config")
    if args.repro is not None:
        # Checked first: a probe takes a while and its result must not be lost.
        writable = args.repro.parent.is_dir() and not args.repro.is_dir()
        nsa.config.require(writable, "--repro", str(args.repro), "a file in a folder that is there")
    config = requested_run(args, loaded) if args.config else None
    attn = None if config is None else config.model.attn
    problem = requested_problem(args) if config is None else run_info.problem_of(config, backward=False)
    router = make_router(loaded)
    if config is not None and preflight.missing_device(config) is not None:
        # The self-test would run on the missing device.
        print(list_problems(preflight.problems(config, router)))
        return 1
    probe_failures: tuple[str, ...] = ()
    if args.probe or args.repro:
        text, probe_failures = probe(router, problem, attn, args.repro)
        print(f"probe\n{indent(text, INDENT)}\n")
    if problem.device == "cuda" and any(map(selftest.compiles_kernels, router.backends.values())):
        say("the first self-test on a machine compiles the kernels: about half a minute ...", error=True)
    report = diagnose(problem, router, attn=attn, probe_failures=probe_failures)
    print(render_report(report))
    ready, record = report.healthy, report.to_dict()
    if config is not None:
        problems, notes = check_run(config, report, router, args)
        ready = not problems
        record |= {"ready": ready, "problems": problems, "notes": notes}
        print(f"\nrun\n{indent(chr(10).join(notes) or 'no step was run', INDENT)}")
        print(f"\n{list_problems(problems) if problems else '[OK] Environment validated'}")
    if args.json:
        print(json.dumps(record, allow_nan=False))
    return 0 if ready else 1
