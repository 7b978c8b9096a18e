"""The config of a run: one object, from a YAML file, the environment and the command line.

    load_config("tiny", {"model.attention": "dense", "steps": 50})

The command line (`overrides`) beats the environment, which beats the file, which beats the defaults here. An unknown
key is an error that names the one to use. The result holds no "auto". Torch is imported only after the keys are
checked, so that mistakes are reported at once.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from nsa import settings
from nsa.config import NSAConfig, check_fields, require, shortened
from nsa.data.config import DataConfig
from nsa.files import replace_text
from nsa.model.config import PRESETS, LMConfig
from nsa.origin import configs_folder
from nsa.train.keys import FROM_SCRATCH, MODEL_FAMILIES, keys_of, replacement
from nsa.train.run_folder import CONFIG, RUNS
from nsa.train.yaml_file import parse_yaml, read_yaml, yaml

log = logging.getLogger("nsa")

Dtype = Literal["float32", "bfloat16", "float16"]

# The keys that settings of the environment set.
ENVIRONMENT = {
    "seq_len": "model.seq_len",
    "batch_size": "batch_size",
    "accum_batches": "accum",
    "fwe_doc_batch": "data.doc_batch",
    "fwe_prefetch": "data.prefetch",
    "fwe_queue": "data.queue",
}

# Keys whose defaults depend on the machine.
MACHINE = {"device", "dtype", "compile", "cuda_graphs", "parallel", "grad_compression"}
# Numbers that may be 0: counts of steps, and fractions.
STEP_COUNTS = ("warmup", "decay", "eval_every", "sample_every", "stats_every", "save_every")
MAY_BE_0 = (*STEP_COUNTS, "seed", "lr_floor", "weight_decay", "min_tokens_per_s", "price_per_hour")
# Keys without a default that may be missing.
OPTIONAL = {"data", "out"}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. The sequence length is `model.seq_len`.

    Raises:
        ValueError: A field has a wrong type or value, or two do not fit each other.
    """

    model: LMConfig
    data: DataConfig
    out: Path

    # A run, its export or a Transformers folder whose parameters a new run starts from (default: random ones).
    init: str | None = None

    steps: int
    # Sequences in a batch of one rank, and batches per step.
    batch_size: int
    accum: int = 1

    lr: float
    # "cosine" falls from the warm-up on; "wsd" stays at the peak and falls in the last `decay` steps (default: a tenth
    # of all). With `lr_floor` 1 neither falls.
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: int = 0
    decay: int = 0
    lr_floor: float = 0.1  # the learning rate at the end, as a fraction of `lr`
    weight_decay: float = 0.1
    gate_decay: bool = True  # whether the weights of NSA's gates decay too
    grad_clip: float = 1.0
    seed: int = 0

    device: str = "cpu"
    dtype: Dtype = "float32"  # of matmuls; parameters and accumulation are fp32
    compile: bool = False
    cuda_graphs: bool = False  # replay each pass as one launch; needs fixed shapes, so no packed documents
    gc: bool = False  # activation checkpointing: less memory, a third more FLOPs
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    grad_compression: Literal["none", "bf16"] = "none"  # dtype of the gradients that ddp all-reduces; none: their own

    # In steps; 0: only at the start and the end of the run.
    log_every: int = 20
    eval_every: int = 0
    eval_batches: int = 4
    sample_every: int = 0
    sample_prompt: str = "def "
    sample_tokens: int = 200
    stats_every: int = 0  # statistics of the gates and the selection in each layer
    save_every: int = 0
    keep: int = 3  # checkpoints kept besides the best

    max_skips: int = 8  # steps in a row without a finite gradient before the run stops
    watchdog_s: float = 600.0  # seconds without a step before every thread's stack is written to a file
    # A slower run stops after its first steps. None: a tenth of what `nsa plan` has for this GPU, where that is based
    # on a measurement; 0: any speed is accepted.
    min_tokens_per_s: float | None = None
    price_per_hour: float = 0.0  # of all machines, for the log; 0: unknown

    def __post_init__(self) -> None:
        check_fields(self, dict.fromkeys(MAY_BE_0, 0))
        left, on_gpu = self.steps - self.warmup, self.device.startswith("cuda")
        device = re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device) is not None
        wsd = self.schedule == "wsd"
        decay = 1 <= self.decay <= left if wsd else self.decay == 0
        prompt = isinstance(self.sample_prompt, str) and self.sample_prompt != ""
        prompt = prompt and self.sample_prompt == self.sample_prompt.encode(errors="replace").decode()
        compression = self.grad_compression == "none" or (self.parallel == "ddp" and on_gpu)
        alone, scales = self.parallel == "none", self.dtype == "float16" and self.parallel == "fsdp"
        graphs, ranks = self.cuda_graphs, f"False with parallel = {self.parallel}: a graph cannot wait for other ranks"
        for holds, name, accepted in (
            (self.lr_floor <= 1, "lr_floor", "a fraction of lr, 0 to 1"),
            (left > 0, "warmup", f"less than steps = {self.steps}"),
            (decay, "decay", f"1 to {left} for wsd: the steps after the warm-up" if wsd else "0 for a cosine"),
            (self.init is None or isinstance(self.init, str), "init", "a folder of a run or of Transformers, or none"),
            (prompt, "sample_prompt", "UTF-8 text of at least one character"),
            (device, "device", "'cpu', 'cuda' or 'cuda:0'"),
            (not graphs or on_gpu, "cuda_graphs", f"False on {self.device}: only a CUDA GPU has graphs"),
            (not (graphs and self.data.pack), "cuda_graphs", "False with data.pack, whose shapes vary"),
            (not graphs or alone, "cuda_graphs", ranks),
            (compression, "grad_compression", "'none', or with ddp on GPUs 'bf16'; fsdp has its own mixed precision"),
            (not scales, "dtype", "'bfloat16' or 'float32' with fsdp, whose ranks would each scale their own losses"),
        ):
            require(holds, name, getattr(self, name), accepted)

    @property
    def tokens_per_batch(self) -> int:
        """Tokens in a batch of one rank."""
        return self.batch_size * self.model.seq_len

    def to_dict(self) -> dict[str, Any]:
        """The config as plain types.

        Returns:
            The fields by name, nested as in the YAML file.
        """
        return {**asdict(self), "model": self.model.to_dict(), "out": str(self.out)}

    @property
    def hash(self) -> str:
        """The same for the same run in any folder."""
        values = {name: value for name, value in self.to_dict().items() if name != "out"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def load_config(
    source: str | Path, overrides: Mapping[str, Any] | None = None, *, env: settings.Settings | None = None
) -> TrainConfig:
    """Read a config and add what the environment and the caller override.

    Args:
        source: a name in `configs/`, a YAML file, or a run's folder.
        overrides: values by dotted key.
        env: the settings of the environment (default: this process's).

    Returns:
        The config of a run, checked and completed for this machine.

    Raises:
        ValueError: names the key, its value, what is accepted and where the value comes from.
    """
    path = find_config(source)
    file, given = read_config(path), dict(flat(overrides or {}))
    environment = from_environment(env or settings.current())
    tree = merged(merged(file, environment), given)
    try:
        for key in [*(overrides or {}), *given]:
            check_config_key(key)
        tree |= fitted_schedule(tree, file, given)
        values = built(to_tree(check_types(tree, str(path))))
        values["out"] = run_folder(values, path)
        # First without what depends on the machine: wrong values are reported before torch is imported.
        TrainConfig(**{name: value for name, value in values.items() if name not in MACHINE})
        return TrainConfig(**on_this_machine(values))
    except ValueError as error:
        # Its first word is the key; what was on the command line needs no origin.
        key = str(error).partition(" ")[0].strip("'")
        if any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in given):
            raise
        setting = next((name for name, known in {**ENVIRONMENT, "no_gc": "gc"}.items() if known == key), None)
        if key in environment and setting is not None:
            raise ValueError(f"{error} (from {settings.BY_NAME[setting].env})") from None
        if any(f"{known}.".startswith(f"{key}.") for known in tree):
            raise ValueError(f"{error} (in {path})") from None
        raise


def read_config(path: Path) -> dict[str, Any]:
    """The values of a file by dotted key; those of its `model.preset` where it has no others."""
    pairs = list(flat(read_yaml(path)))
    values = dict(pairs)
    preset = "model.preset" in values
    name = values.pop("model.preset", None)
    require(not preset or name in list(PRESETS), f"model.preset in {path}", name, f"one of {sorted(PRESETS)}")
    for key in values:
        with prefix_errors("", f" (in {path})"):
            check_config_key(key)
    for key, _ in pairs:
        again = sum(key == other or key.startswith(f"{other}.") for other, _ in pairs) > 1
        require(not again, f"{key} in {path}", "given twice, dotted and nested", "each key once")
    return merged(dict(flat({"model": PRESETS[name].to_dict()})), values) if preset else values


def built(values: dict[str, Any]) -> dict[str, Any]:
    """The values with the config objects of the model and the data, whose errors name whole keys."""
    model = values["model"]
    if isinstance(model.get("attention"), list):
        model = {**model, "attention": tuple(model["attention"])}
    with prefix_errors("model.attn."):
        attn = NSAConfig.from_dict(model["attn"])
    with prefix_errors("model."):
        lm = LMConfig(**{**model, "attn": attn})
    # The shell does not expand `~` in a file or in --set.
    data = values.get("data", {})
    expanded = {name: os.path.expanduser(data[name]) for name in ("path", "tokenizer") if data.get(name)}
    if values.get("init"):
        values["init"] = os.path.expanduser(values["init"])
    return {**values, "model": lm, "data": DataConfig(**{**data, **expanded})}


@contextmanager
def prefix_errors(prefix: str, suffix: str = "") -> Iterator[None]:
    """Add to the message of a `ValueError` in this block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{error}{suffix}") from error


def run_folder(values: Mapping[str, Any], path: Path) -> Path:
    """The run's folder: as given, else a new one under `runs/`."""
    if "out" in values:
        return user_path("out", values["out"], "the path of a folder")
    name = path.parent.name if path.name == CONFIG else path.stem
    kind = values["model"].attention
    # The random part distinguishes runs of the same second.
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    return RUNS / f"{name}-{kind if isinstance(kind, str) else 'mixed'}-{stamp}"


def user_path(name: str, value: object, accepted: str) -> Path:
    """A path with `~` expanded; an empty one is an error, not the current folder."""
    text = str(value) if isinstance(value, str | Path) else ""
    require(text.strip() != "" and "\0" not in text, name, value, accepted)
    expanded = settings.expand_home(text)
    if expanded is None:
        raise ValueError(f"{name} is {text!r}; accepted: {accepted}; no user of that name has a home folder here")
    return expanded


def fitted_schedule(tree: Mapping[str, Any], file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, int]:
    """The `warmup` and `decay` of `tree` where `given` changes the `file`'s steps or schedule, but not these."""
    steps, whole = tree.get("steps"), file.get("steps")
    if not (isinstance(steps, int) and steps > 0):
        # The config's own checks will name it.
        return {}
    own = {key: file[key] for key in ("warmup", "decay") if isinstance(file.get(key), int) and key not in given}
    if "decay" not in given and tree.get("schedule") != file.get("schedule"):
        # The file's is of another schedule.
        own["decay"] = 0
    fitted = dict(own)
    if isinstance(whole, int) and steps < whole:
        # In proportion; rounded so that the two never overlap, and a decay never becomes 0.
        fitted = {key: n * steps // whole if key == "warmup" else -(-n * steps // whole) for key, n in own.items()}
        shorter = ", ".join(f"{key} {n} -> {fitted[key]}" for key, n in own.items() if fitted[key] != n)
        if shorter:
            log.warning("steps is %d where the config has %d; in proportion %s", steps, whole, shorter)
    if tree.get("schedule") == "wsd" and "decay" not in given and fitted.get("decay", tree.get("decay", 0)) == 0:
        fitted["decay"] = -(-steps // 10)
    return fitted


def on_this_machine(values: dict[str, Any]) -> dict[str, Any]:
    """Replace missing values and "auto" by what fits the device and the launcher."""
    # Slow; errors in the keys were reported before.
    import torch

    def fill(name: str, value: Any) -> None:
        if values.get(name) in (None, "auto"):
            values[name] = value

    fill("device", "cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = str(values["device"]).startswith("cuda")
    fill("dtype", "bfloat16" if on_gpu else "float32")
    fill("parallel", "ddp" if torch.distributed.is_torchelastic_launched() else "none")
    fill("compile", on_gpu)
    fixed = not values["data"].pack and values["parallel"] == "none"
    fill("cuda_graphs", bool(on_gpu and values["compile"] and fixed))
    return values


def moved(run: Path) -> dict[str, Any]:
    """The keys of a run's config that have to change because the machine, or the launcher, is another, or because the
    tokenizer's folder is gone; the run has a copy."""
    import torch

    values = read_config(find_config(run))
    moves: dict[str, Any] = {}
    if torch.distributed.is_torchelastic_launched() == (values.get("parallel") == "none"):
        moves |= {"parallel": "auto", "cuda_graphs": "auto"}
    if str(values.get("device")).startswith("cuda") and not torch.cuda.is_available():
        moves |= {"device": "auto", "compile": "auto", "cuda_graphs": "auto"}
    if moves and values.get("grad_compression", "none") != "none":
        # It needs ddp on GPUs.
        moves["grad_compression"] = "none"
    tokenizer = values.get("data.tokenizer")
    if tokenizer not in (None, "bytes"):
        path = Path(tokenizer)
        there = (path / "tokenizer.json" if path.is_dir() else path).is_file()
        if not there and (run / "tokenizer.json").is_file():
            moves["data.tokenizer"] = str(run)
    return moves


def find_config(source: str | Path) -> Path:
    """A `str` that is the name of a config means that config, even where a folder has the same name."""
    names = sorted(file.stem for file in configs_folder().glob("*.yaml"))
    if isinstance(source, str) and source in names:
        return configs_folder() / f"{source}.yaml"
    accepted = f"a .yaml file, a run's folder, or one of {names}"
    path = user_path("config", source, accepted)
    if path.is_dir():
        require((path / CONFIG).is_file(), "config", str(source), f"a folder with {CONFIG}, as `nsa train` writes it")
        return path / CONFIG
    if path.suffix in (".yaml", ".yml"):
        require(path.is_file(), "config", str(source), "a file that exists")
        return path
    close = difflib.get_close_matches(str(source).lower(), names, n=1)
    near = f"; the nearest is {close[0]}" if close else ""
    if not close and str(source).lower().startswith(MODEL_FAMILIES):
        near = f"; {FROM_SCRATCH}"
    raise ValueError(f"config is {str(source)!r}; accepted: {accepted}{near}")


def write_yaml(path: Path, config: TrainConfig) -> None:
    """Write `config` without `out`: a run that starts from the file is another run."""
    values = {name: value for name, value in config.to_dict().items() if name != "out"}
    # Through JSON, which turns tuples into lists.
    replace_text(path, yaml().safe_dump(json.loads(json.dumps(values)), sort_keys=False))


def parse_set(texts: list[str]) -> dict[str, Any]:
    """`["model.attn.w=256", ...]`, values as YAML reads them."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        require(equals == "=" and key.strip() != "", "--set", text, "key=value")
        found[key.strip()] = parse_yaml(value, f"--set {key}: {shortened(value)}")
    return found


def from_environment(env: settings.Settings) -> dict[str, Any]:
    """The keys that the environment sets; defaults of the settings do not count."""
    found = {key: getattr(env, name) for name, key in ENVIRONMENT.items() if env.source(name) != "default"}
    return found | ({"gc": False} if env.no_gc else {})


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by dotted key; an empty mapping is a value too."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def to_tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *groups, leaf = key.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return tree


def merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values by dotted key. A value and the keys of a group in its place replace each other; an empty group
    replaces none."""
    for key, value in changes.items():
        if value == {} and any(k.startswith(f"{key}.") for k in values):
            continue
        others = {k: x for k, x in values.items() if not k.startswith(f"{key}.") and not key.startswith(f"{k}.")}
        values = others | {key: value}
    return values


def check_config_key(name: str) -> None:
    if name not in keys_of(TrainConfig):
        raise ValueError(f"{name!r} is not a key of a config; {replacement(name, keys_of(TrainConfig))}")


def check_types(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The values, by dotted key, if they have types that the config can check and none that it needs is missing."""
    for key, value in values.items():
        kinds = keys_of(TrainConfig)[key]
        if value is None and NoneType in kinds:
            continue
        require(value == {} or not any(map(is_dataclass, kinds)), key, value, "keys and values")
        if float in kinds and isinstance(value, str):
            # YAML 1.1 takes 1e-3 for text. Other text is "auto", or an error that the config's own checks report.
            with suppress(ValueError):
                values[key] = float(value)
        else:
            require(str not in kinds or isinstance(value, str), key, value, "text")
    groups: list[tuple[str, Any]] = [("", TrainConfig)]
    groups += [(f"{key}.", kind) for key, kinds in keys_of(TrainConfig).items() for kind in kinds if is_dataclass(kind)]
    for prefix, cls in groups:
        if not any(f"{key}.".startswith(prefix) for key, value in values.items() if value is not None):
            continue
        needed = {f"{prefix}{f.name}" for f in fields(cls) if f.default is MISSING} - OPTIONAL
        missing = sorted(key for key in needed if not any(f"{given}.".startswith(f"{key}.") for given in values))
        if missing:
            raise ValueError(f"{where} lacks {missing}; accepted: a config with every key that has no default")
    return values


def diff(a: TrainConfig, b: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two runs differ, except `out`."""
    left, right = (dict(flat(replace(config, out=Path()).to_dict())) for config in (a, b))
    keys = [*left, *(key for key in right if key not in left)]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}
