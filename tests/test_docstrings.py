"""Docstrings of what users call: they have Args, Returns and Raises."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import runpy
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import nsa

SITE = runpy.run_path(str(Path(__file__).parents[1] / "docs/tools/hooks.py"))
# Their fields are on the page of the config keys.
CONFIGS = {name for _, name in SITE["CONFIGS"].values()}
# How an argument is checked: `require(...)`, `checks.check_attention(...)`, `self.check_rows(...)`.
CHECK = re.compile(r"(require|check)(_[a-z_]*[a-z])?")


def missing_sections(x: Any) -> list[str]:
    """The sections that the docstring of a function or a class lacks."""
    doc, is_class, signature = inspect.getdoc(x) or "", isinstance(x, type), inspect.signature(x)
    bodies = [vars(x).get(name) for name in ("__init__", "__post_init__")] if is_class else [x]
    doc += (inspect.getdoc(x.__init__) or "") if is_class else ""
    # What the functions of a module have in common is in its docstring.
    doc += "" if is_class or "." in x.__qualname__ else importlib.import_module(x.__module__).__doc__ or ""
    # A tuple's fields are described where they are declared.
    elsewhere = is_class and (hasattr(x, "_fields") or x.__name__ in CONFIGS)
    needed = {
        "Args": not elsewhere and bool(signature.parameters.keys() - {"self", "cls"}),
        "Returns|Yields": not is_class and signature.return_annotation not in (None, "None"),
        "Raises": any(raises(body) for body in bodies if inspect.isfunction(body)),
    }
    return [name for name, wanted in needed.items() if wanted and not re.search(rf"^({name}):$", doc, re.MULTILINE)]


def raises(function: Callable[..., Any]) -> bool:
    """Whether the body of a function raises an error of its own, or checks an argument."""
    try:
        source = inspect.getsource(function)
    except OSError:
        # Made by `dataclass`.
        return False
    nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    called = [ast.unparse(node.func).split(".")[-1] for node in nodes if isinstance(node, ast.Call)]
    return any(map(CHECK.fullmatch, called)) or any(isinstance(node, ast.Raise) and node.exc for node in nodes)


def shown_on_the_site(name: str) -> Iterator[tuple[str, Any]]:
    """The functions, classes and methods that the page of a class, function or module shows."""
    x = pkgutil.resolve_name(name)
    if not inspect.ismodule(x):
        yield name, x
    members: dict[str, Any] = {}
    if inspect.ismodule(x):
        members = {key: getattr(x, key) for key in getattr(x, "__all__", vars(x))}
    elif isinstance(x, type):
        # Of a classmethod, the function.
        members = {key: getattr(member, "__func__", member) for key, member in vars(x).items()}
    for key in SITE["MEMBERS"].get(name, " ".join(key for key in members if key[0] != "_")).split():
        if isinstance(members[key], type):
            yield from shown_on_the_site(f"{name}.{key}")
        elif inspect.isfunction(members[key]):
            yield f"{name}.{key}", members[key]


def incomplete(described: Iterator[tuple[str, Any]]) -> dict[str, list[str]]:
    return {name: sections for name, x in described if (sections := missing_sections(x))}


@pytest.mark.parametrize("page", [page for page in SITE["API"] if page != "hf"])
def test_the_site_describes_arguments_results_and_errors(page: str) -> None:
    for name in SITE["API"][page][1].split():
        assert incomplete(shown_on_the_site(name)) == {}


@pytest.mark.slow
def test_the_site_describes_the_models_of_transformers() -> None:
    pytest.importorskip("transformers")
    test_the_site_describes_arguments_results_and_errors("hf")


@pytest.mark.parametrize("package", ["nsa", "nsa.data", "nsa.model", "nsa.train"])
def test_exports_describe_arguments_results_and_errors(package: str) -> None:
    found = importlib.import_module(package)
    exported = {name: getattr(found, name) for name in found.__all__}
    # Neither modules, nor constants and types, nor protocols, which are not called.
    called = {name: x for name, x in exported.items() if callable(x) and not get_args(x)}
    assert incomplete((name, x) for name, x in called.items() if not getattr(x, "_is_protocol", False)) == {}


@pytest.mark.parametrize(
    ("x", "section", "needed"),
    [
        (nsa.ops.combine, "Args", "Args"),
        (nsa.ops.combine, "Returns", "Returns|Yields"),
        (nsa.nsa_attention, "Raises", "Raises"),
        (nsa.NSAAttention, "Args", "Args"),
        (nsa.NSAAttention, "Raises", "Raises"),
        (nsa.NSAConfig, "Raises", "Raises"),
        (nsa.NSACache.crop, "Raises", "Raises"),
    ],
)
def test_a_section_that_was_removed_is_missed(
    x: Any, section: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(x, "__doc__", str(x.__doc__).replace(f"{section}:", ""))
    assert missing_sections(x) == [needed]
