"""The functions of backends that run an op: resolved once per problem, then a lookup and a call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from nsa.backends.problem import SIZES, Problem
from nsa.backends.routing import BackendFailure, Router, router, without_autocast
from nsa.sequences import AttentionBranches, Pooling, Saved, Upstream, attention_branches


def profiling() -> bool:
    return bool(torch.autograd._profiler_enabled())


class Stage:
    """One function of the backend that runs a problem, resolved once; a call goes straight to it.

    It goes through the router if there is more to do than to call: a backend failed, or the call is logged or profiled.
    """

    __slots__ = ("backend", "compute", "device", "failures", "function", "name", "problem", "router", "strict")

    def __init__(self, router: Router, problem: Problem, function: str, backend: str, strict: bool) -> None:
        self.router, self.problem, self.function, self.backend = router, problem, function, backend
        self.strict, self.device = strict, problem.device
        self.resolve()

    def resolve(self) -> None:
        route = self.router.route(self.problem, self.backend)
        self.name = route.backend
        self.compute: Callable[..., Any] | None = None
        self.failures: tuple[type[Exception], ...] = (BackendFailure,)
        if route.backend is None or not self.router.is_direct(route):
            return
        compute = getattr(self.router.backends[route.backend], self.function)
        if hasattr(compute, "resolve"):
            # A function that is loaded on first use. If that fails, the router will find out.
            with suppress(BackendFailure):
                self.compute, failures = compute.resolve()
                self.failures += failures
        else:
            self.compute = compute

    def __call__(self, *args: Any) -> Any:
        compute = self.compute
        if compute is None or profiling():
            with torch.profiler.record_function(f"nsa::{self.function}"):
                return self.router.run(self.problem, self.function, *args, backend=self.backend, strict=self.strict)
        try:
            result = without_autocast(compute, self.device)(*args)
        except self.failures as failure:
            call: tuple[Any, ...] = (self.problem, self.function, self.backend, self.strict, args)
            result = self.router.after_failure(failure, str(self.name), *call)
            self.resolve()
            return result
        self.router.counts.add_call(self.problem.op, str(self.name))
        return result


def stage(
    op: str, function: str, shape: tuple[int, ...], like: Tensor, backend: str, strict: bool, **flags: bool
) -> Stage:
    """The function of the backend that runs `op` on a `shape` of `(batch, queries, keys, heads, groups, d_k, d_v)`.

    `like` has the dtype and the device of the problem; `flags` say whether it is `backward`, `varlen`, `cached`.
    """
    stages = router().stages
    key = (op, function, shape, like.dtype, like.device, backend, strict, *flags.items())
    found: Stage | None = stages.get(key)
    if found is None:
        sizes: dict[str, Any] = dict(zip(SIZES, shape, strict=True))
        problem = Problem(op=op, dtype=like.dtype, device=like.device.type, **sizes, **flags)
        found = Stage(router(), problem, function, backend, strict)
        router().remember(stages, key, found)
    return found


def attention_shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape of a problem with `q [B,S,Hq,Dk]`, `k [B,N,G,Dk]` and `v [B,N,G,Dv]`."""
    batch, n_queries, n_heads, d_k = q.shape
    return batch, n_queries, k.shape[1], n_heads, k.shape[2], d_k, v.shape[3]


def combine_shape(q: Tensor, d_v: int) -> tuple[int, ...]:
    """The gated sum has no keys: every head is its own group, with one row per query."""
    batch, length, heads, _ = q.shape
    return batch, length, length, heads, heads, d_v, d_v


def compress_stage(
    function: str, like: Tensor, pooling: Pooling, head_dim: int, backend: str, strict: bool, **flags: bool
) -> Stage:
    """Compression has no queries."""
    (batch, _, groups, _), length = like.shape, pooling.sequences.length
    shape = (batch, length, length, groups, groups, head_dim, head_dim)
    varlen = pooling.sequences.cu_seqlens is not None
    return stage("compress", function, shape, like, backend, strict, **flags, varlen=varlen)


def run_together(stages: tuple[Stage, ...], function: str, *args: Any) -> tuple[Tensor, ...] | None:
    """Run all `stages` at once by `function`, if one backend runs them all and has it; else return None.

    Raises:
        BackendFailure: It fails, or has failed before, and `strict` forbids running them one by one.
    """
    router, problem, name, strict = stages[0].router, stages[0].problem, str(stages[0].name), stages[0].strict
    if any(x.compute is None or x.name != name for x in stages):
        return None
    compute: Any = getattr(router.backends[name], function, None)
    failures: tuple[type[Exception], ...] = (BackendFailure,)
    try:
        if router.failed and (problem, function) in router.failed:
            raise BackendFailure(router.failed[problem, function])
        if hasattr(compute, "resolve"):
            compute, more = compute.resolve()
            failures += more
        found: tuple[Tensor, ...] | None = compute and without_autocast(compute, problem.device)(*args)
    except failures as failure:
        if router.has_recovered(failure, name, problem, function, strict):
            return None
        router.note_failure(name, problem, function, str(failure), None if strict else f"{name}, branch by branch")
        if strict:
            why = f"{failure}; strict forbids running the branches one by one"
            raise BackendFailure(f"{name} failed in {function} on {problem}: {why}") from failure
        # After `strict`: a call without it may recover from the same failure.
        router.failed[problem, function] = str(failure)
        return None
    if found is not None:
        for x in stages:
            router.counts.add_call(x.problem.op, name)
    return found


class Plan:
    """The plan of one attention: what runs each of its stages, forward or backward; for fixed-length sequences also
    what each branch sees, which then follows from shapes alone."""

    def __init__(
        self, inputs: tuple[Tensor, ...], places: tuple[Any, ...], rest: tuple[Any, ...], *, backward: bool
    ) -> None:
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, _ = inputs
        *_, backend, strict = rest
        kind = {"backward": backward, "varlen": places[0] is not None, "cached": places[1] is not None}
        way = "backward" if backward else "forward"

        def find(op: str, function: str, shape: tuple[int, ...], **flags: bool) -> Stage:
            return stage(op, function, shape, q, backend, strict, **flags)

        self.compressed = find("compressed", f"compressed_{way}", attention_shape(q, k_cmp, v_cmp), **kind)
        self.selected = find("selected", f"selected_{way}", attention_shape(q, k_sel, v_sel), **kind)
        self.sliding = find("sliding", f"sliding_{way}", attention_shape(q, k_win, v_win), **kind)
        combine = "prepare_backward" if backward else "combine_forward"
        self.combine = find("combine", combine, combine_shape(q, v_cmp.shape[3]), backward=backward)
        if not backward:
            self.select = find("scores", "select_blocks", attention_shape(q, k_cmp, k_cmp), **kind)
        fixed = all(x is None for x in places)
        self.branches = attention_branches(q, *places, *rest[:-2]) if fixed else None

    def branches_backward(
        self, upstreams: tuple[Upstream, Upstream, Upstream], saved: tuple[Saved, Saved, Saved],
        branches: AttentionBranches,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`dq`, then `dk` and `dv` of the compressed, the selected and the sliding branch: at once, if one backend runs
        them all and offers that, else one after the other."""
        to_cmp, to_sel, to_win = upstreams
        stages = (self.compressed, self.selected, self.sliding)
        # A profile shows them one by one.
        found = None if profiling() else run_together(stages, "branches_backward", upstreams, saved, branches)
        if found is not None:
            return found
        # One dq for all three: the first makes it, the others add to it.
        dq, dk_sel, dv_sel = self.selected(to_sel, saved[1], branches.selected)
        dq, dk_win, dv_win = self.sliding(to_win._replace(dq=dq), saved[2], branches.sliding)
        dq, dk_cmp, dv_cmp = self.compressed(to_cmp._replace(dq=dq), saved[0], branches.compressed)
        return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win


def plan_of(
    inputs: tuple[Tensor, ...], places: tuple[Any, ...], rest: tuple[Any, ...], *, backward: bool
) -> tuple[Plan, AttentionBranches]:
    """The plan of an attention of `inputs` (`q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates`), `places`
    (`cu_seqlens, q_start, window_start`) and the `rest` of the arguments of `nsa::attention`; and its branches."""
    q, k_cmp, v_cmp, k_sel, _, k_win, _, _ = inputs
    kind = (backward, places[0] is None, places[1] is None, places[2] is None)
    key = (q.shape, k_cmp.shape, v_cmp.shape[3], k_sel.shape[1], k_win.shape[1], q.dtype, q.device, kind, rest)
    plan: Plan | None = router().plans.get(key)
    if plan is None:
        plan = Plan(inputs, places, rest, backward=backward)
        router().remember(router().plans, key, plan)
    return plan, plan.branches or attention_branches(q, *places, *rest[:-2])
