"""Settings from environment variables, which no other module reads.

Every setting has a type, a default, a description and an environment name. Its value comes from the command line, else
the environment, else a config file, else the default; `Settings.source` reports which.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from nsa.config import require

Source = Literal["default", "file", "environment", "command line"]
Value = bool | int | str | None

ROUTING = "nsa.backends.routing"
FLASH = "nsa.backends.flash"
TUNING = "nsa.backends.triton.tuning"
MODEL, REPLAY = "nsa.model", "nsa.replay"

# Variables of earlier runbooks for what is built in now: accepted, without effect.
RETIRED = {
    "NSA_PREFILL_BATCHED": "prefill is always batched",
    "NSA_USE_SEL_PACK": "every backend has one path for the selected branch, varlen included",
    "NSA_SEL_RANGES_V2": "selected blocks are passed as indices, and nothing converts them to ranges",
}

# Variables of torch and CUDA that change a run's speed or memory. They are reported, never set.
TORCH_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting without its value."""

    name: str
    env: str
    default: Value
    meaning: str
    at_least: int  # the smallest value of an integer setting
    needs: str  # the module without which the setting has no effect

    @property
    def kind(self) -> type:
        """bool, int or str; a setting without a default is an int."""
        return int if self.default is None else type(self.default)

    @property
    def accepted(self) -> str:
        if self.kind is str:
            return "a path"
        return "true or false" if self.kind is bool else f"an integer of at least {self.at_least}"

    def parse(self, text: str, label: str) -> bool | int | str:
        """Parse `text`; a ValueError names it `label`."""
        if self.kind is str:
            return self.check(text.strip(), label)
        if self.kind is bool:
            lowered = text.strip().lower()
            on, off = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
            require(lowered in on + off, label, text, "1/true/yes/on or 0/false/no/off")
            return lowered in on
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{label} is {text!r}; accepted: {self.accepted}") from None
        return self.check(value, label)

    def check(self, value: Any, label: str) -> bool | int | str:
        """Check a typed value, as from a file or a program; a ValueError names it `label`."""
        # The exact type: True is not an integer.
        valid = type(value) is self.kind
        if self.kind is int:
            valid = valid and value >= self.at_least
        elif self.kind is str:
            valid = valid and value != ""
        require(valid, label, value, self.accepted)
        return value


def setting(env: str, default: Value, meaning: str, *, needs: str, at_least: int = 1) -> Any:
    about = {"env": env, "default": default, "meaning": meaning, "needs": needs, "at_least": at_least}
    return field(default=default, metadata=about)


for_routing, for_flash = partial(setting, needs=ROUTING), partial(setting, needs=FLASH)
for_train, for_data = partial(setting, needs="nsa.train"), partial(setting, needs="nsa.data")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The effective values and their sources; None: not set, the reader of the setting decides.

    Raises:
        ValueError: A value has a wrong type or is too small.
    """

    force_parity: bool = for_routing("NSA_FORCE_PARITY", False, "run the reference backend only: slow, exact")
    use_fa2: bool = for_flash("NSA_USE_FA2", True, "FlashAttention-2 may run the compressed and sliding branches")
    use_fa2_win: bool = for_flash("NSA_USE_FA2_WIN", True, "FlashAttention-2 may run the sliding branch")
    use_fa2_cmp: bool = for_flash("NSA_USE_FA2_CMP", True, "FlashAttention-2 may run the compressed branch")
    fa2_min_len_win: int | None = for_flash(
        "NSA_FA2_MIN_LEN_WIN", None, "fewest keys for auto to use FA-2 in the sliding branch; -1: never", at_least=-1
    )
    fa2_min_len_cmp: int | None = for_flash(
        "NSA_FA2_MIN_LEN_CMP", None, "fewest keys for auto to use FA-2 in the compressed branch; -1: never", at_least=-1
    )
    fa2_prefer_fp16: bool = for_flash("NSA_FA2_PREF_FP16", False, "cast fp32 inputs to fp16 for FA-2, with a warning")
    sdpa_no_flash: bool = setting("NSA_SDPA_NO_FLASH", False, "torch's SDPA may not use its flash kernel", needs=MODEL)
    sdpa_audit: bool = for_routing("NSA_SDPA_AUDIT", False, "log which backend runs each op and shape, and why, once")
    debug_timing: bool = for_routing("NSA_DEBUG_TIMING", False, "log every call with its milliseconds (synchronizes)")
    replay: bool = setting("NSA_REPLAY", True, "replay eager layers of few tokens as CUDA graphs", needs=REPLAY)
    tuned_tiles: str = setting(
        "NSA_TUNED_TILES", "~/.cache/nsa/tuned.json", "your own tiles, which `nsa bench tune` writes", needs=TUNING
    )
    seq_len: int | None = for_train("NSA_SEQ_LEN", None, "training sequence length")
    batch_size: int | None = for_train("NSA_BATCH_SIZE", None, "training batch size")
    accum_batches: int | None = for_train("NSA_ACCUM", None, "batches per optimizer step")
    no_gc: bool = for_train("NSA_NO_GC", False, "no activation checkpointing")
    fwe_doc_batch: int | None = for_data("NSA_FWE_DOC_BATCH", None, "documents the streaming loader tokenizes at once")
    fwe_prefetch: bool = for_data("NSA_FWE_PREFETCH", True, "the streaming loader prefetches in the background")
    fwe_queue: int | None = for_data("NSA_FWE_Q", None, "batches the streaming loader keeps ready")
    test_fa2: bool = for_flash("NSA_TEST_FA2", False, "run the tests that need the flash_attn package")

    sources: Mapping[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in SETTINGS:
            value = getattr(self, each.name)
            if value != each.default:
                each.check(value, each.name)

    def source(self, name: str) -> Source:
        return self.sources.get(name, "default")

    def describe(self, name: str) -> str:
        """A setting with its value and source, as the reason in a message."""
        value = getattr(self, name)
        return f"{BY_NAME[name].env} is {show_value(value)} ({self.source(name)})"

    @classmethod
    def load(
        cls,
        *,
        environ: Mapping[str, str] | None = None,
        file: Mapping[str, Any] | None = None,
        command_line: Mapping[str, Any] | None = None,
    ) -> Settings:
        """Merge the sources: the command line over the environment over the file.

        Args:
            environ: Default: this process's environment. An unknown `NSA_*` name is a warning.
            file: Values by setting name.
            command_line: Values by setting name.

        Raises:
            ValueError: A value is wrong, or a name in `file` or `command_line` is no setting.
        """
        environ = os.environ if environ is None else environ
        for name, near in unknown_names(environ).items():
            warnings.warn(f"{name} is not a setting of nsa; the nearest known name is {near}", stacklevel=2)
        from_environ = {s.name: s.parse(environ[s.env], s.env) for s in SETTINGS if s.env in environ}
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        layers: tuple[tuple[Source, Mapping[str, Any]], ...] = (
            ("file", check_values(file or {}, "the config file")),
            ("environment", from_environ),
            ("command line", check_values(command_line or {}, "the command line")),
        )
        for source, layer in layers:
            values.update(layer)
            sources.update(dict.fromkeys(layer, source))
        return cls(**values, sources=sources)


SETTINGS = tuple(Setting(name=f.name, **f.metadata) for f in fields(Settings) if "env" in f.metadata)
BY_NAME = {setting.name: setting for setting in SETTINGS}
BY_ENV = {setting.env: setting for setting in SETTINGS}


def show_value(value: Value) -> str:
    """`"unset"`, `"on"`, `"off"`, or the value."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def find_setting(name: str, where: str) -> Setting:
    if name not in BY_NAME:
        near = nearest(name, BY_NAME)
        raise ValueError(f"{name!r} in {where} is not a setting; the nearest known name is {near}")
    return BY_NAME[name]


def check_values(given: Mapping[str, Any], where: str) -> dict[str, bool | int | str]:
    """`given` if its names are settings and its values are valid, else a ValueError."""
    require(isinstance(given, Mapping), where, given, "a mapping of name: value")
    return {name: find_setting(name, where).check(value, f"{name} in {where}") for name, value in given.items()}


def parse_overrides(texts: Iterable[str], where: str = "the command line") -> dict[str, bool | int | str]:
    """Parse `["name=value", ...]`; the last one of a name wins. Raises a ValueError for a wrong name or value."""
    overrides = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} in {where} has no value; accepted: name=value")
        overrides[name] = find_setting(name, where).parse(value, f"{name} in {where}")
    return overrides


def read_file(path: Path | str) -> dict[str, Any]:
    """Read a JSON object of settings, as `{"force_parity": true}`; a ValueError names the file and what is wrong."""
    try:
        given = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"settings file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"settings file {path} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"settings file {path} holds a {type(given).__name__}; accepted: an object of name: value")
    return check_values(given, f"settings file {path}")


def unknown_names(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The `NSA_*` names in the environment that are no settings, each with the nearest setting."""
    environ = os.environ if environ is None else environ
    names = [name for name in sorted(environ) if name.startswith("NSA_") and name not in BY_ENV | RETIRED]
    return {name: nearest(name, BY_ENV) for name in names}


def retired_names(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The names of RETIRED in the environment, each with the reason."""
    environ = os.environ if environ is None else environ
    return {name: why for name, why in RETIRED.items() if name in environ}


def torch_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The TORCH_VARIABLES that are set, with their values."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in TORCH_VARIABLES if name in environ}


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most similar to `name`, with or without the prefix `NSA_` and in any case."""
    spelled = {candidate.lower().removeprefix("nsa_"): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower().removeprefix("nsa_"), spelled, n=1, cutoff=0.0)
    return spelled[close[0]]


def expand_home(text: str) -> Path | None:
    """The path `text` with `~` expanded; None if the user has no home folder."""
    expanded = os.path.expanduser(text)
    return None if expanded.startswith("~") else Path(expanded)


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, for a child process."""
    return {**os.environ, **changes}


def triton_interpreted() -> bool:
    """Whether TRITON_INTERPRET makes Triton run kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@cache
def current() -> Settings:
    """The settings of this process, read from the environment at the first call."""
    return Settings.load()


def first_on_machine() -> bool:
    """Whether this process has local rank 0 or was not started by torchrun; needs no torch."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"
