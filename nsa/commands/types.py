"""Types of flags, checked while they are parsed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from nsa.config import require
from nsa.train.config import check_key, find_config, parse_set, unfolded, user_path
from nsa.train.yaml_file import read_yaml

T = TypeVar("T")


def reported(check: Callable[[str], T]) -> Callable[[str], T]:
    """`check` as the type of a flag: its ValueError is shown as it is, after the flag's name."""

    def parse(text: str) -> T:
        try:
            return check(text)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


@reported
def path(text: str) -> Path:
    """A path with the home folder for `~`; an empty one is an error, not the current folder."""
    return user_path("path", text, "a path that is not empty")


@reported
def folder(text: str) -> Path:
    found = path(text)
    require(found.is_dir(), "path", text, "a folder that exists")
    return found


@reported
def config_source(text: str) -> str:
    """What `load_config` reads, with no key in it that does not exist."""
    file = find_config(text)
    for key, value in unfolded(read_yaml(file), str(file)).items():
        check_keys(key, value, f" (in {file})")
    return text


@reported
def assignment(text: str) -> str:
    """`key=value` with a key that exists."""
    for key, value in parse_set([text]).items():
        check_keys(key, value, "")
    return text


def check_keys(key: str, value: Any, where: str) -> None:
    try:
        check_key(key)
    except ValueError as error:
        raise ValueError(f"{error}{where}") from None
    if isinstance(value, dict):
        for inner, x in value.items():
            check_keys(f"{key}.{inner}", x, where)


def add_config_arguments(group: Any, *, default: str | None = None, names: tuple[str, ...] = ("--config",)) -> None:
    """`--config` and `--set`."""
    said = f" (default: {default})" if default else ""
    group.add_argument(
        *names,
        type=config_source,
        metavar="CONFIG",
        default=default,
        help=f"a name in configs/, a YAML file, or the folder of a run like it{said}",
    )
    group.add_argument(
        "--set",
        type=assignment,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of the config, dotted",
    )
