"""Our kernels, for training and prefill on CUDA GPUs. Triton is imported when the first of them runs.

`compressed` and `sliding` share one kernel family (`ranged_*`): a tile of queries and heads over a range of keys.
`selection` selects blocks without per-head probabilities in memory. `selected` reads the selected blocks, by query
where groups are large and by block where they are small. `combine` is the gated sum of the branches; `compress` pools
keys. With `TRITON_INTERPRET=1` all of them run on CPU tensors too, in Triton's interpreter: to try them, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from nsa import settings
from nsa.backends import gluon
from nsa.backends.gated import without_gate
from nsa.backends.gpu import SMALL_SHARED_MEMORY
from nsa.backends.problem import OPS, Problem
from nsa.backends.routing import BackendFailure, problem_for_op
from nsa.config import NSAConfig
from nsa.sequences import Compressed, Sequences, Sliding, Upstream

name = "triton"
# When a kernel first runs, and then not again on this machine.
compiles = True

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
DOT_STEP = 16
MAX_HEADS_PER_GROUP = 64
OLDEST_CAPABILITY = (8, 0)
# Of a group with fp32 keys and values of head_dim above 128, on GPUs with little shared memory: the rows of one query
# are then 64 KB, and are held beside a block's keys.
MAX_WIDE_HEADS_ON_SMALL = 32
# Tokens per row of a decode step. More are a chunk of prefill: compute counts there, not bytes.
MAX_STEP_TOKENS = 8
# Functions that cache plans, of which some are of kernels in Gluon.
GLUON_PLANS = {
    "ranged_forward": ("plan",),
    "ranged_backward": ("plan",),
    "branches": ("runs_together", "plan_forward"),
    "selected": ("plan_forward", "plan_backward"),
    "decode.plan": ("plan_decode",),
}


def installed() -> bool:
    """Whether Triton is installed. Does not import it, which is slow."""
    try:
        return find_spec("triton") is not None
    except (ImportError, ValueError):
        # Something keeps it from being imported: a finder that raises, a stand-in without a spec.
        return False


def available() -> str | None:
    """Return None where the kernels can run at all, else what is missing."""
    if not installed():
        return "the triton package is not installed"
    if torch.cuda.is_available() or settings.triton_interpreted():
        return None
    return "no CUDA GPU, and TRITON_INTERPRET=1 is not set"


def explicit_only(problem: Problem) -> str | None:
    """Why `auto` must not pick this backend, though it supports the problem."""
    if problem.device == "cpu":
        return "Triton's interpreter is slow: it runs only by backend='triton'"
    return None


def supports(problem: Problem) -> str | None:
    interpreted = settings.triton_interpreted()
    if problem.device != "cuda" and not (interpreted and problem.device == "cpu"):
        return f"the kernels run on CUDA GPUs, the tensors are on {problem.device}"
    missing = available()
    if missing is not None:
        return missing
    if interpreted:
        if problem.dtype == torch.bfloat16:
            return "Triton's interpreter computes wrong matmuls in bf16 (TRITON_INTERPRET is set); fp16 and fp32 run"
    elif torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        return f"the GPU's capability is {torch.cuda.get_device_capability()}, at least {OLDEST_CAPABILITY} is needed"
    if problem.dtype not in KERNEL_DTYPES:
        return f"the kernels take fp16, bf16 and fp32, not {problem.dtype}"
    if problem.d_k % DOT_STEP or problem.d_v % DOT_STEP:
        return f"head_dim is {problem.d_k} (keys) and {problem.d_v} (values), multiples of {DOT_STEP} are supported"
    if max(problem.d_k, problem.d_v) > MAX_HEAD_DIM:
        return f"head_dim is {problem.d_k} (keys) and {problem.d_v} (values), at most {MAX_HEAD_DIM} is supported"
    if problem.heads_per_group > MAX_HEADS_PER_GROUP:
        return f"{problem.heads_per_group} heads per group, at most {MAX_HEADS_PER_GROUP} are supported"
    wide = problem.dtype == torch.float32 and min(problem.d_k, problem.d_v) > 128
    crowded = problem.op == "selected" and wide and problem.heads_per_group > MAX_WIDE_HEADS_ON_SMALL
    if crowded and not interpreted and torch.cuda.get_device_capability() in SMALL_SHARED_MEMORY:
        group = f"{problem.heads_per_group} heads per group with head_dim {problem.d_k} and {problem.d_v} in fp32"
        return f"{group} need more shared memory than this GPU has, at most {MAX_WIDE_HEADS_ON_SMALL} are supported"
    return None


def kernel_set(
    problem: Problem, forward: Collection[str] = OPS, backward: Collection[str] = OPS, direct: Collection[str] = OPS,
    select_block: int = NSAConfig.l_sel, n_select: int = NSAConfig.n_sel, block: int = NSAConfig.l,
    stride: int = NSAConfig.d, window: int = NSAConfig.w,
) -> str:  # fmt: skip
    """Name the passes of an attention that the launch plans take from the kernels for Hopper; if none, why. The
    forward passes of the ops `forward` and the backward passes of `backward` run here; see `Backend` for `direct`."""
    if problem.device != "cuda" or not torch.cuda.is_available():
        return "Triton; those in Gluon are for CUDA GPUs of sm_90"
    # Imports Triton.
    from nsa.backends.gluon import tiles
    from nsa.backends.triton import branches, selected
    from nsa.backends.triton.decode.plan import step_in_gluon

    why_not = tiles.unsupported(torch.cuda.get_device_capability(), problem.dtype, problem.d_k, problem.d_v)
    if why_not is not None:
        return f"Triton; {why_not}"
    taken = []
    sequences = Sequences(problem.batch, problem.n_queries, torch.device(problem.device))
    for branch in (Compressed(sequences, block, stride, 1.0), Sliding(sequences, window, 1.0)):
        op = "sliding" if isinstance(branch, Sliding) else "compressed"
        one = problem_for_op(problem, op, block, stride, window)
        passes = tiles.passes(one, branch, op in forward, op in backward)
        taken += [f"{op} {', '.join(passes)}"] if passes else []
    step = problem.cached and problem.n_queries <= MAX_STEP_TOKENS
    q, k = tiles.layouts(problem)
    over_blocks = problem_for_op(problem, "selected", block, stride, window)
    if "selected" in forward and not step and selected.forward_in_gluon(over_blocks, select_block, n_select):
        taken.append("selected forward")
    if "selected" in backward and not step and tiles.pick_block_backward(q, q, k, k, select_block) is not None:
        taken.append("selected backward")
    shape = (problem.batch, problem.n_queries, problem.n_heads, problem.d_k)
    sizes = (shape, problem.n_groups, problem.d_v, n_select, select_block)
    fixed = problem.n_queries == problem.n_keys and not (problem.varlen or problem.cached)
    both = fixed and {"selected", "sliding"} <= {*direct}
    if both and branches.runs_together(*sizes, problem.dtype, torch.device(problem.device)):
        taken.append("selected and sliding forward in one kernel")
    if step and not problem.varlen and step_in_gluon(problem, block, stride, select_block, n_select, window):
        taken.append("compressed decode step")
    return f"Gluon for {'; '.join(taken)}; else Triton" if taken else "Triton; Gluon has no faster kernel here"


@cache
def load(module: str) -> tuple[ModuleType, tuple[type[Exception], ...]]:
    """The module of that name, and what Triton raises where a GPU cannot take a kernel."""
    try:
        from nsa.backends.triton.launch import LAUNCH_FAILURES

        return import_module(f"nsa.backends.triton.{module}"), LAUNCH_FAILURES
    except ImportError as error:
        raise BackendFailure(f"triton cannot be imported: {error}") from error


def recover_from(failure: Exception) -> str | None:
    """After a failure of a kernel in Gluon: from now on plans are made without these."""
    if not isinstance(failure, gluon.KernelFailure):
        return None
    gluon.failures().append(str(failure))
    forget_gluon_plans()
    return "Triton's kernels"


def forget_gluon_plans() -> None:
    for module, names in GLUON_PLANS.items():
        for name in names:
            getattr(import_module(f"nsa.backends.triton.{module}"), name).cache_clear()


class Launcher:
    """A launcher by name. What a GPU cannot take at run time becomes a reason for the next backend."""

    def __init__(self, module: str, function: str) -> None:
        self.module = module
        self.function = function

    def resolve(self) -> tuple[Callable[..., Any], tuple[type[Exception], ...]]:
        """The launcher itself, and what it raises where a GPU cannot take a kernel."""
        loaded, failures = load(self.module)
        return getattr(loaded, self.function), failures

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        launch, failures = self.resolve()
        try:
            return launch(*args, **kwargs)
        except failures as error:
            raise BackendFailure(f"{self.function}: {error}") from error


def compile_ahead(computation: Callable[[], Any], progress: Callable[[str, int, int], None] | None = None) -> int:
    """Compile what `computation()` would launch, in parallel and without launching it; see `ahead.compile_ahead`."""
    module, _ = load("ahead")
    count: int = module.compile_ahead(computation, progress)
    return count


def backward_launcher(module: str, function: str) -> Callable[..., Any]:
    """The launcher of a branch's backward pass.

    The kernels fold a gate into their probabilities, whose products with it can be smaller than fp16 goes; there it is
    multiplied into the gradient instead, which a loss scale keeps large.
    """
    fused = Launcher(module, function)
    unfused = without_gate(fused)

    def launch(upstream: Upstream, *args: Any, **options: Any) -> Any:
        unfuse = upstream.gate is not None and upstream.do.dtype == torch.float16
        return (unfused if unfuse else fused)(upstream, *args, **options)

    launch.__name__ = launch.__qualname__ = function
    return launch


compress_mean_forward = Launcher("compress", "compress_mean_forward")
compress_mean_backward = Launcher("compress", "compress_mean_backward")
gather_blocks_forward = Launcher("compress", "gather_blocks_forward")
gather_blocks_backward = Launcher("compress", "gather_blocks_backward")
compressed_forward = Launcher("ranged", "compressed_forward")
compressed_backward = backward_launcher("ranged", "compressed_backward")
select_blocks = Launcher("selection", "select_blocks")
selected_forward = Launcher("selected", "selected_forward")
selected_backward = backward_launcher("selected", "selected_backward")
sliding_forward = Launcher("ranged", "sliding_forward")
sliding_backward = backward_launcher("ranged", "sliding_backward")
selected_sliding_forward = Launcher("branches", "selected_sliding_forward")
combine_forward = Launcher("combine", "combine_forward")
combine_backward = Launcher("combine", "combine_backward")
prepare_backward = Launcher("prepare", "prepare_backward")
branches_backward = Launcher("branches", "branches_backward")
decode_step = Launcher("decode", "decode_step")
dense_step = Launcher("decode", "dense_step")
linear_step = Launcher("decode", "linear_step")
