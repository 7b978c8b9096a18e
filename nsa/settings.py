"""The one place that reads environment variables, once.

Every setting has a type, a default and, where users' runbooks already hold one, an environment name. A value is taken
from the command line, else the environment, else a config file, else the default, and remembers which.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

Source = Literal["default", "file", "environment", "command line"]


@dataclass(frozen=True)
class Setting:
    name: str
    env: str
    default: bool | int | None
    meaning: str
    # An integer setting's smallest value; booleans have none.
    at_least: int = 0

    @property
    def kind(self) -> type:
        return bool if isinstance(self.default, bool) else int

    def parse(self, text: str, label: str) -> bool | int:
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
            raise ValueError(f"{label} is {text!r}; accepted: an integer of at least {self.at_least}") from None
        return self.check(value, label)

    def check(self, value: Any, label: str) -> bool | int:
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{label} is {value!r}; accepted: true or false")
        elif not isinstance(value, int) or isinstance(value, bool) or value < self.at_least:
            raise ValueError(f"{label} is {value!r}; accepted: an integer of at least {self.at_least}")
        return value


SETTINGS: tuple[Setting, ...] = (
    Setting("force_parity", "NSA_FORCE_PARITY", False, "the reference computes everything: slow, exact"),
    Setting("use_fa2", "NSA_USE_FA2", True, "FlashAttention-2 may serve the compressed and sliding branches"),
    Setting("use_fa2_win", "NSA_USE_FA2_WIN", True, "FlashAttention-2 may serve the sliding branch"),
    Setting("use_fa2_cmp", "NSA_USE_FA2_CMP", True, "FlashAttention-2 may serve the compressed branch"),
    Setting("fa2_min_len_win", "NSA_FA2_MIN_LEN_WIN", None, "shortest sequence FA-2's sliding branch takes"),
    Setting("fa2_min_len_cmp", "NSA_FA2_MIN_LEN_CMP", None, "shortest sequence FA-2's compressed branch takes"),
    Setting("fa2_prefer_fp16", "NSA_FA2_PREF_FP16", False, "cast fp32 inputs to fp16 for FA-2, and say so"),
    Setting("sdpa_no_flash", "NSA_SDPA_NO_FLASH", False, "torch's SDPA must not pick its flash kernel"),
    Setting("sdpa_audit", "NSA_SDPA_AUDIT", False, "log which path served each call, and why"),
    Setting("debug_timing", "NSA_DEBUG_TIMING", False, "log the milliseconds of each call (waits for the GPU)"),
    Setting("seq_len", "NSA_SEQ_LEN", None, "training sequence length", at_least=1),
    Setting("batch_size", "NSA_BATCH_SIZE", None, "training batch size", at_least=1),
    Setting("accum_batches", "NSA_ACCUM", None, "batches per optimizer step", at_least=1),
    Setting("no_gc", "NSA_NO_GC", False, "no activation checkpointing"),
    Setting("fwe_doc_batch", "NSA_FWE_DOC_BATCH", None, "documents tokenized at once by the streaming loader", at_least=1),
    Setting("fwe_prefetch", "NSA_FWE_PREFETCH", True, "the streaming loader works ahead in the background"),
    Setting("fwe_queue", "NSA_FWE_Q", None, "batches the streaming loader keeps ready", at_least=1),
    Setting("test_fa2", "NSA_TEST_FA2", False, "run the tests that need the flash_attn package"),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
BY_ENV = {setting.env: setting for setting in SETTINGS}


@dataclass(frozen=True)
class Settings:
    """The effective values, as attributes, and where each came from."""

    values: Mapping[str, bool | int | None]
    sources: Mapping[str, Source]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"no setting named {name!r}") from None

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
        warn_about_unknown(environ)
        values: dict[str, bool | int | None] = {setting.name: setting.default for setting in SETTINGS}
        sources: dict[str, Source] = {setting.name: "default" for setting in SETTINGS}

        def take(name: str, value: bool | int, source: Source) -> None:
            values[name] = value
            sources[name] = source

        for name, value in checked(file or {}, "the config file"):
            take(name, value, "file")
        for setting in SETTINGS:
            if setting.env in environ:
                take(setting.name, setting.parse(environ[setting.env], setting.env), "environment")
        for name, value in checked(command_line or {}, "the command line"):
            take(name, value, "command line")
        return cls(values, sources)


def checked(given: Mapping[str, Any], where: str) -> list[tuple[str, bool | int]]:
    unknown = [name for name in given if name not in BY_NAME]
    if unknown:
        raise ValueError(f"{unknown[0]!r} in {where} is not a setting{nearest(unknown[0], list(BY_NAME))}")
    return [(name, BY_NAME[name].check(value, f"{name} in {where}")) for name, value in given.items()]


def warn_about_unknown(environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if name.startswith("NSA_") and name not in BY_ENV:
            warnings.warn(f"{name} is not a setting of nsa{nearest(name, list(BY_ENV))}", stacklevel=3)


def nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"; the nearest known name is {close[0]}" if close else ""


@cache
def current() -> Settings:
    """The settings of this process, read from the environment the first time anyone asks."""
    return Settings.load()
