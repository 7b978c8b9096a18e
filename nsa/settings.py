"""The one place that reads environment variables, once.

Every setting has a type, a default, a meaning and the environment name that users' runbooks hold. A value is taken from
the command line, else the environment, else a config file, else the default, and remembers which.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

Source = Literal["default", "file", "environment", "command line"]
Value = bool | int | str | None

ROUTING = "nsa.backends.routing"
FLASH = "nsa.backends.flash"
TUNING = "nsa.backends.triton.tuning"

# Exports of earlier runbooks for what is built in now: accepted, without effect.
RETIRED = {
    "NSA_PREFILL_BATCHED": "prefill is always batched",
    "NSA_USE_SEL_PACK": "every backend has one path for the selected branch, for packed rows too",
    "NSA_SEL_RANGES_V2": "selected blocks are passed as indices, and nothing converts them to ranges",
}

# Variables of torch and CUDA that change a run's speed or memory. They are reported, and not ours to set.
TORCH_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What there is to know about one setting besides its value."""

    name: str
    env: str
    default: Value
    meaning: str
    # An integer setting's smallest value; the others have none.
    at_least: int
    # The module without which the setting changes nothing.
    needs: str

    @property
    def kind(self) -> type:
        # A setting without a default is a number that someone else decides.
        return int if self.default is None else type(self.default)

    @property
    def accepted(self) -> str:
        if self.kind is str:
            return "a path"
        return "true or false" if self.kind is bool else f"an integer of at least {self.at_least}"

    def parse(self, text: str, label: str) -> bool | int | str:
        """The value that `text` spells; `label` names it in the error."""
        if self.kind is str:
            return self.check(text.strip(), label)
        if self.kind is bool:
            lowered = text.strip().lower()
            if lowered in ("1", "true", "yes", "on"):
                return True
            if lowered in ("0", "false", "no", "off", ""):
                return False
            raise ValueError(f"{label} is {text!r}; accepted: 1/true/yes/on or 0/false/no/off")
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{label} is {text!r}; accepted: {self.accepted}") from None
        return self.check(value, label)

    def check(self, value: Any, label: str) -> bool | int | str:
        """A value that already has a type, as a file or a program gives it."""
        # An exact type: True is no integer here.
        valid = type(value) is self.kind
        if self.kind is int:
            valid = valid and value >= self.at_least
        elif self.kind is str:
            valid = valid and value != ""
        if not valid:
            raise ValueError(f"{label} is {value!r}; accepted: {self.accepted}")
        return value


def setting(env: str, default: Value, meaning: str, *, needs: str, at_least: int = 1) -> Any:
    return field(
        default=default,
        metadata={"env": env, "default": default, "meaning": meaning, "needs": needs, "at_least": at_least},
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The effective values, and where each came from. `None`: not set, whoever needs the value decides."""

    force_parity: bool = setting(
        "NSA_FORCE_PARITY", False, "the reference computes everything: slow, exact", needs=ROUTING
    )
    use_fa2: bool = setting(
        "NSA_USE_FA2", True, "FlashAttention-2 may serve the compressed and sliding branches", needs=FLASH
    )
    use_fa2_win: bool = setting("NSA_USE_FA2_WIN", True, "FlashAttention-2 may serve the sliding branch", needs=FLASH)
    use_fa2_cmp: bool = setting(
        "NSA_USE_FA2_CMP", True, "FlashAttention-2 may serve the compressed branch", needs=FLASH
    )
    fa2_min_len_win: int | None = setting(
        "NSA_FA2_MIN_LEN_WIN",
        None,
        "fewest keys for auto to pick FA-2 in the sliding branch; -1: never",
        needs=FLASH,
        at_least=-1,
    )
    fa2_min_len_cmp: int | None = setting(
        "NSA_FA2_MIN_LEN_CMP",
        None,
        "fewest compressed keys for auto to pick FA-2 in that branch; -1: never",
        needs=FLASH,
        at_least=-1,
    )
    fa2_prefer_fp16: bool = setting(
        "NSA_FA2_PREF_FP16", False, "cast fp32 inputs to fp16 for FA-2, and say so", needs=FLASH
    )
    sdpa_no_flash: bool = setting(
        "NSA_SDPA_NO_FLASH", False, "torch's SDPA must not pick its flash kernel", needs="nsa.model"
    )
    sdpa_audit: bool = setting(
        "NSA_SDPA_AUDIT", False, "log which path serves each op and shape, and why, the first time", needs=ROUTING
    )
    debug_timing: bool = setting(
        "NSA_DEBUG_TIMING", False, "log every call with its milliseconds (waits for the GPU)", needs=ROUTING
    )
    tuned_tiles: str = setting(
        "NSA_TUNED_TILES",
        "~/.cache/nsa/tuned.json",
        "the user's own tiles for the Triton kernels, which `nsa bench tune` writes",
        needs=TUNING,
    )
    seq_len: int | None = setting("NSA_SEQ_LEN", None, "training sequence length", needs="nsa.train")
    batch_size: int | None = setting("NSA_BATCH_SIZE", None, "training batch size", needs="nsa.train")
    accum_batches: int | None = setting("NSA_ACCUM", None, "batches per optimizer step", needs="nsa.train")
    no_gc: bool = setting("NSA_NO_GC", False, "no activation checkpointing", needs="nsa.train")
    fwe_doc_batch: int | None = setting(
        "NSA_FWE_DOC_BATCH", None, "documents tokenized at once by the streaming loader", needs="nsa.data"
    )
    fwe_prefetch: bool = setting(
        "NSA_FWE_PREFETCH", True, "the streaming loader works ahead in the background", needs="nsa.data"
    )
    fwe_queue: int | None = setting("NSA_FWE_Q", None, "batches the streaming loader keeps ready", needs="nsa.data")
    test_fa2: bool = setting("NSA_TEST_FA2", False, "run the tests that need the flash_attn package", needs=FLASH)

    sources: Mapping[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in SETTINGS:
            value = getattr(self, each.name)
            if value != each.default:
                each.check(value, each.name)

    def source(self, name: str) -> Source:
        return self.sources.get(name, "default")

    def describe(self, name: str) -> str:
        """A setting as a reason: what it is and who said so."""
        value = getattr(self, name)
        return f"{BY_NAME[name].env} is {shown(value)} ({self.source(name)})"

    @classmethod
    def load(
        cls,
        *,
        environ: Mapping[str, str] | None = None,
        file: Mapping[str, Any] | None = None,
        command_line: Mapping[str, Any] | None = None,
    ) -> Settings:
        """Put the sources together; later ones in the order file, environment, command line win."""
        environ = os.environ if environ is None else environ
        for name, near in unknown_names(environ).items():
            warnings.warn(f"{name} is not a setting of nsa; the nearest known name is {near}", stacklevel=2)
        from_environ = {s.name: s.parse(environ[s.env], s.env) for s in SETTINGS if s.env in environ}
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        layers: tuple[tuple[Source, Mapping[str, Any]], ...] = (
            ("file", checked(file or {}, "the config file")),
            ("environment", from_environ),
            ("command line", checked(command_line or {}, "the command line")),
        )
        for source, layer in layers:
            values.update(layer)
            sources.update(dict.fromkeys(layer, source))
        return cls(**values, sources=sources)


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(name=f.name, **f.metadata) for f in fields(Settings) if "env" in f.metadata
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
BY_ENV = {setting.env: setting for setting in SETTINGS}


def shown(value: Value) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def find(name: str, where: str) -> Setting:
    if name not in BY_NAME:
        near = nearest(name, BY_NAME)
        raise ValueError(f"{name!r} in {where} is not a setting; the nearest known name is {near}")
    return BY_NAME[name]


def checked(given: Mapping[str, Any], where: str) -> dict[str, bool | int | str]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is {given!r}; accepted: a mapping of name: value")
    return {name: find(name, where).check(value, f"{name} in {where}") for name, value in given.items()}


def parse_overrides(texts: Iterable[str], where: str = "the command line") -> dict[str, bool | int | str]:
    """`["name=value", ...]`, as a command line gives them; the last one of a name wins."""
    overrides = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} in {where} has no value; accepted: name=value")
        overrides[name] = find(name, where).parse(value, f"{name} in {where}")
    return overrides


def read_file(path: Path | str) -> dict[str, Any]:
    """A JSON object of settings: `{"force_parity": true}`."""
    try:
        given = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"settings file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"settings file {path} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"settings file {path} holds a {type(given).__name__}; accepted: an object of name: value")
    return checked(given, f"settings file {path}")


def unknown_names(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every `NSA_*` name of the environment that is not a setting and never was one, and the setting nearest to it."""
    environ = os.environ if environ is None else environ
    names = [name for name in sorted(environ) if name.startswith("NSA_") and name not in BY_ENV | RETIRED]
    return {name: nearest(name, BY_ENV) for name in names}


def retired_names(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every name of RETIRED that the environment has, and why it is no longer needed."""
    environ = os.environ if environ is None else environ
    return {name: why for name, why in RETIRED.items() if name in environ}


def torch_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of TORCH_VARIABLES that are set, with their values."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in TORCH_VARIABLES if name in environ}


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like `name`, whichever way either is spelled: `NSA_USE_FA` or `use_fa`."""
    spelled = {candidate.lower().removeprefix("nsa_"): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower().removeprefix("nsa_"), spelled, n=1, cutoff=0.0)
    return spelled[close[0]]


def user_path(text: str) -> Path | None:
    """The path that `text` names, with the user's home for `~`; None where a user has none."""
    expanded = os.path.expanduser(text)
    return None if expanded.startswith("~") else Path(expanded)


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment, with `changes`, for one that it starts."""
    return {**os.environ, **changes}


def triton_interpreted() -> bool:
    """Whether Triton is told, by a variable of its own, to run kernels in its interpreter, which takes CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@cache
def current() -> Settings:
    """The settings of this process, read from the environment the first time anyone asks."""
    return Settings.load()


def first_on_machine() -> bool:
    """Whether this process is the first that torchrun started on this machine, or was not started by it; known before
    torch is imported."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"
