"""The records of a run about itself: the boot line, `config.yaml` and `run.json`, and the summary at its end."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import nsa
from nsa import machine, settings
from nsa.backends.problem import Problem
from nsa.backends.routing import Route, Router, router
from nsa.config import require
from nsa.data import Loader, open_loader
from nsa.data.config import Split
from nsa.dtypes import DTYPES
from nsa.files import make_folder, parse_json, read_limited, replace_text
from nsa.model import LM
from nsa.origin import commit, package_version
from nsa.train import run_folder
from nsa.train.config import TrainConfig, diff, flat, load_config, write_yaml
from nsa.train.distributed import Ranks, require_same
from nsa.train.run_folder import CHECKPOINTS, CONFIG, METRICS, RUN_INFO, read_lines, require_checkpoint, saved_steps

# A start adds about a kilobyte.
MAX_RUN_BYTES = 2**26


def boot_line(config: TrainConfig, model: LM, source: str, ranks: Ranks) -> str:
    """Everything that decides what runs, in one line that a log can be searched for."""
    switch = {True: "on", False: "off"}
    kinds = Counter(config.model.kinds)
    parts: dict[str, Any] = {"S": config.model.seq_len, "B": config.batch_size, "accum": config.accum}
    # `nsa`, or `nsa*6+dense*6` where layers differ.
    attention = "+".join(f"{kind}*{n}" if len(kinds) > 1 else kind for kind, n in kinds.items())
    parts |= {"gc": config.gc, "attention": attention, "params": f"{sum(model.parameter_counts().values()):,}"}
    names = ("steps", "lr", "schedule", "seed", "device", "dtype", "compile", "cuda_graphs", "parallel")
    parts |= {name: getattr(config, name) for name in names}
    parts |= {"ranks": ranks.size, **backends(config), "hash": config.hash, "out": config.out, "data": source}
    shown = {name: switch[value] if isinstance(value, bool) else value for name, value in parts.items()}
    return "[boot] effective config: " + " ".join(f"{name}={value}" for name, value in shown.items())


def backends(config: TrainConfig) -> dict[str, str]:
    """The backend of each branch, as `forward/backward` where they differ."""
    kinds = set(config.model.kinds)
    if kinds == {"dense"}:
        return {"backend": "torch-sdpa"}
    forward, backward = routes_of(config, router())
    found = {}
    # The alternatives to NSA consist of these two ops.
    for op in forward if "nsa" in kinds else ("selected", "sliding"):
        found[op] = "/".join(dict.fromkeys(route[op].backend or "none" for route in (forward, backward)))
    return found | ({"dense": "torch-sdpa"} if "dense" in kinds else {})


def routes_of(config: TrainConfig, router: Router) -> list[Mapping[str, Route]]:
    """The routes by op, of the forward and of the backward pass."""
    attn = config.model.attn
    problems = [problem_of(config, backward=backward) for backward in (False, True)]
    sizes: dict[str, Any] = {"block": attn.l, "stride": attn.d, "window": attn.w}
    return [router.explain(problem, attn.backend, **sizes).routes for problem in problems]


def problem_of(config: TrainConfig, *, backward: bool) -> Problem:
    """The attention of one batch."""
    varlen = config.data.pack
    batch, length = (1, config.tokens_per_batch) if varlen else (config.batch_size, config.model.seq_len)
    where: dict[str, Any] = {"dtype": DTYPES[config.dtype], "device": torch.device(config.device).type}
    problem = Problem.of_config(config.model.attn, batch=batch, length=length, backward=backward, **where)
    return replace(problem, varlen=varlen)


def open_data(config: TrainConfig, split: Split, **other: Any) -> Loader:
    """The data of a run as batches of its size, with `other` arguments of `open_loader` over its own."""
    own = {"batch_size": config.batch_size, "seq_len": config.model.seq_len, "seed": config.seed}
    return open_loader(config.data, **{"split": split, "vocab_size": config.model.vocab_size, **own, **other})


def save_run_info(config: TrainConfig, *, step: int, ranks: Ranks, before: dict[str, Any] | None = None) -> None:
    """Write the resolved config, its hash, the environment and the commit into the run's folder.

    `step` is the one that this start resumes from, `before` the record of the last start, which holds the earlier ones.
    """
    make_folder(config.out)
    record = {"hash": config.hash, "from_step": step, "ranks": ranks.size, "environment": environment(ranks.device)}
    if before is not None:
        last = {name: value for name, value in before.items() if name != "before"}
        record["before"] = [*before.get("before", []), last]
    # First, because it marks the config as a run's own.
    replace_text(config.out / RUN_INFO, json.dumps(record, indent=2) + "\n")
    write_yaml(config.out / CONFIG, config)


def read_run_info(run: Path) -> dict[str, Any]:
    """The record of the run's last start; empty where there is none. A `ValueError` names a damaged file."""
    path = run / RUN_INFO
    if not path.is_file():
        return {}
    try:
        found = parse_json(read_limited(path, MAX_RUN_BYTES))
        for name, kind in (("environment", dict), ("before", list)):
            require(isinstance(found.get(name, kind()), kind), name, type(found.get(name)).__name__, kind.__name__)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return found


def environment(device: torch.device) -> dict[str, Any]:
    current = settings.current()
    given = {s.env: getattr(current, s.name) for s in settings.SETTINGS if current.source(s.name) != "default"}
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
        "settings": given,
    }


def config_of(run: Path) -> TrainConfig:
    """The config in a run's folder, whatever this process's environment says."""
    return load_config(run, {"out": str(run)}, env=settings.Settings())


def check_folder(config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """How `config` differs from the run that its folder holds, if it holds one.

    A ValueError if that run has another model, or has lost its checkpoints; or if the folder holds files that no run
    wrote, which this one would replace, or links that it would write through.
    """
    out, name = config.out, str(config.out)
    links = [file for file in run_folder.APPENDED if (out / file).is_symlink()]
    require(not links, "out", name, f"a folder in which {', '.join(links)} is no symbolic link")
    started = (out / RUN_INFO).is_file() and "hash" in read_run_info(out)
    if not (out / CONFIG).is_file() or not (started or saved_steps(out / CHECKPOINTS)):
        found = [file for file in run_folder.WRITTEN if (out / file).exists()]
        # A start that was killed while it wrote the first of its files may be repeated.
        foreign = [] if started and found == [RUN_INFO] else found
        require(not foreign, "out", name, f"another folder: this one holds {', '.join(foreign)} of no run")
        return {}
    if any(line.get("kind") == "step" for line in read_lines(out / METRICS)):
        require_checkpoint(out, "out")
    changed = diff(config_of(out), config)
    model = [key for key in changed if key.startswith("model.") and key != "model.attn.backend"]
    same = not model or not (out / CHECKPOINTS).is_dir()
    require(same, "out", name, f"another folder: the model of the run in this one has another {', '.join(model)}")
    return changed


def check_ranks(config: TrainConfig, data: dict[str, Any] | None = None) -> None:
    """`ValueError` unless all ranks have the same config and, once it is open, the same data; paths may differ between
    machines: a copy elsewhere is the same corpus, which `data` identifies."""
    own = {key: value for key, value in flat(config.to_dict()) if key not in ("out", "data.path")}
    require_same(own if data is None else {f"{key} of the data": value for key, value in data.items()})


def describe_difference(run: Path, config: TrainConfig) -> str:
    """`nsa train --diff RUN`: how a start now would differ from that run's, in config and environment."""
    then, now = read_run_info(run).get("environment", {}), environment(torch.device(config.device))
    lines = [f"{key}: {a!r} -> {b!r}" for key, (a, b) in diff(config_of(run), config).items()]
    names = [name for name in now if name not in ("command", "machine")]
    lines += [f"{name}: {then.get(name)!r} -> {now[name]!r}" for name in names if then.get(name) != now[name]]
    return "\n".join([f"{run} -> a start now", *(f"  {line}" for line in lines or ["no difference"])])


@dataclass
class Summary:
    """The results of a run: its last metrics line, and the last lines that it prints."""

    loss_start: float
    loss_end: float
    tokens_per_s: float | None  # None for a run of one step, which is not timed
    skipped: int
    stand_ins: int  # batches of random tokens in place of data that did not come
    served: dict[str, int]  # calls by "op/backend"; a graph's replays are not calls
    fallbacks: dict[str, int]
    sample: str
    checkpoint: Path
    report: Path | None

    def to_dict(self) -> dict[str, Any]:
        report = None if self.report is None else str(self.report)
        return {**asdict(self), "checkpoint": str(self.checkpoint), "report": report}

    def __str__(self) -> str:
        failures = ", ".join(f"{reason} ({times} times)" for reason, times in self.fallbacks.items())
        calls = ", ".join(f"{name} {times:,}" for name, times in self.served.items())
        rate = self.tokens_per_s
        speed = "speed not measured: the first step is not timed" if rate is None else f"{rate:,.0f} tokens/s"
        counts = f"skipped steps: {self.skipped}   stand-in batches: {self.stand_ins}"
        lines = [f"validation loss {self.loss_start:.3f} -> {self.loss_end:.3f}", speed]
        lines += [f"calls by backend: {calls or 'torch alone'}", f"fallbacks: {failures or 'none'}   {counts}"]
        return "\n".join([*lines, f"sample:\n{self.sample}", f"saved {self.checkpoint}", f"report {self.report}"])
