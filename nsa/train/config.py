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
from typing import Any, Literal, get_args, get_type_hints

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
    """One run. The sequence length is `model.seq_len`."""

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
    # The learning rate at the end, as a fraction of `lr`.
    lr_floor: float = 0.1
    weight_decay: float = 0.1
    # Whether the weights of NSA's gates decay too.
    gate_decay: bool = True
    grad_clip: float = 1.0
    seed: int = 0

    device: str = "cpu"
    # Of matmuls; parameters and accumulation are fp32.
    dtype: Dtype = "float32"
    compile: bool = False
    # Replay each pass as one launch. Needs fixed shapes, so no packed documents.
    cuda_graphs: bool = False
    # Activation checkpointing: less memory, a third more FLOPs.
    gc: bool = False
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    # The dtype of the gradients that ddp all-reduces; none: their own.
    grad_compression: Literal["none", "bf16"] = "none"

    # In steps; 0: only at the start and the end of the run.
    log_every: int = 20
    eval_every: int = 0
    eval_batches: int = 4
    sample_every: int = 0
    sample_prompt: str = "def "
    sample_tokens: int = 200
    # Statistics of the gates and the selection in each layer.
    stats_every: int = 0
    save_every: int = 0
    # Checkpoints kept besides the best.
    keep: int = 3

    # Steps in a row without a finite gradient before the run stops.
    max_skips: int = 8
    # Seconds without a step before every thread's stack is written to a file.
    watchdog_s: float = 600.0
    # A slower run stops after its first steps. None: a tenth of what `nsa plan` has for this GPU, where that is based
    # on a measurement; 0: any speed is accepted.
    min_tokens_per_s: float | None = None
    # Of all machines, for the log; 0: unknown.
    price_per_hour: float = 0.0

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
        """Plain types, nested as in the YAML file."""
        return {**asdict(self), "model": self.model.to_dict(), "out": str(self.out)}

    @property
    def hash(self) -> str:
        """The same for the same run in any folder."""
        values = {name: value for name, value in self.to_dict().items() if name != "out"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def load_config(
    source: str | Path, overrides: Mapping[str, Any] | None = None, *, env: settings.Settings | None = None
) -> TrainConfig:
    """The config of a run.

    Args:
        source: a name in `configs/`, a YAML file, or a run's folder.
        overrides: values by dotted key.
        env: the settings of the environment (default: this process's).

    Raises:
        ValueError: names the key, its value, what is accepted and where the value comes from.
    """
    path = find_config(source)
    tree = read_config(path)
    file, given = dict(tree), overrides or {}
    environment = from_environment(env or settings.current())
    for layer in (environment, given):
        for key, value in layer.items():
            put_value(tree, key, value)
    try:
        tree |= fitted_schedule(tree, file, given)
        values = built(checked(TrainConfig, tree, where=str(path)))
        values["out"] = run_folder(values, path)
        # First without what depends on the machine: wrong values are reported before torch is imported.
        TrainConfig(**{name: value for name, value in values.items() if name not in MACHINE})
        return TrainConfig(**on_this_machine(values))
    except ValueError as error:
        raise ValueError(f"{error}{value_origin(str(error), path, tree, environment, given)}") from None


def value_origin(
    message: str, path: Path, tree: Mapping[str, Any], environment: Mapping[str, Any], given: Mapping[str, Any]
) -> str:
    """Where the value of an error comes from, whose first word is the key; "" where it was on the command line."""
    key = message.partition(" ")[0].strip("'")
    if any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in given):
        return ""
    setting = next((name for name, known in {**ENVIRONMENT, "no_gc": "gc"}.items() if known == key), None)
    if key in environment and setting is not None:
        return f" (from {settings.BY_NAME[setting].env})"
    return f" (in {path})" if any(f"{known}.".startswith(f"{key}.") for known, _ in flat(tree)) else ""


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a file; those of its `model.preset` where it has no others."""
    tree = unfolded(read_yaml(path), str(path))
    model = tree.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return tree
    name = model.pop("preset")
    require(isinstance(name, str) and name in PRESETS, f"model.preset in {path}", name, f"one of {sorted(PRESETS)}")
    found = {"model": PRESETS[name].to_dict()}
    put_value(found, "model", model)
    return {**tree, **found}


def built(values: dict[str, Any]) -> dict[str, Any]:
    """With the config objects of the model and of the data, whose errors name whole keys."""
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
def prefix_errors(prefix: str) -> Iterator[None]:
    """Add `prefix` to the message of a `ValueError` in this block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error


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
    require(expanded is not None, name, value, f"{accepted}; no user of that name has a home folder here")
    assert expanded is not None
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

    def unset(name: str) -> bool:
        return values.get(name) in (None, "auto")

    # Slow; errors in the keys were reported before.
    import torch

    if unset("device"):
        values["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = str(values["device"]).startswith("cuda")
    if unset("dtype"):
        values["dtype"] = "bfloat16" if on_gpu else "float32"
    if unset("parallel"):
        values["parallel"] = "ddp" if torch.distributed.is_torchelastic_launched() else "none"
    if unset("compile"):
        values["compile"] = on_gpu
    if unset("cuda_graphs"):
        static = not values["data"].pack
        values["cuda_graphs"] = bool(on_gpu and values["compile"] and static and values["parallel"] == "none")
    return values


def moved(run: Path) -> dict[str, Any]:
    """The keys of a run's config that have to change because the machine, or the launcher, is another, or because the
    tokenizer's folder is gone; the run has a copy."""
    import torch

    tree = read_yaml(find_config(run))
    moves: dict[str, Any] = {}
    if torch.distributed.is_torchelastic_launched() == (tree.get("parallel") == "none"):
        moves |= {"parallel": "auto", "cuda_graphs": "auto"}
    if str(tree.get("device")).startswith("cuda") and not torch.cuda.is_available():
        moves |= {"device": "auto", "compile": "auto", "cuda_graphs": "auto"}
    if moves and tree.get("grad_compression", "none") != "none":
        # It needs ddp on GPUs.
        moves["grad_compression"] = "none"
    tokenizer = (tree.get("data") or {}).get("tokenizer")
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


def put_value(tree: dict[str, Any], key: str, value: Any, once: str = "") -> None:
    """Set the dotted `key`; a mapping is merged into an existing one. `once`: what an error calls a key that is set
    already."""
    head, _, rest = key.partition(".")
    nested = isinstance(tree.get(head), dict)
    if nested and (rest or isinstance(value, dict)):
        for inner, x in ({rest: value} if rest else value).items():
            put_value(tree[head], inner, x, once)
        return
    require(not once or head not in tree, once, "given twice, dotted and nested", "each key once")
    tree[head] = {} if rest else value
    if rest:
        put_value(tree[head], rest, value, once)


def unfolded(tree: Mapping[Any, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """`tree` with dotted keys such as `model.attn.w` as nested ones."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        require(isinstance(key, str), f"the key {name} in {where}", key, "text, in quotes if need be")
        value = unfolded(value, where, f"{name}.") if isinstance(value, dict) else value
        put_value(result, key, value, once=f"{name} in {where}")
    return result


def check_config_key(name: str) -> None:
    if name not in keys_of(TrainConfig):
        raise ValueError(f"{name!r} is not a key of a config; {replacement(name, keys_of(TrainConfig))}")


def checked(cls: Any, tree: Mapping[str, Any], *, where: str, prefix: str = "") -> dict[str, Any]:
    """`tree` with only the keys that `cls` has; `cls` checks the values."""
    hints = get_type_hints(cls)
    for key in tree:
        check_config_key(f"{prefix}{key}")
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    missing = sorted(f"{prefix}{name}" for name in needed - set(tree) - OPTIONAL)
    if missing:
        raise ValueError(f"{where} lacks {missing}; accepted: a config with every key that has no default")
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        kinds = get_args(hints[key]) or (hints[key],)
        inner = next((kind for kind in kinds if is_dataclass(kind)), None)
        if value is None and NoneType in kinds:
            values[key] = None
        elif inner is not None:
            require(isinstance(value, dict), name, value, "keys and values")
            values[key] = checked(inner, value, where=where, prefix=f"{name}.")
        elif float in kinds and isinstance(value, str):
            # YAML 1.1 takes 1e-3 for text. Other text is "auto", or an error that the config's own checks report.
            values[key] = value
            with suppress(ValueError):
                values[key] = float(value)
        else:
            require(str not in kinds or isinstance(value, str), name, value, "text")
            values[key] = value
    return values


def diff(a: TrainConfig, b: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two runs differ, except `out`."""
    left, right = (dict(flat(replace(config, out=Path()).to_dict())) for config in (a, b))
    keys = [*left, *(key for key in right if key not in left)]
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings under dotted names."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value
