"""Compares each backend with the reference on this machine: every op, forward and each gradient, in about two seconds.

Each op runs on a short fixed-length batch, a short varlen batch and, forward only, a few queries at the end of cached
keys, in fp32 and in the requested dtype. Backends that compile kernels, which takes a minute and is cached, run in the
requested dtype only. Gradients are computed as `nsa.ops` computes them and as a layer does: through a gate, and
accumulated into an existing `dq`. `nsa.testing` defines the error and the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa import reference
from nsa.backends.problem import OPS, Problem
from nsa.backends.reference import arguments_of
from nsa.backends.routing import problem_for_op
from nsa.backends.triton import MAX_HEAD_DIM, MAX_HEADS_PER_GROUP
from nsa.dtypes import HALF_DTYPES, dtype_name
from nsa.geometry import exclusive_offsets
from nsa.reference.visibility import locate_queries
from nsa.sequences import Compressed, Pooling, Saved, Selected, Selection, Sequences, Sliding, Upstream
from nsa.testing import max_error, tolerance


@dataclass(frozen=True, kw_only=True)
class Check:
    """One quantity of one op, compared with the reference; `note` is the reason when nothing was compared."""

    backend: str
    op: str
    dtype: str
    case: str
    quantity: str
    error: float = 0.0
    allowed: float = 0.0
    note: str = ""

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed

    @property
    def badness(self) -> float:
        """The error as a multiple of the tolerance; above 1 is wrong."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed else math.inf


# The paper's block sizes. A short sequence has four or five selection blocks, so one is selected by importance.
COMPRESSION: dict[str, Any] = {"block": 32, "stride": 16}
SELECTION: dict[str, Any] = {"select_block": 64, "n_select": 3, "n_init": 1, "n_local": 1}
HYPERPARAMETERS = {**COMPRESSION, **SELECTION, "window": 100}
# Varlen: a document of one token, one too short for a compressed block, and two of odd lengths.
CASES = {"fixed-length": (259,), "varlen": (1, 31, 26, 201), "cached": (259,)}
# Cached: queries per row, and the position of each row's first: one that sees no compressed block yet, one at the end.
N_CACHED_QUERIES = 5
CACHED_STARTS = (28, 254)

# The branches' outputs, in the order of their gates.
BRANCH_OUTPUTS = ("o_cmp", "o_sel", "o_win")

# What a backend may raise on inputs that it accepted: a BackendFailure or an error of torch, which are RuntimeErrors,
# or a ValueError. Anything else is a bug and keeps its traceback.
REPORTED_ERRORS = (RuntimeError, ValueError)

# The reason why a backend, by name, does not run a problem here; None if it does.
ReasonAgainst = Callable[[str, Problem], str | None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class BackwardPass:
    """One backward pass: the outputs whose gradients are given and the inputs whose gradients are returned."""

    function: str
    outputs: tuple[str, ...]
    leaves: tuple[str, ...]
    label: str = ""
    # As in a layer, where a branch's output is multiplied by this gate and `dq` may be accumulated into another.
    gate: int | None = None
    accumulated: bool = False

    @property
    def quantities(self) -> list[str]:
        return [f"d{name}{self.label}" for name in self.leaves]


@dataclass(frozen=True)
class OpSpec:
    """How an op is called, in the reference and in a backend."""

    op: str
    reference: Callable[..., Any]
    kind: type | None  # what a backend is given besides tensors; the gated sum takes tensors only
    leaves: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("o", "lse")
    gate: int | None = None  # a branch's position among the gates

    @property
    def name(self) -> str:
        """The prefix of the names of a backend's functions."""
        return self.reference.__name__.removesuffix("_attention")

    def backward_passes(self, inputs: CaseInputs) -> Iterator[BackwardPass]:
        """Caches are not trained through. A backend may have a path of its own where `lse` has no gradient."""
        if inputs.sequences.q_start is not None:
            return
        function, first = f"{self.name}_backward", self.outputs[:1]
        yield BackwardPass(function, first, self.leaves)
        if len(self.outputs) > 1:
            yield BackwardPass(function, self.outputs, self.leaves, " with dlse")
        if self.gate is not None:
            yield BackwardPass(function, first, self.leaves, " gated", self.gate)
            yield BackwardPass(function, first, self.leaves, " gated and added", self.gate, accumulated=True)
        if self.op == "combine":
            yield BackwardPass("prepare_backward", first, ("gates",), " alone")


OP_SPECS = (
    OpSpec("compress", reference.compress_mean, Pooling, leaves=("k",), outputs=("mean",)),
    OpSpec("compress", reference.gather_blocks, Pooling, leaves=("v", "position"), outputs=("blocks",)),
    OpSpec("compressed", reference.compressed_attention, Compressed, leaves=("q", "k_cmp", "v_cmp"), gate=0),
    OpSpec("selected", reference.selected_attention, Selected, leaves=("q", "k", "v"), fixed=("indices",), gate=1),
    OpSpec("sliding", reference.sliding_attention, Sliding, leaves=("q", "k", "v"), gate=2),
    OpSpec("combine", reference.combine, None, leaves=(*BRANCH_OUTPUTS, "gates"), outputs=("o",)),
)


@dataclass(frozen=True)
class CaseInputs:
    """One case in one dtype: the tensors, rounded to it, and what all ops share."""

    case: str
    dtype: torch.dtype
    problem: Problem
    sequences: Sequences
    scale: float
    tensors: Mapping[str, Tensor]

    @property
    def specs(self) -> tuple[OpSpec, ...]:
        """The ops of a case. With a cache, only those that read its keys: the gated sum has none, compression needs the
        whole sequence."""
        return tuple(spec for spec in OP_SPECS if self.sequences.q_start is None or spec.gate is not None)

    def cast(self, names: Iterable[str], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The named tensors, floating-point ones in `dtype`."""
        tensors = [self.tensors[name] for name in names]
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)

    def problem_of(self, op: str) -> Problem:
        """The problem of one op, as the router knows it."""
        return problem_for_op(self.problem, op, **COMPRESSION)

    def branch(self, kind: type) -> Any:
        """The sequences and hyperparameters as a backend takes them: a `Compressed`, `Selection`, ..."""
        values = HYPERPARAMETERS | {"scale": self.scale}
        names = [field.name for field in fields(kind) if field.name != "sequences"]
        return kind(self.sequences, **{name: values[name] for name in names})

    def keywords(self, kind: type | None) -> dict[str, Any]:
        """The same as keyword arguments of the reference."""
        return {} if kind is None else arguments_of(self.branch(kind))

    def check(self, backend: str, op: str, quantity: str = "-", **found: Any) -> Check:
        return Check(backend=backend, op=op, dtype=dtype_name(self.dtype), case=self.case, quantity=quantity, **found)


def self_test(
    backends: Sequence[Any],
    shape: Problem,
    reason_against: ReasonAgainst | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Check]:
    """Compare every op of every backend with the reference, at the heads, head_dim, device and dtype of `shape` (see
    `reduced_shape`); returns one check per backend, op, dtype, case and quantity. `reason_against` is called before a
    backend runs, so that a disabled one stays off, by default its `supports`; `progress(kernel, done, total)` is called
    while kernels are compiled."""
    by_name = {backend.name: backend for backend in backends}
    ask = reason_against or (lambda name, problem: by_name[name].supports(problem))
    drawn = {case: draw_inputs(case, shape.dtype, reduced_shape(shape, shape.dtype)) for case in CASES}
    compiling = [backend for backend in backends if hasattr(backend, "compile_ahead")]
    every_op = list(product(drawn.values(), OPS))
    gpu = torch.cuda.current_device() if shape.device == "cuda" else None

    def ask_all(inputs: CaseInputs, op: str) -> None:
        # In a thread, which would start on GPU 0.
        if gpu is not None:
            torch.cuda.set_device(gpu)
        for backend in backends:
            run_ahead(backend, inputs, op, ask, only_ask=not compiling or compiles_kernels(backend))

    def run_all(backend: Any) -> None:
        for inputs, op in every_op:
            run_ahead(backend, inputs, op, ask)

    with ThreadPoolExecutor(len(every_op)) as pool:
        # A backend may start a process to answer: all of them at once, and meanwhile kernels are compiled.
        answers = [pool.submit(ask_all, inputs, op) for inputs, op in every_op]
        for backend in compiling:
            backend.compile_ahead(partial(run_all, backend), progress)
        for answer in answers:
            answer.result()
    checks: list[Check] = []
    for dtype in dict.fromkeys((torch.float32, shape.dtype)):
        tested = [backend for backend in backends if dtype == shape.dtype or not compiles_kernels(backend)]
        for case in CASES:
            inputs = drawn[case] if dtype == shape.dtype else draw_inputs(case, dtype, reduced_shape(shape, dtype))
            for spec in inputs.specs:
                checks += compare_op(spec, inputs, tested, ask)
            checks += compare_selection(inputs, tested, ask)
    rank = {backend.name: i for i, backend in enumerate(backends)}
    return sorted(checks, key=lambda check: (rank[check.backend], check.dtype != "float32", OPS.index(check.op)))


def run_ahead(backend: Any, inputs: CaseInputs, op: str, ask: ReasonAgainst, *, only_ask: bool = False) -> None:
    """Ask about an op, and run whatever the self-test will run of it: FlashAttention is tried in a process of its own
    first, and kernels are compiled. Errors are reported later."""
    runs: list[Callable[[], Any]] = [partial(run_backend, backend, s, inputs) for s in inputs.specs if s.op == op]
    if op == "scores":
        runs = [partial(select, backend, inputs)]
    if runs and ask(backend.name, inputs.problem_of(op)) is None and not only_ask:
        for run in runs:
            with suppress(*REPORTED_ERRORS):
                run()


def compiles_kernels(backend: Any) -> bool:
    """Whether the backend compiles kernels when they first run: then only for the requested dtype."""
    return getattr(backend, "compiles", False)


def reduced_shape(shape: Problem, dtype: torch.dtype) -> Problem:
    """`shape` with at most two groups; on a CPU with few heads and a small head_dim, else with what our kernels take.

    Half precision is reduced further, because many CPUs emulate it: more would take minutes and test nothing else.
    """
    half, on_cpu = dtype in HALF_DTYPES, shape.device == "cpu"
    groups = min(shape.n_groups, 1 if on_cpu and half else 2)
    heads = min(shape.heads_per_group, 2 if on_cpu and half else 3 if on_cpu else MAX_HEADS_PER_GROUP)
    head_dim = 8 if on_cpu and half else 16 if on_cpu else MAX_HEAD_DIM
    d_k, d_v = min(shape.d_k, head_dim), min(shape.d_v, head_dim)
    if d_k == d_v and shape.d_k != shape.d_v:
        # Keep d_k and d_v different: a mix-up of the two would not show otherwise.
        d_k, d_v = (d_k, d_v // 2) if shape.d_k > shape.d_v else (d_k // 2, d_v)
    return replace(shape, n_heads=groups * heads, n_groups=groups, d_k=d_k, d_v=d_v)


def describe_shapes(shape: Problem) -> str:
    runs = {dtype_name(dtype): reduced_shape(shape, dtype) for dtype in dict.fromkeys((torch.float32, shape.dtype))}
    return "ran " + "; ".join(
        f"{name} with {run.n_heads} heads in {run.n_groups} groups, head_dim {run.d_k}/{run.d_v}"
        for name, run in runs.items()
    )


def draw_inputs(case: str, dtype: torch.dtype, shape: Problem) -> CaseInputs:
    lengths = torch.tensor(CASES[case])
    varlen, cached = case == "varlen", case == "cached"
    n_keys = int(lengths.sum())
    n_queries = N_CACHED_QUERIES if cached else n_keys
    batch = len(CACHED_STARTS) if cached else 1
    sizes: dict[str, Any] = {"batch": batch, "n_queries": n_queries, "n_keys": n_keys}
    problem = replace(shape, **sizes, dtype=dtype, varlen=varlen, cached=cached, backward=False)
    cu_seqlens = exclusive_offsets(lengths).int().to(shape.device) if varlen else None
    q_start = torch.tensor(CACHED_STARTS, dtype=torch.int32, device=shape.device) if cached else None
    sequences = Sequences(batch, n_queries, torch.device(shape.device), cu_seqlens, q_start)
    inputs = CaseInputs(case, dtype, problem, sequences, shape.d_k**-0.5, {})
    n_cmp = inputs.problem_of("compressed").n_keys
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(shape.device, dtype)

    rows, groups, block = (batch, n_queries, shape.n_heads), shape.n_groups, HYPERPARAMETERS["block"]
    tensors = {
        "q": draw(*rows, shape.d_k),
        "k_cmp": draw(batch, n_cmp, groups, shape.d_k),
        "v_cmp": draw(batch, n_cmp, groups, shape.d_v),
        "k": draw(batch, n_keys, groups, shape.d_k),
        "v": draw(batch, n_keys, groups, shape.d_v),
        "gates": draw(*rows, 3).sigmoid(),
        "do": draw(*rows, shape.d_v),
        "dq": draw(*rows, shape.d_k),
        "dlse": draw(*rows).to(lse_dtype),
        "position": draw(block, shape.d_v),
        "dmean": draw(batch, n_cmp, groups, shape.d_k),
        "dblocks": draw(batch, n_cmp, groups, block * shape.d_v),
    } | {name: draw(*rows, shape.d_v) for name in BRANCH_OUTPUTS}
    inputs = replace(inputs, tensors=tensors)

    # What one op takes from another comes from the reference, so that each is tested alone.
    q, k_cmp, v_cmp = inputs.cast(("q", "k_cmp", "v_cmp"), torch.float64)
    _, lse = reference.compressed_attention(q, k_cmp, v_cmp, **inputs.keywords(Compressed))
    indices = reference.select_blocks(q, k_cmp, lse, **inputs.keywords(Selection))
    return replace(inputs, tensors={**tensors, "lse_cmp": lse.to(lse_dtype), "indices": indices})


def compare_op(
    spec: OpSpec, inputs: CaseInputs, backends: Sequence[Any], reason_against: ReasonAgainst
) -> Iterator[Check]:
    """Checks of one op, forward and every backward pass, for each backend."""
    passes = list(spec.backward_passes(inputs))
    quantities = [*spec.outputs, *(name for backward in passes for name in backward.quantities)]
    exact = run_reference(spec, inputs, torch.float64)
    plain = run_reference(spec, inputs, inputs.dtype)
    cancelled = cancellation_error(spec, inputs)
    problem = inputs.problem_of(spec.op)
    problems = [problem, *([replace(problem, backward=True)] if passes else [])]
    for backend in backends:
        found = attempt(partial(run_backend, backend, spec, inputs), inputs, backend, problems, reason_against)
        if isinstance(found, Check):
            yield found
            continue
        for name, x, like, right in zip(quantities, found, plain, exact, strict=True):
            # A result is rounded once to its dtype. Before that, a fused backward rounds the three factors of
            # `p * (dp - delta)` in fp32, and their errors do not cancel as they do in autograd's softmax.
            rounding = torch.finfo(like.dtype).eps + 3 * torch.finfo(torch.float32).eps
            allowed = tolerance(like, right, rounding=rounding)
            allowed += cancelled if name.startswith(("dq", "dk")) else 0.0
            off = max_error(x, right) if x.dtype == like.dtype else math.inf
            yield inputs.check(backend.name, spec.op, name, error=off, allowed=allowed)


def attempt(
    run: Callable[[], Result], inputs: CaseInputs, backend: Any, problems: list[Problem], reason_against: ReasonAgainst
) -> Result | Check:
    """`run()`, or a check that reports why the backend declines one of the problems, or what it raised."""
    op = problems[0].op
    for problem in problems:
        reason = reason_against(backend.name, problem)
        if reason:
            return inputs.check(backend.name, op, note=f"declines: {reason}")
    try:
        return run()
    except REPORTED_ERRORS as error:
        if hasattr(backend, "recover_from") and backend.recover_from(error) is not None:
            return attempt(run, inputs, backend, problems, reason_against)
        first_line = (str(error).splitlines() or [""])[0]
        return inputs.check(backend.name, op, error=math.inf, note=f"{type(error).__name__}: {first_line}")


def run_reference(spec: OpSpec, inputs: CaseInputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs.cast(spec.leaves, dtype)]
    fixed = inputs.cast(spec.fixed, dtype)
    outputs = as_tuple(spec.reference(*leaves, *fixed, **inputs.keywords(spec.kind)))
    gradients: list[Tensor] = []
    for backward in spec.backward_passes(inputs):
        if backward.accumulated:
            # The pass before was the same, without an existing `dq`.
            dq, *others = gradients[-len(backward.leaves) :]
            gradients += (inputs.tensors["dq"].to(dtype) + dq, *others)
            continue
        results = outputs[: len(backward.outputs)]
        grads = [inputs.tensors[f"d{name}"].to(x.dtype) for name, x in zip(backward.outputs, results, strict=True)]
        if backward.gate is not None:
            grads[0] = grads[0] * inputs.tensors["gates"].to(dtype)[..., backward.gate, None]
        wanted = [x for name, x in zip(spec.leaves, leaves, strict=True) if name in backward.leaves]
        gradients += torch.autograd.grad(results, wanted, grads, retain_graph=True)
    return (*(x.detach() for x in outputs), *gradients)


def run_backend(backend: Any, spec: OpSpec, inputs: CaseInputs) -> tuple[Tensor, ...]:
    """Outputs and gradients by the backend's own functions."""
    tensors = inputs.cast((*spec.leaves, *spec.fixed), inputs.dtype)
    branch = () if spec.kind is None else (inputs.branch(spec.kind),)
    outputs = as_tuple(getattr(backend, f"{spec.name}_forward")(*tensors, *branch))
    gradients: list[Tensor] = []
    for backward in spec.backward_passes(inputs):
        grads = [inputs.tensors[f"d{name}"] if name in backward.outputs else None for name in spec.outputs]
        function = getattr(backend, backward.function)
        if backward.function == "prepare_backward":
            gradients.append(prepare_gates(backend, inputs, {})[0])
        elif spec.op == "combine":
            gradients += as_tuple(function(*grads, *tensors))
        elif spec.op == "compress":
            gradients += as_tuple(function(*grads, *branch))
        else:
            q, k, v, *indices = tensors
            saved = Saved(q, k, v, *outputs, *indices)
            gradients += function(upstream_of(backend, inputs, backward, grads, outputs), saved, *branch)
    return (*outputs, *gradients)


def upstream_of(
    backend: Any, inputs: CaseInputs, backward: BackwardPass, grads: list[Tensor | None], outputs: tuple[Tensor, ...]
) -> Upstream:
    """The upstream gradients of a branch's backward pass."""
    do, dlse = grads
    assert do is not None
    if backward.gate is None:
        return Upstream(do, dlse)
    if hasattr(backend, "prepare_backward"):
        # As in a layer: one function prepares all branches, of which this is one.
        upstream = prepare_gates(backend, inputs, {backward.gate: outputs})[1][backward.gate]
    else:
        # Columns of tensors that hold all branches; `do . o` in fp32, as a kernel sums it.
        products = (do.to(inputs.tensors["dlse"].dtype) * outputs[0]).sum(dim=-1, keepdim=True).expand(-1, -1, -1, 3)
        columns = (x[..., backward.gate] for x in (inputs.tensors["gates"], products.contiguous()))
        upstream = Upstream(do, dlse, *columns)
    # Accumulated in place.
    return upstream._replace(dq=inputs.tensors["dq"].clone() if backward.accumulated else None)


def prepare_gates(
    backend: Any, inputs: CaseInputs, known: Mapping[int, tuple[Tensor, ...]]
) -> tuple[Tensor, tuple[Upstream, ...]]:
    """`prepare_backward` on random outputs, except for the branches whose `(o, lse)` is `known`."""
    tensors = inputs.tensors
    drawn = [(tensors[name], tensors["lse_cmp"]) for name in BRANCH_OUTPUTS]
    outputs, lses = zip(*(known.get(branch, pair) for branch, pair in enumerate(drawn)), strict=True)
    found: tuple[Tensor, tuple[Upstream, ...]] = backend.prepare_backward(
        tensors["do"], outputs, lses, tensors["gates"], inputs.problem.n_groups
    )
    return found


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def cancellation_error(spec: OpSpec, inputs: CaseInputs) -> float:
    """The error of `dp - delta` where they cancel: the rounding of two fp32 sums of the size `|do| |v|`, which is
    then multiplied by a key in `dq` and a query in `dk`. With few heads and keys nothing else is left."""
    if spec.gate is None:
        return 0.0
    q, k, v = inputs.cast(spec.leaves, torch.float64)
    do = inputs.tensors["do"].double()
    size = float(do.norm(dim=-1).max() * v.norm(dim=-1).max() * torch.maximum(q.abs().max(), k.abs().max()))
    return torch.finfo(torch.float32).eps * inputs.scale * size


def select(backend: Any, inputs: CaseInputs) -> Tensor:
    q, k = inputs.cast(("q", "k_cmp"), inputs.dtype)
    indices: Tensor = backend.select_blocks(q, k, inputs.tensors["lse_cmp"], inputs.branch(Selection))
    return indices


def compare_selection(inputs: CaseInputs, backends: Sequence[Any], reason_against: ReasonAgainst) -> Iterator[Check]:
    """A selection has no rounding error: what is compared is how much fp64 importance it misses.

    Importances that are off by `e` swap two blocks only if these differ by less than `2e`, so the reference's own error
    bounds what each block that is not forced may cost.
    """
    low = (*inputs.cast(("q", "k_cmp"), inputs.dtype), inputs.tensors["lse_cmp"])
    exact = inputs.cast(("q", "k_cmp", "lse_cmp"), torch.float64)
    selection = inputs.keywords(Selection)
    counts = {name: HYPERPARAMETERS[name] for name in ("n_select", "n_init", "n_local")}
    scoring = {name: value for name, value in selection.items() if name not in counts}
    importance, rounded = (reference.selection_importance(*tensors, **scoring).double() for tensors in (exact, low))
    off = float((rounded - importance).abs().max()) + torch.finfo(low[2].dtype).eps * float(importance.max())
    n_free = counts["n_select"] - counts["n_init"] - counts["n_local"]

    best, plain = (reference.select_blocks(*tensors, **selection) for tensors in (exact, low))
    # A forced block counts more than all others together; one that starts after the query is never right.
    _, t = locate_queries(inputs.tensors["q"], inputs.sequences.cu_seqlens, inputs.sequences.q_start)
    own = (t // HYPERPARAMETERS["select_block"])[:, :, None, None]
    j = torch.arange(importance.shape[-1], device=importance.device)
    forced = (j < counts["n_init"]) | (j > own - counts["n_local"])
    value = importance.masked_fill(forced, 1e3).masked_fill(j > own, -math.inf)
    allowed = 2 * (missed_importance(plain, best, value) + n_free * 2 * off)
    problem = inputs.problem_of("scores")
    for backend in backends:
        selected = attempt(partial(select, backend, inputs), inputs, backend, [problem], reason_against)
        if isinstance(selected, Check):
            yield selected
            continue
        missed = missed_importance(selected, best, value)
        yield inputs.check(backend.name, "scores", "missed", error=missed, allowed=allowed)


def missed_importance(selected: Tensor, best: Tensor, value: Tensor) -> float:
    """The most that a query's selection is below the best one; infinite where it is no valid list of as many blocks."""
    if selected.shape != best.shape or selected.dtype != best.dtype or bool((selected >= value.shape[-1]).any()):
        return math.inf
    before, after = selected[..., :-1], selected[..., 1:]
    ascending = (after == -1) | ((before != -1) & (after > before))
    if bool(((selected >= 0) != (best >= 0)).any()) or not bool(ascending.all()):
        return math.inf

    def total(indices: Tensor) -> Tensor:
        return value.gather(-1, indices.clamp_min(0).long()).masked_fill(indices < 0, 0.0).sum(dim=-1)

    return max(0.0, float((total(best) - total(selected)).max()))
