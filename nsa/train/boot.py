"""What a run says of itself when it starts: one line for the log, and files for whoever asks later."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import nsa
from nsa import machine, settings
from nsa.backends.problem import Problem
from nsa.backends.routing import explain
from nsa.config import require
from nsa.files import make_folder, parse_json, read_limited, replace_text
from nsa.model import LM
from nsa.origin import commit, package_version
from nsa.train.config import FILE, TrainConfig, diff, flat, load_config, write_yaml
from nsa.train.distributed import Ranks, require_same
from nsa.train.guards import LOCK
from nsa.train.metrics import HEARTBEAT, read_lines
from nsa.train.report import REPORT
from nsa.train.run_folder import CHECKPOINTS, METRICS, require_checkpoint
from nsa.train.step import DTYPES

RUN = "run.json"
# A start adds about a kilobyte.
MAX_RUN_BYTES = 2**26
# What a run writes into its folder, after `config.yaml`.
WRITTEN = (RUN, METRICS, HEARTBEAT, REPORT, "model.json", "model.safetensors", "tokenizer.json")

# What it writes to in place; the rest is replaced.
APPENDED = (LOCK, METRICS, HEARTBEAT)


def boot_line(config: TrainConfig, model: LM, source: str, ranks: Ranks) -> str:
    """Everything that decides what runs, in one line that a log can be searched for."""
    switch = {True: "on", False: "off"}
    parts = {
        "S": config.model.seq_len,
        "B": config.batch_size,
        "accum": config.accum,
        "gc": switch[config.gc],
        "attention": attention_kinds(config),
        "params": f"{sum(model.parameter_counts().values()):,}",
        "steps": config.steps,
        "lr": config.lr,
        "schedule": config.schedule,
        "seed": config.seed,
        "device": config.device,
        "dtype": config.dtype,
        "compile": switch[config.compile],
        "cuda_graphs": switch[config.cuda_graphs],
        "parallel": config.parallel,
        "ranks": ranks.size,
        **backends(config),
        "hash": config.hash,
        "out": config.out,
        "data": source,
    }
    return "[boot] effective config: " + " ".join(f"{name}={value}" for name, value in parts.items())


def attention_kinds(config: TrainConfig) -> str:
    """`nsa`, or `nsa*6+dense*6` where layers differ."""
    kinds = Counter(config.model.kinds)
    return "+".join(kinds) if len(kinds) == 1 else "+".join(f"{kind}*{count}" for kind, count in kinds.items())


def backends(config: TrainConfig) -> dict[str, str]:
    """Which backend serves each branch; where the backward has another one, both."""
    kinds = set(config.model.kinds)
    if kinds == {"dense"}:
        return {"backend": "torch-sdpa"}
    attn = config.model.attn
    served = []
    for backward in (False, True):
        problem = problem_of(config, backward=backward)
        routes = explain(problem, attn.backend, block=attn.l, stride=attn.d, window=attn.w).routes
        # The alternatives are made of these two ops.
        ops = routes if "nsa" in kinds else ("selected", "sliding")
        served.append({op: routes[op].chosen or "none" for op in ops})
    forward, backward_ = served
    both = {op: name if backward_[op] == name else f"{name}/{backward_[op]}" for op, name in forward.items()}
    return both | ({"dense": "torch-sdpa"} if "dense" in kinds else {})


def problem_of(config: TrainConfig, *, backward: bool) -> Problem:
    """The attention of one batch."""
    packed = config.data.pack
    problem = Problem.of_config(
        config.model.attn,
        batch=1 if packed else config.batch_size,
        length=config.tokens_per_batch if packed else config.model.seq_len,
        dtype=DTYPES[config.dtype],
        device=torch.device(config.device).type,
        backward=backward,
    )
    return replace(problem, packed=packed)


def write_down(config: TrainConfig, *, step: int, ranks: Ranks, before: dict[str, Any] | None = None) -> None:
    """The resolved config, its hash, the environment and the commit, in the run's folder; `before`: the record of the
    start that this one goes on from, which has those before it."""
    make_folder(config.out)
    write_yaml(config.out / FILE, config)
    record = {"hash": config.hash, "from_step": step, "ranks": ranks.size, "environment": environment(ranks.device)}
    if before is not None:
        earlier = before.get("before", [])
        record["before"] = [*earlier, {name: value for name, value in before.items() if name != "before"}]
    replace_text(config.out / RUN, json.dumps(record, indent=2) + "\n")


def record_of(run: Path) -> dict[str, Any]:
    """What was written down at the run's last start; nothing where there is no such file."""
    if not (run / RUN).is_file():
        return {}
    try:
        found = parse_json(read_limited(run / RUN, MAX_RUN_BYTES))
        for name, kind in (("environment", dict), ("before", list)):
            require(isinstance(found.get(name, kind()), kind), name, type(found.get(name)).__name__, kind.__name__)
    except ValueError as error:
        raise ValueError(f"{run / RUN} is damaged: {error}") from error
    return found


def environment(device: torch.device) -> dict[str, Any]:
    current = settings.current()
    said = {s.env: getattr(current, s.name) for s in settings.SETTINGS if current.source(s.name) != "default"}
    return {
        "commit": commit(),
        "command": sys.argv,
        "nsa": nsa.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": package_version("triton"),
        "machine": platform.node(),
        "system": platform.platform(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        **machine.runtime(),
        "settings": said,
    }


def config_of(run: Path) -> TrainConfig:
    """The config that a run's folder holds, whatever this process's environment says."""
    return load_config(run, {"out": str(run)}, env=settings.Settings())


def check_folder(config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """How `config` differs from the run that its folder holds, if it holds one.

    Raises:
        ValueError: The run is of another model, or has lost its checkpoints; or the folder holds files that no run
            wrote, which this one would replace, or links that it would write through.
    """
    links = [name for name in APPENDED if (config.out / name).is_symlink()]
    require(not links, "out", str(config.out), f"a folder in which {', '.join(links)} is no symbolic link")
    if not (config.out / FILE).is_file():
        foreign = [name for name in WRITTEN if (config.out / name).exists()]
        require(not foreign, "out", str(config.out), f"another folder: this one holds {', '.join(foreign)} of no run")
        return {}
    if any(line.get("kind") == "step" for line in read_lines(config.out / METRICS)):
        require_checkpoint(config.out, "out")
    changed = diff(config_of(config.out), config)
    model = [key for key in changed if key.startswith("model.") and key != "model.attn.backend"]
    require(
        not model or not (config.out / CHECKPOINTS).is_dir(),
        "out",
        str(config.out),
        f"another folder: this one holds the run of a model with another {', '.join(model)}",
    )
    return changed


def check_ranks(config: TrainConfig, data: dict[str, Any] | None = None) -> None:
    """`ValueError` unless all ranks have the same config and, once it is open, the same data.

    Paths may differ, as machines do: a copy elsewhere is the same corpus, which `data` tells.
    """
    own = {key: value for key, value in flat(config.to_dict()) if key not in ("out", "data.path")}
    require_same(own if data is None else {f"{key} of the data": value for key, value in data.items()})


def describe_difference(run: Path, config: TrainConfig) -> str:
    """`nsa train --diff RUN`: how a start now would differ from that run's, in config and environment."""
    then, now = record_of(run).get("environment", {}), environment(torch.device(config.device))
    lines = [f"{key}: {a!r} -> {b!r}" for key, (a, b) in diff(config_of(run), config).items()]
    told = [name for name in now if name not in ("command", "machine")]
    lines += [f"{name}: {then.get(name)!r} -> {now[name]!r}" for name in told if then.get(name) != now[name]]
    return "\n".join([f"{run} -> a start now", *(f"  {line}" for line in lines or ["no difference"])])
