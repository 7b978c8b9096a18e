"""Module attributes by `__getattr__` (PEP 562): imported on first use, so that `nsa --help` does not import torch, or
kept under an old name for one version."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_attributes(
    package: str, exports: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for the `__init__` of a package whose attributes are submodules and `exports`,
    the names that it re-exports by module."""
    modules = {name: module for module, names in exports.items() for name in names}

    def get(name: str) -> Any:
        if name in modules:
            value = getattr(import_module(modules[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        module = sys.modules[package]
        return sorted({*vars(module), *module.__all__})

    return get, list_names


def renamed_attributes(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` for a module with renamed attributes (`names`: new by old); they warn with a DeprecationWarning."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is renamed to {names[name]}; the old name will be removed in the next version"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return get
