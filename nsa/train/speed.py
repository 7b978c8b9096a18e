"""How fast a run should be on this machine: what `nsa doctor` compares a step with, and the least that `nsa train`
accepts."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta

import torch

from nsa import settings
from nsa.train.config import TrainConfig
from nsa.train.plan import MEMORY_GIB, RESULTS, Plan, flops_of, measurements, plan
from nsa.train.step import DTYPES

# A run below this fraction of its plan is broken, not slow.
FLOOR = 0.1

# Of the speed of a large product on the CPU, what a training step reaches.
CPU_FRACTION = 0.2
# Rows and columns of that product, and the seconds after which it is not tried again.
CPU_PRODUCT = 256
CPU_PRODUCT_S = 0.1


def expected(config: TrainConfig, *, ranks: int = 1) -> Plan | None:
    """The plan for the GPU of this machine; None on a CPU, a GPU whose peak is not known, or in fp32."""
    if not config.device.startswith("cuda") or config.dtype == "float32":
        return None
    name = torch.cuda.get_device_name(config.device)
    gpu = next((known for known in MEMORY_GIB if known in name), None)
    if gpu is None:
        return None
    parity = settings.current().force_parity
    return plan(config, gpu, gpus=ranks, rows=measurements(RESULTS), parity=parity)


def least_tokens_per_s(config: TrainConfig, *, ranks: int = 1) -> float:
    """What `min_tokens_per_s` comes to: as configured, else a tenth of the plan. 0, any speed, where the plan rests on
    no measurement: an estimate from FLOPs alone is no ground to stop a run."""
    if config.min_tokens_per_s is not None:
        return config.min_tokens_per_s
    found = expected(config, ranks=ranks)
    return 0.0 if found is None or found.basis == "estimated" else FLOOR * found.tokens_per_s


def compared(config: TrainConfig, found: Plan | None, seconds: float) -> tuple[str, str | None]:
    """An uncompiled step of one batch that took so many `seconds`, beside the plan: what to report, and a problem."""
    took = f"one uncompiled step of {config.tokens_per_batch:,} tokens took {milliseconds(seconds)}"
    if found is None:
        return took, None
    batch = found.step_s / config.accum
    told = f"{took}; the plan has {milliseconds(batch)} for the run's own ({found.source})"
    if found.basis == "estimated" or seconds <= batch / FLOOR:
        return told, None
    return told, f"{took}, {seconds / batch:.0f} times the {milliseconds(batch)} of the plan: {found.source}"


def long_time(seconds: float) -> str:
    return f"{seconds / 86400:,.0f} days" if seconds > 2 * 86400 else str(timedelta(seconds=round(seconds)))


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def cpu_step_s(config: TrainConfig) -> float:
    """Seconds that a batch takes on this CPU, estimated from the speed of one product in the run's dtype."""
    n = CPU_PRODUCT
    a = torch.ones(n, n, dtype=DTYPES[config.dtype])
    times: list[float] = []
    with warnings.catch_warnings():
        # A CPU without instructions for the dtype takes a slow path, which shows in the time.
        warnings.simplefilter("ignore")
        while sum(times) < CPU_PRODUCT_S:
            begin = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - begin)
    rate = 2 * n**3 / min(times)
    return config.tokens_per_batch * flops_of(config.model, config.model.seq_len) / (CPU_FRACTION * rate)
