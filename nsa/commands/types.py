"""Types of command-line flags, checked while they are parsed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, TypeVar, get_args

from nsa.config import require
from nsa.train.config import Dtype, check_config_key, find_config, flat, parse_set, read_config, user_path

Parsed = TypeVar("Parsed")

DTYPE_NAMES = get_args(Dtype)


def flag_type(check: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """`check` as the type of a flag: argparse prints its ValueError after the flag's name."""

    def parse(text: str) -> Parsed:
        try:
            return check(text)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


@flag_type
def path(text: str) -> Path:
    """A path with `~` expanded; an empty one is an error, not the current folder."""
    return user_path("path", text, "a path that is not empty")


@flag_type
def folder(text: str) -> Path:
    """An existing folder."""
    found = path(text)
    require(found.is_dir(), "path", text, "a folder that exists")
    return found


@flag_type
def config_source(text: str) -> str:
    """A config that `load_config` can read, without unknown keys."""
    read_config(find_config(text))
    return text


@flag_type
def assignment(text: str) -> str:
    """`key=value` with a known key."""
    for key, _ in flat(parse_set([text])):
        check_config_key(key)
    return text


def set_help(parser: argparse.ArgumentParser, text: str, *examples: str) -> None:
    """Set the text that `--help` shows before and after the flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    # As wide as argparse wraps the rest.
    parser.description = fill(text, max(get_terminal_size().columns - 2, 11))
    parser.epilog = "\n  ".join(["examples:", *examples])


def add_device_arguments(parser: argparse._ActionsContainer, dtype_help: str) -> None:
    """Add `--device` and `--dtype`."""
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help=dtype_help)


def add_config_arguments(group: Any, *, default: str | None = None, names: tuple[str, ...] = ("--config",)) -> None:
    """Add `--config` and `--set` to a parser or group."""
    shown = "a name in configs/, a YAML file, or the folder of a run" + (f" (default: {default})" if default else "")
    group.add_argument(*names, type=config_source, metavar="CONFIG", default=default, help=shown)
    append: dict[str, Any] = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
    group.add_argument("--set", type=assignment, help="any key of the config, dotted", **append)
