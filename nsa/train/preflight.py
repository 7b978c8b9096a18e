"""Checks before a run starts: memory, speed, device, backends, folder and data.

`nsa train` checks the memory, and takes from here the speed below which it stops. `nsa doctor --config C` checks
everything.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch

from nsa import settings
from nsa.backends.routing import Router
from nsa.data import Batch
from nsa.data.config import SPLITS
from nsa.dtypes import DTYPES
from nsa.machine import usable_device
from nsa.model import LM
from nsa.train.config import TrainConfig
from nsa.train.plan import GIB, RunPlan, estimate_memory, expected_plan, flops_of, in_ms, parameter_count
from nsa.train.run_info import check_folder, open_data, routes_of
from nsa.train.step import TrainStep

# Bytes of a parameter in a checkpoint: itself and Adam's two moments.
CHECKPOINT_BYTES = 12
# The estimate of memory is above the peak by less than this: what is refused would not have run.
MARGIN = 1.25
# Bytes of a token in a batch, with its target; and of a generated one, in the list and in the result.
TOKEN_BYTES = 16
# Attention whose cache stops growing with the text.
BOUNDED = ("sliding", "longformer")
# The files of a container's memory limit, with cgroups of version 2 and 1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# A run below this fraction of its planned speed is broken, not slow.
SPEED_FLOOR = 0.1
# The fraction of a large matmul's speed on the CPU that a training step reaches.
CPU_FRACTION = 0.2
# Rows and columns of that matmul, and the seconds for which it is repeated.
CPU_MATMUL, CPU_MATMUL_S = 256, 0.1
# On a CPU, one step is run if it is estimated to take at most this long.
CPU_TRIED_S = 5.0
# A run that takes longer than this on a CPU is meant for a GPU.
CPU_PATIENCE_S = 2 * 86400.0


def check_capacity(config: TrainConfig, ranks: int = 1) -> None:
    """A ValueError with the keys to lower if a run cannot fit, before anything of its size is built."""
    c = config.model
    # The host holds the batches of a step, the prefetched ones and those of the validation.
    held = config.accum + config.data.queue + config.eval_batches
    keys = f"batch_size = {config.batch_size}, model.seq_len = {c.seq_len}, accum = {config.accum}, "
    keys += f"eval_batches = {config.eval_batches} or data.queue = {config.data.queue}"
    require_memory(held * config.tokens_per_batch * TOKEN_BYTES, ram(), "this machine", keys)
    memory = estimate_memory(config, ranks)
    state = memory.parameters + memory.gradients + memory.optimizer
    there, name = ram(), "this machine"
    if config.device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(torch.device(config.device))
        there, name = properties.total_memory, properties.name
    if state > there:
        # No batch is small enough.
        keys = f"model.hidden = {c.hidden}, model.attn.dim = {c.attn.dim} or model.vocab_size = {c.vocab_size}"
    else:
        keys = f"batch_size = {config.batch_size} or model.seq_len = {c.seq_len}, or set gc=true"
    # Usually far below the dimension of the model.
    sizes = {key: getattr(c.attn, key) or 0 for key in ("l", "n_sel", "phi_hidden", "gate_hidden")}
    large = "".join(f"model.attn.{key} = {value}, " for key, value in sizes.items() if value > c.attn.dim)
    require_memory(memory.total, there, name, f"{large}model.n_layers = {c.n_layers}, {keys}")
    require_memory(state + sample_bytes(config), there, name, f"sample_tokens = {config.sample_tokens}")


def sample_bytes(config: TrainConfig) -> int:
    """The tokens of a complete sample and, in fp32, the keys and values of every layer."""
    a = config.model.attn
    layers = sum(kind not in BOUNDED for kind in config.model.kinds)
    return config.sample_tokens * (TOKEN_BYTES + layers * a.n_kv_groups * (a.d_k + a.d_v) * 4)


def require_memory(needed: float, there: int, device: str, keys: str) -> None:
    if needed > MARGIN * there:
        gib = f"{needed / GIB:,.1f} GiB, and {device} has {there / GIB:,.1f}"
        raise ValueError(f"this run needs about {gib}; lower {keys}")


def ram() -> int:
    """Bytes of this machine, or of the container that this process is in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [text for path in LIMITS if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([physical, *map(int, limits)])


def min_tokens_per_s(config: TrainConfig, *, ranks: int = 1) -> float:
    """The configured one, else a tenth of the plan's; 0 where that is an estimate from FLOPs alone."""
    if config.min_tokens_per_s is not None:
        return config.min_tokens_per_s
    found = expected_plan(config, ranks=ranks)
    return 0.0 if found is None or found.basis == "estimated" else SPEED_FLOOR * found.tokens_per_s


def compare_step(config: TrainConfig, found: RunPlan | None, seconds: float) -> tuple[str, str | None]:
    """Compare an uncompiled step of one batch with the plan: a note, and a problem if it is far too slow."""
    took = f"one uncompiled step of {config.tokens_per_batch:,} tokens took {in_ms(seconds)}"
    if found is None:
        return took, None
    batch = found.step_s / config.accum
    note = f"{took}; the plan has {in_ms(batch)} for the run's own ({found.source})"
    if found.basis == "estimated" or seconds <= batch / SPEED_FLOOR:
        return note, None
    return note, f"{took}, {seconds / batch:.0f} times the {in_ms(batch)} of the plan: {found.source}"


def cpu_step_s(config: TrainConfig) -> float:
    """Seconds that a batch takes on this CPU, estimated from the speed of one matmul in the run's dtype."""
    rate = 2 * CPU_MATMUL**3 / min(matmul_times(DTYPES[config.dtype]))
    return config.tokens_per_batch * flops_of(config.model, config.model.seq_len) / (CPU_FRACTION * rate)


def matmul_times(dtype: torch.dtype) -> list[float]:
    """Seconds of each of several matmuls on the CPU. To import torch's Timer takes longer, and prints a warning where
    there is a CUDA compiler and no GPU."""
    matrix, end = torch.ones(CPU_MATMUL, CPU_MATMUL, dtype=dtype), time.perf_counter() + CPU_MATMUL_S
    times: list[float] = []
    # A CPU without instructions for the dtype takes a slow path, and warns of it.
    with warnings.catch_warnings(action="ignore"):
        while not times or time.perf_counter() < end:
            begin = time.perf_counter()
            torch.mm(matrix, matrix)
            times.append(time.perf_counter() - begin)
    return times


def long_time(seconds: float) -> str:
    return f"{seconds / 86400:,.0f} days" if seconds > 2 * 86400 else str(timedelta(seconds=round(seconds)))


def problems(
    config: TrainConfig, router: Router, *, notes: list[str] | None = None, device_given: bool = True
) -> list[str]:
    """The problems of this machine for that run, each as a sentence; leaves nothing behind.

    `notes` gets the speed of a step, which is no problem; `device_given`: the device was named by the user.
    """
    notes = [] if notes is None else notes
    unknown = settings.unknown_names().items()
    found = [f"{name} is not a setting; the nearest is {near}" for name, near in unknown]
    absent = missing_device(config)
    if absent:
        # Neither routes nor a step can be tried on it.
        found.append(absent)
    else:
        try:
            check_capacity(config)
        except ValueError as error:
            # Everything below builds the model, or takes time in proportion to it.
            return [*found, str(error)]
        routes = list(route_problems(config, router))
        found += [*device_problems(config, notes, device_given, runs=not routes), *routes]
    return [*found, *folder_problems(config), *data_problems(config)]


def missing_device(config: TrainConfig) -> str | None:
    """Why the config's device cannot be used; None if it can."""
    try:
        usable_device(config.device)
    except ValueError as error:
        return str(error)
    return None


def device_problems(config: TrainConfig, notes: list[str], device_given: bool, *, runs: bool) -> Iterator[str]:
    """Whether a batch fits the device, and how fast it is, which goes to `notes`. `runs`: a step can be tried."""
    device = torch.device(config.device)
    if device.type != "cuda":
        yield from cpu_problems(config, notes, device_given, runs=runs)
        return
    if config.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield "dtype is 'bfloat16'; accepted: 'float16' or 'float32', because this GPU has no bfloat16"
    if not runs:
        return
    try:
        seconds = try_step(config, device)
    except torch.cuda.OutOfMemoryError as error:
        yield f"one batch does not fit this GPU: {error}; a smaller --batch-size, or --gc, may"
    else:
        note, slow = compare_step(config, expected_plan(config), seconds)
        notes.append(note)
        if slow is not None:
            yield slow
    finally:
        torch.cuda.empty_cache()


def cpu_problems(config: TrainConfig, notes: list[str], device_given: bool, *, runs: bool) -> Iterator[str]:
    """A run that is meant for a GPU is not ready on a CPU, unless the CPU was requested."""
    seconds, how = cpu_step_s(config), "estimated from the speed of one matmul"
    if runs and seconds <= CPU_TRIED_S:
        seconds, how = try_step(config, torch.device("cpu")), "from one step that was timed"
    total = config.steps * config.accum * seconds
    rate = config.tokens_per_batch / seconds
    notes.append(f"on this CPU about {rate:,.3g} tokens/s, {long_time(total)} for {config.steps:,} steps: {how}")
    if not device_given and (config.dtype != "float32" or total > CPU_PATIENCE_S):
        hint = f"that would take {long_time(total)} here (--device cpu if that is what you want)"
        yield f"device is 'cpu', because torch sees no GPU; accepted: 'cuda' for a run in {config.dtype} {hint}"


def try_step(config: TrainConfig, device: torch.device) -> float:
    """Seconds of one uncompiled step on random tokens; on a GPU of the second, because the first compiles kernels."""
    with device:
        model = LM(config.model)
        tokens = torch.randint(config.model.vocab_size, (config.batch_size, config.model.seq_len))
    model.recompute = config.gc
    batch = Batch(tokens, tokens, None)
    if config.data.pack:
        ends = torch.arange(config.batch_size + 1, dtype=torch.int32, device=device) * config.model.seq_len
        batch = Batch(tokens.view(1, -1), tokens.view(1, -1), ends)
    step = TrainStep(model, dtype=DTYPES[config.dtype], compile=False)
    for _ in range(2 if device.type == "cuda" else 1):
        begin = time.perf_counter()
        # Reading the loss waits for the device.
        step([batch], lr=0.0).loss.item()
    return time.perf_counter() - begin


def route_problems(config: TrainConfig, router: Router) -> Iterator[str]:
    if "nsa" not in config.model.kinds:
        return
    auto = config.model.attn.backend == "auto" and config.device.startswith("cuda")
    for backward, routes in enumerate(routes_of(config, router)):
        for name, route in routes.items():
            op = f"{name} backward" if backward else name
            if route.backend is None:
                yield f"no backend runs {op}: {route.error_message()}"
            elif route.backend == "reference" and auto:
                yield f"only the reference runs {op}, which is slow: {route.reasons}"


def folder_problems(config: TrainConfig) -> Iterator[str]:
    """Whether the run can write what it will write."""
    try:
        check_folder(config)
    except ValueError as error:
        yield str(error)
    folders = (config.out, *config.out.absolute().parents)
    blocked = next((path for path in folders if path.is_file()), None)
    if blocked is not None:
        yield f"out is {str(config.out)!r}; accepted: a folder, and {blocked} is a file"
        return
    there = next(folder for folder in folders if folder.is_dir())
    if not os.access(there, os.W_OK):
        yield f"out is {str(config.out)!r}; accepted: a folder that can be written, and {there} cannot"
        return
    # One more is written before the oldest is removed, the best is kept besides, and the export comes last.
    needed = parameter_count(config.model) * (CHECKPOINT_BYTES * (config.keep + 2) + 4)
    free = shutil.disk_usage(there).free
    if free < needed:
        yield f"{there} has {free / GIB:.1f} GiB free, and the checkpoints of this run take {needed / GIB:.1f} GiB"


def data_problems(config: TrainConfig) -> Iterator[str]:
    """Whether each split gives a batch."""
    for split in SPLITS:
        try:
            with open_data(config, split) as loader:
                next(loader)
        except (ValueError, OSError, RuntimeError) as error:
            yield f"{split} data: {error}"
