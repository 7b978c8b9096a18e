"""YAML read with limits, and with one-line errors that name the file.

Duplicate keys, aliases to themselves, unbounded nesting and aliases that would fill the memory when expanded are
errors, although YAML allows them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from nsa.config import require
from nsa.files import read_text

# Far above any config: bytes of a file, and values once all aliases are expanded.
MAX_YAML_BYTES = 2**20
MAX_VALUES = 100_000


def yaml() -> Any:
    try:
        return import_module("yaml")
    except ModuleNotFoundError:
        raise ValueError("configs are YAML, and PyYAML is not installed: pip install 'nsa[train]'") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file; a `ValueError` names `path` if it is too large, not UTF-8, not YAML or no mapping."""
    tree = parse_yaml(read_text(path, MAX_YAML_BYTES), str(path))
    if not isinstance(tree, dict):
        holds = "nothing" if tree is None else f"a {type(tree).__name__}"
        raise ValueError(f"{path} holds {holds}; accepted: keys and values")
    return tree


def parse_yaml(text: str, where: str) -> Any:
    """The value that `text` spells; `where` names it in an error."""
    try:
        loader = yaml().SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        count_values(node, {}, where)
        try:
            return loader.construct_document(node)
        except (ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:
            # Such as a date in month 13, or `!!bool maybe`, for which PyYAML has no error of its own.
            raise ValueError(f"{where} holds a value that YAML cannot read: {error}") from None
    except yaml().YAMLError as error:
        raise ValueError(f"{where} is not YAML: {describe_yaml_error(error)}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply; accepted: the nesting of a config") from None


def describe_yaml_error(error: Any) -> str:
    """PyYAML's error in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"


def count_values(node: Any, counts: dict[int, int], where: str) -> int:
    """How many values `node` has once its aliases are expanded."""
    if id(node) in counts:
        require(counts[id(node)] > 0, where, "an alias inside what it stands for", "aliases of earlier values")
        return counts[id(node)]
    counts[id(node)] = 0
    children = []
    if isinstance(node, yaml().MappingNode):
        check_keys_once(node, where)
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml().SequenceNode):
        children = node.value
    total = 1 + sum(count_values(child, counts, where) for child in children)
    require(total <= MAX_VALUES, where, f"more than {MAX_VALUES} values after its aliases", "a config")
    counts[id(node)] = total
    return total


def check_keys_once(node: Any, where: str) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        name = key.value
        if not isinstance(key, yaml().ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        require(name not in lines, f"{name!r} in {where}", f"on lines {lines.get(name)} and {line}", "each key once")
        lines[name] = line
