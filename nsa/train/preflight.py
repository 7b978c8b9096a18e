"""Before a long run: everything that could end it in its first minute or its last, looked at now.

`nsa doctor --config C` calls this on top of what it always looks at.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import get_args

import torch

from nsa import settings
from nsa.backends.routing import Router
from nsa.data import Batch, open_loader
from nsa.data.config import Split
from nsa.generate import usable_device
from nsa.model import LM
from nsa.train.boot import check_folder, problem_of
from nsa.train.capacity import check_capacity
from nsa.train.config import TrainConfig
from nsa.train.speed import compared, cpu_step_s, expected, long_time
from nsa.train.step import DTYPES, TrainStep

# Bytes of a parameter in a checkpoint: itself and Adam's two moments.
CHECKPOINT_BYTES = 12

# On a CPU a step is run where it is estimated to take no longer than this; else the estimate has to do.
CPU_TRIED_S = 5.0
# A run in fp32 that takes longer on a CPU is meant for a GPU.
CPU_PATIENCE_S = 2 * 86400.0


def problems(
    config: TrainConfig,
    router: Router,
    environ: Mapping[str, str] | None = None,
    *,
    notes: list[str] | None = None,
    device_given: bool = True,
) -> list[str]:
    """What is wrong with this machine for that run, each as a sentence; nothing is left behind.

    Args:
        environ: the environment (default: this process's).
        notes: gets what is worth knowing and no problem: how fast a step is.
        device_given: the device was asked for, and not only found to be the best there is.
    """
    absent = missing_device(config)
    notes = [] if notes is None else notes
    unknown = [
        f"{name} is not a setting; the nearest is {near}" for name, near in settings.unknown_names(environ).items()
    ]
    too_large = None if absent else too_large_for_memory(config)
    if too_large:
        # Everything below builds the model, or takes time in proportion to it.
        return [*unknown, too_large]
    # Skip route checks when the device is missing, and the step where no backend would run it.
    routes = [] if absent else list(route_problems(config, router))
    return [
        *unknown,
        *([absent] if absent else device_problems(config, notes, device_given, runs=not routes)),
        *routes,
        *folder_problems(config),
        *data_problems(config),
    ]


def missing_device(config: TrainConfig) -> str | None:
    """Why nothing can run on the config's device, if so: to be asked before anything is put there."""
    try:
        usable_device(config.device)
    except ValueError as error:
        return str(error)
    return None


def too_large_for_memory(config: TrainConfig) -> str | None:
    try:
        check_capacity(config)
    except ValueError as error:
        return str(error)
    return None


def device_problems(config: TrainConfig, notes: list[str], device_given: bool, *, runs: bool) -> Iterator[str]:
    """Whether a batch fits the device and how fast it is there, which goes to `notes`. `runs`: a step can be tried."""
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
        told, slow = compared(config, expected(config), seconds)
        notes.append(told)
        if slow is not None:
            yield slow
    finally:
        torch.cuda.empty_cache()


def cpu_problems(config: TrainConfig, notes: list[str], device_given: bool, *, runs: bool) -> Iterator[str]:
    """A run that is meant for a GPU is not ready on a CPU, unless somebody asked for the CPU."""
    seconds, how = cpu_step_s(config), "estimated from the speed of one matrix product"
    if runs and seconds <= CPU_TRIED_S:
        seconds, how = try_step(config, torch.device("cpu")), "from one step that was timed"
    total = config.steps * config.accum * seconds
    rate = config.tokens_per_batch / seconds
    notes.append(f"on this CPU about {rate:,.3g} tokens/s, {long_time(total)} for {config.steps:,} steps: {how}")
    if not device_given and (config.dtype != "float32" or total > CPU_PATIENCE_S):
        yield (
            f"device is 'cpu', because torch sees no GPU; accepted: 'cuda' for a run in {config.dtype} that would take "
            f"{long_time(total)} here (--device cpu if that is what you want)"
        )


def try_step(config: TrainConfig, device: torch.device) -> float:
    """Run one uncompiled step on random tokens; on a GPU twice, because the first one compiles kernels.

    Returns:
        The seconds of the last one.
    """
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
    for backward in (False, True):
        problem = problem_of(config, backward=backward)
        attn = config.model.attn
        routes = router.explain(problem, attn.backend, block=attn.l, stride=attn.d, window=attn.w).routes
        for op, route in routes.items():
            if route.chosen is None:
                yield f"nothing serves {op}{' backward' if backward else ''}: {route.error_message()}"
            elif route.chosen == "reference" and problem.device == "cuda" and attn.backend == "auto":
                yield f"only the reference serves {op}{' backward' if backward else ''}, which is slow: {route.reasons}"


def folder_problems(config: TrainConfig) -> Iterator[str]:
    """Whether the run can write what it will write."""
    try:
        check_folder(config)
    except ValueError as error:
        yield str(error)
    blocked = next((path for path in (config.out, *config.out.absolute().parents) if path.is_file()), None)
    if blocked is not None:
        yield f"out is {str(config.out)!r}; accepted: a folder, and {blocked} is a file"
        return
    there = next(folder for folder in (config.out, *config.out.absolute().parents) if folder.is_dir())
    if not os.access(there, os.W_OK):
        yield f"out is {str(config.out)!r}; accepted: a folder that can be written, and {there} cannot"
        return
    with torch.device("meta"):
        parameters = sum(LM(config.model).parameter_counts().values())
    # One more is written before the oldest goes, the best is kept besides, and the export comes last.
    needed = parameters * (CHECKPOINT_BYTES * (config.keep + 2) + 4)
    free = shutil.disk_usage(there).free
    if free < needed:
        yield f"{there} has {free / 2**30:.1f} GiB free, and the checkpoints of this run take {needed / 2**30:.1f} GiB"


def data_problems(config: TrainConfig) -> Iterator[str]:
    splits: tuple[Split, ...] = get_args(Split)
    for split in splits:
        try:
            with open_loader(
                config.data,
                split=split,
                batch_size=config.batch_size,
                seq_len=config.model.seq_len,
                seed=config.seed,
                vocab_size=config.model.vocab_size,
            ) as loader:
                next(loader)
        except (ValueError, OSError, RuntimeError) as error:
            yield f"{split} data: {error}"
