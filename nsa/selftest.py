"""Does each backend agree with the reference on this machine: every op, forward and each gradient, in two seconds.

Each op runs on a short plain batch, a short packed one, and forward on a few queries at the end of cached keys, in fp32
and in the dtype asked for; kernels that are compiled first, which takes a minute and is remembered, in the latter only.
Gradients are taken as `nsa.ops` takes them, and as a layer does: through a gate, and added to a `dq` that is there.
An error is a distance from the reference in fp64; the reference in the same dtype has one too, and a backend may have
twice that and a rounding more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa import reference
from nsa.backends.problem import OPS, Problem
from nsa.backends.routing import problem_for_op
from nsa.geometry import exclusive_offsets
from nsa.reference.visibility import locate_queries
from nsa.sequences import Compressed, Pooling, Saved, Selected, Selection, Sequences, Sliding, Upstream


@dataclass(frozen=True, kw_only=True)
class Check:
    """One quantity of one op, compared. `note` tells why there is nothing to compare."""

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
        """How much of the allowance is used up; above 1 is wrong."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed else math.inf


# Blocks as in the paper; a short sequence has four or five of them, so one of the chosen is chosen freely.
KNOBS: dict[str, Any] = {"block": 32, "stride": 16, "select_block": 64, "window": 100}
SELECTION: dict[str, Any] = {"n_select": 3, "n_init": 1, "n_local": 1}
# Packed: a document of one token, one too short for a compressed block, and two of odd lengths.
CASES = {"plain": (259,), "packed": (1, 31, 26, 201), "cached": (259,)}
# Cached: so many queries in each row, the first of them here: one that sees no compressed block yet, one at the end.
N_CACHED_QUERIES = 5
CACHED_STARTS = (28, 254)

# The branches' outputs, in the order of their gates.
BRANCHES = ("o_cmp", "o_sel", "o_win")

# The largest groups and heads that the self-test runs on a GPU.
MOST_HEADS, WIDEST = 64, 256

# What a backend may raise on inputs that it took: a BackendFailure or an error of torch's, which are RuntimeErrors, or
# a refusal. Anything else is a bug in it, or here, and shows its traceback.
FINDINGS = (RuntimeError, ValueError)


@dataclass(frozen=True)
class Pull:
    """One backward pass: the outputs whose gradients are given, the inputs whose gradients come back."""

    function: str
    outputs: tuple[str, ...]
    leaves: tuple[str, ...]
    label: str = ""
    # As in a layer, where a branch's output meets this one of the gates, and its `dq` may be added to another branch's.
    gate: int | None = None
    added: bool = False

    @property
    def quantities(self) -> list[str]:
        return [f"d{name}{self.label}" for name in self.leaves]


@dataclass(frozen=True)
class Stage:
    """How an op is called, in the reference and in a backend."""

    op: str
    spec: Callable[..., Any]
    forward: str
    backward: str
    leaves: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("o", "lse")
    knobs: tuple[str, ...] = ()
    # What a backend is given for them; the gated sum has no hyperparameters.
    kind: type | None = None
    shared: tuple[str, ...] = ("scale", "cu_seqlens", "q_start")
    # A branch's place among the gates.
    gate: int | None = None

    def pulls(self, trial: Trial) -> list[Pull]:
        """Nobody trains through a cache. Few ask for the gradient of `lse`: a backend may have a path without it."""
        if trial.q_start is not None:
            return []
        first, *rest = self.outputs
        pulls = [Pull(self.backward, (first,), self.leaves)]
        if rest:
            pulls.append(Pull(self.backward, self.outputs, self.leaves, " with dlse"))
        if self.gate is not None:
            pull = Pull(self.backward, (first,), self.leaves, " gated", gate=self.gate)
            pulls += [pull, replace(pull, label=" gated and added", added=True)]
        if self.op == "combine":
            pulls.append(Pull("prepare_backward", (first,), ("gates",), " alone"))
        return pulls


STAGES = (
    Stage(
        "compress",
        reference.compress_mean,
        "compress_mean_forward",
        "compress_mean_backward",
        kind=Pooling,
        leaves=("k",),
        outputs=("mean",),
        knobs=("block", "stride"),
        shared=("cu_seqlens",),
    ),
    Stage(
        "compress",
        reference.gather_blocks,
        "gather_blocks_forward",
        "gather_blocks_backward",
        kind=Pooling,
        leaves=("v", "position"),
        outputs=("blocks",),
        knobs=("block", "stride"),
        shared=("cu_seqlens",),
    ),
    Stage(
        "compressed",
        reference.compressed_attention,
        "compressed_forward",
        "compressed_backward",
        kind=Compressed,
        leaves=("q", "k_cmp", "v_cmp"),
        knobs=("block", "stride"),
        gate=0,
    ),
    Stage(
        "selected",
        reference.selected_attention,
        "selected_forward",
        "selected_backward",
        kind=Selected,
        leaves=("q", "k", "v"),
        fixed=("indices",),
        knobs=("select_block",),
        gate=1,
    ),
    Stage(
        "sliding",
        reference.sliding_attention,
        "sliding_forward",
        "sliding_backward",
        kind=Sliding,
        leaves=("q", "k", "v"),
        knobs=("window",),
        gate=2,
    ),
    Stage(
        "combine",
        reference.combine,
        "combine_forward",
        "combine_backward",
        leaves=(*BRANCHES, "gates"),
        outputs=("o",),
        shared=(),
    ),
)


@dataclass(frozen=True)
class Trial:
    """One case in one dtype: the inputs, rounded to it, and what all stages share."""

    case: str
    dtype: torch.dtype
    problem: Problem
    tensors: Mapping[str, Tensor]
    cu_seqlens: Tensor | None
    q_start: Tensor | None
    scale: float

    @property
    def stages(self) -> tuple[Stage, ...]:
        """A cache changes nothing about the mixture, which has no keys, and has no whole sequence to compress."""
        return tuple(stage for stage in STAGES if self.q_start is None or "q_start" in stage.shared)

    def positional(self, names: Iterable[str], dtype: torch.dtype) -> tuple[Tensor, ...]:
        tensors = [self.tensors[name] for name in names]
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)

    def keywords(self, stage: Stage) -> dict[str, Any]:
        return {name: KNOBS[name] for name in stage.knobs} | {name: self.shared[name] for name in stage.shared}

    def posed(self, op: str) -> Problem:
        """The problem of one op, as the router knows it."""
        return problem_for_op(self.problem, op, KNOBS["block"], KNOBS["stride"])

    def branch(self, stage: Stage) -> Any:
        """The sequences and hyperparameters as a backend takes them."""
        assert stage.kind is not None
        keywords = self.keywords(stage)
        places = [keywords.pop(name, None) for name in ("cu_seqlens", "q_start")]
        return stage.kind(self.sequences(*places), **keywords)

    @property
    def selection(self) -> Selection:
        sizes = {name: KNOBS[name] for name in ("block", "stride", "select_block")}
        return Selection(self.sequences(self.cu_seqlens, self.q_start), **SELECTION, **sizes, scale=self.scale)

    def sequences(self, cu_seqlens: Tensor | None, q_start: Tensor | None) -> Sequences:
        q = self.tensors["q"]
        return Sequences(q.shape[0], q.shape[1], q.device, cu_seqlens, q_start)

    @property
    def shared(self) -> dict[str, Any]:
        return {"scale": self.scale, "cu_seqlens": self.cu_seqlens, "q_start": self.q_start}

    def products(self, branch: int, o: Tensor) -> Tensor:
        """`do . o` of all branches side by side, in fp32 as a kernel sums it; `o` is that of one of them."""
        outputs = [self.tensors[name] for name in BRANCHES]
        outputs[branch] = o
        do = self.tensors["do"].to(self.tensors["dlse"].dtype)
        return torch.stack([(do * x).sum(dim=-1) for x in outputs], dim=-1)

    def check(self, backend: str, op: str, quantity: str, **found: Any) -> Check:
        dtype = str(self.dtype).removeprefix("torch.")
        return Check(backend=backend, op=op, dtype=dtype, case=self.case, quantity=quantity, **found)


# Why a backend, by name, does not run a problem here; None when it does.
Obstacle = Callable[[str, Problem], str | None]


def self_test(
    backends: Sequence[Any],
    shape: Problem,
    obstacle: Obstacle | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Check]:
    """Every op of every backend against the reference, with the heads, the device and the dtype of `shape`.

    `obstacle` is asked before a backend runs, so that what a setting switches off stays off. By default the
    backend's own `supports` is. `progress(kernel, done, total)` is called while kernels are compiled.
    """
    by_name = {backend.name: backend for backend in backends}
    ask = obstacle or (lambda name, problem: by_name[name].supports(problem))
    for backend in backends:
        if hasattr(backend, "compile_ahead"):
            backend.compile_ahead(partial(run_all, backend, shape, ask), progress)
    checks = []
    for dtype in dict.fromkeys((torch.float32, shape.dtype)):
        tested = [backend for backend in backends if dtype == shape.dtype or not compiles(backend)]
        for case in CASES:
            trial = make_trial(case, dtype, affordable(shape, dtype))
            for stage in trial.stages:
                checks += check_stage(stage, trial, tested, ask)
            checks += check_selection(trial, tested, ask)
    rank = {backend.name: i for i, backend in enumerate(backends)}
    return sorted(checks, key=lambda check: (rank[check.backend], check.dtype != "float32", OPS.index(check.op)))


def run_all(backend: Any, shape: Problem, obstacle: Obstacle) -> None:
    """Everything that `check_stage` will run of a backend, for its kernels; what fails now is found there."""
    for case in CASES:
        trial = make_trial(case, shape.dtype, affordable(shape, shape.dtype))
        for stage in trial.stages:
            if obstacle(backend.name, trial.posed(stage.op)) is None:
                with suppress(*FINDINGS):
                    run_backend(backend, stage, trial)
        if obstacle(backend.name, trial.posed("scores")) is None:
            with suppress(*FINDINGS):
                q, k = trial.positional(("q", "k_cmp"), trial.dtype)
                backend.select_blocks(q, k, trial.tensors["lse_cmp"], trial.selection)


def compiles(backend: Any) -> bool:
    """Whether the backend's kernels are compiled when they first run: then not for a dtype nobody asked about."""
    return getattr(backend, "compiles", False)


def affordable(shape: Problem, dtype: torch.dtype) -> Problem:
    """At most two groups; on a CPU few heads too, and narrow ones, the more so for half precision, for which many CPUs
    have no arithmetic: more would take minutes and test nothing else."""
    half = dtype in (torch.float16, torch.bfloat16)
    on_cpu = shape.device == "cpu"
    groups = min(shape.n_groups, 1 if on_cpu and half else 2)
    heads = min(shape.heads_per_group, 2 if on_cpu and half else 3 if on_cpu else MOST_HEADS)
    width = 8 if on_cpu and half else 16 if on_cpu else WIDEST
    d_k, d_v = min(shape.d_k, width), min(shape.d_v, width)
    if d_k == d_v and shape.d_k != shape.d_v:
        # Widths that differ do so at this size too: a mix-up of the two would not show otherwise.
        d_k, d_v = (d_k, d_v // 2) if shape.d_k > shape.d_v else (d_k // 2, d_v)
    return replace(shape, n_heads=groups * heads, n_groups=groups, d_k=d_k, d_v=d_v)


def tested(shape: Problem) -> str:
    """What the self-test runs for `shape`, in words."""
    parts = []
    for dtype in dict.fromkeys((torch.float32, shape.dtype)):
        run = affordable(shape, dtype)
        name = str(dtype).removeprefix("torch.")
        parts.append(f"{name} with {run.n_heads} heads in {run.n_groups} groups, {run.d_k}/{run.d_v} wide")
    return "ran " + "; ".join(parts)


def make_trial(case: str, dtype: torch.dtype, shape: Problem) -> Trial:
    lengths = torch.tensor(CASES[case])
    packed, cached = case == "packed", case == "cached"
    n_keys = int(lengths.sum())
    n_queries = N_CACHED_QUERIES if cached else n_keys
    batch = len(CACHED_STARTS) if cached else 1
    problem = replace(
        shape,
        batch=batch,
        n_queries=n_queries,
        n_keys=n_keys,
        dtype=dtype,
        packed=packed,
        cached=cached,
        backward=False,
    )
    n_cmp = problem_for_op(problem, "compressed", KNOBS["block"], KNOBS["stride"]).n_keys
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(shape.device, dtype)

    rows, groups = (batch, n_queries, shape.n_heads), shape.n_groups
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
        "position": draw(KNOBS["block"], shape.d_v),
        "dmean": draw(batch, n_cmp, groups, shape.d_k),
        "dblocks": draw(batch, n_cmp, groups, KNOBS["block"] * shape.d_v),
    } | {name: draw(*rows, shape.d_v) for name in BRANCHES}
    cu_seqlens = exclusive_offsets(lengths).int().to(shape.device) if packed else None
    q_start = torch.tensor(CACHED_STARTS, dtype=torch.int32, device=shape.device) if cached else None
    trial = Trial(case, dtype, problem, tensors, cu_seqlens, q_start, shape.d_k**-0.5)

    # What later stages take from earlier ones comes from the reference, so that each is judged alone.
    q, k_cmp, v_cmp = trial.positional(("q", "k_cmp", "v_cmp"), torch.float64)
    compression = {"block": KNOBS["block"], "stride": KNOBS["stride"], **trial.shared}
    _, lse = reference.compressed_attention(q, k_cmp, v_cmp, **compression)
    indices = reference.select_blocks(q, k_cmp, lse, select_block=KNOBS["select_block"], **SELECTION, **compression)
    return replace(trial, tensors={**tensors, "lse_cmp": lse.to(lse_dtype), "indices": indices})


def check_stage(stage: Stage, trial: Trial, backends: Sequence[Any], obstacle: Obstacle) -> list[Check]:
    quantities = [*stage.outputs, *(name for pull in stage.pulls(trial) for name in pull.quantities)]
    truth = run_reference(stage, trial, torch.float64)
    rounded = run_reference(stage, trial, trial.dtype)
    extra = cancellation(stage, trial)
    allowed = [
        allowance(x, exact) + (extra if name.startswith(("dq", "dk")) else 0.0)
        for name, x, exact in zip(quantities, rounded, truth, strict=True)
    ]
    problem = trial.posed(stage.op)

    checks = []
    for backend in backends:
        reason = obstacle(backend.name, problem)
        if reason is None and stage.pulls(trial):
            reason = obstacle(backend.name, replace(problem, backward=True))
        if reason:
            checks.append(trial.check(backend.name, stage.op, "-", note=f"declines: {reason}"))
            continue
        try:
            found = run_backend(backend, stage, trial)
        except FINDINGS as error:
            checks.append(raised(trial, backend, stage.op, error))
            continue
        for name, x, like, exact, most in zip(quantities, found, rounded, truth, allowed, strict=True):
            off = distance(x, exact) if x.dtype == like.dtype else math.inf
            checks.append(trial.check(backend.name, stage.op, name, error=off, allowed=most))
    return checks


def run_reference(stage: Stage, trial: Trial, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Outputs and gradients by autograd, in `dtype`."""
    leaves = [x.clone().requires_grad_() for x in trial.positional(stage.leaves, dtype)]
    fixed = trial.positional(stage.fixed, dtype)
    outputs = as_tuple(stage.spec(*leaves, *fixed, **trial.keywords(stage)))
    gradients: list[Tensor] = []
    for pull in stage.pulls(trial):
        if pull.added:
            # The pass before was the same, without a sum.
            dq, *others = gradients[-len(pull.leaves) :]
            gradients += (trial.tensors["dq"].to(dtype) + dq, *others)
            continue
        pulled = outputs[: len(pull.outputs)]
        grads = [trial.tensors[f"d{name}"].to(x.dtype) for name, x in zip(pull.outputs, pulled, strict=True)]
        if pull.gate is not None:
            grads[0] = grads[0] * trial.tensors["gates"].to(dtype)[..., pull.gate, None]
        wanted = [x for name, x in zip(stage.leaves, leaves, strict=True) if name in pull.leaves]
        gradients += torch.autograd.grad(pulled, wanted, grads, retain_graph=True)
    return (*(x.detach() for x in outputs), *gradients)


def run_backend(backend: Any, stage: Stage, trial: Trial) -> tuple[Tensor, ...]:
    """Outputs and gradients by the backend's own functions."""
    inputs = trial.positional((*stage.leaves, *stage.fixed), trial.dtype)
    branch = () if stage.kind is None else (trial.branch(stage),)
    outputs = as_tuple(getattr(backend, stage.forward)(*inputs, *branch))
    gradients: list[Tensor] = []
    for pull in stage.pulls(trial):
        grads = [trial.tensors[f"d{name}"] if name in pull.outputs else None for name in stage.outputs]
        backward = getattr(backend, pull.function)
        results: tuple[Tensor, ...]
        if pull.function == "prepare_backward":
            results = (prepare(backend, trial, {})[0],)
        elif stage.op == "combine":
            results = as_tuple(backward(*grads, *inputs))
        elif stage.op == "compress":
            results = as_tuple(backward(*grads, *branch))
        else:
            results = backward(upstream(backend, trial, pull, grads, outputs), saved(inputs, outputs), *branch)
        gradients += results
    return (*outputs, *gradients)


def saved(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Saved:
    q, k, v, *indices = inputs
    return Saved(q, k, v, *outputs, *indices)


def upstream(
    backend: Any, trial: Trial, pull: Pull, grads: list[Tensor | None], outputs: tuple[Tensor, ...]
) -> Upstream:
    do, dlse = grads
    assert do is not None
    if pull.gate is None:
        return Upstream(do, dlse)
    if hasattr(backend, "prepare_backward"):
        # As the layer has it: one function prepares all branches, of which this is one.
        prepared = prepare(backend, trial, {pull.gate: outputs})[1][pull.gate]
    else:
        # Columns of what all gates have in one tensor.
        gate = trial.tensors["gates"][..., pull.gate]
        prepared = Upstream(do, dlse, gate, trial.products(pull.gate, outputs[0])[..., pull.gate])
    # Added to in place.
    return prepared._replace(dq=trial.tensors["dq"].clone() if pull.added else None)


def prepare(backend: Any, trial: Trial, known: Mapping[int, tuple[Tensor, ...]]) -> tuple[Tensor, tuple[Upstream, ...]]:
    """`prepare_backward` of the drawn outputs, those `known` of a branch in their place."""
    drawn = [(trial.tensors[name], trial.tensors["lse_cmp"]) for name in BRANCHES]
    outputs, lses = zip(*(known.get(branch, pair) for branch, pair in enumerate(drawn)), strict=True)
    tensors = trial.tensors
    found: tuple[Tensor, tuple[Upstream, ...]] = backend.prepare_backward(
        tensors["do"], outputs, lses, tensors["gates"], trial.problem.n_groups
    )
    return found


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def distance(x: Tensor, exact: Tensor) -> float:
    """Largest absolute error; infinite for another shape, a NaN, or an infinity that is not the same one."""
    if x.shape != exact.shape:
        return math.inf
    error = (x.double() - exact).abs().masked_fill_(x.double() == exact, 0.0)
    return float(error.nan_to_num(nan=math.inf, posinf=math.inf).max()) if error.numel() else 0.0


def cancellation(stage: Stage, trial: Trial) -> float:
    """What is left of `dp - delta` where they cancel: the rounding of two fp32 sums of the size `|do| |v|`, which then
    meets a key in `dq` and a query in `dk`. With few heads and keys it is all there is."""
    if "scale" not in stage.shared:
        return 0.0
    q, k, v = trial.positional(stage.leaves, torch.float64)
    do = trial.tensors["do"].double()
    size = float(do.norm(dim=-1).max() * v.norm(dim=-1).max() * torch.maximum(q.abs().max(), k.abs().max()))
    return torch.finfo(torch.float32).eps * trial.scale * size


def allowance(rounded: Tensor, exact: Tensor) -> float:
    """Twice the reference's error in the same dtype, and a floor in roundings of the largest value.

    A result is rounded once to its dtype; before that, `p * (dp - delta)` has three factors that a fused backward
    rounds in fp32, and whose errors do not cancel as they do in autograd's softmax.
    """
    largest = float(exact.masked_fill(exact.isinf(), 0.0).abs().max())
    roundings = 3 * torch.finfo(torch.float32).eps + torch.finfo(rounded.dtype).eps
    own = distance(rounded, exact)
    # A reference that is itself infinitely wrong allows nothing.
    return (2 * own if math.isfinite(own) else 0.0) + roundings * largest


def check_selection(trial: Trial, backends: Sequence[Any], obstacle: Obstacle) -> list[Check]:
    """A choice of blocks has no rounding error: what counts is how much fp64 importance it misses.

    Importances that are off by `e` swap two blocks only if these differ by less than `2e`: from the reference's own
    error follows what each freely chosen block may cost.
    """
    q64, k64, lse64 = trial.positional(("q", "k_cmp", "lse_cmp"), torch.float64)
    q, k = trial.positional(("q", "k_cmp"), trial.dtype)
    lse = trial.tensors["lse_cmp"]
    keywords = {"block": KNOBS["block"], "stride": KNOBS["stride"], "select_block": KNOBS["select_block"]}
    keywords |= trial.shared
    importance = importance_of(q64, k64, lse64, keywords)
    off = float((importance_of(q, k, lse, keywords) - importance).abs().max())
    off += torch.finfo(lse.dtype).eps * float(importance.max())
    n_free = SELECTION["n_select"] - SELECTION["n_init"] - SELECTION["n_local"]

    best = reference.select_blocks(q64, k64, lse64, **SELECTION, **keywords)
    rounded = reference.select_blocks(q, k, lse, **SELECTION, **keywords)
    worth = worth_of_blocks(importance, q, trial.cu_seqlens, trial.q_start)
    allowed = 2 * (missed(rounded, best, worth) + n_free * 2 * off)

    problem = trial.posed("scores")
    checks = []
    for backend in backends:
        reason = obstacle(backend.name, problem)
        if reason:
            checks.append(trial.check(backend.name, "scores", "-", note=f"declines: {reason}"))
            continue
        try:
            chosen = backend.select_blocks(q, k, lse, trial.selection)
        except FINDINGS as error:
            checks.append(raised(trial, backend, "scores", error))
            continue
        loss = missed(chosen, best, worth)
        checks.append(trial.check(backend.name, "scores", "missed", error=loss, allowed=allowed))
    return checks


def importance_of(q: Tensor, k_cmp: Tensor, lse: Tensor, keywords: Mapping[str, Any]) -> Tensor:
    return reference.selection_importance(q, k_cmp, lse, **keywords).double()


def worth_of_blocks(importance: Tensor, q: Tensor, cu_seqlens: Tensor | None, q_start: Tensor | None) -> Tensor:
    """`[B,S,G,J]`: a forced block is worth more than all others together, one not yet begun costs everything."""
    _, t = locate_queries(q, cu_seqlens, q_start)
    own = (t // KNOBS["select_block"])[:, :, None, None]
    j = torch.arange(importance.shape[-1], device=q.device)
    forced = (j < SELECTION["n_init"]) | (j > own - SELECTION["n_local"])
    return importance.masked_fill(forced, 1e3).masked_fill(j > own, -math.inf)


def missed(chosen: Tensor, best: Tensor, worth: Tensor) -> float:
    """The most a query loses by its choice; infinite where that is not a valid list of as many blocks."""
    if chosen.shape != best.shape or chosen.dtype != best.dtype or bool((chosen >= worth.shape[-1]).any()):
        return math.inf
    before, after = chosen[..., :-1], chosen[..., 1:]
    in_order = (after == -1) | ((before != -1) & (after > before))
    if bool(((chosen >= 0) != (best >= 0)).any()) or not bool(in_order.all()):
        return math.inf

    def total(indices: Tensor) -> Tensor:
        return worth.gather(-1, indices.clamp_min(0).long()).masked_fill(indices < 0, 0.0).sum(dim=-1)

    return max(0.0, float((total(best) - total(chosen)).max()))


def raised(trial: Trial, backend: Any, op: str, error: Exception) -> Check:
    first_line = (str(error).splitlines() or [""])[0]
    return trial.check(backend.name, op, "-", error=math.inf, note=f"{type(error).__name__}: {first_line}")
