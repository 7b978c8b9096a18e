"""Module attributes by `__getattr__` (PEP 562): imported on first use, so that `nsa --help` does not import torch, or
kept under an old name for one version, as attributes of a class may be."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")


def lazy_exports(
    package: str, exports: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for the `__init__` of a package whose attributes are submodules and
    `exports`, the names that it re-exports by module; its own are submodules."""
    modules = {name: module for module, names in exports.items() for name in names}

    def get(name: str) -> Any:
        if modules.get(name, package) != package:
            value = getattr(import_module(modules[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted({*vars(sys.modules[package]), *modules}), sorted(modules)


def renamed_attributes(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` for a module with renamed attributes (`names`: new by old); they warn with a DeprecationWarning."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", names[name])
        return getattr(sys.modules[module], names[name])

    return get


def renamed_property(old: str, new: str) -> property:
    """The attribute `old` ("Class.name") of a class, which is `new` now."""

    def get(self: Any) -> Any:
        warn_renamed(old, new)
        return getattr(self, new)

    return property(get, doc=f"Deprecated name of `{new}`, for one version.")


def renamed_field(old: str, new: str) -> Callable[[type[T]], type[T]]:
    """Decorator of a dataclass with keyword-only fields, whose field `new` was `old`."""

    def rename(cls: type[T]) -> type[T]:
        init = cls.__init__

        @wraps(init)
        def renamed_init(self: T, **values: Any) -> None:
            if old in values:
                warn_renamed(f"{cls.__name__}({old}=...)", new)
                values[new] = values.pop(old)
            init(self, **values)

        setattr(cls, "__init__", renamed_init)  # noqa: B010
        setattr(cls, old, renamed_property(f"{cls.__name__}.{old}", new))
        return cls

    return rename


def warn_renamed(old: str, new: str) -> None:
    """A DeprecationWarning at the caller of the function that calls this."""
    message = f"{old} is renamed to {new}; the old name will be removed in the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
